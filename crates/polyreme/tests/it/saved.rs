//! Nothing that was saved is lost: folders of live runs, checkpoints that cannot be read, runs that were killed early.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use polyreme::train::checkpoint;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::binary::{command, folder, json, polyreme, root};
use crate::deploy::commands_of;
use crate::train::{JOB, same_outcome, signal, spawn, wait_for_step, wait_until};

/// Steps of the checkpoints that are there.
fn steps(run: &Path) -> Vec<u64> {
    checkpoint::list(run).unwrap().iter().map(|entry| entry.step).collect()
}

fn step_folder(run: &Path, step: u64) -> PathBuf {
    run.join(format!("checkpoints/step-{step:08}"))
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

#[test]
fn overwriting_a_live_run_is_refused_and_takes_nothing_from_it() {
    let folder = folder(JOB);
    let run = folder.path().join("run");
    let mut child =
        spawn(folder.path(), &["train", "job.toml", "--output", "run", "--set", "train.epochs=100000"]);
    wait_for_step(&run, 3);
    let others: [&[&str]; 2] = [&["train", "job.toml", "--output", "run", "--overwrite"], &["resume", "run"]];
    for args in others {
        let before = *steps(&run).last().unwrap();
        let out = polyreme(folder.path(), args);
        let text = said(&out);
        let want = format!("process {} trains into this folder", child.id());
        assert!(out.status.code() == Some(1) && text.contains(&want), "{args:?}: {text}");
        let now = steps(&run);
        assert!(now.len() >= 3 && *now.last().unwrap() >= before, "{args:?}: {now:?}");
        // It lives, and saves.
        wait_for_step(&run, before + 3);
        assert!(child.try_wait().unwrap().is_none(), "{args:?}");
    }
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    // No process trains there any more. What was set aside is deleted too, and files that are not the run's stay.
    fs::write(run.join("notes.txt"), "mine").unwrap();
    fs::create_dir(run.join("checkpoints/aside-step-00000001")).unwrap();
    let args = ["train", "job.toml", "--json", "--output", "run", "--overwrite", "--set", "train.steps=4"];
    json(folder.path(), &args);
    assert_eq!(steps(&run).last(), Some(&4));
    assert!(run.join("notes.txt").exists() && !run.join("checkpoints/aside-step-00000001").exists());
}

#[test]
fn a_missing_file_stops_resume_and_the_checkpoint_stays() {
    let folder = folder(JOB);
    let run = folder.path().join("run");
    json(folder.path(), &["train", "job.toml", "--json", "--output", "run", "--set", "train.steps=10"]);
    let file = step_folder(&run, 10).join("model.safetensors");
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(&file, &elsewhere).unwrap();
    let before = steps(&run);
    let out = polyreme(folder.path(), &["resume", "run", "--set", "train.steps=20"]);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    for part in [
        "step-00000010/model.safetensors",
        "nothing is changed",
        "polyreme resume run/checkpoints/step-00000009",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert_eq!(steps(&run), before);
    // The file comes back, as after a disk that did not answer: nothing was lost.
    fs::rename(&elsewhere, &file).unwrap();
    let summary = json(folder.path(), &["resume", "run", "--json", "--set", "train.steps=20"]).pop().unwrap();
    assert_eq!(summary["steps"], 20);
}

#[test]
fn a_damaged_checkpoint_is_set_aside_until_a_newer_one_is_whole() {
    let folder = folder(JOB);
    let run = folder.path().join("run");
    let short = ["--set", "train.schedule.kind=constant"];
    let train = |name: &str, n: &str| {
        json(
            folder.path(),
            &[&["train", "job.toml", "--json", "--output", name, "--set", n], &short[..]].concat(),
        )
    };
    train("whole", "train.steps=20");
    train("run", "train.steps=12");
    let file = step_folder(&run, 12).join("moment1.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    bytes[1000] ^= 1;
    fs::write(&file, bytes).unwrap();
    // Killed before a newer one is whole: the damaged one is still there, under another name.
    let aside = run.join("checkpoints/damaged-step-00000012");
    let long = [&["resume", "run", "--set", "train.steps=100000"], &NEVER[..]].concat();
    let mut child = spawn(folder.path(), &long);
    wait_until("the damaged one is set aside", || aside.join("manifest.json").exists());
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    assert!(aside.exists() && steps(&run).last() == Some(&11));
    let out = polyreme(folder.path(), &["resume", "run", "--json", "--set", "train.steps=20"]);
    assert!(out.status.success(), "{}", said(&out));
    assert!(!aside.exists(), "a newer one is whole");
    assert_eq!(
        fs::read(run.join("model.safetensors")).unwrap(),
        fs::read(folder.path().join("whole/model.safetensors")).unwrap()
    );
}

#[test]
fn resume_of_a_step_goes_on_from_it_and_keeps_the_later_ones() {
    let folder = folder(JOB);
    let train = |name: &str| {
        let sets = ["--set", "output.keep=1000", "--set", "train.epochs=2"];
        json(folder.path(), &[&["train", "job.toml", "--json", "--output", name], &sets[..]].concat())
    };
    train("whole");
    let run = folder.path().join("run");
    train("run");
    let later = steps(&run).into_iter().filter(|step| *step > 20).collect::<Vec<_>>();
    let lines = json(folder.path(), &["resume", "run/checkpoints/step-00000020", "--json"]);
    same_outcome(&folder.path().join("whole"), &run);
    for step in &later {
        let aside = run.join(format!("checkpoints/aside-step-{step:08}"));
        assert_eq!(checkpoint::load(&aside).unwrap().manifest.step, *step);
        let note = format!("the later checkpoint of step {step} is now run/checkpoints/aside-step-{step:08}");
        let is_said =
            |line: &serde_json::Value| line["message"].as_str().is_some_and(|text| text.starts_with(&note));
        assert!(lines.iter().any(is_said), "{note} is not said");
    }
    // The best by its name; and a checkpoint that belongs to no run.
    let out = polyreme(folder.path(), &["resume", "run/best", "--json"]);
    assert!(out.status.success(), "{}", said(&out));
    let stray = folder.path().join("step-00000020");
    fs::rename(step_folder(&run, 20), &stray).unwrap();
    let out = polyreme(folder.path(), &["resume", "step-00000020"]);
    assert!(!out.status.success() && said(&out).contains("outside of a run"), "{}", said(&out));
}

/// A run that saves nothing before its end.
const NEVER: [&str; 6] =
    ["--set", "output.every_steps=1000000", "--set", "output.every_epochs=0", "--set", "output.best=none"];

#[test]
fn a_run_killed_before_its_first_checkpoint_starts_again() {
    let folder = folder(JOB);
    let run = folder.path().join("run");
    json(folder.path(), &[&["train", "job.toml", "--json", "--output", "whole"], &NEVER[..]].concat());
    let mut child = spawn(
        folder.path(),
        &[&["train", "job.toml", "--output", "run", "--set", "train.epochs=100000"], &NEVER[..]].concat(),
    );
    wait_until("metrics are written", || {
        fs::metadata(run.join("metrics.jsonl")).is_ok_and(|m| m.len() > 100)
    });
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    assert!(steps(&run).is_empty());
    let out = polyreme(folder.path(), &["train", "job.toml", "--output", "run"]);
    assert!(
        !out.status.success() && said(&out).contains("`polyreme resume run` goes on with it"),
        "{}",
        said(&out)
    );
    let out = polyreme(folder.path(), &["resume", "run", "--json", "--set", "train.epochs=8"]);
    assert!(out.status.success() && said(&out).contains("starts at step 0"), "{}", said(&out));
    same_outcome(&folder.path().join("whole"), &run);
    // A folder without a run says so.
    fs::create_dir(folder.path().join("empty")).unwrap();
    let out = polyreme(folder.path(), &["resume", "empty"]);
    assert!(!out.status.success() && said(&out).contains("empty"), "{}", said(&out));
}

#[test]
fn runs_of_one_job_started_together_all_get_a_folder() {
    let folder = folder(JOB);
    let start = |more: &[&str]| {
        let args = [&["train", "job.toml", "--json", "--set", "train.epochs=1"], more].concat();
        command(folder.path(), &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..5).map(|_| start(&[])).collect();
    for child in children {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
    }
    let mut names: Vec<_> =
        fs::read_dir(folder.path().join("runs")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["job", "job-2", "job-3", "job-4", "job-5"]);
    // Into one folder that was named: one run, and clear words to the others.
    let children: Vec<_> = (0..3).map(|_| start(&["--output", "one"])).collect();
    let outs: Vec<Output> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert_eq!(outs.iter().filter(|out| out.status.success()).count(), 1);
    for out in outs.iter().filter(|out| !out.status.success()) {
        let text = said(out);
        assert!(text.contains("trains into this folder") || text.contains("holds a run already"), "{text}");
    }
    assert_eq!(steps(&folder.path().join("one")).last(), Some(&15));
    // A run that cannot start leaves no folder behind: rank 1 finds nothing to share out.
    let args = [
        "train",
        "job.toml",
        "--ranks",
        "2",
        "--set",
        "model.weights=absent.safetensors",
        "--output",
        "none/at/all",
    ];
    assert!(!polyreme(folder.path(), &args).status.success());
    assert!(!folder.path().join("none").exists());
}

/// Starts what `script` makes, kills it as soon as its run has begun, and starts it again: the run ends as it should.
#[track_caller]
fn goes_on_after_a_kill(script: impl Fn() -> Command, run: &Path) {
    let mut child = script().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the run has begun", || run.join("job.toml").exists());
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    let out = script().output().unwrap();
    assert!(out.status.success(), "{}", said(&out));
    assert!(run.join("model.safetensors").exists());
}

/// A folder with a job that writes no checkpoint before its end, and a `PATH` on which these tools come first: this `polyreme`,
/// and whatever else starts it.
fn with_tools(tools: &[(&str, &str)]) -> (TempDir, String) {
    let folder = folder(&JOB.replace("every_steps = 1", "every_epochs = 0\nevery_steps = 1000000"));
    let bin = folder.path().join("tools");
    fs::create_dir(&bin).unwrap();
    let polyreme = format!("exec {} \"$@\"", env!("CARGO_BIN_EXE_polyreme"));
    for (name, text) in tools.iter().chain([&("polyreme", polyreme.as_str())]) {
        let path = bin.join(name);
        fs::write(&path, format!("#!/bin/bash\n{text}\n")).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    (folder, path)
}

/// The script as Slurm runs it, with `srun` and `scontrol` that do what they would do for one task.
#[test]
fn the_slurm_script_goes_on_with_a_run_that_was_killed_at_once() {
    let srun = ("srun", "shift; unset MASTER_ADDR MASTER_PORT; exec \"$@\"");
    let (folder, path) = with_tools(&[srun, ("scontrol", "echo localhost")]);
    let script = || {
        let mut script = Command::new("bash");
        script.arg(root().join("deploy/slurm/train.sbatch")).arg("job.toml").current_dir(folder.path());
        script.env("PATH", &path).env("SLURM_JOB_NODELIST", "localhost").env("SLURM_JOB_ID", "7");
        script
    };
    goes_on_after_a_kill(script, &folder.path().join("runs/job"));
}

/// The containers' commands as Kubernetes runs them, on one rank: a restart must not end as the start did.
#[test]
fn the_kubernetes_jobs_go_on_with_a_run_that_was_killed_at_once() {
    // `mpirun -n 8 --bind-to none polyreme … --transport mpi`, for one process.
    let mpirun = ("mpirun", "shift 4; exec \"${@:1:$#-2}\"");
    for (file, container) in [("pytorchjob.yaml", "pytorch"), ("mpijob.yaml", "launcher")] {
        let (folder, path) = with_tools(&[mpirun]);
        let commands = commands_of(&format!("deploy/kubernetes/{file}"), container);
        assert!(!commands.is_empty(), "{file}");
        for (i, words) in commands.iter().enumerate() {
            let [shell, flag, script] = &words[..] else { panic!("{file}: {words:?}") };
            let data = folder.path().join(format!("data{i}"));
            fs::create_dir(&data).unwrap();
            fs::copy(folder.path().join("job.toml"), data.join("job.toml")).unwrap();
            let script = script.replace("/data/", &format!("{}/", data.display()));
            let start = || {
                let mut start = Command::new(shell);
                start.args([flag, &script]).current_dir(folder.path()).env("PATH", &path);
                start
            };
            goes_on_after_a_kill(start, &data.join("runs/job"));
        }
    }
}
