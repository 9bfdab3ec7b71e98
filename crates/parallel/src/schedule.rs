//! The schedule of a data-parallel step: every rank has the whole model and a part of the batch; gradients are added up, and
//! each rank updates its part of the parameters.
//!
//! ```text
//!  load, forward … loss  count, start totals
//!  backward … dW3 db3    start sum of bucket 0 ─┐ while the backward pass goes on
//!  backward … dW1 db1    start sum of bucket 1 ─┘
//!  wait for the totals, judge, keep states
//!  wait 0, update own part of bucket 0, start gather of bucket 0
//!  wait 1, update own part of bucket 1, start gather of bucket 1
//!  wait for the gathers
//! ```
//!
//! A bucket is a range of the arena of gradients, which is ordered by readiness, so nothing is copied to be sent. Where
//! ranks keep the moments of their own part, the sum is a reduce-scatter: a rank gets the sum of its own part of each
//! bucket, and the updated parts are gathered. That moves as many bytes as an all-reduce. LAMB and Adafactor need whole
//! tensors, so with them every rank updates everything that it has; of tensors that ranks split for other reasons, sums are
//! exchanged first (`split_tensors`).
//!
//! Ranks that share one copy of the weights have no gather: they meet after the updates. The sum of the last bucket
//! starts after the last node, and is complete only when all ranks have started it; so no rank writes a parameter that
//! another one still reads. With shared memory there is no network to keep busy either, so there is one bucket.
//!
//! # Several microbatches
//! Gradients of all but the last microbatch are added up in a buffer, which is added to those of the last before their sum over
//! the ranks starts. A rank with fewer microbatches than others takes part in the exchanges of the first rounds without
//! samples; a rank without any adds zeros.
//!
//! # Ranks that may be lost
//! In an elastic plan every rank keeps everything and updates everything, and no update comes before the last sum: a step that cannot
//! be finished because a rank is lost has changed no parameter, and one that has begun to change them needs no other rank.
//!
//! # Parameter servers
//! With servers each bucket is pushed to those that hold it, in as many parts as there are servers, when its gradients are complete; behind
//! the last push all ranges are pulled, and awaited. No rank updates anything: the servers do. In lockstep that takes the place of the sums and
//! updates, and the totals are summed as ever. Otherwise a step is one worker's alone: nothing is exchanged but pushes and pulls, and the
//! loss is judged before anything is pushed. Clipping needs the norm of all gradients, so then they are pushed behind the last; sums
//! of logical shards are too (`reproducible`). A rank that only serves takes part in the
//! totals of steps in lockstep, and in nothing else.
//!
//! # Sharded gradients
//! Where a rank keeps only its own shard of the gradients, buckets alternate between two buffers ([`GradBuffers`]):
//! before the first gradient of bucket `k` is written, the sum of bucket `k - 2` is waited for and this rank's shard
//! copied out of it. So bucket `k - 2` is summed while bucket `k - 1` is computed. The whole gradients are gone by the
//! end of the step, so each microbatch's gradients are summed over the ranks and accumulated in the shards: `n`
//! microbatches send `n` times the bytes of one reduce-scatter.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::memory::{ALIGN_BYTES, learnt_len, param_ranges, state_len};
use polyreme_graph::{
    Axis, Body, CodedLayout, Coding, Collective, DType, GradBuffers, Instr, Keeps, Learning, Microbatch,
    Program, Region, Role, SumLayout, Weights, WireCodec, learnt_alike, totals,
};

use crate::buckets::{Bucket, buckets, cuts, in_turn};
use crate::fixed_blocks::block_cuts;
use crate::joint;
use crate::local_steps;
use crate::low_rank;
use crate::plan::{Plan, ServerPlan, StepShape, Training};
use crate::reproducible;
use crate::served::server_cuts;
use crate::shard::{idle, sharded_range};
use crate::split_tensors::measured;
use crate::{stage_body, staged, staged_across};

/// The buffer that codes travel through.
const CODES: &str = "codes";
/// The buffer that factors of matrices travel through.
const PRODUCTS: &str = "factors on their way";

/// The program of one rank for steps of this shape, over bodies that [`compile`](crate::passes::compile) made.
///
/// # Panics
/// If the plan contradicts itself (see [`Plan::keeps`]), or if parameters are updated at once in a step of several microbatches.
pub fn schedule(plan: &Plan, training: &Training, bodies: &[Arc<Body>], shape: &StepShape) -> Program {
    let mut program = Program::empty(bodies.to_vec());
    program.optimizer = Some(training.optimizer);
    program.scaled = training.scaled;
    program.moments = training.moments;
    program.microbatches = shape.microbatches.iter().flatten().copied().collect();
    let (keeps, weights) = plan.ownership(training.optimizer);
    let one_bucket = (weights == Weights::Shared && keeps != Keeps::OwnGradients)
        || (plan.shards.is_some() && plan.servers.is_none())
        || plan.local.is_some()
        || plan.ranks() == 1;
    let of_body = |body: &Arc<Body>| {
        let found = buckets(&body.graph, if one_bucket { usize::MAX } else { plan.bucket_bytes });
        if keeps == Keeps::OwnGradients { in_turn(found) } else { found }
    };
    let buckets: Vec<Vec<Bucket>> = bodies.iter().map(of_body).collect();
    if keeps == Keeps::OwnGradients {
        program.grad_buffers = Some(GradBuffers::new(buckets[0].iter().map(|b| b.range.clone()).collect()));
    }
    let bucket_cuts = |b: &Bucket| match plan.shards {
        _ if plan.servers.is_some() => server_cuts(b.range.len(), plan),
        // There is one bucket, and the norm is that of fixed blocks.
        Some(_) => block_cuts(&bodies[0].graph, b.range.len(), plan.ranks()),
        None => cuts(b.range.len(), plan.ranks()),
    };
    let cuts: Vec<Arc<[usize]>> = buckets[0].iter().map(bucket_cuts).collect();
    let sharded = sharded_range(&bodies[0].graph);
    let part = |rank: usize| match keeps {
        Keeps::All => {
            let shards = (!sharded.is_empty()).then(|| sharded.clone());
            buckets[0].iter().map(|b| b.range.clone()).chain(shards).collect()
        }
        Keeps::OwnMoments | Keeps::OwnGradients => {
            buckets[0].iter().zip(&cuts).map(|(b, cuts)| b.part(cuts, rank)).collect()
        }
    };
    let parts = (0..plan.ranks()).map(part).collect();
    let rank = plan.mesh.place(plan.rank, Axis::Data);
    let role = Role { rank, ranks: plan.ranks(), weights, keeps, shards: plan.shards, parts };
    program.role = Some(role.clone());
    let own = match role.shards_weights() && plan.mesh.stage > 1 {
        true => beside_others(shape),
        false => (0..program.microbatches.len()).map(Some).collect(),
    };
    if role.shards_weights() && program.microbatches.is_empty() {
        // What a rank without samples runs is said to be of a microbatch that is never loaded.
        program.microbatches.push(Microbatch { body: 0, first_sample: 0 });
    }
    let at_once = plan.updates_at_once(training);
    assert!(
        !at_once || shape.rounds == 1,
        "parameters can be updated at once only in a step of one microbatch"
    );
    let mut lowering = Lowering {
        program,
        buckets,
        cuts,
        role,
        slot: 0,
        at_once,
        wire: plan.wire,
        sums: Vec::new(),
        n_taken: 0,
        continues: false,
        accumulated: None,
        own_gradients: None,
        split_axes: split_axes(plan),
        alike_axes: [Axis::Tensor, Axis::Sequence].into_iter().filter(|a| plan.mesh.len(*a) > 1).collect(),
        idle: bodies.iter().map(|body| idle(&body.graph)).collect(),
        own,
        sharded,
        counted_elsewhere: counted_elsewhere(plan, &bodies[0]),
        sums_first: plan.elastic,
        by_itself: false,
        served: plan.servers,
        only_serves: plan.only_serves(),
        pushes_last: plan.servers.is_some() && (training.max_norm().is_some() || plan.shards.is_some()),
    };
    if let Some(local) = plan.local_steps() {
        local_steps::run(&mut lowering, local, shape, training);
        return lowering.program;
    }
    lowering.list_served();
    let states = lowering.keep_states(training);
    if shape.steps > 1 {
        assert!(plan.is_flushless(), "only a schedule without a flush runs several steps as one");
        staged_across::run(&mut lowering, plan, shape.steps, training);
        return lowering.program;
    }
    let timetable = (plan.mesh.stage > 1).then(|| {
        let found = stage_body::timetable_of(plan, lowering.own.len());
        (plan.mesh.place(plan.rank, Axis::Stage), found.expect("a plan that was compiled"))
    });
    let stage = timetable.as_ref().map(|(stage, timetable)| (*stage, timetable));
    match (plan.shards, stage) {
        (Some(shards), _) => reproducible::step(&mut lowering, shards, shape, training.max_norm(), stage),
        (None, Some((stage, timetable))) => {
            staged::step(&mut lowering, timetable, stage);
            lowering.start_sums();
        }
        (None, None) => lowering.rounds(shape),
    }
    lowering.updates(training, bodies);
    lowering.program.instrs.extend(states);
    let program = lowering.program;
    if let Some(buffers) = &program.grad_buffers {
        buffers.verify(&program);
    }
    program
}

/// Stages whose weights are sharded gather them as often on every data rank: this rank's microbatches among as many as the rank with
/// the most has. Others come first, or in a reproducible step where logical shards have no samples.
fn beside_others(shape: &StepShape) -> Vec<Option<usize>> {
    let mut next = 0..;
    if shape.runs.is_empty() {
        let n_idle = shape.rounds - shape.microbatches.len();
        return (0..shape.rounds).map(|t| t.checked_sub(n_idle)).collect();
    }
    let most = shape.runs.iter().map(Range::len).max().unwrap_or(0);
    let microbatch = |t: usize| shape.microbatches.get(t).copied().flatten();
    (0..most).map(|t| microbatch(t).and_then(|_| next.next())).collect()
}

/// The axes along which ranks have different parameters, and gradients that are no longer to be summed.
fn split_axes(plan: &Plan) -> Vec<Axis> {
    let differ = |axis: &Axis| match axis {
        Axis::Data => plan.shard_place().is_some(),
        Axis::Tensor | Axis::Stage => plan.mesh.len(*axis) > 1,
        Axis::Sequence => false,
    };
    Axis::ALL.into_iter().filter(differ).collect()
}

/// Ranges of the parameters that another rank along one of these axes has too: all but the first of those that have a parameter
/// leave it out of the norm.
fn counted_elsewhere(plan: &Plan, body: &Body) -> Vec<Range<usize>> {
    let (first, stage) =
        (plan.mesh.place(plan.rank, Axis::Tensor) == 0, plan.mesh.place(plan.rank, Axis::Stage));
    // In the tree of a reproducible step every element has one owner.
    let others_shard = plan.shard_place().is_some_and(|place| place.rank > 0 && !place.in_tree);
    let graph = &body.graph;
    let elsewhere = |p: &usize| {
        let whole = graph.params[*p].part.is_none();
        (others_shard && graph.params[*p].shard.is_none())
            || (!first && whole)
            || body.tied.iter().any(|t| t.param == *p && t.stages[0] != stage)
    };
    param_ranges(graph).into_iter().filter(|(p, _)| elsewhere(p)).map(|(_, range)| range).collect()
}

/// The program that averages each rank's states over all ranks; the body says where they are stored.
pub fn average_states(ranks: usize, body: &Arc<Body>) -> Program {
    let mut program = Program::empty(vec![body.clone()]);
    let states = Region::States(0..state_len(&body.graph));
    program.exchange_now(Collective::AllReduce, Axis::Data, states.clone());
    program.instrs.push(Instr::Divide { of: states, by: ranks });
    program
}

/// The program that runs forward and backward passes of one microbatch on each rank, with the sums over the data axis
/// that the graph contains. States are updated; gradients are not summed over ranks.
pub fn both_passes(ranks: usize, body: &Arc<Body>) -> Program {
    let mut program = Program::empty(vec![body.clone()]);
    program.microbatches.push(Microbatch { body: 0, first_sample: 0 });
    program.instrs.push(Instr::Load { slot: 0, microbatch: 0 });
    let mut from = 0;
    for (i, node) in body.graph.nodes.iter().enumerate() {
        let Some(axis) = joint::axis_of(node) else { continue };
        if ranks > 1 || axis != Axis::Data {
            program.run(0, 0, from..i + 1);
            from = i + 1;
            let numbers: Vec<usize> =
                joint::exchanges(&mut program, 0, 0, i).iter().map(|e| e.number).collect();
            program.instrs.extend(numbers.iter().map(|n| Instr::Start(*n)));
            program.instrs.extend(numbers.into_iter().map(Instr::Wait));
        }
    }
    program.run(0, 0, from..body.graph.nodes.len());
    let nodes = 0..body.graph.nodes.len();
    program.instrs.push(Instr::Keep { slot: 0, microbatch: 0, nodes });
    program
}

pub(crate) struct Lowering {
    pub(crate) program: Program,
    /// By body.
    pub(crate) buckets: Vec<Vec<Bucket>>,
    /// By bucket.
    pub(crate) cuts: Vec<Arc<[usize]>>,
    pub(crate) role: Role,
    pub(crate) slot: usize,
    at_once: bool,
    /// The format in which gradients travel, if not as they are.
    pub(crate) wire: Option<WireCodec>,
    /// The sums of buckets that were started in this round, in their order.
    sums: Vec<usize>,
    /// How many of them have been waited for and copied out of their buffers.
    n_taken: usize,
    /// Whether the sums of earlier rounds are added to.
    continues: bool,
    /// Where gradients of earlier microbatches are added up.
    accumulated: Option<Region>,
    /// Where this rank's shard of the gradients is, if it keeps no others.
    own_gradients: Option<Region>,
    /// Axes along which ranks have different parameters, and gradients that are no longer to be summed.
    pub(crate) split_axes: Vec<Axis>,
    /// Axes along which all ranks count the same loss.
    pub(crate) alike_axes: Vec<Axis>,
    /// By body and node: whether a rank without samples runs it.
    pub(crate) idle: Vec<Vec<bool>>,
    /// With stages, by microbatch of the timetable: which one of this rank it is; `None` if only other ranks of the data axis have
    /// samples of it.
    pub(crate) own: Vec<Option<usize>>,
    /// The shards of weights among the parameters: their gradients are summed over the ranks in each round.
    pub(crate) sharded: Range<usize>,
    /// Ascending ranges of the parameters that another rank along these axes has too, and counts.
    pub(crate) counted_elsewhere: Vec<Range<usize>>,
    /// Whether no update comes before the last sum.
    sums_first: bool,
    /// Whether this rank takes the step by itself, and others another one at the same time.
    pub(crate) by_itself: bool,
    /// Whether servers hold the weights.
    pub(crate) served: Option<ServerPlan>,
    /// Whether this rank hosts one of them, and does nothing else.
    pub(crate) only_serves: bool,
    /// Whether nothing is pushed before all gradients are there.
    pub(crate) pushes_last: bool,
}

/// One round: a microbatch of this rank or of others.
#[derive(Clone, Copy)]
struct Round {
    body: usize,
    microbatch: Option<usize>,
    first: bool,
    last: bool,
}

impl Lowering {
    /// Keeps the states of before a step whose updates may be skipped; gives the instruction that puts them back.
    fn keep_states(&mut self, training: &Training) -> Option<Instr> {
        let len = state_len(self.program.graph());
        if !training.scaled || len == 0 {
            return None;
        }
        let (states, kept) = (Region::States(0..len), self.program.buffer("states before", DType::F32, len));
        self.push(Instr::Copy { from: states.clone(), into: kept.clone() });
        Some(Instr::PutBack { from: kept, into: states })
    }

    pub(crate) fn push(&mut self, instr: Instr) {
        self.program.instrs.push(instr);
    }

    /// The totals of the step. Ranks that split matrices or sequences all count the same loss, so along these axes only the
    /// caller's numbers are added up, before there is a loss.
    pub(crate) fn begin(&mut self, n_pairs: usize, name: &str) -> Region {
        let len = totals::len(n_pairs);
        let totals = self.program.buffer(name, DType::F64, len);
        self.push(Instr::Begin(totals.clone()));
        for axis in self.alike_axes.clone() {
            let given = totals.part(totals::given(len));
            self.program.exchange_now(Collective::AllReduce, axis, given);
        }
        totals
    }

    /// Where the samples of a step are counted, in its totals.
    pub(crate) fn tally_of(&self, totals: &Region) -> Region {
        totals.part(totals::tally(self.program.len_of(totals)))
    }

    fn rounds(&mut self, shape: &StepShape) {
        let totals = self.begin(1, "totals");
        self.rounds_of(0..shape.microbatches.len(), shape.rounds, &totals);
    }

    /// The rounds of a step with these microbatches of the program.
    pub(crate) fn rounds_of(&mut self, own: Range<usize>, rounds: usize, totals: &Region) {
        let n = own.len();
        let grad_len = self.grad_len();
        if self.role.keeps == Keeps::OwnGradients {
            let len = self.role.own().iter().map(Range::len).sum();
            self.own_gradients = Some(self.program.buffer("own gradients", DType::F32, len));
        } else if n > 1 || (rounds > 1 && !self.sharded.is_empty()) {
            self.accumulated = Some(self.common_buffer("sums of gradients", DType::F32, grad_len));
        }
        if n == 0 && self.own_gradients.is_none() && !self.only_serves {
            self.push(Instr::Zero(Region::Grads(0..grad_len)));
        }
        for k in 0..rounds {
            let microbatch = k.checked_sub(rounds - n).map(|m| own.start + m);
            let body = microbatch.map_or(0, |m| self.program.microbatches[m].body);
            // Shards accumulate over all rounds, with samples or without.
            self.continues = match self.own_gradients {
                Some(_) => k > 0,
                None => microbatch.is_some_and(|m| m > own.start),
            };
            let (first, last) = (k == 0, k + 1 == rounds);
            self.round(Round { body, microbatch, first, last }, totals);
        }
    }

    /// Starts the sums of all buckets.
    fn start_sums(&mut self) {
        self.sums = Vec::new();
        for k in 0..self.n_sums() {
            self.start_sum(Round { body: 0, microbatch: Some(0), first: true, last: true }, k);
        }
    }

    /// Elements of the arena of gradients.
    pub(crate) fn grad_len(&self) -> usize {
        learnt_len(self.program.graph())
    }

    /// Elements of the arena of parameters, frozen ones included.
    pub(crate) fn param_len(&self) -> usize {
        let ranges = param_ranges(self.program.graph());
        ranges.last().map_or(0, |(_, range)| range.end)
    }

    /// Runs a microbatch, or takes part in the others' exchanges.
    fn round(&mut self, round: Round, totals: &Region) {
        let Round { body: number, microbatch, last, .. } = round;
        let body = self.program.bodies[number].clone();
        let graph = &body.graph;
        (self.sums, self.n_taken) = (Vec::new(), 0);
        if let Some(microbatch) = microbatch {
            self.push(Instr::Load { slot: self.slot, microbatch });
        }
        let loss = graph.output("loss").map_or(0, |v| graph.value(v).producer.idx());
        let last_node = graph.nodes.len().saturating_sub(1);
        let n_sums = self.n_sums();
        let free = self.served.is_some_and(|servers| !servers.lockstep);
        let totals_sum = (self.role.ranks > 1 && last && !free)
            .then(|| self.program.exchange(Collective::AllReduce, Axis::Data, totals.clone()));
        let mut from = 0;
        // Exchanges of values that are under way, and the first node that reads each.
        let mut joint: Vec<(usize, usize)> = Vec::new();
        for i in 0..graph.nodes.len() {
            let ready: Vec<usize> = joint.iter().filter(|(_, reader)| *reader <= i).map(|s| s.0).collect();
            let begun = match &self.own_gradients {
                // No rank writes where a sum is still under way.
                Some(_) => self.buckets[number].iter().filter(|b| b.begins <= i).count().saturating_sub(2),
                None => 0,
            };
            if !ready.is_empty() || begun > self.n_taken {
                self.flush(round, &mut from, i);
                joint.retain(|(_, reader)| *reader > i);
                self.program.instrs.extend(ready.into_iter().map(Instr::Wait));
                self.wait_until(begun);
            }
            if joint::axis_of(&graph.nodes[i]).is_some_and(|axis| self.exchanges_along(axis, round)) {
                self.flush(round, &mut from, i + 1);
                joint.extend(self.start_joint(round, i).into_iter().map(|e| (e.number, e.reader)));
            }
            if i == loss {
                self.flush(round, &mut from, i + 1);
                if let Some(microbatch) = microbatch {
                    let (into, tally) = (totals.part(totals::pair(0)), self.tally_of(totals));
                    self.push(Instr::Count { slot: self.slot, microbatch, into, tally });
                }
                self.program.instrs.extend(totals_sum.map(Instr::Start));
                if self.at_once || (free && last) {
                    self.push(Instr::Judge(totals.clone()));
                }
            }
            for k in 0..n_sums {
                let waits_for_all = self.role.shares_weights() && k + 1 == n_sums;
                let at = if waits_for_all { last_node } else { self.buckets[number][k].ready };
                if i == at && (last || self.own_gradients.is_some()) {
                    self.flush(round, &mut from, i + 1);
                    self.start_sum(round, k);
                }
            }
        }
        self.flush(round, &mut from, graph.nodes.len());
        self.program.instrs.extend(joint.into_iter().map(|(sum, _)| Instr::Wait(sum)));
        if last {
            // Nothing is copied out and nothing is updated before all ranks know that the loss is finite.
            self.program.instrs.extend(totals_sum.map(Instr::Wait));
            if self.by_itself {
                self.push(Instr::JudgeOwn(totals.clone()));
            } else if !self.at_once && !free {
                self.push(Instr::Judge(totals.clone()));
            }
            if let (true, true, Some(from)) = (n_sums == 0, self.continues, self.accumulated.clone()) {
                self.push(Instr::Add { from, into: Region::Grads(0..self.grad_len()) });
            }
        } else {
            self.wait_until(self.sums.len());
            let end = if self.sharded.is_empty() { self.grad_len() } else { self.sharded.start };
            if let (Some(_), Some(into), 1..) = (microbatch, &self.accumulated, end) {
                let (from, into) = (Region::Grads(0..end), into.part(0..end));
                self.push(add_or_copy(from, into, self.continues));
            }
        }
        self.add_up_shards(round);
        if let (Some(microbatch), false) = (microbatch, graph.updates.is_empty()) {
            let nodes = 0..graph.nodes.len();
            self.push(Instr::Keep { slot: self.slot, microbatch, nodes });
        }
    }

    /// Adds the shards of a round's gradients to those of earlier rounds, with samples or without; those of the last round stay
    /// where they are, and the others are added to them.
    fn add_up_shards(&mut self, round: Round) {
        let grads = Region::Grads(self.sharded.clone());
        let sums = self.accumulated.as_ref().filter(|_| !self.sharded.is_empty());
        let Some(sums) = sums.map(|sums| sums.part(self.sharded.clone())) else { return };
        match round.last {
            true if round.first => {}
            true => self.push(Instr::Add { from: sums, into: grads }),
            false => self.push(add_or_copy(grads, sums, !round.first)),
        }
    }

    /// Runs the nodes since the last flush. Without samples those that others wait for, or that take shards of their gradients.
    fn flush(&mut self, round: Round, from: &mut usize, to: usize) {
        match round.microbatch {
            Some(microbatch) => self.program.run(self.slot, microbatch, *from..to),
            None => {
                let runs = self.idle[round.body][*from..to].chunk_by(|a, b| a == b);
                let mut at = *from;
                let mut nodes = |run: &[bool]| {
                    at += run.len();
                    run[0].then_some(at - run.len()..at)
                };
                for nodes in runs.filter_map(&mut nodes).collect::<Vec<_>>() {
                    self.program.run_body(round.body, self.slot, 0, nodes);
                }
            }
        }
        *from = to;
    }

    /// Sums of buckets over the ranks in each round. Reproducible steps have a tree instead.
    fn n_sums(&self) -> usize {
        let sums = match self.served {
            Some(_) => !self.pushes_last && !self.only_serves,
            None => self.role.ranks > 1 && self.role.shards.is_none(),
        };
        if sums { self.cuts.len() } else { 0 }
    }

    /// Whether this rank exchanges values along an axis in a round. Of ranks that split the batch some may be without samples,
    /// and take part all the same; along other axes all have the same ones.
    fn exchanges_along(&self, axis: Axis, round: Round) -> bool {
        match axis {
            Axis::Data => self.role.ranks > 1,
            Axis::Tensor | Axis::Stage | Axis::Sequence => round.microbatch.is_some(),
        }
    }

    /// Starts the exchanges that a node stands for; a rank without samples adds zeros, but brings its shards of weights.
    fn start_joint(&mut self, round: Round, node: usize) -> Vec<joint::JointExchange> {
        let brings = self.idle[round.body][node];
        if round.microbatch.is_none() && !brings {
            let value = self.program.bodies[round.body].graph.nodes[node].outputs[0];
            self.push(Instr::Zero(Region::Value { slot: self.slot, body: round.body, value }));
        }
        let started = joint::exchanges(&mut self.program, self.slot, round.body, node);
        self.program.instrs.extend(started.iter().map(|e| Instr::Start(e.number)));
        started
    }

    /// Starts the sum of bucket `k`.
    fn start_sum(&mut self, round: Round, k: usize) {
        let range = self.buckets[round.body][k].range.clone();
        let of = match &self.program.grad_buffers {
            Some(buffers) => Region::Grads(buffers.at(k)..buffers.at(k) + range.len()),
            None => Region::Grads(range.clone()),
        };
        if self.own_gradients.is_some() {
            self.fill_up(round, &range, &of);
        } else if let (true, Some(sums)) = (self.continues, &self.accumulated) {
            let from = sums.part(range.clone());
            self.push(Instr::Add { from, into: of.clone() });
        }
        if self.served.is_some() {
            return self.push_bucket(k);
        }
        let op = match self.role.sharded() {
            true => Collective::ReduceScatter(self.cuts[k].clone()),
            false => Collective::AllReduce,
        };
        let sum = self.program.exchange(op, Axis::Data, of);
        self.code(sum, self.cuts[k].clone(), range);
        self.push(Instr::Start(sum));
        self.sums.push(sum);
    }

    /// Lets a sum of what belongs to a range of the parameters travel in fewer bytes, if the plan says so; the cuts say which part of it is whose.
    pub(crate) fn code(&mut self, sum: usize, cuts: Arc<[usize]>, range: Range<usize>) {
        let Some(codec) = self.wire.filter(|_| self.role.ranks > 1) else { return };
        let residual = Region::Residual(range.clone());
        let coding = match codec {
            WireCodec::Blocks(codec) => {
                let layout = CodedLayout::new(codec, cuts, self.role.rank);
                let coded = self.common_buffer(CODES, DType::U8, layout.room());
                Coding { layout: SumLayout::Blocks(layout.into()), residual, coded, factors: None }
            }
            WireCodec::LowRank { rank } => {
                assert!(!self.role.sharded(), "factors are of whole tensors, which all ranks update");
                let (layout, factors) = low_rank::layout(&self.program.bodies[0].graph, range, rank);
                let coded = self.common_buffer(PRODUCTS, DType::F32, layout.room());
                let factors = Some(Region::Factors(factors));
                Coding { layout: SumLayout::LowRank(layout.into()), residual, coded, factors }
            }
        };
        self.program.exchanges[sum].coding = Some(coding);
    }

    /// Room for what instructions need one after the other: one buffer for all of them.
    pub(crate) fn common_buffer(&mut self, name: &str, dtype: DType, len: usize) -> Region {
        let buffers = &mut self.program.buffers;
        match buffers.iter().position(|buffer| buffer.name == name) {
            Some(at) => {
                buffers[at].len = buffers[at].len.max(len);
                Region::Buffer(at, 0..len)
            }
            None => self.program.buffer(name, dtype, len),
        }
    }

    /// Zeroes what a buffer still holds of another bucket: the gaps between tensors, or everything if this rank has no
    /// samples.
    fn fill_up(&mut self, round: Round, range: &Range<usize>, of: &Region) {
        if round.microbatch.is_none() {
            return self.push(Instr::Zero(of.clone()));
        }
        let graph = &self.program.bodies[round.body].graph;
        let gap = |(p, r): (usize, Range<usize>)| {
            let end = r.start + graph.shape(graph.params[p].value).numel();
            let inside = range.start <= r.start && r.end <= range.end;
            (inside && end < end.next_multiple_of(ALIGN_BYTES / 4))
                .then(|| end - range.start..r.end - range.start)
        };
        let gaps: Vec<_> = param_ranges(graph).into_iter().filter_map(gap).collect();
        self.program.instrs.extend(gaps.into_iter().map(|gap| Instr::Zero(of.part(gap))));
    }

    /// Waits for the sums of the buckets up to `end`, and copies this rank's shards out of their buffers.
    fn wait_until(&mut self, end: usize) {
        for k in self.n_taken..end {
            let sum = self.sums[k];
            self.push(Instr::Wait(sum));
            let Some(own) = &self.own_gradients else { continue };
            let (rank, before) = (self.role.rank, self.role.own()[..k].iter().map(Range::len).sum::<usize>());
            let mine = self.cuts[k][rank]..self.cuts[k][rank + 1];
            if !mine.is_empty() {
                let into = own.part(before..before + mine.len());
                let from = self.program.exchanges[sum].of.part(mine);
                self.push(add_or_copy(from, into, self.continues));
            }
        }
        self.n_taken = self.n_taken.max(end);
    }

    /// The gradients of this rank's shards, each with the offset of its moments.
    pub(crate) fn own_regions(&self) -> Vec<(Range<usize>, Region, usize)> {
        let mut moments_at = 0;
        let region = |range: &Range<usize>| {
            let at = moments_at;
            moments_at += range.len();
            let grads = match &self.own_gradients {
                Some(own) => own.part(at..moments_at),
                None => Region::Grads(range.clone()),
            };
            (range.clone(), grads, at)
        };
        self.role.own().iter().map(region).collect()
    }

    /// The gradients, of a range of parameters and where they lie, whose squares this rank adds to the norm: what several ranks
    /// along other axes than data have is counted by one of them.
    pub(crate) fn counted_here(&self, params: &Range<usize>, grads: &Region) -> Vec<Region> {
        let mut counted = Vec::new();
        let mut at = params.start;
        let overlapping =
            self.counted_elsewhere.iter().filter(|r| r.start < params.end && params.start < r.end);
        for other in overlapping {
            counted.push(at..other.start.max(at));
            at = other.end;
        }
        counted.push(at..params.end.max(at));
        let region = |r: Range<usize>| grads.part(r.start - params.start..r.end - params.start);
        counted.into_iter().filter(|r| !r.is_empty()).map(region).collect()
    }

    /// The updates of a range of parameters, whose gradients and moments lie there: one for each run that is learnt alike.
    fn updates_of(&self, (params, grads, moments_at): (Range<usize>, Region, usize)) -> Vec<Instr> {
        let update = |(part, learning): (Range<usize>, Learning)| {
            let inside = part.start - params.start..part.end - params.start;
            let moments_at = moments_at + inside.start;
            Instr::Update { params: part, grads: grads.part(inside), moments_at, sums: None, learning }
        };
        learnt_alike(self.program.graph(), &params).into_iter().map(update).collect()
    }

    pub(crate) fn updates(&mut self, training: &Training, bodies: &[Arc<Body>]) {
        if self.served.is_some() {
            return self.serve_updates(training);
        }
        let own = self.own_regions();
        let whole = !training.optimizer.by_element() || self.role.ranks == 1;
        let n_sums = self.sums.len();
        // The norm is that of all gradients, shared weights are still read by others, and beside shards there are few others.
        let shared = self.role.shares_weights() || self.role.shards_weights();
        let together = training.max_norm().is_some() || shared || whole || self.sums_first;
        if together {
            self.wait_until(n_sums);
        }
        if let (Some(max_norm), None) = (training.max_norm(), self.role.shards) {
            let squares = self.common_buffer("squares", DType::F64, 1);
            self.push(Instr::Zero(squares.clone()));
            for of in own.iter().flat_map(|(params, of, _)| self.counted_here(params, of)).collect::<Vec<_>>()
            {
                self.push(Instr::Squares { of, into: squares.clone(), block: None });
            }
            let axes = self.split_axes.iter().copied();
            for axis in self.role.sharded().then_some(Axis::Data).into_iter().chain(axes).collect::<Vec<_>>()
            {
                self.program.exchange_now(Collective::AllReduce, axis, squares.clone());
            }
            self.push(Instr::Clip { squares, max_norm });
        }
        // Those of each bucket, if ranks keep parts of it.
        let updates: Vec<Vec<Instr>> = match whole {
            true => vec![measured(self, training.optimizer, bodies[0].whole_updates())],
            false => own.into_iter().map(|own| self.updates_of(own)).collect(),
        };
        let mut gathers = Vec::new();
        for (k, updates) in updates.into_iter().enumerate() {
            self.wait_until((k + 1).min(n_sums));
            self.program.instrs.extend(updates);
            if self.role.sharded() && !self.role.shares_weights() {
                let of = Region::Params(self.buckets[0][k].range.clone());
                let gather =
                    self.program.exchange(Collective::AllGather(self.cuts[k].clone()), Axis::Data, of);
                self.push(Instr::Start(gather));
                gathers.push(gather);
            }
        }
        if self.role.shares_weights() {
            let meet = self.program.exchange(Collective::Meet, Axis::Data, Region::Params(0..0));
            self.push(Instr::Start(meet));
            gathers.push(meet);
        }
        self.program.instrs.extend(gathers.into_iter().map(Instr::Wait));
        let follows = self.role.rank == 0 || self.role.shards_weights();
        if let Some(decay) = training.ema.filter(|_| follows) {
            self.push(Instr::Follow { decay });
        }
    }
}

/// `into += from`, or a copy for the first addition.
pub(crate) fn add_or_copy(from: Region, into: Region, add: bool) -> Instr {
    if add { Instr::Add { from, into } } else { Instr::Copy { from, into } }
}

#[cfg(test)]
mod tests;
