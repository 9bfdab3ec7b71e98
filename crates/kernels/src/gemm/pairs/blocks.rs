//! Blocks of pairs for kernels that fuse products with other work, such as attention and recurrent cells. They copy operands
//! into units in their own scratch, and multiply as many strips and panels, over as many runs, as they need at a time.
//!
//! A sum of several blocks of k has the bits of the whole if every block but the last is whole runs. So has one without runs
//! of which either side is zeros, but for the sign of a zero.

use super::{PairOrder, scalar};
use crate::convert::bf16_from_f32;
use crate::{Floats, Isa};

#[cfg(target_arch = "x86_64")]
use super::source::{Strided, UnitSource};
#[cfg(target_arch = "x86_64")]
use super::task::{Kernel, PackedBlock};

/// Steps of k that AMX takes at once.
pub(crate) const RUN: usize = 32;
/// Rows of a strip, columns of a panel, and pairs of a run.
pub(crate) const UNIT: usize = 16;
/// Floats that take as much space as a unit: 16 rows of 64 bytes.
pub(crate) const UNIT_LEN: usize = UNIT * UNIT;

/// Runs of `k` steps: one of nothing but zeros if there are none.
pub(crate) const fn runs(k: usize) -> usize {
    if k == 0 { 1 } else { k.div_ceil(RUN) }
}

/// Floats that strips of `n_own` rows, or panels of as many columns, take over `k` steps.
pub(crate) const fn units_len(n_own: usize, k: usize) -> usize {
    n_own.div_ceil(UNIT) * runs(k) * UNIT_LEN
}

/// An operand before it is copied.
#[derive(Clone, Copy)]
pub(crate) struct PairOperand<'a> {
    /// From its first element on; f32 is rounded to bf16 as it is copied. Not in f16.
    pub(crate) x: Floats<'a>,
    /// From one row of A, or column of B, to the next.
    pub(crate) own: usize,
    /// From one step of k to the next.
    pub(crate) k: usize,
    /// How many rows of A, or columns of B.
    pub(crate) n_own: usize,
    /// How many steps of k.
    pub(crate) n_k: usize,
}

impl PairOperand<'_> {
    /// The same with steps of k as rows or columns, and those as steps of k.
    pub(crate) fn transposed(self) -> Self {
        PairOperand { own: self.k, k: self.own, n_own: self.n_k, n_k: self.n_own, ..self }
    }
}

/// Copied strips by copied panels, over some runs.
pub(crate) struct UnitProduct<'a> {
    /// At least one.
    pub(crate) runs: usize,
    /// Rows of C. Those up to a whole strip are written as well.
    pub(crate) rows: usize,
    /// Panels.
    pub(crate) panels: usize,
    /// The strips, from the first run on, and runs from one to the next.
    pub(crate) a: (&'a [f32], usize),
    /// The same for the panels.
    pub(crate) b: (&'a [f32], usize),
    /// C, and floats from one row to the next.
    pub(crate) c: (&'a mut [f32], usize),
    /// Starts the sums with what is in C.
    pub(crate) add: bool,
}

/// What copies and multiplies.
#[derive(Clone, Copy)]
pub(crate) struct PairBlocks {
    isa: Isa,
    #[cfg(target_arch = "x86_64")]
    kernel: Option<Kernel>,
}

impl PairBlocks {
    pub(crate) fn new(isa: Isa, order: PairOrder) -> PairBlocks {
        let _ = order;
        PairBlocks {
            isa,
            #[cfg(target_arch = "x86_64")]
            kernel: Kernel::of(isa, order),
        }
    }

    /// Whether the CPU has instructions for the order: those are what makes pairs faster than f32.
    pub(crate) fn are_fast(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            matches!(self.kernel, Some(Kernel::Amx | Kernel::Avx512Bf16))
        }
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Copies rows of A as strips, into the beginning of `to`.
    pub(crate) fn copy_strips(&self, from: &PairOperand, to: &mut [f32]) {
        self.copy(from, false, to);
    }

    /// Copies columns of B as panels, into the beginning of `to`.
    pub(crate) fn copy_panels(&self, from: &PairOperand, to: &mut [f32]) {
        self.copy(from, true, to);
    }

    fn copy(&self, from: &PairOperand, turned: bool, to: &mut [f32]) {
        let &PairOperand { x, own, k, n_own, n_k } = from;
        let to = &mut to[..units_len(n_own, n_k)];
        #[cfg(target_arch = "x86_64")]
        if self.kernel.is_some() && n_own > 0 {
            let operand = Strided { x, batch: 0, own, k, n_own, n_k, turned };
            let n_units = to.len() / UNIT_LEN;
            // SAFETY: there is room for as many; any bits are a u32, which has the size and alignment of a float.
            let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast(), n_units) };
            return operand.copy(self.isa, 0, (0, n_own.div_ceil(UNIT)), (0, runs(n_k)), to);
        }
        let runs = runs(n_k);
        for (at, to) in to.iter_mut().enumerate() {
            let (unit, row, col) = (at / UNIT_LEN, at % UNIT_LEN / UNIT, at % UNIT);
            let (r, pair) = if turned { (col, row) } else { (row, col) };
            let half = |l: usize| {
                let (i, l) = (unit / runs * UNIT + r, unit % runs * RUN + l);
                let inside = i < n_own && l < n_k;
                if inside { u32::from(bf16_from_f32(x.at(i * own + l * k)).to_bits()) } else { 0 }
            };
            *to = f32::from_bits(half(2 * pair) | half(2 * pair + 1) << 16);
        }
    }

    /// Multiplies.
    ///
    /// # Panics
    /// If strips, panels or C do not have room for whole units of what is multiplied.
    pub(crate) fn multiply(&self, product: UnitProduct) {
        let UnitProduct { runs, rows, panels, a: (a, a_runs), b: (b, b_runs), c: (c, c_row), add } = product;
        let strips = rows.div_ceil(UNIT);
        if strips == 0 || panels == 0 {
            return;
        }
        assert!(runs > 0 && a.len() >= ((strips - 1) * a_runs + runs) * UNIT_LEN, "strips have all runs");
        assert!(b.len() >= ((panels - 1) * b_runs + runs) * UNIT_LEN, "panels have all runs");
        assert!(c_row >= panels * UNIT, "rows of C have room for whole panels");
        assert!(c.len() >= (strips * UNIT - 1) * c_row + panels * UNIT, "C has room for whole strips");
        #[cfg(target_arch = "x86_64")]
        if let Some(kernel) = self.kernel {
            let block = PackedBlock {
                runs,
                rows,
                panels,
                a: a.as_ptr().cast(),
                a_next: a_runs * UNIT_LEN,
                b: b.as_ptr().cast(),
                b_next: b_runs * UNIT_LEN,
                c: c.as_mut_ptr(),
                c_row,
                add,
            };
            // SAFETY: the kernel is one of the ISA's; the assertions are what a block asks for, and C is borrowed mutably.
            return unsafe { kernel.multiply(&block) };
        }
        let half = |pair: f32, l: usize| {
            let bits = if l.is_multiple_of(2) { pair.to_bits() << 16 } else { pair.to_bits() & 0xffff_0000 };
            f32::from_bits(bits)
        };
        for i in 0..rows {
            for j in 0..panels * UNIT {
                let a = |run: usize, l: usize| {
                    half(a[(i / UNIT * a_runs + run) * UNIT_LEN + i % UNIT * UNIT + l / 2], l)
                };
                let b = |run: usize, l: usize| {
                    half(b[(j / UNIT * b_runs + run) * UNIT_LEN + l / 2 * UNIT + j % UNIT], l)
                };
                let c = &mut c[i * c_row + j];
                let first = if add { *c } else { 0.0 };
                *c = (0..runs).fold(first, |sum, run| {
                    scalar::add_run(sum, std::array::from_fn(|l| (a(run, l), b(run, l))))
                });
            }
        }
    }
}
