//! What is measured on data that the model does not learn from, and what follows from it. Pure values: nothing here
//! reads data, runs a model or writes a file.
//!
//! - [`Measured`] is an evaluation of any target. [`Scores`] adds up one of classes, batch by batch: loss, accuracy, top-5,
//!   perplexity, confusion; [`NumberScores`] one of numbers; [`LabelScores`] one of labels that each hold or not.
//! - [`Confusion`] says which classes are taken for which.
//! - [`Best`] and [`Patience`] watch a metric over a run: which checkpoint to keep, when to stop.

mod best;
mod confusion;
mod labels;
mod measured;
mod numbers;
mod row;
mod scores;
mod table;

pub use best::{Best, Direction, Patience, Verdict, better};
pub use confusion::{CLASSES_MAX, Confusion, Pair};
pub use labels::LabelScores;
pub use measured::Measured;
pub use numbers::NumberScores;
pub use scores::Scores;
pub use table::Table;
