//! Gradients that a rank holds only until they are summed: buckets that alternate between two buffers.
//!
//! ```text
//!  buffers  [ bucket 0        |          ]   written by the backward pass, then summed over the ranks
//!           [ bucket 0 |        bucket 1 ]   written while bucket 0 is being summed
//!           [ bucket 2    |     bucket 1 ]   when this rank has taken its part of bucket 0
//! ```
//!
//! Even buckets begin at the start and odd ones end at the end, so the buffers are as long as the largest pair of
//! neighbours. A rank copies its own shard out of each sum and keeps it elsewhere for the rest of the step.
//!
//! Where a bucket is stored follows from their lengths alone, so it is the same on all ranks and for all batch sizes.
//! When a buffer is free again depends on the order of the program, which [`GradBuffers::verify`] checks.

use std::ops::Range;

use crate::graph::{Graph, ValueId};
use crate::memory::{MemoryPlan, Place, param_ranges, reshape_root};
use crate::op::Op;
use crate::program::{Collective, Exchange, Instr, Program, Region};

/// Where gradients are stored until they are summed, if each rank keeps only its own shard of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GradBuffers {
    /// In the order in which they become ready: the elements of the parameters' arena.
    pub buckets: Vec<Range<usize>>,
    /// Elements of the buffers.
    pub len: usize,
}

impl GradBuffers {
    /// Buffers for buckets of these parameters.
    pub fn new(buckets: Vec<Range<usize>>) -> GradBuffers {
        let alone = buckets.first().map_or(0, Range::len);
        let len = buckets.windows(2).map(|w| w[0].len() + w[1].len()).max().unwrap_or(alone);
        GradBuffers { buckets, len }
    }

    /// Where bucket `k` begins in the buffers.
    pub fn at(&self, k: usize) -> usize {
        if k.is_multiple_of(2) { 0 } else { self.len - self.buckets[k].len() }
    }

    /// Where the gradient of element `param` of the parameters' arena is stored.
    fn place_of(&self, param: usize) -> usize {
        let k = self.buckets.partition_point(|b| b.end <= param);
        self.at(k) + (param - self.buckets[k].start)
    }

    /// Moves the gradients of a plan into the buffers.
    pub fn apply(&self, plan: &mut MemoryPlan) {
        for place in &mut plan.places {
            if let Place::Grad(at) = place {
                *at = self.place_of(*at);
            }
        }
        plan.grad_len = self.len;
    }

    /// Checks that no gradient overwrites another that is still needed, and that none is read after its sum has
    /// started: this makes it sound to hand out the same memory twice. A failure is a bug in the lowering, so it
    /// panics.
    pub fn verify(&self, program: &Program) {
        let bucket_of: Vec<_> =
            program.bodies.iter().map(|body| self.buckets_of_values(&body.graph)).collect();
        let spot = |k: usize| self.at(k)..self.at(k) + self.buckets[k].len();
        let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let mut stages = vec![Stage::Free; self.buckets.len()];
        // Sums begin in the order of the buckets, microbatch after microbatch.
        let (mut n_started, mut bucket_of_sum) = (0, vec![None; program.exchanges.len()]);
        let write = |stages: &mut [Stage], k: usize| {
            assert!(
                !matches!(stages[k], Stage::Summed | Stage::Waited),
                "bucket {k} is written before it is taken"
            );
            stages[k] = Stage::Written;
            let busy = |j: usize| matches!(stages[j], Stage::Written | Stage::Summed | Stage::Waited);
            let other = (0..stages.len()).find(|&j| j != k && busy(j) && overlap(&spot(j), &spot(k)));
            assert_eq!(other, None, "bucket {k} is written over another");
        };
        for instr in &program.instrs {
            match instr {
                Instr::Run { block, .. } => {
                    let block = &program.blocks[*block];
                    assert_eq!(block.update, None, "only a lone rank updates at once, and it has no buffers");
                    let (graph, bucket_of) = (&program.bodies[block.body].graph, &bucket_of[block.body]);
                    let nodes = &graph.nodes[block.nodes.clone()];
                    for node in nodes.iter().filter(|n| !matches!(n.op, Op::Reshape)) {
                        for k in node.outputs.iter().filter_map(|v| bucket_of[v.idx()]) {
                            write(&mut stages, k);
                        }
                        for k in node.inputs.iter().filter_map(|v| bucket_of[v.idx()]) {
                            assert_eq!(
                                stages[k],
                                Stage::Written,
                                "bucket {k} is read after its sum has started"
                            );
                        }
                    }
                }
                // A rank without samples writes whole buckets.
                Instr::Zero(Region::Grads(range)) => {
                    let k = n_started % stages.len();
                    if *range == spot(k) {
                        write(&mut stages, k);
                    }
                }
                Instr::Start(i) => {
                    let Exchange { op: Collective::ReduceScatter(_), of: Region::Grads(of), .. } =
                        &program.exchanges[*i]
                    else {
                        continue;
                    };
                    let k = n_started % stages.len();
                    assert_eq!(*of, spot(k), "where bucket {k} lies");
                    assert_eq!(stages[k], Stage::Written, "bucket {k} is written before its sum");
                    (stages[k], bucket_of_sum[*i]) = (Stage::Summed, Some(k));
                    n_started += 1;
                }
                Instr::Wait(i) => {
                    if let Some(k) = bucket_of_sum[*i] {
                        // A rank that owns nothing of a bucket copies nothing.
                        let nothing = program.role.as_ref().is_some_and(|role| role.own()[k].is_empty());
                        stages[k] = if nothing { Stage::Taken } else { Stage::Waited };
                    }
                }
                Instr::Copy { from: Region::Grads(range), .. }
                | Instr::Add { from: Region::Grads(range), .. } => {
                    let there = |k: &usize| stages[*k] == Stage::Waited && overlap(&spot(*k), range);
                    let k = (0..stages.len()).find(there).expect("only a finished sum is copied out");
                    stages[k] = Stage::Taken;
                }
                Instr::Begin(_)
                | Instr::Load { .. }
                | Instr::Count { .. }
                | Instr::Keep { .. }
                | Instr::WeighStates { .. }
                | Instr::Zero(_)
                | Instr::Copy { .. }
                | Instr::Add { .. }
                | Instr::Subtract { .. }
                | Instr::DivideByWeight(_)
                | Instr::Divide { .. }
                | Instr::Push(_)
                | Instr::Pull(_)
                | Instr::Await(_)
                | Instr::Judge(_)
                | Instr::JudgeOwn(_)
                | Instr::JudgeSteps(_)
                | Instr::Squares { .. }
                | Instr::SquaresApart { .. }
                | Instr::Leave { .. }
                | Instr::Together
                | Instr::Clip { .. }
                | Instr::Measure { .. }
                | Instr::Update { .. }
                | Instr::Outer { .. }
                | Instr::PutBack { .. }
                | Instr::ReadParams(_)
                | Instr::NextStep
                | Instr::Follow { .. } => {}
            }
        }
        assert!(stages.iter().all(|s| *s == Stage::Taken), "every bucket is summed and taken: {stages:?}");
    }

    /// By value: the bucket that it belongs to, if it is a gradient.
    fn buckets_of_values(&self, graph: &Graph) -> Vec<Option<usize>> {
        let mut of_root = vec![None; graph.values.len()];
        for (p, range) in param_ranges(graph) {
            if let Some(grad) = graph.grads.get(p).copied().flatten() {
                let k = self.buckets.partition_point(|b| b.end <= range.start);
                let fits = self.buckets.get(k).is_some_and(|b| b.start <= range.start && range.end <= b.end);
                assert!(fits, "the gradient of {} has a bucket", graph.params[p].name);
                of_root[reshape_root(graph, grad).idx()] = Some(k);
            }
        }
        let of_value = |v: usize| of_root[reshape_root(graph, ValueId(v as u32)).idx()];
        (0..graph.values.len()).map(of_value).collect()
    }
}

/// What has happened to a bucket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Free,
    Written,
    Summed,
    Waited,
    Taken,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_do_not_overlap() {
        for lens in [&[5][..], &[1, 9], &[3, 4, 5, 1, 7, 7, 2], &[100, 1, 1, 50, 60], &[]] {
            let mut end = 0;
            let next = |len: &usize| {
                end += len;
                end - len..end
            };
            let buffers = GradBuffers::new(lens.iter().map(next).collect());
            let spot = |k: usize| buffers.at(k)..buffers.at(k) + lens[k];
            for k in 0..lens.len() {
                assert!(spot(k).end <= buffers.len);
                let next = if k + 1 < lens.len() { spot(k + 1) } else { 0..0 };
                assert!(spot(k).end <= next.start || next.end <= spot(k).start, "{lens:?}: {k}");
                assert_eq!(buffers.place_of(buffers.buckets[k].start), buffers.at(k));
                assert_eq!(buffers.place_of(buffers.buckets[k].end - 1), buffers.at(k) + lens[k] - 1);
            }
        }
        let len = |lens: [usize; 4]| {
            let ends = [lens[0], lens[0] + lens[1], lens[0] + lens[1] + lens[2], lens.iter().sum()];
            GradBuffers::new((0..4).map(|k| ends[k] - lens[k]..ends[k]).collect()).len
        };
        assert_eq!(len([8, 1, 1, 8]), 9, "the largest pair of neighbours, not twice the largest");
    }
}
