//! One generation of an elastic run on one rank, and what the rank carries to the next one.
//!
//! A generation is an ordinary run with a fixed group of ranks: the same loop, the same programs. It differs in how it begins and
//! ends. It begins with what its ranks carry: the state that is furthest counts, ranks that are behind receive it, new ones while
//! the others train (`entering`), and if no rank has one, rank 0 reads the last checkpoint. It ends when training is complete, when ranks are to change at the end of a step, or when a
//! rank is lost; then the others keep what they have learnt, all of it after a whole number of steps (`Plan::elastic` says why).
//!
//! What a step that cannot be finished has changed is given back: running statistics, which the forward pass writes. Parameters and
//! moments change only when nothing can fail any more. Where servers apply gradients as they come, what counts is a whole segment: until
//! every rank has all that the servers came to, each keeps what it had before.
//!
//! Once training is complete and the model is being shipped, weights are averaged and rounded: a rank that is lost then sends the
//! others back to the last checkpoint, which was written just before.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

use polyreme_collective::{Cause, Comm, Doing, Report};
use polyreme_exec::{ExecError, Kept, LearntState};
use serde::{Deserialize, Serialize};

use super::files::Files;
use super::folder::{FoundRun, Hold, hold_given};
use super::prepared::Prepared;
use super::snapshot::Progress;
use super::train::{Run, Wishes};
use crate::checkpoint::Loaded;
use crate::error::TrainError;
use crate::event::{Event, Observer, Summary};
use crate::judge::block_samples;
use crate::learner::Learner;
use crate::talk;

/// What a rank keeps from one generation to the next.
pub struct CarriedState {
    learnt: LearntState,
    progress: Progress,
    ended: bool,
    saved: (Instant, u64),
    /// Rank 0's.
    files: Option<Files>,
}

impl CarriedState {
    /// How far it is: two for each step, and one more if what follows the last one is done.
    pub fn held(&self) -> u64 {
        2 * self.learnt.steps_done() + u64::from(self.ended)
    }

    /// Gives up the run's folder, for a rank that leaves.
    pub fn release(&mut self) {
        self.files = None;
    }
}

/// One generation, as a rank is told to form it.
pub struct Generation<'a> {
    /// Its number, from 1.
    pub number: u64,
    /// The run's folder.
    pub folder: &'a Path,
    /// Whether the run has just begun: its folder is new, and rank 0 holds it.
    pub is_new: bool,
    /// How far the states of all ranks are.
    pub held: &'a [Option<u64>],
    /// The rank whose state counts.
    pub source: Option<usize>,
    /// Whether it only saves.
    pub save_only: bool,
    /// Why it was formed, in words.
    pub why: &'a str,
}

/// How a generation ended on a rank.
pub enum GenerationEnd {
    /// Training is complete, and everything is written.
    Finished(Box<Summary>),
    /// Ranks change, at the end of a step.
    Changed(Box<CarriedState>),
    /// Another rank is lost, or this one was told so.
    Lost {
        /// What ended the wait for it.
        report: Report,
        /// What this rank keeps; nothing if it has to go back to the last checkpoint.
        carried: Option<Box<CarriedState>>,
        /// Whether a step was begun that has to be done again.
        redoes: bool,
    },
}

/// What must be given back if it cannot be finished: by a step, the running statistics of before; by a segment of steps whose gradients go
/// to servers, everything.
#[derive(Default)]
pub(super) struct Undo {
    arenas: Vec<(Kept, Vec<f32>)>,
    /// Steps that were done when it was kept.
    step: Option<u64>,
    /// Whether steps that are done since are given back too.
    segment: bool,
}

impl Undo {
    /// A step begins.
    pub(super) fn keep(&mut self, learner: &Learner) {
        self.keep_arenas(learner, &[Kept::States]);
    }

    /// A segment begins.
    pub(super) fn keep_segment(&mut self, learner: &Learner) {
        self.keep_arenas(learner, &[Kept::Params, Kept::States, Kept::Moment1, Kept::Moment2]);
        self.segment = true;
    }

    /// All of the segment is done, on every rank.
    pub(super) fn end_segment(&mut self) {
        (self.step, self.segment) = (None, false);
    }

    fn keep_arenas(&mut self, learner: &Learner, what: &[Kept]) {
        self.arenas.resize_with(what.len(), || (Kept::States, Vec::new()));
        for ((kept, numbers), what) in self.arenas.iter_mut().zip(what) {
            *kept = *what;
            numbers.clear();
            numbers.extend_from_slice(learner.engine().kept(*what));
        }
        self.step = Some(learner.steps_done());
    }
}

/// Runs a generation on this rank.
pub fn run_generation(
    prepared: Prepared,
    mut comm: Comm,
    hold: Option<Hold>,
    carried: Option<Box<CarriedState>>,
    generation: &Generation,
    observer: &mut dyn Observer,
) -> Result<GenerationEnd, TrainError> {
    let mut prepared = prepared.for_ranks(comm.size()).inspect_err(|error| comm.fail(&error.to_string()))?;
    prepared.learner.inherits = generation.source.is_some();
    let entered = generation.is_entered(&prepared);
    if entered {
        prepared.cut.weights = generation.first_shares();
    }
    let mut carried = carried;
    let mut run = match Run::new(prepared, comm, 1, None) {
        Ok(run) => run,
        Err(error) => return lost(error, carried, false),
    };
    run.entered = entered;
    let outcome = catch_unwind(AssertUnwindSafe(|| run.generation(hold, &mut carried, generation, observer)));
    match outcome {
        Ok(Ok(Some(summary))) => Ok(GenerationEnd::Finished(Box::new(summary))),
        Ok(Ok(None)) => Ok(GenerationEnd::Changed(Box::new(run.into_carried().0))),
        Ok(Err(error)) => {
            run.fail(&error.to_string());
            let shipping = run.is_shipping();
            match carried {
                // It was not taken over yet.
                Some(carried) => lost(error, Some(carried), false),
                None if shipping || !run.has_state() => lost(error, None, false),
                None => {
                    let (carried, redoes) = run.into_carried();
                    lost(error, Some(Box::new(carried)), redoes)
                }
            }
        }
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            run.fail(&format!("it panicked: {}", text.unwrap_or("without a message")));
            resume_unwind(panic)
        }
    }
}

/// The end of a generation in which a rank was lost; any other error ends the run.
fn lost(
    error: TrainError,
    carried: Option<Box<CarriedState>>,
    redoes: bool,
) -> Result<GenerationEnd, TrainError> {
    let report = match &error {
        TrainError::Rank(report) | TrainError::Exec(ExecError::Rank(report)) => report.clone(),
        _ => return Err(error),
    };
    match report.cause {
        Cause::Gone | Cause::Silent { .. } | Cause::Unreachable { .. } | Cause::Stalled { .. } => {
            Ok(GenerationEnd::Lost { report, carried, redoes })
        }
        // What one rank says of itself would happen to its successor too.
        Cause::Failed { .. } | Cause::Disagrees { .. } | Cause::Damaged { .. } => Err(error),
    }
}

/// What the rank whose state counts tells the others.
#[derive(Serialize, Deserialize)]
struct Inherited {
    progress: Progress,
    ended: bool,
}

impl Run {
    fn generation(
        &mut self,
        hold: Option<Hold>,
        carried: &mut Option<Box<CarriedState>>,
        generation: &Generation,
        observer: &mut dyn Observer,
    ) -> Result<Option<Summary>, TrainError> {
        match generation.source {
            Some(source) => self.inherit(source, carried, generation)?,
            None => self.begin_or_go_back(hold, generation, observer)?,
        }
        let Generation { number, save_only, why, .. } = *generation;
        if save_only {
            self.save(observer)?;
            if let Some(files) = &mut self.files {
                files.settle(crate::event::Ending::Interrupted, observer)?;
            }
            self.learner.comm().barrier()?;
            return Ok(None);
        }
        let step = self.learner.steps_done();
        if self.rank == 0 && number == 1 {
            let outline = self.prepared.outline(&self.folder, step)?;
            observer.event(Event::Started(&outline));
        }
        self.tell_changes(observer);
        observer.event(Event::Membership { generation: number, ranks: self.prepared.ranks(), step, why });
        let (seconds, epoch) = (self.progress.seconds, self.prepared.pace.epoch(step));
        let standing = [("ranks".into(), self.prepared.ranks() as f64), ("generation".into(), number as f64)];
        if let Some(files) = &mut self.files {
            files.record(step, epoch, seconds, &standing, observer);
        }
        let steps = self.prepared.pace.total_steps(self.prepared.job.train.length);
        if !self.ended && step > 0 {
            let wishes = Wishes { stop: false, save: false, look: false, change: false };
            self.end_of_step(step - 1, step == steps, wishes, observer)?;
            self.ended = true;
        }
        let Some(ending) = self.train_steps(observer)? else {
            self.end_servers()?;
            return Ok(None);
        };
        self.undo = None;
        self.complete(ending, observer).map(Some)
    }

    /// Takes over what this rank carries, and what the rank has that is furthest. Collective.
    fn inherit(
        &mut self,
        source: usize,
        carried: &mut Option<Box<CarriedState>>,
        generation: &Generation,
    ) -> Result<(), TrainError> {
        let mut files = None;
        if let Some(own) = carried.take() {
            let CarriedState { learnt, progress, ended, saved, files: own_files } = *own;
            if !self.learner.engine_mut().adopt(learnt) {
                let what = "what this rank has learnt is laid out in another way than in its new program";
                return Err(TrainError::Progress(what.into()));
            }
            (self.progress, self.ended, files) = (progress, ended, own_files);
            (self.saved, self.saved_step) = saved;
            self.folder = generation.folder.to_path_buf();
        }
        let held = generation.held;
        if held[self.rank] != held[source] {
            // What it has is overwritten from here on, and counts again when all of it has come.
            self.folder = PathBuf::new();
        }
        let own = Inherited { progress: self.progress.clone(), ended: self.ended };
        let bad = |e: serde_json::Error| TrainError::Progress(e.to_string());
        let bytes = serde_json::to_vec(&own).map_err(bad)?;
        let told = talk::broadcast(self.learner.comm(), bytes, source)?;
        let inherited: Inherited = serde_json::from_slice(&told).map_err(bad)?;
        self.progress = inherited.progress;
        self.prepared.stats = self.progress.preparation.stats();
        self.prepared.target_stats = self.progress.preparation.target_stats();
        self.compare_kernels()?;
        // Running statistics are each rank's own.
        let keeps_states = held[self.rank] == held[source] && self.prepared.learner.plan.shards.is_none();
        if self.entered {
            self.learner.engine_mut().receive_states(source, keeps_states)?;
            self.let_in(generation)?;
        } else if held.iter().any(|other| *other != held[source]) {
            self.learner.comm().set_doing(Doing::Loading);
            self.learner.engine_mut().receive_learnt(source, keeps_states)?;
        }
        self.ended = inherited.ended;
        self.ready(generation.folder)?;
        if self.rank == 0 {
            self.files = Some(match files {
                Some(files) => files.of_group(&self.learner),
                None => {
                    let hold = hold_given(generation.folder, true)?;
                    Files::open(hold, &self.prepared, &self.learner)?
                }
            });
        }
        self.start_servers()
    }

    /// No rank has a state: the run begins, or goes back to its last checkpoint. Collective.
    fn begin_or_go_back(
        &mut self,
        hold: Option<Hold>,
        generation: &Generation,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let mut loaded: Option<Loaded> = None;
        let mut hold = hold;
        if self.rank == 0 && !generation.is_new {
            let mut notes = Vec::new();
            let (held, found) =
                FoundRun::at(generation.folder)?.hold(&mut |note: &str| notes.push(note.to_string()))?;
            let step = found.as_ref().map_or(0, |loaded| loaded.manifest.step);
            if generation.number > 1 {
                notes.push(format!(
                    "no rank that is left has the state of the run: it goes back to step {step}"
                ));
            }
            notes.iter().for_each(|note| observer.event(Event::Warning(note)));
            (hold, loaded) = (Some(held), found);
        }
        self.open(generation.folder, hold, loaded.as_ref())?;
        self.ended = true;
        Ok(())
    }

    /// What every generation needs that goes on.
    fn ready(&mut self, folder: &Path) -> Result<(), TrainError> {
        if let Some(set) = self.prepared.evaluated() {
            self.learner.prepare_trial(set.spec(), block_samples(&self.prepared.net, set.spec())?)?;
        }
        self.folder = folder.to_path_buf();
        Ok(())
    }

    /// Whether weights are being made into what is shipped.
    fn is_shipping(&self) -> bool {
        self.undo.is_none()
    }

    /// Whether this rank has begun, and so has a state that counts.
    fn has_state(&self) -> bool {
        !self.folder.as_os_str().is_empty() && self.learner.engine().has_learnt()
    }

    /// What this rank keeps, and whether it had begun a step that it did not finish.
    fn into_carried(self) -> (CarriedState, bool) {
        let Run {
            learner,
            mut progress,
            ended,
            files,
            undo,
            saved,
            saved_step,
            started,
            transfer,
            servers,
            ..
        } = self;
        // Threads end before the mailboxes that they read.
        drop((transfer, servers));
        progress.seconds += started.elapsed().as_secs_f64();
        let mut learnt = learner.into_learnt();
        let mut redoes = false;
        if let Some(Undo { arenas, step: Some(step), segment }) = undo
            && (segment || step == learnt.steps_done())
        {
            learnt.go_back(step, &arenas);
            redoes = true;
        }
        (CarriedState { learnt, progress, ended, saved: (saved, saved_step), files }, redoes)
    }
}
