//! Ranks of really different speed, through the binary: one is stopped again and again for a moment.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::binary::{command, folder, json};
use crate::ranks::{end, losses, pids, start};

/// Steps of some 10 ms on each rank, so that what slows a rank down is what it computes.
const JOB: &str = r#"
[model]
layers = [
    { kind = "linear", outputs = 1024 },
    "relu",
    { kind = "linear", outputs = 1024 },
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
steps = 65
optimizer = { kind = "sgd", lr = 0.01, momentum = 0.9 }
log_every = 1
[parallel]
threads = 1
balance = "auto"
"#;

/// A process that runs an eighth of the time: much slower than the other one, whatever else the machine does.
struct Held {
    pid: Pid,
}

impl Held {
    /// Holds it down until `other` has ended.
    fn until_end_of(&self, other: &mut Child) {
        while other.try_wait().unwrap().is_none() {
            for (signal, ms) in [(Signal::STOP, 14), (Signal::CONT, 2)] {
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
    Held { pid: Pid::from_raw(pids[1]).unwrap() }.until_end_of(&mut launcher);
    let out = end(launcher, Duration::from_secs(10));
    let said = fs::read_to_string(&errors).unwrap();
    assert!(out.status.success(), "{said}");
    // "step 20: ranks take 96, 32 samples a step from now on, by their speed; that wins 33 %"
    let shares: Vec<(usize, usize)> = said
        .lines()
        .filter_map(|line| line.split_once("ranks take ")?.1.split_once(" samples")?.0.split_once(", "))
        .map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap()))
        .collect();
    println!("shares of 128 samples: {shares:?}");
    let &(fast, slow) = shares.last().unwrap_or_else(|| panic!("nothing was shared out anew: {said}"));
    assert_eq!(fast + slow, 128);
    assert!(3 * slow <= 2 * fast, "{shares:?}: one that runs an eighth of the time is much slower");
    let two = losses(&folder.path().join("two"));
    assert_eq!((one.len(), two.len()), (65, 65));
    let mut far = 0.0f64;
    for (step, (a, b)) in one.iter().zip(&two).enumerate() {
        far = far.max((a - b).abs() / a.abs().max(1.0));
        assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "step {step}: {a} and {b}");
    }
    println!("losses off by {far:.1e} at most");
}
