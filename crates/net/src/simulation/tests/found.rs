//! Regressions that schedules found: each fault, at many moments.

use std::time::Duration;

use super::super::{Fault, Settings};
use super::job::{Act, Early, RankEnd};
use super::plan::{RunPlan, Verdict};
use crate::patience::Patience;

const MOMENTS: u64 = 40;

/// A fault at moments of a stretch of time, in a job of this many ranks.
fn plans(
    size: usize,
    acts: &[Act],
    fault: Fault,
    within: [u64; 2],
    verdict: Verdict,
) -> impl Iterator<Item = RunPlan> {
    let [from, to] = within.map(Duration::from_micros);
    (0..MOMENTS).map(move |seed| {
        let at = from + (to - from) * seed as u32 / MOMENTS as u32;
        let settings = Settings {
            lag: Duration::from_millis(80),
            faults: vec![(at, fault.clone())],
            ..Settings::default()
        };
        let patience = Patience { silence: Duration::from_secs(4), ..Patience::default() };
        RunPlan {
            seed,
            size,
            patience,
            early: Early::AllPairs,
            acts: acts.to_vec(),
            settings,
            verdict: verdict.clone(),
        }
    })
}

/// The network holds a rank's first connection back while it proves the secret. It gives that one up and comes again before
/// rank 0 has seen the end of the first: "rank 1 came twice", and the job did not start.
#[test]
fn a_rank_that_the_network_holds_back_while_it_joins_is_not_taken_for_two() {
    let hold = Fault::Hold { ranks: vec![1], time: Duration::from_secs(7) };
    for plan in plans(3, &[], hold, [0, 4000], Verdict::AllFine) {
        let outcome = plan.run();
        let twice = |end: &RankEnd| matches!(end, RankEnd::Alone(e) if e.to_string().contains("came"));
        assert!(outcome.failure.is_none(), "{outcome:?}");
        assert!(!outcome.results.iter().flatten().any(twice), "SEED={}: {:?}", plan.seed, outcome.results);
    }
}

/// Rank 0 refused the others with the reason and closed its connections with something unread in them: the reset overtook
/// the reason, and some ranks blamed rank 0.
#[test]
fn all_ranks_learn_why_rank_0_gives_up_while_they_join() {
    for plan in plans(6, &[], Fault::Kill { rank: 2 }, [1000, 30_000], Verdict::Loses { rank: 2 }) {
        let outcome = plan.run();
        plan.judge(&outcome).unwrap_or_else(|why| panic!("SEED={}: {why}", plan.seed));
    }
}

/// A connection between two ranks broke, and each of the two reported that the other one was gone.
#[test]
fn both_ends_of_a_broken_connection_report_the_same() {
    let acts = vec![Act::AllReduce { bytes: 150_000, ring: false }; 12];
    let cut = Fault::Cut { one: 1, other: 2, nth: 0 };
    for plan in plans(4, &acts, cut, [20_000, 100_000], Verdict::Breaks { ends: [1, 2] }) {
        let outcome = plan.run();
        plan.judge(&outcome).unwrap_or_else(|why| panic!("SEED={}: {why}", plan.seed));
    }
}

/// A rank left though rank 0 had not heard its goodbye yet, because the network held it back. What rank 0 still sent was
/// reset, and the reset overtook the goodbye: a job that was done ended with "rank 1 is gone".
#[test]
fn a_rank_that_is_done_leaves_only_when_rank_0_knows() {
    let hold = Fault::Hold { ranks: vec![0], time: Duration::from_secs(8) };
    let acts = [Act::Share { bytes: 10 }];
    for mut plan in plans(3, &acts, hold, [10_000, 200_000], Verdict::AllFine) {
        plan.patience = Patience::default();
        let outcome = plan.run();
        plan.judge(&outcome).unwrap_or_else(|why| panic!("SEED={}: {why}", plan.seed));
    }
}
