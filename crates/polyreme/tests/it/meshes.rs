//! Models that several ranks have together, through the binary: over every transport, and when a rank dies.

use std::fs;
use std::time::{Duration, Instant};

use polyreme::train::checkpoint;
use rustix::process::Signal;

use crate::binary::{folder, json};
use crate::lost::{REPORT, launched};
use crate::ranks::{JOB, end, endless, living, losses, send};

/// Matrices over two ranks, layers over two, cut where no measurement decides.
const SPLIT: [&str; 8] = [
    "--set",
    "parallel.tensor=2",
    "--set",
    "parallel.stage=2",
    "--set",
    "parallel.microbatches=4",
    "--set",
    "parallel.cuts=[\"2\"]",
];

#[test]
fn a_split_model_trains_the_same_over_every_transport() {
    let folder = folder(JOB);
    let run = |name: &str, flags: &[&str]| {
        let args = [&["train", "job.toml", "--json", "--output", name][..], flags].concat();
        json(folder.path(), &args);
        let run = folder.path().join(name);
        (losses(&run), fs::read(run.join("model.safetensors")).unwrap())
    };
    let (one, _) = run("one", &["--ranks", "1", "--set", "train.accumulate=4"]);
    let (threads, model) = run("threads", &[&["--ranks", "4"], &SPLIT[..]].concat());
    assert_eq!((one.len(), threads.len()), (48, 48));
    for (step, (a, b)) in one.iter().zip(&threads).enumerate() {
        assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "step {step}: {a} and {b}");
    }
    for transport in ["shm", "tcp"] {
        let flags = ["--processes", "4", "--transport", transport];
        let (some, there) = run(transport, &[&flags, &SPLIT[..]].concat());
        assert_eq!(some, threads, "{transport}");
        assert!(there == model, "{transport}: the weights of threads, bit for bit");
    }
}

/// A rank that is gone takes its part of the model with it. The checkpoints have it, and any other ranks go on with them.
#[test]
fn a_killed_rank_of_a_split_model_ends_the_others_and_one_rank_goes_on() {
    let folder = folder(&endless());
    for transport in ["shm", "tcp"] {
        let more = [&SPLIT[..], &["--transport", transport]].concat();
        let (launcher, pids, errors) = launched(folder.path(), 4, transport, &more);
        send(pids[3], Signal::KILL);
        let killed = Instant::now();
        let out = end(launcher, Duration::from_secs(30));
        assert!(killed.elapsed() < REPORT, "{transport}: {:?}", killed.elapsed());
        assert_eq!(out.status.code(), Some(1));
        let said = fs::read_to_string(&errors).unwrap();
        assert!(said.contains("rank 3") && said.contains("is gone") && said.contains("at step"), "{said}");
        assert_eq!(living(&pids), [0; 0]);
        let (loaded, _) = checkpoint::latest_whole(&folder.path().join(transport)).unwrap();
        let steps = format!("train.steps={}", loaded.manifest.step + 20);
        let alone = ["parallel.tensor=1", "parallel.stage=1", "parallel.cuts=[]", &steps];
        let sets = alone.into_iter().flat_map(|set| ["--set", set]);
        let resume = ["resume", transport, "--ranks", "1", "--json"];
        let lines = json(folder.path(), &resume.into_iter().chain(sets).collect::<Vec<_>>());
        assert_eq!(lines.last().unwrap()["steps"], loaded.manifest.step + 20);
    }
}
