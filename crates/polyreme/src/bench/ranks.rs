//! `polyreme bench step --ranks N`: training steps on several ranks. Each part of the data axis has the job's batch, unless that of
//! all together is given.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use polyreme_collective::servers::{Discipline, HostOptions, ServerClient, ServerHost, ServerMail};
use polyreme_collective::{Comm, Reduce};
use polyreme_exec::{Comms, Engine, ExecError, Isa, Options, ServedRanges, Timeline};
use polyreme_graph::{Axis, Keeps, Program, Weights, WireCodec, cost};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{LocalSteps, Mesh, Plan, ServerPlan};
use polyreme_train::record::trace::{self, About};
use serde::Serialize;

use super::WARM_UP;
use super::cuts::{self, CutsBy};
use super::jobs::BenchJob;
use crate::process;

const MIB: f64 = (1 << 20) as f64;

/// Steps whose losses are reported, however fast the machine is.
const FIRST: usize = 3;

/// Steps that are recorded with `--trace`.
const TRACED: usize = 5;

/// The size of gradient buckets, which are sent during the backward pass.
pub(super) const BUCKET_BYTES: usize = 1 << 20;

/// The result for one job.
#[derive(Clone, Debug, Serialize)]
pub struct RanksReport {
    /// The job.
    pub job: String,
    /// How many ranks.
    pub ranks: usize,
    /// How many of them the batch is split over.
    pub data: usize,
    /// How many of them each matrix is split over.
    pub tensor: usize,
    /// How many stages the network is cut into.
    pub stage: usize,
    /// How many of them each sequence is cut over.
    pub sequence: usize,
    /// How many microbatches a step has.
    pub microbatches: usize,
    /// In which order stages run them, if there are several.
    pub schedule: Option<String>,
    /// Where the network is cut into stages.
    pub cuts: Vec<String>,
    /// What carried the data.
    pub transport: String,
    /// Threads of each rank.
    pub threads: usize,
    /// The median time of a step.
    pub step_ms: f64,
    /// Multiply-adds of all ranks times two, as if convolutions were computed directly, over the time.
    pub gflops: f64,
    /// The share of the time that rank 0 spent waiting for others.
    pub waiting: f64,
    /// Whether each rank keeps only its own shard of the gradients.
    pub shard_gradients: bool,
    /// Whether each rank keeps only its own shard of the weights.
    pub shard_weights: bool,
    /// The planned memory of rank 0's process: of its engines and groups, and what it had before.
    pub planned_peak_mib: f64,
    /// The peak memory of rank 0's process.
    pub peak_rss_mib: f64,
    /// Parameters of all ranks together; shared ones count once.
    pub param_mib: f64,
    /// Gradients of all ranks together.
    pub grad_mib: f64,
    /// Optimizer state of all ranks together.
    pub optimizer_mib: f64,
    /// The loss of the last step, over all ranks.
    pub loss: f64,
    /// The losses of the first steps, over all ranks: each rank has the same batch, so they are those of one rank.
    pub first_losses: [f64; FIRST],
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct RankSettings {
    /// Threads of each rank.
    pub threads: usize,
    /// The instructions that kernels may use.
    pub isa: Isa,
    /// Timed steps; as many as the job says if `None`.
    pub steps: Option<usize>,
    /// What carries the data, for the report.
    pub transport: String,
    /// How many ranks are threads of this process.
    pub local: usize,
    /// Whether each rank keeps only its own shard of the gradients.
    pub shard_gradients: bool,
    /// The format in which gradients travel, if not as they are.
    pub wire: Option<WireCodec>,
    /// Whether ranks take the steps of a program by themselves, and then average their weights.
    pub by_itself: bool,
    /// Parameter servers that hold the weights.
    pub servers: Option<ServerPlan>,
    /// Whether each rank keeps only its own shard of the weights.
    pub shard_weights: bool,
    /// How ranks are arranged.
    pub mesh: Mesh,
    /// In which order stages run microbatches.
    pub schedule: PipelineKind,
    /// Where the network is cut into stages.
    pub cuts: CutsBy,
    /// What a rank may take; activations are recomputed to fit.
    pub budget_bytes: Option<usize>,
    /// What the process took before its ranks were started.
    pub process_bytes: usize,
    /// Where a timeline of some more steps goes.
    pub trace: Option<PathBuf>,
}

/// One rank's part of a measurement; every rank calls it with the same arguments. Returns the group.
pub fn measure(
    job: &BenchJob,
    mut comm: Comm,
    settings: &RankSettings,
) -> Result<(RanksReport, Comm), Box<dyn std::error::Error + Send + Sync>> {
    let rank = comm.rank();
    let RankSettings { threads, isa, steps, shard_gradients, budget_bytes, .. } = *settings;
    let mut plan = Plan {
        pipeline: settings.schedule,
        microbatches: job.accumulate,
        shards: job.shards,
        precision: job.precision.clone(),
        wire: settings.wire,
        ..plan(&comm, settings.mesh, shard_gradients)
    };
    if settings.shard_weights {
        (plan.shard_weights, plan.weights) = (true, Weights::Own);
    }
    if settings.by_itself {
        plan = by_itself(plan, job.run_steps);
    }
    if settings.servers.is_some() {
        plan = served(plan, settings.servers);
    }
    if plan.is_flushless() && !shard_gradients {
        // As in training: every rank updates all of its stage.
        (plan.keeps, plan.weights) = (Keeps::All, Weights::Own);
    }
    let plan = cuts::chosen(job, &mut comm, plan, settings)?;
    let program = |rank: usize| job.program(&Plan { rank, ..plan.clone() }, budget_bytes, threads);
    let own = program(rank)?;
    let mut flops = [(cost::product_flops(own.graph()) * own.microbatches.len() as u64) as f64];
    let planned = if rank == 0 { planned_bytes(settings, &plan, program)? } else { 0 };
    let parts = job.fed_parts(&plan)?;
    let comms = Comms::new(comm, &plan.mesh)?;
    let mut engine = Engine::join(own, Options { isa, ..Options::threads(threads) }, comms)?;
    engine.comm().all_reduce(&mut flops, Reduce::Sum)?;
    job.fill_parts(&mut engine, &parts)?;
    let host =
        settings.servers.map(|servers| start_servers(job, &mut engine, servers)).transpose()?.flatten();
    let times = time(job, &mut engine, steps.unwrap_or(job.timed_steps), plan.is_free())?;
    if let Some(path) = &settings.trace {
        record(job, &mut engine, &plan, path)?;
    }
    if settings.servers.is_some() {
        end_servers(&mut engine, host)?;
    }
    // Of all microbatches of the program.
    let gflops = flops[0] / (times.seconds * job.run_steps as f64) / 1e9;
    let held = engine.held();
    let mut bytes = [held.params as f64, held.grads as f64, held.optimizer as f64];
    engine.comm().all_reduce(&mut bytes, Reduce::Sum)?;
    let [param_mib, grad_mib, optimizer_mib] = bytes.map(|bytes| bytes / MIB);
    let report = RanksReport {
        job: job.name.clone(),
        ranks: plan.mesh.ranks(),
        data: plan.mesh.data,
        tensor: plan.mesh.tensor,
        stage: plan.mesh.stage,
        sequence: plan.mesh.sequence,
        microbatches: job.accumulate,
        schedule: (plan.mesh.stage > 1).then(|| plan.pipeline.name().into()),
        cuts: plan.cuts.clone(),
        transport: settings.transport.clone(),
        threads,
        step_ms: times.seconds * 1e3,
        gflops,
        waiting: times.waiting,
        shard_gradients,
        shard_weights: settings.shard_weights,
        planned_peak_mib: planned as f64 / MIB,
        peak_rss_mib: process::peak_resident_bytes() as f64 / MIB,
        param_mib,
        grad_mib,
        optimizer_mib,
        loss: times.loss,
        first_losses: times.first_losses,
    };
    Ok((report, engine.leave()))
}

/// The plan of a rank of this group.
pub fn plan(comm: &Comm, mesh: Mesh, shard_gradients: bool) -> Plan {
    let shares = comm.shares_memory() && mesh.data > 1;
    let usual = if shares { Keeps::OwnMoments } else { Keeps::All };
    Plan {
        mesh,
        rank: comm.rank(),
        keeps: if shard_gradients { Keeps::OwnGradients } else { usual },
        weights: if shares { Weights::Shared } else { Weights::Own },
        bucket_bytes: BUCKET_BYTES,
        ..Plan::alone()
    }
}

/// The same where each rank takes so many steps by itself.
pub(super) fn by_itself(plan: Plan, run_steps: usize) -> Plan {
    let local = Some(LocalSteps { outer: None, drift: None, turns: None });
    Plan { local, run_steps, keeps: Keeps::All, weights: Weights::Own, ..plan }
}

/// The same with parameter servers.
pub(super) fn served(plan: Plan, servers: Option<ServerPlan>) -> Plan {
    Plan { servers, keeps: Keeps::All, weights: Weights::Own, ..plan }
}

/// Starts the server beside this rank, if there is to be one, and gives the engine its end of all. Collective.
fn start_servers(
    job: &BenchJob,
    engine: &mut Engine,
    plan: ServerPlan,
) -> Result<Option<ServerHost>, Box<dyn std::error::Error + Send + Sync>> {
    let (rank, ranks) = (engine.role().rank, engine.role().ranks);
    let mail = ServerMail::new(engine.comm())?;
    let discipline = match plan.lockstep {
        true => Discipline::Lockstep { workers: ranks },
        false => Discipline::Free,
    };
    let mut host = None;
    if rank < plan.servers {
        let lr = job.lr;
        let store = ServedRanges::of(engine, Arc::new(move |_| lr), None)?;
        let options = HostOptions { discipline, n_ranges: store.n_ranges(), done: 0, leases: false };
        host = Some(ServerHost::start(mail.clone(), Arc::new(Mutex::new(store)), options)?);
    }
    let mut client = ServerClient::new(mail, plan.servers);
    client.join()?;
    engine.set_servers(client);
    Ok(host)
}

/// Ends the servers. Collective.
fn end_servers(
    engine: &mut Engine,
    host: Option<ServerHost>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    if let Some(client) = engine.servers() {
        client.leave()?;
    }
    // Nobody posts any more.
    engine.comm().barrier()?;
    drop(host);
    engine.comm().barrier()?;
    if let Some(client) = engine.take_servers() {
        client.into_mail().close()?;
    }
    Ok(())
}

/// Bytes that this process takes.
fn planned_bytes<E>(
    settings: &RankSettings,
    plan: &Plan,
    program: impl Fn(usize) -> Result<Program, E>,
) -> Result<usize, E> {
    // Ranks that do not share memory have buffers of sockets, which are smaller.
    let mut bytes = settings.process_bytes + settings.local * Comms::staging_bytes(&plan.mesh);
    for rank in 0..settings.local {
        let footprint = Engine::footprint(&program(rank)?, settings.threads, settings.isa);
        bytes += footprint.total();
        let counted = plan.weights == Weights::Shared && plan.mesh.place(rank, Axis::Data) > 0;
        bytes -= if counted { footprint.params } else { 0 };
    }
    Ok(bytes)
}

/// Records some steps, after those that were timed: recording takes time.
fn record(
    job: &BenchJob,
    engine: &mut Engine,
    plan: &Plan,
    path: &Path,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    engine.comm().barrier()?;
    engine.set_timeline(Some(Timeline::new(Instant::now(), trace::MOMENTS_MAX)));
    for _ in 0..TRACED {
        job.step(engine)?;
    }
    let moments = engine.timeline().map_or(Vec::new(), |timeline| timeline.moments().to_vec());
    engine.set_timeline(None);
    Ok(trace::write(path, &About::of_plan(&job.name, plan), engine.comm(), &moments)?)
}

struct Times {
    seconds: f64,
    waiting: f64,
    loss: f64,
    first_losses: [f64; FIRST],
}

fn time(job: &BenchJob, engine: &mut Engine, n: usize, free: bool) -> Result<Times, ExecError> {
    let (rank, ranks) = (engine.role().rank as u64, engine.role().ranks as u64);
    let mut done = 0;
    let mut step = |engine: &mut Engine| {
        if free {
            // Each rank has blocks of its own.
            engine.set_steps_done(done * ranks + rank);
        }
        done += 1;
        let totals = job.step(engine);
        // What ranks exchange beside steps has one number on all of them.
        engine.comm().set_step(done);
        totals
    };
    let began = Instant::now();
    let mut first_losses = [f64::NAN; FIRST];
    for k in 0.. {
        let totals = step(engine)?;
        if let Some(first) = first_losses.get_mut(k) {
            *first = totals.loss;
        }
        // Ranks agree on when warm-up is over: for all of them, and after the first steps at least.
        let mut cold = [f32::from(u8::from(k + 1 < FIRST || began.elapsed() < WARM_UP))];
        engine.comm().all_reduce(&mut cold, Reduce::Max)?;
        if cold[0] == 0.0 {
            break;
        }
    }
    let (mut times, mut waited, mut loss) = (Vec::with_capacity(n), 0.0, f64::NAN);
    for _ in 0..n.max(1) {
        let start = Instant::now();
        let totals = step(engine)?;
        times.push(start.elapsed().as_secs_f64() / job.run_steps as f64);
        waited += totals.waited.as_secs_f64();
        loss = totals.loss;
    }
    // In the time of one, each rank does one.
    let at_once = if free { ranks as f64 } else { 1.0 };
    let waiting = waited / (times.iter().sum::<f64>() * job.run_steps as f64).max(1e-12);
    times.sort_by(f64::total_cmp);
    Ok(Times { seconds: times[times.len() / 2] / at_once, waiting, loss, first_losses })
}

/// The header of the table for people.
pub const HEADER: &str = "job     ranks  transport  threads     step ms    GFLOP/s   waiting  planned MiB  gradients MiB  actual MiB       loss";

impl std::fmt::Display for RanksReport {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            f,
            "{:<7} {:>5}  {:<9} {:>8} {:>11.3} {:>10.1} {:>8.1}% {:>12.1} {:>14.1} {:>11.1} {:>10.4}",
            self.job,
            self.ranks,
            self.transport,
            self.threads,
            self.step_ms,
            self.gflops,
            self.waiting * 100.0,
            self.planned_peak_mib,
            self.grad_mib,
            self.peak_rss_mib,
            self.loss
        )
    }
}
