//! Gradients that go into the update block by block, while they are computed.

use std::time::Instant;

use polyreme_graph::NodeId;
use polyreme_kernels::cx::SharedMut;
use polyreme_kernels::gemm::{Block, Epilogue, Gemm};
use polyreme_kernels::optim::{Pass, StepHyper};
use polyreme_kernels::{Cx, Isa};

use crate::engine::Engine;
use crate::error::ExecError;
use crate::launch::Launch;
use crate::memory::{NodeMemory, UpdateTarget};
use crate::timeline::MomentKind;

impl Engine {
    /// Computes the gradient of a parameter, and updates it meanwhile.
    pub(crate) fn apply(&mut self, node: NodeId, param: usize, hyper: StepHyper) {
        let began = self.timeline.is_some().then(Instant::now);
        let graph = &self.program.graph;
        let Launch::Apply(gemm) = &self.prepared[node.idx()].launch else {
            unreachable!("prepared as the program says")
        };
        let pass = self.program.optimizer.and_then(|o| o.pass(hyper)).expect("an update by elements");
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let slices = self.memory.node(graph, node.idx());
        let stored = &graph.params[param];
        let target = slices.update_target(stored.value);
        run(&cx, gemm, &slices, pass, &target);
        if let (Some(began), Some(timeline)) = (began, &mut self.timeline) {
            let name = || format!("gradient and update {}", stored.name);
            timeline.push(name, MomentKind::Compute, self.step, began);
        }
    }

    /// An error if the program keeps no gradients that could be asked for, or added up.
    pub(crate) fn keeps_gradients(&self) -> Result<(), ExecError> {
        let at_once = self.prepared.iter().any(|p| matches!(p.launch, Launch::Apply(_)));
        if at_once { Err(ExecError::AtOnce) } else { Ok(()) }
    }
}

fn run(cx: &Cx, gemm: &Gemm, m: &NodeMemory, pass: Pass, target: &UpdateTarget) {
    let isa: Isa = cx.isa;
    let n = gemm.n;
    let call = |block: Block| {
        let mut at = block.row * n + block.col;
        for grad in block.into_rows() {
            // SAFETY: the blocks of a product are disjoint, and each is given once.
            unsafe {
                let (params, len) = (target.params.slice(at, grad.len()), grad.len());
                pass.run(isa, params, grad, part(&target.state1, at, len), part(&target.state2, at, len));
            }
            at += n;
        }
    };
    let beside = [&target.params, &target.state1, &target.state2].map(|s| start(s));
    gemm.pass(cx, m.input(0), m.input(1), Epilogue { call: &call, beside }, m.scratch());
}

/// A part of a state; nothing of one that there is not.
///
/// # Safety
/// Nobody else has this part.
#[expect(clippy::mut_from_ref, reason = "the caller's promise")]
unsafe fn part<'a>(state: &'a SharedMut<f32>, at: usize, len: usize) -> &'a mut [f32] {
    let (at, len) = if state.is_empty() { (0, 0) } else { (at, len) };
    // SAFETY: the caller's promise.
    unsafe { state.slice(at, len) }
}

fn start(of: &SharedMut<f32>) -> *const f32 {
    if of.is_empty() { std::ptr::null() } else { of.as_mut_ptr() }
}
