//! One of the seven products with AVX-512: one panel, or two, by a sweep's strips, in register tiles of 12×32.
//!
//! The twin of `tiles`, with its order of sums.

use std::arch::x86_64::*;

use super::super::avx512::{MR, PANEL_AHEAD, each, lanes, opaque, store_first};
use super::super::block::{Ahead, NR, PrefetchLines, next_rows};
use super::tiles::SumTarget;

/// Multiplies `rows` rows, in strips of `k` steps, by one panel or two; the blocks `ahead` are prefetched in the
/// meantime. The second panel is seven panels after the first.
///
/// # Safety
/// The CPU has AVX-512; `strips` has `rows * k` floats, each panel has `16 * k`; the ends have `rows` rows of `cols`, and
/// nothing else uses them. What is added to them has rows of all the panels' columns.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(super) unsafe fn product(
    rows: usize,
    k: usize,
    strips: *const f32,
    panel: *const f32,
    n_panels: usize,
    ahead: &mut [Ahead],
    ends: [Option<SumTarget>; 2],
) {
    macro_rules! rows_of {
        ($v:literal) => {
            const {
                [
                    tile::<1, $v> as TileFn,
                    tile::<2, $v>,
                    tile::<3, $v>,
                    tile::<4, $v>,
                    tile::<5, $v>,
                    tile::<6, $v>,
                    tile::<7, $v>,
                    tile::<8, $v>,
                    tile::<9, $v>,
                    tile::<10, $v>,
                    tile::<11, $v>,
                    tile::<12, $v>,
                ]
            }
        };
    }
    let kernels = if n_panels == 2 { rows_of!(2) } else { rows_of!(1) };
    let mut i = 0;
    let mut ahead = ahead.iter_mut();
    let mut block = ahead.next();
    while i < rows {
        let n = next_rows(rows - i, MR);
        let mut lines = PrefetchLines::none(panel);
        while let Some(wanted) = &mut block {
            if let Some(next) = wanted.take(k, true) {
                lines = next;
                break;
            }
            block = ahead.next();
        }
        // SAFETY: strip `i` has `n` rows, as have the ends from row `i` on.
        unsafe { kernels[n - 1](i, k, strips.add(i * k), panel, lines, &ends) };
        i += n;
    }
}

/// One tile: the sweep's row, steps of k, strip, panel, lines to prefetch, ends.
type TileFn = unsafe fn(usize, usize, *const f32, *const f32, PrefetchLines, &[Option<SumTarget>; 2]);

/// `M` rows from row `i` of the sweep on, by `V` panels.
///
/// # Safety
/// As for [`product`], for these rows.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn tile<const M: usize, const V: usize>(
    i: usize,
    k: usize,
    strip: *const f32,
    panel: *const f32,
    lines: PrefetchLines,
    ends: &[Option<SumTarget>; 2],
) {
    // SAFETY: every address is an element that the caller promises, or is only prefetched.
    unsafe {
        // C is accessed last, and is in cache by then. What waits is in cache anyway.
        for end in ends.iter().flatten().filter(|end| end.row != V * NR) {
            for r in 0..M {
                let row = end.to.add((i + r) * end.row);
                _mm_prefetch::<_MM_HINT_T0>(row as *const i8);
                _mm_prefetch::<_MM_HINT_T0>(row.add(end.cols - 1) as *const i8);
            }
        }
        let mut acc = [[_mm512_setzero_ps(); 2]; MR];
        let (mut p, mut q, mut ahead) = (strip, panel, lines.at);
        let q_next = 7 * k * NR;
        macro_rules! step {
            () => {
                (p, q, ahead) = (opaque(p), opaque(q), opaque(ahead));
                let b0 = _mm512_loadu_ps(q);
                _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(PANEL_AHEAD * NR) as *const i8);
                let b1 = if V > 1 { _mm512_loadu_ps(q.add(q_next)) } else { b0 };
                if V > 1 {
                    _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(q_next + PANEL_AHEAD * NR) as *const i8);
                }
                each!(M, |I| {
                    let a = _mm512_set1_ps(*p.add(I));
                    acc[I][0] = _mm512_fmadd_ps(a, b0, acc[I][0]);
                    if V > 1 {
                        acc[I][1] = _mm512_fmadd_ps(a, b1, acc[I][1]);
                    }
                });
                p = p.add(M);
                q = q.add(NR);
                _mm_prefetch::<_MM_HINT_T1>(ahead as *const i8);
                ahead = ahead.wrapping_add(lines.stride);
            };
        }
        let mut fours = k / 4;
        while fours > 0 {
            let n = fours.min(lines.rows / 4);
            for _ in 0..n {
                step!();
                step!();
                step!();
                step!();
            }
            fours -= n;
            ahead = lines.next(ahead);
        }
        for _ in 0..k % 4 {
            step!();
        }
        for end in ends.iter().flatten() {
            let to = end.to.add(i * end.row);
            let plus = if end.plus.is_null() { end.plus } else { end.plus.add(i * V * NR) };
            // Two panels are whole.
            let cols = lanes(end.cols.min(NR));
            each!(M, |I| {
                let at = to.add(I * end.row);
                for v in 0..V {
                    let at = at.add(v * NR);
                    let mut x = acc[I][v];
                    if !plus.is_null() {
                        x = _mm512_add_ps(x, _mm512_loadu_ps(plus.add((I * V + v) * NR)));
                    }
                    if end.add {
                        x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(cols, at));
                    }
                    store_first(at, cols, x);
                }
            });
        }
    }
}
