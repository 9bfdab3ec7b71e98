//! Weights in half precision in files: what a run writes, and what it starts from.

use std::path::Path;
use std::sync::Arc;

use polyreme_data::Synthetic;
use polyreme_dtype::{DType, bf16, f16};
use polyreme_train::checkpoint;
use polyreme_train::evaluate::evaluate;
use polyreme_train::install::install_file;
use polyreme_train::job::Job;
use polyreme_train::judge::{Judge, block_samples};
use polyreme_train::lower::training_graph;
use polyreme_train::run::{Given, Prepared};
use polyreme_train::sets::Sets;
use polyreme_train::starting::StartingWeights;
use polyreme_train::weights::{View, Weight, read_weights, write_weights};
use polyreme_train::whole::WholeModel;

use crate::runs::{job, run};

/// With running statistics, averaged weights and a best checkpoint that is not the last one.
const JOB: &str = "[model]\nlayers = [{ kind = \"linear\", outputs = 9 }, \"batch_norm\", \"relu\", \"linear\"]\n\
                   [data]\nkind = \"given\"\nnormalise = false\n\
                   [train]\nbatch = 16\nsteps = 12\nevaluate_every = 4\nema = 0.5\n\
                   [output]\ntensorboard = false\nkeep = 9\nevery_steps = 3\n";

fn set(seed: u64) -> Arc<Synthetic> {
    Arc::new(Synthetic::new(64, &[8], 3, 0.2, seed, 0).unwrap())
}

fn given() -> Given {
    let sets = Sets { validation: Some(set(1)), test: Some(set(2)), ..Sets::new(set(0)) };
    Given { sets: Some(sets), ..Given::default() }
}

fn bf16_job(lines: &str) -> Job {
    job(&format!("{lines}dtype = \"bf16\"\n"))
}

/// The metrics of the test set with the weights of a file.
fn tested(job: &Job, file: &Path) -> Vec<(String, f64)> {
    let prepared = Prepared::new(job.clone(), given(), 1).unwrap();
    let n = block_samples(&prepared.net, &prepared.spec).unwrap();
    let mut judge = Judge::new(
        &prepared.net,
        &prepared.spec,
        n,
        job.train.loss,
        &job.precision(),
        1,
        Given::default().isa,
    )
    .unwrap();
    let graph = training_graph(&prepared.net, &prepared.spec, 2, prepared.learner.loss).unwrap();
    install_file(judge.engine_mut(), &WholeModel::of(&graph), StartingWeights::file(file)).unwrap();
    let set = prepared.sets.test.clone().unwrap();
    let transform = prepared.plain_transform(set.as_ref()).unwrap();
    evaluate(&mut judge, &set, &transform, 1, &[1.0]).unwrap().named("test")
}

#[test]
fn a_model_in_bf16_is_the_f32_one_rounded_and_is_what_was_tested() {
    for (lines, ranks) in [(JOB.to_string(), 1), (JOB.to_string(), 2), (JOB.replace("ema = 0.5\n", ""), 2)] {
        let folder = tempfile::tempdir().unwrap();
        let (exact, half) = (job(&lines), bf16_job(&lines));
        let [whole, rounded] = [(&exact, "f32"), (&half, "bf16")]
            .map(|(job, name)| run(job, given(), ranks, &folder.path().join(name), None).unwrap());
        let [want, got] = [&whole, &rounded].map(|outcome| read_weights(&outcome.summary.model).unwrap());
        assert_eq!(want.len(), got.len());
        for Weight { name, data, .. } in &want {
            let got = got.iter().find(|w| w.name == *name).unwrap();
            let state = name.contains("running");
            assert_eq!(got.dtype, if state { DType::F32 } else { DType::Bf16 }, "{name}");
            let round = |x: &f32| if state { *x } else { bf16::from_f32(*x).to_f32() };
            assert_eq!(got.data, data.iter().map(round).collect::<Vec<_>>(), "{name}");
        }
        for (job, outcome) in [(&exact, &whole), (&half, &rounded)] {
            let test: Vec<_> = outcome
                .watcher
                .metrics
                .iter()
                .filter(|(name, _)| name.starts_with("test"))
                .cloned()
                .collect();
            assert_eq!(test, tested(job, &outcome.summary.model), "{ranks} ranks");
        }
        assert_ne!(whole.watcher.metrics, rounded.watcher.metrics, "rounding changes the loss");
        // All that a run goes on from is exact.
        for step in [3, 6, 9, 12] {
            let files = ["f32", "bf16"].map(|name| {
                let path = folder.path().join(name).join(format!("checkpoints/step-{step:08}"));
                checkpoint::load(&path).unwrap().manifest.files
            });
            assert_eq!(files[0], files[1], "step {step}");
        }
    }
}

#[test]
fn a_run_whose_model_is_bf16_goes_on_after_an_interruption_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let job = bf16_job(JOB);
    let whole = run(&job, given(), 2, &folder.path().join("whole"), None).unwrap();
    run(&job, given(), 2, &folder.path().join("run"), Some(5)).unwrap();
    let resumed = run(&job, given(), 2, &folder.path().join("run"), None).unwrap();
    assert_eq!(whole.weights, resumed.weights);
}

#[test]
fn a_run_starts_from_weights_of_any_floating_type() {
    let folder = tempfile::tempdir().unwrap();
    let first = run(&job(JOB), given(), 1, &folder.path().join("first"), None).unwrap();
    let weights = read_weights(&first.summary.model).unwrap();
    for dtype in [DType::F64, DType::F32, DType::F16, DType::Bf16] {
        let round = |x: &f32| match dtype {
            DType::F16 => f16::from_f32(*x).to_f32(),
            DType::Bf16 => bf16::from_f32(*x).to_f32(),
            _ => *x,
        };
        // The same numbers in that type, and in f32.
        let [there, widened] = [dtype, DType::F32].map(|dtype| {
            let path = folder.path().join(format!("{dtype}.safetensors"));
            let rounded: Vec<Vec<f32>> = weights.iter().map(|w| w.data.iter().map(round).collect()).collect();
            let views: Vec<View> =
                weights.iter().zip(&rounded).map(|(w, data)| View { dtype, data, ..w.view() }).collect();
            write_weights(&path, &views, Some(7)).unwrap();
            let lines = JOB.replace("[data]", &format!("weights = {path:?}\n[data]"));
            let name = format!("from-{dtype}");
            let outcome = run(&job(&lines), given(), 1, &folder.path().join(&name), None).unwrap();
            std::fs::remove_dir_all(folder.path().join(name)).unwrap();
            outcome
        });
        assert_eq!(there.watcher.losses, widened.watcher.losses, "{dtype}");
        assert_eq!(there.weights, widened.weights, "{dtype}");
        assert!(there.watcher.losses[0] < first.watcher.losses[0], "{dtype}: it starts from what was learnt");
    }
}
