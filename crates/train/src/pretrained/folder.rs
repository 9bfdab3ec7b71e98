//! What a job takes from the folder of a model (`model.path`), and the files beside the weights that a run writes.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use polyreme_nn::Model;
use serde_json::Value;

use super::{Family, config};
use crate::checkpoint::{CheckpointError, Disk};
use crate::job::{HeadStart, Job, ModelSpec, Source};

/// The sizes.
pub(crate) const CONFIG_FILE: &str = "config.json";
/// The weights.
pub(crate) const WEIGHTS_FILE: &str = "model.safetensors";
/// The tokens.
const TOKENIZER_FILE: &str = "tokenizer.json";
/// What else is taken along: tokens in the forms that `transformers` knows, and how it generates text.
const BESIDE: [&str; 8] = [
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
];
/// A `config.json` is small; anything larger is another file.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

fn wrong(path: &Path, why: impl Into<String>) -> CheckpointError {
    CheckpointError::Weights { path: path.into(), why: why.into() }
}

impl ModelSpec {
    /// The model of a folder, of whichever family its `config.json` says, with its weights to begin with.
    pub fn of_folder(folder: &Path) -> Result<ModelSpec, CheckpointError> {
        let file = folder.join(CONFIG_FILE);
        let said = read_config(&file)?;
        let is_it = |family: &Family| said["model_type"].as_str() == Some(family.name());
        let family = Family::ALL.into_iter().find(is_it).unwrap_or(Family::Gpt2);
        let model = config::read(family, &said).map_err(|why| wrong(&file, why))?;
        weights_in(folder)?;
        Ok(ModelSpec { path: Some(folder.into()), ..ModelSpec::exact(model) })
    }
}

impl Job {
    /// Takes the sizes, and the tokenizer if the data name none, from the model's folder. Nothing happens if there is none, or if
    /// the job has the sizes already, as that of a run has.
    pub(crate) fn take_folder(&mut self) -> Result<(), CheckpointError> {
        let model = &mut self.model;
        if let (Some(folder), Some(family)) = (model.path.clone(), Family::of(&model.model))
            && model.is_of_folder()
        {
            let file = folder.join(CONFIG_FILE);
            let mut read = config::read(family, &read_config(&file)?).map_err(|why| wrong(&file, why))?;
            keep_what_jobs_say(&model.model, &mut read);
            model.model = read;
            let keys = model.folder_keys();
            model.from_data.retain(|key| !keys.contains(&key.as_str()));
            weights_in(&folder)?;
            let tokens = folder.join(TOKENIZER_FILE);
            if let (Source::Text { tokenizer: tokenizer @ None, .. }, true) =
                (&mut self.data.source, tokens.is_file())
            {
                *tokenizer = Some(tokens.clone());
            }
            if let Source::Text { tokenizer: Some(named), .. } = &self.data.source {
                check_tokens(named, &tokens)?;
            }
            if let Source::Table { choice, .. } = &mut self.data.source
                && !choice.text.columns.is_empty()
            {
                match &choice.text.tokenizer {
                    Some(named) => check_tokens(named, &tokens)?,
                    None if !tokens.is_file() => {
                        let hint = "the model's tokens are those of its tokenizer; write it, in Python: \
                                    `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`, or name one with `data.tokenizer`";
                        return Err(CheckpointError::missing(&tokens, hint));
                    }
                    None => choice.text.tokenizer = Some(tokens),
                }
            }
        }
        let model = &self.model;
        if let (Model::Gpt2(m), HeadStart::New, Some(path)) =
            (&model.model, model.head, model.weights.as_ref().or(model.path.as_ref()))
            && m.tied
        {
            let why =
                "`model.head` is \"new\", and the head of this model is its table of tokens; leave it out";
            return Err(wrong(path, why));
        }
        Ok(())
    }
}

/// Fails if a tokenizer gives tokens other ids than that of the model's folder, whose weights would mean other tokens then. What
/// cannot be read is said where it is used.
fn check_tokens(named: &Path, of_model: &Path) -> Result<(), CheckpointError> {
    let ids = |path: &Path| {
        let mut all: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        Some((all.get_mut("model")?.get_mut("vocab")?.take(), all.get_mut("added_tokens").map(Value::take)))
    };
    match ids(named).zip(ids(of_model)) {
        Some((named_ids, model_ids)) if named_ids != model_ids => {
            let why = format!(
                "its tokens have other ids than those of {}, which the weights were trained with; leave `data.tokenizer` out, or                  begin without weights",
                of_model.display()
            );
            Err(wrong(named, why))
        }
        _ => Ok(()),
    }
}

/// What a job says of a model and `config.json` does not: how it is trained, and what its head reads.
fn keep_what_jobs_say(job: &Model, read: &mut Model) {
    match (job, read) {
        (Model::Gpt2(job), Model::Gpt2(read)) => read.dropout = job.dropout,
        (Model::Bert(job), Model::Bert(read)) => {
            (read.dropout, read.pooling, read.classes) = (job.dropout, job.pooling, job.classes);
        }
        _ => {}
    }
}

/// The weights of a folder; or what to do with those that cannot be read.
pub(crate) fn weights_in(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let file = folder.join(WEIGHTS_FILE);
    if file.is_file() {
        return Ok(file);
    }
    let save = "save the model once more, in Python: `AutoModel.from_pretrained(FOLDER).save_pretrained(NEW, \
                max_shard_size=\"100GB\")`";
    let has = |name: &str| folder.join(name).exists();
    Err(match () {
        () if has("model.safetensors.index.json") => {
            wrong(folder, format!("the weights are in several files, and one is needed; {save}"))
        }
        () if has("pytorch_model.bin") => wrong(
            folder,
            format!(
                "the weights are in a format that can carry code and is not read (pytorch_model.bin); {save}"
            ),
        ),
        () => CheckpointError::missing(
            &file,
            "`model.path` is the folder of a model with config.json and this file",
        ),
    })
}

fn read_config(file: &Path) -> Result<Value, CheckpointError> {
    let mut text = Vec::new();
    let opened = match fs::metadata(file) {
        Ok(about) if about.is_file() => fs::File::open(file),
        _ => {
            return Err(CheckpointError::missing(
                file,
                "`model.path` is the folder of a model with this file",
            ));
        }
    };
    let read = opened.and_then(|f| f.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut text));
    read.map_err(|e| CheckpointError::reading(file, e))?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(wrong(file, "larger than any config.json"));
    }
    serde_json::from_slice(&text).map_err(|e| wrong(file, format!("not JSON: {e}")))
}

/// Writes what `transformers` needs beside the weights of a run's model, so that the run's folder is one of its models. Of other models
/// nothing is written.
pub(crate) fn write_beside(run: &Path, model: &ModelSpec) -> Result<(), CheckpointError> {
    let from = model.path.as_deref();
    // The folder may be gone by now: then what is known of the network is written alone.
    let before = from.and_then(|folder| read_config(&folder.join(CONFIG_FILE)).ok());
    let Some(config) = config::write(&model.model, before.as_ref()) else { return Ok(()) };
    let text =
        serde_json::to_string_pretty(&config).map_err(|e| wrong(&run.join(CONFIG_FILE), e.to_string()))?;
    let disk = Disk::default();
    disk.write_whole(&run.join(CONFIG_FILE), text.as_bytes())?;
    for name in BESIDE {
        let Some(file) = from.map(|folder| folder.join(name)).filter(|file| file.is_file()) else { continue };
        let bytes = fs::read(&file).map_err(|e| CheckpointError::reading(&file, e))?;
        disk.write_whole(&run.join(name), &bytes)?;
    }
    Ok(())
}
