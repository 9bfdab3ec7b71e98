//! `polyreme train --elastic`, `polyreme join` and `polyreme status`: ranks that come and go.
//!
//! The process that the user starts launches and coordinates (`cluster::elastic`), here or over ssh (`launch --elastic`); its children,
//! and processes that join it, run [`member`]. `polyreme coordinator` only coordinates: all ranks join it.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use polyreme_net::environment::SECRET_VARIABLE;
use polyreme_net::members::store::Begins;
use polyreme_net::members::{CoordinatorPlace, MemoryUse, OfficeOptions, Rules, Tenure, ask_status};
use polyreme_net::{Encrypt, Os, Secret, Tell};
use polyreme_train::job::{Elastic, Job, StoreAddress};
use polyreme_train::slowness::Slowness;

use super::member::{MemberSeat, member};
use super::metrics::{MetricsArgs, page_at, show_status};
use super::ranks::{RankArgs, asked_by_job, over, program};
use super::train::read_job;
use super::{CommandResult, Failure};
use crate::app::App;
use crate::cluster::cores::Machine;
use crate::cluster::crew::CrewEnd;
use crate::cluster::elastic::MEMBER;
use crate::cluster::elastic::chaos::ChaosSpec;
use crate::cluster::elastic::coordinator;
use crate::cluster::elastic::host_key;
use crate::cluster::elastic::launcher::{self, Children, ElasticLaunch};
use crate::cluster::elastic::network::OwnNetwork;
use crate::cluster::elastic::post;
use crate::cluster::interfaces::{choose, interfaces};
use crate::cluster::launch::{self, LaunchOptions};
use crate::cluster::lifeline::{Lifeline, last_words};
use crate::cluster::{Asked, Setup, Transport, spawn};
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
    /// `polyreme join`. With it the ranks also outlive this process: one of them takes its place [default: a free port of
    /// 127.0.0.1, and ranks that end with this process].
    #[arg(long, value_name = "ADDR:PORT", help_heading = HEADING)]
    listen: Option<SocketAddr>,
    /// Test a run by faults from a seed. `kill=1s,stop=5s:2s,cut=7s:2s,join=3s,seed=7` kills a rank of an elastic run every second,
    /// stops one for two seconds every five, cuts one off from the network for two seconds every seven, and adds one every three. A
    /// length may be a range: stop=5s:2s..20s. For cuts all ranks get a network of their own (Linux, as root or where user
    /// namespaces are allowed). `sleep=20ms,slow=80ms@0.1,slow_rank=3:4x,seed=1` is for any run: each rank sleeps 20 ms in each of
    /// its steps, 80 ms in a tenth of them, and rank 3 takes four times as long.
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
        let elastic = self.elastic || job.parallel.elastic.is_some();
        if elastic {
            as_elastic(job)?;
        }
        let kind = self.chaos.as_ref().and_then(ChaosSpec::of_elastic_runs);
        let flag = kind.map(|kind| format!("--chaos {kind}=…"));
        if let Some(flag) = self.listen.map(|_| "--listen".to_string()).or(flag)
            && !elastic
        {
            return Err(Failure::usage(format!("{flag} is for elastic runs; add --elastic")));
        }
        Ok(elastic)
    }

    /// How steps are slowed down.
    pub(super) fn slowness(&self) -> Slowness {
        self.chaos.as_ref().map_or_else(Slowness::default, |chaos| chaos.slowness.clone())
    }
}

/// A job as that of an elastic run, if it can be one. How many ranks there may be if nothing is said: no more than there are logical
/// shards.
fn as_elastic(job: &mut Job) -> Result<Elastic, Failure> {
    let shards = if job.parallel.reproducible { job.parallel.shards } else { usize::MAX };
    let usual = Elastic::default();
    let default = Elastic { max: usual.max.min(shards), ..usual };
    let elastic = job.parallel.elastic.get_or_insert(default).clone();
    match job.parallel.refuses_elastic(&job.train) {
        Some((message, hint)) => Err(Failure::usage(format!("{message}; {hint}"))),
        None => Ok(elastic),
    }
}

/// What an elastic `train` was given beside its job.
pub(super) struct ElasticTrain<'a> {
    /// Flags.
    pub(super) args: &'a ElasticArgs,
    /// Flags about ranks.
    pub(super) ranks: &'a RankArgs,
    /// Flags about figures.
    pub(super) metrics: &'a MetricsArgs,
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
    let machine = Machine::read();
    if let Some(child) = std::env::var(MEMBER).ok().and_then(|n| n.parse().ok()) {
        return child_of_launcher(app, job, asked, &machine, child);
    }
    let job_asks = Asked { transport: None, ..asked_by_job(&job.parallel) };
    let decided = asked.ranks.decide(job_asks, &machine)?;
    let processes = match &decided.setup {
        Setup::Process(_) => {
            return Err(Failure::usage(format!(
                "{}, and `--elastic` starts and watches its ranks itself; use `polyreme train --elastic --processes N`, and `polyreme join` on other hosts, or `polyreme launch --elastic`",
                decided.why
            )));
        }
        Setup::Threads { .. } if !decided.open && !asked.ranks.names_processes() => {
            return Err(Failure::usage("--elastic needs ranks that are processes; use --processes N"));
        }
        Setup::Spawn { processes, .. } => *processes,
        Setup::Threads { ranks, .. } => *ranks,
    };
    let memory = memory_use(asked.ranks, &job)?;
    if memory == MemoryUse::Always && asked.args.chaos.as_ref().is_some_and(|chaos| chaos.cut.is_some()) {
        return Err(Failure::usage(
            "`--chaos cut` cuts links between ranks, and ranks that share memory need none; use --transport tcp",
        ));
    }
    let network = match asked.args.chaos.as_ref().and_then(|chaos| chaos.cut) {
        Some(_) if asked.args.listen.is_some() => {
            return Err(Failure::usage(
                "`--chaos cut` puts the run into a network of its own, where nobody else can join it; leave out --listen",
            ));
        }
        Some(_) => Some(OwnNetwork::enter()?),
        None => None,
    };
    let here = network.as_ref().map_or(Ipv4Addr::LOCALHOST.into(), OwnNetwork::address);
    let args = std::env::args_os().skip(1).collect();
    let children = Children::Here { program: program()?, args, network };
    over(run_children(&job, asked, ChildRanks { children, processes, here })?, |lost| match &lost.error {
        Some(error) if lost.pid == 0 => error.clone(),
        _ => lost.to_string(),
    })
}

/// `launch --elastic`: ranks at the far ends of ssh, and the coordinator here.
pub(super) fn launch(job: &Job, asked: &ElasticTrain, options: LaunchOptions) -> CommandResult {
    let kind = asked.args.chaos.as_ref().and_then(ChaosSpec::of_elastic_runs);
    if let Some(kind) = kind {
        return Err(Failure::usage(format!(
            "`--chaos {kind}=…` is for ranks of this host; use `polyreme train --elastic --processes N`"
        )));
    }
    let here = match asked.args.listen {
        Some(listen) => listen.ip(),
        None => choose(launch::interface(&options).as_deref(), None, false, &interfaces())
            .map_err(|e| Failure::usage(format!("ranks have to reach this process: {e}")))?,
    };
    let (processes, children) = (options.size(), Children::OverSsh(options.clone()));
    over(run_children(job, asked, ChildRanks { children, processes, here })?, |lost| match &lost.error {
        Some(error) if lost.pid == 0 => error.clone(),
        _ => launch::explain(lost, &options),
    })
}

/// Which ranks are started, and where they reach this process.
struct ChildRanks {
    children: Children,
    processes: usize,
    here: IpAddr,
}

/// Starts ranks, and coordinates them until the run is over.
fn run_children(job: &Job, asked: &ElasticTrain, started: ChildRanks) -> Result<CrewEnd, Failure> {
    let ChildRanks { children, processes, here } = started;
    let Elastic { min, max, store, .. } = job.parallel.elastic.clone().unwrap_or_default();
    if processes > max {
        return Err(Failure::usage(format!(
            "{processes} processes are asked for, and `parallel.elastic.max` is {max}; start fewer, or raise it"
        )));
    }
    let memory = memory_use(asked.ranks, job)?;
    let secret = match std::env::var(SECRET_VARIABLE) {
        Ok(secret) => secret,
        Err(_) => spawn::random_secret()?,
    };
    if store.is_some() && asked.args.listen.is_none() {
        return Err(Failure::usage(
            "a run with `parallel.elastic.store` has ranks on several hosts; say where they reach this process: --listen \
             ADDR:PORT, with port 0 for a free one",
        ));
    }
    let listen = asked.args.listen.unwrap_or_else(|| SocketAddr::new(here, 0));
    if listen.ip().is_unspecified() {
        return Err(Failure::usage("--listen takes one address of this host, not all of them"));
    }
    let listener =
        TcpListener::bind(listen).map_err(|e| Failure::usage(format!("--listen {listen}: {e}")))?;
    let patience = asked_by_job(&job.parallel).patience.silence;
    let tenure = take_post(store.as_ref(), patience, &listener, Begins::New)?;
    let office = OfficeOptions {
        listener: listener.into(),
        secret: Secret::from_text(&secret).map_err(Failure::usage)?,
        job: job.name.clone(),
        rules: Rules {
            min,
            max,
            start: processes,
            patience,
            hold_off: Duration::ZERO,
            exclusive: tenure.is_some(),
            memory,
        },
        first: 1,
        note: match &asked.resumes {
            // Ranks may have other working directories.
            Some(folder) => folder.canonicalize()?.into_os_string().into_encoded_bytes(),
            None => Vec::new(),
        },
        encrypt: asked.ranks.encryption(job),
        host_key: host_key(),
        children_here: children.are_here(),
        runs_on: None,
        ended: None,
        // Where others can join, they can also reach whoever takes the place of this process.
        succession: asked.args.listen.is_some(),
        tenure,
        tell: Tell::to(|line| output::err().line(&format!("warning: {line}"))),
        system: Arc::new(Os),
    };
    if asked.args.listen.is_some() && !asked.json {
        let place = store.map_or(listen.to_string(), |store| store.to_string());
        output::err().line(&format!("others can join: polyreme join {place} JOB.toml"));
    }
    if let Some(chaos) = &asked.args.chaos {
        output::err().line(&format!("chaos: {chaos}"));
    }
    let launch =
        ElasticLaunch { children, processes, max, secret, chaos: asked.args.chaos.clone(), json: asked.json };
    process::raise_open_files();
    Ok(launcher::run(launch, office)?)
}

fn child_of_launcher(
    app: &App,
    job: Job,
    asked: &ElasticTrain,
    machine: &Machine,
    child: u64,
) -> CommandResult {
    let (stop, leave) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let patience = asked_by_job(&job.parallel).patience;
    let last_words = asked.args.listen.is_none().then(|| last_words(patience));
    // If it is the ssh of this rank alone that has ended, the others go on.
    let (input, end) = (std::io::stdin(), || std::process::exit(1));
    let lifeline = Lifeline::listen(input, last_words, stop.clone(), leave.clone(), end);
    let secret =
        Secret::from_text(&lifeline.secret().map_err(|e| Failure::world(&e))?).map_err(Failure::usage)?;
    let listens = lifeline.master().map_err(|e| Failure::world(&e))?;
    let store = job.parallel.elastic.as_ref().and_then(|elastic| elastic.store.as_ref());
    let coordinator = match store {
        Some(address) => CoordinatorPlace::InStore(post::store(address, patience.silence)),
        None => CoordinatorPlace::At(listens),
    };
    // Over ssh, how many there are on this host.
    let here = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|n| n.parse().ok());
    let start = here.or(asked.ranks.n_processes()).or(job.parallel.ranks).unwrap_or(1);
    let threads = asked.ranks.threads().or(job.parallel.threads).unwrap_or_else(|| {
        let shares = machine.shares(start);
        shares.iter().map(|share| machine.threads(share, start)).min().unwrap_or(1)
    });
    let transport = asked.ranks.transport(&job)?.unwrap_or(Transport::Shm);
    member(MemberSeat {
        app,
        threads,
        overwrite: asked.overwrite,
        changed_data: asked.changed_data,
        json: asked.json,
        stop,
        leave,
        checks: (child == 0).then_some((start, transport)),
        slowness: asked.args.slowness(),
        metrics: asked.metrics.clone(),
        coordinator,
        secret,
        child: Some(child),
        encrypt: asked.ranks.encryption(&job),
        job,
    })
}

/// `polyreme join`.
#[derive(Args)]
pub(super) struct JoinArgs {
    /// Where the run listens: the address of its `--listen`, or of its `parallel.elastic.store` (etcd://HOST:PORT/PREFIX).
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
    metrics: MetricsArgs,
    #[command(flatten)]
    ranks: RankArgs,
}

pub(super) fn join(app: &App, args: &JoinArgs) -> CommandResult {
    args.metrics.check()?;
    let mut job = read_job(app, Some(&args.job), &args.sets)?;
    let store = as_elastic(&mut job)?.store;
    let patience = asked_by_job(&job.parallel).patience.silence;
    let coordinator = post::place(&args.coordinator, patience).map_err(Failure::usage)?;
    if let Some(store) = store.filter(|store| store.to_string() != args.coordinator) {
        return Err(Failure::usage(format!(
            "the job's coordinator is found in its store; write `polyreme join {store} JOB.toml`"
        )));
    }
    let secret = secret_of_environment()?;
    let machine = Machine::read();
    let threads = args.ranks.threads().or(job.parallel.threads).unwrap_or_else(|| machine.cores());
    member(MemberSeat {
        app,
        threads,
        overwrite: false,
        changed_data: false,
        json: args.json,
        stop: Arc::new(AtomicBool::new(false)),
        leave: Arc::new(AtomicBool::new(false)),
        checks: None,
        coordinator,
        secret,
        child: None,
        encrypt: args.ranks.encryption(&job),
        job,
        slowness: Slowness::default(),
        metrics: args.metrics.clone(),
    })
}

/// `polyreme coordinator`.
#[derive(Args)]
pub(super) struct CoordinatorArgs {
    /// The run's job file.
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Where ranks join: an address of this host and a port, such as 10.0.0.1:7777.
    #[arg(long, value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The run's folder, as all ranks see it; a run that is there goes on from its last checkpoint [default: as the job says].
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// How many ranks the run waits for before it begins [default: `min` of `parallel.elastic`].
    #[arg(long, value_name = "N")]
    start: Option<usize>,
    /// Change a setting, as for `polyreme join`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankArgs,
}

pub(super) fn coordinate(app: &App, args: &CoordinatorArgs) -> CommandResult {
    let mut job = read_job(app, Some(&args.job), &args.sets)?;
    let Elastic { min, max, store, .. } = as_elastic(&mut job)?;
    let start = args.start.unwrap_or(min);
    if !(min..=max).contains(&start) {
        return Err(Failure::usage(format!(
            "--start {start} is not between `parallel.elastic`'s min = {min} and max = {max}"
        )));
    }
    let listener = TcpListener::bind(args.listen)
        .map_err(|e| Failure::usage(format!("--listen {}: {e}", args.listen)))?;
    let patience = asked_by_job(&job.parallel).patience.silence;
    let secret = secret_of_environment()?;
    let tenure = take_post(store.as_ref(), patience, &listener, Begins::GoesOn)?;
    let (exclusive, memory) = (tenure.is_some(), memory_use(&args.ranks, &job)?);
    let office = OfficeOptions {
        listener: listener.into(),
        secret,
        job: job.name.clone(),
        rules: Rules { min, max, start, patience, hold_off: coordinator::HOLD_OFF, exclusive, memory },
        first: coordinator::first_number(),
        note: args.output.clone().unwrap_or_default().into_os_string().into_encoded_bytes(),
        encrypt: args.ranks.encryption(&job),
        host_key: host_key(),
        children_here: true,
        runs_on: None,
        ended: None,
        // Without a store it is started again where it was.
        succession: exclusive,
        tenure,
        tell: Tell::to(|line| output::err().line(&format!("warning: {line}"))),
        system: Arc::new(Os),
    };
    process::raise_open_files();
    let whole = coordinator::run(office, patience, store.as_ref(), args.json)?;
    if whole { Ok(()) } else { Err(Failure::interrupted()) }
}

/// `polyreme status`.
#[derive(Args)]
pub(super) struct StatusArgs {
    /// Where the run listens: the address of its `--listen`, or of its `parallel.elastic.store` (etcd://HOST:PORT/PREFIX); or
    /// http://ADDR:PORT, where ADDR:PORT is that of its `--metrics`.
    #[arg(value_name = "HOST:PORT")]
    coordinator: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn status(args: &StatusArgs) -> CommandResult {
    if let Some(at) = page_at(&args.coordinator) {
        return show_status(at, args.json);
    }
    let secret = secret_of_environment()?;
    let place = post::place(&args.coordinator, Duration::ZERO).map_err(Failure::usage)?;
    let text = ask_status(place, &secret, Encrypt::Auto).map_err(|e| Failure::world(&e))?;
    let mut out = std::io::stdout().lock();
    if args.json {
        return Ok(writeln!(out, "{text}")?);
    }
    let status: serde_json::Value = serde_json::from_str(&text)?;
    let number = |key: &str| status[key].as_f64().unwrap_or(0.0);
    let state = if status["trains"] == true { "trains" } else { "waits" };
    let over = status["transport"].as_str().map_or(String::new(), |transport| format!(" over {transport}"));
    let pid = number("coordinator_pid");
    writeln!(
        out,
        "generation {}: {} ranks, {state}{over}; process {pid} coordinates",
        number("generation"),
        number("ranks")
    )?;
    for member in status["members"].as_array().into_iter().flatten() {
        let rank = member["rank"].as_u64().map_or("-".into(), |rank| rank.to_string());
        let host = member["host"].as_str().unwrap_or_default();
        write!(out, "  rank {rank:>4}  {host}  process {}  step {}", member["pid"], member["step"])?;
        match member["samples_per_s"].as_f64() {
            Some(speed) => {
                writeln!(out, "  {} samples a step, {speed:.0} a second", member["samples_per_step"])?
            }
            None => writeln!(out)?,
        }
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

/// Whether ranks may share memory: as they can, if nothing is said.
fn memory_use(ranks: &RankArgs, job: &Job) -> Result<MemoryUse, Failure> {
    match ranks.transport(job)? {
        None => Ok(MemoryUse::IfAllHere),
        Some(Transport::Shm) => Ok(MemoryUse::Always),
        Some(Transport::Tcp) => Ok(MemoryUse::Never),
        Some(Transport::Local | Transport::Mpi) => {
            Err(Failure::usage("--elastic needs ranks that are processes; use --transport shm or tcp"))
        }
    }
}

/// Takes the post of the run's coordinator, if a store says who has it.
fn take_post(
    store: Option<&StoreAddress>,
    patience: Duration,
    listener: &TcpListener,
    begins: Begins,
) -> Result<Option<Tenure>, Failure> {
    let taken = store.map(|address| post::take(address, patience, listener, begins));
    taken.transpose().map_err(|why| Failure::coded(1, why))
}

fn secret_of_environment() -> Result<Secret, Failure> {
    let missing = format!("{SECRET_VARIABLE} is not set; set it to the secret that the run was started with");
    let text = std::env::var(SECRET_VARIABLE).map_err(|_| Failure::usage(missing))?;
    Secret::from_text(&text).map_err(Failure::usage)
}
