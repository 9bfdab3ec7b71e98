//! A generator of test data: the high bits of a linear congruence.

pub(crate) struct SampleRandom(u64);

impl SampleRandom {
    pub(crate) fn new(seed: u64) -> SampleRandom {
        SampleRandom(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678)
    }
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    pub(crate) fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.next() % (1 << 20)) as f32 / (1 << 20) as f32
    }
}
