//! The crate's integration tests.

#![allow(clippy::unwrap_used)]

mod bert;
mod buffers;
mod digests;
mod failing;
mod flushless;
mod halves;
mod learner;
mod ledger;
mod lora;
mod mesh;
mod moments;
mod precision;
mod pretrained;
mod ranks;
mod runs;
mod same_bits;
mod saved;
mod stages;
mod targets;
mod texts;
mod tuned;
mod used;
mod whole_tensors;
