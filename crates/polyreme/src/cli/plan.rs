//! `polyreme plan`: how to split a job over machines, before it runs.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use polyreme_sim::Cluster;
use polyreme_sim::search::{
    FoundPlan, LostBy, PlanChoice, Planner, Question, SearchAnswer, SearchEffort, TimeShares,
};
use polyreme_train::job::edit::{said_keys, with_keys};
use polyreme_train::job::{Job, PrecisionKind};
use serde_json::{Value, json};

use super::machines::MachineArgs;
use super::{CommandResult, Failure, print_json, train};
use crate::app::App;
use crate::plan::asked::{AskedJob, decided};
use crate::plan::goodput::ExpectedGoodput;
use crate::plan::machine::{KnownCluster, with_hosts};
use crate::plan::row::{HEADER, PlanRow, counted, lost_words, mesh_words, price_per_hour};
use crate::plan::searching::SearchLine;
use crate::plan::what_if::Change;
use crate::plan::{chosen, plot};
use crate::times;

/// How many of the choices that are not possible are shown.
const LOST_SHOWN: usize = 6;

/// Examples for `plan --help`.
const EXAMPLES: &str = "\
Examples:
  The best ways to train on this machine:
    polyreme plan job.toml
  On a cluster that a file describes, and put the best plan into the job file:
    polyreme plan job.toml --cluster cluster.toml --write
  Eight machines like this one, four ranks on each:
    polyreme plan job.toml --hosts 8 --ranks-per-host 4
  What if there were more hosts, or slower links:
    polyreme plan job.toml --cluster cluster.toml --what-if \"hosts=16,bandwidth=10G\"
  How much of the time counts if a host is lost every six hours:
    polyreme plan job.toml --cluster cluster.toml --lost-every 6h

Keys of `[parallel]` that the job sets are kept. Precision is searched if `train.precision = \"auto\"`. Times are simulated: they are as
good as the description of the machines. docs/planning.md says more.";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PlanArgs {
    /// The job file.
    #[arg(value_name = "JOB.toml")]
    job: Option<PathBuf>,
    #[command(flatten)]
    machines: MachineArgs,
    /// Ranks on each host [default: searched].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks_per_host: Option<u16>,
    /// Threads of each rank [default: the cores of a host, divided by its ranks].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Change a setting: `--set train.batch=128`; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// How many plans are shown, at most one of each mesh.
    #[arg(long, value_name = "N", default_value_t = 8)]
    top: usize,
    /// Put the best plan into the job file: keys that it does not set itself.
    #[arg(long, conflicts_with = "what_if")]
    write: bool,
    /// How times and costs move if something changes: hosts, bandwidth, latency, slow (a host), lost (hosts), batch.
    #[arg(long, value_name = "CHANGES")]
    what_if: Option<String>,
    /// What losses leave of a run's time, if a host is lost so often (of all hosts together): 6h, 30m.
    #[arg(long, value_name = "TIME", value_parser = times::duration)]
    lost_every: Option<Duration>,
    /// How long it takes until a lost host is replaced.
    #[arg(long, value_name = "TIME", value_parser = times::duration, default_value = "5m", requires = "lost_every")]
    replaced_after: Duration,
    /// Draw the times that are shown as an image (SVG).
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print JSON: one object per plan, best first.
    #[arg(long)]
    json: bool,
}

pub(super) fn plan(app: &App, args: &PlanArgs) -> CommandResult {
    let job = train::read_job(app, args.job.as_deref(), &args.sets)?;
    let said = decided(&job, said(&job, args.job.as_deref(), &args.sets)?);
    let changes = args.what_if.as_deref().map(Change::parse).transpose().map_err(Failure::usage)?;
    if args.write && args.job.is_none() {
        return Err(Failure::usage("--write needs a job file: `polyreme plan JOB.toml --write`"));
    }
    let known = args.machines.known(app)?;
    let mut asked = AskedJob::new(job.clone(), &said, app.given())?;
    let fixed = asked.fixed_mut();
    fixed.ranks_per_host = args.ranks_per_host.map(usize::from);
    fixed.threads = args.threads.map(usize::from).or(fixed.threads);
    if let Some(changes) = changes {
        return what_if(&mut asked, &known, &changes, args);
    }
    let line = SearchLine::begin();
    let watch = |progress| line.show(progress);
    let answer = asked.with(|question| {
        let mut planner = Planner::new(question).watched(&watch);
        let answer = planner.search(&known.cluster, SearchEffort::USUAL).map_err(Failure::usage)?;
        show(question, &asked, &known, &mut planner, &answer, args, &line)?;
        Ok::<SearchAnswer, Failure>(answer)
    })?;
    if args.write {
        let best = &answer.plans[0];
        let precision = asked.precision(best.choice.precision);
        let auto = job.train.precision == PrecisionKind::Auto;
        let keys = chosen::keys(best, &known.cluster, precision, &said, auto);
        write_keys(args.job.as_deref().unwrap_or(Path::new("")), &keys, args.json)?;
    }
    Ok(())
}

/// The keys that the job sets: of a file those that it has, of a job in Rust those that differ from the defaults.
pub(super) fn said(job: &Job, file: Option<&Path>, sets: &[String]) -> Result<BTreeSet<String>, Failure> {
    if let Some(file) = file {
        return Ok(said_keys(&fs::read_to_string(file)?, sets));
    }
    let values = |text: &str| -> BTreeSet<String> { text.lines().map(String::from).collect() };
    let usual = values(&Job::new(job.name.clone()).to_toml());
    let changed: Vec<String> = job
        .to_toml()
        .lines()
        .filter(|line| line.starts_with('[') || !usual.contains(*line))
        .map(String::from)
        .collect();
    Ok(said_keys(&changed.join("\n"), sets))
}

/// The best plans, one of each mesh.
fn of_each_mesh(plans: &[FoundPlan], top: usize) -> Vec<&FoundPlan> {
    let what = |choice: &PlanChoice| (choice.mesh, choice.seating, choice.precision);
    let mut shown: Vec<&FoundPlan> = Vec::new();
    for plan in plans {
        if shown.len() < top.max(1) && !shown.iter().any(|other| what(&other.choice) == what(&plan.choice)) {
            shown.push(plan);
        }
    }
    shown
}

fn show(
    question: &Question,
    asked: &AskedJob,
    known: &KnownCluster,
    planner: &mut Planner,
    answer: &SearchAnswer,
    args: &PlanArgs,
    line: &SearchLine,
) -> CommandResult {
    let cluster = &known.cluster;
    let Some(best) = answer.plans.first() else { return Err(nothing_fits(answer)) };
    let shown = of_each_mesh(&answer.plans, args.top);
    let row = |(i, plan): (usize, &&FoundPlan)| {
        let row = PlanRow::new(i + 1, plan, best, question, cluster, asked.epoch_samples);
        PlanRow { memory_mib: asked.run_bytes(plan, cluster) as f64 / f64::from(1 << 20), ..row }
    };
    let rows: Vec<PlanRow> = shown.iter().enumerate().map(row).collect();
    let shares = TimeShares::of(best, cluster);
    let more = more_hosts(question, planner, cluster, best);
    let goodput = args.lost_every.map(|every| ExpectedGoodput::new(asked, best, every, args.replaced_after));
    line.clear();
    if let Some(file) = &args.plot {
        let bar =
            |row: &PlanRow| (format!("{} ({})", row.mesh(), counted(row.hosts, "host")), Some(row.step_ms));
        fs::write(file, plot::bars("Time of a step", "ms", &rows.iter().map(bar).collect::<Vec<_>>()))?;
    }
    if args.json {
        for (i, row) in rows.iter().enumerate() {
            let mut object = serde_json::to_value(row)?;
            if let (0, Value::Object(fields)) = (i, &mut object) {
                let (by, share) = shares.largest();
                fields.insert("bound_by".into(), json!({ "what": by, "share": share }));
                let of = |(hosts, plan): &(usize, FoundPlan)| json!({ "hosts": hosts, "mesh": mesh_words(&plan.choice.mesh), "step_ms": plan.report.step_us / 1e3 });
                fields.insert("more_hosts".into(), more.iter().map(of).collect());
                if let Some(goodput) = &goodput {
                    fields.insert("goodput".into(), serde_json::to_value(goodput)?);
                }
            }
            print_json(&object)?;
        }
        return Ok(());
    }
    let mut out = io::stdout().lock();
    let cores = cluster.hosts.first().map_or(0, |host| host.cores);
    let (hosts, cores) = (counted(cluster.hosts.len(), "host"), counted(cores, "core"));
    writeln!(out, "{hosts} of {cores}, by {}", known.source)?;
    writeln!(
        out,
        "{}, {} simulated; a step has {}\n\n{HEADER}",
        counted(answer.considered, "choice"),
        answer.simulated,
        counted(question.batch, "sample")
    )?;
    for row in &rows {
        writeln!(out, "{}", row.line())?;
    }
    let percent = |share: f64| share * 100.0;
    writeln!(
        out,
        "\nthe best is bounded by {}: computing {:.0} %, memory bandwidth {:.0} %, bubble {:.0} %, waiting along data {:.0} %, \
         tensor {:.0} %, sequence {:.0} %",
        shares.largest().0,
        percent(shares.computing),
        percent(shares.memory),
        percent(shares.stage),
        percent(shares.data),
        percent(shares.tensor),
        percent(shares.sequence)
    )?;
    for (hosts, plan) in &more {
        let faster = best.report.step_us / plan.report.step_us;
        let (mesh, ms) = (mesh_words(&plan.choice.mesh), plan.report.step_us / 1e3);
        let used = plan.choice.seating.hosts;
        match used > best.choice.seating.hosts || faster > 1.01 {
            true => {
                writeln!(out, "with {hosts} hosts: {ms:.2} ms, {faster:.2} times as fast: {mesh} on {used}")?
            }
            false if used == 1 => writeln!(out, "with {hosts} hosts: no faster, 1 is enough")?,
            false => writeln!(out, "with {hosts} hosts: no faster, {used} are enough")?,
        }
    }
    if let Some(goodput) = &goodput {
        writeln!(out, "\n{goodput}")?;
    }
    // One of each mesh, the smallest first.
    let mut lost: Vec<_> =
        answer.lost.iter().filter(|(_, why)| !matches!(why, LostBy::Bound { .. })).collect();
    lost.sort_by_key(|(choice, _)| choice.mesh.ranks());
    let mut named = BTreeSet::new();
    lost.retain(|(choice, _)| named.insert(mesh_words(&choice.mesh)));
    lost.truncate(LOST_SHOWN);
    if !lost.is_empty() {
        writeln!(out, "\nnot possible, among others:")?;
    }
    for (choice, why) in lost {
        writeln!(out, "  {:<34} {}", mesh_words(&choice.mesh), lost_words(why))?;
    }
    if best.choice.seating.hosts == 1 && cluster.hosts.len() == 1 && args.job.is_some() {
        let ranks = counted(best.choice.mesh.ranks(), "rank");
        writeln!(out, "\nto run it: put it into the job file with --write, then `polyreme train` ({ranks})")?;
    }
    Ok(())
}

/// The best plans on two and on four times as many hosts.
fn more_hosts(
    question: &Question,
    planner: &mut Planner,
    cluster: &Cluster,
    best: &FoundPlan,
) -> Vec<(usize, FoundPlan)> {
    if question.fixed.ranks.is_some() {
        return Vec::new();
    }
    let hosts = [2, 4].map(|times| cluster.hosts.len() * times);
    let found = |hosts: usize| {
        let more = with_hosts(cluster, hosts);
        let answer = planner.search(&more, SearchEffort::LITTLE).ok()?;
        // Whoever has more hosts can leave them idle.
        let same = planner.again(best, &more).ok();
        let fastest = answer.plans.into_iter().take(1).chain(same);
        fastest.min_by(|a, b| a.report.step_us.total_cmp(&b.report.step_us)).map(|plan| (hosts, plan))
    };
    hosts.into_iter().filter_map(found).collect()
}

/// What is said if there is no plan: what is nearest to fitting; or why the job cannot be split so, if that is not a question of memory.
pub(super) fn nothing_fits(answer: &SearchAnswer) -> Failure {
    let short = |(choice, why): &(PlanChoice, LostBy)| match why {
        LostBy::Memory { needs, has } => {
            Some((needs / has, format!("{}: {}", mesh_words(&choice.mesh), lost_words(why))))
        }
        LostBy::Refused(_) | LostBy::Bound { .. } => None,
    };
    let nearest = answer.lost.iter().filter_map(short).min_by(|a, b| a.0.total_cmp(&b.0));
    if let Some((_, nearest)) = nearest {
        return Failure::usage(format!(
            "no plan fits; nearest: {nearest}; use more hosts or memory, a smaller batch, `train.precision = \"auto\"`, or fix fewer keys of \
             `[parallel]`"
        ));
    }
    // Refusals say what to write instead. Those of other meshes are consequences of the same keys.
    let refused = answer.lost.iter().map(|(_, why)| lost_words(why)).next();
    Failure::usage(
        refused.unwrap_or_else(|| "there is no way to split this job; fix fewer keys of `[parallel]`".into()),
    )
}

/// Puts keys into a job file, and checks that it reads as it should.
fn write_keys(file: &Path, keys: &[chosen::ChosenKey], json: bool) -> CommandResult {
    let text = fs::read_to_string(file)?;
    let changed = with_keys(&text, keys.iter().map(|k| (k.section, k.key, k.value.as_str())));
    let changed = changed.map_err(|e| Failure::usage(format!("{}: {e}", file.display())))?;
    let lines = || {
        keys.iter().map(|k| format!("  {}.{} = {}", k.section, k.key, k.value)).collect::<Vec<_>>().join("\n")
    };
    let base = std::path::absolute(file)?;
    let sets: Vec<String> = keys.iter().map(|k| format!("{}.{}={}", k.section, k.key, k.value)).collect();
    let origin = file.display().to_string();
    let folder = base.parent().unwrap_or(Path::new("/"));
    let read = Job::from_text(&changed, &origin, folder, &[]);
    let wanted = Job::from_text(&text, &origin, folder, &sets).map_err(Failure::job)?;
    if !read.is_ok_and(|job| job == wanted) {
        let why = format!(
            "{origin} is written in a way that cannot be changed here; add these keys by hand:\n{}",
            lines()
        );
        return Err(Failure::usage(why));
    }
    fs::write(file, changed)?;
    if !json {
        writeln!(io::stdout(), "\n{origin} now has:\n{}", lines())?;
    }
    Ok(())
}

/// One row of a table of changes.
struct Changed {
    what: String,
    same_us: Option<f64>,
    best: Option<FoundPlan>,
    cluster: Cluster,
    batch: usize,
}

/// How step time and cost move with each change, and with all of them.
fn what_if(asked: &mut AskedJob, known: &KnownCluster, changes: &[Change], args: &PlanArgs) -> CommandResult {
    let usual = asked.batch();
    let line = SearchLine::begin();
    let watch = |progress| line.show(progress);
    let first = asked.with(|question| {
        let mut planner = Planner::new(question).watched(&watch);
        let answer = planner.search(&known.cluster, SearchEffort::USUAL).map_err(Failure::usage)?;
        let plan = answer.plans.first().cloned();
        plan.ok_or_else(|| nothing_fits(&answer))
    })?;
    let as_it_is = Changed {
        what: "as it is".into(),
        same_us: Some(first.report.step_us),
        best: Some(first.clone()),
        cluster: known.cluster.clone(),
        batch: usual,
    };
    let mut rows = vec![as_it_is];
    let mut cases: Vec<Vec<Change>> = changes.iter().map(|change| vec![*change]).collect();
    if changes.len() > 1 {
        cases.push(changes.to_vec());
    }
    for case in cases {
        let mut cluster = known.cluster.clone();
        for change in &case {
            cluster = change.apply(&cluster).map_err(Failure::usage)?;
        }
        let batch = case.iter().find_map(Change::batch).unwrap_or(usual);
        asked.set_batch(batch);
        let row = asked.with(|question| {
            let mut planner = Planner::new(question).watched(&watch);
            let answer = planner.search(&cluster, SearchEffort::LITTLE).ok();
            // The plan as it was, where it still can be.
            let same = (batch == usual).then(|| planner.again(&first, &cluster).ok()).flatten();
            let same_us = same.as_ref().map(|plan| plan.report.step_us);
            let best = answer.and_then(|answer| answer.plans.into_iter().next());
            let best = [same, best]
                .into_iter()
                .flatten()
                .min_by(|a, b| a.report.step_us.total_cmp(&b.report.step_us));
            Changed { what: String::new(), same_us, best, cluster: cluster.clone(), batch }
        });
        let what = case.iter().map(Change::words).collect::<Vec<_>>().join(", ");
        rows.push(Changed { what, ..row });
    }
    asked.set_batch(usual);
    line.clear();
    if let Some(file) = &args.plot {
        let ms = |row: &Changed| row.best.as_ref().map(|plan| plan.report.step_us / 1e3);
        let bars: Vec<_> = rows.iter().map(|row| (row.what.clone(), ms(row))).collect();
        fs::write(file, plot::bars("Time of a step, with the best plan for each", "ms", &bars))?;
    }
    show_changes(&rows, asked.epoch_samples, args.json)
}

fn show_changes(rows: &[Changed], epoch_samples: Option<usize>, json: bool) -> CommandResult {
    let mut out = io::stdout().lock();
    if !json {
        writeln!(
            out,
            "{:<36} {:>12} {:>12} {:>11} {:>11}  best plan",
            "change", "same plan ms", "best ms", "samples/s", "cost/epoch"
        )?;
    }
    for row in rows {
        let cost = row.best.as_ref().and_then(|plan| {
            let steps = epoch_samples?.div_ceil(row.batch) as f64;
            let price = price_per_hour(&row.cluster, plan.choice.seating.hosts)?;
            Some(steps * plan.report.step_us / 1e6 / 3600.0 * price)
        });
        let best_ms = row.best.as_ref().map(|plan| plan.report.step_us / 1e3);
        let rate = row.best.as_ref().map(|plan| plan.report.samples_per_s(row.batch));
        let mesh = row.best.as_ref().map(|plan| mesh_words(&plan.choice.mesh));
        if json {
            let object = json!({
                "what_if": row.what, "hosts": row.cluster.hosts.len(), "batch": row.batch, "same_plan_ms": row.same_us.map(|us| us / 1e3),
                "step_ms": best_ms, "samples_per_s": rate, "epoch_cost": cost, "mesh": mesh,
            });
            serde_json::to_writer(&mut out, &object)?;
            writeln!(out)?;
            continue;
        }
        let number = |x: Option<f64>, digits: usize| x.map_or("-".to_string(), |x| format!("{x:.digits$}"));
        writeln!(
            out,
            "{:<36} {:>12} {:>12} {:>11} {:>11}  {}",
            row.what,
            number(row.same_us.map(|us| us / 1e3), 2),
            number(best_ms, 2),
            number(rate, 1),
            number(cost, 2),
            mesh.unwrap_or_else(|| "nothing fits".into())
        )?;
    }
    Ok(())
}
