//! Ranks that sleep until each other's counters advance; no sleep times out.

use std::sync::Arc;
use std::time::Duration;

use polyreme_net::{Counter, Pace};
use polyreme_sync::model::{Faults, SOUND, check};
use polyreme_sync::thread;

use super::{LATE, found};

const AT_ONCE: Pace = Pace { spin: Duration::ZERO, yields: Duration::ZERO };

fn wait(counter: &Counter, target: u32) {
    counter.wait::<()>(target, AT_ONCE, |_| Ok(())).unwrap();
}

/// Two ranks count in turn, past the wrap-around of the counters; each sleeps until the other has counted.
fn in_turn() {
    let counters = Arc::new([Counter::default(), Counter::default()]);
    let start = u32::MAX - 1;
    counters.iter().for_each(|counter| counter.post(start));
    let rank = |me: usize| {
        let counters = counters.clone();
        thread::spawn(move || {
            for turn in 1..=3 {
                let target = start.wrapping_add(turn);
                counters[me].post(target);
                wait(&counters[1 - me], target);
            }
        })
    };
    let ranks = [rank(0), rank(1)];
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

/// Two ranks wait for a third one.
fn for_one() {
    let counter = Arc::new(Counter::default());
    let waits = || {
        let counter = counter.clone();
        thread::spawn(move || wait(&counter, 2))
    };
    let ranks = [waits(), waits()];
    counter.post(1);
    counter.post(2);
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

#[test]
fn no_wake_up_of_a_counter_is_lost() {
    check(2_000, SOUND, in_turn);
    check(2_000, SOUND, for_one);
}

/// The store of a counter arrives after the check for sleepers, as with anything weaker than `SeqCst`.
#[test]
fn a_counter_that_is_stored_late_is_found() {
    let said = found(LATE, in_turn);
    assert!(said.contains("deadlock"), "{said}");
}

#[test]
fn waking_one_of_two_sleepers_is_found() {
    let said = found(Faults { wakes_one: true, ..SOUND }, for_one);
    assert!(said.contains("deadlock"), "{said}");
}
