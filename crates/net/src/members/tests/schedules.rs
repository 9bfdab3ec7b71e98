//! The coordinator and the members of a job in one process, in virtual time, from a seed: random delays, kills, hosts that vanish, pauses,
//! cut networks, broken links, ranks that leave, joins, coordinators that are lost and started again, with and without a store that keeps
//! the record of the last generation. Invariants are checked after every event; deliberate bugs must be found.
//!
//! The coordinator and the seats are the real ones. A rank's training is a model of it: it sends its part of a step to all others,
//! and has finished the step when it has the parts of all ranks of its generation, whenever that is, also if the others have long
//! gone on without it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use super::super::coordinator::{Coordinator, CoordinatorBug, Rules};
use super::super::decision::{Decision, MemberAction, MemberEvent, Reason};
use super::super::message::{Formation, MemberId, MemoryUse, Ready, Returned, ToMember};
use super::super::seat::{Seat, SeatAction};
use super::super::store::GenerationRecord;
use super::super::tally::TallySummary;

const PATIENCE_US: u64 = 300_000;
const BEAT_US: u64 = 30_000;
const COMPUTE_US: u64 = 8_000;
/// Faults happen until then, and after it there must be progress within the bound.
const FAULTS_US: u64 = 3_000_000;
const BOUND_US: u64 = 2_500_000;
/// By then all pauses and cuts are over, silent members are removed and others have come back: from here on steps are counted.
const SETTLED_US: u64 = 1_500_000;

/// Longer than the longest pause: nobody who lives comes back later than this to a coordinator that was started again.
const HOLD_OFF: Duration = Duration::from_micros(5 * PATIENCE_US);

struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// A process.
struct Process {
    /// Its member number now; a process that comes back gets another.
    id: MemberId,
    watched: bool,
    alive: bool,
    /// Nothing reaches it and it does nothing until then.
    stopped_until: u64,
    seat: Seat,
    form: Option<Formation>,
    formed: bool,
    leaves: bool,
    /// The generation in which each step was done.
    history: Vec<u64>,
    has_state: bool,
    /// Whether it has trained since it entered.
    trained: bool,
    /// What another coordinator would be told: the members of its last generation, and where it stands.
    ranks: Vec<MemberId>,
    stand: Option<MemberEvent>,
    wants_out: bool,
    /// What the lost coordinator had sent arrives until then.
    hears_until: u64,
}

#[derive(Clone, Debug)]
enum Happening {
    /// A member's message arrives at the coordinator that it was sent to.
    Says(u64, MemberId, MemberEvent),
    Told(u64, usize, MemberId, ToMember),
    /// The connection of this member to the coordinator is closed: it connects again, once, to the one that there is then.
    ClosedOn(u64, usize, MemberId),
    /// A member was told that it is one no longer, and enters as new.
    Dismissed(usize, MemberId),
    Connected(usize, u64),
    /// A rank that was told to end its generation looks up from what it computes.
    Stops(usize, u64),
    /// A rank sends its part of a step.
    Sends(usize, u64),
    /// A rank has the parts of all.
    Finishes(usize, u64, u64),
    Beats(usize),
    Strikes,
    CoordinatorDies,
    Tick,
}

struct Generation {
    /// How many coordinators were lost before the one that formed it.
    coordinator: u64,
    ranks: Vec<MemberId>,
    processes: Vec<usize>,
    arrived: BTreeSet<usize>,
    parts: BTreeMap<u64, BTreeSet<usize>>,
}

struct World {
    random: Draws,
    now: u64,
    base: Instant,
    n: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    rules: Rules,
    bug: Option<CoordinatorBug>,
    coordinator: Coordinator,
    /// Whether coordinators are lost; how many were.
    restarts: bool,
    coordinators_lost: u64,
    /// What a store has, if there is one: a coordinator that is started again reads it.
    record: Option<GenerationRecord>,
    processes: Vec<Process>,
    next_id: MemberId,
    /// Numbers under which processes were members that are others now.
    former: Vec<MemberId>,
    generations: BTreeMap<u64, Generation>,
    /// Members as the coordinator sees them: those that it was told of and has not lost.
    lost: BTreeSet<MemberId>,
    /// Those of them that left, and are on their way out.
    released: BTreeSet<MemberId>,
    best: u64,
    /// The coordinator waits for ranks that may be alive elsewhere.
    no_majority: bool,
    /// Steps that were finished, on any rank.
    finished: u64,
    quiet_from: Option<(u64, u64)>,
    /// When the last message from or to a member arrives.
    arrives: BTreeMap<(bool, MemberId), u64>,
    n_events: u64,
}

type Checked = Result<(), String>;

impl World {
    fn new(seed: u64, bug: Option<CoordinatorBug>) -> World {
        let mut random = Draws(seed);
        let n = 2 + random.below(5) as usize;
        let rules = Rules {
            min: 1 + random.below(2) as usize,
            max: 8,
            start: n,
            patience: Duration::from_micros(PATIENCE_US),
            hold_off: Duration::ZERO,
            exclusive: false,
            memory: MemoryUse::Never,
        };
        let restarts = random.chance(50);
        let rules = Rules { exclusive: restarts && random.chance(50), ..rules };
        let mut coordinator = Coordinator::new(rules);
        coordinator.bug = bug;
        let mut world = World {
            random,
            now: 0,
            base: Instant::now(),
            n: 0,
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            rules,
            bug,
            coordinator,
            restarts,
            coordinators_lost: 0,
            record: None,
            processes: Vec::new(),
            next_id: 1,
            former: Vec::new(),
            generations: BTreeMap::new(),
            lost: BTreeSet::new(),
            released: BTreeSet::new(),
            best: 0,
            no_majority: false,
            finished: 0,
            quiet_from: None,
            arrives: BTreeMap::new(),
            n_events: 0,
        };
        (0..n).for_each(|_| world.start());
        world.after(200_000, Happening::Strikes);
        world.after(10_000, Happening::Tick);
        world
    }

    fn after(&mut self, us: u64, what: Happening) {
        self.n += 1;
        self.queue.push(Reverse((self.now + us, self.n)));
        self.happenings.insert(self.n, what);
    }

    fn delay(&mut self) -> u64 {
        let long = self.random.chance(5);
        self.random.below(if long { 30_000 } else { 2_000 })
    }

    fn time(&self) -> Instant {
        self.base + Duration::from_micros(self.now)
    }

    fn start(&mut self) {
        // Children of a coordinator are lost with it.
        let watched = self.random.chance(50) && !self.restarts;
        let p = self.processes.len();
        self.processes.push(Process {
            id: 0,
            watched,
            alive: true,
            stopped_until: 0,
            seat: Seat::new(),
            form: None,
            formed: false,
            leaves: false,
            history: Vec::new(),
            has_state: false,
            trained: false,
            ranks: Vec::new(),
            stand: None,
            wants_out: false,
            hears_until: 0,
        });
        self.enter(p);
        self.after(BEAT_US, Happening::Beats(p));
    }

    /// A process enters, perhaps not for the first time.
    fn enter(&mut self, p: usize) {
        let process = &mut self.processes[p];
        let was = (process.id > 0).then_some(process.id);
        self.former.extend(was);
        process.id = self.next_id;
        self.next_id += 1;
        (process.seat, process.form, process.formed, process.leaves) = (Seat::new(), None, false, false);
        (process.trained, process.wants_out, process.stand) = (false, false, None);
        let (id, watched) = (process.id, process.watched);
        self.says(id, MemberEvent::Entered { watched, was });
        // The worst case: it believes in what it has.
        self.stand_ready(p, "");
    }

    fn stand_ready(&mut self, p: usize, why: &str) {
        let process = &mut self.processes[p];
        process.seat.left();
        (process.form, process.formed, process.leaves) = (None, false, false);
        let held = process.has_state.then(|| 2 * process.history.len() as u64);
        let (generation, redoes) = (process.seat.generation(), false);
        let (listen, why) = (p.to_string(), why.to_string());
        let (id, ready) = (process.id, MemberEvent::Ready(Ready { generation, held, redoes, listen, why }));
        process.stand = Some(ready.clone());
        self.says(id, ready);
    }

    /// Messages of one member arrive in their order.
    fn says(&mut self, id: MemberId, event: MemberEvent) {
        let from = self.processes.iter().find(|p| p.id == id).map_or(0, |p| p.stopped_until);
        // What is being killed says no more.
        let from = if from == u64::MAX { 0 } else { from };
        let at = from.saturating_sub(self.now) + 1_000 + self.random.below(1_000);
        let at = self.in_order((true, id), at);
        self.after(at, Happening::Says(self.coordinators_lost, id, event));
    }

    /// A process whose connection to the coordinator is closed says to the one that answers where it stands.
    fn come_back(&mut self, p: usize) {
        let Process { id, ref seat, ref ranks, ref stand, trained, wants_out, .. } = self.processes[p];
        let generation = seat.generation();
        let (ranks, stand) = (ranks.clone(), stand.clone());
        let running = matches!(stand, Some(MemberEvent::Running { .. }));
        let tally = TallySummary::default();
        self.says(id, MemberEvent::Returned(Returned { generation, ranks, running, trained, tally }));
        stand.into_iter().for_each(|stand| self.says(id, stand));
        if wants_out {
            self.says(id, MemberEvent::Leaves);
        }
    }

    /// The coordinator is lost, and another is started, which knows nothing. What was on its way to the lost one is lost.
    fn lose_coordinator(&mut self) {
        self.coordinators_lost += 1;
        let hold_off = HOLD_OFF;
        self.coordinator = Coordinator::new(Rules { hold_off, ..self.rules });
        self.coordinator.bug = self.bug;
        if let Some(record) = &self.record {
            self.coordinator.goes_on(self.time(), record);
        }
        for p in 0..self.processes.len() {
            let delay = self.delay();
            let process = &mut self.processes[p];
            process.hears_until = self.now + delay;
            if process.alive {
                let id = process.id;
                self.after(delay + 1, Happening::ClosedOn(self.coordinators_lost, p, id));
            }
        }
    }

    /// When something that takes `us` arrives, behind what was sent the same way before.
    fn in_order(&mut self, way: (bool, MemberId), us: u64) -> u64 {
        let at = (self.now + us).max(self.arrives.get(&way).map_or(0, |last| last + 1));
        self.arrives.insert(way, at);
        at - self.now
    }

    fn run(&mut self) -> Checked {
        while let Some(Reverse((at, n))) = self.queue.pop() {
            self.now = at;
            let happening = self.happenings.remove(&n).expect("it was queued");
            self.n_events += 1;
            self.happen(happening)?;
            self.check()?;
            if self.now > FAULTS_US && self.quiet_from.is_none() {
                // Enough for every rule.
                (0..3).for_each(|_| self.start());
                self.quiet_from = Some((self.now, self.finished));
            }
            if let Some((from, finished)) = self.quiet_from {
                // Only somebody who looks at the hosts can say that those which vanished are not training elsewhere.
                if std::mem::take(&mut self.no_majority) {
                    let dead = self.processes.iter().filter(|p| !p.alive).map(|p| p.id);
                    let dead: Vec<MemberId> = dead.chain(self.former.iter().copied()).collect();
                    dead.into_iter().filter(|id| *id > 0).for_each(|id| self.says(id, MemberEvent::Exited));
                }
                if self.now > from + SETTLED_US && self.finished > finished {
                    return Ok(());
                }
                if self.now < from + SETTLED_US {
                    self.quiet_from = Some((from, self.finished));
                }
                if self.now > from + BOUND_US {
                    return Err(format!("no progress within the bound: {}", self.picture()));
                }
            }
        }
        Err("nothing happens any more".into())
    }

    /// Who stands where, for an error.
    fn picture(&self) -> String {
        let of = |p: &Process| {
            let form = p.form.as_ref().map(|form| form.generation);
            let stopped = p.stopped_until.saturating_sub(self.now);
            format!(
                "{} alive {} stopped {stopped} watched {} in {form:?} formed {} at {}",
                p.id,
                p.alive,
                p.watched,
                p.formed,
                p.history.len()
            )
        };
        let processes: Vec<String> = self.processes.iter().filter(|p| p.alive).map(of).collect();
        let (generation, ranks) = self.coordinator.generation();
        format!(
            "generation {generation} {ranks:?} waits {:?} for {:?}; {}",
            self.coordinator.waiting(),
            self.coordinator.waits(),
            processes.join("; ")
        )
    }

    /// The furthest state of a member.
    fn furthest(&self) -> u64 {
        let living = self.processes.iter().filter(|p| self.counts(p));
        living.map(|p| p.history.len() as u64).max().unwrap_or(0)
    }

    /// Whether a process is alive, not taken for lost, and has a state that counts: not one from before it was taken for lost.
    fn counts(&self, p: &Process) -> bool {
        p.alive && p.has_state && p.trained && !self.lost.contains(&p.id) && !self.is_superseded(p)
    }

    /// Whether a later generation has begun without this process. A coordinator that was started since may not know of it yet; it dismisses
    /// the process when it does, and needs ranks that know of it to go on.
    fn is_superseded(&self, p: &Process) -> bool {
        let Some(own) = p.form.as_ref().map(|form| form.generation) else { return false };
        self.generations
            .range(own + 1..)
            .any(|(_, later)| later.arrived.len() == later.processes.len() && !later.ranks.contains(&p.id))
    }

    fn happen(&mut self, happening: Happening) -> Checked {
        match happening {
            // What was sent to a coordinator that is lost, is lost; but that a process has died is seen by whoever looks.
            Happening::Says(to, _, _) if to != self.coordinators_lost => {}
            Happening::Says(_, id, event) => {
                let comes_back = matches!(event, MemberEvent::Returned(_));
                if matches!(event, MemberEvent::Closed | MemberEvent::Exited) {
                    self.lost.insert(id);
                }
                if matches!(event, MemberEvent::Exited) {
                    self.processes.iter_mut().filter(|p| p.id == id).for_each(|p| p.alive = false);
                }
                if let MemberEvent::Entered { was: Some(was), .. } = event {
                    self.lost.insert(was);
                }
                let now = self.time();
                let decisions = self.coordinator.step(now, id, event);
                if comes_back {
                    self.note_return(id);
                }
                self.act(decisions)?;
            }
            Happening::Told(from, p, id, message) => {
                let late = from != self.coordinators_lost && self.now > self.processes[p].hears_until;
                if !late
                    && !self.stopped(p, Happening::Told(from, p, id, message.clone()))
                    && self.processes[p].id == id
                {
                    self.told(p, message);
                }
            }
            Happening::ClosedOn(by, p, id) => {
                if by == self.coordinators_lost
                    && !self.stopped(p, Happening::ClosedOn(by, p, id))
                    && self.processes[p].alive
                    && self.processes[p].id == id
                {
                    self.come_back(p);
                }
            }
            Happening::Dismissed(p, id) => {
                if !self.stopped(p, Happening::Dismissed(p, id))
                    && self.processes[p].alive
                    && self.processes[p].id == id
                {
                    self.enter(p);
                }
            }
            Happening::Connected(p, generation) => self.connected(p, generation),
            Happening::Stops(p, generation) => {
                if !self.stopped(p, Happening::Stops(p, generation)) && self.is_told_to_form(p, generation) {
                    self.stand_ready(p, "");
                }
            }
            Happening::Sends(p, generation) => {
                if !self.stopped(p, Happening::Sends(p, generation)) {
                    self.sends(p, generation);
                }
            }
            Happening::Finishes(p, generation, step) => {
                if !self.stopped(p, Happening::Finishes(p, generation, step)) {
                    self.finishes(p, generation, step)?;
                }
            }
            Happening::Beats(p) => {
                if self.processes[p].alive {
                    let (id, step) = (self.processes[p].id, self.processes[p].history.len() as u64);
                    if self.processes[p].stopped_until <= self.now {
                        self.says(id, MemberEvent::Beat { step });
                    }
                    self.after(BEAT_US, Happening::Beats(p));
                }
            }
            Happening::Strikes => {
                if self.now < FAULTS_US {
                    self.strike();
                    let pause = 20_000 + self.random.below(300_000);
                    self.after(pause, Happening::Strikes);
                }
            }
            Happening::CoordinatorDies => self.lose_coordinator(),
            Happening::Tick => {
                let now = self.time();
                let decisions = self.coordinator.tick(now);
                self.act(decisions)?;
                self.after(10_000, Happening::Tick);
            }
        }
        Ok(())
    }

    /// Whether a process cannot do this now; if it will be able to, it happens then.
    fn stopped(&mut self, p: usize, what: Happening) -> bool {
        let process = &self.processes[p];
        if process.stopped_until == u64::MAX {
            return true;
        }
        if process.alive && process.stopped_until > self.now {
            let wait = process.stopped_until - self.now;
            self.after(wait, what);
            return true;
        }
        !process.alive
    }

    fn strike(&mut self) {
        let living: Vec<usize> = (0..self.processes.len()).filter(|p| self.processes[*p].alive).collect();
        let Some(p) = living.get(self.random.below(living.len() as u64) as usize).copied() else {
            return self.start();
        };
        if self.restarts && self.random.chance(15) {
            return self.lose_coordinator();
        }
        match self.random.below(12) {
            0..=3 => self.kill(p, true),
            4 if !self.processes[p].watched => self.kill(p, false),
            5 => {
                let long = self.random.chance(50);
                let for_us = if long { 2 * PATIENCE_US } else { PATIENCE_US / 2 };
                let until = self.now + self.random.below(for_us);
                self.stop(p, until);
            }
            // A cut network: nothing of these hosts comes through for a while.
            6 => {
                let until = self.now + PATIENCE_US + self.random.below(PATIENCE_US);
                for p in living {
                    if !self.processes[p].watched && self.random.chance(80) {
                        self.stop(p, until);
                    }
                }
            }
            // A link between two ranks breaks: one of them gives its generation up, and the other waits.
            7 => {
                if self.processes[p].formed && self.processes[p].stopped_until <= self.now {
                    self.stand_ready(p, "a link broke");
                }
            }
            8 => {
                self.processes[p].wants_out = true;
                let id = self.processes[p].id;
                self.says(id, MemberEvent::Leaves);
            }
            _ => self.start(),
        }
    }

    /// A pause does not end earlier or later because another one begins.
    fn stop(&mut self, p: usize, until: u64) {
        let process = &mut self.processes[p];
        if process.stopped_until <= self.now {
            process.stopped_until = until;
        }
    }

    fn kill(&mut self, p: usize, noticed: bool) {
        let process = &mut self.processes[p];
        process.alive = false;
        let (id, watched) = (process.id, process.watched);
        if noticed {
            self.says(id, MemberEvent::Closed);
        }
        if watched {
            self.says(id, MemberEvent::Exited);
        }
    }

    fn told(&mut self, p: usize, message: ToMember) {
        match self.processes[p].seat.told(message) {
            SeatAction::Enter(form) => {
                let generation = form.generation;
                let ranks = form.ranks.clone();
                self.processes[p].form = Some(*form);
                (self.processes[p].ranks, self.processes[p].stand) = (ranks.clone(), None);
                let group = self.generations.get_mut(&generation).expect("it was formed");
                // Another coordinator may have given its number to others, because this one was not told to all.
                if group.ranks != ranks {
                    return;
                }
                group.arrived.insert(p);
                if group.arrived.len() == group.processes.len() {
                    for p in group.processes.clone() {
                        let delay = 2_000 + self.delay();
                        self.after(delay, Happening::Connected(p, generation));
                    }
                }
            }
            SeatAction::Cancel => {
                // Its waits end, and what it computes is finished first, perhaps also its step; what arrives after that for this
                // generation is dropped.
                let generation = self.processes[p].seat.generation();
                let delay = self.delay();
                self.after(delay, Happening::Stops(p, generation));
            }
            SeatAction::LeaveAtStepEnd => self.processes[p].leaves = true,
            SeatAction::End { .. } => self.kill(p, true),
            SeatAction::Nothing => {}
        }
    }

    /// All have connected: those that are behind get the state.
    fn connected(&mut self, p: usize, generation: u64) {
        let Some(form) = self.processes[p].form.clone().filter(|form| form.generation == generation) else {
            return;
        };
        let group = &self.generations[&generation];
        if let Some(source) = form.source
            && form.held[form.rank] != form.held[source]
        {
            let from = &self.processes[group.processes[source]];
            if !from.alive {
                return;
            }
            // As much as it had when this generation was formed.
            let held = form.held[source].expect("the source has a state") / 2;
            let history = from.history[..held as usize].to_vec();
            self.processes[p].history = history;
        }
        if form.source.is_none() {
            self.processes[p].history.clear();
        }
        let process = &mut self.processes[p];
        (process.has_state, process.formed) = (true, true);
        let id = process.id;
        if form.save_only {
            return self.stand_ready(p, "");
        }
        (process.trained, process.stand) = (true, Some(MemberEvent::Running { generation }));
        self.says(id, MemberEvent::Running { generation });
        let compute = COMPUTE_US + self.delay();
        self.after(compute, Happening::Sends(p, generation));
    }

    fn is_in(&self, p: usize, generation: u64) -> bool {
        let process = &self.processes[p];
        process.alive && process.formed && self.is_told_to_form(p, generation)
    }

    fn is_told_to_form(&self, p: usize, generation: u64) -> bool {
        self.processes[p].form.as_ref().is_some_and(|form| form.generation == generation)
    }

    fn sends(&mut self, p: usize, generation: u64) {
        if !self.is_in(p, generation) {
            return;
        }
        let step = self.processes[p].history.len() as u64;
        let group = self.generations.get_mut(&generation).expect("it was formed");
        let parts = group.parts.entry(step).or_default();
        parts.insert(p);
        if parts.len() == group.processes.len() {
            for p in group.processes.clone() {
                let delay = self.delay();
                self.after(delay, Happening::Finishes(p, generation, step));
            }
        }
    }

    fn finishes(&mut self, p: usize, generation: u64, step: u64) -> Checked {
        if !self.is_in(p, generation) || self.processes[p].history.len() as u64 != step {
            return Ok(());
        }
        if self.counts(&self.processes[p]) {
            for other in self.processes.iter().filter(|other| self.counts(other)) {
                if let Some(other_generation) = other.history.get(step as usize)
                    && *other_generation != generation
                {
                    return Err(format!(
                        "step {step} is committed in generation {generation} and was in {other_generation}"
                    ));
                }
            }
            self.best = self.best.max(step + 1);
            self.finished += 1;
        }
        self.processes[p].history.push(generation);
        // Ranks agree in each step on whether it is the last of the generation: any of them may have been told.
        let group = self.generations[&generation].processes.clone();
        let leaves = group.iter().any(|q| self.processes[*q].leaves && self.is_in(*q, generation));
        if leaves
            && group
                .iter()
                .all(|q| self.processes[*q].history.len() as u64 > step || !self.is_in(*q, generation))
        {
            let inside: Vec<usize> = group.into_iter().filter(|q| self.is_in(*q, generation)).collect();
            inside.into_iter().for_each(|q| self.stand_ready(q, ""));
            return Ok(());
        }
        let compute = COMPUTE_US + self.delay();
        self.after(compute, Happening::Sends(p, generation));
        Ok(())
    }

    fn act(&mut self, decisions: Vec<Decision>) -> Checked {
        for Decision { action, why } in decisions {
            match action {
                MemberAction::Form { members, forms } => {
                    self.no_majority = false;
                    if self.rules.exclusive {
                        let (generation, ranks) = (forms[0].generation, members.clone());
                        if self.record.as_ref().is_some_and(|record| record.generation >= generation) {
                            return Err(format!("generation {generation} is recorded already"));
                        }
                        self.record = Some(GenerationRecord { generation, ranks });
                    }
                    self.formed(members, forms)?;
                    // In the moment in which some have heard of the generation and others have not.
                    if self.restarts && self.now < FAULTS_US && self.random.chance(10) {
                        let delay = self.random.below(2_500);
                        self.after(delay, Happening::CoordinatorDies);
                    }
                }
                MemberAction::Cancel { generation, members } => {
                    let cancel = ToMember::Cancel { generation, why: String::new() };
                    members.iter().for_each(|id| self.tell(*id, cancel.clone()));
                }
                MemberAction::Change { generation, members } => {
                    members.iter().for_each(|id| self.tell(*id, ToMember::Change { generation }));
                }
                MemberAction::Remove { member } => {
                    self.lost.insert(member);
                    if let Some(p) = self.processes.iter().position(|p| p.id == member && p.alive) {
                        match self.processes[p].watched {
                            // It is killed, which takes a moment.
                            true => {
                                let delay = self.delay();
                                self.processes[p].stopped_until = self.now + delay;
                                self.kill_after(p, delay);
                            }
                            false => {
                                let delay = self.delay();
                                self.after(delay, Happening::ClosedOn(self.coordinators_lost, p, member));
                            }
                        }
                    }
                }
                MemberAction::Dismiss { member } => {
                    self.lost.insert(member);
                    if let Some(p) = self.processes.iter().position(|p| p.id == member) {
                        let delay = self.delay();
                        self.after(delay, Happening::Dismissed(p, member));
                    }
                }
                MemberAction::End { .. } => return Err("the run ended".into()),
                MemberAction::Release { member } => {
                    self.lost.insert(member);
                    self.released.insert(member);
                    self.tell(member, ToMember::End { why: None });
                }
                MemberAction::Wait => {
                    self.no_majority = matches!(why, Reason::NoMajority { .. });
                    if self.no_majority && self.rules.exclusive {
                        return Err("it waits for a majority, which the store makes needless".into());
                    }
                }
                MemberAction::Trains => {}
            }
        }
        Ok(())
    }

    /// A member has come back: it counts if it is a rank of what the coordinator takes for the last generation.
    fn note_return(&mut self, id: MemberId) {
        self.lost.remove(&id);
        let (_, ranks) = self.coordinator.generation();
        let others = self.processes.iter().filter(|p| p.seat.generation() > 0 && !ranks.contains(&p.id));
        self.lost.extend(others.map(|p| p.id));
    }

    fn kill_after(&mut self, p: usize, delay: u64) {
        // Until its end is seen it may still write: it counts as alive for the check of writers.
        let id = self.processes[p].id;
        self.processes[p].stopped_until = u64::MAX;
        self.after(delay + 2_000, Happening::Says(self.coordinators_lost, id, MemberEvent::Exited));
    }

    fn tell(&mut self, id: MemberId, message: ToMember) {
        if let Some(p) = self.processes.iter().position(|p| p.id == id) {
            let delay = 1_000 + self.random.below(1_000);
            let delay = self.in_order((false, id), delay);
            self.after(delay, Happening::Told(self.coordinators_lost, p, id, message));
        }
    }

    /// What must hold whenever a generation is formed.
    fn formed(&mut self, members: Vec<MemberId>, forms: Vec<Formation>) -> Checked {
        let generation = forms[0].generation;
        // Only one that nobody who lives has begun may be formed again: its coordinator was lost while it told its ranks of it.
        if self.generations.contains_key(&generation) {
            let begun = |p: &usize| {
                let process = &self.processes[*p];
                let group = self.generations.get(&process.seat.generation());
                let begun = |g: &Generation| g.arrived.contains(p) && g.arrived.len() == g.processes.len();
                process.alive && process.seat.generation() >= generation && group.is_some_and(begun)
            };
            if let Some(p) = (0..self.processes.len()).find(begun) {
                let id = self.processes[p].id;
                return Err(format!("generation {generation} is formed, and member {id} has begun one"));
            }
            self.generations.retain(|number, _| *number < generation);
        }
        let of = |id: &MemberId| self.processes.iter().position(|p| p.id == *id);
        let processes: Vec<usize> = members.iter().filter_map(of).collect();
        for process in self.processes.iter().filter(|p| p.alive && !self.lost.contains(&p.id)) {
            if let Some(form) = &process.form {
                return Err(format!(
                    "generation {generation} is formed while member {} is in {}",
                    process.id, form.generation
                ));
            }
        }
        let removed = |p: &&Process| self.lost.contains(&p.id) && !self.released.contains(&p.id);
        if let Some(writer) = self.processes.iter().filter(removed).find(|p| p.watched && p.alive) {
            return Err(format!(
                "generation {generation} is formed while removed member {} is alive",
                writer.id
            ));
        }
        // One that not all its ranks were told of before its coordinator was lost has never begun.
        let began = |(_, group): &(&u64, &Generation)| {
            group.arrived.len() == group.processes.len() || group.coordinator == self.coordinators_lost
        };
        if let Some((number, last)) = self.generations.iter().rev().find(began) {
            // Those that live and are out of reach might go on by themselves, if they were the larger part.
            let there = last.processes.iter().filter(|p| processes.contains(p)).count();
            let elsewhere = |p: &&usize| {
                let process = &self.processes[**p];
                // One that has entered as new has given it up.
                let is_in = process.seat.generation() >= *number;
                process.alive && is_in && !processes.contains(p) && removed(&process)
            };
            let elsewhere = last.processes.iter().filter(elsewhere).count();
            // A store lets nobody else form another one.
            if elsewhere > there && !self.rules.exclusive {
                return Err(format!(
                    "{there} ranks go on while {elsewhere} of the last generation are elsewhere: {members:?}; {}",
                    self.picture()
                ));
            }
        }
        let start = forms[0].source.map_or(0, |rank| forms[0].held[rank].unwrap_or(0) / 2);
        let furthest = self.furthest();
        // One that has just died may have been further; the coordinator will hear of it.
        if start < furthest {
            return Err(format!(
                "generation {generation} starts at step {start}, and step {furthest} is done"
            ));
        }
        if furthest > 0 && start + 1 < self.best {
            return Err(format!("generation {generation} starts at step {start} of {}", self.best));
        }
        self.best = start;
        for (id, form) in members.iter().zip(forms) {
            self.lost.remove(id);
            self.tell(*id, ToMember::Form(Box::new(form)));
        }
        let (arrived, parts) = (BTreeSet::new(), BTreeMap::new());
        let coordinator = self.coordinators_lost;
        self.generations
            .insert(generation, Generation { coordinator, ranks: members, processes, arrived, parts });
        Ok(())
    }

    /// Members of one generation have the same steps.
    fn check(&self) -> Checked {
        let Some((generation, group)) = self.generations.last_key_value() else { return Ok(()) };
        let inside: Vec<&Process> = group
            .processes
            .iter()
            .filter(|p| self.is_in(**p, *generation))
            .map(|p| &self.processes[*p])
            .collect();
        for pair in inside.windows(2).filter(|pair| pair.iter().all(|p| self.counts(p))) {
            let n = pair[0].history.len().min(pair[1].history.len());
            if pair[0].history[..n] != pair[1].history[..n] {
                return Err(format!("members {} and {} have different steps", pair[0].id, pair[1].id));
            }
            if pair[0].history.len().abs_diff(pair[1].history.len()) > 1 {
                return Err("ranks are more than a step apart".into());
            }
        }
        Ok(())
    }
}

fn seeds() -> u64 {
    std::env::var("SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(1_000)
}

#[test]
fn no_schedule_breaks_an_invariant() {
    let (mut events, mut coordinators) = (0, 0);
    let began = Instant::now();
    for seed in 0..seeds() {
        let mut world = World::new(seed, None);
        if let Err(what) = world.run() {
            panic!(
                "seed {seed}, at {} us, generation {}: {what}",
                world.now,
                world.coordinator.generation().0
            );
        }
        events += world.n_events;
        coordinators += world.coordinators_lost;
    }
    assert!(events > 100 * seeds() && coordinators > seeds() / 10, "{events} events, {coordinators} lost");
    println!(
        "{} schedules of membership, {events} events, {coordinators} lost coordinators, {:.1?}",
        seeds(),
        began.elapsed()
    );
}

#[test]
fn deliberate_bugs_are_found() {
    let bugs = [
        CoordinatorBug::FormsEarly,
        CoordinatorBug::TrustsNewcomers,
        CoordinatorBug::ForgetsTheDying,
        CoordinatorBug::TakesFirstState,
        CoordinatorBug::EndlessPatience,
        CoordinatorBug::GoesOnWithAny,
        CoordinatorBug::ForgetsTheRun,
        CoordinatorBug::MixesGenerations,
    ];
    for bug in bugs {
        let found =
            (0..2_000).find_map(|seed| World::new(seed, Some(bug)).run().err().map(|what| (seed, what)));
        let (seed, what) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?}: seed {seed}: {what}");
    }
}
