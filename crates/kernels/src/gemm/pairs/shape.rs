//! A product of pairs, whatever its operands are: its shape, its scratch space, and the choice of what multiplies.

use super::super::{Epilogue, Gemm};
use super::source::UnitSource;
use super::{PairOrder, scalar};
#[cfg(target_arch = "x86_64")]
use super::{plan, task};
use crate::Cx;

/// The shape of a product of `m×k` by `k×n`, `batch` times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PairShape {
    pub(crate) batch: usize,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl PairShape {
    pub(super) fn of(g: &Gemm) -> PairShape {
        PairShape { batch: g.batch, m: g.m, n: g.n, k: g.k }
    }

    /// How many floats of scratch [`PairShape::pass`] needs with this many workers.
    pub(crate) fn scratch_len(&self, workers: usize) -> usize {
        // The oracle has one row of C there.
        #[cfg(target_arch = "x86_64")]
        {
            plan::PairPlan::new(self).scratch_len(workers).max(self.n)
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = workers;
            self.n
        }
    }

    /// Runs the product as [`super::PairGemm::pass`] does: `a` has `m` rows and `b` has `n` columns, both of `k` steps.
    ///
    /// # Panics
    /// If `scratch` is shorter than `scratch_len(cx.par.workers())`.
    pub(crate) fn pass(
        &self,
        order: PairOrder,
        cx: &Cx,
        a: &dyn UnitSource,
        b: &dyn UnitSource,
        epilogue: Epilogue,
        scratch: &mut [f32],
    ) {
        if self.batch == 0 || self.m == 0 || self.n == 0 {
            return;
        }
        assert!(
            scratch.len() >= self.scratch_len(cx.par.workers()),
            "the scratch has scratch_len(workers) floats"
        );
        #[cfg(target_arch = "x86_64")]
        if let Some(kernel) = task::Kernel::of(cx.isa, order) {
            return task::run(self, kernel, cx, a, b, epilogue, scratch);
        }
        let _ = (cx, order);
        scalar::run(self, a, b, epilogue, scratch);
    }
}
