//! CPU math on slices: every kernel in a SIMD and a scalar form.
//!
//! A kernel is a descriptor of plain numbers (shapes, strides, options) that is made once, says how much scratch space
//! it needs, and is then run any number of times on slices. Running allocates nothing.
//!
//! This crate deliberately knows nothing of tensors, graphs or threads. Work that can be done in parallel is handed to
//! a [`Parallel`] as numbered tasks; the split into tasks depends on shapes alone, so results have the same bits
//! whatever runs the tasks.
//!
//! # Layout
//! - [`cx`]: what a kernel is given to run with: the instruction set and the tasks' runner.
//! - [`isa`]: instruction sets as sets of features, of which kernels use those that this CPU has.
//! - [`floats`]: slices in any of the formats that values are stored in; [`convert`] changes formats.
//! - `stage`: rows of halves in f32, some at a time.
//! - `simd`, `lanes`: how one body becomes a kernel for each instruction set.
//! - [`gemm`]: matrix products, in f32 and of bf16.
//! - `tile`: register tiles on packed panels, for kernels that fuse products with other work.
//! - [`attention`]: fused scaled dot-product attention.
//! - [`rnn`]: LSTM and GRU over whole sequences.
//! - [`probe`]: the peak speed of this core.
//! - [`math`]: transcendental functions, one value or one vector at a time.
//! - [`elementwise`]: chains of element-wise ops in one pass over memory.
//! - [`norm`]: batch, group, layer and RMS normalisation.
//! - [`softmax`]: softmax and log-softmax over a dim.
//! - [`loss`]: cross entropy from logits and labels.
//! - [`embedding`]: rows of a table picked by ids.
//! - [`pool`]: max and average pooling, fixed and adaptive windows.
//! - [`conv`]: 2-D convolution on channels-last images: forward and both gradients.
//! - [`bytes`]: rows of pixels mixed into rows of numbers.
//! - [`pixels`]: images scaled in integers.
//! - [`marks`]: where certain bytes are in a text.
//! - [`jpeg`]: from coefficients to samples to colours.
//! - [`random`]: random numbers by address. [`tally`]: digests of bags of numbers, in any order.
//! - [`codec`]: shorter formats in which floats travel between ranks.
//! - [`optim`]: optimizer steps, norms and clipping on flat arenas.

pub mod attention;
pub mod bytes;
pub mod codec;
pub mod conv;
pub mod convert;
pub mod copy;
pub mod cx;
pub mod elementwise;
pub mod embedding;
mod exp_rows;
pub mod floats;
pub mod gemm;
pub mod isa;
pub mod jpeg;
mod lanes;
pub mod loss;
pub mod marks;
pub mod math;
pub mod norm;
pub mod optim;
pub mod pixels;
pub mod pool;
pub mod probe;
pub mod random;
pub mod reduce;
pub mod rnn;
mod simd;
pub mod softmax;
mod stage;
pub mod tally;
mod tile;

pub use cx::{Cx, Parallel, Serial};
pub use floats::{Floats, FloatsMut, SharedFloats};
pub use isa::{Feature, Isa};
