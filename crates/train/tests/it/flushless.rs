//! Runs of pipelines without a flush between steps (`schedule = "2bw"`): against a twin on one rank that takes gradients at the weights
//! of the step before, stopped and resumed, and what they learn beside a pipeline that flushes.

use std::collections::BTreeMap;
use std::path::Path;

use polyreme_collective::Comm;
use polyreme_data::{Loader, LoaderOptions, Span};
use polyreme_exec::{Engine, Kept, Slot};
use polyreme_train::TrainError;
use polyreme_train::event::Ending;
use polyreme_train::learner::{Learner, MicrobatchData, RankStep};
use polyreme_train::pace::{RankShare, StepKind};
use polyreme_train::run::{Given, Prepared};

use crate::runs::{Outcome, job, run};

/// A small gpt on a text of which an epoch has 11 steps, the last one short.
fn lines(folder: &Path, train: &str, parallel: &str) -> String {
    let words = ["rank", "mesh", "stage", "tensor", "data", "step", "loss", "the", "of", "a"];
    let text: Vec<&str> = (0..420).map(|i| words[i * i % 7 + i % 4]).collect();
    let path = folder.join("text.txt");
    std::fs::write(&path, text.join(" ")).unwrap();
    format!(
        "[model]\nkind = \"gpt\"\nlayers = 4\nwidth = 16\nheads = 2\ndropout = 0.1\n[data]\nkind = \"text\"\npath = {path:?}\n\
         context = 16\n[train]\nbatch = 12\nlog_every = 1\n{train}[parallel]\nmicrobatches = 4\n{parallel}[output]\nevery_epochs = 0\n\
         best = \"none\"\ntensorboard = false\n"
    )
}

const FLUSHLESS: &str = "schedule = \"2bw\"\nflush_every = 4\n";

/// Momentum, but no decay of weights: a change of the weights is a function of gradients alone.
const SGD: &str = "steps = 24\nevaluate_every = 7\nclip = 0.5\noptimizer = { kind = \"sgd\", lr = 0.1, momentum = 0.9 }\n\
                   schedule = { kind = \"cosine\", warmup = 5, floor = 0.1 }\n";

fn train(lines: &str, ranks: usize, folder: &Path, stop: Option<u64>) -> Result<Outcome, TrainError> {
    let mut job = job(lines);
    job.parallel.ranks = Some(ranks);
    run(&job, Given::default(), ranks, folder, stop)
}

type Tensors = BTreeMap<String, Vec<f32>>;

fn params(engine: &Engine) -> Tensors {
    let of = |Slot { name, range, .. }: Slot| (name, engine.kept(Kept::Params)[range].to_vec());
    engine.param_slots().into_iter().map(of).collect()
}

/// One rank: `W[t+1] = W[t] - update(gradient at W[t-1])`, but for the first step after each flush of the pipeline that `flushed` is.
fn twin(lines: &str, flushed: &Prepared) -> (Vec<f64>, Tensors) {
    let prepared = Prepared::new(job(lines), Given::default(), 1).unwrap().for_ranks(1).unwrap();
    let (pace, steps) = (prepared.pace, prepared.pace.total_steps(prepared.job.train.length));
    let part = RankShare::new(pace, &prepared.cut, 0);
    let (order, of_step) = (prepared.order(0), part.clone());
    let plan = (0..steps).flat_map(move |step| {
        let (order, start) = (order.of_epoch(pace.epoch(step)), pace.start(step));
        let spans = of_step.microbatches(step).iter();
        spans.map(|p| Span::new(order, start + p.offset, p.len)).collect::<Vec<_>>()
    });
    let options = LoaderOptions {
        batch_max: part.lengths()[0],
        threads: 1,
        prefetch: 2,
        seed: prepared.job.train.seed,
    };
    let mut loader = Loader::start(prepared.sets.train.clone(), prepared.transform().unwrap(), plan, options);
    let options = prepared.learner.clone();
    let mut learner =
        Learner::new(&prepared.net, &prepared.spec, &part, None, options, Comm::alone()).unwrap();
    let mut newest = params(learner.engine());
    let (mut older, mut fresh_until, mut losses) = (newest.clone(), 0, Vec::new());
    for step in 0..steps {
        if step == fresh_until {
            older = newest.clone();
            fresh_until += flushed.cut.flushes.run_from(pace, step) as u64;
        }
        let set = |engine: &mut Engine| -> Result<(), TrainError> {
            for (name, tensor) in &older {
                engine.param_mut(name)?.copy_from_slice(tensor);
            }
            Ok(())
        };
        learner.exclusively(set).unwrap();
        let kind = StepKind {
            microbatches: part.microbatches(step),
            rounds: part.rounds(step),
            steps: 1,
            time: None,
        };
        let of = RankStep {
            labels: &|_| pace.len(step) * prepared.spec.n_labels(),
            kind,
            lr: &|_| prepared.lr(step) as f32,
            loss_scale: 1.0,
            extra: &|| [0.0; 2],
        };
        let results = learner.step(of, &mut |_, _, take| {
            let loaded = loader.next().unwrap()?;
            let (x, labels) = (loaded.x.values(), loaded.labels.values());
            take(MicrobatchData { x, labels, mix: 1.0, samples: loaded.tally })
        });
        losses.push(results.unwrap()[0].loss);
        let mut next = newest.clone();
        for (name, after) in params(learner.engine()) {
            let tensor = next.get_mut(&name).unwrap();
            for ((to, before), after) in tensor.iter_mut().zip(&older[&name]).zip(after) {
                *to -= before - after;
            }
        }
        older = std::mem::replace(&mut newest, next);
    }
    (losses, newest)
}

#[test]
fn losses_and_weights_are_those_of_delayed_gradients() {
    let folder = tempfile::tempdir().unwrap();
    let of = |mesh: &str| lines(folder.path(), SGD, &format!("{mesh}{FLUSHLESS}"));
    let staged = Prepared::new(job(&of("stage = 2\n")), Given::default(), 2).unwrap();
    // Flushes at evaluations, around the short step, and after four steps at most.
    let mut runs = Vec::new();
    while runs.iter().sum::<usize>() < 24 {
        runs.push(staged.cut.flushes.run_from(staged.pace, runs.iter().sum::<usize>() as u64));
    }
    assert_eq!(runs, [4, 3, 3, 1, 3, 4, 3, 1, 2]);
    let (losses, weights) = twin(&lines(folder.path(), SGD, ""), &staged);
    let meshes = [
        ("stage = 2\n", 2),
        ("stage = 4\n", 4),
        ("data = 2\nstage = 2\n", 4),
        ("tensor = 2\nstage = 2\n", 4),
        ("sequence = 2\nstage = 2\n", 4),
    ];
    for (mesh, ranks) in meshes {
        let got = train(&of(mesh), ranks, &folder.path().join(mesh.replace("\n", ",")), None).unwrap();
        assert_eq!(
            (got.watcher.losses.len(), got.summary.ending),
            (losses.len(), Ending::Finished),
            "{mesh}"
        );
        for (step, (a, b)) in losses.iter().zip(&got.watcher.losses).enumerate() {
            assert!((a - b).abs() <= 1e-4 * a.abs(), "{mesh}: step {step}: {b} and not {a}");
        }
        for (name, b) in &got.weights {
            let a = &weights[name];
            let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let large = a.iter().map(|a| a.abs()).fold(1e-2, f32::max);
            assert!(far < 2e-3 * large, "{mesh}: {name}: {far} of {large}");
        }
    }
}

#[test]
fn a_run_that_was_stopped_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let adam = "steps = 24\nevaluate_every = 9\nclip = 0.5\nema = 0.9\noptimizer = { kind = \"adamw\", lr = 1e-2 }\n";
    for (mesh, ranks) in [("stage = 3\n", 3), ("data = 2\nstage = 2\n", 4)] {
        let lines = lines(folder.path(), adam, &format!("{mesh}{FLUSHLESS}"));
        let in_one = folder.path().join(format!("{ranks}-one"));
        let whole = train(&lines, ranks, &in_one, None).unwrap();
        // A request is heard at the end of a run of steps: of the first, of one of four steps, and behind the short step.
        let parts = folder.path().join(format!("{ranks}-parts"));
        let mut losses = Vec::new();
        for (asked, stopped) in [(0, 4), (5, 9), (9, 11), (11, 18)] {
            let part = train(&lines, ranks, &parts, Some(asked)).unwrap();
            assert_eq!((part.summary.ending, part.summary.steps), (Ending::Interrupted, stopped), "{mesh}");
            losses.extend(part.watcher.losses);
        }
        let last = train(&lines, ranks, &parts, None).unwrap();
        losses.extend(last.watcher.losses.clone());
        assert!(losses == whole.watcher.losses, "{mesh}: {losses:?} and not {:?}", whole.watcher.losses);
        assert!(last.weights == whole.weights, "{mesh}: the weights have the same bits");
    }
}

#[test]
fn a_loss_that_is_not_finite_is_that_of_its_step() {
    let folder = tempfile::tempdir().unwrap();
    let wild = "steps = 8\noptimizer = { kind = \"sgd\", lr = 1e38 }\n";
    // The first two steps take their gradients at the first weights, the third at those that the first made.
    for (schedule, spoilt) in [(FLUSHLESS, 2), ("", 1)] {
        let lines = lines(folder.path(), wild, &format!("stage = 2\n{schedule}"));
        let error = train(&lines, 2, &folder.path().join(format!("run{spoilt}")), None).err().unwrap();
        match error {
            TrainError::NotFinite { step, place, .. } => {
                assert!(step == spoilt && place != "the sum over the ranks", "step {step}: {place}");
            }
            other => panic!("{other}"),
        }
    }
}

/// Nine samples make five microbatches where six were asked for.
#[test]
fn too_few_microbatches_are_refused_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let train = "steps = 8\noptimizer = { kind = \"sgd\", lr = 0.1 }\n";
    let lines = lines(folder.path(), train, &format!("stage = 7\n{FLUSHLESS}"));
    let lines = lines.replace("batch = 12", "batch = 9").replace("microbatches = 4", "microbatches = 6");
    let error = Prepared::new(job(&lines), Given::default(), 7).err().unwrap().to_string();
    assert!(error.contains("needs 6 or more microbatches in a step, not 5"), "{error}");
}

/// What old gradients cost a small gpt: its validation loss is that of a pipeline that flushes, within two percent.
#[test]
fn a_gpt_learns_as_much_from_as_many_samples() {
    let folder = tempfile::tempdir().unwrap();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/moby-dick.txt");
    let text: String = std::fs::read_to_string(text).unwrap().chars().take(60_000).collect();
    let path = folder.path().join("moby-dick.txt");
    std::fs::write(&path, text).unwrap();
    let loss = |schedule: &str| {
        let lines = format!(
            "[model]\nkind = \"gpt\"\nlayers = 2\nwidth = 32\nheads = 2\n[data]\nkind = \"text\"\npath = {path:?}\ncontext = 32\n\
             validation = 0.1\n[train]\nsteps = 120\nbatch = 16\nevaluate_every = 120\nclip = 1.0\n\
             optimizer = {{ kind = \"adamw\", lr = 4e-3 }}\nschedule = {{ kind = \"cosine\", warmup = 10, floor = 0.1 }}\n\
             [parallel]\nstage = 2\nmicrobatches = 4\nschedule = \"{schedule}\"\n[output]\ntensorboard = false\n"
        );
        let outcome = train(&lines, 2, &folder.path().join(schedule), None).unwrap();
        outcome.watcher.metrics.iter().find(|(name, _)| name == "val_loss").unwrap().1
    };
    let (flushed, flushless) = (loss("1f1b"), loss("2bw"));
    // Bytes at random have a loss of 5.5; 120 steps learn more than how often each byte is used (3.1).
    assert!(flushed < 2.9, "{flushed}");
    assert!(flushless < 1.02 * flushed, "{flushless} and not {flushed}");
}
