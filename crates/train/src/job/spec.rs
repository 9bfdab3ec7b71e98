//! What a job is: plain values, as a job file or Rust gives them. Nothing here reads files or checks data.

use std::path::PathBuf;

pub use polyreme_data::Augment;
pub use polyreme_data::table::{ColumnChoice, TableFormat, TextChoice};
use polyreme_graph::{DType, Precision};
use polyreme_nn::Model;
pub use polyreme_parallel::pipeline::PipelineKind;

use super::open::OpenKeys;
use super::store::StoreAddress;
use super::sync::{EverySpec, OuterSpec, ServersSpec, SyncKind, SyncTurn};
pub use super::tuning::{GroupSpec, HeadStart, LoraSpec, NameRule};
use super::wire::WireSpec;
pub use crate::loss::LossKind;

/// Everything that a run needs to know.
#[derive(Clone, PartialEq, Debug)]
pub struct Job {
    /// The name of the run: of the job file, without its ending.
    pub name: String,
    /// `[model]`.
    pub model: ModelSpec,
    /// `[data]`.
    pub data: DataSpec,
    /// `[train]`.
    pub train: TrainSpec,
    /// `[parallel]`.
    pub parallel: ParallelSpec,
    /// `[output]`.
    pub output: OutputSpec,
}

/// `[model]`: which network. Sizes that a file leaves out are taken from the data (`fit`).
#[derive(Clone, PartialEq, Debug)]
pub struct ModelSpec {
    /// The network, with the file's sizes and defaults elsewhere.
    pub model: Model,
    /// Sizes that the file did not give, to be taken from the data: any of `inputs`, `channels`, `image`, `classes`,
    /// `vocab`, `context`, `input` (of a list of layers); or, with a folder, all of [`ModelSpec::folder_keys`] from there.
    pub from_data: Vec<String>,
    /// The folder of a model of Hugging Face's, with sizes and weights.
    pub path: Option<PathBuf>,
    /// Weights to start from: a safetensors file.
    pub weights: Option<PathBuf>,
    /// What the file's tensors are called here.
    pub map: Vec<NameRule>,
    /// What the last layer starts from.
    pub head: HeadStart,
    /// Patterns of the parameters that stay as they are.
    pub freeze: Vec<String>,
    /// Factors beside frozen weights.
    pub lora: Option<LoraSpec>,
    /// The paths of custom layers that stay in f32 whatever the run's precision is, in the order of the list: `3`, or `3.0`
    /// inside a residual.
    pub f32_layers: Vec<String>,
}

/// `[data]`: which samples, and what is done to them.
#[derive(Clone, PartialEq, Debug)]
pub struct DataSpec {
    /// Where samples come from.
    pub source: Source,
    /// The share of the training set that is kept for validation.
    pub validation: f64,
    /// Whether numbers are shifted and scaled by the training set's mean and deviation, channel by channel.
    pub normalise: bool,
    /// What is done to training images.
    pub augment: Augment,
    /// Weights of the classes in the loss.
    pub class_weights: ClassWeights,
    /// How samples are ordered.
    pub order: OrderSpec,
    /// Whether files of the set lie on different hosts.
    pub spread: bool,
    /// Where copies of what is in stores are kept.
    pub cache: CacheSpec,
    /// The share of the training set that one epoch visits, in (0, 1].
    pub fraction: f64,
    /// Loader threads; `None`: chosen.
    pub threads: Option<usize>,
    /// Batches ready ahead.
    pub prefetch: usize,
}

/// `data.cache`: copies of what is in stores.
#[derive(Clone, PartialEq, Debug)]
pub struct CacheSpec {
    /// The folder; `None`: one of the user's.
    pub path: Option<PathBuf>,
    /// How much they may be together.
    pub max_gib: f64,
}

/// A table with the labels of images.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ImageTable {
    /// The file; `None`: images of a class are in a folder of its name.
    pub labels: Option<PathBuf>,
    /// The file of the test set, whose images are in the same folder.
    pub test: Option<PathBuf>,
    /// The column with the images' paths, by name or number; `None`: found.
    pub image: Option<String>,
    /// The columns with the labels; empty: the last.
    pub label: Vec<String>,
}

/// Where samples come from. Paths are absolute, or relative to the working folder.
#[derive(Clone, PartialEq, Debug)]
pub enum Source {
    /// IDX files, gzipped or not, by their usual names in a folder.
    Idx {
        /// The folder.
        path: PathBuf,
        /// `mnist` or `fashion-mnist`, if the set was named without a path. `path` is then
        /// [`Source::default_folder`], and where that is not, a package of the system may have it.
        known: Option<&'static str>,
    },
    /// CIFAR's binary version.
    Cifar {
        /// The folder.
        path: PathBuf,
        /// 10, or 100 (fine labels).
        classes: usize,
    },
    /// A table.
    Table {
        /// How it is written.
        format: TableFormat,
        /// The training files: files, folders, patterns.
        path: Vec<PathBuf>,
        /// The test files; empty: none.
        test: Vec<PathBuf>,
        /// The labels' columns, by name or number; empty: the last one.
        label: Vec<String>,
        /// Between fields.
        delimiter: u8,
        /// Whether the first line holds names; `None`: found out.
        header: Option<bool>,
        /// Which columns are read, and as what.
        choice: ColumnChoice,
        /// Whether rows are kept in memory, or read where they lie; `None`: chosen by their size.
        in_memory: Option<bool>,
    },
    /// A folder with a folder of images for each class; or one with `train` and `test` (or `val`) of that kind.
    Images {
        /// The folder.
        path: PathBuf,
        /// Rows and columns that every image is brought to; `None`: all must have one size.
        size: Option<(usize, usize)>,
        /// Whether colours are dropped.
        grey: bool,
        /// Where labels are, if folders do not say them.
        table: ImageTable,
    },
    /// Shards of tar: members of one key are a sample, an image and its label.
    Tar {
        /// The training files: files, folders, patterns.
        path: Vec<PathBuf>,
        /// The test files; empty: none.
        test: Vec<PathBuf>,
        /// The key of the `.json` with the label; `None`: the label is the `.cls`.
        label: Option<String>,
        /// Rows and columns that every image is brought to; `None`: all must have one size.
        size: Option<(usize, usize)>,
        /// Whether colours are dropped.
        grey: bool,
    },
    /// Text.
    Text {
        /// The file.
        path: PathBuf,
        /// The test file.
        test: Option<PathBuf>,
        /// `tokenizer.json`; `None`: bytes.
        tokenizer: Option<PathBuf>,
        /// Tokens a sample; `None`: the model's context.
        context: Option<usize>,
    },
    /// Arrays in safetensors files.
    Arrays {
        /// The training file.
        path: PathBuf,
        /// The test file.
        test: Option<PathBuf>,
        /// The features' array.
        x: String,
        /// The labels' array.
        labels: String,
    },
    /// Made up: classes are blobs around random centres.
    Synthetic {
        /// How many training samples; a fifth of it more for the test.
        samples: usize,
        /// Dims of a sample: `[width]`, or `[channels, height, width]`.
        shape: Vec<usize>,
        /// How many classes.
        classes: usize,
        /// The deviation within a class; centres are 1 apart.
        noise: f64,
    },
    /// A set that the program brings (a job defined in Rust).
    Given,
}

/// Weights of the classes in the loss.
#[derive(Clone, PartialEq, Debug)]
pub enum ClassWeights {
    /// All 1.
    None,
    /// In inverse proportion to their frequency in the training set.
    Balanced,
    /// As given.
    Given(Vec<f32>),
}

/// How samples are ordered in an epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OrderSpec {
    /// As they lie.
    InOrder,
    /// Every sample at random.
    Sample,
    /// Blocks of neighbours at random, and samples at random inside a block: for files larger than memory.
    Block(usize),
    /// Every place of a batch has its own part of the set, at random inside it: each rank reads its part only.
    Parts,
}

/// `[train]`: how to learn.
#[derive(Clone, PartialEq, Debug)]
pub struct TrainSpec {
    /// Samples a step.
    pub batch: usize,
    /// When to stop.
    pub length: Length,
    /// The optimizer and its rate.
    pub optimizer: OptimizerSpec,
    /// Parameters with rates of their own.
    pub groups: Vec<GroupSpec>,
    /// How the rate changes.
    pub schedule: crate::schedule::Schedule,
    /// The maximum of the gradients' norm.
    pub clip: Option<f64>,
    /// Into how many microbatches a batch is cut.
    pub accumulate: usize,
    /// The decay of the averaged weights.
    pub ema: Option<f64>,
    /// The format of activations.
    pub precision: PrecisionKind,
    /// The paths of layers, as parameters are named, that stay in f32 whatever the precision is.
    pub f32_layers: Vec<String>,
    /// The first scale of the loss, in f16.
    pub loss_scale: f32,
    /// What is minimised.
    pub loss: LossKind,
    /// Spread over the other classes.
    pub label_smoothing: f32,
    /// The parameter of mixup's beta distribution; 0: none.
    pub mixup: f64,
    /// When to give up.
    pub early_stop: Option<EarlyStop>,
    /// When to evaluate; `None`: after each epoch.
    pub evaluate_every_steps: Option<u64>,
    /// Steps between two lines of metrics.
    pub log_every_steps: u64,
    /// From which everything random follows.
    pub seed: u64,
    /// Activations are recomputed so that training takes at most this much.
    pub memory_mib: Option<usize>,
}

/// `[train] precision`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrecisionKind {
    /// f32 everywhere.
    F32,
    /// The same, with no algorithm that trades accuracy for speed.
    F32Strict,
    /// Activations in bf16.
    Bf16,
    /// Activations in f16.
    F16,
    /// bf16 where it is measured to be faster, else f32.
    Auto,
}

impl PrecisionKind {
    /// Its name in job files.
    pub fn name(self) -> &'static str {
        match self {
            PrecisionKind::F32 => "f32",
            PrecisionKind::F32Strict => "f32-strict",
            PrecisionKind::Bf16 => "bf16",
            PrecisionKind::F16 => "f16",
            PrecisionKind::Auto => "auto",
        }
    }
}

impl Job {
    /// How the graphs of the run are rewritten; what is measured when the run begins is f32 until then.
    pub fn precision(&self) -> Precision {
        self.precision_as(self.train.precision)
    }

    /// The same if the run's precision were this one.
    pub fn precision_as(&self, kind: PrecisionKind) -> Precision {
        let f32_layers = || self.f32_layers().map(String::from).collect();
        let half = |half: DType| Precision { f32_layers: f32_layers(), ..Precision::half(half) };
        let precision = match kind {
            PrecisionKind::F32 | PrecisionKind::Auto => Precision::F32,
            PrecisionKind::F32Strict => Precision::F32_STRICT,
            PrecisionKind::Bf16 => half(DType::Bf16),
            PrecisionKind::F16 => half(DType::F16),
        };
        Precision { reproducible: self.parallel.reproducible, ..precision }
    }

    /// The paths of layers that stay in f32, from `[model]` and from `[train]`.
    pub(crate) fn f32_layers(&self) -> impl Iterator<Item = &str> {
        self.model.f32_layers.iter().chain(&self.train.f32_layers).map(String::as_str)
    }
}

/// When to stop.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Length {
    /// After so many passes over the data.
    Epochs(u64),
    /// After so many steps.
    Steps(u64),
}

/// `[train] optimizer`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OptimizerSpec {
    /// The rule, in the engine's vocabulary.
    pub rule: polyreme_graph::Optimizer,
    /// The base learning rate.
    pub lr: f64,
    /// What the optimizer's state is stored in: f32, or bf16 for rules that go by element.
    pub moments: DType,
}

/// When a run that no longer gets better ends.
#[derive(Clone, PartialEq, Debug)]
pub struct EarlyStop {
    /// Which metric, such as `val_loss`.
    pub metric: String,
    /// Evaluations without a gain before the end.
    pub patience: u64,
    /// What counts as a gain.
    pub min_delta: f64,
}

/// `[parallel]`: with what.
#[derive(Clone, PartialEq, Debug)]
pub struct ParallelSpec {
    /// Keys that are left to the planner.
    pub open: OpenKeys,
    /// How many ranks share a step; `None`: chosen.
    pub ranks: Option<usize>,
    /// How many of them, or groups of them, each batch is split over; `None`: those that the other axes leave.
    pub data: Option<usize>,
    /// How many ranks each matrix is split over.
    pub tensor: usize,
    /// How many stages the layers are split over.
    pub stage: usize,
    /// How many ranks each sequence is split over.
    pub sequence: usize,
    /// Into how many microbatches a step is cut; `None`: `train.accumulate`.
    pub microbatches: Option<usize>,
    /// In which order stages run microbatches.
    pub schedule: PipelineKind,
    /// Without a flush between steps: the most steps from one flush to the next.
    pub flush_every: usize,
    /// The layers before which the network is cut into stages; none: chosen.
    pub cuts: Vec<String>,
    /// Whether each rank of the data axis keeps only its part of the weights.
    pub shard_weights: bool,
    /// Threads of each rank; `None`: the cores that its rank has.
    pub threads: Option<usize>,
    /// What ranks talk over.
    pub transport: Transport,
    /// Whether what ranks send over sockets is encrypted; `None` for where it leaves a host.
    pub encrypt: Option<bool>,
    /// Whether batch norm takes the statistics of all ranks' samples.
    pub sync_batch_norm: bool,
    /// Whether the weights are the same bits on any number of ranks.
    pub reproducible: bool,
    /// Into how many logical shards a reproducible step is cut, on any number of ranks.
    pub shards: usize,
    /// Whether each rank keeps the optimizer's state for its own range of the parameters only; `None` for where ranks
    /// share memory.
    pub shard_optimizer: Option<bool>,
    /// Whether each rank keeps the gradients of its own range only, and so the optimizer's state too.
    pub shard_gradients: bool,
    /// How much of the gradients is reduced at once.
    pub bucket_mib: f64,
    /// The format in which gradients travel between ranks that are connected by a network.
    pub wire: WireSpec,
    /// How replicas agree; with a rule, how they do now.
    pub sync: SyncKind,
    /// After how many steps they do it in another way.
    pub turn: Option<SyncTurn>,
    /// With local steps: how many from one exchange of weights to the next, at most, and what makes them fewer.
    pub every: EverySpec,
    /// With local steps: in how many parts, which take turns, the model is exchanged.
    pub fragments: usize,
    /// With several of them: how many steps are taken while one is exchanged.
    pub overlap: usize,
    /// With local steps: patterns of parameters that each replica keeps for itself.
    pub own: Vec<String>,
    /// With local steps: the outer step; `None`: weights become the mean of the replicas'.
    pub outer: Option<OuterSpec>,
    /// With `"ps-bounded"`: how far a rank may be ahead of the slowest.
    pub staleness: usize,
    /// Where parameter servers are, if they hold the weights.
    pub servers: ServersSpec,
    /// Whether ranks may come and go, and how many there may be.
    pub elastic: Option<Elastic>,
    /// How a step's samples are shared out.
    pub balance: Balance,
    /// Whether threads rest while others need the cores.
    pub follow_load: bool,
    /// Seconds after which a rank of which nothing is heard is lost.
    pub patience: f64,
    /// Seconds after which a run in which no rank gets on ends, though all of them live.
    pub stall: f64,
}

/// How many ranks an elastic run may have, and who says who they are.
#[derive(Clone, PartialEq, Debug)]
pub struct Elastic {
    /// With fewer it saves and waits.
    pub min: usize,
    /// More than these wait until there is room.
    pub max: usize,
    /// A rank that takes this many times as long as the others for the same work leaves.
    pub leave_out: Option<f64>,
    /// The store that says who coordinates.
    pub store: Option<StoreAddress>,
}

/// What ranks talk over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// What fits the way in which the job was started.
    Auto,
    /// Threads of one process.
    Local,
    /// Processes of one host, over shared memory.
    Shm,
    /// Sockets.
    Tcp,
    /// MPI.
    Mpi,
}

/// How a step's samples are shared out among ranks.
#[derive(Clone, PartialEq, Debug)]
pub enum Balance {
    /// By their speed if they are on several hosts that differ; as many for each otherwise.
    Hosts,
    /// As many for each.
    Equal,
    /// By the speed of each, measured now and then.
    Auto,
    /// In proportion to these weights, one for each rank.
    Given(Vec<f64>),
}

/// `[output]`: what is left behind.
#[derive(Clone, PartialEq, Debug)]
pub struct OutputSpec {
    /// The run's folder; `None`: `runs/NAME`, with a number behind it if that is taken.
    pub path: Option<PathBuf>,
    /// A checkpoint after so many steps.
    pub every_steps: Option<u64>,
    /// A checkpoint after so many epochs.
    pub every_epochs: Option<u64>,
    /// A checkpoint after so many minutes.
    pub every_minutes: Option<f64>,
    /// How many checkpoints stay.
    pub keep: usize,
    /// The metric whose best checkpoint stays, such as `val_accuracy`; `None`: none.
    pub best: Option<String>,
    /// Whether TensorBoard files are written.
    pub tensorboard: bool,
    /// Whether low-rank factors are merged into the weights of the run's model.
    pub merge: bool,
    /// What the parameters of the run's model are written in.
    pub dtype: DType,
}
