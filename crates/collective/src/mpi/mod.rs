//! Ranks that `mpirun` or `srun` started: MPI's own collectives, through the library of the launcher, which is loaded at
//! run time.
//!
//! MPI is fail-stop: when a rank dies, its launcher ends the others and says so; a rank that fails prints why and
//! aborts the job. Calls come from one thread at a time, also where a rank is in several groups. Counts are 32-bit in
//! MPI: all-reduces and broadcasts of more elements are split, other operations refuse them.
//!
//! # Layout
//! - [`mod@find`]: the library. `dl`: how libraries are loaded. [`abi`]: what libraries disagree on.
//! - `calls`: its functions. `runtime`: the library, started. `operators`: sums that MPI does not have.
//! - `group`: one rank's end of a communicator. `mail`: messages in it.

pub mod abi;
mod calls;
mod dl;
pub mod find;
mod group;
mod mail;
mod operators;
mod runtime;

use std::ffi::c_int;

use polyreme_net::{Cause, Report};

use self::abi::{Abi, Pointer};
pub use self::find::{MpiLibrary, NotFound, Search, find};
use self::group::MpiGroup;
use self::mail::Mail;
use self::runtime::Runtime;
use crate::work::Work;

/// This rank's end of `MPI_COMM_WORLD`.
pub struct Mpi(EitherGroup);

/// The two kinds of handles.
enum EitherGroup {
    Pointers(MpiGroup<Pointer>),
    Numbers(MpiGroup<c_int>),
}

/// The same expression for either kind of handle.
macro_rules! either {
    ($inner:expr, $group:ident => $value:expr) => {
        match $inner {
            EitherGroup::Pointers($group) => $value,
            EitherGroup::Numbers($group) => $value,
        }
    };
}

impl Mpi {
    /// Starts a library.
    pub fn start(found: &MpiLibrary) -> Result<Mpi, String> {
        // SAFETY: handles are what the library's interface says.
        let inner = unsafe {
            match found.abi {
                Abi::OpenMpi | Abi::Standard => {
                    EitherGroup::Pointers(MpiGroup::world(Runtime::start(found)?)?)
                }
                Abi::Mpich => EitherGroup::Numbers(MpiGroup::world(Runtime::start(found)?)?),
            }
        };
        Ok(Mpi(inner))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        either!(&self.0, group => group.rank)
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        either!(&self.0, group => group.size)
    }

    /// This rank's number in the job.
    pub fn name(&self) -> usize {
        either!(&self.0, group => group.name)
    }

    /// This rank's end of the group of ranks with the same color, ordered by `place`; `names` are their numbers in the
    /// job. All ranks call it, and no operation may be pending in any group.
    pub fn split(&mut self, color: usize, place: usize, names: &[usize]) -> Result<Mpi, String> {
        Ok(Mpi(match &mut self.0 {
            EitherGroup::Pointers(group) => EitherGroup::Pointers(group.split(color, place, names)?),
            EitherGroup::Numbers(group) => EitherGroup::Numbers(group.split(color, place, names)?),
        }))
    }

    /// This group's messages, which go beside its operations; `None` before it was split.
    pub(crate) fn mail(&self) -> Option<MpiMail> {
        let name = self.name();
        match &self.0 {
            EitherGroup::Pointers(group) => {
                group.mail().map(|mail| MpiMail { name, inner: Mails::Pointers(mail) })
            }
            EitherGroup::Numbers(group) => {
                group.mail().map(|mail| MpiMail { name, inner: Mails::Numbers(mail) })
            }
        }
    }

    /// Prints the report, and ends all ranks.
    pub fn abort(&self, report: &Report) {
        eprintln!("{report}; the job is aborted");
        either!(&self.0, group => group.abort());
    }

    /// Runs this rank's part of an operation; one thread at a time.
    ///
    /// # Safety
    /// The memory that `work` names is valid, and nothing else accesses it meanwhile.
    pub unsafe fn run(&mut self, work: &Work, step: u64) -> Result<(), Report> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { either!(&mut self.0, group => group.run(work)) };
        outcome.map_err(|why| Report {
            rank: self.name(),
            host: String::new(),
            step,
            op: work.name().into(),
            cause: Cause::Failed { why },
        })
    }
}

/// One rank's messages in a group.
pub(crate) struct MpiMail {
    name: usize,
    inner: Mails,
}

/// The two kinds of handles.
enum Mails {
    Pointers(Mail<Pointer>),
    Numbers(Mail<c_int>),
}

impl MpiMail {
    /// Starts a message; returns the number to wait for.
    ///
    /// # Safety
    /// The memory is valid and nothing else accesses it until the number was waited for.
    pub(crate) unsafe fn start(&mut self, work: &Work, step: u64) -> Result<u64, Report> {
        // SAFETY: the caller's promise.
        let started = unsafe {
            match &mut self.inner {
                Mails::Pointers(mail) => mail.start(work),
                Mails::Numbers(mail) => mail.start(work),
            }
        };
        started.map_err(|why| self.report(why, step, work.name()))
    }

    /// Waits until a message was sent, or has come.
    pub(crate) fn wait(&mut self, id: u64, step: u64) -> Result<(), Report> {
        let waited = match &mut self.inner {
            Mails::Pointers(mail) => mail.wait(id),
            Mails::Numbers(mail) => mail.wait(id),
        };
        waited.map_err(|why| self.report(why, step, "send and receive"))
    }

    fn report(&self, why: String, step: u64, op: &str) -> Report {
        let cause = Cause::Failed { why };
        Report { rank: self.name, host: String::new(), step, op: op.into(), cause }
    }
}
