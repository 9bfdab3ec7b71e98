//! The schedule of a pipelined step: this stage's passes in the order of a timetable, with what it sends and receives.
//!
//! ```text
//!  start receive of microbatch 1          one action ahead, if there is a slot for it
//!  load, forward of microbatch 0          on its slot
//!  start send to the next stage           waited for when the slot is used again
//!  ...
//!  wait receive, input gradients of 0     and the gradients that they write are added up
//!  start send to the stage before
//!  weight gradients of 0                  in the same pass or later; then the slot is free
//!  all-reduce totals over data and stages, judge
//! ```
//!
//! A microbatch has a slot from its first forward pass on this stage to its last backward pass. Every segment writes
//! its gradients where they lie in the arena, and they are added to those of the microbatches before at once: another
//! microbatch may write there next. Timetables go through microbatches in their order, chunk by chunk and pass by pass, so
//! the sums have the bits of a lone rank's.
//!
//! A rank of the data axis without samples has nothing to run, and adds zeros to the sums over that axis. Where weights are
//! sharded it goes through the timetable of the others all the same, from its first microbatch on: in those that it does not
//! have, *idle* ones, it brings its shards of weights and takes its shards of the others' gradients; no stage sends anything.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::memory::{param_ranges, reshape_root};
use polyreme_graph::{Axis, BlockKind, Body, Collective, DType, Graph, Instr, Link, Region, Tied, totals};

use crate::joint;
use crate::pipeline::{Action, StagePass, Timetable};
use crate::schedule::{Lowering, add_or_copy};
use crate::staged_across::Across;
use crate::staged_shards::Leaves;

/// Values that may go from one chunk to another in one pass.
pub(crate) const LINKS_MAX: usize = 64;

/// The tags of gradients of tied parameters begin here.
const TIED_TAGS: usize = 32_000;

/// The most chunks of a pipeline: every pair of them has tags for all its values, below those of tied parameters.
pub(crate) const CHUNKS_MAX: usize = 22;
const _: () = assert!(CHUNKS_MAX * CHUNKS_MAX * LINKS_MAX <= TIED_TAGS);

/// The tag of the totals of a step, where stages send them to each other.
pub(crate) const TOTALS_TAG: u16 = (1 << 15) - 1;

/// The tag of squares of gradients, where stages send them to each other.
pub(crate) const SQUARES_TAG: u16 = TOTALS_TAG - 1;

/// Everything up to the sums over the data axis.
pub(crate) fn step(lowering: &mut Lowering, timetable: &Timetable, stage: usize) {
    let totals = lowering.begin(1, "totals");
    passes(lowering, timetable, stage, &totals, None, None);
    tied_sums(lowering, stage);
    for (axis, ranks) in [(Axis::Data, lowering.role.ranks), (Axis::Stage, timetable.stages)] {
        if ranks > 1 {
            lowering.program.exchange_now(Collective::AllReduce, axis, totals.clone());
        }
    }
    // Nothing is updated before all ranks know that the loss is finite.
    lowering.push(Instr::Judge(totals));
}

/// All passes of a stage. Gradients are added up one after another, or become leaves of a tree; `across` if they are of several
/// steps.
pub(crate) fn passes(
    lowering: &mut Lowering,
    timetable: &Timetable,
    stage: usize,
    totals: &Region,
    leaves: Option<Leaves>,
    across: Option<Across>,
) -> Option<Leaves> {
    let n = timetable.microbatches;
    let slots = timetable.held(stage).microbatches;
    lowering.program.slots = slots;
    let per_step = across.as_ref().map_or(n, |across| across.per_step);
    let sums = (per_step > 1 && leaves.is_none()).then(|| {
        let len = lowering.grad_len();
        lowering.program.buffer("sums of gradients", DType::F32, len)
    });
    let mut staged = Staged {
        timetable,
        lowering,
        totals: totals.clone(),
        sums,
        leaves,
        across,
        per_step,
        free: (0..slots).rev().collect(),
        slot_of: vec![None; n],
        left: vec![timetable.chunks_of(stage).len(); n],
        sending: vec![Vec::new(); slots],
        posted: Vec::new(),
    };
    staged.zero_what_nobody_writes();
    let actions = &timetable.by_stage[stage];
    for (i, action) in actions.iter().enumerate() {
        staged.between(i);
        staged.post(action, true);
        if let Some(next) = actions.get(i + 1) {
            staged.post(next, false);
        }
        staged.arrived(action);
        staged.act(action);
    }
    staged.between(actions.len());
    let sending: Vec<usize> = staged.sending.drain(..).flatten().collect();
    let leaves = staged.leaves;
    lowering.program.instrs.extend(sending.into_iter().map(Instr::Wait));
    leaves
}

/// The tag of messages about a tied parameter.
pub(crate) fn tied_tag(tied: &Tied) -> u16 {
    let tag = u16::try_from(TIED_TAGS + tied.number).ok().filter(|tag| *tag < SQUARES_TAG);
    tag.expect("few parameters are tied")
}

/// Adds up the gradients of parameters that several stages have, from the last stage to the first, as a lone rank would; then
/// all have the sum.
fn tied_sums(lowering: &mut Lowering, stage: usize) {
    let body = lowering.program.bodies[0].clone();
    for tied in &body.tied {
        let found = param_ranges(&body.graph).into_iter().find(|(p, _)| *p == tied.param);
        let (_, range) = found.expect("every parameter has a place");
        let here = tied.stages.iter().position(|s| *s == stage).expect("this stage has the parameter");
        let tag = tied_tag(tied);
        let (first, grads) = (tied.stages[0], Region::Grads(range.clone()));
        let now = |lowering: &mut Lowering, op: Collective, of: &Region| {
            lowering.program.exchange_now(op, Axis::Stage, of.clone());
        };
        if let Some(&from) = tied.stages.get(here + 1) {
            let other = lowering.program.buffer("a tied gradient", DType::F32, range.len());
            now(lowering, Collective::Receive { from, tag }, &other);
            lowering.push(Instr::Add { from: other, into: grads.clone() });
        }
        match here.checked_sub(1) {
            None => {
                for &to in &tied.stages[1..] {
                    now(lowering, Collective::Send { to, tag }, &grads);
                }
            }
            Some(before) => {
                now(lowering, Collective::Send { to: tied.stages[before], tag }, &grads);
                now(lowering, Collective::Receive { from: first, tag }, &grads);
            }
        }
    }
}

struct Staged<'a> {
    timetable: &'a Timetable,
    lowering: &'a mut Lowering,
    totals: Region,
    /// Where gradients of earlier microbatches are added up.
    sums: Option<Region>,
    /// Reproducible mode: what becomes of gradients, states and losses.
    leaves: Option<Leaves>,
    /// What steps without a flush between them need.
    across: Option<Across>,
    /// Microbatches of a step.
    per_step: usize,
    /// Slots that no microbatch has.
    free: Vec<usize>,
    /// By microbatch.
    slot_of: Vec<Option<usize>>,
    /// By microbatch: chunks of this stage whose backward pass is not done.
    left: Vec<usize>,
    /// By slot: what is on its way out of it.
    sending: Vec<Vec<usize>>,
    /// Receives that were started: for which action, and their exchanges.
    posted: Vec<(Action, Vec<usize>)>,
}

impl Staged<'_> {
    /// This rank's microbatch with that number in the timetable; `None` if only other ranks have samples of it.
    fn own(&self, microbatch: usize) -> Option<usize> {
        self.lowering.own[microbatch]
    }

    /// Gradients that no microbatch of this rank writes are zeros in the sums over the data axis.
    fn zero_what_nobody_writes(&mut self) {
        if self.leaves.is_none() && self.lowering.own.iter().all(Option::is_none) {
            let sharded = &self.lowering.sharded;
            let end = if sharded.is_empty() { self.lowering.grad_len() } else { sharded.start };
            self.lowering.push(Instr::Zero(Region::Grads(0..end)));
        }
    }

    /// Starts to receive what an action reads. If it is `needed` now there is a slot; ahead of time there may be none.
    fn post(&mut self, action: &Action, needed: bool) {
        if self.posted.iter().any(|(a, _)| a == action) {
            return;
        }
        let microbatch = action.microbatch;
        let Some(slot) = self.slot_of[microbatch].or_else(|| self.take_slot(microbatch)) else {
            assert!(!needed, "a slot for each microbatch that the timetable holds");
            return;
        };
        let (number, body) = (self.number(microbatch), self.body(microbatch));
        let mut receives = Vec::new();
        let arrives = if self.own(microbatch).is_some() { &body.arrives[..] } else { &[] };
        for link in arrives.iter().filter(|link| link.to == action.chunk && belongs(link, action.pass)) {
            let op = Collective::Receive { from: self.timetable.place[link.from], tag: self.tag(link) };
            receives.push(self.start(op, Region::Value { slot, body: number, value: link.value }));
        }
        self.posted.push((*action, receives));
    }

    /// A slot for a microbatch, and its inputs; `None` if all are taken.
    fn take_slot(&mut self, microbatch: usize) -> Option<usize> {
        let slot = self.free.pop()?;
        self.slot_of[microbatch] = Some(slot);
        let sending = std::mem::take(&mut self.sending[slot]);
        self.lowering.program.instrs.extend(sending.into_iter().map(Instr::Wait));
        if let Some(microbatch) = self.own(microbatch) {
            self.lowering.push(Instr::Load { slot, microbatch });
        }
        Some(slot)
    }

    /// Waits for what an action reads.
    fn arrived(&mut self, action: &Action) {
        if let Some(at) = self.posted.iter().position(|(a, _)| a == action) {
            let (_, receives) = self.posted.swap_remove(at);
            self.lowering.program.instrs.extend(receives.into_iter().map(Instr::Wait));
        }
    }

    /// Runs the nodes of an action and starts to send what they compute for others.
    fn act(&mut self, action: &Action) {
        let kinds: &[BlockKind] = match action.pass {
            StagePass::Forward => &[BlockKind::Forward],
            StagePass::InputGrad => &[BlockKind::InputGrad],
            StagePass::WeightGrad => &[BlockKind::WeightGrad],
            StagePass::Backward => &[BlockKind::InputGrad, BlockKind::WeightGrad],
        };
        let microbatch = action.microbatch;
        let body = self.body(microbatch);
        let slot = self.slot_of[microbatch].expect("a microbatch that runs has a slot");
        if let Some(across) = &mut self.across {
            across.read_for(self.lowering, action);
        }
        for kind in kinds {
            let segments = body.segments.iter().filter(|s| s.chunk == action.chunk && s.kind == *kind);
            for nodes in segments.map(|s| s.nodes.clone()) {
                // What other stages wait for is on its way while the rest runs.
                if self.own(microbatch).is_none() {
                    let idle = &self.lowering.idle[0];
                    joint::run_idle(&mut self.lowering.program, slot, 0, &nodes, idle);
                    self.add_up(&body.graph, microbatch, &nodes);
                    continue;
                }
                let sent = end_of_sent(&body, action, &nodes);
                self.run(slot, microbatch, &(nodes.start..sent));
                if *kind != BlockKind::WeightGrad {
                    self.send(action, slot, &body.leaves);
                }
                self.run(slot, microbatch, &(sent..nodes.end));
                self.add_up(&body.graph, microbatch, &nodes);
            }
        }
        if action.frees() {
            self.left[microbatch] -= 1;
            if self.left[microbatch] == 0 {
                if let (Some(leaves), Some(own)) = (&mut self.leaves, self.lowering.own[microbatch]) {
                    leaves.finish(self.lowering, own, slot);
                }
                self.free.push(slot);
            }
        }
    }

    /// Runs nodes, with the exchanges along other axes that they contain; counts the loss and keeps the states that they
    /// compute.
    fn run(&mut self, slot: usize, microbatch: usize, nodes: &Range<usize>) {
        let body = self.body(microbatch);
        let graph = &body.graph;
        let data_ranks = self.lowering.role.ranks;
        let own = self.own(microbatch).expect("only microbatches with samples are run");
        let number = self.number(microbatch);
        let copies = match &mut self.leaves {
            Some(leaves) => leaves.whole_grads(self.lowering, own, &body, (slot, number), nodes),
            None => Vec::new(),
        };
        joint::run_with(&mut self.lowering.program, slot, own, nodes, data_ranks, &copies);
        let computes = |v| nodes.contains(&graph.value(v).producer.idx());
        if graph.output("loss").is_some_and(computes) {
            let totals = match &self.across {
                Some(across) => across.totals_of(microbatch),
                None => &self.totals,
            };
            let into = match &self.leaves {
                Some(leaves) => leaves.loss_of(own),
                None => totals.part(totals::pair(0)),
            };
            let tally = self.lowering.tally_of(totals);
            self.lowering.push(Instr::Count { slot, microbatch: own, into, tally });
        }
        // Logical shards all start from the states of the step's beginning.
        if self.leaves.is_none() && graph.updates.iter().any(|(_, v)| computes(*v)) {
            self.lowering.push(Instr::Keep { slot, microbatch: own, nodes: nodes.clone() });
        }
    }

    /// Adds the gradients that nodes have written to those of the microbatches before. The last microbatch's stay where they
    /// are, and the others are added to them.
    fn add_up(&mut self, graph: &Graph, microbatch: usize, nodes: &Range<usize>) {
        if let Some(leaves) = &mut self.leaves {
            let Some(own) = self.lowering.own[microbatch] else { return };
            // Whole gradients of sharded parameters are in the leaf already.
            let sharded = self.lowering.sharded.clone();
            let parts = written(graph, nodes).into_iter().flat_map(|range| cut_at(range, &sharded));
            let alike = parts.filter(|(_, is_shard)| !is_shard).map(|(range, _)| range).collect();
            return leaves.take(self.lowering, own, alike);
        }
        let Some(sums) = self.sums.clone() else { return };
        let sharded = self.lowering.sharded.clone();
        let first_own = self.lowering.own.iter().take_while(|own| own.is_none()).count();
        let number = microbatch % self.per_step;
        let last = number + 1 == self.per_step;
        for (range, is_shard) in written(graph, nodes).into_iter().flat_map(|range| cut_at(range, &sharded)) {
            // Shards of gradients are written in idle microbatches too.
            let first = if is_shard { 0 } else { first_own };
            let (sum, grads) = (sums.part(range.clone()), Region::Grads(range));
            match last {
                false if number >= first => self.lowering.push(add_or_copy(grads, sum, number > first)),
                true if number > first => self.lowering.push(Instr::Add { from: sum, into: grads }),
                // It is not written, or nothing is to be added to it.
                _ => {}
            }
        }
    }

    /// What is done between passes, before the action with this number.
    fn between(&mut self, place: usize) {
        if let Some(across) = &mut self.across {
            across.at(self.lowering, place);
        }
        if let Some(leaves) = &mut self.leaves {
            leaves.at(self.lowering, place);
        }
    }

    /// Starts to send what an action has computed for other stages.
    fn send(&mut self, action: &Action, slot: usize, leaves: &[Link]) {
        let number = self.number(action.microbatch);
        for link in leaves.iter().filter(|link| link.from == action.chunk && belongs(link, action.pass)) {
            let op = Collective::Send { to: self.timetable.place[link.to], tag: self.tag(link) };
            let exchange = self.start(op, Region::Value { slot, body: number, value: link.value });
            self.sending[slot].push(exchange);
        }
    }

    fn start(&mut self, op: Collective, of: Region) -> usize {
        let exchange = self.lowering.program.exchange(op, Axis::Stage, of);
        self.lowering.push(Instr::Start(exchange));
        exchange
    }

    /// What both ends call a value that goes from one chunk to another.
    fn tag(&self, link: &Link) -> u16 {
        link_tag(link, self.timetable.place.len())
    }

    /// The number of a microbatch's body.
    fn number(&self, microbatch: usize) -> usize {
        self.own(microbatch).map_or(0, |own| self.lowering.program.microbatches[own].body)
    }

    fn body(&self, microbatch: usize) -> Arc<Body> {
        self.lowering.program.bodies[self.number(microbatch)].clone()
    }
}

/// The end of the nodes of a segment that compute something for other stages.
fn end_of_sent(body: &Body, action: &Action, nodes: &Range<usize>) -> usize {
    let leaves = body.leaves.iter().filter(|link| link.from == action.chunk && belongs(link, action.pass));
    let made = leaves.map(|link| body.graph.value(link.value).producer.idx() + 1);
    made.filter(|end| nodes.start < *end && *end <= nodes.end).max().unwrap_or(nodes.start)
}

/// What both ends call a value that goes from one of `n_chunks` chunks to another.
pub(crate) fn link_tag(link: &Link, n_chunks: usize) -> u16 {
    assert!(link.number < LINKS_MAX, "at most {LINKS_MAX} values go from one chunk to another");
    let tag = (link.from * n_chunks + link.to) * LINKS_MAX + link.number;
    let tag = u16::try_from(tag).ok().filter(|tag| usize::from(*tag) < TIED_TAGS);
    tag.expect("a longer pipeline has no timetable")
}

/// Whether a link is between passes of this kind: activations come from earlier chunks, gradients from later ones.
fn belongs(link: &Link, pass: StagePass) -> bool {
    match pass {
        StagePass::Forward => link.from < link.to,
        StagePass::Backward | StagePass::InputGrad => link.from > link.to,
        StagePass::WeightGrad => false,
    }
}

/// A range of gradients in parts: those that every rank has, and shards.
fn cut_at(range: Range<usize>, sharded: &Range<usize>) -> Vec<(Range<usize>, bool)> {
    let at = if sharded.is_empty() { range.end } else { sharded.start.clamp(range.start, range.end) };
    let parts = [(range.start..at, false), (at..range.end, true)];
    parts.into_iter().filter(|(range, _)| !range.is_empty()).collect()
}

/// The ranges of the gradients' arena that nodes write, as few as can be.
///
/// # Panics
/// If a node outside of them reads one of these gradients: another microbatch may have overwritten it by then.
fn written(graph: &Graph, nodes: &Range<usize>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (p, range) in param_ranges(graph) {
        let Some(grad) = graph.grads[p] else { continue };
        let root = reshape_root(graph, grad);
        if !nodes.contains(&graph.value(root).producer.idx()) {
            continue;
        }
        let reads = |i: usize| graph.nodes[i].inputs.iter().any(|&v| reshape_root(graph, v) == root);
        assert!((nodes.end..graph.nodes.len()).all(|i| !reads(i)), "a gradient is read in its own segment");
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => ranges.push(range),
        }
    }
    ranges
}
