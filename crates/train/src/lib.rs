//! Training as a product: job files, the loop, schedules, metrics, checkpoints and the records of a run.
//!
//! Nothing here reads flags, the environment or the terminal, and nothing here knows a kernel: a job is lowered to
//! programs, and engines run them.
//!
//! # Layout
//! - [`job`]: what to train, from a file or from Rust.
//! - [`schedule`]: how the rate changes. [`pace`]: how a run is cut into epochs, steps and pieces. [`mod@mixup`].
//! - [`net`], [`lower`]: from a network to programs. [`team`], [`judge`]: the engines that train and evaluate.
//! - [`error`]: what can go wrong.

#![forbid(unsafe_code)]

pub mod error;
pub mod job;
pub mod judge;
pub mod lower;
pub mod mixup;
pub mod net;
pub mod pace;
pub mod schedule;
pub mod team;

pub use error::TrainError;
pub use net::Net;
