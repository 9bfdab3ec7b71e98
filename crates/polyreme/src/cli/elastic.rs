//! `polyreme train --elastic`, `polyreme join` and `polyreme status`: ranks that come and go.
//!
//! The process that the user starts launches and coordinates (`cluster::elastic`); its children, and processes that join it, run
//! [`member`]: a loop over generations. A generation is an ordinary run; between two of them a member stands ready, with what it
//! has learnt.

use std::ffi::OsStr;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use polyreme_net::environment::SECRET_VARIABLE;
use polyreme_net::members::{
    Apart, EnterOptions, Membership, OfficeOptions, Ready, Rules, TallySummary, Wish, ask_status,
};
use polyreme_net::{Encrypt, Os, Secret, Tell};
use polyreme_train::event::{Ending, Event, MembershipCost, Observer};
use polyreme_train::job::{Elastic, Job};
use polyreme_train::run::elastic::{CarriedState, Generation, GenerationEnd, run_generation};
use polyreme_train::run::{Hold, Prepared};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::ranks::{RankArgs, asked_by_job, over, program, show};
use super::terminal::{Screen, catch_interrupts};
use super::train::{fit, for_ranks, read_job};
use super::{CommandResult, Failure};
use crate::app::App;
use crate::cluster::cores::Machine;
use crate::cluster::elastic::MEMBER;
use crate::cluster::elastic::chaos::ChaosSpec;
use crate::cluster::elastic::group::{GroupOptions, form_group};
use crate::cluster::elastic::launcher::{self, ElasticLaunch};
use crate::cluster::enter::{Ranks, Seats};
use crate::cluster::join::JoinedRank;
use crate::cluster::lifeline::{Lifeline, last_words};
use crate::cluster::places::{self, RankRow};
use crate::cluster::{Asked, LAUNCHED, Setup, Transport, spawn};
use crate::{output, process};

const HEADING: &str = "Ranks that come and go";

/// Flags of elastic runs.
#[derive(Args, Clone, Debug)]
pub(super) struct ElasticArgs {
    /// Let ranks be lost and join while training goes on; as `parallel.elastic` of the job, or min = 1, max = 16 (no more than
    /// `parallel.shards` of a reproducible job).
    #[arg(long, help_heading = HEADING)]
    elastic: bool,
    /// Where others can join: an address of this host and a port, such as 10.0.0.1:7777. Set POLYREME_SECRET here and for
    /// `polyreme join` [default: a free port of 127.0.0.1].
    #[arg(long, value_name = "ADDR:PORT", help_heading = HEADING)]
    listen: Option<SocketAddr>,
    /// Test an elastic run by faults from a seed: `kill=1s,stop=5s:2s,join=3s,seed=7` kills a rank every second, stops one for
    /// two seconds every five, and adds one every three.
    #[arg(long, value_name = "FAULTS", help_heading = HEADING)]
    chaos: Option<ChaosSpec>,
}

impl ElasticArgs {
    /// Whether the flag is given.
    pub(super) fn is_asked(&self) -> bool {
        self.elastic
    }

    /// Puts the flag into the job; whether it is elastic.
    pub(super) fn apply(&self, job: &mut Job) -> Result<bool, Failure> {
        if self.elastic {
            job.parallel
                .elastic
                .get_or_insert(default_of(job.parallel.reproducible.then_some(job.parallel.shards)));
        }
        if let Some((message, hint)) = job.parallel.refuses_elastic(&job.train) {
            return Err(Failure::usage(format!("{message}; {hint}")));
        }
        let elastic = job.parallel.elastic.is_some();
        if let Some(flag) = self.listen.map(|_| "--listen").or(self.chaos.as_ref().map(|_| "--chaos"))
            && !elastic
        {
            return Err(Failure::usage(format!("{flag} is for elastic runs; add --elastic")));
        }
        Ok(elastic)
    }
}

/// How many ranks there may be if nothing is said: no more than there are logical shards.
fn default_of(shards: Option<usize>) -> Elastic {
    let Elastic { min, max } = Elastic::default();
    Elastic { min, max: shards.map_or(max, |shards| max.min(shards)) }
}

/// What an elastic `train` was given beside its job.
pub(super) struct ElasticTrain<'a> {
    /// Flags.
    pub(super) args: &'a ElasticArgs,
    /// Flags about ranks.
    pub(super) ranks: &'a RankArgs,
    /// Whether a run in the folder is replaced.
    pub(super) overwrite: bool,
    /// Whether output is for programs.
    pub(super) json: bool,
    /// The run that goes on.
    pub(super) resumes: Option<PathBuf>,
    /// Whether it goes on although its data have changed.
    pub(super) changed_data: bool,
}

/// Launches and coordinates an elastic run; as one of its children, takes part in it.
pub(super) fn train(app: &App, job: Job, asked: &ElasticTrain) -> CommandResult {
    let Elastic { min, max } = job.parallel.elastic.unwrap_or_default();
    let machine = Machine::read();
    if let Some(child) = std::env::var(MEMBER).ok().and_then(|n| n.parse().ok()) {
        return child_of_launcher(app, job, asked, &machine, child);
    }
    let job_asks = Asked { transport: None, ..asked_by_job(&job.parallel) };
    let decided = asked.ranks.decide(job_asks, &machine)?;
    let processes = match &decided.setup {
        Setup::Process(_) => {
            return Err(Failure::usage(format!(
                "{}, and `--elastic` starts and watches its ranks itself; use `polyreme train --elastic --processes N`, and `polyreme join` on other hosts",
                decided.why
            )));
        }
        Setup::Spawn { transport: Transport::Shm, .. } if asked.ranks.names_transport() => {
            return Err(Failure::usage(
                "--elastic needs ranks that talk over sockets: memory that a killed rank shared cannot be trusted; use --transport tcp",
            ));
        }
        Setup::Threads { .. } if !decided.open && !asked.ranks.names_processes() => {
            return Err(Failure::usage("--elastic needs ranks that are processes; use --processes N"));
        }
        Setup::Spawn { processes, .. } => *processes,
        Setup::Threads { ranks, .. } => *ranks,
    };
    if processes > max {
        return Err(Failure::usage(format!(
            "{processes} processes are asked for, and `parallel.elastic.max` is {max}; start fewer, or raise it"
        )));
    }
    let secret = match std::env::var(SECRET_VARIABLE) {
        Ok(secret) => secret,
        Err(_) => spawn::random_secret()?,
    };
    let listen = asked.args.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
    if listen.ip().is_unspecified() {
        return Err(Failure::usage("--listen takes one address of this host, not all of them"));
    }
    let listener =
        TcpListener::bind(listen).map_err(|e| Failure::usage(format!("--listen {listen}: {e}")))?;
    let office = OfficeOptions {
        listener: listener.into(),
        secret: Secret::from_text(&secret).map_err(Failure::usage)?,
        job: job.name.clone(),
        rules: Rules { min, max, start: processes, patience: decided.patience.silence },
        note: match &asked.resumes {
            // Ranks may have other working directories.
            Some(folder) => folder.canonicalize()?.into_os_string().into_encoded_bytes(),
            None => Vec::new(),
        },
        encrypt: asked.ranks.encryption(&job),
        tell: Tell::to(|line| output::err().line(&format!("warning: {line}"))),
        system: Arc::new(Os),
    };
    if asked.args.listen.is_some() && !asked.json {
        output::err().line(&format!("others can join: polyreme join {listen} JOB.toml"));
    }
    if let Some(chaos) = &asked.args.chaos {
        output::err().line(&format!("chaos: {chaos}"));
    }
    let launch = ElasticLaunch {
        program: program()?,
        args: std::env::args_os().skip(1).collect(),
        processes,
        max,
        secret,
        chaos: asked.args.chaos.clone(),
        json: asked.json,
    };
    process::raise_open_files();
    over(launcher::run(launch, office)?, |lost| match &lost.error {
        Some(error) if lost.pid == 0 => error.clone(),
        _ => lost.to_string(),
    })
}

fn child_of_launcher(
    app: &App,
    job: Job,
    asked: &ElasticTrain,
    machine: &Machine,
    child: u64,
) -> CommandResult {
    let stop = Arc::new(AtomicBool::new(false));
    let patience = asked_by_job(&job.parallel).patience;
    let lifeline =
        Lifeline::listen(std::io::stdin(), last_words(patience), stop.clone(), || std::process::exit(1));
    let secret =
        Secret::from_text(&lifeline.secret().map_err(|e| Failure::world(&e))?).map_err(Failure::usage)?;
    let coordinator = lifeline.master().map_err(|e| Failure::world(&e))?;
    let start = asked.ranks.n_processes().or(job.parallel.ranks).unwrap_or(1);
    let threads = asked.ranks.threads().or(job.parallel.threads).unwrap_or_else(|| {
        let shares = machine.shares(start);
        shares.iter().map(|share| machine.threads(share, start)).min().unwrap_or(1)
    });
    let encrypt = asked.ranks.encryption(&job);
    let enter = EnterOptions { coordinator, secret, job: job.name.clone(), child: Some(child), encrypt };
    let checks = (child == 0).then_some(start);
    let (overwrite, changed_data, json) = (asked.overwrite, asked.changed_data, asked.json);
    let seat = MemberSeat { app, job, threads, overwrite, changed_data, json, stop, checks };
    member(seat, &enter)
}

/// `polyreme join`.
#[derive(Args)]
pub(super) struct JoinArgs {
    /// Where the run listens: the address of its `--listen`.
    #[arg(value_name = "HOST:PORT")]
    coordinator: String,
    /// The run's job file.
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Change a setting, as the run was started with.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Print JSON lines if this becomes rank 0.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankArgs,
}

pub(super) fn join(app: &App, args: &JoinArgs) -> CommandResult {
    let mut job = read_job(app, Some(&args.job), &args.sets)?;
    job.parallel.elastic.get_or_insert(default_of(job.parallel.reproducible.then_some(job.parallel.shards)));
    let secret = secret_of_environment()?;
    let machine = Machine::read();
    let threads = args.ranks.threads().or(job.parallel.threads).unwrap_or_else(|| machine.cores());
    let stop = Arc::new(AtomicBool::new(false));
    let encrypt = args.ranks.encryption(&job);
    let coordinator = args.coordinator.clone();
    let enter = EnterOptions { coordinator, secret, job: job.name.clone(), child: None, encrypt };
    let (overwrite, changed_data, json, checks) = (false, false, args.json, None);
    let seat = MemberSeat { app, job, threads, overwrite, changed_data, json, stop, checks };
    member(seat, &enter)
}

/// `polyreme status`.
#[derive(Args)]
pub(super) struct StatusArgs {
    /// Where the run listens: the address of its `--listen`.
    #[arg(value_name = "HOST:PORT")]
    coordinator: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn status(args: &StatusArgs) -> CommandResult {
    let secret = secret_of_environment()?;
    let text = ask_status(&args.coordinator, &secret, Encrypt::Auto).map_err(|e| Failure::world(&e))?;
    let mut out = std::io::stdout().lock();
    if args.json {
        return Ok(writeln!(out, "{text}")?);
    }
    let status: serde_json::Value = serde_json::from_str(&text)?;
    let number = |key: &str| status[key].as_f64().unwrap_or(0.0);
    let state = if status["trains"] == true { "trains" } else { "waits" };
    writeln!(out, "generation {}: {} ranks, {state}", number("generation"), number("ranks"))?;
    for member in status["members"].as_array().into_iter().flatten() {
        let rank = member["rank"].as_u64().map_or("-".into(), |rank| rank.to_string());
        let host = member["host"].as_str().unwrap_or_default();
        writeln!(out, "  rank {rank:>4}  {host}  process {}  step {}", member["pid"], member["step"])?;
    }
    writeln!(
        out,
        "lost {}, joined {}, steps done again {}; stalls: median {:.0} ms, p99 {:.0} ms, longest {:.0} ms",
        number("ranks_lost"),
        number("ranks_joined"),
        number("steps_redone"),
        number("stall_ms_p50"),
        number("stall_ms_p99"),
        number("stall_ms_max")
    )?;
    Ok(())
}

fn secret_of_environment() -> Result<Secret, Failure> {
    let missing = format!("{SECRET_VARIABLE} is not set; set it to the secret that the run was started with");
    let text = std::env::var(SECRET_VARIABLE).map_err(|_| Failure::usage(missing))?;
    Secret::from_text(&text).map_err(Failure::usage)
}

/// A process that may be a rank.
struct MemberSeat<'a> {
    app: &'a App,
    job: Job,
    threads: usize,
    overwrite: bool,
    changed_data: bool,
    json: bool,
    stop: Arc<AtomicBool>,
    /// Whether it checks that so many ranks fit into this host's memory.
    checks: Option<usize>,
}

/// Takes part in an elastic run until it is over.
fn member(seat: MemberSeat, enter: &EnterOptions) -> CommandResult {
    let MemberSeat { app, job, threads, overwrite, changed_data, json, stop, checks } = seat;
    process::raise_open_files();
    let asked = asked_by_job(&job.parallel);
    let leave = Arc::new(AtomicBool::new(false));
    match std::env::var_os(LAUNCHED).is_some() {
        true => {
            // The terminal interrupts all processes of the run, and a hangup is for all; but who terminates one of them means that one.
            signal_hook::flag::register(SIGTERM, leave.clone())?;
            signal_hook::flag::register(SIGINT, stop.clone())?;
            if !process::ignores(SIGHUP) {
                signal_hook::flag::register(SIGHUP, stop.clone())?;
            }
        }
        false => catch_interrupts(&leave, false)?,
    }
    let membership = Membership::enter(enter).map_err(|e| Failure::world(&e))?;
    let mut prepared = for_ranks(app, job, 1, threads, 0)?;
    if let Some(processes) = checks {
        let setup = Setup::Spawn { processes, threads, transport: Transport::Tcp };
        fit(&prepared.clone().for_ranks(processes)?, &setup)?;
    }
    prepared.system = process::facts();
    prepared.changed_data = changed_data;
    prepared.process_bytes = process::bytes_before_training();
    let options = GroupOptions {
        secret: enter.secret.clone(),
        job: enter.job.clone(),
        local: membership.local(),
        patience: asked.patience,
        encrypt: enter.encrypt,
    };
    let mut screen = Screen::new(json, stop.clone());
    let mut kept = Kept::default();
    loop {
        let listener = TcpListener::bind((membership.local(), 0))?;
        let ready = Ready {
            generation: 0,
            held: kept.carried.as_ref().map(|carried| carried.held()),
            redoes: std::mem::take(&mut kept.redoes),
            listen: listener.local_addr()?.to_string(),
            why: std::mem::take(&mut kept.why),
        };
        let wish = || match (stop.load(Ordering::Relaxed), leave.load(Ordering::Relaxed)) {
            (true, _) => Wish::Stop,
            (false, true) => Wish::Leave,
            (false, false) => Wish::Nothing,
        };
        let form = match membership.ready(ready, &wish).map_err(|e| Failure::world(&e))? {
            Apart::Form(form) => form,
            Apart::End { why: None } if stop.load(Ordering::Relaxed) => return Err(Failure::interrupted()),
            Apart::End { why: None } => return Ok(()),
            Apart::End { why: Some(why) } => return Err(Failure::coded(1, why)),
        };
        let joined = form_group(&form, listener, &options, &|| membership.is_cancelled());
        let JoinedRank { comm, control, transport } = match joined {
            Ok(joined) => joined,
            Err(why) => {
                kept.why = why;
                continue;
            }
        };
        if let Some(control) = &control {
            membership.watch(control.alarm(), form.rank);
        }
        let group = FormedGroup { form: &form, comm, transport, threads };
        let mut observer = MemberObserver {
            screen: &mut screen,
            membership: &membership,
            leave: &leave,
            speaks: form.rank == 0,
        };
        let outcome = generation(group, &prepared, &mut kept, &mut observer, overwrite, json);
        membership.unwatch();
        match outcome? {
            Next::Over(ending) => {
                if let Some(control) = control {
                    // Whoever is lost now has nothing left to do.
                    drop(control.goodbye());
                }
                membership.done(form.generation);
                screen.close();
                return match ending {
                    Ending::Interrupted => Err(Failure::interrupted()),
                    Ending::Finished | Ending::EarlyStop => Ok(()),
                };
            }
            Next::Generation { agreed: true } => {
                if let Some(control) = control {
                    // A rank that is lost now is no rank of the next generation.
                    drop(control.goodbye());
                }
            }
            Next::Generation { agreed: false } => drop(control),
        }
    }
}

/// What a member keeps between generations.
#[derive(Default)]
struct Kept {
    carried: Option<Box<CarriedState>>,
    /// The new run's folder, until it was begun.
    hold: Option<Hold>,
    folder: Option<PathBuf>,
    redoes: bool,
    why: String,
}

/// A group that was formed.
struct FormedGroup<'a> {
    form: &'a polyreme_net::members::Formation,
    comm: polyreme_collective::Comm,
    transport: Transport,
    threads: usize,
}

/// What a member does after a generation.
enum Next {
    Over(Ending),
    /// `agreed`: all ranks ended it together.
    Generation {
        agreed: bool,
    },
}

/// One generation on this member.
fn generation(
    group: FormedGroup,
    prepared: &Prepared,
    kept: &mut Kept,
    observer: &mut MemberObserver,
    overwrite: bool,
    json: bool,
) -> Result<Next, Failure> {
    let FormedGroup { form, mut comm, transport, threads } = group;
    let row = RankRow::here(form.rank, threads, None, transport.name());
    let lost = |kept: &mut Kept, report: polyreme_net::Report| {
        kept.why = report.to_string();
        Ok(Next::Generation { agreed: false })
    };
    let rows = match places::gather(&mut comm, &row) {
        Ok(rows) => rows,
        Err(report) => return lost(kept, report),
    };
    let mut ranks =
        Ranks { comms: vec![comm], seats: Seats::anywhere(form.rank), threads, rows, control: None };
    if form.generation == 1 {
        show(&ranks, json);
    }
    // Rank 0 knows the folder, from an earlier generation or because it chooses it now.
    let noted = (!form.note.is_empty()).then(|| PathBuf::from(OsStr::from_bytes(&form.note)));
    let known = kept.folder.clone().or(noted);
    let is_new = ranks.speaks() && known.as_ref().is_none_or(|folder| !folder.join("job.toml").exists());
    if is_new && kept.hold.is_none() {
        let mut job = prepared.job.clone();
        job.output.path = known.clone().or(job.output.path);
        let hold = Hold::new(&job, overwrite);
        let hold = hold.inspect_err(|error| ranks.comms[0].fail(&error.to_string()))?;
        observer.membership.note(hold.folder().as_os_str().as_bytes().to_vec());
        kept.folder = Some(hold.folder().to_path_buf());
        kept.hold = Some(hold);
    }
    let own = kept.folder.clone().or(known).unwrap_or_default();
    let told = ranks.tell(own.into_os_string().into_encoded_bytes());
    let folder = match told {
        Ok(bytes) => PathBuf::from(OsStr::from_bytes(&bytes)),
        Err(report) => return lost(kept, report),
    };
    kept.folder = Some(folder.clone());
    let comm = ranks.comms.pop().expect("the one of this rank");
    let generation = Generation {
        number: form.generation,
        folder: &folder,
        is_new,
        held: &form.held,
        source: form.source,
        save_only: form.save_only,
        why: &form.why,
    };
    let hold = kept.hold.take();
    let ended = run_generation(prepared.clone(), comm, hold, kept.carried.take(), &generation, observer)?;
    Ok(match ended {
        GenerationEnd::Finished(summary) => Next::Over(summary.ending),
        GenerationEnd::Changed(carried) => {
            kept.carried = Some(carried);
            Next::Generation { agreed: true }
        }
        GenerationEnd::Lost { report, carried, redoes } => {
            (kept.carried, kept.redoes, kept.why) = (carried, redoes, report.to_string());
            Next::Generation { agreed: false }
        }
    })
}

/// Shows a run if this is rank 0, and tells the coordinator how it gets on.
struct MemberObserver<'a> {
    screen: &'a mut Screen,
    membership: &'a Membership,
    /// Whether this rank is to leave while the others go on.
    leave: &'a AtomicBool,
    speaks: bool,
}

impl Observer for MemberObserver<'_> {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Step(done) => {
                self.membership.at(done.step);
                if self.leave.load(Ordering::Relaxed) {
                    self.membership.leave();
                }
            }
            Event::Membership { generation, step, .. } => {
                self.membership.at(step);
                self.membership.running(generation);
            }
            Event::Started(_)
            | Event::Evaluated { .. }
            | Event::Saving { .. }
            | Event::Balanced { .. }
            | Event::Followed { .. }
            | Event::Warning(_)
            | Event::Finished(_) => {}
        }
        if self.speaks {
            self.screen.event(event);
        }
    }

    fn stop_requested(&self) -> bool {
        // A run without its coordinator saves and ends.
        self.screen.stop_requested() || self.membership.is_orphan()
    }

    fn change_requested(&self) -> bool {
        self.membership.leaves_at_step_end()
    }

    fn membership(&self) -> Option<MembershipCost> {
        let TallySummary { ranks_lost, ranks_joined, steps_redone, .. } = self.membership.tally();
        let TallySummary { stall_us_p50, stall_us_p99, stall_us_max, parts_us_p50, .. } =
            self.membership.tally();
        let ms = |us: u64| us as f64 / 1e3;
        Some(MembershipCost {
            ranks_lost,
            ranks_joined,
            steps_redone,
            stall_ms_p50: ms(stall_us_p50),
            stall_ms_p99: ms(stall_us_p99),
            stall_ms_max: ms(stall_us_max),
            stall_parts_ms_p50: parts_us_p50.map(ms),
        })
    }
}
