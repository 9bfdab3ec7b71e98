//! Reproducible steps with sharded weights: whole gradients of logical shards are added up in the fixed tree, and what each rank
//! needs of the sum is sent to it.
//!
//! ```text
//!  for each of this rank's logical shards: gather weights, run; gradients of all parameters are a leaf of the tree
//!  rounds without samples: only bring shards of weights
//!  all-to-all sums of subtrees             the owner of a range of whole blocks gets that range of all of them
//!  add them up along the tree; squares of blocks, if the norm is needed
//!  all-to-all of the sums                  each rank gets its shards, and all of what every rank has
//! ```
//!
//! The sum of a gradient must not depend on how weights are sharded, so ranks do not add up gradients while they send them, as
//! they do in other steps. A leaf has gradients in the order of the model's elements, and ranges of it are owned by blocks of
//! whole tensors as without shards: the same additions, and the same norm, to the bit. That is why only runs of rows are
//! sharded here: a shard of columns would be scattered over the leaf.
//!
//! Whole gradients are kept until the step's end, as in every reproducible step: what is saved are weights and optimizer state.
//! Beside the gathers of weights a rank sends its subtrees once and the sum once.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::memory::{param_ranges, reshape_root};
use polyreme_graph::{Axis, Body, Collective, DType, Graph, Instr, Op, Region, ValueId};

use crate::fixed_blocks::block_cuts_of;
use crate::schedule::Lowering;

/// The whole gradient of a sharded parameter, which a body computes.
#[derive(Clone, Debug)]
pub(crate) struct WholeGrad {
    /// The parameter.
    pub(crate) param: usize,
    /// The node that takes this rank's shard out of it; nothing else reads it later.
    pub(crate) taken_by: usize,
    /// The gradient.
    pub(crate) value: ValueId,
}

/// The whole gradients of a body's sharded parameters.
pub(crate) fn whole_grads(graph: &Graph) -> Vec<WholeGrad> {
    let of = |(param, grad): (usize, &Option<ValueId>)| {
        let grad = grad.filter(|_| graph.params[param].shard.is_some())?;
        let node = graph.value(reshape_root(graph, grad)).producer.idx();
        let Op::Slice { .. } = graph.nodes[node].op else {
            unreachable!("a shard is taken out of a whole gradient")
        };
        let value = reshape_root(graph, graph.nodes[node].inputs[0]);
        Some(WholeGrad { param, taken_by: node, value })
    };
    graph.grads.iter().enumerate().filter_map(of).collect()
}

/// Where gradients lie in a leaf: first those that every rank has, as in the arena; then whole ones of sharded parameters.
#[derive(Clone, Debug)]
pub(crate) struct LeafLayout {
    /// How many elements there are.
    pub(crate) len: usize,
    /// Elements of the arena that every rank has.
    alike: usize,
    ranks: usize,
    sharded: Vec<LeafParam>,
}

#[derive(Clone, Debug)]
struct LeafParam {
    param: usize,
    /// The first element in the leaf.
    at: usize,
    /// This rank's shard in the arena of gradients.
    shard: Range<usize>,
}

impl LeafLayout {
    /// For a body whose shards lie in `sharded` of the arena; `None` if it has none.
    pub(crate) fn new(graph: &Graph, sharded: &Range<usize>, ranks: usize) -> Option<LeafLayout> {
        if sharded.is_empty() {
            return None;
        }
        let mut layout = LeafLayout { len: sharded.start, alike: sharded.start, ranks, sharded: Vec::new() };
        for (param, range) in param_ranges(graph) {
            let learnt = graph.grads.get(param).copied().flatten().is_some();
            if learnt && graph.params[param].shard.is_some() {
                let numel = graph.shape(graph.params[param].value).numel();
                let (at, shard) = (layout.len, range.start..range.start + numel);
                layout.sharded.push(LeafParam { param, at, shard });
                layout.len += numel * ranks;
            }
        }
        Some(layout)
    }

    /// Where the whole gradient of a sharded parameter lies.
    pub(crate) fn of(&self, param: usize) -> Range<usize> {
        let found = self.sharded.iter().find(|p| p.param == param).expect("a sharded parameter");
        found.at..found.at + found.shard.len() * self.ranks
    }

    /// Where the gradients of all parameters begin, and how many elements they have: those of a tensor, or of this rank's part.
    pub(crate) fn tensors(&self, graph: &Graph) -> Vec<(usize, Range<usize>)> {
        let alike = param_ranges(graph).into_iter().filter(|(_, range)| range.end <= self.alike);
        let alike = alike.map(|(p, range)| {
            let numel = graph.shape(graph.params[p].value).numel();
            (p, range.start..range.start + numel)
        });
        alike.chain(self.sharded.iter().map(|p| (p.param, self.of(p.param)))).collect()
    }

    /// Which rank adds up which elements of a leaf: nearly equal parts, of whole blocks.
    pub(crate) fn cuts(&self, graph: &Graph) -> Arc<[usize]> {
        let tensors = self.tensors(graph).into_iter().map(|(_, range)| range);
        block_cuts_of(tensors, self.len, self.ranks)
    }

    /// The elements of a leaf that a rank needs, in their order.
    fn needed(&self, rank: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let row = move |p: &LeafParam| {
            let first = p.at + rank * p.shard.len();
            first..first + p.shard.len()
        };
        std::iter::once(0..self.alike).chain(self.sharded.iter().map(row))
    }

    /// Sends everybody what it needs of the sums; `mine` are those of `cuts[rank]..cuts[rank + 1]`.
    pub(crate) fn deliver(&self, lowering: &mut Lowering, mine: &Region, cuts: &[usize]) {
        let (ranks, rank) = (self.ranks, lowering.role.rank);
        let pieces = |from: usize, to: usize| -> Vec<Range<usize>> {
            let owned = |r: Range<usize>| r.start.max(cuts[from])..r.end.min(cuts[from + 1]);
            self.needed(to).map(owned).filter(|r| !r.is_empty()).collect()
        };
        let ends = |between: &dyn Fn(usize) -> Vec<Range<usize>>| -> Arc<[usize]> {
            let mut ends = vec![0];
            for other in 0..ranks {
                ends.push(ends[other] + between(other).iter().map(Range::len).sum::<usize>());
            }
            ends.into()
        };
        let (send_cuts, recv_cuts) = (ends(&|to| pieces(rank, to)), ends(&|from| pieces(from, rank)));
        let send = lowering.program.buffer("gradients to send", DType::F32, send_cuts[ranks]);
        let recv = lowering.program.buffer("gradients received", DType::F32, recv_cuts[ranks]);
        let mut at = 0;
        for piece in (0..ranks).flat_map(|to| pieces(rank, to)) {
            let from = mine.part(piece.start - cuts[rank]..piece.end - cuts[rank]);
            lowering.push(Instr::Copy { from, into: send.part(at..at + piece.len()) });
            at += piece.len();
        }
        let op = Collective::AllToAll { send: send_cuts, into: recv.clone(), recv: recv_cuts };
        lowering.program.exchange_now(op, Axis::Data, send);
        at = 0;
        for piece in (0..ranks).flat_map(|from| pieces(from, rank)) {
            let into = Region::Grads(self.in_arena(rank, &piece));
            lowering.push(Instr::Copy { from: recv.part(at..at + piece.len()), into });
            at += piece.len();
        }
    }

    /// Where elements that a rank needs lie in its arena of gradients.
    fn in_arena(&self, rank: usize, piece: &Range<usize>) -> Range<usize> {
        if piece.end <= self.alike {
            return piece.clone();
        }
        let of = |p: &&LeafParam| self.of(p.param).contains(&piece.start);
        let p = self.sharded.iter().find(of).expect("elements of a sharded parameter");
        let start = p.shard.start + piece.start - (p.at + rank * p.shard.len());
        start..start + piece.len()
    }
}

/// Copies of a body's whole gradients into a leaf, each with the node before which it is made.
pub(crate) fn into_leaf(
    layout: &LeafLayout,
    body: &Body,
    (slot, number): (usize, usize),
    leaf: &Region,
) -> Vec<(usize, Instr)> {
    let copy = |grad: WholeGrad| {
        let from = Region::Value { slot, body: number, value: grad.value };
        (grad.taken_by, Instr::Copy { from, into: leaf.part(layout.of(grad.param)) })
    };
    whole_grads(&body.graph).into_iter().map(copy).collect()
}
