//! Numbers for tests: splitmix64, so that every run sees the same.

/// A stream of numbers.
pub(crate) struct TestRandom(u64);

impl TestRandom {
    /// The stream that a seed names.
    pub(crate) fn new(seed: u64) -> TestRandom {
        TestRandom(seed)
    }

    /// The next 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `low..high`.
    pub(crate) fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Between `low` and `high` away from zero, with either sign.
    pub(crate) fn signed(&mut self, low: f32, high: f32) -> f32 {
        let size = self.uniform(low, high);
        if self.bits() & 1 == 0 { size } else { -size }
    }

    /// An integer in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Shuffles `items`.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below(i + 1);
            items.swap(i, j);
        }
    }
}
