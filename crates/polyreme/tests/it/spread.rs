//! Sets whose files lie on different hosts: ranks with folders of their own, which have nothing in common but a job file.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use tempfile::TempDir;

use crate::binary::{command, json, polyreme};

const SECRET: &str = "8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a";

const TABLES: &str = r#"
[model]
layers = [{ kind = "linear", outputs = 16 }, "relu", { kind = "linear" }]
[data]
kind = "csv"
path = "part-*.csv"
test = "test-*.csv"
spread = true
[train]
batch = 32
epochs = 3
log_every = 1
[parallel]
threads = 1
reproducible = true
[output]
every_steps = 5
keep = 10
"#;

/// Rows of a table with blanks, words, and a column whose mean depends on the order of sums.
fn rows(range: std::ops::Range<usize>) -> String {
    let mut text = String::from("a,b,kind,label\n");
    for i in range {
        let a = if i % 11 == 3 { String::new() } else { format!("{}.{}", i * 37 % 101, i % 7) };
        let (b, kind) = (1e5 / (i + 1) as f64, ["red", "green", "blue", "grey"][i * i % 4]);
        writeln!(text, "{a},{b},{kind},{}", ["ant", "bee", "cow"][i / 40 % 3]).unwrap();
    }
    text
}

/// The files of a set.
fn files() -> Vec<(&'static str, String)> {
    let parts =
        [("part-1.csv", 0..50), ("part-2.csv", 50..120), ("part-3.csv", 120..130), ("part-4.csv", 130..247)];
    let tests = [("test-1.csv", 247..260), ("test-2.csv", 260..300)];
    parts.into_iter().chain(tests).map(|(name, range)| (name, rows(range))).collect()
}

/// A folder for each host, with the job and these files of the set; the last folder has all of them.
fn hosts(job: &str, files: &[(&str, String)], has: &[&[&str]]) -> (TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
    let folders: Vec<PathBuf> = (0..=has.len()).map(|k| folder.path().join(format!("host{k}"))).collect();
    for (host, names) in folders.iter().zip(has.iter().copied().chain([&all[..]])) {
        fs::create_dir(host).unwrap();
        fs::write(host.join("job.toml"), job).unwrap();
        for (name, content) in files.iter().filter(|(name, _)| names.contains(name)) {
            fs::write(host.join(name), content).unwrap();
        }
    }
    (folder, folders)
}

/// Runs a rank in each folder, each on a host of its own as far as they know; how they ended.
fn ranks(folders: &[PathBuf], args: &[&str]) -> Vec<Output> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |(rank, folder): (usize, &PathBuf)| {
        let mut command = command(folder, args);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", folders.len().to_string());
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]);
        command.env("POLYREME_SECRET", SECRET).env("POLYREME_HOST", format!("host{rank}"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<_> = folders.iter().enumerate().map(start).collect();
    ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

#[track_caller]
fn all_succeed(outputs: &[Output]) {
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// What is in a model's file, but for the job, which says where the data were.
pub(crate) fn model(run: &Path) -> (serde_json::Value, Vec<u8>) {
    let file = fs::read(run.join("model.safetensors")).unwrap();
    let (length, rest) = file.split_at(8);
    let (header, weights) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    assert!(header["__metadata__"].as_object_mut().unwrap().remove("job").is_some());
    (header, weights.to_vec())
}

const TRAIN: [&str; 5] = ["train", "job.toml", "--json", "--output", "run"];

/// Weights, classes and what is known of columns are those of one host, bit for bit. A file that two hosts have
/// counts once, and one of them has no file for the test.
#[test]
fn a_spread_table_trains_as_on_one_host() {
    let has: [&[&str]; 3] = [
        &["part-2.csv", "test-2.csv"],
        &["part-4.csv", "part-1.csv"],
        &["part-3.csv", "part-1.csv", "test-1.csv"],
    ];
    let (_folder, folders) = hosts(TABLES, &files(), &has);
    let (spread, whole) = folders.split_at(3);
    json(&whole[0], &[&TRAIN[..], &["--ranks", "1"]].concat());
    all_succeed(&ranks(spread, &TRAIN));
    let (run, alone) = (spread[0].join("run"), whole[0].join("run"));
    assert!(model(&run) == model(&alone), "the weights of one host");
    let scores = |run: &Path| {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines
            .map(|line| [line["train_loss"].clone(), line["val_loss"].clone(), line["test_loss"].clone()])
            .collect::<Vec<_>>()
    };
    assert_eq!(scores(&run), scores(&alone));
}

/// Each rank's part of the set is what it has itself, as far as hosts have as much; nothing is lost where they have not.
#[test]
fn ranks_read_their_own_parts() {
    let job = TABLES.replace("spread = true", "spread = true\norder = \"parts\"");
    // The names are in the order of ranks, so that one host has the same order.
    let has: [&[&str]; 3] =
        [&["part-1.csv", "test-1.csv"], &["part-2.csv", "part-3.csv"], &["part-4.csv", "test-2.csv"]];
    let (_folder, folders) = hosts(&job, &files(), &has);
    let (spread, whole) = folders.split_at(3);
    json(&whole[0], &[&TRAIN[..], &["--ranks", "1"]].concat());
    all_succeed(&ranks(spread, &TRAIN));
    assert!(model(&spread[0].join("run")) == model(&whole[0].join("run")));
}

/// What ranks say of files that do not make a set; each says the same, and no folder is made.
#[test]
fn files_that_make_no_set_are_named() {
    let check = |change: &dyn Fn(&[PathBuf]), job: &str, said: &[&str]| {
        let has: [&[&str]; 2] =
            [&["part-1.csv", "part-2.csv", "test-1.csv", "test-2.csv"], &["part-3.csv", "part-4.csv"]];
        let (_folder, folders) = hosts(job, &files(), &has);
        change(&folders);
        for output in ranks(&folders[..2], &TRAIN) {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success(), "{text}");
            said.iter().for_each(|part| assert!(text.contains(part), "{text} lacks {part}"));
        }
        assert!(!folders[0].join("run").exists());
    };
    let differs = |folders: &[PathBuf]| {
        let other = rows(0..50).replacen("red", "RED", 1);
        fs::write(folders[1].join("part-1.csv"), other).unwrap();
    };
    check(&differs, TABLES, &["part-1.csv is not the same on rank 0 and on rank 1", "other content"]);
    let longer = |folders: &[PathBuf]| fs::write(folders[1].join("part-1.csv"), rows(0..51)).unwrap();
    check(&longer, TABLES, &["part-1.csv is not the same", "bytes and"]);
    let gap = |folders: &[PathBuf]| fs::remove_file(folders[1].join("part-3.csv")).unwrap();
    check(&gap, TABLES, &["part-3.csv: not found; no rank has it"]);
    let listed = TABLES.replace("\"part-*.csv\"", "[\"part-*.csv\", \"extra.csv\"]");
    check(&|_| (), &listed, &["extra.csv: not found; no rank has such a file"]);
    let broken =
        |folders: &[PathBuf]| fs::write(folders[1].join("part-4.csv"), "a,b,kind\n1,2,red\n").unwrap();
    check(&broken, TABLES, &["part-4.csv lacks \"label\""]);
}

/// What cannot be spread is refused before ranks meet.
#[test]
fn what_cannot_be_spread_is_refused() {
    let (_folder, folders) = hosts(TABLES, &files(), &[]);
    let said = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = TRAIN.into_iter().chain(sets).collect();
        let output = polyreme(&folders[0], &args);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let elastic = said(&["parallel.elastic={min=1}", "parallel.reproducible=true"]);
    assert!(elastic.contains("`data.spread` does not work with `parallel.elastic`"), "{elastic}");
    let texts = said(&["data.text=kind"]);
    assert!(texts.contains("`data.spread` does not work with `data.text`"), "{texts}");
    let auto = said(&["parallel.stage=auto"]);
    assert!(auto.contains("`data.spread` does not work with `parallel.stage = \"auto\"`"), "{auto}");
    let kind = said(&["data.kind=synthetic"]);
    assert!(kind.contains("spread"), "{kind}");
    json(&folders[0], &[&TRAIN[..], &["--ranks", "2", "--set", "train.epochs=1"]].concat());
    let eval = polyreme(&folders[0], &["eval", "run"]);
    let text = String::from_utf8_lossy(&eval.stderr);
    assert!(!eval.status.success() && text.contains("--set data.spread=false"), "{text}");
    let eval = polyreme(&folders[0], &["eval", "run", "--set", "data.spread=false"]);
    assert!(eval.status.success(), "{}", String::from_utf8_lossy(&eval.stderr));
}
