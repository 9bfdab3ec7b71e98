//! Codecs: formats in which floats travel between ranks, shorter than f32.
//!
//! A [`BlockCodec`] writes blocks of numbers in a fixed number of bits each, so the coded length follows from the count alone. Parts of a message
//! begin at multiples of [`BLOCK`], and are coded and decoded each by itself:
//!
//! | codec | block | bytes of `n` numbers |
//! |---|---|---|
//! | bf16 | — | `2 n` |
//! | f16 | a power of two as its scale, then 1024 halves | `2 n + 4 ⌈n / 1024⌉` |
//! | int8 | a scale, then 256 integers of a byte | `n + 4 ⌈n / 256⌉` |
//! | onebit | a scale, then 256 signs | `⌈n / 8⌉ + 4 ⌈n / 256⌉` |
//! | topk | the largest of 16384, with their places | `6 ⌈share · n⌉` |
//!
//! Halves have a scale because gradients are sums over samples, times the scale of the loss: 65504 is soon exceeded at one
//! end, and 6e-8 at the other. A power of two changes no bit of a mantissa.
//!
//! # Error feedback
//! [`BlockCodec::encode`] codes `x + residual` and leaves in the residual what the code lost. The next message carries it, so
//! over many steps everything arrives: what is lost is only delayed.
//!
//! A block with a number that is not finite decodes to NaN, or to that number, and leaves no residual: the error shows in the
//! sum, and nothing of it stays behind.
//!
//! # Layout
//! `halves`: bf16 and f16. `int8`: integers of a byte. `onebit`: signs. `topk`: the largest. [`layout`]: where the parts of a coded sum lie. [`low_rank`]: matrices as products of
//! factors, which is no format of numbers but of whole tensors. [`WireCodec`]: any of them.

mod halves;
mod int8;
pub mod layout;
pub mod low_rank;
mod onebit;
#[cfg(test)]
mod tests;
mod topk;

use std::sync::Arc;

use crate::Isa;

pub use layout::CodedLayout;
pub use low_rank::{LowRankLayout, LowRankMatrix};

/// Parts of a message begin at multiples of this many numbers, so that blocks of every codec do.
pub const BLOCK: usize = 1024;

/// A format of floats on the wire whose length follows from how many there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockCodec {
    /// The upper half of an f32, rounded.
    Bf16,
    /// Halves, with a power of two for each 1024 as their scale.
    F16,
    /// Integers of a byte, with a scale for each 256.
    Int8,
    /// Signs, with the mean magnitude of each 256.
    OneBit,
    /// The largest numbers of each 16384, with their places.
    TopK {
        /// The share that is sent, in millionths.
        ppm: u32,
    },
}

impl BlockCodec {
    /// All of them; `topk` with a hundredth.
    pub const ALL: [BlockCodec; 5] = [
        BlockCodec::Bf16,
        BlockCodec::F16,
        BlockCodec::Int8,
        BlockCodec::OneBit,
        BlockCodec::TopK { ppm: 10_000 },
    ];

    /// Its name in job files and printed programs.
    pub fn name(self) -> &'static str {
        match self {
            BlockCodec::Bf16 => "bf16",
            BlockCodec::F16 => "f16",
            BlockCodec::Int8 => "int8",
            BlockCodec::OneBit => "onebit",
            BlockCodec::TopK { .. } => "topk",
        }
    }

    /// Bytes that `n` numbers take.
    pub fn coded_len(self, n: usize) -> usize {
        match self {
            BlockCodec::Bf16 => 2 * n,
            BlockCodec::F16 => 2 * n + SCALE_BYTES * n.div_ceil(halves::F16_BLOCK),
            BlockCodec::Int8 => n + SCALE_BYTES * n.div_ceil(int8::INT8_BLOCK),
            BlockCodec::OneBit => onebit::coded_len(n),
            BlockCodec::TopK { ppm } => topk::coded_len(ppm, n),
        }
    }

    /// Codes `x + residual`; the residual becomes what the code lost.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn encode(self, isa: Isa, x: &[f32], residual: &mut [f32], coded: &mut [u8]) {
        assert_eq!(x.len(), residual.len(), "a residual for each number");
        assert_eq!(coded.len(), self.coded_len(x.len()), "room for the code");
        match self {
            BlockCodec::Bf16 => halves::encode_bf16(isa, x, residual, coded),
            BlockCodec::F16 => halves::encode_f16(isa, x, residual, coded),
            BlockCodec::Int8 => int8::encode(isa, x, residual, coded),
            BlockCodec::OneBit => onebit::encode(isa, x, residual, coded),
            BlockCodec::TopK { ppm } => topk::encode(isa, ppm, x, residual, coded),
        }
    }

    /// Writes the numbers of a code.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn decode(self, isa: Isa, coded: &[u8], y: &mut [f32]) {
        assert_eq!(coded.len(), self.coded_len(y.len()), "the code of as many numbers");
        match self {
            BlockCodec::Bf16 => halves::decode_bf16(isa, coded, y),
            BlockCodec::F16 => halves::decode_f16(isa, coded, y),
            BlockCodec::Int8 => int8::decode(isa, coded, y),
            BlockCodec::OneBit => onebit::decode(isa, coded, y),
            BlockCodec::TopK { ppm } => topk::decode(ppm, coded, y),
        }
    }

    /// Adds the numbers of a code.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn decode_add(self, isa: Isa, coded: &[u8], y: &mut [f32]) {
        assert_eq!(coded.len(), self.coded_len(y.len()), "the code of as many numbers");
        match self {
            BlockCodec::Bf16 => halves::add_bf16(isa, coded, y),
            BlockCodec::F16 => halves::add_f16(isa, coded, y),
            BlockCodec::Int8 => int8::add(isa, coded, y),
            BlockCodec::OneBit => onebit::add(isa, coded, y),
            BlockCodec::TopK { ppm } => topk::add(ppm, coded, y),
        }
    }
}

/// In which way a sum of gradients travels in fewer bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WireCodec {
    /// Number by number.
    Blocks(BlockCodec),
    /// Matrices as factors.
    LowRank {
        /// Columns of the factors.
        rank: usize,
    },
}

impl WireCodec {
    /// All of them, as they are by their names alone.
    pub const USUAL: [WireCodec; 6] = [
        WireCodec::Blocks(BlockCodec::Bf16),
        WireCodec::Blocks(BlockCodec::F16),
        WireCodec::Blocks(BlockCodec::Int8),
        WireCodec::Blocks(BlockCodec::OneBit),
        WireCodec::Blocks(BlockCodec::TopK { ppm: 10_000 }),
        WireCodec::LowRank { rank: 2 },
    ];

    /// Its name in job files.
    pub fn name(self) -> &'static str {
        match self {
            WireCodec::Blocks(codec) => codec.name(),
            WireCodec::LowRank { .. } => "powersgd",
        }
    }
}

/// How the parts of one sum travel, and where they lie.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SumLayout {
    /// Number by number, in parts that ranks own.
    Blocks(Arc<CodedLayout>),
    /// Matrices as factors.
    LowRank(Arc<LowRankLayout>),
}

impl SumLayout {
    /// Its format as printed programs have it.
    pub fn words(&self) -> String {
        match self {
            SumLayout::Blocks(layout) => match layout.codec {
                BlockCodec::TopK { ppm } => format!("topk of {}", f64::from(ppm) / 1e6),
                BlockCodec::Bf16 | BlockCodec::F16 | BlockCodec::Int8 | BlockCodec::OneBit => {
                    layout.codec.name().into()
                }
            },
            SumLayout::LowRank(layout) => format!("factors of rank {}", layout.rank),
        }
    }

    /// Bytes that `n` of its numbers take: as many as travel together.
    pub fn wire_bytes(&self, n: usize) -> usize {
        match self {
            SumLayout::Blocks(layout) => layout.codec.coded_len(n),
            SumLayout::LowRank(layout) => layout.sent_len() * size_of::<f32>(),
        }
    }
}

crate::lanes::twin! {
    /// `y += x`.
    pub fn add_to(y: &mut [f32], x: &[f32]) = add_body
}

#[inline(always)]
fn add_body(y: &mut [f32], x: &[f32]) {
    assert_eq!(y.len(), x.len(), "as many of both");
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

/// Bytes of the scale before a block.
const SCALE_BYTES: usize = size_of::<f32>();

/// The bits of infinity: those of every number that is not finite, without its sign, are at least as large.
const INFINITE: u32 = 0x7f80_0000;

/// The largest magnitude among numbers, as bits: NaN are larger than all others.
#[inline(always)]
fn largest_bits(y: &[f32]) -> u32 {
    let mut lanes = [0u32; crate::lanes::LANES];
    let (chunks, rest) = y.as_chunks::<{ crate::lanes::LANES }>();
    for chunk in chunks {
        for (lane, y) in lanes.iter_mut().zip(chunk) {
            *lane = (*lane).max(y.to_bits() & 0x7fff_ffff);
        }
    }
    let rest = rest.iter().map(|y| y.to_bits() & 0x7fff_ffff);
    lanes.into_iter().chain(rest).fold(0, u32::max)
}
