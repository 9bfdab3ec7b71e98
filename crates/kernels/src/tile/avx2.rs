//! The tile and its packing with AVX2 and FMA.

use std::arch::x86_64::*;

use super::{TILE_COLS, TILE_ROWS};

/// The left operand of a tile.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// Element (row, depth) lies at `row * stride + depth`.
    Rows(usize),
    /// Element (row, depth) lies at `depth * stride + row`.
    Columns(usize),
}

/// `c[rows×16] = a[rows×depth] · b[depth×16]`, or `+=`, for `rows` of 1 to 6.
///
/// # Safety
/// The CPU has AVX2 and FMA. The pointers are valid for those elements: `a` as `left` says, row `i` of `b` at
/// `i * b_stride`, row `i` of `c` at `i * c_stride`. `c` overlaps neither `a` nor `b`.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn tile<const ADD: bool>(
    rows: usize,
    depth: usize,
    a: *const f32,
    left: Left,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match left {
            Left::Rows(stride) => match rows {
                6 => fixed::<6, false, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                5 => fixed::<5, false, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                4 => fixed::<4, false, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                3 => fixed::<3, false, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                2 => fixed::<2, false, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                _ => fixed::<1, false, ADD>(depth, a, stride, b, b_stride, c, c_stride),
            },
            Left::Columns(stride) => match rows {
                6 => fixed::<6, true, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                5 => fixed::<5, true, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                4 => fixed::<4, true, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                3 => fixed::<3, true, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                2 => fixed::<2, true, ADD>(depth, a, stride, b, b_stride, c, c_stride),
                _ => fixed::<1, true, ADD>(depth, a, stride, b, b_stride, c, c_stride),
            },
        }
    }
}

/// One tile with the number of rows known: 12 sums, 2 of `b`, and 1 broadcast fill the 16 registers.
///
/// # Safety
/// As for [`tile`].
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

/// How many floats [`pack_transposed`] and [`pack_panels`] write for a `depth × cols` right operand.
pub(crate) const fn panels_len(depth: usize, cols: usize) -> usize {
    depth * super::round_cols(cols)
}

/// Packs the transpose of `src` (`cols` rows of `depth` floats, `stride` apart) into panels: the right operand of a
/// product with `srcᵀ`. Columns that fill the last panel up are zeros.
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
            // SAFETY: rows c..c+n of src exist; the panel lies inside dst.
            unsafe {
                let dst = dst.add(panel * depth * TILE_COLS + 8 * half);
                let full = if n == 8 { depth / 8 * 8 } else { 0 };
                for i in (0..full).step_by(8) {
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

/// Packs `src` (`depth` rows of `cols` floats, `stride` apart) into panels. Columns that fill the last panel up are
/// zeros.
///
/// # Safety
/// The CPU has AVX2. `src` is valid for reads of those rows, `dst` for writes of `panels_len(depth, cols)`.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn pack_panels(src: *const f32, stride: usize, cols: usize, depth: usize, dst: *mut f32) {
    for (panel, c0) in (0..cols).step_by(TILE_COLS).enumerate() {
        let n = (cols - c0).min(TILE_COLS);
        for i in 0..depth {
            // SAFETY: row i of src has columns c0..c0+n; the panel lies inside dst.
            unsafe {
                let src = src.add(i * stride + c0);
                let dst = dst.add((panel * depth + i) * TILE_COLS);
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

/// `c[m×n] = a[m×depth] · panels`, or `+=`: tiles over all rows and panels. `n` is rounded up to whole panels, so the
/// rows of `c` have room for them.
///
/// # Safety
/// As for [`tile`], for all rows and panels.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn product<const ADD: bool>(
    m: usize,
    n: usize,
    depth: usize,
    a: *const f32,
    a_stride: usize,
    panels: *const f32,
    c: *mut f32,
    c_stride: usize,
) {
    // Equal shares of rows: 8 rows are two tiles of 4, which cost less than one of 6 and one of 2.
    let tiles = m.div_ceil(TILE_ROWS).max(1);
    for (panel, c0) in (0..n).step_by(TILE_COLS).enumerate() {
        let mut row = 0;
        for t in 0..tiles {
            let rows = (m - row).div_ceil(tiles - t);
            if rows > 0 {
                // SAFETY: rows row..row+rows and this panel are inside what the caller promises.
                unsafe {
                    tile::<ADD>(
                        rows,
                        depth,
                        a.add(row * a_stride),
                        Left::Rows(a_stride),
                        panels.add(panel * depth * TILE_COLS),
                        TILE_COLS,
                        c.add(row * c_stride + c0),
                        c_stride,
                    );
                }
            }
            row += rows;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + 11) % 23) as f32 - 11.0).collect()
    }

    /// Small whole numbers: every sum is exact, so tiles equal the plain loops bit for bit.
    fn check(m: usize, n: usize, depth: usize) {
        if !Isa::detect().has_avx2() {
            return;
        }
        let (a, b) = (numbers(m * depth), numbers(n * depth));
        let ldc = super::super::round_cols(n);
        let b_t: Vec<f32> = (0..n * depth).map(|x| b[(x % n.max(1)) * depth + x / n.max(1)]).collect();
        let mut panels = [vec![f32::NAN; panels_len(depth, n)], vec![f32::NAN; panels_len(depth, n)]];
        // SAFETY: AVX2 is there, and the buffers have the lengths that the functions state.
        unsafe {
            pack_transposed(b.as_ptr(), depth, n, depth, panels[0].as_mut_ptr());
            pack_panels(b_t.as_ptr(), n, n, depth, panels[1].as_mut_ptr());
        }
        assert_eq!(panels[0], panels[1], "packing {n}×{depth}");
        let mut c = vec![1.0; m * ldc];
        // SAFETY: as above.
        unsafe { product::<true>(m, n, depth, a.as_ptr(), depth, panels[0].as_ptr(), c.as_mut_ptr(), ldc) };
        for i in 0..m {
            for j in 0..n {
                let want: f32 = (0..depth).map(|l| a[i * depth + l] * b[j * depth + l]).sum();
                assert_eq!(c[i * ldc + j], want + 1.0, "{m}×{n}×{depth} at {i},{j}");
            }
        }
        // The same with the left operand turned, one tile.
        let rows = m.min(6);
        let a_t: Vec<f32> =
            (0..rows * depth).map(|x| a[(x % rows.max(1)) * depth + x / rows.max(1)]).collect();
        if rows > 0 && n > 0 {
            let mut c = vec![0.0; rows * 16];
            let left = Left::Columns(rows);
            // SAFETY: as above.
            unsafe {
                tile::<false>(rows, depth, a_t.as_ptr(), left, panels[0].as_ptr(), 16, c.as_mut_ptr(), 16)
            };
            for (i, row) in c.chunks(16).enumerate() {
                let want: f32 = (0..depth).map(|l| a[i * depth + l] * b[l]).sum();
                assert_eq!(row[0], want, "turned {rows}×{depth}");
            }
        }
    }

    #[test]
    fn tiles_equal_plain_loops() {
        for m in [0, 1, 2, 3, 4, 5, 6, 7, 8, 13] {
            for n in [0, 1, 7, 8, 15, 16, 17, 33] {
                for depth in [0, 1, 7, 8, 9, 20] {
                    check(m, n, depth);
                }
            }
        }
    }
}
