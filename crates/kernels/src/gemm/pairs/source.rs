//! What an operand is to a product of pairs: something that fills units.
//!
//! [`Strided`] is a matrix in memory. Convolutions bring their own sources, which gather patches of an image, so that no
//! matrix of patches is ever stored.

#[cfg(target_arch = "x86_64")]
use super::RUN;
#[cfg(target_arch = "x86_64")]
use super::blocks::{UNIT, UNIT_LEN};
#[cfg(target_arch = "x86_64")]
use super::pack::{self, Part, Rounded};
use crate::Floats;
#[cfg(target_arch = "x86_64")]
use crate::Isa;
use crate::convert::{bf16_from_f32, f32_from_bf16};

/// An operand: rows of A, or columns of B, each along k.
pub(crate) trait UnitSource: Sync {
    /// Copies units `units.0..units.1` of runs `runs.0..runs.1` of one matrix of the batch, all runs of a unit one after
    /// the other. The rows of a unit are rows of A, or pairs of steps of k if the operand is B; what is beyond the operand
    /// is zero. The ISA has AVX2.
    #[cfg(target_arch = "x86_64")]
    fn copy(
        &self,
        isa: Isa,
        batch: usize,
        units: (usize, usize),
        runs: (usize, usize),
        target: &mut [[u32; UNIT_LEN]],
    );

    /// Step `k` of a row of A or a column of B, as bf16, for the oracle.
    fn at(&self, batch: usize, own: usize, k: usize) -> f32;
}

/// A matrix in memory, or a batch of them.
#[derive(Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub(crate) x: Floats<'a>,
    /// From one matrix of the batch to the next.
    pub(crate) batch: usize,
    /// From one row of A, or column of B, to the next.
    pub(crate) own: usize,
    /// From one step of k to the next.
    pub(crate) k: usize,
    /// How many rows of A, or columns of B.
    pub(crate) n_own: usize,
    /// How many steps of k.
    pub(crate) n_k: usize,
    /// Whether it is B.
    pub(crate) turned: bool,
}

impl UnitSource for Strided<'_> {
    #[cfg(target_arch = "x86_64")]
    fn copy(
        &self,
        isa: Isa,
        batch: usize,
        units: (usize, usize),
        runs: (usize, usize),
        target: &mut [[u32; UNIT_LEN]],
    ) {
        match self.x {
            Floats::F32(x) => self.copy_of(isa, x, batch, units, runs, target),
            Floats::Bf16(x) => self.copy_of(isa, x, batch, units, runs, target),
            Floats::F16(_) => unreachable!("operands in f16 were refused"),
        }
    }

    fn at(&self, batch: usize, own: usize, k: usize) -> f32 {
        let at = batch * self.batch + own * self.own + k * self.k;
        match self.x {
            Floats::F32(x) => f32_from_bf16(bf16_from_f32(x[at])),
            Floats::Bf16(x) => f32_from_bf16(x[at]),
            Floats::F16(_) => unreachable!("operands in f16 were refused"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Strided<'_> {
    fn copy_of<T: Rounded>(
        &self,
        isa: Isa,
        x: &[T],
        batch: usize,
        (unit0, unit1): (usize, usize),
        (run0, run1): (usize, usize),
        target: &mut [[u32; UNIT_LEN]],
    ) {
        // The stride of a dim of one does not count.
        let stride = |n: usize, stride: usize| if n == 1 { 1 } else { stride };
        let (own, k) = (stride(self.n_own, self.own), stride(self.n_k, self.k));
        let (own0, own1) = (unit0 * UNIT, (unit1 * UNIT).min(self.n_own));
        let (k0, k1) = (run0 * RUN, (run1 * RUN).min(self.n_k));
        let start = batch * self.batch + own0 * own + k0 * k;
        let x = if k1 > k0 { &x[start..] } else { &[] };
        let part = Part { x, own, k, n_own: own1 - own0, n_k: k1 - k0 };
        // SAFETY: the ISA has the instructions.
        unsafe {
            match (isa.has_avx512(), self.turned) {
                (true, true) => pack::avx512::copy::<true, T>(&part, target),
                (true, false) => pack::avx512::copy::<false, T>(&part, target),
                (false, true) => pack::avx2::copy::<true, T>(&part, target),
                (false, false) => pack::avx2::copy::<false, T>(&part, target),
            }
        }
    }
}
