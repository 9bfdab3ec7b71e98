//! The front door of Polyreme: the command line, and the crates behind it by their short names.
//!
//! Only this crate reads flags, the environment, the terminal and the state of the process; the crates below get them
//! as arguments.
//!
//! # Layout
//! - [`app`]: a job defined in Rust, with the whole command line.
//! - [`cli`]: the commands. [`mod@bench`], [`doctor`]: two of them that are libraries too.
//! - [`cluster`]: how many ranks there are, on which cores, and what starts them.
//! - `metrics`: figures of a run for Prometheus.
//! - [`output`]: the standard streams, which never block training.
//! - [`plan`]: how a job would be split over machines.
//! - [`process`]: the process and the machine, as the operating system sees them. `stores`: what it knows of stores of objects.

#![forbid(unsafe_code)]
// They panic when the pipe is closed; see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod app;
pub mod bench;
pub mod cli;
pub mod cluster;
pub mod doctor;
pub mod memory;
mod metrics;
pub mod output;
pub mod plan;
pub mod process;
mod stores;
mod times;

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
