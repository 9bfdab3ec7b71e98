//! What is measured on data that the model does not learn from, and what follows from it. Pure values: nothing here
//! reads data, runs a model or writes a file.
//!
//! - [`Scores`] adds up an evaluation, batch by batch: loss, accuracy, top-5, perplexity, confusion.
//! - [`Confusion`] says which classes are taken for which.
//! - [`Best`] and [`Patience`] watch a metric over a run: which checkpoint to keep, when to stop.

mod best;
mod confusion;
mod row;
mod scores;
mod table;

pub use best::{Best, Direction, Patience, Verdict, better};
pub use confusion::{CLASSES_MAX, Confusion, Pair};
pub use scores::Scores;
pub use table::Table;
