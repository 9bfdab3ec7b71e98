//! Ranks of different speeds, through the binary: one is paused again and again.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::binary::{command, folder, json};
use crate::ranks::{end, losses, pids, start};

/// Steps of some milliseconds on each rank, so that computing dominates; and enough steps to show the effect on a busy
/// machine.
const JOB: &str = r#"
[model]
layers = [
    { kind = "linear", outputs = 512 },
    "relu",
    { kind = "linear", outputs = 512 },
    "relu",
    { kind = "linear" },
]
[data]
kind = "synthetic"
samples = 4000
shape = [128]
classes = 10
noise = 2.0
validation = 0.1
[train]
batch = 128
steps = 240
optimizer = { kind = "sgd", lr = 0.01, momentum = 0.9 }
log_every = 1
[parallel]
threads = 1
balance = "auto"
"#;

/// A process that runs for a small part of the time: much slower than the other one, whatever else the machine does.
struct Held {
    pid: Pid,
}

impl Held {
    /// Holds it down until `done`, or until `other` has ended.
    fn until(&self, done: impl Fn() -> bool, other: &mut Child) {
        while other.try_wait().unwrap().is_none() && !done() {
            for (signal, ms) in [(Signal::STOP, 31), (Signal::CONT, 1)] {
                // It may have ended meanwhile.
                let _: Result<(), Errno> = kill_process(self.pid, signal);
                std::thread::sleep(Duration::from_millis(ms));
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _: Result<(), Errno> = kill_process(self.pid, Signal::CONT);
    }
}

#[test]
fn a_rank_that_is_held_down_gets_fewer_samples_and_nothing_else_changes() {
    let folder = folder(JOB);
    json(folder.path(), &["train", "job.toml", "--ranks", "1", "--json", "--output", "one"]);
    let one = losses(&folder.path().join("one"));
    let errors = folder.path().join("errors");
    let args = ["train", "job.toml", "--processes", "2", "--output", "two"];
    let mut launcher = start(command(folder.path(), &args), &errors);
    let pids = pids(&errors, 2, Instant::now() + Duration::from_secs(60));
    // "step 40: ranks take 120, 8 samples a step from now on, by their speed; that wins 44 %"
    let shares = || -> Vec<(usize, usize)> {
        let said = fs::read_to_string(&errors).unwrap();
        let numbers =
            |line: &str| Some(line.split_once("ranks take ")?.1.split_once(" samples")?.0.to_string());
        let pair =
            |text: String| text.split_once(", ").map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap()));
        said.lines().filter_map(numbers).filter_map(pair).collect()
    };
    let held = Held { pid: Pid::from_raw(pids[1]).unwrap() };
    held.until(|| !shares().is_empty(), &mut launcher);
    drop(held);
    let out = end(launcher, Duration::from_secs(120));
    let said = fs::read_to_string(&errors).unwrap();
    assert!(out.status.success(), "{said}");
    let shares = shares();
    println!("shares of 128 samples: {shares:?}");
    let &(fast, slow) = shares.first().unwrap_or_else(|| panic!("nothing was shared out anew: {said}"));
    assert_eq!(fast + slow, 128);
    assert!(3 * slow <= 2 * fast, "{shares:?}: one that hardly runs is much slower");
    let two = losses(&folder.path().join("two"));
    assert_eq!((one.len(), two.len()), (240, 240));
    let mut far = 0.0f64;
    for (step, (a, b)) in one.iter().zip(&two).enumerate() {
        far = far.max((a - b).abs() / a.abs().max(1.0));
        assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "step {step}: {a} and {b}");
    }
    println!("losses off by {far:.1e} at most");
}

/// Logical shards move whole, so that weights have the same bits however they are shared out.
#[test]
fn reproducible_runs_have_the_same_weights_whoever_has_which_shards() {
    let job = crate::ranks::JOB.replace("threads = 1", "threads = 1\nreproducible = true\nshards = 8");
    let folder = folder(&job);
    let run = |name: &str, flags: &[&str]| {
        json(folder.path(), &[&["train", "job.toml", "--json", "--output", name][..], flags].concat());
        let run = folder.path().join(name);
        (losses(&run), fs::read(run.join("model.safetensors")).unwrap())
    };
    let one = run("one", &["--ranks", "1"]);
    for (name, flags) in [
        ("unequal", &["--ranks", "2", "--set", "parallel.balance=[5, 3]"][..]),
        ("idle", &["--ranks", "3", "--set", "parallel.balance=[1, 100, 1]"]),
        ("processes", &["--processes", "2", "--set", "parallel.balance=[1, 7]"]),
        ("auto", &["--ranks", "2", "--set", "parallel.balance=auto"]),
    ] {
        assert!(run(name, flags) == one, "{name} has other weights or losses");
    }
}
