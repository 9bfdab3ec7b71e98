//! What can go wrong with a run.

use std::path::PathBuf;

use polyreme_data::DataError;
use polyreme_exec::{ExecError, NonFinite};
use polyreme_graph::TraceError;
use polyreme_graph::recompute::BudgetError;

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
    Budget(#[from] BudgetError),
    /// A step.
    #[error(transparent)]
    Exec(#[from] ExecError),
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
    /// The loss is not a number any more.
    #[error("step {step}: the loss is {loss}; it came from {}; try a lower `train.optimizer.lr`, or `train.clip = 1.0`", place.as_ref().map_or_else(|| "the loss itself".to_string(), ToString::to_string))]
    NotFinite {
        /// The step, counted from 0.
        step: u64,
        /// The loss.
        loss: f64,
        /// Where it came from.
        place: Option<NonFinite>,
    },
    /// The system could not read or write.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}
