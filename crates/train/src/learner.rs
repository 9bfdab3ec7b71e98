//! The engine of one rank's training: a program for each kind of step, all over the same weights, and one for evaluations.
//!
//! Every rank has its own. What is collective says so: all ranks call it at the same time.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use polyreme_collective::{Comm, Reduce};
use polyreme_data::{Spec, Tally, Values};
use polyreme_dtype::DType;
use polyreme_exec::{
    Comms, Counted, Engine, ExecError, Feed, Inputs, Isa, Kept, LearntState, NonFinite, Options, Slot,
    StepArgs, Totals,
};
use polyreme_graph::{Axis, Body, Keeps};
use polyreme_parallel::{Plan, Training, average_states, share_own, states_of_workers, take_back_own};

use crate::checkpoint::{TensorShape, tensors};
use crate::error::TrainError;
use crate::evaluate::n_counted;
use crate::fed::Fed;
use crate::job;
use crate::judge::{Judge, Trial, shorter};
use crate::loss::Loss;
use crate::lower::{Lowering, training_graph};
use crate::mixup;
use crate::net::Net;
use crate::pace::{MicrobatchRange, RankShare, StepKind};
use crate::run::apart::Apart;
use crate::talk;
use crate::whole::WholeModel;

/// How engines are made.
#[derive(Clone, Debug)]
pub struct LearnerOptions {
    /// Threads of each rank.
    pub threads: usize,
    /// Whether what is learnt comes from other ranks, or from this one as a rank of another group; then nothing is initialised.
    pub inherits: bool,
    /// The instructions that kernels may use.
    pub isa: Isa,
    /// From which weights and masks follow.
    pub seed: u64,
    /// What a step does with gradients.
    pub training: Training,
    /// The loss.
    pub loss: Loss,
    /// Weights of the classes, if the loss has them.
    pub class_weights: Vec<f32>,
    /// What the training of one rank may take.
    pub memory_bytes: Option<usize>,
    /// How a step is split, but for what follows from the group of ranks: this rank, and who holds the weights.
    pub plan: Plan,
    /// What a rank keeps of gradients and optimizer state. `None`: the optimizer state of its own part where ranks share memory,
    /// and hold the weights together, otherwise everything. Over a network parts cost overlap: updated parameters are sent
    /// when there is nothing left to compute.
    pub keeps: Option<Keeps>,
}

impl LearnerOptions {
    /// How the programs of a rank are made. `shares_memory` says whether the ranks of the data axis can hold the weights
    /// together.
    pub fn lowering(&self, rank: usize, shares_memory: bool) -> Lowering {
        let plan = Plan { rank, ..self.plan.clone() }.kept(self.keeps, shares_memory);
        let (budget_bytes, threads) = (self.memory_bytes, self.threads);
        Lowering { training: self.training, plan, budget_bytes, threads, isa: self.isa }
    }
}

/// The engine of one rank.
pub struct Learner {
    options: LearnerOptions,
    lowering: Lowering,
    net: Net,
    spec: Spec,
    input: &'static str,
    engine: Engine,
    bodies: Bodies,
    /// The kinds of steps that there are programs for, and their numbers.
    programs: Vec<(OwnedKind, usize)>,
    /// Reproducible: which logical shards each rank has.
    runs: Option<Vec<Range<usize>>>,
    /// The program that averages states over the ranks, if they have their own.
    averaging: Option<usize>,
    /// What each rank keeps of the parameters for itself, if it keeps any.
    own: Option<OwnParams>,
    /// The program that tells ranks which only serve what the states of the others have become, if there are such ranks.
    telling: Option<usize>,
    trial: Option<Trial>,
    /// What of its inputs the rank is fed.
    fed: Fed,
    /// The tensors of the whole model, whichever rank has them.
    whole: WholeModel,
    /// Who has what of them, if several ranks have the model together and this is one of those that write it.
    apart: Option<Apart>,
}

/// Parameters that each rank keeps for itself.
#[derive(Clone, Copy)]
struct OwnParams {
    /// The program that puts their mean in their place, and the one that takes them back.
    programs: [usize; 2],
    /// Whether all ranks have the same in their place now: their mean, or what a file has.
    common: bool,
}

/// Bodies by their number of samples, and the length that texts are filled up to.
type Bodies = Vec<((usize, Option<usize>), Arc<Body>)>;

/// A [`StepKind`], with its microbatches, rounds, steps and length, and whether gradients travel in the format of the plan.
type OwnedKind = (Vec<MicrobatchRange>, usize, usize, Option<usize>, bool);

fn owned(kind: StepKind, coded: bool) -> OwnedKind {
    (kind.microbatches.to_vec(), kind.rounds, kind.steps, kind.time, coded)
}

/// What a finished step came to, over all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepResult {
    /// The mean loss of its samples.
    pub loss: f64,
    /// The gradients' norm, if they are clipped.
    pub grad_norm: Option<f64>,
    /// The caller's numbers, added up over the ranks; of several steps without a flush, those of the last.
    pub extra: [f64; 2],
    /// The samples that it counted.
    pub samples: Tally,
    /// How long this rank waited for others, since the last flush.
    pub waited: Duration,
    /// Whether nothing was updated, because a scaled loss or its gradients are not finite.
    pub skipped: bool,
}

/// What goes through an engine at once.
#[derive(Clone, Copy, Debug)]
pub struct MicrobatchData<'a> {
    /// Features, sample by sample.
    pub x: Values<'a>,
    /// Labels: classes or ids as i32, numbers as f32.
    pub labels: Values<'a>,
    /// The share of each sample in its mixture; 1 without mixup.
    pub mix: f32,
    /// Which samples they are.
    pub samples: Tally,
}

/// One rank's part of a step, or of several without a flush between them.
#[derive(Clone, Copy)]
pub struct RankStep<'a> {
    /// How many labels of each step count, over all ranks; steps are counted from 0.
    pub labels: &'a dyn Fn(usize) -> usize,
    /// What this rank has of it, and how many steps there are.
    pub kind: StepKind<'a>,
    /// The learning rate of each step, counted from 0.
    pub lr: &'a dyn Fn(usize) -> f32,
    /// What the loss is multiplied by before it is differentiated.
    pub loss_scale: f32,
    /// The caller's numbers, to be added up over the ranks; asked for as late as can be.
    pub extra: &'a dyn Fn() -> [f64; 2],
}

impl RankStep<'_> {
    /// The arguments of one of the steps.
    fn args(&self, step: usize) -> StepArgs {
        StepArgs { lr: (self.lr)(step), loss_scale: self.loss_scale, extra: (self.extra)() }
    }
}

/// Takes a batch for a microbatch.
pub type Take<'a> = dyn FnMut(MicrobatchData) -> Result<(), TrainError> + 'a;

/// Finds the batch of a microbatch of one of the steps, counted from 0, and hands it over.
pub type Load<'a> = dyn FnMut(usize, MicrobatchRange, &mut Take) -> Result<(), TrainError> + 'a;

impl Learner {
    /// Compiles and reserves everything for one rank's training. Collective; the weights are those of rank 0. In reproducible
    /// mode each rank has such a run of logical shards.
    pub fn new(
        net: &Net,
        spec: &Spec,
        part: &RankShare,
        runs: Option<Vec<Range<usize>>>,
        options: LearnerOptions,
        comm: Comm,
    ) -> Result<Learner, TrainError> {
        let rank = comm.rank();
        let mut comms = Comms::new(comm, &options.plan.mesh)?;
        let in_memory = comms.along(Axis::Data).shares_memory();
        if let Some(codec) = options.plan.wire.filter(|_| in_memory && options.plan.mesh.data > 1) {
            return Err(TrainError::Mesh(format!(
                "`wire = \"{}\"` {}; leave it out, or write transport = \"tcp\"",
                codec.name(),
                job::in_memory()
            )));
        }
        let lowering = options.lowering(rank, in_memory);
        let mut bodies = Bodies::new();
        let kind = part.kinds()[0];
        let mut body = |n: usize| body_of(&mut bodies, (n, kind.time), &lowering, net, spec, options.loss);
        let compiled = lowering.step_program(kind, runs.as_deref(), &mut body);
        // The others would wait for this rank.
        let program = compiled.inspect_err(|error| comms.job().fail(&error.to_string()))?;
        let LearnerOptions { threads, isa, seed, inherits, .. } = options;
        let exec = Options { isa, seed, inherits, ..Options::threads(threads) };
        let engine = Engine::join(program, exec, comms)?;
        // Two samples: statistics of one make no sense.
        let graph = training_graph(net, spec, 2, options.loss)?;
        let (fed, whole) = (Fed::new(&graph, &lowering.plan)?, WholeModel::of(&graph));
        let mut learner = Learner {
            lowering,
            net: net.clone(),
            spec: spec.clone(),
            input: net.input(spec, 1, true).name,
            engine,
            bodies,
            programs: vec![(owned(kind, true), 0)],
            runs: runs.clone(),
            averaging: None,
            own: None,
            telling: None,
            trial: None,
            fed,
            whole,
            apart: None,
            options,
        };
        let ready = learner.prepare(part, runs).and_then(|()| learner.prepare_averaging());
        let ready = ready.and_then(|()| learner.prepare_own()).and_then(|()| learner.prepare_apart());
        ready.inspect_err(|error| learner.comm().fail(&error.to_string()))?;
        Ok(learner)
    }

    /// Compiles for the steps of a part, as far as that has not been done. On an error everything is as it was.
    pub fn prepare(&mut self, part: &RankShare, runs: Option<Vec<Range<usize>>>) -> Result<(), TrainError> {
        let before = std::mem::replace(&mut self.runs, runs);
        let known = if before == self.runs { self.programs.len() } else { 0 };
        let mut made = Vec::new();
        let mut outcome = Ok(());
        for kind in part.kinds() {
            if self.programs[..known].iter().all(|(k, _)| *k != owned(kind, true)) {
                match self.add_program(kind, true) {
                    Ok(number) => made.push((owned(kind, true), number)),
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
        if outcome.is_err() {
            made.into_iter().for_each(|(_, number)| self.engine.remove(number));
            self.runs = before;
            return outcome;
        }
        if known == 0 {
            self.forget(0);
        }
        self.programs.extend(made);
        Ok(())
    }

    fn add_program(&mut self, kind: StepKind, coded: bool) -> Result<usize, TrainError> {
        let Learner { lowering, net, spec, options, bodies, runs, .. } = self;
        let mut body = |n: usize| body_of(bodies, (n, kind.time), lowering, net, spec, options.loss);
        let program = match coded {
            true => lowering.step_program(kind, runs.as_deref(), &mut body)?,
            false => lowering.without_wire().step_program(kind, runs.as_deref(), &mut body)?,
        };
        Ok(self.engine.add(program)?)
    }

    /// States that ranks have of their own are averaged by a program.
    fn prepare_averaging(&mut self) -> Result<(), TrainError> {
        let (ranks, role) = (self.engine.role().ranks, self.engine.role());
        // Shards have averaged theirs in every step, and ranks that take steps by themselves when they meet.
        let apart = role.shards.is_none() && self.lowering.plan.local_steps().is_none();
        if ranks > 1 && apart && !self.engine.kept(Kept::States).is_empty() {
            let program = average_states(ranks, &self.engine.program().bodies[0]);
            self.averaging = Some(self.engine.add(program)?);
            if self.lowering.plan.workers() < ranks {
                let program = states_of_workers(&self.lowering.plan, &self.engine.program().bodies[0]);
                self.telling = Some(self.engine.add(program)?);
            }
        }
        Ok(())
    }

    /// What each rank keeps for itself has a mean where one model is asked for.
    fn prepare_own(&mut self) -> Result<(), TrainError> {
        let ranks = self.engine.role().ranks;
        if self.lowering.plan.local_steps().is_some() && self.engine.own_len() > 0 {
            let body = self.engine.program().bodies[0].clone();
            let programs =
                [self.engine.add(share_own(ranks, &body))?, self.engine.add(take_back_own(&body))?];
            self.own = Some(OwnParams { programs, common: false });
        }
        Ok(())
    }

    /// Ranks that have the model together find out who has what. Collective.
    fn prepare_apart(&mut self) -> Result<(), TrainError> {
        if self.is_apart() && self.engine.is_writer() {
            let moments: Vec<_> = (0..self.n_moments()).map(|k| self.whole_moments(k)).collect();
            self.apart = Some(Apart::agree(&mut self.engine, &self.whole, &moments)?);
        }
        Ok(())
    }

    /// Whether several ranks have the model together.
    pub fn is_apart(&self) -> bool {
        let plan = &self.lowering.plan;
        plan.mesh.replica_ranks() > 1 || plan.shard_place().is_some()
    }

    /// Who has what of the model, and the engine.
    pub(crate) fn apart_and_engine(&mut self) -> (&Apart, &mut Engine) {
        (self.apart.as_ref().expect("a writer of a model that ranks have together"), &mut self.engine)
    }

    /// The tensors of the whole model.
    pub fn whole(&self) -> &WholeModel {
        &self.whole
    }

    /// What the optimizer keeps of the whole model as its state number `k`.
    pub(crate) fn whole_moments(&self, k: usize) -> Vec<TensorShape> {
        self.whole.moments(self.options.training.optimizer, k)
    }

    /// The same on each of the ranks of the data axis.
    pub(crate) fn whole_moments_of_ranks(&self, k: usize) -> Vec<TensorShape> {
        self.whole.moments_of(self.options.training.optimizer, k, self.engine.role().ranks)
    }

    /// The place of this rank along the data axis, and how many there are.
    pub fn data_place(&self) -> (usize, usize) {
        (self.engine.role().rank, self.engine.role().ranks)
    }

    /// Ends, and gives its group back.
    pub(crate) fn leave(self) -> Comm {
        self.engine.leave()
    }

    /// Ends, and keeps what was learnt.
    pub(crate) fn into_learnt(self) -> LearntState {
        self.engine.into_learnt()
    }

    /// Gives up programs for other steps than those of a part.
    pub fn keep_only(&mut self, part: &RankShare) {
        let kinds: Vec<OwnedKind> = part.kinds().into_iter().map(|kind| owned(kind, true)).collect();
        // Whatever texts are filled up to.
        let stays = |(m, r, n, ..): &OwnedKind| kinds.iter().any(|(a, b, c, ..)| (a, b, c) == (m, r, n));
        let (kept, gone) = self.programs.drain(..).partition(|(kind, _)| stays(kind));
        self.programs = kept;
        self.remove(gone);
    }

    /// Gives up programs from the `first` on.
    fn forget(&mut self, first: usize) {
        let gone = self.programs.split_off(first);
        self.remove(gone);
    }

    fn remove(&mut self, gone: Vec<(OwnedKind, usize)>) {
        // The first program says where everything lies, and stays.
        gone.into_iter().filter(|(_, number)| *number > 0).for_each(|(_, number)| self.engine.remove(number));
        let used = |(n, time): (usize, Option<usize>)| {
            let has = |m: &[MicrobatchRange]| m.iter().any(|p| p.len == n);
            self.programs.iter().any(|((microbatches, _, _, t, _), _)| *t == time && has(microbatches))
        };
        self.bodies.retain(|(key, _)| used(*key));
    }

    /// Compiles for evaluations of at most `n` samples of `spec` at once.
    pub fn prepare_trial(&mut self, spec: &Spec, n: usize) -> Result<(), TrainError> {
        let (program, mut trial) =
            Trial::new(&self.net, spec, n, self.options.loss.kind, &self.lowering.plan)?;
        trial.number = self.engine.add(program)?;
        for (time, program) in shorter(&self.net, spec, n, self.options.loss.kind, &self.lowering.plan)? {
            trial.by_time.push((time, self.engine.add(program)?));
        }
        self.trial = Some(trial);
        Ok(())
    }

    /// The judge of this rank, with the weights that are being learnt; `None` before [`Learner::prepare_trial`].
    pub fn judge(&mut self) -> Option<Judge<&mut Engine>> {
        let trial = self.trial.clone()?;
        Some(Judge::over(&mut self.engine, trial))
    }

    /// Ranks that only serve get the mean of the others' running statistics. Collective.
    pub fn tell_states(&mut self) -> Result<(), TrainError> {
        if let Some(number) = self.telling {
            self.engine.select(number);
            self.engine.run()?;
        }
        Ok(())
    }

    /// Running statistics that ranks have of their own become their mean. Collective.
    pub fn average_states(&mut self) -> Result<(), TrainError> {
        self.tell_states()?;
        if let Some(number) = self.averaging {
            self.engine.select(number);
            self.engine.run()?;
        }
        Ok(())
    }

    /// Puts the mean over all ranks in the place of the parameters that each keeps for itself, as one model has them; whether there are any
    /// to be taken back. Collective.
    pub fn share_own(&mut self) -> Result<bool, TrainError> {
        let Some(own) = self.own.as_mut().filter(|own| !own.common) else { return Ok(false) };
        own.common = true;
        self.engine.select(own.programs[0]);
        self.engine.run()?;
        Ok(true)
    }

    /// Gives each rank its own again.
    pub fn take_back_own(&mut self) -> Result<(), TrainError> {
        let own = self.own.as_mut().expect("what was shared");
        own.common = false;
        self.engine.select(own.programs[1]);
        Ok(self.engine.run()?)
    }

    /// From here on all ranks have the same parameters, those of a file; or each its own among them.
    pub(crate) fn set_own_common(&mut self, common: bool) {
        if let Some(own) = &mut self.own {
            own.common = common;
        }
    }

    /// Whether each rank keeps parameters for itself.
    pub(crate) fn has_own_params(&self) -> bool {
        self.own.is_some()
    }

    /// Runs this rank's part of a step, or of several without a flush between them, and returns what each came to. Collective. `load` is
    /// asked for each microbatch that has samples, in their order, and hands its batch to the function that it is given.
    pub fn step(&mut self, step: RankStep, load: &mut Load) -> Result<Vec<StepResult>, TrainError> {
        let kind = step.kind;
        let coded = self.engine.steps_done() >= self.lowering.plan.wire_start;
        let same = |(p, r, n, time, c): &OwnedKind| {
            (&p[..], *r, *n, *time, *c) == (kind.microbatches, kind.rounds, kind.steps, kind.time, coded)
        };
        let number = match self.programs.iter().find(|(known, _)| same(known)) {
            Some((_, number)) => *number,
            None => {
                let number = self.add_program(kind, coded)?;
                self.programs.push((owned(kind, coded), number));
                number
            }
        };
        self.engine.select(number);
        let Learner { engine, options, input, fed, .. } = self;
        let mut feed = RankFeed { step, load, options, input, fed };
        let outcome = engine.step_with(&mut feed, step.args(0));
        let Totals { loss, extra, samples, grad_norm, waited, skipped, not_finite, .. } = match outcome {
            Err(TrainError::Exec(ExecError::NotFinite { loss, here, place })) => {
                let place = here.then(|| place.map_or_else(|| "the loss itself".into(), |p| p.to_string()));
                // Of several steps, an earlier one may be to blame.
                let earlier = self.engine.earlier_steps();
                let later = earlier.iter().skip_while(|totals| totals.loss.is_finite()).count();
                let step = self.engine.steps_done() - later as u64;
                if self.lowering.plan.is_free() {
                    // No other rank knows of it yet; what this one says when it fails ends their waits.
                    let place = place.unwrap_or_else(|| "the loss itself".into());
                    return Err(TrainError::NotFinite { step, loss, place });
                }
                return Err(self.not_finite(step, loss, place)?);
            }
            outcome => outcome?,
        };
        if !loss.is_finite() {
            self.only_overflowed(loss, not_finite)?;
        }
        let result = |totals: &Totals| {
            let Totals { loss, samples, grad_norm, waited, skipped, .. } = *totals;
            StepResult { loss, grad_norm, extra: [0.0; 2], samples, waited, skipped }
        };
        let mut results: Vec<StepResult> = self.engine.earlier_steps().iter().map(result).collect();
        results.push(StepResult { loss, grad_norm, extra, samples, waited, skipped });
        Ok(results)
    }

    /// A scaled loss that is not finite: an error, unless on every rank where it came from a number was too large for f16. All
    /// ranks come here together.
    fn only_overflowed(&mut self, loss: f64, found: Option<NonFinite>) -> Result<(), TrainError> {
        let wrong = found.filter(|f| !matches!(f, NonFinite::Node { overflow: true, .. }));
        let mut wrongs = [i64::from(wrong.is_some())];
        self.engine.comm().all_reduce(&mut wrongs, Reduce::Sum)?;
        match wrongs {
            [0] => Ok(()),
            _ => Err(self.not_finite(self.last_step(), loss, wrong.map(|w| w.to_string()))?),
        }
    }

    /// The error of a run that skips step after step. All ranks come here together.
    pub fn overflows(&mut self, loss: f64) -> Result<TrainError, TrainError> {
        let place = self.engine.find_non_finite()?.map(|p| p.to_string());
        match self.not_finite(self.last_step(), loss, place)? {
            TrainError::NotFinite { step, place, .. } => Ok(TrainError::Overflows { step, place }),
            other => Ok(other),
        }
    }

    /// The number of the step that was done last.
    fn last_step(&self) -> u64 {
        self.engine.steps_done().saturating_sub(1)
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.engine.steps_done()
    }

    /// Whether ranks take steps by themselves, and so have moments of their own.
    pub(crate) fn has_own_moments(&self) -> bool {
        self.lowering.plan.local_steps().is_some()
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, for what all ranks do together.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// This rank's end of its group.
    pub fn comm(&mut self) -> &mut Comm {
        self.engine.comm()
    }

    /// The averaged parameters, laid out as the engine's; empty without averaging, and on other ranks than 0.
    pub fn average(&self) -> &[f32] {
        self.engine.kept(Kept::Average)
    }

    /// Lets rank 0 set weights, states and averages; then all ranks have the weights and states. Collective.
    pub fn exclusively(
        &mut self,
        write: impl FnOnce(&mut Engine) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        self.engine.exclusively(write)
    }

    /// How many states the optimizer has.
    pub fn n_moments(&self) -> usize {
        self.options.training.optimizer.n_states()
    }

    /// Puts the averaged parameters in the place of those that are being learnt; the second time, back. Collective.
    /// Nothing without averaging.
    pub fn swap_average(&mut self) -> Result<(), TrainError> {
        if self.options.training.ema.is_none() {
            return Ok(());
        }
        self.exclusively(|engine| {
            engine.swap_average();
            Ok(())
        })
    }

    /// The parameters that are evaluated and shipped: the averaged ones if there are. Rank 0's to ask.
    pub fn shipped(&self) -> (Vec<Slot>, &[f32]) {
        let average = self.average();
        let params = if average.is_empty() { self.engine.kept(Kept::Params) } else { average };
        (self.engine.param_slots(), params)
    }

    /// Rounds the parameters that are shipped to what their file will have them in, so that what is tested is what is
    /// written. Collective; nothing for f32.
    pub fn round_shipped(&mut self, dtype: DType) -> Result<(), TrainError> {
        if dtype == DType::F32 {
            return Ok(());
        }
        self.exclusively(|engine| {
            let averaged = !engine.kept(Kept::Average).is_empty();
            let shipped = engine.kept_mut(if averaged { Kept::Average } else { Kept::Params });
            tensors::round(dtype, shipped);
            Ok(())
        })
    }

    /// All ranks come here together: the first one that knows where it came from tells the others.
    fn not_finite(&mut self, step: u64, loss: f64, place: Option<String>) -> Result<TrainError, TrainError> {
        let comm = self.engine.comm();
        let mine = if place.is_some() { comm.rank() } else { comm.size() };
        let mut first = [mine as i64];
        comm.all_reduce(&mut first, Reduce::Min)?;
        let place = match usize::try_from(first[0]) {
            Ok(rank) if rank < comm.size() => {
                let text = talk::broadcast(comm, place.unwrap_or_default().into_bytes(), rank)?;
                String::from_utf8_lossy(&text).into_owned()
            }
            // Every rank's own loss is finite, and their sum is not.
            _ => "the sum over the ranks".into(),
        };
        Ok(TrainError::NotFinite { step, loss, place })
    }
}

/// Feeds the microbatches of a rank's steps.
struct RankFeed<'a, 'b> {
    step: RankStep<'a>,
    load: &'a mut Load<'b>,
    options: &'a LearnerOptions,
    input: &'a str,
    fed: &'a Fed,
}

impl Feed<TrainError> for RankFeed<'_, '_> {
    fn load(&mut self, microbatch: usize, inputs: &mut Inputs) -> Result<Counted, TrainError> {
        let RankFeed { step, load, options, input, fed } = self;
        let ranges = || step.kind.microbatches.iter().filter(|p| p.len > 0);
        let n = ranges().count();
        let range = *ranges().nth(microbatch % n).expect("a range for each microbatch");
        let mut counted = Counted::default();
        let step_labels = (step.labels)(microbatch / n).max(1) as f64;
        load(microbatch / n, range, &mut |batch: MicrobatchData| {
            fill(inputs, input, range.len, batch, options, fed)?;
            let weight = label_weight(batch.labels, &options.class_weights) / step_labels;
            counted = Counted { weight, samples: batch.samples };
            Ok(())
        })?;
        Ok(counted)
    }

    fn args(&mut self, step: usize) -> Option<StepArgs> {
        Some(self.step.args(step))
    }
}

/// The body for `n` samples, of texts that are filled up to `time` if they are; compiled if it is not there yet.
fn body_of(
    bodies: &mut Bodies,
    (n, time): (usize, Option<usize>),
    lowering: &Lowering,
    net: &Net,
    spec: &Spec,
    loss: Loss,
) -> Result<Arc<Body>, TrainError> {
    if let Some((_, body)) = bodies.iter().find(|(key, _)| *key == (n, time)) {
        return Ok(body.clone());
    }
    let graph = match time {
        None => training_graph(net, spec, n, loss)?,
        Some(time) => {
            let spec = Spec { features: spec.features.filled_to(time), target: spec.target.clone() };
            training_graph(net, &spec, n, loss)?
        }
    };
    let body = lowering.body(&graph)?;
    bodies.push(((n, time), body.clone()));
    Ok(body)
}

/// What the labels of a microbatch weigh in the mean of its step.
fn label_weight(labels: Values, class_weights: &[f32]) -> f64 {
    match labels {
        Values::I32(labels) if !class_weights.is_empty() => {
            labels.iter().map(|&l| f64::from(class_weights.get(l as usize).copied().unwrap_or(0.0))).sum()
        }
        labels => n_counted(labels) as f64,
    }
}

fn fill(
    inputs: &mut Inputs,
    input: &str,
    n: usize,
    batch: MicrobatchData,
    options: &LearnerOptions,
    fed: &Fed,
) -> Result<(), TrainError> {
    let mixup = options.loss.mixup;
    // A stage is fed what its layers read.
    if inputs.has(input) {
        match batch.x {
            Values::F32(x) => {
                let to = inputs.f32(input)?;
                to.copy_from_slice(&fed.own(input, x));
                if mixup {
                    mixup::mix(to, n, batch.mix);
                }
            }
            Values::I32(x) => inputs.i32(input)?.copy_from_slice(&fed.own(input, x)),
            Values::U8(_) => unreachable!("batches are f32 or i32"),
        }
    }
    if !inputs.has("labels") {
        return Ok(());
    }
    match batch.labels {
        Values::I32(labels) => inputs.i32("labels")?.copy_from_slice(&fed.own("labels", labels)),
        Values::F32(labels) => inputs.f32("labels")?.copy_from_slice(&fed.own("labels", labels)),
        Values::U8(_) => unreachable!("batches are f32 or i32"),
    }
    if options.loss.class_weights {
        inputs.f32("class_weights")?.copy_from_slice(&options.class_weights);
    }
    if mixup {
        inputs.f32("mix")?[0] = batch.mix;
        match batch.labels {
            Values::I32(labels) => reverse(&fed.own("labels", labels), inputs.i32("labels2")?, n),
            Values::F32(labels) => reverse(&fed.own("labels", labels), inputs.f32("labels2")?, n),
            Values::U8(_) => unreachable!("batches are f32 or i32"),
        }
    }
    Ok(())
}

/// The labels of `n` samples, the last sample's first.
fn reverse<T: Copy>(from: &[T], to: &mut [T], n: usize) {
    let per_sample = to.len() / n.max(1);
    let pairs = to.chunks_exact_mut(per_sample).zip(from.chunks_exact(per_sample).rev());
    pairs.for_each(|(to, from)| to.copy_from_slice(from));
}
