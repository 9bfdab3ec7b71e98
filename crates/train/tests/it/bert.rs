//! BERT from folders of Hugging Face's: a small one against what `transformers` computes with the same weights
//! (`crates/nn/references/pretrained_bert.py`): pairs of texts with types and padding, tags of words, embeddings; and its way out again.

use std::fs;
use std::path::{Path, PathBuf};

use polyreme_exec::{Engine, Options};
use polyreme_graph::{Builder, DType, Program};
use polyreme_nn::Model;
use polyreme_nn::model::{Bert, Pooling};
use polyreme_train::install::install_file;
use polyreme_train::job::{Job, ModelSpec};
use polyreme_train::run::{Given, Prepared};
use polyreme_train::starting::StartingWeights;
use polyreme_train::weights::{Weight, read_weights};
use polyreme_train::whole::WholeModel;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::pretrained::{FilledTensor, ReferenceOptimizer, k, near, save, trained};
use crate::runs::{job, run};

#[derive(Deserialize)]
struct BertReference {
    config: Value,
    steps: usize,
    batch: usize,
    classes: u64,
    words: u64,
    most: [u64; 2],
    optimizer: ReferenceOptimizer,
    params: Vec<FilledTensor>,
    losses: Vec<f64>,
    tags: TagReference,
    embeddings: Vec<f64>,
}

#[derive(Deserialize)]
struct TagReference {
    params: Vec<FilledTensor>,
    losses: Vec<f64>,
}

/// Where ordinary tokens begin: [PAD], [UNK], [CLS] and [SEP] come before.
const SPECIALS: [&str; 4] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"];

impl BertReference {
    fn read() -> BertReference {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../nn/references/bert.json");
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    }

    fn words(&self, which: &str, sample: usize, most: u64) -> Vec<u64> {
        let n = 1 + k(&format!("{which}.{sample}.n"), 0) % most;
        (0..n as usize).map(|i| k(&format!("{which}.{sample}"), i) % self.words).collect()
    }

    fn text(&self, which: &str, sample: usize, most: u64) -> String {
        let words = self.words(which, sample, most);
        words.iter().map(|word| format!("w{word}")).collect::<Vec<_>>().join(" ")
    }

    /// The folder of a model with these tensors, and the texts beside it.
    fn folder(&self, parent: &Path, weights: &[Weight]) -> PathBuf {
        let folder = parent.join("bert");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        save(&folder.join("model.safetensors"), weights);
        fs::write(folder.join("tokenizer.json"), self.tokenizer().to_string()).unwrap();
        let (mut pairs, mut tagged) = (String::new(), String::new());
        for sample in 0..self.steps * self.batch {
            let (a, b) =
                (self.text("first", sample, self.most[0]), self.text("second", sample, self.most[1]));
            let label = k(&format!("label.{sample}"), 0) % self.classes;
            pairs += &format!("{}\n", json!({ "a": a, "b": b, "kind": format!("c{label}") }));
            let n = a.split(' ').count();
            let tags: Vec<String> =
                (0..n).map(|i| format!("t{}", k(&format!("tags.{sample}"), i) % self.classes)).collect();
            tagged += &format!("{}\n", json!({ "words": a, "tags": tags.join(" ") }));
        }
        fs::write(parent.join("pairs.jsonl"), pairs).unwrap();
        fs::write(parent.join("tags.jsonl"), tagged).unwrap();
        folder
    }

    /// A token for each word.
    fn tokenizer(&self) -> Value {
        let words = (0..self.words).map(|word| format!("w{word}"));
        let all = SPECIALS.iter().map(|s| s.to_string()).chain(words);
        let vocab: serde_json::Map<String, Value> = all.zip(0..).map(|(w, id)| (w, json!(id))).collect();
        let added = SPECIALS.iter().zip(0..).map(|(token, id)| {
            json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
        });
        let special = |token: &str, of: usize| json!({ "SpecialToken": { "id": token, "type_id": of } });
        let text = |name: &str, of: usize| json!({ "Sequence": { "id": name, "type_id": of } });
        let known = |token: &str, id: usize| json!({ "id": token, "ids": [id], "tokens": [token] });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "pre_tokenizer": { "type": "WhitespaceSplit" },
            "post_processor": { "type": "TemplateProcessing",
                "single": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)],
                "pair": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0), text("B", 1), special("[SEP]", 1)],
                "special_tokens": { "[CLS]": known("[CLS]", 2), "[SEP]": known("[SEP]", 3) } },
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" },
        })
    }

    /// A job that reads every sample once, in its order.
    fn lines(&self, model: &str, data: &str, parallel: &str) -> String {
        let &BertReference { batch, steps, .. } = self;
        let ReferenceOptimizer { lr, weight_decay } = self.optimizer;
        format!(
            "[model]\nkind = \"bert\"\n{model}\n[data]\nkind = \"jsonl\"\n{data}\norder = \"in-order\"\nvalidation = 0\n\
             [train]\nbatch = {batch}\nsteps = {steps}\n\
             optimizer = {{ kind = \"adamw\", lr = {lr}, weight_decay = {weight_decay} }}\n[parallel]\n{parallel}\n\
             [output]\nevery_epochs = 0\ntensorboard = false\n"
        )
    }

    fn pairs(&self, folder: &Path, model: &str, parallel: &str) -> String {
        let data = format!(
            "path = {:?}\ntext = [\"a\", \"b\"]\nlabel = \"kind\"",
            folder.with_file_name("pairs.jsonl")
        );
        self.lines(&format!("path = {folder:?}\n{model}"), &data, parallel)
    }
}

fn filled(params: &[FilledTensor]) -> Vec<Weight> {
    params.iter().map(FilledTensor::weight).collect()
}

fn shapes(weights: &[Weight]) -> Vec<(String, Vec<usize>)> {
    let mut all: Vec<_> = weights.iter().map(|w| (w.name.clone(), w.dims.clone())).collect();
    all.sort();
    all
}

/// Types of pairs and padding; on one rank, on several, and split over them.
#[test]
fn pairs_have_the_losses_of_transformers() {
    let (here, want) = (tempfile::tempdir().unwrap(), BertReference::read());
    let before = filled(&want.params);
    let folder = want.folder(here.path(), &before);
    let meshes = [
        ("", 1),
        ("data = 2\n", 2),
        ("data = 2\nshard_weights = true\n", 2),
        ("tensor = 2\n", 2),
        ("stage = 2\nmicrobatches = 2\n", 2),
    ];
    for (n, (parallel, ranks)) in meshes.into_iter().enumerate() {
        let path = here.path().join(format!("run{n}"));
        let run = trained(&job(&want.pairs(&folder, "", parallel)), ranks, &path);
        near(&run.watcher.losses, &want.losses, parallel);
        // The run's folder is one of the family again.
        let after = read_weights(&run.summary.model).unwrap();
        assert_eq!(shapes(&before), shapes(&after), "{parallel}");
        let config: Value = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["architectures"], json!(["BertForSequenceClassification"]));
        assert_eq!(config["hidden_act"], want.config["hidden_act"]);
    }
    let again = want
        .pairs(&folder, "", "")
        .replace(&format!("path = {folder:?}"), &format!("path = {:?}", here.path().join("run0")));
    let again = trained(&job(&again.replace("lr = 0.003", "lr = 1e-12")), 1, &here.path().join("again"));
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&again.watcher.losses) < mean(&want.losses), "it has learnt the texts");
}

#[test]
fn tags_have_the_losses_of_transformers() {
    let (here, want) = (tempfile::tempdir().unwrap(), BertReference::read());
    // A file of the body with its pooler, which tags have no use for, is read as well.
    let pooler = filled(&want.params).into_iter().filter(|w| w.name.contains("pooler"));
    let weights: Vec<Weight> = filled(&want.tags.params).into_iter().chain(pooler).collect();
    let folder = want.folder(here.path(), &weights);
    let data = format!("path = {:?}\ntext = \"words\"\ntags = \"tags\"", here.path().join("tags.jsonl"));
    let lines = want.lines(&format!("path = {folder:?}"), &data, "");
    let run = trained(&job(&lines), 1, &here.path().join("run"));
    near(&run.watcher.losses, &want.tags.losses, "tags");
    let after = read_weights(&run.summary.model).unwrap();
    assert_eq!(shapes(&filled(&want.tags.params)), shapes(&after));
}

/// Means of hidden states, of a file with the names of a bare model.
#[test]
fn embeddings_are_those_of_transformers() {
    let (here, want) = (tempfile::tempdir().unwrap(), BertReference::read());
    let bare = want.params.iter().filter_map(|p| {
        let name = p.name.strip_prefix("bert.")?.to_string();
        Some(FilledTensor { name, ..p.clone() }.weight())
    });
    let folder = want.folder(here.path(), &bare.collect::<Vec<_>>());
    let mut spec = ModelSpec::of_folder(&folder).unwrap();
    let Model::Bert(read) = &mut spec.model else { panic!("{:?}", spec.model) };
    (read.pooling, read.padding) = (Pooling::Mean, Some(0));
    let bert: Bert = read.clone();
    let row = |sample: usize| {
        let ids = |which: &str, most| {
            want.words(which, sample, most).into_iter().map(|word| word as i32 + SPECIALS.len() as i32)
        };
        let first = [2].into_iter().chain(ids("first", want.most[0])).chain([3]);
        // The second text is told by its sign.
        let second = ids("second", want.most[1]).chain([3]).map(|id| -1 - id);
        first.chain(second).collect::<Vec<i32>>()
    };
    let rows: Vec<Vec<i32>> = (0..want.batch).map(row).collect();
    let time = rows.iter().map(Vec::len).max().unwrap();
    let mut b = Builder::new();
    let ids = b.input("ids", [want.batch, time], DType::I32).unwrap();
    let means = bert.embeddings(&mut b, ids).unwrap();
    let graph = b.finish(&[("means", means)]);
    let mut engine = Engine::new(Program::forward(&graph), Options::threads(1)).unwrap();
    install_file(&mut engine, &WholeModel::of(&graph), StartingWeights::of(&spec).unwrap()).unwrap();
    let to = engine.input_i32("ids").unwrap();
    to.fill(0);
    to.chunks_mut(time).zip(&rows).for_each(|(to, row)| to[..row.len()].copy_from_slice(row));
    engine.run().unwrap();
    let got = engine.output("means").unwrap();
    assert_eq!(got.len(), want.embeddings.len());
    for (got, want) in got.iter().zip(&want.embeddings) {
        assert!((f64::from(*got) - want).abs() < 1e-5, "{got}, and {want} in PyTorch");
    }
}

/// A head for other classes, on a mean, with factors beside the frozen body.
#[test]
fn a_new_head_and_factors() {
    let (here, want) = (tempfile::tempdir().unwrap(), BertReference::read());
    let folder = want.folder(here.path(), &filled(&want.params));
    let keys = "head = \"new\"\npooling = \"mean\"\nlora = { rank = 2, on = [\"*.qkv\"] }";
    let data = format!("path = {:?}\ntext = \"a\"\nlabel = \"b\"", here.path().join("two.jsonl"));
    let two = (0..80).map(|s| {
        let a = want.text("first", s, want.most[0]);
        format!("{}\n", json!({ "a": a, "b": if a.contains("w1") { "yes" } else { "no" } }))
    });
    fs::write(here.path().join("two.jsonl"), two.collect::<String>()).unwrap();
    let lines = want.lines(&format!("path = {folder:?}\n{keys}"), &data, "");
    let run = trained(&job(&lines), 1, &here.path().join("run"));
    let mut names: Vec<&str> = run.weights.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names[names.len() - 2..], ["classifier.bias", "classifier.weight"]);
    assert_eq!(names.len(), 6);
}

#[test]
fn what_does_not_fit_is_said_before_anything_is_written() {
    let want = BertReference::read();
    let check = |model: &str, change: &dyn Fn(&Path), parts: &[&str]| {
        let here = tempfile::tempdir().unwrap();
        let folder = want.folder(here.path(), &filled(&want.params));
        change(&folder);
        let lines = want.pairs(&folder, model, "");
        let job = || Job::from_text(&lines, "job.toml", Path::new("/"), &[]).unwrap();
        let said = match Prepared::new(job(), Given::default(), 1) {
            Err(error) => error.to_string(),
            Ok(_) => {
                let error = run(&job(), Given::default(), 1, &here.path().join("run"), None).map(|_| ());
                error.unwrap_err().to_string()
            }
        };
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        assert!(!here.path().join("run").exists(), "{said}");
    };
    let config = |key: &'static str, value: Value| {
        let mut config = want.config.clone();
        config[key] = value;
        move |folder: &Path| fs::write(folder.join("config.json"), config.to_string()).unwrap()
    };
    check("", &config("model_type", json!("roberta")), &["config.json", "\"roberta\"", "\"bert\""]);
    check("", &config("hidden_size", json!(64)), &["tok.weight", "[64, 64]", "[64, 32]"]);
    check("", &config("num_hidden_layers", json!(3)), &["blocks.2"]);
    check("", &config("vocab_size", json!(50)), &["vocab", "50", "64", "tokenizer"]);
    check("", &config("max_position_embeddings", json!(16)), &["[16, 32]", "[24, 32]"]);
    let gone = |folder: &Path| fs::remove_file(folder.join("tokenizer.json")).unwrap();
    check("", &gone, &["tokenizer.json", "AutoTokenizer"]);
    let strange = |folder: &Path| {
        let mut weights = filled(&want.params);
        weights[0].name = "bert.embeddings.words.weight".into();
        save(&folder.join("model.safetensors"), &weights);
    };
    check("", &strange, &["bert.embeddings.words.weight", "model.map"]);
    let headless = |folder: &Path| {
        let weights: Vec<Weight> =
            filled(&want.params).into_iter().filter(|w| !w.name.starts_with("classifier")).collect();
        save(&folder.join("model.safetensors"), &weights);
    };
    check("", &headless, &["head.weight", "model.head = \"new\""]);
    // The tokenizer of another model has as many tokens, under other ids.
    let here = tempfile::tempdir().unwrap();
    let (folder, other) = (want.folder(here.path(), &filled(&want.params)), here.path().join("other.json"));
    let tokens = want.tokenizer().to_string().replace("\"w1\":", "\"new\":");
    let lines = want.pairs(&folder, "", "").replace("text = [", &format!("tokenizer = {other:?}\ntext = ["));
    let prepare = |tokens: &str| {
        fs::write(&other, tokens).unwrap();
        Prepared::new(job(&lines), Given::default(), 1).map(|_| ()).map_err(|error| error.to_string())
    };
    let said = prepare(&tokens).unwrap_err();
    assert!(
        ["other.json", "other ids", "leave `data.tokenizer` out"].iter().all(|part| said.contains(part)),
        "{said}"
    );
    prepare(&want.tokenizer().to_string()).unwrap();
}
