//! What code that threads and ranks run at the same time is made of: atomics, locks, threads, futexes and clocks.
//!
//! Usually all of it is the standard library's and the kernel's, and this crate is a list of names. With the feature
//! `interleave` the same code runs under a checker (`shuttle`): every operation is a point where another thread may go on, and
//! stores reach other threads as late as their ordering allows. So what is checked is what runs, and not a model of it.
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

/// Whether a checker decides who runs: then looking again and again shows nothing new, and is cut short.
pub const CHECKED: bool = cfg!(feature = "interleave");
