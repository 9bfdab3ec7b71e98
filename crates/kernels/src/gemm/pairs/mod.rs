//! Matrix products of bf16 with f32 sums: instructions that multiply *pairs* of neighbours along k.
//!
//! # How it goes
//! **Copies.** Both operands are always copied, f32 being rounded to bf16 on the way, into units of 16 rows of A, or 16
//! columns of B, by a *run* of 32 steps of k (`pack`). A unit of A is 16 rows of 64 bytes; a unit of B is 16 rows of 64
//! bytes too, in which row `p` has steps `2p` and `2p + 1` of each column side by side. Those are the tiles of AMX, and
//! the vectors of AVX512-BF16. A *strip* is all units of 16 rows, a *panel* all units of 16 columns, run after run. What is
//! beyond the operands is zero, so kernels know whole units only.
//!
//! **Blocks.** k is cut into blocks of at most 16 runs, so that a panel stays in L1 or near it. The sums of a block of C
//! wait in the worker's scratch between blocks of k; the order of a sum does not depend on any cut.
//!
//! **Tasks.** A task is a range of strips by a range of panels of one product. An operand that is not too large is copied
//! once, before the tasks start; of a larger one each task copies what it needs, a block at a time (`plan`, `task`). If k is
//! long and C is small, as in gradients of weights, k goes in *rounds*: both operands are copied for a part of k, and all
//! tasks add its products to their parts of C, which last from round to round.
//!
//! **Kernels.** `avx512_bf16` sums as [`PairOrder::Pairs`]; `amx` and its twins `avx512` and `avx2` as
//! [`PairOrder::Tiles`]. `scalar` is the oracle, and what runs without AVX2.
//!
//! Kernels that fuse products with other work copy and multiply by themselves, with `blocks`.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod amx_state;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
pub(crate) mod blocks;
#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
mod plan;
mod scalar;
mod shape;
mod source;
#[cfg(target_arch = "x86_64")]
mod task;

pub use amx_state::{AmxState, amx_state};
#[cfg(target_arch = "x86_64")]
pub(crate) use blocks::{UNIT, UNIT_LEN};
pub(crate) use shape::PairShape;
pub(crate) use source::{Strided, UnitSource};

pub(crate) use blocks::RUN;

use super::{Epilogue, Gemm, OutputBlock};
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

/// In which order the products of a sum are added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PairOrder {
    /// That of AMX (TDPBF16PS). Of each 32 steps of k the even ones are summed from zero in one chain of fused
    /// multiply-adds, the odd ones in another, both chains are added, and that is added to the sum of earlier steps. All
    /// of it rounds to nearest even, reads denormals as zeros and writes zeros for them.
    ///
    /// The bits are the same on every machine, for any number of workers, with AMX or without. Only which NaN a NaN is
    /// may differ.
    Tiles,
    /// That of AVX512-BF16 (VDPBF16PS): both products of a pair are added to the sum of the earlier pairs, denormals as
    /// above. The bits do not depend on the number of workers, but CPUs need not agree on them; those without the
    /// instruction use [`PairOrder::Tiles`].
    Pairs,
}

/// The instructions that an order of sums is named after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OwnInstructions {
    /// TDPBF16PS.
    Amx,
    /// VDPBF16PS.
    Avx512Bf16,
}

impl PairOrder {
    /// Whether there are instructions that sum in this order. Without them twins do, which are slower than f32.
    pub fn is_native(self, isa: Isa) -> bool {
        self.instructions(isa).is_some()
    }

    /// The order of the fastest instructions for pairs; `None` without any.
    pub fn fastest(isa: Isa) -> Option<PairOrder> {
        [PairOrder::Tiles, PairOrder::Pairs].into_iter().find(|order| order.is_native(isa))
    }

    /// Its own instructions, if these have them, and not a twin.
    pub(crate) fn instructions(self, isa: Isa) -> Option<OwnInstructions> {
        #[cfg(target_arch = "x86_64")]
        return match task::Kernel::of(isa, self) {
            Some(task::Kernel::Amx) => Some(OwnInstructions::Amx),
            Some(task::Kernel::Avx512Bf16) => Some(OwnInstructions::Avx512Bf16),
            _ => None,
        };
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = isa;
            None
        }
    }
}

/// A product of matrices of bf16, each sum in f32.
#[derive(Clone, Debug)]
pub struct PairGemm {
    /// The shape, and the layouts. That of C matters only to [`PairGemm::run`].
    pub gemm: Gemm,
    /// The order of its sums.
    pub order: PairOrder,
}

/// The fewest rows and columns of C, and steps of k, for which pairs are faster than f32.
///
/// Measured on a Zen 4 core with `examples/pair_shapes`, as shares of f32's time, for operands in bf16 and in f32: 0.57 to
/// 0.86 where the least of rows and columns is 64 (0.89 to 1.03 in a batch whose k is short too), 0.64 to 1.13 where it is
/// 32, 1.0 to 1.6 where it is 16; 0.65 to 0.76 with a k of 32, 1.2 with 16. On AMX nothing has been measured.
const PAYS: (usize, usize) = (64, 32);

impl PairGemm {
    /// Whether this is expected to be faster with these instructions than [`Gemm`] in f32. It never is without the
    /// order's own instructions: AMX's twins take 1.13 to 1.5 of f32's time with AVX-512.
    pub fn pays(&self, isa: Isa) -> bool {
        self.order.is_native(isa) && self.gemm.m.min(self.gemm.n) >= PAYS.0 && self.gemm.k >= PAYS.1
    }

    /// How many floats of scratch [`PairGemm::pass`] needs with this many workers, whatever the instruction set. Their
    /// contents do not matter.
    pub fn scratch_len(&self, workers: usize) -> usize {
        PairShape::of(&self.gemm).scratch_len(workers)
    }

    /// Runs the product and keeps C, rounded to its format, in the layout that `gemm` says.
    ///
    /// # Panics
    /// As [`PairGemm::pass`]; or if C's slice is too short, or elements of C overlap.
    pub fn run(&self, cx: &Cx, a: Floats, b: Floats, c: FloatsMut, scratch: &mut [f32]) {
        let g = &self.gemm;
        if g.batch == 0 || g.m == 0 || g.n == 0 {
            return;
        }
        g.check_output(c.len());
        let c = SharedFloats::new(c);
        let store = |block: OutputBlock| {
            let first = block.batch * g.c.batch + block.row * g.c.row + block.col;
            for (i, row) in block.into_rows().enumerate() {
                // SAFETY: each element is in one row of one block, and elements of C do not overlap.
                unsafe { c.part(first + i * g.c.row, row.len()) }.round(cx.isa, row);
            }
        };
        self.pass(cx, a, b, Epilogue::new(&store), scratch);
    }

    /// Runs the product; each finished block of C is lent to `epilogue` and then forgotten. `epilogue` is called exactly
    /// once for each element of C, from any task. Operands in f32 are rounded to bf16, to nearest even, as they are
    /// copied. Strides of A and B may be zero or overlap. A `k` of zero gives zeros.
    ///
    /// # Panics
    /// If an operand is in f16, which bf16 cannot hold; if a slice is too short for its layout; if C is to be added to; or
    /// if `scratch` is shorter than `scratch_len(cx.par.workers())`.
    pub fn pass(&self, cx: &Cx, a: Floats, b: Floats, epilogue: Epilogue, scratch: &mut [f32]) {
        let g = &self.gemm;
        assert!(!g.accumulate, "there is no C to add to");
        assert!(
            !matches!(a, Floats::F16(_)) && !matches!(b, Floats::F16(_)),
            "f16 is multiplied in f32: widen it for `Gemm`"
        );
        if g.batch == 0 || g.m == 0 || g.n == 0 {
            return;
        }
        g.check_lengths(a.len(), b.len());
        let rows =
            Strided { x: a, batch: g.a.batch, own: g.a.row, k: g.a.col, n_own: g.m, n_k: g.k, turned: false };
        let columns =
            Strided { x: b, batch: g.b.batch, own: g.b.col, k: g.b.row, n_own: g.n, n_k: g.k, turned: true };
        PairShape::of(g).pass(self.order, cx, &rows, &columns, epilogue, scratch);
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
