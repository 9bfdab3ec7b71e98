//! Stages of a pipeline: a step's graph is cut into chunks, and each rank of the stage axis gets one chunk or several.
//!
//! ```text
//!            forward ▶                       a chunk is a graph of its own:
//!   chunk 0 ──────────▶ chunk 1 ─────▶ ..      inputs   what it is fed, and what arrives from other chunks
//!           ◀──────────         ◀─────        outputs  losses, and what leaves for other chunks
//!            ◀ backward
//! ```
//!
//! Values cross in two ways only: those of the forward pass to later chunks, gradients to earlier ones. So chunks can run in
//! the order of any pipeline schedule. A value that several chunks need is sent to each of them directly.
//!
//! Cutting changes no bit: every chunk has the nodes of the whole step that belong to it, in the same order, and sums of
//! gradients are added up in the same order.
//!
//! # Layout
//! - `homes`: which chunk each node belongs to. `tied`: gradients of parameters that several chunks use.
//! - [`mod@cut`]: the chunks' graphs. [`mod@join`]: the chunks of one rank as one body.
//! - [`mod@positions`]: where a step may be cut. [`mod@partition`]: where it should be. [`by_name`]: cuts by name; `points`: which
//!   names there are.

pub mod by_name;
pub mod cut;
mod homes;
pub mod join;
pub mod partition;
mod points;
pub mod positions;
#[cfg(test)]
mod tests;
mod tied;

pub(crate) use by_name::nodes_by_name;
pub use by_name::{PlaceError, place_by_name};
pub use cut::{ChunkGraph, Crossing, CrossingPass, Cut, CutError, Tied, cut};
pub(crate) use homes::Homes;
pub use join::{BackwardOrder, StageBody, join};
pub(crate) use partition::place;
pub use partition::{ChunkLoad, MemoryBound, choose, chunk_costs, flops, partition};
pub use positions::{Position, positions};
