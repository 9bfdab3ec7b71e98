//! Who does what of a step: plans, and the lowering of a step's graph into one program per rank.
//!
//! Pure data in, pure data out. It knows nothing of sockets, threads or kernels.
//!
//! # Layout
//! - [`data`]: data parallel: every rank has the whole model and a part of the batch. [`buckets`]: which gradients are
//!   sent together, and who owns them.
//! - [`sync_norm`]: batch norms that see the rows of all ranks.
//! - [`tree`]: the fixed tree in which gradients of logical shards are added up.

#![forbid(unsafe_code)]

pub mod buckets;
pub mod data;
pub mod sync_norm;
pub mod tree;

pub use data::{DataPlan, data_parallel};
pub use sync_norm::sync_batch_norm;
pub use tree::Node;
