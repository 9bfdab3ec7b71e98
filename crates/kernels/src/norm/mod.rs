//! Normalisations: batch, group, layer and RMS, forward and backward.
//!
//! Legend: `rows` are samples times pixels, `c` channels, `d` the last dim. Images are channels-last, so a channel is
//! a column of a row-major matrix. All moments are taken about a mean that is known first (two passes over data that
//! is still in cache), in f32 lanes, and combined over fixed slabs of rows in f64, in the order of the slabs.
//!
//! # Layout
//! - [`batch`]: over rows, a mean and a variance per channel.
//! - [`synced`]: batch norm in parts, with its sums exposed, for a batch that is spread over several ranks.
//! - [`group`]: over pixels and the channels of a group, a mean and a variance per sample and group.
//! - [`row`]: over the last dim, layer and RMS.
//! - `columns`: the passes over a slab of rows that batch and group norm share.

pub mod batch;
mod columns;
pub mod group;
pub mod row;
pub mod synced;

pub use batch::{BatchNorm, RunningStats};
pub use group::GroupNorm;
pub use row::{LayerNorm, RmsNorm};
