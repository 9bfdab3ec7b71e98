//! Ranks of different speeds, through the binary: one is paused again and again.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::binary::{cannot_run, command, folder, json, polyreme};
use crate::ranks::{end, environment_commands, losses, pids, send, start};

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

/// A control group of processes that may use a part of a core: the kernel's own way to make a machine slow.
struct Quota {
    group: PathBuf,
}

impl Quota {
    const PERIOD_US: u32 = 100_000;

    /// A group beside that of this process, without a limit; or why there can be none.
    fn new() -> Result<Quota, String> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of_cpu = |line: &str| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            controllers.split(',').any(|c| c == "cpu").then(|| path.trim_start_matches('/').to_string())
        };
        let path = own.lines().find_map(of_cpu).ok_or("there is no cgroup v1 controller for cpu")?;
        let parent = Path::new("/sys/fs/cgroup/cpu").join(path);
        let group = parent.join(format!("polyreme-test-{}", std::process::id()));
        let why = |e: std::io::Error| format!("{}: {e}", group.display());
        fs::create_dir(&group).map_err(why)?;
        let quota = Quota { group: group.clone() };
        fs::write(group.join("cpu.cfs_period_us"), Quota::PERIOD_US.to_string()).map_err(why)?;
        Ok(quota)
    }

    /// Moves a process with all its threads into the group.
    fn take(&self, pid: u32) {
        fs::write(self.group.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// From now on its processes have this part of a core together; `None` for all they want.
    fn allow(&self, cores: Option<f64>) {
        let us = cores.map_or(-1, |cores| (cores * f64::from(Quota::PERIOD_US)) as i64);
        fs::write(self.group.join("cpu.cfs_quota_us"), us.to_string()).unwrap();
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        // Processes that have ended leave it a moment later.
        for _ in 0..100 {
            if fs::remove_dir(&self.group).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{} is left", self.group.display());
    }
}

/// Steps of some 50 ms of two cores, all of one length, and as many as are wanted. `bench/quota.py` measures the same job.
const LONG_STEPS: &str = r#"
[model]
layers = [{ kind = "linear", outputs = 1024 }, "relu", { kind = "linear", outputs = 1024 }, "relu", { kind = "linear" }]
[data]
kind = "synthetic"
samples = 8192
shape = [128]
classes = 10
validation = 0
[train]
batch = 1024
steps = 1000000
optimizer = { kind = "sgd", lr = 0.001 }
log_every = 1
[parallel]
threads = 1
[output]
every_epochs = 0
best = "none"
"#;

/// The samples of a step of the second rank each time that shares were changed.
fn second_shares(errors: &Path) -> Vec<usize> {
    let said = fs::read_to_string(errors).unwrap();
    let second = |line: &str| {
        let (_, rest) = line.strip_prefix("step ")?.split_once(": ranks take ")?;
        rest.split_once(" samples")?.0.split(", ").nth(1)?.parse().ok()
    };
    said.lines().filter_map(second).collect()
}

/// Ranks that end with the test, however it ends.
struct Started(Vec<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // One that has ended already is fine.
            drop(rank.kill());
            drop(rank.wait());
        }
    }
}

/// A command on a host of this name.
fn on_host(name: &str, command: &Command) -> Command {
    let mut named = Command::new("unshare");
    named.args(["--uts", "sh", "-c", "hostname \"$0\" && exec \"$@\"", name]);
    named.arg(command.get_program()).args(command.get_args());
    named.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
    if let Some(folder) = command.get_current_dir() {
        named.current_dir(folder);
    }
    named
}

/// A rank on another host is held to a small part of its core, and then no more: nobody has to ask for shares by speed there. How much that
/// wins and how soon depends on what else the machine does, so it is measured by `bench/quota.py` and not here.
#[test]
fn a_slow_host_is_named_and_its_share_goes_down_and_up() {
    let quota = match Quota::new() {
        Ok(quota) => quota,
        Err(why) => return cannot_run(&why),
    };
    let folder = folder(LONG_STEPS);
    let errors = folder.path().join("errors0");
    let hosts = ["here", "there"];
    let commands = environment_commands(folder.path(), &hosts, &[]);
    let begin = |(rank, (command, host)): (usize, (&Command, &str))| {
        start(on_host(host, command), &folder.path().join(format!("errors{rank}")))
    };
    let mut ranks = Started(commands.iter().zip(hosts).enumerate().map(begin).collect());
    quota.take(ranks.0[1].id());
    quota.allow(Some(0.06));
    let said = || fs::read_to_string(&errors).unwrap();
    let mut wait = |what: &str, done: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(90);
        while !done() {
            assert!(ranks.0[0].try_wait().unwrap().is_none(), "it ended: {}", said());
            assert!(Instant::now() < until, "{what} did not come: {}", said());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait("a smaller share", &|| second_shares(&errors).last().is_some_and(|n| *n <= 340));
    wait("its name", &|| said().contains("rank 1 on there takes "));
    quota.allow(None);
    wait("its share again", &|| second_shares(&errors).last().is_some_and(|n| *n >= 400));
    send(ranks.0[0].id() as i32, Signal::TERM);
    for rank in std::mem::take(&mut ranks.0) {
        let out = end(rank, Duration::from_secs(60));
        assert!(!out.status.success(), "it was interrupted: {}", said());
    }
}

/// Somebody else computes on this machine: a run that follows the load sends a thread to rest, and learns the same.
#[test]
fn a_run_that_follows_the_load_gives_up_a_core_and_keeps_its_bits() {
    let folder =
        folder(&LONG_STEPS.replace("steps = 1000000", "steps = 80").replace("threads = 1", "threads = 2"));
    let args = |name: &'static str| ["train", "job.toml", "--ranks", "1", "--output", name];
    let model = |name: &str| fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    let out = polyreme(folder.path(), &args("alone"));
    assert!(out.status.success());
    let mut other = Command::new("sh").args(["-c", "while :; do :; done"]).process_group(0).spawn().unwrap();
    let out =
        polyreme(folder.path(), &[&args("beside")[..], &["--set", "parallel.follow_load=true"]].concat());
    other.kill().unwrap();
    other.wait().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains(": 1 of 2 threads from now on: others use "), "{said}");
    assert!(model("alone") == model("beside"), "weights differ");
}
