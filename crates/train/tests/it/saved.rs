//! What is saved, and what saving does to a run: nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_data::{DataError, Dataset, Fetched, Scratch, Spec, Synthetic, Values};
use polyreme_train::checkpoint;
use polyreme_train::event::{Ending, Event, Observer};
use polyreme_train::run::{Given, Prepared, Progress, run_ranks};
use polyreme_train::sets::Sets;
use polyreme_train::weights::read_weights;

use crate::runs::{Outcome, job, run};

const JOB: &str = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"given\"\nnormalise = false\n\
                   [train]\nbatch = 16\nsteps = 12\nevaluate_every = 4\n[output]\ntensorboard = false\n";

fn set() -> Synthetic {
    Synthetic::new(64, &[8], 3, 0.2, 0, 0).unwrap()
}

/// A set whose numbers are all the same one.
struct Flat {
    set: Synthetic,
    x: [f32; 8],
}

impl Dataset for Flat {
    fn len(&self) -> usize {
        self.set.len()
    }
    fn spec(&self) -> &Spec {
        self.set.spec()
    }
    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        self.set.class(idx)
    }
    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        Ok(Fetched { values: Values::F32(&self.x), ..self.set.fetch(idx, scratch)? })
    }
}

#[test]
fn a_validation_metric_that_is_not_finite_leaves_a_checkpoint_that_goes_on() {
    for x in [f32::NAN, f32::INFINITY] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("run");
        let job = job(JOB);
        let flat = || Arc::new(Flat { set: set(), x: [x; 8] });
        let sets = || Sets { validation: Some(flat()), ..Sets::new(Arc::new(set())) };
        let given = || Given { sets: Some(sets()), ..Given::default() };
        let half = run(&job, given(), 2, &folder, Some(5)).unwrap();
        assert_eq!((half.summary.ending, half.summary.steps), (Ending::Interrupted, 6));
        let loaded = checkpoint::latest_whole(&folder).unwrap().0;
        let loss =
            Progress::of(&loaded).unwrap().metrics.into_iter().find(|(name, _)| name.ends_with("_loss"));
        assert!(loss.is_some_and(|(_, value)| !value.is_finite()), "the evaluation was to give no number");
        let rest = run(&job, given(), 2, &folder, None).unwrap();
        assert_eq!((rest.summary.ending, rest.summary.steps), (Ending::Finished, 12));
    }
}

/// Takes the folder of the checkpoints away after a step.
struct Thief {
    checkpoints: PathBuf,
    after: u64,
    stops: bool,
    done: bool,
    warnings: Vec<String>,
}

impl Observer for Thief {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Step(done) if done.step == self.after => {
                fs::rename(&self.checkpoints, self.checkpoints.with_file_name("taken")).unwrap();
                fs::write(&self.checkpoints, "no folder").unwrap();
                self.done = true;
            }
            Event::Warning(text) => self.warnings.push(text.into()),
            Event::Step(_)
            | Event::Started(_)
            | Event::Evaluated { .. }
            | Event::Saving { .. }
            | Event::Balanced { .. }
            | Event::Followed { .. }
            | Event::Servers(_)
            | Event::Turned { .. }
            | Event::TooSlow
            | Event::Membership { .. }
            | Event::Finished(_) => {}
        }
    }

    fn stop_requested(&self) -> bool {
        self.stops && self.done
    }
}

#[test]
fn the_model_is_written_even_if_the_last_checkpoint_is_not() {
    let lines = JOB.replace("evaluate_every = 4\n", "");
    let given = || Given { sets: Some(Sets::new(Arc::new(set()))), ..Given::default() };
    let train = |folder: &Path, after: u64, stops: bool| {
        let prepared = Prepared::new(job(&lines), given(), 1).unwrap();
        let checkpoints = folder.join("checkpoints");
        let mut thief = Thief { checkpoints, after, stops, done: false, warnings: Vec::new() };
        (run_ranks(prepared, folder, None, Comm::local(2), &mut thief), thief.warnings)
    };
    let folder = tempfile::tempdir().unwrap();
    let whole = run(&job(&lines), given(), 2, &folder.path().join("whole"), None).unwrap();
    let (summary, warnings) = train(&folder.path().join("run"), 11, false);
    let summary = summary.unwrap();
    assert!(
        warnings.iter().any(|text| text.starts_with("the last checkpoint could not be written")),
        "{warnings:?}"
    );
    let model: Vec<_> = read_weights(&summary.model).unwrap().into_iter().map(|w| (w.name, w.data)).collect();
    assert_eq!(model, whole.weights);
    // Who stops in order to go on later has nothing to go on from: that is an error.
    let (summary, _) = train(&folder.path().join("stopped"), 5, true);
    assert!(summary.is_err());
}

const NORMS: &str = "[model]\nlayers = [{ kind = \"linear\", outputs = 12 }, \"batch_norm\", \"relu\", \"linear\"]\n\
                     [data]\nkind = \"synthetic\"\nsamples = 160\nshape = [8]\nclasses = 4\nnoise = 0.8\n\
                     [train]\nsteps = 30\nbatch = 36\nevaluate_every = 20\n[output]\ntensorboard = false\n";

fn train(lines: &str, ranks: usize, stop_after: Option<u64>, folder: &Path) -> Outcome {
    run(&job(lines), Given::default(), ranks, folder, stop_after).unwrap()
}

#[track_caller]
fn same_bits(a: &Outcome, b: &Outcome, what: &str) {
    assert_eq!(a.weights.len(), b.weights.len());
    for ((name, a), (_, b)) in a.weights.iter().zip(&b.weights) {
        let differ = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differ, None, "{what}: {name}: {a:?} and {b:?}");
    }
}

#[test]
fn statistics_of_ranks_are_the_same_bits_however_often_checkpoints_are_written() {
    let seldom = format!("{NORMS}every_epochs = 0\nbest = \"none\"\n");
    let often = format!("{NORMS}every_steps = 1\nbest = \"none\"\n");
    for ranks in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let whole = train(&seldom, ranks, None, &at("seldom"));
        assert!(whole.weights.iter().any(|(name, _)| name.ends_with("running_var")));
        same_bits(&whole, &train(&often, ranks, None, &at("often")), "a checkpoint after every step");
        // Stopped between two evaluations, and gone on with.
        let half = train(&seldom, ranks, Some(12), &at("cut"));
        assert_eq!(half.summary.steps, 13);
        let rest = train(&seldom, ranks, None, &at("cut"));
        assert_eq!(rest.watcher.losses[..], whole.watcher.losses[13..], "{ranks} ranks");
        same_bits(&whole, &rest, "stopped and gone on with");
        // Another number of ranks starts from the mean of the statistics.
        train(&seldom, ranks, Some(12), &at("more"));
        let states = checkpoint::latest_whole(&at("more")).unwrap().0;
        let mean = |name: &str| {
            let of = |name: &str, file: &str| {
                let all = read_weights(&states.path.join(file)).unwrap();
                all.iter().find(|w| w.name == name).unwrap_or_else(|| panic!("{name}")).data.clone()
            };
            let parts: Vec<_> =
                (0..ranks).map(|r| of(&format!("rank{r}.{name}"), "states.safetensors")).collect();
            let mean = |i: usize| parts.iter().map(|p| f64::from(p[i])).sum::<f64>() / ranks as f64;
            let model = of(name, checkpoint::MODEL_FILE);
            (0..model.len()).all(|i| model[i] == mean(i) as f32)
        };
        assert!(mean("1.running_mean") && mean("1.running_var"));
        let rest = train(&seldom, ranks + 1, None, &at("more"));
        assert_eq!((rest.summary.ending, rest.summary.steps), (Ending::Finished, 30));
    }
}

#[test]
fn every_optimizer_goes_on_with_the_same_bits() {
    for (optimizer, files) in [
        ("{ kind = \"sgd\", momentum = 0 }", 0),
        ("\"sgd\"", 1),
        ("\"adamw\"", 2),
        ("\"lamb\"", 2),
        ("\"lion\"", 1),
        ("\"adafactor\"", 2),
    ] {
        let optimizer_line = format!("[train]\noptimizer = {optimizer}\n");
        let lines = NORMS.replace("[train]\n", &optimizer_line) + "every_epochs = 0\nbest = \"none\"\n";
        for ranks in [1, 3] {
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            let whole = train(&lines, ranks, None, &at("whole"));
            train(&lines, ranks, Some(12), &at("cut"));
            let saved = checkpoint::latest_whole(&at("cut")).unwrap().0;
            let moments = ["moment1.safetensors", "moment2.safetensors"].map(|file| saved.file(file));
            assert_eq!(moments.iter().flatten().count(), files, "{optimizer}");
            if optimizer == "\"adafactor\"" {
                let dims = |k: usize| -> Vec<(&str, &[usize])> {
                    let tensors = moments[k].unwrap().shapes.iter().map(|w| (&w.name[..], &w.dims[..]));
                    tensors.filter(|(name, _)| name.starts_with("0.")).collect()
                };
                assert_eq!(dims(0), [("0.weight", &[12, 1][..]), ("0.bias", &[12])]);
                assert_eq!(dims(1), [("0.weight", &[1, 8][..])]);
            }
            let rest = train(&lines, ranks, None, &at("cut"));
            assert_eq!(rest.watcher.losses[..], whole.watcher.losses[13..], "{optimizer}, {ranks} ranks");
            same_bits(&whole, &rest, &format!("{optimizer}, {ranks} ranks"));
        }
    }
}
