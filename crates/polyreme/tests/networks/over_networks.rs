//! Ranks on separate hosts, over links with little bandwidth or long delays: they train as one rank does.

use std::process::Command;

use crate::hosts::{Hosts, Link, root};

const BINARY: &str = env!("CARGO_BIN_EXE_polyreme");

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
        hosts.run(BINARY, 1, &args.iter().map(String::as_str).collect::<Vec<_>>());
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
    hosts.run(BINARY, 2, &four.iter().map(String::as_str).collect::<Vec<_>>());
    let model = |name: &str| std::fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    assert!(model("four") == model("alone"));
}

/// Two hosts with two ranks each: matrices are split inside of a host, and only what crosses the cut between two stages goes over the
/// link. The weights are those of the same four ranks on one host, bit for bit.
#[test]
fn a_split_model_trains_over_two_hosts() {
    let _machine = crate::alone();
    let folder = tempfile::tempdir().unwrap();
    let hosts = Hosts::new(2, Link::Mbit(1000));
    let train = |name: &str, more: &[&str]| -> Vec<String> {
        let output = folder.path().join(name).display().to_string();
        let common =
            ["train", "examples/gpt.toml", "--json", "--threads", "1", "--no-pin", "--output", &output];
        let small = [
            "model.width=32",
            "model.context=32",
            "data.validation=0",
            "data.fraction=0.2",
            "train.steps=40",
        ];
        let mesh = [
            "parallel.tensor=2",
            "parallel.stage=2",
            "parallel.microbatches=4",
            "parallel.cuts=[\"blocks.2\"]",
        ];
        let sets = small.iter().chain(&mesh).flat_map(|set| ["--set", set]);
        common.into_iter().chain(sets).chain(more.iter().copied()).map(String::from).collect()
    };
    let here = train("here", &["--processes", "4"]);
    let output = Command::new(BINARY).args(&here).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sent = hosts.sent_bytes(0);
    let there = train("there", &[]);
    hosts.run(BINARY, 2, &there.iter().map(String::as_str).collect::<Vec<_>>());
    let model = |name: &str| std::fs::read(folder.path().join(name).join("model.safetensors")).unwrap();
    assert!(model("there") == model("here"));
    // Links are measured with 13 MB. A step sends the activations of 16 samples of 32 by 32 floats, of which each of the two ranks has
    // half: 3 MB in 40 steps. Sums of split matrices would be a dozen times as much.
    let sent = hosts.sent_bytes(0) - sent;
    println!("{sent} bytes left the first host");
    assert!(sent < 20_000_000, "{sent}");
}
