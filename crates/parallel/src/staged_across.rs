//! The schedule of several steps of a pipeline without a flush between them (2BW): one program for a run of `n` steps, from an
//! empty pipeline to an empty pipeline.
//!
//! ```text
//!  older weights = params
//!  first forwards of step 0                        with the older weights
//!  ── list 0: the other passes of step 0           with the older weights
//!     first forwards of step 1                     with the newest
//!     keep gradients of step 0; start their exchanges, and that of its loss
//!     older weights = params
//!  ── list 1: the other passes of step 1           with the older weights
//!     wait for step 0's exchanges, judge, update   before the first pass that needs the result
//!     first forwards of step 2                     with the newest weights
//!  ...
//!  wait, judge, update with step n - 1
//! ```
//!
//! Stages are not at the same place of their lists: one that waited for all others at the end of each step would empty the
//! pipeline. So what a step exchanges over stages (its loss, and the gradients of tied parameters) is started at the end of its list, and
//! waited for in the next list, before the first forward pass that reads the new weights. By then every other stage has
//! ended the list: it has run passes that this stage's depend on. The gradients wait meanwhile in a buffer, since passes of the next
//! step write the arena.
//!
//! # What it costs
//! - Staleness: the gradient of step `t` is taken at the weights of step `t - 1`, `W[t+1] = W[t] - update(gradient at W[t-1])`. Only
//!   the first step of a run has the newest. A run of one step is a step of 1F1B.
//! - Memory: a stage's weights once more, and its gradients once more.
//! - Time: copies of both per step; a flush per run instead of per step.
//! - A loss that is not finite is an error at the end of the run, when stages do not wait for each other any more; updates have been made
//!   meanwhile.
//!
//! Norms of all gradients and scaled losses would have to be known before each update on all stages at the same place, which
//! is a flush; they are refused, as are several data ranks (not done yet) and logical shards (whose bits must not depend on stages).
//!
//! If a peer dies, the exchange that waits for it ends with a report; updates of earlier steps of the run have been made.

use std::ops::Range;

use polyreme_graph::memory::param_ranges;
use polyreme_graph::{Axis, Collective, DType, Instr, Region, Tied};

use crate::pipeline::{AcrossSteps, Action};
use crate::plan::Training;
use crate::schedule::Lowering;
use crate::split_tensors::measured;
use crate::staged::{TOTALS_TAG, passes, tied_tag};

/// A run of as many steps as the program has microbatches for.
pub(crate) fn run(lowering: &mut Lowering, lists: &AcrossSteps, stage: usize, training: &Training) {
    let n_steps = lowering.program.microbatches.len() / lists.microbatches;
    let len = lowering.grad_len();
    let mut buffer = |name: &str, dtype, len| lowering.program.buffer(name, dtype, len);
    let steps = Across {
        older: buffer("older weights", DType::F32, len),
        grads: buffer("gradients of a step", DType::F32, len),
        totals: [buffer("totals 0", DType::F64, 4), buffer("totals 1", DType::F64, 4)],
        per_step: lists.microbatches,
        ahead: lists.stages - 1 - stage,
        n_actions: lists.run(n_steps).by_stage[stage].len(),
        n_steps,
        stages: lists.stages,
        stage,
        training: *training,
        ended: 0,
        updated: 0,
        reads_older: false,
        arriving: Vec::new(),
        tied_arriving: Vec::new(),
        sending: Vec::new(),
    };
    lowering.push(Instr::Copy { from: Region::Params(0..len), into: steps.older.clone() });
    lowering.push(Instr::Begin(steps.totals[0].clone()));
    let totals = steps.totals[0].clone();
    passes(lowering, &lists.run(n_steps), stage, &totals, None, Some(steps));
    lowering.push(Instr::ReadParams(Region::Params(0..len)));
}

/// What several steps need between the passes of a stage.
pub(crate) struct Across {
    /// The weights that passes of the list's own step read.
    older: Region,
    /// The gradients of the step that ended last.
    grads: Region,
    /// By parity of the step.
    totals: [Region; 2],
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
    reads_older: bool,
    /// Totals that are on their way to this stage.
    arriving: Vec<usize>,
    /// Tied gradients that are: the exchange, and where they arrive, and which of the gradients they are.
    tied_arriving: Vec<(usize, Region, Range<usize>)>,
    /// What is on its way out of the buffers of the step that ended last.
    sending: Vec<usize>,
}

impl Across {
    /// Where the loss of a microbatch is counted.
    pub(crate) fn loss_of(&self, microbatch: usize) -> Region {
        self.totals[microbatch / self.per_step % 2].part(0..2)
    }

    /// The weights that an action reads: those of the list's own step are the older ones.
    pub(crate) fn read_for(&mut self, lowering: &mut Lowering, action: &Action) {
        let older = action.microbatch / self.per_step == self.ended;
        if older != self.reads_older {
            let len = lowering.grad_len();
            let from = if older { self.older.clone() } else { Region::Params(0..len) };
            lowering.push(Instr::ReadParams(from));
            self.reads_older = older;
        }
    }

    /// What is done before the action with this number.
    pub(crate) fn at(&mut self, lowering: &mut Lowering, place: usize) {
        self.update_at(lowering, place);
        if place == self.end_of(self.ended) && self.ended < self.n_steps {
            self.end_list(lowering);
            self.update_at(lowering, place);
        }
        if place == self.n_actions {
            lowering.program.instrs.extend(self.sending.drain(..).map(Instr::Wait));
        }
    }

    /// The place behind the list of a step.
    fn end_of(&self, step: usize) -> usize {
        (self.ahead + 2 * self.per_step * (step + 1)).min(self.n_actions)
    }

    /// The place of a step's update: in the next list, before its first forward of the step after, or at its end.
    fn place_of_update(&self, step: usize) -> usize {
        match step + 2 < self.n_steps && self.ahead > 0 {
            true => self.end_of(step) + 2 * (self.per_step - self.ahead),
            false => self.end_of(step + 1),
        }
    }

    fn update_at(&mut self, lowering: &mut Lowering, place: usize) {
        if self.updated < self.ended && place >= self.place_of_update(self.updated) {
            self.update(lowering);
        }
    }

    /// Keeps the gradients of a step whose passes are done, and starts what stages exchange of it.
    fn end_list(&mut self, lowering: &mut Lowering) {
        let (step, len) = (self.ended, lowering.grad_len());
        // What was sent of the step before is still in these buffers.
        lowering.program.instrs.extend(self.sending.drain(..).map(Instr::Wait));
        lowering.push(Instr::Copy { from: Region::Grads(0..len), into: self.grads.clone() });
        let last = self.stages - 1;
        let totals = self.totals[step % 2].clone();
        if self.stage == last {
            for to in 0..last {
                let send = start(lowering, Collective::Send { to, tag: TOTALS_TAG }, &totals);
                self.sending.push(send);
            }
        } else {
            let op = Collective::Receive { from: last, tag: TOTALS_TAG };
            self.arriving.push(start(lowering, op, &totals));
        }
        let body = lowering.program.bodies[0].clone();
        for tied in &body.tied {
            self.start_tied(lowering, tied);
        }
        self.ended += 1;
        if self.ended < self.n_steps {
            lowering.push(Instr::Copy { from: Region::Params(0..len), into: self.older.clone() });
            lowering.push(Instr::Begin(self.totals[self.ended % 2].clone()));
        }
    }

    /// Contributions to a tied parameter go to the first stage that has it, and come back as their sum.
    fn start_tied(&mut self, lowering: &mut Lowering, tied: &Tied) {
        let (range, tag, first) = (range_of(lowering, tied), tied_tag(tied), tied.stages[0]);
        let own = self.grads.part(range.clone());
        let from: Vec<usize> = match self.stage == first {
            true => tied.stages[1..].iter().rev().copied().collect(),
            false => {
                self.sending.push(start(lowering, Collective::Send { to: first, tag }, &own));
                vec![first]
            }
        };
        for from in from {
            let name = format!("tied gradient {tag} of stage {from}");
            // One buffer for all steps.
            let known = lowering.program.buffers.iter().position(|b| b.name == name);
            let into = match known {
                Some(buffer) => Region::Buffer(buffer, 0..range.len()),
                None => lowering.program.buffer(name, DType::F32, range.len()),
            };
            let exchange = start(lowering, Collective::Receive { from, tag }, &into);
            self.tied_arriving.push((exchange, into, range.clone()));
        }
    }

    /// Waits for what stages exchange of a step, and updates the weights with it.
    fn update(&mut self, lowering: &mut Lowering) {
        let body = lowering.program.bodies[0].clone();
        lowering.program.instrs.extend(self.arriving.drain(..).map(Instr::Wait));
        let mut sums = Vec::new();
        for (exchange, from, range) in self.tied_arriving.drain(..) {
            let into = self.grads.part(range.clone());
            lowering.push(Instr::Wait(exchange));
            let tied = body.tied.iter().find(|t| range_of(lowering, t) == range).expect("a tied parameter");
            if tied.stages[0] == self.stage {
                lowering.push(Instr::Add { from, into });
                sums.push(tied.clone());
            } else {
                // This stage's contribution has arrived: the sum contains it. Its send is over, and is waited for here.
                lowering.program.instrs.extend(self.sending.drain(..).map(Instr::Wait));
                lowering.push(Instr::Copy { from, into });
            }
        }
        sums.dedup();
        for tied in sums {
            let sum = self.grads.part(range_of(lowering, &tied));
            for &to in &tied.stages[1..] {
                self.sending.push(start(lowering, Collective::Send { to, tag: tied_tag(&tied) }, &sum));
            }
        }
        lowering.push(Instr::Judge(self.totals[self.updated % 2].clone()));
        let mut updates = body.whole_updates();
        for update in &mut updates {
            let Instr::Update { params, grads, .. } = update else { continue };
            *grads = self.grads.part(params.clone());
        }
        let updates = measured(lowering, self.training.optimizer, updates);
        lowering.program.instrs.extend(updates);
        if let Some(decay) = self.training.ema {
            lowering.push(Instr::Follow { decay });
        }
        self.updated += 1;
        if self.updated < self.n_steps {
            lowering.push(Instr::NextStep);
        }
    }
}

/// The gradient of a tied parameter.
fn range_of(lowering: &Lowering, tied: &Tied) -> Range<usize> {
    let found = param_ranges(lowering.program.graph()).into_iter().find(|(p, _)| *p == tied.param);
    found.expect("every parameter has a place").1
}

fn start(lowering: &mut Lowering, op: Collective, of: &Region) -> usize {
    let exchange = lowering.program.exchange(op, Axis::Stage, of.clone());
    lowering.push(Instr::Start(exchange));
    exchange
}
