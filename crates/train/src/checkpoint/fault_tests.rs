//! Every moment at which writing can stop: after each single operation on the disk, for good or just once.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::disk::Faults;
use super::tests::snapshot;
use super::*;

/// What a run saves, in this order: step, value of the metric. Step 2 is saved twice, step 1 goes when 3 comes.
const SAVES: [(u64, f64); 5] = [(1, 0.5), (2, 0.7), (2, 0.6), (3, 0.1), (4, 0.2)];

/// A folder in memory where there is one: thousands of operations are brought to the disk here.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Saves all; gives the newest step whose save was reported as done, and how many saves were reported as failed.
fn save_all(run: &Path, faults: &Arc<Faults>) -> (u64, usize) {
    // Faults begin after the folder is there: what cannot be opened has saved nothing.
    std::fs::create_dir_all(run.join("checkpoints")).unwrap();
    let lock = Lock::take_on(Disk::with_faults(faults.clone()), run).unwrap();
    let mut store = Store::open_held(lock, 2, Some("val_accuracy".into())).unwrap();
    let (mut newest, mut n_failed) = (0, 0);
    for (step, value) in SAVES {
        store.save(snapshot(step, &[("val_accuracy", value)])).unwrap();
        match store.finish() {
            Ok(()) => newest = step,
            Err(_) => n_failed += 1,
        }
    }
    (newest, n_failed)
}

/// Whatever stands under a real name is whole, and the newest is at least `newest`.
fn check_whole(run: &Path, newest: u64, moment: &str) {
    let entries = list(run).unwrap();
    for entry in &entries {
        let loaded = load(&entry.path).unwrap_or_else(|e| panic!("{moment}: {e}"));
        let want = snapshot(entry.step, &[]);
        for (want, file) in want.shards.iter().zip(&loaded.files) {
            let got = crate::weights::read_weights(&file.path).unwrap();
            let n: usize = got.iter().map(|w| w.data.len()).sum();
            assert_eq!((Some(want.file.as_ref()), want.data.len()), (file.path.file_name(), n), "{moment}");
            for (at, weight) in want.tensors.iter().zip(&got).filter(|(_, weight)| !weight.data.is_empty()) {
                assert_eq!(want.data[at.start..at.start + weight.data.len()], weight.data, "{moment}");
            }
        }
    }
    let found = entries.last().map_or(0, |entry| entry.step);
    assert!(found >= newest, "{moment}: step {newest} was done and {found} is the newest");
    if run.join("checkpoints/best").symlink_metadata().is_ok() {
        let GivenPath::Checkpoint(best) = resolve(&run.join("best")).unwrap() else {
            panic!("{moment}: no best")
        };
        load(&best).unwrap_or_else(|e| panic!("{moment}: best: {e}"));
    }
}

/// Names that are there; none may be a leftover.
fn names(run: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(run.join("checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn stopped_anywhere_it_is_whole() {
    let faults = Arc::new(Faults::default());
    let run = folder();
    assert_eq!(save_all(run.path(), &faults), (4, 0));
    check_whole(run.path(), 4, "without faults");
    let want = [".lock", "best", "step-00000002", "step-00000003", "step-00000004"];
    assert_eq!(names(run.path()), want);
    let n_ops = faults.n_ops.load(SeqCst);
    assert!(n_ops > 60, "{n_ops}");

    for onward in [true, false] {
        for op in 1..=n_ops {
            let moment =
                format!("operation {op} of {n_ops} fails{}", if onward { ", and all after it" } else { "" });
            let faults = Arc::new(Faults { first: op.into(), onward: onward.into(), ..Faults::default() });
            let run = folder();
            let (newest, n_failed) = save_all(run.path(), &faults);
            check_whole(run.path(), newest, &moment);
            assert!(n_failed > 0, "{moment}: and nobody was told");
            if !onward {
                // One failure: one save is told, and the next ones put everything in order.
                assert_eq!(n_failed, 1, "{moment}");
            }
            // The next run, on a disk that works.
            let mut store = Store::open(run.path(), 1, Some("val_accuracy".into())).unwrap();
            check_whole(run.path(), newest, &moment);
            assert!(
                names(run.path()).iter().all(|name| !name.starts_with('.') || name == ".lock"),
                "{moment}"
            );
            store.save(snapshot(5, &[("val_accuracy", 0.9)])).unwrap();
            store.finish().unwrap();
            check_whole(run.path(), 5, &moment);
            assert_eq!(names(run.path()), [".lock", "best", "step-00000005"], "{moment}");
        }
    }
}
