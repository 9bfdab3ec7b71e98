//! Low-rank factors beside frozen weights: against `peft` (`crates/nn/references/pretrained.py`), on ranks, in checkpoints, merged.

use std::fs;
use std::path::Path;

use polyreme_graph::Instr;
use polyreme_train::checkpoint;
use polyreme_train::job::Job;
use polyreme_train::run::{Given, Prepared};
use polyreme_train::trained::Trained;
use polyreme_train::weights::{Weight, read_weights};

use crate::mesh::{MeshCase, cases, train};
use crate::pretrained::{Reference, near, save, trained};
use crate::runs::{job, run};

const LORA: &str = "lora = { rank = 4, alpha = 8, on = [\"*.qkv\"] }";

/// A folder whose file also has the factors that `peft` began with.
fn with_factors(want: &Reference, parent: &Path) -> std::path::PathBuf {
    let folder = want.folder(parent);
    let all: Vec<Weight> = want.weights().into_iter().chain(want.factors()).collect();
    save(&folder.join("model.safetensors"), &all);
    folder
}

fn is_factor(name: &str) -> bool {
    name.ends_with("lora_a") || name.ends_with("lora_b")
}

#[test]
fn losses_are_those_of_peft_on_every_kind_of_mesh() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = with_factors(&want, here.path());
    let meshes = [
        ("", 1),
        ("data = 2\nshard_gradients = true\n", 2),
        ("data = 2\nshard_weights = true\n", 2),
        ("tensor = 2\nstage = 2\nmicrobatches = 2\n", 4),
        ("sequence = 2\n", 2),
    ];
    for (n, (parallel, ranks)) in meshes.into_iter().enumerate() {
        let run = trained(&want.job(&folder, LORA, parallel), ranks, &here.path().join(format!("run{n}")));
        near(&run.watcher.losses, want.lora_losses(), parallel);
        // The file has what was learnt, and nothing else.
        assert_eq!(run.weights.len(), 4);
        assert!(run.weights.iter().all(|(name, _)| is_factor(name)), "{parallel}");
    }
}

#[test]
fn only_factors_are_learnt_exchanged_and_saved() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = with_factors(&want, here.path());
    let lines = |parallel: &str| {
        let lines = want.lines(&folder, &format!("path = {folder:?}\n{LORA}"), parallel);
        job(&lines.replace("every_epochs = 0", "every_steps = 5\nkeep = 9"))
    };
    let factors: usize = want.factors().iter().map(|w| w.data.len()).sum();
    let prepared = Prepared::new(lines("data = 2\n"), Given::default(), 1).unwrap();
    let program = prepared.program(0).unwrap();
    let learnt = |name: &str| is_factor(name);
    assert!(program.graph().params.iter().all(|p| p.learning.frozen != learnt(&p.name)));
    let exchanged: usize = (program.instrs.iter())
        .map(|i| match i {
            Instr::Start(k) => program.len_of(&program.exchanges[*k].of),
            _ => 0,
        })
        .sum();
    assert!(
        exchanged <= 2 * factors + 64,
        "{exchanged} numbers are exchanged, and there are {factors} in factors"
    );

    // Checkpoints have the factors; a run that was cut goes on with the same bits, without the folder that it began with.
    let whole = trained(&lines(""), 1, &here.path().join("whole"));
    let cut = here.path().join("cut");
    let first = run(&lines(""), Given::default(), 1, &cut, Some(7)).unwrap();
    let loaded = checkpoint::latest_whole(&cut).unwrap().0;
    for file in &loaded.files {
        assert!(file.shapes.iter().all(|t| is_factor(&t.name)), "{}", file.path.display());
    }
    let tokens = here.path().join("tokenizer.json");
    fs::copy(folder.join("tokenizer.json"), &tokens).unwrap();
    let kept = fs::read_to_string(cut.join("job.toml")).unwrap();
    let kept = kept.replace(folder.join("tokenizer.json").to_str().unwrap(), tokens.to_str().unwrap());
    fs::rename(&folder, here.path().join("moved")).unwrap();
    let kept = Job::from_text(&kept, "job.toml", Path::new("/"), &[]).unwrap();
    let mut prepared = Prepared::new(kept, Given::default(), 1).unwrap();
    prepared.changed_data = true;
    let mut watcher = crate::runs::Watcher::default();
    let ranks = polyreme_collective::Comm::local(1);
    polyreme_train::run::run_ranks(prepared, &cut, Some(&loaded), ranks, &mut watcher).unwrap();
    let losses: Vec<f64> = first.watcher.losses.into_iter().chain(watcher.losses).collect();
    assert_eq!(losses, whole.watcher.losses);
    let after: Vec<_> = read_weights(&cut.join("model.safetensors")).unwrap();
    let after: Vec<_> = after.into_iter().map(|w| (w.name, w.data)).collect();
    assert_eq!(after, whole.weights);

    // A file of frozen weights that is not the one of the run is refused.
    let file = cut.join("frozen.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    let loaded = checkpoint::latest_whole(&cut).unwrap().0;
    let job = Job::from_file(&cut.join("job.toml"), &[]).unwrap();
    fs::rename(here.path().join("moved"), &folder).unwrap();
    let prepared = Prepared::new(job, Given::default(), 1).unwrap();
    let ranks = polyreme_collective::Comm::local(1);
    let mut watcher = crate::runs::Watcher::default();
    let said = polyreme_train::run::run_ranks(prepared, &cut, Some(&loaded), ranks, &mut watcher);
    let said = said.map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("frozen.safetensors"), "{said}");
}

#[test]
fn merged_factors_are_the_same_model() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = with_factors(&want, here.path());
    let lines = want.lines(&folder, &format!("path = {folder:?}\n{LORA}"), "");
    let merged = trained(
        &job(&lines.replace("[output]\n", "[output]\nmerge = true\n")),
        1,
        &here.path().join("merged"),
    );
    let names: Vec<&String> = merged.weights.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), want.weights().len(), "{names:?}");
    // The run's folder is a plain one now; the losses of its first step are those of the factors beside the weights.
    let plain = |path: &Path, lora: &str| {
        let lines = want.lines(&folder, &format!("path = {path:?}\n{lora}"), "");
        lines.replace("lr = 0.003", "lr = 1e-12")
    };
    let a = trained(&job(&plain(&here.path().join("merged"), "")), 1, &here.path().join("a"));
    let alone = trained(&job(&lines), 1, &here.path().join("alone"));
    let mut all = want.weights();
    all.extend(read_weights(&alone.summary.model).unwrap());
    save(&folder.join("model.safetensors"), &all);
    let b = trained(&job(&plain(&folder, LORA)), 1, &here.path().join("b"));
    for (a, b) in a.watcher.losses.iter().zip(&b.watcher.losses) {
        assert!((a - b).abs() < 1e-5, "{a} merged, {b} beside each other");
    }
    assert!(a.watcher.losses[19] < want.lora_losses()[19], "something was learnt");
}

/// A new head is learnt and saved with the factors; the run's job says so, and a trained model is read with it.
#[test]
fn a_new_head_is_learnt_beside_factors() {
    let here = tempfile::tempdir().unwrap();
    let case = cases(here.path()).into_iter().find(|case| case.name == "gpt").unwrap();
    let before = train(&case, "", "", 1, &here.path().join("before"));
    let keys = format!(
        "weights = {:?}\nhead = \"new\"\nlora = {{ on = [\"*.qkv\", \"*.up\"] }}",
        before.summary.model
    );
    let model = case.model.replacen("[model]\n", &format!("[model]\n{keys}\n"), 1);
    let case = MeshCase { model, ..case };
    let run = train(&case, "", "", 1, &here.path().join("run"));
    let learnt = |name: &str| is_factor(name) || name.starts_with("head.");
    let names: Vec<&String> = run.weights.iter().map(|(name, _)| name).collect();
    assert!(names.iter().all(|name| learnt(name)) && names.iter().any(|name| !is_factor(name)), "{names:?}");
    let frozen = read_weights(&here.path().join("run/frozen.safetensors")).unwrap();
    assert!(!frozen.is_empty());
    let old = read_weights(&before.summary.model).unwrap();
    for weight in &frozen {
        assert!(!learnt(&weight.name));
        assert_eq!(old.iter().find(|old| old.name == weight.name), Some(weight));
    }
    // As `eval` and `predict` read it: the weights of both files, and none that were drawn.
    let given = Given { sets: case.given.clone(), ..Given::default() };
    let used = Trained::open(&here.path().join("run"), &given).unwrap();
    let lora = used.job.model.lora.as_ref().unwrap();
    assert!(lora.learn.iter().any(|name| name == "head.weight"), "{lora:?}");
}

#[test]
fn what_factors_do_not_go_with_is_refused() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = with_factors(&want, here.path());
    let check = |lora: &str, section: &str, line: &str, parts: &[&str]| {
        let lines = want.lines(&folder, &format!("path = {folder:?}\n{lora}"), "");
        let lines = lines.replace(&format!("[{section}]\n"), &format!("[{section}]\n{line}\n"));
        let said = match Job::from_text(&lines, "job.toml", Path::new("/"), &[]) {
            Err(errors) => errors.to_string(),
            Ok(job) => Prepared::new(job, Given::default(), 1).map(|_| ()).unwrap_err().to_string(),
        };
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    };
    check("lora = { on = [\"*.qvk\"] }", "train", "", &["model.lora.on", "qvk"]);
    check("lora = { on = [\"*.ln1\"] }", "train", "", &["model.lora.on", "ln1"]);
    check("lora = { on = [\"*.qkv\"], learn = [\"hed\"] }", "train", "", &["model.lora.learn", "hed"]);
    check("lora = { rank = 4 }", "train", "", &["on", "*.qkv"]);
    check(LORA, "train", "ema = 0.9", &["model.lora", "train.ema"]);
    check(LORA, "output", "dtype = \"bf16\"", &["model.lora", "output.dtype"]);
    check("", "output", "merge = true", &["output.merge", "model.lora"]);
    check(
        LORA,
        "parallel",
        "elastic = { min = 1, max = 2 }\ntransport = \"tcp\"",
        &["model.lora", "elastic"],
    );
}
