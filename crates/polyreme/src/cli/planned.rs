//! Jobs that leave keys of `[parallel]` to the planner: what `train` does before it prepares one.
//!
//! Ranks that are threads of one process are planned before they start. Processes cannot each plan for themselves: they would look at
//! different machines, or at one machine at different moments, and come to different plans. So they meet first; then rank 0 searches, knowing
//! where all ranks are, and tells the others which keys it chose. They put these into their jobs as they are.

use std::collections::BTreeSet;

use polyreme_parallel::Mesh;
use polyreme_sim::InsideBy;
use polyreme_sim::search::{Planner, Question, SearchEffort};
use polyreme_train::job::Job;
use polyreme_train::run::planned_step::PlannedStep;

use super::ending::Failure;
use super::plan::{nothing_fits, said};
use crate::app::App;
use crate::cluster::enter::Ranks;
use crate::cluster::places::RankRow;
use crate::cluster::{Decided, Setup, Transport};
use crate::plan::asked::{AskedJob, decided};
use crate::plan::chosen;
use crate::plan::machine::this_machine;
use crate::plan::row::mesh_words;
use crate::plan::searching::SearchLine;
use crate::{output, process};

/// A job that runs as it is now, with what was predicted of it if it was planned.
pub(super) struct PlannedJob {
    pub(super) job: Job,
    pub(super) step: Option<PlannedStep>,
}

/// Where the ranks of a job are, as far as that is known.
struct RankSeats {
    /// How many there are, if that is decided.
    ranks: Option<usize>,
    /// On how many hosts, as many on each.
    hosts: usize,
    /// Threads of each rank, if that is decided.
    threads: Option<usize>,
    /// How ranks of one host reach each other.
    inside: InsideBy,
    /// Cores of a host, as far as they can be used.
    cores: usize,
}

impl RankSeats {
    /// Of ranks that are processes: before they have met, as far as a launcher says.
    fn of_setup(decided: &Decided, cores: usize) -> RankSeats {
        match &decided.setup {
            Setup::Threads { .. } if decided.open => {
                RankSeats { ranks: None, hosts: 1, threads: None, inside: InsideBy::Threads, cores }
            }
            Setup::Threads { ranks, .. } => {
                RankSeats { ranks: Some(*ranks), hosts: 1, threads: None, inside: InsideBy::Threads, cores }
            }
            Setup::Spawn { processes, threads, transport } => RankSeats {
                ranks: Some(*processes),
                hosts: 1,
                threads: Some(*threads),
                inside: inside(Some(*transport)),
                cores,
            },
            Setup::Process(place) => RankSeats {
                ranks: Some(place.size),
                hosts: place.size.div_ceil(place.local_size),
                threads: Some(place.threads),
                inside: inside(place.transport),
                cores,
            },
        }
    }

    /// Of ranks that have met: as they are.
    fn of_ranks(ranks: &Ranks, setup: &Setup, cores: usize) -> Result<RankSeats, Failure> {
        let mut hosts: Vec<(&str, usize)> = Vec::new();
        for RankRow { host, .. } in &ranks.rows {
            match hosts.iter_mut().find(|(known, _)| known == host) {
                Some((_, n)) => *n += 1,
                None => hosts.push((host, 1)),
            }
        }
        if hosts.iter().any(|(_, n)| *n != hosts[0].1) {
            let spread: Vec<String> = hosts.iter().map(|(host, n)| format!("{n} on {host}")).collect();
            return Err(Failure::usage(format!(
                "\"auto\" in `[parallel]` is planned for as many ranks on each host, and there are {}; use as many on each, or put a plan \
                 into the job file with `polyreme plan JOB.toml --hosts N --write`",
                spread.join(", ")
            )));
        }
        let transport = match setup {
            Setup::Process(place) => place.transport,
            Setup::Threads { .. } | Setup::Spawn { .. } => None,
        };
        Ok(RankSeats {
            ranks: Some(ranks.size()),
            hosts: hosts.len(),
            threads: Some(ranks.threads),
            inside: inside(transport),
            // A launcher may have bound this process to the cores of its rank.
            cores: cores.max(hosts[0].1 * ranks.threads),
        })
    }
}

/// How processes of one host reach each other over a transport; shared memory, if nothing else is asked for.
fn inside(transport: Option<Transport>) -> InsideBy {
    match transport {
        None | Some(Transport::Shm) => InsideBy::Processes,
        Some(Transport::Local) => InsideBy::Threads,
        Some(Transport::Tcp | Transport::Mpi) => InsideBy::Sockets,
    }
}

/// The job with a plan in place of what it leaves open, if its ranks are threads of this process. Others are planned when they have met, by
/// [`planned_together`]; unless this is only a check, in which none are started. `cores` are those of this machine.
pub(super) fn planned(
    app: &App,
    job: Job,
    keys: &BTreeSet<String>,
    setup: &Decided,
    cores: usize,
    check: bool,
) -> Result<PlannedJob, Failure> {
    // Where the number of ranks is open they are threads.
    let here = check || setup.open || matches!(setup.setup, Setup::Threads { .. });
    if !job.parallel.open.any() || !here {
        return Ok(PlannedJob { job, step: None });
    }
    let (sets, step) = search(app, &job, keys, &RankSeats::of_setup(setup, cores))?;
    Ok(PlannedJob { job: chosen::applied(&job, &sets).map_err(Failure::job)?, step: Some(step) })
}

/// The same for ranks that are processes and have met: rank 0 searches, and tells the others what it chose. `cores` are those that this process
/// saw before it was pinned to its own. Collective.
pub(super) fn planned_together(
    app: &App,
    job: Job,
    keys: &BTreeSet<String>,
    setup: &Setup,
    cores: usize,
    ranks: &mut Ranks,
) -> Result<PlannedJob, Failure> {
    let mut step = None;
    let mut sets = Vec::new();
    if ranks.speaks() && job.parallel.open.any() {
        let seats = RankSeats::of_ranks(ranks, setup, cores)?;
        let found = search(app, &job, keys, &seats)?;
        (sets, step) = (found.0, Some(found.1));
    }
    // A list also if there is nothing to tell: all ranks take part, whatever their own job files leave open.
    let told = ranks.tell(serde_json::to_vec(&sets)?)?;
    let sets: Vec<String> = serde_json::from_slice(&told)?;
    if let (Some(key), true) = (job.parallel.open.names().first(), sets.is_empty()) {
        return Err(Failure::usage(format!(
            "`parallel.{key}` is \"auto\" in the job of rank {}, and rank 0's leaves nothing open; give all the same job",
            ranks.first()
        )));
    }
    let job = if sets.is_empty() { job } else { chosen::applied(&job, &sets).map_err(Failure::job)? };
    Ok(PlannedJob { job, step })
}

/// The keys that the best plan has for ranks that sit so, as settings (`parallel.data=2`), and what is predicted of it. Precision is not
/// planned: what is open of that is measured when the run begins.
fn search(
    app: &App,
    job: &Job,
    keys: &BTreeSet<String>,
    seats: &RankSeats,
) -> Result<(Vec<String>, PlannedStep), Failure> {
    let open = job.parallel.open.names();
    let said = decided(job, keys.clone());
    let known = this_machine(None, seats.hosts, seats.cores, seats.inside, app.given().isa)
        .map_err(Failure::usage)?;
    let mut asked = AskedJob::new(job.clone(), &said, app.given())?;
    let fixed = asked.fixed_mut();
    fixed.ranks = seats.ranks.or(fixed.ranks);
    fixed.threads = seats.threads.or(fixed.threads);
    // Ranks stay where they are.
    fixed.ranks_per_host = seats.ranks.filter(|_| seats.hosts > 1).map(|ranks| ranks / seats.hosts);
    let before = process::bytes_before_training();
    let line = SearchLine::begin();
    let watch = |progress| line.show(progress);
    let search = |question: &Question| {
        Planner::new(question).watched(&watch).search(&known.cluster, SearchEffort::USUAL)
    };
    let answer = asked.with(search).map_err(Failure::usage)?;
    line.clear();
    let Some(first) = answer.plans.first() else { return Err(nothing_fits(&answer)) };
    // What is nearly as fast as the first by prediction may be faster.
    let here = seats.inside == InsideBy::Threads && seats.hosts == 1;
    let tried = if here { asked.tried(&answer.plans).map_err(Failure::boxed)? } else { None };
    let (best, tried) = match tried {
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
    let sets = chosen::settings(&keys, &open);
    let Mesh { data, tensor, stage, sequence } = best.choice.mesh;
    // What the search has left in memory stays there while the run goes on.
    let left = process::bytes_before_training().saturating_sub(before);
    let step = PlannedStep {
        mesh: [data, tensor, stage, sequence],
        threads: best.choice.seating.threads,
        step_ms: best.report.step_us / 1e3,
        memory_mib: (asked.run_bytes(best, &known.cluster) + left) as f64 / f64::from(1 << 20),
        source: known.source,
    };
    // What the search took for a while is no part of what the run takes.
    process::reset_peak();
    Ok((sets, step))
}

/// A job that was refused because it does not fit this machine, with a plan that would, if there is one.
pub(super) fn with_plan(app: &App, job: &Job, failure: Failure) -> Failure {
    let find = || -> Option<String> {
        let said = decided(job, said(job, None, &[]).ok()?);
        let asked = AskedJob::new(job.clone(), &said, app.given()).ok()?;
        let known = this_machine(None, 1, process::cores(), InsideBy::Threads, app.given().isa).ok()?;
        let answer = asked
            .with(|question| Planner::new(question).search(&known.cluster, SearchEffort::LITTLE))
            .ok()?;
        let best = answer.plans.first()?;
        let keys = chosen::keys(best, &known.cluster, asked.precision(best.choice.precision), &said, false);
        let words: Vec<String> =
            keys.iter().map(|k| format!("{}.{} = {}", k.section, k.key, k.value)).collect();
        let mib = asked.run_bytes(best, &known.cluster) >> 20;
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
