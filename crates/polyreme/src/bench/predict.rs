//! `polyreme bench step --predict`: what the simulator says of a step that was measured.

use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use polyreme_exec::{Engine, Isa};
use polyreme_graph::{Keeps, Program, Weights};
use polyreme_parallel::{Plan, Updates};
use polyreme_sim::{BetweenSpec, Calibration, Cluster, Fleet, InsideBy, SimReport, SimSettings, simulate};
use polyreme_train::record::trace::{self, About, TimeSource};
use serde::Serialize;

use super::jobs::BenchJob;
use super::ranks::{BUCKET_BYTES, RankSettings, by_itself, served};

/// A step as it was predicted and measured.
#[derive(Clone, Debug, Serialize)]
pub struct Prediction {
    /// The job.
    pub job: String,
    /// How many ranks.
    pub ranks: usize,
    /// The predicted time of a step.
    pub predicted_ms: f64,
    /// The median of the measured ones.
    pub measured_ms: f64,
    /// How much the prediction is above the measurement, as a share of it.
    pub error: f64,
    /// The share of the time that ranks were predicted to wait.
    pub waiting: f64,
    /// What a rank was predicted to compute for, on average.
    pub computing_ms: f64,
}

impl Prediction {
    /// Compares.
    pub fn new(job: &str, report: &SimReport, measured_ms: f64) -> Prediction {
        let predicted_ms = report.step_us / 1e3;
        let computing: f64 = report.ranks.iter().map(|rank| rank.computing_us).sum();
        Prediction {
            job: job.into(),
            ranks: report.ranks.len(),
            predicted_ms,
            measured_ms,
            error: predicted_ms / measured_ms - 1.0,
            waiting: report.waiting,
            computing_ms: computing / report.ranks.len() as f64 / 1e3,
        }
    }
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Prediction { predicted_ms, error, waiting, .. } = self;
        let (error, waiting) = (error * 100.0, waiting * 100.0);
        write!(f, "  predicted: {predicted_ms:.3} ms, {error:+.1} %; waiting {waiting:.1} %")
    }
}

/// Reads a calibration.
pub fn read(path: &Path) -> Result<Arc<Calibration>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Calibration::parse(&text).map(Arc::new).map_err(|e| format!("{}: {e}", path.display()))
}

/// A step of a lone rank with this many threads.
pub fn alone(
    job: &BenchJob,
    calibration: &Arc<Calibration>,
    threads: usize,
    isa: Isa,
    budget_bytes: Option<usize>,
) -> Result<SimReport, Box<dyn Error + Send + Sync>> {
    let program = job.lone_program(budget_bytes, threads)?;
    let memory = Engine::footprint(&program, threads, isa).total();
    let plan = Plan { updates: Updates::AtOnce, ..Plan::alone() };
    let fleet = Fleet::alone(program, &plan, memory);
    let cluster = Cluster::measured(calibration, 1, InsideBy::Threads, BetweenSpec::free());
    Ok(simulate(&fleet, &cluster, &SimSettings { threads, ..SimSettings::default() })?)
}

/// A step of several ranks of this machine, cut as it was measured, over sockets of so many Mbit/s if that is given. If a timeline of
/// it is written, so is a simulated one, beside it.
pub fn together(
    job: &BenchJob,
    calibration: &Arc<Calibration>,
    settings: &RankSettings,
    cuts: &[String],
    link_mbits: Option<u32>,
) -> Result<SimReport, Box<dyn Error + Send + Sync>> {
    let RankSettings { threads, isa, mesh, .. } = *settings;
    let by = match settings.transport.as_str() {
        "local" => InsideBy::Threads,
        "shm" => InsideBy::Processes,
        _ => InsideBy::Sockets,
    };
    let shares = by != InsideBy::Sockets && mesh.data > 1;
    let usual = if shares { Keeps::OwnMoments } else { Keeps::All };
    let plan = Plan {
        mesh,
        keeps: if settings.shard_gradients { Keeps::OwnGradients } else { usual },
        weights: if shares && !settings.shard_weights { Weights::Shared } else { Weights::Own },
        shard_weights: settings.shard_weights,
        bucket_bytes: BUCKET_BYTES,
        wire: settings.wire,
        pipeline: settings.schedule,
        cuts: cuts.to_vec(),
        microbatches: job.accumulate,
        shards: job.shards,
        precision: job.precision.clone(),
        ..Plan::alone()
    };
    let plan = if settings.by_itself { by_itself(plan, job.run_steps) } else { plan };
    let plan = if settings.servers.is_some() { served(plan, settings.servers) } else { plan };
    let bytes_of = |program: &Program| Engine::footprint(program, threads, isa).total();
    let fleet = Fleet::lower(&job.graph()?, &plan, &job.training, &bytes_of, settings.budget_bytes)?;
    let mut cluster = Cluster::measured(calibration, 1, by, BetweenSpec::free());
    if let Some(mbits) = link_mbits {
        cluster.inside.sockets = calibration.links.loopback.slowed_to(f64::from(mbits) / 8.0);
    }
    let ranks = mesh.ranks();
    let traced = if settings.trace.is_some() { 0..ranks } else { 0..0 };
    let sim = SimSettings { ranks_per_host: ranks, threads, traced, ..SimSettings::default() };
    let report = simulate(&fleet, &cluster, &sim)?;
    if let Some(path) = &settings.trace {
        let path = path.with_extension("simulated.json");
        let about = About { source: TimeSource::Simulated, ..About::of_plan(&job.name, &fleet.plan) };
        let moments: Vec<_> = report.timeline.iter().map(|of| of.moments.clone()).collect();
        std::fs::write(&path, trace::text(&about, &moments))
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(report)
}
