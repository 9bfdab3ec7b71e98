//! Trained models in use: tables, images, text; and weights that come from elsewhere.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use crate::binary::{folder, json, polyreme, root};

/// Two classes that a line tells apart.
fn table(rows: usize, labels: bool) -> String {
    let mut text = String::from(if labels { "a,b,kind\n" } else { "a,b\n" });
    for i in 0..rows {
        let (a, b) = ((i * 37 % 100) as f32 / 50.0 - 1.0, (i * 61 % 100) as f32 / 50.0 - 1.0);
        let kind = if a > b { "right" } else { "left" };
        text += &if labels { format!("{a},{b},{kind}\n") } else { format!("{a},{b}\n") };
    }
    text
}

#[test]
fn rows_of_a_table_get_their_names() {
    let folder = folder(
        "[model]\nkind = 'mlp'\nhidden = [16]\n[data]\nkind = 'csv'\npath = 'train.csv'\nlabel = 'kind'\n\
         [train]\nbatch = 16\nepochs = 30\noptimizer = { kind = 'adam', lr = 0.02 }\n",
    );
    fs::write(folder.path().join("train.csv"), table(200, true)).unwrap();
    fs::write(folder.path().join("new.csv"), "a,b\n0.9,-0.9\n-0.9,0.9\n").unwrap();
    json(folder.path(), &["train", "job.toml", "--json"]);
    let answers = json(folder.path(), &["predict", "runs/job", "new.csv", "--json"]);
    let first = |k: usize| answers[k]["labels"][0]["label"].as_str().unwrap().to_string();
    assert_eq!([first(0), first(1)], ["right", "left"]);
    let sum: f64 =
        answers[0]["labels"].as_array().unwrap().iter().map(|l| l["probability"].as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-6, "two classes, two probabilities: {sum}");

    // Plain text for people, and a file that does not fit.
    let out = polyreme(folder.path(), &["predict", "runs/job", "new.csv"]);
    assert!(String::from_utf8(out.stdout).unwrap().contains("new.csv:1  right "));
    fs::write(folder.path().join("wide.csv"), "1,2,3,4,5\n").unwrap();
    let out = polyreme(folder.path(), &["predict", "runs/job", "wide.csv"]);
    assert!(!out.status.success() && String::from_utf8(out.stderr).unwrap().contains("wide.csv"));
}

/// A binary grey image that every viewer reads, as PNG.
pub(crate) fn write_png(path: &Path, side: u32, pixel: impl Fn(u32, u32) -> u8) {
    let mut raw = Vec::new();
    for y in 0..side {
        raw.push(0);
        raw.extend((0..side).map(|x| pixel(x, y)));
    }
    // One stored block of deflate is enough for a small image.
    let mut deflate = vec![0x78, 0x01, 0x01];
    deflate.extend((raw.len() as u16).to_le_bytes());
    deflate.extend((!(raw.len() as u16)).to_le_bytes());
    deflate.extend(&raw);
    let (mut a, mut b) = (1u32, 0u32);
    for byte in &raw {
        a = (a + u32::from(*byte)) % 65521;
        b = (b + a) % 65521;
    }
    deflate.extend((b << 16 | a).to_be_bytes());
    let mut file = vec![0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a];
    let mut chunk = |kind: &[u8; 4], body: &[u8]| {
        let mut whole = kind.to_vec();
        whole.extend(body);
        let crc = !whole.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 })
        });
        file.extend((body.len() as u32).to_be_bytes());
        file.extend(whole);
        file.extend(crc.to_be_bytes());
    };
    let mut header = Vec::new();
    header.extend(side.to_be_bytes());
    header.extend(side.to_be_bytes());
    header.extend([8, 0, 0, 0, 0]);
    chunk(b"IHDR", &header);
    chunk(b"IDAT", &deflate);
    chunk(b"IEND", &[]);
    fs::File::create(path).unwrap().write_all(&file).unwrap();
}

#[test]
fn images_of_a_folder_are_learnt_and_told_apart() {
    let folder = folder(
        "[model]\nlayers = [{ kind = 'conv', outputs = 8, kernel = 3 }, 'relu', 'global_mean', 'linear']\n\
         [data]\nkind = 'images'\npath = 'pictures'\ngrey = true\nvalidation = 0.2\n\
         [train]\nbatch = 8\nepochs = 40\noptimizer = { kind = 'adam', lr = 0.02 }\n",
    );
    // Lines across and lines down.
    for i in 0..20u32 {
        for (name, across) in [("across", true), ("down", false)] {
            let place = folder.path().join("pictures").join(name);
            fs::create_dir_all(&place).unwrap();
            write_png(&place.join(format!("{i}.png")), 12, |x, y| {
                let along = if across { y } else { x };
                if (along + i) % 4 < 2 { 200 + (i % 5) as u8 * 10 } else { i as u8 }
            });
        }
    }
    json(folder.path(), &["train", "job.toml", "--json"]);
    write_png(&folder.path().join("new.png"), 12, |x, _| if x % 4 < 2 { 220 } else { 5 });
    let answers = json(folder.path(), &["predict", "runs/job", "new.png", "--json"]);
    assert_eq!(answers[0]["labels"][0]["label"], "down");
    let broken = folder.path().join("broken.png");
    fs::write(&broken, b"\x89PNG\r\n\x1a\nand nothing").unwrap();
    let out = polyreme(folder.path(), &["predict", "runs/job", "broken.png"]);
    assert!(!out.status.success() && String::from_utf8(out.stderr).unwrap().contains("broken.png"));
}

#[test]
fn a_text_is_learnt_and_goes_on() {
    let folder = folder(
        "[model]\nkind = 'gpt'\nlayers = 1\nwidth = 32\nheads = 2\ncontext = 32\n\
         [data]\nkind = 'text'\npath = 'text.txt'\n\
         [train]\nbatch = 8\nsteps = 150\noptimizer = { kind = 'adamw', lr = 1e-2 }\n",
    );
    fs::write(folder.path().join("text.txt"), "row, row, row your boat\n".repeat(600)).unwrap();
    let summary = json(folder.path(), &["train", "job.toml", "--json"]).pop().unwrap();
    assert!(summary["metrics"]["val_perplexity"].as_f64().unwrap() < 1.5, "{summary}");
    let args = ["predict", "runs/job", "--prompt", "row, row", "--length", "15", "--temperature", "0"];
    let out = polyreme(folder.path(), &args);
    assert_eq!(String::from_utf8(out.stdout).unwrap(), "row, row, row your boat\n");
    let answer: &Value = &json(folder.path(), &[&args[..], &["--json"]].concat())[0];
    assert_eq!(answer["text"], ", row your boat");
}

#[test]
fn weights_from_elsewhere_are_where_training_starts() {
    let folder = tempfile::tempdir().unwrap();
    let job = root().join("examples/digits.toml");
    let job = job.to_str().unwrap();
    json(folder.path(), &["train", job, "--json", "--set", "train.epochs=8", "--output", "first"]);
    let trained = &json(folder.path(), &["eval", "first", "--json"])[0]["metrics"]["test_accuracy"];
    // The file says what it is: enough to use it without the run.
    let about = &json(folder.path(), &["inspect", "first/model.safetensors", "--json"])[0]["about"];
    assert_eq!(about["preparation"]["sample"]["image"], serde_json::json!([1, 8, 8]), "{about}");
    assert_eq!(about["preparation"]["classes"].as_array().map(Vec::len), Some(10), "{about}");
    assert!(
        about["preparation"]["mean"][0].is_number() && about["preparation"]["std"][0].is_number(),
        "{about}"
    );
    assert!(
        about["job"].as_str().is_some_and(|job| job.contains("[train]") && job.contains("epochs = 8")),
        "{about}"
    );
    let shown = polyreme(folder.path(), &["inspect", "first/model.safetensors"]).stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(
        shown.contains("  job:\n") && shown.contains("preparation: {") && shown.contains("tensors,"),
        "{shown}"
    );
    // One step that changes next to nothing.
    let args = [
        "train",
        job,
        "--json",
        "--output",
        "second",
        "--set",
        "model.weights=first/model.safetensors",
        "--set",
        "train.steps=1",
        "--set",
        "train.optimizer.lr=1e-12",
    ];
    let summary = json(folder.path(), &args).pop().unwrap();
    assert_eq!(&summary["metrics"]["test_accuracy"], trained);
    // A file that is no file of weights, and weights of another model.
    let refuse = |file: &str, part: &str| {
        let set = format!("model.weights={file}");
        let out = polyreme(folder.path(), &["train", job, "--output", "third", "--set", &set]);
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success() && text.contains(part), "{text}");
    };
    refuse("absent.safetensors", "absent.safetensors");
    fs::write(folder.path().join("text.safetensors"), "not weights").unwrap();
    refuse("text.safetensors", "text.safetensors");
}
