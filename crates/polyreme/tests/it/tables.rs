//! Tables with names, words, dates and blanks, as people have them: trained on, predicted, evaluated, looked at.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::binary::{folder, json, polyreme};
use crate::wrong_data::refusal;

const JOB: &str = "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\nkind = 'csv'\npath = 'houses.csv'\nlabel = 'sold'\n\
                   [train]\nbatch = 32\nepochs = 30\noptimizer = { kind = 'adam', lr = 0.02 }\n\
                   [parallel]\nranks = 1\nthreads = 1\n[output]\ntensorboard = false\n";

/// Whether a house was sold follows from its town alone, of which there are 40; other columns are noise, with blanks.
fn houses(rows: usize) -> String {
    let row = |i: usize| {
        let town = i * 7 % 40;
        let area = if i % 11 == 3 { "NA".into() } else { format!("{}.5", 50 + i * 37 % 90) };
        let garden = ["yes", "no", ""][i % 3];
        let built = format!("{}-{:02}-15", 1950 + i % 70, 1 + i % 12);
        let sold = if town.is_multiple_of(2) { "sold" } else { "left" };
        format!(
            "ref-{i},town {town},{area},{garden},{},{built},{sold}\n",
            ["flat", "house", "barn"][i * 13 % 3]
        )
    };
    "ref,town,area,garden,kind,built,sold\n".to_string() + &(0..rows).map(row).collect::<String>()
}

fn with_houses() -> TempDir {
    let folder = folder(JOB);
    fs::write(folder.path().join("houses.csv"), houses(400)).unwrap();
    folder
}

fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).unwrap();
}

#[test]
fn a_table_as_it_is_is_trained_on_and_used() {
    let folder = with_houses();
    let folder = folder.path();
    let shown = polyreme(folder, &["train", "job.toml", "--check"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    for part in [
        "1 number, 1 yes or no, 1 date, 1 category (one-hot), 1 category (learnt vectors); 2 with blanks",
        "\"ref\" is left out: it looks like an id or a name (400 different values in 400 rows)",
    ] {
        assert!(
            shown.split_whitespace().collect::<Vec<_>>().join(" ").contains(part),
            "{part} is not in\n{shown}"
        );
    }
    let summary = json(folder, &["train", "job.toml", "--json"]).pop().unwrap();
    let accuracy = summary["metrics"]["val_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.95, "{summary}");

    // Columns in another order, some that are new, blanks, a town that is new, and no label.
    let answers = |name: &str| -> Vec<String> {
        let lines = json(folder, &["predict", "runs/job", name, "--json"]);
        lines.iter().map(|line| line["labels"][0]["label"].as_str().unwrap().into()).collect()
    };
    write(
        folder,
        "new.csv",
        "kind,town,price,built,garden,area\nbarn,town 2,1,1980-01-15,yes,70\nflat,town 3,2,,,\nflat,town 99,2,1999-05-15,no,60\n",
    );
    let said = answers("new.csv");
    assert_eq!((said.len(), &said[..2]), (3, &["sold".to_string(), "left".to_string()][..]));
    // The same rows in the order of training, with their labels.
    write(
        folder,
        "old.csv",
        "ref,town,area,garden,kind,built,sold\n?,town 2,70,yes,barn,1980-01-15,?\n?,town 3,,,flat,,?\n\
         ?,town 99,60,no,flat,1999-05-15,?\n",
    );
    let probabilities = |name: &str| -> Vec<Value> {
        json(folder, &["predict", "runs/job", name, "--json"]).iter().map(|l| l["labels"].clone()).collect()
    };
    assert_eq!(probabilities("old.csv"), probabilities("new.csv"));

    // An evaluation of a file in another order, without the column that was left out.
    let rows = houses(200);
    let moved = |line: &str| {
        let f: Vec<&str> = line.split(',').collect();
        format!("{},{},{},{},{},{}\n", f[6], f[5], f[4], f[3], f[2], f[1])
    };
    write(folder, "moved.csv", &rows.lines().map(moved).collect::<String>());
    write(folder, "plain.csv", &rows);
    let eval = |name: &str| {
        let set = format!("data.path={name}");
        let args =
            ["eval", "runs/job", "--json", "--on", "train", "--set", &set, "--set", "data.validation=0"];
        json(folder, &args)[0]["metrics"].clone()
    };
    assert_eq!(eval("moved.csv"), eval("plain.csv"));
    assert!(eval("moved.csv")["train_accuracy"].as_f64().unwrap() > 0.95);

    for (content, parts) in [
        ("town,area,garden,kind\ntown 1,1,yes,flat\n", ["the header lacks \"built\"", "leave fields blank"]),
        (
            "town,area,garden,kind,built\ntown 1,large,yes,flat,2000-01-01\n",
            ["field \"area\": \"large\" is not a number, as it was in training", "line 2"],
        ),
        (
            "town,area,garden,kind,built\n12,3,yes,flat,2000-01-01\n",
            ["column \"town\" has only numbers", "words such as"],
        ),
    ] {
        write(folder, "wrong.csv", content);
        refusal(folder, &["predict", "runs/job", "wrong.csv"], &["wrong.csv", parts[0], parts[1]]);
    }
}

/// The same table, by residual blocks with a vector for each number.
#[test]
fn tabular_learns_a_table_as_it_is() {
    let folder = with_houses();
    let folder = folder.path();
    let job = JOB.replace("kind = 'mlp'\nhidden = [16]", "kind = 'tabular'\nwidth = 32\nhidden = 64");
    write(folder, "job.toml", &job.replace("epochs = 30", "epochs = 10").replace("lr = 0.02", "lr = 0.005"));
    let summary = json(folder, &["train", "job.toml", "--json"]).pop().unwrap();
    assert!(summary["metrics"]["val_accuracy"].as_f64().unwrap() > 0.95, "{summary}");
    write(folder, "new.csv", "kind,town,built,garden,area\nbarn,town 2,1980-01-15,yes,70\nflat,town 3,,,\n");
    let lines = json(folder, &["predict", "runs/job", "new.csv", "--json"]);
    let said: Vec<_> = lines.iter().map(|line| line["labels"][0]["label"].as_str().unwrap()).collect();
    assert_eq!(said, ["sold", "left"]);
}

/// Embeddings on ranks: split over tensor ranks and over the data, in bf16, and in a run that goes on.
#[test]
fn categories_are_learnt_on_ranks_as_on_one() {
    let folder = with_houses();
    let folder = folder.path();
    let losses = |name: &str, more: &[&str]| -> Vec<f64> {
        let args =
            [&["train", "job.toml", "--json", "--output", name, "--set", "train.epochs=3"], more].concat();
        let lines = json(folder, &args);
        let of =
            |line: &Value| line["metrics"]["val_loss"].as_f64().filter(|_| line["event"] == "evaluation");
        lines.iter().filter_map(of).collect()
    };
    let alone = losses("alone", &[]);
    assert_eq!(alone.len(), 3, "{alone:?}");
    for (name, more) in [
        ("tensor", &["--set", "parallel.ranks=2", "--set", "parallel.tensor=2"][..]),
        ("data", &["--ranks", "2"]),
        (
            "stage",
            &["--set", "parallel.ranks=2", "--set", "parallel.stage=2", "--set", "parallel.microbatches=2"],
        ),
    ] {
        let split = losses(name, more);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
        assert!(split.len() == 3 && split.iter().zip(&alone).all(near), "{name}: {split:?} {alone:?}");
    }
    // An id in bf16 would be another town from 257 on.
    let half = losses("half", &["--set", "train.precision=bf16"]);
    assert!(half.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 0.05), "{half:?} {alone:?}");
    // A run goes on with columns as it knows them, and refuses others.
    write(folder, "houses.csv", &houses(400).replace(",barn,", ",mill,"));
    refusal(
        folder,
        &["resume", "alone", "--set", "train.epochs=4", "--changed-data"],
        &["column \"kind\" is category of 3 values"],
    );
    write(folder, "houses.csv", &houses(400));
    json(folder, &["resume", "alone", "--json", "--set", "train.epochs=4"]);
    refusal(folder, &["train", "job.toml", "--check", "--set", "train.mixup=0.2"], &["train.mixup", "ids"]);
    let layers = "[model]\nlayers = [{ kind = 'linear', outputs = 8 }, 'relu', 'linear']\n";
    write(folder, "layers.toml", &(layers.to_string() + &JOB[JOB.find("[data]").unwrap()..]));
    refusal(folder, &["train", "layers.toml", "--check"], &["categories with many values", "data.one_hot"]);
    json(folder, &["train", "layers.toml", "--json", "--set", "data.one_hot=40", "--set", "train.epochs=1"]);
}

const NOTES: &str = "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\nkind = 'csv'\npath = 'notes.csv'\nlabel = 'what'\n\
                     [train]\nbatch = 32\nepochs = 12\noptimizer = { kind = 'adam', lr = 0.02 }\n\
                     [parallel]\nranks = 1\nthreads = 1\n[output]\ntensorboard = false\n";

/// What is done with a machine follows from a word of its note and from its age together: from either alone nothing follows.
fn machines(rows: usize) -> Vec<(String, String, usize, &'static str)> {
    const WORDS: [&str; 12] = [
        "It",
        "stood",
        "in the rain,",
        "quietly",
        "hums",
        "since",
        "may",
        "Monday.",
        "door",
        "is open",
        "and",
        "warm",
    ];
    let drawn = |i: usize, k: usize, n: usize| {
        let mixed = ((i * 100 + k + 1) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (((mixed ^ (mixed >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33) as usize) % n
    };
    let row = |i: usize| {
        let (leaks, age) = (drawn(i, 0, 2) == 0, drawn(i, 1, 101));
        let mut note: Vec<&str> = (2..9).map(|k| WORDS[drawn(i, k, WORDS.len())]).collect();
        if leaks {
            note.insert(drawn(i, 9, 6), ["Leaks,", "leaks", "(leaks)"][i % 3]);
        }
        let note = if i % 50 == 49 { String::new() } else { note.join(" ") };
        let what = if (leaks && !note.is_empty()) != (age > 50) { "repair" } else { "keep" };
        (format!("m-{i}"), note, age, what)
    };
    (0..rows).map(row).collect()
}

fn with_machines() -> TempDir {
    let folder = folder(NOTES);
    let rows = machines(900);
    let csv =
        |(id, note, age, what): &(String, String, usize, &str)| format!("{id},\"{note}\",{age},{what}\n");
    write(
        folder.path(),
        "notes.csv",
        &("id,note,age,what\n".to_string() + &rows.iter().map(csv).collect::<String>()),
    );
    let line = |(id, note, age, what): &(String, String, usize, &str)| {
        let note = if note.is_empty() { Value::Null } else { note.as_str().into() };
        serde_json::json!({"what": what, "id": id, "note": note, "age": age}).to_string() + "\n"
    };
    write(folder.path(), "notes.jsonl", &rows.iter().map(line).collect::<String>());
    folder
}

/// A text and a number together say what neither says alone.
#[test]
fn a_text_beside_other_columns_is_learnt_from() {
    let folder = with_machines();
    let folder = folder.path();
    let shown = polyreme(folder, &["train", "job.toml", "--check"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    let shown = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["1 number, 1 text; 1 with blanks", "\"note\" is a text of up to", "\"id\" is left out"] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    let looked = polyreme(folder, &["inspect", "notes.csv", "--data"]);
    let looked = String::from_utf8(looked.stdout).unwrap();
    assert!(
        looked.contains("a text: `mlp` and `tabular` learn") && looked.contains("an id or a name"),
        "{looked}"
    );

    let train = |name: &str, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let args = [&["train", "job.toml", "--json", "--output", name], &sets[..]].concat();
        json(folder, &args).pop().unwrap()["metrics"].clone()
    };
    let accuracy = |metrics: &Value| metrics["val_accuracy"].as_f64().unwrap();
    let both = train("both", &[]);
    assert!(accuracy(&both) > 0.95, "{both}");
    for (name, left_out) in [("number", "data.ignore=['note']"), ("text", "data.ignore=['age']")] {
        let alone = train(name, &[left_out]);
        assert!(accuracy(&alone) < 0.75, "{name}: {alone}");
    }
    // Rows in memory and rows in their file, fields of a CSV and of JSON are the same samples.
    assert_eq!(train("stored", &["data.in_memory=false"]), both);
    assert_eq!(
        train("json", &["data.kind=jsonl", "data.path=notes.jsonl", "data.columns=['note', 'age']"]),
        both
    );
    write(
        folder,
        "tabular.toml",
        &NOTES
            .replace("kind = 'mlp'\nhidden = [16]", "kind = 'tabular'\nwidth = 32\nhidden = 64")
            .replace("0.02", "0.005"),
    );
    let tabular = json(folder, &["train", "tabular.toml", "--json"]).pop().unwrap();
    assert!(accuracy(&tabular["metrics"]) > 0.95, "{tabular}");

    // Columns in another order; words that are new; a blank, which is a note without leaks.
    let (leaks, dry) = (
        "It LEAKS, hums and stood open. zyx door warm Monday",
        "It hums quietly and stood open. zyx door warm Monday",
    );
    let rows = [(80, leaks), (20, leaks), (80, ""), (20, dry), (80, dry), (20, "?")];
    let csv: String = rows.iter().map(|(age, note)| format!("{age},\"{note}\"\n")).collect();
    write(folder, "new.csv", &format!("age,note\n{csv}"));
    let line = |(age, note): &(i32, &str)| match *note {
        "" => format!("{{\"age\": {age}}}\n"),
        "?" => format!("{{\"note\": null, \"age\": {age}}}\n"),
        note => format!("{{\"note\": \"{note}\", \"age\": {age}}}\n"),
    };
    write(folder, "new.jsonl", &rows.iter().map(line).collect::<String>());
    let answers = |run: &str, file: &str| -> Vec<Value> {
        let lines = json(folder, &["predict", run, file, "--json"]);
        lines.iter().map(|line| line["labels"][0].clone()).collect()
    };
    for run in ["both", "runs/tabular"] {
        let said = answers(run, "new.csv");
        let labels: Vec<_> = said.iter().map(|answer| answer["label"].as_str().unwrap()).collect();
        assert_eq!(labels, ["keep", "repair", "repair", "keep", "repair", "keep"], "{run}");
    }
    assert_eq!(answers("json", "new.jsonl"), answers("both", "new.csv"));
    let moved: String =
        machines(200).iter().map(|(_, note, age, what)| format!("{what},{age},\"{note}\"\n")).collect();
    write(folder, "moved.csv", &format!("what,age,note\n{moved}"));
    let args = [
        "eval",
        "both",
        "--json",
        "--on",
        "train",
        "--set",
        "data.path=moved.csv",
        "--set",
        "data.validation=0",
    ];
    let metrics = json(folder, &args)[0]["metrics"].clone();
    assert!(metrics["train_accuracy"].as_f64().unwrap() > 0.95, "{metrics}");

    write(folder, "wrong.csv", "age,note\n80,17\n20,18\n");
    refusal(
        folder,
        &["predict", "both", "wrong.csv"],
        &["column \"note\" has only numbers", "words such as"],
    );
    write(folder, "wrong.csv", "age\n80\n");
    refusal(folder, &["predict", "both", "wrong.csv"], &["the header lacks \"note\"", "leave fields blank"]);
}

/// Words on ranks: split over tensor ranks, stages and the data, in bf16, and in a run that goes on.
#[test]
fn texts_beside_others_are_learnt_on_ranks_as_on_one() {
    let folder = with_machines();
    let folder = folder.path();
    let losses = |name: &str, more: &[&str]| -> Vec<f64> {
        let args =
            [&["train", "job.toml", "--json", "--output", name, "--set", "train.epochs=2"], more].concat();
        let lines = json(folder, &args);
        let of =
            |line: &Value| line["metrics"]["val_loss"].as_f64().filter(|_| line["event"] == "evaluation");
        lines.iter().filter_map(of).collect()
    };
    let alone = losses("alone", &[]);
    let stages =
        ["--set", "parallel.ranks=2", "--set", "parallel.stage=2", "--set", "parallel.microbatches=2"];
    for (name, more) in [
        ("tensor", &["--set", "parallel.ranks=2", "--set", "parallel.tensor=2"][..]),
        ("data", &["--ranks", "2"]),
        ("stage", &stages),
    ] {
        let split = losses(name, more);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
        assert!(split.len() == 2 && split.iter().zip(&alone).all(near), "{name}: {split:?} {alone:?}");
    }
    let half = losses("half", &["--set", "train.precision=bf16"]);
    assert!(half.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 0.05), "{half:?} {alone:?}");

    let text = fs::read_to_string(folder.join("notes.csv")).unwrap();
    write(folder, "notes.csv", &text.replace("rain", "snow"));
    let again = ["resume", "alone", "--set", "train.epochs=3", "--changed-data"];
    refusal(folder, &again, &["column \"note\" is text of up to"]);
    write(folder, "notes.csv", &text);
    json(folder, &["resume", "alone", "--json", "--set", "train.epochs=3"]);

    let check = |sets: &[&str], parts: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        refusal(folder, &[&["train", "job.toml", "--check"], &sets[..]].concat(), parts);
    };
    check(&["data.texts=['body']"], &["`data.texts` has \"body\"", "\"note\""]);
    check(&["data.texts=['note']", "data.categories=['n*']"], &["in `data.categories` and in `data.texts`"]);
    check(&["data.texts=['note']", "data.text=note"], &["data.texts", "`data.text` leaves those out"]);
    check(&["data.length=5"], &["data.length", "`data.text` names no column"]);
    // Other models are trained as they were before, without the text, unless it is asked for.
    let layers = "[model]\nlayers = [{ kind = 'linear', outputs = 8 }, 'relu', 'linear']\n";
    write(folder, "layers.toml", &(layers.to_string() + &NOTES[NOTES.find("[data]").unwrap()..]));
    json(folder, &["train", "layers.toml", "--json", "--set", "train.epochs=1"]);
    let named = ["train", "layers.toml", "--check", "--set", "data.texts=['note']"];
    refusal(folder, &named, &["1 numbers and 1 texts", "`data.ignore` leaves texts out"]);
}

#[test]
fn columns_are_chosen_and_what_is_wrong_is_said_before_training() {
    let folder = with_houses();
    let folder = folder.path();
    let check = |sets: &[&str], parts: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        refusal(folder, &[&["train", "job.toml", "--check"], &sets[..]].concat(), parts);
    };
    check(&["data.columns=['towns']"], &["`data.columns` has \"towns\"", "\"town\""]);
    check(&["data.ignore=['x*']"], &["`data.ignore` has \"x*\""]);
    check(&["data.label=price"], &["no column \"price\""]);
    check(&["data.blanks=['-']"], &["\"NA\" is not a number", "data.blanks"]);
    check(&["data.columns=[]"], &["data.columns", "is empty"]);
    // A numeric target, from chosen columns, with a part of them written as categories.
    let sets = ["data.label=area", "train.loss=mse", "data.columns=['town', 'b*', 'kind']"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let args = [&["train", "job.toml", "--check"], &sets[..]].concat();
    refusal(folder, &args, &["field \"area\": \"NA\" is blank", "leave out the row"]);
    write(folder, "houses.csv", &houses(400).replace(",NA,", ",77,"));
    let args = [&["train", "job.toml", "--json", "--set", "train.epochs=1"], &sets[..]].concat();
    json(folder, &args);
    for (content, parts) in [
        ("town,town,sold\na,b,c\nd,e,f\n", ["column \"town\" occurs twice", "data.ignore"]),
        ("town,area,sold\na,1,c\nd,2\n", ["2 fields, but the first row has 3", "line 3"]),
    ] {
        write(folder, "houses.csv", content);
        refusal(folder, &["train", "job.toml", "--check"], &parts);
    }
}

#[test]
fn columns_are_shown() {
    let folder = with_houses();
    let folder = folder.path();
    let found = json(folder, &["inspect", "houses.csv", "--data", "--json"]).pop().unwrap();
    let columns = found["columns"].as_array().unwrap();
    let types: Vec<_> = columns.iter().map(|c| c["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["text", "category", "number", "boolean", "category", "date", "category"]);
    assert_eq!((&columns[1]["distinct"], &columns[2]["blanks"]), (&40.into(), &37.into()));
    assert_eq!((&columns[2]["min"], &columns[5]["min"]), (&50.5.into(), &"1950-01-15".into()));
    let values: u64 =
        columns[4]["values"].as_array().unwrap().iter().map(|v| v["rows"].as_u64().unwrap()).sum();
    assert_eq!(values, 400);
    // A job's table is read as the job says.
    for path in ["houses.csv", "job.toml"] {
        let out = polyreme(folder, &["inspect", path, "--data"]);
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(
            text.lines().count() == 8 && text.contains("400 rows, 7 columns") && text.contains('█'),
            "{text}"
        );
    }
    refusal(folder, &["inspect", "nosuch.csv", "--data"], &["nosuch.csv", "not found"]);
}

/// Several files are one table, and its rows may stay in them: the bits are the same.
#[test]
fn a_table_in_several_files_larger_than_memory() {
    let folder = with_houses();
    let folder = folder.path();
    let text = fs::read_to_string(folder.join("houses.csv")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    fs::create_dir(folder.join("parts")).unwrap();
    for (k, rows) in lines[1..].chunks(150).enumerate() {
        write(folder, &format!("parts/part-{}.csv", k + 8), &format!("{}\n{}\n", lines[0], rows.join("\n")));
    }
    let train = |path: &str, in_memory: &str, name: &str| {
        let (path, rows, output) =
            (format!("data.path={path}"), format!("data.in_memory={in_memory}"), format!("runs/{name}"));
        let sets = ["--set", &path, "--set", &rows, "--set", "train.epochs=3", "--output", &output];
        let summary = json(folder, &[&["train", "job.toml", "--json"][..], &sets].concat()).pop().unwrap();
        let file = fs::read(folder.join(output).join("model.safetensors")).unwrap();
        // The header says where the data were.
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        (summary["metrics"].clone(), file[8 + header..].to_vec())
    };
    let whole = train("houses.csv", "true", "whole");
    assert_eq!(train("houses.csv", "false", "stored"), whole);
    let parts = train("parts", "true", "parts");
    assert_eq!(train("parts/part-*.csv", "false", "stored-parts"), parts);
    let all = "['parts/part-8.csv', 'parts/part-9.csv', 'parts/part-10.csv']";
    assert_eq!(train(all, "false", "listed"), parts);
    let loss = |of: &Value| of["val_loss"].as_f64().unwrap();
    assert!((loss(&parts.0) - loss(&whole.0)).abs() < 1e-4, "{} {}", parts.0, whole.0);
    let shown = polyreme(folder, &["train", "job.toml", "--check", "--set", "data.in_memory=false"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    assert!(shown.contains("read where they lie"), "{shown}");
    let found = json(folder, &["inspect", "parts", "--data", "--json"]).pop().unwrap();
    assert_eq!(found["columns"][0]["rows"], 400);

    write(folder, "parts/part-11.csv", "ref,town,sold\n1,town 1,left\n");
    refusal(
        folder,
        &["train", "job.toml", "--check", "--set", "data.path=parts"],
        &["part-11.csv lacks \"area\", \"garden\", \"kind\", \"built\"", "part-8.csv has"],
    );
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_is_a_table_like_any_other() {
    let job = JOB.replace("'csv'", "'parquet'").replace("houses.csv", "t.parquet").replace("'sold'", "'y'");
    let folder = folder(&job);
    let folder = folder.path();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/fixtures/tables");
    fs::copy(fixtures.join("snappy.parquet"), folder.join("t.parquet")).unwrap();
    fs::copy(fixtures.join("zstd.parquet"), folder.join("zstd.parquet")).unwrap();
    fs::copy(fixtures.join("same.csv"), folder.join("same.csv")).unwrap();
    let found = json(folder, &["inspect", "t.parquet", "--data", "--json"]).pop().unwrap();
    let types: Vec<_> = found["columns"].as_array().unwrap().iter().map(|c| c["type"].clone()).collect();
    assert_eq!(types[4..9], ["number", "category", "boolean", "date", "date"]);
    json(folder, &["train", "job.toml", "--json"]);
    let answers = |name: &str| {
        let lines = json(folder, &["predict", "runs/job", name, "--json"]);
        lines.into_iter().map(|line| line["labels"].clone()).collect::<Vec<_>>()
    };
    let said = answers("t.parquet");
    assert_eq!((said.len(), &answers("zstd.parquet"), &answers("same.csv")), (40, &said, &said));
    write(folder, "t.parquet", "PAR1 and no more");
    refusal(
        folder,
        &["train", "job.toml", "--check"],
        &["t.parquet", "not a Parquet file, or a damaged one"],
    );
    refusal(folder, &["train", "job.toml", "--check", "--set", "data.in_memory=false"], &["in_memory"]);
}
