//! `polyreme eval`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use polyreme_train::evaluate::evaluate;
use polyreme_train::judge::block_samples;
use polyreme_train::metrics::Measured;
use polyreme_train::run::Prepared;
use polyreme_train::trained::Trained;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{CommandResult, Failure, print_json, train};
use crate::app::App;
use crate::process;

#[derive(Args)]
pub(super) struct EvalArgs {
    /// A run's folder (its best checkpoint is used), or a checkpoint.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Which part of the data [default: test if there is one, else val, else train].
    #[arg(long, value_enum)]
    on: Option<DataSplit>,
    /// Change a setting, such as `data.path=other/folder`.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
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

pub(super) fn eval(app: &App, args: &EvalArgs) -> CommandResult {
    let trained = Trained::open(&args.run, &app.given())?;
    let job = train::stored_job(&trained.loaded.manifest.job, &trained.folder(), &args.sets)?;
    let mut prepared = Prepared::to_use(job, app.given(), process::cores(), &trained.preparation)?;
    // Statistics are those of training, not of these data.
    prepared.stats = trained.preparation.stats();
    prepared.target_stats = trained.preparation.target_stats();
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
    let set = set.ok_or_else(|| {
        Failure::usage(format!("the job's data have no {on} set; `--on train` always works, and `--set data.validation=0.1` splits off a validation set"))
    })?;
    // This process may use all cores.
    let mut judge = trained.judge(set.spec(), block_samples(trained.net(), set.spec())?, process::cores())?;
    let began = Instant::now();
    let scores = evaluate(&mut judge, set, &prepared.plain_transform(set.as_ref())?, 1)?;
    let seconds = began.elapsed().as_secs_f64();
    let names = &trained.preparation.names;
    let report = Report {
        model: trained.loaded.path.clone(),
        step: trained.loaded.manifest.step,
        on,
        samples: set.len(),
        seconds,
        samples_per_s: set.len() as f64 / seconds,
        metrics: scores.named(on).into_iter().map(|(name, value)| (name, value.into())).collect(),
        confusion: scores.confusion().map(|c| (0..c.classes()).map(|k| c.row(k).to_vec()).collect()),
        classes: names,
    };
    if args.json { print_json(&report) } else { show(&report, &scores, names) }
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
