//! Ranks on separate hosts: network namespaces with slow links. A separate binary, one test at a time, because the
//! links are measured too.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod elastic;
mod encrypted;
mod hosts;
mod over_networks;
mod spread;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Holds the machine: the others wait.
fn alone() -> MutexGuard<'static, ()> {
    static MACHINE: Mutex<()> = Mutex::new(());
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}
