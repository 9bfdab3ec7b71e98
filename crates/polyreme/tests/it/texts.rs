//! Texts with labels, as people have them: trained on, evaluated, predicted, looked at, and what is wrong with them.

use std::fs;
use std::path::Path;

use serde_json::json as object;
use tempfile::TempDir;

use crate::binary::{folder, json, polyreme};
use crate::wrong_data::refusal;

const JOB: &str = "[model]\nkind = 'encoder'\nwidth = 16\nheads = 2\nhidden = 32\nlayers = 1\n\
                   [data]\nkind = 'csv'\npath = 'mail.csv'\ntext = 'body'\nlabel = 'kind'\n\
                   [train]\nbatch = 32\nepochs = 12\noptimizer = { kind = 'adam', lr = 0.01 }\n\
                   [parallel]\nranks = 1\nthreads = 1\n[output]\ntensorboard = false\n";

/// A text of some words, which is spam if one of them says so.
fn text(i: usize) -> (String, &'static str) {
    let words = ["the", "ship", "sails, \"soon\"", "over", "a\nquiet", "sea"];
    let mut all: Vec<&str> = (0..1 + i * 7 % 12).map(|k| words[(i * 5 + k * k) % words.len()]).collect();
    let spam = i.is_multiple_of(2);
    if spam {
        all.insert(i % all.len(), "zzz");
    }
    (all.join(" "), if spam { "spam" } else { "ham" })
}

fn mail(rows: usize) -> String {
    let row = |i: usize| {
        let (body, kind) = text(i);
        format!("{i},\"{}\",{kind}\n", body.replace('"', "\"\""))
    };
    "id,body,kind\n".to_string() + &(0..rows).map(row).collect::<String>()
}

fn with_mail() -> TempDir {
    let folder = folder(JOB);
    fs::write(folder.path().join("mail.csv"), mail(300)).unwrap();
    folder
}

fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).unwrap();
}

#[test]
fn texts_are_trained_on_evaluated_and_predicted() {
    let folder = with_mail();
    let folder = folder.path();
    let summary = json(folder, &["train", "job.toml", "--json", "--output", "runs/job"]).pop().unwrap();
    assert!(summary["metrics"]["val_accuracy"].as_f64().unwrap() > 0.9, "{summary}");

    // Columns in another order, without labels, and as lines of JSON: the same answers.
    let rows: Vec<(String, &str)> = (300..340).map(text).collect();
    let csv = rows.iter().map(|(body, _)| format!("\"{}\",x\n", body.replace('"', "\"\"")));
    write(folder, "new.csv", &("body,from\n".to_string() + &csv.collect::<String>()));
    let lines = rows.iter().map(|(body, _)| object!({ "body": body }).to_string() + "\n");
    write(folder, "new.jsonl", &lines.collect::<String>());
    let answers = |name: &str, more: &[&str]| {
        let lines = json(folder, &[&["predict", "runs/job", name, "--json"], more].concat());
        lines.iter().map(|line| line["labels"].clone()).collect::<Vec<_>>()
    };
    let said = answers("new.csv", &[]);
    assert_eq!(said, answers("new.jsonl", &[]));
    let right = said.iter().zip(&rows).filter(|(said, (_, kind))| said[0]["label"] == *kind).count();
    assert!(right >= 36, "{right} of 40");
    // Alone as among others: padding is nothing.
    write(folder, "one.jsonl", &(object!({ "body": rows[3].0 }).to_string() + "\n"));
    let alone = answers("one.jsonl", &[])[0][0]["probability"].as_f64().unwrap();
    assert!((alone - said[3][0]["probability"].as_f64().unwrap()).abs() < 1e-6);

    // An evaluation on the files, by one rank and by two.
    write(folder, "test.csv", &mail(400));
    let eval = |more: &[&str]| {
        let args = ["eval", "runs/job", "--json", "--on", "test", "--set", "data.test=test.csv"];
        json(folder, &[&args[..], more].concat())[0]["metrics"].clone()
    };
    let one = eval(&[]);
    assert!(one["test_accuracy"].as_f64().unwrap() > 0.9, "{one}");
    assert_eq!(one, eval(&["--ranks", "2"]));

    for (name, content, parts) in [
        ("wrong.csv", "subject,kind\nhello,ham\n", ["no column \"body\"", "the header has subject, kind"]),
        ("wrong.csv", "body,from\nfine,x\n\"\",y\n", ["line 3", "has no tokens"]),
        ("wrong.jsonl", "{\"body\": \"fine\"}\n{\"text\": \"hello\"}\n", ["line 2", "has no tokens"]),
    ] {
        write(folder, name, content);
        refusal(folder, &["predict", "runs/job", name], &[name, parts[0], parts[1]]);
    }
    refusal(
        folder,
        &["eval", "runs/job", "--set", &format!("data.tokenizer={}", bpe())],
        &["trained with another tokenizer (bytes)", "set `data.tokenizer` to the file"],
    );
}

/// The tokenizer of the tests of `data`.
fn bpe() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/fixtures/bpe.json");
    fs::canonicalize(path).unwrap().display().to_string()
}

#[test]
fn texts_are_cut_into_the_tokens_of_a_file_and_go_on() {
    let folder = with_mail();
    let folder = folder.path();
    fs::copy(bpe(), folder.join("tokens.json")).unwrap();
    let args = ["train", "job.toml", "--json", "--output", "runs/job", "--set", "data.tokenizer=tokens.json"];
    let more = ["--set", "train.epochs=3", "--set", "data.length=6", "--set", "model.kind=\"lstm\""];
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    write(folder, "job.toml", &job.replace("width = 16\nheads = 2\nhidden = 32", "width = 16\nhidden = 16"));
    json(folder, &[&args[..], &more].concat());
    let predicted = json(folder, &["predict", "runs/job", "mail.csv", "--json"]);
    assert_eq!(predicted.len(), 300);
    // Another file in its place is noticed, when the model is used and when it is trained on.
    let other = fs::read_to_string(folder.join("tokens.json")).unwrap() + "\n";
    write(folder, "tokens.json", &other);
    refusal(folder, &["predict", "runs/job", "mail.csv"], &["another tokenizer", "tokens.json"]);
    refusal(folder, &["resume", "runs/job", "--set", "train.epochs=4"], &["tokens.json"]);
}

#[test]
fn what_is_wrong_with_texts_is_said_before_training() {
    let folder = with_mail();
    let folder = folder.path();
    let check = |changes: &[&str], parts: &[&str]| {
        let sets = changes.iter().flat_map(|change| ["--set", change]);
        let args: Vec<&str> = ["train", "job.toml", "--check"].into_iter().chain(sets).collect();
        refusal(folder, &args, parts);
    };
    check(&["data.text=text"], &["mail.csv", "no column \"text\"; the header has id, body, kind"]);
    check(&["data.text=kind"], &["is the text and the label", "`data.label`"]);
    check(&["data.text=[\"body\", \"body\"]"], &["names column \"body\" twice"]);
    check(&["data.ignore=[\"id\"]"], &["`data.ignore`", "leave out one of the two"]);
    let encoder = "kind = 'encoder'\nwidth = 16\nheads = 2\nhidden = 32\nlayers = 1";
    write(folder, "mlp.toml", &JOB.replace(encoder, "kind = 'mlp'"));
    refusal(folder, &["train", "mlp.toml", "--check"], &["`mlp` takes rows or images", "texts of up to"]);
    write(folder, "mail.csv", &(mail(30) + "31,  ,ham\n"));
    check(&[], &["mail.csv", "field \"body\"", "has no tokens"]);
    let plain =
        fs::read_to_string(folder.join("job.toml")).unwrap().replace("text = 'body'\n", "length = 9\n");
    write(folder, "job.toml", &plain);
    check(&[], &["`data.length` is for texts", "write text ="]);
}

#[test]
fn inspect_says_which_column_is_a_text_and_how_long() {
    let folder = with_mail();
    // Texts that hardly ever occur twice.
    let letters = (0..60).map(|i| format!("letter {i} about {},{}\n", "the sea ".repeat(1 + i % 9), i % 2));
    write(folder.path(), "letters.csv", &("body,kind\n".to_string() + &letters.collect::<String>()));
    let out = polyreme(folder.path(), &["inspect", "letters.csv", "--data"]);
    let said = String::from_utf8(out.stdout).unwrap();
    let line = said.lines().find(|line| line.trim_start().starts_with("body")).unwrap();
    for part in ["text", "bytes", "on average", "`data.text`"] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    let shown = polyreme(folder.path(), &["train", "job.toml", "--check"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned() + &String::from_utf8_lossy(&shown.stderr);
    assert!(
        shown.split_whitespace().collect::<Vec<_>>().join(" ").contains("\"body\" as texts of"),
        "{shown}"
    );
}

#[test]
fn pairs_of_texts_are_learnt_from_together() {
    let folder = folder(&JOB.replace("text = 'body'", "text = ['left', 'right']"));
    // Whether both sides have the word is seen only by both.
    let row = |i: usize| {
        let side = |has: bool| if has { "zz" } else { "ab ab" };
        let (left, right) = (i.is_multiple_of(2), (i / 2).is_multiple_of(2));
        format!("{},{},{}\n", side(left), side(right), if left && right { "both" } else { "not" })
    };
    write(
        folder.path(),
        "mail.csv",
        &("left,right,kind\n".to_string() + &(0..320).map(row).collect::<String>()),
    );
    let summary = json(folder.path(), &["train", "job.toml", "--json"]).pop().unwrap();
    assert!(summary["metrics"]["val_accuracy"].as_f64().unwrap() > 0.95, "{summary}");
}

/// A tokenizer of the tests of `data` in the folder.
fn wordpiece(folder: &Path) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/fixtures/wordpiece.json");
    fs::copy(path, folder.join("wordpiece.json")).unwrap();
}

#[test]
fn special_tokens_stand_around_texts_and_pairs() {
    let folder = with_mail();
    let folder = folder.path();
    wordpiece(folder);
    let with = ["--set", "data.tokenizer=wordpiece.json"];
    let train = ["train", "job.toml", "--json", "--output", "runs/job", "--set", "train.epochs=2"];
    json(folder, &[&train[..], &with].concat());
    assert_eq!(json(folder, &["predict", "runs/job", "mail.csv", "--json"]).len(), 300);
    let check = |changes: &[&str], parts: &[&str]| {
        let sets = changes.iter().flat_map(|change| ["--set", change]);
        let args: Vec<&str> = ["train", "job.toml", "--check"].into_iter().chain(with).chain(sets).collect();
        refusal(folder, &args, parts);
    };
    check(&["data.length=2"], &["2 tokens has no room for 1 text beside 2 special tokens", "`data.length`"]);
    check(
        &["data.text=[\"id\", \"body\", \"kind\"]", "data.label=id"],
        &["special tokens for one text or two"],
    );
    write(folder, "not.json", "{}");
    check(&["data.tokenizer=not.json"], &["not.json", "a `tokenizer.json` is needed"]);
    write(folder, "mail.csv", &(mail(30) + "31,[PAD] [PAD],ham\n"));
    check(&[], &["mail.csv", "the token in it that marks padding", "hidden from the model"]);
    write(folder, "mail.csv", &(mail(30) + "31,the [PAD] sea,ham\n"));
    check(&[], &["mail.csv", "the token in it that marks padding"]);
}

const TAG_JOB: &str = "[model]\nkind = 'bigru'\nwidth = 16\nhidden = 16\n\
                       [data]\nkind = 'jsonl'\npath = 'words.jsonl'\ntext = 'words'\ntags = 'tags'\n\
                       [train]\nbatch = 16\nepochs = 8\noptimizer = { kind = 'adam', lr = 0.01 }\n\
                       [parallel]\nranks = 1\nthreads = 1\n[output]\ntensorboard = false\n";

/// Words with a tag for each: names are those with a capital letter.
fn tagged(i: usize) -> (Vec<&'static str>, Vec<&'static str>) {
    let known = [("Ahab", "name"), ("saw", "other"), ("the", "other"), ("Pequod", "name"), ("sea", "other")];
    (0..2 + i % 6).map(|k| known[(i * 3 + k * k) % known.len()]).unzip()
}

#[test]
fn words_are_tagged() {
    let folder = folder(TAG_JOB);
    let folder = folder.path();
    let line = |i: usize| {
        let (words, tags) = tagged(i);
        object!({ "words": words, "tags": tags }).to_string() + "\n"
    };
    write(folder, "words.jsonl", &(0..200).map(line).collect::<String>());
    let summary = json(folder, &["train", "job.toml", "--json", "--output", "runs/job"]).pop().unwrap();
    assert!(summary["metrics"]["val_accuracy"].as_f64().unwrap() > 0.95, "{summary}");

    // Words between spaces, and lists of them: the same answers, a tag for each word.
    let rows: Vec<_> = (200..220).map(tagged).collect();
    let csv = rows.iter().map(|(words, _)| format!("{}\n", words.join(" ")));
    write(folder, "new.csv", &("words\n".to_string() + &csv.collect::<String>()));
    let lines = rows.iter().map(|(words, _)| object!({ "words": words }).to_string() + "\n");
    write(folder, "new.jsonl", &lines.collect::<String>());
    let answers = |name: &str| {
        let lines = json(folder, &["predict", "runs/job", name, "--json"]);
        lines.iter().map(|line| line["words"].clone()).collect::<Vec<_>>()
    };
    let said = answers("new.jsonl");
    assert_eq!(said.len(), 20);
    assert_eq!(said, answers("new.csv"));
    let (mut right, mut all) = (0, 0);
    for (said, (words, tags)) in said.iter().zip(&rows) {
        assert_eq!(said.as_array().unwrap().len(), words.len());
        for (k, (word, tag)) in words.iter().zip(tags).enumerate() {
            assert_eq!(said[k]["word"], *word);
            right += usize::from(said[k]["tag"]["label"] == *tag);
            all += 1;
        }
    }
    assert!(right * 20 >= all * 19, "{right} of {all}");
    let shown = polyreme(folder, &["predict", "runs/job", "new.csv"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("Ahab/name"));
    let eval = |more: &[&str]| {
        let args = ["eval", "runs/job", "--json", "--on", "test", "--set", "data.test=words.jsonl"];
        json(folder, &[&args[..], more].concat())[0]["metrics"].clone()
    };
    let one = eval(&[]);
    assert!(one["test_accuracy"].as_f64().unwrap() > 0.95, "{one}");
    assert_eq!(one, eval(&["--ranks", "2"]));

    let check = |changes: &[&str], parts: &[&str]| {
        let sets = changes.iter().flat_map(|change| ["--set", change]);
        let args: Vec<&str> = ["train", "job.toml", "--check"].into_iter().chain(sets).collect();
        refusal(folder, &args, parts);
    };
    check(&["data.label=tags"], &["`data.tags` and `data.label` are both given", "leave out one of the two"]);
    check(&["train.loss=mse"], &["tags, which are classes"]);
    check(&["data.class_weights=balanced"], &["counts one class for each sample"]);
    check(&["data.tags=tag"], &["no column \"tag\""]);
    write(folder, "words.jsonl", &(line(1) + "{\"words\": [\"a\", \"b\"], \"tags\": [\"x\"]}\n"));
    check(&[], &["words.jsonl", "line 2", "has 2 words, and the row has 1 tags"]);
    write(folder, "words.jsonl", &(line(1) + "{\"words\": [], \"tags\": []}\n"));
    check(&[], &["words.jsonl", "line 2", "has no tokens"]);
}
