//! The front door of Polyreme: what the command line does, and the crates behind it by their short names.
//!
//! This crate alone reads flags, the terminal and what the operating system says of the process; everything below
//! is told.
//!
//! # Layout
//! - [`app`]: a job defined in Rust, with the whole command line.
//! - [`cli`]: the commands. [`mod@bench`], [`doctor`]: two of them that are libraries too.
//! - [`cluster`]: how many ranks there are, on which cores, and who starts them.
//! - [`output`]: the standard streams, which hold nobody who trains.
//! - [`process`]: the process and the machine, as the operating system sees them.

#![forbid(unsafe_code)]
// They panic when their reader has gone; see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod app;
pub mod bench;
pub mod cli;
pub mod cluster;
pub mod doctor;
pub mod memory;
pub mod output;
pub mod process;

pub use app::App;
pub use polyreme_data as data;
pub use polyreme_exec as exec;
pub use polyreme_graph as graph;
pub use polyreme_kernels as kernels;
pub use polyreme_nn as nn;
pub use polyreme_train as train;
pub use polyreme_train::TrainError;
pub use polyreme_train::job::Job;

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
