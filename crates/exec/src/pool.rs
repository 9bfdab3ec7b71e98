//! The fork-join pool of one rank: the caller and `threads - 1` helpers, which spin briefly and then sleep.
//!
//! A step is hundreds of short parallel regions, so what counts is the time to start one. The caller publishes a job
//! by opening a gate; helpers that are awake pass it, take task numbers, and leave. The caller works too, closes the gate
//! when all tasks are taken, and waits only for the helpers inside: a helper that slept through a job costs
//! nothing. A panic in a task is carried to the caller.
//!
//! Each worker has its own range of task numbers, and steals from the others when it is done. So a worker mostly comes
//! back to the parts of the tensors that it wrote in the region before, and finds them in its own cache; and counters do
//! not bounce between the cores.
//!
//! Workers can be sent to rest ([`Pool::set_active`]): the others take their tasks. Tasks are cut as before, so results are the same bits.
//!
//! It is not a scheduler: one job at a time, no nesting, no queues.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError};

use polyreme_kernels::Parallel;
use polyreme_sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use polyreme_sync::thread::{self, JoinHandle};
use polyreme_sync::{CHECKED, Condvar, Mutex, hint};

/// How often a waiting helper checks the gate before it sleeps: about 100 µs. The gaps between the regions of a step are
/// shorter; waking a sleeper takes 50 µs.
const SPINS: usize = if CHECKED { 2 } else { 4_000 };

/// A thread pool for one rank.
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held while a job runs: a second caller runs its tasks alone.
    busy: AtomicBool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &(self.helpers.len() + 1)).finish_non_exhaustive()
    }
}

type Task = dyn Fn(usize, usize) + Sync;

struct Shared {
    /// `generation << 16 | open << 15 | inside`: which job, whether it can still be joined, how many helpers are in.
    gate: AtomicU64,
    job: UnsafeCell<PoolJob>,
    /// For each worker, the next task of its range.
    next: Box<[Counter]>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    spins: usize,
    n_asleep: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    /// Helpers that have started.
    n_up: AtomicUsize,
    /// Workers that take tasks; those from this number on rest.
    n_active: AtomicUsize,
    rested: Condvar,
}

/// Two cache lines long, so that no two counters share a line or a pair of adjacent lines that are prefetched together.
#[derive(Default)]
struct Counter {
    next: AtomicUsize,
    _room: [usize; 15],
}

#[derive(Clone, Copy)]
struct PoolJob {
    task: *const Task,
    n_tasks: usize,
}

const OPEN: u64 = 1 << 15;
const INSIDE: u64 = OPEN - 1;

// SAFETY: `job` is written by the caller while the gate is closed and no helper is inside, and read only inside.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointer in `job` is only followed while the caller that owns the task waits.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads`, the caller included. With more threads than cores, helpers sleep at once instead of
    /// taking the core from a thread that works. Returns when all of them are up: what the system does to start a
    /// thread, allocations included, is not left to the first steps.
    pub fn new(threads: usize) -> io::Result<Pool> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(PoolJob { task: &|_, _| {}, n_tasks: 0 }),
            next: (0..threads.max(1)).map(|_| Counter::default()).collect(),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            spins: if threads <= cores { SPINS } else { 0 },
            n_asleep: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            n_up: AtomicUsize::new(0),
            n_active: AtomicUsize::new(threads.max(1)),
            rested: Condvar::new(),
        });
        let mut pool = Pool { shared, helpers: Vec::new(), busy: AtomicBool::new(false) };
        for worker in 1..threads {
            let shared = pool.shared.clone();
            let help = move || {
                shared.n_up.fetch_add(1, Ordering::SeqCst);
                drop(shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
                shared.wake.notify_all();
                shared.help(worker);
            };
            // If a thread cannot be started, those that were end with the pool.
            let thread = thread::Builder::new().name(format!("polyreme-{worker}")).spawn(help)?;
            pool.helpers.push(thread);
        }
        let shared = &*pool.shared;
        let mut guard = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while shared.n_up.load(Ordering::SeqCst) < pool.helpers.len() {
            guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        Ok(pool)
    }

    /// From now on so many workers take tasks, the caller included; the others sleep. A helper that is on its way may still take part
    /// in one more job.
    pub fn set_active(&self, workers: usize) {
        self.shared.n_active.store(workers.max(1), Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.rested.notify_all();
    }
}

// SAFETY: ranges are disjoint, and counters give each number once; every thread has its own worker number; `run` returns
// after the gate is closed and no helper is inside, when every task taken has returned.
unsafe impl Parallel for Pool {
    fn workers(&self) -> usize {
        self.helpers.len() + 1
    }

    fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        let resting = self.shared.n_active.load(Ordering::Relaxed) <= 1;
        let alone =
            n_tasks <= 1 || self.helpers.is_empty() || resting || self.busy.swap(true, Ordering::Acquire);
        if alone {
            for i in 0..n_tasks {
                task(i, 0);
            }
            return;
        }
        let s = &*self.shared;
        // SAFETY: the lifetime is erased only until `close` returns, after which no helper follows the pointer.
        let task: *const Task = unsafe { std::mem::transmute(task) };
        // SAFETY: the gate is closed and no helper is inside (the last `run` waited for it).
        unsafe { *s.job.get() = PoolJob { task, n_tasks } };
        for (worker, next) in s.next.iter().enumerate() {
            next.next.store(s.run_of(n_tasks, worker).start, Ordering::Relaxed);
        }
        let generation = (s.gate.load(Ordering::Relaxed) >> 16) + 1;
        s.gate.store(generation << 16 | OPEN, Ordering::SeqCst);
        if s.n_asleep.load(Ordering::SeqCst) > 0 {
            drop(s.lock.lock().unwrap_or_else(PoisonError::into_inner));
            s.wake.notify_all();
        }
        s.work(PoolJob { task, n_tasks }, 0);
        s.close();
        let panic = s.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.busy.store(false, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn run_backwards(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        self.run(n_tasks, &|i, worker| task(self.shared.mirrored(n_tasks, i), worker));
    }
}

impl Shared {
    /// The task that is as far from the end of its worker's range as task `i` is from the start.
    fn mirrored(&self, n_tasks: usize, i: usize) -> usize {
        let range = self.run_of(n_tasks, ((i + 1) * self.next.len() - 1) / n_tasks);
        range.start + range.end - 1 - i
    }

    /// The tasks that a worker begins with.
    fn run_of(&self, n_tasks: usize, worker: usize) -> Range<usize> {
        let workers = self.next.len();
        n_tasks * worker / workers..n_tasks * (worker + 1) / workers
    }

    /// Takes tasks until none is left: a worker's own, then those of the workers after it.
    fn work(&self, job: PoolJob, worker: usize) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            let workers = self.next.len();
            for owner in (worker..workers).chain(0..worker) {
                let end = self.run_of(job.n_tasks, owner).end;
                loop {
                    let i = self.next[owner].next.fetch_add(1, Ordering::Relaxed);
                    if i >= end {
                        break;
                    }
                    // SAFETY: the caller keeps the task alive until all helpers are out.
                    unsafe { (*job.task)(i, worker) };
                }
            }
        }));
        if let Err(panic) = result {
            for next in &self.next {
                next.next.store(usize::MAX / 2, Ordering::Relaxed);
            }
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }

    /// Closes the gate and waits for the helpers inside.
    fn close(&self) {
        let mut inside = self.gate.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE;
        let mut spins = 0;
        while inside > 0 {
            spins += 1;
            if spins < 10_000 {
                hint::spin_loop()
            } else {
                thread::yield_now()
            }
            inside = self.gate.load(Ordering::Acquire) & INSIDE;
        }
    }

    fn help(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.rest(worker);
            if !self.wait_for_job(seen) {
                return;
            }
            let gate = self.gate.load(Ordering::Acquire);
            seen = gate >> 16;
            let entered = gate & OPEN != 0
                && self.gate.compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
            if !entered {
                // Another thread moved the gate, or the job is over: check again.
                if gate & OPEN != 0 {
                    seen -= 1;
                }
                continue;
            }
            // SAFETY: being inside an open gate means that the job was published and stays.
            let job = unsafe { *self.job.get() };
            self.work(job, worker);
            self.gate.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Sleeps as long as this worker is not needed.
    fn rest(&self, worker: usize) {
        let rests = || worker >= self.n_active.load(Ordering::SeqCst) && !self.stop.load(Ordering::SeqCst);
        if rests() {
            let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            while rests() {
                guard = self.rested.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Returns true when there may be a job newer than `seen`, false when the pool ends.
    fn wait_for_job(&self, seen: u64) -> bool {
        let ready = || self.gate.load(Ordering::Acquire) >> 16 != seen || self.stop.load(Ordering::Acquire);
        for _ in 0..self.spins {
            if ready() {
                return !self.stop.load(Ordering::Acquire);
            }
            hint::spin_loop();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.n_asleep.fetch_add(1, Ordering::SeqCst);
        while !(self.gate.load(Ordering::SeqCst) >> 16 != seen || self.stop.load(Ordering::SeqCst)) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.n_asleep.fetch_sub(1, Ordering::SeqCst);
        drop(guard);
        !self.stop.load(Ordering::Acquire)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        self.shared.rested.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper only panics if the pool itself is wrong; no caller is left to tell.
            drop(helper.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.workers(), threads);
            for n in [0, 1, 2, 7, 100] {
                for _ in 0..200 {
                    let counts: Vec<_> = (0..n).map(|_| AtomicU32::new(0)).collect();
                    pool.run(n, &|i, worker| {
                        assert!(worker < threads);
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn backwards_every_worker_has_the_tasks_that_it_has_forwards() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads).unwrap();
            for n in [1, 2, 7, 8, 100] {
                let shared = &*pool.shared;
                for worker in 0..threads {
                    let range = shared.run_of(n, worker);
                    let tasks: Vec<_> = range.clone().map(|i| shared.mirrored(n, i)).collect();
                    assert_eq!(tasks, range.rev().collect::<Vec<_>>(), "{n} tasks on {threads} threads");
                }
                let counts: Vec<_> = (0..n).map(|_| AtomicU32::new(0)).collect();
                pool.run_backwards(n, &|i, _| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn helpers_wake_after_a_sleep() {
        let pool = Pool::new(4).unwrap();
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(3));
            let sum = AtomicUsize::new(0);
            pool.run(50, &|i, _| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 1225);
        }
    }

    /// However many rest, every task runs once, and after a moment none of them runs on a worker that rests.
    #[test]
    fn workers_rest_and_come_back() {
        let pool = Pool::new(4).unwrap();
        for active in [4, 1, 3, 2, 4, 0, 4] {
            pool.set_active(active);
            // Helpers that are awake see one more job.
            pool.run(100, &|_, _| {});
            std::thread::sleep(std::time::Duration::from_millis(3));
            pool.run(100, &|_, _| {});
            for _ in 0..50 {
                let counts: Vec<_> = (0..100).map(|_| AtomicU32::new(0)).collect();
                pool.run(100, &|i, worker| {
                    assert!(worker < 4);
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
        pool.set_active(1);
        std::thread::scope(|_| pool.run(100, &|_, worker| assert_eq!(worker, 0)));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(3).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(20, &|i, _| assert!(i != 7, "task seven"));
        }));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i, _| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    #[test]
    fn two_callers_do_not_meet() {
        let pool = Pool::new(2).unwrap();
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..500 {
                        let sum = AtomicUsize::new(0);
                        pool.run(10, &|i, _| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 45);
                    }
                });
            }
        });
    }
}
