//! Ranks on hosts of their own, over links that are slow or late: they train, they use the bandwidth there is, and
//! what they send is hidden behind what they compute.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::hosts::{Hosts, Link};

const BINARY: &str = env!("CARGO_BIN_EXE_polyreme");

/// Runs `polyreme` as one rank on each host, and returns what rank 0 printed.
fn on_all(hosts: &Hosts, n: usize, args: &[&str]) -> String {
    ranks_on(hosts, n, 1, args)
}

/// The same with ranks `k` and `k + 1` on one host and so on, if each has two.
fn ranks_on(hosts: &Hosts, n: usize, per_host: usize, args: &[&str]) -> String {
    let start = |rank: usize| -> Child {
        let mut command: Command = hosts.command(rank / per_host, BINARY);
        command.args(args).env("RANK", rank.to_string()).env("WORLD_SIZE", n.to_string());
        command.env("MASTER_ADDR", hosts.address(0)).env("MASTER_PORT", "29500");
        command.env("POLYREME_SECRET", "a secret of this test").current_dir(root());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks: Vec<Child> = (0..n).map(start).collect();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    for (rank, output) in outputs.iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank} of {args:?}: {text}");
    }
    String::from_utf8_lossy(&outputs[0].stdout).into_owned()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// The last line that is JSON and has `key`.
fn last(text: &str, key: &str) -> Value {
    let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.rfind(|value| value.get(key).is_some()).unwrap_or_else(|| panic!("no {key} in {text}"))
}

const DIGITS: [&str; 7] =
    ["train", "examples/digits.toml", "--transport", "tcp", "--json", "--set", "train.epochs=2"];

#[test]
fn four_hosts_train_whatever_the_links() {
    let _machine = crate::alone();
    let folder = tempfile::tempdir().unwrap();
    let model = |name: &str| std::fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    let train = |name: &str| {
        let output = folder.path().join(name).display().to_string();
        let more = ["--set", "parallel.reproducible=true", "--threads", "1", "--no-pin", "--output", &output];
        [&DIGITS[..], &more[..]].concat().iter().map(|s| s.to_string()).collect::<Vec<_>>()
    };
    let alone = train("alone");
    let status = Command::new(BINARY).args(&alone).arg("--ranks=1").current_dir(root()).output().unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    for link in [Link::Mbit(1000), Link::Mbit(100), Link::DelayMs(1), Link::DelayMs(10)] {
        let hosts = Hosts::new(4, link);
        let name = format!("{link:?}");
        let args = train(&name);
        on_all(&hosts, 4, &args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(model(&name) == model("alone"), "{link:?}: the weights of one rank, bit for bit");
    }
}

/// Two hosts with two ranks each: memory inside, one stream between.
#[test]
fn two_levels_give_the_weights_of_one_rank() {
    let _machine = crate::alone();
    let folder = tempfile::tempdir().unwrap();
    let hosts = Hosts::new(2, Link::Mbit(1000));
    let train = |name: &str, more: &[&str]| -> Vec<String> {
        let output = folder.path().join(name).display().to_string();
        let common = ["train", "examples/digits.toml", "--json", "--threads", "1", "--no-pin"];
        let set = ["--set", "train.epochs=2", "--set", "parallel.reproducible=true", "--output", &output];
        [&common[..], &set[..], more].concat().iter().map(|s| s.to_string()).collect()
    };
    let alone = train("alone", &["--ranks", "1"]);
    let output = Command::new(BINARY).args(&alone).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let four = train("four", &[]);
    ranks_on(&hosts, 4, 2, &four.iter().map(String::as_str).collect::<Vec<_>>());
    let model = |name: &str| std::fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    assert!(model("four") == model("alone"));
    let text = ranks_on(
        &hosts,
        4,
        2,
        &["bench", "collective", "--op", "allreduce", "--sizes", "8M", "--json", "--no-pin"],
    );
    let us = last(&text, "us")["us"].as_f64().unwrap();
    // A host's data cross the link once: 8 MiB each way at 1 Gbit/s. Four ranks in one ring would take half as long again.
    let share = (8 << 20) as f64 * 8.0 / us / 1000.0;
    assert!(cfg!(debug_assertions) || share >= 0.7, "{us} us: {share:.2} of the link");
}

/// Measured in a release build: checks of the development build slow down what is sent more than what is computed.
#[cfg(not(debug_assertions))]
#[test]
fn the_ring_fills_the_link() {
    let _machine = crate::alone();
    // Each rank sends and receives 2 (n - 1) / n of the buffer.
    for (mbit, bytes) in [(1000, 16usize << 20), (100, 4 << 20)] {
        let hosts = Hosts::new(4, Link::Mbit(mbit));
        let size = bytes.to_string();
        let text = on_all(
            &hosts,
            4,
            &[
                "bench",
                "collective",
                "--op",
                "allreduce",
                "--transport",
                "tcp",
                "--sizes",
                &size,
                "--json",
                "--no-pin",
            ],
        );
        let us = last(&text, "us")["us"].as_f64().unwrap();
        let sent_mbit_per_s = 1.5 * bytes as f64 * 8.0 / us;
        let share = sent_mbit_per_s / f64::from(mbit);
        assert!(share >= 0.85, "{sent_mbit_per_s:.0} Mbit/s of {mbit}");
    }
}

#[cfg(not(debug_assertions))]
#[test]
fn what_is_sent_is_hidden_behind_what_is_computed() {
    let _machine = crate::alone();
    const MBIT: u32 = 250;
    let hosts = Hosts::new(2, Link::Mbit(MBIT));
    let bench = |args: &[&str]| on_all(&hosts, 2, args);
    let step = ["bench", "step", "--job", "cnn", "--threads", "1", "--no-pin", "--steps", "7", "--json"];
    let report = last(&bench(&[&step[..], &["--transport", "tcp"]].concat()), "step_ms");
    let with = report["step_ms"].as_f64().unwrap();
    let local =
        Command::new(BINARY).args(step).args(["--ranks", "2", "--transport", "local"]).output().unwrap();
    let without = last(&String::from_utf8_lossy(&local.stdout), "step_ms")["step_ms"].as_f64().unwrap();
    // The gradients of cnn: 1.15 million numbers.
    let size = "4596000";
    let alone = [
        "bench",
        "collective",
        "--op",
        "allreduce",
        "--transport",
        "tcp",
        "--sizes",
        size,
        "--json",
        "--no-pin",
    ];
    let sending = last(&bench(&alone), "us")["us"].as_f64().unwrap() / 1e3;
    let hidden = 1.0 - (with - without) / sending;
    let what =
        format!("step {with:.0} ms over the link, {without:.0} without it, {sending:.0} ms of sending");
    println!("{what}: {:.0} % hidden", hidden * 100.0);
    assert!(hidden >= 0.5, "{what}: only {:.0} % is hidden", hidden * 100.0);
}
