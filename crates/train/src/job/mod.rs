//! Jobs: what to train, on what, how, with what, and what to write.
//!
//! A job comes from a file ([`Job::from_file`]) or from Rust ([`Job::new`]), and goes to a file again
//! ([`Job::to_toml`]). `docs/job-file.md` describes the file, and [`schema`] describes it to editors. All errors of a file
//! are reported at once, each with its place and the nearest thing that would be right.
//!
//! Every key is declared once, in the file of its section. Reading, writing, overrides, the page and the schema follow.
//!
//! # Layout
//! - `spec`: what a job is. `defaults`: its defaults.
//! - `read`: the whole file; `model`, `layers`, `data`, `train`, `parallel`, `output`: the keys of its sections;
//!   `mesh`: how the ranks of `parallel` are arranged; `sync`: how they agree; `open`: what is left to the planner;
//!   `store`: where a store is that says who coordinates.
//! - `declare`: how keys are written down. `section`, `key`: tables and keys, read and written. `types`: types of values.
//! - `outline`, `shape`: tables, keys and what they accept, as plain data.
//! - `tree`: the file as values that know their places. `sets`: overrides. `cursor`: tables while they are read.
//! - `error`: errors and how they are shown. `nearest`: which name was meant.
//! - [`edit`]: which keys a file sets, and how some are changed. `write`: a job as a file. `schema`: the keys as a JSON schema.

mod cursor;
mod data;
mod declare;
mod defaults;
pub mod edit;
mod error;
mod key;
mod layers;
mod mesh;
mod model;
mod nearest;
mod open;
mod outline;
mod output;
mod parallel;
mod read;
mod schema;
mod section;
mod sets;
mod shape;
mod spec;
mod store;
mod sync;
mod train;
mod tree;
mod tuning;
mod types;
mod wire;
mod write;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

pub use error::{JobError, JobErrors};
pub(crate) use nearest::nearest;
pub use open::OpenKeys;
pub use schema::schema;
pub use spec::*;
pub use store::StoreAddress;
pub use sync::{EverySpec, OuterSpec, ServersSpec, ServingRanks, SyncKind, SyncTurn};
pub(crate) use wire::in_memory;
pub use wire::{WireKind, WireSpec};
