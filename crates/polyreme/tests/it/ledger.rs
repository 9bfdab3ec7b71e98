//! The ledger of samples through the binary: what a killed and resumed run counted, and what `inspect` says of it.

use std::time::Duration;

use rustix::process::Signal;

use crate::binary::{folder, json, polyreme};
use crate::lost::launched;
use crate::ranks::{JOB, end, send, steps_in};

/// The same samples count, once each, whichever ranks read them and however often the run was killed.
#[test]
fn a_run_that_is_killed_and_resumed_counts_each_sample_once() {
    let job = JOB.replace("epochs = 4", "epochs = 100").replace("every_steps = 10", "every_steps = 25");
    // So that `inspect` looks at the last checkpoint.
    let job = job.replace("best = \"val_accuracy\"", "best = \"none\"");
    let folder = folder(&job);
    let one = json(folder.path(), &["train", "job.toml", "--ranks", "1", "--json", "--output", "one"]);
    let one = &one.last().unwrap()["ledger"];
    assert_eq!(one["words"], "each of 540 samples counted once in each of 100 epochs");
    assert_eq!((&one["samples"], &one["exact"]), (&54_000.into(), &true.into()));
    let (launcher, pids, _) = launched(folder.path(), 3, "killed", &[]);
    send(pids[1], Signal::KILL);
    assert_eq!(end(launcher, Duration::from_secs(30)).status.code(), Some(1));
    let step = steps_in(&folder.path().join("killed"));
    assert!((25..1200).contains(&step), "killed at {step}");
    let inspected = json(folder.path(), &["inspect", "killed", "--json"]);
    let half = &inspected[0]["ledger"];
    assert_eq!((&half["exact"], half["digest"] == one["digest"]), (&true.into(), false), "{half}");
    let rest = json(folder.path(), &["resume", "killed", "--ranks", "2", "--json"]);
    assert_eq!(&rest.last().unwrap()["ledger"], one);
    let out = polyreme(folder.path(), &["inspect", "killed"]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(
        out.status.success() && said.contains("each of 540 samples counted once in each of 100 epochs"),
        "{said}"
    );
}
