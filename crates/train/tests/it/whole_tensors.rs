//! Optimizers that look at whole tensors, on meshes whose ranks have parts of them, against one rank.

use std::path::Path;

use polyreme_train::run::Given;

use crate::mesh::{MeshCase, agree, cases, lines, with_optimizer};
use crate::runs::{Outcome, job, run};

const OPTIMIZERS: [&str; 2] = [
    "{ kind = \"lamb\", lr = 2e-3, weight_decay = 0.01 }",
    "{ kind = \"adafactor\", lr = 5e-3, weight_decay = 0.01 }",
];

fn train(
    case: &MeshCase,
    optimizer: &str,
    parallel: &str,
    ranks: usize,
    stop: Option<u64>,
    folder: &Path,
) -> Outcome {
    let parallel = format!("{parallel}microbatches = 2\nsync_batch_norm = true\n");
    let mut job = job(&with_optimizer(&lines(case, &parallel, "clip = 1.0\n"), optimizer));
    job.parallel.ranks = Some(ranks);
    let given = Given { sets: case.given.clone(), ..Given::default() };
    run(&job, given, ranks, folder, stop).unwrap_or_else(|e| panic!("{}, {parallel}: {e}", case.name))
}

/// Each network on each of these meshes: their lines and their ranks.
fn on_meshes(names: &[&str], meshes: &[(&str, usize)]) {
    let folder = tempfile::tempdir().unwrap();
    for case in cases(folder.path()).iter().filter(|case| names.contains(&case.name)) {
        for (k, optimizer) in OPTIMIZERS.iter().enumerate() {
            let at = |mesh: &str| folder.path().join(format!("{}-{k}-{mesh}", case.name));
            let one = train(case, optimizer, "", 1, None, &at("one"));
            for (i, (parallel, ranks)) in meshes.iter().enumerate() {
                let many = train(case, optimizer, parallel, *ranks, None, &at(&i.to_string()));
                agree(&one, &many, &format!("{}, {optimizer}, {parallel}", case.name));
            }
        }
    }
}

#[test]
fn parts_of_matrices_have_the_steps_of_one_rank() {
    on_meshes(
        &["mlp", "gpt"],
        &[("tensor = 2\n", 2), ("tensor = 4\n", 4), ("data = 2\ntensor = 2\nstage = 2\n", 8)],
    );
}

#[test]
fn shards_of_weights_have_the_steps_of_one_rank() {
    on_meshes(
        &["mlp", "cnn", "gpt"],
        &[
            ("data = 2\nshard_weights = true\n", 2),
            ("data = 2\ntensor = 2\nshard_weights = true\n", 4),
            ("data = 2\nstage = 2\nshard_weights = true\n", 4),
        ],
    );
}

#[test]
fn convolutions_and_recurrent_layers_too() {
    on_meshes(&["cnn", "lstm", "encoder"], &[("tensor = 2\n", 2), ("data = 2\ntensor = 2\n", 4)]);
}

/// States of rows and columns are in checkpoints as on one rank, whatever the mesh.
#[test]
fn checkpoints_of_means_know_nothing_of_meshes() {
    let folder = tempfile::tempdir().unwrap();
    let meshes = [
        ("tensor = 2\n", 2),
        ("data = 2\nshard_weights = true\n", 2),
        ("", 1),
        ("data = 2\ntensor = 2\nshard_weights = true\n", 4),
        ("stage = 2\ntensor = 2\n", 4),
        ("data = 2\n", 2),
    ];
    for case in cases(folder.path()).iter().filter(|case| ["cnn", "gpt"].contains(&case.name)) {
        for (k, optimizer) in OPTIMIZERS.iter().enumerate() {
            let at = |what: &str| folder.path().join(format!("{}-{k}-{what}", case.name));
            let mut one = train(case, optimizer, "", 1, None, &at("one"));
            let mut losses = Vec::new();
            let mut last = None;
            for (i, (parallel, ranks)) in meshes.iter().enumerate() {
                let stop = (i + 1 < meshes.len()).then_some(3 * (i as u64 + 1));
                let outcome = train(case, optimizer, parallel, *ranks, stop, &at("moved"));
                losses.extend(outcome.watcher.losses.clone());
                last = Some(outcome);
            }
            let mut last = last.unwrap();
            // Scores of evaluations before the last part are not its own.
            one.watcher.metrics.drain(..one.watcher.metrics.len() - last.watcher.metrics.len());
            last.watcher.losses = losses;
            agree(&one, &last, &format!("{}, {optimizer}", case.name));
        }
    }
}
