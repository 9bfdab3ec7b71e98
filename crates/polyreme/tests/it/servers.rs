//! Parameter servers through the binary: processes over sockets, and threads.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::binary::{folder, json, polyreme, root};

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
    for (sync, more) in [("ps", "1"), ("ps-bounded", "1"), ("ps-async", "3")] {
        let servers = format!("parallel.servers={more}");
        let end = train(at, "4", &[&format!("parallel.sync={sync}"), &servers], sync);
        let (a, b) = (accuracy(&end), accuracy(&plain));
        println!("{sync}: {a} for {b}, staleness {} {}", end["staleness_mean"], end["staleness_max"]);
        // Of 360 samples to test, five.
        assert!(a >= b - 0.015, "{sync}: {a} for {b}");
        assert_eq!(end["ledger"]["exact"], true, "{sync}: {end}");
        assert_eq!(end["staleness_max"].as_u64().unwrap() > 0, sync != "ps", "{sync}: {end}");
    }
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
