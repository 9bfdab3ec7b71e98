//! Gradients that are applied to the parameter block by block, while they are computed.

use polyreme_kernels::Cx;
use polyreme_kernels::cx::SharedMut;
use polyreme_kernels::gemm::{Epilogue, OutputBlock};

use crate::engine::{Engine, Loaded};
use crate::launch::Launch;
use crate::memory::{NodeMemory, SharedMoments, UpdateTarget};
use crate::product::Product;

impl Engine {
    /// Computes the gradient of a parameter, and updates the parameter meanwhile.
    pub(crate) fn apply(&mut self, loaded: &Loaded, body: usize, slot: usize, node: usize, param: usize) {
        let rounding = self.rounding(0);
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        let Launch::Apply(product) = &ready.prepared[node].launch else {
            unreachable!("prepared as the program says")
        };
        let learning = &ready.body.graph.params[param].learning;
        let rule = loaded.program.optimizer.map(|optimizer| self.rule(optimizer, learning));
        let pass = rule.and_then(|(optimizer, hyper)| optimizer.pass(hyper)).expect("an update by elements");
        let cx = Cx { isa: self.options.isa, par: &*self.pool };
        let slices = self.memory.node(ready, slot, node);
        slices.stage(&cx);
        let target = slices.update_target(ready.body.graph.params[param].value);
        let UpdateTarget { params, at, moments } = &target;
        match moments {
            SharedMoments::F32([one, other]) => {
                let beside = [start(params), start(one), start(other)];
                run(&cx, product, &slices, params, [one, other], beside, |_, p, g, m, v| {
                    pass.run(cx.isa, p, g, m, v);
                });
            }
            SharedMoments::Bf16([one, other]) => {
                // Moments are half as far apart as what is prefetched, and few enough to do without.
                let beside = [start(params), std::ptr::null(), std::ptr::null()];
                run(&cx, product, &slices, params, [one, other], beside, |first, p, g, m, v| {
                    pass.run_half(cx.isa, rounding.after(at + first), p, g, m, v);
                });
            }
        }
    }
}

/// Computes a gradient; `update` gets rows of its blocks, with the offset of their first element, what they update and the
/// moments of that.
fn run<T: Send>(
    cx: &Cx,
    product: &Product,
    m: &NodeMemory,
    params: &SharedMut<f32>,
    [state1, state2]: [&SharedMut<T>; 2],
    beside: [*const f32; 3],
    update: impl Fn(usize, &mut [f32], &[f32], &mut [T], &mut [T]) + Sync,
) {
    let n = product.gemm().n;
    let call = |block: OutputBlock| {
        let mut at = block.row * n + block.col;
        for grad in block.into_rows() {
            // SAFETY: the blocks of a product are disjoint, and each is passed once.
            unsafe {
                let (params, len) = (params.slice(at, grad.len()), grad.len());
                update(at, params, grad, part(state1, at, len), part(state2, at, len));
            }
            at += n;
        }
    };
    product.pass(cx, m, Epilogue { call: &call, beside });
}

/// A range of an optimizer state; empty if the optimizer has no such state.
///
/// # Safety
/// Nothing else may hold this range while the slice lives.
#[expect(clippy::mut_from_ref, reason = "the caller's promise")]
unsafe fn part<'a, T>(state: &'a SharedMut<T>, at: usize, len: usize) -> &'a mut [T] {
    let (at, len) = if state.is_empty() { (0, 0) } else { (at, len) };
    // SAFETY: the caller's promise.
    unsafe { state.slice(at, len) }
}

fn start(of: &SharedMut<f32>) -> *const f32 {
    if of.is_empty() { std::ptr::null() } else { of.as_mut_ptr() }
}
