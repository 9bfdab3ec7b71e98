//! How processes that know a job's secret become its ranks: from nothing to connected, proven streams.
//!
//! Rank 0 listens; the others connect to it, prove the secret, and say where they can be reached. When all are there,
//! rank 0 sends every rank the table, the pairs that are known to talk are connected and checked (`mesh`), and rank 0
//! tells all the result: all ranks join, or none, and each says why. The connections to rank 0 stay as the control
//! plane. Other pairs are connected when they first talk (`door`). It is not elastic: a job has the ranks that it
//! started with.
//!
//! # Layout
//! `hello`: identity and proof. `gate`: a listener that strangers cannot keep busy. `dial`: connecting. `gather`: rank
//! 0's side. `enlist`: the others'. `mesh`: the pairs. `probe`: the first message of each. `door`: pairs that talk
//! later. `bounds`: how long all of it may take. `host`: what a process knows about its host. `knock`: lines about
//! connections that were turned away.

mod bounds;
pub(crate) mod dial;
pub(crate) mod door;
mod enlist;
pub(crate) mod gate;
mod gather;
pub(crate) mod hello;
mod host;
mod knock;
pub(crate) mod mesh;
mod probe;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::connection::Connection;
use crate::control::Control;
use crate::control::channel::Channel;
use crate::control::message::LinkFault;
use crate::links::{Links, Meeting, WaitBounds};
use crate::mailbox::{self, Limits, Mailbox, MailboxOptions};
use crate::patience::Patience;
use crate::seal::Encrypt;
use crate::secret::{Secret, SecretError};
use crate::socket::Listener;
use crate::system::{Os, System};

use door::Door;
#[cfg(test)]
pub(crate) use gather::CLOSE_TIME;
pub use hello::PROTOCOL_VERSION;
use hello::{Hello, Purpose, fingerprint};
pub(crate) use host::key as host_key;
pub(crate) use host::name as host_name;
pub use knock::Tell;
use mesh::{Edge, Mesh, MeshOptions, Opened};

/// How many ranks a job may have.
pub const RANKS_MAX: usize = 1 << 14;
/// The longest wait, whatever the options say.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a process must know to join.
#[derive(Debug)]
pub struct JoinOptions {
    /// Its rank.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Where rank 0 listens: `host:port` or an address with a port.
    pub master: String,
    /// The interface on which this rank listens. By default the one that reaches rank 0.
    pub bind: Option<IpAddr>,
    /// The address that other ranks connect to, if it is not the bound one (a host behind NAT).
    pub advertise: Option<IpAddr>,
    /// The job's secret.
    pub secret: Secret,
    /// Which job this is: ranks of another one are turned away.
    pub job: String,
    /// Which start of the job this is.
    pub generation: u64,
    /// How long to wait for the others to be started.
    pub timeout: Duration,
    /// How long to wait for them afterwards. Rank 0's setting applies to all.
    pub patience: Patience,
    /// Rank 0's listener, if the launcher has bound one already.
    pub listener: Option<Listener>,
    /// Which pairs are connected while ranks join.
    pub first: First,
    /// Whether connections are encrypted; the same on all ranks.
    pub encrypt: Encrypt,
    /// Receives what the user should know while this rank waits.
    pub tell: Tell,
    /// Overrides what the kernel says about which ranks share a host.
    pub host_key: Option<String>,
    /// Time and sockets.
    pub system: Arc<dyn System>,
}

/// Which pairs of ranks are connected and checked before [`join`] returns, so that problems between them are known
/// before the job begins. All others are connected when they first talk.
#[derive(Clone, Default)]
pub enum First {
    /// All pairs, in group 0, the group of all ranks.
    #[default]
    AllPairs,
    /// None.
    NoPairs,
    /// The pairs that this function gives for each rank: group and other rank. It must be symmetric.
    Some(Arc<Talks>),
}

/// The ranks that a rank talks with, given all members and its number: pairs of group and rank.
pub type Talks = dyn Fn(&[Member], usize) -> Vec<(u16, usize)> + Send + Sync;

/// What the others know about one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its rank.
    pub rank: usize,
    /// Its host's name.
    pub host: String,
    /// Equal for ranks that can share memory.
    pub host_key: String,
    /// Its process.
    pub pid: u32,
    /// Where it listens for data.
    pub addr: SocketAddr,
}

/// A rank of the job.
#[derive(Debug)]
pub struct Joined {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// All of them, by rank.
    pub members: Vec<Member>,
    /// The control plane.
    pub control: Control,
    generation: u64,
    system: Arc<dyn System>,
    door: Door,
}

impl Joined {
    /// This rank's links to a group of the job's ranks, in this order. A pair is connected when it first talks, unless
    /// it was while ranks joined. The group's number is the same on all of them, and each of them calls this once.
    ///
    /// # Panics
    /// If this rank is not in the group, or the number is one of a mailbox.
    pub fn links(&self, group: u16, ranks: &[usize]) -> io::Result<Links> {
        assert!(group < mailbox::GROUPS_FROM, "group {group} is one of a mailbox");
        let meeting = Meeting::new(self.door.clone(), group, ranks)?;
        let place = self.place_in(ranks);
        let hosts = ranks.iter().map(|&rank| self.members[rank].host.clone()).collect();
        let mut links = Links::meeting(
            self.system.clone(),
            place,
            hosts,
            meeting,
            self.generation,
            self.control.alarm(),
        )?;
        links.set_bounds(WaitBounds::watched(self.control.patience()));
        Ok(links)
    }

    /// Which start of the job, or which generation of it, this is.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// One of this rank's mailboxes, by number: letters between any two of these ranks of the job, which it counts in this
    /// order. Each of them calls this once for a number, with the same ranks and limits, and no two mailboxes with a pair of ranks
    /// in common have the same number. Two ranks are connected when they first talk.
    ///
    /// # Panics
    /// If this rank is not one of them.
    pub fn mailbox(&self, number: u8, ranks: &[usize], limits: Limits) -> io::Result<Mailbox> {
        Mailbox::start(MailboxOptions {
            system: self.system.clone(),
            rank: self.place_in(ranks),
            members: ranks.iter().map(|&rank| self.members[rank].clone()).collect(),
            generation: self.generation,
            number,
            limits,
            door: self.door.clone(),
            control: &self.control,
        })
    }

    fn place_in(&self, ranks: &[usize]) -> usize {
        ranks.iter().position(|rank| *rank == self.rank).expect("a group that this rank is in")
    }

    /// The connections of group 0 that joining made, by rank, as blocking ones. They can be taken once.
    pub fn streams(&self) -> io::Result<Vec<Option<Connection>>> {
        let stream = |peer| {
            let connection = self.door.take(Edge { group: 0, peer });
            if let Some(connection) = &connection {
                connection.stream.set_nonblocking(false)?;
            }
            Ok(connection)
        };
        (0..self.size).map(stream).collect()
    }
}

/// Why a process did not become a rank.
#[derive(Debug, Error)]
pub enum JoinError {
    /// The options contradict themselves.
    #[error("{0}")]
    Options(String),
    /// Rank 0 cannot listen where it was told to.
    #[error("rank {rank} cannot listen on {addr}: {source}; {hint}")]
    Listen {
        /// The rank.
        rank: usize,
        /// The address.
        addr: String,
        /// What the system says.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// Some ranks did not join in time.
    #[error("{} did not join within {} s (rank 0 listens on {listening}{note}){turned_away}", some_ranks(.ranks), .timeout.as_secs_f64())]
    Missing {
        /// The missing ranks.
        ranks: Vec<usize>,
        /// How long rank 0 waited.
        timeout: Duration,
        /// The address.
        listening: SocketAddr,
        /// What may be wrong with that address.
        note: &'static str,
        /// Which connections were turned away meanwhile, and why.
        turned_away: String,
    },
    /// Nothing answered at rank 0's address.
    #[error("rank {rank} did not reach rank 0 at {master} within {} s: {why}", .timeout.as_secs_f64())]
    Unreachable {
        /// This rank.
        rank: usize,
        /// Where rank 0 should be.
        master: String,
        /// How long it was tried.
        timeout: Duration,
        /// The last failure.
        why: String,
    },
    /// One of the two does not know the secret.
    #[error(
        "rank {rank} and rank 0 at {master} have different secrets: give every rank the same one, or choose another port if another job is there"
    )]
    WrongSecret {
        /// This rank.
        rank: usize,
        /// Rank 0's address.
        master: String,
    },
    /// A rank has another encryption setting than rank 0.
    #[error(
        "rank {rank} has parallel.encrypt = {theirs} and rank 0 has {zeros}: give every rank the same job file and flags"
    )]
    Encryption {
        /// The rank.
        rank: usize,
        /// What it wants.
        theirs: Encrypt,
        /// What rank 0 wants.
        zeros: Encrypt,
    },
    /// The two were built from different versions.
    #[error(
        "rank 0 at {master} speaks version {theirs} of the protocol and this rank version {PROTOCOL_VERSION}: run the same polyreme everywhere"
    )]
    Version {
        /// Rank 0's address.
        master: String,
        /// Its version.
        theirs: u16,
    },
    /// Another program is there.
    #[error("what answers at {master} is not a rank of a job: choose another port")]
    NoRank {
        /// Where rank 0 should be.
        master: String,
    },
    /// A process was started with another number of ranks.
    #[error(
        "rank {rank} at {addr} was started as one of {theirs} ranks and rank 0 as one of {ours}: start all with the same number"
    )]
    Size {
        /// Whose number is different.
        rank: usize,
        /// From where it came.
        addr: SocketAddr,
        /// Its number.
        theirs: usize,
        /// Rank 0's.
        ours: usize,
    },
    /// Two processes have the same rank.
    #[error("rank {rank} came twice, from {first} and from {second}: give each process its own rank")]
    Duplicate {
        /// The rank.
        rank: usize,
        /// The first one.
        first: String,
        /// The second one's address.
        second: SocketAddr,
    },
    /// Rank 0 refused this rank or gave up, for this reason.
    #[error("{why}")]
    Refused {
        /// What rank 0 says.
        why: String,
    },
    /// A rank left while the others were joining.
    #[error("rank {rank} ({host}) left while the ranks were joining: see its own error")]
    Left {
        /// The rank.
        rank: usize,
        /// Where, if known.
        host: String,
    },
    /// Some pairs cannot talk.
    #[error("{} cannot talk: {}", if .pairs.len() == 1 { "a pair of ranks" } else { "some pairs of ranks" }, .pairs.join("; "))]
    Mesh {
        /// Each pair, and what is wrong between the two.
        pairs: Vec<String>,
    },
    /// A rank violates the protocol.
    #[error("rank {rank} sent {what}")]
    Protocol {
        /// The rank.
        rank: usize,
        /// What.
        what: String,
    },
    /// No random numbers.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The system failed.
    #[error("while joining: {0}")]
    Io(#[from] io::Error),
}

impl JoinOptions {
    /// Options with defaults: the interface that reaches rank 0, generation 0, a minute to wait, all pairs connected.
    pub fn new(rank: usize, size: usize, master: impl Into<String>, secret: Secret) -> JoinOptions {
        JoinOptions {
            rank,
            size,
            master: master.into(),
            bind: None,
            advertise: None,
            secret,
            job: String::new(),
            generation: 0,
            timeout: Duration::from_secs(60),
            patience: Patience::default(),
            listener: None,
            first: First::AllPairs,
            encrypt: Encrypt::Auto,
            tell: Tell::default(),
            host_key: None,
            system: Arc::new(Os),
        }
    }
}

/// Joins a job. Returns when all ranks have joined and all pairs that talk first are connected. All ranks call it.
pub fn join(mut options: JoinOptions) -> Result<Joined, JoinError> {
    options.timeout = options.timeout.min(WAIT_MAX);
    let JoinOptions { rank, size, .. } = options;
    if size == 0 || size > RANKS_MAX {
        return Err(JoinError::Options(format!("a job has 1 to {RANKS_MAX} ranks, not {size}")));
    }
    if rank >= size {
        return Err(JoinError::Options(format!(
            "rank {rank} does not exist: the {size} ranks are 0 to {}",
            size - 1
        )));
    }
    if options.bind.is_some_and(|ip| ip.is_unspecified()) {
        return Err(JoinError::Options(
            "a rank listens on one interface: give an address, not all of them".into(),
        ));
    }
    let hello = Hello {
        purpose: Purpose::Control,
        job: fingerprint(&options.job),
        generation: options.generation,
        rank: rank as u32,
        size: size as u32,
        peer: 0,
        group: 0,
        encrypt: options.encrypt,
        here: false,
        key: [0; 32],
    };
    if rank == 0 { gather::gather(options, hello) } else { enlist::enlist(options, hello) }
}

impl First {
    /// The edges of a rank that are connected while ranks join.
    fn edges(&self, members: &[Member], rank: usize) -> Vec<Edge> {
        let others = (0..members.len()).filter(|&peer| peer != rank);
        match self {
            First::AllPairs => others.map(|peer| Edge { group: 0, peer }).collect(),
            First::NoPairs => Vec::new(),
            First::Some(talks) => {
                talks(members, rank).into_iter().map(|(group, peer)| Edge { group, peer }).collect()
            }
        }
    }
}

impl fmt::Debug for First {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            First::AllPairs => "AllPairs",
            First::NoPairs => "NoPairs",
            First::Some(_) => "Some(..)",
        })
    }
}

/// This process, listening on an interface for data.
fn listen_for_data(options: &JoinOptions, ip: IpAddr) -> Result<(Listener, Member), JoinError> {
    let ip = options.bind.unwrap_or(ip);
    let rank = options.rank;
    let listener = options.system.listen(&[SocketAddr::new(ip, 0)]).map_err(|source| JoinError::Listen {
        rank,
        addr: ip.to_string(),
        source,
        hint: "give the address of an interface of this host",
    })?;
    if ip.is_loopback() {
        crate::loopback::unpaced(&listener);
    }
    let port = listener.local_addr()?.port();
    let addr = SocketAddr::new(options.advertise.unwrap_or(ip), port);
    let host_key = options.host_key.clone().unwrap_or_else(host::key);
    Ok((listener, Member { rank, host: host::name(), host_key, pid: std::process::id(), addr }))
}

/// Pairs that cannot talk, in words. The connecting side's observation says more than the other side's.
fn describe(faults: &[LinkFault], members: &[Member]) -> Vec<String> {
    let known = |rank: u32| members.get(rank as usize);
    let mut pairs = Vec::new();
    for fault in faults {
        let seen_by_connector = fault.from > fault.to;
        let told = faults.iter().any(|other| (other.from, other.to) == (fault.to, fault.from));
        if !seen_by_connector && told {
            continue;
        }
        let (Some(from), Some(to)) = (known(fault.from), known(fault.to)) else { continue };
        let verb = if seen_by_connector { "cannot reach" } else { "was not reached by" };
        pairs.push(format!(
            "rank {} ({}, {}) {verb} rank {} ({}, {}): {}",
            from.rank, from.host, from.addr, to.rank, to.host, to.addr, fault.why
        ));
    }
    pairs
}

/// `rank 3`, or `ranks 2, 5`.
fn some_ranks(ranks: &[usize]) -> String {
    let listed: Vec<String> = ranks.iter().take(20).map(usize::to_string).collect();
    let more = if ranks.len() > 20 { format!(" and {} more", ranks.len() - 20) } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, listed.join(", "))
}

/// The mesh of a rank that has the table of all.
fn mesh(
    options: &JoinOptions,
    listener: Listener,
    hello: Hello,
    members: &[Member],
    patience: Patience,
) -> Result<Mesh, JoinError> {
    let options = MeshOptions {
        system: options.system.clone(),
        rank: options.rank,
        members: members.into(),
        secret: options.secret.clone(),
        hello,
        patience,
        tell: options.tell.clone(),
    };
    Mesh::new(listener, options)
}

/// The end of joining: all pairs that talk first are connected.
fn joined(
    options: JoinOptions,
    members: Vec<Member>,
    channels: Channels,
    patience: Patience,
    mesh: Mesh,
    open: Opened,
) -> Result<Joined, JoinError> {
    let JoinOptions { rank, size, generation, system, .. } = options;
    let control = Control::start(system.clone(), rank, &members, channels, patience)?;
    let door = Door::start(system.clone(), rank, members[..].into(), mesh, open, &control)?;
    Ok(Joined { rank, size, members, control, generation, system, door })
}

/// Rank 0's channels by rank, or the others' one to rank 0.
type Channels = Vec<Option<Channel>>;
