//! Ranks that die or hang, through the binary: the others say who, where and when, within 5 seconds, and fewer go on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use polyreme::train::checkpoint;
use rustix::process::Signal;

use crate::binary::{command, folder, json};
use crate::ranks::{by_environment, end, endless, living, pids, send, start, steps_in, wait_for_step};

/// How soon after a rank was killed the others must have reported it and ended.
pub(crate) const REPORT: Duration = Duration::from_secs(5);

/// Starts processes with a launcher and waits until they train; returns the launcher, the processes, and the file with
/// their messages.
pub(crate) fn launched(
    folder: &Path,
    processes: usize,
    output: &str,
    more: &[&str],
) -> (Child, Vec<i32>, PathBuf) {
    let errors = folder.join(format!("errors_{output}"));
    let until = Instant::now() + Duration::from_secs(60);
    let n = processes.to_string();
    let args = [&["train", "job.toml", "--processes", &n, "--output", output], more].concat();
    let launcher = start(command(folder, &args), &errors);
    let pids = pids(&errors, processes, until);
    wait_for_step(&folder.join(output), 25, until);
    (launcher, pids, errors)
}

/// Every survivor on its own, without a launcher that passes on its messages.
#[test]
fn each_survivor_of_a_killed_rank_reports_it() {
    let folder = folder(&endless());
    let one_host = ["a"; 4];
    for (hosts, victim) in
        [(one_host, 2), (one_host, 0), (["a", "b", "a", "b"], 3), (["a", "b", "c", "d"], 0)]
    {
        drop(fs::remove_dir_all(folder.path().join("run")));
        let until = Instant::now() + Duration::from_secs(60);
        let mut ranks = by_environment(folder.path(), &hosts, &[]);
        wait_for_step(&folder.path().join("run"), 25, until);
        send(ranks[victim].id() as i32, Signal::KILL);
        let killed = Instant::now();
        let mut reported = [None; 4];
        while reported.iter().enumerate().any(|(rank, at)| rank != victim && at.is_none()) {
            for (rank, at) in
                reported.iter_mut().enumerate().filter(|(rank, at)| *rank != victim && at.is_none())
            {
                let said = fs::read_to_string(folder.path().join(format!("errors{rank}"))).unwrap();
                let report =
                    said.lines().find(|l| l.contains(&format!("rank {victim}")) && l.contains("is gone"));
                if let Some(report) = report {
                    assert!(report.contains("at step"), "{report}");
                    *at = Some(killed.elapsed());
                }
                let late = killed.elapsed() >= REPORT;
                assert!(!late, "{hosts:?}, {victim} killed: nothing of rank {rank} after {REPORT:?}: {said}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("{hosts:?}, {victim} killed: {reported:?}");
        for (rank, child) in ranks.drain(..).enumerate() {
            let out = end(child, REPORT.saturating_sub(killed.elapsed()));
            assert_eq!(out.status.code(), (rank != victim).then_some(1), "rank {rank}");
        }
    }
}

/// A survivor that notices nothing, because it hangs, is ended by the launcher in the same time.
#[test]
fn a_survivor_that_hangs_is_ended() {
    let folder = folder(&endless());
    let (launcher, pids, errors) = launched(folder.path(), 4, "run", &[]);
    send(pids[1], Signal::STOP);
    send(pids[2], Signal::KILL);
    let killed = Instant::now();
    let out = end(launcher, Duration::from_secs(30));
    assert!(killed.elapsed() < REPORT, "{:?}", killed.elapsed());
    assert_eq!(out.status.code(), Some(1));
    let said = fs::read_to_string(&errors).unwrap();
    assert!(said.contains("rank 2 on ") && said.contains("is gone"), "{said}");
    assert!(said.contains("ranks that did not stop by themselves were ended: 1"), "{said}");
    assert_eq!(living(&pids), [0; 0]);
}

#[test]
fn a_killed_rank_ends_the_others_with_a_report_and_three_go_on() {
    let folder = folder(&endless());
    let (launcher, pids, errors) = launched(folder.path(), 4, "run", &[]);
    send(pids[2], Signal::KILL);
    let killed = Instant::now();
    let out = end(launcher, Duration::from_secs(30));
    assert!(killed.elapsed() < REPORT, "{:?}", killed.elapsed());
    assert_eq!(out.status.code(), Some(1));
    let said = fs::read_to_string(&errors).unwrap();
    assert!(said.contains("rank 2") && said.contains("is gone") && said.contains("at step"), "{said}");
    assert!(said.contains(&format!("rank 2 (process {}) was killed by signal 9", pids[2])), "{said}");
    assert_eq!(living(&pids), [0; 0]);
    let (loaded, _) = checkpoint::latest_whole(&folder.path().join("run")).unwrap();
    let steps = loaded.manifest.step + 30;
    let lines = json(
        folder.path(),
        &["resume", "run", "--processes", "3", "--json", "--set", &format!("train.steps={steps}")],
    );
    assert_eq!(lines.last().unwrap()["steps"], steps);
}

/// A machine that swaps or is migrated stands still for a while: no rank is lost, and the user is told which one is
/// late.
#[test]
fn a_rank_that_is_paused_is_waited_for() {
    let folder = folder(&endless());
    for (transport, pause) in [("shm", Duration::from_secs(12)), ("tcp", Duration::from_secs(6))] {
        let output = format!("paused_{transport}");
        let (launcher, pids, errors) = launched(folder.path(), 2, &output, &["--transport", transport]);
        send(pids[1], Signal::STOP);
        std::thread::sleep(pause);
        send(pids[1], Signal::CONT);
        let run = folder.path().join(&output);
        let so_far = steps_in(&run);
        wait_for_step(&run, so_far + 25, Instant::now() + Duration::from_secs(60));
        let said = fs::read_to_string(&errors).unwrap();
        assert_eq!(said.contains("waiting for rank 1 on "), pause >= Duration::from_secs(11), "{said}");
        assert_eq!(living(&pids), pids, "{said}");
        send(launcher.id() as i32, Signal::INT);
        assert_eq!(end(launcher, Duration::from_secs(60)).status.code(), Some(130));
    }
}

/// Rank 0 alone measures the training set, for longer than ranks are patient with one that is silent or stands still: the others
/// wait for it, however they are connected.
#[test]
fn a_rank_that_measures_the_data_for_long_before_the_start_is_waited_for() {
    let patience = 3;
    // The mean and deviation of this many samples are computed.
    let folder = folder(&format!(
        "[model]\nlayers = [{{ kind = 'conv', outputs = 1, kernel = 3, stride = 3 }}, 'global_mean', 'linear']\n\
         [data]\nkind = 'synthetic'\nsamples = 20000\nshape = [3, 72, 72]\nclasses = 2\nvalidation = 0\n\
         normalise = true\n[train]\nbatch = 4\nsteps = 2\n\
         [parallel]\nthreads = 1\npatience = {patience}\nstall = {patience}\n[output]\nbest = 'none'\n"
    ));
    for flags in [&["--processes", "2"][..], &["--processes", "2", "--transport", "tcp"], &["--ranks", "2"]] {
        let output = flags.last().unwrap().to_string();
        let began = Instant::now();
        let lines = json(
            folder.path(),
            &[&["train", "job.toml", "--json", "--output", &output], flags, &["--overwrite"]].concat(),
        );
        assert_eq!(lines.last().unwrap()["ending"], "finished", "{flags:?}");
        assert!(began.elapsed() > Duration::from_secs(patience), "{flags:?}: too short to show anything");
    }
}

/// A rank that hangs is silent: the others know where it was.
#[test]
fn a_stopped_rank_is_named_with_the_step_it_was_in() {
    let folder = folder(&endless());
    for transport in ["shm", "tcp"] {
        let (launcher, pids, errors) = launched(
            folder.path(),
            3,
            transport,
            &["--transport", transport, "--set", "parallel.patience=4"],
        );
        send(pids[2], Signal::STOP);
        let out = end(launcher, Duration::from_secs(30));
        assert_eq!(out.status.code(), Some(1));
        let said = fs::read_to_string(&errors).unwrap();
        let report = said.lines().find(|l| l.contains("rank 2") && l.contains("silent"));
        let report = report.unwrap_or_else(|| panic!("{transport}: {said}"));
        let step =
            report.split("at step ").nth(1).and_then(|rest| rest.split(',').next()?.parse::<u64>().ok());
        assert!(step.is_some_and(|step| step >= 25), "{transport}: {report}");
        assert_eq!(living(&pids), [0; 0]);
    }
}
