//! Runs in which the way to agree changes after some steps (`parallel.sync = { start = "allreduce", then = "local", after = 1000 }`).
//!
//! A run with a rule is two runs in one: at the step of the rule it takes a checkpoint, ends what the first way needs (servers, engine,
//! programs), and goes on from that checkpoint in the second way, as `resume --set parallel.sync=…` would. So both come to the same bits, and
//! there is one way for what ranks have learnt to get from one layout to another. What it costs is writing and reading one checkpoint.

use polyreme_collective::servers::Staleness;
use polyreme_collective::{Comm, Doing};

use super::folder::{FoundRun, Hold};
use super::prepared::Prepared;
use super::train::Run;
use crate::checkpoint::Loaded;
use crate::error::TrainError;
use crate::event::{Ending, Event, Observer};

/// What the steps before a turn came to that is not in a checkpoint.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct SentBefore {
    /// Bytes that this rank sent, with its server.
    pub(super) own: u64,
    /// Those of all ranks.
    pub(super) bytes: u64,
    /// Those of the rank that sent the most.
    pub(super) bytes_max: u64,
    /// How old gradients were, if there were servers.
    pub(super) staleness: Option<Staleness>,
}

/// A run at its turn: what the second part of it needs.
pub(super) struct TurnedRun {
    /// The group of all ranks.
    pub(super) comm: Comm,
    /// Steps done.
    pub(super) step: u64,
    /// Rank 0's folder.
    pub(super) hold: Option<Hold>,
    /// Rank 0's checkpoint of this moment.
    pub(super) loaded: Option<Loaded>,
    /// What the summary adds.
    pub(super) before: SentBefore,
}

impl Prepared {
    /// The same for what follows this step, in the way in which ranks agree then.
    pub(super) fn at_step(mut self, done: u64) -> Result<Prepared, TrainError> {
        let Some(turn) = self.job.parallel.turn else { return Ok(self) };
        let ranks = self.ranks();
        (self.job.parallel.sync, self.turns_at) = match done < turn.after {
            true => (turn.start, Some(turn.after)),
            false => (turn.then, None),
        };
        self.follow_sync();
        self.for_ranks(ranks)
    }

    /// The number of steps after which this part of the run ends.
    pub(super) fn until(&self) -> u64 {
        let total = self.pace.total_steps(self.job.train.length);
        self.turns_at.map_or(total, |turn| turn.min(total))
    }
}

/// How many steps a run has done that is resumed, or that begins: rank 0 knows it. Collective; nothing is said if there is no turn.
pub(super) fn steps_before(
    prepared: &Prepared,
    comm: &mut Comm,
    resumed: Option<&Loaded>,
) -> Result<u64, TrainError> {
    if prepared.job.parallel.turn.is_none() {
        return Ok(0);
    }
    let known = resumed.filter(|_| comm.rank() == 0).map_or(0, |loaded| loaded.manifest.step);
    let mut done = [known as i64];
    comm.broadcast(&mut done, 0)?;
    Ok(done[0] as u64)
}

impl Run {
    /// Saves what the first way to agree has come to, at the step of the turn, and ends its servers. Collective.
    pub(super) fn settle_to_turn(&mut self, observer: &mut dyn Observer) -> Result<SentBefore, TrainError> {
        self.save(observer)?;
        self.learner.comm().set_doing(Doing::Saving);
        if let Some(files) = &mut self.files {
            files.settle(Ending::Interrupted, observer)?;
        }
        self.sent()
    }

    /// Leaves everything else of it.
    pub(super) fn turn(
        mut self,
        before: SentBefore,
        observer: &mut dyn Observer,
    ) -> Result<TurnedRun, TrainError> {
        let (step, folder) = (self.learner.steps_done(), self.folder.clone());
        // The lock of the folder goes with them, and is taken again.
        let is_first = self.files.take().is_some();
        let mut comm = self.learner.leave();
        let (mut hold, mut loaded) = (None, None);
        if is_first {
            let warn = &mut |note: &str| observer.event(Event::Warning(note));
            let (held, found) = FoundRun::at(&folder)
                .and_then(|found| found.hold(warn))
                .inspect_err(|error| comm.fail(&error.to_string()))?;
            if found.as_ref().is_none_or(|found| found.manifest.step != step) {
                let what = format!(
                    "the checkpoint of step {step}, at which `parallel.sync` changes, was not written"
                );
                comm.fail(&what);
                return Err(TrainError::Progress(what));
            }
            (hold, loaded) = (Some(held), found);
            let kind = self.prepared.job.parallel.turn.map_or("", |turn| turn.then.name());
            observer.event(Event::Turned { step, sync: kind });
        }
        Ok(TurnedRun { comm, step, hold, loaded, before })
    }
}
