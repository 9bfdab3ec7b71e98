//! The ranks of a run in this process: a thread for each, all running the same loop.
//!
//! If one fails, it tells the others why, and their waits end: everybody stops at the same place, and whoever started
//! the run sees one report that names the rank.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::thread;

use polyreme_collective::Comm;

use super::folder::Hold;
use super::prepared::Prepared;
use super::train::Run;
use super::turns::{SentBefore, TurnedRun, steps_before};
use crate::checkpoint::Loaded;
use crate::error::TrainError;
use crate::event::{Event, Observer, Silent, Summary};

/// Trains `prepared` in `folder` with the ranks of this process, one for each of `comms`; the first runs on this
/// thread. With `resumed`, goes on from there, whatever number of ranks wrote it.
///
/// Rank 0 alone reads `resumed`, writes files and tells `observer`. Of a process that does not have it, `observer` is
/// asked whether to stop and hears nothing, and the summary names files that it does not have.
///
/// # Panics
/// If `comms` is empty, or if the first rank does.
pub fn run_ranks(
    prepared: Prepared,
    folder: &Path,
    resumed: Option<&Loaded>,
    comms: Vec<Comm>,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    run_ranks_at(prepared, folder, None, resumed, comms, observer, &|_| ())
}

/// The same in a folder whose lock is held already (rank 0's process takes it otherwise, when it begins to write), and
/// with something that is done first on each rank's own thread: the place to choose its cores, which all threads that it
/// starts inherit.
///
/// # Panics
/// As [`run_ranks`].
pub fn run_ranks_at(
    prepared: Prepared,
    folder: &Path,
    hold: Option<Hold>,
    resumed: Option<&Loaded>,
    comms: Vec<Comm>,
    observer: &mut dyn Observer,
    begin: &(dyn Fn(usize) + Sync),
) -> Result<Summary, TrainError> {
    let local = comms.len();
    let mut comms = comms.into_iter();
    let mut first = comms.next().expect("a process has at least one rank");
    let prepared = prepared.for_ranks(first.size()).inspect_err(|error| first.fail(&error.to_string()))?;
    thread::scope(|scope| {
        let mut others = Vec::new();
        for comm in comms {
            let (rank, prepared) = (comm.rank(), prepared.clone());
            let body = move || {
                begin(rank);
                one_rank(prepared, folder, None, resumed, comm, local, &mut Silent)
            };
            match thread::Builder::new().name(format!("rank {rank}")).spawn_scoped(scope, body) {
                Ok(thread) => others.push(thread),
                Err(source) => {
                    let error = TrainError::Thread { rank, source };
                    // The ranks that have begun end their wait with this.
                    first.fail(&error.to_string());
                    return Err(error);
                }
            }
        }
        begin(first.rank());
        let mine = match first.rank() {
            0 => one_rank(prepared, folder, hold, resumed, first, local, observer),
            _ => one_rank(prepared, folder, None, None, first, local, &mut Deaf(observer)),
        };
        // What went wrong on another rank, a panic included, it has told this one.
        others.into_iter().for_each(|other| drop(other.join()));
        match mine {
            Ok(summary) => Ok(summary),
            Err(Stop::Error(error)) => Err(error),
            Err(Stop::Panic(panic)) => resume_unwind(panic),
        }
    })
}

/// Why a rank ended before its time.
enum Stop {
    Error(TrainError),
    Panic(Box<dyn Any + Send>),
}

/// One rank's whole life. Whatever ends it, the others hear of it.
fn one_rank(
    prepared: Prepared,
    folder: &Path,
    hold: Option<Hold>,
    resumed: Option<&Loaded>,
    mut comm: Comm,
    local: usize,
    observer: &mut dyn Observer,
) -> Result<Summary, Stop> {
    let done = steps_before(&prepared, &mut comm, resumed).map_err(Stop::Error)?;
    let part = RunPart { prepared: prepared.clone(), folder, hold, resumed, local, before: None };
    let mut turned = match one_part(part, done, comm, observer)? {
        PartEnd::Over(summary) => return Ok(*summary),
        PartEnd::Turned(turned) => turned,
    };
    loop {
        let TurnedRun { comm, step, hold, loaded, before } = *turned;
        let (prepared, resumed, before) = (prepared.clone(), loaded.as_ref(), Some(before));
        let part = RunPart { prepared, folder, hold, resumed, local, before };
        match one_part(part, step, comm, observer)? {
            PartEnd::Over(summary) => return Ok(*summary),
            PartEnd::Turned(again) => turned = again,
        }
    }
}

/// A part of a run in which ranks agree in one way.
struct RunPart<'a> {
    prepared: Prepared,
    folder: &'a Path,
    hold: Option<Hold>,
    resumed: Option<&'a Loaded>,
    local: usize,
    /// What earlier parts came to.
    before: Option<SentBefore>,
}

/// How it ends.
enum PartEnd {
    Over(Box<Summary>),
    /// Ranks agree in another way from here on.
    Turned(Box<TurnedRun>),
}

/// One part of a rank's life.
fn one_part(part: RunPart, done: u64, comm: Comm, observer: &mut dyn Observer) -> Result<PartEnd, Stop> {
    let RunPart { prepared, folder, hold, resumed, local, before } = part;
    let prepared = prepared.at_step(done).map_err(Stop::Error)?;
    let mut run = Run::new(prepared, comm, local, resumed).map_err(Stop::Error)?;
    run.before = before.unwrap_or_default();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        run.open(folder, hold, resumed)?;
        run.train(observer, before.is_some())
    }));
    match outcome {
        Ok(Ok(Some(summary))) => Ok(PartEnd::Over(Box::new(summary))),
        Ok(Ok(None)) => match run.settle_to_turn(observer) {
            Ok(before) => run
                .turn(before, observer)
                .map(|turned| PartEnd::Turned(Box::new(turned)))
                .map_err(Stop::Error),
            Err(error) => {
                run.fail(&error.to_string());
                Err(Stop::Error(error))
            }
        },
        Ok(Err(error)) => {
            run.fail(&error.to_string());
            Err(Stop::Error(error))
        }
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            run.fail(&format!("it panicked: {}", text.unwrap_or("without a message")));
            Err(Stop::Panic(panic))
        }
    }
}

/// Asks an observer whether to stop, and tells it nothing.
struct Deaf<'a>(&'a dyn Observer);

impl Observer for Deaf<'_> {
    fn event(&mut self, _: Event<'_>) {}

    fn stop_requested(&self) -> bool {
        self.0.stop_requested()
    }

    fn change_requested(&self) -> bool {
        self.0.change_requested()
    }
}
