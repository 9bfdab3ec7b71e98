//! The tile with AVX2 and FMA, and the packing, which serves wider tiles too.

use std::arch::x86_64::*;

use super::{Avx2, Left, Right, TILE_COLS, Tiles};

impl Tiles for Avx2 {
    const ROWS: usize = 6;
    const COLS: usize = TILE_COLS;

    unsafe fn tile<const ADD: bool>(
        rows: usize,
        cols: usize,
        depth: usize,
        a: *const f32,
        left: Left,
        b: *const f32,
        right: Right,
        c: *mut f32,
        c_stride: usize,
    ) {
        debug_assert_eq!(cols, TILE_COLS, "tiles are a panel wide");
        macro_rules! with_rows {
            ($stride:ident, $columns:literal: $($n:literal)*) => {
                match rows {
                    $($n => fixed::<$n, $columns, ADD>(depth, a, $stride, b, right.stride, c, c_stride),)*
                    _ => unreachable!("tiles have 1 to 6 rows"),
                }
            };
        }
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match left {
                Left::Rows(stride) => with_rows!(stride, false: 1 2 3 4 5 6),
                Left::Columns(stride) => with_rows!(stride, true: 1 2 3 4 5 6),
            }
        }
    }
}

/// One tile with the number of rows known: 12 sums, 2 of `b`, and 1 broadcast fill the 16 registers.
///
/// # Safety
/// As for [`Tiles::tile`].
#[target_feature(enable = "avx2,fma")]
unsafe fn fixed<const R: usize, const COLUMNS: bool, const ADD: bool>(
    depth: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
) {
    // SAFETY: every address is an element that the caller promises.
    unsafe {
        let mut sum = [[_mm256_setzero_ps(); 2]; R];
        if COLUMNS {
            let (mut a, mut b) = (a, b);
            for _ in 0..depth {
                let (b0, b1) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8)));
                for r in 0..R {
                    let v = _mm256_broadcast_ss(&*a.add(r));
                    sum[r][0] = _mm256_fmadd_ps(v, b0, sum[r][0]);
                    sum[r][1] = _mm256_fmadd_ps(v, b1, sum[r][1]);
                }
                a = a.wrapping_add(a_stride);
                b = b.wrapping_add(b_stride);
            }
        } else {
            let mut row = [a; R];
            for r in 0..R {
                row[r] = a.add(r * a_stride);
            }
            let mut b = b;
            for i in 0..depth {
                let (b0, b1) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8)));
                for r in 0..R {
                    let v = _mm256_broadcast_ss(&*row[r].add(i));
                    sum[r][0] = _mm256_fmadd_ps(v, b0, sum[r][0]);
                    sum[r][1] = _mm256_fmadd_ps(v, b1, sum[r][1]);
                }
                b = b.wrapping_add(b_stride);
            }
        }
        for r in 0..R {
            let c = c.add(r * c_stride);
            if ADD {
                sum[r][0] = _mm256_add_ps(_mm256_loadu_ps(c), sum[r][0]);
                sum[r][1] = _mm256_add_ps(_mm256_loadu_ps(c.add(8)), sum[r][1]);
            }
            _mm256_storeu_ps(c, sum[r][0]);
            _mm256_storeu_ps(c.add(8), sum[r][1]);
        }
    }
}

/// How many rows ahead [`pack_panels`] prefetches.
const AHEAD: usize = 8;

/// How many floats [`pack_transposed`] and [`pack_panels`] write for a `depth × cols` right operand.
pub(crate) const fn panels_len(depth: usize, cols: usize) -> usize {
    depth * super::round_cols(cols)
}

/// Packs the transpose of `src` (`cols` rows of `depth` floats, `stride` apart) into panels: the right operand of a
/// product with `srcᵀ`. Columns that pad the last panel are zeros.
///
/// # Safety
/// The CPU has AVX2. `src` is valid for reads of those rows, `dst` for writes of `panels_len(depth, cols)`.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn pack_transposed(
    src: *const f32,
    stride: usize,
    cols: usize,
    depth: usize,
    dst: *mut f32,
) {
    for (panel, c0) in (0..cols).step_by(TILE_COLS).enumerate() {
        for half in 0..2 {
            let c = c0 + 8 * half;
            let n = cols.saturating_sub(c).min(8);
            // SAFETY: rows c..c+n of src exist; the panel is inside dst.
            unsafe {
                let dst = dst.add(panel * depth * TILE_COLS + 8 * half);
                let full = if n == 8 { depth / 8 * 8 } else { 0 };
                for i in (0..full).step_by(8) {
                    // Prefetches the rows after this panel: they are too far apart for the hardware prefetcher.
                    for j in 0..if i % TILE_COLS == 0 { 8 } else { 0 } {
                        let next = src.wrapping_add((c + TILE_COLS + j) * stride + i);
                        _mm_prefetch::<_MM_HINT_T0>(next.cast());
                    }
                    transpose8(src.add(c * stride + i), stride, dst.add(i * TILE_COLS), TILE_COLS);
                }
                for i in full..depth {
                    for j in 0..8 {
                        *dst.add(i * TILE_COLS + j) =
                            if j < n { *src.add((c + j) * stride + i) } else { 0.0 };
                    }
                }
            }
        }
    }
}

/// Packs `src` (`depth` rows of `cols` floats, `stride` apart) into panels. Columns that pad the last panel are zeros.
///
/// # Safety
/// The CPU has AVX2. `src` is valid for reads of those rows, `dst` for writes of `panels_len(depth, cols)`.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn pack_panels(src: *const f32, stride: usize, cols: usize, depth: usize, dst: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { pack_panel_rows(src, stride, cols, depth, depth, dst) };
}

/// As [`pack_panels`], for `rows` of a panel's `depth` rows: `dst` is where the first of them begins in the first panel.
///
/// # Safety
/// The CPU has AVX2. `src` is valid for reads of those rows, `dst` for writes of them in every panel.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn pack_panel_rows(
    src: *const f32,
    stride: usize,
    cols: usize,
    rows: usize,
    depth: usize,
    dst: *mut f32,
) {
    for i in 0..rows {
        for (panel, c0) in (0..cols).step_by(TILE_COLS).enumerate() {
            let n = (cols - c0).min(TILE_COLS);
            // SAFETY: row i of src has columns c0..c0+n; the panel is inside dst; what is prefetched may be anywhere.
            unsafe {
                let src = src.add(i * stride + c0);
                let dst = dst.add((panel * depth + i) * TILE_COLS);
                _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(AHEAD * stride).cast());
                if n == TILE_COLS {
                    _mm256_storeu_ps(dst, _mm256_loadu_ps(src));
                    _mm256_storeu_ps(dst.add(8), _mm256_loadu_ps(src.add(8)));
                } else {
                    for j in 0..TILE_COLS {
                        *dst.add(j) = if j < n { *src.add(j) } else { 0.0 };
                    }
                }
            }
        }
    }
}

/// `dst[j][i] = src[i][j]` for an 8×8 block.
///
/// # Safety
/// The CPU has AVX2; 8 rows of 8 floats are readable at `src` and writable at `dst`, at their strides.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn transpose8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
    // SAFETY: rows 0..8 of both, by the caller's promise.
    unsafe {
        // Rows r and r + 4 share a register, so that all crossing of lanes is done by the loads.
        let pair = |r: usize, half: usize| {
            let low = _mm256_castps128_ps256(_mm_loadu_ps(src.add(r * src_stride + 4 * half)));
            _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(src.add((r + 4) * src_stride + 4 * half)))
        };
        for half in 0..2 {
            let (r0, r1, r2, r3) = (pair(0, half), pair(1, half), pair(2, half), pair(3, half));
            let (lo01, hi01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (lo23, hi23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let dst = dst.add(4 * half * dst_stride);
            _mm256_storeu_ps(dst, _mm256_shuffle_ps::<0x44>(lo01, lo23));
            _mm256_storeu_ps(dst.add(dst_stride), _mm256_shuffle_ps::<0xEE>(lo01, lo23));
            _mm256_storeu_ps(dst.add(2 * dst_stride), _mm256_shuffle_ps::<0x44>(hi01, hi23));
            _mm256_storeu_ps(dst.add(3 * dst_stride), _mm256_shuffle_ps::<0xEE>(hi01, hi23));
        }
    }
}
