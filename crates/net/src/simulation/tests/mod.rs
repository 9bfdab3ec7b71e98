//! Thousands of jobs on networks that fail. After each one: every wait has ended, no live rank was reported, and all
//! reports agree.
//!
//! `SEED=7 cargo test -p polyreme-net --lib simulation::tests::schedules -- --nocapture` repeats one schedule and
//! prints its events; `SCHEDULES=2000` runs more of them than an ordinary test does.

mod found;
mod job;
mod plan;
mod stalls;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Bug;
use plan::RunPlan;

/// How many schedules an ordinary test runs.
const SCHEDULES: u64 = 300;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// A schedule that did not end as it must.
struct Wrong {
    seed: u64,
    why: String,
    all: String,
}

/// The first schedules of a range that do not end as they must, at most `most`.
fn wrong(seeds: std::ops::Range<u64>, most: usize, change: impl Fn(&mut RunPlan) + Sync) -> Vec<Wrong> {
    let next = AtomicU64::new(seeds.start);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(8) {
            s.spawn(|| {
                while wrong.lock().unwrap().len() < most {
                    let seed = next.fetch_add(1, Ordering::SeqCst);
                    if seed >= seeds.end {
                        return;
                    }
                    let mut plan = RunPlan::new(seed);
                    change(&mut plan);
                    let outcome = plan.run();
                    if let Err(why) = plan.judge(&outcome) {
                        let all = format!("{plan:#?}\n{:#?}", outcome.results);
                        wrong.lock().unwrap().push(Wrong { seed, why, all });
                    }
                }
            });
        }
    });
    let mut wrong = wrong.into_inner().unwrap();
    wrong.sort_by_key(|wrong| wrong.seed);
    wrong
}

#[test]
fn schedules() {
    if let Some(seed) = number("SEED") {
        let plan = RunPlan::new(seed);
        let outcome = plan.run();
        println!("{plan:#?}\n{}\n{:#?}", outcome.trace, outcome.results);
        plan.judge(&outcome).unwrap();
        return;
    }
    let wrong = wrong(0..number("SCHEDULES").unwrap_or(SCHEDULES), 50, |_| {});
    for Wrong { seed, why, .. } in &wrong {
        println!("SEED={seed}: {why}");
    }
    if let Some(Wrong { seed, why, all }) = wrong.first() {
        panic!("SEED={seed}: {why}\n{all}");
    }
}

#[test]
fn a_seed_leaves_the_same_trace_each_time() {
    for seed in 0..40 {
        let plan = RunPlan::new(seed);
        let [first, second] = [plan.run(), plan.run()];
        assert!(first.trace.0.len() > 5, "seed {seed}: something happened");
        let differ = first.trace.0.iter().zip(&second.trace.0).position(|(a, b)| a != b);
        assert_eq!(differ, None, "seed {seed}: the first of {} events", first.trace.0.len());
        assert_eq!((first.trace.0.len(), first.time), (second.trace.0.len(), second.time), "seed {seed}");
        let ends = [first.results, second.results].map(|results| format!("{results:?}"));
        assert_eq!(ends[0], ends[1], "seed {seed}");
    }
}

/// Each bug is found within this many schedules.
#[test]
fn mistakes_are_found() {
    let bugs = [
        Bug::Doubles,
        Bug::Drops,
        Bug::Overtakes,
        Bug::JudgesAlone,
        Bug::KeepsReports,
        Bug::JudgesAcrossPauses,
        Bug::ForgetsBeats,
        Bug::ForgetsGoodbye,
        Bug::IgnoresAlarm,
        Bug::NeverCalls,
        Bug::TakesOnlyWhatItWants,
    ];
    for bug in bugs {
        let found = wrong(0..SCHEDULES, 1, |plan| plan.settings.bug = Some(bug));
        let Some(Wrong { seed, why, .. }) = found.first() else {
            panic!("{bug:?} is not found in {SCHEDULES} schedules");
        };
        println!("{bug:?}: schedule {seed}: {why}");
    }
}
