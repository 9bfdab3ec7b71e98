//! The schedule of a reproducible step: gradients of logical shards, added up in a fixed tree, so that any number of ranks
//! gets the same bits.
//!
//! ```text
//!  for each of this rank's shards: load, run, count its loss; its gradients and weighted states are a leaf of the tree
//!  leaf 0 += leaf 1                        as soon as a subtree is whole
//!  all-reduce losses of shards, judge
//!  all-to-all sums of subtrees             each owner gets its elements of all of them
//!  add them up along the tree
//! ```
//!
//! A rank adds up whole subtrees as they become complete ([`crate::tree`]). All ranks know who has which subtrees, so
//! the owner of a range of elements can add up those of all ranks along the same tree. States (running statistics) of
//! every shard start from those of the step's beginning; the new ones are the weighted mean, added up in the same tree,
//! on every rank.
//!
//! With several stages each has the tree of its own parameters and states; [`crate::staged_shards`] says how their microbatches
//! become leaves. Stages and ranks of the data axis change no bit.
//!
//! With parameter servers a rank pushes its sums of gradients to them, and they add up those of all ranks along the tree; only states are exchanged
//! among ranks.
//!
//! Per step a rank sends each of its sums once and whole; it has at most `2·log2(shards)`. If a rank dies, the exchange
//! ends with a report and nothing is updated.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::memory::state_len;
use polyreme_graph::{Axis, Collective, DType, Instr, Region, totals};

use crate::fixed_blocks::{self, BlocksHere};
use crate::joint;
use crate::pipeline::Timetable;
use crate::plan::StepShape;
use crate::schedule::Lowering;
use crate::shard::{LeafLayout, into_leaf};
use crate::staged;
use crate::staged_shards::Leaves;
use crate::tree::{Subtree, SumsOfRanks, cut, is_subtree};

/// Everything up to the updates. With several stages, `stage` is this one and the timetable of this rank's microbatches.
pub(crate) fn step(
    lowering: &mut Lowering,
    shards: usize,
    shape: &StepShape,
    clip: Option<f64>,
    stage: Option<(usize, &Timetable)>,
) {
    let ranks = lowering.role.ranks;
    let losses = lowering.begin(shards, "losses of shards");
    let learnt = lowering.role.parts.iter().flatten().map(|part| part.end).max().unwrap_or(0);
    let states = state_len(lowering.program.graph());
    let layout = LeafLayout::new(lowering.program.graph(), &lowering.sharded, ranks);
    let leaf = layout.as_ref().map_or(learnt, |layout| layout.len);
    let tree = Tree { shards, learnt: leaf, states, stack: Vec::new(), free: Vec::new(), n_leaves: 0 };
    let tree = match stage {
        None => one_by_one(lowering, tree, shape, &losses, layout.as_ref()),
        Some((stage, timetable)) => {
            let leaves = Leaves::new(lowering, tree, losses.clone(), shape, timetable, stage, layout.clone());
            let leaves = staged::passes(lowering, timetable, stage, &losses, Some(leaves), None);
            leaves.expect("leaves that were given").sums(lowering)
        }
    };
    let n_stages = stage.map_or(1, |(_, timetable)| timetable.stages);
    for (axis, ranks) in [(Axis::Data, ranks), (Axis::Stage, n_stages)] {
        if ranks > 1 {
            lowering.program.exchange_now(Collective::AllReduce, axis, losses.clone());
        }
    }
    lowering.program.instrs.push(Instr::Judge(losses));
    if lowering.served.is_some() {
        return tree.serve(lowering, &shape.runs);
    }
    let cuts = match &layout {
        Some(layout) => layout.cuts(lowering.program.graph()),
        None => lowering.cuts.first().cloned().unwrap_or_else(|| vec![0; ranks + 1].into()),
    };
    let own = cuts[lowering.role.rank]..cuts[lowering.role.rank + 1];
    match (ranks, &layout) {
        (1, _) => tree.whole(lowering),
        (_, None) => {
            let sum = tree.exchange(lowering, &shape.runs, &cuts);
            tree.take(lowering, &sum, own);
        }
        (_, Some(layout)) => {
            let sum = tree.exchange(lowering, &shape.runs, &cuts);
            tree.take_states(lowering, &sum, own.len());
            if let Some(max_norm) = clip {
                let region = |r: Range<usize>| sum.part(r.start - own.start..r.end - own.start);
                let tensors = layout.tensors(lowering.program.graph());
                let here = BlocksHere { tensors, mine: std::slice::from_ref(&own), region: &region };
                fixed_blocks::clip_blocks(lowering, &here, max_norm);
            }
            layout.deliver(lowering, &sum, &cuts);
        }
    }
    if states > 0 {
        lowering.program.instrs.push(Instr::DivideByWeight(Region::States(0..states)));
    }
    if layout.is_some() {
        return;
    }
    if !lowering.role.sharded() && ranks > 1 {
        let (op, of) = (Collective::AllGather(cuts.clone()), Region::Grads(0..learnt));
        lowering.program.exchange_now(op, Axis::Data, of);
    }
    if let Some(max_norm) = clip {
        let mine = lowering.role.own().to_vec();
        fixed_blocks::clip(lowering, &mine, max_norm);
    }
}

/// Runs the microbatches of a rank with all layers, each as a whole. Where weights are sharded, other ranks may have more of them,
/// and need this one's shards.
fn one_by_one(
    lowering: &mut Lowering,
    mut tree: Tree,
    shape: &StepShape,
    losses: &Region,
    layout: Option<&LeafLayout>,
) -> Tree {
    let (learnt, states) = (tree.learnt, tree.states);
    // What lies in the arena; the rest of a leaf is copied while the body runs.
    let alike = if layout.is_some() { lowering.sharded.start } else { learnt };
    let mut microbatches = 0..;
    for (shard, microbatch) in shape.runs[lowering.role.rank].clone().zip(&shape.microbatches) {
        let leaf = tree.leaf(lowering);
        match microbatch {
            None => {
                lowering.program.instrs.push(Instr::Zero(leaf.clone()));
                bring_shards(lowering, layout);
            }
            Some(_) => {
                let microbatch = microbatches.next().expect("counting has no end");
                run(lowering, microbatch, (losses, shard), layout, &leaf);
                let (from, into) = (Region::Grads(0..alike), leaf.part(0..alike));
                let weighed = leaf.part(learnt..learnt + states);
                let slot = lowering.slot;
                if alike > 0 {
                    lowering.program.instrs.push(Instr::Copy { from, into });
                }
                if states > 0 {
                    lowering.program.instrs.push(Instr::WeighStates { slot, microbatch, into: weighed });
                }
            }
        }
        tree.push(lowering, shard, leaf);
    }
    let most = shape.runs.iter().map(Range::len).max().unwrap_or(0);
    for _ in shape.microbatches.len()..most {
        bring_shards(lowering, layout);
    }
    tree
}

/// Takes part in the gathers of a round without samples, if weights are sharded.
fn bring_shards(lowering: &mut Lowering, layout: Option<&LeafLayout>) {
    if layout.is_some() {
        let (slot, nodes) = (lowering.slot, 0..lowering.program.bodies[0].graph.nodes.len());
        joint::run_idle(&mut lowering.program, slot, 0, &nodes, &lowering.idle[0]);
    }
}

/// Runs all nodes of a microbatch and counts its loss; whole gradients of sharded parameters go into the leaf.
fn run(
    lowering: &mut Lowering,
    microbatch: usize,
    (losses, shard): (&Region, usize),
    layout: Option<&LeafLayout>,
    leaf: &Region,
) {
    let (slot, number) = (lowering.slot, lowering.program.microbatches[microbatch].body);
    let body = lowering.program.bodies[number].clone();
    lowering.program.instrs.push(Instr::Load { slot, microbatch });
    let (nodes, ranks) = (0..body.graph.nodes.len(), lowering.role.ranks);
    let copies = layout.map_or(Vec::new(), |layout| into_leaf(layout, &body, (slot, number), leaf));
    joint::run_with(&mut lowering.program, slot, microbatch, &nodes, ranks, &copies);
    let (into, tally) = (losses.part(totals::pair(shard)), lowering.tally_of(losses));
    lowering.program.instrs.push(Instr::Count { slot, microbatch, into, tally });
}

/// The subtrees that are complete at a point of the program.
pub(crate) struct Tree {
    shards: usize,
    /// Elements of the gradients, which come first, and of the states after them.
    learnt: usize,
    states: usize,
    /// Complete subtrees from left to right, with the buffers that hold their sums.
    stack: Vec<(Subtree, Region)>,
    free: Vec<Region>,
    n_leaves: usize,
}

impl Tree {
    /// A buffer for the sum of one shard.
    pub(crate) fn leaf(&mut self, lowering: &mut Lowering) -> Region {
        self.free.pop().unwrap_or_else(|| {
            let name = format!("shard sum {}", self.n_leaves);
            self.n_leaves += 1;
            lowering.program.buffer(name, DType::F32, self.learnt + self.states)
        })
    }

    /// Takes the sum of a shard, and adds up the subtrees that it completes.
    pub(crate) fn push(&mut self, lowering: &mut Lowering, shard: usize, leaf: Region) {
        self.stack.push((shard..shard + 1, leaf));
        while let [.., (a, left), (b, right)] = &self.stack[..] {
            let both = a.start..b.end;
            if !is_subtree(self.shards, &both) || cut(&both) != b.start {
                break;
            }
            let (into, from) = (left.clone(), right.clone());
            lowering.program.instrs.push(Instr::Add { from: from.clone(), into: into.clone() });
            self.free.push(from);
            self.stack.truncate(self.stack.len() - 2);
            self.stack.push((both, into));
        }
    }

    /// The sums of the subtrees that are complete, from left to right.
    pub(crate) fn sums(&self) -> impl Iterator<Item = &Region> {
        self.stack.iter().map(|(_, sum)| sum)
    }

    /// A lone rank has the whole sum.
    fn whole(&self, lowering: &mut Lowering) {
        if let Some((_, sum)) = self.stack.first() {
            self.take(lowering, sum, 0..self.learnt);
        }
    }

    /// What servers are to be pushed; they add it up along the tree. The states are added up here, without the gradients.
    fn serve(&self, lowering: &mut Lowering, runs: &[Range<usize>]) {
        for range in &mut lowering.program.served {
            range.pushed = self.sums().map(|sum| sum.part(range.params.clone())).collect();
        }
        if self.states == 0 {
            return;
        }
        let ranks = lowering.role.ranks;
        match self.stack.first() {
            Some((_, sum)) if ranks == 1 => self.take_states(lowering, &sum.clone(), self.learnt),
            Some(_) | None => {
                let sum = self.exchange(lowering, runs, &vec![0; ranks + 1].into());
                self.take_states(lowering, &sum, 0);
            }
        }
        lowering.program.instrs.push(Instr::DivideByWeight(Region::States(0..self.states)));
    }

    /// Copies the gradients `own` and the states out of `sum`, where they are stored one after the other.
    fn take(&self, lowering: &mut Lowering, sum: &Region, own: Range<usize>) {
        let n = own.len();
        let (from, into) = (sum.part(0..n), Region::Grads(own));
        lowering.program.instrs.push(Instr::Copy { from, into });
        self.take_states(lowering, sum, n);
    }

    /// Copies the states out of `sum`, where they follow `n` gradients.
    fn take_states(&self, lowering: &mut Lowering, sum: &Region, n: usize) {
        if self.states > 0 {
            let (from, into) = (sum.part(n..n + self.states), Region::States(0..self.states));
            lowering.program.instrs.push(Instr::Copy { from, into });
        }
    }

    /// Exchanges the sums, and adds them up along the tree: this rank's part of the gradients, and all states, of all shards.
    fn exchange(&self, lowering: &mut Lowering, runs: &[Range<usize>], cuts: &Arc<[usize]>) -> Region {
        let (ranks, rank) = (lowering.role.ranks, lowering.role.rank);
        let SumsOfRanks { counts, adds } = SumsOfRanks::new(self.shards, runs);
        let part = |rank: usize| cuts[rank]..cuts[rank + 1];
        let ends = |len: &dyn Fn(usize) -> usize| -> Arc<[usize]> {
            let up_to = |end: usize| (0..end).map(len).sum();
            (0..=ranks).map(up_to).collect()
        };
        let row = part(rank).len() + self.states;
        let send_cuts = ends(&|r| self.stack.len() * (part(r).len() + self.states));
        let recv_cuts = ends(&|r| counts[r] * row);
        let send = lowering.program.buffer("sums to send", DType::F32, send_cuts[ranks]);
        let recv = lowering.program.buffer("sums received", DType::F32, recv_cuts[ranks]);
        let mut at = 0;
        for rank in 0..ranks {
            for (_, sum) in &self.stack {
                for piece in [part(rank), self.learnt..self.learnt + self.states] {
                    let (n, from) = (piece.len(), sum.part(piece));
                    let into = send.part(at..at + n);
                    at += n;
                    if n > 0 {
                        lowering.program.instrs.push(Instr::Copy { from, into });
                    }
                }
            }
        }
        let op = Collective::AllToAll { send: send_cuts, into: recv.clone(), recv: recv_cuts };
        lowering.program.exchange_now(op, Axis::Data, send);
        let sum = |k: usize| recv.part(k * row..(k + 1) * row);
        for add in adds {
            lowering.program.instrs.push(Instr::Add { from: sum(add.from), into: sum(add.into) });
        }
        sum(0)
    }
}
