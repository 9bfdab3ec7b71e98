//! Runs on meshes against one rank: every combination of data, tensor and stage ranks, and sequences and sharded weights, on
//! models of every kind. Checkpoints of one mesh go on with another.

use std::path::Path;
use std::sync::Arc;

use polyreme_data::{Dataset, Features, InMemory, Spec, Target};
use polyreme_train::event::Ending;
use polyreme_train::run::{Given, Prepared};
use polyreme_train::sets::Sets;

use crate::runs::{Outcome, job, run};

const STEPS: usize = 20;

/// A model in a test size, and its data.
#[derive(Clone)]
pub(crate) struct MeshCase {
    pub(crate) name: &'static str,
    pub(crate) model: String,
    pub(crate) given: Option<Sets>,
    pub(crate) lr: f64,
    /// More lines of `[train]`.
    pub(crate) more: &'static str,
    /// Meshes that cannot be, with a part of what is said.
    pub(crate) refused: &'static [([usize; 3], &'static str)],
}

/// Sequences of ids with a class each.
fn sequences(n: usize, time: usize) -> Arc<dyn Dataset> {
    let mut state = 7_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 20) as i32
    };
    let ids: Vec<i32> = (0..n * time).map(|_| next() % 16).collect();
    let labels = ids.chunks(time).map(|ids| ids.iter().sum::<i32>() as usize % 4).collect();
    let target = Target::Class { classes: 4, names: Vec::new() };
    let spec = Spec { features: Features::Ids { time, vocab: 16 }, target };
    Arc::new(InMemory::new(spec, ids, labels).unwrap())
}

fn of_sequences() -> Option<Sets> {
    let (train, test) = (sequences(120, 16), sequences(24, 16));
    Some(Sets { validation: Some(test.clone()), test: Some(test), ..Sets::new(train) })
}

fn images(more: &str) -> String {
    format!("[data]\nkind = \"synthetic\"\nshape = [3, 8, 8]\nclasses = 4\nnoise = 0.8\n{more}")
}

/// Text that a run can read, in a folder that lives as long as the tests.
fn text(folder: &Path) -> String {
    let words = ["rank", "mesh", "stage", "tensor", "data", "step", "loss", "the", "of", "a"];
    let text: Vec<&str> = (0..900).map(|i| words[i * i % 7 + i % 4]).collect();
    let path = folder.join("text.txt");
    std::fs::write(&path, text.join(" ")).unwrap();
    format!("[data]\nkind = \"text\"\npath = {path:?}\ncontext = 16\n")
}

pub(crate) fn cases(folder: &Path) -> Vec<MeshCase> {
    let case = |name, model: String, given| MeshCase { name, model, given, lr: 0.05, more: "", refused: &[] };
    let ids = |kind: &str, more: &str| format!("[model]\nkind = \"{kind}\"\nlayers = 8\nwidth = 16\n{more}");
    let rows = "[data]\nkind = \"synthetic\"\nsamples = 120\nclasses = 4\nnoise = 0.6\n";
    // Every rank needs two samples where images have become one pixel.
    let whole = "samples = 96\nvalidation = 0\n";
    vec![
        case("mlp", format!("[model]\nkind = \"mlp\"\nhidden = [16, 24, 64, 32, 16, 24, 16]\n{rows}"), None),
        case(
            "cnn",
            format!("[model]\nkind = \"cnn\"\nwidths = [8, 16, 16]\n{}", images("samples = 120\n")),
            None,
        ),
        // Deep and without a floor under rounding: a larger learning rate turns last bits into other signs of ReLUs.
        MeshCase {
            lr: 0.000002,
            more: "precision = \"f32-strict\"\n",
            ..case("resnet18", format!("[model]\nkind = \"resnet18_cifar\"\n{}", images(whole)), None)
        },
        case("lstm", ids("lstm", "hidden = 16\n"), of_sequences()),
        case("encoder", ids("encoder", "heads = 8\nhidden = 32\ndropout = 0.1\n"), of_sequences()),
        case("gpt", ids("gpt", &format!("heads = 8\ndropout = 0.1\n{}", text(folder))), None),
    ]
}

pub(crate) fn train(case: &MeshCase, parallel: &str, more: &str, ranks: usize, folder: &Path) -> Outcome {
    let lines = lines(case, parallel, more);
    let given = Given { sets: case.given.clone(), ..Given::default() };
    let mut job = job(&lines);
    job.parallel.ranks = Some(ranks);
    run(&job, given, ranks, folder, None).unwrap_or_else(|e| panic!("{}, {parallel}: {e}", case.name))
}

pub(crate) fn lines(case: &MeshCase, parallel: &str, more: &str) -> String {
    let (model, lr, own) = (&case.model, case.lr, case.more);
    let data = if case.given.is_some() { "[data]\nkind = \"given\"\n" } else { "" };
    // The last step of an epoch is short.
    format!(
        "{model}{data}[train]\nsteps = {STEPS}\nbatch = 16\nevaluate_every = 10\noptimizer = {{ kind = \"sgd\", lr = {lr}, \
         momentum = 0.9 }}\n{own}{more}[parallel]\n{parallel}[output]\nevery_epochs = 0\ntensorboard = false\n"
    )
}

/// The lines of a job with another optimizer.
pub(crate) fn with_optimizer(lines: &str, optimizer: &str) -> String {
    let begin = lines.find("optimizer").unwrap();
    let end = begin + lines[begin..].find('\n').unwrap();
    format!("{}optimizer = {optimizer}{}", &lines[..begin], &lines[end..])
}

fn in_folder(case: &MeshCase, parallel: &str, more: &str, ranks: usize) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    train(case, parallel, more, ranks, &folder.path().join("run"))
}

/// Losses of all steps, scores and weights are one rank's, up to rounding.
#[track_caller]
pub(crate) fn agree(one: &Outcome, many: &Outcome, what: &str) {
    assert_eq!(
        (many.watcher.losses.len(), many.summary.ending),
        (one.watcher.losses.len(), Ending::Finished)
    );
    for (step, (a, b)) in one.watcher.losses.iter().zip(&many.watcher.losses).enumerate() {
        assert!((a - b).abs() <= 1e-4 * a.abs(), "step {step}: {b} and not {a}; {what}");
    }
    assert_eq!(one.watcher.metrics.len(), many.watcher.metrics.len(), "{what}");
    for ((name, a), (_, b)) in one.watcher.metrics.iter().zip(&many.watcher.metrics) {
        // Counts of samples may differ by one whose two best classes are equal but for rounding.
        let allowed =
            if name.contains("loss") || name.contains("perplexity") { 2e-4 * a.abs().max(1.0) } else { 0.05 };
        assert!((a - b).abs() <= allowed, "{name}: {b} and not {a}; {what}");
    }
    assert_eq!(one.weights.len(), many.weights.len(), "{what}");
    for ((name, a), (other, b)) in one.weights.iter().zip(&many.weights) {
        assert_eq!(name, other, "a file has its tensors in the same order; {what}");
        let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let large = a.iter().map(|a| a.abs()).fold(1e-2, f32::max);
        assert!(far < 2e-3 * large, "{name}: {far} of {large}; {what}");
    }
}

/// One rank with the same microbatches is what all meshes are compared with.
fn alone(case: &MeshCase) -> Outcome {
    in_folder(case, "", "accumulate = 2\n", 1)
}

fn grid(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let case = cases(folder.path()).into_iter().find(|case| case.name == name).unwrap();
    let one = alone(&case);
    // Each axis has 1, 2 or 4 ranks.
    for mesh in 1..27_u32 {
        let [data, tensor, stage] = [mesh % 3, mesh / 3 % 3, mesh / 9].map(|power| 1_usize << power);
        let ranks = data * tensor * stage;
        if ranks == 1 || ranks > 8 {
            continue;
        }
        let parallel = format!(
            "data = {data}\ntensor = {tensor}\nstage = {stage}\nmicrobatches = 2\nsync_batch_norm = true\n"
        );
        let what = format!("{name}: data {data}, tensor {tensor}, stage {stage}");
        match case.refused.iter().find(|(mesh, _)| *mesh == [data, tensor, stage]) {
            Some((_, why)) => {
                let given = Given { sets: case.given.clone(), ..Given::default() };
                let said = Prepared::new(job(&lines(&case, &parallel, "")), given, 1).map(|_| ());
                let said = said.unwrap_err().to_string();
                assert!(said.contains(why), "{what}: {said}");
            }
            None => agree(&one, &in_folder(&case, &parallel, "", ranks), &what),
        }
    }
}

#[test]
fn mlp_on_every_mesh() {
    grid("mlp");
}

#[test]
fn cnn_on_every_mesh() {
    grid("cnn");
}

#[test]
fn resnet18_on_every_mesh() {
    grid("resnet18");
}

#[test]
fn lstm_on_every_mesh() {
    grid("lstm");
}

#[test]
fn encoder_on_every_mesh() {
    grid("encoder");
}

#[test]
fn gpt_on_every_mesh() {
    grid("gpt");
}

/// Sequences that ranks cut, alone and with other axes.
#[test]
fn sequences_are_cut_over_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases(folder.path()).iter().filter(|case| ["gpt", "encoder", "lstm"].contains(&case.name)) {
        let one = alone(case);
        for (data, stage, sequence) in [(1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2)] {
            let parallel =
                format!("data = {data}\nstage = {stage}\nsequence = {sequence}\nmicrobatches = 2\n");
            let what = format!("{}: {parallel}", case.name);
            agree(&one, &in_folder(case, &parallel, "", data * stage * sequence), &what);
        }
    }
}

/// Weights that ranks of the data axis shard, alone and with other axes.
#[test]
fn weights_are_sharded_over_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases(folder.path()).iter().filter(|case| ["gpt", "cnn", "mlp"].contains(&case.name)) {
        let one = alone(case);
        for (data, tensor, stage) in [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)] {
            let mesh = format!("data = {data}\ntensor = {tensor}\nstage = {stage}\nmicrobatches = 2\n");
            let parallel = format!("{mesh}shard_weights = true\nsync_batch_norm = true\n");
            let what = format!("{}: {parallel}", case.name);
            agree(&one, &in_folder(case, &parallel, "", data * tensor * stage), &what);
        }
    }
}

/// A run that is stopped on one mesh goes on with another one, with moments, averaged weights and states.
#[test]
fn checkpoints_know_nothing_of_meshes() {
    let folder = tempfile::tempdir().unwrap();
    let meshes = [
        ("", 1),
        ("tensor = 2\nstage = 2\n", 4),
        ("data = 2\nstage = 2\nschedule = \"zb-v\"\n", 4),
        ("data = 2\nshard_weights = true\n", 2),
        ("data = 2\ntensor = 2\nshard_weights = true\n", 4),
        ("stage = 4\nschedule = \"zb-h1\"\n", 4),
        ("", 1),
    ];
    for case in cases(folder.path()).iter().filter(|case| ["cnn", "gpt"].contains(&case.name)) {
        let more = "ema = 0.9\nclip = 1.0\n";
        let adam = |lines: String| with_optimizer(&lines, "{ kind = \"adamw\", lr = 1e-3 }");
        let of = |parallel: &str, ranks: usize, stop: Option<u64>, run_in: &Path| {
            let parallel = format!("{parallel}microbatches = 2\nsync_batch_norm = true\n");
            let mut job = job(&adam(lines(case, &parallel, more)));
            job.parallel.ranks = Some(ranks);
            let given = Given { sets: case.given.clone(), ..Given::default() };
            run(&job, given, ranks, run_in, stop).unwrap_or_else(|e| panic!("{}, {parallel}: {e}", case.name))
        };
        let one = of("", 1, None, &folder.path().join(format!("{}-one", case.name)));
        let moved = folder.path().join(format!("{}-moved", case.name));
        let mut losses = Vec::new();
        let mut last = None;
        for (k, (parallel, ranks)) in meshes.iter().enumerate() {
            let stop = (k + 1 < meshes.len()).then_some(3 * (k as u64 + 1));
            let outcome = of(parallel, *ranks, stop, &moved);
            losses.extend(outcome.watcher.losses.clone());
            last = Some(outcome);
        }
        let mut last = last.unwrap();
        // Scores of evaluations before the last part are not its own.
        let n = last.watcher.metrics.len();
        let mut one = one;
        one.watcher.metrics.drain(..one.watcher.metrics.len() - n);
        last.watcher.losses = losses;
        agree(&one, &last, case.name);
    }
}
