//! What both cells share: the order of steps, the cut of the batch into tasks, the product of states with the
//! recurrent weights, and their gradient.

use crate::Cx;
use crate::Isa;
use crate::cx::SharedMut;
use crate::gemm::{Gemm, Strides};
use crate::tile::round_cols;

/// Extra floats of scratch, to begin on a cache line.
pub(super) const SPARE: usize = 15;

/// Rows of a block that one task writes.
const ROWS_A_TASK: usize = 16;

/// A worker's floats of scratch.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnLen {
    /// For each sequence of its task.
    pub per_sequence: usize,
    /// For whichever sequence it is at.
    pub once: usize,
}

/// B sequences of T steps with H hidden, and G gates.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    pub batch: usize,
    pub time: usize,
    pub hidden: usize,
    pub gates: usize,
    pub reverse: bool,
    pub strict: bool,
}

impl Sequence {
    /// B·T·H.
    pub(super) fn states_len(&self) -> usize {
        self.batch * self.time * self.hidden
    }

    /// G·H.
    pub(super) fn width(&self) -> usize {
        self.gates * self.hidden
    }

    /// The time index of step `s`.
    pub(super) fn t(&self, s: usize) -> usize {
        if self.reverse { self.time - 1 - s } else { s }
    }

    /// The row of `[B, T, ..]` for sequence `b` at step `s`.
    pub(super) fn row(&self, b: usize, s: usize) -> usize {
        b * self.time + self.t(s)
    }

    /// The sequence and the step of row `row` of `[B, T, ..]`.
    pub(super) fn at(&self, row: usize) -> (usize, usize) {
        // The index of a step and the step of an index are the same map.
        (row / self.time, self.t(row % self.time))
    }

    /// Sequences of a task: equal shares of at least 8, whose tiles use each panel of weights twice, in up to 16
    /// tasks; or half of a small batch.
    fn chunk(&self) -> usize {
        let tasks = if self.batch < 16 { self.batch / 4 } else { self.batch / 8 };
        let tasks = if tasks == 0 { 1 } else { 1 << tasks.min(16).ilog2() };
        self.batch.div_ceil(tasks).max(1)
    }

    /// Scratch of one worker.
    pub(super) fn worker_len(&self, own: OwnLen) -> usize {
        round_cols(self.chunk() * own.per_sequence + own.once)
    }

    /// Runs `f(first sequence, how many, the worker's scratch)` for every task.
    pub(super) fn for_each_chunk(
        &self,
        cx: &Cx,
        own: OwnLen,
        scratch: &mut [f32],
        f: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) {
        let (chunk, len) = (self.chunk(), self.worker_len(own));
        let scratch = SharedMut::new(scratch);
        cx.par.run(self.batch.div_ceil(chunk), &|task, worker| {
            let start = task * chunk;
            // SAFETY: a worker runs one task at a time, and this part is its own.
            f(start, chunk.min(self.batch - start), unsafe { scratch.slice(worker * len, len) });
        });
    }

    /// `dw[G·H, H] = Σ dzᵀ·h` and `db = Σ dz` over all B·T rows of `dz [B, T, G·H]` and of the states before each
    /// step `h_before [B, T, H]`.
    pub(super) fn weight_grads(
        &self,
        cx: &Cx,
        dz: &[f32],
        h_before: &[f32],
        dw: &mut [f32],
        db: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) {
        self.weight_product().run(cx, dz, h_before, dw, None, scratch);
        if let Some(db) = db {
            self.bias_grad(cx, dz, db, false);
        }
    }

    /// As [`Sequence::weight_grads`], of rows that `row(idx, dz, h_before)` writes, some hundred at a time: those of a block
    /// of the product, so that the sums have the order of the whole.
    pub(super) fn weight_grads_by_rows(
        &self,
        cx: &Cx,
        row: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
        dw: &mut [f32],
        mut db: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) {
        let (whole, width, hidden) = (self.weight_product(), self.width(), self.hidden);
        let (blocks, rows_max) = self.row_blocks();
        let (dz, scratch) = scratch.split_at_mut(round_cols(rows_max * width));
        let (h_before, scratch) = scratch.split_at_mut(round_cols(rows_max * hidden));
        for i in 0..blocks {
            let (first, end) = (whole.k * i / blocks, whole.k * (i + 1) / blocks);
            let k = end - first;
            let (dz, h_before) = (&mut dz[..k * width], &mut h_before[..k * hidden]);
            {
                let h_before = SharedMut::new(&mut *h_before);
                cx.for_each_chunk(dz, ROWS_A_TASK * width, |task, dz| {
                    for (r, dz) in dz.chunks_exact_mut(width).enumerate() {
                        let at = task * ROWS_A_TASK + r;
                        // SAFETY: a row belongs to one task.
                        row(first + at, dz, unsafe { h_before.slice(at * hidden, hidden) });
                    }
                });
            }
            Gemm { k, accumulate: i > 0, ..whole.clone() }.run(cx, dz, h_before, dw, None, scratch);
            if let Some(db) = &mut db {
                self.bias_grad(cx, dz, db, i > 0);
            }
        }
    }

    /// How many floats of scratch [`Sequence::weight_grads_by_rows`] needs.
    pub(super) fn by_rows_len(&self, workers: usize) -> usize {
        let (_, rows_max) = self.row_blocks();
        let product = |k: usize| Gemm { k, ..self.weight_product() }.scratch_len(workers);
        round_cols(rows_max * self.width())
            + round_cols(rows_max * self.hidden)
            + product(rows_max).max(product(rows_max.saturating_sub(1)))
    }

    /// How many blocks of rows the product of the weights' gradient has, and the longest.
    fn row_blocks(&self) -> (usize, usize) {
        let whole = self.weight_product();
        (whole.k_blocks(), whole.k.div_ceil(whole.k_blocks()))
    }

    /// `db = Σ dz` over rows, or `+=`.
    fn bias_grad(&self, cx: &Cx, dz: &[f32], db: &mut [f32], add: bool) {
        let width = self.width();
        cx.for_each_chunk(db, 128, |i, db| {
            if !add {
                db.fill(0.0);
            }
            for row in dz.chunks_exact(width) {
                for (db, dz) in db.iter_mut().zip(&row[i * 128..]) {
                    *db += dz;
                }
            }
        });
    }

    /// The product of [`Sequence::weight_grads`].
    pub(super) fn weight_product(&self) -> Gemm {
        let (width, hidden) = (self.width(), self.hidden);
        Gemm {
            batch: 1,
            m: width,
            n: hidden,
            k: self.batch * self.time,
            a: Strides { batch: 0, row: 1, col: width },
            b: Strides { batch: 0, row: hidden, col: 1 },
            c: Strides { batch: 0, row: hidden, col: 1 },
            accumulate: false,
            strict: self.strict,
        }
    }
}

/// The recurrent weights as the right operand of a product: `depth × cols`.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    isa: Isa,
    /// Packed panels, or for the scalar twin the weights as they are.
    data: &'a [f32],
    depth: usize,
    cols: usize,
    /// The strides of (depth, col) in weights that are not packed.
    strides: (usize, usize),
}

impl<'a> Weights<'a> {
    /// How many floats `panels` of a `depth × cols` operand are.
    pub(super) fn panels_len(depth: usize, cols: usize) -> usize {
        depth * round_cols(cols)
    }

    /// `wᵀ` of `w [width, hidden]`, for `h·wᵀ`.
    pub(super) fn transposed(
        cx: &Cx,
        w: &'a [f32],
        width: usize,
        hidden: usize,
        panels: &'a mut [f32],
    ) -> Self {
        Weights::pack(cx, w, hidden, width, (1, hidden), panels)
    }

    /// `w [width, hidden]` itself, for `dz·w`.
    pub(super) fn plain(cx: &Cx, w: &'a [f32], width: usize, hidden: usize, panels: &'a mut [f32]) -> Self {
        Weights::pack(cx, w, width, hidden, (hidden, 1), panels)
    }

    fn pack(
        cx: &Cx,
        w: &'a [f32],
        depth: usize,
        cols: usize,
        strides: (usize, usize),
        panels: &'a mut [f32],
    ) -> Self {
        assert_eq!(w.len(), depth * cols, "recurrent weights");
        #[cfg(target_arch = "x86_64")]
        if cx.isa.has_avx2() {
            // Four panels per task.
            let group = 4 * crate::tile::TILE_COLS;
            let panels = &mut panels[..Weights::panels_len(depth, cols)];
            cx.for_each_chunk(panels, (group * depth).max(1), |i, panels| {
                let n = group.min(cols - i * group);
                let src = &w[i * group * strides.1..];
                // SAFETY: the instruction set was detected; `w` has depth × cols elements, of which these are columns
                // `i·group .. i·group + n`, and the panels have room for them.
                unsafe {
                    use crate::tile::avx2::{pack_panels, pack_transposed};
                    if strides.1 == 1 {
                        pack_panels(src.as_ptr(), strides.0, n, depth, panels.as_mut_ptr());
                    } else {
                        pack_transposed(src.as_ptr(), strides.1, n, depth, panels.as_mut_ptr());
                    }
                }
            });
            return Weights { isa: cx.isa, data: panels, depth, cols, strides };
        }
        let _ = panels;
        Weights { isa: cx.isa, data: w, depth, cols, strides }
    }

    /// Floats from one row of the product to the next.
    pub(super) fn out_stride(&self) -> usize {
        round_cols(self.cols)
    }

    /// `out[m × cols] = a[m × depth] · weights`, or `+=`, the rows of `out` [`Weights::out_stride`] apart.
    pub(super) fn product<const ADD: bool>(&self, m: usize, a: &[f32], out: &mut [f32]) {
        let stride = self.out_stride();
        assert!(a.len() >= m * self.depth && out.len() >= m * stride, "operands of the recurrent product");
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_avx2() {
            use crate::tile::{Avx2, Avx512, product};
            let run = if self.isa.has_avx512() { product::<Avx512, ADD> } else { product::<Avx2, ADD> };
            let (a, panels, out) = (a.as_ptr(), self.data.as_ptr(), out.as_mut_ptr());
            // SAFETY: the instruction set was detected; lengths by the assertion and by `pack`.
            return unsafe { run(m, self.cols, self.depth, a, self.depth, panels, out, stride) };
        }
        for r in 0..m {
            for c in 0..self.cols {
                let sum: f32 = (0..self.depth)
                    .map(|i| a[r * self.depth + i] * self.data[i * self.strides.0 + c * self.strides.1])
                    .sum();
                let out = &mut out[r * stride + c];
                *out = if ADD { *out + sum } else { sum };
            }
        }
    }
}

/// Row `row` of the gradient of a last state, or zeros where there is none.
pub(super) fn start_row(target: &mut [f32], source: Option<&[f32]>, row: usize) {
    match source {
        Some(source) => target.copy_from_slice(&source[row * target.len()..][..target.len()]),
        None => target.fill(0.0),
    }
}
