//! A model of the kernel that records which threads sleep on which word. Nothing wakes by timeout, so a lost wake-up is
//! a deadlock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use shuttle::sync::{Condvar, Mutex};

use super::atomic::{AtomicU32, Ordering, flush};
use super::{faults, point};

shuttle::lazy_static! {
    /// By the address of the word.
    static ref SLEEPERS: Mutex<HashMap<usize, Arc<Condvar>>> = Mutex::new(HashMap::new());
}

fn at(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word) as usize
}

/// Sleeps if the word still has this value.
pub fn wait(word: &AtomicU32, value: u32, _: Duration) {
    flush();
    if faults().waits_end {
        return shuttle::thread::yield_now();
    }
    let mut sleepers = SLEEPERS.lock().expect("no panic while it is held");
    // To threads that wake others, the kernel's check and sleep are one atomic step.
    if word.load(Ordering::SeqCst) != value {
        return;
    }
    let here = sleepers.entry(at(word)).or_default().clone();
    drop(here.wait(sleepers).expect("no panic while it is held"));
}

/// Wakes all threads that sleep on a word.
pub fn wake(word: &AtomicU32) {
    flush();
    point();
    let sleepers = SLEEPERS.lock().expect("no panic while it is held");
    let Some(here) = sleepers.get(&at(word)) else { return };
    if faults().wakes_one { here.notify_one() } else { here.notify_all() }
}
