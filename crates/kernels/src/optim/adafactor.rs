//! Adafactor's step of one tensor, as PyTorch's `torch.optim.Adafactor`.
//!
//! The mean of g² of a matrix is kept as the means of its rows, `r`, and of its columns, `c`, and taken to be
//! `v = r·c / mean(r)`: `rows + cols` numbers in place of `rows · cols`. A tensor of more dims is a list of such matrices; a
//! vector keeps all of `v`. Then, with `t` the number of the step:
//!
//! ```text
//! r, c, v   move by t^beta2_decay towards the means of this step
//! u         = g / max(√v, eps1)
//! p         = p·(1 - lr·weight_decay) - min(lr, 1/√t) · max(eps2, rms(p)) · u / max(1, rms(u)/d)
//! ```
//!
//! `u` is never stored: it is computed once for its root mean square and once to be applied. Work is split by rows, or
//! by whole matrices where those are small, so results do not depend on the number of workers.

use super::{
    CHUNK, ParamTensor, SQUARES, SplitTensor, StepHyper, chunk_sums_of, squares_body, sum_of_squares,
};
use crate::Cx;
use crate::cx::SharedMut;
use crate::lanes::twin;
use std::ops::Range;

/// Adafactor's settings.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adafactor {
    /// The exponent of `step` in the rate at which means of squares move; at most 0.
    pub beta2_decay: f64,
    /// The least root of a mean square that a gradient is divided by.
    pub eps1: f32,
    /// The least root mean square of a tensor's parameters that its steps are scaled by.
    pub eps2: f32,
    /// The largest root mean square of a tensor's step, before the learning rate.
    pub d: f32,
    /// Decoupled from the gradient, as in AdamW.
    pub weight_decay: f32,
}

impl Adafactor {
    /// PyTorch's defaults.
    pub const DEFAULT: Adafactor =
        Adafactor { beta2_decay: -0.8, eps1: f32::EPSILON, eps2: 1e-3, d: 1.0, weight_decay: 0.0 };

    /// What is kept of a tensor of these dims: means of rows and of columns, or all means of a vector.
    pub(super) fn state_dims(dims: &[usize]) -> [Option<Vec<usize>>; 2] {
        let Some(cols) = dims.len().checked_sub(1).filter(|cols| *cols > 0) else {
            return [Some(dims.to_vec()), None];
        };
        let without = |dim: usize| {
            let mut dims = dims.to_vec();
            dims[dim] = 1;
            Some(dims)
        };
        [without(cols), without(cols - 1)]
    }

    /// The step of one tensor.
    pub(super) fn step(
        &self,
        cx: &Cx,
        hyper: StepHyper,
        tensor: &ParamTensor,
        p: &mut [f32],
        g: &[f32],
        state1: &mut [f32],
        state2: &mut [f32],
    ) {
        if p.is_empty() {
            return;
        }
        let size = sum_of_squares(cx, p);
        let k = self.numbers(hyper);
        let squares = match tensor.matrix {
            None => vector_moments(cx, k, g, state1),
            Some([rows, cols]) => {
                let m = Matrices { rows, cols, totals: None };
                m.moments(cx, k, g, state1, state2);
                m.squares(cx, k, g, state1, state2)
            }
        };
        let k = StepNumbers { rate: self.rate(hyper, [size, squares], p.len()), ..k };
        match tensor.matrix {
            None => vector_update(cx, k, p, g, state1),
            Some([rows, cols]) => {
                Matrices { rows, cols, totals: None }.apply(cx, k, p, g, state1, state2);
            }
        }
    }

    /// Adds up what the means of rows and columns of a split tensor take, of this rank's part. `sums` are those of all tensors.
    pub(super) fn measure_means(
        &self,
        cx: &Cx,
        hyper: StepHyper,
        split: &SplitTensor,
        g: &[f32],
        row: &[f32],
        sums: &mut [f64],
    ) {
        let (Some([rows, cols]), Some([_, whole_cols])) = (split.part.matrix, split.matrix) else { return };
        let (m, k) = (Matrices { rows, cols, totals: None }, self.numbers(hyper));
        m.row_squares(cx, g, &mut sums[split.sums.rows.clone()]);
        m.column_squares(cx, g, &mut sums[split.sums.cols.clone()]);
        let (take, scale) = (f64::from(k.take), f64::from(k.scale).powi(2));
        for (i, row) in row.chunks_exact(rows).enumerate() {
            let kept = sum(cx.isa, row) / split.row_copies as f64;
            let new: f64 = sums[split.sums.rows.clone()][i * rows..(i + 1) * rows].iter().sum();
            sums[split.sums.totals.start + i] = (1.0 - take) * kept + take * scale * new / whole_cols as f64;
        }
    }

    /// Moves the means of a split tensor, of which all sums are known, and adds up the squares of this rank's part: of the
    /// parameters and of their step's direction.
    pub(super) fn measure_norms(
        &self,
        cx: &Cx,
        hyper: StepHyper,
        split: &SplitTensor,
        p: &[f32],
        g: &[f32],
        [row, col]: [&mut [f32]; 2],
        sums: &mut [f64],
    ) {
        let k = self.numbers(hyper);
        let squares = match Matrices::of_split(split, sums) {
            None => vector_moments(cx, k, g, row),
            Some(m) => {
                match split.matrix {
                    None => m.moments(cx, k, g, row, col),
                    Some([rows, cols]) => {
                        let of = |at: &Range<usize>| sums[at.clone()].iter().copied();
                        row.iter_mut().zip(of(&split.sums.rows)).for_each(|(r, sum)| k.towards(r, sum, cols));
                        col.iter_mut().zip(of(&split.sums.cols)).for_each(|(c, sum)| k.towards(c, sum, rows));
                    }
                }
                m.squares(cx, k, g, row, col)
            }
        };
        let norms = &mut sums[split.sums.norms.clone()];
        norms.copy_from_slice(&[sum_of_squares(cx, p), squares]);
    }

    /// The step of a part whose norms are known.
    pub(super) fn step_split(
        &self,
        cx: &Cx,
        hyper: StepHyper,
        split: &SplitTensor,
        p: &mut [f32],
        g: &[f32],
        [row, col]: [&[f32]; 2],
        sums: &[f64],
    ) {
        let rate = self.rate(hyper, split.norms(sums), split.numel);
        let k = StepNumbers { rate, ..self.numbers(hyper) };
        match Matrices::of_split(split, sums) {
            None => vector_update(cx, k, p, g, row),
            Some(m) => m.apply(cx, k, p, g, row, col),
        }
    }

    /// The numbers of a step; its rate is known later.
    fn numbers(&self, hyper: StepHyper) -> StepNumbers {
        StepNumbers {
            take: (hyper.step as f64).powf(self.beta2_decay) as f32,
            scale: hyper.grad_scale,
            floor: (f64::from(self.eps1).powi(2) as f32).max(f32::MIN_POSITIVE),
            least_mean: self.eps1,
            keep: hyper.keep(self.weight_decay),
            rate: 0.0,
        }
    }

    /// The rate of a tensor of `n` elements, from the squares of its parameters and of its direction, each added up.
    fn rate(&self, hyper: StepHyper, [p2, u2]: [f64; 2], n: usize) -> f32 {
        let n = n as f64;
        let size = (p2 / n).sqrt().max(f64::from(self.eps2));
        let over = (u2 / n).sqrt() / f64::from(self.d);
        // Not `max`, which would take 1 for a NaN.
        let over = if over <= 1.0 { 1.0 } else { over };
        (f64::from(hyper.lr).min(1.0 / (hyper.step as f64).sqrt()) * size / over) as f32
    }
}

/// The numbers of a step of one tensor.
#[derive(Clone, Copy)]
struct StepNumbers {
    /// How far the means move.
    take: f32,
    scale: f32,
    /// The least mean square that a gradient is divided by the root of.
    floor: f32,
    /// The least mean of a matrix' rows that their product with columns is divided by.
    least_mean: f32,
    /// What p is multiplied by before the step.
    keep: f32,
    rate: f32,
}

impl StepNumbers {
    /// Moves a mean towards `sum / n`, where `sum` is of squares that have not been scaled.
    #[inline(always)]
    fn towards(&self, mean: &mut f32, sum: f64, n: usize) {
        let new = (sum * f64::from(self.scale).powi(2) / n as f64) as f32;
        *mean += self.take * (new - *mean);
    }

    /// `g / max(√v, eps1)`.
    #[inline(always)]
    fn direction(&self, g: f32, v: f32) -> f32 {
        g * self.scale / (if v < self.floor { self.floor } else { v }).sqrt()
    }
}

/// A tensor, or a part of one, as a list of matrices of its last two dims.
#[derive(Clone, Copy)]
struct Matrices<'a> {
    rows: usize,
    cols: usize,
    /// Of a part: the sum of the means of all rows of each whole matrix, and how many rows that has.
    totals: Option<(&'a [f64], usize)>,
}

/// Columns of a task where a matrix takes more than one.
const COLUMNS: usize = 64;

impl<'a> Matrices<'a> {
    /// Those of a part whose sums are known; `None` if it is a vector.
    fn of_split(split: &SplitTensor, sums: &'a [f64]) -> Option<Matrices<'a>> {
        let totals = split.matrix.map(|[rows, _]| (&sums[split.sums.totals.clone()], rows));
        split.part.matrix.map(|[rows, cols]| Matrices { rows, cols, totals })
    }

    /// The mean that products of rows and columns of matrix `i` are divided by.
    fn mean(self, cx: &Cx, k: StepNumbers, i: usize, row: &[f32]) -> f32 {
        let mean = match self.totals {
            Some((totals, rows)) => totals[i] / rows as f64,
            None => sum(cx.isa, row) / row.len() as f64,
        } as f32;
        if mean < k.least_mean { k.least_mean } else { mean }
    }

    /// The sums of the squares of each row.
    fn row_squares(self, cx: &Cx, g: &[f32], sums: &mut [f64]) {
        let (cols, n) = (self.cols, self.rows_in_task());
        cx.for_each_chunk(sums, n, |task, sums| {
            let g = &g[task * n * cols..];
            row_squares(cx.isa, cols, &g[..sums.len() * cols], sums);
        });
    }

    /// The sums of the squares of each column.
    fn column_squares(self, cx: &Cx, g: &[f32], sums: &mut [f64]) {
        let Matrices { rows, cols, .. } = self;
        if let Some(n) = self.in_task() {
            cx.for_each_chunk(sums, n * cols, |task, sums| {
                for (i, sums) in sums.chunks_exact_mut(cols).enumerate() {
                    column_squares(cx.isa, rows, cols, &g[self.of(task * n + i)], sums);
                }
            });
            return;
        }
        for (i, sums) in sums.chunks_exact_mut(cols).enumerate() {
            let g = &g[self.of(i)];
            cx.for_each_chunk(sums, COLUMNS, |task, sums| {
                column_squares(cx.isa, rows, cols, &g[task * COLUMNS..], sums);
            });
        }
    }

    fn len(self) -> usize {
        self.rows * self.cols
    }

    /// How many whole matrices are a task; `None` if one is too large to be a part of it.
    fn in_task(self) -> Option<usize> {
        (self.len() < CHUNK).then(|| CHUNK / self.len())
    }

    /// Rows of a task.
    fn rows_in_task(self) -> usize {
        (CHUNK / self.cols).max(1)
    }

    /// The new means of rows and of columns.
    fn moments(self, cx: &Cx, k: StepNumbers, g: &[f32], row: &mut [f32], col: &mut [f32]) {
        let Matrices { rows, cols, .. } = self;
        cx.for_each_chunk(row, self.rows_in_task(), |task, row| {
            let start = task * self.rows_in_task() * cols;
            row_means(cx.isa, k, cols, &g[start..start + row.len() * cols], row);
        });
        if let Some(n) = self.in_task() {
            cx.for_each_chunk(col, n * cols, |task, col| {
                let first = task * n;
                for (i, col) in col.chunks_exact_mut(cols).enumerate() {
                    column_means(cx.isa, k, rows, cols, &g[self.of(first + i)], col);
                }
            });
            return;
        }
        for (i, col) in col.chunks_exact_mut(cols).enumerate() {
            let g = &g[self.of(i)];
            cx.for_each_chunk(col, COLUMNS, |task, col| {
                column_means(cx.isa, k, rows, cols, &g[task * COLUMNS..], col);
            });
        }
    }

    /// The sum of the squares of the step's direction.
    fn squares(self, cx: &Cx, k: StepNumbers, g: &[f32], row: &[f32], col: &[f32]) -> f64 {
        let Matrices { rows, cols, .. } = self;
        let count = g.len() / self.len();
        let whole = |i: usize| (&row[i * rows..(i + 1) * rows], &col[i * cols..(i + 1) * cols]);
        if let Some(n) = self.in_task() {
            let [sum] = chunk_sums_of(cx, count, n, |matrices| {
                let of = |i: usize| {
                    let (row, col) = whole(i);
                    factored_squares(cx.isa, k, self.mean(cx, k, i, row), &g[self.of(i)], row, col)
                };
                [matrices.map(of).sum()]
            });
            return sum;
        }
        let of = |i: usize| {
            let ((row, col), g) = (whole(i), &g[self.of(i)]);
            let mean = self.mean(cx, k, i, row);
            let [sum] = chunk_sums_of(cx, rows, self.rows_in_task(), |r| {
                let g = &g[r.start * cols..r.end * cols];
                [factored_squares(cx.isa, k, mean, g, &row[r], col)]
            });
            sum
        };
        (0..count).map(of).sum()
    }

    /// The step itself.
    fn apply(self, cx: &Cx, k: StepNumbers, p: &mut [f32], g: &[f32], row: &[f32], col: &[f32]) {
        let Matrices { rows, cols, .. } = self;
        let whole = |i: usize| (&row[i * rows..(i + 1) * rows], &col[i * cols..(i + 1) * cols]);
        if let Some(n) = self.in_task() {
            cx.for_each_chunk(p, n * self.len(), |task, p| {
                for (i, p) in p.chunks_exact_mut(self.len()).enumerate() {
                    let i = task * n + i;
                    let (row, col) = whole(i);
                    factored_apply(cx.isa, k, self.mean(cx, k, i, row), p, &g[self.of(i)], row, col);
                }
            });
            return;
        }
        let per_task = self.rows_in_task();
        for (i, p) in p.chunks_exact_mut(self.len()).enumerate() {
            let ((row, col), g) = (whole(i), &g[self.of(i)]);
            let mean = self.mean(cx, k, i, row);
            cx.for_each_chunk(p, per_task * cols, |task, p| {
                let r = task * per_task..task * per_task + p.len() / cols;
                factored_apply(cx.isa, k, mean, p, &g[r.start * cols..r.end * cols], &row[r], col);
            });
        }
    }

    /// The elements of a matrix.
    fn of(self, i: usize) -> Range<usize> {
        i * self.len()..(i + 1) * self.len()
    }
}

/// The new means of a vector; returns the sum of the squares of the step's direction.
fn vector_moments(cx: &Cx, k: StepNumbers, g: &[f32], v: &mut [f32]) -> f64 {
    let vs = SharedMut::new(v);
    let [sum] = chunk_sums_of(cx, g.len(), CHUNK, |r| {
        // SAFETY: chunks do not overlap, and each is visited once.
        let v = unsafe { vs.slice(r.start, r.len()) };
        [vector_squares(cx.isa, k, &g[r], v)]
    });
    sum
}

/// The step of a vector, when its means have moved.
fn vector_update(cx: &Cx, k: StepNumbers, p: &mut [f32], g: &[f32], v: &[f32]) {
    cx.for_each_chunk(p, CHUNK, |task, p| {
        let r = task * CHUNK..task * CHUNK + p.len();
        vector_apply(cx.isa, k, p, &g[r.clone()], &v[r]);
    });
}

twin! { fn row_squares(cols: usize, g: &[f32], sums: &mut [f64]) = row_squares_body }
twin! { fn column_squares(rows: usize, cols: usize, g: &[f32], sums: &mut [f64]) = column_squares_body }
twin! { fn row_means(k: StepNumbers, cols: usize, g: &[f32], row: &mut [f32]) = row_means_body }
twin! { fn column_means(k: StepNumbers, rows: usize, cols: usize, g: &[f32], col: &mut [f32]) = column_means_body }
twin! { fn sum(x: &[f32]) -> f64 = sum_body }
twin! {
    fn factored_squares(k: StepNumbers, mean: f32, g: &[f32], row: &[f32], col: &[f32]) -> f64 = factored_squares_body
}
twin! {
    fn factored_apply(k: StepNumbers, mean: f32, p: &mut [f32], g: &[f32], row: &[f32], col: &[f32])
        = factored_apply_body
}
twin! { fn vector_squares(k: StepNumbers, g: &[f32], v: &mut [f32]) -> f64 = vector_squares_body }
twin! { fn vector_apply(k: StepNumbers, p: &mut [f32], g: &[f32], v: &[f32]) = vector_apply_body }

#[inline(always)]
fn row_means_body(k: StepNumbers, cols: usize, g: &[f32], row: &mut [f32]) {
    for (g, mean) in g.chunks_exact(cols).zip(row) {
        k.towards(mean, squares_body(g), cols);
    }
}

#[inline(always)]
fn row_squares_body(cols: usize, g: &[f32], sums: &mut [f64]) {
    for (g, sum) in g.chunks_exact(cols).zip(sums) {
        *sum = squares_body(g);
    }
}

/// The sums of the squares of up to 64 columns. `g` begins with the first row's element of the first of them.
#[inline(always)]
fn block_squares(rows: usize, cols: usize, g: &[f32], width: usize) -> [f64; COLUMNS] {
    let mut sums = [0.0f64; COLUMNS];
    for row in 0..rows {
        let start = row * cols;
        for (sum, &g) in sums.iter_mut().zip(&g[start..start + width]) {
            *sum += f64::from(g) * f64::from(g);
        }
    }
    sums
}

/// `g` begins with the first row's element of the first of these columns.
#[inline(always)]
fn column_means_body(k: StepNumbers, rows: usize, cols: usize, g: &[f32], col: &mut [f32]) {
    for (block, col) in col.chunks_mut(COLUMNS).enumerate() {
        let sums = block_squares(rows, cols, &g[block * COLUMNS..], col.len());
        for (mean, sum) in col.iter_mut().zip(sums) {
            k.towards(mean, sum, rows);
        }
    }
}

/// As [`column_means_body`].
#[inline(always)]
fn column_squares_body(rows: usize, cols: usize, g: &[f32], sums: &mut [f64]) {
    for (block, sums) in sums.chunks_mut(COLUMNS).enumerate() {
        let found = block_squares(rows, cols, &g[block * COLUMNS..], sums.len());
        sums.copy_from_slice(&found[..sums.len()]);
    }
}

#[inline(always)]
fn sum_body(x: &[f32]) -> f64 {
    let mut sums = [0.0f64; SQUARES];
    let (chunks, rest) = x.as_chunks::<SQUARES>();
    for chunk in chunks {
        for l in 0..SQUARES {
            sums[l] += f64::from(chunk[l]);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(x);
    }
    sums.iter().sum()
}

#[inline(always)]
fn factored_squares_body(k: StepNumbers, mean: f32, g: &[f32], row: &[f32], col: &[f32]) -> f64 {
    let mut sums = [0.0f64; SQUARES];
    let (col_chunks, col_rest) = col.as_chunks::<SQUARES>();
    for (g, &row) in g.chunks_exact(col.len()).zip(row) {
        let row = row / mean;
        let (g_chunks, g_rest) = g.as_chunks::<SQUARES>();
        for (g, col) in g_chunks.iter().zip(col_chunks) {
            for l in 0..SQUARES {
                let u = f64::from(k.direction(g[l], row * col[l]));
                sums[l] += u * u;
            }
        }
        for ((sum, &g), &col) in sums.iter_mut().zip(g_rest).zip(col_rest) {
            let u = f64::from(k.direction(g, row * col));
            *sum += u * u;
        }
    }
    sums.iter().sum()
}

#[inline(always)]
fn factored_apply_body(k: StepNumbers, mean: f32, p: &mut [f32], g: &[f32], row: &[f32], col: &[f32]) {
    let cols = col.len();
    for ((p, g), &row) in p.chunks_exact_mut(cols).zip(g.chunks_exact(cols)).zip(row) {
        let row = row / mean;
        for ((p, &g), &col) in p.iter_mut().zip(g).zip(col) {
            *p = *p * k.keep - k.rate * k.direction(g, row * col);
        }
    }
}

#[inline(always)]
fn vector_squares_body(k: StepNumbers, g: &[f32], v: &mut [f32]) -> f64 {
    let mut sums = [0.0f64; SQUARES];
    let ((g_chunks, g_rest), (v_chunks, v_rest)) = (g.as_chunks::<SQUARES>(), v.as_chunks_mut::<SQUARES>());
    for (g, v) in g_chunks.iter().zip(v_chunks) {
        for l in 0..SQUARES {
            k.towards(&mut v[l], f64::from(g[l]) * f64::from(g[l]), 1);
            let u = f64::from(k.direction(g[l], v[l]));
            sums[l] += u * u;
        }
    }
    for ((sum, &g), v) in sums.iter_mut().zip(g_rest).zip(v_rest) {
        k.towards(v, f64::from(g) * f64::from(g), 1);
        let u = f64::from(k.direction(g, *v));
        *sum += u * u;
    }
    sums.iter().sum()
}

#[inline(always)]
fn vector_apply_body(k: StepNumbers, p: &mut [f32], g: &[f32], v: &[f32]) {
    for ((p, &g), &v) in p.iter_mut().zip(g).zip(v) {
        *p = *p * k.keep - k.rate * k.direction(g, v);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Optimizer;
    use super::*;
    use crate::lanes::testing::{close, contexts, data, same_bits};

    const DECAYED: Adafactor = Adafactor { d: 1.5, weight_decay: 0.1, eps1: 1e-3, ..Adafactor::DEFAULT };

    /// The formulas at the head of this file in f64, on a tensor of `count` matrices; a vector is one without rows.
    fn naive(o: Adafactor, h: StepHyper, dims: [usize; 3], p: &mut [f64], g: &[f64], s: [&mut [f64]; 2]) {
        let [count, rows, cols] = dims;
        let [r, c] = s;
        let (lr, t, n) = (f64::from(h.lr), h.step as f64, p.len() as f64);
        let take = t.powf(o.beta2_decay);
        let g: Vec<f64> = g.iter().map(|g| g * f64::from(h.grad_scale)).collect();
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / n).sqrt();
        let alpha = lr.min(1.0 / t.sqrt()) * rms(p).max(f64::from(o.eps2));
        let mut v = vec![0.0; p.len()];
        if rows == 0 {
            r.iter_mut().zip(&g).for_each(|(r, g)| *r += take * (g * g - *r));
            v.copy_from_slice(r);
        }
        for m in 0..if rows == 0 { 0 } else { count } {
            let at = |i: usize, j: usize| (m * rows + i) * cols + j;
            let square = |i: usize, j: usize| g[at(i, j)].powi(2);
            for i in 0..rows {
                let new = (0..cols).map(|j| square(i, j)).sum::<f64>() / cols as f64;
                r[m * rows + i] += take * (new - r[m * rows + i]);
            }
            for j in 0..cols {
                let new = (0..rows).map(|i| square(i, j)).sum::<f64>() / rows as f64;
                c[m * cols + j] += take * (new - c[m * cols + j]);
            }
            let mean = r[m * rows..(m + 1) * rows].iter().sum::<f64>() / rows as f64;
            for i in 0..rows {
                for j in 0..cols {
                    v[at(i, j)] = r[m * rows + i] * c[m * cols + j] / mean.max(f64::from(o.eps1));
                }
            }
        }
        let u: Vec<f64> = g.iter().zip(v).map(|(g, v)| g / v.sqrt().max(f64::from(o.eps1))).collect();
        let over = (rms(&u) / f64::from(o.d)).max(1.0);
        let keep = 1.0 - lr * f64::from(o.weight_decay) * f64::from(h.decay_scale);
        p.iter_mut().zip(u).for_each(|(p, u)| *p = *p * keep - alpha * u / over);
    }

    /// Five steps of a tensor that comes after three numbers of no tensor.
    fn check(o: Adafactor, [count, rows, cols]: [usize; 3], spread: f32) {
        let what = format!("{o:?} {count} of {rows} x {cols}");
        let n = count * rows.max(1) * cols;
        let lens = if rows == 0 { [n, 0] } else { [count * rows, count * cols] };
        let tensor = ParamTensor {
            range: 3..3 + n,
            matrix: (rows > 0).then_some([rows, cols]),
            states: [2..2 + lens[0], 1..1 + lens[1]],
        };
        let hyper = |step| StepHyper { lr: 0.3, step, grad_scale: 0.5, decay_scale: 0.7 };
        let grads = |step: u64| data(step + 9, n + 3).iter().map(|g| g * spread).collect::<Vec<f32>>();
        let mut runs = vec![];
        for cx in contexts() {
            let (mut p, mut r, mut c) = (data(1, n + 3), vec![0.0; lens[0] + 2], vec![0.0; lens[1] + 1]);
            for step in 1..=5 {
                let tensors = std::slice::from_ref(&tensor);
                Optimizer::Adafactor(o).step(&cx, hyper(step), &mut p, &grads(step), &mut r, &mut c, tensors);
            }
            runs.push([&p[..], &r[2..], &c[1..]].concat());
        }
        same_bits(&what, &runs);
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (mut p, mut r, mut c) = (wide(&data(1, n + 3)), vec![0.0; lens[0]], vec![0.0; lens[1]]);
        for step in 1..=5 {
            let g = wide(&grads(step));
            naive(o, hyper(step), [count, rows, cols], &mut p[3..], &g[3..], [&mut r, &mut c]);
        }
        close(&what, &runs[0], &[p, r, c].concat(), 2e-5);
    }

    #[test]
    fn matches_the_formulas() {
        for o in [Adafactor::DEFAULT, DECAYED] {
            for n in [1, 15, 16, 17, CHUNK + 5] {
                check(o, [1, 0, n], 1.0);
            }
            for dims in
                [[1, 1, 1], [1, 3, 17], [1, 17, 1], [1, 130, 200], [1, 2, CHUNK + 3], [1, CHUNK + 3, 2]]
            {
                check(o, dims, 1.0);
            }
            for dims in [[700, 3, 3], [5, 1, 7], [2, 129, 130]] {
                check(o, dims, 1.0);
            }
            // Squares below eps1, where gradients are divided by it.
            check(o, [1, 9, 20], 1e-9);
            check(o, [1, 0, 20], 1e-9);
        }
    }

    #[test]
    fn a_gradient_that_is_no_number_shows() {
        let tensor = ParamTensor { range: 0..6, matrix: Some([2, 3]), states: [0..2, 0..3] };
        let h = StepHyper { lr: 0.1, step: 1, grad_scale: 1.0, decay_scale: 1.0 };
        let (mut p, mut r, mut c) = ([1.0; 6], [0.0; 2], [0.0; 3]);
        let g = [1.0, 1.0, f32::NAN, 1.0, 1.0, 1.0];
        Optimizer::Adafactor(DECAYED).step(&Cx::serial(), h, &mut p, &g, &mut r, &mut c, &[tensor]);
        assert!(p.iter().all(|p| p.is_nan()), "{p:?}");
    }

    #[test]
    fn a_matrix_keeps_rows_and_columns() {
        let dims = |dims: &[usize]| Adafactor::state_dims(dims);
        assert_eq!(dims(&[]), [Some(vec![]), None]);
        assert_eq!(dims(&[7]), [Some(vec![7]), None]);
        assert_eq!(dims(&[4, 7]), [Some(vec![4, 1]), Some(vec![1, 7])]);
        assert_eq!(dims(&[8, 4, 3, 5]), [Some(vec![8, 4, 3, 1]), Some(vec![8, 4, 1, 5])]);
    }
}
