//! How the totals of a step lie, which ranks add up once per step: pairs of a weighted loss and its weight (one pair, or one for each
//! logical shard), then the tally of the samples that were counted, then the caller's numbers.
//!
//! ```text
//! [weight · loss, weight] … │ count, 4 parts of the sum of hashes │ 2 numbers of the caller
//! ```

use std::ops::Range;

/// Numbers of a tally of samples.
pub const TALLY: usize = 5;
/// Numbers of the caller.
pub const GIVEN: usize = 2;

/// The length of totals with `n` pairs.
pub fn len(n: usize) -> usize {
    2 * n + TALLY + GIVEN
}

/// Pair `k`.
pub fn pair(k: usize) -> Range<usize> {
    2 * k..2 * k + 2
}

/// The pairs of totals of this length.
pub fn pairs(len: usize) -> Range<usize> {
    0..len - TALLY - GIVEN
}

/// The tally in totals of this length.
pub fn tally(len: usize) -> Range<usize> {
    len - TALLY - GIVEN..len - GIVEN
}

/// The caller's numbers in totals of this length.
pub fn given(len: usize) -> Range<usize> {
    len - GIVEN..len
}
