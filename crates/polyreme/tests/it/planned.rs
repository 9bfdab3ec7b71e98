//! Jobs that leave keys of `[parallel]` to the planner, through the binary: threads and processes, and what is said of it afterwards.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::binary::{folder, json, polyreme};
use crate::ranks::{JOB, losses};

/// Leaves every axis to the planner.
const OPEN: &str = "tensor = \"auto\"\nstage = \"auto\"\nsequence = \"auto\"\nmicrobatches = \"auto\"\nschedule = \"auto\"\n\
                    shard_weights = \"auto\"\nshard_gradients = \"auto\"\n";

/// The job with everything open.
fn open_job() -> String {
    JOB.replace("[parallel]\nthreads = 1\n", &format!("[parallel]\nthreads = 1\n{OPEN}"))
}

/// Ranks of a run along data, tensor, stage and sequence, by the job that it has stored.
fn mesh(run: &Path) -> [usize; 4] {
    let text = fs::read_to_string(run.join("job.toml")).unwrap();
    ["data", "tensor", "stage", "sequence"].map(|axis| {
        let value = text.lines().find_map(|line| line.strip_prefix(&format!("{axis} = ")));
        value.unwrap_or_else(|| panic!("no {axis} in {text}")).parse().unwrap()
    })
}

/// Checks that two runs had the same losses but for rounding.
fn same_losses(one: &Path, other: &Path) {
    let (one, other) = (losses(one), losses(other));
    assert!(one.len() == other.len() && !one.is_empty());
    for (step, (a, b)) in one.iter().zip(&other).enumerate() {
        assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "step {}: {a} and {b}", step + 1);
    }
}

#[test]
fn a_planned_run_is_shown_beside_its_prediction() {
    let folder = folder(&open_job());
    let at = folder.path();
    json(at, &["train", "job.toml", "--output", "run", "--json"]);
    let seen = &json(at, &["inspect", "run", "--json"])[0]["planned"];
    for what in ["step_ms", "memory_mib"] {
        let figure = |key: &str| seen[what][key].as_f64().unwrap_or_else(|| panic!("{what}.{key}: {seen}"));
        let (predicted, measured) = (figure("predicted"), figure("measured"));
        assert!(predicted > 0.0 && measured > 0.0, "{seen}");
        assert!((figure("error") - (predicted / measured - 1.0)).abs() < 1e-9, "{seen}");
    }
    // The plan is the one that ran.
    assert_eq!(seen["mesh"], serde_json::to_value(mesh(&at.join("run"))).unwrap());
    let text = |run: &str| String::from_utf8(polyreme(at, &["inspect", run]).stdout).unwrap();
    let shown = text("run");
    assert!(shown.contains("predicted       measured") && shown.contains(" MiB "), "{shown}");
    // What goes on with other ranks was not planned so.
    let more = format!("parallel.data={}", mesh(&at.join("run"))[0] + 1);
    json(at, &["resume", "run", "--json", "--set", "train.epochs=5", "--set", &more]);
    assert_eq!(json(at, &["inspect", "run", "--json"])[0]["planned"], Value::Null);
    assert!(!text("run").contains("predicted"));
}

#[test]
fn processes_train_what_rank_0_planned() {
    let folder = folder(&open_job());
    let at = folder.path();
    fs::write(at.join("plain.toml"), JOB).unwrap();
    json(at, &["train", "plain.toml", "--output", "one", "--json", "--ranks", "1"]);
    assert_eq!(json(at, &["inspect", "one", "--json"])[0]["planned"], Value::Null, "nothing was planned");
    for (name, flags) in
        [("shm", &["--processes", "2"][..]), ("tcp", &["--processes", "3", "--transport", "tcp"])]
    {
        let args = [&["train", "job.toml", "--output", name][..], flags].concat();
        let out = polyreme(at, &args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{said}");
        assert_eq!(said.matches("planned: ").count(), 1, "one rank plans: {said}");
        let ranks: usize = flags[1].parse().unwrap();
        assert_eq!(mesh(&at.join(name)).iter().product::<usize>(), ranks, "{said}");
        same_losses(&at.join("one"), &at.join(name));
        let seen = &json(at, &["inspect", name, "--json"])[0]["planned"];
        assert!(seen["step_ms"]["error"].is_f64() && seen["memory_mib"]["error"].is_f64(), "{seen}");
    }
    // A check plans for as many, and starts none.
    let check = json(at, &["train", "job.toml", "--check", "--json", "--processes", "2"]);
    assert_eq!(check[0]["ranks"], 2, "{check:?}");
}

#[test]
fn what_cannot_be_planned_is_refused_before_anything_is_written() {
    let job = open_job().replace("tensor = \"auto\"", "tensor = 5");
    let folder = folder(&job);
    let out = polyreme(folder.path(), &["train", "job.toml", "--output", "run", "--processes", "2"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{said}");
    let why = said.contains("no mesh goes together") || said.contains("tensor = 5");
    assert!(why && !folder.path().join("run").exists(), "{said}");
}
