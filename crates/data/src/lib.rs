//! Datasets: what a sample is, where it lies, in which order samples come, and how batches get into memory ahead of
//! the step that needs them.
//!
//! Nothing here knows of models, graphs or ranks: a loader is told which positions of an epoch to read.
//!
//! # Layout
//! - [`spec`]: what a sample is. [`dataset`]: random access to samples. [`error`]: what can be wrong with files.

#![deny(unsafe_code)]

pub mod dataset;
pub mod error;
pub mod spec;

pub use dataset::{Dataset, Fetched, Label, Scratch, Values};
pub use error::DataError;
pub use spec::{Features, Layout, Spec, Target};
