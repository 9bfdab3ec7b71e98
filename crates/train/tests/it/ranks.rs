//! Ranks against one rank: the same losses, whatever is in the job; reproducible runs the same bits.

use polyreme_train::event::Ending;
use polyreme_train::run::Given;

use crate::runs::{Outcome, job, run};

const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [24, 17]\n";
const NORMS: &str = r#"
[model]
layers = [
    { kind = "conv", outputs = 6, kernel = 3, padding = 1 },
    "batch_norm",
    "relu",
    { kind = "max_pool", kernel = 2 },
    "flatten",
    { kind = "dropout", p = 0.2 },
    "linear",
]
"#;
const ROWS: &str = "[data]\nkind = \"synthetic\"\nsamples = 170\nclasses = 5\nnoise = 0.6\n";
const IMAGES: &str =
    "[data]\nkind = \"synthetic\"\nsamples = 150\nshape = [2, 6, 6]\nclasses = 4\nnoise = 0.8\n";
const TRAIN: &str = "[train]\nsteps = 50\nbatch = 37\nevaluate_every = 20\n";
const OUTPUT: &str = "[output]\ntensorboard = false\n";

fn train(lines: &str, ranks: usize) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    run(&job(lines), Given::default(), ranks, &folder.path().join("run"), None).unwrap()
}

/// Losses of all steps and the metrics at the end agree with one rank's.
#[track_caller]
fn check(lines: &str, ranks: &[usize]) {
    check_with(lines, "", ranks);
}

/// The same, where the ranks' job has more lines.
#[track_caller]
fn check_with(lines: &str, more: &str, ranks: &[usize]) {
    let one = train(lines, 1);
    let lines = &format!("{lines}{more}");
    for &ranks in ranks {
        agree(&one, &train(lines, ranks), &format!("{ranks} ranks\n{lines}"));
    }
}

/// Losses, metrics and weights of two runs of 50 steps differ by rounding alone.
#[track_caller]
pub(crate) fn agree(one: &Outcome, many: &Outcome, what: &str) {
    assert_eq!((one.watcher.losses.len(), many.summary.ending), (50, Ending::Finished));
    for (step, (a, b)) in one.watcher.losses.iter().zip(&many.watcher.losses).enumerate() {
        assert!((a - b).abs() <= 1e-5 * a.abs(), "step {step}: {b} and not {a}; {what}");
    }
    assert_eq!(one.watcher.metrics.len(), many.watcher.metrics.len());
    for ((name, a), (_, b)) in one.watcher.metrics.iter().zip(&many.watcher.metrics) {
        assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{name}: {b} and not {a}; {what}");
    }
    for ((name, a), (_, b)) in one.weights.iter().zip(&many.weights) {
        let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 2e-3, "{name}: {far}; {what}");
    }
}

#[test]
fn losses_do_not_depend_on_the_number_of_ranks() {
    // Every epoch of 153 samples ends with a step of 5: some ranks have none of it.
    check(&format!("{MLP}{ROWS}{TRAIN}{OUTPUT}"), &[2, 3, 4, 8]);
}

#[test]
fn every_optimizer_works_on_ranks() {
    for optimizer in ["sgd", "adam", "adamw", "lamb", "lion", "adafactor"] {
        check(&format!("{MLP}{ROWS}{TRAIN}optimizer = \"{optimizer}\"\nclip = 0.5\n{OUTPUT}"), &[2, 4]);
    }
    check(&format!("{MLP}{ROWS}{TRAIN}optimizer = {{ kind = \"sgd\", momentum = 0 }}\n{OUTPUT}"), &[3]);
}

#[test]
fn microbatches_weights_and_averages_work_on_ranks() {
    let train =
        "[train]\nsteps = 50\nbatch = 36\nevaluate_every = 20\naccumulate = 3\nema = 0.9\nclip = 1.0\n";
    check(
        &format!("{MLP}{ROWS}class_weights = \"balanced\"\n{train}label_smoothing = 0.1\n{OUTPUT}"),
        &[2, 3, 8],
    );
    // Weights by hand; and nothing sharded.
    let lines = format!("{MLP}{ROWS}{train}{OUTPUT}");
    check_with(&lines, "[parallel]\nbalance = [3, 1, 2]\n", &[3]);
    check_with(&lines, "[parallel]\nshard_optimizer = false\nbucket_mib = 0.001\n", &[4]);
    check_with(&lines, "[parallel]\nbalance = \"auto\"\n", &[2]);
}

#[test]
fn statistics_of_all_ranks_are_those_of_one() {
    let train = "[train]\nsteps = 50\nbatch = 36\nevaluate_every = 20\naccumulate = 2\n";
    // 135 samples: the last step of an epoch has 27.
    // A bias before a norm has no gradient but rounding, which Adam makes as large as any other.
    let norms = NORMS.replace("padding = 1 }", "padding = 1, bias = false }");
    let lines = format!("{norms}{IMAGES}{train}{OUTPUT}");
    check_with(&lines.replace("accumulate = 2\n", ""), "[parallel]\nsync_batch_norm = true\n", &[2, 3]);
    // With microbatches, statistics are those of a microbatch of each rank.
    let many = self::train(&format!("{lines}[parallel]\nsync_batch_norm = true\n"), 3);
    assert_eq!(many.summary.ending, Ending::Finished);
    assert!(many.watcher.losses[49] < 0.7 * many.watcher.losses[0], "{:?}", many.watcher.losses);
}

pub(crate) fn same_bits(a: &Outcome, b: &Outcome, what: &str) {
    assert_eq!(a.watcher.metrics, b.watcher.metrics, "{what}");
    assert_eq!(a.weights.len(), b.weights.len());
    for ((name, a), (_, b)) in a.weights.iter().zip(&b.weights) {
        let differ = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differ, None, "{what}: {name}");
    }
}

#[test]
fn reproducible_runs_are_the_same_bits() {
    let train = "[train]\nsteps = 30\nbatch = 32\nevaluate_every = 10\nclip = 1.0\nmixup = 0.2\nema = 0.9\n";
    let lines = |train: &str| format!("{NORMS}{IMAGES}{train}{OUTPUT}[parallel]\nreproducible = true\n");
    let with = |optimizer: &str| lines(&format!("{train}optimizer = \"{optimizer}\"\n"));
    for lines in [lines(train), with("lamb"), with("lion"), with("adafactor")] {
        let one = self::train(&lines, 1);
        assert!(one.watcher.metrics.iter().any(|(name, _)| name == "test_accuracy"));
        for ranks in [2, 3, 4, 8] {
            let many = self::train(&lines, ranks);
            assert_eq!(one.watcher.losses, many.watcher.losses, "{ranks} ranks");
            same_bits(&one, &many, &format!("{ranks} ranks"));
        }
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let train = "[train]\nsteps = 30\nbatch = 32\nevaluate_every = 10\nema = 0.9\n";
    let lines = format!("{NORMS}{IMAGES}{train}{OUTPUT}[parallel]\nreproducible = true\n");
    let whole = self::train(&lines, 1);
    for (first, second) in [(4, 3), (1, 8), (8, 1)] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("run");
        let job = job(&lines);
        let half = run(&job, Given::default(), first, &folder, Some(13)).unwrap();
        assert_eq!((half.summary.ending, half.summary.steps), (Ending::Interrupted, 14));
        let mut rest = run(&job, Given::default(), second, &folder, None).unwrap();
        assert_eq!(rest.watcher.losses[..], whole.watcher.losses[14..], "{first} and then {second} ranks");
        rest.watcher.metrics.splice(0..0, half.watcher.metrics);
        same_bits(&whole, &rest, &format!("{first} and then {second} ranks"));
    }
    // The usual mode goes on too, to the last few bits.
    let lines = format!("{MLP}{ROWS}{TRAIN}{OUTPUT}");
    let whole = self::train(&lines, 1);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("run");
    run(&job(&lines), Given::default(), 4, &folder, Some(20)).unwrap();
    let rest = run(&job(&lines), Given::default(), 3, &folder, None).unwrap();
    for (a, b) in whole.watcher.losses[21..].iter().zip(&rest.watcher.losses) {
        assert!((a - b).abs() <= 1e-5 * a.abs(), "{b} and not {a}");
    }
}

/// Everything that a step can be made of, with gradients that only their owners keep.
#[test]
fn ranks_may_keep_their_own_gradients_only() {
    // Every epoch of 153 samples ends with a step of 5 or 3: some ranks have none of it. Of 50 samples in microbatches of one,
    // 8 ranks have 7 microbatches or 6.
    let train = "[train]\nsteps = 50\nevaluate_every = 20\nema = 0.9\n";
    let more = "[parallel]\nshard_gradients = true\nbucket_mib = 0.001\n";
    for optimizer in ["sgd", "adam", "adamw"] {
        for extra in ["batch = 37\n", "batch = 37\nclip = 0.5\n", "batch = 50\naccumulate = 10\nclip = 0.5\n"]
        {
            let lines = format!("{MLP}{ROWS}{train}optimizer = \"{optimizer}\"\n{extra}{OUTPUT}");
            check_with(&lines, more, &[1, 2, 3, 4, 8]);
        }
    }
    let lines =
        format!("{MLP}{ROWS}class_weights = \"balanced\"\n{train}batch = 36\naccumulate = 2\n{OUTPUT}");
    check_with(&lines, &format!("{more}balance = [3, 1, 2]\n"), &[3]);
    check_with(&lines, &format!("{more}balance = \"auto\"\n"), &[2]);
    // Statistics of all ranks; a bias before a norm has no gradient but rounding.
    let norms = NORMS.replace("padding = 1 }", "padding = 1, bias = false }");
    let train = "[train]\nsteps = 50\nbatch = 36\nevaluate_every = 20\n";
    let lines = format!("{norms}{IMAGES}{train}{OUTPUT}");
    check_with(&lines, &format!("{more}sync_batch_norm = true\n"), &[2, 3]);
    // Statistics of each rank: the same as where all gradients are kept.
    let lines = format!("{lines}[parallel]\n");
    let (all, own) = (
        self::train(&lines, 3),
        self::train(&format!("{lines}shard_gradients = true\nbucket_mib = 0.001\n"), 3),
    );
    assert_eq!(all.watcher.losses, own.watcher.losses);
    same_bits(&all, &own, "statistics of each rank");
}

#[test]
fn a_run_with_sharded_gradients_goes_on() {
    let lines = format!("{MLP}{ROWS}{TRAIN}{OUTPUT}[parallel]\nshard_gradients = true\nbucket_mib = 0.001\n");
    let whole = self::train(&lines, 4);
    let go_on = |ranks: usize| {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("run");
        run(&job(&lines), Given::default(), 4, &folder, Some(20)).unwrap();
        run(&job(&lines), Given::default(), ranks, &folder, None).unwrap()
    };
    let rest = go_on(4);
    assert_eq!(whole.watcher.losses[21..], rest.watcher.losses, "the same bits with as many ranks");
    for (a, b) in whole.watcher.losses[21..].iter().zip(&go_on(3).watcher.losses) {
        assert!((a - b).abs() <= 1e-5 * a.abs(), "{b} and not {a}");
    }
}
