//! Runs whose optimizer keeps its state in bf16.

use std::path::Path;
use std::sync::Arc;

use polyreme_data::Synthetic;
use polyreme_dtype::DType;
use polyreme_train::checkpoint;
use polyreme_train::event::Ending;
use polyreme_train::job::Job;
use polyreme_train::run::Given;
use polyreme_train::sets::Sets;
use polyreme_train::weights::read_weights;

use crate::runs::{job, run};

fn lines(optimizer: &str, moments: &str, steps: u64, parallel: &str) -> Job {
    // Lion's default learning rate is for longer runs.
    let lr = if optimizer == "lion" { "lr = 3e-3, " } else { "" };
    job(&format!(
        "[model]\nkind = \"mlp\"\nhidden = [33, 9]\n[data]\nkind = \"given\"\nnormalise = false\n\
         [train]\nbatch = 16\nsteps = {steps}\noptimizer = {{ kind = \"{optimizer}\", {lr}moments = \"{moments}\" }}\n\
         [parallel]\n{parallel}[output]\ntensorboard = false\n"
    ))
}

fn given() -> Given {
    let set = |seed| Arc::new(Synthetic::new(96, &[8], 3, 0.2, seed, 0).unwrap());
    Given { sets: Some(Sets { validation: Some(set(1)), ..Sets::new(set(0)) }), ..Given::default() }
}

const OPTIMIZERS: [&str; 4] = ["sgd", "adam", "adamw", "lion"];

#[test]
fn a_run_goes_on_with_the_same_bits_and_its_checkpoints_have_bf16_moments() {
    for optimizer in OPTIMIZERS {
        for ranks in [1, 2] {
            let folder = tempfile::tempdir().unwrap();
            let job = lines(optimizer, "bf16", 12, "");
            let whole = run(&job, given(), ranks, &folder.path().join("whole"), None).unwrap();
            let half = run(&job, given(), ranks, &folder.path().join("run"), Some(5)).unwrap();
            assert_eq!(half.summary.ending, Ending::Interrupted);
            let rest = run(&job, given(), ranks, &folder.path().join("run"), None).unwrap();
            assert!(whole.weights == rest.weights, "{optimizer}, {ranks} ranks");
            for name in ["whole", "run"] {
                for tensor in moments(&folder.path().join(name)) {
                    assert_eq!(tensor.1, DType::Bf16, "{optimizer}: {}", tensor.0);
                }
            }
            assert_eq!(moments(&folder.path().join("whole")), moments(&folder.path().join("run")));
        }
    }
}

/// Names, types and numbers of the moments in the newest checkpoint of a run.
fn moments(run: &Path) -> Vec<(String, DType, Vec<f32>)> {
    let loaded = checkpoint::latest_whole(run).unwrap().0;
    let files = ["moment1.safetensors", "moment2.safetensors"].map(|file| loaded.path.join(file));
    let there = files.iter().filter(|file| file.exists());
    there.flat_map(|file| read_weights(file).unwrap()).map(|w| (w.name, w.dtype, w.data)).collect()
}

#[test]
fn reproducible_runs_have_the_same_bits_on_any_number_of_ranks() {
    for optimizer in ["sgd", "adamw"] {
        let folder = tempfile::tempdir().unwrap();
        let job = lines(optimizer, "bf16", 8, "reproducible = true\n");
        let outcomes = [1, 2, 3].map(|ranks| {
            let path = folder.path().join(ranks.to_string());
            let outcome = run(&job, given(), ranks, &path, None).unwrap();
            (outcome.watcher.losses, outcome.weights, moments(&path))
        });
        assert!(outcomes[0] == outcomes[1] && outcomes[0] == outcomes[2], "{optimizer}");
    }
}

/// A run goes on with another number of ranks, and with another type of moments, from what either wrote.
#[test]
fn each_type_of_moments_goes_on_from_a_checkpoint_of_the_other() {
    for (first, then) in [("f32", "bf16"), ("bf16", "f32")] {
        for ranks in [[1, 1], [1, 2], [2, 1]] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("run");
            run(&lines("adamw", first, 12, ""), given(), ranks[0], &path, Some(6)).unwrap();
            let rest = run(&lines("adamw", then, 12, ""), given(), ranks[1], &path, None).unwrap();
            assert_eq!(rest.summary.steps, 12);
            let want = if then == "bf16" { DType::Bf16 } else { DType::F32 };
            assert!(moments(&path).iter().all(|(_, dtype, _)| *dtype == want), "{first}, {then}, {ranks:?}");
        }
    }
}

#[test]
fn moments_of_bf16_learn_what_those_of_f32_do() {
    for optimizer in OPTIMIZERS {
        let folder = tempfile::tempdir().unwrap();
        let [exact, half] = ["f32", "bf16"].map(|moments| {
            run(&lines(optimizer, moments, 300, ""), given(), 1, &folder.path().join(moments), None).unwrap()
        });
        assert_ne!(exact.weights, half.weights, "{optimizer}");
        let mean = |losses: &[f64]| losses[250..].iter().sum::<f64>() / 50.0;
        let [exact, half, first] =
            [mean(&exact.watcher.losses), mean(&half.watcher.losses), exact.watcher.losses[0]];
        assert!(exact < 0.6 * first, "{optimizer}: it learns ({first} to {exact})");
        assert!((half - exact).abs() < 0.03 * first, "{optimizer}: {half} and {exact} of {first}");
    }
}
