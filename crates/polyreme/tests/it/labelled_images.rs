//! Images with a table of labels: learnt, evaluated, predicted by another table, and refused before training where something is wrong.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::binary::{folder, json};
use crate::in_use::write_png;
use crate::wrong_data::refusal;

const JOB: &str = "[model]\nlayers = [{ kind = 'conv', outputs = 8, kernel = 3 }, 'relu', 'global_mean', 'linear']\n\
                   [data]\nkind = 'images'\npath = 'pictures'\nlabels = 'labels.csv'\ntest = 'test.csv'\ngrey = true\n\
                   validation = 0.2\n[train]\nbatch = 8\nepochs = 40\noptimizer = { kind = 'adam', lr = 0.02 }\n\
                   [parallel]\nranks = 1\nthreads = 1\n[output]\ntensorboard = false\n";

/// Lines across and lines down, all in one folder; a table for training and one, with its columns in another order, for the test.
fn pictures() -> TempDir {
    let folder = folder(JOB);
    fs::create_dir(folder.path().join("pictures")).unwrap();
    let (mut train, mut test) = ("file,lines,bright\n".to_string(), "bright,lines,file\n".to_string());
    for i in 0..48u32 {
        let (across, bright) = (i % 2 == 0, 100 + (i % 5) as u8 * 30);
        write_png(&folder.path().join(format!("pictures/{i}.png")), 12, |x, y| {
            let along = if across { y } else { x };
            if (along + i) % 4 < 2 { bright } else { 0 }
        });
        let lines = if across { "across" } else { "down" };
        match i < 40 {
            true => train += &format!("{i}.png,{lines},{bright}\n"),
            false => test += &format!("{bright},{lines},{i}.png\n"),
        }
    }
    fs::write(folder.path().join("labels.csv"), train).unwrap();
    fs::write(folder.path().join("test.csv"), test).unwrap();
    folder
}

fn train(folder: &Path, more: &[&str]) -> serde_json::Value {
    let args = [&["train", "job.toml", "--json"], more].concat();
    json(folder, &args).pop().unwrap()["metrics"].clone()
}

#[test]
fn images_with_a_table_of_labels_are_learnt_and_used() {
    let folder = pictures();
    let folder = folder.path();
    let metrics = train(folder, &["--set", "data.label=lines"]);
    assert!(metrics["test_accuracy"].as_f64().unwrap() > 0.95, "{metrics}");
    let evaluated = &json(folder, &["eval", "runs/job", "--json"])[0]["metrics"];
    assert_eq!(evaluated["test_accuracy"], metrics["test_accuracy"]);
    // By a table without labels, and by the file itself.
    fs::write(folder.join("new.tsv"), "n\tfile\n1\t40.png\n2\t41.png\n").unwrap();
    let answers = json(folder, &["predict", "runs/job", "new.tsv", "pictures/42.png", "--json"]);
    let said: Vec<_> = answers.iter().map(|a| a["labels"][0]["label"].as_str().unwrap()).collect();
    assert_eq!(said, ["across", "down", "across"]);
    assert!(answers[1]["sample"].as_str().unwrap().ends_with("pictures/41.png"), "{answers:?}");

    // A label that changed is another set.
    let table = fs::read_to_string(folder.join("labels.csv")).unwrap();
    fs::write(folder.join("labels.csv"), table.replace("5.png,down", "5.png,across")).unwrap();
    refusal(folder, &["resume", "runs/job", "--set", "train.epochs=41"], &["changed"]);

    // A number of each image.
    let loss = ["--set", "data.label=bright", "--set", "train.loss=mse", "--output", "bright"];
    let metrics = train(folder, &loss);
    assert!(metrics["test_r2"].as_f64().unwrap() > 0.5, "{metrics}");
}

#[test]
fn a_table_of_labels_is_checked_before_training() {
    let folder = pictures();
    let folder = folder.path();
    let check = |set: &str, parts: &[&str]| {
        refusal(folder, &["train", "job.toml", "--check", "--set", "data.label=lines", "--set", set], parts);
        assert!(!folder.join("runs").exists());
    };
    fs::write(folder.join("gone.csv"), "file,lines\n1.png,down\n99.png,down\n98.png,down\n").unwrap();
    check("data.labels=gone.csv", &["gone.csv", "line 3", "\"99.png\" is not in", "nor is 1 more"]);
    fs::write(folder.join("out.csv"), "file,lines\n1.png,down\n../job.toml,down\n").unwrap();
    check("data.labels=out.csv", &["out.csv", "line 3", "leaves the folder"]);
    fs::write(folder.join("pictures/text.png"), "a text").unwrap();
    fs::write(folder.join("text.csv"), "file,lines\n1.png,down\ntext.png,across\n").unwrap();
    check("data.labels=text.csv", &["text.png", "neither PNG nor JPEG"]);
    fs::write(folder.join("blank.csv"), "file,lines\n1.png,down\n2.png,\n").unwrap();
    check("data.labels=blank.csv", &["blank.csv", "line 3", "\"lines\"", "blank"]);
    check("data.labels=labels.txt", &["labels.txt", ".csv, .tsv or .jsonl"]);
    check("data.image=photo", &["no column \"photo\"", "the header has file, lines, bright"]);
    let without = JOB.replace("labels = 'labels.csv'\ntest = 'test.csv'\n", "image = 'file'\n");
    fs::write(folder.join("job.toml"), without).unwrap();
    check("data.grey=true", &["`data.image` is about a table of labels", "labels = \"labels.csv\""]);
}
