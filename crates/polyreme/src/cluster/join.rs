//! How a process that is one rank finds the others: it learns the secret and where rank 0 is, joins them there, and
//! connects to them over the transport.

use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use polyreme_collective::links::peers;
use polyreme_collective::{Comm, ShmSetup, TcpOptions};
use polyreme_net::secret::SecretError;
use polyreme_net::{
    Control, First, JoinError, JoinOptions, Joined, Member, Patience, Report, Secret, Tell, join as meet,
};

use crate::output;

use super::interfaces::{NoAddress, choose, interfaces};
use super::levels::{self, over_levels};
use super::lifeline::{Lifeline, Unsaid, last_words, listening};
use super::{ClusterRank, HOST, INTERFACE, MPI_LIBRARY, Transport, mpi};

/// How long a rank waits for the others to be started, and how much longer for each of them: launchers start many one
/// after the other.
const START_TIME: Duration = Duration::from_secs(120);
const START_TIME_PER_RANK: Duration = Duration::from_millis(500);

/// How long a rank waits for this many to be started.
pub(super) fn start_time(ranks: usize) -> Duration {
    START_TIME + START_TIME_PER_RANK * ranks as u32
}

/// Ranks that are started together are of one generation; no rank joins later.
const GENERATION: u64 = 0;

/// The group that all ranks are in.
pub(super) const ALL_RANKS: u16 = 0;

/// A rank that has found the others.
pub struct JoinedRank {
    /// Its end of the group.
    pub comm: Comm,
    /// The control plane; `None` where MPI watches the ranks, or for a lone rank.
    pub control: Option<Control>,
    /// What carries its data.
    pub transport: Transport,
}

/// The ranks did not find each other.
#[derive(Debug)]
pub enum JoinFailure {
    /// The launcher did not pass what this rank needs.
    Unsaid(Unsaid),
    /// The secret is malformed.
    Secret(SecretError),
    /// No address to listen on.
    Address(NoAddress),
    /// Rank 0 cannot listen, or cannot say where.
    Listen(io::Error),
    /// Not all ranks joined, or not all pairs that must talk can.
    Join(JoinError),
    /// Memory cannot be shared.
    Memory(String),
    /// A rank was lost on the way.
    Lost(Report),
    /// MPI did not start.
    Mpi(String),
    /// The environment does not say enough.
    Unknown,
}

impl fmt::Display for JoinFailure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            JoinFailure::Unsaid(error) => error.fmt(f),
            JoinFailure::Secret(error) => error.fmt(f),
            JoinFailure::Address(error) => error.fmt(f),
            JoinFailure::Listen(error) => {
                write!(f, "rank 0 cannot listen: {error}; name another --interface")
            }
            JoinFailure::Join(error) => error.fmt(f),
            JoinFailure::Memory(why) => {
                write!(f, "ranks of this host cannot share memory: {why}; use --transport tcp")
            }
            JoinFailure::Lost(report) => report.fmt(f),
            JoinFailure::Mpi(why) => write!(f, "mpi: {why}"),
            JoinFailure::Unknown => write!(
                f,
                "the address of rank 0 and the secret are missing; set MASTER_ADDR, MASTER_PORT and POLYREME_SECRET"
            ),
        }
    }
}

impl std::error::Error for JoinFailure {}

/// Joins the others; returns when all are there and pairs that will talk are connected. `stop` is set when a launcher
/// asks this rank to stop, and `vars` is the environment.
pub fn join(
    place: &ClusterRank,
    job: &str,
    patience: Patience,
    stop: Arc<AtomicBool>,
    vars: &dyn Fn(&str) -> Option<String>,
) -> Result<JoinedRank, JoinFailure> {
    // It is read until the process ends, whatever happens to the rest.
    let end = || std::process::exit(1);
    let listen = || Lifeline::listen(io::stdin(), Some(last_words(patience)), stop.clone(), stop, end);
    let lifeline = place.launched.then(listen);
    if place.size == 1 {
        return Ok(JoinedRank { comm: Comm::alone(), control: None, transport: Transport::Local });
    }
    if place.transport == Some(Transport::Mpi) {
        return by_mpi(place, patience, vars);
    }
    let options = match &lifeline {
        Some(lifeline) => told(place, lifeline, vars)?,
        None => found(place, vars)?,
    };
    let transport = place.transport;
    let options = JoinOptions {
        job: format!("{job} {}", place.start.as_deref().unwrap_or_default()),
        generation: GENERATION,
        timeout: start_time(place.size),
        patience,
        first: First::Some(Arc::new(move |members, rank| talks(transport, members, rank))),
        host_key: vars(HOST),
        encrypt: place.encrypt,
        tell: Tell::to(|line| output::err().line(&format!("warning: {line}"))),
        ..options
    };
    let joined = meet(options).map_err(JoinFailure::Join)?;
    match carried(transport, &joined.members) {
        Carried::Memory => over_memory(joined),
        Carried::Nothing => Err(JoinFailure::Memory("they are not all on one host".into())),
        Carried::Sockets => over_sockets(joined),
        Carried::Levels => over_levels(joined),
    }
}

/// What carries the data of these ranks.
enum Carried {
    Memory,
    Sockets,
    Levels,
    /// Shared memory was asked for, and they do not share any.
    Nothing,
}

fn carried(transport: Option<Transport>, members: &[Member]) -> Carried {
    let hosts = levels::hosts(members);
    match transport {
        Some(Transport::Shm) | None if hosts.len() == 1 => Carried::Memory,
        Some(Transport::Shm) => Carried::Nothing,
        // Asked for: sockets, whichever hosts the ranks are on.
        Some(_) => Carried::Sockets,
        None if hosts.iter().any(|ranks| ranks.len() > 1) => Carried::Levels,
        None => Carried::Sockets,
    }
}

/// The ranks that a rank will talk with, by group: connected and checked before step 0.
fn talks(transport: Option<Transport>, members: &[Member], rank: usize) -> Vec<(u16, usize)> {
    match carried(transport, members) {
        Carried::Memory | Carried::Nothing => Vec::new(),
        Carried::Levels => levels::talks(members, rank),
        Carried::Sockets => peers(rank, members.len()).into_iter().map(|peer| (ALL_RANKS, peer)).collect(),
    }
}

/// Options from our own launcher; rank 0 tells it where it listens.
fn told(
    place: &ClusterRank,
    lifeline: &Lifeline,
    vars: &dyn Fn(&str) -> Option<String>,
) -> Result<JoinOptions, JoinFailure> {
    let secret = lifeline.secret().map_err(JoinFailure::Unsaid)?;
    let secret = Secret::from_text(&secret).map_err(JoinFailure::Secret)?;
    let (wanted, ssh) = (vars(INTERFACE), vars("SSH_CONNECTION"));
    let bind = || {
        let one_host = place.local_size == place.size;
        choose(wanted.as_deref(), ssh.as_deref(), one_host, &interfaces()).map_err(JoinFailure::Address)
    };
    if place.rank > 0 {
        let master = lifeline.master().map_err(JoinFailure::Unsaid)?;
        let bind = wanted.is_some().then(bind).transpose()?;
        return Ok(JoinOptions { bind, ..JoinOptions::new(place.rank, place.size, master, secret) });
    }
    let bind = bind()?;
    let listener = TcpListener::bind((bind, 0)).map_err(JoinFailure::Listen)?;
    let address = listener.local_addr().map_err(JoinFailure::Listen)?.to_string();
    let mut out = io::stdout().lock();
    out.write_all(listening(&address).as_bytes()).and_then(|()| out.flush()).map_err(JoinFailure::Listen)?;
    let options = JoinOptions::new(place.rank, place.size, address, secret);
    Ok(JoinOptions { bind: Some(bind), listener: Some(listener.into()), ..options })
}

/// Options from the environment.
fn found(place: &ClusterRank, vars: &dyn Fn(&str) -> Option<String>) -> Result<JoinOptions, JoinFailure> {
    let (Some(master), Some(secret)) = (&place.master, &place.secret) else {
        return Err(JoinFailure::Unknown);
    };
    let bind = match vars(INTERFACE) {
        None => None,
        Some(wanted) => {
            Some(choose(Some(&wanted), None, false, &interfaces()).map_err(JoinFailure::Address)?)
        }
    };
    Ok(JoinOptions { bind, ..JoinOptions::new(place.rank, place.size, master, secret.clone()) })
}

/// Processes of one host: rank 0 creates the memory, and the others open it.
pub(super) fn over_memory(joined: Joined) -> Result<JoinedRank, JoinFailure> {
    let Joined { rank, size, ref members, ref control, .. } = joined;
    let generation = joined.generation();
    let fail = |why: String| {
        control.fail(&why);
        JoinFailure::Memory(why)
    };
    let own = match rank {
        0 => Some(Comm::segment(size, generation).map_err(|e| fail(e.to_string()))?),
        _ => None,
    };
    let path = own.as_ref().and_then(|s| s.path()).unwrap_or_default();
    let paths = control.share(path.as_bytes()).map_err(JoinFailure::Lost)?;
    let segment = match own {
        Some(segment) => segment,
        None => {
            let path = String::from_utf8_lossy(&paths[0]);
            Comm::open_segment(&path, size, generation).map_err(|e| fail(e.to_string()))?
        }
    };
    let host = members[rank].host.clone();
    // The control plane decides which rank is stuck.
    let (alarm, stall) = (control.alarm(), Duration::MAX);
    let setup = ShmSetup { host, alarm, stall, ..ShmSetup::new(rank, size, segment) };
    let comm = Comm::shm(setup).map_err(JoinFailure::Lost)?;
    Ok(joined_by(joined, comm, Transport::Shm))
}

/// Several hosts: streams between ranks that talk.
pub(super) fn over_sockets(joined: Joined) -> Result<JoinedRank, JoinFailure> {
    let all: Vec<usize> = (0..joined.size).collect();
    let links = joined.links(ALL_RANKS, &all).map_err(JoinFailure::Listen)?;
    let comm = Comm::tcp(links).map_err(JoinFailure::Lost)?;
    Ok(joined_by(joined, comm, Transport::Tcp))
}

/// A rank whose group was made where all have met. Groups of some ranks, messages and mailboxes are connected there too.
pub(super) fn joined_by(joined: Joined, mut comm: Comm, transport: Transport) -> JoinedRank {
    let control = joined.control.clone();
    comm.tell(&control);
    comm.set_joined(joined);
    JoinedRank { comm, control: Some(control), transport }
}

/// Ranks that MPI started. It watches its ranks itself.
fn by_mpi(
    place: &ClusterRank,
    patience: Patience,
    vars: &dyn Fn(&str) -> Option<String>,
) -> Result<JoinedRank, JoinFailure> {
    let library = mpi::library(&place.mpi, vars).map_err(JoinFailure::Mpi)?;
    let mut comm = Comm::mpi(&library).map_err(|why| JoinFailure::Mpi(format!("{library}: {why}")))?;
    if (comm.rank(), comm.size()) != (place.rank, place.size) {
        return Err(JoinFailure::Mpi(format!(
            "{library} says rank {} of {}, but the launcher started this process as rank {} of {}; set {MPI_LIBRARY} to the library of that launcher",
            comm.rank(),
            comm.size(),
            place.rank,
            place.size
        )));
    }
    comm.set_tcp(beside_mpi(place, patience, vars));
    Ok(JoinedRank { comm, control: None, transport: Transport::Mpi })
}

/// How ranks that MPI started reach each other over TCP, for mailboxes.
fn beside_mpi(place: &ClusterRank, patience: Patience, vars: &dyn Fn(&str) -> Option<String>) -> TcpOptions {
    let (wanted, one_host) = (vars(INTERFACE), place.local_size == place.size);
    let bind = Arc::new(move |rank| address_beside_mpi(wanted.as_deref(), one_host, rank));
    TcpOptions { bind, encrypt: place.encrypt, patience, host_key: vars(HOST) }
}

/// Where nothing is said, rank 0 listens where the others reach it, and they listen on the interface that reaches rank 0.
fn address_beside_mpi(wanted: Option<&str>, one_host: bool, rank: usize) -> Result<Option<IpAddr>, String> {
    let chooses = rank == 0 || wanted.is_some();
    let chosen = chooses.then(|| choose(wanted, None, one_host, &interfaces()));
    chosen.transpose().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_mpi_listen_where_others_reach_them() {
        let check = |wanted, rank, expected: Option<[u8; 4]>| {
            assert_eq!(address_beside_mpi(wanted, true, rank), Ok(expected.map(IpAddr::from)), "{wanted:?}");
        };
        check(None, 0, Some([127, 0, 0, 1]));
        check(None, 1, None);
        check(Some("10.1.0.7"), 0, Some([10, 1, 0, 7]));
        check(Some("10.1.0.7"), 1, Some([10, 1, 0, 7]));
        let why = address_beside_mpi(Some("none0"), false, 1).unwrap_err();
        assert!(why.contains("no interface or network none0"), "{why}");
    }
}
