//! `polyreme train` and `polyreme resume`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use polyreme_train::TrainError;
use polyreme_train::checkpoint::{self, Loaded};
use polyreme_train::event::Ending;
use polyreme_train::job::Job;
use polyreme_train::run::{Prepared, choose_folder, run_ranks_at};

use super::ranks::{RankArgs, asked_by_job, part, show};
use super::terminal::{Screen, catch_interrupts, outline_text};
use super::{Failure, Outcome, print_json};
use crate::app::App;
use crate::cluster::cores::Machine;
use crate::cluster::enter::Ranks;
use crate::cluster::{Decided, Setup};
use crate::{memory, process};

/// What people learn from `train --help`.
const EXAMPLES: &str = "\
Examples:
  Everything that this machine has:
    polyreme train job.toml
  Another batch, another folder, four ranks of two threads:
    polyreme train job.toml --set train.batch=128 --output runs/wide --ranks 4 --threads 2
  Four processes of this host, over shared memory:
    polyreme train job.toml --processes 4
  Started by somebody else, a rank for each process:
    mpirun -n 8 polyreme train job.toml
    srun --ntasks 8 polyreme train job.toml
  Several hosts over ssh:
    polyreme launch --hosts a,b,c:4 job.toml

`train.batch` is that of all ranks together: the same job means the same training on any number of them.";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
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
    /// Write a timeline of every rank: computing, exchanging, waiting. chrome://tracing and Perfetto show it.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    ranks: RankArgs,
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
    /// Write a timeline of every rank: computing, exchanging, waiting. chrome://tracing and Perfetto show it.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    ranks: RankArgs,
}

pub(super) fn train(app: &App, args: &TrainArgs) -> Outcome {
    let mut job = read_job(app, args.job.as_deref(), &args.sets)?;
    if let Some(folder) = &args.output {
        job.output.path = Some(folder.clone());
    }
    job.parallel.threads = args.ranks.threads().or(job.parallel.threads);
    if args.check {
        return check(app, job, args);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let Some((mut ranks, prepared)) = prepare(app, job, &args.ranks, &stop)? else { return Ok(()) };
    let choose = |ranks: &mut Ranks| {
        let folder = ranks.agree_on(|| Ok::<_, Failure>(choose_folder(&prepared.job, args.overwrite)?))?;
        if args.overwrite && ranks.speaks() {
            remove_run(&folder)?;
        }
        Ok(folder)
    };
    let folder = or_tell(&mut ranks, choose)?;
    let prepared = Prepared { trace: args.trace.clone(), ..prepared };
    start(prepared, &folder, None, ranks, args.json, stop)
}

/// The ranks of this process and the job, ready to run; `None` if this process was the launcher.
fn prepare(
    app: &App,
    job: Job,
    args: &RankArgs,
    stop: &Arc<AtomicBool>,
) -> Result<Option<(Ranks, Prepared)>, Failure> {
    let (machine, name) = (Machine::read(), job.name.clone());
    let decided = args.decide(asked_by_job(&job.parallel), &machine)?;
    if decided.open {
        let prepared = Prepared::new(job, app.given(), machine.cores())?;
        let setup = Setup::Threads { ranks: prepared.ranks(), threads: prepared.threads };
        fit(&prepared, &setup)?;
        let ranks = args.enter_as(Decided { setup, ..decided }, machine, &name, stop.clone())?;
        return Ok(ranks.map(|ranks| (ranks, prepared)));
    }
    let setup = decided.setup.clone();
    let Some(mut ranks) = args.enter_as(decided, machine, &name, stop.clone())? else { return Ok(None) };
    let prepared = or_tell(&mut ranks, |ranks| {
        let prepared = for_ranks(app, job, ranks.size(), ranks.threads, ranks.first())?;
        fit(&prepared, &setup)?;
        Ok(prepared)
    })?;
    Ok(Some((ranks, prepared)))
}

/// Refuses a job that does not fit into memory. One process of each host looks.
fn fit(prepared: &Prepared, setup: &Setup) -> Outcome {
    if matches!(setup, Setup::Process(place) if place.local_rank > 0) {
        return Ok(());
    }
    match prepared.fit(setup.lodging(), &memory::limits()) {
        Ok(need) => {
            if let Some(warning) = memory::warning(&need) {
                eprintln!("warning: {warning}");
            }
            Ok(())
        }
        Err(TrainError::TooLarge(too_large)) => Err(Failure::usage(too_large)),
        Err(error) => Err(error.into()),
    }
}

/// A job for so many ranks of so many threads, whatever it says itself; its own words stay in it.
fn for_ranks(
    app: &App,
    mut job: Job,
    ranks: usize,
    threads: usize,
    first: usize,
) -> Result<Prepared, Failure> {
    let said = job.parallel.ranks.replace(ranks);
    let mut prepared = Prepared::of_rank(job, app.given(), ranks * threads, first)?;
    prepared.job.parallel.ranks = said;
    Ok(prepared)
}

/// Says what would run, and writes nothing.
fn check(app: &App, job: Job, args: &TrainArgs) -> Outcome {
    let machine = Machine::read();
    let decided = args.ranks.decide(asked_by_job(&job.parallel), &machine)?;
    let mut setup = decided.setup;
    let prepared = match &setup {
        _ if decided.open => Prepared::new(job, app.given(), machine.cores())?,
        Setup::Threads { ranks, threads } => for_ranks(app, job, *ranks, *threads, 0)?,
        Setup::Spawn { processes, threads, .. } => for_ranks(app, job, *processes, *threads, 0)?,
        Setup::Process(place) => for_ranks(app, job, place.size, place.threads, place.rank)?,
    };
    if decided.open {
        setup = Setup::Threads { ranks: prepared.ranks(), threads: prepared.threads };
    }
    let outline = prepared.outline(&choose_folder(&prepared.job, true)?, 0)?;
    match args.json {
        true => print_json(&outline)?,
        false => print!("{}", outline_text(&outline)),
    }
    fit(&prepared, &setup)
}

pub(super) fn resume(app: &App, args: &ResumeArgs) -> Outcome {
    // Rank 0 alone reads the run, which may lie on its host only.
    let reads = args.ranks.speaks()?;
    let found = reads.then(|| last_whole(&args.run)).transpose()?;
    let mut job = match &found {
        Some((folder, loaded)) => stored_job(loaded, folder, &args.sets)?,
        None => Job::new("resume"),
    };
    job.parallel.threads = args.ranks.threads().or(job.parallel.threads);
    let stop = Arc::new(AtomicBool::new(false));
    let machine = Machine::read();
    let decided = args.ranks.decide(asked_by_job(&job.parallel), &machine)?;
    if decided.open {
        let Some((ranks, prepared)) = prepare(app, job, &args.ranks, &stop)? else { return Ok(()) };
        let (folder, loaded) = found.expect("threads of one process have rank 0");
        let prepared = Prepared { trace: args.trace.clone(), ..prepared };
        return start(prepared, &folder, Some(&loaded), ranks, args.json, stop);
    }
    let setup = decided.setup.clone();
    let Some(mut ranks) = args.ranks.enter_as(decided, machine, "resume", stop.clone())? else {
        return Ok(());
    };
    let hear = |ranks: &mut Ranks| {
        let text = ranks.tell(job.to_toml().into_bytes())?;
        let text = String::from_utf8_lossy(&text);
        let job = Job::from_text(&text, "job.toml of rank 0", Path::new("."), &[]).map_err(Failure::job)?;
        let prepared = for_ranks(app, job, ranks.size(), ranks.threads, ranks.first())?;
        fit(&prepared, &setup)?;
        Ok(prepared)
    };
    let prepared = or_tell(&mut ranks, hear)?;
    let (folder, loaded) = found.map_or((args.run.clone(), None), |(folder, loaded)| (folder, Some(loaded)));
    let prepared = Prepared { trace: args.trace.clone(), ..prepared };
    start(prepared, &folder, loaded.as_ref(), ranks, args.json, stop)
}

/// What has to be done before a run starts. If it fails here, the other ranks are told why.
fn or_tell<T>(ranks: &mut Ranks, work: impl FnOnce(&mut Ranks) -> Result<T, Failure>) -> Result<T, Failure> {
    work(ranks).inspect_err(|failure| {
        ranks.comms.iter_mut().for_each(|comm| comm.fail(failure.message.trim_start_matches("error: ")));
    })
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

fn start(
    mut prepared: Prepared,
    folder: &Path,
    resumed: Option<&Loaded>,
    ranks: Ranks,
    json: bool,
    stop: Arc<AtomicBool>,
) -> Outcome {
    prepared.system = process::facts();
    catch_interrupts(&stop)?;
    show(&ranks, json)?;
    let mut screen = Screen::new(json, stop);
    let Ranks { comms, seats, control, .. } = ranks;
    let trained = run_ranks_at(prepared, folder, resumed, comms, &mut screen, &|rank| seats.pin(rank));
    screen.clear();
    let mut ending = Ending::Finished;
    part(control, trained.map(|summary| ending = summary.ending).map_err(Failure::from))?;
    match ending {
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
