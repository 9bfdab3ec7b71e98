//! `polyreme predict`: labels with probabilities, numbers, or text that goes on.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use polyreme_data::images::{decode_file, listed};
use polyreme_data::shards::decode_tar;
use polyreme_data::table::{Table, TableFormat, TableOptions, WordPlace};
use polyreme_data::{Augment, Dataset, InMemory, Layout, Stats, Target, Tokenizer, Transform};
use polyreme_net::Doing;
use polyreme_train::generate::{NextToken, Sampling, generate};
use polyreme_train::job::{ParallelSpec, Source};
use polyreme_train::predict::Predictor;
use polyreme_train::preparation::Sample;
use polyreme_train::sets::label_options;
use polyreme_train::texts::to_use;
use polyreme_train::trained::Trained;
use serde::Serialize;

use super::ranks::or_tell;
use super::used::{UseArgs, UsedModel, on_ranks};
use super::{CommandResult, Failure, print_json};
use crate::app::App;

/// Samples that are predicted at once.
const BATCH: usize = 64;

/// Examples for `predict --help`.
const EXAMPLES: &str = "\
Examples:
  Labels for images, on all cores:
    polyreme predict runs/digits seven.png three.png
  Text, with a model that four ranks have together:
    polyreme predict runs/gpt --prompt 'Once' --processes 4 --set parallel.tensor=2 --set parallel.stage=2

A model that was trained with tensor or stage ranks is used by as many; `--ranks 1` puts all of it on one.";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PredictArgs {
    #[command(flatten)]
    used: UseArgs,
    /// Images (PNG, JPEG) or tables that name some (paths are relative to the job's `data.path`), tables (CSV, JSON lines or Parquet with the columns of the training file, in any order if they have names; the label
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

/// The tags of a sample's words.
#[derive(Serialize)]
struct Tagged<'a> {
    sample: &'a str,
    words: Vec<TaggedWord<'a>>,
}

#[derive(Serialize)]
struct TaggedWord<'a> {
    word: &'a str,
    /// The likeliest tag; none of a word that is beyond the length that the model takes.
    tag: Option<&'a Answer>,
}

#[derive(Serialize)]
struct Numbers<'a> {
    sample: &'a str,
    values: &'a [f64],
    /// Their names, if there are.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    targets: &'a [String],
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

/// What is predicted.
enum Asked {
    /// Labels, or numbers, of some sets.
    Sets(Vec<AskedSet>),
    /// How texts go on.
    Prompts(Tokenizer, Vec<String>),
}

/// A set, a name for each sample, and where the words of each are, if they are to have tags.
struct AskedSet {
    set: Arc<dyn Dataset>,
    names: Vec<String>,
    words: Vec<Vec<WordPlace>>,
}

pub(super) fn predict(app: &App, args: &PredictArgs) -> CommandResult {
    let plan_for = |trained: &Trained, parallel: &ParallelSpec, ranks: usize| match writes_text(trained) {
        true => NextToken::plan(trained, parallel, ranks),
        false => trained.plan(&trained.preparation().spec(Layout::Planes), BATCH, parallel, ranks),
    };
    let Some(used) = args.used.open(app, "predict", args.json, &plan_for)? else { return Ok(()) };
    let UsedModel { trained, plan, mut ranks } = used;
    let asked = or_tell(&mut ranks, |ranks| {
        ranks.comms.iter_mut().for_each(|comm| comm.set_doing(Doing::Preparing));
        read_asked(app, args, &trained)
    })?;
    let threads = ranks.threads;
    on_ranks(ranks, |comm| match &asked {
        Asked::Prompts(tokenizer, prompts) => {
            let speaks = comm.rank() == 0;
            let mut next = NextToken::new(&trained, &plan, threads, comm)?;
            let written = write_on(&mut next, tokenizer, prompts, args, speaks);
            written.inspect_err(|failure| next.fail(&failure.message))?;
            Ok(next.leave().finish()?)
        }
        Asked::Sets(sets) => {
            let Some(spec) = sets.first().map(|asked| asked.set.spec()) else { return Ok(()) };
            let speaks = comm.rank() == 0;
            let longest = sets.iter().map(|asked| asked.set.len().div_ceil(plan.ranks())).max().unwrap_or(0);
            let n = BATCH.min(longest).max(1);
            let mut predictor = Predictor::new(&trained, spec, n, &plan, threads, comm)?;
            let labelled =
                sets.iter().try_for_each(|asked| label(&trained, &mut predictor, asked, args, speaks));
            labelled.inspect_err(|failure| predictor.fail(&failure.message))?;
            Ok(predictor.leave().finish()?)
        }
    })
}

/// Whether the model is asked how texts go on.
fn writes_text(trained: &Trained) -> bool {
    trained.preparation().spec(Layout::Planes).target == Target::NextId
}

/// Reads what is to be predicted.
fn read_asked(app: &App, args: &PredictArgs, trained: &Trained) -> Result<Asked, Failure> {
    let job = args.used.data_job(trained)?;
    match &trained.preparation().sample {
        Sample::Ids { .. } if writes_text(trained) => read_prompts(args, trained),
        Sample::Ids { .. } => Err(Failure::usage(
            "a model that labels ids takes arrays, which `predict` does not read; use `eval`",
        )),
        _ if args.files.is_empty() => {
            Err(Failure::usage("files to predict are needed: `polyreme predict RUN FILE...`"))
        }
        Sample::Image { .. } => {
            let spec = trained.preparation().spec(Layout::Interleaved);
            let mut pixels = Vec::new();
            let mut names = Vec::new();
            for file in &args.files {
                let isa = app.given().isa;
                if file.extension().is_some_and(|e| e.eq_ignore_ascii_case("tar")) {
                    for (member, image) in decode_tar(file, &spec.features, isa)? {
                        names.push(file.join(member).display().to_string());
                        pixels.extend(image);
                    }
                    continue;
                }
                let files = match TableFormat::of(file) {
                    Some(_) => named_images(&job.data.source, file)?,
                    None => vec![file.clone()],
                };
                for file in files {
                    names.push(file.display().to_string());
                    pixels.extend(decode_file(&file, &spec.features, isa)?);
                }
            }
            let (n, each) = (names.len(), spec.n_labels());
            let set = match spec.target.is_values() {
                false => InMemory::new(spec, pixels, vec![0; n])?,
                true => InMemory::with_values(spec, pixels, vec![0.0; n * each])?,
            };
            Ok(Asked::Sets(vec![AskedSet { set: Arc::new(set), names, words: Vec::new() }]))
        }
        Sample::Row { .. } | Sample::Mixed { .. } | Sample::Texts { .. } => {
            let width = trained.preparation().spec(Layout::Planes).features.numel();
            let table = |file: &PathBuf| -> Result<AskedSet, Failure> {
                let (set, names) = table(trained, &job.data.source, file, width)?;
                let words = set.words().to_vec();
                Ok(AskedSet { set: Arc::new(set), names, words })
            };
            Ok(Asked::Sets(args.files.iter().map(table).collect::<Result<_, _>>()?))
        }
    }
}

/// The images that a table names, as the tables of labels in training did; it need not have labels.
fn named_images(source: &Source, file: &Path) -> Result<Vec<PathBuf>, Failure> {
    let Source::Images { path, table, .. } = source else {
        let why = format!(
            "{}: a table names images in the folder `data.path`, and this model was not trained on images of a folder; \
             give the images themselves",
            file.display()
        );
        return Err(Failure::usage(why));
    };
    let table = Table::features_only(file, 1, &label_options(file, &table.image)?)?;
    Ok(listed(path, &table)?)
}

/// The rows of a table, and what each is called.
fn table(
    trained: &Trained,
    source: &Source,
    file: &Path,
    width: usize,
) -> Result<(Table, Vec<String>), Failure> {
    let columns = trained.preparation().columns();
    let schema = trained.preparation().schema.clone().map(Arc::new);
    let options = match source {
        Source::Table { format, delimiter, label, choice, .. } => TableOptions {
            texts: to_use(&choice.text, trained.preparation())?,
            format: TableFormat::of(file).unwrap_or(*format),
            delimiter: *delimiter,
            labels: choice.text.tags.clone().map_or_else(|| label.clone(), |tags| vec![tags]),
            columns,
            schema,
            ..TableOptions::default()
        },
        _ => TableOptions { columns, schema, ..TableOptions::default() },
    };
    let target = trained.preparation().spec(Layout::Planes).target;
    let set = Table::features_only(file, width, &options)?.with_target(&target)?;
    let names = (1..=set.len()).map(|row| format!("{}:{row}", file.display())).collect();
    Ok((set, names))
}

/// Predicts the samples of a set; the rank that speaks prints.
fn label(
    trained: &Trained,
    predictor: &mut Predictor,
    AskedSet { set, names, words }: &AskedSet,
    args: &PredictArgs,
    speaks: bool,
) -> CommandResult {
    let (preparation, spec) = (trained.preparation(), set.spec());
    let transform = Transform::new(spec, preparation.stats().as_ref(), Augment::default())?;
    if !speaks {
        return Ok(predictor.logits(set, &transform, &mut |_| Ok(()))?);
    }
    let mut out = io::stdout().lock();
    if let Target::Tags { .. } = spec.target {
        let (rows, mut row, mut found) = (spec.n_rows(), 0, Vec::new());
        return Ok(predictor.logits(set, &transform, &mut |logits: &[f32]| {
            let (sample, at) = (row / rows, row % rows);
            row += 1;
            if words[sample].iter().any(|(_, place)| *place == Some(at)) {
                found.extend(ranked(logits, 1, |k| preparation.class_name(k)));
            }
            if at + 1 < rows {
                return Ok(());
            }
            // Words are in the order of their tokens.
            let mut tags = found.drain(..);
            let tagged = |(word, place): &'_ WordPlace| (word.clone(), place.and_then(|_| tags.next()));
            let tagged: Vec<(String, Option<Answer>)> = words[sample].iter().map(tagged).collect();
            write_tags(&mut out, &names[sample], tagged, args.json)
        })?);
    }
    let mut row = 0;
    let units = preparation.target_stats();
    predictor.logits(set, &transform, &mut |logits: &[f32]| {
        let sample = &names[row];
        row += 1;
        if let Target::Numbers { names, .. } = &spec.target {
            let values = &brought_back(logits, units.as_ref());
            return match args.json {
                true => json_line(&mut out, &Numbers { sample, values, targets: names }),
                false => writeln!(out, "{sample}  {}", numbers(values, names)),
            };
        }
        let labels = match spec.target {
            Target::Labels { .. } => each_label(logits, |k| preparation.class_name(k)),
            _ => ranked(logits, args.top.max(1), |k| preparation.class_name(k)),
        };
        let mut prediction = Prediction { sample, labels };
        if args.json {
            return json_line(&mut out, &prediction);
        }
        if matches!(spec.target, Target::Labels { .. }) {
            prediction.labels.retain(|answer| answer.probability > 0.5);
            if prediction.labels.is_empty() {
                return writeln!(out, "{sample}  none");
            }
        }
        let labels = prediction.labels.iter().map(|a| format!("{} {:.1}%", a.label, a.probability * 100.0));
        writeln!(out, "{}  {}", prediction.sample, labels.collect::<Vec<_>>().join("  "))
    })?;
    Ok(())
}

/// One line with the words of a sample and their tags.
fn write_tags(
    out: &mut impl Write,
    sample: &str,
    tagged: Vec<(String, Option<Answer>)>,
    json: bool,
) -> io::Result<()> {
    if json {
        let words = tagged.iter().map(|(word, tag)| TaggedWord { word, tag: tag.as_ref() }).collect();
        return json_line(out, &Tagged { sample, words });
    }
    let word = |(word, tag): &(String, Option<Answer>)| {
        format!("{word}/{}", tag.as_ref().map_or("?", |tag| tag.label.as_str()))
    };
    writeln!(out, "{sample}  {}", tagged.iter().map(word).collect::<Vec<_>>().join(" "))
}

fn json_line(out: &mut impl Write, of: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, of)?;
    writeln!(out)
}

/// Numbers in units of the data.
fn brought_back(outputs: &[f32], units: Option<&Stats>) -> Vec<f64> {
    let in_units = |(k, &y): (usize, &f32)| match units {
        Some(Stats { mean, std }) => f64::from(y) * f64::from(std[k]) + f64::from(mean[k]),
        None => f64::from(y),
    };
    outputs.iter().enumerate().map(in_units).collect()
}

/// Numbers with their names, if there are; as many digits as an f32 holds.
fn numbers(values: &[f64], names: &[String]) -> String {
    let shown = values.iter().enumerate().map(|(k, &value)| match names.get(k) {
        Some(name) => format!("{name} {}", value as f32),
        None => (value as f32).to_string(),
    });
    shown.collect::<Vec<_>>().join("  ")
}

/// Every label with its probability, the likeliest first.
fn each_label(logits: &[f32], name: impl Fn(usize) -> String) -> Vec<Answer> {
    let probability = |logit: f32| 1.0 / (1.0 + (-f64::from(logit)).exp());
    let answer = |(k, &logit): (usize, &f32)| Answer { label: name(k), probability: probability(logit) };
    let mut answers: Vec<Answer> = logits.iter().enumerate().map(answer).collect();
    answers.sort_by(|a, b| b.probability.total_cmp(&a.probability));
    answers
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

fn read_prompts(args: &PredictArgs, trained: &Trained) -> Result<Asked, Failure> {
    let tokenizer = match &trained.preparation().tokenizer {
        Some(path) => Tokenizer::from_file(path)?,
        None => Tokenizer::bytes(),
    };
    let mut prompts: Vec<String> = args.prompt.iter().cloned().collect();
    for file in &args.files {
        let text =
            std::fs::read_to_string(file).map_err(|e| Failure::usage(format!("{}: {e}", file.display())))?;
        prompts.push(text);
    }
    if prompts.is_empty() {
        prompts.push("\n".into());
    }
    Ok(Asked::Prompts(tokenizer, prompts))
}

/// Writes how each prompt goes on; the rank that speaks prints.
fn write_on(
    next: &mut NextToken,
    tokenizer: &Tokenizer,
    prompts: &[String],
    args: &PredictArgs,
    speaks: bool,
) -> CommandResult {
    let how =
        Sampling { length: args.length, temperature: args.temperature, top: args.from_top, seed: args.seed };
    for prompt in prompts {
        if !speaks {
            generate(next, tokenizer, prompt, how, &mut |_| ())?;
            continue;
        }
        let mut out = io::stdout();
        if !args.json {
            write!(out, "{prompt}")?;
        }
        let (mut pending, mut broken) = (Vec::new(), None);
        let ids = generate(next, tokenizer, prompt, how, &mut |id| {
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
