//! `polyreme train` and `polyreme resume`.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use polyreme_net::Doing;
use polyreme_train::TrainError;
use polyreme_train::checkpoint::Loaded;
use polyreme_train::event::Ending;
use polyreme_train::job::Job;
use polyreme_train::run::{FoundRun, Given, Hold, Prepared, likely_folder, run_ranks_at};
use polyreme_train::sets::open_spread;

use super::elastic::{self, ElasticArgs, ElasticTrain};
use super::metrics::MetricsArgs;
use super::plan::said;
use super::planned::{PlannedJob, planned, planned_together, with_plan};
use super::ranks::{RankArgs, asked_by_job, note_apart, or_tell, part, show, voice_waits};
use super::terminal::{Screen, catch_interrupts, outline_text};
use super::{CommandResult, Failure, print_json};
use crate::app::App;
use crate::cluster::cores::Machine;
use crate::cluster::enter::Ranks;
use crate::cluster::launch::LaunchOptions;
use crate::cluster::{Decided, LAUNCHED, Setup};
use crate::metrics::watched::Watched;
use crate::{memory, output, process};

/// Examples for `train --help`.
const EXAMPLES: &str = "\
Examples:
  Everything that this machine has:
    polyreme train job.toml
  Another batch, another folder, four ranks of two threads:
    polyreme train job.toml --set train.batch=128 --output runs/wide --ranks 4 --threads 2
  Four processes of this host, over shared memory:
    polyreme train job.toml --processes 4
  Started by an external launcher, one rank per process:
    mpirun -n 8 polyreme train job.toml
    srun --ntasks 8 polyreme train job.toml
  Several hosts over ssh:
    polyreme launch --hosts a,b,c:4 job.toml
  Four processes, of which any may be lost, and others may join:
    polyreme train job.toml --elastic --processes 4 --listen 10.0.0.1:7777
    polyreme join 10.0.0.1:7777 job.toml

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
    /// Check everything and show what would run; write nothing.
    #[arg(long)]
    check: bool,
    /// The run's folder [default: `output.path` of the job, or runs/NAME].
    #[arg(long, short, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Replace the run that the folder holds; refused while that run is being trained.
    #[arg(long)]
    overwrite: bool,
    /// Print JSON lines; the last one is the summary, or the error.
    #[arg(long)]
    json: bool,
    /// Write a timeline of every rank: passes of microbatches, exchanges, waiting. chrome://tracing and Perfetto show it, and
    /// `inspect FILE --timeline STEP.svg` draws a step.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    elastic: ElasticArgs,
}

#[derive(Args)]
pub(super) struct ResumeArgs {
    /// The run's folder, or one of its checkpoints: RUN/checkpoints/step-N, or RUN/best. Later checkpoints are then
    /// renamed and kept; nothing is deleted. A run without a checkpoint starts at step 0.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Change a setting, such as `train.epochs=20` to train for longer.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Resume although the data have changed since the run began.
    #[arg(long)]
    changed_data: bool,
    /// Print JSON lines; the last one is the summary, or the error.
    #[arg(long)]
    json: bool,
    /// Write a timeline of every rank: passes of microbatches, exchanges, waiting. chrome://tracing and Perfetto show it, and
    /// `inspect FILE --timeline STEP.svg` draws a step.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsArgs,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    elastic: ElasticArgs,
}

pub(super) fn train(app: &App, args: &TrainArgs) -> CommandResult {
    let mut job = read_job(app, args.job.as_deref(), &args.sets)?;
    if let Some(folder) = &args.output {
        job.output.path = Some(folder.clone());
    }
    args.metrics.check()?;
    job.parallel.threads = args.ranks.threads().or(job.parallel.threads);
    let elastic = args.elastic.apply(&mut job)?;
    if elastic && !args.check {
        if args.trace.is_some() {
            return Err(Failure::usage("--trace follows one group of ranks; leave it out, or --elastic"));
        }
        let (overwrite, json, metrics) = (args.overwrite, args.json, &args.metrics);
        let (args, ranks) = (&args.elastic, &args.ranks);
        let asked =
            ElasticTrain { args, ranks, metrics, overwrite, json, resumes: None, changed_data: false };
        return elastic::train(app, job, &asked);
    }
    // Only a search asks which keys were said; a job file may be a pipe, which is read once.
    let keys = match job.parallel.open.any() {
        true => said(&job, args.job.as_deref(), &args.sets)?,
        false => BTreeSet::new(),
    };
    let machine = Machine::read();
    let decided = args.ranks.decide(asked_by_job(&job.parallel), &machine)?;
    let planned = planned(app, job, &keys, &decided, machine.cores(), args.check)?;
    if args.check {
        return check(app, planned.job, args);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let Some((mut ranks, prepared)) = prepare(app, planned, &keys, &args.ranks, &stop)? else {
        return Ok(());
    };
    let mut hold = None;
    let mut choose = || {
        let hold = hold.insert(Hold::new(&prepared.job, args.overwrite)?);
        Ok::<_, Failure>(hold.folder().to_path_buf())
    };
    let folder = or_tell(&mut ranks, |ranks| ranks.agree_on(&mut choose))?;
    let (trace, slowness) = (args.trace.clone(), args.elastic.slowness());
    let prepared = Prepared { trace, slowness, ..prepared };
    start(prepared, &folder, hold, None, ranks, (args.json, &args.metrics), stop)
}

impl TrainArgs {
    /// Whether the run is asked to be elastic.
    pub(super) fn is_elastic(&self) -> bool {
        self.elastic.is_asked()
    }
}

impl ResumeArgs {
    /// Whether the run is asked to be elastic.
    pub(super) fn is_elastic(&self) -> bool {
        self.elastic.is_asked()
    }
}

/// What `launch --elastic` does here: ranks at the far ends of ssh take these arguments too.
pub(super) fn launch_elastic(app: &App, args: &TrainArgs, options: LaunchOptions) -> CommandResult {
    // The coordinator needs the job as well, at the same path.
    let file = args.job.as_ref().map(|file| options.dir.join(file));
    let mut job = read_job(app, file.as_deref(), &args.sets)?;
    args.metrics.check()?;
    args.elastic.apply(&mut job)?;
    if args.trace.is_some() {
        return Err(Failure::usage("--trace follows one group of ranks; leave it out, or --elastic"));
    }
    let (overwrite, json, metrics, ranks) = (args.overwrite, args.json, &args.metrics, &args.ranks);
    let args = &args.elastic;
    let asked = ElasticTrain { args, ranks, metrics, overwrite, json, resumes: None, changed_data: false };
    elastic::launch(&job, &asked, options)
}

/// The ranks of this process and the job, ready to run; `None` if this process was the launcher.
fn prepare(
    app: &App,
    planned: PlannedJob,
    keys: &BTreeSet<String>,
    args: &RankArgs,
    stop: &Arc<AtomicBool>,
) -> Result<Option<(Ranks, Prepared)>, Failure> {
    let PlannedJob { job, step } = planned;
    let (machine, name) = (Machine::read(), job.name.clone());
    let decided = args.decide(asked_by_job(&job.parallel), &machine)?;
    if decided.open {
        let prepared = Prepared::new(job, app.given(), machine.cores())?;
        let setup = Setup::Threads { ranks: prepared.ranks(), threads: prepared.threads };
        fit(&prepared, &setup).map_err(|failure| with_plan(app, &prepared.job, failure))?;
        let ranks = args.enter_as(Decided { setup, ..decided }, machine, &name, stop.clone())?;
        return Ok(ranks.map(|ranks| (ranks, Prepared { planned: step, ..prepared })));
    }
    let (setup, cores) = (decided.setup.clone(), machine.cores());
    let Some(mut ranks) = args.enter_as(decided, machine, &name, stop.clone())? else { return Ok(None) };
    ranks.comms.iter_mut().for_each(|comm| comm.set_doing(Doing::Preparing));
    let prepared = or_tell(&mut ranks, |ranks| {
        let together = planned_together(app, job, keys, &setup, cores, ranks)?;
        let prepared = for_entered(app, together.job, ranks)?;
        fit(&prepared, &setup)?;
        Ok(Prepared { planned: step.or(together.step), ..prepared })
    })?;
    Ok(Some((ranks, prepared)))
}

/// Refuses a job that does not fit into memory. One process per host checks.
pub(super) fn fit(prepared: &Prepared, setup: &Setup) -> CommandResult {
    if matches!(setup, Setup::Process(place) if place.local_rank > 0) {
        return Ok(());
    }
    match prepared.fit(setup.lodging(), &memory::limits()) {
        Ok(need) => {
            if let Some(warning) = memory::warning(&need) {
                output::say(&format!("warning: {warning}"));
            }
            Ok(())
        }
        Err(TrainError::TooLarge(too_large)) => Err(Failure::usage(too_large)),
        Err(error) => Err(error.into()),
    }
}

/// A job for the ranks that have met. They open its data together if each has files of its own.
fn for_entered(app: &App, job: Job, ranks: &mut Ranks) -> Result<Prepared, Failure> {
    let (size, threads, first) = (ranks.size(), ranks.threads, ranks.first());
    let mut given = app.given();
    // Ranks that are threads of this process have all files.
    if let ([comm], true) = (&mut ranks.comms[..], job.data.spread) {
        given.sets = Some(open_spread(&job, comm, &given.reading())?);
    }
    for_given(job, given, size, threads, first)
}

/// A job for this many ranks and threads, whatever it says itself; its own settings are kept in it.
pub(super) fn for_ranks(
    app: &App,
    job: Job,
    ranks: usize,
    threads: usize,
    first: usize,
) -> Result<Prepared, Failure> {
    for_given(job, app.given(), ranks, threads, first)
}

fn for_given(
    mut job: Job,
    given: Given,
    ranks: usize,
    threads: usize,
    first: usize,
) -> Result<Prepared, Failure> {
    let said = job.parallel.ranks.replace(ranks);
    let mut prepared = Prepared::of_rank(job, given, ranks * threads, first)?;
    prepared.job.parallel.ranks = said;
    Ok(prepared)
}

/// Shows what would run, and writes nothing.
fn check(app: &App, job: Job, args: &TrainArgs) -> CommandResult {
    let machine = Machine::read();
    let decided = args.ranks.decide(asked_by_job(&job.parallel), &machine)?;
    let mut setup = decided.setup;
    let mut prepared = match &setup {
        _ if decided.open => Prepared::new(job, app.given(), machine.cores())?,
        Setup::Threads { ranks, threads } => for_ranks(app, job, *ranks, *threads, 0)?,
        Setup::Spawn { processes, threads, .. } => for_ranks(app, job, *processes, *threads, 0)?,
        Setup::Process(place) => for_ranks(app, job, place.size, place.threads, place.rank)?,
    };
    if decided.open {
        setup = Setup::Threads { ranks: prepared.ranks(), threads: prepared.threads };
    }
    prepared.process_bytes = process::bytes_before_training();
    let outline = prepared.outline(&likely_folder(&prepared.job), 0)?;
    match args.json {
        true => print_json(&outline)?,
        false => write!(io::stdout(), "{}", outline_text(&outline, output::out().width()))?,
    }
    fit(&prepared, &setup)
}

pub(super) fn resume(app: &App, args: &ResumeArgs) -> CommandResult {
    args.metrics.check()?;
    // Only rank 0 reads the run, which may be on its host only.
    // The ranks of an elastic run have no numbers yet; its launcher and their children all read it.
    let reads = args.elastic.is_asked() || args.ranks.speaks()?;
    let found = reads.then(|| FoundRun::at(&args.run)).transpose()?;
    let mut job = match &found {
        Some(found) => stored_job(&found.job, &found.folder, &args.sets)?,
        None => Job::new("resume"),
    };
    job.parallel.threads = args.ranks.threads().or(job.parallel.threads);
    if args.elastic.is_asked() {
        return resume_elastic(app, args, job, found);
    }
    // Without the flag it goes on with as many ranks as are started, whatever it began with.
    job.parallel.elastic = None;
    args.elastic.apply(&mut job)?;
    let stop = Arc::new(AtomicBool::new(false));
    let machine = Machine::read();
    let decided = args.ranks.decide(asked_by_job(&job.parallel), &machine)?;
    let (mut ranks, prepared) = if decided.open {
        let stored = PlannedJob { job, step: None };
        let Some(entered) = prepare(app, stored, &BTreeSet::new(), &args.ranks, &stop)? else {
            return Ok(());
        };
        entered
    } else {
        let setup = decided.setup.clone();
        let entered = args.ranks.enter_as(decided, machine, "resume", stop.clone())?;
        let Some(mut ranks) = entered else { return Ok(()) };
        let hear = |ranks: &mut Ranks| {
            let text = ranks.tell(job.to_toml().into_bytes())?;
            let text = String::from_utf8_lossy(&text);
            ranks.comms.iter_mut().for_each(|comm| comm.set_doing(Doing::Preparing));
            let job =
                Job::from_text(&text, "job.toml of rank 0", Path::new("."), &[]).map_err(Failure::job)?;
            let prepared = for_entered(app, job, ranks)?;
            fit(&prepared, &setup)?;
            Ok(prepared)
        };
        let prepared = or_tell(&mut ranks, hear)?;
        (ranks, prepared)
    };
    let (trace, slowness) = (args.trace.clone(), args.elastic.slowness());
    let prepared = Prepared { trace, slowness, changed_data: args.changed_data, ..prepared };
    let shown = (args.json, &args.metrics);
    // A launcher has returned by now: the lock is taken by the process that trains.
    let Some(found) = found else {
        return start(prepared, &args.run, None, None, ranks, shown, stop);
    };
    let warn = &mut |note: &str| output::say(&format!("warning: {note}"));
    let (hold, loaded) = or_tell(&mut ranks, |_| Ok(found.hold(warn)?))?;
    start(prepared, &found.folder, Some(hold), loaded.as_ref(), ranks, shown, stop)
}

/// `resume --elastic`: its ranks find the folder noted, as those of a generation do that has lost the state.
fn resume_elastic(app: &App, args: &ResumeArgs, mut job: Job, found: Option<FoundRun>) -> CommandResult {
    args.elastic.apply(&mut job)?;
    if args.trace.is_some() {
        return Err(Failure::usage("--trace follows one group of ranks; leave it out, or --elastic"));
    }
    let Some(found) = found.filter(|found| found.folder == args.run) else {
        return Err(Failure::usage(
            "`resume --elastic` goes on from the last checkpoint of a run; give the run's folder",
        ));
    };
    let (resumes, changed_data, json) = (Some(found.folder), args.changed_data, args.json);
    let (args, ranks, metrics, overwrite) = (&args.elastic, &args.ranks, &args.metrics, false);
    elastic::train(app, job, &ElasticTrain { args, ranks, metrics, overwrite, json, resumes, changed_data })
}

/// The job that a run has stored, with changes.
fn stored_job(text: &str, folder: &Path, sets: &[String]) -> Result<Job, Failure> {
    let origin = folder.join("job.toml");
    let mut job =
        Job::from_text(text, &origin.display().to_string(), Path::new("."), sets).map_err(Failure::job)?;
    job.output.path = Some(folder.to_path_buf());
    Ok(job)
}

/// The job from a file, or the program's own.
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

fn start(
    mut prepared: Prepared,
    folder: &Path,
    hold: Option<Hold>,
    resumed: Option<&Loaded>,
    mut ranks: Ranks,
    (json, metrics): (bool, &MetricsArgs),
    stop: Arc<AtomicBool>,
) -> CommandResult {
    prepared.system = process::facts();
    prepared.process_bytes = process::bytes_before_training();
    prepared.hosts = ranks.rows.iter().map(|row| row.host.clone()).collect();
    prepared.peak_bytes = Some(process::peak_resident_bytes);
    let ranks_slowed = &prepared.slowness.ranks;
    if let Some((rank, _)) = ranks_slowed.iter().find(|(rank, _)| *rank >= ranks.size()) {
        let why = format!("--chaos slow_rank={rank}: there are {} ranks, counted from 0", ranks.size());
        return Err(Failure::usage(why));
    }
    catch_interrupts(&stop, std::env::var_os(LAUNCHED).is_some())?;
    show(&ranks, json);
    note_apart(&ranks, prepared.mesh());
    let page = or_tell(&mut ranks, |ranks| metrics.open(ranks.speaks(), json))?;
    let mut screen = Screen::new(json, stop);
    voice_waits(&mut ranks);
    let Ranks { comms, seats, control, .. } = ranks;
    let mut watched = Watched { inner: &mut screen, page: page.as_ref() };
    let trained = run_ranks_at(prepared, folder, hold, resumed, comms, &mut watched, &|rank| seats.pin(rank));
    let mut ending = Ending::Finished;
    let parted = part(control, trained.map(|summary| ending = summary.ending).map_err(Failure::from));
    screen.close();
    parted?;
    match ending {
        Ending::Interrupted => Err(Failure::interrupted()),
        Ending::Finished | Ending::EarlyStop => Ok(()),
    }
}
