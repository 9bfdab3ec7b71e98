use proptest::prelude::*;

use super::*;
use crate::pace::{RankShare, StepCut};

/// The samples of one rank's part of a step, as the loader would read them.
fn read(order: Order, pace: Pace, part: &RankShare, step: u64) -> Tally {
    let mut tally = Tally::default();
    let epoch = pace.epoch(step);
    for range in part.microbatches(step) {
        let samples = order.of_epoch(epoch).walk(pace.start(step) + range.offset).take(range.len);
        samples.for_each(|idx| tally.note(epoch, idx as u64));
    }
    tally
}

/// A run of so many steps: how often each step was committed.
fn ledger(
    order: Order,
    batch: usize,
    cut: &StepCut,
    steps: u64,
    times: impl Fn(u64) -> usize,
) -> SampleLedger {
    let pace = Pace { samples: order.epoch_len(), batch };
    let parts: Vec<_> = (0..cut.ranks()).map(|rank| RankShare::new(pace, cut, rank)).collect();
    let mut ledger = SampleLedger::default();
    ledger.follow(0, order, batch);
    for step in 0..steps {
        let whole =
            parts.iter().map(|part| read(order, pace, part, step)).fold(Tally::default(), |a, b| a + b);
        (0..times(step)).for_each(|_| ledger.commit(pace.epoch(step), whole, false));
    }
    ledger
}

fn order(len: usize, mode: Mode, fraction: f64) -> Order {
    Order { len, seed: 7, epoch: 0, mode, fraction }
}

proptest! {
    #[test]
    fn any_split_gives_one_digest_and_any_slip_is_found(
        len in 1_usize..150, batch in 1_usize..60, steps in 1_u64..30, ranks in 1_usize..5, accumulate in 1_usize..4,
        mode in prop_oneof![Just(Mode::InOrder), Just(Mode::Sample), Just(Mode::Block(8)), Just(Mode::Parts(5))],
        fraction in prop_oneof![Just(1.0), 0.1..1.0_f64], slip: u64,
    ) {
        let order = order(len, mode, fraction);
        let one = ledger(order, batch, &StepCut::alone(), steps, |_| 1);
        let cut = StepCut { weights: (1..=ranks).map(|w| w as f64).collect(), accumulate, ..StepCut::alone() };
        let many = ledger(order, batch, &cut, steps, |_| 1);
        prop_assert_eq!(&one, &many);
        let report = one.report(steps);
        prop_assert_eq!(report.exact, Some(true), "{}", report.words);
        let slip = slip % steps;
        for times in [0, 2, 3] {
            let other = ledger(order, batch, &cut, steps, |step| if step == slip { times } else { 1 });
            let report = other.report(steps);
            prop_assert_eq!(report.exact, Some(false), "step {} counted {} times: {}", slip, times, report.words);
        }
        // One more step than the run says it made, and one less.
        prop_assert_eq!(one.report(steps + 1).exact, Some(false));
        prop_assert_eq!(one.report(steps - 1).exact, Some(false));
        let text = serde_json::to_string(&one).unwrap();
        prop_assert_eq!(serde_json::from_str::<SampleLedger>(&text).unwrap(), one);
    }
}

#[test]
fn what_is_said_of_it() {
    let says = |len, batch, fraction, steps, want: &str| {
        let ledger = ledger(order(len, Mode::Sample, fraction), batch, &StepCut::alone(), steps, |_| 1);
        assert_eq!(ledger.report(steps).words, want);
    };
    says(100, 30, 1.0, 8, "each of 100 samples counted once in each of 2 epochs");
    says(100, 30, 1.0, 4, "each of 100 samples counted once in 1 epoch");
    says(100, 30, 1.0, 5, "each of 100 samples counted once in 1 epoch, and 30 of them in the next");
    says(
        100,
        30,
        1.0,
        11,
        "each of 100 samples counted once in each of 2 epochs, and 90 of them in the next",
    );
    says(100, 30, 1.0, 3, "90 of 100 samples counted once");
    says(100, 30, 0.5, 4, "100 samples counted, 50 of 100 in each epoch, each as often as the order says");
    let slip = |times: usize| {
        let of = |step| if step == 5 { times } else { 1 };
        ledger(order(100, Mode::Sample, 1.0), 30, &StepCut::alone(), 8, of).report(8).words
    };
    assert_eq!(slip(0), "epoch 2: 70 samples were counted instead of 100; some were left out");
    assert_eq!(slip(2), "epoch 2: 130 samples were counted instead of 100; some were counted twice");
    // Step 5 in the place of step 6.
    let of = |step| [1, 1, 1, 1, 1, 2, 0, 1][step as usize];
    let words = ledger(order(100, Mode::Sample, 1.0), 30, &StepCut::alone(), 8, of).report(8).words;
    assert_eq!(words, "epoch 2: 100 samples were counted, but some twice and others not at all");
}

#[test]
fn an_order_that_changes_is_followed() {
    let (first, second) = (order(100, Mode::Sample, 1.0), order(100, Mode::Block(9), 1.0));
    let mut run = ledger(first, 20, &StepCut::alone(), 7, |_| 1);
    // The same again, as every process that goes on says it.
    run.follow(7, first, 20);
    assert_eq!(run.report(7).exact, Some(true));
    run.follow(7, second, 10);
    let pace = Pace { samples: 100, batch: 10 };
    let part = RankShare::new(pace, &StepCut::alone(), 0);
    for step in 7..12 {
        run.commit(pace.epoch(step), read(second, pace, &part, step), step == 8);
    }
    let report = run.report(12);
    let want = "190 samples counted, each as often as the order says; the batch or the data changed at step 7; 10 of them in steps \
                that overflowed and changed nothing";
    assert_eq!((report.exact, report.words.as_str(), report.skipped), (Some(true), want, 10));
}

#[test]
fn many_epochs_are_bounded_and_still_checked() {
    let epochs = 3 * ENTRIES_MAX as u64;
    let order = order(3, Mode::Sample, 1.0);
    let run = |times: &dyn Fn(u64) -> usize| ledger(order, 3, &StepCut::alone(), epochs, times);
    let right = run(&|_| 1);
    assert_eq!(right.epochs.len(), ENTRIES_MAX);
    assert_eq!((right.report(epochs).exact, right.report(epochs).epochs), (Some(true), epochs));
    let wrong = run(&|step| usize::from(step != 4)).report(epochs).words;
    assert!(wrong.starts_with("no sample of epoch 5") || wrong.contains("left out"), "{wrong}");
}

#[test]
fn a_ledger_that_makes_no_sense_is_wrong_and_not_worked_off() {
    let text = |len: u64, batch: u64| {
        format!(
            r#"{{"epochs": [], "orders": [{{"step": 0, "len": {len}, "seed": 1, "mode": "sample", "fraction": 1.0, "batch": {batch}}}], "skipped": 0}}"#
        )
    };
    let report =
        |len, batch, steps| serde_json::from_str::<SampleLedger>(&text(len, batch)).unwrap().report(steps);
    assert_eq!(report(0, 1, 10).exact, Some(false));
    assert_eq!(report(10, 0, 10).exact, Some(false));
    assert_eq!(report(1 << 60, 1 << 50, 1 << 10).exact, None);
    assert_eq!(report(3, 1, u64::MAX).exact, None);
    assert_eq!(report(100, 10, 10).exact, Some(false));
}
