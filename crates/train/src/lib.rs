//! Training as a product: job files, the loop, schedules, metrics, checkpoints and the records of a run.
//!
//! Nothing here reads flags, the environment or the terminal, and nothing here knows a kernel: a job is lowered to
//! programs, and engines run them.
//!
//! # Layout
//! - [`job`]: what to train, from a file or from Rust.
//! - [`schedule`]: how the rate changes.

#![forbid(unsafe_code)]

pub mod job;
pub mod schedule;
