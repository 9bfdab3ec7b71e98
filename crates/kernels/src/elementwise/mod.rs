//! Chains of element-wise ops, in one pass over memory.
//!
//! An [`Expr`] is a straight-line program over registers. A [`Fused`] is an expression compiled for fixed shapes:
//! inputs broadcast against the output's shape as in NumPy. Running it walks the output once, in blocks that stay in
//! the L1 cache; each op of the chain is a SIMD loop over a block. Inputs are read in place and the last op writes
//! straight to the output, so a chain costs the memory traffic of its inputs and outputs alone.
//!
//! Inputs and outputs are stored in f32, f16 or bf16; every value between them is an f32. Halves pass through buffers of
//! a block's length.
//!
//! [`Fused::pieces`] binds everything but one row piece, for use as the epilogue of a matrix product.
//!
//! It is not a compiler of machine code, and it does not reduce: see [`crate::reduce`].

mod blocks;
mod expr;
mod formats;
mod fused;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod layout;
mod pieces;
mod plan;
mod scalar;

pub use expr::{Binary, Expr, ExprError, Instr, Reg, Unary};
pub use fused::{Fused, PieceSource, PieceTarget, Source};
pub use pieces::FusedPieces;

#[cfg(test)]
mod halves_tests;
#[cfg(test)]
mod tests;
