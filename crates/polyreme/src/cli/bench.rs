//! `polyreme bench` and `polyreme doctor`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Subcommand};
use polyreme_exec::Isa;
use polyreme_graph::{DType, Precision, WireCodec};
use polyreme_parallel::{Plan, ServerPlan};
use polyreme_sim::Calibration;
use polyreme_train::run::Prepared;

use super::mesh::MeshArgs;
use super::ranks::{RankArgs, part, show};
use super::{CommandResult, Failure, print};
use crate::app::App;
use crate::bench::collective::{self, BenchOp, Measured};
use crate::bench::jobs::BenchJob;
use crate::bench::predict::{self, Prediction};
use crate::bench::{self, calibrate, kernels, load, step, step::StepSettings};
use crate::cluster::Asked;
use crate::{output, process};

#[derive(Subcommand)]
pub(super) enum Bench {
    /// Whole training steps of the reference jobs or of a job file: forward, backward, update; data in memory.
    ///
    /// Prints the median time of a step, GFLOP/s (convolutions counted as if computed directly), the share of the
    /// measured multiply-add peak, and planned and actual peak memory; with --json also what parameters, gradients and
    /// optimizer state take of it, on all ranks together.
    Step(Box<StepArgs>),
    /// Collectives: all-reduce and its family, by size.
    ///
    /// Prints the mean time of a call on the slowest rank, and the bytes of each rank's buffer over it. What was timed is
    /// checked too: wrong elements are an error.
    Collective(CollectiveArgs),
    /// Kernels one by one, at the shapes of the reference jobs.
    Kernels(KernelArgs),
    /// Everything that predictions of step times need to know about this machine, in about a minute.
    ///
    /// Measures kernels by shape, in f32 and bf16, with one thread, with all, and with one on each core at the same time; and
    /// exchanges between two ranks by size, in memory and over loopback sockets. Looks at no job. Nothing else should run
    /// meanwhile.
    Calibrate(CalibrateArgs),
    /// Loading of a job's training set: reading, decoding, augmentation, batches.
    Load(LoadArgs),
}

#[derive(Args)]
pub(super) struct StepArgs {
    /// The reference jobs to run; all of them if neither this nor --job-file is given.
    #[arg(long = "job", value_name = "NAME", value_parser = BenchJob::NAMES)]
    jobs: Vec<String>,
    /// A job file to run, on random batches; may be given several times.
    ///
    /// Sizes that `[model]` leaves out are taken from the data; if it gives all, no data need be there. `[parallel]` is
    /// not used: see --ranks and --threads.
    #[arg(long = "job-file", value_name = "JOB.toml")]
    job_files: Vec<PathBuf>,
    /// Change a setting of the job files: `--set train.batch=1`.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "job_files")]
    sets: Vec<String>,
    /// Samples (of text: sequences) per step, of all ranks together [default: what the jobs say, for each rank that the
    /// batch is split over].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch: Option<u32>,
    /// The length of sequences, for jobs on sequences [default: what the jobs say].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Timed steps of each job [default: what the job says, 8 to 300].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// The precision of the steps [default: what a job file says, or f32].
    #[arg(long, value_name = "FORMAT", value_parser = ["f32", "f32-strict", "bf16", "f16"])]
    precision: Option<String>,
    /// Recompute activations so that parameters, gradients, optimizer state and activations of a rank take at most this much.
    #[arg(long, value_name = "MIB")]
    memory_mib: Option<usize>,
    /// With several ranks: each keeps only its own shard of the gradients, as with `parallel.shard_gradients` of a job.
    #[arg(long)]
    shard_gradients: bool,
    /// With several ranks over sockets: the format in which gradients travel, as `parallel.wire` of a job has it by its name alone
    /// [default: f32].
    #[arg(long, value_name = "FORMAT", value_parser = parse_wire, conflicts_with = "shard_gradients")]
    wire: Option<WireCodec>,
    /// With several ranks: each takes so many steps by itself before their weights are averaged, as with `parallel.sync = "local"` and
    /// `parallel.every` of a job.
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..=1024), conflicts_with_all = ["shard_gradients", "wire"])]
    every: Option<u32>,
    /// With several ranks: parameter servers beside so many of them, as with `parallel.servers` of a job.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with_all = ["shard_gradients", "wire", "every"])]
    servers: Option<u32>,
    /// With --servers: each rank does steps of its own, as with `parallel.sync = "ps-async"` of a job; a step is then the batch of one rank
    /// [default: all ranks together, as with "ps"].
    #[arg(long, requires = "servers")]
    free: bool,
    /// Also show where the time goes: one line per kind of node, the slowest first.
    #[arg(long)]
    ops: bool,
    /// With --ranks or a mesh, and one job: write a timeline of five more steps, as `train --trace` does.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Also simulate each step on this machine, by a file of `bench calibrate`, and compare. With --trace FILE.json, also write
    /// the timeline of the simulation, as FILE.simulated.json.
    #[arg(long, value_name = "CALIBRATION.json")]
    predict: Option<PathBuf>,
    /// With --predict: ranks are connected by links of this bandwidth, each its own, in Mbit/s; as between containers or network
    /// namespaces of this machine [default: as measured between processes of this machine].
    #[arg(long, value_name = "MBIT", requires = "predict", value_parser = clap::value_parser!(u32).range(1..))]
    link_mbits: Option<u32>,
    /// Print one JSON object per job.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    mesh: MeshArgs,
}

#[derive(Args)]
pub(super) struct CollectiveArgs {
    /// The collective to measure; may be given several times.
    #[arg(long = "op", value_name = "OP", default_value = "allreduce")]
    ops: Vec<BenchOp>,
    /// Bytes of each rank's buffer, such as `4K,1M` [default: 4K,64K,1M,16M,64M].
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = collective::parse_size)]
    sizes: Vec<usize>,
    /// Print one JSON object per size.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankArgs,
}

#[derive(Args)]
pub(super) struct KernelArgs {
    /// Only kernels whose name contains this, such as `matmul` or `conv2d grad`.
    #[arg(default_value = "")]
    filter: String,
    /// Threads [default: all cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print one JSON object per kernel.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct CalibrateArgs {
    /// The file to write.
    #[arg(long, value_name = "FILE", default_value = "calibration.json")]
    output: PathBuf,
    /// Measure few shapes, a few times each: a first impression.
    #[arg(long)]
    quick: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct LoadArgs {
    /// The job file.
    #[arg(value_name = "JOB.toml")]
    job: PathBuf,
    /// Change a setting: `--set data.path=other/folder`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Loader threads [default: all cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1024))]
    threads: Option<u16>,
    /// Epochs to load.
    #[arg(long, value_name = "N", default_value_t = 2)]
    passes: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Bench {
    pub(super) fn run(&self, app: &App, start: Instant) -> CommandResult {
        match self {
            Bench::Load(args) => {
                let job = super::train::read_job(app, Some(&args.job), &args.sets)?;
                let prepared = Prepared::new(job, app.given(), process::cores())?;
                print(&load::measure(&prepared, threads(args.threads), args.passes, start)?, args.json)
            }
            Bench::Step(args) if args.ranks.any() || args.mesh.any() => bench_ranks(args, app),
            Bench::Step(args) => bench_step(args, app, start),
            Bench::Collective(args) => bench_collective(args),
            Bench::Kernels(args) => bench_kernels(args, app.given().isa),
            Bench::Calibrate(args) => {
                let report = calibrate::write(&args.output, app.given().isa, args.quick);
                print(&report.map_err(Failure::boxed)?, args.json)
            }
        }
    }
}

impl StepArgs {
    fn calibration(&self) -> Result<Option<Arc<Calibration>>, Failure> {
        self.predict.as_deref().map(predict::read).transpose().map_err(Failure::usage)
    }

    fn jobs(&self, app: &App) -> Result<Vec<BenchJob>, Failure> {
        let names: Vec<&str> = match self.jobs.is_empty() && self.job_files.is_empty() {
            true => BenchJob::NAMES.to_vec(),
            false => self.jobs.iter().map(String::as_str).collect(),
        };
        let mut jobs: Vec<_> =
            names.iter().map(|name| BenchJob::by_name(name).expect("the name was checked")).collect();
        for file in &self.job_files {
            let job = super::train::read_job(app, Some(file), &self.sets)?;
            jobs.push(BenchJob::of(job, app.given())?);
        }
        if let Some(context) = self.context {
            let set = |job: &mut BenchJob| job.set_context(context as usize);
            jobs.iter_mut().try_for_each(set).map_err(Failure::usage)?;
        }
        let precision = match self.precision.as_deref() {
            Some("f32") => Some(Precision::F32),
            Some("f32-strict") => Some(Precision::F32_STRICT),
            Some("bf16") => Some(Precision::half(DType::Bf16)),
            Some("f16") => Some(Precision::half(DType::F16)),
            _ => None,
        };
        if let Some(precision) = precision {
            for job in &mut jobs {
                job.training.scaled = precision.scales_loss();
                job.precision = precision.clone();
            }
        }
        Ok(jobs)
    }
}

/// Steps on several ranks. Each job has its own group, as each run has.
/// A format on the wire by its name.
fn parse_wire(name: &str) -> Result<WireCodec, String> {
    let names = WireCodec::USUAL.map(WireCodec::name).join(", ");
    WireCodec::USUAL.into_iter().find(|codec| codec.name() == name).ok_or(format!("one of {names} is needed"))
}

fn bench_ranks(args: &StepArgs, app: &App) -> CommandResult {
    if args.ops {
        return Err(Failure::usage("--ops is for one rank; leave out --ranks and related flags"));
    }
    let mut jobs = args.jobs(app)?;
    if args.trace.is_some() && jobs.len() != 1 {
        return Err(Failure::usage("--trace records one job; name it with --job or --job-file"));
    }
    let calibration = args.calibration()?;
    let asked = Asked { ranks: args.mesh.ranks(), ..Asked::default() };
    let Some(mut group) = args.ranks.enter(asked, "bench step", Arc::default())? else {
        return Ok(());
    };
    let mesh = args.mesh.mesh(group.size())?;
    for job in &mut jobs {
        args.mesh.cut(job, &mesh, args.batch.map(|n| n as usize))?;
        job.fed_parts(&Plan { mesh, ..Plan::alone() }).map_err(|error| Failure::usage(error.to_string()))?;
    }
    let transport = group.rows[0].transport.clone();
    let whole = mesh.replica_ranks() == 1 && !args.mesh.shard_weights();
    if args.wire.is_some() && (!whole || ["local", "shm"].contains(&transport.as_str())) {
        return Err(Failure::usage(
            "--wire is for ranks that are connected by sockets and have the whole model each; add --transport tcp",
        ));
    }
    if let Some(servers) = args.servers {
        let n = mesh.ranks();
        if !whole || transport == "mpi" || servers as usize > n {
            return Err(Failure::usage(format!(
                "--servers is for ranks that have the whole model each, are not started by MPI, and are at least as many as servers; there are {n}"
            )));
        }
        if jobs.iter().any(|job| {
            job.training.moments != DType::F32
                || !job.training.optimizer.by_element()
                || job.training.ema.is_some()
        }) {
            return Err(Failure::usage(
                "--servers is for optimizers that look at each number by itself, with state in f32, and without `train.ema`",
            ));
        }
    }
    if let Some(every) = args.every {
        if !whole {
            return Err(Failure::usage(
                "--every is for ranks that have the whole model each; leave out other axes than --data",
            ));
        }
        jobs.iter_mut().for_each(|job| job.run_steps = every as usize);
    }
    if group.speaks() && !args.json {
        show(&group, false);
        output::err().settle();
        writeln!(io::stdout(), "{}", bench::ranks::HEADER)?;
    }
    let settings = bench::ranks::RankSettings {
        threads: group.threads,
        isa: app.given().isa,
        steps: args.steps.map(|n| n as usize),
        local: if transport == "local" { group.size() } else { 1 },
        transport,
        shard_gradients: args.shard_gradients,
        wire: args.wire,
        by_itself: args.every.is_some(),
        servers: args.servers.map(|n| ServerPlan { servers: n as usize, serving: 0, lockstep: !args.free }),
        mesh,
        shard_weights: args.mesh.shard_weights(),
        schedule: args.mesh.schedule(),
        cuts: args.mesh.cuts(),
        budget_bytes: args.memory_mib.map(|mib| mib << 20),
        trace: args.trace.clone(),
        process_bytes: process::bytes_before_training(),
    };
    let control = group.control.take();
    let outcomes = group.run(|mut comm| -> CommandResult {
        for job in &jobs {
            comm = match bench::ranks::measure(job, comm, &settings) {
                Ok((report, comm)) => {
                    if comm.rank() == 0 {
                        print(&report, args.json)?;
                    }
                    if let (0, Some(calibration)) = (comm.rank(), &calibration) {
                        let link = args.link_mbits;
                        let simulated = predict::together(job, calibration, &settings, &report.cuts, link);
                        let simulated = simulated.map_err(Failure::boxed)?;
                        print(&Prediction::new(&report.job, &simulated, report.step_ms), args.json)?;
                    }
                    comm
                }
                Err(error) => return Err(Failure::world(error)),
            };
        }
        Ok(comm.finish()?)
    });
    part(control, outcomes.into_iter().collect())
}

fn bench_collective(args: &CollectiveArgs) -> CommandResult {
    let sizes = if args.sizes.is_empty() { collective::SIZES.to_vec() } else { args.sizes.clone() };
    let Some(mut group) = args.ranks.enter(Asked::default(), "bench collective", Arc::default())? else {
        return Ok(());
    };
    let (ranks, transport) = (group.size(), group.rows[0].transport.clone());
    if group.speaks() && !args.json {
        show(&group, false);
        output::err().settle();
        writeln!(io::stdout(), "{}", collective::HEADER)?;
    }
    let control = group.control.take();
    let outcomes = group.run(|mut comm| -> CommandResult {
        for op in &args.ops {
            // A barrier has no size.
            let sizes = if *op == BenchOp::Barrier { &[0][..] } else { &sizes[..] };
            for &bytes in sizes {
                let Measured { us, wrong } = collective::measure(&mut comm, *op, bytes)?;
                let (op, transport) = (op.name(), transport.clone());
                if comm.rank() == 0 {
                    print(&collective::CollectiveReport { op, transport, ranks, bytes, us, wrong }, args.json)?;
                }
                if wrong > 0 {
                    return Err(Failure::world(format!(
                        "{op} of {bytes} bytes: {wrong} elements were wrong; please report this with the output of `polyreme doctor`"
                    )));
                }
            }
        }
        Ok(comm.finish()?)
    });
    part(control, outcomes.into_iter().collect())
}

fn bench_step(args: &StepArgs, app: &App, start: Instant) -> CommandResult {
    if args.shard_gradients {
        return Err(Failure::usage("--shard-gradients needs several ranks; set their number with --ranks"));
    }
    if args.servers.is_some() {
        return Err(Failure::usage(
            "--servers needs several ranks; set their number with --ranks or --processes",
        ));
    }
    if args.every.is_some() {
        return Err(Failure::usage(
            "--every needs several ranks; set their number with --ranks or --processes",
        ));
    }
    if args.wire.is_some() {
        return Err(Failure::usage(
            "--wire needs several ranks; set their number with --ranks or --processes",
        ));
    }
    if args.trace.is_some() {
        return Err(Failure::usage("--trace is for ranks; set their number with --ranks, which may be 1"));
    }
    let mut jobs = args.jobs(app)?;
    if let Some(batch) = args.batch {
        jobs.iter_mut().for_each(|job| job.set_batch(batch as usize));
    }
    if !args.json {
        writeln!(io::stdout(), "{}", step::HEADER)?;
    }
    let isa = app.given().isa;
    let calibration = args.calibration()?;
    let mut since = start;
    for job in jobs {
        let settings = StepSettings {
            threads: args.ranks.threads().unwrap_or_else(process::cores),
            isa,
            steps: args.steps.map(|n| n as usize),
            budget_bytes: args.memory_mib.map(|mib| mib << 20),
        };
        let report =
            step::measure(&job, settings, || since.elapsed().as_secs_f64() * 1e3).map_err(Failure::boxed)?;
        print(&report, args.json)?;
        if let Some(calibration) = &calibration {
            let simulated = predict::alone(&job, calibration, settings.threads, isa, settings.budget_bytes);
            let simulated = simulated.map_err(Failure::boxed)?;
            print(&Prediction::new(&report.job, &simulated, report.step_ms), args.json)?;
        }
        if args.ops {
            for op in step::measure_ops(&job, settings).map_err(Failure::boxed)? {
                print(&op, args.json)?;
            }
        }
        since = Instant::now();
    }
    Ok(())
}

fn bench_kernels(args: &KernelArgs, isa: Isa) -> CommandResult {
    if !args.json {
        writeln!(io::stdout(), "{}", kernels::HEADER)?;
    }
    let mut outcome: CommandResult = Ok(());
    let mut n = 0;
    kernels::measure(threads(args.threads), isa, &args.filter, &mut |report| {
        n += 1;
        if outcome.is_ok() {
            outcome = print(&report, args.json);
        }
    })?;
    if n == 0 {
        let filter = &args.filter;
        return Err(Failure::usage(format!(
            "no kernel's name contains `{filter}`; without a filter all are run"
        )));
    }
    outcome
}

fn threads(asked: Option<u16>) -> usize {
    asked.map_or_else(process::cores, usize::from)
}
