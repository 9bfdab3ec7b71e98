//! Servers, leases and workers in one process, in virtual time, from a seed: messages that are lost, doubled, delayed and reordered;
//! workers that die and others that come. Invariants are checked after every event; deliberate bugs must be found. In half of the
//! schedules ranks die with the servers beside them, and the others form a new generation (`generations`). In half of them, if there are
//! enough ranks, those with a server only serve.
//!
//! The servers and the leases are the real ones. A worker is a model: it repeats what it waits for until it has its answer. What is in the
//! weights of a range is a sum over the blocks that were applied to it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

mod generations;

use generations::{KeptBlocks, RankBug};

use super::super::leases::LeaseBug;
use super::super::server::ServerBug;
use super::super::*;

const RANGES: usize = 2;
const RETRY_US: u64 = 5_000;
/// Faults happen until then; after it the rest must be done within the bound.
const FAULTS_US: u64 = 150_000;
const BOUND_US: u64 = 1_500_000;
const BLOCKS: u64 = 30;

struct Draws(u64);

impl Draws {
    /// Below `n`, by SplitMix64.
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n.max(1)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stand {
    /// Waits for the answer to its question.
    Asks,
    /// Computes a gradient.
    Computes(u64),
    /// Pushes a block and waits for the weights of all ranges.
    Exchanges(u64),
    /// Was told that there is nothing to do.
    Rests,
    /// The segment is over, and it pulls what the servers came to.
    Pulls(u64),
    /// It has all that, and waits for the others.
    Meets,
    /// All have, and it will know.
    Met,
    Dead,
}

struct ModelWorker {
    stand: Stand,
    session: u64,
    clock: u64,
    /// Where its clock starts, if it has joined to push.
    base: Option<u64>,
    number: u64,
    last: Option<u64>,
    missing: BTreeSet<(usize, usize)>,
    /// What is in its weights.
    working: BTreeMap<(usize, usize), u64>,
    /// The blocks that it did in this segment.
    mine: Vec<u64>,
    /// Whether it only serves.
    watches: bool,
    kept: KeptBlocks,
}

#[derive(Clone, Debug)]
enum Happening {
    AtServer(usize, ServerEvent<()>),
    AtLeases(LeaseEvent),
    Weights {
        worker: usize,
        session: u64,
        clock: u64,
        from: (usize, usize),
        content: u64,
    },
    /// What the leases say, and where the clock of a worker starts that joins.
    Told(LeaseAction, u64),
    Computed(usize),
    Met(usize),
    Regroup,
    Retry(usize),
    Strike,
}

#[derive(Clone, Copy, Default, Debug)]
struct Bugs {
    server: Option<ServerBug>,
    lease: Option<LeaseBug>,
    rank: Option<RankBug>,
}

/// What a block adds to the weights of a range.
fn content_of(block: u64) -> u64 {
    Draws(block).below(u64::MAX)
}

/// What is in the weights of a range when all blocks before `end` were applied to it once.
fn content_below(end: u64) -> u64 {
    (0..end).map(content_of).fold(0, u64::wrapping_add)
}

/// What the harness itself knows of a worker at a server, by the messages that arrived there.
#[derive(Default)]
struct Heard {
    session: u64,
    joined: bool,
    base: u64,
    pushed: [u64; RANGES],
}

impl Heard {
    fn clock(&self) -> u64 {
        self.base + self.pushed.iter().min().copied().unwrap_or(0)
    }
}

struct ServersWorld {
    random: Draws,
    now: u64,
    n: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    base: Instant,
    staleness: Option<u64>,
    bugs: Bugs,
    /// Whether a loss forms a new generation; otherwise workers come and go one by one, and servers stay.
    elastic: bool,
    /// Whether ranks with a server only serve, if others are left.
    serving: bool,
    /// For how long a segment hands out blocks.
    longest: Duration,
    /// Where the clock of a worker starts that joins now.
    clock: u64,
    /// Whether a rank of this generation is lost.
    lost: bool,
    /// By server: the worker that it dies with.
    hosts: Vec<usize>,
    /// By server and range: what is in its weights.
    contents: BTreeMap<(usize, usize), u64>,
    servers: Vec<ParamServer<()>>,
    heard: Vec<BTreeMap<usize, Heard>>,
    leases: Leases,
    workers: Vec<ModelWorker>,
    segment: u64,
    /// How often each block was applied to each range of each server.
    applied: BTreeMap<(usize, usize, u64), u64>,
    ended: u64,
    n_events: u64,
}

impl ServersWorld {
    fn new(seed: u64, bugs: Bugs) -> ServersWorld {
        let mut random = Draws(seed);
        let staleness = match random.below(5) {
            4 => None,
            s => Some(s),
        };
        let discipline = staleness.map_or(Discipline::Free, |staleness| Discipline::Bounded { staleness });
        let (n_servers, n_workers) = (1 + random.below(2) as usize, 2 + random.below(3));
        let (elastic, longest) = (random.below(2) == 0, Duration::from_micros(2_000 + random.below(40_000)));
        let server = || ParamServer::new(discipline, RANGES, 0).with_bug(bugs.server);
        let mut world = ServersWorld {
            random,
            now: 0,
            n: 0,
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            base: Instant::now(),
            staleness,
            bugs,
            elastic,
            serving: Draws(!seed).below(2) == 0,
            longest,
            clock: 0,
            lost: false,
            hosts: (0..n_servers).collect(),
            contents: BTreeMap::new(),
            servers: (0..n_servers).map(|_| server()).collect(),
            heard: (0..n_servers).map(|_| BTreeMap::new()).collect(),
            leases: Leases::new(0).with_bug(bugs.lease),
            workers: Vec::new(),
            segment: 1,
            applied: BTreeMap::new(),
            ended: 0,
            n_events: 0,
        };
        world.open();
        (0..n_workers).for_each(|_| world.enter());
        let all: Vec<usize> = (0..world.workers.len()).collect();
        world.seat(&all);
        all.into_iter().for_each(|worker| world.act(worker));
        world.at(3_000, Happening::Strike);
        world
    }

    fn at(&mut self, after: u64, what: Happening) {
        self.n += 1;
        self.queue.push(Reverse((self.now + after, self.n)));
        self.happenings.insert(self.n, what);
    }

    /// Over a network that loses, doubles, delays and reorders.
    fn send(&mut self, what: Happening) {
        let faults = self.now < FAULTS_US;
        if faults && self.random.below(100) < 8 {
            return;
        }
        let copies = if faults && self.random.below(100) < 8 { 2 } else { 1 };
        for _ in 0..copies {
            let long = faults && self.random.below(100) < 10;
            let after = 1 + self.random.below(if long { 20_000 } else { 500 });
            self.at(after, what.clone());
        }
    }

    fn open(&mut self) {
        let blocks = self.ended..BLOCKS;
        self.at(
            0,
            Happening::AtLeases(LeaseEvent::Open { segment: self.segment, blocks, longest: self.longest }),
        );
    }

    fn enter(&mut self) {
        let worker = self.workers.len();
        self.workers.push(ModelWorker::new(KeptBlocks::default()));
        self.at(RETRY_US, Happening::Retry(worker));
    }

    /// The first of these ranks only serve, if there are such ranks: those with servers, but for one.
    fn seat(&mut self, ranks: &[usize]) {
        let n = if self.serving { self.hosts.len().min(ranks.len() - 1) } else { 0 };
        for (place, rank) in ranks.iter().enumerate() {
            self.workers[*rank].watches = place < n;
        }
    }

    fn id(&self, worker: usize) -> WorkerId {
        WorkerId { worker, session: self.workers[worker].session }
    }

    fn join(&mut self, worker: usize) {
        let (id, clock) = (self.id(worker), self.workers[worker].base);
        for server in 0..self.servers.len() {
            self.send(Happening::AtServer(server, ServerEvent::Join { id, clock }));
        }
    }

    /// Sends, or sends again, what a worker waits for.
    fn act(&mut self, worker: usize) {
        let (id, of) = (self.id(worker), &self.workers[worker]);
        let (clock, base, number) = (of.clock, of.base, of.number);
        let (last, segment, watches) = (of.last, self.segment, of.watches);
        match of.stand {
            Stand::Asks => {
                let stop = self.random.below(200) == 0;
                let ask = LeaseEvent::Ask { worker, segment, number, done: last, stop, watches };
                self.send(Happening::AtLeases(ask));
            }
            Stand::Exchanges(block) => {
                for (server, range) in of.missing.clone() {
                    let push = ServerEvent::Push { from: id, clock, block, range, gradient: () };
                    let pull = ServerEvent::Pull { from: id, clock: clock + 1, range };
                    [ServerEvent::Join { id, clock: base }, push, pull]
                        .into_iter()
                        .for_each(|event| self.send(Happening::AtServer(server, event)));
                }
            }
            Stand::Rests => {
                let ask = LeaseEvent::Ask { worker, segment, number, done: last, stop: false, watches };
                self.send(Happening::AtLeases(ask));
                self.leave(worker);
            }
            Stand::Pulls(_) => {
                for (server, range) in of.missing.clone() {
                    let pull = ServerEvent::Pull { from: id, clock: 0, range };
                    let both = [ServerEvent::Join { id, clock: None }, pull];
                    both.into_iter().for_each(|event| self.send(Happening::AtServer(server, event)));
                }
            }
            Stand::Meets => self.leave(worker),
            Stand::Computes(_) | Stand::Met | Stand::Dead => {}
        }
    }

    fn leave(&mut self, worker: usize) {
        let id = self.id(worker);
        for server in 0..self.servers.len() {
            self.send(Happening::AtServer(server, ServerEvent::Leave(id)));
        }
    }

    fn run(&mut self) -> Result<(), String> {
        while self.ended < BLOCKS {
            let Some(Reverse((at, n))) = self.queue.pop() else { return Err("nothing happens".into()) };
            self.now = at;
            self.n_events += 1;
            if self.now > FAULTS_US + BOUND_US {
                let stands: Vec<Stand> = self.workers.iter().map(|w| w.stand).collect();
                return Err(format!("no end: {} of {BLOCKS} blocks, workers {stands:?}", self.ended));
            }
            let happening = self.happenings.remove(&n).expect("each happens once");
            self.happen(happening)?;
            self.meet()?;
        }
        match self.places().find(|at| self.contents.get(at) != Some(&content_below(self.ended))) {
            Some(at) => Err(format!("range {at:?} has other weights than those of {} blocks", self.ended)),
            None => Ok(()),
        }
    }

    fn happen(&mut self, what: Happening) -> Result<(), String> {
        match what {
            Happening::AtServer(server, event) if self.lives(server) => self.at_server(server, event)?,
            Happening::AtLeases(event) if self.lives(0) => {
                let now = self.base + Duration::from_micros(self.now);
                self.clock = self.servers[0].slowest().unwrap_or(self.clock);
                for action in self.leases.step(now, event) {
                    self.send(Happening::Told(action, self.clock));
                }
            }
            Happening::AtServer(..) | Happening::AtLeases(_) => {}
            Happening::Weights { worker, session, clock, from, content } => {
                let of = &mut self.workers[worker];
                let due = match of.stand {
                    Stand::Exchanges(_) => of.clock + 1,
                    Stand::Pulls(_) => 0,
                    _ => return Ok(()),
                };
                if (of.session, due) != (session, clock) || !of.missing.remove(&from) {
                    return Ok(());
                }
                of.working.insert(from, content);
                if !of.missing.is_empty() {
                    return Ok(());
                }
                match of.stand {
                    Stand::Exchanges(block) => {
                        of.clock += 1;
                        (of.stand, of.last) = (Stand::Asks, Some(block));
                        of.number += 1;
                        of.mine.push(block);
                    }
                    _ => self.pulled(worker)?,
                }
                self.act(worker);
            }
            Happening::Met(worker) => self.met(worker),
            Happening::Regroup => self.regroup()?,
            Happening::Told(action, clock) => self.told(action, clock)?,
            Happening::Computed(worker) => {
                if let Stand::Computes(block) = self.workers[worker].stand {
                    let all =
                        (0..self.servers.len()).flat_map(|s| (0..RANGES).map(move |r| (s, r))).collect();
                    (self.workers[worker].stand, self.workers[worker].missing) =
                        (Stand::Exchanges(block), all);
                    self.act(worker);
                }
            }
            Happening::Retry(worker) => {
                if self.workers[worker].stand != Stand::Dead {
                    self.act(worker);
                    self.at(RETRY_US, Happening::Retry(worker));
                }
            }
            Happening::Strike => self.strike(),
        }
        Ok(())
    }

    /// Workers die, and the membership says so some time later; others come.
    fn strike(&mut self) {
        if self.now >= FAULTS_US {
            return;
        }
        let alive: Vec<usize> =
            (0..self.workers.len()).filter(|w| self.workers[*w].stand != Stand::Dead).collect();
        if alive.len() > 1 && self.random.below(3) == 0 {
            let worker = alive[self.random.below(alive.len() as u64) as usize];
            let learns = |w: &usize| *w != worker && !self.workers[*w].watches;
            if !self.elastic && !alive.iter().any(learns) {
                return self.next_strike();
            }
            self.workers[worker].stand = Stand::Dead;
            let noticed = 1 + self.random.below(30_000);
            if self.elastic {
                self.lost = true;
                self.at(noticed, Happening::Regroup);
                return self.next_strike();
            }
            self.at(noticed, Happening::AtLeases(LeaseEvent::Leave { worker }));
            for server in 0..self.servers.len() {
                let for_good = WorkerId { worker, session: u64::MAX };
                self.at(noticed, Happening::AtServer(server, ServerEvent::Leave(for_good)));
            }
        }
        if !self.elastic && alive.len() < 5 && self.random.below(3) == 0 {
            self.enter();
            self.act(self.workers.len() - 1);
        }
        self.next_strike();
    }

    fn next_strike(&mut self) {
        let next = 1_000 + self.random.below(20_000);
        self.at(next, Happening::Strike);
    }

    fn told(&mut self, action: LeaseAction, clock: u64) -> Result<(), String> {
        let (LeaseAction::Lease { worker, number, .. }
        | LeaseAction::Rest { worker, number }
        | LeaseAction::Over { worker, number, .. }) = action;
        let of = &mut self.workers[worker];
        if of.number != number || !matches!(of.stand, Stand::Asks | Stand::Rests) {
            return Ok(());
        }
        match action {
            LeaseAction::Lease { block, .. } if of.watches => {
                return Err(format!("worker {worker} only serves, and gets block {block}"));
            }
            LeaseAction::Lease { block, .. } => {
                if of.base.is_none() {
                    (of.session, of.clock, of.base) = (of.session + 1, 0, Some(clock));
                    self.join(worker);
                }
                self.workers[worker].stand = Stand::Computes(block);
                let slow = if self.random.below(10) == 0 { 10 } else { 1 };
                let took = 200 + self.random.below(1_500) * slow;
                self.at(took, Happening::Computed(worker));
            }
            LeaseAction::Rest { .. } => {
                (of.stand, of.base) = (Stand::Rests, None);
                self.act(worker);
            }
            LeaseAction::Over { end, .. } => {
                of.stand = Stand::Pulls(end);
                (of.session, of.clock, of.base) = (of.session + 1, 0, None);
                self.workers[worker].missing = self.places().collect();
                self.act(worker);
                let ranges = (0..self.servers.len()).flat_map(|s| (0..RANGES).map(move |r| (s, r)));
                for (server, range) in ranges {
                    if let Some(block) = (0..end).find(|b| !self.applied.contains_key(&(server, range, *b))) {
                        return Err(format!("the segment is over without block {block} at server {server}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// When all workers have been told that the segment is over, the next one begins.
    fn meet(&mut self) -> Result<(), String> {
        let mut alive = self.workers.iter().filter(|w| w.stand != Stand::Dead).peekable();
        // What all do together does not end without one of them.
        if self.lost || alive.peek().is_none() || !alive.all(|w| w.stand == Stand::Meets) {
            return Ok(());
        }
        // All blocks up to some number, and none beyond it.
        let ended = self.applied.keys().map(|(_, _, block)| block + 1).max().unwrap_or(0);
        let want = ended * (self.servers.len() * RANGES) as u64;
        if self.applied.len() as u64 != want || ended <= self.ended {
            return Err(format!("{} applied of {want}, after {} blocks", self.applied.len(), self.ended));
        }
        (self.ended, self.segment) = (ended, self.segment + 1);
        self.open();
        for worker in 0..self.workers.len() {
            if self.workers[worker].stand == Stand::Meets {
                self.workers[worker].stand = Stand::Met;
                let late = self.random.below(4) == 0;
                let told = 1 + self.random.below(if late { 20_000 } else { 500 });
                self.at(told, Happening::Met(worker));
            }
        }
        Ok(())
    }

    fn at_server(&mut self, server: usize, event: ServerEvent<()>) -> Result<(), String> {
        self.hear(server, &event);
        for action in self.servers[server].step(event) {
            match action {
                ServerAction::Apply { range, block, .. } => {
                    let times = self.applied.entry((server, range, block)).or_default();
                    *times += 1;
                    if *times > 1 {
                        return Err(format!("block {block} is applied twice to range {range} of {server}"));
                    }
                    let content = self.contents.entry((server, range)).or_default();
                    *content = content.wrapping_add(content_of(block));
                }
                ServerAction::Answer { to, range, clock, .. } => {
                    let heard = &self.heard[server];
                    let of = &heard[&to.worker];
                    let slowest = heard.values().filter(|w| w.joined).map(Heard::clock).min().unwrap_or(0);
                    if let Some(s) = self.staleness
                        && of.base + clock > slowest + s
                    {
                        let ahead = of.base + clock - slowest;
                        return Err(format!("a pull was answered {ahead} ahead of the slowest, bound {s}"));
                    }
                    let from = (server, range);
                    let content = self.contents.get(&from).copied().unwrap_or(0);
                    self.send(Happening::Weights {
                        worker: to.worker,
                        session: to.session,
                        clock,
                        from,
                        content,
                    });
                }
                ServerAction::Refuse { .. } => {}
            }
        }
        // The server's clocks are those that follow from what arrived, and from where they start.
        for (worker, of) in self.heard[server].iter().filter(|(_, w)| w.joined) {
            match self.servers[server].clock_of(*worker) {
                Some(clock) if clock > of.clock() => {
                    return Err(format!("the clock of worker {worker} runs ahead of its pushes"));
                }
                Some(clock) if clock < of.base => {
                    return Err(format!(
                        "the clock of worker {worker} is {clock}, and starts at {}",
                        of.base
                    ));
                }
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// Keeps the harness's own record of what arrived at a server.
    fn hear(&mut self, server: usize, event: &ServerEvent<()>) {
        let heard = &mut self.heard[server];
        let slowest = heard.values().filter(|w| w.joined).map(Heard::clock).min().unwrap_or(0);
        match *event {
            ServerEvent::Join { id, clock } => {
                let of = heard.entry(id.worker).or_default();
                if id.session > of.session {
                    let base = clock.unwrap_or(slowest);
                    *of = Heard { session: id.session, joined: true, base, pushed: [0; RANGES] };
                }
            }
            ServerEvent::Leave(id) => {
                let of = heard.entry(id.worker).or_default();
                if id.session >= of.session {
                    (of.session, of.joined) = (id.session, false);
                }
            }
            ServerEvent::Push { from, clock, range, .. } => {
                if let Some(of) = heard.get_mut(&from.worker)
                    && of.joined
                    && of.session == from.session
                {
                    of.pushed[range] = of.pushed[range].max(clock + 1);
                }
            }
            ServerEvent::Pull { .. } => {}
        }
    }
}

fn run(seed: u64, bugs: Bugs) -> Result<u64, String> {
    let mut world = ServersWorld::new(seed, bugs);
    world.run().map(|()| world.n_events).map_err(|why| format!("seed {seed}: {why}"))
}

/// `SCHEDULES=10000` runs more of them.
#[test]
fn every_block_is_applied_once_and_no_worker_runs_ahead() {
    let n = std::env::var("SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(2_000);
    let mut n_events = 0;
    for seed in 0..n {
        n_events += run(seed, Bugs::default()).unwrap_or_else(|why| panic!("{why}"));
    }
    println!("{n} schedules, {n_events} events");
}

#[test]
fn deliberate_bugs_are_found() {
    let servers = [
        ServerBug::AppliesTwice,
        ServerBug::LooseBound,
        ServerBug::WaitsForTheGone,
        ServerBug::FirstRangeCounts,
        ServerBug::JoinsAtZero,
        ServerBug::TakesOldSessions,
    ];
    let servers = servers.map(|bug| Bugs { server: Some(bug), ..Bugs::default() });
    let leases =
        [LeaseBug::LosesBlocks, LeaseBug::EndsEarly].map(|bug| Bugs { lease: Some(bug), ..Bugs::default() });
    let ranks = RankBug::ALL.map(|bug| Bugs { rank: Some(bug), ..Bugs::default() });
    for bugs in servers.into_iter().chain(leases).chain(ranks) {
        let found = (0..500).find_map(|seed| run(seed, bugs).err());
        println!("{bugs:?}: {}", found.as_deref().unwrap_or("not found"));
        assert!(found.is_some(), "{bugs:?} is not found in 500 schedules");
    }
}
