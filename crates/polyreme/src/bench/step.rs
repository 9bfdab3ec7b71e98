//! `polyreme bench step`: whole training steps.

use std::collections::HashMap;
use std::time::Instant;

use polyreme_exec::{Engine, ExecError, Timeline};
use polyreme_graph::{MomentKind, cost};
use polyreme_kernels::{Cx, Isa, probe};
use serde::Serialize;

use super::jobs::BenchJob;
use super::median_seconds;
use crate::process;

const MIB: f64 = (1 << 20) as f64;

/// The result for one job.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// The job.
    pub job: String,
    /// Threads of the one rank.
    pub threads: usize,
    /// The median time of a step.
    pub step_ms: f64,
    /// Multiply-adds times two, as if convolutions were computed directly, over the time.
    pub gflops: f64,
    /// The share of the measured multiply-add peak of one core times the threads.
    pub peak_share: f64,
    /// What the process was to take at most: what it took before, the rest of its code, and the plan.
    pub planned_peak_mib: f64,
    /// What it took.
    pub peak_rss_mib: f64,
    /// Parameters, of `peak_rss_mib`.
    pub param_mib: f64,
    /// Their gradients.
    pub grad_mib: f64,
    /// Optimizer state.
    pub optimizer_mib: f64,
    /// From the start of the process to the end of the first step; of the first job only.
    pub first_step_ms: f64,
    /// The loss after the last step.
    pub loss: f32,
}

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct StepSettings {
    /// Threads of the one rank.
    pub threads: usize,
    /// The instructions that kernels may use.
    pub isa: Isa,
    /// Timed steps; as many as the job says if `None`.
    pub steps: Option<usize>,
    /// What an engine may take; activations are recomputed to fit.
    pub budget_bytes: Option<usize>,
}

/// Measures `job`. `since_start` gives the milliseconds since the process began.
pub fn measure(
    job: &BenchJob,
    settings: StepSettings,
    since_start: impl Fn() -> f64,
) -> Result<StepReport, Box<dyn std::error::Error + Send + Sync>> {
    let StepSettings { threads, isa, .. } = settings;
    process::reset_peak();
    let program = job.lone_program(settings.budget_bytes, threads)?;
    let process = process::bytes_before_training();
    let planned = process + Engine::footprint(&program, threads, isa).total();
    let flops = cost::product_flops(program.graph());
    let mut engine = job.engine(program, threads, isa)?;
    job.step(&mut engine)?;
    let first_step_ms = since_start();
    let n = settings.steps.unwrap_or(job.timed_steps);
    let seconds = median_seconds::<ExecError>(3, n, || job.step(&mut engine).map(|_| ()))?;
    let peak_rss_mib = process::peak_resident_bytes() as f64 / MIB;
    let held = engine.held();
    let gflops = flops as f64 / seconds / 1e9;
    let peak = probe::fma_peak_gflops(&Cx { isa, ..Cx::serial() }) * threads as f64;
    Ok(StepReport {
        job: job.name.clone(),
        threads,
        step_ms: seconds * 1e3,
        gflops,
        peak_share: gflops / peak,
        planned_peak_mib: planned as f64 / MIB,
        peak_rss_mib,
        param_mib: held.params as f64 / MIB,
        grad_mib: held.grads as f64 / MIB,
        optimizer_mib: held.optimizer as f64 / MIB,
        first_step_ms,
        loss: engine.output("loss")?[0],
    })
}

/// Where the time of a step goes: one line for each kind of node, the slowest first.
#[derive(Clone, Debug, Serialize)]
pub struct OpReport {
    /// The job.
    pub job: String,
    /// The op, and the shape of its first result.
    pub op: String,
    /// How many such nodes a step has.
    pub count: usize,
    /// The median time of all of them in a step.
    pub ms: f64,
    /// Floating-point operations over the time.
    pub gflops: f64,
}

/// Times the nodes of `job`, and its update.
pub fn measure_ops(
    job: &BenchJob,
    settings: StepSettings,
) -> Result<Vec<OpReport>, Box<dyn std::error::Error + Send + Sync>> {
    let steps = settings.steps.unwrap_or(job.timed_steps);
    let program = job.lone_program(settings.budget_bytes, settings.threads)?;
    let mut engine = job.engine(program, settings.threads, settings.isa)?;
    let body = engine.program().bodies[0].clone();
    let graph = &body.graph;
    let mut times = vec![Vec::new(); graph.nodes.len()];
    let mut updates = Vec::new();
    for k in 0..steps + 2 {
        engine.set_timeline(Some(Timeline::new(Instant::now(), usize::MAX)));
        job.step(&mut engine)?;
        if k < 2 {
            continue;
        }
        let mut rest = 0.0;
        for moment in engine.timeline().map_or(&[][..], Timeline::moments) {
            match (moment.label.node, moment.label.kind) {
                (Some(node), _) => times[node].push(moment.us / 1e3),
                (None, MomentKind::Update) => rest += moment.us / 1e3,
                (None, _) => {}
            }
        }
        updates.push(rest);
    }
    let mut kinds: HashMap<String, (usize, f64, u64)> = HashMap::new();
    for ((node, times), applied) in graph.nodes.iter().zip(&mut times).zip(&body.applied) {
        let flops = cost::cost(graph, node).flops;
        if flops == 0 && median(times) < 1e-3 {
            continue;
        }
        let update = if applied.is_some() { ", update" } else { "" };
        let key = format!("{} {}{update}", node.op.name(), graph.shape(node.outputs[0]));
        let kind = kinds.entry(key).or_default();
        *kind = (kind.0 + 1, kind.1 + median(times), kind.2 + flops);
    }
    kinds.insert("update".into(), (1, median(&mut updates), 0));
    let report = |(op, (count, ms, flops)): (String, (usize, f64, u64))| {
        let gflops = flops as f64 / ms.max(1e-9) / 1e6;
        OpReport { job: job.name.clone(), op, count, ms, gflops }
    };
    let mut reports: Vec<_> = kinds.into_iter().map(report).collect();
    reports.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    Ok(reports)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

impl std::fmt::Display for OpReport {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "  {:>10.3} ms {:>5}x {:>8.1} GFLOP/s  {}", self.ms, self.count, self.gflops, self.op)
    }
}

/// The header of the table for people.
pub const HEADER: &str =
    "job     threads     step ms    GFLOP/s   of peak   planned MiB   actual MiB   first step ms";

impl std::fmt::Display for StepReport {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            f,
            "{:<7} {:>7} {:>11.3} {:>10.1} {:>8.0}% {:>13.1} {:>12.1} {:>15.0}",
            self.job,
            self.threads,
            self.step_ms,
            self.gflops,
            self.peak_share * 100.0,
            self.planned_peak_mib,
            self.peak_rss_mib,
            self.first_step_ms
        )
    }
}
