//! A training step as plain data: ops, shapes, gradients, fusion, recomputation, the memory plan and the printer.
//!
//! A model is traced into a [`Graph`] by a [`Builder`]; [`differentiate`] appends the backward pass, [`recompute()`]
//! trades time for memory, [`fuse()`] joins element-wise work, and [`MemoryPlan`] assigns memory to every value.
//!
//! It knows nothing of threads, IO or how ranks are reached, and computes nothing: of the kernels it uses the vocabulary
//! of element-wise ops and optimizers alone.
//!
//! # Layout
//! - [`shape`], [`op`], [`graph`], [`part`], [`error`]: the data.
//! - [`builder`]: how models are traced.
//! - `infer`, `types`, [`grad`], [`cost`], [`mod@print`]: the tables, with one row per op.
//! - [`mod@dot`]: a graph as a picture.
//! - [`precision`], [`mod@recompute`], [`mod@fuse`]: rewrites.
//! - [`memory`]: where every value is stored.
//! - [`program`]: everything that one rank does in one step. [`body`]: the graph of a microbatch and the blocks that it is cut
//!   into. `listing`: a program as text. [`moment`]: where its time goes, and what spans of it are called.
//! - [`totals`]: what ranks add up once per step.
//! - [`mod@split_sums`]: what must be known of tensors that ranks split before they are updated.
//! - [`buffers`]: gradients that are held only until they are summed. [`at_once`]: gradients that go into the update as
//!   they are computed, and are never stored.
//! - [`tuning`]: parameters that are not learnt, or not as the others are.

#![forbid(unsafe_code)]

pub mod at_once;
pub mod body;
pub mod buffers;
pub mod builder;
pub mod cost;
pub mod dot;
pub mod error;
pub mod fuse;
pub mod grad;
pub mod graph;
mod infer;
mod listing;
pub mod memory;
pub mod moment;
pub mod op;
pub mod part;
pub mod precision;
pub mod print;
pub mod program;
pub mod recompute;
pub mod shape;
pub mod split_sums;
pub mod totals;
pub mod tuning;
mod types;

#[cfg(test)]
mod tests;

pub use body::{Block, BlockKind, Body, Declared, Link, Segment, Tied};
pub use buffers::GradBuffers;
pub use builder::{Builder, Tensor, Traced};
pub use error::{TraceError, TraceErrorKind};
pub use fuse::fuse;
pub use grad::differentiate;
pub use graph::{Graph, Init, NodeId, ValueId};
pub use memory::{MemoryPlan, Place};
pub use moment::{Exchanged, Moment, MomentKind, MomentLabel};
pub use op::{ExchangeKind, Op};
pub use part::{Part, Piece, Splits};
/// What element-wise ops, updates and codecs do: the vocabulary of the kernels.
pub use polyreme_kernels::codec::{
    BlockCodec, CodedLayout, LowRankLayout, LowRankMatrix, SumLayout, WireCodec,
};
pub use polyreme_kernels::elementwise::{Binary, Unary};
pub use polyreme_kernels::optim::{Adafactor, Moments, Optimizer, SumsOf};
pub use precision::Precision;
pub use program::{
    Axis, Buffer, Coding, Collective, Exchange, Instr, Keeps, Microbatch, Program, Region, Role, ServedRange,
    Weights,
};
pub use recompute::{recompute, recompute_parts};
pub use shape::{DType, Shape};
pub use split_sums::{SplitSums, split_sums};
pub use tuning::{Learning, LearningGroup, LowRank, NamePattern, Tuning, learnt_alike};
