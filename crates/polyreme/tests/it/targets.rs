//! Numbers and labels as targets, through the binary: trained, gone on with, evaluated and predicted, from tables and from
//! arrays. What is predicted is judged by closed forms, and metrics by their definitions, in f64.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::binary::{folder, json, polyreme};
use crate::train::{same_outcome, signal, spawn, wait_for_step};
use crate::wrong_data::refusal;

/// Full batches and a constant rate, so that gradient descent ends where the closed form is.
const LINEAR: &str = "[model]\nlayers = [{ kind = 'linear' }]\n\
                      [data]\nkind = 'csv'\npath = 'train.csv'\ntest = 'test.csv'\nlabel = ['price', 'age']\n\
                      validation = 0\n\
                      [train]\nloss = 'mse'\nbatch = 60\nsteps = 80\n\
                      optimizer = { kind = 'sgd', lr = 0.5, momentum = 0 }\n\
                      [parallel]\nranks = 1\nthreads = 1\n[output]\ntensorboard = false\nevery_epochs = 0\n";

/// Noise that is the same everywhere, in -1..1.
fn noise(i: usize) -> f64 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 40) as f64 / (1u64 << 23) as f64 - 1.0
}

/// Features, and two targets of very different sizes that lines do not explain altogether.
fn rows(n: usize, from: usize) -> Vec<[f64; 4]> {
    let row = |i: usize| {
        let (a, b) = (noise(4 * i), 3.0 * noise(4 * i + 1) + 10.0);
        let (c, d) = (noise(4 * i + 2), noise(4 * i + 3));
        // As an f32 and the text of it hold it.
        [a, b, 250_000.0 + 40_000.0 * a - 9000.0 * b + 5000.0 * c, 0.02 * b - 0.01 * a * b + 0.003 * d]
            .map(|v| f64::from(v as f32))
    };
    (from..from + n).map(row).collect()
}

/// A table of the columns in this order.
fn table(columns: &[&str], rows: &[[f64; 4]]) -> String {
    let all = ["a", "b", "price", "age"];
    let field = |row: &[f64; 4], column: &str| {
        (row[all.iter().position(|c| *c == column).unwrap()] as f32).to_string()
    };
    let line = |row: &[f64; 4]| columns.iter().map(|c| field(row, c)).collect::<Vec<_>>().join(",");
    let lines: Vec<String> = rows.iter().map(line).collect();
    format!("{}\n{}\n", columns.join(","), lines.join("\n"))
}

/// Least squares of column `k` on a constant and the features: the normal equations, solved by elimination with pivots.
fn least_squares(rows: &[[f64; 4]], k: usize) -> [f64; 3] {
    let mut system = [[0.0; 4]; 3];
    for row in rows {
        let x = [1.0, row[0], row[1]];
        for i in 0..3 {
            (0..3).for_each(|j| system[i][j] += x[i] * x[j]);
            system[i][3] += x[i] * row[k];
        }
    }
    for i in 0..3 {
        let pivot = (i..3).max_by(|&a, &b| system[a][i].abs().total_cmp(&system[b][i].abs())).unwrap();
        system.swap(i, pivot);
        for other in (0..3).filter(|&other| other != i) {
            let times = system[other][i] / system[i][i];
            (0..4).for_each(|j| system[other][j] -= times * system[i][j]);
        }
    }
    [0, 1, 2].map(|i| system[i][3] / system[i][i])
}

/// R² and the mean absolute error by their definitions, the mean over the targets.
fn by_definition(predicted: &[Vec<f64>], truth: &[Vec<f64>]) -> (f64, f64) {
    let (n, targets) = (truth.len() as f64, truth[0].len());
    let each = (0..targets).map(|k| {
        let mean = truth.iter().map(|row| row[k]).sum::<f64>() / n;
        let total: f64 = truth.iter().map(|row| (row[k] - mean).powi(2)).sum();
        let errors = || truth.iter().zip(predicted).map(|(t, p)| t[k] - p[k]);
        (1.0 - errors().map(|e| e * e).sum::<f64>() / total, errors().map(f64::abs).sum::<f64>() / n)
    });
    let (r2, mae) = each.fold((0.0, 0.0), |(r2, mae), (a, b)| (r2 + a, mae + b));
    (r2 / targets as f64, mae / targets as f64)
}

/// The numbers that are predicted for the rows of a file.
fn predicted(folder: &Path, run: &str, file: &str) -> Vec<Vec<f64>> {
    let lines = json(folder, &["predict", run, file, "--json"]);
    let values =
        |line: &Value| line["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    lines.iter().map(values).collect()
}

#[track_caller]
fn near(what: &str, got: &Value, want: f64, within: f64) {
    let got = got.as_f64().unwrap_or_else(|| panic!("{what} is {got}"));
    assert!((got - want).abs() <= within * want.abs().max(1e-3), "{what}: {got} and not {want}");
}

#[test]
fn a_linear_model_of_two_numbers_is_that_of_least_squares() {
    let folder = folder(LINEAR);
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let (train, test) = (rows(60, 0), rows(25, 1000));
    write("train.csv", &table(&["price", "a", "age", "b"], &train));
    write("test.csv", &table(&["a", "b", "price", "age"], &test));
    let summary = json(folder.path(), &["train", "job.toml", "--json"]).pop().unwrap();

    let lines = [2, 3].map(|k| least_squares(&train, k));
    let of = |row: &[f64; 4]| lines.map(|w| w[0] + w[1] * row[0] + w[2] * row[1]).to_vec();
    let want: Vec<Vec<f64>> = test.iter().map(of).collect();
    // Columns in another order, with the targets and without, and without names.
    write("features.csv", &table(&["b", "a"], &test));
    write("between.csv", &table(&["b", "age", "a", "price"], &test));
    write("nameless.csv", table(&["a", "b"], &test).split_once('\n').unwrap().1);
    // Processes that have unequal parts of each step come to the same.
    let ranks = ["parallel.ranks=3", "parallel.transport=tcp", "parallel.balance=[3, 1, 2]"];
    let sets = ranks.iter().flat_map(|set| ["--set", set]);
    let args: Vec<&str> =
        ["train", "job.toml", "--json", "--output", "ranks"].into_iter().chain(sets).collect();
    json(folder.path(), &args);
    for (run, file) in [
        ("runs/job", "test.csv"),
        ("runs/job", "features.csv"),
        ("runs/job", "between.csv"),
        ("runs/job", "nameless.csv"),
        ("ranks", "test.csv"),
    ] {
        let got = predicted(folder.path(), run, file);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got - want).abs() < 2e-5 * want.abs().max(0.1), "{run}, {file}: {got} and not {want}");
        }
    }

    // Metrics of the run, and of an evaluation of it, by their definitions.
    let truth: Vec<Vec<f64>> = test.iter().map(|row| row[2..].to_vec()).collect();
    let (r2, mae) = by_definition(&predicted(folder.path(), "runs/job", "test.csv"), &truth);
    assert!(r2 > 0.5 && r2 < 0.999, "{r2} can be wrong in either direction");
    let evaluated = json(folder.path(), &["eval", "runs/job", "--json"]).pop().unwrap();
    for metrics in [&summary["metrics"], &evaluated["metrics"]] {
        near("test_r2", &metrics["test_r2"], r2, 1e-5);
        near("test_mae", &metrics["test_mae"], mae, 1e-5);
    }
    // The same of a part of the training set, with the normalisation of the whole.
    write("some.csv", &table(&["age", "a", "b", "price"], &train[..20]));
    let set = ["--on", "train", "--set", "data.path=some.csv"];
    let evaluated = json(folder.path(), &[&["eval", "runs/job", "--json"], &set[..]].concat()).pop().unwrap();
    let truth: Vec<Vec<f64>> = train[..20].iter().map(|row| row[2..].to_vec()).collect();
    let (r2, mae) = by_definition(&predicted(folder.path(), "runs/job", "some.csv"), &truth);
    near("train_r2", &evaluated["metrics"]["train_r2"], r2, 1e-5);
    near("train_mae", &evaluated["metrics"]["train_mae"], mae, 1e-5);

    // For people: names and numbers.
    let out =
        String::from_utf8(polyreme(folder.path(), &["predict", "runs/job", "features.csv"]).stdout).unwrap();
    let first = out.lines().next().unwrap();
    let fields: Vec<&str> = first.split_whitespace().collect();
    assert_eq!(
        (fields[0], fields[1], fields[3], fields.len()),
        ("features.csv:1", "price", "age", 5),
        "{first}"
    );
    near("price", &fields[2].parse::<f64>().unwrap().into(), want[0][0], 2e-5);
    let line = &json(folder.path(), &["predict", "runs/job", "features.csv", "--json"])[0];
    assert_eq!(line["targets"], serde_json::json!(["price", "age"]));
    let shown = String::from_utf8(polyreme(folder.path(), &["eval", "runs/job"]).stdout).unwrap();
    assert!(shown.contains("test_r2") && shown.contains("test_mae"), "{shown}");
    let report = fs::read_to_string(folder.path().join("runs/job/report.html")).unwrap();
    assert!(report.contains("test_r2") || report.contains("R²"), "the report shows R²");
}

#[test]
fn outliers_move_squares_and_not_absolute_errors() {
    // A line, but for every tenth row, which is far above it. The line of the least absolute errors is the line itself.
    let line = |i: usize| 7.0 + 2.0 * noise(i);
    let row = |i: usize| (noise(i), line(i) + if i.is_multiple_of(10) { 100.0 } else { 0.0 });
    let content: String = (0..200).map(row).map(|(x, y)| format!("{x},{y}\n")).collect::<String>();
    let mut off = Map::new();
    for loss in ["mse", "mae", "huber"] {
        let folder = folder(
            &LINEAR
                .replace("test = 'test.csv'\nlabel = ['price', 'age']\n", "header = false\n")
                .replace("'mse'", &format!("'{loss}'"))
                .replace("batch = 60\nsteps = 80", "batch = 200\nsteps = 1500\nschedule = 'linear'"),
        );
        fs::write(folder.path().join("train.csv"), &content).unwrap();
        json(folder.path(), &["train", "job.toml", "--json"]);
        let got = predicted(folder.path(), "runs/job", "train.csv");
        let worst = got.iter().enumerate().map(|(i, got)| (got[0] - line(i)).abs()).fold(0.0, f64::max);
        off.insert(loss.into(), worst.into());
    }
    let off = |loss: &str| off[loss].as_f64().unwrap();
    // The mean is 10 above the line; Huber's loss is between the two.
    assert!(off("mse") > 9.0 && off("mae") < 0.2, "{} {}", off("mse"), off("mae"));
    assert!(off("mae") < off("huber") && off("huber") < off("mse"), "{}", off("huber"));
}

/// A file of arrays: a header of JSON after its length, and the bytes.
fn arrays(list: &[(&str, &str, &[usize], Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in list {
        let offsets = [data.len(), data.len() + bytes.len()];
        let array = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert(name.to_string(), array);
        data.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn le(values: impl Iterator<Item = f64>) -> Vec<u8> {
    values.flat_map(|v| (v as f32).to_le_bytes()).collect()
}

const LABELS: &str = "[model]\nkind = 'mlp'\nhidden = [16]\n\
                      [data]\nkind = 'arrays'\npath = 'train.safetensors'\ntest = 'test.safetensors'\n\
                      [train]\nloss = 'bce'\nbatch = 32\nepochs = 30\noptimizer = { kind = 'adam', lr = 0.01 }\n\
                      [parallel]\nthreads = 1\n[output]\ntensorboard = false\nbest = 'val_f1'\n";

/// Two features and three labels that hold or not, with some that are wrong.
fn labelled(i: usize) -> ([f64; 2], [u8; 3]) {
    let (a, b) = (noise(2 * i), noise(2 * i + 1));
    let flip = i.is_multiple_of(17);
    ([a, b], [(a > 0.0) != flip, a + b > 0.5, a * b > 0.0].map(u8::from))
}

fn labels_file(from: usize, n: usize) -> Vec<u8> {
    let x = le((from..from + n).flat_map(|i| labelled(i).0));
    let y = (from..from + n).flat_map(|i| labelled(i).1).collect();
    arrays(&[("x", "F32", &[n, 2], x), ("labels", "U8", &[n, 3], y)])
}

#[test]
fn labels_that_each_hold_or_not_are_learnt_from_arrays_on_ranks() {
    let folder = folder(LABELS);
    let write = |name: &str, content: &[u8]| fs::write(folder.path().join(name), content).unwrap();
    write("train.safetensors", &labels_file(0, 400));
    write("test.safetensors", &labels_file(5000, 90));
    // The same scores and the same model, but for rounding, on three ranks.
    let train = |ranks: &str, output: &str| {
        let set = format!("parallel.ranks={ranks}");
        let lines = json(folder.path(), &["train", "job.toml", "--json", "--set", &set, "--output", output]);
        let evaluations: Vec<&Value> = lines.iter().filter(|line| line["event"] == "evaluation").collect();
        assert!(evaluations[0]["metrics"]["val_f1"].is_f64() && evaluations[0]["best"] == true, "{lines:?}");
        lines.last().unwrap()["metrics"].clone()
    };
    let (one, three) = (train("1", "runs/job"), train("3", "runs/three"));
    for metric in ["test_loss", "test_f1", "test_accuracy", "val_f1"] {
        near(metric, &three[metric], one[metric].as_f64().unwrap(), 0.02);
    }
    // Probabilities at 0.5, counted over all labels.
    let text: String =
        (5000..5090).map(|i| labelled(i).0).map(|[a, b]| format!("{},{}\n", a as f32, b as f32)).collect();
    write("test.csv", text.as_bytes());
    let lines = json(folder.path(), &["predict", "runs/job", "test.csv", "--json"]);
    let (mut found, mut wrong, mut all_right) = (0, 0, 0);
    for (line, i) in lines.iter().zip(5000..) {
        let probability = |k: usize| {
            let answers = line["labels"].as_array().unwrap();
            let of_label = answers.iter().find(|a| a["label"] == ["0", "1", "2"][k]).unwrap();
            of_label["probability"].as_f64().unwrap()
        };
        let pairs = [0, 1, 2].map(|k| (probability(k) > 0.5, labelled(i).1[k] == 1));
        found += pairs.iter().filter(|(p, t)| *p && *t).count();
        wrong += pairs.iter().filter(|(p, t)| p != t).count();
        all_right += usize::from(pairs.iter().all(|(p, t)| p == t));
    }
    let f1 = 2.0 * found as f64 / (2 * found + wrong) as f64;
    assert!(wrong > 0 && f1 > 0.85, "{f1}, {wrong} wrong");
    near("test_f1", &one["test_f1"], f1, 1e-12);
    near("test_accuracy", &one["test_accuracy"], all_right as f64 / 90.0, 1e-12);
    let evaluated = json(folder.path(), &["eval", "runs/job", "--json"]).pop().unwrap();
    assert_eq!(evaluated["metrics"]["test_f1"], one["test_f1"]);
    // For people: the labels that hold.
    let out =
        String::from_utf8(polyreme(folder.path(), &["predict", "runs/job", "test.csv"]).stdout).unwrap();
    assert_eq!(out.lines().count(), 90);
    let none = out.lines().filter(|line| line.ends_with("  none")).count();
    let none_of = |line: &&Value| {
        line["labels"].as_array().unwrap().iter().all(|a| a["probability"].as_f64().unwrap() <= 0.5)
    };
    assert_eq!(none, lines.iter().filter(none_of).count());
}

#[test]
fn runs_that_are_stopped_go_on_with_the_same_bits() {
    for (job, data) in [
        (LABELS.to_string(), labels_file(0, 400)),
        (
            LABELS.replace("'bce'", "'huber'").replace("val_f1", "val_mae"),
            arrays(&[
                ("x", "F32", &[400, 2], le((0..400).flat_map(|i| labelled(i).0))),
                (
                    "labels",
                    "F32",
                    &[400],
                    le((0..400).map(|i| 1e6 + 1000.0 * labelled(i).0[0] * labelled(i).0[1])),
                ),
            ]),
        ),
    ] {
        let folder = folder(&job.replace("test = 'test.safetensors'\n", ""));
        fs::write(folder.path().join("train.safetensors"), data).unwrap();
        let train = |name: &'static str| {
            [
                "train",
                "job.toml",
                "--json",
                "--output",
                name,
                "--set",
                "output.every_steps=1",
                "--set",
                "train.epochs=6",
            ]
        };
        json(folder.path(), &train("whole"));
        let mut child = spawn(folder.path(), &train("cut"));
        let run = folder.path().join("cut");
        wait_for_step(&run, 10);
        signal(&child, rustix::process::Signal::KILL);
        assert_eq!(child.wait().unwrap().code(), None, "killed before its end");
        json(folder.path(), &["resume", "cut", "--json"]);
        same_outcome(&folder.path().join("whole"), &run);
    }
}

#[test]
fn targets_that_do_not_fit_are_refused_with_what_to_do() {
    let folder = folder(LINEAR);
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let good = table(&["a", "b", "price", "age"], &rows(20, 0));
    write("test.csv", &good);
    let check = |content: &str, sets: &[&str], parts: &[&str]| {
        write("train.csv", content);
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["train", "job.toml", "--check"].into_iter().chain(sets).collect();
        refusal(folder.path(), &args, parts);
    };
    check("a,b,price,age\n1,2,3,4\n1,2,dear,4\n", &[], &["line 3", "\"dear\" is not a number", "data.label"]);
    check("a,b,price,age\n1,2,3,4\n1,2,nan,4\n", &[], &["line 3", "\"price\"", "not a finite number"]);
    check("a,b,price,age\n1,2,3,4\n1,2,,4\n", &[], &["line 3", "\"price\"", "is empty"]);
    check("a,b,price,year\n1,2,3,4\n", &[], &["no column \"age\"", "the header has a, b, price, year"]);
    check(&good, &["train.loss=cross_entropy"], &["data.label", "2 columns", "mse", "bce"]);
    check(&good, &["train.loss=bce"], &["is not 0 or 1", "train.loss"]);
    check(&good, &["train.label_smoothing=0.1"], &["train.label_smoothing", "for classes", "mse"]);
    check(&good, &["data.class_weights=balanced"], &["data.class_weights", "for classes", "mse"]);
    check(&good, &["output.best=val_accuracy"], &["output.best", "val_accuracy", "val_r2", "val_mae"]);
    let early = ["train.early_stop.metric=val_f1", "train.early_stop.patience=2"];
    check(&good, &early, &["early_stop", "val_f1", "val_r2"]);
    check(&good, &["train.loss=rmse"], &["rmse", "mse"]);
    check(
        &good,
        &["data.label=age", "train.loss=cross_entropy"],
        &["is not a class", "train.loss = \"mse\""],
    );
    // A model whose last layer has another width.
    check(&good, &["model.layers.0.outputs=3"], &["3", "2 targets", "outputs"]);
    // Numbers of pictures have no place to be written.
    let synthetic = "[model]\nkind = 'mlp'\n[data]\nkind = 'synthetic'\n[train]\nloss = 'mse'\n";
    write("synthetic.toml", synthetic);
    refusal(
        folder.path(),
        &["train", "synthetic.toml", "--check"],
        &["train.loss", "classes", "csv", "arrays"],
    );
    // A trained model judged by a file of other targets.
    write("train.csv", &good);
    json(folder.path(), &["train", "job.toml", "--json", "--set", "train.steps=3"]);
    write("other.csv", "a,b,price\n1,2,3\n");
    refusal(folder.path(), &["eval", "runs/job", "--set", "data.test=other.csv"], &["other.csv", "\"age\""]);
    // Arrays.
    let arrays_job = LABELS.replace("test = 'test.safetensors'\n", "");
    write("arrays.toml", &arrays_job);
    let x = || ("x", "F32", &[3usize, 2][..], le((0..6).map(noise)));
    let refused = |labels: (&str, &str, &[usize], Vec<u8>), set: &str, parts: &[&str]| {
        fs::write(folder.path().join("train.safetensors"), arrays(&[x(), labels])).unwrap();
        refusal(
            folder.path(),
            &["train", "arrays.toml", "--check", "--set", set, "--set", "output.best=val_loss"],
            parts,
        );
    };
    refused(("labels", "U8", &[3, 2], vec![0, 1, 2, 0, 1, 1]), "train.loss=bce", &["label 2 is not 0 or 1"]);
    let nan = le([1.0, f64::NAN, 2.0].into_iter());
    refused(("labels", "F32", &[3], nan), "train.loss=mse", &["label NaN is not a finite number"]);
    let half = le([1.0, 0.5, 2.0].into_iter());
    refused(
        ("labels", "F32", &[3], half),
        "train.loss=cross_entropy",
        &["label 0.5 is not a class", "train.loss"],
    );
}
