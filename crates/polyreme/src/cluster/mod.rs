//! Starting a job of several ranks: how many there are, which cores they get, and what starts them.
//!
//! One pure function, [`decide`], turns flags, job file, environment and machine into a setup, and says why. Everything
//! that touches the system is in the modules below it.
//!
//! # Layout
//! - [`cores`]: the machine's cores and how they are divided. [`interfaces`]: its addresses.
//! - [`crew`]: processes that are started, watched and ended together. [`pumps`]: their output. [`spawn`]: on this
//!   host. [`launch`]: over ssh.
//! - [`enter`]: from a decision to ranks that can talk. [`join`]: how a process finds the others.
//! - [`elastic`]: ranks that come and go.
//! - [`mpi`]: the MPI library of the launcher that started this process.
//! - [`lifeline`]: what a launcher tells its processes.
//! - [`places`]: where each rank runs.

pub mod cores;
pub mod crew;
pub mod elastic;
pub mod enter;
pub mod interfaces;
pub mod join;
pub mod launch;
mod levels;
pub mod lifeline;
pub mod mpi;
pub mod places;
pub mod pumps;
pub mod spawn;

use std::fmt;

use polyreme_net::environment::{self, MpiFamily, from_environment, mpi_families};
use polyreme_net::{Encrypt, Patience, Secret};
use polyreme_train::run::Lodging;

use self::cores::Machine;

/// Set in processes that a launcher of ours started: their standard input is a [`lifeline`].
pub const LAUNCHED: &str = "POLYREME_LAUNCHED";
/// The interface to use, as a name or as a network: `eth1`, `10.0.0.0/8`.
pub const INTERFACE: &str = "POLYREME_INTERFACE";
/// Ranks with the same value share memory, and others do not, whatever the kernel says about hosts.
pub const HOST: &str = "POLYREME_HOST";
/// The transport of the ranks, if there is no flag.
pub const TRANSPORT: &str = "POLYREME_TRANSPORT";
/// The MPI library to load, instead of the one that is found by the launcher.
pub const MPI_LIBRARY: &str = "POLYREME_MPI";
/// The job's secret, where no launcher passes it: 64 hexadecimal digits.
pub const SECRET: &str = environment::SECRET_VARIABLE;

/// The most ranks that a job can ask for.
pub const RANKS_MAX: usize = 4096;

/// What carries data between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Transport {
    /// Threads of one process.
    Local,
    /// Processes of one host, through shared memory.
    Shm,
    /// Processes of any hosts, over sockets.
    Tcp,
    /// The MPI of the cluster.
    Mpi,
}

impl Transport {
    /// Its name in flags.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Local => "local",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
            Transport::Mpi => "mpi",
        }
    }
}

/// What the flags or the job file ask for.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Asked {
    /// Ranks, of whichever kind.
    pub ranks: Option<usize>,
    /// Processes of this host, a rank each.
    pub processes: Option<usize>,
    /// Threads of each rank.
    pub threads: Option<usize>,
    /// What carries data.
    pub transport: Option<Transport>,
    /// Whether connections are encrypted.
    pub encrypt: Option<Encrypt>,
    /// How long ranks wait for each other; only a job file says so.
    pub patience: Patience,
}

/// How this process takes part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Setup {
    /// All ranks are threads of this process.
    Threads {
        /// How many.
        ranks: usize,
        /// Threads of each rank.
        threads: usize,
    },
    /// This process starts others, a rank each, and watches them.
    Spawn {
        /// How many.
        processes: usize,
        /// Threads of each rank.
        threads: usize,
        /// What carries data between them.
        transport: Transport,
    },
    /// This process is one rank.
    Process(ClusterRank),
}

impl Setup {
    /// How the ranks share memory, as far as it is known before they join.
    pub fn lodging(&self) -> Lodging {
        match self {
            Setup::Threads { ranks, .. } => Lodging::threads(*ranks),
            Setup::Spawn { processes, transport, .. } => Lodging {
                here: *processes,
                threads: false,
                shared: *transport == Transport::Shm,
                together: true,
                flag: Some("--processes"),
            },
            Setup::Process(place) => {
                let alone = place.local_size == place.size;
                Lodging {
                    here: place.local_size,
                    threads: place.size == 1,
                    shared: alone && matches!(place.transport, None | Some(Transport::Shm)),
                    // Which ranks an external launcher puts into one control group is not known.
                    together: alone && place.launched,
                    flag: (alone && place.launched).then_some("--processes"),
                }
            }
        }
    }
}

/// One rank among those of all hosts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClusterRank {
    /// Its rank.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
    /// Its number on this host.
    pub local_rank: usize,
    /// How many ranks this host has.
    pub local_size: usize,
    /// Where rank 0 listens, `host:port`; our own launcher sends it later.
    pub master: Option<String>,
    /// The job's secret, if the environment has it.
    pub secret: Option<Secret>,
    /// The launcher's name for this start of the job, if it has one.
    pub start: Option<String>,
    /// Whether the standard input is a lifeline.
    pub launched: bool,
    /// The transport; `None` is shared memory if all ranks are on one host, sockets otherwise.
    pub transport: Option<Transport>,
    /// MPI libraries that can find the other ranks, the likeliest first.
    pub mpi: Vec<MpiFamily>,
    /// Whether connections are encrypted.
    pub encrypt: Encrypt,
    /// Threads of this rank.
    pub threads: usize,
}

/// A setup and why it is so.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decided {
    /// What to do.
    pub setup: Setup,
    /// Why, in words.
    pub why: String,
    /// The number of ranks was not set: code that knows the job may choose better than by the machine alone.
    pub open: bool,
    /// How long ranks wait for each other.
    pub patience: Patience,
}

/// The request makes no sense.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unclear(pub String);

impl fmt::Display for Unclear {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unclear {}

/// Decides how this process takes part: flags first, then an external launcher, then the job file, then the machine.
pub fn decide(
    flags: Asked,
    job: Asked,
    vars: &dyn Fn(&str) -> Option<String>,
    machine: &Machine,
) -> Result<Decided, Unclear> {
    let launched = vars(LAUNCHED).is_some();
    let patience = job.patience;
    let asked = flags.processes.or(flags.ranks);
    let found = match found(vars, launched) {
        // A batch script has the variables of an allocation but is not one of its ranks: flags may start some there.
        Err(_) if asked.is_some() && !launched => None,
        found => found?,
    };
    let threads = flags.threads.or(job.threads);
    let transport = asked_transport(flags.transport, vars)?.or(job.transport);
    if let (Some(ranks), Some(processes)) = (flags.ranks, flags.processes)
        && ranks != processes
    {
        return unclear(format!(
            "--ranks {ranks} and --processes {processes} are both given; a process is one rank, so remove one of them"
        ));
    }
    if let Some(found) = found.filter(|f| launched || f.size > 1) {
        // The copies that a launcher starts have its flags, so those are ignored.
        if let (Some(n), false) = (asked, launched)
            && n != found.size
        {
            return unclear(format!(
                "{n} ranks are asked for, but {} says that this process is one of {}; leave the flag out, or unset the \
                 variable",
                found.by, found.size
            ));
        }
        let why = format!("{} says rank {} of {}", found.by, found.rank, found.size);
        let encrypt = flags.encrypt.or(job.encrypt).unwrap_or_default();
        let decided = place(found, launched, transport, encrypt, threads, machine, why)?;
        return Ok(Decided { patience, ..decided });
    }
    if transport == Some(Transport::Mpi) {
        return unclear("transport mpi needs an MPI start: `mpirun -n 4 polyreme train JOB.toml`".into());
    }
    let of_process = matches!(transport, Some(Transport::Shm | Transport::Tcp));
    let open = flags.processes.is_none() && flags.ranks.is_none() && job.ranks.is_none();
    let (n, why) = match (flags.processes, flags.ranks, job.ranks) {
        (Some(n), ..) => (n, format!("--processes {n}")),
        (None, Some(n), _) => (n, format!("--ranks {n}")),
        (None, None, Some(n)) => (n, format!("`parallel.ranks` of the job is {n}")),
        (None, None, None) => {
            let n = if machine.quota.is_some() { 1 } else { machine.nodes.len().max(1) };
            let n = if threads.is_some() { 1 } else { n };
            (n, format!("default: one rank per NUMA node, {} cores", machine.cores()))
        }
    };
    if n == 0 || n > RANKS_MAX {
        return unclear(format!("{n} ranks are asked for; a job can have 1 to {RANKS_MAX}"));
    }
    let threads = threads.unwrap_or_else(|| fewest_threads(machine, n));
    if flags.processes.is_none() && !of_process {
        return Ok(Decided { setup: Setup::Threads { ranks: n, threads }, why, open, patience });
    }
    match transport.unwrap_or(Transport::Shm) {
        Transport::Local => {
            unclear("--transport local is for threads of one process; use --ranks, or --transport shm".into())
        }
        transport => {
            Ok(Decided { setup: Setup::Spawn { processes: n, threads, transport }, why, open, patience })
        }
    }
}

fn place(
    found: LaunchedRank,
    launched: bool,
    transport: Option<Transport>,
    encrypt: Encrypt,
    threads: Option<usize>,
    machine: &Machine,
    why: String,
) -> Result<Decided, Unclear> {
    let LaunchedRank { rank, size, local_rank, local_size, master, secret, start, by, mpi } = found;
    if rank >= size || local_rank >= local_size || local_size > size || size > RANKS_MAX {
        return unclear(format!(
            "{by} says rank {rank} of {size}, {local_rank} of {local_size} on this host, which is impossible; start the ranks with `polyreme train --processes N`"
        ));
    }
    if transport == Some(Transport::Local) && size > 1 {
        return unclear(format!(
            "transport local is for threads of one process, but {by} says that there are {size} processes; leave it out"
        ));
    }
    // Slurm's list of nodes says where rank 0 would listen, even for ranks that MPI can start: without a secret it must
    // be MPI.
    let only_mpi = !mpi.is_empty() && (master.is_none() || secret.is_none());
    let by_mpi = transport == Some(Transport::Mpi) || (transport.is_none() && only_mpi);
    if by_mpi && encrypt == Encrypt::Always {
        return unclear(
            "parallel.encrypt = true has no effect on MPI, which has its own settings; use --transport tcp, or leave `encrypt` out"
            .into(),
        );
    }
    let meets = launched || by_mpi || size == 1;
    if !meets && master.is_none() {
        return unclear(format!(
            "{by} says that this is rank {rank} of {size}, but the address of rank 0 is not set; set MASTER_ADDR and MASTER_PORT, or let MPI find it: leave --transport out and start with mpirun or srun --mpi=pmix"
        ));
    }
    if !meets && secret.is_none() {
        return unclear(format!(
            "{by} says that this is rank {rank} of {size}, but the ranks share no secret; set {SECRET} to the same 64 \
             hexadecimal digits for all of them (`openssl rand -hex 32`), or start with mpirun or srun --mpi=pmix"
        ));
    }
    let own = if machine.bound { 1 } else { local_size };
    let threads = threads.unwrap_or_else(|| fewest_threads(machine, own));
    let transport = if by_mpi && !launched { Some(Transport::Mpi) } else { transport };
    let place = ClusterRank {
        rank,
        size,
        local_rank,
        local_size,
        master,
        secret,
        start,
        launched,
        transport,
        mpi,
        encrypt,
        threads,
    };
    Ok(Decided { setup: Setup::Process(place), why, open: false, patience: Patience::default() })
}

/// How many threads each of `ranks` ranks of this host can have.
fn fewest_threads(machine: &Machine, ranks: usize) -> usize {
    let shares = machine.shares(ranks);
    shares.iter().map(|share| machine.threads(share, ranks)).min().unwrap_or(1)
}

fn unclear<T>(what: String) -> Result<T, Unclear> {
    Err(Unclear(what))
}

/// The transport that a flag names, or else the environment.
pub fn asked_transport(
    flag: Option<Transport>,
    vars: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Transport>, Unclear> {
    flag.map_or_else(
        || vars(TRANSPORT).map(|name| transport_by_name(&name)).transpose(),
        |flag| Ok(Some(flag)),
    )
}

fn transport_by_name(name: &str) -> Result<Transport, Unclear> {
    let all = [Transport::Local, Transport::Shm, Transport::Tcp, Transport::Mpi];
    let known = all.into_iter().find(|t| t.name() == name);
    known.ok_or_else(|| Unclear(format!("{TRANSPORT} is {name:?}; choose local, shm, tcp or mpi")))
}

/// What the environment says about this process's rank.
struct LaunchedRank {
    rank: usize,
    size: usize,
    local_rank: usize,
    local_size: usize,
    master: Option<String>,
    secret: Option<Secret>,
    start: Option<String>,
    /// The source of this information.
    by: String,
    /// MPI libraries that can ask it for the other ranks.
    mpi: Vec<MpiFamily>,
}

/// The variables of each kind of launcher with the number of ranks on this host. Slurm's may be a list, `4(x2),3`.
const LOCAL_SIZES: [&str; 5] = [
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
];

fn found(vars: &dyn Fn(&str) -> Option<String>, launched: bool) -> Result<Option<LaunchedRank>, Unclear> {
    if launched {
        // The copies of our own launcher get everything else over their lifelines.
        let number = |key: &str| vars(key).and_then(|v| v.trim().parse().ok());
        let numbers = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"].map(number);
        let [Some(rank), Some(size), Some(local_rank), Some(local_size)] = numbers else {
            return unclear(format!(
                "{LAUNCHED} is set, but RANK, WORLD_SIZE and the like are not; unset it"
            ));
        };
        let (master, secret, start, by) = (None, None, None, "the launcher".into());
        let mpi = Vec::new();
        return Ok(Some(LaunchedRank { rank, size, local_rank, local_size, master, secret, start, by, mpi }));
    }
    let Some(found) = from_environment(vars).map_err(|e| Unclear(e.to_string()))? else { return Ok(None) };
    let digits = |text: String| text.split(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok());
    let local_size = LOCAL_SIZES.into_iter().find_map(|key| vars(key).and_then(digits));
    let environment::LauncherVars { launcher, rank, size, local_rank, master, secret, job } = found;
    let local_rank = local_rank.unwrap_or(0);
    // Nodes of a list may have different numbers; the number is at least this rank's local rank plus one.
    let local_size = local_size.unwrap_or(1).clamp(1, size.max(1)).max(local_rank.saturating_add(1));
    let by = launcher.to_string();
    let mpi = mpi_families(vars);
    Ok(Some(LaunchedRank { rank, size, local_rank, local_size, master, secret, start: job, by, mpi }))
}

#[cfg(test)]
mod tests;
