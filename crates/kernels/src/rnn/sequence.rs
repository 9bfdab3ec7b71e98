//! What both cells share: the order of steps, the cut of the batch into tasks, and the gradient of the recurrent weights.

use crate::cx::SharedMut;
use crate::floats::{Float, Floats, FloatsMut, as_bf16, each};
use crate::gemm::pairs::blocks::PairBlocks;
use crate::gemm::pairs::{PairGemm, PairOrder};
use crate::gemm::{Gemm, Strides};
use crate::tile::{round_cols, take};
use crate::{Cx, Isa};

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

/// The fewest units for which products of bf16 are faster than those of f32.
///
/// Measured on a Zen 4 core with `examples/recurrent_shapes`, as shares of the time that steps in bf16 take with products in
/// f32, forward and backward: 0.52 to 0.72 for 128 to 1024 units and batches of 1 to 64, 0.89 to 0.97 and 0.76 to 0.95 for 32
/// and 48 units, 1.32 and 1.04 to 1.45 for 16; for 32 units and a batch of 1, 1.02 to 1.13. On AMX nothing has been measured.
const PAYS: usize = 32;

/// B sequences of T steps with H hidden, and G gates.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    pub batch: usize,
    pub time: usize,
    pub hidden: usize,
    pub gates: usize,
    pub reverse: bool,
    pub strict: bool,
    pub products: Option<PairOrder>,
}

impl Sequence {
    /// Whether the products of bf16 that are asked for are expected to be faster than f32. They never are without the order's
    /// own instructions.
    pub(super) fn pays(&self, isa: Isa) -> bool {
        let fast = self.products.is_some_and(|order| PairBlocks::new(isa, order).are_fast());
        fast && self.hidden >= PAYS
    }

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
    pub(super) fn chunk(&self) -> usize {
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

    /// As [`Sequence::weight_grads`], with a product of bf16 in this order; `db` sums `dz` as it is stored.
    pub(super) fn weight_grads_in_pairs(
        &self,
        cx: &Cx,
        order: PairOrder,
        dz: Floats,
        h_before: Floats,
        dw: &mut [f32],
        db: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) {
        let pairs = PairGemm { gemm: self.weight_product(), order };
        pairs.run(cx, dz, h_before, FloatsMut::F32(dw), scratch);
        if let Some(db) = db {
            each!(Floats, dz, dz => self.bias_grad(cx, dz, db, false));
        }
    }

    /// Room for `n` floats of all steps that the gradients of the weights need beside what is stored: as operands in bf16, or
    /// in f32, unless they are read again some rows at a time.
    pub(super) fn kept<'a>(
        &self,
        half: bool,
        n: usize,
        scratch: &mut &'a mut [f32],
    ) -> Option<FloatsMut<'a>> {
        let room = take(scratch, self.kept_len(half, n));
        match self.products {
            Some(_) => Some(FloatsMut::Bf16(&mut as_bf16(room)[..n])),
            None if half => None,
            None => Some(FloatsMut::F32(&mut room[..n])),
        }
    }

    /// How many floats of scratch [`Sequence::kept`] takes.
    pub(super) fn kept_len(&self, half: bool, n: usize) -> usize {
        match self.products {
            Some(_) => round_cols(n.div_ceil(2)),
            None if half => 0,
            None => round_cols(n),
        }
    }

    /// How many floats of scratch the gradients of the weights need.
    pub(super) fn weight_grads_len(&self, half: bool, workers: usize) -> usize {
        match self.products {
            Some(order) => PairGemm { gemm: self.weight_product(), order }.scratch_len(workers),
            None if half => self.by_rows_len(workers),
            None => self.weight_product().scratch_len(workers),
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
    fn by_rows_len(&self, workers: usize) -> usize {
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
    fn bias_grad<T: Float>(&self, cx: &Cx, dz: &[T], db: &mut [f32], add: bool) {
        let width = self.width();
        cx.for_each_chunk(db, 128, |i, db| {
            if !add {
                db.fill(0.0);
            }
            for row in dz.chunks_exact(width) {
                for (db, dz) in db.iter_mut().zip(&row[i * 128..]) {
                    *db += dz.wide();
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

/// Row `row` of the gradient of a last state, or zeros where there is none.
pub(super) fn start_row(target: &mut [f32], source: Option<&[f32]>, row: usize) {
    match source {
        Some(source) => target.copy_from_slice(&source[row * target.len()..][..target.len()]),
        None => target.fill(0.0),
    }
}
