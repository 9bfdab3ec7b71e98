//! What a run's `model.safetensors` says of itself in its header: the job, how samples are prepared, what classes are called.
//!
//! With it the file is enough to use the model elsewhere: `docs/pytorch.md` does it in PyTorch. It is text, so readers of the
//! format that want none of it pass over it. Checkpoints have the same in their manifest, which is what a run goes on from; nothing
//! here is read back by a run.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::job::Job;
use crate::preparation::{Preparation, Sample};

/// What was learnt of a table's columns is said up to this length: categories may be as many as rows.
const SCHEMA_BYTES_MAX: usize = 64 * 1024;

/// The texts of a header, by name: `polyreme` (the version), `job` (TOML), `preparation` (JSON), `tokenizer` (the name of its file).
///
/// Of the job it has what makes the model. Where it ran and where it wrote are left out: a model that has the same weights on any
/// ranks is the same file.
pub(crate) fn about(job: &Job, preparation: &Preparation) -> Vec<(String, String)> {
    let plain = Job::new(&job.name);
    let job = Job { parallel: plain.parallel, output: plain.output, ..job.clone() };
    let mut texts = vec![
        ("polyreme".to_string(), env!("CARGO_PKG_VERSION").to_string()),
        ("job".to_string(), job.to_toml()),
        ("preparation".to_string(), prepared(preparation).to_string()),
    ];
    let name = |file: &Path| file.file_name().map(|name| name.to_string_lossy().into_owned());
    if let Some(name) = preparation.tokenizer.as_deref().and_then(name) {
        texts.push(("tokenizer".to_string(), name));
    }
    texts
}

/// How a sample becomes the model's input, and what its outputs are. Numbers become `(x - mean) / std`, pixels being 0 to 1 before;
/// what is predicted as a number is `y * std + mean` of its own.
fn prepared(preparation: &Preparation) -> Value {
    let mut all = Map::new();
    let sample = match &preparation.sample {
        Sample::Image { channels, height, width } => json!({ "image": [channels, height, width] }),
        Sample::Row { width } => json!({ "row": width }),
        Sample::Mixed { numbers, ids, texts } => {
            let mut sample = json!({ "row": numbers, "ids": ids });
            if !texts.is_empty() {
                sample["texts"] = json!(texts);
            }
            sample
        }
        Sample::Ids { time, vocab } => json!({ "tokens": time, "vocab": vocab }),
        Sample::Texts { times, vocab, padding } => {
            json!({ "texts": times, "vocab": vocab, "padding": padding })
        }
    };
    all.insert("sample".into(), sample);
    if !preparation.mean.is_empty() {
        all.insert("mean".into(), json!(preparation.mean));
        all.insert("std".into(), json!(preparation.std));
    }
    if preparation.classes > 0 {
        let names: Vec<String> =
            (0..preparation.classes).map(|class| preparation.class_name(class)).collect();
        all.insert("classes".into(), json!(names));
    }
    if let Some(values) = &preparation.values {
        let kind = if values.labels { "labels" } else { "numbers" };
        all.insert(
            kind.into(),
            json!({ "names": values.names, "n": values.n, "mean": values.mean, "std": values.std }),
        );
    }
    if !preparation.columns.is_empty() {
        all.insert("columns".into(), json!(preparation.columns));
    }
    if let Some(schema) = &preparation.schema {
        let schema = serde_json::to_value(schema).unwrap_or(Value::Null);
        let fits = schema.to_string().len() <= SCHEMA_BYTES_MAX;
        let schema = if fits { schema } else { json!("too long to be said here; the checkpoint has it") };
        all.insert("schema".into(), schema);
    }
    Value::Object(all)
}

#[cfg(test)]
mod tests {
    use polyreme_data::{Features, Layout, Spec, Stats, Target};

    use super::*;

    #[test]
    fn a_header_says_how_samples_are_prepared() {
        let features = Features::Image { channels: 1, height: 2, width: 3, layout: Layout::Planes };
        let target = Target::Class { classes: 2, names: vec!["cat".into(), "dog".into()] };
        let stats = Stats { mean: vec![0.5], std: vec![0.25] };
        let tokens = Some("/models/tokenizer.json".into());
        let preparation = Preparation::new(&Spec { features, target }, Some(&stats), tokens);
        let texts = about(&Job::new("a"), &preparation);
        let text = |key: &str| texts.iter().find(|(name, _)| name == key).map(|(_, text)| text.as_str());
        let want = json!({ "sample": { "image": [1, 2, 3] }, "mean": [0.5], "std": [0.25], "classes": ["cat", "dog"] });
        assert_eq!(serde_json::from_str::<Value>(text("preparation").unwrap()).unwrap(), want);
        assert_eq!(text("tokenizer"), Some("tokenizer.json"));
        assert_eq!(text("job"), Some(Job::new("a").to_toml().as_str()));
    }
}
