//! A permutation of `0..len` chosen by a key, without a table: any element is computed directly.
//!
//! A Feistel network mixes the two halves of an index's bits in turn. It permutes a power of two; an image that is not
//! below `len` is permuted again until it is (cycle walking), which takes less than two tries on average, and at most
//! 16 on average for the smallest sets.

use crate::draw::scramble;

/// Enough for halves of two bits: over 60,000 keys all permutations of up to five elements come equally often, within
/// five standard deviations. With four rounds they are 22 off.
const ROUNDS: usize = 8;
/// The least bits of a half: shorter halves mix badly.
const BITS_MIN: u32 = 4;

/// A permutation of `0..len`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Permutation {
    len: usize,
    /// The bits of each half.
    low_bits: u32,
    high_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..len` that `key` chooses.
    pub(crate) fn new(len: usize, key: u64) -> Permutation {
        let bits = (usize::BITS - len.saturating_sub(1).leading_zeros()).max(BITS_MIN);
        let mut keys = [0; ROUNDS];
        let mut state = key;
        for key in &mut keys {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            *key = scramble(state);
        }
        Permutation { len, low_bits: bits / 2, high_bits: bits - bits / 2, keys }
    }

    /// The image of `idx`, which is below `len`.
    pub(crate) fn at(&self, idx: usize) -> usize {
        assert!(idx < self.len, "index {idx} of a permutation of {}", self.len);
        let mut image = idx as u64;
        loop {
            image = self.mix(image);
            if image < self.len as u64 {
                return image as usize;
            }
        }
    }

    /// The network: a permutation of all numbers of `low_bits + high_bits` bits.
    fn mix(&self, x: u64) -> u64 {
        let (low_mask, high_mask) = ((1 << self.low_bits) - 1, (1 << self.high_bits) - 1);
        let (mut low, mut high) = (x & low_mask, x >> self.low_bits);
        for pair in self.keys.as_chunks::<2>().0 {
            // Added, not xored: xor would leave out the odd permutations.
            low = low.wrapping_add(blend(high, pair[0])) & low_mask;
            high = high.wrapping_add(blend(low, pair[1])) & high_mask;
        }
        high << self.low_bits | low
    }
}

/// A random function of one half, of 32 well-mixed bits.
fn blend(half: u64, key: u64) -> u64 {
    let x = half.wrapping_add(key).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_index_is_reached_once(len in 0_usize..3000, key: u64) {
            let order = Permutation::new(len, key);
            let mut seen = vec![false; len];
            for idx in 0..len {
                prop_assert!(!std::mem::replace(&mut seen[order.at(idx)], true));
            }
        }

        #[test]
        fn no_length_is_too_long(key: u64, idx in 0..usize::MAX) {
            let order = Permutation::new(usize::MAX, key);
            prop_assert!(order.at(idx) < usize::MAX);
        }
    }

    /// The distance from equal counts in standard deviations: near 0 for random counts.
    fn excess(counts: impl Iterator<Item = u64> + Clone, cells: usize) -> f64 {
        let total: u64 = counts.clone().sum();
        let expected = total as f64 / cells as f64;
        let present = counts.clone().count();
        let chi2: f64 = counts.map(|n| (n as f64 - expected).powi(2) / expected).sum::<f64>()
            + (cells - present) as f64 * expected;
        (chi2 - (cells - 1) as f64) / (2.0 * (cells - 1) as f64).sqrt()
    }

    #[test]
    fn all_permutations_of_a_tiny_set_are_equally_likely() {
        // Keys in sequence and keys that differ in high bits only.
        for (len, cells) in [(2, 2), (3, 6), (4, 24), (5, 120)] {
            for stride in [1_u64, 1 << 40] {
                let mut counts: HashMap<Vec<usize>, u64> = HashMap::new();
                for n in 0..60_000_u64 {
                    let order = Permutation::new(len, n.wrapping_mul(stride));
                    *counts.entry((0..len).map(|idx| order.at(idx)).collect()).or_default() += 1;
                }
                let excess = excess(counts.values().copied(), cells);
                assert!(excess.abs() < 5.0, "{len} elements, keys {stride} apart: {excess} deviations");
            }
        }
    }

    #[test]
    fn every_index_goes_everywhere_equally_often() {
        for len in [7, 16, 17, 64, 100] {
            let mut places = vec![0_u64; len * len];
            // The difference of neighbours' images: what a weak network would show.
            let mut steps = vec![0_u64; len - 1];
            for key in 0..4000 {
                let order = Permutation::new(len, key);
                for idx in 0..len {
                    places[idx * len + order.at(idx)] += 1;
                }
                for idx in 1..len {
                    steps[(order.at(idx) + len - order.at(idx - 1)) % len - 1] += 1;
                }
            }
            for (what, counts) in [("places", places), ("steps", steps)] {
                let cells = counts.len();
                let excess = excess(counts.into_iter(), cells);
                assert!(excess.abs() < 5.0, "{len} elements, {what}: {excess} deviations");
            }
        }
    }
}
