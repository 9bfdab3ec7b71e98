//! The pool: every task once and none after its run, with helpers that sleep, join late and steal; panics; shutdown.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

// The counters of the tasks are not part of what is checked.
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use polyreme_exec::Pool;
use polyreme_kernels::Parallel;
use polyreme_sync::model::{SOUND, check};
use polyreme_sync::thread;

use super::{UNORDERED, found};

/// One run: every task once, before it ends. The memory of tasks is never freed: a fault should fail the test, not crash it.
fn run(pool: &Pool, tasks: usize) {
    let counts: &[_] = Box::leak((0..tasks).map(|_| AtomicU32::new(0)).collect());
    let over: &AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    let late: &AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    pool.run(
        tasks,
        Box::leak(Box::new(move |i: usize, worker: usize| {
            // A task yields: others run meanwhile.
            thread::yield_now();
            late.fetch_or(worker >= 3 || i >= tasks || over.load(Ordering::SeqCst), Ordering::SeqCst);
            counts.get(i).map(|count| count.fetch_add(1, Ordering::SeqCst));
        })),
    );
    over.store(true, Ordering::SeqCst);
    // So that a task that still runs is noticed.
    (0..4).for_each(|_| thread::yield_now());
    assert!(!late.load(Ordering::SeqCst), "no task after its run, nor one out of range");
    let counts: Vec<_> = counts.iter().map(|count| count.load(Ordering::SeqCst)).collect();
    assert!(counts.iter().all(|count| *count == 1), "every task once: {counts:?}");
}

/// Not dropped after a failure, when its threads are gone; and never moved, because stores to it may be in flight.
fn boxed(threads: usize) -> ManuallyDrop<Box<Pool>> {
    ManuallyDrop::new(Box::new(Pool::new(threads).unwrap()))
}

fn runs_of_any_length() {
    let pool = boxed(3);
    for tasks in [2, 7, 3] {
        run(&pool, tasks);
    }
    // Helpers end, wherever they are.
    drop(ManuallyDrop::into_inner(pool));
}

fn workers_rest() {
    let pool = boxed(3);
    for active in [1, 3, 2] {
        pool.set_active(active);
        run(&pool, 3);
    }
    // Those that rest end as well.
    drop(ManuallyDrop::into_inner(pool));
}

fn a_task_panics() {
    let pool = boxed(2);
    let seen = Arc::new(AtomicU32::new(0));
    let in_task = seen.clone();
    let ended = catch_unwind(AssertUnwindSafe(|| {
        pool.run(4, &move |i, _| {
            thread::yield_now();
            in_task.fetch_add(1, Ordering::SeqCst);
            if i == 2 {
                std::panic::resume_unwind(Box::new("task two"));
            }
        });
    }));
    assert!(ended.is_err_and(|panic| panic.is::<&str>()), "the panic of a task reaches the caller");
    assert!(seen.load(Ordering::SeqCst) <= 4, "no task twice");
    run(&pool, 3);
    drop(ManuallyDrop::into_inner(pool));
}

fn two_callers() {
    let pool = Arc::new(boxed(2));
    let other = pool.clone();
    let caller = thread::spawn(move || run(&other, 3));
    run(&pool, 4);
    caller.join().unwrap();
    drop(ManuallyDrop::into_inner(Arc::into_inner(pool).unwrap()));
}

#[test]
fn every_task_runs_once_and_none_after_its_run() {
    check(2_000, SOUND, runs_of_any_length);
}

#[test]
fn workers_that_rest_are_not_missed() {
    check(2_000, SOUND, workers_rest);
}

#[test]
fn a_panic_leaves_the_pool_whole() {
    check(2_000, SOUND, a_task_panics);
}

#[test]
fn two_callers_do_not_share_a_run() {
    check(2_000, SOUND, two_callers);
}

/// A gate that is open before the numbers of the tasks are set.
#[test]
fn a_gate_that_opens_too_early_is_found() {
    let said = found(UNORDERED, runs_of_any_length);
    assert!(said.contains("every task once") || said.contains("no task after its run"), "{said}");
}
