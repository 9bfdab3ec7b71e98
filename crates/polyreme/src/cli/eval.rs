//! `polyreme eval`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use polyreme_data::{Dataset, Layout, Transform};
use polyreme_net::Doing;
use polyreme_train::evaluate::evaluate;
use polyreme_train::job::ParallelSpec;
use polyreme_train::judge::block_samples;
use polyreme_train::metrics::Measured;
use polyreme_train::run::Prepared;
use polyreme_train::trained::Trained;
use serde::Serialize;
use serde_json::{Map, Value};

use super::ranks::or_tell;
use super::used::{UseArgs, UsedModel, on_ranks};
use super::{CommandResult, Failure, print_json};
use crate::app::App;

/// Examples for `eval --help`.
const EXAMPLES: &str = "\
Examples:
  A run, on all cores; one that was trained with tensor or stage ranks is evaluated on as many:
    polyreme eval runs/digits
  The model split over four processes, whatever it was trained on:
    polyreme eval runs/gpt --processes 4 --set parallel.tensor=2 --set parallel.stage=2
    mpirun -n 4 polyreme eval runs/gpt --set parallel.tensor=2 --set parallel.stage=2
  Other data:
    polyreme eval runs/digits --on val --set data.path=other/folder";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    used: UseArgs,
    /// Which part of the data [default: test if there is one, else val, else train].
    #[arg(long, value_enum)]
    on: Option<DataSplit>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DataSplit {
    Train,
    Val,
    Test,
}

#[derive(Serialize)]
struct Report<'a> {
    model: PathBuf,
    step: u64,
    on: &'a str,
    samples: usize,
    seconds: f64,
    samples_per_s: f64,
    metrics: Map<String, Value>,
    confusion: Option<Vec<Vec<u64>>>,
    classes: &'a [String],
}

/// What is evaluated.
struct Evaluated {
    on: &'static str,
    set: Arc<dyn Dataset>,
    transform: Transform,
}

pub(super) fn eval(app: &App, args: &EvalArgs) -> CommandResult {
    let plan_for = |trained: &Trained, parallel: &ParallelSpec, ranks: usize| {
        let spec = trained.preparation().spec(Layout::Planes);
        trained.plan(&spec, block_samples(trained.net(), &spec)?, parallel, ranks)
    };
    let Some(used) = args.used.open(app, "eval", args.json, &plan_for)? else { return Ok(()) };
    let UsedModel { trained, plan, mut ranks } = used;
    let evaluated = or_tell(&mut ranks, |ranks| {
        ranks.comms.iter_mut().for_each(|comm| comm.set_doing(Doing::Preparing));
        open_set(app, args, &trained)
    })?;
    let threads = ranks.threads;
    on_ranks(ranks, |comm| {
        let (speaks, Evaluated { on, set, transform }) = (comm.rank() == 0, &evaluated);
        let n = block_samples(trained.net(), set.spec())?;
        let mut judge = trained.judge(set.spec(), n, &plan, threads, comm)?;
        let began = Instant::now();
        let scores = evaluate(&mut judge, set, transform, 1, &vec![1.0; plan.ranks()]);
        let scores = scores.inspect_err(|error| judge.fail(&error.to_string()))?;
        let seconds = began.elapsed().as_secs_f64();
        judge.leave().finish()?;
        if !speaks {
            return Ok(());
        }
        let names = &trained.preparation().names;
        let report = Report {
            model: trained.note.path.clone(),
            step: trained.note.step,
            on,
            samples: set.len(),
            seconds,
            samples_per_s: set.len() as f64 / seconds,
            metrics: scores.named(on).into_iter().map(|(name, value)| (name, value.into())).collect(),
            confusion: scores.confusion().map(|c| (0..c.classes()).map(|k| c.row(k).to_vec()).collect()),
            classes: names,
        };
        if args.json { print_json(&report) } else { show(&report, &scores, names) }
    })
}

/// Opens the set that is asked for.
fn open_set(app: &App, args: &EvalArgs, trained: &Trained) -> Result<Evaluated, Failure> {
    let job = args.used.data_job(trained)?;
    if job.data.spread {
        return Err(Failure::usage(
            "the data of this run lie on several hosts (`data.spread`), and `eval` reads those of its own host; where that has all \
             files, or is to read only its own, say so with `--set data.spread=false`",
        ));
    }
    let mut prepared = Prepared::to_use(job, app.given(), 1, trained.preparation())?;
    // Statistics are those of training, not of these data.
    prepared.stats = trained.preparation().stats();
    prepared.target_stats = trained.preparation().target_stats();
    let sets = &prepared.sets;
    let part = args.on.unwrap_or(match (&sets.test, &sets.validation) {
        (Some(_), _) => DataSplit::Test,
        (None, Some(_)) => DataSplit::Val,
        (None, None) => DataSplit::Train,
    });
    let (on, set) = match part {
        DataSplit::Train => ("train", Some(&sets.train)),
        DataSplit::Val => ("val", sets.validation.as_ref()),
        DataSplit::Test => ("test", sets.test.as_ref()),
    };
    let set = set.cloned().ok_or_else(|| {
        Failure::usage(format!("the job's data have no {on} set; `--on train` always works, and `--set data.validation=0.1` splits off a validation set"))
    })?;
    Ok(Evaluated { on, transform: prepared.plain_transform(set.as_ref())?, set })
}

fn show(report: &Report, scores: &Measured, names: &[String]) -> CommandResult {
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{} (step {}) on the {} set, {} samples",
        report.model.display(),
        report.step,
        report.on,
        report.samples
    )?;
    for (name, value) in scores.named(report.on) {
        writeln!(out, "  {name:<16} {value:.4}")?;
    }
    writeln!(out, "  {:.0} samples/s", report.samples_per_s)?;
    if let Some(confusion) = scores.confusion() {
        writeln!(out, "\n{}", confusion.with_names(names))?;
    }
    Ok(())
}
