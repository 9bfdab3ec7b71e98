//! What can go wrong with a run.

use std::path::PathBuf;

use polyreme_collective::Report;
use polyreme_data::DataError;
use polyreme_exec::ExecError;
use polyreme_graph::TraceError;
use polyreme_graph::recompute::BudgetError;
use polyreme_nn::model::FitError;
use polyreme_parallel::CompileError;

use crate::checkpoint::CheckpointError;
use crate::job::JobErrors;
use crate::record::RecordError;
use crate::run::TooLarge;

/// An error of a run.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model.
    #[error("the model does not fit: {0}")]
    Trace(#[from] TraceError),
    /// The memory budget.
    #[error("train.memory_mib: {0}")]
    Budget(BudgetError),
    /// A plan for which there is no program.
    #[error("{0}")]
    Plan(CompileError),
    /// A step.
    #[error(transparent)]
    Exec(ExecError),
    /// Another rank failed, or is lost.
    #[error(transparent)]
    Rank(#[from] Report),
    /// Samples and the model's input differ.
    #[error("the model takes {} of {model:?}, and a sample of the data is {data:?}; change the model's sizes", if *ids { "ids" } else { "numbers" })]
    Misfit {
        /// What the model takes.
        model: Vec<usize>,
        /// Whether these are ids.
        ids: bool,
        /// What there is.
        data: Vec<usize>,
    },
    /// Logits and labels differ.
    #[error("the model's result is {got:?}, and {want:?} (labels, classes) is needed; change its last layer")]
    Logits {
        /// What the model gives.
        got: Vec<usize>,
        /// What the data need.
        want: Vec<usize>,
    },
    /// A pattern that names no parameter.
    #[error("`{key}`: the model has no parameter {pattern:?} that is learnt; {hint}")]
    NoParameter {
        /// The key of the job.
        key: &'static str,
        /// The pattern.
        pattern: String,
        /// What there is.
        hint: String,
    },
    /// Nothing to learn.
    #[error(
        "`model.freeze` names every parameter, so there is nothing to train; leave out at least the last layer"
    )]
    AllFrozen,
    /// The loss is not a number any more.
    #[error(
        "step {step}: the loss is {loss}; it came from {place}; try a lower `train.optimizer.lr`, or `train.clip = 1.0`"
    )]
    NotFinite {
        /// The step, counted from 0.
        step: u64,
        /// The loss.
        loss: f64,
        /// Where it came from.
        place: String,
    },
    /// Gradients in f16 stay infinite however small the scale of the loss is.
    #[error(
        "step {step}: gradients in f16 are still not finite with the loss scaled down to 1: {place}; use `train.precision = \"bf16\"`, a lower `train.optimizer.lr`, or `train.clip = 1.0`"
    )]
    Overflows {
        /// The step, counted from 0.
        step: u64,
        /// Where they came from.
        place: String,
    },
    /// The network's sizes.
    #[error("{0}")]
    Fit(#[from] FitError),
    /// The job.
    #[error("{0}")]
    Job(#[from] JobErrors),
    /// A checkpoint or a file of weights.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The records of the run.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A folder that holds a run.
    #[error("{} holds a run already; `polyreme resume {}` goes on with it, `--overwrite` replaces it, `--output` takes another folder", path.display(), path.display())]
    Taken {
        /// The folder.
        path: PathBuf,
    },
    /// No samples.
    #[error("the training set is empty")]
    Empty,
    /// A job without data.
    #[error("the job has no data; give it `[data]`, or sets from Rust")]
    NoData,
    /// The data of a run that goes on are others.
    #[error(
        "the data are not those that the run began with: {what}; restore them, or go on with them as they are with \
         `polyreme resume --changed-data`"
    )]
    DataChanged {
        /// What is not as it was.
        what: String,
    },
    /// The data of a run that goes on have another meaning.
    #[error("the data do not fit the model that the run has: {what}; restore them, or train anew")]
    DataMisfit {
        /// What is not as it was.
        what: String,
    },
    /// There is nothing to take a metric of.
    #[error(
        "train.early_stop.metric is {metric:?}, and there is no validation set; set `data.validation` to a share of the \
         training set such as 0.1, or watch \"train_loss\""
    )]
    NoValidation {
        /// The metric.
        metric: String,
    },
    /// Ids cannot be mixed.
    #[error("train.mixup mixes images or numbers, and the data have ids; leave it out")]
    MixupOfIds,
    /// A loss for other labels than the data have.
    #[error(
        "train.loss is {loss:?}, and the labels of the data are {target}; \"cross_entropy\" is for classes and tokens, \
         \"mse\", \"mae\" and \"huber\" are for numbers and \"bce\" for labels of 0 or 1, from `csv` or `arrays`"
    )]
    LossMisfit {
        /// The loss.
        loss: &'static str,
        /// What labels are, in words.
        target: String,
    },
    /// Weights of classes that do not exist.
    #[error("data.class_weights has {got} weights, and there are {want} classes")]
    ClassWeights {
        /// How many there are.
        got: usize,
        /// How many are needed.
        want: usize,
    },
    /// The path of a layer that the network does not have.
    #[error("{path:?} is to stay in f32, and the model has no such layer; {hint}")]
    NoLayer {
        /// The path.
        path: String,
        /// What to write instead.
        hint: String,
    },
    /// Weights of ranks that do not exist.
    #[error(
        "parallel.balance has {got} weights, and there are {want} ranks; write one for each, or \"auto\""
    )]
    Balance {
        /// How many there are.
        got: usize,
        /// How many are needed.
        want: usize,
    },
    /// A step that has too few samples for all ranks to have a part in every statistic.
    #[error(
        "parallel.sync_batch_norm: a step of {samples} samples does not give every one of {ranks} ranks a sample \
         for each of its microbatches; take fewer ranks, or a `train.batch` whose last step is longer"
    )]
    TooFew {
        /// Samples of the step.
        samples: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// Ranks that cannot be arranged as the job says.
    #[error("parallel: {0}")]
    Mesh(String),
    /// Ranks that cannot use a model as it was trained.
    #[error(
        "{why}, or use the model on another mesh than it was trained on: `--set parallel.tensor=1`, `parallel.stage=1` and so on"
    )]
    UseMesh {
        /// Why.
        why: String,
    },
    /// Ranks that would all write the same text.
    #[error(
        "text is written one token after another, and {ranks} ranks have {data} copies of the model, which would all write the \
         same; use {} ranks, or split the model over more of them with `--set parallel.tensor=N` or `parallel.stage=N`",
        ranks / data
    )]
    Copies {
        /// How many copies.
        data: usize,
        /// All ranks.
        ranks: usize,
    },
    /// Gradients that cannot be sharded.
    #[error("{message}; {hint}")]
    ShardGradients {
        /// Why not.
        message: String,
        /// What to write instead.
        hint: &'static str,
    },
    /// A job that needs more memory than there is.
    #[error(transparent)]
    TooLarge(Box<TooLarge>),
    /// A rank's thread.
    #[error("no thread for rank {rank}: {source}; take fewer ranks")]
    Thread {
        /// The rank.
        rank: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A model that writes no text.
    #[error("this model does not write text; give it files to label")]
    NoText,
    /// Weights without a run around them.
    #[error("{}: a file of weights alone does not say what the model is; give the run's folder or a checkpoint", path.display())]
    WeightsOnly {
        /// The file.
        path: PathBuf,
    },
    /// What a checkpoint says of the run.
    #[error("the checkpoint's progress does not read: {0}")]
    Progress(String),
    /// The system could not read or write.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl From<ExecError> for TrainError {
    fn from(error: ExecError) -> TrainError {
        match error {
            ExecError::Rank(report) => TrainError::Rank(report),
            error => TrainError::Exec(error),
        }
    }
}

impl TrainError {
    /// An error of the system at `path`.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> TrainError {
        TrainError::Io { path: path.into(), source }
    }
}

impl From<CompileError> for TrainError {
    fn from(error: CompileError) -> TrainError {
        match error {
            CompileError::Budget(error) => TrainError::Budget(error),
            error => TrainError::Plan(error),
        }
    }
}
