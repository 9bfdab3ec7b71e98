//! The scheduler and clock of a simulation.
//!
//! Every thread of every rank is a real one, but only the one whose turn it is runs. It gives its turn back when it
//! waits. Then the network takes what it wrote, and the next thread is drawn from those whose sockets are ready or
//! whose time has come. If there is none, the clock advances to the next event.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::local::{Made, Making};
use super::network::Network;
use super::random::SimRandom;
use super::settings::{Bug, Fault, Settings};
use super::trace::{SimEvent, Trace};

/// Each look at the clock takes this long, in nanoseconds, so that a loop that only looks at it ends.
const LOOK_NS: u64 = 1000;
/// A thread that keeps its turn for this long in real time waits for something that is not simulated.
const STUCK: Duration = Duration::from_secs(120);
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

thread_local! {
    /// The number of this thread's task.
    static TASK: Cell<Option<usize>> = const { Cell::new(None) };
    /// The bug that is planted in this thread.
    static BUG: Cell<Option<Bug>> = const { Cell::new(None) };
    /// The time that a thread of a killed rank sees while it unwinds.
    static LATE_NS: Cell<u64> = const { Cell::new(0) };
}

/// Whether a bug is planted in this thread.
#[cfg(test)]
pub(crate) fn makes(bug: Bug) -> bool {
    BUG.get() == Some(bug)
}

/// What a thread of a killed rank unwinds with.
struct Killed;

/// Everything that the threads of one simulation share.
pub(super) struct World {
    base: Instant,
    clock: AtomicU64,
    time_max: u64,
    state: Mutex<WorldState>,
    over: Condvar,
}

struct WorldState {
    settings: Settings,
    random: SimRandom,
    network: Network,
    hosts: Vec<Host>,
    tasks: Vec<SimTask>,
    turn: Option<usize>,
    n_turns: u64,
    /// Faults that are still to come, with their numbers.
    faults: VecDeque<(u64, usize, Fault)>,
    /// Connections that are being made, by the descriptor that is waited for.
    makings: Vec<(RawFd, Weak<Making>)>,
    trace: Trace,
    failure: Option<String>,
}

/// A rank's machine and process.
#[derive(Clone, Default)]
struct Host {
    killed: bool,
    paused_until: u64,
    main_paused_until: u64,
    /// The CPU time that it has used, and since when it has been using more.
    worked: u64,
    works_since: Option<u64>,
    /// Whether something arrived since its threads' files were last polled.
    reached: bool,
}

/// A thread.
struct SimTask {
    rank: usize,
    /// Whether it is its rank's first.
    main: bool,
    name: String,
    thread: Option<ThreadId>,
    ended: bool,
    woken: Arc<Condvar>,
    waits: Waits,
}

/// What a thread waits for.
#[derive(Default)]
struct Waits {
    files: Vec<(OwnedFd, PollFlags)>,
    makings: Vec<Weak<Making>>,
    since: u64,
    until: u64,
    /// Since when one of them is ready.
    ready_at: Option<u64>,
    /// How late it resumes.
    lag: u64,
}

/// The results of a simulation whose threads have all ended.
pub(super) struct Remains {
    pub(super) trace: Trace,
    pub(super) failure: Option<String>,
    pub(super) time: Duration,
}

impl World {
    pub(super) fn new(seed: u64, ranks: usize, settings: Settings) -> World {
        let mut faults: Vec<_> = settings.faults.iter().enumerate().collect();
        faults.sort_by_key(|(_, (at, _))| *at);
        let faults = faults.into_iter().map(|(n, (at, fault))| (at.as_nanos() as u64, n, fault.clone()));
        let state = WorldState {
            random: SimRandom::new(seed),
            network: Network::new(ranks, settings.clone()),
            hosts: vec![Host::default(); ranks],
            tasks: Vec::new(),
            turn: None,
            n_turns: 0,
            faults: faults.collect(),
            makings: Vec::new(),
            trace: Trace::default(),
            failure: None,
            settings,
        };
        let time_max = state.settings.time_max.as_nanos() as u64;
        let (base, clock) = (Instant::now(), AtomicU64::new(0));
        World { base, clock, time_max, state: Mutex::new(state), over: Condvar::new() }
    }

    pub(super) fn now(&self) -> Instant {
        let now = self.clock.fetch_add(LOOK_NS, Ordering::SeqCst);
        if now > self.time_max && !std::thread::panicking() {
            let mut state = self.lock();
            state.fail("a thread looks at the clock again and again and does not wait".into());
            drop(state);
            resume_unwind(Box::new(Killed));
        }
        self.base + Duration::from_nanos(now.max(LATE_NS.get()))
    }

    /// Calls the network.
    pub(super) fn with_network<T>(&self, call: impl FnOnce(&mut Network, u64, &mut SimRandom) -> T) -> T {
        let mut state = self.lock();
        let WorldState { network, random, .. } = &mut *state;
        call(network, self.clock.load(Ordering::SeqCst), random)
    }

    /// Remembers that a connection is being made.
    pub(super) fn making(&self, fd: RawFd, making: &Arc<Making>) {
        let mut state = self.lock();
        state.makings.retain(|(other, making)| *other != fd && making.strong_count() > 0);
        state.makings.push((fd, Arc::downgrade(making)));
    }

    /// Waits, in virtual time.
    pub(super) fn wait(&self, fds: &[PollFd], until: Instant) {
        let me = TASK.get().expect("only threads of a simulation wait in it");
        let until = until.saturating_duration_since(self.base).as_nanos() as u64;
        let mut state = self.lock();
        let rank = state.tasks[me].rank;
        if !state.hosts[rank].killed {
            let now = self.clock.load(Ordering::SeqCst);
            state.tasks[me].waits = state.waits(fds, now, until);
        } else if std::thread::panicking() {
            LATE_NS.set(LATE_NS.get().max(until));
        }
        let state = self.pass(state, me);
        if state.hosts[rank].killed && !std::thread::panicking() {
            drop(state);
            resume_unwind(Box::new(Killed));
        }
    }

    /// Sets whether a rank uses the CPU from now on.
    pub(super) fn set_working(&self, rank: usize, yes: bool) {
        let now = self.clock.load(Ordering::SeqCst);
        let host = &mut self.lock().hosts[rank];
        host.worked += host.works_since.map_or(0, |since| now - since);
        host.works_since = yes.then_some(now);
    }

    /// The CPU time that a rank has used.
    pub(super) fn worked(&self, rank: usize) -> Duration {
        let now = self.clock.load(Ordering::SeqCst);
        let host = &self.lock().hosts[rank];
        Duration::from_nanos(host.worked + host.works_since.map_or(0, |since| now - since))
    }

    /// Whether a thread of the simulation has ended.
    pub(super) fn ended(&self, thread: ThreadId) -> bool {
        self.lock().tasks.iter().all(|task| task.thread != Some(thread) || task.ended)
    }

    /// Adds a thread to a rank, which starts at that time and passes its number to [`World::live`].
    pub(super) fn add(&self, rank: usize, name: &str, main: bool, from: u64) -> usize {
        let mut state = self.lock();
        let waits = Waits { until: from.max(self.clock.load(Ordering::SeqCst)), ..Waits::default() };
        let (name, woken) = (name.to_owned(), Arc::new(Condvar::new()));
        state.tasks.push(SimTask { rank, main, name, thread: None, ended: false, woken, waits });
        state.tasks.len() - 1
    }

    pub(super) fn set_thread(&self, task: usize, thread: ThreadId) {
        self.lock().tasks[task].thread = Some(thread);
    }

    /// Runs a thread: waits for its first turn, does its work, and gives its turn up for good.
    pub(super) fn live<T>(&self, me: usize, body: impl FnOnce() -> T) -> Option<T> {
        TASK.set(Some(me));
        let state = self.lock();
        BUG.set(state.settings.bug);
        let woken = state.tasks[me].woken.clone();
        drop(woken.wait_while(state, |state| state.turn != Some(me)).unwrap_or_else(PoisonError::into_inner));
        let done = catch_unwind(AssertUnwindSafe(body));
        let mut state = self.lock();
        let now = self.clock.load(Ordering::SeqCst);
        let rank = state.tasks[me].rank;
        state.tasks[me].ended = true;
        state.trace.add(now, SimEvent::Ended { rank, task: me });
        let done = done.map_err(|why| {
            if !why.is::<Killed>() {
                let name = state.tasks[me].name.clone();
                state.fail(format!("thread {name} of rank {rank} panics: {}", text(&*why)));
            }
        });
        state.ran(rank, now);
        match state.next(&self.clock, self.time_max) {
            Some(next) => state.wake(next),
            None => self.over.notify_all(),
        }
        done.ok()
    }

    /// Gives the first turn, and waits until all threads have ended.
    pub(super) fn run(&self) {
        let mut state = self.lock();
        match state.next(&self.clock, self.time_max) {
            Some(first) => state.wake(first),
            None => return,
        }
        let mut n_turns = 0;
        while !state.tasks.iter().all(|task| task.ended) {
            let (back, late) = self.over.wait_timeout(state, STUCK).unwrap_or_else(PoisonError::into_inner);
            state = back;
            if late.timed_out() && state.n_turns == n_turns {
                let task = state.turn.map_or("no thread".into(), |turn| state.describe(turn));
                drop(state);
                panic!("{task} keeps its turn: it waits for something that is not simulated");
            }
            n_turns = state.n_turns;
        }
    }

    pub(super) fn remains(&self) -> Remains {
        let mut state = self.lock();
        Remains {
            trace: std::mem::take(&mut state.trace),
            failure: state.failure.take(),
            time: Duration::from_nanos(self.clock.load(Ordering::SeqCst)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives this thread's turn back, and waits until it has it again.
    fn pass<'a>(&'a self, mut state: MutexGuard<'a, WorldState>, me: usize) -> MutexGuard<'a, WorldState> {
        let rank = state.tasks[me].rank;
        state.ran(rank, self.clock.load(Ordering::SeqCst));
        match state.next(&self.clock, self.time_max) {
            Some(next) if next == me => state.turn = Some(me),
            Some(next) => {
                state.wake(next);
                let woken = state.tasks[me].woken.clone();
                let back = woken.wait_while(state, |state| state.turn != Some(me));
                state = back.unwrap_or_else(PoisonError::into_inner);
            }
            None => unreachable!("this thread has not ended"),
        }
        state
    }
}

impl WorldState {
    /// Waits for these files. Which events are waited for cannot be read back from them, so any event that they do not
    /// have now counts, and a wait may end early.
    fn waits(&mut self, fds: &[PollFd], now: u64, until: u64) -> Waits {
        let lag = self.lag();
        let mut waits = Waits { since: now, until, lag, ..Waits::default() };
        let mut here = Vec::with_capacity(fds.len());
        for fd in fds {
            let raw = fd.as_fd().as_raw_fd();
            let making = self.makings.iter().find(|(other, _)| *other == raw).map(|(_, making)| making);
            match making.filter(|making| pending(making)) {
                Some(making) => waits.makings.push(making.clone()),
                None => here.push(fd.clone()),
            }
        }
        if ready(&mut here) {
            waits.ready_at = Some(now);
            return waits;
        }
        let all = PollFlags::IN | PollFlags::OUT;
        let mut has: Vec<_> = here.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), all)).collect();
        ready(&mut has);
        for fd in &has {
            let lacks = all - fd.revents();
            if !lacks.is_empty() {
                match fd.as_fd().try_clone_to_owned() {
                    Ok(file) => waits.files.push((file, lacks)),
                    Err(e) => self.fail(format!("the simulation has no file descriptor left: {e}")),
                }
            }
        }
        waits
    }

    /// A thread of this rank ran.
    fn ran(&mut self, rank: usize, now: u64) {
        if !self.hosts[rank].killed {
            self.network.ran(rank, now, &mut self.random);
        }
        self.hosts[rank].reached = true;
    }

    /// Whose turn is next. None if all threads have ended.
    fn next(&mut self, clock: &AtomicU64, time_max: u64) -> Option<usize> {
        if self.tasks.iter().all(|task| task.ended) {
            return None;
        }
        loop {
            let now = clock.load(Ordering::SeqCst);
            while self.faults.front().is_some_and(|(at, _, _)| *at <= now) {
                let (_, nth, fault) = self.faults.pop_front().expect("looked at above");
                self.trace.add(now, SimEvent::Fault { nth });
                self.befall(fault, now);
            }
            let mut reached = vec![false; self.hosts.len()];
            self.network.deliver(now, &mut self.random, &mut self.trace, &mut reached);
            for (host, reached) in self.hosts.iter_mut().zip(reached) {
                host.reached |= reached;
            }
            self.look(now);
            let live = || (0..self.tasks.len()).filter(|&task| !self.tasks[task].ended);
            let due: Vec<usize> = live().filter(|&task| self.due(task) <= now).collect();
            if !due.is_empty() {
                let next = due[self.random.within(0..due.len() as u64) as usize];
                let rank = self.tasks[next].rank;
                self.trace.add(now, SimEvent::Ran { rank, task: next });
                self.n_turns += 1;
                self.tasks[next].waits = Waits::default();
                return Some(next);
            }
            let then = live().map(|task| self.due(task)).chain(self.network.next_at());
            let then = then.chain(self.faults.front().map(|fault| fault.0)).min().unwrap_or(u64::MAX);
            if then > time_max {
                let waiting: Vec<_> = live().map(|task| self.describe(task)).collect();
                self.fail(format!("these waits have not ended: {}", waiting.join("; ")));
                continue;
            }
            clock.store(then.max(now), Ordering::SeqCst);
        }
    }

    /// When a thread resumes.
    fn due(&self, task: usize) -> u64 {
        let SimTask { rank, main, waits, .. } = &self.tasks[task];
        let host = &self.hosts[*rank];
        if host.killed {
            return 0;
        }
        let due = waits.ready_at.unwrap_or(u64::MAX).min(waits.until).saturating_add(waits.lag);
        due.max(host.paused_until).max(if *main { host.main_paused_until } else { 0 })
    }

    /// Polls the files of the ranks that something may have reached.
    fn look(&mut self, now: u64) {
        for task in &mut self.tasks {
            let reached = self.hosts[task.rank].reached && !task.ended && task.waits.ready_at.is_none();
            if !reached {
                continue;
            }
            let files = task.waits.files.iter();
            let mut fds: Vec<_> = files.map(|(file, flags)| PollFd::new(file, *flags)).collect();
            let made = task.waits.makings.iter().any(|making| !pending(making));
            if made || ready(&mut fds) {
                task.waits.ready_at = Some(now);
            }
        }
        self.hosts.iter_mut().for_each(|host| host.reached = false);
    }

    fn befall(&mut self, fault: Fault, now: u64) {
        let until = |time: Duration| now.saturating_add(time.as_nanos() as u64);
        match fault {
            Fault::Pause { rank, time } => {
                self.hosts[rank].paused_until = self.hosts[rank].paused_until.max(until(time));
            }
            Fault::PauseMain { rank, time } => {
                self.hosts[rank].main_paused_until = self.hosts[rank].main_paused_until.max(until(time));
            }
            Fault::Hold { ranks, time } => self.network.hold(ranks, now, until(time)),
            Fault::Part { one, other } => self.network.part(one, other),
            Fault::Cut { one, other, nth } => {
                self.network.cut(one, other, nth, &mut self.random);
            }
            Fault::Kill { rank } => {
                self.network.kill(rank, now, &mut self.random);
                self.hosts[rank].killed = true;
            }
            Fault::Vanish { rank } => {
                self.network.vanish(rank);
                self.hosts[rank].killed = true;
            }
        }
    }

    /// Most threads run soon, some later, a few late.
    fn lag(&mut self) -> u64 {
        let most = self.settings.lag.as_nanos() as u64;
        let share = match self.random.within(0..100) {
            0 => 1,
            1..10 => 10,
            _ => 1000,
        };
        self.random.within(0..most / share + 1)
    }

    /// The first failure stays, and all threads end.
    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
        self.hosts.iter_mut().for_each(|host| host.killed = true);
    }

    fn wake(&mut self, task: usize) {
        self.turn = Some(task);
        self.tasks[task].woken.notify_one();
    }

    fn describe(&self, task: usize) -> String {
        let SimTask { rank, name, waits, .. } = &self.tasks[task];
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (since, until) = (seconds(waits.since), seconds(waits.until));
        format!("thread {name} of rank {rank} (since {since:.3} s, until {until:.3} s)")
    }
}

fn pending(making: &Weak<Making>) -> bool {
    making.upgrade().is_some_and(|making| making.get() == Made::Pending)
}

fn ready(fds: &mut [PollFd]) -> bool {
    !fds.is_empty() && matches!(poll(fds, Some(&AT_ONCE)), Ok(1..))
}

fn text(why: &(dyn Any + Send)) -> &str {
    let owned = why.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| why.downcast_ref::<&str>().copied()).unwrap_or("without a word")
}
