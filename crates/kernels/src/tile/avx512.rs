//! The tile with AVX-512: up to 12×32 sums of the 32 registers, or 12×16 at the edge.

use std::arch::x86_64::*;

use super::{Avx512, Left, Right, TILE_COLS, Tiles};

impl Tiles for Avx512 {
    const ROWS: usize = 12;
    const COLS: usize = 2 * TILE_COLS;

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
        macro_rules! with_rows {
            ($stride:ident, $columns:literal, $panels:literal: $($n:literal)*) => {
                match rows {
                    $($n => fixed::<$n, $panels, $columns, ADD>(depth, a, $stride, b, right, c, c_stride),)*
                    _ => unreachable!("tiles have 1 to 12 rows"),
                }
            };
        }
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match (left, cols > TILE_COLS) {
                (Left::Rows(stride), true) => with_rows!(stride, false, 2: 1 2 3 4 5 6 7 8 9 10 11 12),
                (Left::Rows(stride), false) => with_rows!(stride, false, 1: 1 2 3 4 5 6 7 8 9 10 11 12),
                (Left::Columns(stride), true) => with_rows!(stride, true, 2: 1 2 3 4 5 6 7 8 9 10 11 12),
                (Left::Columns(stride), false) => with_rows!(stride, true, 1: 1 2 3 4 5 6 7 8 9 10 11 12),
            }
        }
    }
}

/// One tile with its size known: at most 24 sums, 2 of `b`, and a broadcast that serves both.
///
/// # Safety
/// As for [`Tiles::tile`].
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn fixed<const R: usize, const N: usize, const COLUMNS: bool, const ADD: bool>(
    depth: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    right: Right,
    c: *mut f32,
    c_stride: usize,
) {
    // SAFETY: every address is an element that the caller promises.
    unsafe {
        let mut sum = [[_mm512_setzero_ps(); N]; R];
        let (mut a, mut b) = (a, b);
        for _ in 0..depth {
            let mut line = [_mm512_setzero_ps(); N];
            for v in 0..N {
                line[v] = _mm512_loadu_ps(b.add(v * right.panel));
            }
            for r in 0..R {
                let x = _mm512_set1_ps(if COLUMNS { *a.add(r) } else { *a.add(r * a_stride) });
                for v in 0..N {
                    sum[r][v] = _mm512_fmadd_ps(x, line[v], sum[r][v]);
                }
            }
            a = a.wrapping_add(if COLUMNS { a_stride } else { 1 });
            b = b.wrapping_add(right.stride);
        }
        for r in 0..R {
            for v in 0..N {
                let c = c.add(r * c_stride + 16 * v);
                _mm512_storeu_ps(
                    c,
                    if ADD { _mm512_add_ps(_mm512_loadu_ps(c), sum[r][v]) } else { sum[r][v] },
                );
            }
        }
    }
}
