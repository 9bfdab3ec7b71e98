//! Parameter servers through the binary: processes over sockets, and threads.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::binary::{command, folder, json, polyreme, root};
use crate::elastic::{Watched, is_generation, pids};
use crate::ranks::{JOB, SECRET, send};

/// The digits that ship with the repository, for as long as the test says.
fn digits(length: &str) -> String {
    let job = fs::read_to_string(root().join("examples/digits.toml")).unwrap();
    let data = root().join("examples/data/digits");
    job.replace("data/digits", data.to_str().unwrap()).replace("epochs = 25", length)
}

/// The last line of a run of so many processes over sockets.
fn train(folder: &Path, processes: &str, sets: &[&str], output: &str) -> Value {
    let mut args = vec!["train", "job.toml", "--output", output, "--json", "--processes", processes];
    args.extend(["--transport", "tcp"]);
    sets.iter().for_each(|set| args.extend(["--set", set]));
    json(folder, &args).pop().unwrap()
}

/// The numbers of a model, without the header that says which job made it.
fn numbers(folder: &Path, run: &str) -> Vec<u8> {
    let file = fs::read(folder.join(run).join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[8 + header..].to_vec()
}

const LAST: &str = "best = \"none\"\nevery_steps = 15\nkeep = 9";

/// Two gradients have one sum in whatever order, so servers that apply them together have the bits of an all-reduce. The run that was saved and
/// resumed has them too: the optimizer's state came from the servers.
#[test]
fn in_lockstep_servers_have_the_bits_of_an_all_reduce() {
    let folder = folder(&digits("steps = 40").replace("best = \"val_loss\"", LAST));
    let at = folder.path();
    train(at, "2", &["parallel.sync=allreduce"], "reduced");
    let reduced = numbers(at, "reduced");
    for (servers, run) in [("1", "one"), ("2", "two")] {
        let servers = format!("parallel.servers={servers}");
        let end = train(at, "2", &["parallel.sync=ps", &servers, "parallel.bucket_mib=0.05"], run);
        assert_eq!(end["staleness_max"], 0, "{end}");
        assert!(end["wire_bytes"].as_u64().unwrap() > 0, "{end}");
        assert!(numbers(at, run) == reduced, "{run}: the same bits");
    }
    let from = "two/checkpoints/step-00000015";
    json(at, &["resume", from, "--processes", "2", "--transport", "tcp", "--json"]);
    assert!(numbers(at, "two") == reduced, "the same bits after it was resumed");
    // Threads of one process put nothing on a wire.
    let threads = ["train", "job.toml", "--ranks", "2", "--set", "parallel.sync=ps", "--output", "threads"];
    let end = json(at, &[&threads[..], &["--json"]].concat()).pop().unwrap();
    assert_eq!(end["wire_bytes"], 0, "{end}");
    assert!(numbers(at, "threads") == reduced, "threads: the same bits");
}

/// Of four ranks two only serve, and the other two have what two ranks have without servers. Rank 0, which has neither samples nor gradients, writes
/// the checkpoints all the same; from one of them the run goes on with the same bits, with servers on ranks of their own or without.
#[test]
fn ranks_that_only_serve_leave_the_bits_of_the_others() {
    let folder = folder(&digits("steps = 40").replace("best = \"val_loss\"", LAST));
    let at = folder.path();
    train(at, "2", &["parallel.sync=allreduce"], "reduced");
    let reduced = numbers(at, "reduced");
    let served = ["parallel.sync=ps", "parallel.servers.ranks=2", "parallel.bucket_mib=0.05"];
    let end = train(at, "4", &served, "served");
    assert_eq!((&end["staleness_max"], &end["ledger"]["exact"]), (&0.into(), &true.into()), "{end}");
    assert!(numbers(at, "served") == reduced, "the same bits");
    let tensors = |run: &str, step: u64, name: &str| {
        fs::read(at.join(run).join(format!("checkpoints/step-{step:08}/{name}.safetensors"))).unwrap()
    };
    for name in ["model", "moment1", "moment2"] {
        assert!(tensors("served", 30, name) == tensors("reduced", 30, name), "{name}: the same bits");
    }
    let from = "served/checkpoints/step-00000015";
    let resumed = ["resume", from, "--transport", "tcp", "--json", "--processes"];
    for more in
        [vec!["4"], vec!["2", "--set", "parallel.servers=1"], vec!["2", "--set", "parallel.sync=allreduce"]]
    {
        json(at, &[&resumed[..], &more].concat());
        assert!(numbers(at, "served") == reduced, "{more:?}: the same bits after it was resumed");
    }
    // Threads of one process can have the same parts.
    let threads = ["train", "job.toml", "--ranks", "3", "--set", "parallel.sync=ps", "--output", "threads"];
    let end =
        json(at, &[&threads[..], &["--set", "parallel.servers.ranks=1", "--json"]].concat()).pop().unwrap();
    assert_eq!(end["wire_bytes"], 0, "{end}");
    assert!(numbers(at, "threads") == reduced, "threads: the same bits");
}

/// Asynchronously one of two ranks does all blocks in their order, whatever the rank does that only serves.
#[test]
fn one_worker_beside_ranks_that_only_serve_has_the_bits_of_one_rank() {
    let folder = folder(&digits("steps = 40").replace("best = \"val_loss\"", LAST));
    let at = folder.path();
    let plain = ["train", "job.toml", "--ranks", "1", "--output", "plain", "--json"];
    json(at, &plain);
    for sync in ["ps-async", "ps-bounded"] {
        let sync = format!("parallel.sync={sync}");
        let end = train(at, "3", &[&sync, "parallel.servers.ranks=2"], "served");
        assert_eq!((&end["staleness_max"], &end["ledger"]["exact"]), (&0.into(), &true.into()), "{end}");
        assert!(numbers(at, "served") == numbers(at, "plain"), "{sync}: the same bits");
        let from = "served/checkpoints/step-00000015";
        json(at, &["resume", from, "--processes", "2", "--set", "parallel.servers.ranks=1", "--json"]);
        assert!(numbers(at, "served") == numbers(at, "plain"), "{sync}: the same bits after it was resumed");
        fs::remove_dir_all(at.join("served")).unwrap();
    }
}

/// In reproducible runs the weights of any number of workers are those of one, bit for bit: with batch norms, a short last step and runs of shards that
/// are no subtrees; with as many servers as there are ranks, or on ranks of their own; and after a run was resumed with other numbers of both.
#[test]
fn reproducible_weights_are_those_of_one_worker() {
    let job = endless("ps", "every_steps = 10\nkeep = 9").replace("epochs = 1000000", "steps = 25");
    let job = job.replace("servers = 2", "reproducible = true\nbucket_mib = 0.001");
    // A short last step of 30 samples.
    let job = job.replace("outputs = 32 }, ", "outputs = 64 }, \"batch_norm\", ").replace("= 600", "= 620");
    let folder = folder(&job.replace("best = \"val_accuracy\"", "best = \"none\""));
    let at = folder.path();
    let tensors = |run: &str| {
        let step = at.join(run).join("checkpoints/step-00000020");
        ["model", "moment1", "moment2"]
            .map(|name| fs::read(step.join(name).with_extension("safetensors")).unwrap())
    };
    let all_reduce =
        ["train", "job.toml", "--ranks", "1", "--set", "parallel.sync=allreduce", "--output", "one"];
    json(at, &[&all_reduce[..], &["--json"]].concat());
    let alone = ["train", "job.toml", "--ranks", "1", "--output", "alone", "--json"];
    let alone = json(at, &alone).pop().unwrap();
    let check = |run: &str, end: &Value| {
        assert_eq!((&end["staleness_max"], &end["ledger"]["exact"]), (&0.into(), &true.into()), "{end}");
        assert!(numbers(at, run) == numbers(at, "one"), "{run}: the same bits");
        assert!(tensors(run) == tensors("one"), "{run}: the same bits in checkpoints");
    };
    check("alone", &alone);
    for (ranks, servers, run) in
        [("4", "servers=1", "four"), ("3", "servers=3", "three"), ("5", "servers.ranks=2", "serving")]
    {
        check(run, &train(at, ranks, &[&format!("parallel.{servers}")], run));
    }
    let from = "serving/checkpoints/step-00000010";
    json(at, &["resume", from, "--processes", "3", "--set", "parallel.servers=2", "--json"]);
    assert!(numbers(at, "serving") == numbers(at, "one"), "the same bits after it was resumed");
}

/// Where `n` workers and `k` ranks that only serve share the sums, no link carries more than the best that is known (OSDI 2020). Without such ranks, and with a
/// server beside each worker, that is what an all-reduce takes.
#[test]
fn no_link_carries_more_than_it_must() {
    let job = JOB.replace("outputs = 32", "outputs = 32768").replace("epochs = 4", "steps = 12");
    let job = job.replace("every_steps = 10\nbest = \"val_accuracy\"", "best = \"none\"");
    let folder = folder(&job);
    let at = folder.path();
    let most = |end: &Value| end["wire_bytes_max"].as_f64().unwrap();
    // 4 bytes for each weight, in twelve steps.
    train(at, "2", &["parallel.sync=allreduce"], "two");
    let bytes = 12.0 * numbers(at, "two").len() as f64;
    let n = 4.0;
    for k in 0..4u32 {
        let ranks = (4 + k).to_string();
        let servers = if k == 0 { "servers=4".to_string() } else { format!("servers.ranks={k}") };
        let set = ["parallel.sync=ps", &format!("parallel.{servers}"), "parallel.bucket_mib=0.25"];
        let end = train(at, &ranks, &set, &ranks);
        let k = f64::from(k);
        let want = 2.0 * n * (n - 1.0) * bytes / (n * n + k * n - 2.0 * k);
        println!("{k} more: {} for {want}, {} in all", most(&end), end["wire_bytes"]);
        assert!((most(&end) / want - 1.0).abs() < 0.05, "{k} more: {end}, not {want}");
        // All links carry as much, so that is the mean too.
        assert!(end["wire_bytes"].as_f64().unwrap() > 0.95 * want * (n + k), "{k} more: {end}, not {want}");
        if k == 0.0 {
            let reduced = train(at, "4", &["parallel.sync=allreduce"], "reduced");
            assert!((most(&end) / most(&reduced) - 1.0).abs() < 0.05, "{reduced} for {end}");
        }
    }
}

/// Running statistics of a batch norm are those of the ranks that have samples: one that only serves has never seen any.
#[test]
fn statistics_are_those_of_ranks_with_samples() {
    let job = JOB.replace("outputs = 32 }, ", "outputs = 32 }, \"batch_norm\", ");
    let folder = folder(&job.replace("best = \"val_accuracy\"", "best = \"none\""));
    let at = folder.path();
    let floats = |run: &str| {
        let bytes = numbers(at, run);
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
    };
    train(at, "2", &["parallel.sync=ps"], "beside");
    train(at, "3", &["parallel.sync=ps", "parallel.servers.ranks=1"], "apart");
    let (beside, apart) = (floats("beside"), floats("apart"));
    let far = beside.iter().zip(&apart).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(beside.len() == apart.len() && far < 1e-4, "off by {far}");
    let losses = |run: &str| crate::ranks::losses(&at.join(run));
    assert_eq!(losses("beside"), losses("apart"));
}

/// A worker that is alone takes the blocks in their order, and the server applies what a rank without servers would.
#[test]
fn one_worker_has_the_bits_of_one_rank() {
    let folder = folder(&digits("steps = 40").replace("best = \"val_loss\"", LAST));
    let at = folder.path();
    for clip in ["train.clip=0", "train.clip=0.5"] {
        let sets = if clip.ends_with("=0") { vec![] } else { vec!["--set", clip] };
        let run = |sync: &str, output: &str| {
            let sync = format!("parallel.sync={sync}");
            let args = ["train", "job.toml", "--ranks", "1", "--set", &sync, "--output", output, "--json"];
            json(at, &[&args[..], &sets[..]].concat()).pop().unwrap()
        };
        run("allreduce", "plain");
        let end = run("ps-async", "served");
        assert_eq!(end["staleness_max"], 0, "{end}");
        assert!(numbers(at, "served") == numbers(at, "plain"), "{clip}: the same bits");
        json(at, &["resume", "served/checkpoints/step-00000015", "--ranks", "1", "--json"]);
        assert!(numbers(at, "served") == numbers(at, "plain"), "{clip}: the same bits after it was resumed");
        fs::remove_dir_all(at.join("plain")).unwrap();
        fs::remove_dir_all(at.join("served")).unwrap();
    }
}

/// Four workers come near the accuracy of an all-reduce in every mode, and every sample counts once in every epoch.
#[test]
fn digits_are_learnt_in_every_mode() {
    let folder = folder(&digits("epochs = 25"));
    let at = folder.path();
    let accuracy = |run: &Value| run["metrics"]["test_accuracy"].as_f64().unwrap();
    let plain = train(at, "4", &["parallel.sync=allreduce"], "plain");
    for (sync, ranks, servers) in [
        ("ps", "4", "servers=1"),
        ("ps-bounded", "4", "servers=1"),
        ("ps-async", "4", "servers=3"),
        ("ps-async", "5", "servers.ranks=1"),
    ] {
        let output = format!("{sync} of {ranks}");
        let end =
            train(at, ranks, &[&format!("parallel.sync={sync}"), &format!("parallel.{servers}")], &output);
        let (a, b) = (accuracy(&end), accuracy(&plain));
        println!("{sync}: {a} for {b}, staleness {} {}", end["staleness_mean"], end["staleness_max"]);
        // Of 360 samples to test, five.
        assert!(a >= b - 0.015, "{sync}: {a} for {b}");
        assert_eq!(end["ledger"]["exact"], true, "{sync}: {end}");
        assert_eq!(end["staleness_max"].as_u64().unwrap() > 0, sync != "ps", "{sync}: {end}");
    }
}

/// A job that never ends by itself, with servers; the model is so small that one of two servers holds nothing.
fn endless(sync: &str, output: &str) -> String {
    endless_on(sync, "2", output)
}

fn endless_on(sync: &str, servers: &str, output: &str) -> String {
    let servers = format!("threads = 1\nsync = \"{sync}\"\nservers = {servers}");
    let job = JOB.replace("epochs = 4", "epochs = 1000000").replace("threads = 1", &servers);
    job.replace("every_steps = 10", output)
}

/// Workers and the servers beside them are killed, and others join: the run goes on, and every sample counts once in every epoch. The long form is
/// `bench/servers.py chaos`.
#[test]
fn killed_workers_and_servers_lose_no_sample() {
    for (sync, servers) in [("ps-async", "2"), ("ps-bounded", "2"), ("ps-async", "{ ranks = 1 }")] {
        let folder = folder(&endless_on(sync, servers, "every_steps = 100"));
        let chaos = "kill=600ms,join=600ms,seed=5";
        let args = ["train", "job.toml", "--elastic", "--processes", "3", "--json", "--output", "run"];
        let mut run = Watched::start(command(folder.path(), &[&args[..], &["--chaos", chaos]].concat()));
        run.until(|line| is_generation(line, 6) && line["step"].as_u64() > Some(100));
        let summary = run.interrupt();
        println!("{sync}, {servers}: {summary}");
        assert!(summary["ranks_lost"].as_u64() >= Some(2), "{summary}");
        assert!(summary["ranks_joined"].as_u64() >= Some(1), "{summary}");
        assert_eq!(summary["ledger"]["exact"], true, "{summary}");
    }
}

/// What a rank goes on with when its server's neighbour was killed is what all had at the last meeting, the optimizer's state too: a run that resumes
/// from the checkpoint of that moment has the same bits. Here ranks meet only where there is a checkpoint.
#[test]
fn a_survivor_goes_on_from_the_last_meeting() {
    let job = endless("ps-async", "every_steps = 4\nkeep = 1000");
    let folder = folder(&job.replace("best = \"val_accuracy\"", "best = \"none\""));
    let at = folder.path();
    let file = |step: u64, name: &str| at.join(format!("run/checkpoints/step-{step:08}/{name}"));
    let tensors = |step: u64| {
        ["model.safetensors", "moment1.safetensors", "moment2.safetensors"]
            .map(|name| fs::read(file(step, name)).unwrap())
    };
    let saved =
        |line: &Value, step: u64| line["event"] == "checkpoint" && line["step"].as_u64() >= Some(step);
    for attempt in 0.. {
        let args = ["train", "job.toml", "--elastic", "--processes", "2", "--json", "--output", "run"];
        let mut run = Watched::start(command(at, &[&args[..], &["--overwrite"]].concat()));
        let pids = pids(&run.until(|line| line["event"] == "placed"));
        run.until(|line| saved(line, 20));
        send(pids[1], Signal::KILL);
        let second = run.until(|line| is_generation(line, 2));
        let from = second["step"].as_u64().unwrap();
        run.until(|line| saved(line, from + 12));
        run.interrupt();
        if !file(from, "model.safetensors").exists() {
            // A machine that is very busy: ranks met after some time, without a checkpoint.
            assert!(attempt < 5, "no checkpoint of step {from}");
            continue;
        }
        let survivor = tensors(from + 8);
        let checkpoint = format!("run/checkpoints/step-{from:08}");
        let args = ["resume", &checkpoint, "--ranks", "1", "--set", "parallel.servers=1", "--json"];
        let mut again = Watched::start(command(at, &args));
        again.until(|line| saved(line, from + 12));
        again.interrupt();
        assert!(tensors(from + 8) == survivor, "the same bits after step {from}");
        return;
    }
}

/// Whoever comes with another secret or another job is turned away in words; the run goes on, and every sample counts once. (What a rank that was let in may
/// not ask of a server is tested beside the servers; another version, beside the rendezvous.)
#[test]
fn strangers_are_turned_away() {
    let folder = folder(&endless("ps-async", "every_steps = 100"));
    let at = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let with = |secret: &str, args: &[&str]| {
        let mut command = command(folder.path(), args);
        command.env("POLYREME_SECRET", secret);
        command
    };
    let args =
        ["train", "job.toml", "--elastic", "--processes", "2", "--listen", &at, "--json", "--output", "run"];
    let mut run = Watched::start(with(SECRET, &args));
    run.until(|line| line["event"] == "checkpoint");
    let other_secret = "ab".repeat(32);
    for (secret, more, said) in [
        (other_secret.as_str(), vec![], "another secret"),
        (SECRET, vec!["--set", "train.optimizer.lr=0.5"], "not those of the run's ranks"),
        (SECRET, vec!["--set", "parallel.servers=1"], "not those of the run's ranks"),
    ] {
        let join = [&["join", &at, "job.toml"][..], &more].concat();
        let out = with(secret, &join).output().unwrap();
        let errors = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && errors.contains(said), "{more:?}: {errors}");
    }
    run.until(|line| line["event"] == "checkpoint");
    let summary = run.interrupt();
    assert_eq!((&summary["ledger"]["exact"], &summary["ranks_lost"]), (&Value::from(true), &Value::from(0)));
}

/// What servers cannot do is refused before anything runs.
#[test]
fn what_servers_cannot_do_is_refused() {
    let folder = folder(&digits("steps = 4"));
    for (set, said) in [
        ("parallel.reproducible=true", "applies gradients as they come"),
        ("parallel.wire=int8", "works where each rank has the whole model, and not with `wire`"),
        ("train.ema=0.9", "does not work with `train.ema`"),
        ("parallel.servers=3", "a rank hosts one server at most"),
        ("parallel.servers.ranks=2", "leaves no rank that learns: of 2, 2 only serve"),
    ] {
        let args =
            ["train", "job.toml", "--ranks", "2", "--set", "parallel.sync=ps-async", "--output", "run"];
        let out = polyreme(folder.path(), &[&args[..], &["--set", set]].concat());
        let err = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{set}: {err}");
        assert!(err.contains(said), "{set}: {err}");
        assert!(!folder.path().join("run").exists(), "no folder is made");
    }
}
