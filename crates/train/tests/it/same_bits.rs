//! Reproducible runs on meshes: what changes no bit, and what is recorded because it does.

use std::path::Path;

use polyreme_train::checkpoint;
use polyreme_train::job::Job;
use polyreme_train::run::degrees::Degrees;
use polyreme_train::run::{Given, Prepared, Progress};

use crate::mesh::{MeshCase, cases, lines};
use crate::runs::{Outcome, job, run};

fn reproducible(case: &MeshCase, parallel: &str, ranks: usize) -> Job {
    let parallel = format!("reproducible = true\nshards = 8\n{parallel}");
    let mut job = job(&lines(case, &parallel, "clip = 0.5\n"));
    job.parallel.ranks = Some(ranks);
    job
}

fn train(case: &MeshCase, parallel: &str, ranks: usize, stop: Option<u64>, folder: &Path) -> Outcome {
    let given = Given { sets: case.given.clone(), ..Given::default() };
    run(&reproducible(case, parallel, ranks), given, ranks, folder, stop)
        .unwrap_or_else(|e| panic!("{}, {parallel}: {e}", case.name))
}

#[track_caller]
fn same(one: &Outcome, other: &Outcome, what: &str) {
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&one.watcher.losses), bits(&other.watcher.losses), "{what}");
    for ((name, a), (_, b)) in one.weights.iter().zip(&other.weights) {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(a) == bits(b), "{name}: {what}");
    }
    assert_eq!(one.weights.len(), other.weights.len(), "{what}");
}

/// The runs of a case on these meshes have the bits of the first one.
fn check(case: &MeshCase, meshes: &[(&str, usize)]) {
    let folder = tempfile::tempdir().unwrap();
    let at = |i: usize| folder.path().join(i.to_string());
    let one = train(case, meshes[0].0, meshes[0].1, None, &at(0));
    for (i, (parallel, ranks)) in meshes.iter().enumerate().skip(1) {
        let other = train(case, parallel, *ranks, None, &at(i));
        same(&one, &other, &format!("{}: {parallel}", case.name));
    }
}

#[test]
fn sharded_weights_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases(folder.path()).iter().filter(|case| ["mlp", "cnn", "gpt"].contains(&case.name)) {
        check(
            case,
            &[("", 1), ("data = 2\nshard_weights = true\n", 2), ("data = 4\nshard_weights = true\n", 4)],
        );
        check(case, &[("tensor = 2\n", 2), ("data = 2\ntensor = 2\nshard_weights = true\n", 4)]);
    }
}

/// Three ranks have two, three and three logical shards, and the last step is too short for all of them.
#[test]
fn ranks_with_fewer_shards_bring_their_weights() {
    let folder = tempfile::tempdir().unwrap();
    let mut case = cases(folder.path()).into_iter().find(|case| case.name == "mlp").unwrap();
    case.model = case.model.replace("[16, 24, 64, 32, 16, 24, 16]", "[48, 24, 96, 48]").replace("120", "85");
    check(
        &case,
        &[
            ("", 1),
            ("data = 3\nshard_weights = true\n", 3),
            ("data = 3\nstage = 2\nshard_weights = true\n", 6),
        ],
    );
}

#[test]
fn data_ranks_and_stages_change_no_bit_of_sequences_that_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    for case in cases(folder.path()).iter().filter(|case| ["gpt", "lstm"].contains(&case.name)) {
        check(
            case,
            &[("sequence = 2\n", 2), ("data = 2\nsequence = 2\n", 4), ("stage = 2\nsequence = 2\n", 4)],
        );
    }
}

#[test]
fn degrees_are_recorded_and_another_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let case = cases(folder.path()).into_iter().find(|case| case.name == "gpt").unwrap();
    let run_in = folder.path().join("moved");
    let degrees = || Progress::of(&checkpoint::latest_whole(&run_in).unwrap().0).unwrap().degrees;
    let part = |parallel: &str, ranks: usize, stop: u64| train(&case, parallel, ranks, Some(stop), &run_in);
    assert!(part("data = 2\ntensor = 2\n", 4, 3).watcher.notes.is_empty());
    assert_eq!(degrees(), Some(Degrees { tensor: 2, sequence: 1 }));
    assert!(part("stage = 2\ntensor = 2\n", 4, 5).watcher.notes.is_empty(), "the same bits");
    let notes = part("sequence = 2\n", 2, 7).watcher.notes;
    let said = "split over tensor = 2 and sequence = 1, from here on over tensor = 1 and sequence = 2";
    assert!(notes.len() == 1 && notes[0].contains(said), "{notes:?}");
    assert_eq!(degrees(), Some(Degrees { tensor: 1, sequence: 2 }));
}

#[test]
fn what_cannot_have_the_same_bits_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let case = cases(folder.path()).into_iter().find(|case| case.name == "mlp").unwrap();
    let said = |parallel: &str, ranks: usize, optimizer: Option<&str>| {
        let mut lines = lines(&case, &format!("reproducible = true\nshards = 8\n{parallel}"), "");
        if let Some(optimizer) = optimizer {
            lines = crate::mesh::with_optimizer(&lines, optimizer);
        }
        let mut job = job(&lines);
        job.parallel.ranks = Some(ranks);
        let prepared = Prepared::new(job, Given::default(), 1).unwrap();
        prepared.program(0).map(|_| ()).unwrap_err().to_string()
    };
    let lamb = said("data = 2\nshard_weights = true\n", 2, Some("\"lamb\""));
    assert!(lamb.contains("needs an optimizer that goes by element"), "{lamb}");
}
