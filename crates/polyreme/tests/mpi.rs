//! Ranks that `mpirun` of this machine starts, with MPI's own collectives, against one rank.
//!
//! The program must have been built with `--features mpi`, which needs `mpicc`. So `cargo test` alone leaves this out,
//! and `.ci/run` names it together with such a build:
//!
//! ```text
//! cargo build --release --features mpi
//! POLYREME_BINARY=$PWD/target/release/polyreme cargo test --workspace --test mpi
//! ```

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

const STEPS: usize = 50;

fn binary() -> String {
    match std::env::var("POLYREME_BINARY") {
        Ok(binary) => binary,
        Err(_) if cfg!(feature = "mpi") => env!("CARGO_BIN_EXE_polyreme").into(),
        Err(_) => panic!("set POLYREME_BINARY to a build with --features mpi, or test with that feature"),
    }
}

/// Trains digits for [`STEPS`] steps: `ranks` of them under mpirun, or one rank without it. What it said.
fn train(folder: &TempDir, name: &str, ranks: Option<usize>, more: &[&str]) -> String {
    let mut command = match ranks {
        None => Command::new(binary()),
        Some(ranks) => {
            let mut command = Command::new("mpirun");
            command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string(), &binary()]);
            command
        }
    };
    command.args(["train", "examples/digits.toml", "--threads", "1", "--json"]);
    command.args(["--set", &format!("train.steps={STEPS}"), "--set", "train.log_every=1"]);
    command.arg("--output").arg(folder.path().join(name)).args(more);
    if ranks.is_none() {
        command.args(["--ranks", "1"]);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let out = command.current_dir(root).output().unwrap();
    assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The losses of a run, by step.
fn losses(folder: &TempDir, name: &str) -> Vec<f64> {
    let text = fs::read_to_string(folder.path().join(name).join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["train_loss"].as_f64();
    text.lines().filter_map(loss).collect()
}

#[test]
fn losses_under_mpirun_are_those_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    train(&folder, "one", None, &[]);
    let one = losses(&folder, "one");
    assert_eq!(one.len(), STEPS);
    for ranks in [1, 2, 3, 4, 8] {
        let name = format!("mpi{ranks}");
        let said = train(&folder, &name, Some(ranks), &[]);
        assert_eq!(said.matches("\"event\":\"started\"").count(), 1, "one rank speaks: {said}");
        assert!(ranks == 1 || said.contains("\"transport\":\"mpi\""), "{said}");
        let many = losses(&folder, &name);
        assert_eq!(many.len(), STEPS, "{ranks} ranks");
        let mut far = 0.0f64;
        for (step, (a, b)) in one.iter().zip(&many).enumerate() {
            far = far.max((a - b).abs() / a.abs().max(1.0));
            assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{ranks} ranks, step {step}: {b} and not {a}");
        }
        println!("{ranks} ranks under mpirun: losses off by {far:.1e} at most");
    }
}

/// Gradients that only their owners keep, in small buckets and several pieces.
#[test]
fn sharded_gradients_under_mpirun_give_the_losses_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    train(&folder, "one", None, &[]);
    let sharded = ["parallel.shard_gradients=true", "parallel.bucket_mib=0.001", "train.accumulate=4"];
    let sharded: Vec<_> = sharded.into_iter().flat_map(|set| ["--set", set]).collect();
    train(&folder, "mpi3", Some(3), &sharded);
    let (one, many) = (losses(&folder, "one"), losses(&folder, "mpi3"));
    assert_eq!((one.len(), many.len()), (STEPS, STEPS));
    for (step, (a, b)) in one.iter().zip(&many).enumerate() {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "step {step}: {b} and not {a}");
    }
}

#[test]
fn reproducible_weights_under_mpirun_are_those_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let reproducible = ["--set", "parallel.reproducible=true"];
    train(&folder, "one", None, &reproducible);
    let weights = |name: &str| fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    for ranks in [2, 4] {
        let name = format!("mpi{ranks}");
        train(&folder, &name, Some(ranks), &reproducible);
        assert!(weights(&name) == weights("one"), "{ranks} ranks: the same bits");
    }
}
