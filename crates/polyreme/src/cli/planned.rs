//! Jobs that leave keys of `[parallel]` to the planner: what `train` does before it prepares one.

use std::path::Path;

use polyreme_sim::search::{Planner, SearchEffort};
use polyreme_train::job::Job;

use super::ending::Failure;
use super::plan::{nothing_fits, said};
use super::ranks::{RankArgs, asked_by_job};
use crate::app::App;
use crate::cluster::Setup;
use crate::cluster::cores::Machine;
use crate::output;
use crate::plan::asked::{AskedJob, decided};
use crate::plan::chosen;
use crate::plan::machine::this_machine;
use crate::plan::row::mesh_words;

/// The job with a plan for this machine in place of what it leaves open. Its precision is not planned: what is open of that is
/// measured when the run begins.
///
/// Only threads of one process are planned for. Several processes would each look at their machine and come to plans of their own.
pub(super) fn planned(
    app: &App,
    job: Job,
    file: Option<&Path>,
    sets: &[String],
    ranks: &RankArgs,
) -> Result<Job, Failure> {
    let open = job.parallel.open.names();
    if open.is_empty() {
        return Ok(job);
    }
    let said = decided(&job, said(&job, file, sets)?);
    let setup = ranks.decide(asked_by_job(&job.parallel), &Machine::read())?;
    let asked_ranks = match setup.setup {
        Setup::Threads { .. } if setup.open => None,
        Setup::Threads { ranks, .. } => Some(ranks),
        Setup::Spawn { .. } | Setup::Process(_) => {
            return Err(Failure::usage(format!(
                "`parallel.{}` is \"auto\", which is planned for ranks that are threads of one process; put a plan into the job file with \
                 `polyreme plan JOB.toml --write`, with --hosts or --cluster for several machines",
                open[0]
            )));
        }
    };
    let known = this_machine(None, 1, app.given().isa).map_err(Failure::usage)?;
    let mut asked = AskedJob::new(job.clone(), &said, app.given())?;
    asked.fixed_mut().ranks = asked_ranks.or(asked.fixed_mut().ranks);
    let answer = asked.with(|question| Planner::new(question).search(&known.cluster, SearchEffort::USUAL));
    let answer = answer.map_err(Failure::usage)?;
    let Some(first) = answer.plans.first() else { return Err(nothing_fits(&answer)) };
    // What is nearly as fast as the first by prediction may be faster.
    let (best, tried) = match asked.tried(&answer.plans).map_err(Failure::boxed)? {
        Some((best, ms)) => (best, format!(", {ms:.1} as tried")),
        None => (first, String::new()),
    };
    let precision = asked.precision(best.choice.precision);
    let keys = chosen::keys(best, &known.cluster, precision, &said, false);
    let words: Vec<String> = keys.iter().map(|k| format!("{}.{} = {}", k.section, k.key, k.value)).collect();
    output::say(&format!(
        "planned: {}, about {:.1} ms per step by {}{tried}: {}",
        mesh_words(&best.choice.mesh),
        best.report.step_us / 1e3,
        known.source,
        words.join(", ")
    ));
    let mut sets: Vec<String> = keys.iter().map(|k| format!("{}.{}={}", k.section, k.key, k.value)).collect();
    // What the plan does not need has its default.
    let closed = |key: &str| keys.iter().any(|k| k.key == key);
    let defaults = [
        ("shard_weights", "false"),
        ("shard_gradients", "false"),
        ("microbatches", "1"),
        ("schedule", "1f1b"),
    ];
    let left = defaults.into_iter().filter(|(key, _)| open.contains(key) && !closed(key));
    sets.extend(left.map(|(key, value)| format!("parallel.{key}={value}")));
    let origin = format!("{}.toml", job.name);
    Job::from_text(&job.to_toml(), &origin, Path::new("."), &sets).map_err(Failure::job)
}

/// A job that was refused because it does not fit this machine, with a plan that would, if there is one.
pub(super) fn with_plan(app: &App, job: &Job, failure: Failure) -> Failure {
    let find = || -> Option<String> {
        let said = decided(job, said(job, None, &[]).ok()?);
        let asked = AskedJob::new(job.clone(), &said, app.given()).ok()?;
        let known = this_machine(None, 1, app.given().isa).ok()?;
        let answer = asked
            .with(|question| Planner::new(question).search(&known.cluster, SearchEffort::LITTLE))
            .ok()?;
        let best = answer.plans.first()?;
        let keys = chosen::keys(best, &known.cluster, asked.precision(best.choice.precision), &said, false);
        let words: Vec<String> =
            keys.iter().map(|k| format!("{}.{} = {}", k.section, k.key, k.value)).collect();
        let mib = best.process_bytes >> 20;
        Some(format!(
            "this would fit, with {mib} MiB: {}; `polyreme plan JOB.toml --write` puts it into the job file",
            words.join(", ")
        ))
    };
    match find() {
        Some(words) => Failure { message: format!("{}\n{words}", failure.message.trim_end()), ..failure },
        None => failure,
    }
}
