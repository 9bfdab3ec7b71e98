//! The same names under the checker.
//!
//! # What is checked
//! The checker (`shuttle`) runs one thread at a time and chooses at random who goes on, before and after every operation
//! here. A run in which nobody can go on is a deadlock, which it reports, as it does a panic, with the seed.
//!
//! It knows sequential consistency only. So stores are kept back here ([`atomic`]) as a machine may: one that is `Relaxed`
//! or `Release` reaches the others some time later, and a `Relaxed` one also later than those that follow it. That finds an
//! ordering that is too weak for what the code does, where the fault is a late store. Loads are never early, and what a late
//! load breaks is not found.
//!
//! Time does not pass: waits have no end but what they wait for, unless a test says that they may end early.
//!
//! # Bugs on purpose
//! [`Faults`] make the checker's machine worse than any real one, to show that a test would see it.

pub mod atomic;
pub mod futex;
mod lock;
pub mod thread;

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};

pub use lock::{Condvar, Mutex, MutexGuard};
pub use shuttle::hint;
pub use shuttle::sync::Barrier;

/// What is wrong with the machine, and how long waits in the kernel may take.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Every store is taken for one of this ordering.
    pub stores: Option<atomic::Ordering>,
    /// Who wakes all who sleep at a word wakes one of them.
    pub wakes_one: bool,
    /// No fault: waits in the kernel may end for no reason, as they do with a time limit.
    pub waits_end: bool,
}

/// A machine as it should be.
pub const SOUND: Faults = Faults { stores: None, wakes_one: false, waits_end: false };

thread_local! {
    // Of the thread that runs the checker; all threads that it checks run on it.
    static FAULTS: Cell<Faults> = const { Cell::new(SOUND) };
}

fn faults() -> Faults {
    FAULTS.get()
}

/// What all draws begin with, so that every time the same runs are made. Another one makes others.
const SEED: u64 = 11;

/// Changes of priority in a run of the second kind.
const CHANGES: usize = 3;

/// Runs `test` so many times, each time with other interleavings, on a machine with these faults: half of them with a draw at
/// every point, which mixes threads finely, and half with priorities that change a few times, which lets a thread go on for
/// long while another stands still.
///
/// # Panics
/// With what one of the runs panicked with, or with the deadlock it came to.
pub fn check(runs: usize, faults: Faults, test: impl Fn() + Send + Sync + 'static) {
    FAULTS.set(faults);
    let test = Arc::new(move || {
        test();
        atomic::flush();
    });
    run(RandomScheduler::new_from_seed(SEED, runs.div_ceil(2)), test.clone());
    run(PctScheduler::new_from_seed(SEED, CHANGES, runs.div_ceil(2)), test);
}

fn run(scheduler: impl Scheduler + 'static, test: Arc<impl Fn() + Send + Sync + 'static>) {
    let mut config = shuttle::Config::new();
    config.silence_warnings = true;
    config.stack_size = 1 << 20;
    shuttle::Runner::new(scheduler, config).run(move || test());
}

/// Lets another thread go on, if the checker wants it.
fn point() {
    if !std::thread::panicking() {
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// A clock by which a moment has passed since any time: longer than a thread looks before it sleeps, shorter than all limits.
#[derive(Clone, Copy, Debug)]
pub struct Instant;

impl Instant {
    /// Any time.
    pub fn now() -> Instant {
        Instant
    }

    /// A moment.
    pub fn elapsed(&self) -> Duration {
        Duration::from_millis(1)
    }
}
