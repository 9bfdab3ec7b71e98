//! Waiting in the kernel for a word to change. The futexes are the shared kind, so that they work between processes.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex::{self, Flags, Timespec};

/// Sleeps if the word still has this value: until it is woken, until the timeout, or until a spurious wake-up.
pub fn wait(word: &AtomicU32, value: u32, at_most: Duration) {
    let at_most =
        Timespec { tv_sec: at_most.as_secs().cast_signed(), tv_nsec: i64::from(at_most.subsec_nanos()) };
    // Woken, timed out, interrupted or changed meanwhile: all the same, the caller looks again.
    let _ = futex::wait(word, Flags::empty(), value, Some(&at_most));
}

/// Wakes all threads that sleep on a word.
pub fn wake(word: &AtomicU32) {
    // It fails only for an invalid address.
    let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
}
