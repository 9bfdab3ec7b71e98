//! What of a bucket travels as factors, and where the messages of its sum lie.
//!
//! ```text
//!  bucket   [ matrix | bias | matrix | bias .. ]
//!  first    [ bias bias .. | P | P ]              a message: what travels as it is, and the left factors
//!  factors  [ Q | Q ]                             the second message; it stays, for the next sum
//!  own      [ Q | Q ]                             this rank's own, while the sum of all is on its way
//! ```

use std::ops::Range;

use super::LowRankMatrix;

/// The layout of a sum of which matrices travel as factors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LowRankLayout {
    /// The columns that were asked for.
    pub rank: usize,
    /// Numbers of the bucket.
    pub len: usize,
    /// What travels as factors, in ascending order.
    pub matrices: Vec<LowRankMatrix>,
    /// What travels as it is: the rest, in ascending order.
    pub plain: Vec<Range<usize>>,
}

impl LowRankLayout {
    /// The layout of a bucket of `len` numbers with these matrices, which are in ascending order.
    pub fn new(rank: usize, len: usize, matrices: Vec<LowRankMatrix>) -> LowRankLayout {
        let mut plain = Vec::new();
        let mut next = 0;
        for m in &matrices {
            assert!(next <= m.at && m.at + m.len() <= len, "matrices of the bucket in ascending order");
            plain.push(next..m.at);
            next = m.at + m.len();
        }
        plain.push(next..len);
        plain.retain(|range| !range.is_empty());
        LowRankLayout { rank, len, matrices, plain }
    }

    /// Numbers that travel as they are.
    pub fn plain_len(&self) -> usize {
        self.plain.iter().map(Range::len).sum()
    }

    /// Numbers of the first message.
    pub fn first_len(&self) -> usize {
        self.plain_len() + self.matrices.iter().map(LowRankMatrix::left_len).sum::<usize>()
    }

    /// Numbers of the second message, and of the factors that stay.
    pub fn factors_len(&self) -> usize {
        self.matrices.iter().map(LowRankMatrix::right_len).sum()
    }

    /// Numbers of both messages.
    pub fn sent_len(&self) -> usize {
        self.first_len() + self.factors_len()
    }

    /// Floats that a sum travels through: the first message, this rank's own right factors, and what products need.
    pub fn room(&self) -> usize {
        let scratch = self.matrices.iter().map(LowRankMatrix::scratch_len).max().unwrap_or(0);
        self.sent_len() + scratch
    }
}
