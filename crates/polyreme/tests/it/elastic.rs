//! Ranks that come and go, through the binary: real processes, real kills.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::binary::{command, folder, json, polyreme};
use crate::ranks::{JOB, SECRET, send};

pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// A job whose weights have the same bits on any number of ranks, and that never ends by itself: however busy the machine is, what a
/// test does to it happens while it trains.
pub(crate) fn endless() -> String {
    JOB.replace("epochs = 4", "epochs = 1000000")
        .replace("threads = 1", "threads = 1\nreproducible = true")
        .replace("every_steps = 10", "every_steps = 100")
}

/// Does as many steps on one rank as a run did that was interrupted: weights, moments and ledger must be the same.
#[track_caller]
pub(crate) fn equals_an_undisturbed_run(folder: &Path, summary: &Value) {
    let steps = summary["steps"].as_u64().unwrap();
    let job = endless().replace("epochs = 1000000", &format!("steps = {steps}"));
    fs::write(folder.join("calm.toml"), job).unwrap();
    let calm = json(folder, &["train", "calm.toml", "--ranks", "1", "--json", "--output", "calm"]);
    let calm = calm.into_iter().find(|line| line.get("final_loss").is_some()).unwrap();
    assert_eq!(calm["steps"], summary["steps"]);
    let tensors = |run: &str| {
        let last = folder.join(run).join("checkpoints").join(format!("step-{steps:08}"));
        let files =
            fs::read_dir(&last).unwrap_or_else(|e| panic!("{last:?}: {e}")).map(|f| f.unwrap().path());
        let mut files: Vec<_> = files.filter(|f| f.extension().is_some_and(|e| e == "safetensors")).collect();
        files.sort();
        files
            .into_iter()
            .map(|f| (f.file_name().unwrap().to_owned(), fs::read(f).unwrap()))
            .collect::<Vec<_>>()
    };
    let (calm_tensors, tensors) = (tensors("calm"), tensors("run"));
    assert!(calm_tensors.len() > 1, "weights and moments");
    for ((name, calm), (other, disturbed)) in calm_tensors.iter().zip(&tensors) {
        assert!(name == other && calm == disturbed, "{name:?} differs after {steps} steps");
    }
    assert_eq!(calm_tensors.len(), tensors.len());
    // Ranks that leave one by one write no summary.
    if summary.get("ledger").is_some() {
        assert_eq!(summary["ledger"]["exact"], true, "{summary}");
        assert_eq!(calm["ledger"]["digest"], summary["ledger"]["digest"]);
    }
}

/// A running `train --json`, whose lines are read as they come.
pub(crate) struct Watched {
    pub(crate) child: Child,
    lines: Receiver<Value>,
    seen: Vec<Value>,
}

impl Watched {
    pub(crate) fn start(mut command: Command) -> Watched {
        // What it says on stderr is shown if the test fails.
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let errors = child.stderr.take().unwrap();
        std::thread::spawn(move || {
            BufReader::new(errors).lines().map_while(Result::ok).for_each(|line| println!("{line}"));
        });
        let out = child.stdout.take().unwrap();
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Ok(value) = serde_json::from_str(&line) {
                    drop(tell.send(value));
                }
            }
        });
        Watched { child, lines, seen: Vec::new() }
    }

    /// The next line that is wanted.
    #[track_caller]
    pub(crate) fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + LIMIT;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if wanted(&line) {
                        return line;
                    }
                }
                Err(_) => {
                    drop(self.child.kill());
                    panic!(
                        "it did not come; the last were {:?}",
                        self.seen.iter().rev().take(8).collect::<Vec<_>>()
                    );
                }
            }
        }
    }

    /// The summary of a run that is asked to save and stop.
    #[track_caller]
    pub(crate) fn interrupt(mut self) -> Value {
        send(self.child.id() as i32, Signal::INT);
        let summary = self.until(|line| line.get("final_loss").is_some());
        assert_eq!(summary["ending"], "interrupted");
        assert_eq!(self.child.wait().unwrap().code(), Some(130));
        summary
    }
}

/// A test that fails leaves no ranks running: they end with their launcher, or here if they outlive it.
impl Drop for Watched {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        let placed =
            self.seen.iter().filter(|line| line["event"] == "placed").flat_map(pids).collect::<Vec<_>>();
        if std::thread::panicking() {
            crate::ranks::living(&placed).into_iter().for_each(|pid| send(pid, Signal::KILL));
        }
    }
}

pub(crate) fn is_generation(line: &Value, n: u64) -> bool {
    line["event"] == "membership" && line["generation"].as_u64() >= Some(n)
}

/// The processes of the ranks, by rank, from the table that rank 0 prints.
pub(crate) fn pids(placed: &Value) -> Vec<i32> {
    placed["ranks"].as_array().unwrap().iter().map(|row| row["pid"].as_i64().unwrap() as i32).collect()
}

/// Of three ranks the last is killed, then the first: no step is lost, and weights, moments and ledger are those of a run in which
/// nothing happened. On one host they share memory, if nothing else is said.
#[test]
fn killed_ranks_change_no_bit() {
    let check = |transport: &str, more: &[&str]| {
        let folder = folder(&endless());
        let args = ["train", "job.toml", "--elastic", "--processes", "3", "--json", "--output", "run"];
        let run = Watched::start(command(folder.path(), &[&args, more].concat()));
        kill_two_of_three(&folder, run, transport);
    };
    check("shm", &[]);
    check("tcp", &["--transport", "tcp"]);
}

fn kill_two_of_three(folder: &tempfile::TempDir, mut run: Watched, transport: &str) {
    let placed = run.until(|line| line["event"] == "placed");
    assert!(placed["ranks"].as_array().unwrap().iter().all(|row| row["transport"] == transport), "{placed}");
    let pids = pids(&placed);
    run.until(|line| line["event"] == "checkpoint");
    send(pids[2], Signal::KILL);
    let second = run.until(|line| is_generation(line, 2));
    assert_eq!(second["ranks"], 2);
    run.until(|line| line["event"] == "checkpoint");
    send(pids[0], Signal::KILL);
    let third = run.until(|line| is_generation(line, 3));
    assert_eq!(third["ranks"], 1);
    assert!(third["step"].as_u64() >= second["step"].as_u64(), "{third}");
    run.until(|line| line["event"] == "checkpoint");
    let summary = run.interrupt();
    assert_eq!(summary["ranks_lost"], 2);
    assert!(summary["steps_redone"].as_u64().unwrap() <= 2, "{summary}");
    equals_an_undisturbed_run(folder.path(), &summary);
}

/// Faults from a seed, and ranks that are added: the same again.
#[test]
fn a_run_under_chaos_ends_with_the_weights_of_one_without() {
    let folder = folder(&endless());
    let chaos = "kill=600ms,join=900ms,seed=7";
    let args =
        ["train", "job.toml", "--elastic", "--processes", "3", "--json", "--output", "run", "--chaos", chaos];
    let mut run = Watched::start(command(folder.path(), &args));
    run.until(|line| is_generation(line, 7));
    let summary = run.interrupt();
    assert!(summary["ranks_lost"].as_u64().unwrap() >= 1, "{summary}");
    assert!(summary["ranks_joined"].as_u64().unwrap() >= 1, "{summary}");
    assert!(summary["stall_ms_max"].as_f64() >= summary["stall_ms_p50"].as_f64(), "{summary}");
    let report = fs::read_to_string(folder.path().join("run/report.html")).unwrap();
    let (ranks, loss) = (report.find("<h2>Ranks</h2>"), report.find("<h2>Loss</h2>"));
    assert!(ranks.is_some() && ranks < loss, "the strip stands above the loss");
    equals_an_undisturbed_run(folder.path(), &summary);
    println!("{summary}");
}

/// Ranks in network namespaces, each with a link that can be cut: one that is cut off is lost after patience, although nothing of it has
/// ended.
#[test]
fn ranks_whose_links_are_cut_change_no_bit() {
    let namespace = Command::new("unshare").args(["--net", "--", "ip", "link"]).output();
    if !namespace.is_ok_and(|out| out.status.success()) {
        return crate::binary::cannot_run("network namespaces need root, `unshare` and `ip`");
    }
    let folder = folder(&endless().replace("threads = 1", "threads = 1\npatience = 2"));
    let chaos = "cut=1s:300ms..60s,seed=2";
    let args =
        ["train", "job.toml", "--elastic", "--processes", "3", "--json", "--output", "run", "--chaos", chaos];
    let mut run = Watched::start(command(folder.path(), &args));
    let cut = run.until(|line| line["event"] == "fault");
    assert!(cut["fault"] == "cut" && cut["lasts_s"].as_f64() > Some(2.0), "it is missed: {cut}");
    let second = run.until(|line| is_generation(line, 2));
    assert!(second["ranks"] == 2 && second["why"].as_str().unwrap().contains("silent"), "{second}");
    run.until(|line| line["event"] == "checkpoint");
    let summary = run.interrupt();
    assert_eq!(summary["ranks_lost"], 1);
    equals_an_undisturbed_run(folder.path(), &summary);
}

/// A rank that is asked to end finishes the step and leaves, also the first one: no rank is lost. When all are asked, the last save.
#[test]
fn a_terminated_rank_hands_over_and_leaves() {
    let folder = folder(&endless());
    let args = ["train", "job.toml", "--elastic", "--processes", "3", "--json", "--output", "run"];
    let mut run = Watched::start(command(folder.path(), &args));
    let placed = run.until(|line| line["event"] == "placed");
    let pids = pids(&placed);
    run.until(|line| line["event"] == "checkpoint");
    send(pids[0], Signal::TERM);
    let second = run.until(|line| is_generation(line, 2));
    assert!(second["ranks"] == 2 && second["why"].as_str().unwrap().ends_with("leaves"), "{second}");
    run.until(|line| line["event"] == "checkpoint");
    // It ends by itself, and is no loss.
    let until = Instant::now() + LIMIT;
    while !crate::ranks::living(&pids[..1]).is_empty() {
        assert!(Instant::now() < until, "it stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    let at = crate::ranks::steps_in(&folder.path().join("run"));
    pids[1..].iter().for_each(|pid| send(*pid, Signal::TERM));
    run.until(|line| line["event"] == "waiting");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
    assert!(!run.seen.iter().any(|line| line["event"] == "lost"), "{:?}", run.seen.last());
    let saved = crate::ranks::steps_in(&folder.path().join("run"));
    assert!(saved > at, "the last checkpoint is of step {saved}, as before");
    // It goes on from there, with ranks that come and go.
    let args = ["resume", "run", "--elastic", "--processes", "2", "--json"];
    let mut run = Watched::start(command(folder.path(), &args));
    let first = run.until(|line| is_generation(line, 1));
    assert_eq!((first["step"].as_u64(), &first["ranks"]), (Some(saved), &Value::from(2)));
    run.until(|line| line["event"] == "checkpoint");
    let summary = run.interrupt();
    assert_eq!(summary["ranks_lost"], 0);
    equals_an_undisturbed_run(folder.path(), &summary);
}

/// A process that was started by hand joins; `status` shows it.
#[test]
fn a_process_joins_a_run_that_trains() {
    let folder = folder(&endless());
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let at = port.to_string();
    let with_secret = |args: &[&str]| {
        let mut command = command(folder.path(), args);
        command.env("POLYREME_SECRET", SECRET);
        command
    };
    let mut run = Watched::start(with_secret(&[
        "train",
        "job.toml",
        "--elastic",
        "--processes",
        "1",
        "--listen",
        &at,
        "--json",
        "--output",
        "run",
    ]));
    run.until(|line| is_generation(line, 1));
    // As if it were on another host: memory is shared before it comes, and when it has gone.
    let transport = || {
        let status = with_secret(&["status", &at, "--json"]).output().unwrap();
        serde_json::from_slice::<Value>(&status.stdout).unwrap()["transport"].clone()
    };
    assert_eq!(transport(), "shm");
    let mut join = with_secret(&["join", &at, "job.toml"]);
    let joined = join.env("POLYREME_HOST", "elsewhere").stderr(Stdio::null()).spawn().unwrap();
    let joined = StartedProcess(joined);
    let second = run.until(|line| is_generation(line, 2));
    assert_eq!((&second["ranks"], second["why"].as_str()), (&Value::from(2), Some("a rank joins")));
    assert_eq!(transport(), "tcp");
    // Ranks tell their shares and speeds about once a second.
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let status = with_secret(&["status", &at, "--json"]).output().unwrap();
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
        let status: Value = serde_json::from_slice(&status.stdout).unwrap();
        let members = status["members"].as_array().unwrap();
        assert_eq!(members.len(), 2, "{status}");
        let shares: u64 = members.iter().filter_map(|row| row["samples_per_step"].as_u64()).sum();
        if shares == 48 && members.iter().all(|row| row["samples_per_s"].as_f64() > Some(1.0)) {
            break;
        }
        assert!(Instant::now() < until, "{status}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let text = with_secret(&["status", &at]).output().unwrap();
    assert!(String::from_utf8_lossy(&text.stdout).contains("2 ranks"), "{text:?}");
    // With another secret it is turned away.
    let stranger =
        command(folder.path(), &["status", &at]).env("POLYREME_SECRET", "ab".repeat(32)).output().unwrap();
    assert!(String::from_utf8_lossy(&stranger.stderr).contains("another secret"), "{stranger:?}");
    // One that would train something else is turned away, and the run goes on.
    let other = with_secret(&["join", &at, "job.toml", "--set", "train.optimizer.lr=0.5"]).output().unwrap();
    assert_eq!(other.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&other.stderr).contains("not those of the run's ranks"), "{other:?}");
    drop(joined);
    run.until(|line| is_generation(line, 3));
    assert_eq!(transport(), "shm");
    let summary = run.interrupt();
    assert_eq!((&summary["ranks_joined"], &summary["ranks_lost"]), (&Value::from(1), &Value::from(1)));
    equals_an_undisturbed_run(folder.path(), &summary);
}

/// Ranks that share memory: one joins that the launcher did not start, stops for longer than patience, and is dead before the others form
/// a group without it. A process of another host is refused.
#[test]
fn a_rank_that_shared_memory_is_dead_before_the_others_go_on() {
    let folder = folder(&endless().replace("threads = 1", "threads = 1\npatience = 2\ntransport = \"shm\""));
    let at = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let with_secret = |args: &[&str]| {
        let mut command = command(folder.path(), args);
        command.env("POLYREME_SECRET", SECRET);
        command
    };
    let args =
        ["train", "job.toml", "--elastic", "--processes", "2", "--listen", &at, "--json", "--output", "run"];
    let mut run = Watched::start(with_secret(&args));
    let placed = run.until(|line| line["event"] == "placed");
    run.until(|line| line["event"] == "checkpoint");
    let joins = ["join", &at, "job.toml"];
    let other = with_secret(&joins).env("POLYREME_HOST", "elsewhere").output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(other.status.code() == Some(1) && said.contains("transport = \"auto\""), "{other:?}");
    let mut joined = StartedProcess(with_secret(&joins).stderr(Stdio::null()).spawn().unwrap());
    run.until(|line| is_generation(line, 2) && line["ranks"] == 3);
    run.until(|line| line["event"] == "checkpoint");
    send(joined.0.id() as i32, Signal::STOP);
    let third = run.until(|line| is_generation(line, 3));
    assert!(third["ranks"] == 2 && third["why"].as_str().unwrap().contains("silent"), "{third}");
    assert_eq!(joined.0.try_wait().unwrap().expect("it is dead").signal(), Some(9));
    send(pids(&placed)[0], Signal::KILL);
    run.until(|line| is_generation(line, 4));
    run.until(|line| line["event"] == "checkpoint");
    let summary = run.interrupt();
    assert_eq!((&summary["ranks_joined"], &summary["ranks_lost"]), (&Value::from(1), &Value::from(2)));
    equals_an_undisturbed_run(folder.path(), &summary);
}

/// Below `min` the run saves and waits; a rank that joins lets it go on.
#[test]
fn below_min_it_saves_and_waits() {
    let folder = folder(&endless().replace("threads = 1", "threads = 1\nelastic = { min = 2, max = 4 }"));
    let at = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let args =
        ["train", "job.toml", "--elastic", "--processes", "2", "--listen", &at, "--json", "--output", "run"];
    let mut start = command(folder.path(), &args);
    start.env("POLYREME_SECRET", SECRET);
    let mut run = Watched::start(start);
    let placed = run.until(|line| line["event"] == "placed");
    run.until(|line| line["event"] == "checkpoint");
    send(pids(&placed)[0], Signal::KILL);
    let waiting =
        run.until(|line| line["event"] == "waiting" && line["why"].as_str().unwrap().contains("at least 2"));
    assert!(waiting["why"].as_str().unwrap().contains("parallel.elastic.min"), "{waiting}");
    let mut joined = command(folder.path(), &["join", &at, "job.toml"]);
    let mut joined = joined.env("POLYREME_SECRET", SECRET).stdout(Stdio::null()).spawn().unwrap();
    run.until(|line| is_generation(line, 3) && line["ranks"] == 2);
    run.interrupt();
    assert_eq!(joined.wait().unwrap().code(), Some(130));
}

#[test]
fn what_cannot_be_elastic_is_refused_before_anything_runs() {
    let folder = folder(JOB);
    let check = |args: &[&str], words: &str| {
        let out = polyreme(folder.path(), &[&["train", "job.toml", "--output", "never"], args].concat());
        let said = String::from_utf8_lossy(&out.stderr).replace('\n', " ");
        assert!(out.status.code() == Some(2) && said.contains(words), "{args:?}: {said}");
    };
    check(&["--elastic", "--processes", "2", "--transport", "local"], "--transport shm");
    check(
        &["--elastic", "--processes", "2", "--transport", "shm", "--chaos", "cut=2s:1s"],
        "use --transport tcp",
    );
    check(&["--elastic", "--ranks", "2"], "--processes N");
    check(
        &["--elastic", "--processes", "2", "--set", "parallel.tensor=2"],
        "leave `tensor`, `stage` and `sequence` out",
    );
    check(&["--elastic", "--processes", "2", "--set", "train.ema=0.9"], "train.ema");
    check(&["--elastic", "--processes", "2", "--set", "parallel.transport=mpi"], "MPI");
    check(&["--elastic", "--processes", "20"], "parallel.elastic.max");
    check(&["--chaos", "kill=1s"], "--elastic");
    check(&["--elastic", "--processes", "2", "--listen", "0.0.0.0:0"], "one address");
    check(
        &["--elastic", "--processes", "2", "--listen", "127.0.0.1:0", "--chaos", "cut=2s:1s"],
        "leave out --listen",
    );
    let out = command(folder.path(), &["train", "job.toml", "--elastic"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")])
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"), ("POLYREME_SECRET", SECRET)])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&out.stderr).contains("polyreme join"), "{out:?}");
    assert!(!folder.path().join("never").exists());
}

/// The coordinator is a process of its own, and is killed again and again, also in the moments in which ranks change: the ranks go on
/// training, and one that is started again goes on with them. A rank that is lost and one that joins afterwards change no bit.
#[test]
fn a_coordinator_that_is_killed_and_started_again_loses_no_step() {
    let settings = "threads = 1\npatience = 5\nelastic = { min = 1, max = 4 }";
    let folder = folder(&endless().replace("threads = 1", settings));
    let at = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |args: &[&str]| {
        let mut command = command(folder.path(), args);
        command.env("POLYREME_SECRET", SECRET);
        command
    };
    let coordinator = || {
        let args = ["coordinator", "job.toml", "--listen", &at, "--start", "3", "--output", "run"];
        StartedProcess(start(&args).stderr(Stdio::null()).spawn().unwrap())
    };
    let joins = ["join", &at, "job.toml", "--json"];
    let mut boss = coordinator();
    let mut first = Watched::start(start(&joins));
    let rank = || StartedProcess(start(&joins).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let mut others = vec![rank(), rank()];
    // Whichever of them is rank 0 begins.
    let step = || {
        let status = start(&["status", &at, "--json"]).output().unwrap();
        let status: Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
        let members = status["members"].as_array().cloned().unwrap_or_default();
        let step = members.iter().filter_map(|row| row["step"].as_u64()).max().unwrap_or(0);
        (step, status["ranks"].as_u64().unwrap_or(0), status["generation"].as_u64().unwrap_or(0))
    };
    let wait = |what: &str, done: &dyn Fn((u64, u64, u64)) -> bool| {
        let until = Instant::now() + LIMIT;
        loop {
            let now = step();
            if done(now) {
                return now;
            }
            assert!(Instant::now() < until, "{what}: {now:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let (_, _, generation) = wait("it begins", &|(step, ranks, _)| step > 5 && ranks == 3);
    for round in 0..6 {
        let (before, ..) = step();
        drop(boss);
        boss = coordinator();
        let (_, _, now) = wait("it goes on", &|(step, ranks, _)| ranks == 3 - round / 3 && step > before + 3);
        // No rank was lost with the coordinator.
        assert_eq!(now, generation + round / 3, "round {round}");
        if round == 2 {
            drop(others.pop());
            wait("a rank is lost", &|(_, ranks, now)| ranks == 2 && now == generation + 1);
        }
    }
    // Killed in the moment in which a rank joins.
    others.push(rank());
    std::thread::sleep(Duration::from_millis(100));
    drop(boss);
    let boss = coordinator();
    let (before, ..) = wait("a rank joins", &|(_, ranks, _)| ranks == 3);
    wait("they train", &|(step, ranks, _)| ranks == 3 && step > before + 3);
    // Without a coordinator they save and stop: all are asked to leave.
    others.iter().for_each(|rank| send(rank.0.id() as i32, Signal::TERM));
    wait("they leave", &|(_, ranks, _)| ranks == 1);
    send(first.child.id() as i32, Signal::TERM);
    assert_eq!(first.child.wait().unwrap().code(), Some(0));
    drop(boss);
    let steps = crate::ranks::steps_in(&folder.path().join("run"));
    equals_an_undisturbed_run(folder.path(), &serde_json::json!({"steps": steps}));
}

/// The process that started the run is killed, and then the rank that coordinates in its place, and the next: the run goes on with
/// those that are left, and no bit changes.
#[test]
fn a_rank_takes_the_place_of_the_process_that_started_the_run() {
    let folder = folder(&endless());
    let at = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |args: &[&str]| {
        let mut command = command(folder.path(), args);
        command.env("POLYREME_SECRET", SECRET);
        command
    };
    let args =
        ["train", "job.toml", "--elastic", "--processes", "4", "--listen", &at, "--json", "--output", "run"];
    let mut run = Watched::start(start(&args));
    let placed = pids(&run.until(|line| line["event"] == "placed"));
    run.until(|line| line["event"] == "checkpoint");
    send(run.child.id() as i32, Signal::KILL);
    let status = || {
        let status = start(&["status", &at, "--json"]).output().unwrap();
        serde_json::from_slice::<Value>(&status.stdout).unwrap_or_default()
    };
    let step_of = |status: &Value| {
        let members = status["members"].as_array().cloned().unwrap_or_default();
        members.iter().filter_map(|row| row["step"].as_u64()).min().unwrap_or(0)
    };
    let mut before = 0;
    let mut gone = run.child.id() as i64;
    for ranks in (2..=4).rev() {
        let until = Instant::now() + LIMIT;
        let goes_on = loop {
            let now = status();
            let other = now["coordinator_pid"].as_i64().is_some_and(|pid| pid != gone);
            if other && now["ranks"] == ranks && now["trains"] == true && step_of(&now) > before + 3 {
                break now;
            }
            assert!(Instant::now() < until, "{ranks} ranks: {now}");
            std::thread::sleep(Duration::from_millis(20));
        };
        let pid = goes_on["coordinator_pid"].as_i64().unwrap();
        assert!(placed.contains(&(pid as i32)), "a rank coordinates: {goes_on}");
        (before, gone) = (step_of(&goes_on), pid);
        if ranks > 2 {
            send(pid as i32, Signal::KILL);
        }
    }
    // All are asked to leave: the last ones save.
    crate::ranks::living(&placed).into_iter().for_each(|pid| send(pid, Signal::TERM));
    let until = Instant::now() + LIMIT;
    while !crate::ranks::living(&placed).is_empty() {
        assert!(Instant::now() < until, "they stay");
        std::thread::sleep(Duration::from_millis(20));
    }
    let steps = crate::ranks::steps_in(&folder.path().join("run"));
    assert!(steps > before, "{steps} steps are saved, and {before} were done");
    equals_an_undisturbed_run(folder.path(), &serde_json::json!({"steps": steps}));
}

/// A process that ends with the test, however that ends.
pub(crate) struct StartedProcess(pub(crate) Child);

impl Drop for StartedProcess {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
