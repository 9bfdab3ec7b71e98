//! Maxima of 2x2 windows side by side, of few channels, with AVX-512. A vector holds as many whole pixels of the result as
//! it can: twice as many of each row above are two loads, from which two permutations take the left and the right
//! pixels of the windows.

use std::arch::x86_64::*;

use super::{Pool2d, Window};

/// More channels fill vectors by themselves.
const CHANNELS_MAX: usize = 7;
/// Lanes of a vector.
const LANES: usize = 16;

/// Whether all windows are pairs of columns side by side, and there are few channels. Rows are asked for one by one.
pub(super) fn fit(p: &Pool2d) -> bool {
    p.c <= CHANNELS_MAX && p.cols.iter().enumerate().all(|(i, w)| (w.start, w.end) == (2 * i, 2 * i + 2))
}

/// The maxima of one row of windows, two rows high, and where they were.
///
/// # Safety
/// The CPU has AVX-512, and the windows fit.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(super) unsafe fn forward_row(p: &Pool2d, x: &[f32], rows: Window, y: &mut [f32], argmax: &mut [i32]) {
    let (c, w) = (p.c, p.w);
    let (upper, lower) = (&x[rows.start * w * c..][..w * c], &x[(rows.start + 1) * w * c..][..w * c]);
    // Lane `l` is channel `l % c` of pixel `l / c` of the result.
    let per_vector = LANES / c;
    let (mut left, mut columns) = ([0; LANES], [0; LANES]);
    for l in 0..per_vector * c {
        left[l] = (l / c * 2 * c + l % c) as i32;
        columns[l] = (l / c * 2) as i32;
    }
    // SAFETY: 16 numbers of 4 bytes each.
    let (left, columns) =
        unsafe { (_mm512_loadu_si512(left.as_ptr().cast()), _mm512_loadu_si512(columns.as_ptr().cast())) };
    let right = _mm512_add_epi32(left, _mm512_set1_epi32(c as i32));
    let first = |n: usize| -> __mmask16 { if n >= LANES { !0 } else { (1 << n) - 1 } };
    let out = p.out_w();
    assert!(y.len() == out * c && argmax.len() == out * c && 2 * out <= w);
    for px in (0..out).step_by(per_vector) {
        let n = (out - px).min(per_vector) * c;
        // SAFETY: masks cut all accesses at the last pixel.
        unsafe {
            let halves = |line: &[f32]| {
                let at = line.as_ptr().add(2 * px * c);
                let a = _mm512_maskz_loadu_ps(first(2 * n), at);
                let b = _mm512_maskz_loadu_ps(first((2 * n).saturating_sub(LANES)), at.wrapping_add(LANES));
                (_mm512_permutex2var_ps(a, left, b), _mm512_permutex2var_ps(a, right, b))
            };
            let best = |(a, a_at), (b, b_at)| {
                // As `wins` has it: the later of two only if it is larger, or NaN.
                let wins = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(b, a) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(b, b);
                (_mm512_mask_blend_ps(wins, a, b), _mm512_mask_blend_epi32(wins, a_at, b_at))
            };
            let one = _mm512_set1_epi32(1);
            let at = _mm512_add_epi32(columns, _mm512_set1_epi32((rows.start * w + 2 * px) as i32));
            let below = _mm512_add_epi32(at, _mm512_set1_epi32(w as i32));
            let ((ul, ur), (ll, lr)) = (halves(upper), halves(lower));
            let above = best((ul, at), (ur, _mm512_add_epi32(at, one)));
            let (max, at) = best(above, best((ll, below), (lr, _mm512_add_epi32(below, one))));
            _mm512_mask_storeu_ps(y.as_mut_ptr().add(px * c), first(n), max);
            _mm512_mask_storeu_epi32(argmax.as_mut_ptr().add(px * c), first(n), at);
        }
    }
}
