//! Gradients that travel in fewer bytes, through the binary: processes over sockets.

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

/// The last line of a run of two processes over sockets.
fn train(folder: &Path, wire: &str, output: &str) -> Value {
    // Loopback is faster than codecs.
    let wire = match wire.strip_prefix('{') {
        Some(table) => format!("parallel.wire={{ force = true, {table}"),
        None if wire == "f32" || wire == "auto" => format!("parallel.wire={wire}"),
        None => format!("parallel.wire={{ kind = \"{wire}\", force = true }}"),
    };
    let args = ["train", "job.toml", "--output", output, "--set", &wire];
    json(folder, &[&args[..], &OVER_SOCKETS].concat()).pop().unwrap()
}

const OVER_SOCKETS: [&str; 5] = ["--processes", "2", "--transport", "tcp", "--json"];

/// Every format reaches the accuracy of f32, and sends the stated share of its bytes.
#[test]
fn digits_are_learnt_with_fewer_bytes() {
    let folder = folder(&digits("epochs = 8"));
    let accuracy = |run: &Value| run["metrics"]["test_accuracy"].as_f64().unwrap();
    let sent = |run: &Value| run["wire_bytes"].as_u64().unwrap() as f64;
    let plain = train(folder.path(), "f32", "f32");
    assert!(accuracy(&plain) > 0.95, "{plain}");
    // Of 43,056 numbers, matrices of 32x9, 32x288, 64x512 and 10x64 are two columns and rows; 144 are biases.
    let factors = (2 * (41 + 320 + 576 + 74) + 144) as f64 / 43_056.0;
    let shares = [
        ("bf16", 0.5),
        ("f16", 0.5 + 1.0 / 1024.0),
        ("int8", 0.25 + 1.0 / 256.0),
        ("powersgd", factors),
        ("{ kind = \"topk\", share = 0.1 }", 0.15),
    ];
    for (k, (wire, share)) in shares.into_iter().enumerate() {
        let coded = train(folder.path(), wire, &format!("coded{k}"));
        let (a, b) = (accuracy(&coded), accuracy(&plain));
        assert!((a - b).abs() <= 0.015, "{wire}: {a} for {b}");
        // The totals of a step are sent beside the codes.
        let ratio = sent(&coded) / sent(&plain);
        assert!((ratio - share).abs() < 0.0025, "{wire}: {ratio} of the bytes for {share}");
    }
}

/// Signs are for gradient descent: they reach its accuracy, and are the stated share of the bytes after `start`.
#[test]
fn signs_are_for_sgd() {
    let job = digits("epochs = 8");
    let adamw = "{ kind = \"adamw\", lr = 4e-3, weight_decay = 0.01 }";
    assert!(job.contains(adamw));
    let folder = folder(&job.replace(adamw, "{ kind = \"sgd\", lr = 0.05, momentum = 0.9 }"));
    let plain = train(folder.path(), "f32", "f32");
    let signs = train(folder.path(), "{ kind = \"onebit\", start = 20 }", "signs");
    let [a, b] = [&signs, &plain].map(|run| run["metrics"]["test_accuracy"].as_f64().unwrap());
    assert!(b > 0.94 && (a - b).abs() <= 0.015, "{a} for {b}");
    let dense = 20.0 / plain["steps"].as_f64().unwrap();
    let share = dense + (1.0 - dense) * (1.0 / 32.0 + 1.0 / 256.0);
    let [sent, all] = [&signs, &plain].map(|run| run["wire_bytes"].as_u64().unwrap() as f64);
    assert!((sent / all - share).abs() < 0.0025, "{} of the bytes for {share}", sent / all);
}

/// A run that is resumed has the bits of one that went on: what codes have lost is saved with it, for each rank.
#[test]
fn a_resumed_run_has_the_same_bits() {
    let job =
        digits("steps = 40").replace("best = \"val_loss\"", "best = \"none\"\nevery_steps = 15\nkeep = 9");
    let folder = folder(&job);
    let model = || fs::read(folder.path().join("run/model.safetensors")).unwrap();
    let from = "run/checkpoints/step-00000015";
    // The checkpoint is before gradients travel as factors, and then after.
    for (start, has_factors) in [(20, false), (5, true)] {
        train(folder.path(), &format!("{{ kind = \"powersgd\", rank = 1, start = {start} }}"), "run");
        let whole = model();
        let factors = fs::read(folder.path().join(from).join("factors.safetensors")).unwrap();
        assert_eq!(factors[factors.len() / 2..].iter().any(|b| *b != 0), has_factors);
        json(folder.path(), &[&["resume", from][..], &OVER_SOCKETS].concat());
        assert!(model() == whole, "the same bits");
        fs::remove_dir_all(folder.path().join("run")).unwrap();
    }
    train(folder.path(), "int8", "run");
    let whole = model();
    let residual = fs::read(folder.path().join(from).join("residual.safetensors")).unwrap();
    assert!(residual.windows(6).any(|w| w == b"rank1."), "each rank has its own");
    // A copy, because what follows the checkpoint makes way.
    let copy = folder.path().join("copy");
    fs::create_dir_all(copy.join("checkpoints")).unwrap();
    let to = copy.join("checkpoints/step-00000015");
    fs::create_dir(&to).unwrap();
    for file in fs::read_dir(folder.path().join(from)).unwrap().flatten() {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    json(folder.path(), &[&["resume", from][..], &OVER_SOCKETS].concat());
    assert!(model() == whole, "the same bits");
    // One rank takes over what both had lost, and has nothing to send.
    let alone = json(folder.path(), &["resume", "copy", "--ranks", "1", "--json"]);
    assert_eq!(alone.last().unwrap()["wire_bytes"], 0);
}

/// Ranks that share memory send nothing: the run is refused before it begins.
#[test]
fn memory_is_no_wire() {
    let folder = folder(&digits("steps = 4"));
    for ranks in [&["--ranks", "2"][..], &["--processes", "2"]] {
        let args = ["train", "job.toml", "--set", "parallel.wire=int8", "--output", "run"];
        let out = polyreme(folder.path(), &[&args[..], ranks].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(said.contains("those that share memory send nothing"), "{said}");
        assert!(!folder.path().join("run").exists(), "no folder is made");
    }
}

/// What is asked for is measured first: a run says how long sums take with it and without, or trains; `auto` always trains.
#[test]
fn a_format_must_gain_something() {
    let folder = folder(&digits("steps = 4"));
    let args = ["train", "job.toml", "--set", "parallel.wire=topk", "--output", "run"];
    let out = polyreme(folder.path(), &[&args[..], &OVER_SOCKETS].concat());
    let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    // Over loopback either may be faster, but nothing else can happen.
    if !out.status.success() {
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(said.contains("gains nothing here: a sum of 1 MiB of gradients takes"), "{said}");
        assert!(said.contains("ms as topk and") && said.contains("force = true"), "{said}");
        assert!(!folder.path().join("run").exists(), "no folder is made");
    }
    let auto = train(folder.path(), "auto", "auto");
    assert!(auto["wire_bytes"].as_u64().unwrap() > 0, "{auto}");
    // In memory there is nothing to choose.
    let shm = json(
        folder.path(),
        &["train", "job.toml", "--set", "parallel.wire=auto", "--output", "shm", "--ranks", "2", "--json"],
    );
    assert_eq!(shm.last().unwrap()["wire_bytes"], 0);
}
