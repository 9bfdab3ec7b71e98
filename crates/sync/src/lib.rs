//! The primitives of concurrent code: atomics, locks, threads, futexes and clocks.
//!
//! Normally they are the standard library's and the kernel's, and this crate only re-exports them. With the feature
//! `interleave` the same code runs under a checker (`shuttle`): at every operation another thread may be scheduled, and
//! stores become visible as late as their ordering allows. So the checker sees the real code and not a model of it.
//!
//! It knows nothing of ranks, pools or messages.
//!
//! # Layout
//! [`futex`]: waiting for a word to change. `model`, a feature: the same names under the checker.

#[cfg(not(feature = "interleave"))]
pub mod futex;
#[cfg(feature = "interleave")]
pub mod model;

#[cfg(feature = "interleave")]
pub use model::{Barrier, Condvar, Instant, Mutex, MutexGuard, atomic, futex, hint, thread};
#[cfg(not(feature = "interleave"))]
pub use std::{
    hint,
    sync::{Barrier, Condvar, Mutex, MutexGuard, atomic},
    thread,
    time::Instant,
};

/// Whether the checker schedules threads: spinning then sees nothing new, and is cut short.
pub const CHECKED: bool = cfg!(feature = "interleave");
