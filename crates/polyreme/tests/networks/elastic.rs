//! Ranks that come and go on separate hosts: one that is paused is waited for, one whose host vanishes is not.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::hosts::{Hosts, Link, root};

const BINARY: &str = env!("CARGO_BIN_EXE_polyreme");
const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const PATIENCE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(60);

/// A process on a host, which ends with the test.
struct HostProcess(Child);

impl Drop for HostProcess {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl HostProcess {
    fn send(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.0.id() as i32).unwrap(), signal).unwrap();
    }
}

/// What `status` says: generation, ranks that train, the furthest step.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Standing {
    generation: u64,
    ranks: u64,
    step: u64,
}

struct Job<'a> {
    hosts: &'a Hosts,
    folder: &'a Path,
}

impl Job<'_> {
    fn command(&self, host: usize, args: &[&str]) -> Command {
        let mut command = self.hosts.command(host, BINARY);
        command.args(args).current_dir(root()).env("POLYREME_SECRET", SECRET);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// The settings that all ranks need, as flags.
    fn sets(&self) -> Vec<String> {
        let patience = format!("parallel.patience={}", PATIENCE.as_secs());
        let output = format!("output.path={}", self.folder.join("run").display());
        // A rate that does not depend on how many steps there are.
        let rate = "train.schedule={ kind = \"constant\" }";
        let sets = ["parallel.reproducible=true", "parallel.threads=1", "train.epochs=100000", rate];
        let sets = sets.into_iter().chain([patience.as_str(), output.as_str()]);
        sets.flat_map(|set| ["--set".to_string(), set.to_string()]).collect()
    }

    fn start(&self, host: usize, args: &[&str]) -> HostProcess {
        let sets = self.sets();
        let args: Vec<&str> = args.iter().copied().chain(sets.iter().map(String::as_str)).collect();
        HostProcess(self.command(host, &args).spawn().unwrap())
    }

    fn standing(&self, at: &str) -> Option<Standing> {
        let out = self.command(0, &["status", at, "--json"]).stdout(Stdio::piped()).output().unwrap();
        let status: Value = serde_json::from_slice(&out.stdout).ok()?;
        let steps = status["members"].as_array()?.iter().filter_map(|row| row["step"].as_u64());
        let step = steps.max().unwrap_or(0);
        let ranks = if status["trains"] == true { status["ranks"].as_u64()? } else { 0 };
        Some(Standing { generation: status["generation"].as_u64()?, ranks, step })
    }

    /// Waits for this standing; how long it took.
    #[track_caller]
    fn wait(&self, at: &str, what: &str, done: impl Fn(Standing) -> bool) -> (Standing, Duration) {
        let began = Instant::now();
        loop {
            let standing = self.standing(at);
            if let Some(standing) = standing.filter(|standing| done(*standing)) {
                return (standing, began.elapsed());
            }
            assert!(began.elapsed() < LIMIT, "{what}: {standing:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_paused_rank_is_waited_for_and_a_vanished_host_is_not() {
    let _machine = crate::alone();
    let folder = tempfile::tempdir().unwrap();
    let hosts = Hosts::new(4, Link::Mbit(1000));
    let job = Job { hosts: &hosts, folder: folder.path() };
    let at = format!("{}:7777", hosts.address(0));
    let start = ["train", "examples/digits.toml", "--elastic", "--processes", "1", "--listen", &at, "--json"];
    let first = job.start(0, &start);
    job.wait(&at, "it begins", |now| now.ranks == 1 && now.step > 0);
    let join = ["join", &at, "examples/digits.toml", "--json"];
    let mut others: Vec<HostProcess> = (1..4).map(|host| job.start(host, &join)).collect();
    let (all, _) = job.wait(&at, "all join", |now| now.ranks == 4);
    job.wait(&at, "all train", |now| now.step > all.step + 5);

    // A pause that is shorter than patience stalls for its own length, and removes nobody.
    others[0].send(Signal::STOP);
    std::thread::sleep(PATIENCE / 2);
    others[0].send(Signal::CONT);
    let (now, _) = job.wait(&at, "it goes on", |now| now.ranks == 4 && now.step > all.step + 5);
    assert_eq!(now.generation, all.generation, "nobody was removed");

    // A host whose cable is pulled says nothing more.
    hosts.set_cable(3, false);
    let (less, took) = job.wait(&at, "three go on", |then| then.ranks == 3 && then.step > now.step);
    println!("three ranks train {took:.1?} after the cable was pulled");
    assert!(less.generation > now.generation);
    assert!(took >= PATIENCE - Duration::from_secs(1), "{took:?}: it was not silent for long enough");
    // Patience, a second, and two between beats and looks.
    assert!(took < PATIENCE + Duration::from_secs(3), "{took:?}");

    // When the cable is in again, the rank learns that the others went on, and ends; its host can join again.
    hosts.set_cable(3, true);
    let ended = others[2].0.wait().unwrap();
    assert!(!ended.success(), "{ended}");
    others[2] = job.start(3, &join);
    job.wait(&at, "it is back", |now| now.ranks == 4 && now.generation > less.generation);

    // The weights are those of a run in which nothing happened.
    let mut first = first;
    first.send(Signal::INT);
    assert_eq!(first.0.wait().unwrap().code(), Some(130));
    let run = folder.path().join("run");
    let last = fs::read_dir(run.join("checkpoints")).unwrap().map(|e| e.unwrap().file_name());
    let last = last.map(|name| name.into_string().unwrap()).filter(|name| name.starts_with("step-")).max();
    let last = last.unwrap();
    let steps: u64 = last.strip_prefix("step-").unwrap().parse().unwrap();
    let calm = folder.path().join("calm").display().to_string();
    let sets = job.sets();
    let sets = sets.iter().map(String::as_str).filter(|set| !set.contains("epochs") && *set != "--set");
    let steps = format!("train.steps={steps}");
    let mut alone = Command::new(BINARY);
    alone
        .args(["train", "examples/digits.toml", "--ranks", "1", "--json", "--output", &calm])
        .current_dir(root());
    alone.args(sets.chain([steps.as_str()]).flat_map(|set| ["--set", set]));
    let out = alone.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let weights = |run: &str| {
        let file = folder.path().join(run).join("checkpoints").join(&last).join("model.safetensors");
        fs::read(&file).unwrap_or_else(|e| panic!("{file:?}: {e}"))
    };
    assert!(weights("run") == weights("calm"), "after {steps}");
}
