//! Training through the binary: its outputs, how it stops, how it resumes, what it refuses.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use polyreme::train::checkpoint;
use serde_json::Value;

use crate::binary::{cannot_run, command, folder, json, polyreme, root};

/// A job that takes a second or two: checkpoints after every step, evaluation, dropout.
pub(crate) const JOB: &str = r#"
[model]
layers = [
    { kind = "linear", outputs = 64 }, "relu", { kind = "dropout", p = 0.2 },
    { kind = "linear", outputs = 64 }, "batch_norm", "relu", { kind = "linear" },
]
[data]
kind = "synthetic"
samples = 1000
shape = [32]
classes = 5
noise = 1.0
validation = 0.1
[train]
batch = 64
epochs = 8
accumulate = 2
ema = 0.95
clip = 1.0
optimizer = { kind = "adamw", lr = 3e-3 }
schedule = { kind = "cosine", warmup = 10 }
log_every = 5
[parallel]
threads = 1
[output]
every_steps = 1
keep = 3
best = "val_accuracy"
"#;

/// The lines of metrics without what depends on the clock.
fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let line = |l: &str| {
        let mut line: Value = serde_json::from_str(l).unwrap();
        for clock in ["seconds", "samples_per_s", "wait_share"] {
            line.as_object_mut().unwrap().remove(clock);
        }
        line
    };
    text.lines().map(line).collect()
}

#[test]
fn digits_reach_97_percent() {
    let folder = tempfile::tempdir().unwrap();
    let job = root().join("examples/digits.toml");
    let lines = json(folder.path(), &["train", job.to_str().unwrap(), "--json"]);
    let summary = lines.last().unwrap();
    for key in ["steps", "seconds", "samples_per_s", "final_loss", "metrics", "output"] {
        assert!(!summary[key].is_null(), "{key} in {summary}");
    }
    let accuracy = summary["metrics"]["test_accuracy"].as_f64().unwrap();
    assert!(accuracy >= 0.97, "{accuracy}");
    let run = folder.path().join("runs/digits");
    for file in
        ["model.safetensors", "metrics.jsonl", "report.html", "job.toml", "checkpoints/best/manifest.json"]
    {
        assert!(run.join(file).exists(), "{file}");
    }
    assert!(
        fs::read_dir(&run).unwrap().any(|f| f
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with("events.out."))
    );

    // The model in use.
    let report = &json(folder.path(), &["eval", "runs/digits", "--json"])[0];
    assert_eq!(report["metrics"]["test_accuracy"], summary["metrics"]["test_accuracy"]);
    let tensors = &json(folder.path(), &["inspect", "runs/digits", "--json"])[0]["parameters"];
    assert_eq!(tensors[0]["name"], "0.weight");
    let dot = polyreme(folder.path(), &["inspect", "runs/digits", "--graph", "dot"]);
    assert!(dot.stdout.starts_with(b"digraph"));

    // A second run of the same name takes another folder.
    let again = json(folder.path(), &["train", job.to_str().unwrap(), "--json", "--set", "train.epochs=1"]);
    assert_eq!(again.last().unwrap()["output"], "runs/digits-2");
}

/// The graph that is printed is the one that runs: in bf16, with its casts.
#[test]
fn a_printed_graph_is_in_the_precision_of_the_job() {
    let graph = |precision: &str, of_last: &str, form: &str| {
        let folder = folder(&format!(
            "[model]\nlayers = [{{ kind = \"linear\", outputs = 8 }}, \"gelu\", {{ kind = \"linear\", outputs = 8 }}, \"relu\",\
             {{ kind = \"linear\"{of_last} }}]\n[data]\nkind = \"synthetic\"\n[train]\nprecision = \"{precision}\"\n"
        ));
        let out = polyreme(folder.path(), &["inspect", "job.toml", "--graph", form]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let halves = |text: &str, layer: &str| {
        let of_layer = text.lines().filter(|line| line.ends_with(&format!("# {layer}")));
        of_layer.filter(|line| line.contains("cast{bf16}") || line.contains("as bf16")).count()
    };
    let bf16 = graph("bf16", "", "text");
    assert!(!bf16.contains("-- backward --") && bf16.contains("output loss"), "{bf16}");
    for (layer, want) in [("0", 2), ("1", 1), ("2", 1), ("3", 1), ("4", 2)] {
        assert_eq!(halves(&bf16, layer), want, "layer {layer}\n{bf16}");
    }
    let kept = graph("bf16", ", precision = \"f32\"", "text");
    assert_eq!((halves(&kept, "2"), halves(&kept, "4")), (1, 0), "{kept}");
    assert!(graph("bf16", "", "dot").contains("cast"));
    let f32 = graph("f32", "", "text");
    assert!(!f32.contains("cast") && !f32.contains("bf16"), "{f32}");
}

#[test]
fn digits_are_learnt_with_lion_and_adafactor() {
    let folder = tempfile::tempdir().unwrap();
    let job = root().join("examples/digits.toml");
    // Four seeds each came to at least 0.969 and 0.989; with a fifteenth and a sixth of these rates, to 0.91 and 0.96 at most.
    for (kind, lr, least) in [("lion", "1.5e-3", 0.965), ("adafactor", "0.06", 0.98)] {
        let optimizer = format!("train.optimizer={{ kind = \"{kind}\", lr = {lr} }}");
        let lines = json(folder.path(), &["train", job.to_str().unwrap(), "--json", "--set", &optimizer]);
        let accuracy = lines.last().unwrap()["metrics"]["test_accuracy"].as_f64().unwrap();
        assert!(accuracy > least, "{kind}: {accuracy}");
    }
}

#[test]
fn a_check_plans_what_an_optimizer_keeps() {
    let folder = folder(
        "[model]\nlayers = [{ kind = \"linear\", outputs = 1024, bias = false }, { kind = \"linear\", bias = false }]\n\
         [data]\nkind = \"synthetic\"\nsamples = 64\nshape = [1024]\nclasses = 1024\n\
         [train]\nbatch = 16\nclip = 1.0\n[parallel]\nranks = 1\nthreads = 1\n",
    );
    let mib = |optimizer: &str| {
        let set = format!("train.optimizer={optimizer}");
        json(folder.path(), &["train", "job.toml", "--check", "--json", "--set", &set])[0]["memory_mib"]
            .as_f64()
            .unwrap()
    };
    let plain = mib("{ kind = \"sgd\", momentum = 0 }");
    // Two matrices of 1024x1024. Their MiB, and a float for each row and column.
    let (params, rows_and_columns) = (8.0, 4096.0 * 4.0 / 1_048_576.0);
    for (optimizer, keeps) in [
        ("sgd", params),
        ("adamw", 2.0 * params),
        ("lamb", 2.0 * params),
        ("lion", params),
        ("adafactor", rows_and_columns),
    ] {
        // States, and copies of what an update overtakes while a checkpoint is written. What the process has before differs a
        // little.
        let (got, want) = (mib(optimizer) - plain, (1.0 + 1.0 / 16.0) * keeps);
        assert!((got - want).abs() < 1.0, "{optimizer}: {got} MiB and not {want}");
    }
}

#[test]
fn a_check_says_what_would_run_and_writes_nothing() {
    let folder = folder(JOB);
    let outline = &json(folder.path(), &["train", "job.toml", "--check", "--json"])[0];
    assert_eq!((&outline["train_samples"], &outline["val_samples"]), (&900.into(), &100.into()));
    assert_eq!(outline["steps"], 8 * 15);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn mistakes_in_a_job_are_all_told_before_anything_runs() {
    let folder = folder(
        "[model]\nkind = \"mpl\"\n[data]\nkind = \"synthetic\"\nclases = 3\n[train]\nbatch = \"many\"\n",
    );
    let out = polyreme(folder.path(), &["train", "job.toml"]);
    assert_eq!(out.status.code(), Some(2));
    let text = String::from_utf8(out.stderr).unwrap();
    for part in [
        "mpl",
        "did you mean \"mlp\"",
        "clases",
        "`classes`",
        "batch",
        "job.toml:2",
        "job.toml:5",
        "job.toml:7",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_cannot_work_is_refused_with_a_reason() {
    let folder = folder(JOB);
    let check = |args: &[&str], parts: &[&str]| {
        let out = polyreme(folder.path(), args);
        assert!(!out.status.success(), "{args:?}");
        let text = String::from_utf8(out.stderr).unwrap();
        parts.iter().for_each(|part| assert!(text.contains(part), "{args:?}: {part} is not in\n{text}"));
    };
    check(&["train"], &["JOB.toml"]);
    check(&["train", "absent.toml"], &["absent.toml"]);
    check(&["resume", "absent"], &["absent"]);
    check(&["eval", "absent"], &["absent"]);
    fs::write(
        folder.path().join("idx.toml"),
        "[model]\nkind = \"mlp\"\n[data]\nkind = \"idx\"\npath = \"nowhere\"",
    )
    .unwrap();
    check(&["train", "idx.toml"], &["nowhere"]);
    // A folder below a file cannot be made.
    check(&["train", "job.toml", "--output", "job.toml/run"], &["job.toml/run"]);

    json(folder.path(), &["train", "job.toml", "--json", "--output", "run", "--set", "train.epochs=1"]);
    check(&["train", "job.toml", "--output", "run"], &["run", "resume", "--overwrite"]);
    // Another model's checkpoint.
    check(
        &["resume", "run", "--set", "model.layers=[{kind='linear',outputs=8},{kind='linear'}]"],
        &["0.weight", "[64, 32]", "[8, 32]"],
    );
    // A half-written manifest: the one before counts.
    let newest =
        checkpoint::list(&folder.path().join("run")).unwrap().into_iter().max_by_key(|e| e.step).unwrap();
    let manifest = newest.path.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    let out = polyreme(folder.path(), &["resume", "run", "--json"]);
    let errors = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && errors.contains("manifest"), "{errors}");
}

#[test]
fn a_run_that_was_stopped_goes_on_to_the_same_bits() {
    let folder = folder(JOB);
    json(folder.path(), &["train", "job.toml", "--json", "--output", "whole"]);
    let mut child = spawn(folder.path(), &["train", "job.toml", "--json", "--output", "cut"]);
    wait_for_step(&folder.path().join("cut"), 20);
    signal(&child, rustix::process::Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    json(folder.path(), &["resume", "cut", "--json"]);
    same_outcome(&folder.path().join("whole"), &folder.path().join("cut"));
}

#[test]
fn fifty_kills_leave_whole_checkpoints_and_the_same_weights() {
    let folder = folder(JOB);
    json(folder.path(), &["train", "job.toml", "--json", "--output", "whole", "--set", "train.epochs=40"]);
    let run = folder.path().join("killed");
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    for kills in 1..=50 {
        // As a script does that starts a run again and again.
        let args: &[&str] = match run.join("job.toml").exists() {
            true => &["resume", "killed", "--json"],
            false => &["train", "job.toml", "--json", "--output", "killed", "--set", "train.epochs=40"],
        };
        let before = newest(&run);
        let mut child = spawn(folder.path(), args);
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let steps = (random >> 33) % 4;
        // Killed when it has the folder, or some steps later, and then at once or inside the next write.
        let has_folder = || {
            let holder = fs::read_to_string(run.join("checkpoints/.lock")).unwrap_or_default();
            run.join("job.toml").exists() && holder.trim() == child.id().to_string()
        };
        wait_until("the run has its folder", has_folder);
        wait_until("steps are saved", || newest(&run) >= before + steps);
        if random >> 40 & 1 == 1 {
            wait_until("a checkpoint is being written", || is_writing(&run));
        }
        signal(&child, rustix::process::Signal::KILL);
        assert_eq!(child.wait().unwrap().code(), None, "the run ended before kill {kills}");
        for entry in checkpoint::list(&run).unwrap() {
            checkpoint::load(&entry.path).unwrap_or_else(|e| panic!("after {kills} kills: {e}"));
        }
    }
    json(folder.path(), &["resume", "killed", "--json"]);
    same_outcome(&folder.path().join("whole"), &run);
}

/// The newest step that is saved.
fn newest(run: &Path) -> u64 {
    checkpoint::list(run).unwrap_or_default().last().map_or(0, |entry| entry.step)
}

/// Whether there is something half written.
fn is_writing(run: &Path) -> bool {
    let names = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    names.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with(".writing-"))
}

/// Waits for something that the file system shows; a slow machine has its time.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(120), "{what}: not in two minutes");
        std::thread::yield_now();
    }
}

pub(crate) fn same_outcome(a: &Path, b: &Path) {
    assert_eq!(
        fs::read(a.join("model.safetensors")).unwrap(),
        fs::read(b.join("model.safetensors")).unwrap()
    );
    assert_eq!(metrics(a), metrics(b));
    let last = |run: &Path| checkpoint::latest_whole(run).unwrap().0;
    let (a, b) = (last(a), last(b));
    assert_eq!(a.manifest.step, b.manifest.step);
    assert_eq!(a.files.len(), b.files.len());
    for (a, b) in a.files.iter().zip(&b.files) {
        assert_eq!(a.path.file_name(), b.path.file_name());
        assert!(fs::read(&a.path).unwrap() == fs::read(&b.path).unwrap(), "{}", a.path.display());
    }
}

pub(crate) fn spawn(folder: &Path, args: &[&str]) -> Child {
    command(folder, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    // It may have ended by itself.
    let _ = rustix::process::kill_process(pid, signal);
}

pub(crate) fn wait_for_step(run: &Path, step: u64) {
    wait_until(&format!("step {step} is saved"), || newest(run) >= step);
}

#[test]
fn a_run_without_gain_stops_early() {
    let folder = folder(JOB);
    let set = ["--set", "train.early_stop.metric=val_loss", "--set", "train.early_stop.patience=2"];
    // Labels that say nothing: the noise is a thousand times the signal.
    let noise = ["--set", "data.noise=1000", "--set", "train.epochs=60", "--set", "train.optimizer.lr=0.05"];
    let args = [&["train", "job.toml", "--json"], &set[..], &noise[..]].concat();
    let summary = json(folder.path(), &args).pop().unwrap();
    assert_eq!(summary["ending"], "early_stop");
    assert!(summary["steps"].as_u64().unwrap() < 60 * 15);
}

#[test]
fn a_loss_that_is_not_finite_stops_and_says_where_it_came_from() {
    let folder = folder(JOB);
    let out = polyreme(
        folder.path(),
        &[
            "train",
            "job.toml",
            "--set",
            "train.optimizer.lr=1e38",
            "--set",
            "train.schedule.kind=constant",
            "--set",
            "train.schedule.warmup=0",
        ],
    );
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8(out.stderr).unwrap();
    for part in ["the loss is", "it came from", "train.optimizer.lr"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_full_disk_leaves_the_last_whole_checkpoint() {
    let folder = folder(JOB);
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=400k", "tmpfs"])
        .arg(&disk)
        .status();
    if !mounted.is_ok_and(|s| s.success()) {
        return cannot_run("only root may mount a small disk");
    }
    let out = polyreme(folder.path(), &["train", "job.toml", "--json", "--output", "disk/run"]);
    let text = String::from_utf8(out.stdout).unwrap() + &String::from_utf8(out.stderr).unwrap();
    let whole = checkpoint::latest_whole(&disk.join("run")).map(|(loaded, _)| loaded.manifest.step);
    let unmounted = std::process::Command::new("umount").arg(&disk).status().unwrap();
    assert!(unmounted.success());
    assert!(text.contains("space") || text.contains("full"), "{text}");
    assert!(whole.is_ok_and(|step| step > 0), "{text}");
}

#[test]
fn a_checkpoint_holds_training_for_less_than_a_step() {
    let folder = folder(
        "[model]\nkind = 'mlp'\nhidden = [1024, 1024]\n[data]\nkind = 'synthetic'\nsamples = 4000\nshape = [256]\n\
         [train]\nbatch = 512\nepochs = 6\nlog_every = 1\noptimizer = 'adam'\n[output]\nevery_epochs = 1\nbest = 'none'\n",
    );
    let lines = json(folder.path(), &["train", "job.toml", "--json"]);
    let mut held: Vec<f64> = lines.iter().filter_map(|l| l["held_ms"].as_f64()).collect();
    held.sort_by(f64::total_cmp);
    let summary = lines.last().unwrap();
    let step_ms = 512e3 / summary["samples_per_s"].as_f64().unwrap();
    assert!(held.len() >= 5, "{held:?}");
    assert!(held[held.len() / 2] < step_ms, "held for {held:?} ms, a step takes {step_ms}");
}
