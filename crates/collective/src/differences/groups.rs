//! Groups of ranks: threads of this process, processes that share memory, sockets, and two levels of both.
//!
//! Every rank may be pinned to its own cores, as `taskset` and launchers do. Linux pins threads, so ranks that are
//! threads with their own sockets can differ just as processes do.

use std::collections::HashMap;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use polyreme_net::{Alarm, Encrypt, JoinOptions, Links, Secret, join, loopback};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::rows::PlantedBug;
use super::{mailboxes, meshes, rows};
use crate::comm::Comm;
use crate::shared::ShmSetup;
use crate::split::Connect;

/// How ranks reach each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TestTransport {
    /// Threads that see each other's memory.
    Threads,
    /// Processes with a segment of shared memory.
    Processes,
    /// Links between every two.
    Sockets,
    /// Shared memory inside hosts, links between them.
    TwoLevels,
    /// Links between ranks that joined as those of a job do, with everything encrypted.
    Joined,
}

/// Which cores ranks may run on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cores {
    /// All ranks may run on all cores.
    Equal,
    /// Even ranks run on one core, odd ones on all.
    Unequal,
}

const FAULTS: [PlantedBug; 4] =
    [PlantedBug::None, PlantedBug::SecretWays, PlantedBug::OpenWays, PlantedBug::OneElement];

/// What the ranks of a group run.
#[derive(Clone, Debug)]
pub(super) enum Play {
    /// All rows, with a planted bug.
    Rows(PlantedBug),
    /// Rows in the groups of a mesh with axes of these sizes.
    Mesh(Vec<usize>),
    /// The last rank of a mesh disappears in the middle of a step.
    LostRank(Vec<usize>),
    /// The same, and the others wait for its messages.
    LostSender(Vec<usize>),
    /// Letters between any two ranks.
    Mailboxes,
    /// This rank goes away while the others wait for letters.
    LostMember(usize),
}

impl Play {
    fn to_text(&self) -> String {
        let list = |sizes: &[usize]| sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        match self {
            Play::Rows(fault) => format!("rows:{}", *fault as usize),
            Play::Mesh(sizes) => format!("mesh:{}", list(sizes)),
            Play::LostRank(sizes) => format!("lost:{}", list(sizes)),
            Play::LostSender(sizes) => format!("sender:{}", list(sizes)),
            Play::Mailboxes => "mailboxes:0".into(),
            Play::LostMember(rank) => format!("member:{rank}"),
        }
    }

    fn of_text(text: &str) -> Play {
        let (kind, rest) = text.split_once(':').expect("a kind and numbers");
        let numbers: Vec<usize> = rest.split('x').map(|n| n.parse().expect("a number")).collect();
        match kind {
            "rows" => Play::Rows(FAULTS[numbers[0]]),
            "mesh" => Play::Mesh(numbers),
            "lost" => Play::LostRank(numbers),
            "sender" => Play::LostSender(numbers),
            "mailboxes" => Play::Mailboxes,
            "member" => Play::LostMember(numbers[0]),
            kind => panic!("no test is called {kind}"),
        }
    }
}

/// Runs a play and returns each rank's result.
pub(super) fn run(
    transport: TestTransport,
    ranks: usize,
    cores: Cores,
    play: &Play,
) -> Vec<Result<(), String>> {
    assert!(cores_here() > 1, "unequal cores need two cores");
    match transport {
        TestTransport::Threads => {
            let ends: Vec<_> = Comm::local(ranks).into_iter().map(|end| Mutex::new(Some(end))).collect();
            on_threads(ranks, cores, play, |rank| {
                Ok(ends[rank].lock().expect("taken once").take().expect("taken once"))
            })
        }
        TestTransport::Processes => processes(ranks, cores, play),
        TestTransport::Sockets => {
            let sockets = Sockets::new(ranks);
            let exchange = Exchange::default();
            on_threads(ranks, cores, play, |rank| {
                let mut comm = Comm::tcp(sockets.links(rank)).map_err(|r| r.to_string())?;
                comm.set_connect(exchange.connect(rank));
                Ok(comm)
            })
        }
        TestTransport::TwoLevels => two_levels(ranks, cores, play),
        TestTransport::Joined => {
            let master = TcpListener::bind("127.0.0.1:0").expect("a port of this machine");
            let address = master.local_addr().expect("it is bound").to_string();
            let master = Mutex::new(Some(master));
            on_threads(ranks, cores, play, |rank| joined(rank, ranks, &address, &master))
        }
    }
}

/// Starts one thread per rank, which makes its end of the group on its cores.
fn on_threads(
    ranks: usize,
    cores: Cores,
    play: &Play,
    end: impl Fn(usize) -> Result<Comm, String> + Sync,
) -> Vec<Result<(), String>> {
    let end = &end;
    thread::scope(|scope| {
        let rank = |rank| {
            scope.spawn(move || {
                stay_on(cores, rank);
                act(end(rank)?, play)
            })
        };
        let ranks: Vec<_> = (0..ranks).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank returns what is wrong")).collect()
    })
}

fn act(mut comm: Comm, play: &Play) -> Result<(), String> {
    let fault = match play {
        Play::Rows(fault) => *fault,
        Play::Mesh(sizes) => return meshes::run(comm, sizes),
        Play::LostRank(sizes) => return meshes::lose_one(comm, sizes, meshes::Missed::Sum),
        Play::LostSender(sizes) => return meshes::lose_one(comm, sizes, meshes::Missed::Message),
        Play::Mailboxes => return mailboxes::run(comm),
        // What a thread leaves without a word is what it drops.
        Play::LostMember(rank) => return mailboxes::lose_one(&mut comm, *rank, || ()),
    };
    match fault {
        PlantedBug::SecretWays => comm.force_roomy(comm.size() <= cores_here(), false),
        PlantedBug::OpenWays => comm.force_roomy(comm.rank() == 0, true),
        PlantedBug::None | PlantedBug::OneElement => {}
    }
    rows::run(&mut comm, fault)?;
    comm.finish().map_err(|report| report.to_string())
}

fn cores_here() -> usize {
    thread::available_parallelism().map_or(1, |n| n.get())
}

fn allowed() -> CpuSet {
    sched_getaffinity(None).expect("the system says which cores")
}

/// Pins the calling thread, and those that it starts, to the cores of a rank.
fn stay_on(cores: Cores, rank: usize) {
    if cores == Cores::Equal || rank % 2 == 1 {
        return;
    }
    let all = allowed();
    let first = (0..CpuSet::MAX_CPU).find(|core| all.is_set(*core)).expect("there is a core");
    let mut one = CpuSet::new();
    one.set(first);
    sched_setaffinity(None, &one).expect("a core that this thread may run on");
}

/// Connected streams, taken by the ranks that they belong to.
struct Sockets {
    rows: Vec<Mutex<Option<Vec<Option<polyreme_net::Stream>>>>>,
}

impl Sockets {
    fn new(ranks: usize) -> Sockets {
        let rows = loopback::streams(ranks).expect("sockets of this machine");
        Sockets { rows: rows.into_iter().map(|row| Mutex::new(Some(row))).collect() }
    }

    fn links(&self, rank: usize) -> Links {
        let row = self.rows[rank].lock().expect("taken once").take().expect("taken once");
        let hosts = vec!["localhost".to_string(); self.rows.len()];
        Links::over(rank, hosts, row, 0, Alarm::default()).expect("sockets that are connected")
    }
}

/// Where ranks of one process find the links of new groups: the first rank of a group makes them for all.
#[derive(Clone, Default)]
struct Exchange(Arc<Mutex<HashMap<NamedGroup, Sockets>>>);

/// A group's number and its ranks.
type NamedGroup = (u16, Vec<usize>);

impl Exchange {
    fn connect(&self, rank: usize) -> Connect {
        let exchange = self.clone();
        Arc::new(move |group, names| {
            let mut all = exchange.0.lock().expect("no thread panicked while it held the lock");
            let sockets = all.entry((group, names.to_vec()));
            let place = names.iter().position(|name| *name == rank).expect("the group has this rank");
            Ok(sockets.or_insert_with(|| Sockets::new(names.len())).links(place))
        })
    }
}

/// Hosts of different sizes; with five ranks, hosts whose ranks are not consecutive.
fn hosts(ranks: usize) -> Vec<Vec<usize>> {
    match ranks {
        1 => vec![vec![0]],
        2 => vec![vec![0], vec![1]],
        3 => vec![vec![0, 1], vec![2]],
        4 => vec![vec![0, 1], vec![2, 3]],
        5 => vec![vec![0, 2], vec![1, 3, 4]],
        n => vec![vec![0, 1, 2], (3..n - 1).collect(), vec![n - 1]],
    }
}

fn two_levels(ranks: usize, cores: Cores, play: &Play) -> Vec<Result<(), String>> {
    let hosts = hosts(ranks);
    let (between, every_two) = (Sockets::new(hosts.len()), Sockets::new(ranks));
    let segments: Vec<_> =
        hosts.iter().map(|host| Comm::segment(host.len(), 0).expect("shared memory")).collect();
    let exchange = Exchange::default();
    on_threads(ranks, cores, play, |rank| {
        let host = hosts.iter().position(|host| host.contains(&rank)).expect("a host has it");
        let place = hosts[host].iter().position(|r| *r == rank).expect("its host has it");
        let (size, path) = (hosts[host].len(), segments[host].path().expect("a file"));
        let segment = Comm::open_segment(&path, size, 0).expect("the segment of its host");
        let inside = Comm::shm(ShmSetup::new(place, size, segment)).map_err(|r| r.to_string())?;
        let between = (place == 0).then(|| between.links(host));
        let comm = Comm::two_level(hosts.clone(), inside, between, every_two.links(rank));
        let mut comm = comm.map_err(|r| r.to_string())?;
        comm.set_connect(exchange.connect(rank));
        Ok(comm)
    })
}

/// Joins as a rank of a job, and stays with it.
fn joined(
    rank: usize,
    size: usize,
    address: &str,
    master: &Mutex<Option<TcpListener>>,
) -> Result<Comm, String> {
    let secret = Secret::from_text(&"5a".repeat(32)).map_err(|e| e.to_string())?;
    let mut options = JoinOptions::new(rank, size, address, secret);
    options.encrypt = Encrypt::Always;
    if rank == 0 {
        options.listener = master.lock().expect("taken once").take().map(Into::into);
    }
    let joined = join(options).map_err(|e| e.to_string())?;
    // No rank is missed when it ends: the others may be in their last operation.
    std::mem::forget(joined.control.clone());
    let all: Vec<usize> = (0..size).collect();
    let links = joined.links(0, &all).map_err(|e| e.to_string())?;
    let mut comm = Comm::tcp(links).map_err(|r| r.to_string())?;
    comm.set_joined(joined);
    Ok(comm)
}

const RANK: &str = "POLYREME_DIFFERENCES_RANK";

fn processes(ranks: usize, cores: Cores, play: &Play) -> Vec<Result<(), String>> {
    let segment = Comm::segment(ranks, 0).expect("shared memory");
    let path = segment.path().expect("a file");
    let start = |rank: usize| {
        let (unequal, play) = (cores == Cores::Unequal, play.to_text());
        Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "differences::one_rank", "--nocapture", "--test-threads=1"])
            .env(RANK, format!("{rank} {ranks} {unequal} {play} {path}"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("this binary starts")
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    children.into_iter().map(end_of).collect()
}

/// The result that a process printed.
fn end_of(mut child: Child) -> Result<(), String> {
    let mut text = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
    let status = child.wait().expect("a child");
    match text.lines().find_map(|line| line.split_once("end: ")) {
        Some((_, "well")) => Ok(()),
        Some((_, what)) => Err(what.to_string()),
        None => Err(format!("ended with {status}, saying {text}")),
    }
}

/// Runs as one process of a group, if the parent started this one so.
pub(super) fn rank_of_processes() {
    let Ok(line) = std::env::var(RANK) else { return };
    let [rank, size, unequal, play, path] = line.splitn(5, ' ').collect::<Vec<_>>()[..] else {
        panic!("{line}")
    };
    let number = |text: &str| text.parse::<usize>().expect("a number");
    let (rank, size, play) = (number(rank), number(size), Play::of_text(play));
    stay_on(if unequal == "true" { Cores::Unequal } else { Cores::Equal }, rank);
    let segment = Comm::open_segment(path, size, 0).expect("the parent's memory");
    let end = Comm::shm(ShmSetup::new(rank, size, segment)).map_err(|report| report.to_string());
    let end = end.and_then(|comm| act(comm, &play));
    println!("end: {}", end.map_or_else(|what| what, |()| "well".into()));
}
