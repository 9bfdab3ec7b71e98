//! What it costs that a sum travels coded: what goes over the wire in which rounds, and how long a core codes and decodes.
//!
//! As `collective` does it (its `coded` has the essay):
//!
//! ```text
//!  number by number   code all parts but the own one, send them to their owners, decode and add; code the sum of the own part,
//!                     gather all, decode all: 1 coding and 2 - 1/n decodings of each number
//!  factors            two all-reduces of a few numbers; passes over all numbers and four thin products, by the rank of the factors
//! ```
//!
//! The thread that exchanges also codes, so all of it comes one after the other.

use polyreme_graph::{BlockCodec, Coding, SumLayout, WireCodec};
use serde::{Deserialize, Serialize};

use crate::calibration::LinkTimes;

/// How long a core takes for a codec, per number.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CodecTimes {
    /// To code it. Of factors: all that is done to it, for each of their columns.
    pub encode_us: f64,
    /// To decode it. Of factors: what is done to it however many columns they have.
    pub decode_us: f64,
}

/// Times of a codec that were measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MeasuredCodec {
    /// Its name in job files.
    pub name: String,
    /// Its times.
    pub times: CodecTimes,
}

/// A coded sum of a program.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct CodedOp {
    pub(crate) codec: WireCodec,
    /// How many numbers are summed.
    pub(crate) numbers: f64,
    /// Of factors: bytes of the first message and of the second, and how many of the numbers are in matrices.
    pub(crate) messages: [f64; 2],
    pub(crate) in_matrices: f64,
}

impl CodedOp {
    /// A sum of so many numbers that travels so.
    pub(crate) fn new(coding: &Coding, numbers: usize) -> CodedOp {
        let four = size_of::<f32>() as f64;
        match &coding.layout {
            SumLayout::Blocks(layout) => CodedOp {
                codec: WireCodec::Blocks(layout.codec),
                numbers: numbers as f64,
                messages: [0.0; 2],
                in_matrices: 0.0,
            },
            SumLayout::LowRank(layout) => CodedOp {
                codec: WireCodec::LowRank { rank: layout.rank },
                numbers: numbers as f64,
                messages: [layout.first_len(), layout.factors_len()].map(|n| n as f64 * four),
                in_matrices: (numbers - layout.plain_len()) as f64,
            },
        }
    }

    /// A sum of so many numbers, of which nothing else is known: matrices of them may have any shape, and factors then travel for nothing.
    pub(crate) fn at_least(codec: WireCodec, numbers: f64) -> CodedOp {
        CodedOp { codec, numbers, messages: [0.0; 2], in_matrices: numbers }
    }

    /// Bytes on the wire.
    pub(crate) fn wire_bytes(&self) -> f64 {
        match self.codec {
            WireCodec::Blocks(codec) => codec.coded_len(self.numbers as usize) as f64,
            WireCodec::LowRank { .. } => self.messages.iter().sum(),
        }
    }

    /// How long a core of a rank codes and decodes in a sum over so many ranks; with `scattered`, each rank gets its part alone.
    pub(crate) fn core_us(&self, times: &CodecTimes, ranks: usize, scattered: bool) -> f64 {
        let n = ranks.max(1) as f64;
        let others = (n - 1.0) / n;
        match (self.codec, scattered) {
            (WireCodec::Blocks(_), true) => self.numbers * others * (times.encode_us + times.decode_us),
            (WireCodec::Blocks(_), false) => {
                self.numbers * (times.encode_us + (1.0 + others) * times.decode_us)
            }
            (WireCodec::LowRank { rank }, _) => {
                self.in_matrices * (rank as f64 * times.encode_us + times.decode_us)
            }
        }
    }
}

/// Times of a codec on a machine: as they were measured, or as assumed where nothing was.
pub(crate) fn times_of(codec: WireCodec, links: Option<&LinkTimes>) -> CodecTimes {
    let measured = links.and_then(|links| links.codecs.iter().find(|known| known.name == codec.name()));
    measured.map_or_else(|| assumed(codec), |known| known.times)
}

/// Times of a core of a server of today, rounded from what one was measured to take (BENCHMARKS.md).
fn assumed(codec: WireCodec) -> CodecTimes {
    // From GB/s of f32.
    let [encode, decode] = match codec {
        WireCodec::Blocks(BlockCodec::Bf16) => [20.0, 50.0],
        WireCodec::Blocks(BlockCodec::F16) => [6.0, 25.0],
        WireCodec::Blocks(BlockCodec::Int8) => [6.0, 50.0],
        WireCodec::Blocks(BlockCodec::OneBit) => [6.0, 25.0],
        WireCodec::Blocks(BlockCodec::TopK { .. }) => [1.5, 25.0],
        // Four products of two operations per column and number, and about six passes.
        WireCodec::LowRank { .. } => [20.0, 4.0],
    };
    let us = |gbs: f64| size_of::<f32>() as f64 / (gbs * 1e3);
    CodecTimes { encode_us: us(encode), decode_us: us(decode) }
}
