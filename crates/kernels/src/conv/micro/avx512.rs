//! The register tiles with AVX-512: 14 rows by two panels, or 24 to 28 rows by one. A tile over two panels loads half
//! as often as it multiplies; over one it multiplies by broadcasts straight from memory, one load per multiply-add,
//! which the CPU can still sustain.

use std::arch::x86_64::*;

use super::{GatherTarget, GatherWalk, PANEL, STRIP_MAX, Sweep};

/// Rows of a tile over a strip of `width` lanes (16 or 32).
pub(super) fn rows_max(width: usize) -> usize {
    if width == STRIP_MAX { 14 } else { 24 }
}

/// The mask of the first `lanes` lanes.
#[inline]
fn mask(lanes: usize) -> __mmask16 {
    if lanes >= 16 { !0 } else { (1 << lanes) - 1 }
}

/// [`super::gather`] for strips of one or two whole panels.
///
/// # Safety
/// As there; the CPU has AVX-512.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
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
                _ => unreachable!("a tile has 1 to 24 rows"),
            }
        };
    }
    if width == STRIP_MAX {
        pick!(2: 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    } else {
        pick!(1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24)
    }
}

/// [`gather`] for a tile whose size is a constant.
///
/// # Safety
/// As for [`gather`], with `R` rows and a width of `16 * V`.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn gather_tile<const R: usize, const V: usize>(
    walk: &GatherWalk,
    a: *const f32,
    b: *const f32,
    init: *const f32,
    target: GatherTarget,
) {
    let mut acc = [[_mm512_setzero_ps(); V]; R];
    for r in 0..R {
        for v in 0..V {
            // SAFETY: `init` has `16 * V` floats.
            acc[r][v] = unsafe { _mm512_loadu_ps(init.add(PANEL * v)) };
        }
    }
    // Rows go by threes behind one pointer each, as in the AVX2 tile.
    let mut bases = [0; 8];
    for g in 0..R.div_ceil(3) {
        bases[g] = std::hint::black_box(3 * g * walk.row);
    }
    let mut b = b;
    for i in 0..walk.outer {
        for j in 0..walk.inner {
            // SAFETY: all reads are along the walk and inside the panels, by the caller's promise.
            unsafe {
                let run = a.add(i * walk.outer_step + j * walk.inner_step);
                let mut from = [run; 8];
                for g in 0..R.div_ceil(3) {
                    from[g] = run.add(bases[g]);
                }
                for _ in 0..walk.len {
                    let mut bv = [_mm512_setzero_ps(); V];
                    for v in 0..V {
                        bv[v] = _mm512_loadu_ps(b.add(v * walk.b_panel));
                    }
                    b = b.add(PANEL);
                    for g in 0..R.div_ceil(3) {
                        // Two loops, since the compiler does not unroll one that is this long.
                        for r in 3 * g..if 3 * g + 3 < R { 3 * g + 3 } else { R } {
                            let av = _mm512_set1_ps(*from[g].add((r - 3 * g) * walk.row));
                            for v in 0..V {
                                acc[r][v] = _mm512_fmadd_ps(av, bv[v], acc[r][v]);
                            }
                        }
                        from[g] = from[g].wrapping_add(1);
                    }
                }
            }
        }
    }
    let last = mask(target.lanes - PANEL * (V - 1));
    for r in 0..R {
        for v in 0..V {
            // SAFETY: the target's rows have `lanes` floats.
            unsafe {
                let at = target.ptr.add(r * target.row + PANEL * v);
                if v + 1 < V {
                    _mm512_storeu_ps(at, acc[r][v]);
                } else {
                    _mm512_mask_storeu_ps(at, last, acc[r][v]);
                }
            }
        }
    }
}

/// [`super::reduce`] for strips of one or two whole panels.
///
/// # Safety
/// As there; the CPU has AVX-512.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
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
        ($vectors:literal: $($rows:literal)*) => {
            match rows {
                // SAFETY: the caller's promise.
                $($rows => unsafe { reduce_tile::<$rows, $vectors>(lanes, sweep, a, b, out, add) },)*
                _ => unreachable!("a tile has 1 to 24 rows"),
            }
        };
    }
    if width == STRIP_MAX {
        pick!(2: 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    } else {
        pick!(1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24)
    }
}

/// [`reduce`] for a tile whose size is a constant.
///
/// # Safety
/// As for [`reduce`], with `R` rows and a width of `16 * V`.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn reduce_tile<const R: usize, const V: usize>(
    lanes: usize,
    sweep: &Sweep,
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    add: bool,
) {
    let last = mask(lanes - PANEL * (V - 1));
    let mut acc = [[_mm512_setzero_ps(); V]; R];
    for line in 0..sweep.lines {
        // SAFETY: all reads are along the sweep, by the caller's promise.
        unsafe {
            let mut a = a.add(line * sweep.a_line);
            let mut b = b.add(line * sweep.b_line);
            for _ in 0..sweep.pixels {
                let mut bv = [_mm512_setzero_ps(); V];
                for v in 0..V {
                    let at = b.add(v * sweep.b_panel);
                    bv[v] = if v + 1 < V { _mm512_loadu_ps(at) } else { _mm512_maskz_loadu_ps(last, at) };
                }
                for r in 0..R {
                    let av = _mm512_set1_ps(*a.add(r));
                    for v in 0..V {
                        acc[r][v] = _mm512_fmadd_ps(av, bv[v], acc[r][v]);
                    }
                }
                a = a.wrapping_add(sweep.a_pixel);
                b = b.wrapping_add(sweep.b_pixel);
            }
        }
    }
    for r in 0..R {
        for v in 0..V {
            // SAFETY: each panel of `out` has `R` rows of 16 floats.
            unsafe {
                let at = out.add(v * sweep.out_panel + r * PANEL);
                let sum = if add { _mm512_add_ps(_mm512_loadu_ps(at), acc[r][v]) } else { acc[r][v] };
                _mm512_storeu_ps(at, sum);
            }
        }
    }
}
