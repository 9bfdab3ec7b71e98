//! Pseudorandom numbers from a seed (SplitMix64).

use std::ops::Range;

/// A generator. The same seed gives the same numbers.
#[derive(Clone, Debug)]
pub struct SimRandom(u64);

impl SimRandom {
    /// A generator with this seed.
    pub fn new(seed: u64) -> SimRandom {
        SimRandom(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number of a range; its start if the range is empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        match range.end.saturating_sub(range.start) {
            0 => range.start,
            width => range.start + self.number() % width,
        }
    }

    /// True this many times in a thousand.
    pub fn chance(&mut self, in_thousand: u32) -> bool {
        self.within(0..1000) < u64::from(in_thousand)
    }
}
