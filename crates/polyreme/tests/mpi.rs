//! Ranks that OpenMPI's and MPICH's `mpirun` start, with MPI's own collectives, against one rank.
//!
//! Both have to be installed, so `cargo test` alone leaves this out, and `.ci/run` names it together with a release build:
//!
//! ```text
//! apt-get install openmpi-bin mpich
//! cargo build --release
//! POLYREME_BINARY=$PWD/target/release/polyreme cargo test --workspace --test mpi
//! ```
//!
//! `POLYREME_MPIRUN` names one more `mpirun` of MPICH's kind, for example of a version with the standard's ABI.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const STEPS: usize = 50;

/// A program that starts ranks, with what it takes to start more of them than there are cores, as root.
#[derive(Clone)]
struct Mpirun {
    program: String,
    flags: &'static [&'static str],
    /// The library of the other family.
    wrong_library: &'static str,
}

fn launchers() -> Vec<Mpirun> {
    let flags: &[&str] = &["--allow-run-as-root", "--oversubscribe"];
    let openmpi = Mpirun { program: "mpirun.openmpi".into(), flags, wrong_library: "libmpich.so.12" };
    let mpich = |program: String| Mpirun { program, flags: &[], wrong_library: "libmpi.so.40" };
    let mut all = vec![openmpi, mpich("mpirun.mpich".into())];
    all.extend(std::env::var("POLYREME_MPIRUN").ok().map(mpich));
    all
}

fn binary() -> String {
    std::env::var("POLYREME_BINARY").unwrap_or_else(|_| env!("CARGO_BIN_EXE_polyreme").into())
}

/// Training digits for [`STEPS`] steps: `ranks` of them under a launcher, or one rank without it. Strictly: Winograd's algorithm rounds
/// by the place of a pixel in its tile, so which of two equal sums a max pool takes depends on how a batch is cut.
fn command(folder: &TempDir, name: &str, ranks: Option<(&Mpirun, usize)>, more: &[&str]) -> Command {
    let mut command = match ranks {
        None => Command::new(binary()),
        Some((launcher, ranks)) => {
            let mut command = Command::new(&launcher.program);
            command.args(launcher.flags).args(["-n", &ranks.to_string(), &binary()]);
            command
        }
    };
    command.args(["train", "examples/digits.toml", "--threads", "1", "--json"]);
    command.args(["--set", &format!("train.steps={STEPS}"), "--set", "train.log_every=1"]);
    command.args(["--set", "train.precision=f32-strict"]);
    command.arg("--output").arg(folder.path().join(name)).args(more);
    if ranks.is_none() {
        command.args(["--ranks", "1"]);
    }
    command.current_dir(root());
    command
}

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// Runs it and returns its output.
fn train(folder: &TempDir, name: &str, ranks: Option<(&Mpirun, usize)>, more: &[&str]) -> String {
    let out = output(&mut command(folder, name, ranks, more));
    assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{:?}: {error}", command.get_program()))
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
    let rows = launchers().into_iter().flat_map(|l| [1, 2, 3, 4, 8].map(|ranks| (l.clone(), ranks)));
    for (k, (launcher, ranks)) in rows.enumerate() {
        let name = format!("mpi{k}");
        let said = train(&folder, &name, Some((&launcher, ranks)), &[]);
        assert_eq!(said.matches("\"event\":\"started\"").count(), 1, "one rank speaks: {said}");
        assert!(ranks == 1 || said.contains("\"transport\":\"mpi\""), "{said}");
        let many = losses(&folder, &name);
        assert_eq!(many.len(), STEPS, "{ranks} ranks");
        let program = &launcher.program;
        let mut far = 0.0f64;
        for (step, (a, b)) in one.iter().zip(&many).enumerate() {
            far = far.max((a - b).abs() / a.abs().max(1.0));
            assert!(
                (a - b).abs() <= 1e-6 * a.abs().max(1.0),
                "{program}, {ranks} ranks, step {step}: {b} and not {a}"
            );
        }
        println!("{ranks} ranks under {program}: losses off by {far:.1e} at most");
    }
}

/// Parameter servers: beside two ranks, and on a rank of its own. Two gradients have one sum, so the losses are those of two ranks that sum over MPI; asynchronously
/// a worker that is alone has those of one rank.
#[test]
fn servers_under_mpirun_have_the_losses_of_ranks_without() {
    let folder = tempfile::tempdir().unwrap();
    train(&folder, "one", None, &[]);
    let one = losses(&folder, "one");
    for (k, launcher) in launchers().into_iter().enumerate() {
        let program = &launcher.program;
        let run = |name: &str, ranks: usize, sets: &[&str]| {
            let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
            let name = format!("{name}{k}");
            let said = train(&folder, &name, Some((&launcher, ranks)), &sets);
            let end: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
            (losses(&folder, &name), end)
        };
        let (reduced, _) = run("reduced", 2, &["parallel.sync=allreduce"]);
        assert_eq!(reduced.len(), STEPS);
        let beside = ["parallel.sync=ps", "parallel.servers=2", "parallel.bucket_mib=0.05"];
        assert_eq!(run("beside", 2, &beside).0, reduced, "{program}");
        let apart = ["parallel.sync=ps", "parallel.servers.ranks=1"];
        assert_eq!(run("apart", 3, &apart).0, reduced, "{program}");
        let (alone, end) = run("alone", 2, &["parallel.sync=ps-async", "parallel.servers.ranks=1"]);
        assert_eq!(alone, one, "{program}");
        assert_eq!((&end["ledger"]["exact"], &end["staleness_max"]), (&true.into(), &0.into()), "{end}");
        let (_, end) = run("async", 4, &["parallel.sync=ps-async", "parallel.servers.ranks=2"]);
        assert_eq!((&end["ledger"]["exact"], &end["steps"]), (&true.into(), &STEPS.into()), "{end}");
    }
}

/// Sharded gradients, in small buckets and several microbatches.
#[test]
fn sharded_gradients_under_mpirun_give_the_losses_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    train(&folder, "one", None, &[]);
    let sharded = ["parallel.shard_gradients=true", "parallel.bucket_mib=0.001", "train.accumulate=4"];
    let sharded: Vec<_> = sharded.into_iter().flat_map(|set| ["--set", set]).collect();
    for (k, launcher) in launchers().into_iter().enumerate() {
        let name = format!("mpi{k}");
        train(&folder, &name, Some((&launcher, 3)), &sharded);
        let (one, many) = (losses(&folder, "one"), losses(&folder, &name));
        assert_eq!((one.len(), many.len()), (STEPS, STEPS));
        for (step, (a, b)) in one.iter().zip(&many).enumerate() {
            let program = &launcher.program;
            assert!((a - b).abs() <= 1e-6 * a.abs().max(1.0), "{program}, step {step}: {b} and not {a}");
        }
    }
}

/// A model that is split: matrices over two ranks, layers over two.
#[test]
fn a_split_model_under_mpirun_has_the_losses_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    train(&folder, "one", None, &["--set", "train.accumulate=4"]);
    let mesh = ["parallel.tensor=2", "parallel.stage=2", "parallel.microbatches=4"];
    let mesh: Vec<_> = mesh.into_iter().flat_map(|set| ["--set", set]).collect();
    for (k, launcher) in launchers().into_iter().enumerate() {
        let name = format!("mpi{k}");
        train(&folder, &name, Some((&launcher, 4)), &mesh);
        let (one, many) = (losses(&folder, "one"), losses(&folder, &name));
        assert_eq!((one.len(), many.len()), (STEPS, STEPS));
        let program = &launcher.program;
        for (step, (a, b)) in one.iter().zip(&many).enumerate() {
            assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{program}, step {step}: {b} and not {a}");
        }
        let far = one.iter().zip(&many).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("tensor 2 x stage 2 under {program}: losses off by {far:.1e} at most");
    }
}

/// Rank 0 plans for all: which ranks there are is MPI's word, and how they are arranged is its.
#[test]
fn ranks_under_mpirun_train_what_rank_0_planned() {
    let folder = tempfile::tempdir().unwrap();
    train(&folder, "one", None, &[]);
    let open = ["parallel.tensor=auto", "parallel.stage=auto", "parallel.schedule=auto"];
    let open: Vec<_> = open.into_iter().flat_map(|set| ["--set", set]).collect();
    for (k, launcher) in launchers().into_iter().enumerate() {
        let name = format!("mpi{k}");
        let out = output(&mut command(&folder, &name, Some((&launcher, 2)), &open));
        let said = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "{said}");
        assert_eq!(said.matches("planned: ").count(), 1, "one rank plans: {said}");
        let (one, many) = (losses(&folder, "one"), losses(&folder, &name));
        assert_eq!((one.len(), many.len()), (STEPS, STEPS));
        for (step, (a, b)) in one.iter().zip(&many).enumerate() {
            let program = &launcher.program;
            assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{program}, step {step}: {b} and not {a}");
        }
    }
}

/// The same for a model in use: four ranks have it together, and rank 0 prints its scores.
#[test]
fn a_trained_model_under_mpirun_has_the_scores_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    train(&folder, "one", None, &[]);
    let scores = |launcher: Option<&Mpirun>| -> Value {
        let mut command = Command::new(launcher.map_or_else(binary, |l| l.program.clone()));
        if let Some(launcher) = launcher {
            command.args(launcher.flags).args(["-n", "4", &binary()]);
        }
        command.arg("eval").arg(folder.path().join("one")).args(["--json", "--threads", "1"]);
        if launcher.is_some() {
            command.args(["--set", "parallel.tensor=2", "--set", "parallel.stage=2"]);
        }
        let out = output(command.current_dir(root()));
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice::<Value>(&out.stdout).unwrap()["metrics"].clone()
    };
    let one = scores(None);
    for launcher in launchers() {
        let many = scores(Some(&launcher));
        for (name, a) in one.as_object().unwrap() {
            let (a, b) = (a.as_f64().unwrap(), many[name].as_f64().unwrap());
            assert!((a - b).abs() <= 1e-5 * a.abs(), "{}: {name} is {b} and not {a}", launcher.program);
        }
    }
}

#[test]
fn reproducible_weights_under_mpirun_are_those_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let reproducible = ["--set", "parallel.reproducible=true"];
    train(&folder, "one", None, &reproducible);
    let weights = |name: &str| fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    let rows = launchers().into_iter().flat_map(|l| [2, 4].map(|ranks| (l.clone(), ranks)));
    for (k, (launcher, ranks)) in rows.enumerate() {
        let name = format!("mpi{k}");
        train(&folder, &name, Some((&launcher, ranks)), &reproducible);
        assert!(weights(&name) == weights("one"), "{ranks} ranks under {}: the same bits", launcher.program);
    }
}

/// A library that does not find the launcher's ranks starts a world of one, which must not train.
#[test]
fn the_library_of_another_launcher_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for launcher in launchers() {
        let library = launcher.wrong_library;
        let mut command = command(&folder, "wrong", Some((&launcher, 2)), &[]);
        let out = output(command.env("POLYREME_MPI", library));
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success(), "{}: {said}", launcher.program);
        for word in [library, "says rank 0 of 1", "as rank 1 of 2", "POLYREME_MPI"] {
            assert!(said.contains(word), "{}: no {word:?} in {said}", launcher.program);
        }
        assert!(!folder.path().join("wrong").exists(), "nothing was written");
    }
}
