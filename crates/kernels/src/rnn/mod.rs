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
//! What has T steps (xp, y, cells, gates and their gradients) may be stored in half, each in its own format. A step of a
//! sequence is then widened as it is read and rounded as it is written, while the state, the cell and their gradients go
//! from step to step in f32. The bits are those of widening everything, running in f32 and rounding the results, but for
//! the gradients of the weights: those are sums over `dxp` as it is stored, a block of rows at a time, so that no `dxp` in
//! f32 exists. The tests compare them with the same sums over a `dxp` that was rounded.
//!
//! With [`Lstm::products`] or [`Gru::products`] set, states, gradients of gates and the recurrent weights are rounded to bf16
//! as they become operands, in all three products; sums and what goes from step to step stay f32. The gradients of the
//! weights are then one product, and those of biases sums, of the operands as they were rounded.
//!
//! Sizes: B sequences, T steps, H hidden. Tensors are contiguous, in the order that is stated with each.

/// Makes `fn name(isa, h, args..)`, which runs the twin of that name for the instruction set.
macro_rules! cell {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*)) => {
        $(#[$doc])*
        pub(super) fn $name(isa: $crate::Isa, h: usize, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            if isa.has_avx512() {
                // SAFETY: the instruction set was detected.
                return unsafe { super::lanes::avx512::$name(h, $($arg),*) };
            } else if isa.has_avx2() {
                // SAFETY: as above.
                return unsafe { super::lanes::avx2::$name(h, $($arg),*) };
            }
            let _ = isa;
            super::scalar::$name(h, $($arg),*);
        }
    };
}

mod gru;
mod lstm;
mod scalar;
mod sequence;
mod weights;

#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(test)]
mod paired_tests;
#[cfg(test)]
mod tests;

pub use gru::{Gru, GruBackward, GruForward};
pub use lstm::{Lstm, LstmBackward, LstmForward};
