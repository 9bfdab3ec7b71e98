//! The clock: runs the scores of all ranks in virtual time.
//!
//! Every rank has a clock of its own: it computes, starts exchanges and waits for them as its program says, and nothing else makes
//! it wait. What happens next, anywhere, is at the head of one queue, ordered by time and then by the order of entry, so the
//! same input gives the same times to the bit.
//!
//! # Messages
//! A sender copies a message and goes on. The way between two ranks carries one message at a time. A receiver waits until it is
//! there.
//!
//! [`groups`] says when collectives begin and end, [`hosts`] how fast ranks compute, [`servers`] what parameter servers do.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::Range;

use polyreme_graph::Axis;

use crate::cluster::Cluster;
use crate::exchange::{ExchangeCost, GroupOp, GroupWay, MessageCost, message};
use crate::score::{Act, Meeting, Score};

mod groups;
mod hosts;
mod servers;

pub(crate) use servers::ServerOrder;
use servers::{RangeState, ServerLetter, ServerState};

/// What the clock runs.
pub(crate) struct Scene<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) scores: &'a [Score],
    pub(crate) ranks: Vec<RankPlace>,
    pub(crate) groups: Vec<GroupPlace>,
    /// Ways that groups have.
    pub(crate) ways: Vec<GroupWay>,
    /// How much ranks of a host slow each other down.
    pub(crate) contention: bool,
    /// How often the programs are run.
    pub(crate) runs: usize,
    /// The ranks of which a timeline is kept.
    pub(crate) traced: Range<usize>,
    /// If there are parameter servers: in which order they apply gradients.
    pub(crate) order: ServerOrder,
}

/// Where a rank is.
#[derive(Clone, Debug)]
pub(crate) struct RankPlace {
    pub(crate) score: usize,
    pub(crate) host: usize,
    pub(crate) threads: f64,
    /// By axis: its group, if there are others along it.
    pub(crate) groups: [Option<usize>; 4],
    /// By exchange of its score: the channel of a message.
    pub(crate) channels: Vec<Option<usize>>,
}

/// The ranks along an axis.
#[derive(Clone, Debug)]
pub(crate) struct GroupPlace {
    pub(crate) axis: Axis,
    pub(crate) members: Vec<usize>,
    /// Their hosts, each once.
    pub(crate) hosts: Vec<usize>,
    pub(crate) way: usize,
}

/// Messages from one rank to another with one tag.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelPlace {
    pub(crate) axis: Axis,
    pub(crate) from: usize,
    /// Whether it goes over the link of the sender's host, and how many groups use that.
    pub(crate) crosses: bool,
    pub(crate) sharing: usize,
    /// The way that it has in common with the others between the two ranks.
    pub(crate) line: usize,
}

/// What the clock saw.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClockSeen {
    /// By rank: when each of its runs ended.
    pub(crate) ends: Vec<Vec<f64>>,
    /// By rank: for how long it computed.
    pub(crate) computed: Vec<f64>,
    /// By rank and axis: for how long it waited.
    pub(crate) waited: Vec<[f64; 4]>,
    /// By host and axis: bytes that it sent over its link.
    pub(crate) link_bytes: Vec<[f64; 4]>,
    /// By host: bytes that passed its memory in exchanges.
    pub(crate) memory_bytes: Vec<f64>,
    /// By traced rank: what it did.
    pub(crate) marks: Vec<Vec<Mark>>,
}

/// A span of a traced rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    pub(crate) run: usize,
    pub(crate) what: MarkOf,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum MarkOf {
    Stretch(usize),
    /// A copy of what is sent.
    Copy(usize),
    Wait(usize),
    /// From its start until it was waited for.
    Exchange(usize),
    /// A wait for weights of a server, by the instruction that waits.
    Served(usize),
}

/// A rank that nothing wakes any more, and the exchange that it waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stopped {
    pub(crate) rank: usize,
    pub(crate) exchange: usize,
}

/// Why the clock stopped.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum ClockError {
    /// Ranks of a group call different operations.
    Differs { rank: usize, axis: Axis },
    /// Ranks wait for ever.
    Stuck(Stopped),
}

/// Runs everything.
pub(crate) fn run(scene: &Scene, channels: &[ChannelPlace]) -> Result<ClockSeen, ClockError> {
    let mut clock = Clock::new(scene, channels);
    for rank in 0..scene.ranks.len() {
        clock.go(rank)?;
    }
    clock.retime();
    while let Some(Reverse(tick)) = clock.queue.pop() {
        clock.now = tick.time;
        clock.tick(tick.what)?;
        clock.retime();
    }
    match clock.ranks.iter().position(|rank| !matches!(rank.doing, RankDoing::Nothing)) {
        None => Ok(clock.seen),
        Some(rank) => {
            let exchange = match clock.ranks[rank].doing {
                RankDoing::Awaiting { exchange, .. } => exchange,
                RankDoing::Computing { .. } | RankDoing::Served { .. } | RankDoing::Nothing => 0,
            };
            Err(ClockError::Stuck(Stopped { rank, exchange }))
        }
    }
}

/// A way, an operation, its bytes, whether its memory is visible, and of coded sums how many numbers they are of. A job has one codec.
type CostKey = (usize, u8, u64, bool, u64);

struct Clock<'a> {
    scene: &'a Scene<'a>,
    places: &'a [ChannelPlace],
    now: f64,
    queue: BinaryHeap<Reverse<Tick>>,
    entered: u64,
    ranks: Vec<RankClock>,
    hosts: Vec<HostClock>,
    groups: Vec<GroupClock>,
    channels: Vec<ChannelClock>,
    /// By line: when it has carried what was sent.
    lines: Vec<f64>,
    /// Hosts whose ranks changed what they do.
    stale: Vec<usize>,
    /// Costs by way, operation, bytes and whether memory is visible.
    costs: BTreeMap<CostKey, ExchangeCost>,
    /// By server, and by range of the program.
    servers: Vec<ServerState>,
    ranges: Vec<RangeState>,
    /// By host, and then by rank: until when its way out and its way in are taken by letters of servers.
    server_lines: Vec<(f64, f64)>,
    seen: ClockSeen,
}

struct RankClock {
    doing: RankDoing,
    /// The next act, and how many runs are over.
    at: usize,
    run: usize,
    /// Of what it computes: how much is left, how fast it goes, and how much slower it is in a crowd.
    left_us: f64,
    rate: f64,
    crowd: f64,
    comms: [CommClock; 4],
    /// By exchange: when it was started, if the rank is traced.
    started: Vec<f64>,
    /// By range of servers: whether its weights have come, and were not taken over yet.
    came: Vec<bool>,
}

/// Collectives of a rank along an axis, counted over all runs.
#[derive(Clone, Copy, Default)]
struct CommClock {
    started: usize,
    arrived: usize,
    done: usize,
}

#[derive(Clone, Copy)]
enum RankDoing {
    Computing {
        what: MarkOf,
        since: f64,
    },
    Awaiting {
        exchange: usize,
        axis: Axis,
        since: f64,
        target: Option<usize>,
    },
    /// Waits for the weights of a range.
    Served {
        range: usize,
        instr: usize,
        since: f64,
    },
    Nothing,
}

struct HostClock {
    /// Ranks that compute.
    busy: Vec<usize>,
    threads: f64,
    /// Cores that exchanges take meanwhile.
    background: f64,
    since: f64,
    version: u64,
    next: usize,
    is_stale: bool,
}

#[derive(Default)]
struct GroupClock {
    arrived: usize,
    op: Option<GroupOp>,
    /// How much of a core its collective takes of each rank.
    core_share: f64,
    /// When it was last done with something.
    met: f64,
}

#[derive(Default)]
struct ChannelClock {
    arrivals: VecDeque<f64>,
    waiting: Option<usize>,
}

struct Tick {
    time: f64,
    entered: u64,
    what: TickOf,
}

#[derive(Clone, Copy)]
enum TickOf {
    /// A rank of a host has computed what it had to, unless the host has changed since.
    Host { host: usize, version: u64 },
    /// A group's collective is over.
    Group(usize),
    /// A message that a rank waits for is there.
    Message(usize),
    /// A letter is at its server.
    Letter(usize, ServerLetter),
    /// A server is done with a letter.
    Served(usize),
    /// Weights have come.
    Weights { rank: usize, range: usize },
    /// Something else takes a share of a core of a host, or gives it back.
    Background { host: usize, share: f64 },
}

impl PartialEq for Tick {
    fn eq(&self, other: &Tick) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Tick {}
impl PartialOrd for Tick {
    fn partial_cmp(&self, other: &Tick) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Tick {
    fn cmp(&self, other: &Tick) -> Ordering {
        self.time.total_cmp(&other.time).then(self.entered.cmp(&other.entered))
    }
}

impl<'a> Clock<'a> {
    fn new(scene: &'a Scene<'a>, places: &'a [ChannelPlace]) -> Clock<'a> {
        let rank = |(rank, place): (usize, &RankPlace)| RankClock {
            doing: RankDoing::Nothing,
            at: 0,
            run: 0,
            left_us: 0.0,
            rate: 1.0,
            crowd: 1.0,
            comms: [CommClock::default(); 4],
            started: match scene.traced.contains(&rank) {
                true => vec![0.0; scene.scores[place.score].meetings.len()],
                false => Vec::new(),
            },
            came: vec![false; scene.scores[place.score].served.len()],
        };
        let served = scene.ranks.first().map_or(&[][..], |place| &scene.scores[place.score].served[..]);
        let n_servers = served.iter().map(|part| part.server + 1).max().unwrap_or(0);
        let range = |_| RangeState::new(scene.ranks.len());
        let host = |_| HostClock {
            busy: Vec::new(),
            threads: 0.0,
            background: 0.0,
            since: 0.0,
            version: 0,
            next: 0,
            is_stale: false,
        };
        let (n, n_hosts) = (scene.ranks.len(), scene.cluster.hosts.len());
        Clock {
            scene,
            places,
            now: 0.0,
            queue: BinaryHeap::new(),
            entered: 0,
            ranks: scene.ranks.iter().enumerate().map(rank).collect(),
            hosts: (0..n_hosts).map(host).collect(),
            groups: scene.groups.iter().map(|_| GroupClock::default()).collect(),
            channels: places.iter().map(|_| ChannelClock::default()).collect(),
            lines: vec![0.0; places.iter().map(|place| place.line + 1).max().unwrap_or(0)],
            stale: Vec::new(),
            costs: BTreeMap::new(),
            servers: (0..n_servers).map(|_| ServerState::default()).collect(),
            ranges: served.iter().map(range).collect(),
            server_lines: vec![(0.0, 0.0); if served.is_empty() { 0 } else { n_hosts + n }],
            seen: ClockSeen {
                ends: vec![Vec::new(); n],
                computed: vec![0.0; n],
                waited: vec![[0.0; 4]; n],
                link_bytes: vec![[0.0; 4]; n_hosts],
                memory_bytes: vec![0.0; n_hosts],
                marks: vec![Vec::new(); scene.traced.len()],
            },
        }
    }

    fn enter(&mut self, time: f64, what: TickOf) {
        self.entered += 1;
        self.queue.push(Reverse(Tick { time, entered: self.entered, what }));
    }

    fn tick(&mut self, what: TickOf) -> Result<(), ClockError> {
        match what {
            TickOf::Host { host, version } => {
                if self.hosts[host].version == version {
                    let rank = self.hosts[host].next;
                    self.end_computing(rank)?;
                }
                Ok(())
            }
            TickOf::Group(group) => self.group_is_done(group),
            TickOf::Message(rank) => self.wake(rank),
            TickOf::Letter(server, letter) => {
                self.letter_came(server, letter);
                Ok(())
            }
            TickOf::Served(server) => {
                self.served_letter(server);
                Ok(())
            }
            TickOf::Weights { rank, range } => self.weights_came(rank, range),
            TickOf::Background { host, share } => {
                self.background(host, share);
                Ok(())
            }
        }
    }

    /// Goes through a rank's acts until it computes or waits.
    fn go(&mut self, rank: usize) -> Result<(), ClockError> {
        let place = &self.scene.ranks[rank];
        let score = &self.scene.scores[place.score];
        loop {
            let Some(&act) = score.acts.get(self.ranks[rank].at) else {
                self.seen.ends[rank].push(self.now);
                self.ranks[rank].run += 1;
                if self.ranks[rank].run >= self.scene.runs {
                    self.left_servers();
                    return Ok(());
                }
                self.ranks[rank].at = 0;
                continue;
            };
            self.ranks[rank].at += 1;
            match act {
                Act::Compute(k) => {
                    let took = score.stretches[k].took;
                    self.compute(rank, MarkOf::Stretch(k), took.alone_us, took.crowded_us);
                    return Ok(());
                }
                Act::Start(exchange) => {
                    if let Some(started) = self.ranks[rank].started.get_mut(exchange) {
                        *started = self.now;
                    }
                    let (axis, meeting) = &score.meetings[exchange];
                    match meeting {
                        Meeting::Group { at_wait: false, .. } => {
                            self.ranks[rank].comms[*axis as usize].started += 1;
                            self.arrive(rank, *axis)?;
                        }
                        Meeting::Group { at_wait: true, .. } | Meeting::Receive { .. } => {}
                        Meeting::Send { bytes, .. } => {
                            let channel = place.channels[exchange].expect("every message has a channel");
                            let copy_us = self.message(channel, *bytes).copy_us;
                            if copy_us > 0.0 {
                                self.compute(rank, MarkOf::Copy(exchange), copy_us, copy_us);
                                return Ok(());
                            }
                            self.send(channel, *bytes);
                        }
                    }
                }
                Act::Push(range) => self.post_to_server(rank, range, true),
                Act::Pull(range) => self.post_to_server(rank, range, false),
                Act::Await { range, instr } => {
                    if !self.want_weights(rank, range, instr) {
                        return Ok(());
                    }
                }
                Act::Wait(exchange) => {
                    let (axis, meeting) = &score.meetings[exchange];
                    let (axis, since) = (*axis, self.now);
                    let target = match meeting {
                        Meeting::Send { .. } => continue,
                        Meeting::Group { number, at_wait, .. } => {
                            let run = self.ranks[rank].run;
                            self.ranks[rank].comms[axis as usize].started += usize::from(*at_wait);
                            Some(number + run * score.order[axis as usize].len())
                        }
                        Meeting::Receive { .. } => None,
                    };
                    self.ranks[rank].doing = RankDoing::Awaiting { exchange, axis, since, target };
                    let over = match target {
                        Some(target) => {
                            self.arrive(rank, axis)?;
                            self.ranks[rank].comms[axis as usize].done > target
                        }
                        None => {
                            let channel = place.channels[exchange].expect("every message has a channel");
                            self.received(rank, channel)
                        }
                    };
                    if !over {
                        return Ok(());
                    }
                    self.waited(rank);
                }
            }
        }
    }

    /// Whether a message is there. If not, the rank is woken when it is.
    fn received(&mut self, rank: usize, channel: usize) -> bool {
        match self.channels[channel].arrivals.pop_front() {
            Some(time) if time <= self.now => true,
            Some(time) => {
                self.enter(time, TickOf::Message(rank));
                false
            }
            None => {
                self.channels[channel].waiting = Some(rank);
                false
            }
        }
    }

    fn message(&self, channel: usize, bytes: f64) -> MessageCost {
        let place = &self.places[channel];
        message(self.scene.cluster, !place.crosses, place.sharing, bytes)
    }

    /// Puts a message on its way.
    fn send(&mut self, channel: usize, bytes: f64) {
        let (place, cost) = (&self.places[channel], self.message(channel, bytes));
        let free_at = &mut self.lines[place.line];
        *free_at = free_at.max(self.now) + cost.transfer_us;
        let arrival = *free_at + cost.latency_us;
        let waiting = self.channels[channel].waiting.take();
        let host = self.scene.ranks[place.from].host;
        match place.crosses {
            true => self.seen.link_bytes[host][place.axis as usize] += bytes,
            false => self.seen.memory_bytes[host] += 2.0 * bytes,
        }
        match waiting {
            Some(rank) => self.enter(arrival, TickOf::Message(rank)),
            None => self.channels[channel].arrivals.push_back(arrival),
        }
    }

    /// Ends a rank's wait, and lets it go on.
    fn wake(&mut self, rank: usize) -> Result<(), ClockError> {
        self.waited(rank);
        self.go(rank)
    }

    /// Counts a wait that is over.
    fn waited(&mut self, rank: usize) {
        let doing = std::mem::replace(&mut self.ranks[rank].doing, RankDoing::Nothing);
        let RankDoing::Awaiting { exchange, axis, since, .. } = doing else { return };
        self.seen.waited[rank][axis as usize] += self.now - since;
        if let Some(&started) = self.ranks[rank].started.get(exchange) {
            let meeting = &self.scene.scores[self.scene.ranks[rank].score].meetings[exchange].1;
            // What is only begun in its wait was not under way before.
            if !matches!(meeting, Meeting::Group { at_wait: true, .. }) {
                self.mark(rank, MarkOf::Exchange(exchange), started);
            }
            self.mark(rank, MarkOf::Wait(exchange), since);
        }
    }

    fn mark(&mut self, rank: usize, what: MarkOf, from: f64) {
        if self.scene.traced.contains(&rank) {
            let (run, to) = (self.ranks[rank].run, self.now);
            self.seen.marks[rank - self.scene.traced.start].push(Mark { run, what, from, to });
        }
    }
}
