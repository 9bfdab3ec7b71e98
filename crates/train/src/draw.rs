//! A stream of random numbers (splitmix64) from a seed, for the few draws that training itself makes. Orders, masks and
//! augmentation are functions of their own, in `data` and the kernels.

/// A stream of numbers.
pub(crate) struct Draw(u64);

impl Draw {
    /// The stream that a seed names.
    pub(crate) fn new(seed: u64) -> Draw {
        Draw(seed)
    }

    /// In (0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / 2f64.powi(53)
    }

    /// 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
