//! Timelines of real runs through the binary: `train --trace`, and `inspect --timeline` of what it wrote.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::binary::{folder, json, polyreme};
use crate::ranks::JOB;

/// Five steps and an evaluation of a network that can be cut into eight.
const DEEP: &str = r#"
[model]
kind = "mlp"
hidden = [16, 24, 64, 32, 16, 24, 16]
[data]
kind = "synthetic"
samples = 300
shape = [16]
classes = 4
validation = 0.2
[train]
batch = 48
epochs = 1
"#;

fn events(file: &Path) -> Vec<Value> {
    let trace: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

/// What a rank did, in the order of time: outer spans before inner ones.
fn work(events: &[Value], rank: usize) -> Vec<&Value> {
    let mut work: Vec<&Value> =
        events.iter().filter(|e| e["pid"] == rank && e["ph"] == "X" && e["tid"] == 0).collect();
    let key = |e: &Value| (e["ts"].as_f64().unwrap(), -e["dur"].as_f64().unwrap());
    work.sort_by(|a, b| key(a).partial_cmp(&key(b)).unwrap());
    work
}

/// Checks that spans lie inside of each other or apart, and returns how deep each is.
fn depths(work: &[&Value]) -> Vec<usize> {
    // Times are rounded to nanoseconds.
    const SLACK: f64 = 0.002;
    let mut open: Vec<f64> = Vec::new();
    let mut depths = Vec::new();
    for event in work {
        let (start, us) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        while open.last().is_some_and(|end| *end <= start + SLACK) {
            open.pop();
        }
        assert!(open.last().is_none_or(|end| start + us <= end + SLACK), "{event} leaves its span");
        depths.push(open.len());
        open.push(start + us);
    }
    depths
}

/// What a run with several stages must have recorded.
fn check(events: &[Value], ranks: usize, stages: usize, tensor: usize, microbatches: u64) {
    for rank in 0..ranks {
        let stage = rank / tensor % stages;
        let name = events.iter().find(|e| e["pid"] == rank && e["name"] == "process_name").unwrap();
        let name = name["args"]["name"].as_str().unwrap();
        assert!(name.starts_with(&format!("rank {rank}: stage {stage}")), "{name}");
        let work = work(events, rank);
        for (event, depth) in work.iter().zip(depths(&work)) {
            let want = match event["cat"].as_str().unwrap() {
                "step" | "evaluation" => 0,
                "node" => 2,
                _ => 1,
            };
            assert_eq!(depth, want, "{event}");
        }
        assert!(work.iter().any(|e| e["cat"] == "evaluation"), "rank {rank} evaluates");
        let steps: Vec<u64> =
            work.iter().filter(|e| e["cat"] == "step").map(|e| e["args"]["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, (1..=5).collect::<Vec<_>>());
        for step in steps {
            let of = |cat: &str| {
                work.iter().filter(|e| e["cat"] == cat && e["args"]["step"] == step).collect::<Vec<_>>()
            };
            for cat in ["forward", "weight-grad", "load"] {
                let seen: BTreeSet<u64> =
                    of(cat).iter().map(|e| e["args"]["microbatch"].as_u64().unwrap()).collect();
                assert_eq!(seen, (0..microbatches).collect(), "{cat} of step {step} on rank {rank}");
            }
            let waits: BTreeSet<&str> = of("wait").iter().map(|e| e["name"].as_str().unwrap()).collect();
            let mut from = vec![stage.wrapping_sub(1), stage + 1];
            from.retain(|s| *s < stages);
            for from in from {
                let wait = format!("receive from stage {from}");
                assert!(waits.contains(wait.as_str()), "{wait} on rank {rank} in {waits:?}");
            }
            if tensor > 1 {
                assert!(waits.iter().any(|w| w.ends_with("over tensor")), "{waits:?}");
            }
            assert!(!of("update").is_empty());
        }
    }
    // Every message that arrived has one that was sent, on another rank, and earlier.
    let ends = |ph: &str| {
        let of = events.iter().filter(|e| e["ph"] == ph);
        of.map(|e| (e["id"].as_u64().unwrap(), e)).collect::<BTreeMap<u64, &Value>>()
    };
    let (sent, arrived) = (ends("s"), ends("f"));
    assert!(arrived.len() as u64 >= 5 * microbatches, "{}", arrived.len());
    assert_eq!(sent.keys().collect::<Vec<_>>(), arrived.keys().collect::<Vec<_>>());
    for (id, from) in sent {
        assert_ne!(from["pid"], arrived[&id]["pid"]);
    }
    // What is under way while a rank computes begins and ends.
    let under_way = |ph: &str| events.iter().filter(|e| e["ph"] == ph && e["cat"] == "exchange").count();
    assert!(under_way("b") > 0 && under_way("b") == under_way("e"));
}

#[test]
fn a_timeline_shows_stages_microbatches_and_waiting() {
    for (parallel, flags, [ranks, stages, tensor], microbatches) in [
        ("stage = 2\nmicrobatches = 4\nschedule = \"1f1b\"", &[][..], [2, 2, 1], 4),
        ("stage = 4\nmicrobatches = 8\nschedule = \"zb-h1\"", &[], [4, 4, 1], 8),
        ("stage = 4\nmicrobatches = 4\nschedule = \"zb-v\"", &[], [4, 4, 1], 4),
        ("stage = 2\ntensor = 2\nmicrobatches = 4", &["--processes", "4"], [4, 2, 2], 4),
    ] {
        let job = format!("{DEEP}[parallel]\nthreads = 1\n{parallel}\n");
        let folder = folder(&job);
        let args =
            [&["train", "job.toml", "--output", "run", "--trace", "run/trace.json"][..], flags].concat();
        let out = polyreme(folder.path(), &args);
        assert!(out.status.success(), "{parallel}: {}", String::from_utf8_lossy(&out.stderr));
        let file = folder.path().join("run/trace.json");
        check(&events(&file), ranks, stages, tensor, microbatches);
        let drawn = &json(folder.path(), &["inspect", "run", "--timeline", "step.svg", "--json"])[0];
        let idle = drawn["steps"][0]["idle"].as_f64().unwrap();
        assert!(idle > 0.0 && idle < 1.0, "{drawn}");
        let picture = fs::read_to_string(folder.path().join("step.svg")).unwrap();
        for stage in 0..stages {
            assert!(picture.contains(&format!(">stage {stage}")), "{picture}");
        }
        assert!(picture.contains(&format!("{stages} stages · ")) && picture.contains("Measured, step "));
    }
}

#[test]
fn a_timeline_has_every_rank() {
    // So many parameters that each rank has some to update.
    let folder = folder(&JOB.replace("outputs = 32", "outputs = 512"));
    for (flags, ranks) in [(["--ranks", "2"], 2), (["--processes", "3"], 3)] {
        let args =
            [&["train", "job.toml", "--overwrite", "--output", "run", "--trace", "trace.json"][..], &flags]
                .concat();
        let out = polyreme(folder.path(), &args);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let events = events(&folder.path().join("trace.json"));
        for rank in 0..ranks {
            for kind in ["step", "forward", "input-grad", "weight-grad", "node", "update", "exchange", "wait"]
            {
                let of = |e: &Value| e["pid"] == rank && e["cat"] == kind;
                assert!(events.iter().any(of), "{kind} of rank {rank}");
            }
        }
        let drawn =
            &json(folder.path(), &["inspect", "trace.json", "--timeline", "a.svg", "--json", "--step", "3"])
                [0];
        assert_eq!(drawn["steps"][0]["step"], 3);
    }
    let said = |args: &[&str], code: i32| {
        let out = polyreme(folder.path(), args);
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(code), "{args:?}: {text}");
        text
    };
    let args = ["inspect", "trace.json", "--timeline", "b.svg", "--beside", "trace.json"];
    assert!(polyreme(folder.path(), &args).status.success());
    let picture = fs::read_to_string(folder.path().join("b.svg")).unwrap();
    assert_eq!(picture.matches("Measured, step ").count(), 2);
    let draw = |path, more: &[&'static str], code| {
        said(&[&["inspect", path, "--timeline", "c.svg"], more].concat(), code)
    };
    assert!(draw("trace.json", &["--step", "900"], 2).contains("step 900 is not in it: it has steps 1 to "));
    assert!(
        draw("run", &[], 2).contains("there is no trace.json in it; train with `--trace run/trace.json`")
    );
    assert!(draw("run/metrics.jsonl", &[], 2).contains("not a timeline: "));
    assert!(draw("nothing.json", &[], 1).contains("cannot be read"));
    assert!(said(&["inspect", "run", "--step", "3"], 2).contains("--timeline"));
    assert!(said(&["inspect", "job.toml", "--hosts", "3"], 2).contains("--timeline FILE.svg"));
    assert!(!folder.path().join("c.svg").exists());
}

#[test]
fn a_job_file_is_drawn_by_simulating_it() {
    const CLUSTER: &str = "[[hosts]]\ncount = 4\ncores = 2\nmemory_gib = 8\ngflops = 50\ncore_gbs = 10\n";
    let mesh = "[parallel]\ndata = 2\nstage = 4\nmicrobatches = 8\nschedule = \"1f1b\"\nthreads = 1\n";
    let folder = folder(&format!("{DEEP}{mesh}"));
    fs::write(folder.path().join("cluster.toml"), CLUSTER).unwrap();
    let open =
        mesh.replace("stage = 4", "stage = \"auto\"").replace("schedule = \"1f1b\"", "tensor = \"auto\"");
    fs::write(folder.path().join("open.toml"), format!("{DEEP}{open}")).unwrap();
    let picture = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let args = ["job.toml", "--timeline", "a.svg", "--cluster", "cluster.toml", "--json"];
    let drawn = &json(folder.path(), &[&["inspect"][..], &args].concat())[0];
    assert!(drawn["steps"][0]["step_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{drawn}");
    let a = picture("a.svg");
    // Eight rows, each with its passes of all microbatches.
    for stage in 0..4 {
        assert_eq!(a.matches(&format!(">stage {stage}</text>")).count(), 2, "{a}");
    }
    assert!(a.contains("1f1b · 4 stages · 2 data ranks · 8 microbatches") && a.contains("Simulated, step "));
    for microbatch in 0..8 {
        assert_eq!(
            a.matches(&format!("forward of microbatch {microbatch}:")).count(),
            8,
            "microbatch {microbatch}"
        );
    }
    // Keys that are open are searched; a second one goes below.
    let args = ["open.toml", "--timeline", "b.svg", "--cluster", "cluster.toml", "--beside", "job.toml"];
    assert!(polyreme(folder.path(), &[&["inspect"][..], &args].concat()).status.success());
    assert_eq!(picture("b.svg").matches("Simulated, step ").count(), 2);
    let refused =
        polyreme(folder.path(), &["inspect", "job.toml", "--timeline", "c.svg", "--cluster", "none.toml"]);
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn measured_steps_are_recorded_after_they_were_timed() {
    let folder = folder(DEEP);
    let bench = ["bench", "step", "--job-file", "job.toml", "--steps", "1", "--trace", "t.json"];
    let mesh = ["--stage", "2", "--microbatches", "4", "--schedule", "zb-h1", "--threads", "1"];
    let out = polyreme(folder.path(), &[&bench[..], &mesh].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let args = ["inspect", "t.json", "--timeline", "t.svg", "--json"];
    let drawn = &json(folder.path(), &args)[0];
    assert!(drawn["steps"][0]["step_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{drawn}");
    let events = events(&folder.path().join("t.json"));
    for rank in 0..2 {
        assert_eq!(work(&events, rank).iter().filter(|e| e["cat"] == "step").count(), 5);
    }
    let refused = polyreme(folder.path(), &bench);
    assert_eq!(refused.status.code(), Some(2), "one rank has no ranks to show");
}
