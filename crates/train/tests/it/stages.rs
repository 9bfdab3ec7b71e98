//! What runs with several stages choose and must do, beside what every mesh does.

use std::path::Path;

use polyreme_train::checkpoint;
use polyreme_train::run::{Given, Prepared, Progress};

use crate::mesh::{MeshCase, agree, cases, lines};
use crate::runs::{Outcome, job, run};

fn train(
    case: &MeshCase,
    parallel: &str,
    batch: usize,
    ranks: usize,
    stop: Option<u64>,
    folder: &Path,
) -> Outcome {
    let lines = lines(case, parallel, "").replace("batch = 16", &format!("batch = {batch}"));
    let mut job = job(&lines);
    job.parallel.ranks = Some(ranks);
    let given = Given { sets: case.given.clone(), ..Given::default() };
    run(&job, given, ranks, folder, stop).unwrap_or_else(|e| panic!("{}, {parallel}: {e}", case.name))
}

/// A batch of which few samples are left in the last step of an epoch: one if there is such a batch, at most three else.
fn batch_with_few_left(case: &MeshCase) -> usize {
    let given = Given { sets: case.given.clone(), ..Given::default() };
    let samples = Prepared::new(job(&lines(case, "", "")), given, 1).unwrap().pace.samples;
    let with = |left: &[usize]| (8..32).find(|batch| left.contains(&(samples % batch)));
    with(&[1]).or_else(|| with(&[2, 3])).unwrap()
}

#[test]
fn a_data_rank_without_samples_adds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for mut case in cases(folder.path()).into_iter().filter(|case| ["mlp", "gpt"].contains(&case.name)) {
        case.model = case.model.replace("samples = 120", "samples = 113\nvalidation = 0");
        let case = &case;
        let batch = batch_with_few_left(case);
        let at = |name: &str| folder.path().join(format!("{}-{name}", case.name));
        let one = train(case, "microbatches = 2\n", batch, 1, None, &at("one"));
        let meshes = [
            ("data = 2\nstage = 2\n", 4),
            ("data = 4\nstage = 2\nschedule = \"zb-h1\"\n", 8),
            ("data = 2\nstage = 2\nshard_weights = true\n", 4),
            ("data = 4\nstage = 2\nschedule = \"zb-v\"\nshard_weights = true\n", 8),
        ];
        for (k, (parallel, ranks)) in meshes.iter().enumerate() {
            let parallel = format!("{parallel}microbatches = 2\n");
            let many = train(case, &parallel, batch, *ranks, None, &at(&k.to_string()));
            agree(&one, &many, &format!("{}: {parallel}", case.name));
        }
    }
}

#[test]
fn cuts_are_measured_once_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let case = cases(folder.path()).into_iter().find(|case| case.name == "gpt").unwrap();
    let run_in = folder.path().join("kept");
    let cuts = |run_in: &Path| Progress::of(&checkpoint::latest_whole(run_in).unwrap().0).unwrap().cuts;
    train(&case, "stage = 4\n", 16, 4, Some(2), &run_in);
    let first = cuts(&run_in);
    assert_eq!(first.len(), 3, "{first:?}");
    train(&case, "stage = 4\n", 16, 4, Some(4), &run_in);
    assert_eq!(cuts(&run_in), first);
    // With another number of stages they are measured again, and one stage has none.
    train(&case, "stage = 2\n", 16, 2, Some(6), &run_in);
    assert_eq!(cuts(&run_in).len(), 1);
    train(&case, "", 16, 1, Some(8), &run_in);
    assert!(cuts(&run_in).is_empty());
    for (name, parallel) in [
        ("given", "stage = 2\ncuts = [\"blocks.3\"]\n"),
        ("reproducible", "stage = 2\nreproducible = true\nshards = 8\n"),
    ] {
        let run_in = folder.path().join(name);
        train(&case, parallel, 16, 2, Some(2), &run_in);
        assert!(cuts(&run_in).is_empty(), "{name}");
    }
}
