//! Jobs of several ranks through the binary, as threads and processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use polyreme::train::checkpoint;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::binary::{command, folder, json, polyreme};

/// A job of a second, with evaluations and checkpoints between.
pub(crate) const JOB: &str = r#"
[model]
layers = [{ kind = "linear", outputs = 32 }, "relu", { kind = "linear" }]
[data]
kind = "synthetic"
samples = 600
shape = [16]
classes = 5
validation = 0.1
[train]
batch = 48
epochs = 4
optimizer = { kind = "adamw", lr = 3e-3 }
log_every = 1
[parallel]
threads = 1
[output]
every_steps = 10
best = "val_accuracy"
"#;

/// The secret of ranks that a test starts itself.
pub(crate) const SECRET: &str = "8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a";

/// The job, as if it would never end.
pub(crate) fn endless() -> String {
    JOB.replace("epochs = 4", "epochs = 1000000").replace("every_steps = 10", "every_steps = 25")
}

/// The losses of a run, by step.
pub(crate) fn losses(run: &Path) -> Vec<f64> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss = |l: &str| serde_json::from_str::<Value>(l).unwrap()["train_loss"].as_f64();
    text.lines().filter_map(loss).collect()
}

/// The pids in the table of ranks, once it is there.
pub(crate) fn pids(errors: &Path, ranks: usize, until: Instant) -> Vec<i32> {
    loop {
        let text = fs::read_to_string(errors).unwrap_or_default();
        let row = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            let is_row = words.len() == 6 && words[0].parse::<usize>().is_ok();
            is_row.then(|| words[2].parse().ok())?
        };
        let pids: Vec<i32> = text.lines().filter_map(row).collect();
        // Training has begun when the run's outline is there.
        if pids.len() == ranks && text.contains("output ") {
            return pids;
        }
        assert!(Instant::now() < until, "no table of {ranks} ranks: {text}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A run in the background, with its standard error in a file.
pub(crate) fn start(mut command: Command, errors: &Path) -> Child {
    command.stdout(Stdio::piped()).stderr(fs::File::create(errors).unwrap()).spawn().unwrap()
}

/// Waits for the end, with a timeout.
pub(crate) fn end(mut child: Child, limit: Duration) -> Output {
    let until = Instant::now() + limit;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            panic!("it did not end within {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// Waits for a checkpoint of this step or a later one: earlier ones make way.
pub(crate) fn wait_for_step(run: &Path, step: u64, until: Instant) {
    while steps_in(run) < step {
        assert!(Instant::now() < until, "no checkpoint of step {step} in {}", run.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The step of the newest checkpoint; 0 if there is none.
pub(crate) fn steps_in(run: &Path) -> u64 {
    let names = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    names.filter_map(|e| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).max().unwrap_or(0)
}

pub(crate) fn send(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Processes that still run; a zombie does not count.
pub(crate) fn living(pids: &[i32]) -> Vec<i32> {
    let lives = |pid: &&i32| {
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let zombie = state.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'));
        test_kill_process(Pid::from_raw(**pid).unwrap()).is_ok() && !zombie
    };
    pids.iter().filter(lives).copied().collect()
}

#[test]
fn any_number_of_ranks_of_any_kind_trains_the_same() {
    let folder = folder(JOB);
    let run = |name: &str, flags: &[&str]| {
        let args = [&["train", "job.toml", "--json", "--output", name][..], flags].concat();
        let lines = json(folder.path(), &args);
        (losses(&folder.path().join(name)), lines)
    };
    let (one, lines) = run("one", &["--ranks", "1"]);
    assert_eq!(one.len(), 48);
    assert!(lines.iter().all(|l| l["event"] != "placed"), "one rank is no table");
    for (name, flags, ranks, transport) in [
        ("two", &["--ranks", "2"][..], 2, "local"),
        ("four", &["--ranks", "4", "--no-pin"], 4, "local"),
        ("processes", &["--processes", "2"], 2, "shm"),
        ("four_processes", &["--processes", "4"], 4, "shm"),
        ("sockets", &["--ranks", "3", "--transport", "tcp"], 3, "tcp"),
    ] {
        let (some, lines) = run(name, flags);
        let placed = lines.iter().find(|l| l["event"] == "placed").expect("who runs where");
        let rows = placed["ranks"].as_array().unwrap();
        assert_eq!(rows.len(), ranks, "{placed}");
        assert!(rows.iter().all(|r| r["transport"] == transport && r["threads"] == 1), "{placed}");
        assert_eq!(some.len(), one.len(), "{name}");
        for (step, (a, b)) in one.iter().zip(&some).enumerate() {
            assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{name}: step {step}: {a} and {b}");
        }
        let model = folder.path().join(name).join("model.safetensors");
        assert!(model.exists(), "{name}");
    }
}

/// A launcher has three pipes to each of its processes, and rank 0 a connection to every other.
#[test]
fn more_ranks_than_the_soft_limit_of_open_files_allows() {
    let folder = folder(JOB);
    let program = env!("CARGO_BIN_EXE_polyreme");
    let line = format!(
        "ulimit -S -n 20; exec '{program}' train job.toml --ranks 8 --transport tcp --set train.epochs=1"
    );
    let out = Command::new("sh").current_dir(folder.path()).args(["-c", &line]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Sharded gradients over every transport. With 50 samples in microbatches of one, some ranks have fewer than others.
#[test]
fn ranks_of_any_kind_may_keep_their_own_gradients_only() {
    let job = JOB.replace("batch = 48", "batch = 50\naccumulate = 25\nclip = 1.0");
    let folder = folder(&job.replace("outputs = 32", "outputs = 160"));
    let run = |name: &str, flags: &[&str]| {
        let args = [&["train", "job.toml", "--json", "--output", name][..], flags].concat();
        let lines = json(folder.path(), &args);
        let started = lines.iter().find(|l| l["event"] == "started").expect("an outline").clone();
        (losses(&folder.path().join(name)), started)
    };
    let (one, _) = run("one", &["--ranks", "1"]);
    for (name, flags) in [
        ("threads", &["--ranks", "4"][..]),
        ("processes", &["--processes", "3"]),
        ("sockets", &["--ranks", "3", "--transport", "tcp"]),
    ] {
        let set = ["--set", "parallel.shard_gradients=true", "--set", "parallel.bucket_mib=0.001"];
        let (some, started) = run(name, &[flags, &set].concat());
        assert_eq!(started["outline"]["shard_gradients"], true, "{started}");
        assert_eq!(some.len(), one.len(), "{name}");
        for (step, (a, b)) in one.iter().zip(&some).enumerate() {
            assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{name}: step {step}: {a} and {b}");
        }
    }
    let said = |more: &[&str]| {
        let args = [&["train", "job.toml", "--check", "--ranks", "4"][..], more].concat();
        let out = polyreme(folder.path(), &args);
        String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned()
    };
    let shard = "parallel.shard_gradients=true";
    let text = said(&["--set", shard]);
    assert!(text.contains("4 ranks of 1 thread, each with its shard of the gradients"), "{text}");
    let text = said(&["--set", shard, "--set", "train.optimizer=lamb"]);
    assert!(
        text.contains("does not work with the optimizer \"lamb\"") && text.contains("choose \"adamw\""),
        "{text}"
    );
}

#[test]
fn ctrl_c_stops_all_processes_after_the_step_and_saves() {
    let folder = folder(&endless());
    let (run, errors) = (folder.path().join("run"), folder.path().join("errors"));
    let until = Instant::now() + Duration::from_secs(60);
    let launcher =
        start(command(folder.path(), &["train", "job.toml", "--processes", "3", "--output", "run"]), &errors);
    let pids = pids(&errors, 3, until);
    wait_for_step(&run, 25, until);
    send(launcher.id() as i32, Signal::INT);
    let out = end(launcher, Duration::from_secs(30));
    assert_eq!(out.status.code(), Some(130));
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(said.contains("steps are saved") && said.contains("polyreme resume"), "{said}");
    assert_eq!(living(&pids), [0; 0]);
    let steps: u64 = said.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert_eq!(checkpoint::latest_whole(&run).unwrap().0.manifest.step, steps);
}

#[test]
fn ranks_do_not_outlive_their_launcher() {
    let folder = folder(&endless());
    let (run, errors) = (folder.path().join("run"), folder.path().join("errors"));
    let until = Instant::now() + Duration::from_secs(60);
    let mut launcher =
        start(command(folder.path(), &["train", "job.toml", "--processes", "2", "--output", "run"]), &errors);
    let pids = pids(&errors, 2, until);
    wait_for_step(&run, 25, until);
    send(launcher.id() as i32, Signal::KILL);
    launcher.wait().unwrap();
    let gone = Instant::now() + Duration::from_secs(25);
    while !living(&pids).is_empty() {
        assert!(Instant::now() < gone, "{:?} live on", living(&pids));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(checkpoint::latest_whole(&run).unwrap().0.manifest.step > 0);
}

/// Starts ranks as an external launcher would; `hosts` says which host each counts as. Their standard errors go to the
/// files `errors0`, `errors1` and so on.
pub(crate) fn by_environment(folder: &Path, hosts: &[&str], more: &[&str]) -> Vec<Child> {
    let commands = environment_commands(folder, hosts, more).into_iter().enumerate();
    commands.map(|(rank, command)| start(command, &folder.join(format!("errors{rank}")))).collect()
}

/// What an external launcher would start.
pub(crate) fn environment_commands(folder: &Path, hosts: &[&str], more: &[&str]) -> Vec<Command> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rank = |(rank, host): (usize, &&str)| {
        let args = ["train", "job.toml", "--output", "run", "--overwrite"];
        let mut command = command(folder, &[&args[..], more].concat());
        let (rank, size) = (rank.to_string(), hosts.len().to_string());
        command.envs([
            ("RANK", &rank),
            ("WORLD_SIZE", &size),
            ("LOCAL_RANK", &rank),
            ("LOCAL_WORLD_SIZE", &size),
        ]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]);
        command.envs([("POLYREME_SECRET", SECRET), ("POLYREME_HOST", host)]);
        command
    };
    hosts.iter().enumerate().map(rank).collect()
}

/// A rank with another secret ends at once; rank 0, which still waits, prints which rank was turned away.
#[test]
fn rank_0_says_who_came_with_another_secret() {
    let folder = folder(JOB);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let rank = |rank: &str, secret: &str| {
        let mut command = command(folder.path(), &["train", "job.toml", "--output", "run"]);
        command.envs([
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ]);
        command.env("POLYREME_SECRET", secret).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut zero = rank("0", SECRET);
    let out = rank("1", &SECRET.replace('0', "1")).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("have different secrets"), "{said}");
    let errors = BufReader::new(zero.stderr.take().unwrap());
    let line = errors.lines().map(Result::unwrap).find(|line| line.contains("turned away")).unwrap();
    zero.kill().unwrap();
    zero.wait().unwrap();
    assert!(line.starts_with("warning: turned away 127.0.0.1:"), "{line}");
    assert!(line.contains("as rank 1: wrong secret"), "{line}");
}

#[test]
fn ranks_that_somebody_else_starts_find_each_other() {
    let folder = folder(JOB);
    for (hosts, carrier) in [
        (&["a", "a"][..], "shm"),
        (&["a", "b"], "tcp"),
        (&["a", "a", "b", "b"], "tcp"),
        (&["a", "b", "a"], "tcp"),
    ] {
        let outs: Vec<_> = by_environment(folder.path(), hosts, &["--json"])
            .into_iter()
            .map(|c| end(c, Duration::from_secs(90)))
            .collect();
        for (rank, out) in outs.iter().enumerate() {
            let errors = fs::read_to_string(folder.path().join(format!("errors{rank}"))).unwrap();
            assert!(out.status.success(), "{hosts:?}: rank {rank}: {errors}");
        }
        let said = String::from_utf8_lossy(&outs[0].stdout).into_owned();
        assert!(said.contains(&format!("\"transport\":\"{carrier}\"")), "{hosts:?}: {said}");
        assert_eq!(losses(&folder.path().join("run")).len(), 48);
    }
}

/// Two hosts with four ranks each: between hosts only the first ranks talk, so no other rank has a data connection.
#[test]
fn ranks_of_two_hosts_are_connected_with_those_they_talk_with() {
    let folder = folder(&endless());
    let hosts = ["a", "a", "a", "a", "b", "b", "b", "b"];
    let mut ranks = by_environment(folder.path(), &hosts, &[]);
    wait_for_step(&folder.path().join("run"), 25, Instant::now() + Duration::from_secs(120));
    let sockets = |pid: u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let kinds = files.filter_map(|file| fs::read_link(file.path()).ok());
        kinds.filter(|kind| kind.to_string_lossy().starts_with("socket:")).count()
    };
    let open: Vec<usize> = ranks.iter().map(|rank| sockets(rank.id())).collect();
    for rank in &mut ranks {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
    // Each has a listener and a connection to rank 0, and rank 0 all of those; first ranks have one more, to each other.
    assert_eq!(open, [9, 2, 2, 2, 3, 2, 2, 2]);
}

#[test]
fn what_one_rank_finds_wrong_is_said_once_and_ends_all() {
    let folder = folder(
        &JOB.replace("kind = \"synthetic\"", "kind = \"csv\"\npath = \"none.csv\"")
            .replace("samples = 600\nshape = [16]\nclasses = 5\n", ""),
    );
    let began = Instant::now();
    let out = polyreme(folder.path(), &["train", "job.toml", "--processes", "2"]);
    assert!(!out.status.success() && began.elapsed() < Duration::from_secs(20));
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(said.contains("none.csv"), "{said}");
    let out = polyreme(folder.path(), &["train", "job.toml", "--ranks", "2", "--processes", "3"]);
    assert_eq!(out.status.code(), Some(2));
}

#[test]
fn collectives_and_shared_steps_are_measured() {
    let ops = ["allreduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"];
    let first_losses = |report: &Value| {
        let losses = report["first_losses"].as_array().unwrap().iter();
        losses.map(|loss| loss.as_f64().unwrap()).collect::<Vec<f64>>()
    };
    let step = ["bench", "step", "--job", "mlp", "--threads", "1", "--steps", "2", "--json"];
    let one = first_losses(&json(Path::new("."), &[&step[..], &["--ranks", "1"]].concat())[0]);
    assert!(one.len() == 3 && one[2] < one[0], "it learns: {one:?}");
    // Every rank has the same batch, so a step with gradients that were not summed, or summed twice, shows in the next loss.
    let same = |report: &Value| {
        let losses = first_losses(report);
        let off = one.iter().zip(&losses).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
        assert!(off < 1e-6 && losses.len() == one.len(), "{losses:?} and of one rank {one:?}");
    };
    for (transport, ranks) in [("local", 2), ("shm", 2), ("tcp", 2)] {
        let n = ranks.to_string();
        let args =
            ["bench", "collective", "--transport", transport, "--ranks", &n, "--sizes", "4K,64K", "--json"];
        let reports = json(Path::new("."), &args);
        assert_eq!(reports.len(), 2);
        for (report, bytes) in reports.iter().zip([4096, 65536]) {
            assert_eq!((&report["op"], &report["transport"]), (&"allreduce".into(), &transport.into()));
            assert_eq!((&report["ranks"], &report["bytes"]), (&ranks.into(), &bytes.into()));
            assert!(report["us"].as_f64().unwrap() > 0.0 && report["wrong"] == 0, "{report}");
        }
        // Three ranks, and lengths that do not divide by them: what each of them holds afterwards is right.
        let mut all = vec!["bench", "collective", "--transport", transport, "--ranks", "3", "--json"];
        all.extend(["--sizes", "4,4K,1M"].into_iter().chain(ops.iter().flat_map(|op| ["--op", op])));
        let reports = json(Path::new("."), &all);
        assert_eq!(reports.len(), 3 * ops.len());
        reports.iter().for_each(|report| assert_eq!(report["wrong"], 0, "{report}"));
        let args = [&step[..], &["--transport", transport, "--ranks", &n]].concat();
        let reports = json(Path::new("."), &args);
        assert_eq!(reports.len(), 1);
        assert_eq!((&reports[0]["job"], &reports[0]["ranks"]), (&"mlp".into(), &ranks.into()));
        let number = |key: &str| reports[0][key].as_f64().unwrap();
        assert!(number("step_ms") > 0.0 && number("loss").is_finite());
        same(&reports[0]);
        // Momentum is as large as the weights. Ranks that share memory share both, others have their own.
        let copies = if transport == "tcp" { 2.0 } else { 1.0 };
        let (params, momentum) = (number("param_mib") / copies, number("optimizer_mib") / copies);
        assert!(params > 2.0 && (momentum / params - 1.0).abs() < 0.01, "{}", reports[0]);
        assert_eq!(number("grad_mib"), 2.0 * params);
        let own = json(Path::new("."), &[&args[..], &["--shard-gradients"]].concat());
        assert_eq!(
            (&own[0]["shard_gradients"], &reports[0]["shard_gradients"]),
            (&true.into(), &false.into())
        );
        assert!(own[0]["loss"].as_f64().unwrap().is_finite());
        same(&own[0]);
        // Of two ranks, half of the gradients each and two buckets: nearly all of `mlp` fits into them.
        let grads = own[0]["grad_mib"].as_f64().unwrap();
        assert!((grads - 3.0 * params).abs() < 0.02, "{grads} MiB of gradients, {params} of weights");
        // Sharded weights: all ranks together have one copy of everything, and of biases two.
        let sharded = json(Path::new("."), &[&args[..], &["--shard-weights"]].concat());
        assert_eq!(sharded[0]["shard_weights"], true);
        same(&sharded[0]);
        for key in ["param_mib", "grad_mib", "optimizer_mib"] {
            let all = sharded[0][key].as_f64().unwrap();
            assert!((all / params - 1.0).abs() < 0.01, "{key}: {all}, and {params} MiB of weights");
        }
    }
}
