//! A process that writes checkpoints is killed for real, fifty times, at moments that the folder shows. Whatever it leaves under a
//! real name must be whole, and what it reported as written must be there.
//!
//! The process is this binary itself, run again with `RUN` set: then its second test is the writer.

#![allow(clippy::unwrap_used)]

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use polyreme_dtype::DType;
use polyreme_train::checkpoint::{
    CheckpointError, GivenPath, Loaded, MODEL_FILE, Shard, Snapshot, Store, TensorAt, latest_whole, list,
    load, resolve,
};
use polyreme_train::weights::read_weights;

const KILLS: u64 = 50;
const RUN: &str = "CHECKPOINT_KILL_RUN";
/// The arena's length, in two files: two megabytes a checkpoint.
const N: usize = 250_000;

#[test]
fn fifty_kills_leave_whole_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path();
    let mut random = Random(0x5eed);
    let (mut newest, mut n_leftovers) = (0, 0);
    for kill in 0..KILLS {
        let (mut child, lines) = start(run);
        wait_for(&mut child, run, newest + 1 + random.below(3), MOMENTS[random.below(6) as usize]);
        child.kill().unwrap();
        child.wait().unwrap();
        n_leftovers += u64::from(has_leftovers(run));
        // What it had said by then is still in the pipe.
        newest = check(run, newest.max(reported(lines)), kill);
    }
    eprintln!("{KILLS} kills, {n_leftovers} of them inside a write or a delete, up to step {newest}");
    assert!(n_leftovers > 0, "no kill hit a write: the test shows nothing");
}

/// All that is there is whole; gives the newest step.
fn check(run: &Path, at_least: u64, kill: u64) -> u64 {
    let entries = list(run).unwrap();
    for entry in &entries {
        check_content(&load(&entry.path).unwrap_or_else(|e| panic!("after kill {kill}: {e}")), kill);
    }
    if let Ok(GivenPath::Checkpoint(best)) = resolve(&run.join("best")) {
        check_content(&load(&best).unwrap_or_else(|e| panic!("after kill {kill}: best: {e}")), kill);
    }
    let (newest, skipped) = latest_whole(run).unwrap();
    assert!(skipped.is_empty(), "after kill {kill}");
    assert!(newest.manifest.step >= at_least, "after kill {kill}: step {at_least} is gone");
    // Two to keep, the best, and one that was not pruned yet.
    assert!(entries.len() <= 4, "after kill {kill}: {} checkpoints", entries.len());
    newest.manifest.step
}

fn check_content(loaded: &Loaded, kill: u64) {
    let step = loaded.manifest.step;
    assert_eq!(loaded.manifest.progress["step"], step, "after kill {kill}");
    for (file, sign) in [(MODEL_FILE, 1.0), ("optimizer.safetensors", -1.0)] {
        let weights = read_weights(&loaded.path.join(file)).unwrap();
        let [weight] = &weights[..] else { panic!("after kill {kill}: {file}") };
        assert_eq!(weight.data.len(), N);
        let wrong = (0..N).find(|&i| weight.data[i] != sign * number(step, i));
        assert_eq!(wrong, None, "after kill {kill}: {file} of step {step}");
    }
}

fn number(step: u64, i: usize) -> f32 {
    (step as usize * 31 + i) as f32
}

fn has_leftovers(run: &Path) -> bool {
    let mut names = std::fs::read_dir(run.join("checkpoints")).unwrap().map(|e| e.unwrap().file_name());
    names.any(|name| [".writing-", ".old-"].iter().any(|part| name.to_string_lossy().starts_with(part)))
}

fn start(run: &Path) -> (Child, BufReader<ChildStdout>) {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "writer", "--nocapture", "--test-threads=1"])
        .env(RUN, run)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    (child, lines)
}

/// What the writer may be doing when it is killed, as the folder shows it: a name's beginning, and a file that it has.
const MOMENTS: [(&str, &str); 6] = [
    (".writing-", ""),
    (".writing-", MODEL_FILE),
    (".writing-", "optimizer.safetensors"),
    (".writing-", "manifest.json"),
    ("step-", "manifest.json"),
    (".old-", ""),
];

/// Waits until the writer has saved `step`, and then for the moment; or, since a moment may be too short to be seen, for a
/// few steps more.
fn wait_for(child: &mut Child, run: &Path, step: u64, (begin, file): (&str, &str)) {
    let root = run.join("checkpoints");
    let began = Instant::now();
    loop {
        let names: Vec<String> = std::fs::read_dir(&root)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        let saved = |name: &String| name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok());
        let newest = names.iter().filter_map(saved).max().unwrap_or(0);
        let is_moment = |name: &String| name.starts_with(begin) && root.join(name).join(file).exists();
        if newest > step + 5 || newest >= step && names.iter().any(is_moment) {
            return;
        }
        assert!(child.try_wait().unwrap().is_none(), "the writer ended by itself");
        assert!(began.elapsed() < Duration::from_secs(120), "step {step} was not written in two minutes");
        std::thread::yield_now();
    }
}

/// The newest step that the writer reported as written. A report may be cut off.
fn reported(lines: BufReader<ChildStdout>) -> u64 {
    let text = lines.lines().map_while(Result::ok);
    let step = |line: String| {
        line.trim().split_once("written ").and_then(|(_, step)| step.strip_suffix('.')?.parse().ok())
    };
    text.filter_map(step).max().unwrap_or(0)
}

/// In the process to be killed: resumes, saves that step again, and goes on for ever. Otherwise nothing.
#[test]
fn writer() {
    let Some(run) = env::var_os(RUN) else { return };
    let run = Path::new(&run);
    let mut store = Store::open(run, 2, Some("val_accuracy".into())).unwrap();
    let mut step = match latest_whole(run) {
        Ok((loaded, _)) => loaded.manifest.step,
        Err(CheckpointError::Missing { .. }) => 1,
        Err(e) => panic!("{e}"),
    };
    let layout = [TensorAt { name: "weight".into(), dims: vec![N], start: 0 }];
    loop {
        let mut buffers = store.take_buffers().into_iter();
        let shards = [(MODEL_FILE, 1.0), ("optimizer.safetensors", -1.0)].map(|(file, sign)| {
            let mut data = buffers.next().unwrap_or_default();
            data.clear();
            data.extend((0..N).map(|i| sign * number(step, i)));
            Shard::copy(file, layout.clone().into(), &data, Vec::new())
        });
        let snapshot = Snapshot {
            step,
            epoch: 0,
            batches: step,
            shards: shards.into(),
            progress: serde_json::json!({ "step": step }),
            metrics: vec![("val_accuracy".into(), (step % 7) as f64)],
            job: String::new(),
        };
        store.save(snapshot).unwrap();
        for written in store.take_written() {
            // Not `println!`: the test harness may hold it back.
            let mut out = std::io::stdout().lock();
            writeln!(out, "written {}.", written.step).unwrap();
            out.flush().unwrap();
        }
        step += 1;
    }
}

/// Marsaglia's xorshift: a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}
