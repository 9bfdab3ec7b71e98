//! The schedule of several steps of a pipeline without a flush between them (2BW): one program for a run of `n` steps, from an
//! empty pipeline to an empty pipeline.
//!
//! ```text
//!  older weights = params
//!  first forwards of step 0                        with the older weights
//!  ── list 0: the other passes of step 0           with the older weights
//!     first forwards of step 1                     with the newest
//!     kept:    gradients of step 0; start their sum over the data axis, and the messages with its loss
//!     older weights = params
//!  ── list 1: the other passes of step 1           with the older weights
//!     summed:  wait for that sum, start to exchange tied gradients
//!     whole:   wait for these, take the squares of the gradients, start to exchange them
//!     updated: wait for the squares and the loss, judge, clip, update
//!     first forwards of step 2                     with the newest weights
//!  ...
//!  the same for step n - 1, with nothing to hide it behind
//! ```
//!
//! Stages are not at the same place of their lists: one that waited for all others at the end of each step would empty the
//! pipeline. So what a step exchanges is started at one *station* and waited for at the next, with passes of the next step in between. What
//! stages exchange are messages: a collective over stages would hold up the activations behind it. The gradients wait in a
//! buffer, since passes of the next step write the arena.
//!
//! # Where stations are
//! A list has `m` turns of a forward and a backward pass. Stage `s`, which is `a = p - 1 - s` forwards ahead, needs the update before
//! turn `m - a`, where the forwards of the step after the next begin. Exchanges start at turn 0, in the middle, and at three quarters
//! of that; a station that has nothing to wait for is where the one before it is. A stage that waits at turn `c` of its list for what
//! stage `s'` starts at turn `b` of its own lets that one come so far if `b <= c`, or for a later stage `b <= c + (s' - s)`: with these
//! places that is so, and no circle of stages waits (`staged_across/tests.rs` tries them all). The first stage ends its list last and has
//! the least time, `m - (p - 1)` turns: with `m = p - 1` it waits for everything at once.
//!
//! # What it costs
//! - Staleness: the gradient of step `t` is taken at the weights of step `t - 1`, `W[t+1] = W[t] - update(gradient at W[t-1])`. Only
//!   the first step of a run has the newest.
//! - Memory: a stage's weights once more, and its gradients once more.
//! - Time: copies of both per step; a flush per run instead of per step.
//! - Messages: per step 32 bytes from the last stage to each other one; with clipping 8 bytes from each stage to each other; tied gradients
//!   from each stage that has them to each other.
//! - A loss that is not finite is an error at the end of the run, when stages do not wait for each other any more. From its step on
//!   nothing is updated: all stages judge a step before they update with it.
//!
//! The caller's numbers are added up over all ranks in the last step of a run, where all meet; those of other steps are the last stage's.
//!
//! Refused: scaled losses, whose scale would have to be known before the forward passes of each step; logical shards, whose bits must not
//! depend on stages; optimizer state or weights that ranks of the data axis share out, since each update would wait for all of them.
//!
//! If a peer dies, the exchange that waits for it ends with a report; updates of earlier steps of the run have been made.

use std::ops::Range;

use polyreme_graph::memory::param_ranges;
use polyreme_graph::{Axis, Collective, DType, Instr, Region, Tied, totals};

use crate::pipeline::{Action, across_steps};
use crate::plan::{Plan, Training};
use crate::schedule::Lowering;
use crate::split_tensors::measured;
use crate::staged::{SQUARES_TAG, TOTALS_TAG, passes, tied_tag};

/// A run of `n_steps` steps, over which the program's microbatches are spread.
///
/// # Panics
/// If a step has too few microbatches for the stages.
pub(crate) fn run(lowering: &mut Lowering, plan: &Plan, n_steps: usize, training: &Training) {
    let (stages, stage) = (plan.mesh.stage, plan.mesh.place(plan.rank, Axis::Stage));
    let per_step = lowering.program.microbatches.len() / n_steps;
    let lists = across_steps(stages, per_step).expect("a step with enough microbatches");
    let timetable = lists.run(n_steps);
    let (len, param_len) = (lowering.grad_len(), lowering.param_len());
    let mut buffer = |name: &str, dtype, len| lowering.program.buffer(name, dtype, len);
    let steps = Across {
        older: buffer("older weights", DType::F32, param_len),
        grads: buffer("gradients of a step", DType::F32, len),
        totals: ["totals 0", "totals 1"].map(|name| buffer(name, DType::F64, totals::len(1))),
        squares: training.clip.map(|_| buffer("squares by stage", DType::F64, stages)),
        per_step,
        ahead: stages - 1 - stage,
        n_actions: timetable.by_stage[stage].len(),
        n_steps,
        stages,
        stage,
        training: *training,
        ended: 0,
        updated: 0,
        station: Station::Kept,
        reads_older: false,
        summing: None,
        totals_arriving: None,
        squares_arriving: Vec::new(),
        tied_exchanges: Vec::new(),
        sending: Vec::new(),
    };
    let totals = steps.totals[0].clone();
    lowering.push(Instr::Copy { from: Region::Params(0..param_len), into: steps.older.clone() });
    lowering.push(Instr::Begin(totals.clone()));
    passes(lowering, &timetable, stage, &totals, None, Some(steps));
    lowering.push(Instr::ReadParams(Region::Params(0..param_len)));
}

/// How far a step has come whose passes are done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Station {
    /// Its gradients are in their buffer.
    Kept,
    /// They are summed over the data axis.
    Summed,
    /// Those of tied parameters are summed over the stages.
    Whole,
    /// The weights are updated.
    Updated,
}

/// What several steps need between the passes of a stage.
pub(crate) struct Across {
    /// The weights that passes of the list's own step read.
    older: Region,
    /// The gradients of the step that ended last.
    grads: Region,
    /// By parity of the step.
    totals: [Region; 2],
    /// By stage: the sum of the squares of its gradients, if they are clipped.
    squares: Option<Region>,
    pub(crate) per_step: usize,
    /// How many forwards of the next step a list ends with.
    ahead: usize,
    n_actions: usize,
    n_steps: usize,
    stages: usize,
    stage: usize,
    training: Training,
    /// How many lists have ended, and how many steps have updated the weights.
    ended: usize,
    updated: usize,
    /// Where the step is that has ended and not updated.
    station: Station,
    reads_older: bool,
    /// The sum of gradients over the data axis that is under way.
    summing: Option<usize>,
    /// Totals that are on their way to this stage.
    totals_arriving: Option<usize>,
    /// Squares that are.
    squares_arriving: Vec<usize>,
    /// Tied gradients that are on their way, to this stage and from it.
    tied_exchanges: Vec<usize>,
    /// What is on its way out of the buffers of the step that ended last.
    sending: Vec<usize>,
}

impl Across {
    /// Where a microbatch is counted.
    pub(crate) fn totals_of(&self, microbatch: usize) -> &Region {
        &self.totals[microbatch / self.per_step % 2]
    }

    /// The weights that an action reads: those of the list's own step are the older ones.
    pub(crate) fn read_for(&mut self, lowering: &mut Lowering, action: &Action) {
        let older = action.microbatch / self.per_step == self.ended;
        if older != self.reads_older {
            let len = lowering.param_len();
            let from = if older { self.older.clone() } else { Region::Params(0..len) };
            lowering.push(Instr::ReadParams(from));
            self.reads_older = older;
        }
    }

    /// What is done before the action with this number.
    pub(crate) fn at(&mut self, lowering: &mut Lowering, place: usize) {
        self.advance(lowering, place);
        if place == self.end_of(self.ended) && self.ended < self.n_steps {
            self.end_list(lowering);
            self.advance(lowering, place);
        }
        if place == self.n_actions {
            self.sent(lowering);
        }
    }

    /// The place behind the list of a step.
    fn end_of(&self, step: usize) -> usize {
        (self.ahead + 2 * self.per_step * (step + 1)).min(self.n_actions)
    }

    /// The place in the next list where a step comes to a station. The last two updates of a run come behind its last pass.
    fn place_of(&self, lowering: &Lowering, step: usize, station: Station) -> usize {
        let turns = self.per_step - self.ahead;
        let summed = if lowering.role.ranks > 1 { turns / 2 } else { 0 };
        let turn = match station {
            Station::Kept => 0,
            Station::Summed => summed,
            Station::Whole if lowering.program.bodies[0].tied.is_empty() => summed,
            Station::Whole => turns * 3 / 4,
            Station::Updated if step + 2 >= self.n_steps => return self.n_actions,
            Station::Updated => turns,
        };
        (self.end_of(step) + 2 * turn).min(self.n_actions)
    }

    /// Brings the step that ended last to the stations that are due.
    fn advance(&mut self, lowering: &mut Lowering, place: usize) {
        let step = self.updated;
        if step == self.ended {
            return;
        }
        let due = |across: &Across, lowering: &Lowering, station: Station| {
            across.station < station && across.place_of(lowering, step, station) <= place
        };
        if due(self, lowering, Station::Summed) {
            self.sum(lowering);
        }
        if due(self, lowering, Station::Whole) {
            self.complete(lowering);
        }
        if due(self, lowering, Station::Updated) {
            self.update(lowering);
        }
    }

    /// Waits for what is on its way out of the buffers of a step.
    fn sent(&mut self, lowering: &mut Lowering) {
        lowering.program.instrs.extend(self.sending.drain(..).map(Instr::Wait));
    }

    /// Keeps the gradients of a step whose passes are done, and starts their sum and the messages with its loss.
    fn end_list(&mut self, lowering: &mut Lowering) {
        let (step, len) = (self.ended, lowering.grad_len());
        self.sent(lowering);
        lowering.push(Instr::Copy { from: Region::Grads(0..len), into: self.grads.clone() });
        if lowering.role.ranks > 1 {
            self.summing = Some(start(lowering, Collective::AllReduce, Axis::Data, &self.grads));
        }
        self.ended += 1;
        self.station = Station::Kept;
        if self.ended < self.n_steps {
            self.start_totals(lowering, &self.totals[step % 2].clone());
            let all = Region::Params(0..lowering.param_len());
            lowering.push(Instr::Copy { from: all, into: self.older.clone() });
            lowering.push(Instr::Begin(self.totals[self.ended % 2].clone()));
        }
    }

    /// The loss is known to the last stage, which tells the others. Behind the last step all meet instead.
    fn start_totals(&mut self, lowering: &mut Lowering, totals: &Region) {
        let last = self.stages - 1;
        if self.stage < last {
            self.totals_arriving = Some(receive(lowering, last, TOTALS_TAG, totals));
            return;
        }
        for to in 0..last {
            self.sending.push(send(lowering, to, TOTALS_TAG, totals));
        }
    }

    /// Waits for the sums over the data axis, and starts to exchange tied gradients: each stage that has one sends its contribution
    /// to the others, and all add them up.
    fn sum(&mut self, lowering: &mut Lowering) {
        lowering.program.instrs.extend(self.summing.take().map(Instr::Wait));
        if lowering.role.ranks > 1 && self.updated + 1 < self.n_steps {
            self.totals_arrived(lowering);
            let totals = self.totals[self.updated % 2].clone();
            lowering.program.exchange_now(Collective::AllReduce, Axis::Data, totals);
        }
        let body = lowering.program.bodies[0].clone();
        for tied in &body.tied {
            let own = self.grads.part(range_of(lowering, tied));
            for other in tied.stages.iter().copied().filter(|stage| *stage != self.stage) {
                let into = contribution(lowering, tied, other);
                self.tied_exchanges.push(send(lowering, other, tied_tag(tied), &own));
                self.tied_exchanges.push(receive(lowering, other, tied_tag(tied), &into));
            }
        }
        self.station = Station::Summed;
    }

    /// Adds up tied gradients, and starts to exchange the squares of all of them.
    fn complete(&mut self, lowering: &mut Lowering) {
        let body = lowering.program.bodies[0].clone();
        lowering.program.instrs.extend(self.tied_exchanges.drain(..).map(Instr::Wait));
        for tied in &body.tied {
            self.add_up(lowering, tied);
        }
        if let Some(squares) = self.squares.clone() {
            let own = squares.part(self.stage..self.stage + 1);
            lowering.push(Instr::Zero(own.clone()));
            for (params, grads) in self.whole_updates(lowering).iter().filter_map(updated) {
                for of in lowering.counted_here(params, grads) {
                    lowering.push(Instr::Squares { of, into: own.clone(), block: None });
                }
            }
            for axis in lowering.split_axes.clone().into_iter().filter(|axis| *axis != Axis::Stage) {
                lowering.program.exchange_now(Collective::AllReduce, axis, own.clone());
            }
            for other in (0..self.stages).filter(|stage| *stage != self.stage) {
                let into = squares.part(other..other + 1);
                self.sending.push(send(lowering, other, SQUARES_TAG, &own));
                self.squares_arriving.push(receive(lowering, other, SQUARES_TAG, &into));
            }
        }
        self.station = Station::Whole;
    }

    /// The sum of all contributions to a tied parameter, from the last stage to the first as a lone rank would: the same bits on all of
    /// these stages.
    fn add_up(&self, lowering: &mut Lowering, tied: &Tied) {
        let own = self.grads.part(range_of(lowering, tied));
        let mut sum: Option<Region> = None;
        for &stage in tied.stages.iter().rev() {
            let into = if stage == self.stage { own.clone() } else { contribution(lowering, tied, stage) };
            if let Some(from) = sum.replace(into.clone()) {
                lowering.push(Instr::Add { from, into });
            }
        }
        if let Some(from) = sum.filter(|sum| *sum != own) {
            lowering.push(Instr::Copy { from, into: own });
        }
    }

    /// Waits for the rest of what stages exchange of a step, and updates the weights with it.
    fn update(&mut self, lowering: &mut Lowering) {
        let totals = self.totals[self.updated % 2].clone();
        match self.updated + 1 == self.n_steps {
            true => self.meet(lowering, &totals),
            false => self.totals_arrived(lowering),
        }
        lowering.push(Instr::Judge(totals));
        lowering.program.instrs.extend(self.squares_arriving.drain(..).map(Instr::Wait));
        if let (Some(squares), Some(max_norm)) = (self.squares.clone(), self.training.clip) {
            lowering.push(Instr::Clip { squares, max_norm });
        }
        let updates = measured(lowering, self.training.optimizer, self.whole_updates(lowering));
        lowering.program.instrs.extend(updates);
        if let Some(decay) = self.training.ema.filter(|_| lowering.role.rank == 0) {
            lowering.push(Instr::Follow { decay });
        }
        self.updated += 1;
        self.station = Station::Updated;
        if self.updated < self.n_steps {
            lowering.push(Instr::NextStep);
        }
    }

    fn totals_arrived(&mut self, lowering: &mut Lowering) {
        lowering.program.instrs.extend(self.totals_arriving.take().map(Instr::Wait));
    }

    /// The totals of the last step, with the caller's numbers as they are by now, over all ranks.
    fn meet(&self, lowering: &mut Lowering, totals: &Region) {
        let given = totals.part(totals::given(totals::len(1)));
        lowering.push(Instr::Begin(given.clone()));
        for axis in lowering.alike_axes.clone() {
            lowering.program.exchange_now(Collective::AllReduce, axis, given.clone());
        }
        if lowering.role.ranks > 1 {
            lowering.program.exchange_now(Collective::AllReduce, Axis::Data, totals.clone());
        }
        lowering.program.exchange_now(Collective::AllReduce, Axis::Stage, totals.clone());
    }

    /// All updates of a step, with gradients where a step keeps them.
    fn whole_updates(&self, lowering: &Lowering) -> Vec<Instr> {
        let mut updates = lowering.program.bodies[0].whole_updates();
        for update in &mut updates {
            if let Instr::Update { params, grads, .. } = update {
                *grads = self.grads.part(params.clone());
            }
        }
        updates
    }
}

/// The parameters of an update and their gradients.
fn updated(update: &Instr) -> Option<(&Range<usize>, &Region)> {
    if let Instr::Update { params, grads, .. } = update { Some((params, grads)) } else { None }
}

/// The gradient of a tied parameter.
fn range_of(lowering: &Lowering, tied: &Tied) -> Range<usize> {
    let found = param_ranges(lowering.program.graph()).into_iter().find(|(p, _)| *p == tied.param);
    found.expect("every parameter has a place").1
}

/// Where the contribution of another stage to a tied gradient arrives, in all steps.
fn contribution(lowering: &mut Lowering, tied: &Tied, stage: usize) -> Region {
    let len = range_of(lowering, tied).len();
    let name = format!("tied gradient {} of stage {stage}", tied_tag(tied));
    match lowering.program.buffers.iter().position(|b| b.name == name) {
        Some(buffer) => Region::Buffer(buffer, 0..len),
        None => lowering.program.buffer(name, DType::F32, len),
    }
}

fn send(lowering: &mut Lowering, to: usize, tag: u16, of: &Region) -> usize {
    start(lowering, Collective::Send { to, tag }, Axis::Stage, of)
}

fn receive(lowering: &mut Lowering, from: usize, tag: u16, into: &Region) -> usize {
    start(lowering, Collective::Receive { from, tag }, Axis::Stage, into)
}

fn start(lowering: &mut Lowering, op: Collective, axis: Axis, of: &Region) -> usize {
    let exchange = lowering.program.exchange(op, axis, of.clone());
    lowering.push(Instr::Start(exchange));
    exchange
}

#[cfg(test)]
mod tests;
