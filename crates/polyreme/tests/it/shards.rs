//! Shards of tar through the binary: they train to the bits of the folder that they were made of, and wrong ones are said.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::binary::{folder, json, root};
use crate::wrong_data::refusal;

const JOB: &str = "[model]\nlayers = ['flatten', 'linear']\n[data]\nkind = 'images'\npath = 'set'\nsize = [8, 8]\n\
                   validation = 0.2\n[train]\nbatch = 4\nepochs = 3\n[parallel]\nranks = 1\nthreads = 1\n\
                   [output]\ntensorboard = false\n";

/// A folder with a set of images, and two shards with the same ones in the same order, written by GNU tar.
fn with_images() -> TempDir {
    let made = folder(JOB);
    let set = made.path().join("set");
    for (class, names) in [
        ("cat", ["alpha.png", "baseline.jpg", "coarse.jpg", "grey.jpg", "grown.png", "half.jpg"]),
        ("dog", ["narrow.jpg", "odd.png", "palette.png", "progressive.jpg", "restarts.jpg", "whole.jpg"]),
    ] {
        fs::create_dir_all(set.join(class)).unwrap();
        for name in names {
            fs::copy(root().join("crates/data/references").join(name), set.join(class).join(name)).unwrap();
            let label = Path::new(name).with_extension("cls");
            fs::write(set.join(class).join(label), format!("{class}\n")).unwrap();
        }
        tar(&set, &format!("../{class}.tar"), &[class]);
    }
    made
}

fn tar(folder: &Path, name: &str, members: &[&str]) {
    let mut command = Command::new("tar");
    command.current_dir(folder).args(["--sort=name", "-cf", name]).args(members);
    assert!(command.status().unwrap().success());
}

#[test]
fn shards_train_to_the_bits_of_their_folder() {
    let made = with_images();
    let folder = made.path();
    let train = |name: &str, more: &[&str]| -> Value {
        let output = format!("runs/{name}");
        let args = [&["train", "job.toml", "--json", "--output", &output], more].concat();
        json(folder, &args).pop().unwrap()["metrics"].clone()
    };
    let shards = ["--set", "data.kind=tar", "--set", "data.path=['cat.tar', 'dog.tar']"];
    let from_folder = train("folder", &[]);
    assert_eq!(train("shards", &shards), from_folder);
    assert_eq!(
        train(
            "ranks",
            &[
                &shards[..],
                &["--ranks", "2", "--set", "parallel.reproducible=true", "--set", "parallel.shards=4"]
            ]
            .concat()
        ),
        train("folder-ranks", &["--set", "parallel.reproducible=true", "--set", "parallel.shards=4"])
    );
    // Patterns, and a run that ends early and goes on.
    let pattern = ["--set", "data.kind=tar", "--set", "data.path=*.tar", "--set", "train.epochs=1"];
    train("resumed", &pattern);
    let resumed = json(folder, &["resume", "runs/resumed", "--json", "--set", "train.epochs=3"]);
    assert_eq!(resumed.last().unwrap()["metrics"], from_folder);
    // Used: all members of a tar, or files; evaluated with the classes that were trained on.
    let answers = |files: &[&str]| -> Vec<Value> {
        let lines = json(folder, &[&["predict", "runs/shards", "--json"], files].concat());
        lines.iter().map(|line| line["labels"].clone()).collect()
    };
    let cats = ["set/cat/alpha.png", "set/cat/baseline.jpg", "set/cat/coarse.jpg"];
    assert_eq!(answers(&["cat.tar"])[..3], answers(&cats));
    json(folder, &["eval", "runs/shards", "--json"]);
}

#[test]
fn wrong_shards_are_refused_before_training() {
    let made = with_images();
    let folder = made.path();
    let check = |path: &str, parts: &[&str]| {
        let path = format!("data.path={path}");
        refusal(folder, &["train", "job.toml", "--check", "--set", "data.kind=tar", "--set", &path], parts);
    };
    check("nosuch-*.tar", &["nosuch-*.tar", "no file"]);
    check("part-{0..1}.tar", &["part-0.tar: not found"]);
    fs::remove_file(folder.join("set/dog/odd.cls")).unwrap();
    tar(&folder.join("set"), "../unlabelled.tar", &["dog"]);
    check("unlabelled.tar", &["unlabelled.tar", "sample \"dog/odd\" has no label", "data.label"]);
    fs::write(folder.join("set/cat/text.jpg"), "a text").unwrap();
    fs::write(folder.join("set/cat/text.cls"), "cat").unwrap();
    tar(&folder.join("set"), "../text.tar", &["cat"]);
    check("text.tar", &["text.tar", "cat/text.jpg: neither PNG nor JPEG"]);
    let outside = Command::new("tar")
        .current_dir(folder.join("set"))
        .args(["-P", "-cf", "../outside.tar", "../set/cat/alpha.png"])
        .status();
    assert!(outside.unwrap().success());
    check("outside.tar", &["outside.tar", "../set/cat/alpha.png: this name leaves the folder"]);
    let whole = fs::read(folder.join("cat.tar")).unwrap();
    fs::write(folder.join("cut.tar"), &whole[..whole.len() / 2]).unwrap();
    check("cut.tar", &["cut.tar: at byte", "copy it again"]);
}
