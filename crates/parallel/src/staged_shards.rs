//! A reproducible step in stages: every microbatch is a logical shard, and its gradients are a leaf of the fixed tree.
//!
//! ```text
//!  forward, input gradients of shard 2      in the order of the timetable
//!  weight gradients of shard 0              copied out of the arena, into the leaf of shard 0
//!  states of shard 0, weighted              into its leaf; the leaf is whole
//!  receive tied gradients of shard 0        from later stages, added to the leaf; or sent to earlier ones
//!  leaf 0 += leaf 1                         as soon as a subtree is whole
//!  ...
//!  send sums of tied gradients              from the first stage that has the parameter to the others
//! ```
//!
//! A lone rank adds up all uses of a tied parameter within a microbatch, and then microbatches in the tree. So do stages: each
//! microbatch's contributions go from the last stage that uses the parameter to the first, which alone adds them up in the tree;
//! [`hand_overs`](crate::pipeline::hand_overs) says when, such that no stage waits for ever. All other stages get the sums of
//! subtrees at the end, before ranks of the data axis exchange theirs.
//!
//! Timetables finish microbatches in their order on each stage, so leaves enter the tree in its order. How many leaves there are
//! at a time is how many microbatches have some of their weight gradients, or are being handed on: with 1F1B and GPipe one
//! or two, with zero-bubble schedules as many as they put off. Beside them there are at most `log2` of the shards.
//!
//! If a peer dies, the exchange that waits for it ends with a report, and nothing has been updated.

use std::ops::Range;

use polyreme_graph::memory::{param_ranges, state_len};
use polyreme_graph::{Axis, Body, Collective, DType, Instr, Region, Tied, totals};

use crate::pipeline::{HandOver, Timetable, hand_overs};
use crate::plan::StepShape;
use crate::reproducible::Tree;
use crate::schedule::Lowering;
use crate::shard::{LeafLayout, into_leaf, whole_grads};
use crate::staged::tied_tag;

/// What becomes of the gradients of this stage's microbatches.
pub(crate) struct Leaves {
    tree: Tree,
    losses: Region,
    /// This rank's shards.
    run: Range<usize>,
    /// By microbatch: its shard. The others of the run have no samples.
    shards: Vec<usize>,
    /// By microbatch: its leaf, while it is not in the tree.
    leaves: Vec<Option<Region>>,
    /// By microbatch: the place in the stage's list at which its leaf enters the tree.
    enters: Vec<usize>,
    tied: Vec<HandedOn>,
    /// Where whole gradients of sharded parameters lie in a leaf.
    layout: Option<LeafLayout>,
    /// How many microbatches and shards are in the tree.
    n_microbatches: usize,
    n_shards: usize,
}

/// A tied parameter, as this stage sees it.
struct HandedOn {
    /// Its gradient in a leaf.
    range: Range<usize>,
    /// The stages that have it, ascending.
    stages: Vec<usize>,
    /// This one's place among them.
    here: usize,
    tag: u16,
    /// Where contributions of other stages arrive, one at a time.
    other: Option<Region>,
    /// By microbatch.
    plan: Vec<HandOver>,
    /// By microbatch: the send that is under way.
    sending: Vec<Option<usize>>,
}

impl Leaves {
    /// For the shards of a rank; `timetable` is that of its microbatches.
    pub(crate) fn new(
        lowering: &Lowering,
        tree: Tree,
        losses: Region,
        shape: &StepShape,
        timetable: &Timetable,
        stage: usize,
        layout: Option<LeafLayout>,
    ) -> Leaves {
        let times: Vec<usize> =
            lowering.own.iter().enumerate().filter(|(_, own)| own.is_some()).map(|(t, _)| t).collect();
        let run = shape.runs[lowering.role.rank].clone();
        let with_samples = run.clone().zip(&shape.microbatches).filter(|(_, m)| m.is_some());
        let shards: Vec<usize> = with_samples.map(|(shard, _)| shard).collect();
        let n = shards.len();
        let tied = tied(lowering, timetable, stage, &times, layout.as_ref());
        let last = |m: usize| {
            let at = timetable.by_stage[stage].iter().rposition(|a| a.microbatch == times[m]);
            at.map_or(0, |at| at + 1)
        };
        let enters = |m: usize| tied.iter().map(|t| t.plan[m].done).fold(last(m), usize::max);
        let enters = (0..n).map(enters).collect();
        let leaves = vec![None; n];
        Leaves { tree, losses, run, shards, leaves, enters, tied, layout, n_microbatches: 0, n_shards: 0 }
    }

    /// Where the loss of a microbatch is counted.
    pub(crate) fn loss_of(&self, microbatch: usize) -> Region {
        let shard = self.shards[microbatch];
        self.losses.part(totals::pair(shard))
    }

    /// Copies gradients of a microbatch out of the arena, where the next one's will be written.
    pub(crate) fn take(&mut self, lowering: &mut Lowering, microbatch: usize, written: Vec<Range<usize>>) {
        for range in written {
            let into = self.leaf(lowering, microbatch).part(range.clone());
            lowering.push(Instr::Copy { from: Region::Grads(range), into });
        }
    }

    /// Copies of whole gradients of sharded parameters, which these nodes compute, into the leaf of a microbatch; each with the node
    /// before which it is made.
    pub(crate) fn whole_grads(
        &mut self,
        lowering: &mut Lowering,
        microbatch: usize,
        body: &Body,
        place: (usize, usize),
        nodes: &Range<usize>,
    ) -> Vec<(usize, Instr)> {
        let Some(layout) = self.layout.clone() else { return Vec::new() };
        if !whole_grads(&body.graph).iter().any(|grad| nodes.contains(&grad.taken_by)) {
            return Vec::new();
        }
        let leaf = self.leaf(lowering, microbatch);
        into_leaf(&layout, body, place, &leaf)
    }

    /// The last pass of a microbatch has run; its slot is still there.
    pub(crate) fn finish(&mut self, lowering: &mut Lowering, microbatch: usize, slot: usize) {
        let leaf = self.leaf(lowering, microbatch);
        let states = state_len(lowering.program.graph());
        if states > 0 {
            let at = lowering.program.len_of(&leaf) - states;
            let into = leaf.part(at..at + states);
            lowering.push(Instr::WeighStates { slot, microbatch, into });
        }
    }

    /// What is done before the action with this number: tied gradients are handed on, and whole leaves enter the tree.
    pub(crate) fn at(&mut self, lowering: &mut Lowering, place: usize) {
        for m in 0..self.shards.len() {
            for tied in &mut self.tied {
                let Some(leaf) = &self.leaves[m] else { continue };
                tied.hand_on(lowering, m, place, &leaf.part(tied.range.clone()));
            }
        }
        for m in 0..self.shards.len() {
            for tied in self.tied.iter_mut().filter(|t| t.plan[m].done == place) {
                lowering.program.instrs.extend(tied.sending[m].take().map(Instr::Wait));
            }
        }
        while self.enters.get(self.n_microbatches).is_some_and(|enters| *enters <= place) {
            let m = self.n_microbatches;
            let leaf = self.leaves[m].take().expect("a microbatch that has run has a leaf");
            self.without_samples(lowering, self.shards[m]);
            self.tree.push(lowering, self.shards[m], leaf);
            (self.n_microbatches, self.n_shards) = (m + 1, self.n_shards + 1);
        }
    }

    /// The tree, when all passes are done: tied parameters have the sums of all stages.
    pub(crate) fn sums(mut self, lowering: &mut Lowering) -> Tree {
        self.without_samples(lowering, self.run.end);
        for sum in self.tree.sums() {
            for tied in &self.tied {
                tied.pass_on(lowering, &sum.part(tied.range.clone()));
            }
        }
        self.tree
    }

    /// Shards before this one that are not in the tree have no samples: zeros.
    fn without_samples(&mut self, lowering: &mut Lowering, end: usize) {
        for shard in self.run.start + self.n_shards..end {
            let leaf = self.tree.leaf(lowering);
            lowering.push(Instr::Zero(leaf.clone()));
            self.tree.push(lowering, shard, leaf);
            self.n_shards += 1;
        }
    }

    fn leaf(&mut self, lowering: &mut Lowering, microbatch: usize) -> Region {
        let leaf = self.leaves[microbatch].take().unwrap_or_else(|| self.tree.leaf(lowering));
        self.leaves[microbatch] = Some(leaf.clone());
        leaf
    }
}

impl HandedOn {
    /// Receives what later stages have of a microbatch's gradient and adds it to this stage's; sends the sum to the stage before.
    fn hand_on(&mut self, lowering: &mut Lowering, microbatch: usize, place: usize, own: &Region) {
        let (plan, tag) = (self.plan[microbatch], self.tag);
        if plan.receive == Some(place) {
            let (name, len) = (format!("tied gradient {}", self.tag), self.range.len());
            let other = self.other.get_or_insert_with(|| lowering.program.buffer(name, DType::F32, len));
            let other = other.clone();
            let op = Collective::Receive { from: self.stages[self.here + 1], tag };
            lowering.program.exchange_now(op, Axis::Stage, other.clone());
            lowering.push(Instr::Add { from: other, into: own.clone() });
        }
        if plan.send == Some(place) {
            let op = Collective::Send { to: self.stages[self.here - 1], tag };
            let exchange = lowering.program.exchange(op, Axis::Stage, own.clone());
            lowering.push(Instr::Start(exchange));
            self.sending[microbatch] = Some(exchange);
        }
    }

    /// Sends a sum from the first stage to all others.
    fn pass_on(&self, lowering: &mut Lowering, sum: &Region) {
        let (first, tag) = (self.stages[0], self.tag);
        let now = |lowering: &mut Lowering, op: Collective| {
            lowering.program.exchange_now(op, Axis::Stage, sum.clone());
        };
        match self.here {
            0 => self.stages[1..].iter().for_each(|&to| now(lowering, Collective::Send { to, tag })),
            _ => now(lowering, Collective::Receive { from: first, tag }),
        }
    }
}

/// The tied parameters of this stage. `times` are the numbers of this rank's microbatches in the timetable.
fn tied(
    lowering: &Lowering,
    timetable: &Timetable,
    stage: usize,
    times: &[usize],
    layout: Option<&LeafLayout>,
) -> Vec<HandedOn> {
    let body = &lowering.program.bodies[0];
    let ranges = param_ranges(&body.graph);
    let of = |tied: &Tied| {
        let chain: Vec<usize> = tied.stages.iter().rev().copied().collect();
        let plans = hand_overs(timetable, &chain).expect("timetables are tested not to deadlock");
        let here = tied.stages.iter().position(|s| *s == stage).expect("this stage has the parameter");
        let found = ranges.iter().find(|(p, _)| *p == tied.param);
        let whole = layout.filter(|_| body.graph.params[tied.param].shard.is_some());
        let plan = &plans[chain.len() - 1 - here];
        HandedOn {
            range: match whole {
                Some(layout) => layout.of(tied.param),
                None => found.expect("every parameter has a place").1.clone(),
            },
            plan: times.iter().map(|t| plan[*t]).collect(),
            stages: tied.stages.clone(),
            here,
            tag: tied_tag(tied),
            other: None,
            sending: vec![None; times.len()],
        }
    };
    body.tied.iter().map(of).collect()
}
