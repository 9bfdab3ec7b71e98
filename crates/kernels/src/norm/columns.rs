//! Passes over a slab of rows of a row-major `[rows, c]` matrix, with something known or summed for each column.
//!
//! A slab is at most 128 KiB, so a second pass over it reads from L2. Four rows are taken at a time, so that the
//! columns' sums are loaded and stored once for the four. Rows in half are widened into a buffer: a whole slab where it is
//! read twice, else a few rows.

use crate::cx::RunEpilogue;
use crate::floats::prefetch;
use crate::lanes::twin;
use crate::stage::RowStage;
use crate::{Floats, FloatsMut, Isa};
use std::ops::Range;

/// How many rows make a slab of `c` columns: 32 Ki floats, and few enough rows for a sum in f32.
pub(super) fn slab_rows(c: usize) -> usize {
    (32 * 1024 / c.max(1)).clamp(8, 1024) & !3
}

/// The rows of slab `slab`, of `rows` in all.
pub(super) fn slab_range(slab: usize, rows: usize, c: usize) -> Range<usize> {
    let step = slab_rows(c);
    slab * step..((slab + 1) * step).min(rows)
}

/// A buffer for each worker: room for a slab, or for a few rows of three operands. None if there are no `halves`.
pub(super) fn stage(halves: bool, c: usize) -> RowStage {
    RowStage::of_rows(halves, 1, slab_rows(c).max(3 * staged_rows(c)), c)
}

/// Rows of halves that are widened at a time: about 8 KB of them, and whole blocks of [`dot_sums`].
fn staged_rows(c: usize) -> usize {
    (2_048 / c.max(1) / BLOCK_ROWS).max(1) * BLOCK_ROWS
}

/// The mean and the sum of squared deviations of each column of a slab; `first` is room for the first-order correction.
pub(super) fn moments(
    isa: Isa,
    x: Floats,
    c: usize,
    mean: &mut [f32],
    m2: &mut [f32],
    first: &mut [f32],
    buffer: &mut [f32],
) {
    moments_f32(isa, x.staged(isa, 0, x.len(), buffer), c, mean, m2, first);
}

/// `y = (x - mean) * scale + beta`, clamped at 0 if `relu`; then the epilogue, with the position of the slab's first
/// element. It sees f32, before anything is rounded.
pub(super) fn apply(
    isa: Isa,
    x: Floats,
    c: usize,
    p: Affine<'_>,
    relu: bool,
    mut y: FloatsMut,
    epilogue: Option<(usize, &RunEpilogue)>,
    buffer: &mut [f32],
) {
    let halves = x.is_half() || y.is_half();
    // Sixteen rows at a time, so that the epilogue finds them in L1.
    let step = if epilogue.is_some() { 16 } else { rows_at_a_time(halves, x.len(), c) };
    let (x_stage, y_stage) = buffer.split_at_mut(buffer.len() / 3);
    for (first, len) in parts(x.len(), step * c) {
        let x = x.staged(isa, first, len, x_stage);
        y.part(first, len).staged(isa, y_stage, |y| {
            apply_f32(isa, x, c, p, relu, y);
            if let Some((start, epilogue)) = epilogue {
                epilogue(start + first, y);
            }
        });
    }
}

/// The sums of `dy` and of `dy * (x - mean)` of each column of a slab; with `relu`, of the `dy` whose output was above 0.
pub(super) fn dot_sums(
    isa: Isa,
    dy: Floats,
    x: Floats,
    c: usize,
    p: Affine<'_>,
    relu: bool,
    sum_dy: &mut [f32],
    sum_dyx: &mut [f32],
    buffer: &mut [f32],
) {
    sum_dy.fill(0.0);
    sum_dyx.fill(0.0);
    let step = rows_at_a_time(dy.is_half() || x.is_half(), x.len(), c);
    let (dy_stage, x_stage) = buffer.split_at_mut(buffer.len() / 3);
    for (first, len) in parts(x.len(), step * c) {
        let (dy, x) = (dy.staged(isa, first, len, dy_stage), x.staged(isa, first, len, x_stage));
        add_dot_sums(isa, dy, x, c, p, relu, sum_dy, sum_dyx);
    }
}

/// `dx = dy * scale - k1 - (x - mean) * k2`; with `relu`, `dy` counts where the output was above 0.
pub(super) fn input_grad(
    isa: Isa,
    dy: Floats,
    x: Floats,
    c: usize,
    p: Affine<'_>,
    k1: &[f32],
    k2: &[f32],
    relu: bool,
    mut dx: FloatsMut,
    buffer: &mut [f32],
) {
    let step = rows_at_a_time(dy.is_half() || x.is_half() || dx.is_half(), x.len(), c);
    let third = buffer.len() / 3;
    let (dy_stage, rest) = buffer.split_at_mut(third);
    let (x_stage, dx_stage) = rest.split_at_mut(third);
    for (first, len) in parts(x.len(), step * c) {
        let (dy, x) = (dy.staged(isa, first, len, dy_stage), x.staged(isa, first, len, x_stage));
        dx.part(first, len).staged(isa, dx_stage, |dx| {
            input_grad_f32(isa, dy, x, c, p, k1, k2, relu, dx);
        });
    }
}

/// All rows of a slab of `len` elements, or as many as are staged.
fn rows_at_a_time(halves: bool, len: usize, c: usize) -> usize {
    if halves { staged_rows(c) } else { len.div_ceil(c) }
}

/// Starts and lengths of the parts of `len` elements.
fn parts(len: usize, step: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(step.max(1)).map(move |first| (first, step.min(len - first)))
}

twin! {
    fn moments_f32(x: &[f32], c: usize, mean: &mut [f32], m2: &mut [f32], first: &mut [f32]) = moments_body
}
twin! {
    fn apply_f32(x: &[f32], c: usize, p: Affine<'_>, relu: bool, y: &mut [f32]) = apply_body
}
twin! {
    fn add_dot_sums(
        dy: &[f32], x: &[f32], c: usize, p: Affine<'_>, relu: bool, sum_dy: &mut [f32], sum_dyx: &mut [f32],
    ) = add_dot_sums_body
}
twin! {
    fn input_grad_f32(
        dy: &[f32], x: &[f32], c: usize, p: Affine<'_>, k1: &[f32], k2: &[f32], relu: bool, dx: &mut [f32],
    ) = input_grad_body
}

/// The parameters of each column's normalisation; three slices of `c`.
#[derive(Clone, Copy)]
pub(super) struct Affine<'a> {
    /// The column's mean.
    pub mean: &'a [f32],
    /// `gamma * rstd`.
    pub scale: &'a [f32],
    /// What is added at the end.
    pub beta: &'a [f32],
}

impl<'a> Affine<'a> {
    /// The one expression for an output: the backward of a fused ReLU must see the very bits of the forward.
    #[inline(always)]
    fn output(x: f32, mean: f32, scale: f32, beta: f32) -> f32 {
        (x - mean) * scale + beta
    }
    /// The three slices, cut to `c` so that the compiler drops bounds checks.
    #[inline(always)]
    fn cut(self, c: usize) -> (&'a [f32], &'a [f32], &'a [f32]) {
        (&self.mean[..c], &self.scale[..c], &self.beta[..c])
    }
}

/// Four rows of a group of four.
#[inline(always)]
fn quad(q: &[f32], c: usize) -> [&[f32]; 4] {
    [&q[..c], &q[c..2 * c], &q[2 * c..3 * c], &q[3 * c..4 * c]]
}

#[inline(always)]
fn moments_body(x: &[f32], c: usize, mean: &mut [f32], m2: &mut [f32], first: &mut [f32]) {
    let (mean, m2, first) = (&mut mean[..c], &mut m2[..c], &mut first[..c]);
    let inv_n = 1.0 / (x.len() / c) as f32;
    let (quads, rest) = x.split_at(x.len() / (4 * c) * (4 * c));
    mean.fill(0.0);
    for q in quads.chunks_exact(4 * c) {
        let [r0, r1, r2, r3] = quad(q, c);
        for j in 0..c {
            mean[j] += (r0[j] + r1[j]) + (r2[j] + r3[j]);
        }
    }
    for row in rest.chunks_exact(c) {
        for j in 0..c {
            mean[j] += row[j];
        }
    }
    for m in mean.iter_mut() {
        *m *= inv_n;
    }
    m2.fill(0.0);
    first.fill(0.0);
    for q in quads.chunks_exact(4 * c) {
        let [r0, r1, r2, r3] = quad(q, c);
        for j in 0..c {
            let (d0, d1, d2, d3) = (r0[j] - mean[j], r1[j] - mean[j], r2[j] - mean[j], r3[j] - mean[j]);
            first[j] += (d0 + d1) + (d2 + d3);
            m2[j] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
        }
    }
    for row in rest.chunks_exact(c) {
        for j in 0..c {
            let d = row[j] - mean[j];
            first[j] += d;
            m2[j] += d * d;
        }
    }
    // The first mean was rounded: its error is the mean deviation from it.
    for j in 0..c {
        let off = first[j] * inv_n;
        mean[j] += off;
        m2[j] = (m2[j] - first[j] * off).max(0.0);
    }
}

#[inline(always)]
fn apply_body(x: &[f32], c: usize, p: Affine<'_>, relu: bool, y: &mut [f32]) {
    let (mean, scale, beta) = p.cut(c);
    // Above 0 or not at all: a NaN stays a NaN with either bound.
    let floor = if relu { 0.0 } else { f32::NEG_INFINITY };
    for (x, y) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)) {
        for j in 0..c {
            let v = Affine::output(x[j], mean[j], scale[j], beta[j]);
            y[j] = if v < floor { floor } else { v };
        }
    }
}

/// Columns whose sums stay in registers, and rows that stay in L1 while their columns are gone through.
const BLOCK: usize = 16;
const BLOCK_ROWS: usize = 32;

#[inline(always)]
fn add_dot_sums_body(
    dy: &[f32],
    x: &[f32],
    c: usize,
    p: Affine<'_>,
    relu: bool,
    sum_dy: &mut [f32],
    sum_dyx: &mut [f32],
) {
    for (dy, x) in dy.chunks(BLOCK_ROWS * c).zip(x.chunks(BLOCK_ROWS * c)) {
        let whole = c - c % BLOCK;
        for first in (0..whole).step_by(BLOCK) {
            if relu {
                dot_block::<BLOCK, true>(dy, x, c, p, first, sum_dy, sum_dyx);
            } else {
                dot_block::<BLOCK, false>(dy, x, c, p, first, sum_dy, sum_dyx);
            }
        }
        for first in whole..c {
            if relu {
                dot_block::<1, true>(dy, x, c, p, first, sum_dy, sum_dyx);
            } else {
                dot_block::<1, false>(dy, x, c, p, first, sum_dy, sum_dyx);
            }
        }
    }
}

/// Adds the sums of `N` columns from `first` on. Arrays of fixed size, so that no loop is so short that the checks for
/// overlapping slices before it cost more than itself.
#[inline(always)]
fn dot_block<const N: usize, const RELU: bool>(
    dy: &[f32],
    x: &[f32],
    c: usize,
    p: Affine<'_>,
    first: usize,
    sum_dy: &mut [f32],
    sum_dyx: &mut [f32],
) {
    let (mean, scale, beta) =
        (lanes::<N>(p.mean, first), lanes::<N>(p.scale, first), lanes::<N>(p.beta, first));
    let (mut sums, mut dots) = ([0.0f32; N], [0.0f32; N]);
    for (dy, x) in dy.chunks_exact(c).zip(x.chunks_exact(c)) {
        // The next block of rows: columns of this one are too far apart for the hardware prefetchers.
        prefetch(dy.as_ptr(), BLOCK_ROWS * c + first, 1);
        prefetch(x.as_ptr(), BLOCK_ROWS * c + first, 1);
        let (dy, x) = (lanes::<N>(dy, first), lanes::<N>(x, first));
        for l in 0..N {
            let on = !RELU || Affine::output(x[l], mean[l], scale[l], beta[l]) > 0.0;
            let g = if on { dy[l] } else { 0.0 };
            sums[l] += g;
            dots[l] += g * (x[l] - mean[l]);
        }
    }
    for l in 0..N {
        sum_dy[first + l] += sums[l];
        sum_dyx[first + l] += dots[l];
    }
}

/// `N` elements from `first` on.
#[inline(always)]
fn lanes<const N: usize>(v: &[f32], first: usize) -> [f32; N] {
    std::array::from_fn(|l| v[first..first + N][l])
}

#[inline(always)]
fn input_grad_body(
    dy: &[f32],
    x: &[f32],
    c: usize,
    p: Affine<'_>,
    k1: &[f32],
    k2: &[f32],
    relu: bool,
    dx: &mut [f32],
) {
    let (mean, scale, beta) = p.cut(c);
    let (k1, k2) = (&k1[..c], &k2[..c]);
    for ((dy, x), dx) in dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(dx.chunks_exact_mut(c)) {
        if relu {
            for j in 0..c {
                let on = Affine::output(x[j], mean[j], scale[j], beta[j]) > 0.0;
                let g = if on { dy[j] } else { 0.0 };
                dx[j] = g * scale[j] - k1[j] - (x[j] - mean[j]) * k2[j];
            }
        } else {
            for j in 0..c {
                dx[j] = dy[j] * scale[j] - k1[j] - (x[j] - mean[j]) * k2[j];
            }
        }
    }
}
