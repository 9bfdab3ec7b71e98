//! Defaults, for job files and for jobs made in Rust.

use std::path::PathBuf;

use polyreme_collective::patience::{SILENCE, STALL};
use polyreme_data::{Features, Spec, Target};
use polyreme_dtype::DType;
use polyreme_graph::{Adafactor, Moments, Optimizer};
use polyreme_nn::layer::TextIds;
use polyreme_nn::model::StackInput;
use polyreme_nn::{Answer, FitError, Fitted, Model, Sample};

use super::open::OpenKeys;
use super::spec::*;
use super::sync::{EverySpec, ServersSpec, SyncKind};
use super::wire::WireSpec;
use crate::schedule::{Schedule, ScheduleShape};

/// Tokens a sample, where neither the data nor the model say it.
const CONTEXT: usize = 256;

impl Job {
    /// A job with defaults all over: an `mlp` of the data's sizes, on a set that the program brings.
    pub fn new(name: impl Into<String>) -> Job {
        Job {
            name: name.into(),
            model: ModelSpec::default(),
            data: DataSpec::default(),
            train: TrainSpec::default(),
            parallel: ParallelSpec::default(),
            output: OutputSpec::default(),
        }
    }

    /// Tokens a sample of text: what the data say, or else the model, or else 256.
    pub fn context(&self) -> usize {
        match self.data.source {
            Source::Text { context: Some(context), .. } => context,
            _ => self.model.context().unwrap_or(CONTEXT),
        }
    }
}

impl ModelSpec {
    /// The model, with every size that data have taken from them; of a list of layers, those that it leaves open.
    pub fn new(model: Model) -> ModelSpec {
        let open = model.sizes_from_data().iter().filter(|key| match (&model, **key) {
            (Model::Layers(m), "input") => m.input == StackInput::Open,
            (Model::Layers(m), _) => m.is_open(),
            _ => true,
        });
        let from_data = open.map(|s| s.to_string()).collect();
        let (path, weights, map, head, freeze) = (None, None, Vec::new(), HeadStart::File, Vec::new());
        ModelSpec { model, from_data, path, weights, map, head, freeze, lora: None, f32_layers: Vec::new() }
    }

    /// The model as it is; data of other sizes are an error.
    pub fn exact(model: Model) -> ModelSpec {
        ModelSpec { from_data: Vec::new(), ..ModelSpec::new(model) }
    }

    /// The length of sequences that the model is made for, if it takes sequences.
    pub fn context(&self) -> Option<usize> {
        match &self.model {
            Model::Gpt(m) => Some(m.context),
            Model::Gpt2(m) => Some(m.context),
            Model::Bert(m) => Some(m.context),
            Model::Recurrent(m) => Some(m.context),
            Model::Encoder(m) => Some(m.context),
            Model::Layers(m) => match m.input {
                StackInput::Ids { context, .. } | StackInput::Texts { context, .. } => Some(context),
                _ => None,
            },
            _ => None,
        }
    }

    /// Takes open sizes from the data and holds the others against them; nothing is open afterwards.
    pub fn fit(&mut self, data: &Spec) -> Result<Fitted, FitError> {
        let texts: Vec<TextIds> = match &data.features {
            Features::Mixed { texts, .. } => {
                texts.iter().map(|text| TextIds { ids: text.ids, length: text.length }).collect()
            }
            _ => Vec::new(),
        };
        let sample = match &data.features {
            &Features::Image { channels, height, width, .. } => Sample::Image { channels, height, width },
            &Features::Row { width } => Sample::Row { width },
            Features::Mixed { numbers, ids, .. } => Sample::Mixed { numbers: *numbers, ids, texts: &texts },
            &Features::Ids { time, vocab } => Sample::Ids { vocab, time },
            &Features::Texts { vocab, padding, .. } => {
                Sample::Texts { vocab, time: data.features.numel(), padding }
            }
        };
        let answer = match &data.target {
            Target::Class { classes, .. } => Answer::Class { classes: *classes },
            Target::Tags { classes, .. } => Answer::Tags { classes: *classes },
            Target::NextId => Answer::NextId,
            Target::Numbers { n, .. } | Target::Labels { n, .. } => Answer::Values { n: *n },
        };
        let fitted = self.model.fit(sample, answer, &self.from_data).map_err(|error| match error {
            // Sizes of a folder cannot be left to the data.
            FitError::Differs { key: key @ ("vocab" | "context"), said, found, .. }
                if self.path.is_some() =>
            {
                let advice = match key {
                    "vocab" => "take the tokenizer that belongs to the model",
                    _ => "the model's weights have no more; make `data.context` or `data.length` smaller",
                };
                FitError::Differs { key, said, found, advice }
            }
            error => error,
        })?;
        self.from_data.clear();
        Ok(fitted)
    }
}

impl Default for ModelSpec {
    fn default() -> ModelSpec {
        ModelSpec::new(Model::Mlp(polyreme_nn::model::Mlp::default()))
    }
}

impl Default for CacheSpec {
    fn default() -> CacheSpec {
        CacheSpec { path: None, max_gib: 32.0 }
    }
}

impl Default for DataSpec {
    fn default() -> DataSpec {
        DataSpec {
            source: Source::Given,
            validation: 0.1,
            normalise: true,
            augment: Augment::default(),
            class_weights: ClassWeights::None,
            order: OrderSpec::Sample,
            spread: false,
            cache: CacheSpec::default(),
            fraction: 1.0,
            threads: None,
            prefetch: 4,
        }
    }
}

impl Source {
    /// The name, as a job file has it.
    pub fn kind(&self) -> &'static str {
        match self {
            Source::Idx { known: Some(name), .. } => name,
            Source::Idx { known: None, .. } => "idx",
            Source::Cifar { classes: 100, .. } => "cifar100",
            Source::Cifar { .. } => "cifar10",
            Source::Table { format: TableFormat::Csv, .. } => "csv",
            Source::Table { format: TableFormat::JsonLines, .. } => "jsonl",
            Source::Table { format: TableFormat::Parquet, .. } => "parquet",
            Source::Images { .. } => "images",
            Source::Tar { .. } => "tar",
            Source::Text { .. } => "text",
            Source::Arrays { .. } => "arrays",
            Source::Synthetic { .. } => "synthetic",
            Source::Given => "given",
        }
    }

    /// The folder of a well-known set whose path was not given: `data/NAME` in the working folder, made absolute.
    pub fn default_folder(name: &str) -> PathBuf {
        let path = PathBuf::from("data").join(name);
        std::path::absolute(&path).unwrap_or(path)
    }
}

impl Default for TrainSpec {
    fn default() -> TrainSpec {
        TrainSpec {
            batch: 64,
            length: Length::Epochs(10),
            optimizer: OptimizerSpec::default(),
            groups: Vec::new(),
            schedule: Schedule { shape: ScheduleShape::Constant, warmup: 0 },
            clip: None,
            accumulate: 1,
            ema: None,
            precision: PrecisionKind::F32,
            f32_layers: Vec::new(),
            loss_scale: crate::loss_scale::FIRST,
            loss: LossKind::CrossEntropy,
            label_smoothing: 0.0,
            mixup: 0.0,
            early_stop: None,
            evaluate_every_steps: None,
            log_every_steps: 50,
            seed: 0,
            memory_mib: None,
        }
    }
}

impl OptimizerSpec {
    /// Stochastic gradient descent: rate 0.01, momentum 0.9.
    pub fn sgd() -> OptimizerSpec {
        let rule = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
        OptimizerSpec { rule, lr: 0.01, moments: DType::F32 }
    }
    /// Adam with PyTorch's defaults.
    pub fn adam() -> OptimizerSpec {
        OptimizerSpec { rule: Optimizer::Adam(Moments::DEFAULT), lr: 1e-3, moments: DType::F32 }
    }
    /// AdamW with PyTorch's defaults.
    pub fn adamw() -> OptimizerSpec {
        let rule = Optimizer::AdamW(Moments { weight_decay: 0.01, ..Moments::DEFAULT });
        OptimizerSpec { rule, lr: 1e-3, moments: DType::F32 }
    }
    /// LAMB: rate 0.001, decay 0.01, eps 1e-6.
    pub fn lamb() -> OptimizerSpec {
        let rule = Optimizer::Lamb(Moments { weight_decay: 0.01, eps: 1e-6, ..Moments::DEFAULT });
        OptimizerSpec { rule, lr: 1e-3, moments: DType::F32 }
    }
    /// Adafactor with PyTorch's defaults.
    pub fn adafactor() -> OptimizerSpec {
        OptimizerSpec { rule: Optimizer::Adafactor(Adafactor::DEFAULT), lr: 0.01, moments: DType::F32 }
    }
    /// Lion: rate 0.0001, the paper's betas 0.9 and 0.99, no decay.
    pub fn lion() -> OptimizerSpec {
        let rule = Optimizer::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 };
        OptimizerSpec { rule, lr: 1e-4, moments: DType::F32 }
    }
}

impl Default for OptimizerSpec {
    fn default() -> OptimizerSpec {
        OptimizerSpec::adamw()
    }
}

impl Default for EarlyStop {
    fn default() -> EarlyStop {
        EarlyStop { metric: "val_loss".into(), patience: 3, min_delta: 0.0 }
    }
}

impl Default for ParallelSpec {
    fn default() -> ParallelSpec {
        ParallelSpec {
            open: OpenKeys::default(),
            ranks: None,
            data: None,
            tensor: 1,
            stage: 1,
            sequence: 1,
            microbatches: None,
            schedule: PipelineKind::OneFOneB,
            flush_every: 16,
            cuts: Vec::new(),
            shard_weights: false,
            threads: None,
            transport: Transport::Auto,
            encrypt: None,
            sync_batch_norm: false,
            reproducible: false,
            shards: 8,
            shard_optimizer: None,
            shard_gradients: false,
            bucket_mib: 1.0,
            follow_load: false,
            wire: WireSpec::default(),
            sync: SyncKind::AllReduce,
            turn: None,
            every: EverySpec::default(),
            fragments: 1,
            overlap: 0,
            own: Vec::new(),
            outer: None,
            staleness: 3,
            servers: ServersSpec::default(),
            elastic: None,
            patience: SILENCE.as_secs_f64(),
            stall: STALL.as_secs_f64(),
            balance: Balance::Hosts,
        }
    }
}

impl Default for Elastic {
    fn default() -> Elastic {
        Elastic { min: 1, max: 16, leave_out: None, store: None }
    }
}

impl Transport {
    /// All of them.
    pub const ALL: [Transport; 5] =
        [Transport::Auto, Transport::Local, Transport::Shm, Transport::Tcp, Transport::Mpi];

    /// The name, as a job file has it.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Local => "local",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
            Transport::Mpi => "mpi",
        }
    }

    /// What it is.
    pub(super) fn words(self) -> &'static str {
        match self {
            Transport::Auto => {
                "threads of one process, or what fits the way in which the processes were started"
            }
            Transport::Local => "threads of one process",
            Transport::Shm => "processes of one host, over shared memory",
            Transport::Tcp => "sockets",
            Transport::Mpi => "MPI, through the library of the `mpirun` or `srun` that started the ranks",
        }
    }
}

impl Default for OutputSpec {
    fn default() -> OutputSpec {
        OutputSpec {
            path: None,
            every_steps: None,
            every_epochs: Some(1),
            every_minutes: None,
            keep: 3,
            best: Some("val_accuracy".into()),
            tensorboard: true,
            merge: false,
            dtype: DType::F32,
        }
    }
}
