//! The ledger of whole runs: one digest on any ranks, meshes and orders and after any interruption; and a slip of a step is found.
//!
//! That it is right is asserted by [`run`] for every run of these tests, on every kind of mesh.

use std::fs;
use std::path::Path;

use polyreme_collective::Comm;
use polyreme_train::checkpoint;
use polyreme_train::event::{Ending, Event, Observer};
use polyreme_train::ledger::LedgerReport;
use polyreme_train::run::{Given, Prepared, run_ranks};

use crate::runs::{job, run};

/// Epochs of 153 samples: four steps of 36 and one of 9.
const ROWS: &str =
    "[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nkind = \"synthetic\"\nsamples = 170\nclasses = 5\n";
const TRAIN: &str = "[train]\nepochs = 3\nbatch = 36\n";
const OUTPUT: &str = "[output]\nevery_steps = 4\nkeep = 100\ntensorboard = false\n";

/// The ledger of a run of these lines.
fn ledger(lines: &str, ranks: usize) -> LedgerReport {
    let folder = tempfile::tempdir().unwrap();
    let outcome = run(&job(lines), Given::default(), ranks, &folder.path().join("run"), None).unwrap();
    outcome.summary.ledger.unwrap()
}

#[test]
fn ranks_microbatches_shards_and_orders_have_one_digest() {
    let one = ledger(&format!("{ROWS}{TRAIN}{OUTPUT}"), 1);
    assert_eq!((one.samples, one.epochs, one.skipped, one.exact), (3 * 153, 3, 0, Some(true)));
    assert_eq!(one.words, "each of 153 samples counted once in each of 3 epochs");
    for (data, train, parallel, ranks) in [
        ("", "", "", 3),
        ("", "", "balance = [5, 1]\n", 2),
        ("", "accumulate = 4\n", "", 1),
        ("", "accumulate = 4\n", "", 3),
        ("", "", "shard_gradients = true\n", 2),
        // Whole epochs are whole in any order.
        ("order = \"in-order\"\n", "", "", 2),
        ("order = \"block\"\nblock = 20\n", "", "", 2),
        ("order = \"parts\"\n", "", "", 3),
        ("", "seed = 9\nprecision = \"bf16\"\n", "", 2),
    ] {
        let lines = format!("{ROWS}{data}{TRAIN}{train}[parallel]\n{parallel}{OUTPUT}");
        assert_eq!(ledger(&lines, ranks), one, "{ranks} ranks:\n{lines}");
    }
    // Another batch, so other steps, and the same epochs.
    let lines = format!(
        "{ROWS}[train]\nepochs = 3\nbatch = 32\n[parallel]\nreproducible = true\nshards = 8\n{OUTPUT}"
    );
    for ranks in [1, 3] {
        assert_eq!(ledger(&lines, ranks), one, "{ranks} ranks:\n{lines}");
    }
}

#[test]
fn ranks_that_have_a_model_together_count_each_sample_once() {
    let folder = tempfile::tempdir().unwrap();
    let text: Vec<&str> = (0..700).map(|i| ["to ", "be ", "or ", "not "][i * i % 7 % 4]).collect();
    let path = folder.path().join("text.txt");
    fs::write(&path, text.concat()).unwrap();
    let lines = |parallel: &str| {
        format!(
            "[model]\nkind = \"gpt\"\nlayers = 2\nwidth = 16\nheads = 2\n[data]\nkind = \"text\"\npath = {path:?}\n\
             context = 16\n[train]\nbatch = 12\nsteps = 15\n[parallel]\nmicrobatches = 4\n{parallel}[output]\ntensorboard = false\n"
        )
    };
    let one = ledger(&lines(""), 1);
    assert!(one.samples > 150 && one.exact == Some(true), "{one:?}");
    for (parallel, ranks) in [
        ("tensor = 2\n", 2),
        ("stage = 2\ncuts = [\"blocks.1\"]\n", 2),
        ("stage = 2\ncuts = [\"blocks.1\"]\nschedule = \"2bw\"\nflush_every = 3\n", 2),
        ("sequence = 2\n", 2),
        ("tensor = 2\ndata = 2\n", 4),
        ("stage = 2\ndata = 2\ncuts = [\"blocks.1\"]\n", 4),
        ("shard_weights = true\n", 2),
    ] {
        assert_eq!(ledger(&lines(parallel), ranks), one, "{ranks} ranks, {parallel}");
    }
}

#[test]
fn a_run_that_is_interrupted_again_and_again_ends_with_the_same_ledger() {
    let lines = format!("{ROWS}{TRAIN}[parallel]\nranks = 1\n{OUTPUT}");
    let one = ledger(&lines, 1);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("run");
    for (stop, ranks) in [(Some(2), 1), (Some(5), 3), (Some(6), 2), (Some(13), 4), (None, 1)] {
        let mut job = job(&lines);
        job.parallel.ranks = Some(ranks);
        let outcome = run(&job, Given::default(), ranks, &folder, stop).unwrap();
        assert_eq!(outcome.summary.ending == Ending::Finished, stop.is_none());
        let ledger = outcome.summary.ledger.unwrap();
        assert_eq!(ledger == one, stop.is_none(), "{ledger:?}");
    }
}

/// Collects warnings.
#[derive(Default)]
struct Warned(Vec<String>);

impl Observer for Warned {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Warning(text) = event {
            self.0.push(text.into());
        }
    }
}

/// Changes what a manifest says, and seals it again.
fn change(checkpoint: &Path, from: &str, to: &str) {
    let path = checkpoint.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let seal = ",\n  \"checksum\": \"";
    let body = text.split(seal).next().unwrap();
    assert!(body.contains(from), "no {from} in {body}");
    let body = body.replacen(from, to, 1);
    let hash = blake3::hash(body.as_bytes()).to_hex();
    fs::write(&path, format!("{body}{seal}{hash}\"\n}}\n")).unwrap();
}

/// A process that lost count: its checkpoint says another step than the one whose weights it has.
#[test]
fn steps_that_are_left_out_or_done_twice_are_found() {
    let lines = format!("{ROWS}{TRAIN}{OUTPUT}");
    for (says, want) in [
        (9, "epoch 2: 117 samples were counted instead of 153; some were left out"),
        (7, "epoch 2: 189 samples were counted instead of 153; some were counted twice"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("run");
        run(&job(&lines), Given::default(), 2, &folder, Some(8)).unwrap();
        let (latest, _) = checkpoint::latest_whole(&folder).unwrap();
        assert_eq!(latest.manifest.step, 9);
        // The newest is of step 9; go on from that of step 8.
        fs::remove_dir_all(&latest.path).unwrap();
        let (eight, _) = checkpoint::latest_whole(&folder).unwrap();
        assert_eq!(eight.manifest.step, 8);
        let name = eight.path.file_name().unwrap().to_str().unwrap();
        let moved = eight.path.with_file_name(name.replace('8', &says.to_string()));
        fs::rename(&eight.path, &moved).unwrap();
        change(&moved, "\"step\": 8,", &format!("\"step\": {says},"));
        let (loaded, _) = checkpoint::latest_whole(&folder).unwrap();
        assert_eq!(loaded.manifest.step, says);
        let prepared = Prepared::new(job(&lines), Given::default(), 1).unwrap();
        let mut warned = Warned::default();
        let summary = run_ranks(prepared, &folder, Some(&loaded), Comm::local(2), &mut warned).unwrap();
        let ledger = summary.ledger.unwrap();
        assert_eq!((ledger.exact, ledger.words.as_str()), (Some(false), want));
        assert!(warned.0.iter().any(|text| text.contains(want)), "{:?}", warned.0);
    }
}
