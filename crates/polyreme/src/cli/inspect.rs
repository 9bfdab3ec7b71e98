//! `polyreme inspect`: what is in a run, a checkpoint, a weights file, a job or a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use polyreme_data::Layout;
use polyreme_graph::dot::dot;
use polyreme_graph::{DType, Graph, Precision, Program};
use polyreme_parallel::{Plan, Training, Updates};
use polyreme_train::checkpoint::{self, GivenPath};
use polyreme_train::job::OptimizerSpec;
use polyreme_train::ledger::LedgerReport;
use polyreme_train::loss::Loss;
use polyreme_train::lower::{Lowering, forward_in, training_graph};
use polyreme_train::record::history::{Column, History};
use polyreme_train::run::{Prepared, Progress, kernels};
use polyreme_train::trained::Trained;
use polyreme_train::weights::WeightsFile;
use serde::Serialize;
use serde_json::json;

use super::compared::ComparedRun;
use super::ending::Failure;
use super::timeline::TimelineArgs;
use super::{CommandResult, columns, print_json, train};
use crate::app::App;
use crate::process;

#[derive(Args)]
pub(super) struct InspectArgs {
    /// A run's folder, a checkpoint, a `.safetensors` file, or a job file; with `--timeline`, also what `--trace` wrote; with `--data`, a
    /// table or a job file.
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// Print the graph instead: as text, as DOT for Graphviz, or as the program of a whole training step.
    #[arg(long, value_enum, value_name = "FORM")]
    graph: Option<Form>,
    /// Of a job file, with `--graph program`: the rank whose program is printed.
    #[arg(long, value_name = "R", default_value_t = 0)]
    rank: usize,
    /// Show the columns of a table, or of a job's table: type, a picture of the values, blanks, range and different values.
    #[arg(long, conflicts_with_all = ["graph", "timeline"])]
    data: bool,
    #[command(flatten)]
    timeline: TimelineArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    Text,
    Dot,
    Program,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    elements: usize,
    dtype: &'static str,
    #[serde(skip)]
    bytes: usize,
}

impl Tensor {
    fn new(name: &str, dims: &[usize], dtype: DType) -> Tensor {
        let elements = dims.iter().product();
        let (dtype, bytes) = (dtype.name(), elements * dtype.bytes());
        Tensor { name: name.into(), shape: dims.to_vec(), elements, dtype, bytes }
    }
}

pub(super) fn inspect(app: &App, args: &InspectArgs) -> CommandResult {
    args.timeline.check()?;
    if let Some(picture) = &args.timeline.timeline {
        return args.timeline.draw(app, &args.path, picture, args.json);
    }
    if args.data {
        return columns::show(&args.path, args.json);
    }
    if args.path.extension().is_some_and(|e| e == "toml") {
        return inspect_job(app, args);
    }
    let place = checkpoint::resolve(&args.path)?;
    if let GivenPath::Weights(file) = &place {
        let found = WeightsFile::read(file)?;
        let tensors: Vec<_> = found.weights.iter().map(|w| Tensor::new(&w.name, &w.dims, w.dtype)).collect();
        show_about(&found.about, args.json)?;
        return show_tensors(&tensors, args.json);
    }
    let trained = Trained::open(&args.path, &app.given())?;
    if let Some(form) = args.graph {
        let spec = trained.preparation().spec(Layout::Planes);
        let graph = training_graph(trained.net(), &spec, trained.job.train.batch, Loss::default())?;
        let OptimizerSpec { rule: optimizer, moments, .. } = trained.job.train.optimizer;
        let precision = trained.job.precision();
        let lone = Lowering {
            training: Training {
                optimizer,
                moments,
                clip: trained.job.train.clip,
                ema: trained.job.train.ema,
                scaled: precision.scales_loss(),
            },
            plan: Plan { updates: Updates::AtOnce, precision: precision.clone(), ..Plan::alone() },
            budget_bytes: None,
            threads: 1,
            isa: app.given().isa,
        };
        return show_graph(&graph, &precision, form, || Ok(lone.program(&graph)?));
    }
    let loaded = trained.loaded.as_ref().expect("it was opened here");
    let tensors: Vec<_> = loaded
        .needed(checkpoint::MODEL_FILE)?
        .shapes
        .iter()
        .map(|s| Tensor::new(&s.name, &s.dims, DType::F32))
        .collect();
    let manifest = &loaded.manifest;
    let progress = Progress::of(loaded)?;
    let classes = kernels::known(&progress.kernels);
    let ledger = progress.ledger.as_ref().map(|ledger| ledger.report(manifest.step));
    let history = History::read(&trained.folder().join("metrics.jsonl")).unwrap_or_default();
    let compared = ComparedRun::of(&trained.folder(), &history);
    if args.json {
        let others: Vec<_> = checkpoint::list(&trained.folder())?.iter().map(|e| e.step).collect();
        print_json(&json!({
            "checkpoint": loaded.path, "step": manifest.step, "epoch": manifest.epoch,
            "metrics": manifest.metrics, "bytes": manifest.n_bytes(), "checkpoints": others,
            "kernels": progress.kernels, "degrees": progress.degrees, "ledger": ledger, "parameters": tensors, "history": history_json(&history),
            "planned": compared,
        }))?;
        return counted_once(ledger.as_ref());
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{}", loaded.path.display())?;
    writeln!(
        out,
        "  step {}, epoch {}, {}",
        manifest.step,
        manifest.epoch,
        mib(manifest.n_bytes() as usize)
    )?;
    if !classes.is_empty() {
        writeln!(out, "  products are summed {}", kernels::words(&classes))?;
    }
    if let Some(degrees) = &progress.degrees {
        writeln!(out, "  reproducible on any number of data ranks and stages with {}", degrees.words())?;
    }
    if let Some(ledger) = &ledger {
        writeln!(out, "  {ledger}")?;
    }
    for (name, value) in &manifest.metrics {
        writeln!(out, "  {name:<16} {value:.4}")?;
    }
    drop(out);
    show_checkpoints(&trained.folder())?;
    show_history(&history)?;
    if let Some(compared) = &compared {
        compared.show()?;
    }
    writeln!(io::stdout())?;
    show_tensors(&tensors, false)?;
    counted_once(ledger.as_ref())
}

/// Fails where samples were left out or counted twice.
fn counted_once(ledger: Option<&LedgerReport>) -> CommandResult {
    match ledger {
        Some(report) if report.exact == Some(false) => {
            Err(Failure::world(format!("the ledger of samples does not add up: {report}")))
        }
        _ => Ok(()),
    }
}

fn inspect_job(app: &App, args: &InspectArgs) -> CommandResult {
    let job = train::read_job(app, Some(&args.path), &[])?;
    let prepared = Prepared::new(job, app.given(), process::cores())?;
    let graph = training_graph(&prepared.net, &prepared.spec, prepared.micro(), prepared.learner.loss)?;
    if let Some(form) = args.graph {
        let ranks = prepared.ranks();
        if args.rank >= ranks {
            let last = ranks - 1;
            let why = format!("there is no rank {}: the last one of this job is {last}", args.rank);
            return Err(Failure::usage(why));
        }
        let precision = &prepared.learner.plan.precision;
        return show_graph(&graph, precision, form, || Ok(prepared.program(args.rank)?));
    }
    let tensors: Vec<_> = graph
        .params
        .iter()
        .chain(&graph.states)
        .map(|p| Tensor::new(&p.name, graph.shape(p.value).dims(), DType::F32))
        .collect();
    show_tensors(&tensors, args.json)
}

fn show_graph(
    graph: &Graph,
    precision: &Precision,
    form: Form,
    program: impl FnOnce() -> Result<Program, Failure>,
) -> CommandResult {
    let text = match form {
        Form::Text => forward_in(graph, precision)?.to_string(),
        Form::Dot => dot(&forward_in(graph, precision)?),
        Form::Program => program()?.to_string(),
    };
    Ok(io::stdout().lock().write_all(text.as_bytes())?)
}

/// What a file says of itself: as JSON one line, of which those texts that are JSON are a part.
fn show_about(about: &BTreeMap<String, String>, json: bool) -> CommandResult {
    let texts = about.iter().filter(|(key, _)| *key != "format");
    if json {
        let parsed = |text: &String| serde_json::from_str(text).unwrap_or_else(|_| json!(text));
        let texts: serde_json::Map<_, _> = texts.map(|(key, text)| (key.clone(), parsed(text))).collect();
        return if texts.is_empty() { Ok(()) } else { print_json(&json!({ "about": texts })) };
    }
    let mut out = io::stdout().lock();
    for (key, text) in texts {
        match text.trim().contains('\n') {
            false => writeln!(out, "  {key}: {text}")?,
            true => {
                writeln!(out, "  {key}:")?;
                text.trim().lines().try_for_each(|line| writeln!(out, "    {line}"))?;
            }
        }
    }
    Ok(())
}

fn show_tensors(tensors: &[Tensor], json: bool) -> CommandResult {
    if json {
        return tensors.iter().try_for_each(print_json);
    }
    let wide = tensors.iter().map(|t| t.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for t in tensors {
        writeln!(
            text,
            "  {:<wide$}  {:<20} {:>12} {}",
            t.name,
            format!("{:?}", t.shape),
            t.elements,
            t.dtype
        )?;
    }
    let total: usize = tensors.iter().map(|t| t.elements).sum();
    let bytes: usize = tensors.iter().map(|t| t.bytes).sum();
    writeln!(text, "  {} tensors, {total} elements, {}", tensors.len(), mib(bytes))?;
    Ok(io::stdout().lock().write_all(text.as_bytes())?)
}

fn show_checkpoints(folder: &Path) -> CommandResult {
    let mut out = io::stdout().lock();
    writeln!(out, "\n  checkpoints")?;
    for entry in checkpoint::list(folder)? {
        let best = if entry.is_best { " (best)" } else { "" };
        let state = entry.manifest.map_or_else(|e| format!("damaged: {e}"), |m| mib(m.n_bytes() as usize));
        writeln!(out, "  step {:>8}  {state}{best}", entry.step)?;
    }
    Ok(())
}

/// The evaluations of a run, a line each; the middle of a long list is left out.
fn show_history(history: &History) -> CommandResult {
    const SHOWN: usize = 12;
    let columns: Vec<_> = history.columns().filter(|(name, _)| name.starts_with("val_")).collect();
    let Some((_, first)) = columns.first() else { return Ok(()) };
    let mut out = io::stdout().lock();
    write!(out, "\n  {:>8}", "step")?;
    for (name, _) in &columns {
        write!(out, "  {name:>14}")?;
    }
    writeln!(out)?;
    let n = first.steps.len();
    for i in 0..n {
        if n > 2 * SHOWN && (SHOWN..n - SHOWN).contains(&i) {
            if i == SHOWN {
                writeln!(out, "       ...")?;
            }
            continue;
        }
        write!(out, "  {:>8}", first.steps[i])?;
        for (_, column) in &columns {
            match column.values.get(i) {
                Some(value) => write!(out, "  {value:>14.4}")?,
                None => write!(out, "  {:>14}", "")?,
            }
        }
        writeln!(out)?;
    }
    Ok(())
}

fn history_json(history: &History) -> serde_json::Map<String, serde_json::Value> {
    let column =
        |(name, c): (&str, &Column)| (name.to_string(), json!({"steps": c.steps, "values": c.values}));
    history.columns().map(column).collect()
}

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
