//! Trained models that several ranks use together, through the binary: threads and processes against one rank.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::binary::{folder, json, polyreme};

/// Settings of a model that four ranks have together.
const SPLIT: [&str; 4] = ["--set", "parallel.tensor=2", "--set", "parallel.stage=2"];

fn metrics(folder: &Path, args: &[&str]) -> Vec<(String, f64)> {
    let report = json(folder, &[&["eval", "runs/job", "--json", "--threads", "1"], args].concat());
    assert_eq!(report.len(), 1, "one object: {report:?}");
    let metrics = report[0]["metrics"].as_object().unwrap();
    metrics.iter().map(|(name, value)| (name.clone(), value.as_f64().unwrap())).collect()
}

#[track_caller]
fn same_metrics(folder: &Path, args: &[&str], one: &[(String, f64)]) {
    let many = metrics(folder, args);
    assert_eq!(many.len(), one.len());
    for ((name, a), (other, b)) in one.iter().zip(&many) {
        assert!(name == other && (a - b).abs() <= 1e-5 * a.abs(), "{args:?}: {name} is {b} and not {a}");
    }
}

#[track_caller]
fn refused(folder: &Path, args: &[&str], words: &[&str]) {
    let out = polyreme(folder, args);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
    assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    assert!(out.stdout.is_empty(), "nothing was done");
}

#[test]
fn a_text_goes_on_alike_on_any_ranks() {
    let folder = folder(
        "[model]\nkind = 'gpt'\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 16\n\
         [data]\nkind = 'text'\npath = 'text.txt'\n\
         [train]\nbatch = 8\nsteps = 30\noptimizer = { kind = 'adamw', lr = 1e-2 }\n\
         [parallel]\ntensor = 2\nstage = 2\nmicrobatches = 4\n[output]\ntensorboard = false\n",
    );
    let folder = folder.path();
    fs::write(folder.join("text.txt"), "row, row, row your boat\n".repeat(120)).unwrap();
    json(folder, &["train", "job.toml", "--json", "--ranks", "4", "--threads", "1"]);
    let one = metrics(folder, &["--ranks", "1"]);
    // The ranks of the run, as threads; as processes that have two copies; and on other axes.
    same_metrics(folder, &[], &one);
    same_metrics(folder, &["--processes", "4"], &one);
    same_metrics(folder, &["--processes", "4", "--transport", "tcp", "--set", "parallel.stage=1"], &one);
    let text = |args: &[&str]| -> Value {
        let asked = ["predict", "runs/job", "--prompt", "row", "--length", "24", "--json", "--threads", "1"];
        json(folder, &[&asked[..], args].concat()).pop().unwrap()["text"].clone()
    };
    for how in [["--temperature", "0"], ["--seed", "3"]] {
        let alone = text(&[&how[..], &["--ranks", "1"]].concat());
        assert_eq!(alone, text(&how), "{how:?}, as threads");
        assert_eq!(alone, text(&[&how[..], &["--processes", "4"]].concat()), "{how:?}, as processes");
    }
    let out = polyreme(folder, &["eval", "runs/job", "--threads", "1"]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && said.lines().count() >= 4, "where the four ranks are: {said}");
    // What cannot be is said by the one process that was started.
    refused(folder, &["eval", "runs/job", "--ranks", "3"], &["tensor = 2, stage = 2", "use 4 ranks"]);
    let heads = ["eval", "runs/job", "--set", "parallel.tensor=4", "--set", "parallel.stage=1"];
    refused(folder, &heads, &["2 attention heads", "tensor = 4"]);
    refused(folder, &["predict", "runs/job", "--processes", "8"], &["2 copies of the model", "use 4 ranks"]);
    refused(folder, &["eval", "runs/job", "--set", "parallel.tensro=2"], &["tensro", "tensor"]);
}

#[test]
fn a_table_is_predicted_alike_on_any_ranks() {
    let folder = folder(
        "[model]\nkind = 'mlp'\nhidden = [16, 8]\n[data]\nkind = 'csv'\npath = 'train.csv'\nlabel = 'kind'\n\
         [train]\nbatch = 16\nepochs = 3\noptimizer = { kind = 'lamb', lr = 0.02 }\n\
         [output]\ntensorboard = false\n",
    );
    let folder = folder.path();
    let rows = |n: usize| {
        let row = |i: usize| {
            let (a, b) = ((i * 37 % 100) as f32 / 50.0 - 1.0, (i * 61 % 100) as f32 / 50.0 - 1.0);
            format!("{a},{b},{}\n", if a > b { "right" } else { "left" })
        };
        format!("a,b,kind\n{}", (0..n).map(row).collect::<String>())
    };
    fs::write(folder.join("train.csv"), rows(160)).unwrap();
    fs::write(folder.join("few.csv"), rows(3)).unwrap();
    fs::write(folder.join("many.csv"), rows(150)).unwrap();
    json(folder, &["train", "job.toml", "--json", "--ranks", "1"]);
    let one = metrics(folder, &[]);
    same_metrics(folder, &["--ranks", "3"], &one);
    // An optimizer that needs whole tensors says nothing about who may use the model.
    same_metrics(folder, &[&["--processes", "4"], &SPLIT[..]].concat(), &one);
    let asked = ["predict", "runs/job", "few.csv", "many.csv", "--json", "--threads", "1"];
    let alone = json(folder, &asked);
    assert_eq!(alone.len(), 153);
    for ranks in [&["--ranks", "3"][..], &[&["--processes", "4"], &SPLIT[..]].concat()] {
        let many = json(folder, &[&asked[..], ranks].concat());
        assert_eq!(many.len(), alone.len(), "{ranks:?}");
        for (a, b) in alone.iter().zip(&many) {
            assert_eq!((&a["sample"], &a["labels"][0]["label"]), (&b["sample"], &b["labels"][0]["label"]));
            let probability = |answer: &Value| answer["labels"][0]["probability"].as_f64().unwrap();
            assert!((probability(a) - probability(b)).abs() < 1e-5, "{ranks:?}: {a} and {b}");
        }
    }
    refused(folder, &["predict", "runs/job", "few.csv", "--set", "parallel.sequence=2"], &["sequence = 2"]);
}
