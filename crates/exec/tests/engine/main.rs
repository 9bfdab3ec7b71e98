//! The engine against what it should compute: finite differences, plain loops in f64, and itself in other settings.

#![allow(clippy::unwrap_used)]

mod across_steps;
mod at_once;
mod check;
mod edges;
mod errors;
mod forward;
mod gradients;
mod loans;
mod local_steps;
mod memory;
mod nets;
mod node_times;
mod optimizers;
mod oracle;
mod random;
mod random_graphs;
mod ranks;
mod same_bits;
mod shard_gradients;
mod staged_memory;
mod staged_shards;
mod stages;
mod strict;
mod sync_norm;
mod timelines;
mod truth;
mod weights;
