//! From a decision to ranks that can talk: threads get the ends of one group, a process joins the others, and a
//! launcher starts them.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use polyreme_collective::Comm;
use polyreme_net::{Alarm, Control, Report, SegmentError};

use super::cores::{self, Machine};
use super::join::{self, JoinFailure};
use super::places::{self, RankRow};
use super::{Decided, Setup, Transport, crew, spawn};
use crate::{output, process};

/// The longest job file or path.
const TOLD_BYTES_MAX: usize = 16 << 20;

/// What a command needs to start its ranks.
pub struct RankEntry {
    /// How this process takes part.
    pub decided: Decided,
    /// This machine.
    pub machine: Machine,
    /// Whether ranks are pinned to their cores.
    pub pin: bool,
    /// Set when a launcher wants this rank to stop.
    pub stop: Arc<AtomicBool>,
    /// What the ranks of one job agree on before they talk.
    pub job: String,
    /// This program.
    pub program: PathBuf,
    /// Its arguments, for copies of it.
    pub args: Vec<OsString>,
}

/// The result of an entry.
pub enum Entered {
    /// This process has ranks.
    Ranks(Ranks),
    /// This process was the launcher, and all ranks have ended.
    Over(crew::CrewEnd),
}

/// An entry that failed.
#[derive(Debug)]
pub enum EnterError {
    /// The launcher could not start a rank.
    Start(std::io::Error),
    /// The ranks did not find each other.
    Join(JoinFailure),
    /// There is no memory for the ranks to meet in.
    Memory(SegmentError),
}

impl fmt::Display for EnterError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            EnterError::Start(error) => error.fmt(f),
            EnterError::Join(error) => error.fmt(f),
            EnterError::Memory(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for EnterError {}

/// The ranks of this process.
pub struct Ranks {
    /// Their ends of the group, in order.
    pub comms: Vec<Comm>,
    /// Their cores.
    pub seats: Seats,
    /// Threads of each rank.
    pub threads: usize,
    /// Where all ranks run, those of other processes included.
    pub rows: Vec<RankRow>,
    /// The control plane, which watches the other processes.
    pub control: Option<Control>,
}

/// The cores of the ranks of this process.
pub struct Seats {
    first: usize,
    /// By rank, from the first; `None` is any core.
    cores: Vec<Option<Vec<usize>>>,
}

impl Seats {
    /// A rank on any cores.
    pub fn anywhere(rank: usize) -> Seats {
        Seats { first: rank, cores: vec![None] }
    }

    /// Pins the calling thread, and those that it will start, to the cores of `rank`.
    pub fn pin(&self, rank: usize) {
        let cores = rank.checked_sub(self.first).and_then(|i| self.cores.get(i)?.as_ref());
        if let Some(cores) = cores {
            warn_unpinned(cores::pin(cores));
        }
    }
}

/// Carries out what was decided. A launcher returns when all ranks have ended.
pub fn enter(entry: RankEntry) -> Result<Entered, EnterError> {
    let RankEntry { decided, machine, pin, stop, job, program, args } = entry;
    process::raise_open_files();
    // A CPU quota does not give a rank its own core.
    let pin = pin && machine.quota.is_none();
    match decided.setup {
        Setup::Spawn { processes, transport, .. } => {
            let secret = spawn::random_secret().map_err(EnterError::Start)?;
            let members = spawn::members(&program, &args, processes, transport);
            crew::run(members, &secret, true).map(Entered::Over).map_err(EnterError::Start)
        }
        Setup::Threads { ranks, threads } => {
            let share = |cores: Vec<usize>| (pin && ranks > 1).then_some(cores);
            let cores: Vec<_> = machine.shares(ranks).into_iter().map(share).collect();
            let row = |(rank, cores): (usize, &Option<Vec<usize>>)| {
                RankRow::here(rank, threads, cores.as_deref(), Transport::Local.name())
            };
            let rows = cores.iter().enumerate().map(row).collect();
            Ok(Entered::Ranks(Ranks {
                comms: Comm::try_threads(ranks, &Alarm::default(), decided.patience.stall)
                    .map_err(EnterError::Memory)?,
                seats: Seats { first: 0, cores },
                threads,
                rows,
                control: None,
            }))
        }
        Setup::Process(place) => {
            // A process that was bound already has its cores; the other ranks of this host have theirs.
            let own = match machine.bound {
                true => machine.nodes.concat(),
                false => machine.shares(place.local_size).swap_remove(place.local_rank),
            };
            let own = (pin && place.size > 1).then_some(own);
            let threads = place.threads;
            // Pinned from here on, since threads of the transport belong to the rank too.
            if let Some(cores) = &own {
                warn_unpinned(cores::pin(cores));
            }
            let vars = |key: &str| std::env::var(key).ok();
            let found = join::join(&place, &job, decided.patience, stop, &vars).map_err(EnterError::Join)?;
            let (mut comm, control) = (found.comm, found.control);
            let row = RankRow::here(place.rank, threads, own.as_deref(), found.transport.name());
            let rows = places::gather(&mut comm, &row).map_err(|r| EnterError::Join(JoinFailure::Lost(r)))?;
            Ok(Entered::Ranks(Ranks {
                comms: vec![comm],
                seats: Seats { first: place.rank, cores: vec![own] },
                threads,
                rows,
                control,
            }))
        }
    }
}

impl Ranks {
    /// How many ranks there are, those of other processes included.
    pub fn size(&self) -> usize {
        self.rows.len()
    }

    /// The first rank of this process.
    pub fn first(&self) -> usize {
        self.seats.first
    }

    /// Whether rank 0, which speaks for all, is here.
    pub fn speaks(&self) -> bool {
        self.seats.first == 0
    }

    /// Rank 0 chooses a path, and all ranks get it.
    pub fn agree_on<E: From<Report>>(
        &mut self,
        choose: impl FnOnce() -> Result<PathBuf, E>,
    ) -> Result<PathBuf, E> {
        let chosen = if self.speaks() { choose()? } else { PathBuf::new() };
        let bytes = self.tell(chosen.into_os_string().into_encoded_bytes())?;
        Ok(PathBuf::from(OsStr::from_bytes(&bytes)))
    }

    /// All processes get the bytes of rank 0's.
    pub fn tell(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>, Report> {
        // Threads of one process have it already.
        let ([comm], true) = (&mut self.comms[..], self.rows.len() > 1) else { return Ok(bytes) };
        let mut len = [bytes.len() as i64];
        comm.broadcast(&mut len, 0)?;
        let len = usize::try_from(len[0]).unwrap_or(0).min(TOLD_BYTES_MAX);
        let mut told = if comm.rank() == 0 { bytes } else { Vec::new() };
        told.resize(len, 0);
        comm.broadcast(&mut told, 0)?;
        Ok(told)
    }

    /// Calls `work` once for each rank of this process, each in its own thread on its own cores. A single one stays on
    /// this thread, as MPI requires.
    pub fn run<T: Send>(mut self, work: impl Fn(Comm) -> T + Sync) -> Vec<T> {
        let seats = &self.seats;
        let rank = |comm: Comm| {
            seats.pin(comm.rank());
            work(comm)
        };
        if self.comms.len() < 2 {
            return self.comms.drain(..).map(rank).collect();
        }
        let rank = &rank;
        std::thread::scope(|s| {
            let ranks: Vec<_> = self
                .comms
                .drain(..)
                .map(|comm| {
                    let named = std::thread::Builder::new().name(format!("rank {}", comm.rank()));
                    named.spawn_scoped(s, move || rank(comm)).expect("a process that runs can start threads")
                })
                .collect();
            let join = |r: std::thread::ScopedJoinHandle<T>| {
                r.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            ranks.into_iter().map(join).collect()
        })
    }
}

/// A rank that cannot be pinned is only slower.
fn warn_unpinned(pinned: std::io::Result<()>) {
    if let Err(error) = pinned {
        let warning =
            format!("warning: a rank cannot be pinned to its cores ({error}); use --no-pin to silence this");
        output::err().line(&warning);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_run_on_their_own_cores() {
        let machine = Machine::read();
        let shares = machine.shares(2);
        for pin in [true, false] {
            let entry = RankEntry {
                decided: Decided {
                    setup: Setup::Threads { ranks: 2, threads: 1 },
                    why: String::new(),
                    open: false,
                    patience: Default::default(),
                },
                machine: Machine { quota: None, ..machine.clone() },
                pin,
                stop: Arc::default(),
                job: "test".into(),
                program: PathBuf::new(),
                args: Vec::new(),
            };
            let Ok(Entered::Ranks(ranks)) = enter(entry) else { panic!("threads are ranks") };
            assert!(ranks.speaks() && ranks.size() == 2);
            let seen = ranks.run(|comm| (comm.rank(), cores::pinned()));
            for (rank, cores) in seen {
                let mut want = if pin { shares[rank].clone() } else { machine.nodes.concat() };
                want.sort_unstable();
                assert_eq!(cores, want, "rank {rank}");
            }
        }
    }
}
