//! Whole runs with threads as ranks, for the tests around them.

use std::path::Path;

use polyreme_collective::Comm;
use polyreme_train::TrainError;
use polyreme_train::checkpoint::{self, Loaded};
use polyreme_train::event::{Ending, Event, Observer, Summary};
use polyreme_train::job::Job;
use polyreme_train::run::{Given, Prepared, run_ranks};
use polyreme_train::weights::read_weights;

/// Remembers what a run told, and stops it after some step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watcher {
    pub(crate) losses: Vec<f64>,
    pub(crate) metrics: Vec<(String, f64)>,
    pub(crate) notes: Vec<String>,
    /// Steps that were skipped.
    pub(crate) overflows: u64,
    pub(crate) stop_after: Option<u64>,
    step: u64,
}

impl Observer for Watcher {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Step(done) => {
                self.losses.extend(done.loss);
                self.step = done.step;
                assert!((0.0..=1.0).contains(&done.waiting_for_ranks), "{}", done.waiting_for_ranks);
            }
            Event::Evaluated { metrics, .. } => self.metrics.extend_from_slice(metrics),
            Event::Balanced { why, .. } | Event::Followed { why, .. } => self.notes.push(why.into()),
            Event::TooSlow => self.notes.push("too slow".into()),
            Event::Warning(text) if text.contains("overflowed in f16") => self.overflows += 1,
            Event::Warning(text) if text.contains("bits will differ") => self.notes.push(text.into()),
            Event::Warning(text) if text.contains("products were summed") => self.notes.push(text.into()),
            Event::Warning(text) => panic!("{text}"),
            Event::Started(_)
            | Event::Saving { .. }
            | Event::Membership { .. }
            | Event::Servers(_)
            | Event::Turned { .. }
            | Event::Finished(_) => {}
        }
    }

    fn stop_requested(&self) -> bool {
        self.stop_after.is_some_and(|after| self.step >= after)
    }
}

/// What a run came to.
pub(crate) struct Outcome {
    pub(crate) summary: Summary,
    pub(crate) watcher: Watcher,
    /// Names and numbers of the weights; empty if it was interrupted.
    pub(crate) weights: Vec<(String, Vec<f32>)>,
}

/// A job from lines of a job file.
pub(crate) fn job(lines: &str) -> Job {
    Job::from_text(lines, "job.toml", Path::new("/"), &[]).unwrap_or_else(|e| panic!("{e}"))
}

/// Trains `job` with so many ranks in `folder`; with a checkpoint there, goes on from it.
pub(crate) fn run(
    job: &Job,
    given: Given,
    ranks: usize,
    folder: &Path,
    stop_after: Option<u64>,
) -> Result<Outcome, TrainError> {
    let prepared = Prepared::new(job.clone(), given, 1).unwrap();
    let resumed: Option<Loaded> = folder.exists().then(|| checkpoint::latest_whole(folder).unwrap().0);
    let mut watcher = Watcher { stop_after, ..Watcher::default() };
    let summary = run_ranks(prepared, folder, resumed.as_ref(), Comm::local(ranks), &mut watcher)?;
    // Whatever the job is and however it is split: each sample counts as often as it should.
    let exact = summary.ledger.as_ref().map(|ledger| ledger.exact);
    assert_eq!(exact, Some(Some(true)), "{:?}", summary.ledger);
    let weights = match summary.ending {
        Ending::Interrupted => Vec::new(),
        _ => read_weights(&summary.model).unwrap().into_iter().map(|w| (w.name, w.data)).collect(),
    };
    Ok(Outcome { summary, watcher, weights })
}
