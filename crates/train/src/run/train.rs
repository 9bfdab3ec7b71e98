//! The loop: batches in, steps, evaluations, checkpoints, records. Every rank runs it.
//!
//! Ranks take the same way through it, because all that decides the way is the same on all of them: the number of
//! steps, the scores of evaluations, and what they told each other at the end of the step (somebody wants to stop, rank
//! 0 finds that it is time for a checkpoint). Steps of a pipeline without a flush between them are taken together, up to the next
//! flush: what comes between steps comes between such runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use polyreme_collective::{Comm, Doing, Reduce};
use polyreme_data::Loader;
use polyreme_exec::{KernelClass, Timeline};
use polyreme_graph::Axis;
use serde::{Deserialize, Serialize};

use super::apart::{hand_over_apart, ship_apart};
use super::degrees::{self, Degrees};
use super::elastic::Undo;
use super::entering::Transfer;
use super::files::Files;
use super::folder::{Hold, hold_given};
use super::frozen::write_frozen;
use super::kernels;
use super::prepared::{Prepared, is_of_validation};
use super::servers::Servers;
use super::snapshot::{Progress, hand_over, load_weights, restore, restore_weights, start_from};
use super::step::Pulse;
use super::turns::SentBefore;
use crate::checkpoint::{self, CheckpointError, Loaded};
use crate::error::TrainError;
use crate::event::{Ending, Event, Observer, StepDone, Summary};
use crate::fingerprint::Fingerprint;
use crate::follow_load::FollowedLoad;
use crate::install::ship;
use crate::judge::block_samples;
use crate::learner::{Learner, StepResult};
use crate::ledger::SampleLedger;
use crate::loss_scale::LossScale;
use crate::low_rank::Selection;
use crate::metrics::{Best, Confusion, Patience};
use crate::pace::RankShare;
use crate::pretrained::folder::write_beside;
use crate::record::trace::{self, About};
use crate::starting::StartingWeights;
use crate::talk;

/// One rank of a run.
pub(super) struct Run {
    pub(super) prepared: Prepared,
    pub(super) rank: usize,
    pub(super) learner: Learner,
    pub(super) part: RankShare,
    pub(super) folder: PathBuf,
    /// Rank 0's.
    pub(super) files: Option<Files>,
    pub(super) progress: Progress,
    /// When this process began to train, moved back by what earlier ones took.
    pub(super) started: Instant,
    /// When the last checkpoint was taken.
    pub(super) saved: Instant,
    pub(super) saved_step: u64,
    pub(super) confusion: Option<Confusion>,
    /// What is not as it was in data that may change; rank 0's.
    changed: Option<String>,
    /// What it means that products are summed by other kernels than before; rank 0's.
    other_kernels: Option<String>,
    /// What it means that sums are split over other numbers of ranks than before; rank 0's.
    other_degrees: Option<String>,
    /// How long this rank waited for others in the last step; and all ranks in all steps, on the average.
    pub(super) waited_last: Duration,
    /// How long this rank computed in the last step.
    pub(super) busy_last: Duration,
    /// How long of that it slept, because it was to be slow.
    pub(super) slept_last: Duration,
    waited: f64,
    /// Its speed, if samples are shared out by it.
    pub(super) pulse: Option<Pulse>,
    /// The load of its host, if threads follow it.
    load: Option<FollowedLoad>,
    /// What a step that is not finished must give back, if ranks may be lost.
    pub(super) undo: Option<Undo>,
    /// The servers that hold the weights, if there are any.
    pub(super) servers: Option<Servers>,
    /// What the steps before the last turn came to.
    pub(super) before: SentBefore,
    /// Whether what follows the last step (evaluation, checkpoint) is done.
    pub(super) ended: bool,
    /// Whether ranks have entered that have no samples yet.
    pub(super) entered: bool,
    /// What brings them what is learnt.
    pub(super) transfer: Option<Transfer>,
}

/// What ranks wish, and tell each other in every step, or in the last of several without a flush.
#[derive(Clone, Copy)]
pub(super) struct Wishes {
    pub(super) stop: bool,
    pub(super) save: bool,
    /// Rank 0 finds that it is time to look at speeds.
    pub(super) look: bool,
    /// The ranks of an elastic run are to change.
    pub(super) change: bool,
}

/// How a run begins: rank 0 says it to the others.
#[derive(Serialize, Deserialize)]
struct Opening {
    resumed: bool,
    progress: Progress,
}

/// Why nothing is followed.
const NO_LOAD: &str = "`parallel.follow_load` does nothing here: ranks have one thread each, which they cannot give up, or this kernel \
                       does not say how long threads wait for a core; use fewer ranks with more threads";

/// What a rank follows, if it is to and can.
fn followed_load(prepared: &Prepared, rank: usize) -> Option<FollowedLoad> {
    if !prepared.job.parallel.follow_load || prepared.threads < 2 {
        return None;
    }
    // Without names all ranks are on this host.
    let (hosts, ranks) = (&prepared.hosts, prepared.ranks());
    let beside = |other: &usize| hosts.get(*other) == hosts.get(rank);
    let turn = ((0..rank).filter(beside).count(), (0..ranks).filter(beside).count());
    FollowedLoad::new(prepared.threads, turn)
}

impl Run {
    /// Reserves everything for one rank. Collective; `local` is the number of ranks in this process.
    /// `resumed` is the checkpoint that the run will go on from, if this is rank 0 and there is one.
    pub(super) fn new(
        prepared: Prepared,
        mut comm: Comm,
        local: usize,
        resumed: Option<&Loaded>,
    ) -> Result<Run, TrainError> {
        let (what, op) = ("its job or its data are not those of rank 0; give all the same", "comparing jobs");
        talk::agree(&mut comm, op, &prepared.fingerprint(), what)?;
        let prepared = prepared.decided(&mut comm)?.with_wire(&mut comm)?;
        let before = resumed.filter(|_| comm.rank() == 0).map(Progress::of).transpose()?;
        let before = before.map_or(Vec::new(), |progress| progress.cuts);
        let prepared = prepared.with_cuts(&mut comm, &before, local)?;
        // Programs must not differ, so the budget is that of the fullest process.
        let mut most = [local as i64];
        comm.all_reduce(&mut most, Reduce::Max)?;
        let mut options = prepared.rank_options(usize::try_from(most[0]).unwrap_or(1));
        comm.broadcast(&mut options.class_weights, 0)?;
        let rank = comm.rank();
        let part = RankShare::new(prepared.pace, &prepared.cut, prepared.data_rank(rank));
        let runs = prepared.cut.shard_runs();
        let learner = Learner::new(&prepared.net, &prepared.spec, &part, runs, options, comm)?;
        let progress = first_progress(&prepared);
        let now = Instant::now();
        Ok(Run {
            rank,
            learner,
            part,
            folder: PathBuf::new(),
            files: None,
            progress,
            started: now,
            saved: now,
            saved_step: 0,
            confusion: None,
            changed: None,
            other_kernels: None,
            other_degrees: None,
            waited_last: Duration::ZERO,
            busy_last: Duration::ZERO,
            slept_last: Duration::ZERO,
            waited: 0.0,
            pulse: Pulse::new(&prepared, rank),
            load: followed_load(&prepared, rank),
            undo: prepared.job.parallel.elastic.is_some().then(Undo::default),
            servers: None,
            before: SentBefore::default(),
            ended: true,
            entered: false,
            transfer: None,
            prepared,
        })
    }

    /// Brings the run to its beginning, or with `resumed` to where it was, and makes the folder. Collective.
    pub(super) fn open(
        &mut self,
        folder: &Path,
        hold: Option<Hold>,
        resumed: Option<&Loaded>,
    ) -> Result<(), TrainError> {
        let engine = self.learner.engine();
        // Which shard of a tensor a rank has is its own.
        let slots = engine.param_slots();
        let slots: Vec<_> = slots.iter().map(|slot| (&slot.name, &slot.dims, &slot.range)).collect();
        let layout = format!("{slots:?} {:?}", engine.role().parts);
        let what = "its program lays out the parameters in another way; give all the same version";
        let alike = self.learner.engine_mut().comms().along(Axis::Data);
        talk::agree(alike, "comparing programs", &layout, what)?;
        let mut progress = match resumed {
            Some(loaded) => Progress::of(loaded)?,
            None => self.progress.clone(),
        };
        if self.rank == 0 {
            self.compare_data(&mut progress)?;
        }
        let opening = Opening { resumed: resumed.is_some(), progress };
        let bad = |e: serde_json::Error| TrainError::Progress(e.to_string());
        let bytes = serde_json::to_vec(&opening).map_err(bad)?;
        let opening: Opening =
            serde_json::from_slice(&talk::broadcast(self.learner.comm(), bytes, 0)?).map_err(bad)?;
        let now = self.prepared.preparation();
        if let Some(what) = opening.progress.preparation.misfit(&now).filter(|_| opening.resumed) {
            return Err(TrainError::DataMisfit { what });
        }
        self.progress = opening.progress;
        self.progress.cuts = match self.prepared.cuts_from.is_kept() {
            true => self.prepared.learner.plan.cuts.clone(),
            false => Vec::new(),
        };
        // Other ranks than a run began with were not planned.
        let (mesh, threads) = (*self.prepared.mesh(), self.prepared.threads);
        self.progress.planned.take_if(|plan| !plan.is_of(&mesh, threads));
        self.compare_kernels()?;
        // As rank 0 measured it; or as before, whatever the files on the disk would give now.
        self.prepared.stats = self.progress.preparation.stats();
        self.prepared.target_stats = self.progress.preparation.target_stats();
        let resumed = resumed.filter(|_| self.rank == 0);
        self.learner.comm().set_doing(Doing::Loading);
        match (StartingWeights::of(&self.prepared.job.model), opening.resumed) {
            (_, true) => restore(&mut self.learner, resumed)?,
            (Some(start), false) => self.progress.batches_before = start_from(&mut self.learner, start)?,
            (None, false) => {}
        }
        if let Some(set) = self.prepared.evaluated() {
            self.learner.prepare_trial(set.spec(), block_samples(&self.prepared.net, set.spec())?)?;
        }
        self.folder = folder.to_path_buf();
        if self.rank == 0 {
            let hold = hold.map_or_else(|| hold_given(folder, resumed.is_some()), Ok)?;
            self.files = Some(Files::open(hold, &self.prepared, &self.learner)?);
        }
        if !opening.resumed {
            self.progress.frozen = write_frozen(folder, &mut self.learner)?;
        }
        let done = self.learner.steps_done();
        if let Some(ledger) = &mut self.progress.ledger {
            ledger.follow(done, self.prepared.order(0), self.prepared.pace.batch);
        }
        self.saved_step = done;
        self.saved = Instant::now();
        self.start_servers()
    }

    /// Whether the data are those that the run began with, which `progress` knows; from now on it knows these.
    fn compare_data(&mut self, progress: &mut Progress) -> Result<(), TrainError> {
        let now = Fingerprint::of(&self.prepared.sets)?;
        let changes = progress.data.as_ref().map_or(Vec::new(), |before| now.changes(before));
        if !changes.is_empty() {
            let what = changes.join("; ");
            if !self.prepared.changed_data {
                return Err(TrainError::DataChanged { what });
            }
            self.changed = Some(format!("the data changed since the run began: {what}"));
        }
        progress.data = Some(now);
        // What runs without a validation set chose by before it was one of the test set.
        if self.prepared.sets.validation.is_none() {
            progress.best = progress.best.take().filter(|best| !is_of_validation(&best.metric));
        }
        Ok(())
    }

    /// Whether products are summed by the kernels that the checkpoint names, and split over as many ranks; from now on it is these.
    /// Collective.
    pub(super) fn compare_kernels(&mut self) -> Result<(), TrainError> {
        let own = KernelClass::of(&self.prepared.learner.plan.precision, self.prepared.learner.isa);
        let now = kernels::of_all_ranks(self.learner.comm(), own)?;
        self.other_kernels = kernels::change(&self.progress.kernels, &now).filter(|_| self.rank == 0);
        self.progress.kernels = now.iter().map(|class| class.name().to_string()).collect();
        let plan = &self.prepared.learner.plan;
        let now = plan.shards.map(|_| Degrees::of(&plan.mesh));
        self.other_degrees = degrees::change(self.progress.degrees, now).filter(|_| self.rank == 0);
        self.progress.degrees = now;
        Ok(())
    }

    /// Tells the others that this rank ends here.
    pub(super) fn fail(&mut self, why: &str) {
        self.learner.comm().fail(why);
    }

    /// Trains to the end, or until an observer of any rank wants to stop; nothing if ranks are to agree in another way from here on.
    /// Collective.
    pub(super) fn train(
        &mut self,
        observer: &mut dyn Observer,
        goes_on: bool,
    ) -> Result<Option<Summary>, TrainError> {
        if self.rank == 0 && !goes_on {
            let outline = self.prepared.outline(&self.folder, self.learner.steps_done())?;
            observer.event(Event::Started(&outline));
        }
        self.tell_changes(observer);
        match self.train_steps(observer)? {
            Some(ending) => self.complete(ending, observer).map(Some),
            None => Ok(None),
        }
    }

    /// Tells what is not as it was when the run was left.
    pub(super) fn tell_changes(&mut self, observer: &mut dyn Observer) {
        let others = [self.changed.take(), self.other_kernels.take(), self.other_degrees.take()];
        for what in others.into_iter().flatten() {
            observer.event(Event::Warning(&what));
        }
        if self.rank == 0 && self.prepared.job.parallel.follow_load && self.load.is_none() {
            observer.event(Event::Warning(NO_LOAD));
        }
        if let Some(files) = &mut self.files {
            files.tell(observer);
        }
    }

    /// All steps that are left; `None` if ranks, or the way in which they agree, are to change before the last of them. Collective.
    pub(super) fn train_steps(&mut self, observer: &mut dyn Observer) -> Result<Option<Ending>, TrainError> {
        let steps = self.prepared.pace.total_steps(self.prepared.job.train.length);
        self.begin_trace()?;
        self.started = Instant::now();
        let until = self.prepared.until();
        let mut loader = self.loader(until)?;
        let mut ending = Ending::Finished;
        while self.learner.steps_done() < until {
            let first = self.learner.steps_done();
            let (results, wishes) = match self.is_free() {
                true => self.segment(&mut loader, first, until, observer)?,
                false => self.steps(&mut loader, first, until, observer)?,
            };
            // Without a flush between steps, what each came to is known behind the last of them.
            for (step, result) in (first..).zip(&results) {
                self.note(step, steps, *result, &loader, observer)?;
            }
            let step = first + results.len() as u64 - 1;
            self.ended = false;
            let stopped_early = self.end_of_step(step, step + 1 == steps, wishes, observer)?;
            self.ended = true;
            if stopped_early {
                ending = Ending::EarlyStop;
                break;
            }
            if wishes.stop && step + 1 < steps {
                ending = Ending::Interrupted;
                break;
            }
            self.follow_load(step + 1, observer);
            if wishes.change && step + 1 < steps {
                return Ok(None);
            }
            if std::mem::take(&mut self.entered) {
                self.share_equally(step + 1, observer)?;
                loader = self.loader(until)?;
            } else if wishes.look && self.rebalance(step + 1, observer)? {
                loader = self.loader(until)?;
            }
        }
        drop(loader);
        self.end_trace()?;
        let turns = ending == Ending::Finished && until < steps;
        Ok((!turns).then_some(ending))
    }

    /// What follows the last step. Collective.
    pub(super) fn complete(
        &mut self,
        ending: Ending,
        observer: &mut dyn Observer,
    ) -> Result<Summary, TrainError> {
        self.save(observer)?;
        self.learner.comm().set_doing(Doing::Saving);
        if let Some(files) = &mut self.files {
            files.settle(ending, observer)?;
        }
        self.finish(ending, observer)
    }

    /// Lets threads rest, or wakes them, as others use this host.
    fn follow_load(&mut self, done: u64, observer: &mut dyn Observer) {
        let Some((threads, why)) = self.load.as_mut().and_then(FollowedLoad::look) else { return };
        self.learner.engine().set_active_threads(threads);
        observer.event(Event::Followed { step: done, why: &why });
    }

    /// From here on this rank records where its time goes, if it is to. Clocks start together. Collective.
    fn begin_trace(&mut self) -> Result<(), TrainError> {
        if self.prepared.trace.is_some() {
            self.learner.comm().barrier()?;
            let timeline = Timeline::new(Instant::now(), trace::MOMENTS_MAX);
            self.learner.engine_mut().set_timeline(Some(timeline));
        }
        Ok(())
    }

    /// Writes what all ranks recorded. Collective.
    fn end_trace(&mut self) -> Result<(), TrainError> {
        let Some(path) = self.prepared.trace.clone() else { return Ok(()) };
        let moments = self.learner.engine().timeline().map_or(Vec::new(), |t| t.moments().to_vec());
        self.learner.engine_mut().set_timeline(None);
        let about = About::of_plan(&self.prepared.job.name, &self.prepared.learner.plan);
        trace::write(&path, &about, self.learner.comm(), &moments)
    }

    /// Seconds of the whole run, those before a resumption included.
    pub(super) fn seconds(&self) -> f64 {
        self.progress.seconds + self.started.elapsed().as_secs_f64()
    }

    fn note(
        &mut self,
        step: u64,
        steps: u64,
        result: StepResult,
        loader: &Loader,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let (pace, seconds, ranks) = (self.prepared.pace, self.seconds(), self.prepared.ranks());
        let workers = ranks - self.prepared.learner.plan.servers.map_or(0, |servers| servers.serving);
        let (samples, lr) = (pace.len(step), self.prepared.lr(step));
        self.progress.samples += samples as u64;
        if let Some(ledger) = &mut self.progress.ledger {
            ledger.commit(pace.epoch(step), result.samples, result.skipped);
        }
        if !result.skipped {
            for (sum, n) in [&mut self.progress.window, &mut self.progress.epoch] {
                *sum += result.loss;
                *n += 1;
            }
        }
        if let Some(scale) = &mut self.progress.loss_scale {
            scale.note(result.skipped);
            if scale.is_lost() {
                return Err(self.learner.overflows(result.loss)?);
            }
            if result.skipped {
                let (done, scale) = (step + 1, scale.scale);
                let what = format!(
                    "step {done} overflowed in f16 and is skipped; the loss is scaled by {scale} now"
                );
                observer.event(Event::Warning(&what));
            }
        }
        let here = self.started.elapsed().as_secs_f64().max(1e-9);
        // What a rank waits with nobody to wait for is the price of a look at the clock.
        self.waited += if ranks > 1 { result.extra[1] / workers as f64 } else { 0.0 };
        let waiting_for_ranks = (self.waited / here).min(1.0);
        observer.event(Event::Step(&StepDone {
            step: step + 1,
            steps,
            epoch: pace.epoch(step) + 1,
            epochs: steps.div_ceil(pace.steps_per_epoch()),
            loss: (!result.skipped).then_some(result.loss),
            lr,
            samples,
            own_samples: self.part.samples(step),
            own_busy: self.busy_last,
            seconds,
            waiting: loader.waited().as_secs_f64() / here,
            waiting_for_ranks,
            sent_bytes: self.learner.engine().wire_bytes(),
            batches_ready: loader.n_ready(),
        }));
        let every = self.prepared.job.train.log_every_steps.max(1);
        if (step + 1).is_multiple_of(every) || step + 1 == steps {
            let (sum, n) = std::mem::take(&mut self.progress.window);
            let training = (seconds - self.progress.evaluating).max(1e-9);
            let mut line = Vec::new();
            // Of skipped steps alone there is no loss.
            line.extend((n > 0).then(|| ("train_loss".to_string(), sum / n as f64)));
            line.push(("lr".to_string(), lr));
            line.push(("samples_per_s".to_string(), self.progress.samples as f64 / training));
            let clips = self.prepared.job.train.clip.is_some() && !result.skipped;
            line.extend(result.grad_norm.filter(|_| clips).map(|norm| ("grad_norm".to_string(), norm)));
            if let Some(scale) = self.progress.loss_scale {
                line.push(("loss_scale".to_string(), f64::from(scale.scale)));
                line.push(("steps_skipped".to_string(), scale.steps_skipped as f64));
            }
            line.extend((ranks > 1).then(|| ("wait_share".to_string(), waiting_for_ranks)));
            self.record(step + 1, &line, observer);
            if !self.is_free() {
                self.tell_servers(observer)?;
            }
        }
        if pace.ends_epoch(step) {
            let (sum, n) = std::mem::take(&mut self.progress.epoch);
            self.progress.last_epoch_loss = (n > 0).then(|| sum / n as f64);
        }
        Ok(())
    }

    /// Evaluates and saves where it is time to; whether the run is to stop early.
    pub(super) fn end_of_step(
        &mut self,
        step: u64,
        last: bool,
        wishes: Wishes,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        let (pace, done) = (self.prepared.pace, step + 1);
        let due = done.is_multiple_of(self.prepared.job.evaluates_every(pace));
        // Also if a stop is wished: a run that was interrupted in its last step ends as one that was not.
        let (best, stop) = if due || last { self.evaluate(done, observer)? } else { (false, false) };
        let mut saves = self.prepared.job.saves_every(pace);
        let save = best || wishes.save || saves.any(|n| done.is_multiple_of(n));
        if save {
            self.save(observer)?;
        }
        Ok(stop)
    }

    /// Hands a checkpoint of this moment to the writer, unless there is one already. Collective.
    pub(super) fn save(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let step = self.learner.steps_done();
        if step == self.saved_step {
            return Ok(());
        }
        let began = Instant::now();
        let peak_mib = self.prepared.peak_bytes.map(|peak| peak() as f64 / f64::from(1 << 20));
        self.settle_servers()?;
        let progress = Progress { seconds: self.seconds(), peak_mib, ..self.progress.clone() };
        let epoch = step / self.prepared.pace.steps_per_epoch();
        match &mut self.files {
            Some(files) => files.save(&mut self.learner, epoch, &progress, observer)?,
            None if self.learner.is_apart() => hand_over_apart(&mut self.learner)?,
            None => hand_over(&mut self.learner)?,
        }
        (self.saved, self.saved_step) = (Instant::now(), step);
        observer.event(Event::Saving { step, held: began.elapsed() });
        Ok(())
    }

    pub(super) fn record(&mut self, step: u64, values: &[(String, f64)], observer: &mut dyn Observer) {
        let (epoch, seconds) = (self.prepared.pace.epoch(step.saturating_sub(1)), self.seconds());
        if let Some(files) = &mut self.files {
            files.record(step, epoch, seconds, values, observer);
        }
    }

    /// Writes the model that the run ends with, evaluates the test set with it, and reports. Collective.
    fn finish(&mut self, ending: Ending, observer: &mut dyn Observer) -> Result<Summary, TrainError> {
        let seconds = self.seconds();
        let model = self.folder.join("model.safetensors");
        let mut model_step = self.learner.steps_done();
        if ending != Ending::Interrupted {
            match self.best_elsewhere() {
                Some(step) => model_step = self.take_best(step, observer)?,
                None => self.learner.average_states()?,
            }
            self.learner.share_own()?;
            let dtype = self.prepared.job.output.dtype;
            self.learner.round_shipped(dtype)?;
            self.test(observer)?;
            self.learner.comm().set_doing(Doing::Saving);
            let batches = self.learner.steps_done().saturating_add(self.progress.batches_before);
            let form = self.prepared.model_file(&self.progress.preparation);
            if self.learner.is_apart() {
                ship_apart(&model, &mut self.learner, dtype, batches, &form)?;
            } else if self.files.is_some() {
                ship(&model, &self.learner, dtype, batches, &form)?;
            }
            if self.files.is_some() && form.tensors != Selection::Learnt {
                write_beside(&self.folder, &self.prepared.job.model)?;
            }
        }
        let training = (seconds - self.progress.evaluating).max(1e-9);
        let (sum, n) = self.progress.epoch;
        let partial = (n > 0).then(|| sum / n as f64);
        let final_loss = self.progress.last_epoch_loss.or(partial).unwrap_or(f64::NAN);
        let metrics = self.progress.metrics.iter().map(|(name, v)| (name.clone(), (*v).into())).collect();
        // Rank 0 speaks for all: they have the same sums.
        let ledger = self.progress.ledger.as_ref().filter(|_| self.rank == 0);
        let ledger = ledger.map(|ledger| ledger.report(self.saved_step));
        if let Some(report) = ledger.as_ref().filter(|report| report.exact == Some(false)) {
            observer.event(Event::Warning(&format!("the ledger of samples does not add up: {report}")));
        }
        let SentBefore { bytes: wire_bytes, bytes_max: wire_bytes_max, staleness: stale, .. } =
            self.sent()?;
        let summary = Summary {
            steps: self.saved_step,
            seconds,
            samples_per_s: self.progress.samples as f64 / training,
            final_loss,
            metrics,
            output: self.folder.clone(),
            model,
            ending,
            model_step,
            ledger,
            wire_bytes,
            wire_bytes_max,
            staleness_max: stale.map(|stale| stale.max),
            staleness_mean: stale.map(|stale| stale.sum as f64 / stale.count.max(1) as f64),
            membership: observer.membership(),
        };
        if let Some(files) = self.files.take() {
            files.finish(&self.prepared, &self.progress, self.confusion.as_ref(), &summary, observer);
        }
        // Nobody is done before rank 0 has written everything: a rank that leaves may end its process.
        self.learner.comm().barrier()?;
        // And nobody asks for samples any more.
        if let Some(lending) = &self.prepared.sets.lending {
            lending.close()?;
        }
        observer.event(Event::Finished(&summary));
        Ok(summary)
    }

    /// What all ranks and servers have sent since the run was started or resumed, and how old gradients were. Ends the servers. Collective.
    pub(super) fn sent(&mut self) -> Result<SentBefore, TrainError> {
        let own = self.learner.engine().wire_bytes();
        let served = self.end_servers()?;
        let own = self.before.own + own + served.as_ref().map_or(0, |end| end.own_bytes);
        let (mut sum, mut most) = ([own as i64], [own as i64]);
        self.learner.comm().all_reduce(&mut sum, Reduce::Sum)?;
        self.learner.comm().all_reduce(&mut most, Reduce::Max)?;
        let stale = served.map(|end| end.staleness);
        let staleness = match (self.before.staleness, stale) {
            (Some(before), Some(now)) => Some(before.with(now)),
            (before, now) => before.or(now),
        };
        Ok(SentBefore { own, bytes: sum[0] as u64, bytes_max: most[0] as u64, staleness })
    }

    /// Takes the weights of the best checkpoint, and gives its step; if it cannot be read, the last ones stay.
    /// Collective.
    fn take_best(&mut self, step: u64, observer: &mut dyn Observer) -> Result<u64, TrainError> {
        let missing =
            || CheckpointError::missing(&self.folder.join("checkpoints/best"), "it was not written");
        let read = |path: Option<PathBuf>| load_weights(&path.ok_or_else(missing)?);
        let best = (self.rank == 0).then(|| checkpoint::best(&self.folder).and_then(read));
        let mut there = [i64::from(matches!(best, Some(Ok(_))))];
        self.learner.comm().broadcast(&mut there, 0)?;
        let best = match best.transpose() {
            Ok(best) => best,
            Err(error) => {
                let what = "the best checkpoint cannot be read, so the model has the last weights";
                observer.event(Event::Warning(&format!("{what}: {error}")));
                None
            }
        };
        if there == [0] {
            self.learner.average_states()?;
            return Ok(self.learner.steps_done());
        }
        restore_weights(&mut self.learner, best.as_ref())?;
        Ok(best.map_or(step, |loaded| loaded.manifest.step))
    }

    /// The step of the best checkpoint, if it is another than the last.
    fn best_elsewhere(&self) -> Option<u64> {
        let best = self.progress.best.as_ref().filter(|b| b.value.is_some())?;
        (best.step != self.learner.steps_done()).then_some(best.step)
    }
}

/// A run of which nothing is done.
fn first_progress(prepared: &Prepared) -> Progress {
    let (best, stop) = (&prepared.job.output.best, &prepared.job.train.early_stop);
    let scales = prepared.learner.training.scaled;
    Progress {
        seconds: 0.0,
        evaluating: 0.0,
        samples: 0,
        window: (0.0, 0),
        epoch: (0.0, 0),
        last_epoch_loss: None,
        best: best.as_ref().map(Best::new),
        patience: stop.as_ref().map(|s| Patience::new(&s.metric, s.patience, s.min_delta)),
        metrics: Vec::new(),
        preparation: prepared.preparation(),
        data: None,
        batches_before: 0,
        loss_scale: scales.then(|| LossScale::new(prepared.job.train.loss_scale)),
        kernels: Vec::new(),
        degrees: None,
        cuts: Vec::new(),
        ledger: Some(SampleLedger::default()),
        planned: prepared.planned.clone(),
        frozen: None,
        peak_mib: None,
    }
}
