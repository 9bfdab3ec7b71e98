//! File systems without links, locks or synced folders: a run goes on, and says so once.

use std::sync::Arc;

use super::disk::Faults;
use super::lacks::Lack;
use super::tests::snapshot;
use super::*;

const METRIC: &str = "val_accuracy";

fn open(run: &std::path::Path, without: &[Lack]) -> Store {
    let faults = Arc::new(Faults { without: without.to_vec(), ..Faults::default() });
    let lock = Lock::take_on(Disk::with_faults(faults), run).unwrap();
    Store::open_held(lock, 1, Some(METRIC.into())).unwrap()
}

#[test]
fn file_systems_without_links_locks_or_synced_folders_are_warned_about_once() {
    let all = [Lack::Links, Lack::Locks, Lack::FolderSync];
    let words = ["no symbolic links", "no locks", "does not sync folders"];
    for (lacks, words) in [
        (&all[..], &words[..]),
        (&all[..1], &words[..1]),
        (&all[1..2], &words[1..2]),
        (&all[2..], &words[2..]),
        (&[], &[]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let mut store = open(&run, lacks);
        let mut notes = Vec::new();
        for (step, value) in [(1, 0.5), (2, 0.9), (3, 0.1)] {
            store.save(snapshot(step, &[(METRIC, value)])).unwrap();
            store.finish().unwrap();
            notes.extend(store.take_notes());
        }
        assert_eq!(notes.len(), words.len(), "{lacks:?}: {notes:?}");
        for word in words {
            assert!(notes.iter().any(|note| note.contains(word)), "{lacks:?}: {notes:?}");
        }
        // The best is known, kept, and found by all its names.
        let step = |path: &std::path::Path| load_at(path).unwrap().0.manifest.step;
        assert_eq!([step(&run), step(&run.join("best")), step(&run.join("checkpoints/best"))], [3, 2, 2]);
        assert_eq!(best(&run).unwrap(), Some(run.join("checkpoints/step-00000002")));
        let entries = list(&run).unwrap();
        assert_eq!(entries.iter().map(|e| (e.step, e.is_best)).collect::<Vec<_>>(), [(2, true), (3, false)]);
        // A second process is kept out where there are locks.
        assert_eq!(
            matches!(Lock::take(&run), Err(CheckpointError::Locked { .. })),
            !lacks.contains(&Lack::Locks)
        );
        drop(store);
        // And the run goes on, here or where the file system can do more.
        for without in [lacks, &[]] {
            let mut store = open(&run, without);
            let step = latest_whole(&run).unwrap().0.manifest.step + 1;
            store.save(snapshot(step, &[(METRIC, step as f64)])).unwrap();
            store.finish().unwrap();
            assert_eq!(list(&run).unwrap().iter().find(|e| e.is_best).map(|e| e.step), Some(step));
        }
    }
}
