//! Data that are not what they seem, through the binary: each is said, with the place and what to do.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::binary::{command, folder, json, polyreme};
use crate::ranks::{end, living, pids, start, wait_for_step};

const JOB: &str = "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\nkind = 'csv'\npath = 'train.csv'\n\
                   [train]\nbatch = 16\nepochs = 4\noptimizer = { kind = 'adam', lr = 0.02 }\n\
                   [parallel]\nranks = 1\nthreads = 1\n[output]\ntensorboard = false\n";

/// Rows of two numbers and a label.
fn table(rows: usize, label: impl Fn(usize, f32, f32) -> String) -> String {
    let row = |i: usize| {
        let (a, b) = ((i * 37 % 100) as f32 / 50.0 - 1.0, (i * 61 % 100) as f32 / 50.0 - 1.0);
        format!("{a},{b},{}\n", label(i, a, b))
    };
    "a,b,kind\n".to_string() + &(0..rows).map(row).collect::<String>()
}

fn sides(_: usize, a: f32, b: f32) -> String {
    if a > b { "right".into() } else { "left".into() }
}

/// A folder with the job and a table for it.
fn with_table(content: &str) -> TempDir {
    let folder = folder(JOB);
    fs::write(folder.path().join("train.csv"), content).unwrap();
    folder
}

/// What a command that is refused says.
#[track_caller]
pub(crate) fn refusal(folder: &Path, args: &[&str], parts: &[&str]) {
    let out = polyreme(folder, args);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success(), "{args:?} is refused: {said}");
    parts.iter().for_each(|part| assert!(said.contains(part), "{args:?}: {part} is not in\n{said}"));
}

#[test]
fn a_quote_that_is_never_closed_is_named_with_its_line() {
    let open_at = |row: usize| move |i, a, b| if i == row { "\"left".into() } else { sides(i, a, b) };
    let folder = with_table(&table(60, open_at(30)));
    refusal(
        folder.path(),
        &["train", "job.toml", "--check"],
        &["train.csv", "line 32,", "quote opens here and is never closed"],
    );
    // In a file to predict, whose labels are not looked at, half of the rows would be gone.
    fs::write(folder.path().join("train.csv"), table(60, sides)).unwrap();
    json(folder.path(), &["train", "job.toml", "--json"]);
    fs::write(folder.path().join("new.csv"), table(20, open_at(10))).unwrap();
    refusal(folder.path(), &["predict", "runs/job", "new.csv"], &["new.csv", "line 12,", "never closed"]);
}

#[test]
fn columns_in_another_order_give_the_same_answers() {
    let folder = with_table(&table(200, sides));
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    json(folder.path(), &["train", "job.toml", "--json", "--set", "train.epochs=20"]);
    let predict = |name: &str| json(folder.path(), &["predict", "runs/job", name, "--json"]);
    let answers = |name: &str| predict(name).iter().map(|l| l["labels"].clone()).collect::<Vec<Value>>();
    write("as_trained.csv", "a,b\n0.9,-0.9\n-0.5,0.1\n");
    let want = answers("as_trained.csv");
    assert_eq!(want[0][0]["label"], "right");
    for (name, text) in [
        ("swapped.csv", "b,a\n-0.9,0.9\n0.1,-0.5\n"),
        ("label_between.csv", "b,kind,a\n-0.9,?,0.9\n0.1,?,-0.5\n"),
        ("without_names.csv", "0.9,-0.9\n-0.5,0.1\n"),
        ("label_without_names.csv", "0.9,-0.9,x\n-0.5,0.1,y\n"),
    ] {
        write(name, text);
        assert_eq!(answers(name), want, "{name}");
    }
    write("others.csv", "a,c\n1,2\n");
    refusal(
        folder.path(),
        &["predict", "runs/job", "others.csv"],
        &["others.csv", "lacks \"b\"", "has \"c\""],
    );
    write("more.csv", "a,id,b\n0.9,7,-0.9\n-0.5,8,0.1\n");
    assert_eq!(answers("more.csv"), want, "columns that training did not have are passed over");
    write("narrow.csv", "0.1\n0.2\n");
    refusal(
        folder.path(),
        &["predict", "runs/job", "narrow.csv"],
        &["narrow.csv", "1 columns, but the model takes 2"],
    );

    // The same for an evaluation, of a file without one of the classes and with the columns in another order.
    let rows = table(200, sides);
    let right = |l: &&str| l.ends_with("right") || l.ends_with("kind");
    let swap = |l: &str| {
        let fields: Vec<&str> = l.split(',').collect();
        format!("{},{},{}\n", fields[2], fields[1], fields[0])
    };
    let lines: Vec<&str> = rows.lines().filter(right).collect();
    write("plain.csv", &(lines.join("\n") + "\n"));
    write("moved.csv", &lines.iter().map(|l| swap(l)).collect::<String>());
    let eval = |name: &str| {
        let set = format!("data.path={name}");
        let line = json(
            folder.path(),
            &["eval", "runs/job", "--json", "--on", "train", "--set", &set, "--set", "data.validation=0"],
        );
        (line[0]["samples"].clone(), line[0]["metrics"].clone())
    };
    let (samples, metrics) = eval("plain.csv");
    assert!(samples.as_u64().unwrap() > 90 && metrics["train_accuracy"].as_f64().unwrap() > 0.9, "{metrics}");
    assert_eq!(eval("moved.csv"), (samples, metrics));
    write("renamed.csv", "a,x,kind\n1,2,left\n3,4,right\n");
    refusal(
        folder.path(),
        &["eval", "runs/job", "--set", "data.path=renamed.csv"],
        &["renamed.csv", "lacks \"b\"", "has \"x\""],
    );
}

#[test]
fn a_column_of_prices_does_not_become_hundreds_of_classes() {
    let check = |content: &str, parts: &[&str]| {
        let folder = with_table(content);
        refusal(folder.path(), &["train", "job.toml", "--check"], parts);
    };
    let price = |i: usize, _: f32, _: f32| (100_000 + i * 7919 % 391 * 500).to_string();
    let numeric = "for a numeric target set `train.loss = \"mse\"`";
    // However many rows there are.
    for rows in [500, 20_000] {
        let n = format!("\"kind\" has 391 different values in {rows} rows");
        check(
            &table(rows, price),
            &[&n, "integers from 100000 to 295000", numeric, "data.label", "model.classes = 391"],
        );
    }
    check(&table(200, |i, _, _| (i % 120).to_string()), &["120 different values in 200 rows", numeric]);
    check(
        &table(80, |i, _, _| format!("row {i}")),
        &["80 different values in 80 rows", "words such as \"row 0\""],
    );
    check(
        &table(80, |i, _, _| format!("{i}.25")),
        &["line 2, ", "label 0.25 is not a class; for a numeric target set `train.loss = \"mse\"`"],
    );
    // Who says how many classes there are means classes; ids with enough rows are believed.
    let classes = |content: &str, more: &[&str]| {
        let folder = with_table(content);
        let args = [&["train", "job.toml", "--check", "--json"], more].concat();
        json(folder.path(), &args)[0]["sample"].as_str().unwrap().to_string()
    };
    assert_eq!(classes(&table(500, price), &["--set", "model.classes=391"]), "2 numbers, 391 classes");
    assert_eq!(classes(&table(2000, |i, _, _| (i % 120).to_string()), &[]), "2 numbers, 120 classes");
}

#[test]
fn without_validation_nothing_is_chosen_by_the_test_set() {
    let folder = with_table(&table(200, sides));
    let none = ["--set", "data.validation=0", "--set", "data.test=train.csv"];
    let run = |name: &str, more: &[&str]| {
        let args =
            [&["train", "job.toml", "--json", "--output", name, "--set", "output.keep=9"], &none[..], more]
                .concat();
        json(folder.path(), &args).pop().unwrap()
    };
    let summary = run("run", &[]);
    let names: Vec<_> = summary["metrics"].as_object().unwrap().keys().cloned().collect();
    assert!(names.iter().all(|n| n.starts_with("test_")) && !names.is_empty(), "{names:?}");
    assert_eq!((&summary["model_step"], &summary["steps"]), (&52.into(), &52.into()));
    let metrics = fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    assert!(!metrics.contains("val_") && !folder.path().join("run/checkpoints/best").exists(), "{metrics}");
    // It is said at the start.
    let out = polyreme(folder.path(), &[&["train", "job.toml", "--check"], &none[..]].concat());
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(said.contains("model    of the last step; there is no validation set"), "{said}");
    // The training loss can be watched; scores of a set that is not there cannot.
    let stop = ["--set", "train.early_stop.patience=1", "--set", "train.early_stop.min_delta=100"];
    let args = [&["train", "job.toml", "--output", "never"], &none[..], &stop[..]].concat();
    refusal(
        folder.path(),
        &args,
        &["train.early_stop.metric is \"val_loss\"", "no validation set", "train_loss"],
    );
    assert!(!folder.path().join("never").exists());
    let watched = ["--set", "train.early_stop.metric=train_loss", "--set", "output.best=train_loss"];
    let summary = run("watched", &[&stop[..], &watched].concat());
    assert_eq!((&summary["ending"], &summary["steps"]), (&"early_stop".into(), &26.into()));
    assert!(folder.path().join("watched/checkpoints/best").exists());
}

#[test]
fn data_that_changed_are_not_gone_on_with_unseen() {
    let folder = with_table(&table(200, sides));
    let path = folder.path().join("train.csv");
    json(folder.path(), &["train", "job.toml", "--json", "--output", "run"]);
    let longer = |epochs: &str, more: &[&str]| {
        let set = format!("train.epochs={epochs}");
        [&["resume", "run", "--json", "--set", &set], more]
            .concat()
            .iter()
            .map(|s| s.to_string())
            .collect::<Vec<_>>()
    };
    let resume = |args: &[String]| json(folder.path(), &args.iter().map(String::as_str).collect::<Vec<_>>());
    let refused = |args: &[String], parts: &[&str]| {
        refusal(folder.path(), &args.iter().map(String::as_str).collect::<Vec<_>>(), parts);
    };
    // One label of 200; then a row more; then another split.
    let good = fs::read_to_string(&path).unwrap();
    let flipped = good.replacen("right", "left\u{20}", 1);
    assert_eq!(flipped.len(), good.len());
    fs::write(&path, &flipped).unwrap();
    refused(
        &longer("5", &[]),
        &["not those that the run began with: train.csv: other content", "--changed-data"],
    );
    fs::write(&path, format!("{good}0.5,0.25,right\n")).unwrap();
    refused(&longer("5", &[]), &["training set: 181 samples now, 180 samples before", "train.csv: "]);
    refused(&longer("5", &["--processes", "2"]), &["training set: 181 samples now", "--changed-data"]);
    fs::write(&path, &good).unwrap();
    refused(
        &longer("5", &["--set", "data.validation=0.2"]),
        &["validation set: 40 samples now, 20 samples before"],
    );
    refused(
        &longer("5", &["--set", "train.seed=7"]),
        &["validation split: 0.1 by seed 7 now, 0.1 by seed 0 before"],
    );
    // As they were, here or elsewhere; and others, if that is meant, which is remembered.
    resume(&longer("5", &[]));
    let elsewhere = folder.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::rename(&path, elsewhere.join("train.csv")).unwrap();
    resume(&longer("6", &["--set", "data.path=elsewhere/train.csv"]));
    fs::write(elsewhere.join("train.csv"), &flipped).unwrap();
    let lines = resume(&longer("7", &["--changed-data"]));
    assert!(
        lines
            .iter()
            .any(|l| l["event"] == "warning" && l["message"].as_str().unwrap().contains("other content"))
    );
    resume(&longer("8", &[]));
    // Columns that mean something else are no data for this model.
    fs::write(elsewhere.join("train.csv"), good.replacen("a,b,", "b,a,", 1)).unwrap();
    refused(&longer("9", &["--changed-data"]), &["columns are b, a and were a, b"]);
}

/// A job on a text of a megabyte that does not end by itself.
const TEXT: &str = "[model]\nkind = 'gpt'\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 32\n[data]\nkind = 'text'\n\
                    path = 'corpus.txt'\nvalidation = 0\n[train]\nbatch = 16\nsteps = 1000000\n\
                    [parallel]\nthreads = 1\n[output]\nevery_steps = 20\ntensorboard = false\n";

#[test]
fn a_file_that_is_cut_while_it_is_trained_on_is_named_and_all_ranks_end() {
    for (name, ranks, flags) in
        [("threads", 2, ["--ranks", "2"]), ("shm", 2, ["--processes", "2"]), ("alone", 1, ["--ranks", "1"])]
    {
        let folder = folder(TEXT);
        let path = folder.path().join("corpus.txt");
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        let (run, errors) = (folder.path().join("run"), folder.path().join("errors"));
        let until = Instant::now() + Duration::from_secs(120);
        let args = [&["train", "job.toml", "--output", "run"], &flags[..]].concat();
        let child = start(command(folder.path(), &args), &errors);
        let processes = if ranks > 1 { pids(&errors, ranks, until) } else { Vec::new() };
        wait_for_step(&run, 20, until);
        File::options().write(true).open(&path).unwrap().set_len(10_000).unwrap();
        let out = end(child, Duration::from_secs(120));
        let said = fs::read_to_string(&errors).unwrap();
        assert_eq!(out.status.code(), Some(1), "{name}: {said}");
        assert!(
            said.contains("corpus.txt: at byte") && said.contains("cut from 1048576 to 10000 bytes"),
            "{name}: {said}"
        );
        assert!(!said.contains("signal"), "{name}: {said}");
        assert_eq!(living(&processes), [0; 0], "{name}");
    }
}
