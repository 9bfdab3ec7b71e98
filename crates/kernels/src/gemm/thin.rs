//! Products with one row or one column: a matrix by a vector, where every element of the matrix is used once.
//!
//! Nothing is copied: the matrix is read once, in memory order, and memory bandwidth is the limit. What has to be converted to
//! f32 is, a few rows at a time.

use std::arch::x86_64::*;

use super::source::{Converted, OperandSource, OperandSources, Runs};
use super::{Epilogue, Gemm, OutputBlock};
use crate::Cx;
use crate::cx::SharedMut;

/// Outputs of a task, and of the sums that are kept on the stack.
const OUTPUTS: usize = 256;
/// Of what is converted, outputs that [`dots`] gets at a time, and steps of k that [`sum_rows`] does: as many as they take at once, or
/// several times that. Neither cut changes the order of a sum.
const TOGETHER: usize = 4;
const STEPS: usize = 16;
/// Multiply-adds below which a product is one task.
const TASK_WORK: usize = 1 << 18;

/// Whether `run` applies: one row or column, the matrix contiguous along one of its dims, the vector along its own.
pub(super) fn suits(g: &Gemm) -> bool {
    let (matrix, vector_stride) = parts(g);
    (g.m == 1 || g.n == 1) && (vector_stride == 1 || g.k == 1) && (matrix.0 == 1 || matrix.1 == 1)
}

/// The strides of the matrix (between outputs, along k), and of the vector along k.
fn parts(g: &Gemm) -> ((usize, usize), usize) {
    if g.m == 1 { ((g.b.col, g.b.row), g.a.col) } else { ((g.a.row, g.a.col), g.b.row) }
}

/// Floats that one worker converts to: the vector, and some of the matrix.
pub(super) fn own_len(g: &Gemm, converted: Converted) -> usize {
    if converted == Converted::NONE { 0 } else { g.k + (TOGETHER * g.k).max(STEPS * OUTPUTS) }
}

/// Runs the product; `Gemm::run` has checked the slices, and `suits` the shape.
pub(super) fn run(
    g: &Gemm,
    cx: &Cx,
    from: OperandSources,
    c: &mut [f32],
    epilogue: Option<Epilogue>,
    scratch: &mut [f32],
) {
    let own_len = own_len(g, from.converted());
    assert!(scratch.len() >= cx.par.workers() * own_len, "the scratch has scratch_len(workers) floats");
    let own = SharedMut::new(scratch);
    let ((out_stride, k_stride), _) = parts(g);
    let n_out = g.m * g.n;
    let c_stride = if g.m == 1 { 1 } else { g.c.row };
    let chunk = if g.batch * n_out * g.k < TASK_WORK { n_out } else { OUTPUTS.min(n_out) };
    let per_batch = n_out.div_ceil(chunk);
    let c = SharedMut::new(c);
    cx.par.run(g.batch * per_batch, &|task, worker| {
        let (batch, first) = (task / per_batch, task % per_batch * chunk);
        let last = (first + chunk).min(n_out);
        // SAFETY: a worker has one task at a time.
        let own = unsafe { own.slice(worker * own_len, own_len) };
        let (a, b) = (from.a.from(batch * g.a.batch), from.b.from(batch * g.b.batch));
        let (matrix, vector) = if g.m == 1 { (b, a) } else { (a, b) };
        let (vector, own): (&[f32], _) = match vector.in_place() {
            Some(vector) => (&vector[..g.k], own),
            None => {
                let (wide, own) = own.split_at_mut(g.k);
                vector.copy_runs(Runs { at: 0, n: 1, stride: 0, len: g.k }, wide, g.k);
                (wide, own)
            }
        };
        for start in (first..last).step_by(OUTPUTS) {
            let mut sums = [0f32; OUTPUTS];
            let sums = &mut sums[..OUTPUTS.min(last - start)];
            let matrix = matrix.from(start * out_stride);
            // SAFETY: the ISA has AVX2, as `Gemm::run` has checked.
            unsafe {
                match matrix.in_place() {
                    Some(matrix) if k_stride == 1 => dots(matrix, out_stride, vector, sums),
                    Some(matrix) => sum_rows(matrix, k_stride, vector, sums),
                    None => converted(&matrix, (out_stride, k_stride), vector, sums, own),
                }
            }
            for (j, sum) in sums.iter().enumerate() {
                let at = batch * g.c.batch + (start + j) * c_stride;
                // SAFETY: this element is of this task alone.
                let out = unsafe { &mut c.slice(at, 1)[0] };
                *out = if g.accumulate { *out + sum } else { *sum };
            }
        }
        if let Some(epilogue) = epilogue {
            let base = batch * g.c.batch;
            if g.m == 1 {
                // SAFETY: these elements are of this task alone.
                (epilogue.call)(OutputBlock::piece(batch, 0, first, unsafe {
                    c.slice(base + first, last - first)
                }));
            } else {
                for row in first..last {
                    // SAFETY: as above.
                    (epilogue.call)(OutputBlock::piece(batch, row, 0, unsafe {
                        c.slice(base + row * c_stride, 1)
                    }));
                }
            }
        }
    });
}

/// The sums of a matrix that has to be converted to f32: the same calls, each of some of its rows.
///
/// # Safety
/// The CPU has AVX2.
unsafe fn converted(
    matrix: &OperandSource,
    (out_stride, k_stride): (usize, usize),
    vector: &[f32],
    sums: &mut [f32],
    own: &mut [f32],
) {
    let (k, n) = (vector.len(), sums.len());
    if k_stride == 1 {
        for (i, sums) in sums.chunks_mut(TOGETHER).enumerate() {
            let at = i * TOGETHER * out_stride;
            matrix.copy_runs(Runs { at, n: sums.len(), stride: out_stride, len: k }, own, k);
            // SAFETY: the caller's promise.
            unsafe { dots(own, k, vector, sums) };
        }
        return;
    }
    for (i, vector) in vector.chunks(STEPS).enumerate() {
        let at = i * STEPS * k_stride;
        matrix.copy_runs(Runs { at, n: vector.len(), stride: k_stride, len: n }, own, n);
        // SAFETY: the caller's promise.
        unsafe { sum_rows(own, n, vector, sums) };
    }
}

/// `sums[j] = Σ_l matrix[j * stride + l] * vector[l]`, four sums at a time.
#[target_feature(enable = "avx2,fma")]
fn dots(matrix: &[f32], stride: usize, vector: &[f32], sums: &mut [f32]) {
    let k = vector.len();
    let k8 = k / 8 * 8;
    let n = sums.len();
    for j0 in (0..n).step_by(4) {
        // Past the end, the last row is computed again.
        let row = |r: usize| &matrix[(j0 + r).min(n - 1) * stride..][..k];
        let rows = [row(0), row(1), row(2), row(3)];
        let mut acc = [_mm256_setzero_ps(); 4];
        for l in (0..k8).step_by(8) {
            // SAFETY: `l + 8 <= k`, the length of the vector and of each row.
            unsafe {
                let v = _mm256_loadu_ps(vector.as_ptr().add(l));
                for r in 0..4 {
                    acc[r] = _mm256_fmadd_ps(_mm256_loadu_ps(rows[r].as_ptr().add(l)), v, acc[r]);
                }
            }
        }
        for r in 0..4.min(n - j0) {
            let low = _mm_add_ps(_mm256_castps256_ps128(acc[r]), _mm256_extractf128_ps::<1>(acc[r]));
            let pair = _mm_add_ps(low, _mm_movehl_ps(low, low));
            let mut sum = _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
            for l in k8..k {
                sum += rows[r][l] * vector[l];
            }
            sums[j0 + r] = sum;
        }
    }
}

/// `sums[j] += Σ_l matrix[l * stride + j] * vector[l]`, four rows at a time.
#[target_feature(enable = "avx2,fma")]
fn sum_rows(matrix: &[f32], stride: usize, vector: &[f32], sums: &mut [f32]) {
    let n = sums.len();
    let mut l = 0;
    while l + 4 <= vector.len() {
        let row = |r: usize| &matrix[(l + r) * stride..][..n];
        let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
        let (v0, v1, v2, v3) = (vector[l], vector[l + 1], vector[l + 2], vector[l + 3]);
        for j in 0..n {
            let sum = v1.mul_add(r1[j], v0.mul_add(r0[j], sums[j]));
            sums[j] = v3.mul_add(r3[j], v2.mul_add(r2[j], sum));
        }
        l += 4;
    }
    for l in l..vector.len() {
        for (sum, v) in sums.iter_mut().zip(&matrix[l * stride..][..n]) {
            *sum = vector[l].mul_add(*v, *sum);
        }
    }
}
