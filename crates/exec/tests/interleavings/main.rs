//! The pool, counters, notices, meetings of ranks and lent memory, under a checker that chooses which thread runs and when stores
//! arrive (`polyreme_sync::model`). Each scenario runs a few hundred times on a correct machine, and must pass; and on one
//! with a fault, where it must fail: that shows that the scenario finds such a bug.
//!
//!     cargo test --workspace --features polyreme-exec/interleave --test interleavings

#![allow(clippy::unwrap_used)] // a test that panics is a test that fails

mod counters;
mod ledger;
mod meetings;
mod notices;
mod pool;

use std::panic::{AssertUnwindSafe, catch_unwind};

use polyreme_sync::atomic::Ordering;
use polyreme_sync::model::{Faults, SOUND, check};

/// What is `SeqCst` in the code is `Release`: stores stay in order, and arrive after loads that follow them.
const LATE: Faults = Faults { stores: Some(Ordering::Release), ..SOUND };
/// What is `SeqCst` in the code is `Relaxed`: stores arrive in any order.
const UNORDERED: Faults = Faults { stores: Some(Ordering::Relaxed), ..SOUND };

/// A fault is found within this many runs, or the test fails.
const RUNS_WITH_FAULT: usize = 20_000;

/// Runs a scenario that must panic on a machine with these faults; returns the message.
fn found(faults: Faults, scene: fn()) -> String {
    let ended = catch_unwind(AssertUnwindSafe(|| check(RUNS_WITH_FAULT, faults, scene)));
    let panic = ended.expect_err("the fault is found");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}
