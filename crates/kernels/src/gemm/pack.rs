//! Copies of operands in the order in which the tiles read them. What is copied when is decided in `plan`.

use std::arch::x86_64::*;

use super::avx2::{MR, store_eight};
use super::block::{NR, next_rows};
use super::source::{OperandSource, Runs};

pub(super) mod avx512;

/// Copies `k` rows of `cols` (at most 16) columns to rows of 16, padded with zeros.
///
/// # Safety
/// The CPU has AVX2; `source` has `k` rows of `cols` columns at these strides, `target` has room for `16 * k`.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn panel(
    source: *const f32,
    col_stride: usize,
    k_stride: usize,
    cols: usize,
    k: usize,
    target: *mut f32,
) {
    // SAFETY: rows `< k` and columns `< cols` of the source are read; `16 * k` floats are written.
    unsafe {
        if k_stride == 1 && cols == NR {
            let k8 = k / 8 * 8;
            for half in 0..2 {
                let source = source.add(8 * half * col_stride);
                for l in (0..k8).step_by(8) {
                    transpose8(source.add(l), col_stride, target.add(l * NR + 8 * half));
                }
            }
            for l in k8..k {
                for j in 0..NR {
                    *target.add(l * NR + j) = *source.add(j * col_stride + l);
                }
            }
        } else {
            for l in 0..k {
                for j in 0..cols {
                    *target.add(l * NR + j) = *source.add(j * col_stride + l * k_stride);
                }
                for j in cols..NR {
                    *target.add(l * NR + j) = 0.0;
                }
            }
        }
    }
}

/// Copies `n_panels` whole, neighbouring panels that are contiguous along their columns.
///
/// # Safety
/// The CPU has AVX2; `source` has `k` rows, `k_stride` apart, of `16 * n_panels` floats; `target` has room for them.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn panels(
    source: *const f32,
    k_stride: usize,
    n_panels: usize,
    k: usize,
    target: *mut f32,
) {
    // SAFETY: rows `< k` of the source are read, `16 * k` floats of each panel are written.
    unsafe {
        for l0 in (0..k).step_by(LINES) {
            let l1 = (l0 + LINES).min(k);
            prefetch(source, k_stride, l1, (l1 + LINES).min(k), n_panels * NR);
            for panel in 0..n_panels {
                prefetch(target.add(panel * k * NR), NR, l1, (l1 + LINES).min(k), NR);
                for l in l0..l1 {
                    let from = source.add(l * k_stride + panel * NR);
                    let to = target.add((panel * k + l) * NR);
                    _mm256_storeu_ps(to, _mm256_loadu_ps(from));
                    _mm256_storeu_ps(to.add(8), _mm256_loadu_ps(from.add(8)));
                }
            }
        }
    }
}

/// Copies panels of `cols` columns and `k` steps, from element `at` of an operand on, that have to be converted to f32: panel
/// after panel, the last padded with zeros.
///
/// # Safety
/// The CPU has AVX2.
pub(super) unsafe fn converted(
    source: &OperandSource,
    at: usize,
    col_stride: usize,
    k_stride: usize,
    cols: usize,
    k: usize,
    target: &mut [f32],
) {
    if col_stride == 1 {
        return source.copy_panels(Runs { at, n: k, stride: k_stride, len: cols }, target);
    }
    // In pieces that stay in L1 until they are turned.
    let mut stage = [0f32; NR * STAGE_STEPS];
    for (panel, target) in target.chunks_exact_mut(k * NR).enumerate() {
        let cols = NR.min(cols - panel * NR);
        for (l0, target) in (0..k).step_by(STAGE_STEPS).zip(target.chunks_mut(STAGE_STEPS * NR)) {
            let steps = target.len() / NR;
            let at = at + panel * NR * col_stride + l0 * k_stride;
            source.copy_block(at, (cols, col_stride), (steps, k_stride), &mut stage, STAGE_STEPS);
            // SAFETY: the CPU has AVX2, by the caller's promise; the stage has `cols` rows of `steps`, and so has the target.
            unsafe { self::panel(stage.as_ptr(), STAGE_STEPS, 1, cols, steps, target.as_mut_ptr()) };
        }
    }
}

/// Steps of k that are converted at a time, and then turned: 8 KB of 16 columns.
const STAGE_STEPS: usize = 128;

/// Steps of k that are copied at a time: long enough to fill whole lines, few enough that the source's stay in L1.
const LINES: usize = 8;

/// Prefetches rows `l0..l1` of `len` floats, which the strides hide from the hardware prefetchers.
///
/// # Safety
/// The CPU has AVX2. The addresses need not be readable: a prefetch never faults.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn prefetch(source: *const f32, stride: usize, l0: usize, l1: usize, len: usize) {
    for l in l0..l1 {
        for j in (0..len).step_by(16) {
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(l * stride + j) as *const i8);
        }
    }
}

/// Copies rows in strips, as `next_rows` cuts them, so that the floats of one strip and step of k are neighbours.
///
/// # Safety
/// The CPU has AVX2; `source` has `rows` rows of `k` columns at these strides, `target` has room for `rows * k`.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn strips(
    source: *const f32,
    row_stride: usize,
    k_stride: usize,
    rows: usize,
    k: usize,
    target: *mut f32,
) {
    // SAFETY: rows `< rows` and columns `< k` of the source are read; `rows * k` floats are written. A strip of six
    // is copied by eights where a later step of k, at least two floats on, lies both in source and in target.
    unsafe {
        for l0 in (0..k).step_by(LINES) {
            let l1 = (l0 + LINES).min(k);
            if row_stride == 1 {
                prefetch(source, k_stride, l1, (l1 + LINES).min(k), rows);
            }
            let by_eights = row_stride == 1 && k_stride >= 2 && l1 < k;
            let mut i = 0;
            while i < rows {
                let strip = next_rows(rows - i, MR);
                let (from, to) = (source.add(i * row_stride), target.add(i * k));
                if strip == 6 && by_eights {
                    for l in l0..l1 {
                        _mm256_storeu_ps(to.add(l * 6), _mm256_loadu_ps(from.add(l * k_stride)));
                    }
                } else if strip == MR && k_stride == 1 && l1 - l0 == LINES {
                    let row = |r: usize| _mm256_loadu_ps(from.add(r * row_stride + l0));
                    let rows = [row(0), row(1), row(2), row(3), row(4), row(5)];
                    store_eight::<MR>(rows, to.add(l0 * MR), MR, false);
                } else if row_stride == 1 && strip >= 4 {
                    for l in l0..l1 {
                        let (from, to) = (from.add(l * k_stride), to.add(l * strip));
                        _mm_storeu_ps(to, _mm_loadu_ps(from));
                        for r in 4..strip {
                            *to.add(r) = *from.add(r);
                        }
                    }
                } else {
                    for l in l0..l1 {
                        for r in 0..strip {
                            *to.add(l * strip + r) = *from.add(l * k_stride + r * row_stride);
                        }
                    }
                }
                i += strip;
            }
        }
    }
}

/// Transposes 8 rows of 8 floats, `stride` apart, to rows that are 16 apart.
///
/// # Safety
/// The CPU has AVX2. `source` is readable for 8 rows of 8 floats, `target` writable for as many, 16 apart.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn transpose8(source: *const f32, stride: usize, target: *mut f32) {
    // SAFETY: the caller promises 8 rows of 8 in the source and 8 rows of 8, 16 apart, in the target.
    unsafe {
        // Two rows of 4 in each register, so that half the exchange is done by the loads.
        let pair = |i: usize, off: usize| {
            let low = _mm256_castps128_ps256(_mm_loadu_ps(source.add(i * stride + off)));
            _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(source.add((i + 4) * stride + off)))
        };
        for half in 0..2 {
            let (r0, r1) = (pair(0, 4 * half), pair(1, 4 * half));
            let (r2, r3) = (pair(2, 4 * half), pair(3, 4 * half));
            let (a, b) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (c, d) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let target = target.add(4 * half * NR);
            _mm256_storeu_ps(target, _mm256_shuffle_ps::<0x44>(a, c));
            _mm256_storeu_ps(target.add(NR), _mm256_shuffle_ps::<0xee>(a, c));
            _mm256_storeu_ps(target.add(2 * NR), _mm256_shuffle_ps::<0x44>(b, d));
            _mm256_storeu_ps(target.add(3 * NR), _mm256_shuffle_ps::<0xee>(b, d));
        }
    }
}
