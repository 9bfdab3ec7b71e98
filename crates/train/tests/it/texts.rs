//! Runs on texts with labels, of very different lengths: padding, ranks, microbatches and meshes change nothing, steps are filled up
//! only as far as they need, and a run that goes on has the same bits.

use std::fmt::Write as _;
use std::path::Path;

use polyreme_data::Features;
use polyreme_train::event::Ending;
use polyreme_train::run::{Given, Prepared};

use crate::ranks::same_bits;
use crate::runs::{Outcome, job, run};

/// The models that take texts.
const MODELS: [&str; 5] = [
    "kind = 'encoder'\nwidth = 16\nheads = 2\nhidden = 24\nlayers = 2",
    "kind = 'lstm'\nwidth = 8\nhidden = 12\nlayers = 2",
    "kind = 'bigru'\nwidth = 8\nhidden = 10",
    "layers = [{ kind = 'embedding', width = 12 }, 'mean_time', { kind = 'linear' }]",
    "layers = [{ kind = 'embedding', width = 12 }, 'positions', { kind = 'attention', heads = 2 }, 'last_step', 'linear']",
];

/// 170 texts, most of them short, and what is said of each: whether it has an `x`, and how many of its letters are `a`.
fn table(folder: &Path) {
    let mut text = "body,kind,share\n".to_string();
    for i in 0..170_usize {
        let len = if i % 7 == 0 { 20 + i % 41 } else { 1 + i % 13 };
        let letter = |k: usize| if (i * 31 + k * k * 7 + k).is_multiple_of(5) { 'a' } else { 'b' };
        let mut body: String = (0..len).map(letter).collect();
        if i % 2 == 0 {
            body.replace_range(len / 2..len / 2 + 1, "x");
        }
        let share = body.matches('a').count() as f64 / len as f64;
        writeln!(text, "{body},{},{share:.3}", if i % 2 == 0 { "with" } else { "without" }).unwrap();
    }
    std::fs::write(folder.join("texts.csv"), text).unwrap();
}

fn lines(folder: &Path, model: &str, more: &str) -> String {
    format!(
        "[model]\n{model}\n[data]\nkind = 'csv'\npath = '{}'\ntext = 'body'\nlabel = 'kind'\nbuckets = 3\n\
         [train]\nsteps = 16\nbatch = 36\nevaluate_every = 7\noptimizer = {{ kind = 'adam', lr = 3e-3 }}\n{more}\
         [output]\ntensorboard = false\n",
        folder.join("texts.csv").display()
    )
}

fn train(folder: &Path, name: &str, lines: &str, ranks: usize) -> Outcome {
    run(&job(lines), Given::default(), ranks, &folder.join(name), None).unwrap()
}

/// Losses, scores and weights are the same but for rounding.
fn agree(one: &Outcome, many: &Outcome, what: &str) {
    assert_eq!((one.watcher.losses.len(), many.watcher.losses.len()), (16, 16), "{what}");
    for (step, (a, b)) in one.watcher.losses.iter().zip(&many.watcher.losses).enumerate() {
        assert!((a - b).abs() <= 1e-5 * a.abs(), "step {step}: {b} and not {a}; {what}");
    }
    assert_eq!(one.watcher.metrics.len(), many.watcher.metrics.len());
    for ((name, a), (_, b)) in one.watcher.metrics.iter().zip(&many.watcher.metrics) {
        assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{name}: {b} and not {a}; {what}");
    }
    for ((name, a), (_, b)) in one.weights.iter().zip(&many.weights) {
        let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 2e-3, "{name}: {far}; {what}");
    }
}

#[test]
fn ranks_microbatches_and_padding_change_nothing() {
    for (k, model) in MODELS.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        table(folder);
        let lines = |folder: &Path, model: &str, more: &str| {
            let lines = lines(folder, model, more);
            // The bias of keys has a gradient of zero but for rounding, which Adam would make as large as any other.
            if k == 4 { lines.replace("kind = 'adam', lr = 3e-3", "kind = 'sgd', lr = 0.05") } else { lines }
        };
        let one = train(folder, "one", &lines(folder, model, ""), 1);
        // 153 texts to train on: every epoch ends with a step of 9.
        let many = lines(folder, model, "accumulate = 3\n[parallel]\nbalance = [3, 1, 2]\n");
        agree(&one, &train(folder, "many", &many, 3), model);
        // All texts of a model that ranks have together are filled up to one length: the same losses, with more padding.
        let axes: &[&str] = match k {
            0 => &["stage", "tensor", "sequence"],
            2 => &["stage", "tensor"],
            _ => &[],
        };
        for axis in axes {
            let mesh = lines(folder, model, &format!("[parallel]\n{axis} = 2\n"));
            agree(&one, &train(folder, axis, &mesh, 2), &format!("{axis}: {model}"));
        }
    }
}

#[test]
fn reproducible_runs_on_texts_are_the_same_bits_and_go_on() {
    for model in [MODELS[0], MODELS[2]] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        table(folder);
        let lines = lines(folder, model, "clip = 1.0\n[parallel]\nreproducible = true\n");
        let lines = lines.replace("batch = 36", "batch = 32");
        let one = train(folder, "one", &lines, 1);
        let three = train(folder, "three", &lines, 3);
        assert_eq!(one.watcher.losses, three.watcher.losses, "{model}");
        same_bits(&one, &three, model);
        let half = run(&job(&lines), Given::default(), 2, &folder.join("half"), Some(9)).unwrap();
        assert_eq!(half.summary.ending, Ending::Interrupted);
        let rest = train(folder, "half", &lines, 3);
        assert_eq!(rest.watcher.losses, one.watcher.losses[10..], "{model}");
        assert_eq!(one.weights, rest.weights, "{model}");
    }
}

#[test]
fn steps_are_filled_up_as_far_as_they_need() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    table(folder);
    let prepared = Prepared::new(job(&lines(folder, MODELS[0], "")), Given::default(), 1).unwrap();
    let set = prepared.sets.train.as_ref();
    let Features::Texts { times, vocab, padding } = &set.spec().features else { panic!("texts") };
    assert_eq!((times.len(), times.is_sorted(), *vocab, *padding), (3, true, 257, 256), "{times:?}");
    let pace = prepared.pace;
    let tokens: usize = (0..set.len()).map(|i| set.tokens(i).unwrap()).sum();
    let positions: usize = (0..pace.steps_per_epoch())
        .map(|step| {
            let (start, len) = (pace.start(step), pace.len(step));
            polyreme_data::time_of(set, prepared.order(0), start, len).unwrap() * len
        })
        .sum();
    let longest = set.len() * times[2];
    assert!(positions >= tokens && positions * 2 < longest, "{tokens} of {positions}, at most {longest}");
    let notes = prepared.sets.notes();
    assert!(notes[0].contains("\"body\" as texts of 1 to 58 tokens"), "{notes:?}");
}

#[test]
fn numbers_are_learnt_of_texts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    table(folder);
    let of = |model: &str| {
        let lines = lines(folder, model, "loss = 'mse'\n").replace("label = 'kind'", "label = 'share'");
        lines.replace("steps = 16", "steps = 300").replace("lr = 3e-3", "lr = 1e-2")
    };
    // The share of a letter is what a mean of embeddings can say.
    let one = train(folder, "one", &of(MODELS[3]), 1);
    let r2 = one.watcher.metrics.iter().rev().find(|(name, _)| name == "val_r2").unwrap().1;
    assert!(r2 > 0.9, "{r2}");
}

/// 150 lists of words, most of them short, with a tag for each word: whether it has an `x`, or comes after one that has.
fn tagged_words(folder: &Path) {
    let mut text = String::new();
    for i in 0..150_usize {
        let n = if i % 7 == 0 { 9 + i % 8 } else { 1 + i % 5 };
        let has = |k: usize| (i * 31 + k * k * 7 + k).is_multiple_of(3);
        let word = |k: usize| format!("{}{}", "ab".repeat(1 + (i + k) % 2), if has(k) { "x" } else { "" });
        let tag = |k: usize| match () {
            () if has(k) => "B",
            () if k > 0 && has(k - 1) => "I",
            () => "O",
        };
        let words: Vec<String> = (0..n).map(word).collect();
        let tags: Vec<&str> = (0..n).map(tag).collect();
        writeln!(text, "{{\"words\": {words:?}, \"tags\": {tags:?}}}").unwrap();
    }
    std::fs::write(folder.join("words.jsonl"), text).unwrap();
}

fn tag_lines(folder: &Path, model: &str, more: &str) -> String {
    let path = folder.join("words.jsonl").display().to_string();
    let lines = lines(folder, model, more).replace("kind = 'csv'", "kind = 'jsonl'");
    let lines = lines.replace(&folder.join("texts.csv").display().to_string(), &path);
    lines.replace("text = 'body'\nlabel = 'kind'", "text = 'words'\ntags = 'tags'")
}

#[test]
fn tags_count_by_words_on_any_ranks_and_padding() {
    let stack =
        "layers = [{ kind = 'embedding', width = 12 }, { kind = 'gru', hidden = 8 }, { kind = 'linear' }]";
    for (k, model) in [MODELS[0], MODELS[1], MODELS[2], stack].into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        tagged_words(folder);
        let one = train(folder, "one", &tag_lines(folder, model, ""), 1);
        let many = tag_lines(folder, model, "accumulate = 3\n[parallel]\nbalance = [3, 1, 2]\n");
        agree(&one, &train(folder, "many", &many, 3), model);
        let axes: &[&str] = match k {
            0 => &["stage", "tensor", "sequence"],
            2 => &["stage", "tensor"],
            _ => &[],
        };
        for axis in axes {
            let mesh = tag_lines(folder, model, &format!("[parallel]\n{axis} = 2\n"));
            agree(&one, &train(folder, axis, &mesh, 2), &format!("{axis}: {model}"));
        }
        // The same samples with more padding.
        let in_order = |buckets: &str| {
            tag_lines(folder, model, "")
                .replace("buckets = 3", &format!("order = 'in-order'\nbuckets = {buckets}"))
        };
        let (few, all) = (train(folder, "few", &in_order("3"), 1), train(folder, "all", &in_order("1"), 1));
        agree(&few, &all, model);
    }
}

#[test]
fn the_loss_of_tags_is_the_mean_over_words() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    tagged_words(folder);
    // Nothing is learnt: the first loss of a whole set is the mean over its words, whatever batches it is cut into.
    let lines = |batch: usize, steps: usize| {
        let lines = tag_lines(folder, MODELS[0], "").replace("lr = 3e-3", "lr = 1e-12");
        let lines = lines
            .replace("batch = 36", &format!("batch = {batch}"))
            .replace("buckets = 3", "buckets = 3\nvalidation = 0.0");
        lines.replace("steps = 16", &format!("steps = {steps}")).replace("evaluate_every = 7\n", "")
    };
    let prepared = Prepared::new(job(&lines(50, 3)), Given::default(), 1).unwrap();
    let set = prepared.sets.train.as_ref();
    let words = |step: u64| {
        let (start, len) = (prepared.pace.start(step), prepared.pace.len(step));
        polyreme_data::counted_of(set, prepared.order(0), start, len) as f64
    };
    let all: usize = (0..set.len()).map(|idx| set.n_counted(idx).unwrap()).sum();
    assert_eq!((0..3).map(words).sum::<f64>(), all as f64);
    let whole = train(folder, "whole", &lines(150, 1), 1).watcher.losses[0];
    let parts = train(folder, "parts", &lines(50, 3), 1).watcher.losses;
    let mean = (0..3).map(|k| parts[k] * words(k as u64)).sum::<f64>() / all as f64;
    assert!((whole - mean).abs() < 1e-6 * whole, "{whole} and {mean}");
    // By samples it would be another number.
    let by_samples = parts.iter().sum::<f64>() / 3.0;
    assert!((whole - by_samples).abs() > 1e-5 * whole, "{whole} and {by_samples}");
}

#[test]
fn tags_are_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    tagged_words(folder);
    let lines = tag_lines(folder, MODELS[2], "")
        .replace("steps = 16", "steps = 120")
        .replace("lr = 3e-3", "lr = 1e-2");
    let one = train(folder, "one", &lines, 2);
    let accuracy = one.watcher.metrics.iter().rev().find(|(name, _)| name == "val_accuracy").unwrap().1;
    assert!(accuracy > 0.95, "{accuracy}");
}
