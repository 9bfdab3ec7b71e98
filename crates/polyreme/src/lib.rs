//! The front door of Polyreme: what the command line does, and the crates behind it by their short names.
//!
//! This crate alone reads flags, the terminal and what the operating system says of the process; everything below
//! is told.
//!
//! # Layout
//! - [`jobs`]: the reference jobs.
//! - [`mod@bench`], [`doctor`]: the commands.
//! - [`process`]: the process and the machine, as the operating system sees them.

#![forbid(unsafe_code)]

pub mod bench;
pub mod doctor;
pub mod jobs;
pub mod process;

pub use polyreme_exec as exec;
pub use polyreme_graph as graph;
pub use polyreme_kernels as kernels;
pub use polyreme_nn as nn;

/// Runs the README's example as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
