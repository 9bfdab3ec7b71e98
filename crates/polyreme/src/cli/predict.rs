//! `polyreme predict`: labels with probabilities, or text that goes on.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use polyreme_data::images::decode_file;
use polyreme_data::table::{Table, TableOptions};
use polyreme_data::{Augment, Dataset, InMemory, Layout, Tokenizer, Transform};
use polyreme_train::evaluate::logits;
use polyreme_train::generate::{Sampling, generate};
use polyreme_train::job::Source;
use polyreme_train::preparation::Sample;
use polyreme_train::trained::Trained;
use serde::Serialize;

use super::{Failure, Outcome, print_json};
use crate::app::App;
use crate::process;

/// Samples that are predicted at once.
const BATCH: usize = 64;

#[derive(Args)]
pub(super) struct PredictArgs {
    /// A run's folder (its best checkpoint counts), or a checkpoint.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Images (PNG, JPEG), tables (CSV with the columns of the training file, in any order if they have names; the label
    /// may be left out), or text files to go on from.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Text to go on from.
    #[arg(long, value_name = "TEXT", conflicts_with = "files")]
    prompt: Option<String>,
    /// How many labels to show for each sample.
    #[arg(long, value_name = "N", default_value_t = 3)]
    top: usize,
    /// How many tokens to write.
    #[arg(long, value_name = "N", default_value_t = 300)]
    length: usize,
    /// 0: always the likeliest token; 1: as the model says; more: wilder.
    #[arg(long, value_name = "T", default_value_t = 0.8)]
    temperature: f64,
    /// Draw only from so many of the likeliest tokens; 0: from all.
    #[arg(long, value_name = "N", default_value_t = 0)]
    from_top: usize,
    /// From which the draws follow.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print a JSON object a sample.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Prediction<'a> {
    sample: &'a str,
    labels: Vec<Answer>,
}

#[derive(Serialize)]
struct Answer {
    label: String,
    probability: f64,
}

#[derive(Serialize)]
struct Continuation<'a> {
    prompt: &'a str,
    text: String,
}

pub(super) fn predict(app: &App, args: &PredictArgs) -> Outcome {
    let trained = Trained::open(&args.run, &app.given())?;
    match trained.preparation.sample {
        Sample::Ids { .. } if trained.preparation.classes == 0 => write_on(&trained, args),
        Sample::Ids { .. } => {
            Err(Failure::usage("a classifier of ids takes arrays, which `predict` does not read; use `eval`"))
        }
        _ if args.files.is_empty() => {
            Err(Failure::usage("files to predict are needed: `polyreme predict RUN FILE...`"))
        }
        Sample::Image { .. } => {
            let spec = trained.preparation.spec(Layout::Interleaved);
            let mut pixels = Vec::new();
            for file in &args.files {
                pixels.extend(decode_file(file, &spec.features, app.given().isa)?);
            }
            let set = InMemory::new(spec, pixels, vec![0; args.files.len()])?;
            let names: Vec<_> = args.files.iter().map(|f| f.display().to_string()).collect();
            label(&trained, Arc::new(set), &names, args)
        }
        Sample::Row { width } => {
            for file in &args.files {
                let (set, names) = table(&trained, file, width)?;
                label(&trained, Arc::new(set), &names, args)?;
            }
            Ok(())
        }
    }
}

/// The rows of a table, and what each is called.
fn table(trained: &Trained, file: &Path, width: usize) -> Result<(Table, Vec<String>), Failure> {
    let columns = trained.preparation.columns();
    let options = match &trained.job.data.source {
        Source::Csv { delimiter, label, .. } => {
            TableOptions { delimiter: *delimiter, label: label.clone(), columns, ..TableOptions::default() }
        }
        _ => TableOptions { columns, ..TableOptions::default() },
    };
    let target = trained.preparation.spec(Layout::Planes).target;
    let set = Table::features_only(file, width, &options)?.with_classes(&target)?;
    let names = (1..=set.len()).map(|row| format!("{}:{row}", file.display())).collect();
    Ok((set, names))
}

fn label(trained: &Trained, set: Arc<dyn Dataset>, names: &[String], args: &PredictArgs) -> Outcome {
    let preparation = &trained.preparation;
    let spec = set.spec().clone();
    let transform = Transform::new(&spec, preparation.stats().as_ref(), Augment::default())?;
    let mut judge = trained.judge(&spec, BATCH.min(set.len()).max(1), process::cores())?;
    let mut out = io::stdout().lock();
    let mut row = 0;
    logits(&mut judge, &set, &transform, &mut |logits: &[f32]| {
        let labels = ranked(logits, args.top.max(1), |k| preparation.class_name(k));
        let prediction = Prediction { sample: &names[row], labels };
        row += 1;
        if args.json {
            serde_json::to_writer(&mut out, &prediction)?;
            return writeln!(out);
        }
        let labels = prediction.labels.iter().map(|a| format!("{} {:.1}%", a.label, a.probability * 100.0));
        writeln!(out, "{}  {}", prediction.sample, labels.collect::<Vec<_>>().join("  "))
    })?;
    Ok(())
}

/// The likeliest labels, with their probabilities.
fn ranked(logits: &[f32], top: usize, name: impl Fn(usize) -> String) -> Vec<Answer> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|l| f64::from(l - best).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let answer = |&k: &usize| Answer { label: name(k), probability: weights[k] / total };
    order.iter().take(top).map(answer).collect()
}

fn write_on(trained: &Trained, args: &PredictArgs) -> Outcome {
    let tokenizer = match &trained.preparation.tokenizer {
        Some(path) => Tokenizer::from_file(path)?,
        None => Tokenizer::bytes(),
    };
    let how =
        Sampling { length: args.length, temperature: args.temperature, top: args.from_top, seed: args.seed };
    let mut prompts: Vec<String> = args.prompt.iter().cloned().collect();
    for file in &args.files {
        let text =
            std::fs::read_to_string(file).map_err(|e| Failure::usage(format!("{}: {e}", file.display())))?;
        prompts.push(text);
    }
    if prompts.is_empty() {
        prompts.push("\n".into());
    }
    for prompt in &prompts {
        let mut out = io::stdout();
        if !args.json {
            write!(out, "{prompt}")?;
        }
        let (mut pending, mut broken) = (Vec::new(), None);
        let ids = generate(trained, &tokenizer, prompt, how, process::cores(), &mut |id| {
            if args.json || broken.is_some() {
                return;
            }
            // Tokens may end inside a character: what is whole is written.
            pending.extend(tokenizer.decode_bytes(&[id]));
            let whole = match std::str::from_utf8(&pending) {
                Ok(_) => pending.len(),
                Err(e) if e.error_len().is_none() => e.valid_up_to(),
                Err(_) => pending.len(),
            };
            let text = String::from_utf8_lossy(&pending[..whole]).into_owned();
            pending.drain(..whole);
            broken = out.write_all(text.as_bytes()).and_then(|()| out.flush()).err();
        })?;
        if let Some(error) = broken {
            return Err(error.into());
        }
        match args.json {
            true => print_json(&Continuation { prompt, text: tokenizer.decode(&ids) })?,
            false => writeln!(io::stdout())?,
        }
    }
    Ok(())
}
