//! Rows of one head in the format that they are stored in, read and written as f32.
//!
//! Rows in f32 are used in place. Rows in half are widened a few at a time into a piece of scratch on their way into
//! panels and blocks, and rounded as they are written.

use crate::Isa;
use crate::floats::{Floats, SharedFloats};
use crate::gemm::pairs::blocks::PairOperand;

/// Rows that are widened together: whole panels of keys, and few enough to stay in L1.
#[cfg(target_arch = "x86_64")]
const TOGETHER: usize = crate::tile::TILE_COLS;

/// Rows that are read, from the head's first one on.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a> {
    data: Floats<'a>,
    /// Elements from one row to the next.
    stride: usize,
}

impl<'a> HeadRows<'a> {
    /// Rows of `data` that begin at element `first`. Without rows the data may end before that.
    pub(super) fn new(data: Floats<'a>, first: usize, stride: usize) -> HeadRows<'a> {
        let first = first.min(data.len());
        HeadRows { data: data.part(first, data.len() - first), stride }
    }

    /// The `d` elements of row `t`: in place, or in `stage`.
    pub(super) fn row<'b>(self, isa: Isa, t: usize, d: usize, stage: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        self.data.staged(isa, t * self.stride, d, stage)
    }

    /// The first `n` rows of `d` elements, and the elements from one to the next: in place, or all in `stage`, which
    /// has `n * d`.
    pub(super) fn all<'b>(self, isa: Isa, n: usize, d: usize, stage: &'b mut [f32]) -> (&'b [f32], usize)
    where
        'a: 'b,
    {
        if let Floats::F32(data) = self.data {
            return (data, self.stride);
        }
        for (t, row) in stage.chunks_exact_mut(d).take(n).enumerate() {
            self.data.part(t * self.stride, d).widen(isa, row);
        }
        (stage, d)
    }

    /// Calls `f(rows, stride, first, n)` with rows `first..first + n`, `stride` floats apart, until it has had the first
    /// `n_rows`: all at once if they are in place, else some at a time in `stage`, `stage_stride` floats apart.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn for_each_block(
        self,
        isa: Isa,
        n_rows: usize,
        d: usize,
        stage: &mut [f32],
        stage_stride: usize,
        mut f: impl FnMut(&[f32], usize, usize, usize),
    ) {
        if let Floats::F32(data) = self.data {
            return f(data, self.stride, 0, n_rows);
        }
        assert!(stage.len() >= TOGETHER.min(n_rows) * stage_stride && stage_stride >= d, "rows are staged");
        for first in (0..n_rows).step_by(TOGETHER) {
            let n = (n_rows - first).min(TOGETHER);
            for (r, row) in stage.chunks_exact_mut(stage_stride).take(n).enumerate() {
                self.data.part((first + r) * self.stride, d).widen(isa, &mut row[..d]);
            }
            f(stage, stage_stride, first, n);
        }
    }

    /// `n` rows of `d` elements from row `first` on, as an operand whose steps of k are the elements.
    pub(super) fn along_d(self, first: usize, n: usize, d: usize) -> PairOperand<'a> {
        PairOperand { x: self.from(first), own: self.stride, k: 1, n_own: n, n_k: d }
    }

    /// The same, but the steps of k are the rows.
    pub(super) fn along_rows(self, first: usize, n: usize, d: usize) -> PairOperand<'a> {
        PairOperand { x: self.from(first), own: 1, k: self.stride, n_own: d, n_k: n }
    }

    /// All from row `first` on.
    fn from(self, first: usize) -> Floats<'a> {
        let at = (first * self.stride).min(self.data.len());
        self.data.part(at, self.data.len() - at)
    }

    /// Prefetches the `d` elements of row `t`, which need not exist.
    pub(super) fn ask_for(self, t: usize, d: usize) {
        self.data.prefetch(t * self.stride, d);
    }
}

/// Rows that are written, from the head's first one on.
#[derive(Clone, Copy)]
pub(super) struct HeadRowsMut<'a> {
    data: SharedFloats<'a>,
    first: usize,
    stride: usize,
}

impl<'a> HeadRowsMut<'a> {
    /// Rows of `data` that begin at element `first`.
    pub(super) fn new(data: SharedFloats<'a>, first: usize, stride: usize) -> HeadRowsMut<'a> {
        HeadRowsMut { data, first, stride }
    }

    /// Writes row `t`.
    ///
    /// # Safety
    /// Nothing else accesses the row.
    pub(super) unsafe fn write(&self, isa: Isa, t: usize, row: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.data.part(self.first + t * self.stride, row.len()) }.round(isa, row);
    }

    /// Writes the `d` elements of row `t` as `f` makes them: in place, or in `stage`, from which they are rounded.
    ///
    /// # Safety
    /// Nothing else accesses the row.
    pub(super) unsafe fn make(
        &self,
        isa: Isa,
        t: usize,
        d: usize,
        stage: &mut [f32],
        f: impl FnOnce(&mut [f32]),
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.data.part(self.first + t * self.stride, d) }.staged(isa, stage, f);
    }

    /// Prefetches the `d` elements of row `t`, which need not exist.
    pub(super) fn ask_for(&self, t: usize, d: usize) {
        self.data.prefetch(self.first + t * self.stride, d);
    }
}
