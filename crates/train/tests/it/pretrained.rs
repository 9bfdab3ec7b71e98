//! Folders of Hugging Face's models: a small GPT-2 against what `transformers` computes with the same weights
//! (`crates/nn/references/pretrained.py`), on one rank and on meshes; and its way out again.

use std::fs;
use std::path::{Path, PathBuf};

use polyreme_dtype::DType;
use polyreme_exec::{Engine, Options};
use polyreme_graph::Program;
use polyreme_nn::TraceOptions;
use polyreme_train::install::install_file;
use polyreme_train::job::Job;
use polyreme_train::run::{Given, Prepared};
use polyreme_train::starting::StartingWeights;
use polyreme_train::weights::{Weight, read_weights, write_weights};
use polyreme_train::whole::WholeModel;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::runs::{Outcome, job, run};

#[derive(Deserialize)]
pub(crate) struct Reference {
    config: Value,
    batch: usize,
    context: usize,
    characters: u64,
    steps: usize,
    optimizer: ReferenceOptimizer,
    params: Vec<FilledTensor>,
    logits: Samples,
    losses: Vec<f64>,
    frozen_losses: Vec<f64>,
    lora: LoraReference,
}

#[derive(Deserialize)]
struct LoraReference {
    params: Vec<FilledTensor>,
    losses: Vec<f64>,
}

#[derive(Clone, Copy, Deserialize)]
pub(crate) struct ReferenceOptimizer {
    pub(crate) lr: f64,
    pub(crate) weight_decay: f64,
}

#[derive(Clone, Deserialize)]
pub(crate) struct FilledTensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) fill: [f32; 2],
}

#[derive(Deserialize)]
struct Samples {
    at: Vec<usize>,
    values: Vec<f64>,
}

/// 24 bits for a name and an index, as `references/README.md` has it.
pub(crate) fn k(name: &str, i: usize) -> u64 {
    let seed =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut z = seed.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ z >> 31) >> 40
}

impl FilledTensor {
    pub(crate) fn weight(&self) -> Weight {
        let numel: usize = self.shape.iter().product();
        let [center, spread] = self.fill;
        let v = |i| (k(&self.name, i) as f32 - 8_388_608.0) / 8_388_608.0;
        let data = (0..numel).map(|i| center + spread * v(i)).collect();
        Weight { name: self.name.clone(), dims: self.shape.clone(), dtype: DType::F32, data }
    }
}

impl Reference {
    pub(crate) fn read() -> Reference {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../nn/references/gpt2.json");
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    }

    /// The factors that `peft` begins with.
    pub(crate) fn factors(&self) -> Vec<Weight> {
        self.lora.params.iter().map(FilledTensor::weight).collect()
    }

    /// The losses with them.
    pub(crate) fn lora_losses(&self) -> &[f64] {
        &self.lora.losses
    }

    pub(crate) fn weights(&self) -> Vec<Weight> {
        self.params.iter().map(FilledTensor::weight).collect()
    }

    fn ids(&self) -> Vec<u64> {
        let n = self.steps * self.batch * self.context + 1;
        (0..n).map(|i| u64::from(b' ') + k("text", i) % self.characters).collect()
    }

    /// The folder of the model, and a text beside it.
    pub(crate) fn folder(&self, parent: &Path) -> PathBuf {
        let folder = parent.join("gpt2");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        save(&folder.join("model.safetensors"), &self.weights());
        fs::write(folder.join("tokenizer.json"), self.tokenizer().to_string()).unwrap();
        let text: Vec<u8> = self.ids().into_iter().map(|id| id as u8).collect();
        fs::write(parent.join("text.txt"), text).unwrap();
        folder
    }

    /// A token for each byte, and some that never occur.
    fn tokenizer(&self) -> Value {
        let mut vocab = serde_json::Map::new();
        let mut more = 256..;
        for byte in 0..=255u8 {
            // Bytes that cannot be seen are characters further on.
            let seen = matches!(byte, 33..=126 | 161..=172 | 174..);
            let code = if seen { u32::from(byte) } else { more.next().unwrap() };
            vocab.insert(char::from_u32(code).unwrap().into(), json!(byte));
        }
        for id in 256..self.config["vocab_size"].as_u64().unwrap() {
            vocab.insert(format!("<{id}>"), json!(id));
        }
        json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "truncation": null, "padding": null,
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "decoder": { "type": "ByteLevel" },
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
        })
    }

    /// A job that reads every sample once, in its order.
    pub(crate) fn lines(&self, folder: &Path, model: &str, parallel: &str) -> String {
        let text = folder.with_file_name("text.txt");
        let &Reference { batch, context, steps, .. } = self;
        let ReferenceOptimizer { lr, weight_decay } = self.optimizer;
        format!(
            "[model]\nkind = \"gpt2\"\n{model}\n[data]\nkind = \"text\"\npath = {text:?}\ncontext = {context}\norder = \"in-order\"\n\
             validation = 0\n[train]\nbatch = {batch}\nsteps = {steps}\n\
             optimizer = {{ kind = \"adamw\", lr = {lr}, weight_decay = {weight_decay} }}\n[parallel]\n{parallel}\n\
             [output]\nevery_epochs = 0\ntensorboard = false\n"
        )
    }

    pub(crate) fn job(&self, folder: &Path, model: &str, parallel: &str) -> Job {
        job(&self.lines(folder, &format!("path = {folder:?}\n{model}"), parallel))
    }
}

pub(crate) fn save(file: &Path, weights: &[Weight]) {
    write_weights(file, &weights.iter().map(Weight::view).collect::<Vec<_>>(), None).unwrap();
}

pub(crate) fn trained(job: &Job, ranks: usize, folder: &Path) -> Outcome {
    run(job, Given::default(), ranks, folder, None).unwrap()
}

/// Losses are those of the reference, to 1e-4.
#[track_caller]
pub(crate) fn near(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() < 1e-4, "{what}: step {step}: {got}, and {want} in PyTorch");
    }
}

#[test]
fn logits_are_those_of_transformers() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = want.folder(here.path());
    let prepared = Prepared::new(want.job(&folder, "", ""), Given::default(), 1).unwrap();
    let model = &prepared.job.model;
    assert_eq!((model.model.name(), model.model.classes(), model.context()), ("gpt2", 260, Some(24)));
    let options = TraceOptions { time: Some(want.context), ..TraceOptions::evaluation(want.batch) };
    let graph = model.model.trace(&options).unwrap();
    let mut engine = Engine::new(Program::forward(&graph), Options::threads(1)).unwrap();
    let start = StartingWeights::of(model).unwrap();
    install_file(&mut engine, &WholeModel::of(&graph), start).unwrap();
    let ids = want.ids();
    engine.input_i32("ids").unwrap().iter_mut().zip(&ids).for_each(|(to, id)| *to = *id as i32);
    engine.input_i32("labels").unwrap().fill(0);
    engine.run().unwrap();
    let logits = engine.output("logits").unwrap();
    for (&at, value) in want.logits.at.iter().zip(&want.logits.values) {
        let got = f64::from(logits[at]);
        assert!((got - value).abs() < 1e-4, "logits[{at}]: {got}, and {value} in PyTorch");
    }
}

#[test]
fn fine_tuning_has_the_losses_of_pytorch() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = want.folder(here.path());
    let path = |name: &str| here.path().join(name);
    let all = trained(&want.job(&folder, "", ""), 1, &path("all"));
    near(&all.watcher.losses, &want.losses, "all parameters");

    let freeze = "freeze = [\"tok\", \"pos\", \"blocks.0\"]";
    let frozen = trained(&want.job(&folder, freeze, ""), 1, &path("frozen"));
    near(&frozen.watcher.losses, &want.frozen_losses, "frozen");
    let is_frozen = |name: &str| ["wte", "wpe", "h.0."].iter().any(|part| name.contains(part));
    let mut before = want.weights();
    before.sort_by(|a, b| a.name.cmp(&b.name));
    let mut after = read_weights(&frozen.summary.model).unwrap();
    after.sort_by(|a, b| a.name.cmp(&b.name));
    // The file has the names, shapes and layouts of the one that was read.
    let shapes =
        |weights: &[Weight]| weights.iter().map(|w| (w.name.clone(), w.dims.clone())).collect::<Vec<_>>();
    assert_eq!(shapes(&before), shapes(&after));
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before.data == after.data, is_frozen(&before.name), "{}", before.name);
    }

    // The run's folder is one to begin with: what it says of itself is what was read, and its model has the run's scores.
    let config: Value =
        serde_json::from_slice(&fs::read(path("frozen").join("config.json")).unwrap()).unwrap();
    let mut as_read = want.config.clone();
    as_read["architectures"] = json!(["GPT2LMHeadModel"]);
    assert_eq!(config, as_read);
    assert_eq!(
        fs::read(path("frozen").join("tokenizer.json")).unwrap(),
        fs::read(folder.join("tokenizer.json")).unwrap()
    );
    let again = want.lines(&folder, &format!("path = {:?}", path("frozen")), "");
    let again = trained(&job(&again.replace("lr = 0.003", "lr = 1e-12")), 1, &path("again"));
    let by_weights = format!(
        "weights = {:?}\nlayers = 2\nwidth = 32\nheads = 4\nvocab = 260\ncontext = 24",
        frozen.summary.model
    );
    let data = format!("tokenizer = {:?}\ncontext =", folder.join("tokenizer.json"));
    let lines = want.lines(&folder, &by_weights, "").replace("context = 16", &format!("{data} 16"));
    let by_weights = trained(&job(&lines.replace("lr = 0.003", "lr = 1e-12")), 1, &path("by-weights"));
    assert_eq!(again.watcher.losses, by_weights.watcher.losses);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&again.watcher.losses) < mean(&want.frozen_losses), "it has learnt the text");
}

#[test]
fn a_folder_on_every_kind_of_mesh() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = want.folder(here.path());
    let one = trained(&want.job(&folder, "", ""), 1, &here.path().join("one"));
    let meshes = [
        ("data = 2\nshard_gradients = true\n", 2),
        ("data = 2\nshard_weights = true\n", 2),
        ("tensor = 2\n", 2),
        ("stage = 2\nmicrobatches = 2\n", 2),
        ("tensor = 2\nstage = 2\nmicrobatches = 2\n", 4),
        ("sequence = 2\n", 2),
    ];
    for (n, (parallel, ranks)) in meshes.into_iter().enumerate() {
        let many = trained(&want.job(&folder, "", parallel), ranks, &here.path().join(format!("mesh{n}")));
        near(&many.watcher.losses, &want.losses, parallel);
        assert_eq!(one.weights.len(), many.weights.len());
        for ((name, a), (other, b)) in one.weights.iter().zip(&many.weights) {
            assert_eq!(name, other, "{parallel}");
            // A bias of keys changes no attention: its gradient is rounding, which the optimizer blows up.
            if name.ends_with("c_attn.bias") {
                continue;
            }
            let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far < 2e-3, "{parallel}: {name} is {far} away");
        }
    }
}

#[test]
fn a_run_goes_on_without_its_folder() {
    let (here, want) = (tempfile::tempdir().unwrap(), Reference::read());
    let folder = want.folder(here.path());
    // The tokenizer is data; the rest is not needed again.
    let tokens = here.path().join("tokenizer.json");
    fs::copy(folder.join("tokenizer.json"), &tokens).unwrap();
    let lines = want.lines(&folder, &format!("path = {folder:?}"), "");
    let lines = lines.replace("context =", &format!("tokenizer = {tokens:?}\ncontext ="));
    let whole = trained(&job(&lines), 1, &here.path().join("whole"));
    let cut = here.path().join("cut");
    let first = run(&job(&lines), Given::default(), 1, &cut, Some(7)).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    // As `resume` reads it.
    let kept = Job::from_file(&cut.join("job.toml"), &[]).unwrap();
    let rest = trained(&kept, 1, &cut);
    let losses: Vec<f64> = first.watcher.losses.into_iter().chain(rest.watcher.losses).collect();
    assert_eq!(losses, whole.watcher.losses);
    assert_eq!(rest.weights, whole.weights);
}

#[test]
fn what_does_not_fit_is_said_before_anything_is_written() {
    let want = Reference::read();
    let check = |model: &str, change: &dyn Fn(&Path), parts: &[&str]| {
        let here = tempfile::tempdir().unwrap();
        let folder = want.folder(here.path());
        change(&folder);
        let said = match Prepared::new(want.job(&folder, model, ""), Given::default(), 1) {
            Err(error) => error.to_string(),
            Ok(_) => {
                let job = want.job(&folder, model, "");
                let error = run(&job, Given::default(), 1, &here.path().join("run"), None).map(|_| ());
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
    let weights = |change: &dyn Fn(&mut Vec<Weight>)| {
        let mut weights = want.weights();
        change(&mut weights);
        move |folder: &Path| save(&folder.join("model.safetensors"), &weights)
    };
    check("", &config("model_type", json!("bloom")), &["config.json", "\"bloom\"", "gpt2"]);
    check("", &config("n_embd", json!(64)), &["tok.weight", "[260, 64]", "[260, 32]"]);
    check("", &config("n_layer", json!(3)), &["blocks.2"]);
    check("", &config("vocab_size", json!(50)), &["vocab", "50", "260", "tokenizer"]);
    check("", &config("n_positions", json!(8)), &["context", "data.context"]);
    check("", &config("tie_word_embeddings", json!(false)), &["head.weight"]);
    check("head = \"new\"", &|_| (), &["table of tokens"]);
    check("", &|folder| fs::write(folder.join("config.json"), "{").unwrap(), &["config.json", "not JSON"]);
    check("", &|folder| fs::remove_file(folder.join("config.json")).unwrap(), &["config.json", "not found"]);
    let gone = |folder: &Path| fs::remove_file(folder.join("model.safetensors")).unwrap();
    check("", &gone, &["model.safetensors", "not found"]);
    let other = |name: &'static str| {
        move |folder: &Path| {
            fs::rename(folder.join("model.safetensors"), folder.join(name)).unwrap();
        }
    };
    check("", &other("pytorch_model.bin"), &["can carry code", "save_pretrained"]);
    check("", &other("model.safetensors.index.json"), &["several files", "save_pretrained"]);
    let named = |name: &str, dims: &[usize]| Weight {
        name: name.into(),
        dims: dims.into(),
        dtype: DType::F32,
        data: vec![0.5; dims.iter().product()],
    };
    check("", &weights(&|w| w.push(named("score.weight", &[2, 32]))), &["score.weight", "model.map"]);
    check(
        "",
        &weights(&|w| w.push(named("lm_head.weight", &[260, 32]))),
        &["lm_head.weight", "tie_word_embeddings"],
    );
    check("", &weights(&|w| w.retain(|w| !w.name.ends_with("h.1.ln_2.bias"))), &["blocks.1.ln2.bias"]);
}
