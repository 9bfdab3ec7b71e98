//! `polyreme train` and `polyreme resume`.

use std::path::{Path, PathBuf};

use clap::Args;
use polyreme_train::checkpoint::{self, Loaded};
use polyreme_train::event::Ending;
use polyreme_train::job::Job;
use polyreme_train::run::{Prepared, Run, choose_folder};

use super::terminal::{Screen, outline_text};
use super::{Failure, Outcome, print_json};
use crate::app::App;
use crate::process;

#[derive(Args)]
pub(super) struct TrainArgs {
    /// The job file.
    #[arg(value_name = "JOB.toml")]
    job: Option<PathBuf>,
    /// Change a setting: `--set train.batch=128`; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Check everything and say what would run; write nothing.
    #[arg(long)]
    check: bool,
    /// The run's folder [default: `output.path` of the job, or runs/NAME].
    #[arg(long, short, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Replace the run that the folder holds.
    #[arg(long)]
    overwrite: bool,
    /// Print JSON lines; the last one is the summary.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct ResumeArgs {
    /// The run's folder, or one of its checkpoints.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Change a setting, such as `train.epochs=20` to train for longer.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Print JSON lines; the last one is the summary.
    #[arg(long)]
    json: bool,
}

pub(super) fn train(app: &App, args: &TrainArgs) -> Outcome {
    let mut job = read_job(app, args.job.as_deref(), &args.sets)?;
    if let Some(folder) = &args.output {
        job.output.path = Some(folder.clone());
    }
    let prepared = Prepared::new(job, app.given(), process::cores())?;
    let folder = choose_folder(&prepared.job, args.overwrite || args.check)?;
    if args.check {
        let outline = prepared.outline(&folder, 0)?;
        return match args.json {
            true => print_json(&outline),
            false => {
                print!("{}", outline_text(&outline));
                Ok(())
            }
        };
    }
    if args.overwrite {
        remove_run(&folder)?;
    }
    start(prepared, &folder, None, args.json)
}

pub(super) fn resume(app: &App, args: &ResumeArgs) -> Outcome {
    let (folder, loaded) = last_whole(&args.run)?;
    let job = stored_job(&loaded, &folder, &args.sets)?;
    let prepared = Prepared::new(job, app.given(), process::cores())?;
    start(prepared, &folder, Some(&loaded), args.json)
}

/// The job that a checkpoint belongs to, with changes.
pub(super) fn stored_job(loaded: &Loaded, folder: &Path, sets: &[String]) -> Result<Job, Failure> {
    let origin = folder.join("job.toml");
    let mut job = Job::from_text(&loaded.manifest.job, &origin.display().to_string(), Path::new("."), sets)
        .map_err(Failure::job)?;
    job.output.path = Some(folder.to_path_buf());
    Ok(job)
}

/// The job of a file, or the program's own.
pub(super) fn read_job(app: &App, file: Option<&Path>, sets: &[String]) -> Result<Job, Failure> {
    match (file, app.job()) {
        (Some(file), _) => Job::from_file(file, sets).map_err(Failure::job),
        (None, Some(job)) => {
            let origin = format!("{}.toml", job.name);
            Job::from_text(&job.to_toml(), &origin, Path::new("."), sets).map_err(Failure::job)
        }
        (None, None) => Err(Failure::usage(
            "a job file is needed: `polyreme train JOB.toml`; examples/digits.toml is one to start from",
        )),
    }
}

/// The newest whole checkpoint of a run, and the run's folder. Damaged ones are named and passed over.
fn last_whole(path: &Path) -> Result<(PathBuf, Loaded), Failure> {
    let (loaded, skipped) = checkpoint::latest_whole(path)?;
    for skipped in skipped {
        eprintln!("warning: {} is passed over: {}", skipped.path.display(), skipped.why);
    }
    let folder = loaded.path.parent().and_then(Path::parent).unwrap_or(path).to_path_buf();
    Ok((folder, loaded))
}

fn start(mut prepared: Prepared, folder: &Path, resumed: Option<&Loaded>, json: bool) -> Outcome {
    prepared.system = process::facts();
    let mut screen = Screen::new(json)?;
    let run = Run::new(prepared, folder, resumed)?;
    let summary = run.train(&mut screen).inspect_err(|_| screen.clear())?;
    match summary.ending {
        Ending::Interrupted => Err(Failure::interrupted()),
        Ending::Finished | Ending::EarlyStop => Ok(()),
    }
}

/// Takes away what a run left in its folder, and nothing else.
fn remove_run(folder: &Path) -> Outcome {
    let gone = |result: std::io::Result<()>| match result {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    };
    gone(std::fs::remove_dir_all(folder.join("checkpoints")))?;
    for file in ["job.toml", "metrics.jsonl", "report.html", "model.safetensors"] {
        gone(std::fs::remove_file(folder.join(file)))?;
    }
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("events.out.tfevents.") {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
