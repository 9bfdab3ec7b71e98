//! One of the seven products: a panel by a sweep's strips, in register tiles of 6×16.
//!
//! The inner loop is that of `gemm::avx2`, for strips alone. What differs is the end, where a tile is added to what
//! earlier products left, and goes to one or two targets.

use std::arch::x86_64::*;

use super::super::avx2::MR;
use super::super::block::{Ahead, NR, next_rows};

/// Where sums go: `to = sums + plus`, or `to += sums + plus`.
#[derive(Clone, Copy)]
pub(super) struct SumTarget {
    /// The element of the sweep's first row.
    pub(super) to: *mut f32,
    /// Floats from one row to the next.
    pub(super) row: usize,
    /// How many of the tile's columns there are.
    pub(super) cols: usize,
    /// Adds to what is there.
    pub(super) add: bool,
    /// Rows of all the tile's columns that are added too, or null.
    pub(super) plus: *const f32,
}

/// How many steps of k ahead the panel is prefetched, as in `gemm::avx2`.
const PANEL_AHEAD: usize = 4;

/// Multiplies `rows` rows, in strips of `k` steps, by a panel; the blocks `ahead` are prefetched in the meantime.
///
/// # Safety
/// The CPU has AVX2 and FMA; `strips` has `rows * k` floats, `panel` has `16 * k`; the ends have `rows` rows of `cols`,
/// and nothing else uses them.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn product(
    rows: usize,
    k: usize,
    strips: *const f32,
    panel: *const f32,
    ahead: &mut [Ahead],
    ends: [Option<SumTarget>; 2],
) {
    let mut i = 0;
    let mut ahead = ahead.iter_mut();
    let mut block = ahead.next();
    while i < rows {
        let n = next_rows(rows - i, MR);
        let (mut lines, mut stride) = (panel, 0);
        while let Some(wanted) = &mut block {
            if let Some(next) = wanted.take(k / 4, false) {
                (lines, stride) = (next.at, next.stride);
                break;
            }
            block = ahead.next();
        }
        // SAFETY: strip `i` has `n` rows, as have the ends from row `i` on.
        unsafe {
            let strip = strips.add(i * k);
            match n {
                6 => tile::<6>(i, k, strip, panel, lines, stride, &ends),
                5 => tile::<5>(i, k, strip, panel, lines, stride, &ends),
                4 => tile::<4>(i, k, strip, panel, lines, stride, &ends),
                3 => tile::<3>(i, k, strip, panel, lines, stride, &ends),
                2 => tile::<2>(i, k, strip, panel, lines, stride, &ends),
                _ => tile::<1>(i, k, strip, panel, lines, stride, &ends),
            }
        }
        i += n;
    }
}

/// Repeats a block for each row of a tile, with `$i` known to the compiler, as in `gemm::avx2`.
macro_rules! each {
    ($m:ident, |$i:ident| $body:block) => {
        each!(@ $m, $i, $body, 0 1 2 3 4 5)
    };
    (@ $m:ident, $i:ident, $body:block, $($n:literal)*) => {
        $(if $m > $n {
            const $i: usize = $n;
            $body
        })*
    };
}

/// The tile of rows `i..i + M`.
///
/// # Safety
/// As for [`product`].
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize>(
    i: usize,
    k: usize,
    strip: *const f32,
    panel: *const f32,
    ahead: *const f32,
    ahead_stride: usize,
    ends: &[Option<SumTarget>; 2],
) {
    // SAFETY: every address is an element that the caller promises, or is only prefetched.
    unsafe {
        // C is accessed last, and is in cache by then.
        for end in ends.iter().flatten() {
            for r in 0..M {
                _mm_prefetch::<_MM_HINT_T0>(end.to.add((i + r) * end.row) as *const i8);
            }
        }
        let mut acc = [[_mm256_setzero_ps(); 2]; MR];
        let (mut p, mut q, mut ahead) = (strip, panel, ahead);
        macro_rules! step {
            () => {
                let (b0, b1) = (_mm256_loadu_ps(q), _mm256_loadu_ps(q.add(8)));
                _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(PANEL_AHEAD * NR) as *const i8);
                each!(M, |I| {
                    let a = _mm256_broadcast_ss(&*p.add(I));
                    acc[I][0] = _mm256_fmadd_ps(a, b0, acc[I][0]);
                    acc[I][1] = _mm256_fmadd_ps(a, b1, acc[I][1]);
                });
                p = p.add(M);
                q = q.add(NR);
            };
        }
        for _ in 0..k / 4 {
            step!();
            step!();
            step!();
            step!();
            _mm_prefetch::<_MM_HINT_T1>(ahead as *const i8);
            ahead = ahead.wrapping_add(ahead_stride);
        }
        for _ in 0..k % 4 {
            step!();
        }
        for end in ends.iter().flatten() {
            let to = end.to.add(i * end.row);
            let plus = if end.plus.is_null() { end.plus } else { end.plus.add(i * NR) };
            if end.cols < NR {
                let mut sums = [0f32; MR * NR];
                each!(M, |I| {
                    _mm256_storeu_ps(sums.as_mut_ptr().add(I * NR), acc[I][0]);
                    _mm256_storeu_ps(sums.as_mut_ptr().add(I * NR + 8), acc[I][1]);
                });
                store_edge(end, M, to, plus, &sums);
                continue;
            }
            each!(M, |I| {
                let at = to.add(I * end.row);
                let (mut x0, mut x1) = (acc[I][0], acc[I][1]);
                if !plus.is_null() {
                    x0 = _mm256_add_ps(x0, _mm256_loadu_ps(plus.add(I * NR)));
                    x1 = _mm256_add_ps(x1, _mm256_loadu_ps(plus.add(I * NR + 8)));
                }
                if end.add {
                    x0 = _mm256_add_ps(x0, _mm256_loadu_ps(at));
                    x1 = _mm256_add_ps(x1, _mm256_loadu_ps(at.add(8)));
                }
                _mm256_storeu_ps(at, x0);
                _mm256_storeu_ps(at.add(8), x1);
            });
        }
    }
}

/// An end that stops inside the tile.
///
/// # Safety
/// `to` is valid for `rows` rows of `end.cols` floats; `plus` is null, or readable for `rows` rows of as many, `NR`
/// apart.
#[inline(never)]
unsafe fn store_edge(end: &SumTarget, rows: usize, to: *mut f32, plus: *const f32, sums: &[f32; MR * NR]) {
    for i in 0..rows {
        for j in 0..end.cols {
            // SAFETY: `rows` rows of `cols` elements, by the caller's promise.
            unsafe {
                let at = to.add(i * end.row + j);
                let plus = if plus.is_null() { 0.0 } else { *plus.add(i * NR + j) };
                *at = sums[i * NR + j] + plus + if end.add { *at } else { 0.0 };
            }
        }
    }
}
