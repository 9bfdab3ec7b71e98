//! Jobs: what to train, on what, how, with what, and what to leave behind.
//!
//! A job comes from a file ([`Job::from_file`]) or from Rust ([`Job::new`]), and goes to a file again
//! ([`Job::to_toml`]). `docs/job-file.md` describes the file. A file's errors are all found at once, each with its place
//! and the nearest thing that would be right.
//!
//! # Layout
//! - `spec`: what a job is. `defaults`: what holds if nothing is said.
//! - `error`: errors and how they are shown. `tree`: the file as values that know their places. `sets`: overrides.
//! - `keys`: the keys there are. `nearest`: which of them was meant. `cursor`: reads tables by them.
//! - `read`: the whole file; `model`, `layers`, `data`, `train`, `parallel`, `output`: its sections.
//! - `write`: the way back.

mod cursor;
mod data;
mod defaults;
mod error;
mod keys;
mod layers;
mod model;
mod nearest;
mod output;
mod parallel;
mod read;
mod sets;
mod spec;
mod train;
mod tree;
mod write;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

pub use error::{JobError, JobErrors};
pub use spec::*;
