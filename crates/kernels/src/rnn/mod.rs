//! Recurrent layers over whole sequences: LSTM and GRU, with PyTorch's gates, their order, and its two biases.
//!
//! The projection of the input, `xp = x·W_ihᵀ + b_ih`, is one matrix product outside, and so is its gradient; what
//! is here is the part that must go step by step. A layer that runs in both directions is two of these, one of them
//! with `reverse`. There is no dropout between layers, no projection of the state, and no packing of sequences of
//! different lengths.
//!
//! Sequences of a batch do not depend on each other, so a task takes some of them through all steps: tasks never wait
//! for one another. The recurrent weights are packed once for all steps; their gradient is one product at the end.
//!
//! Sizes: B sequences, T steps, H hidden. Tensors are contiguous, in the order that is stated with each.

mod gru;
mod lstm;
mod scalar;
mod sequence;

#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(test)]
mod tests;

pub use gru::{Gru, GruBackward, GruForward};
pub use lstm::{Lstm, LstmBackward, LstmForward};
