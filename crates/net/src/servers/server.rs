//! One server: whose gradients are applied to its ranges, and which pulls are answered when.

use std::collections::{BTreeMap, BTreeSet};

use super::blocks::BlockSet;

/// In which order gradients and pulls of several workers take effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Discipline {
    /// Gradients of all workers are applied together, step by step.
    Lockstep {
        /// How many they are.
        workers: usize,
    },
    /// Gradients are applied as they come; no worker's clock is ahead of another's by more than `staleness + 1`.
    Bounded {
        /// How far a worker may be ahead when it pulls.
        staleness: u64,
    },
    /// Gradients are applied as they come, and pulls are answered at once.
    Free,
}

/// A worker, and how many times it has joined.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerId {
    /// Its number.
    pub worker: usize,
    /// A later session replaces an earlier one.
    pub session: u64,
}

/// What reaches a server. `G` is a gradient, or where it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerEvent<G> {
    /// A worker begins a session: its clock counts.
    Join {
        /// Who.
        id: WorkerId,
        /// Where its clock starts, at all servers alike; none, for a worker that only pulls: at that of the slowest here.
        clock: Option<u64>,
    },
    /// It ends it.
    Leave(WorkerId),
    /// A gradient.
    Push {
        /// From whom.
        from: WorkerId,
        /// Its finished pushes of this session, without this one.
        clock: u64,
        /// Of which samples.
        block: u64,
        /// For which range.
        range: usize,
        /// The gradient.
        gradient: G,
    },
    /// A request for weights.
    Pull {
        /// From whom.
        from: WorkerId,
        /// Its finished pushes of this session.
        clock: u64,
        /// Of which range.
        range: usize,
    },
}

/// What a server does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerAction<G> {
    /// Updates a range with gradients of one block, added up in this order.
    Apply {
        /// The range.
        range: usize,
        /// The block.
        block: u64,
        /// The gradients: one, or in lockstep one of each worker in the order of their numbers.
        gradients: Vec<G>,
        /// How many updates the range has had, with this one.
        version: u64,
        /// How many of them came between the weights that the gradient is of and this update; the most of all gradients.
        staleness: u64,
    },
    /// Sends the weights of a range.
    Answer {
        /// To whom.
        to: WorkerId,
        /// The range.
        range: usize,
        /// The clock of the pull.
        clock: u64,
        /// How many updates the range has had.
        version: u64,
    },
    /// Does nothing else.
    Refuse {
        /// Whose message it was.
        to: WorkerId,
        /// Why.
        why: Refusal,
    },
}

/// Why a message changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The worker has not joined, has left, or has joined again since.
    #[error("it has not joined, or has left")]
    NotJoined,
    /// There is no such range here.
    #[error("there is no range {range} at this server")]
    UnknownRange {
        /// The number that was asked for.
        range: usize,
    },
    /// The block is in the range already. No fault: its samples count once.
    #[error("block {block} is applied already")]
    Applied {
        /// The block.
        block: u64,
    },
    /// The worker has not had the weights of its last push: it would run ahead.
    #[error("its pull at clock {clock} is not answered")]
    Ahead {
        /// Its clock.
        clock: u64,
    },
}

impl Refusal {
    /// Whether only a worker that breaks the protocol is refused so.
    pub fn is_fault(self) -> bool {
        match self {
            Refusal::Applied { .. } => false,
            Refusal::NotJoined | Refusal::UnknownRange { .. } | Refusal::Ahead { .. } => true,
        }
    }
}

/// How old applied gradients were.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Staleness {
    /// The sum over applied gradients.
    pub sum: u64,
    /// How many there were.
    pub count: u64,
    /// The most.
    pub max: u64,
}

impl Staleness {
    /// Both together.
    #[must_use]
    pub fn with(self, other: Staleness) -> Staleness {
        Staleness { sum: self.sum + other.sum, count: self.count + other.count, max: self.max.max(other.max) }
    }

    fn note(&mut self, staleness: u64) {
        *self = self.with(Staleness { sum: staleness, count: 1, max: staleness });
    }
}

/// A bug of a test, which its harness must find.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ServerBug {
    /// Forgets which blocks were applied.
    AppliesTwice,
    /// Answers pulls one clock too early.
    LooseBound,
    /// Goes on waiting for workers that have left.
    WaitsForTheGone,
    /// Takes the clock of the range that was pushed first for that of all.
    FirstRangeCounts,
    /// Lets a worker that joins start at clock 0.
    JoinsAtZero,
    /// Takes messages of earlier sessions.
    TakesOldSessions,
}

/// What a server knows of a worker that has joined.
#[derive(Clone, Debug)]
struct KnownWorker {
    session: u64,
    joined: bool,
    /// Its clock when it joined.
    base: u64,
    /// By range: its finished pushes of this session.
    pushed: Vec<u64>,
    /// By range: the clock of its last pull that was answered in this session.
    answered: Vec<u64>,
    /// By range: the version that it has.
    seen: Vec<u64>,
}

impl KnownWorker {
    fn clock(&self) -> u64 {
        self.base + self.pushed.iter().copied().min().unwrap_or(0)
    }
}

/// What a server knows of a range.
#[derive(Clone, Debug)]
struct HeldRange<G> {
    version: u64,
    applied: BlockSet,
    /// In lockstep: gradients that wait for those of other workers; by worker, the clock, block and gradient.
    pending: BTreeMap<usize, (u64, u64, G)>,
    /// Pulls that wait, with the clocks that they were sent at.
    pulls: BTreeSet<(usize, u64)>,
}

/// The state of one server.
#[derive(Clone, Debug)]
pub struct ParamServer<G> {
    discipline: Discipline,
    workers: BTreeMap<usize, KnownWorker>,
    ranges: Vec<HeldRange<G>>,
    staleness: Staleness,
    #[cfg(test)]
    bug: Option<ServerBug>,
}

impl<G> ParamServer<G> {
    /// A server of `n_ranges` ranges, to each of which the blocks below `done` were applied.
    pub fn new(discipline: Discipline, n_ranges: usize, done: u64) -> ParamServer<G> {
        let range = || HeldRange {
            version: done,
            applied: BlockSet::below(done),
            pending: BTreeMap::new(),
            pulls: BTreeSet::new(),
        };
        ParamServer {
            discipline,
            workers: BTreeMap::new(),
            ranges: (0..n_ranges).map(|_| range()).collect(),
            staleness: Staleness::default(),
            #[cfg(test)]
            bug: None,
        }
    }

    /// How many ranges it has.
    pub fn n_ranges(&self) -> usize {
        self.ranges.len()
    }

    /// How many workers have joined.
    pub fn n_clients(&self) -> usize {
        self.joined().count()
    }

    /// How many updates every range has had, those below the first block included.
    pub fn version(&self) -> u64 {
        self.ranges.iter().map(|range| range.version).min().unwrap_or(0)
    }

    /// How old the gradients were that were applied.
    pub fn staleness(&self) -> Staleness {
        self.staleness
    }

    /// The clock of the slowest worker that has joined.
    pub fn slowest(&self) -> Option<u64> {
        self.joined().map(|(_, w)| w.clock()).min()
    }

    /// What a message leads to.
    pub fn step(&mut self, event: ServerEvent<G>) -> Vec<ServerAction<G>> {
        let mut actions = Vec::new();
        match event {
            ServerEvent::Join { id, clock } => self.join(id, clock),
            ServerEvent::Leave(id) => self.leave(id),
            ServerEvent::Push { from, clock, block, range, gradient } => {
                match self.push(from, clock, block, range) {
                    Ok(()) => self.take(from, clock, block, range, gradient, &mut actions),
                    Err(why) => actions.push(ServerAction::Refuse { to: from, why }),
                }
            }
            ServerEvent::Pull { from, clock, range } => match self.known(from, range) {
                Ok(()) => {
                    self.ranges[range].pulls.insert((from.worker, clock));
                }
                Err(why) => actions.push(ServerAction::Refuse { to: from, why }),
            },
        }
        self.apply_together(&mut actions);
        self.answer(&mut actions);
        actions
    }

    fn join(&mut self, id: WorkerId, clock: Option<u64>) {
        let known = self.workers.get(&id.worker);
        if known.is_some_and(|w| w.session >= id.session) {
            return;
        }
        let base = clock.or(self.slowest()).unwrap_or(0);
        let n = self.ranges.len();
        let seen = known.map_or_else(|| self.ranges.iter().map(|r| r.version).collect(), |w| w.seen.clone());
        #[cfg(test)]
        let base = if self.bug == Some(ServerBug::JoinsAtZero) { 0 } else { base };
        let (pushed, answered) = (vec![0; n], vec![0; n]);
        let worker = KnownWorker { session: id.session, joined: true, base, pushed, answered, seen };
        self.workers.insert(id.worker, worker);
        self.forget(id.worker);
    }

    fn leave(&mut self, id: WorkerId) {
        #[cfg(test)]
        if self.bug == Some(ServerBug::WaitsForTheGone) {
            return;
        }
        // Also of a worker that has not joined yet: its message may be on its way.
        self.join(id, None);
        if let Some(worker) = self.workers.get_mut(&id.worker).filter(|w| w.session == id.session) {
            worker.joined = false;
            self.forget(id.worker);
        }
    }

    /// Drops what waits for a worker, or of it.
    fn forget(&mut self, worker: usize) {
        for range in &mut self.ranges {
            range.pending.remove(&worker);
            range.pulls.retain(|(of, _)| *of != worker);
        }
    }

    fn is_joined(&self, id: WorkerId) -> bool {
        self.workers.get(&id.worker).is_some_and(|w| {
            #[cfg(test)]
            if self.bug == Some(ServerBug::TakesOldSessions) {
                return w.joined;
            }
            w.joined && w.session == id.session
        })
    }

    fn joined(&self) -> impl Iterator<Item = (usize, &KnownWorker)> {
        self.workers.iter().filter(|(_, w)| w.joined).map(|(worker, w)| (*worker, w))
    }

    fn known(&self, from: WorkerId, range: usize) -> Result<(), Refusal> {
        match (self.is_joined(from), range < self.ranges.len()) {
            (false, _) => Err(Refusal::NotJoined),
            (true, false) => Err(Refusal::UnknownRange { range }),
            (true, true) => Ok(()),
        }
    }

    /// Whether a push counts; its clock is that of a finished push also if its block is there already.
    fn push(&mut self, from: WorkerId, clock: u64, block: u64, range: usize) -> Result<(), Refusal> {
        self.known(from, range)?;
        let worker = self.workers.get_mut(&from.worker).expect("it has joined");
        if clock > worker.answered[range] {
            return Err(Refusal::Ahead { clock });
        }
        let applied = self.ranges[range].applied.contains(block);
        #[cfg(test)]
        let applied = applied && self.bug != Some(ServerBug::AppliesTwice);
        if applied {
            worker.pushed[range] = worker.pushed[range].max(clock + 1);
            return Err(Refusal::Applied { block });
        }
        Ok(())
    }

    /// Takes a gradient that counts.
    fn take(
        &mut self,
        from: WorkerId,
        clock: u64,
        block: u64,
        range: usize,
        gradient: G,
        actions: &mut Vec<ServerAction<G>>,
    ) {
        if let Discipline::Lockstep { .. } = self.discipline {
            self.ranges[range].pending.entry(from.worker).or_insert((clock, block, gradient));
            return;
        }
        let worker = self.workers.get_mut(&from.worker).expect("it has joined");
        worker.pushed[range] = worker.pushed[range].max(clock + 1);
        let of = &mut self.ranges[range];
        let staleness = of.version - worker.seen[range];
        of.applied.insert(block);
        of.version += 1;
        let version = of.version;
        self.staleness.note(staleness);
        actions.push(ServerAction::Apply { range, block, gradients: vec![gradient], version, staleness });
    }

    /// In lockstep: applies what all workers have pushed.
    fn apply_together(&mut self, actions: &mut Vec<ServerAction<G>>) {
        let Discipline::Lockstep { workers } = self.discipline else { return };
        for (range, of) in self.ranges.iter_mut().enumerate() {
            if of.pending.len() < workers {
                continue;
            }
            let mut gradients = Vec::with_capacity(workers);
            let (mut block, mut staleness) = (0, 0);
            for (worker, (clock, of_block, gradient)) in std::mem::take(&mut of.pending) {
                let known = self.workers.get_mut(&worker).expect("it has joined");
                known.pushed[range] = known.pushed[range].max(clock + 1);
                staleness = staleness.max(of.version - known.seen[range]);
                block = of_block;
                gradients.push(gradient);
            }
            of.applied.insert(block);
            of.version += 1;
            self.staleness.note(staleness);
            let version = of.version;
            actions.push(ServerAction::Apply { range, block, gradients, version, staleness });
        }
    }

    /// Answers the pulls that may be.
    fn answer(&mut self, actions: &mut Vec<ServerAction<G>>) {
        let slowest = self.joined().map(|(_, w)| w.clock()).min().unwrap_or(0);
        #[cfg(test)]
        let slowest = match self.bug {
            Some(ServerBug::LooseBound) => slowest + 1,
            Some(ServerBug::FirstRangeCounts) => {
                self.joined().map(|(_, w)| w.base + w.pushed[0]).min().unwrap_or(0)
            }
            Some(_) | None => slowest,
        };
        for (range, of) in self.ranges.iter_mut().enumerate() {
            let (workers, discipline, version) = (&mut self.workers, self.discipline, of.version);
            of.pulls.retain(|&(number, clock)| {
                let worker = workers.get_mut(&number).expect("pulls of others are dropped");
                // Its own push may be on its way still.
                let pushed = worker.pushed[range] >= clock;
                let allowed = match discipline {
                    Discipline::Free | Discipline::Lockstep { .. } => true,
                    Discipline::Bounded { staleness } => worker.base + clock <= slowest + staleness,
                };
                if !pushed || !allowed {
                    return true;
                }
                worker.answered[range] = worker.answered[range].max(clock);
                worker.seen[range] = version;
                let to = WorkerId { worker: number, session: worker.session };
                actions.push(ServerAction::Answer { to, range, clock, version });
                false
            });
        }
    }
}

#[cfg(test)]
impl<G> ParamServer<G> {
    pub(super) fn with_bug(mut self, bug: Option<ServerBug>) -> ParamServer<G> {
        self.bug = bug;
        self
    }

    /// Clocks of the workers that have joined.
    pub(super) fn clocks(&self) -> Vec<u64> {
        self.joined().map(|(_, w)| w.clock()).collect()
    }

    /// The clock of a worker that has joined.
    pub(super) fn clock_of(&self, worker: usize) -> Option<u64> {
        self.joined().find(|(number, _)| *number == worker).map(|(_, w)| w.clock())
    }
}
