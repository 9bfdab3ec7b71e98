//! Something stands still for 5, 61 or 601 seconds, with the patience that jobs have by default: at the start, in
//! training, in an evaluation, while a rank saves, and at the end; and while data are prepared or a checkpoint is loaded, which one
//! rank does after all have joined.

use std::time::Duration;

use super::super::{Bug, Fault, Settings};
use super::job::{Act, Early, RankEnd};
use super::plan::{RunPlan, Verdict};
use crate::patience::{Patience, SILENCE};

const RANKS: usize = 3;

/// The phases of the job, when they are, in microseconds, and which rank stands still.
const PHASES: [(&str, u64, usize); 10] = [
    ("start", 300, 0),
    ("start", 1_200, 1),
    ("preparing", 500_000, 0),
    ("preparing", 700_000, 1),
    ("training", 2_010_000, 0),
    ("training", 2_020_000, 1),
    ("saving", 4_000_000, 0),
    ("evaluation", 7_500_000, 0),
    ("evaluation", 7_600_000, 2),
    ("end", 11_500_000, 1),
];

/// Prepares on all ranks, trains, saves on rank 0, evaluates (each rank its share of the set, and then the sums of all), and a last
/// rank that is late.
fn acts() -> Vec<Act> {
    let compute = |each, longer| Act::Compute { each: Duration::from_secs(each), longer };
    let mut acts = vec![compute(2, None)];
    acts.extend(vec![Act::AllReduce { bytes: 150_000, ring: true }; 20]);
    acts.push(Act::Share { bytes: 100 });
    acts.push(compute(0, Some((0, Duration::from_secs(4)))));
    acts.push(Act::AllReduce { bytes: 5000, ring: false });
    acts.push(compute(3, Some((2, Duration::from_secs(2)))));
    acts.push(Act::AllReduce { bytes: 64, ring: false });
    acts.push(compute(0, Some((1, Duration::from_secs(1)))));
    acts
}

/// The job with one fault; pairs are connected before, or when they first talk.
fn plan(at: u64, early: Early, fault: Fault, verdict: Verdict) -> RunPlan {
    let settings = Settings { faults: vec![(Duration::from_micros(at), fault)], ..Settings::default() };
    RunPlan { seed: at, size: RANKS, patience: Patience::default(), early, acts: acts(), settings, verdict }
}

/// Runs the job with one fault, and says whether a rank reported anything.
fn reports(at: u64, joining: bool, fault: Fault, verdict: Verdict) -> bool {
    // When pairs are connected makes no difference to what is waited for.
    let reported = [Early::AllPairs, Early::NoPairs]
        .map(|early| come_of(plan(at, early, fault.clone(), verdict.clone())).unwrap());
    assert!(joining || reported[0] == reported[1], "{fault:?} at {at}");
    reported[0]
}

/// Whether a rank reported anything, or what is wrong with the outcome.
fn come_of(mut plan: RunPlan) -> Result<bool, String> {
    plan.settings.time_max = plan.time_max();
    let outcome = plan.run();
    let all = |why| format!("{why} ({plan:?}: {:?})", outcome.results);
    plan.judge(&outcome).map_err(all)?;
    Ok(!outcome.results.iter().flatten().all(|end| matches!(end, RankEnd::Fine { .. })))
}

fn check(seconds: u64) {
    let time = Duration::from_secs(seconds);
    for (phase, at, rank) in PHASES {
        let joining = phase == "start";
        let verdict = |waited_for: bool| match waited_for {
            true => Verdict::AllFine,
            false => Verdict::Loses { rank },
        };
        // All of its threads: it is silent.
        let pause = Fault::Pause { rank, time };
        let reported = reports(at, joining, pause, verdict(time < SILENCE));
        assert!(joining || reported == (time > SILENCE), "rank {rank} paused for {seconds} s at {phase}");
        // The thread that works: the one that sends heartbeats goes on, once there is one.
        let pause = Fault::PauseMain { rank, time };
        reports(at, joining, pause, verdict(!joining || time < SILENCE));
        // The network: retransmissions may take as long once more.
        let hold = Fault::Hold { ranks: vec![rank], time };
        reports(at, joining, hold, verdict(2 * time < SILENCE));
    }
}

#[test]
fn stalls_of_5_seconds_are_waited_for() {
    check(5);
}

#[test]
fn stalls_of_61_seconds_are_waited_for_if_the_rank_is_heard() {
    check(61);
}

#[test]
fn stalls_of_601_seconds_are_waited_for_if_the_rank_is_heard() {
    check(601);
}

#[test]
fn a_checkpoint_that_takes_longer_than_a_stall_is_waited_for_and_a_rank_that_hangs_is_not() {
    let patience = Patience { stall: Duration::from_secs(120), ..Patience::default() };
    let long = patience.stall * 2;
    let ends = |first: Act, verdict: Verdict| {
        let acts = vec![first, Act::AllReduce { bytes: 100, ring: true }];
        let (early, settings) = (Early::NoPairs, Settings::default());
        come_of(RunPlan { seed: 1, size: RANKS, patience, early, acts, settings, verdict }).unwrap()
    };
    let saves = Act::Compute { each: Duration::ZERO, longer: Some((0, long)) };
    assert!(!ends(saves, Verdict::AllFine));
    assert!(ends(Act::Idle { rank: 2, time: long }, Verdict::Stalls { rank: 2 }));
}

/// A job that all ranks end in order, with the patience that jobs have by default.
fn ends_well(early: Early, acts: Vec<Act>, faults: Vec<(Duration, Fault)>) {
    let settings = Settings { faults, ..Settings::default() };
    let (patience, verdict) = (Patience::default(), Verdict::AllFine);
    come_of(RunPlan { seed: 1, size: RANKS, patience, early, acts, settings, verdict }).unwrap();
}

/// Rank 0 reads a large folder before the start, another rank is slow to load its part, or the thread that works is
/// stopped: what all exchange over the control plane next waits for it.
#[test]
fn what_ranks_tell_each_other_waits_for_one_that_reads_for_minutes() {
    for seconds in [59, 61, 65, 601] {
        let time = Duration::from_secs(seconds);
        for rank in 0..RANKS {
            let exchange = Act::Share { bytes: 100 };
            let reads = Act::Compute { each: Duration::ZERO, longer: Some((rank, time)) };
            ends_well(Early::NoPairs, vec![reads, exchange.clone()], vec![]);
            let starts = Act::Compute { each: Duration::from_secs(1), longer: None };
            let stopped = (Duration::from_millis(500), Fault::PauseMain { rank, time });
            ends_well(Early::NoPairs, vec![starts, exchange], vec![stopped]);
        }
    }
}

/// All have done their work, and one needs minutes to leave: to free its memory, or to write a last file.
#[test]
fn the_end_of_a_run_waits_for_a_rank_that_takes_minutes_to_finish() {
    for seconds in [61, 601] {
        for rank in 0..RANKS {
            let late = Act::Linger { rank, time: Duration::from_secs(seconds) };
            ends_well(Early::AllPairs, vec![Act::Share { bytes: 100 }, late], vec![]);
        }
    }
}

/// A machine that swaps stands still for almost as long as patience allows, at any moment of joining, or when two ranks
/// connect because they talk for the first time: the others go on trying to connect to it.
#[test]
fn two_ranks_are_connected_though_one_stands_still_for_most_of_its_patience() {
    let time = SILENCE - Duration::from_secs(5);
    let paused = |at: Duration, rank: usize| vec![(at, Fault::Pause { rank, time })];
    for rank in 0..RANKS {
        for moment in 0..24 {
            ends_well(Early::AllPairs, vec![], paused(Duration::from_micros(250) * moment, rank));
        }
        let alone = Act::Compute { each: Duration::from_secs(1), longer: None };
        let talk = Act::AllReduce { bytes: 5000, ring: true };
        ends_well(Early::NoPairs, vec![alone, talk], paused(Duration::from_millis(999), rank));
    }
}

/// Planted bugs are found in every phase: heartbeats that a busy thread does not send, and patience as short as it once
/// was.
#[test]
fn stalls_find_a_rank_that_is_not_heard_while_it_works_and_one_that_is_given_up_too_soon() {
    for (phase, at, rank) in PHASES.into_iter().filter(|(phase, ..)| *phase != "start") {
        for seconds in [61, 601] {
            let pause = Fault::PauseMain { rank, time: Duration::from_secs(seconds) };
            let mut silent = plan(at, Early::AllPairs, pause, Verdict::AllFine);
            silent.settings.bug = Some(Bug::ForgetsBeats);
            let found = come_of(silent);
            assert!(found.is_err(), "rank {rank} is silent for {seconds} s at {phase} and that is not found");
        }
        let pause = Fault::Pause { rank, time: Duration::from_secs(5) };
        let mut hasty = plan(at, Early::AllPairs, pause, Verdict::AllFine);
        hasty.patience.silence = Duration::from_secs(4);
        assert!(
            come_of(hasty).is_err(),
            "rank {rank} is given up after 4 s at {phase} and that is not found"
        );
    }
}
