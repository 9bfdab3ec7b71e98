//! The texts of a table, as a job or a trained model says: which columns, which tokenizer, how long they may be.
//!
//! A model knows its tokenizer by the digest of its file: ids of another one would mean other tokens.

use std::path::Path;
use std::sync::Arc;

use polyreme_data::table::{LENGTH, Table, TextChoice, TextColumns, choose_times};
use polyreme_data::{DataError, TextTokenizer};
use polyreme_nn::Model;

use crate::error::TrainError;
use crate::job::Job;
use crate::loss::LossKind;
use crate::preparation::{Preparation, Sample};

/// The texts of a job's table, to train with.
pub(crate) fn to_train(job: &Job, choice: &TextChoice) -> Result<Option<TextColumns>, TrainError> {
    if choice.columns.is_empty() {
        return Ok(None);
    }
    let of_model = job.model.context().filter(|_| job.model.from_data.iter().all(|size| size != "context"));
    let length = choice.length.or(of_model).unwrap_or(LENGTH);
    let tokenizer = Arc::new(tokenizer(choice.tokenizer.as_deref())?);
    let tagged = choice.tags.is_some();
    if tagged && job.train.loss != LossKind::CrossEntropy {
        let why = format!(
            "`train.loss = \"{}\"` is not one of tags, which are classes; leave it out, or name the label's column with `data.label` \
             and not with `data.tags`",
            job.train.loss.name()
        );
        return Err(DataError::Setting { why }.into());
    }
    let columns = choice.columns.clone();
    let typed = columns.len() > 1 && matches!(&job.model.model, Model::Bert(m) if m.types > 1);
    checked(TextColumns { columns, tokenizer, length, times: Vec::new(), tagged, typed }).map(Some)
}

/// The texts of a model that was trained on some; `None` if it was not.
pub fn to_use(choice: &TextChoice, trained: &Preparation) -> Result<Option<TextColumns>, TrainError> {
    let Sample::Texts { times, vocab, .. } = &trained.sample else { return Ok(None) };
    let path = choice.tokenizer.as_deref().or(trained.tokenizer.as_deref());
    let now = path.map(digest).transpose()?;
    if now != trained.tokenizer_digest {
        let words = |path: Option<&Path>| path.map_or("bytes".into(), |path| path.display().to_string());
        return Err(DataError::Setting {
            why: format!(
                "the model was trained with another tokenizer ({}) than {}: its ids would mean other tokens; set \
                 `data.tokenizer` to the file that it was trained with",
                words(trained.tokenizer.as_deref()),
                words(path)
            ),
        }
        .into());
    }
    let columns = match trained.columns.is_empty() {
        true => choice.columns.clone(),
        false => trained.columns.clone(),
    };
    let length = times.last().copied().unwrap_or(1);
    let tokenizer = Arc::new(tokenizer(path)?);
    let (tagged, typed) = (trained.tags, trained.types);
    let texts = TextColumns { columns, tokenizer, length, times: times.clone(), tagged, typed };
    match texts.vocab() == *vocab {
        true => Ok(Some(texts)),
        false => {
            let why = format!("{} ids are made of these texts, and the model knows {vocab}", texts.vocab());
            Err(DataError::Setting { why }.into())
        }
    }
}

/// The tables with the lengths that their texts are filled up to.
pub(crate) fn with_times(tables: Vec<Table>, buckets: usize) -> (Vec<Table>, Vec<usize>) {
    let lengths = tables.iter().flat_map(Table::lengths);
    let times = choose_times(lengths, buckets);
    (tables.into_iter().map(|table| table.with_times(&times)).collect(), times)
}

/// What was found in texts, as lines for people.
pub(crate) fn notes(tables: &[Table], texts: &TextColumns, times: &[usize]) -> Vec<String> {
    let mut lengths: Vec<usize> = tables.iter().flat_map(Table::lengths).collect();
    lengths.sort_unstable();
    let (Some(least), Some(most)) = (lengths.first(), lengths.last()) else { return Vec::new() };
    let filled: usize = lengths.iter().map(|n| times.iter().find(|time| *time >= n).unwrap_or(most)).sum();
    let padding = 100.0 * (1.0 - lengths.iter().sum::<usize>() as f64 / filled.max(1) as f64);
    let columns: Vec<String> = texts.columns.iter().map(|name| format!("{name:?}")).collect();
    let to: Vec<String> = times.iter().map(usize::to_string).collect();
    let mut lines = vec![format!(
        "{} as texts of {least} to {most} tokens, median {}; filled up to {} ({padding:.0}% padding)",
        columns.join(" and "),
        lengths[lengths.len() / 2],
        to.join(", "),
    )];
    let cut: usize = tables.iter().map(Table::n_cut).sum();
    if cut > 0 {
        let n = lengths.len();
        let more = "`data.length` says how long they may be";
        lines.push(format!("{cut} of {n} texts are longer and are cut at {} tokens; {more}", texts.length));
    }
    lines
}

/// The digest of a tokenizer's file.
pub(crate) fn digest(path: &Path) -> Result<String, TrainError> {
    let bytes = std::fs::read(path).map_err(|source| TrainError::Io { path: path.into(), source })?;
    Ok(blake3::hash(&bytes).to_hex().to_string())
}

/// The same, if texts can be read so.
fn checked(texts: TextColumns) -> Result<TextColumns, TrainError> {
    match texts.refusal() {
        None => Ok(texts),
        Some(why) => Err(DataError::Setting { why }.into()),
    }
}

fn tokenizer(path: Option<&Path>) -> Result<TextTokenizer, DataError> {
    path.map_or_else(|| Ok(TextTokenizer::bytes()), TextTokenizer::from_file)
}
