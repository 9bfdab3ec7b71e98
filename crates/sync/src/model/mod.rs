//! The same names under the checker.
//!
//! # What is checked
//! The checker (`shuttle`) runs one thread at a time and chooses at random which goes on, before and after every
//! operation here. A run in which no thread can go on is a deadlock; it is reported with the seed, and so is a panic.
//!
//! It models sequential consistency only. So stores are delayed here ([`atomic`]), as real hardware may delay them: one
//! that is `Relaxed` or `Release` reaches the others some time later, and a `Relaxed` one also later than those that
//! follow it. That finds an ordering that is too weak for what the code does, where the fault is a late store. Loads
//! are never early, and what a late load breaks is not found.
//!
//! Time does not pass: a wait ends only with what it waits for, unless a test allows spurious wake-ups.
//!
//! # Bugs on purpose
//! [`Faults`] make the checker's machine worse than any real one, to show that a test would notice.

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
    /// Waking all threads that sleep on a word wakes only one of them.
    pub wakes_one: bool,
    /// Not a fault: waits in the kernel may end spuriously, as they do with a timeout.
    pub waits_end: bool,
}

/// A correct machine.
pub const SOUND: Faults = Faults { stores: None, wakes_one: false, waits_end: false };

thread_local! {
    // Of the thread that runs the checker; all threads that it checks run on it.
    static FAULTS: Cell<Faults> = const { Cell::new(SOUND) };
}

fn faults() -> Faults {
    FAULTS.get()
}

/// The seed of all draws, so that runs repeat. Another seed gives other runs.
const SEED: u64 = 11;

/// How often priorities change in a run of the second kind.
const CHANGES: usize = 3;

/// Runs `test` this many times with different interleavings, on a machine with these faults: half of the runs draw the
/// next thread at every point, which mixes threads finely; half use priorities that change a few times, which lets one
/// thread run for long while another stands still.
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

/// Lets the checker schedule another thread.
fn point() {
    if !std::thread::panicking() {
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// A clock on which the same short time has passed since any moment: longer than threads spin, shorter than all
/// timeouts.
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
