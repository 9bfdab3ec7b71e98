//! A set whose files lie on three hosts that have no storage in common: it trains as on one.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::hosts::{Hosts, Link};

const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const BINARY: &str = env!("CARGO_BIN_EXE_polyreme");

const JOB: &str = r#"
[model]
layers = [{ kind = "linear", outputs = 32 }, "relu", { kind = "linear" }]
[data]
kind = "jsonl"
path = "part-*.jsonl"
label = "label"
spread = true
[train]
batch = 48
epochs = 2
[parallel]
reproducible = true
threads = 1
[output]
every_steps = 10
keep = 10
"#;

/// Lines of a table with numbers, words and blanks.
fn lines(range: std::ops::Range<usize>) -> String {
    let mut text = String::new();
    for i in range {
        let a = if i % 13 == 5 { "null".to_string() } else { format!("{}", 1e4 / (i + 1) as f64) };
        let (kind, label) = (["red", "green", "blue"][i * i % 3], i / 90 % 4);
        writeln!(text, "{{\"a\": {a}, \"b\": {}, \"kind\": \"{kind}\", \"label\": {label}}}", i * 53 % 89)
            .unwrap();
    }
    text
}

#[test]
fn three_hosts_train_as_one() {
    let _machine = crate::alone();
    let folder = tempfile::tempdir().unwrap();
    let host = |k: usize| -> PathBuf { folder.path().join(format!("host{k}")) };
    // The last folder has all files. The second file is on two hosts.
    let has: [&[usize]; 4] = [&[1, 4], &[0, 2], &[3, 1], &[0, 1, 2, 3, 4]];
    for (k, parts) in has.iter().enumerate() {
        fs::create_dir(host(k)).unwrap();
        fs::write(host(k).join("job.toml"), JOB).unwrap();
        for part in parts.iter() {
            let (first, n) = (200 * part, if *part == 3 { 60 } else { 200 });
            fs::write(host(k).join(format!("part-{part}.jsonl")), lines(first..first + n)).unwrap();
        }
    }
    // On every host the files lie under the same path, and nobody sees those of the others.
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    let on = |network: &Hosts, host_idx: usize, k: usize, args: &[&str]| -> Command {
        let mut command = network.command(host_idx, "sh");
        let script = "mount --bind \"$1\" \"$2\" && cd \"$2\" && shift 2 && exec \"$@\"";
        command.args(["-c", script, "sh"]).arg(host(k)).arg(&data).arg(BINARY).args(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let hosts = Hosts::new(3, Link::Mbit(1000));
    let train = ["train", "job.toml", "--json", "--no-pin", "--output", "run"];
    let alone = on(&hosts, 0, 3, &[&train[..], &["--ranks", "1"]].concat()).output().unwrap();
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    let together = |args: &[&str]| {
        let start = |rank: usize| -> Child {
            let mut command = on(&hosts, rank, rank, args);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3").env("POLYREME_SECRET", SECRET);
            command.env("MASTER_ADDR", hosts.address(0)).env("MASTER_PORT", "29500").spawn().unwrap()
        };
        let ranks: Vec<Child> = (0..3).map(start).collect();
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
        }
    };
    let model = |k: usize| fs::read(host(k).join("run/model.safetensors")).unwrap();
    together(&train);
    assert!(model(0) == model(3), "the weights of one host, bit for bit");
    // Again from the middle: only rank 0 has the run.
    fs::remove_file(host(0).join("run/model.safetensors")).unwrap();
    together(&["resume", "run/checkpoints/step-00000010", "--json", "--no-pin"]);
    assert!(model(0) == model(3), "the weights of a run that was resumed");
    assert!(!Path::new(&host(1)).join("run").exists());
}
