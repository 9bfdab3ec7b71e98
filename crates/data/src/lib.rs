//! Datasets: what a sample is, where it is stored, in which order samples come, and how batches are loaded ahead of
//! the step that needs them.
//!
//! Nothing here knows of models, graphs or ranks: a loader is given the positions of an epoch to read.
//!
//! # Layout
//! - [`spec`]: what a sample is. [`dataset`]: random access to samples. [`error`]: what can be wrong with files.
//! - Formats: [`idx`] (MNIST), [`cifar`], [`table`] (CSV), [`images`] (a folder per class), [`shards`] (tars of images), [`arrays`] (safetensors),
//!   [`text`] with [`bpe`], its tokenizers, [`text_tokens`], those of texts with labels; all over [`map`], mapped files.
//! - [`remote`]: files from S3, Google Cloud Storage and web servers, through a cache of bounded size.
//! - [`memory`], [`synthetic`]: sets that are given as vectors, or generated. [`mod@split`]: parts of a set. [`by_length`]: texts,
//!   the shortest first. [`spread`]: a set whose files lie with several processes, opened [`together`].
//! - [`order`]: which sample stands where in an epoch; `permute` and `draw` are its randomness.
//! - [`stats`]: means, deviations and class counts. [`augment`], [`transform`]: from a sample to its place in a batch.
//! - [`batch`], [`loader`]: batches, and the threads that prefetch them.
//! - `fetch` (feature `download`): downloads well-known sets by name.

#![deny(unsafe_code)]

pub mod arrays;
pub mod augment;
pub mod batch;
pub mod bpe;
pub mod by_length;
pub mod cifar;
mod classes;
#[cfg(test)]
mod damage;
pub mod dataset;
mod draw;
pub mod error;
#[cfg(feature = "download")]
pub mod fetch;
pub mod idx;
pub mod images;
pub mod joined;
pub mod loader;
pub mod map;
pub mod memory;
pub mod order;
mod permute;
mod plane;
pub mod remote;
pub mod shards;
pub mod spec;
pub mod split;
pub mod spread;
pub mod stats;
pub mod synthetic;
pub mod table;
pub mod text;
pub mod text_tokens;
pub mod together;
pub mod transform;

pub use augment::Augment;
pub use batch::{Batch, BatchValues, Span, counted_of, spans, time_of};
pub use bpe::Tokenizer;
pub use dataset::{Dataset, Fetched, Label, Scratch, Values};
pub use error::DataError;
pub use joined::Joined;
pub use loader::{BatchGuard, Loader, LoaderOptions};
pub use memory::InMemory;
pub use order::{Mode, Order};
/// Which samples were read, as a digest.
pub use polyreme_kernels::tally::Tally;
pub use shards::{ShardOptions, Shards};
pub use spec::{Features, LabelKind, Layout, Spec, Target, TextIds};
pub use split::{Subset, split};
pub use stats::{Stats, balanced_weights};
pub use synthetic::Synthetic;
pub use text::Text;
pub use text_tokens::TextTokenizer;
pub use transform::Transform;
