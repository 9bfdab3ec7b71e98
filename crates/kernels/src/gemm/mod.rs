//! Matrix products `C = A·B` or `C += A·B` on strided matrices, one or a batch of them.
//!
//! # How it goes
//! **Tiles.** C is computed in tiles of 6×16, whose sums live in twelve registers over a block of k (`avx2`). A step of
//! k multiplies 6 floats of the *rows' operand*, each broadcast, by 16 neighbours of the *columns' operand*. The rows'
//! operand can be read in place, along either dim; the columns' operand needs its 16 floats adjacent and close in
//! memory, so it is mostly copied into *panels*: 16 columns, k after k. AVX-512 has twice the registers, twice as wide:
//! a tile is then 12×32, two panels at a time (`avx512`), and all else stays as it is.
//!
//! **Roles.** A is the rows' operand and B the columns', or the other way round, and then tiles are transposed as they
//! are stored. The second way costs some fifty cycles per tile, and pays where it saves a large copy: in `x·Wᵀ` with a
//! short `x` it is `x` that is copied, and `W` is read in place. `plan` estimates both ways.
//!
//! **Blocks.** k is cut into blocks of at most 800 (192 if the product is strict): a panel then stays near while up to 136 rows, which stay in L2, are
//! swept over it. Every block but the first adds to C. k is never split between tasks, and the cut follows from the
//! shape alone: the order of every sum, and so its bits, do not depend on which worker computes it.
//!
//! **Copies.** Panels are copied once for all tasks, in a separate round (`Shared`), if several tasks need them; by the
//! task that needs them (`Own`, `OwnWide`); by the first tile that reads them (`OnTheWay`); or not at all (`InPlace`).
//! Rows are copied, in strips of 6, if they are not contiguous along k and are used often enough.
//!
//! **Prefetching.** Strided blocks are invisible to the hardware prefetchers. Every tile prefetches some lines of what
//! its task reads after this sweep (`Ahead`), so that copies find their source in L2. This is worth up to 15 %.
//!
//! **Tasks.** A task is a range of rows by a range of panels of one product. It alone writes its part of C, and calls
//! the epilogue on it as soon as the last block of k is added, a sweep of rows at a time.
//!
//! **Seven for eight.** A large product is cut into halves and takes seven products of them, an eighth fewer
//! multiplications (`seven`), with tiles, panels and strips as above. A strict one does not.
//!
//! A product with one row or one column uses `thin`, and without AVX2 all use the oracle (`scalar`).
//!
//! **Formats.** Operands in half are converted to f32 while they are copied, so they always are, a block at a time, and C is
//! rounded block by block: [`WideGemm`].
//!
//! Products of bf16 use other instructions, and their operands other copies: [`pairs`].

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod block;
#[cfg(target_arch = "x86_64")]
mod pack;
pub mod pairs;
#[cfg(target_arch = "x86_64")]
mod plan;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod seven;
mod source;
#[cfg(target_arch = "x86_64")]
mod thin;
mod wide;

pub use wide::WideGemm;

use std::marker::PhantomData;

use crate::Cx;
use source::{Converted, OperandSources};

/// The index of element `(batch, row, col)` of a matrix: `batch*self.batch + row*self.row + col*self.col`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strides {
    /// Elements from one matrix of the batch to the next.
    pub batch: usize,
    /// Elements from one row to the next.
    pub row: usize,
    /// Elements from one column to the next.
    pub col: usize,
}

/// What is done with each finished block of C, while it is still in cache.
#[derive(Clone, Copy)]
pub struct Epilogue<'a> {
    /// The function, called with each block.
    pub call: &'a (dyn Fn(OutputBlock) + Sync),
    /// The starts of what else it accesses, laid out as C is: prefetched, and never read here. Null if there is
    /// nothing.
    pub beside: [*const f32; 3],
}

// SAFETY: `beside` are addresses for prefetching only.
unsafe impl Sync for Epilogue<'_> {}

impl<'a> Epilogue<'a> {
    /// An epilogue that accesses nothing else that is worth prefetching.
    pub fn new(call: &'a (dyn Fn(OutputBlock) + Sync)) -> Epilogue<'a> {
        Epilogue { call, beside: [std::ptr::null(); 3] }
    }
}

/// A finished block of C, lent to an epilogue.
pub struct OutputBlock<'a> {
    /// Which product.
    pub batch: usize,
    /// The first row.
    pub row: usize,
    /// The first column.
    pub col: usize,
    rows: usize,
    cols: usize,
    at: *mut f32,
    stride: usize,
    lent: PhantomData<&'a mut [f32]>,
}

impl<'a> OutputBlock<'a> {
    /// A part of one row.
    fn piece(batch: usize, row: usize, col: usize, piece: &'a mut [f32]) -> OutputBlock<'a> {
        let (at, cols) = (piece.as_mut_ptr(), piece.len());
        OutputBlock { batch, row, col, rows: 1, cols, at, stride: 0, lent: PhantomData }
    }

    /// The same block, for a shorter time.
    fn reborrow(&mut self) -> OutputBlock<'_> {
        OutputBlock { lent: PhantomData, ..*self }
    }

    /// The block's rows, one after the other.
    pub fn into_rows(self) -> impl Iterator<Item = &'a mut [f32]> {
        (0..self.rows).map(move |r| {
            // SAFETY: the block's creator lent all of it; each row is given once, and rows do not overlap.
            unsafe { std::slice::from_raw_parts_mut(self.at.add(r * self.stride), self.cols) }
        })
    }
}

/// A product of `m×k` by `k×n`, `batch` times. The rows of C are contiguous (`c.col == 1`).
#[derive(Clone, Debug)]
pub struct Gemm {
    /// How many products.
    pub batch: usize,
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// The layout of A, `m×k`.
    pub a: Strides,
    /// The layout of B, `k×n`.
    pub b: Strides,
    /// The layout of C, `m×n`.
    pub c: Strides,
    /// Adds to C instead of overwriting it.
    pub accumulate: bool,
    /// Takes eight products of halves and not seven, and sums k in short blocks: a smaller error, and an element that is
    /// not finite stays in its row or column.
    pub strict: bool,
}

impl Gemm {
    /// How many floats of scratch `run` needs with this many workers. Their contents do not matter.
    pub fn scratch_len(&self, workers: usize) -> usize {
        self.scratch_len_from(Converted::NONE, workers)
    }

    fn scratch_len_from(&self, converted: Converted, workers: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        {
            // One line more, to start on a line.
            if converted != Converted::NONE && thin::suits(self) {
                return LINE + workers * thin::own_len(self, converted);
            }
            if let Some(cut) = seven::SevenCut::new(self) {
                return LINE + cut.shared_len() + workers * cut.own_len(converted);
            }
            let plan = plan::GemmPlan::new(self, converted);
            LINE + plan.shared_len() + workers * plan.own_len()
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (converted, workers);
            0
        }
    }

    /// How many blocks k is cut into: block `i` of `n` goes from `k*i/n` on, and is added to C after the one before it. So
    /// a product of each of them, added up in C, gives the bits of the whole, if that is not one of seven or of a vector.
    pub(crate) fn k_blocks(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        return plan::GemmPlan::new(self, Converted::NONE).n_kb.max(1);
        // The oracle adds one product after the other to C: any cut will do.
        #[cfg(not(target_arch = "x86_64"))]
        self.k.div_ceil(1024).max(1)
    }

    /// Runs the product. `epilogue` is called exactly once for each element of C, from any task, after its last
    /// write. A `k` of zero leaves zeros, or C as it was if it is added to. Strides of A and B may be zero or overlap.
    /// In a large product that is not strict an element that is not finite may reach all of C, not only its row or column.
    ///
    /// # Panics
    /// If a slice is too short for its layout, if elements of C overlap, or if `scratch` is shorter than
    /// `scratch_len(cx.par.workers())`.
    pub fn run(
        &self,
        cx: &Cx,
        a: &[f32],
        b: &[f32],
        c: &mut [f32],
        epilogue: Option<Epilogue>,
        scratch: &mut [f32],
    ) {
        self.run_from(cx, OperandSources::of_f32(a, b, cx.isa), c, epilogue, scratch);
    }

    fn run_from(
        &self,
        cx: &Cx,
        from: OperandSources,
        c: &mut [f32],
        epilogue: Option<Epilogue>,
        scratch: &mut [f32],
    ) {
        if self.batch == 0 || self.m == 0 || self.n == 0 {
            return;
        }
        self.check_output(c.len());
        self.check_lengths(from.a.len(), from.b.len());
        #[cfg(target_arch = "x86_64")]
        if cx.isa.has_avx2() && self.k > 0 {
            if thin::suits(self) {
                return thin::run(self, cx, from, c, epilogue, from_line(scratch));
            }
            if let Some(cut) = seven::SevenCut::new(self) {
                return seven::run(self, cut, cx, from, c.as_mut_ptr(), epilogue, from_line(scratch));
            }
            return self.run_tiles(cx, from, c.as_mut_ptr(), epilogue, scratch);
        }
        let _ = (cx, scratch);
        scalar::run(self, from, c, epilogue);
    }

    /// How many floats of scratch `pass` needs with this many workers.
    pub fn pass_scratch_len(&self, workers: usize) -> usize {
        self.pass_scratch_len_from(Converted::NONE, workers)
    }

    fn pass_scratch_len_from(&self, converted: Converted, workers: usize) -> usize {
        let run = self.scratch_len_from(converted, workers);
        #[cfg(target_arch = "x86_64")]
        if let Some(block) = self.passed_block_len(converted) {
            // The oracle has one row of C there.
            return (run + workers * block).max(self.n);
        }
        // The whole of C, from a line on.
        run + LINE + (self.batch * self.m * self.n).next_multiple_of(LINE)
    }

    /// Runs the product without keeping C: each block is lent to `epilogue` and then forgotten. The blocks have the
    /// bits that `run` gives them. The address and the stride of C do not matter.
    ///
    /// # Panics
    /// As `run`, with `pass_scratch_len`; or if C is to be added to.
    pub fn pass(&self, cx: &Cx, a: &[f32], b: &[f32], epilogue: Epilogue, scratch: &mut [f32]) {
        self.pass_from(cx, OperandSources::of_f32(a, b, cx.isa), epilogue, scratch);
    }

    fn pass_from(&self, cx: &Cx, from: OperandSources, epilogue: Epilogue, scratch: &mut [f32]) {
        assert!(!self.accumulate, "there is no C to add to");
        #[cfg(target_arch = "x86_64")]
        if self.passed_block_len(from.converted()).is_some() {
            if self.batch == 0 || self.m == 0 || self.n == 0 {
                return;
            }
            self.check_lengths(from.a.len(), from.b.len());
            let nowhere = std::ptr::null_mut();
            if !cx.isa.has_avx2() {
                // Row after row in one place.
                let row = Gemm { c: Strides { batch: 0, row: 0, col: 1 }, ..self.clone() };
                return scalar::run(&row, from, &mut scratch[..self.n], Some(epilogue));
            }
            if let Some(cut) = seven::SevenCut::new(self) {
                return seven::run(self, cut, cx, from, nowhere, Some(epilogue), from_line(scratch));
            }
            return self.run_tiles(cx, from, nowhere, Some(epilogue), scratch);
        }
        let whole = Strides { batch: self.m * self.n, row: self.n, col: 1 };
        let (c, rest) =
            from_line(scratch).split_at_mut((self.batch * self.m * self.n).next_multiple_of(LINE));
        Gemm { c: whole, ..self.clone() }.run_from(cx, from, c, Some(epilogue), rest);
    }

    /// Floats of a task's part of C, if C need not be whole for `pass`.
    #[cfg(target_arch = "x86_64")]
    fn passed_block_len(&self, converted: Converted) -> Option<usize> {
        if self.k == 0 || thin::suits(self) {
            return None;
        }
        if let Some(cut) = seven::SevenCut::new(self) {
            return cut.completes().then(|| cut.block_len());
        }
        let plan = plan::GemmPlan::new(self, converted);
        plan.completes().then(|| plan.block_len())
    }

    fn check_output(&self, c_len: usize) {
        assert!(self.c.col == 1 || self.n == 1, "the rows of C are contiguous");
        assert!(self.c_is_disjoint(), "the rows of C do not overlap: {self:?}");
        assert!(c_len >= self.c.reach(self.batch, self.m, self.n), "C is inside its slice");
    }

    fn check_lengths(&self, a_len: usize, b_len: usize) {
        if self.k > 0 {
            assert!(a_len >= self.a.reach(self.batch, self.m, self.k), "A is inside its slice");
            assert!(b_len >= self.b.reach(self.batch, self.k, self.n), "B is inside its slice");
        }
    }

    /// Whether no two elements of C are the same: batch outside rows, or (heads of attention) rows outside batch.
    fn c_is_disjoint(&self) -> bool {
        let fits = |inner: usize, n_inner: usize, outer: usize, n_outer: usize| {
            (n_inner == 1 || inner >= self.n)
                && (n_outer == 1 || outer >= inner.saturating_mul(n_inner - 1).saturating_add(self.n))
        };
        fits(self.c.row, self.m, self.c.batch, self.batch)
            || fits(self.c.batch, self.batch, self.c.row, self.m)
    }

    /// Runs the product in tiles; the slices have been checked. `c` is null if C is not kept after the epilogue.
    #[cfg(target_arch = "x86_64")]
    fn run_tiles(
        &self,
        cx: &Cx,
        from: OperandSources,
        c: *mut f32,
        epilogue: Option<Epilogue>,
        scratch: &mut [f32],
    ) {
        let plan = plan::GemmPlan::new(self, from.converted());
        let own_len = plan.own_len() + if c.is_null() { plan.block_len() } else { 0 };
        let needed = plan.shared_len() + cx.par.workers() * own_len;
        let scratch = from_line(scratch);
        assert!(scratch.len() >= needed, "the scratch has scratch_len(workers) floats");
        let (shared, own) = scratch.split_at_mut(plan.shared_len());
        let round = plan.round_blocks();
        for first in (0..plan.n_kb).step_by(round) {
            let job = block::BlockProduct {
                plan,
                tiles: block::Tiles::of(cx.isa),
                from,
                c,
                c_batch: self.c.batch,
                c_row: self.c.row,
                accumulate: self.accumulate,
                epilogue,
                blocks: first..(first + round).min(plan.n_kb),
                shared: shared.as_mut_ptr(),
                own: own.as_mut_ptr(),
                own_len,
            };
            if plan.panels == plan::Panels::Shared {
                let n = plan.n_panels().div_ceil(PANELS_A_TASK);
                cx.par.run(n, &|task, _| {
                    let end = ((task + 1) * PANELS_A_TASK).min(plan.n_panels());
                    // SAFETY: the ISA has AVX2; each panel is in one task.
                    unsafe { job.share_panels(task * PANELS_A_TASK, end) };
                });
            }
            let task = |task: usize, worker: usize| {
                // SAFETY: the ISA has AVX2, and the runner gives each task once, each worker one at a time.
                unsafe { job.task(task, worker) }
            };
            match plan.n_tasks() {
                1 => task(0, 0),
                n => cx.par.run(n, &task),
            }
        }
    }
}

/// The scratch from its first whole cache line on.
fn from_line(scratch: &mut [f32]) -> &mut [f32] {
    let line = scratch.as_ptr().align_offset(64).min(LINE).min(scratch.len());
    &mut scratch[line..]
}

/// Floats of a cache line.
const LINE: usize = 16;

/// Panels that one task copies to the shared scratch.
#[cfg(target_arch = "x86_64")]
const PANELS_A_TASK: usize = 4;

impl Strides {
    /// The length of the shortest slice that holds a whole batch of `rows × cols`, none of them zero.
    fn reach(&self, batch: usize, rows: usize, cols: usize) -> usize {
        let part = |n: usize, stride: usize| (n - 1).saturating_mul(stride);
        let last = part(batch, self.batch).saturating_add(part(rows, self.row));
        last.saturating_add(part(cols, self.col)).saturating_add(1)
    }
}

#[cfg(test)]
mod tests;
