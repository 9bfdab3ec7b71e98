//! What goes wrong on one rank ends the run on all, with one report; and a process without rank 0 writes nothing.

use std::sync::Arc;

use polyreme_collective::{Cause, Comm};
use polyreme_data::{DataError, Dataset, Fetched, Scratch, Spec, Synthetic};
use polyreme_train::TrainError;
use polyreme_train::event::Silent;
use polyreme_train::job::Job;
use polyreme_train::run::{Given, Prepared, run_ranks};
use polyreme_train::sets::Sets;

use crate::runs::{job, run};

const JOB: &str = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"given\"\norder = \"in-order\"\n\
                   normalise = false\n[train]\nbatch = 16\nsteps = 20\n[output]\ntensorboard = false\n";

/// A set whose last sample cannot be read.
struct Broken {
    set: Synthetic,
    panics: bool,
}

impl Dataset for Broken {
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
        match (idx + 1 == self.set.len(), self.panics) {
            (false, _) => self.set.fetch(idx, scratch),
            (true, true) => panic!("a hole in the set"),
            (true, false) => Err(DataError::Setting { why: "sample 63 is unreadable".into() }),
        }
    }
}

fn set() -> Synthetic {
    Synthetic::new(64, &[8], 3, 0.2, 0, 0).unwrap()
}

#[test]
fn one_report_names_the_rank() {
    // Sample 63 belongs to the last rank, in the fourth step.
    for (ranks, panics, why) in
        [(2, false, "unreadable"), (4, false, "unreadable"), (3, true, "a hole in the set")]
    {
        let folder = tempfile::tempdir().unwrap();
        let given =
            Given { sets: Some(Sets::new(Arc::new(Broken { set: set(), panics }))), ..Given::default() };
        let error = run(&job(JOB), given, ranks, &folder.path().join("run"), None).err().unwrap();
        let TrainError::Rank(report) = &error else { panic!("{error}") };
        assert_eq!((report.rank, report.step), (ranks - 1, 3), "{error}");
        assert!(matches!(&report.cause, Cause::Failed { why: text } if text.contains(why)), "{error}");
    }
    // Rank 0's own errors are as they are.
    let folder = tempfile::tempdir().unwrap();
    let given =
        Given { sets: Some(Sets::new(Arc::new(Broken { set: set(), panics: false }))), ..Given::default() };
    let error = run(&job(JOB), given, 1, &folder.path().join("run"), None).err().unwrap();
    assert!(matches!(error, TrainError::Data(_)), "{error}");
}

#[test]
fn processes_without_rank_0_write_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (mine, theirs) = (folder.path().join("mine"), folder.path().join("theirs"));
    let text = JOB.replace("normalise = false", "normalise = true\nclass_weights = \"balanced\"");
    let job = job(&text);
    let given =
        || Given { sets: Some(Sets::new(Arc::new(set())).with_test(Arc::new(set()))), ..Given::default() };
    let mut comms = Comm::local(4);
    let back = comms.split_off(2);
    let (first, second) = std::thread::scope(|s| {
        let prepared = Prepared::of_rank(job.clone(), given(), 1, 2).unwrap();
        assert_eq!(prepared.stats, None);
        let theirs = &theirs;
        let second = s.spawn(move || run_ranks(prepared, theirs, None, back, &mut Silent).unwrap());
        let prepared = Prepared::new(job.clone(), given(), 1).unwrap();
        let first = run_ranks(prepared, &mine, None, comms, &mut Silent).unwrap();
        (first, second.join().unwrap())
    });
    assert_eq!((first.steps, &first.metrics), (second.steps, &second.metrics));
    assert!(first.model.exists() && !theirs.exists());
}

#[test]
fn a_rank_with_another_job_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let given = || Given { sets: Some(Sets::new(Arc::new(set()))), ..Given::default() };
    let other = Job { train: polyreme_train::job::TrainSpec { batch: 8, ..job(JOB).train }, ..job(JOB) };
    let mut comms = Comm::local(2);
    let back = comms.split_off(1);
    let errors = std::thread::scope(|s| {
        let path = folder.path();
        let second = Prepared::new(other, given(), 1).unwrap();
        let second =
            s.spawn(move || run_ranks(second, path, None, back, &mut Silent).err().unwrap().to_string());
        let first = Prepared::new(job(JOB), given(), 1).unwrap();
        let first = run_ranks(first, path, None, comms, &mut Silent).err().unwrap().to_string();
        [first, second.join().unwrap()]
    });
    for error in errors {
        assert!(error.starts_with("rank 1 disagrees with the others: its job or its data"), "{error}");
    }
}

#[test]
fn what_cannot_be_shared_out_is_said_before_anything_runs() {
    let check = |lines: &str, ranks: usize, want: &str| {
        let given = Given { sets: Some(Sets::new(Arc::new(set()))), ..Given::default() };
        let prepared = Prepared::new(job(&format!("{JOB}{lines}")), given, 1).unwrap();
        let error = prepared.for_ranks(ranks).err().unwrap().to_string();
        assert!(error.contains(want), "{error}");
    };
    check("[parallel]\nbalance = [1, 2]", 3, "parallel.balance has 2 weights, and there are 3 ranks");
    let norm = JOB.replace(
        "kind = \"mlp\"\nhidden = [8]",
        "layers = [{ kind = \"linear\", outputs = 4 }, \"batch_norm\", \"linear\"]",
    );
    // A job that was made in Rust comes by no reader of files.
    let mut made = job(JOB);
    made.parallel.shard_gradients = true;
    made.parallel.reproducible = true;
    let given = || Given { sets: Some(Sets::new(Arc::new(set()))), ..Given::default() };
    let error = Prepared::new(made, given(), 1).err().unwrap().to_string();
    assert!(error.contains("`parallel.shard_gradients` does not work with `reproducible`"), "{error}");
    let given = given();
    let text = format!("{norm}[parallel]\nranks = 17\nsync_batch_norm = true");
    let error = Prepared::new(job(&text), given, 1).err().unwrap().to_string();
    assert!(error.contains("a step of 16 samples does not give every one of 17 ranks"), "{error}");
}
