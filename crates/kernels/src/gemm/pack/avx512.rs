//! The copies whose form follows the tiles of AVX-512: strips of twelve rows.

use std::arch::x86_64::*;

use super::super::avx512::{MR, lanes, store_turned};
use super::super::block::{NR, next_rows};
use super::prefetch;

/// Steps of k that are copied at a time: a vector of each row, where rows are contiguous along k.
const LINES: usize = 16;

/// Copies rows in strips, as [`super::strips`] does, for tiles of twelve rows.
///
/// # Safety
/// The CPU has AVX-512; `source` has `rows` rows of `k` columns at these strides, `target` has room for `rows * k`.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(in super::super) unsafe fn strips(
    source: *const f32,
    row_stride: usize,
    k_stride: usize,
    rows: usize,
    k: usize,
    target: *mut f32,
) {
    // SAFETY: rows `< rows` and columns `< k` of the source are read; `rows * k` floats are written.
    unsafe {
        for l0 in (0..k).step_by(LINES) {
            let l1 = (l0 + LINES).min(k);
            if row_stride == 1 {
                prefetch(source, k_stride, l1, (l1 + LINES).min(k), rows);
            }
            let mut i = 0;
            while i < rows {
                let strip = next_rows(rows - i, MR);
                let (from, to) = (source.add(i * row_stride), target.add(i * k));
                if row_stride == 1 {
                    let mask = lanes(strip);
                    for l in l0..l1 {
                        let row = _mm512_maskz_loadu_ps(mask, from.add(l * k_stride));
                        store_step(to, strip, l, k, row);
                    }
                } else if strip == MR && k_stride == 1 {
                    let mask = lanes(l1 - l0);
                    let mut x = [_mm512_setzero_ps(); MR];
                    for r in 0..MR {
                        x[r] = _mm512_maskz_loadu_ps(mask, from.add(r * row_stride + l0));
                    }
                    store_turned::<MR>(x, to.add(l0 * MR), MR, l1 - l0, false);
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

/// Stores step `l` of `k` of a strip of `strip` rows. A whole vector where what is beyond the step is still to be written,
/// as masked stores take longer.
///
/// # Safety
/// The CPU has AVX-512; `to` has room for `strip * k` floats, and later steps are stored later.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(in super::super) unsafe fn store_step(to: *mut f32, strip: usize, l: usize, k: usize, x: __m512) {
    // SAFETY: both stay inside the strip.
    unsafe {
        let at = to.add(l * strip);
        if l * strip + NR <= k * strip {
            _mm512_storeu_ps(at, x);
        } else {
            _mm512_mask_storeu_ps(at, lanes(strip), x);
        }
    }
}
