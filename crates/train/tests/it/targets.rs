//! Runs whose targets are numbers, or labels that each hold or not: on ranks, gone on with, chosen and stopped by their
//! metrics.

use std::sync::Arc;

use polyreme_data::{Dataset, Features, InMemory, Spec, Target};
use polyreme_train::event::Ending;
use polyreme_train::run::{Given, Prepared, Progress};
use polyreme_train::sets::Sets;
use polyreme_train::{TrainError, checkpoint};

use crate::ranks::{agree, same_bits};
use crate::runs::{Outcome, job, run};

const WIDTH: usize = 3;
const LOSSES: [&str; 4] = ["mse", "mae", "huber", "bce"];

/// A job with 153 samples to train on: every epoch ends with a step of 5, of which some ranks have none.
fn lines(loss: &str, more: &str) -> String {
    format!(
        "[model]\nkind = \"mlp\"\nhidden = [24, 17]\n[data]\nkind = \"given\"\n\
         [train]\nloss = \"{loss}\"\nsteps = 50\nbatch = 37\nevaluate_every = 20\n{more}\
         [output]\ntensorboard = false\n"
    )
}

/// Values without order that are the same everywhere, in -1..1.
fn scattered(i: usize) -> f32 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Two numbers, of very different sizes, or three labels.
fn set(loss: &str, n: usize, from: usize) -> Arc<dyn Dataset> {
    let x: Vec<f32> = (0..n * WIDTH).map(|i| scattered(from + i)).collect();
    let (target, y): (_, Vec<f32>) = match loss {
        "bce" => {
            let holds = |x: &[f32]| [x[0] > 0.1, x[0] + x[1] > 0.0, x[2] * x[1] > 0.0].map(u8::from);
            let y = x.chunks(WIDTH).flat_map(holds).map(f32::from).collect();
            (Target::Labels { n: 3, names: Vec::new() }, y)
        }
        _ => {
            let numbers = |x: &[f32]| [1e4 + 50.0 * (x[0] - x[1] * x[2]), 0.01 * (x[2] - 2.0 * x[0])];
            let y = x.chunks(WIDTH).flat_map(numbers).collect();
            (Target::Numbers { n: 2, names: Vec::new() }, y)
        }
    };
    let spec = Spec { features: Features::Row { width: WIDTH }, target };
    Arc::new(InMemory::with_values(spec, x, y).unwrap())
}

fn given(loss: &str) -> Given {
    let (validation, test) = (Some(set(loss, 17, 5000)), Some(set(loss, 41, 9000)));
    let sets = Sets { validation, test, ..Sets::new(set(loss, 153, 0)) };
    Given { sets: Some(sets), ..Given::default() }
}

fn train(loss: &str, lines: &str, ranks: usize) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    run(&job(lines), given(loss), ranks, &folder.path().join("run"), None).unwrap()
}

fn of<'a>(outcome: &'a Outcome, metric: &'a str) -> impl Iterator<Item = f64> + 'a {
    outcome.watcher.metrics.iter().filter(move |(name, _)| name == metric).map(|(_, value)| *value)
}

#[test]
fn losses_and_metrics_do_not_depend_on_the_number_of_ranks() {
    for loss in LOSSES {
        let one = train(loss, &lines(loss, ""), 1);
        let names = one.watcher.metrics.iter().map(|(name, _)| name.as_str());
        let measured: Vec<&str> = names.filter_map(|name| name.strip_prefix("test_")).collect();
        assert_eq!(measured, if loss == "bce" { ["loss", "f1", "accuracy"] } else { ["loss", "r2", "mae"] });
        for (ranks, parallel) in [(2, ""), (3, "balance = [3, 1, 2]\n"), (8, "")] {
            let lines = format!("{}[parallel]\n{parallel}", lines(loss, ""));
            agree(&one, &train(loss, &lines, ranks), &format!("{loss} on {ranks} ranks"));
        }
        // In microbatches too.
        let cut = lines(loss, "accumulate = 3\n").replace("batch = 37", "batch = 36");
        agree(&train(loss, &cut, 1), &train(loss, &cut, 4), loss);
    }
}

#[test]
fn reproducible_runs_are_the_same_bits_and_so_are_their_metrics() {
    for loss in LOSSES {
        let lines = lines(loss, "mixup = 0.2\nema = 0.9\n").replace("batch = 37", "batch = 32")
            + "[parallel]\nreproducible = true\n";
        let one = train(loss, &lines, 1);
        assert!(of(&one, "test_loss").count() == 1);
        for ranks in [2, 3, 8] {
            let many = train(loss, &lines, ranks);
            assert_eq!(one.watcher.losses, many.watcher.losses, "{loss} on {ranks} ranks");
            same_bits(&one, &many, &format!("{loss} on {ranks} ranks"));
        }
    }
}

#[test]
fn a_run_that_goes_on_has_the_same_bits_and_the_normalisation_of_its_start() {
    for loss in LOSSES {
        let lines = lines(loss, "");
        for ranks in [1, 3] {
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            let whole = run(&job(&lines), given(loss), ranks, &at("whole"), None).unwrap();
            let half = run(&job(&lines), given(loss), ranks, &at("cut"), Some(23)).unwrap();
            let saved = Progress::of(&checkpoint::latest_whole(&at("cut")).unwrap().0).unwrap();
            let stats = saved.preparation.target_stats();
            assert_eq!(stats.is_some(), loss != "bce");
            if let Some(stats) = stats {
                assert!((stats.mean[0] - 1e4).abs() < 10.0 && stats.std[1] < 0.1, "{stats:?}");
            }
            let mut rest = run(&job(&lines), given(loss), ranks, &at("cut"), None).unwrap();
            assert_eq!(rest.watcher.losses[..], whole.watcher.losses[24..], "{loss} on {ranks} ranks");
            rest.watcher.metrics.splice(0..0, half.watcher.metrics);
            same_bits(&whole, &rest, &format!("{loss} on {ranks} ranks"));
        }
    }
}

/// Metrics that get better by getting larger, and one that gets better by getting smaller.
#[test]
fn the_best_model_and_an_early_stop_know_which_way_is_better() {
    for (loss, metric, larger) in [
        ("mse", "val_r2", true),
        ("mae", "val_mae", false),
        ("huber", "val_r2", true),
        ("bce", "val_f1", true),
    ] {
        let stop = |min_delta: f64| {
            format!("early_stop = {{ metric = \"{metric}\", patience = 2, min_delta = {min_delta} }}\n")
        };
        let with = |more: &str| {
            lines(loss, more).replace("steps = 50", "steps = 240") + &format!("best = \"{metric}\"\n")
        };
        // It learns, so that a stop would take the way for the wrong one.
        let learning = train(loss, &with(&stop(0.0).replace("patience = 2", "patience = 6")), 2);
        let seen: Vec<f64> = of(&learning, metric).collect();
        assert_eq!((learning.summary.ending, seen.len()), (Ending::Finished, 12), "{metric}: {seen:?}");
        let better = |a: f64, b: f64| if larger { a > b } else { a < b };
        assert!(better(seen[11], seen[0]), "{metric}: {seen:?}");
        let best = (0..12).reduce(|a, b| if better(seen[b], seen[a]) { b } else { a }).unwrap();
        assert_eq!(learning.summary.model_step, 20 * (best as u64 + 1), "{metric}: {seen:?}");
        // No step is as large as is asked for.
        let stopped = train(loss, &with(&stop(1e6)), 2);
        assert_eq!(
            (stopped.summary.ending, of(&stopped, metric).count()),
            (Ending::EarlyStop, 3),
            "{metric}"
        );
    }
}

#[test]
fn a_loss_of_other_labels_is_refused() {
    for (loss, data, parts) in [
        ("mse", "bce", ["train.loss is \"mse\"", "3 labels of 0 or 1", "\"bce\" for labels"]),
        ("bce", "mse", ["train.loss is \"bce\"", "2 numbers to predict", "\"mse\""]),
        ("cross_entropy", "mse", ["train.loss is \"cross_entropy\"", "2 numbers to predict", "\"mse\""]),
    ] {
        let error = match Prepared::new(job(&lines(loss, "")), given(data), 1) {
            Ok(_) => panic!("{loss} was taken for labels of {data}"),
            Err(error) => error,
        };
        assert!(matches!(error, TrainError::LossMisfit { .. }), "{error}");
        let said = error.to_string();
        parts.iter().for_each(|part| assert!(said.contains(part), "{said} lacks {part}"));
    }
}
