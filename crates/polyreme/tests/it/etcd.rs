//! Elastic runs whose coordinator is found in etcd: Debian's real one, on loopback, with a folder of the test's own. It is killed and started
//! again, and so are the processes that coordinate.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::binary::{cannot_run, command, folder};
use crate::elastic::{LIMIT, StartedProcess, Watched, endless, equals_an_undisturbed_run, pids};
use crate::ranks::{SECRET, living, send, steps_in};

/// A server of etcd, which can be killed and started again with what it has on disk.
struct EtcdServer {
    folder: TempDir,
    client: String,
    peer: String,
    child: Option<Child>,
}

impl EtcdServer {
    /// None if this machine has none.
    fn start() -> Option<EtcdServer> {
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let folder = tempfile::tempdir().unwrap();
        let mut server = EtcdServer { folder, client: free(), peer: free(), child: None };
        server.go_on().then_some(server)
    }

    fn go_on(&mut self) -> bool {
        let (client, peer) = (format!("http://{}", self.client), format!("http://{}", self.peer));
        let started = Command::new("etcd")
            .current_dir(self.folder.path())
            .args(["--data-dir", "data", "--initial-cluster", &format!("default={peer}")])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = started.ok();
        self.child.is_some()
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A job whose coordinator is found in that etcd; the address of its store.
fn stored(etcd: &EtcdServer, patience: u64) -> (TempDir, String) {
    let store = format!("etcd://{}/runs/one", etcd.client);
    let settings =
        format!("threads = 1\npatience = {patience}\nelastic = {{ min = 1, max = 4, store = \"{store}\" }}");
    (folder(&endless().replace("threads = 1", &settings)), store)
}

fn start(folder: &Path, args: &[&str]) -> Command {
    let mut command = command(folder, args);
    command.env("POLYREME_SECRET", SECRET);
    command
}

fn status(folder: &Path, at: &str) -> Value {
    let out = start(folder, &["status", at, "--json"]).output().unwrap();
    serde_json::from_slice(&out.stdout).unwrap_or_default()
}

fn step_of(status: &Value) -> u64 {
    let members = status["members"].as_array().cloned().unwrap_or_default();
    members.iter().filter_map(|row| row["step"].as_u64()).max().unwrap_or(0)
}

/// Waits until `ranks` train and have done some more steps.
#[track_caller]
fn trains(folder: &Path, at: &str, ranks: u64, gone: u64) -> Value {
    let until = Instant::now() + LIMIT;
    let mut from = None;
    loop {
        let now = status(folder, at);
        let there = now["trains"] == true && now["ranks"] == ranks && now["coordinator_pid"] != gone;
        if there && step_of(&now) > *from.get_or_insert(step_of(&now)) + 3 {
            return now;
        }
        assert!(Instant::now() < until, "{ranks} ranks at {at}: {now}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// etcd is killed, a rank, the process that coordinates, the rank that takes its place, and etcd together with the next one: no step is
/// lost, and no bit changes.
#[test]
fn etcd_and_coordinators_that_are_killed_lose_no_step() {
    let Some(mut etcd) = EtcdServer::start() else {
        return cannot_run("`etcd` is missing: `apt-get install etcd-server`");
    };
    let (folder, store) = stored(&etcd, 20);
    let folder = folder.path();
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let quiet = |args: &[&str]| {
        StartedProcess(start(folder, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    };
    let boss = quiet(&["coordinator", "job.toml", "--listen", &at, "--start", "4", "--output", "run"]);
    let boss_pid = u64::from(boss.0.id());
    let mut ranks: Vec<StartedProcess> = (0..4).map(|_| quiet(&["join", &store, "job.toml"])).collect();
    let first = trains(folder, &store, 4, 0);
    assert_eq!((first["generation"].as_u64(), first["coordinator_pid"].as_u64()), (Some(1), Some(boss_pid)));
    // Without etcd they train on. A rank that is lost meanwhile is waited for until etcd is there again.
    etcd.kill();
    trains(folder, &at, 4, 0);
    drop(ranks.pop());
    assert!(etcd.go_on());
    let second = trains(folder, &at, 3, 0);
    assert_eq!((&second["generation"], &second["ranks_lost"]), (&Value::from(2), &Value::from(1)));
    // The coordinator is not started again: a rank takes its place, at an address of its own, and no rank is lost.
    drop(boss);
    let mut now = trains(folder, &store, 3, boss_pid);
    assert_eq!(now["generation"], 2, "{now}");
    for left in [2, 1] {
        let coordinates = now["coordinator_pid"].as_u64().unwrap();
        let which = ranks.iter().position(|rank| u64::from(rank.0.id()) == coordinates);
        let which = which.unwrap_or_else(|| panic!("a rank coordinates: {now}"));
        if left == 1 {
            etcd.kill();
        }
        drop(ranks.remove(which));
        if left == 1 {
            assert!(etcd.go_on());
        }
        now = trains(folder, &store, left, coordinates);
    }
    let mut last = ranks.pop().unwrap();
    send(last.0.id() as i32, Signal::TERM);
    assert!(last.0.wait().unwrap().code().is_some());
    let steps = steps_in(&folder.join("run"));
    assert!(steps >= step_of(&now), "{steps} steps are saved; {now}");
    equals_an_undisturbed_run(folder, &serde_json::json!({"steps": steps}));
}

/// `train --elastic` is found in etcd too, goes on when the process that was started is paused, and a second run cannot take its prefix.
#[test]
fn a_run_in_etcd_outlives_the_process_that_started_it() {
    let Some(etcd) = EtcdServer::start() else {
        return cannot_run("`etcd` is missing: `apt-get install etcd-server`");
    };
    let (folder, store) = stored(&etcd, 4);
    let folder = folder.path();
    let args = ["train", "job.toml", "--elastic", "--processes", "2", "--json", "--output", "run"];
    let said = |args: &[&str]| {
        let out = start(folder, args).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).replace('\n', " "))
    };
    let (code, words) = said(&args);
    assert!(code == Some(2) && words.contains("--listen ADDR:PORT"), "{words}");
    let listens = [&args[..], &["--listen", "127.0.0.1:0"]].concat();
    let mut run = Watched::start(start(folder, &listens));
    let placed = pids(&run.until(|line| line["event"] == "placed"));
    let (code, words) =
        said(&["train", "job.toml", "--elastic", "--listen", "127.0.0.1:0", "--output", "two"]);
    assert!(code == Some(1) && words.contains("choose another prefix"), "{words}");
    let (code, words) = said(&["join", "127.0.0.1:9", "job.toml"]);
    assert!(code == Some(2) && words.contains(&format!("polyreme join {store}")), "{words}");
    // It is paused for longer than patience. When it wakes up, another one has its place: it ends, and the ranks train on.
    send(run.child.id() as i32, Signal::STOP);
    let first = trains(folder, &store, 2, u64::from(run.child.id()));
    send(run.child.id() as i32, Signal::CONT);
    assert_eq!(run.child.wait().unwrap().code(), Some(1));
    let now = trains(folder, &store, 2, u64::from(run.child.id()));
    assert_eq!((&now["generation"], &now["ranks_lost"]), (&first["generation"], &Value::from(0)), "{now}");
    assert!(placed.contains(&(now["coordinator_pid"].as_i64().unwrap() as i32)), "a rank coordinates: {now}");
    living(&placed).into_iter().for_each(|pid| send(pid, Signal::TERM));
    let until = Instant::now() + LIMIT;
    while !living(&placed).is_empty() {
        assert!(Instant::now() < until, "they stay");
        std::thread::sleep(Duration::from_millis(20));
    }
    let steps = steps_in(&folder.join("run"));
    assert!(steps >= step_of(&now), "{steps} steps are saved; {now}");
    equals_an_undisturbed_run(folder, &serde_json::json!({"steps": steps}));
}
