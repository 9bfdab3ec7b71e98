//! The first plans of a search, tried: a few steps of each on this machine, on random batches, in turns.
//!
//! Predictions are some percent off, and on one machine the best plans are not further apart than that: two threads of one rank, or
//! two ranks of one thread. So a run whose ranks are threads of this process tries what is predicted to be nearly as fast as the first,
//! if that takes no more than some seconds, and takes what was.

use std::time::Instant;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, Isa, Options};
use polyreme_parallel::Plan;
use polyreme_sim::search::FoundPlan;

use crate::bench::jobs::BenchJob;
use crate::bench::on_ranks;

/// Plans that are predicted to take at most this much longer than the first are tried.
const NEARLY: f64 = 1.3;
/// At most so many, of different meshes or threads.
const PLANS: usize = 4;
/// Each is tried twice, not one after the other: machines change their speed.
const ROUNDS: usize = 2;
/// What all trials together may take, as predicted.
const SECONDS: f64 = 15.0;
/// What one trial takes, at least: with short steps there are more of them.
const TRIAL_SECONDS: f64 = 0.25;
/// Steps before those that count.
const COLD: usize = 2;

/// The error of a trial.
type Trying<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The plan that was fastest, and the milliseconds of a step; `None` if there is nothing to choose from, or it would take too long.
/// Plans are in their predicted order, for steps of `batch` samples, with all ranks on one host.
pub fn fastest<'p>(
    job: &BenchJob,
    batch: usize,
    plans: &'p [FoundPlan],
    isa: Isa,
) -> Trying<Option<(&'p FoundPlan, f64)>> {
    let tried = candidates(plans);
    let seconds = |plan: &FoundPlan| (COLD + steps(plan)) as f64 * plan.report.step_us / 1e6;
    if tried.len() < 2 || tried.iter().map(|plan| seconds(plan)).sum::<f64>() * ROUNDS as f64 > SECONDS {
        return Ok(None);
    }
    let mut best = vec![f64::INFINITY; tried.len()];
    for _ in 0..ROUNDS {
        for (plan, best) in tried.iter().zip(&mut best) {
            *best = best.min(step_seconds(job, batch, plan, isa)?);
        }
    }
    let fastest = tried.iter().zip(&best).min_by(|a, b| a.1.total_cmp(b.1));
    Ok(fastest.map(|(plan, seconds)| (*plan, seconds * 1e3)))
}

/// The first plan of each mesh and number of threads, as far as they are predicted to be nearly as fast as the first.
fn candidates(plans: &[FoundPlan]) -> Vec<&FoundPlan> {
    let mut found: Vec<&FoundPlan> = Vec::new();
    for plan in plans {
        let (first_us, seats) = (plans[0].report.step_us, (plan.choice.mesh, plan.choice.seating.threads));
        let known = found.iter().any(|other| (other.choice.mesh, other.choice.seating.threads) == seats);
        if !known && found.len() < PLANS && plan.report.step_us <= first_us * NEARLY {
            found.push(plan);
        }
    }
    found
}

/// Steps of a trial that count.
fn steps(plan: &FoundPlan) -> usize {
    ((TRIAL_SECONDS * 1e6 / plan.report.step_us.max(1.0)) as usize).clamp(2, 50)
}

/// The median time of a step.
fn step_seconds(job: &BenchJob, batch: usize, plan: &FoundPlan, isa: Isa) -> Trying<f64> {
    let (choice, of_ranks) = (&plan.choice, &plan.fleet.plan);
    let mut job = job.clone();
    (job.accumulate, job.shards, job.precision) =
        (of_ranks.microbatches, of_ranks.shards, of_ranks.precision.clone());
    let parts = of_ranks.shards.unwrap_or(job.accumulate * choice.mesh.data);
    job.batch = batch.div_ceil(parts).max(1);
    let (job, threads) = (&job, choice.seating.threads);
    let of_rank = |comm: Comm| -> Trying<f64> {
        let own = Plan { rank: comm.rank(), ..of_ranks.clone() };
        let comms = Comms::new(comm, &own.mesh)?;
        let program = job.program(&own, choice.budget_bytes, threads)?;
        let mut engine = Engine::join(program, Options { isa, ..Options::threads(threads) }, comms)?;
        job.fill_parts(&mut engine, &job.fed_parts(&own)?)?;
        let mut times = Vec::new();
        for k in 0..COLD + steps(plan) {
            let start = Instant::now();
            job.step(&mut engine)?;
            if k >= COLD {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_by(f64::total_cmp);
        engine.leave().finish()?;
        Ok(times[times.len() / 2])
    };
    Ok(on_ranks(Comm::local(choice.mesh.ranks()), of_rank)?.into_iter().fold(0.0, f64::max))
}
