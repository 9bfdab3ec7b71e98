//! Gradients that are applied to the parameter block by block, while they are computed.

use polyreme_kernels::cx::SharedMut;
use polyreme_kernels::gemm::{Epilogue, OutputBlock};
use polyreme_kernels::optim::Pass;
use polyreme_kernels::{Cx, Isa};

use crate::engine::{Engine, Loaded};
use crate::launch::Launch;
use crate::memory::{NodeMemory, UpdateTarget};
use crate::product::Product;

impl Engine {
    /// Computes the gradient of a parameter, and updates the parameter meanwhile.
    pub(crate) fn apply(&mut self, loaded: &Loaded, body: usize, slot: usize, node: usize, param: usize) {
        let hyper = self.hyper();
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        let Launch::Apply(product) = &ready.prepared[node].launch else {
            unreachable!("prepared as the program says")
        };
        let pass = loaded.program.optimizer.and_then(|o| o.pass(hyper)).expect("an update by elements");
        let cx = Cx { isa: self.options.isa, par: &*self.pool };
        let slices = self.memory.node(ready, slot, node);
        slices.stage(&cx);
        let target = slices.update_target(ready.body.graph.params[param].value);
        run(&cx, product, &slices, pass, &target);
    }
}

fn run(cx: &Cx, product: &Product, m: &NodeMemory, pass: Pass, target: &UpdateTarget) {
    let isa: Isa = cx.isa;
    let n = product.gemm().n;
    let call = |block: OutputBlock| {
        let mut at = block.row * n + block.col;
        for grad in block.into_rows() {
            // SAFETY: the blocks of a product are disjoint, and each is passed once.
            unsafe {
                let (params, len) = (target.params.slice(at, grad.len()), grad.len());
                pass.run(isa, params, grad, part(&target.state1, at, len), part(&target.state2, at, len));
            }
            at += n;
        }
    };
    let beside = [&target.params, &target.state1, &target.state2].map(|s| start(s));
    product.pass(cx, m, Epilogue { call: &call, beside });
}

/// A range of an optimizer state; empty if the optimizer has no such state.
///
/// # Safety
/// Nothing else may hold this range while the slice lives.
#[expect(clippy::mut_from_ref, reason = "the caller's promise")]
unsafe fn part<'a>(state: &'a SharedMut<f32>, at: usize, len: usize) -> &'a mut [f32] {
    let (at, len) = if state.is_empty() { (0, 0) } else { (at, len) };
    // SAFETY: the caller's promise.
    unsafe { state.slice(at, len) }
}

fn start(of: &SharedMut<f32>) -> *const f32 {
    if of.is_empty() { std::ptr::null() } else { of.as_mut_ptr() }
}
