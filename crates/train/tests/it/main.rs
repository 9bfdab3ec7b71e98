//! The crate's integration tests.

#![allow(clippy::unwrap_used)]

mod buffers;
mod digests;
mod failing;
mod flushless;
mod halves;
mod learner;
mod mesh;
mod moments;
mod precision;
mod ranks;
mod runs;
mod saved;
mod targets;
