//! Connections between pairs of ranks, made when they are wanted and checked before anything goes over them.
//!
//! Of two ranks the higher one connects to the lower one, and both prove the secret again. Then each sends the other a
//! message that is longer than a packet (`probe`). All pairs make progress at once, without threads: the driver of a
//! [`Mesh`] calls [`Mesh::turn`] whenever a socket is ready. While ranks join that is their own thread
//! ([`Mesh::build`]), for the pairs that are known to talk; a pair that is not connected at the end is a fault, with
//! what was last seen of it. Afterwards it is the thread of `door`, for pairs that talk later.
//!
//! # Which rank connects
//! A pair that is connected while ranks join is known to both. Later one of them may come to talk long before the other
//! one does. If that is the higher one it connects, and the lower one takes the connection whether it wanted it yet or
//! not. If it is the lower one, it waits for a moment and then calls: a connection that carries only the proof and the
//! request, upon which the higher one connects as usual. So only one rank ever makes the connection of a pair, and two
//! that start at the same time need not choose between two connections.
//!
//! A call that does not get through is not a fault, and is repeated: the other rank may be reachable in one direction
//! only, and connects when it wants to talk itself. Only the rank that has to connect and cannot reports it. A rank
//! that is alive is waited for: not answering for a while does not count against it, as while ranks join.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::bounds::{dial_time, mesh_time};
use super::dial::{Dial, Dialled, explain, widen};
use super::gate::Gate;
use super::hello::{Hello, Purpose, Turned};
use super::knock::Tell;
use super::probe::Probe;
use super::{JoinError, Member};
use crate::connection::{Connection, Proven};
use crate::control::message::LinkFault;
use crate::patience::Patience;
use crate::ready;
use crate::secret::Secret;
#[cfg(test)]
use crate::simulation::{Bug, makes};
use crate::socket::Listener;
use crate::system::System;

/// How many refusals make a fault.
const REFUSALS_MAX: usize = 5;
const DIAL_PAUSE: Duration = Duration::from_millis(200);
/// A rank that is gone refuses connections, and the control plane may hear of it a little later: how long to wait for
/// its report before a pair that cannot connect while the job runs is reported.
const GRACE: Duration = Duration::from_secs(2);
/// How long the lower rank waits before it calls: mostly both want to talk at about the same time.
const CALL_AFTER: Duration = Duration::from_millis(20);
/// The longest pause between two calls that did not get through.
const CALL_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How often to look whether the others have given up.
const LOOK: Duration = Duration::from_millis(100);

/// The ends of a connection: this rank, and another one of a group. Ranks are numbered as in the job.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Edge {
    pub(crate) group: u16,
    pub(crate) peer: usize,
}

/// The result for an edge: a connection, or why there is none.
pub(crate) type Settled = (Edge, Result<Connection, String>);

/// Connections that were made.
pub(crate) type Opened = Vec<(Edge, Connection)>;

/// What a mesh is made from.
pub(crate) struct MeshOptions {
    pub(crate) system: Arc<dyn System>,
    pub(crate) rank: usize,
    pub(crate) members: Arc<[Member]>,
    pub(crate) secret: Secret,
    /// Job and generation are taken from it.
    pub(crate) hello: Hello,
    pub(crate) patience: Patience,
    pub(crate) tell: Tell,
}

/// One rank's connections that are being made.
pub(crate) struct Mesh {
    options: MeshOptions,
    hello: Hello,
    gate: Gate,
    ways: BTreeMap<Edge, PeerPath>,
    /// Whether ranks are still joining.
    joining: bool,
}

/// The state of the connection to one other rank.
struct PeerPath {
    stage: Stage,
    /// Whether this rank asked for it.
    wanted: bool,
    /// When to give up.
    until: Instant,
    /// How often the other rank refused, and since when.
    n_refusals: usize,
    refused: Option<Instant>,
}

enum Stage {
    /// The other rank connects to this one.
    Awaited {
        last: &'static str,
        call: Invitation,
    },
    /// This rank connects to it, after `until`.
    Resting {
        until: Instant,
        last: String,
    },
    Dialling {
        dial: Box<Dial>,
        until: Instant,
    },
    Probing {
        connection: Connection,
        probe: Probe,
    },
    /// The driver of the mesh has the result.
    Settled,
}

/// Whether the other rank has been asked to connect.
enum Invitation {
    /// It is asked after `until`; if that fails, again after the pause.
    Resting {
        until: Instant,
        pause: Duration,
    },
    Dialling {
        dial: Box<Dial>,
        until: Instant,
        pause: Duration,
    },
    Heard,
}

/// The result of a stage.
enum Next {
    Stage(Stage),
    Open(Connection),
    Failed(String),
    /// It is no longer wanted.
    Forgotten,
}

impl Mesh {
    /// A mesh in which nothing is wanted yet.
    pub(crate) fn new(listener: Listener, options: MeshOptions) -> Result<Mesh, JoinError> {
        widen(&listener);
        let (rank, size) = (options.rank as u32, options.members.len());
        let hello = Hello { purpose: Purpose::Data, rank, size: size as u32, ..options.hello };
        let gate = Gate::new(listener, options.secret.clone(), hello, size, options.tell.clone())?;
        Ok(Mesh { options, hello, gate, ways: BTreeMap::new(), joining: true })
    }

    /// Asks for an edge to be connected, unless it is already or soon will be.
    pub(crate) fn want(&mut self, edge: Edge) {
        let now = self.options.system.now();
        let until = now + mesh_time(self.options.members.len(), self.options.patience);
        let lower = edge.peer < self.options.rank;
        let way = self.ways.entry(edge).or_insert_with(|| {
            let stage = match lower {
                true => Stage::Resting { until: now, last: "no time to connect".into() },
                false => Stage::awaited(now, "it did not connect"),
            };
            PeerPath { wanted: true, ..PeerPath::new(stage, until) }
        });
        way.wanted = true;
    }

    /// Makes progress with all edges, without waiting. Returns those that are settled now.
    pub(crate) fn turn(&mut self) -> Vec<Settled> {
        let now = self.options.system.now();
        for arrival in self.gate.turn(now) {
            self.take(arrival, now);
        }
        let mut settled = Vec::new();
        let edges: Vec<Edge> =
            self.ways.iter().filter(|(_, way)| !way.is_settled()).map(|(e, _)| *e).collect();
        for edge in edges {
            let Some(mut way) = self.ways.remove(&edge) else { continue };
            let stage = std::mem::replace(&mut way.stage, Stage::Settled);
            way.stage = match self.advance(edge, &mut way, stage, now) {
                Next::Stage(stage) => stage,
                Next::Forgotten => continue,
                Next::Open(connection) => {
                    settled.push((edge, Ok(connection)));
                    Stage::Settled
                }
                Next::Failed(why) => {
                    settled.push((edge, Err(why)));
                    Stage::Settled
                }
            };
            self.ways.insert(edge, way);
        }
        settled
    }

    /// What to wait for before the next turn.
    pub(crate) fn interests<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        self.gate.interests(fds);
        for way in self.ways.values() {
            match &way.stage {
                Stage::Dialling { dial, .. } => fds.push(dial.interest()),
                Stage::Awaited { call: Invitation::Dialling { dial, .. }, .. } => fds.push(dial.interest()),
                Stage::Probing { connection, probe } => {
                    fds.push(ready::interest(connection.stream.as_fd(), probe.writes()));
                }
                Stage::Awaited { .. } | Stage::Resting { .. } | Stage::Settled => {}
            }
        }
    }

    /// When the next turn is due even if nothing comes.
    pub(crate) fn due(&self) -> Option<Instant> {
        let stages = self.ways.iter().filter_map(|(edge, way)| match &way.stage {
            Stage::Resting { until, .. } | Stage::Dialling { until, .. } => Some((*until).min(way.until)),
            Stage::Awaited {
                call: Invitation::Resting { until, .. } | Invitation::Dialling { until, .. },
                ..
            } if !self.joining => Some(*until),
            Stage::Probing { .. } if edge.peer < self.options.rank => Some(way.until),
            Stage::Awaited { .. } | Stage::Probing { .. } | Stage::Settled => None,
        });
        stages.chain(self.gate.due()).min()
    }

    /// While ranks join: connects what both ends of each edge want. Returns the connections, and the ranks that this
    /// one cannot talk with. If `over` says that another rank's fault ended joining for all, edges that are not settled
    /// by then are not faults.
    pub(crate) fn build(
        &mut self,
        edges: Vec<Edge>,
        until: Instant,
        over: &mut dyn FnMut() -> Result<bool, JoinError>,
    ) -> Result<(Opened, Vec<LinkFault>), JoinError> {
        let (mut open, mut faults) = (Vec::new(), Vec::new());
        let from = self.options.rank as u32;
        let fault = |edge: Edge, why: String| LinkFault { from, to: edge.peer as u32, why };
        edges.into_iter().for_each(|edge| self.want(edge));
        let interrupted = loop {
            for (edge, done) in self.turn() {
                match done {
                    Ok(connection) => open.push((edge, connection)),
                    Err(why) => faults.push(fault(edge, why)),
                }
            }
            let now = self.options.system.now();
            if self.ways.values().all(PeerPath::is_settled) || now >= until {
                break false;
            }
            if over()? {
                break true;
            }
            let mut fds = Vec::new();
            self.interests(&mut fds);
            let until = self.due().unwrap_or(until).min(until).min(now + LOOK);
            self.options.system.wait(&mut fds, until)?;
        };
        for (edge, way) in self.ways.iter().filter(|(_, way)| !interrupted && !way.is_settled()) {
            faults.push(fault(*edge, way.stage.unsettled()));
        }
        faults.sort();
        self.joining = false;
        Ok((open, faults))
    }

    /// A peer has proved the secret: is it a rank that this one talks with, or that wants to?
    fn take(&mut self, arrival: Proven, now: Instant) {
        let (rank, size) = (self.options.rank, self.options.members.len());
        let Proven { mut connection, hello: theirs, .. } = arrival;
        let edge = Edge { group: theirs.group, peer: theirs.rank as usize };
        let mine = (self.hello.job, self.hello.generation, self.hello.size);
        let agrees = usize::from(theirs.peer) == rank
            && edge.peer < size
            && (theirs.job, theirs.generation, theirs.size) == mine;
        match theirs.purpose {
            Purpose::Call if agrees && edge.peer < rank => self.want(edge),
            Purpose::Data if agrees && edge.peer > rank => {
                #[cfg(test)]
                if makes(Bug::TakesOnlyWhatItWants) && !self.ways.contains_key(&edge) {
                    return;
                }
                let until = now + mesh_time(size, self.options.patience);
                // A rank that comes a second time gave its first connection up before it was proved, so nothing went
                // over that one. A connection for an edge that is settled already is dropped.
                if self.ways.get(&edge).is_some_and(PeerPath::is_settled) {
                    return;
                }
                let probe = Probe::new(rank, edge.peer, &mut connection);
                let stage = Stage::Probing { connection, probe };
                match self.ways.get_mut(&edge) {
                    Some(way) => way.stage = stage,
                    None => drop(self.ways.insert(edge, PeerPath::new(stage, until))),
                }
            }
            Purpose::Call | Purpose::Data | Purpose::Control | Purpose::Member => {}
        }
    }

    fn advance(&self, edge: Edge, way: &mut PeerPath, stage: Stage, now: Instant) -> Next {
        let dials = edge.peer < self.options.rank;
        if dials && way.until <= now && !self.joining {
            return Next::Failed(stage.unsettled());
        }
        let grace = if self.joining { Duration::ZERO } else { GRACE.min(self.options.patience.silence) };
        let rest = |last: String| Next::Stage(Stage::Resting { until: now + DIAL_PAUSE, last });
        let mut refused = |last: String| {
            way.n_refusals += 1;
            let since = *way.refused.get_or_insert(now);
            if way.n_refusals >= REFUSALS_MAX && now >= since + grace {
                Next::Failed(last)
            } else {
                rest(last)
            }
        };
        match stage {
            Stage::Resting { until, .. } if until <= now => match self.dial(edge, Purpose::Data) {
                Ok(dial) => {
                    let until = (now + dial_time(self.options.members.len())).min(way.until);
                    Next::Stage(Stage::Dialling { dial, until })
                }
                Err(e) => refused(explain(&e)),
            },
            Stage::Dialling { dial, until } => match dial.turn() {
                Dialled::Proved(proven) => self.proved(edge, proven),
                Dialled::Turned(turned) => match turned {
                    Turned::WrongSecret => Next::Failed("it does not know the job's secret".into()),
                    Turned::Encryption(theirs) => Next::Failed(format!("it has parallel.encrypt = {theirs}")),
                    Turned::Stranger => Next::Failed("something else than a rank answers".into()),
                    Turned::Version(v) => Next::Failed(format!("it speaks version {v} of the protocol")),
                    Turned::Closed => refused("it closed the connection".into()),
                    Turned::Failed(kind) => refused(kind.to_string()),
                },
                Dialled::Unconnected(e) => refused(explain(&e)),
                Dialled::Pending(dial) if until <= now && now < way.until => {
                    // It may stand still for a while: that does not count as a refusal.
                    rest(overdue(dial.connected()).into())
                }
                Dialled::Pending(dial) => Next::Stage(Stage::Dialling { dial, until }),
                Dialled::Overdue { connected } => rest(overdue(connected).into()),
            },
            Stage::Probing { mut connection, mut probe } => match probe.advance(&mut connection) {
                Ok(true) => Next::Open(connection),
                Ok(false) => Next::Stage(Stage::Probing { connection, probe }),
                Err(why) if dials => Next::Failed(why),
                Err(_) if way.wanted => Next::Stage(Stage::awaited(now, "it closed the connection")),
                Err(_) => Next::Forgotten,
            },
            Stage::Awaited { last, call } if !self.joining => {
                Next::Stage(Stage::Awaited { last, call: self.call(edge, call, now) })
            }
            stage => Next::Stage(stage),
        }
    }

    /// The other side of a connection that this rank made is proved: is it the right one?
    fn proved(&self, edge: Edge, proven: Proven) -> Next {
        let Proven { mut connection, hello: theirs, .. } = proven;
        if theirs.rank as usize != edge.peer || theirs.purpose != Purpose::Data {
            return Next::Failed(format!("rank {} answers there", theirs.rank));
        }
        let probe = Probe::new(self.options.rank, edge.peer, &mut connection);
        Next::Stage(Stage::Probing { connection, probe })
    }

    /// Asks a higher rank to connect.
    fn call(&self, edge: Edge, call: Invitation, now: Instant) -> Invitation {
        let rest = |pause: Duration| Invitation::Resting {
            until: now + pause,
            pause: (2 * pause).clamp(DIAL_PAUSE, CALL_PAUSE_MAX),
        };
        #[cfg(test)]
        if makes(Bug::NeverCalls) {
            return rest(CALL_PAUSE_MAX);
        }
        match call {
            Invitation::Resting { until, pause } if until <= now => match self.dial(edge, Purpose::Call) {
                Ok(dial) => {
                    Invitation::Dialling { dial, until: now + dial_time(self.options.members.len()), pause }
                }
                Err(_) => rest(pause),
            },
            Invitation::Dialling { dial, until, pause } => match dial.turn() {
                Dialled::Proved(proven) if proven.hello.rank as usize == edge.peer => Invitation::Heard,
                Dialled::Pending(dial) if now < until => Invitation::Dialling { dial, until, pause },
                _ => rest(pause),
            },
            call => call,
        }
    }

    fn dial(&self, edge: Edge, purpose: Purpose) -> io::Result<Box<Dial>> {
        let MeshOptions { system, members, secret, .. } = &self.options;
        let hello = Hello { purpose, peer: edge.peer as u16, group: edge.group, ..self.hello };
        Dial::start(&**system, members[edge.peer].addr, secret.clone(), hello)
    }
}

impl PeerPath {
    fn new(stage: Stage, until: Instant) -> PeerPath {
        PeerPath { stage, wanted: false, until, n_refusals: 0, refused: None }
    }

    fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Settled)
    }
}

impl Stage {
    /// The other rank has to connect, and may have to be told.
    fn awaited(now: Instant, last: &'static str) -> Stage {
        Stage::Awaited { last, call: Invitation::Resting { until: now + CALL_AFTER, pause: DIAL_PAUSE } }
    }

    /// What was last seen of a connection that was not made.
    fn unsettled(&self) -> String {
        match self {
            Stage::Awaited { last, .. } => (*last).to_owned(),
            Stage::Resting { last, .. } => last.clone(),
            Stage::Dialling { dial, .. } => overdue(dial.connected()).to_owned(),
            Stage::Probing { probe, .. } => probe.stalled(),
            Stage::Settled => String::new(),
        }
    }
}

fn overdue(connected: bool) -> &'static str {
    if connected { "it accepted the connection and did not answer" } else { "connection timed out" }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::seal::Encrypt;
    use crate::system::Os;

    const TIME: Duration = Duration::from_millis(1500);

    fn member(rank: usize, listener: &TcpListener) -> Member {
        let addr = listener.local_addr().unwrap();
        Member { rank, host: format!("h{rank}"), host_key: format!("k{}", rank / 2), pid: 1, addr }
    }

    fn hello(generation: u64) -> Hello {
        let (encrypt, here, key) = (Encrypt::Always, false, [0; 32]);
        let (purpose, job, rank, size, peer, group) = (Purpose::Control, 1, 0, 0, 0, 0);
        Hello { purpose, job, generation, rank, size, peer, group, encrypt, here, key }
    }

    fn mesh(rank: usize, listener: TcpListener, members: &[Member], secret: &str, generation: u64) -> Mesh {
        let options = MeshOptions {
            system: Arc::new(Os),
            rank,
            members: members.into(),
            secret: crate::secret::tests::secret(secret),
            hello: hello(generation),
            patience: Patience::default(),
            tell: Tell::default(),
        };
        Mesh::new(listener.into(), options).unwrap()
    }

    fn listeners(n: usize) -> (Vec<TcpListener>, Vec<Member>) {
        let listeners: Vec<_> = (0..n).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let members = listeners.iter().enumerate().map(|(i, l)| member(i, l)).collect();
        (listeners, members)
    }

    type Talks<'a> = &'a (dyn Fn(usize, usize) -> bool + Sync);

    /// Builds the meshes of these ranks, each with its secret and generation; `None` is a listener that never answers.
    /// `talks` says which pairs talk first.
    fn build(ranks: &[Option<(&str, u64)>], talks: Talks) -> Vec<(Vec<usize>, Vec<String>)> {
        let (listeners, members) = listeners(ranks.len());
        let members = &members;
        std::thread::scope(|s| {
            let build = |rank: usize, listener: TcpListener, (secret, generation): (&str, u64)| {
                let mut mesh = mesh(rank, listener, members, secret, generation);
                let peers = (0..members.len()).filter(|&peer| peer != rank && talks(rank, peer));
                let edges = peers.map(|peer| Edge { group: 3, peer }).collect();
                let (open, faults) = mesh.build(edges, Instant::now() + TIME, &mut || Ok(false)).unwrap();
                let faults = faults.iter().map(|f| format!("{} to {}: {}", f.from, f.to, f.why)).collect();
                let mut open: Vec<usize> = open.iter().map(|(edge, _)| edge.peer).collect();
                open.sort_unstable();
                (open, faults)
            };
            let mut silent = Vec::new();
            let mut running = Vec::new();
            for ((rank, kind), listener) in ranks.iter().enumerate().zip(listeners) {
                match *kind {
                    Some(kind) => running.push(s.spawn(move || build(rank, listener, kind))),
                    None => silent.push(listener),
                }
            }
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn pairs_that_cannot_talk_are_named_and_the_others_talk() {
        let check = |ranks: &[Option<(&str, u64)>], talks: Talks, expected: &[(&[usize], &[&str])]| {
            for ((open, faults), (to, says)) in build(ranks, talks).iter().zip(expected) {
                assert_eq!((open.as_slice(), faults.len()), (*to, says.len()), "{ranks:?}: {faults:?}");
                for (fault, says) in faults.iter().zip(*says) {
                    assert!(fault.contains(says), "{ranks:?}: {fault}");
                }
            }
        };
        let good = Some(("correct horse", 1));
        let all: Talks = &|_, _| true;
        check(&[good; 3], all, &[(&[1, 2], &[]), (&[0, 2], &[]), (&[0, 1], &[])]);
        // Ranks 0 and 1 do not talk.
        check(&[good; 3], &|one, other| one + other > 1, &[(&[2], &[]), (&[2], &[]), (&[0, 1], &[])]);
        let deaf: &[(&[usize], &[&str])] = &[
            (&[2], &["0 to 1: it did not connect"]),
            (&[0], &["2 to 1: it accepted the connection and did not answer"]),
        ];
        check(&[good, None, good], all, deaf);
        let secret: &[(&[usize], &[&str])] = &[
            (&[1], &["0 to 2: it did not connect"]),
            (&[0], &["1 to 2: it did not connect"]),
            (
                &[],
                &["2 to 0: it does not know the job's secret", "2 to 1: it does not know the job's secret"],
            ),
        ];
        check(&[good, good, Some(("wrong horse", 1))], all, secret);
        let old: &[(&[usize], &[&str])] =
            &[(&[], &["0 to 1: it did not connect"]), (&[], &["1 to 0: it closed the connection"])];
        check(&[good, Some(("correct horse", 2))], all, old);
    }

    /// Drives meshes until they have settled `n` edges, and returns which, on which rank, and how.
    fn settle(meshes: &mut [Mesh], n: usize) -> Vec<(usize, Edge, Result<Connection, String>)> {
        let begun = Instant::now();
        let mut settled = Vec::new();
        loop {
            for (rank, mesh) in meshes.iter_mut().enumerate() {
                settled.extend(mesh.turn().into_iter().map(|(edge, how)| (rank, edge, how)));
            }
            if settled.len() == n {
                return settled;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{} of {n} are settled", settled.len());
            let mut fds = Vec::new();
            meshes.iter().for_each(|mesh| mesh.interests(&mut fds));
            let due = meshes.iter().filter_map(Mesh::due).min().unwrap_or(begun + Duration::from_secs(60));
            Os.wait(&mut fds, due).unwrap();
        }
    }

    fn running(n: usize) -> Vec<Mesh> {
        let (listeners, members) = listeners(n);
        let ranks = listeners.into_iter().enumerate();
        let mesh = |(rank, listener)| Mesh { joining: false, ..mesh(rank, listener, &members, "a", 1) };
        ranks.map(mesh).collect()
    }

    /// Whichever rank wants to talk first, the pair gets one connection, which both have.
    #[test]
    fn either_of_two_can_want_to_talk_first_or_both() {
        for wants in [&[0][..], &[1], &[0, 1]] {
            let mut meshes = running(2);
            for group in [0, 7] {
                wants.iter().for_each(|&rank| meshes[rank].want(Edge { group, peer: 1 - rank }));
                let mut settled = settle(&mut meshes, 2);
                settled.sort_by_key(|(rank, ..)| *rank);
                for (rank, (by, edge, how)) in settled.iter().enumerate() {
                    assert_eq!((*by, *edge), (rank, Edge { group, peer: 1 - rank }), "{wants:?}");
                    assert!(how.is_ok(), "{how:?}");
                }
            }
            // It was made once, and wanting it again changes nothing.
            wants.iter().for_each(|&rank| meshes[rank].want(Edge { group: 7, peer: 1 - rank }));
            assert!(meshes.iter_mut().all(|mesh| mesh.turn().is_empty() && mesh.due().is_none()));
        }
    }

    /// Nothing listens at the lower rank's address: the higher one finds out, also if it was only asked to connect.
    #[test]
    fn who_has_to_connect_says_why_it_cannot() {
        for wants in [0, 1] {
            let mut meshes = running(2);
            let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let mut members = meshes[1].options.members.to_vec();
            members[0].addr = gone;
            meshes[1].options.members = members.into();
            let begun = Instant::now();
            meshes[wants].want(Edge { group: 0, peer: 1 - wants });
            let settled = settle(&mut meshes, 1);
            let [(1, Edge { peer: 0, .. }, Err(why))] = &settled[..] else { panic!("{settled:?}") };
            assert_eq!(why, "connection refused");
            assert!(begun.elapsed() >= GRACE, "the control plane has time to say that it is gone");
        }
    }
}
