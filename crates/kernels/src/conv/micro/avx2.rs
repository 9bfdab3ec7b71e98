//! The register tiles with AVX2 and FMA: 6 rows by 16 lanes, or 12 by 8 where there are 8 channels or fewer: 12
//! accumulators, enough to cover the latency of 4 at two multiply-adds per cycle, with registers left for the operands.

use std::arch::x86_64::*;

use super::{GatherTarget, GatherWalk, PANEL, Sweep};

/// Rows of a tile over a strip of `width` lanes (8 or 16).
pub(super) fn rows_max(width: usize) -> usize {
    if width == PANEL { 6 } else { 12 }
}

/// One tile of `rows` by `width` (8 or 16) lanes; see the module's head.
///
/// # Safety
/// The CPU has AVX2 and FMA. `a` is readable along the walk for each row, `b` for `outer·inner·len·width` floats,
/// `init` for `width`; the target is writable.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn gather(
    rows: usize,
    width: usize,
    walk: &GatherWalk,
    a: *const f32,
    b: *const f32,
    init: *const f32,
    target: GatherTarget,
) {
    macro_rules! pick {
        ($vectors:literal: $($rows:literal)*) => {
            match rows {
                // SAFETY: the caller's promise.
                $($rows => unsafe { gather_tile::<$rows, $vectors>(walk, a, b, init, target) },)*
                _ => unreachable!("a tile has 1 to 12 rows"),
            }
        };
    }
    if width == PANEL { pick!(2: 1 2 3 4 5 6) } else { pick!(1: 1 2 3 4 5 6 7 8 9 10 11 12) }
}

/// [`gather`] for a tile whose size is a constant.
///
/// # Safety
/// As for [`gather`], with `R` rows and a width of `8 * V`.
#[target_feature(enable = "avx2,fma")]
unsafe fn gather_tile<const R: usize, const V: usize>(
    walk: &GatherWalk,
    a: *const f32,
    b: *const f32,
    init: *const f32,
    target: GatherTarget,
) {
    let mut acc = [[_mm256_setzero_ps(); V]; R];
    for r in 0..R {
        for v in 0..V {
            // SAFETY: `init` has `8 * V` floats.
            acc[r][v] = unsafe { _mm256_loadu_ps(init.add(8 * v)) };
        }
    }
    // Rows go by threes behind one pointer each, as far as an address can reach: base, base + row, base + 2·row. The
    // compiler would rather chain additions from row to row; it must not know how the bases are related.
    let mut bases = [0; 4];
    for g in 0..R.div_ceil(3) {
        bases[g] = std::hint::black_box(3 * g * walk.row);
    }
    let mut b = b;
    for i in 0..walk.outer {
        for j in 0..walk.inner {
            // SAFETY: all reads are along the walk and inside the panel, by the caller's promise.
            unsafe {
                let run = a.add(i * walk.outer_step + j * walk.inner_step);
                let mut from = [run; 4];
                for g in 0..R.div_ceil(3) {
                    from[g] = run.add(bases[g]);
                }
                for _ in 0..walk.len {
                    let mut bv = [_mm256_setzero_ps(); V];
                    for v in 0..V {
                        bv[v] = _mm256_loadu_ps(b.add(8 * v));
                    }
                    b = b.add(8 * V);
                    for r in 0..R {
                        let av = _mm256_broadcast_ss(&*from[r / 3].add(r % 3 * walk.row));
                        for v in 0..V {
                            acc[r][v] = _mm256_fmadd_ps(av, bv[v], acc[r][v]);
                        }
                    }
                    for g in 0..R.div_ceil(3) {
                        from[g] = from[g].wrapping_add(1);
                    }
                }
            }
        }
    }
    for r in 0..R {
        for v in 0..V {
            // SAFETY: the target's rows have `lanes` floats.
            unsafe {
                store(target.ptr.add(r * target.row + 8 * v), acc[r][v], target.lanes.saturating_sub(8 * v))
            };
        }
    }
}

/// Stores the first `lanes` lanes of `value`, all 8 if there are more.
///
/// # Safety
/// The CPU has AVX2; `ptr` is writable for that many floats.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in super::super) unsafe fn store(ptr: *mut f32, value: __m256, lanes: usize) {
    if lanes >= 8 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(ptr, value) };
    } else {
        // Masked stores are dozens of micro-operations on Zen, and a copy of unknown length is a call.
        // SAFETY: the pieces of 4, 2 and 1 floats add up to `lanes`.
        unsafe {
            let (mut ptr, mut rest) = (ptr, _mm256_castps256_ps128(value));
            if lanes & 4 != 0 {
                _mm_storeu_ps(ptr, rest);
                (ptr, rest) = (ptr.add(4), _mm256_extractf128_ps::<1>(value));
            }
            if lanes & 2 != 0 {
                _mm_storel_pd(ptr.cast(), _mm_castps_pd(rest));
                (ptr, rest) = (ptr.add(2), _mm_movehl_ps(rest, rest));
            }
            if lanes & 1 != 0 {
                _mm_store_ss(ptr, rest);
            }
        }
    }
}

/// The mask of the first `lanes` lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in super::super) fn mask(lanes: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// One tile of `rows` by `width` lanes, of which `b` has the first `lanes`; `out` has rows of `width` floats and is
/// added to if `add`, else overwritten.
///
/// # Safety
/// The CPU has AVX2 and FMA. `a` is readable along the sweep for `rows` floats, `b` for `lanes`; `out` is valid for
/// `rows * width` floats.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn reduce(
    rows: usize,
    width: usize,
    lanes: usize,
    sweep: &Sweep,
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    add: bool,
) {
    macro_rules! pick {
        ($vectors:literal, $masked:literal: $($rows:literal)*) => {
            match rows {
                // SAFETY: the caller's promise.
                $($rows => unsafe { reduce_tile::<$rows, $vectors, $masked>(lanes, sweep, a, b, out, add) },)*
                _ => unreachable!("a tile has 1 to 12 rows"),
            }
        };
    }
    match (width == PANEL, lanes == width) {
        (true, true) => pick!(2, false: 1 2 3 4 5 6),
        (true, false) => pick!(2, true: 1 2 3 4 5 6),
        (false, true) => pick!(1, false: 1 2 3 4 5 6 7 8 9 10 11 12),
        (false, false) => pick!(1, true: 1 2 3 4 5 6 7 8 9 10 11 12),
    }
}

/// [`reduce`] for a tile whose size is a constant.
///
/// # Safety
/// As for [`reduce`], with `R` rows and a width of `8 * V`.
#[target_feature(enable = "avx2,fma")]
unsafe fn reduce_tile<const R: usize, const V: usize, const MASKED: bool>(
    lanes: usize,
    sweep: &Sweep,
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    add: bool,
) {
    let last = mask(lanes - 8 * (V - 1));
    let mut acc = [[_mm256_setzero_ps(); V]; R];
    for line in 0..sweep.lines {
        // SAFETY: all reads are along the sweep, by the caller's promise.
        unsafe {
            let mut a = a.add(line * sweep.a_line);
            let mut b = b.add(line * sweep.b_line);
            for _ in 0..sweep.pixels {
                let mut bv = [_mm256_setzero_ps(); V];
                for v in 0..V {
                    bv[v] = if MASKED && v == V - 1 {
                        _mm256_maskload_ps(b.add(8 * v), last)
                    } else {
                        _mm256_loadu_ps(b.add(8 * v))
                    };
                }
                for r in 0..R {
                    let av = _mm256_broadcast_ss(&*a.add(r));
                    for v in 0..V {
                        acc[r][v] = _mm256_fmadd_ps(av, bv[v], acc[r][v]);
                    }
                }
                a = a.wrapping_add(sweep.a_pixel);
                b = b.wrapping_add(sweep.b_pixel);
            }
        }
    }
    for r in 0..R {
        for v in 0..V {
            // SAFETY: `out` has `R` rows of `8 * V` floats.
            unsafe {
                let at = out.add((r * V + v) * 8);
                let sum = if add { _mm256_add_ps(_mm256_loadu_ps(at), acc[r][v]) } else { acc[r][v] };
                _mm256_storeu_ps(at, sum);
            }
        }
    }
}
