//! The inner loop with AVX-512: one tile of at most 12×32 outputs, kept in 24 registers, over one block of k.
//!
//! A step of k costs a full tile 24 multiply-adds (twelve cycles, at two per cycle) and fourteen loads: a float of each
//! row, broadcast, and sixteen of each of two neighbouring panels. Sums are computed in the order of `avx2`, so they
//! have the same bits.

use std::arch::x86_64::*;

use super::block::{NR, Tile, TileFn};

/// Rows of a full tile.
pub(super) const MR: usize = 12;

/// The kernel of tiles with `rows` rows and `cols` columns, more than 16 only if they are 32. `along_k` and `copy` as for
/// [`super::avx2::tile_fn`].
pub(super) fn tile_fn(rows: usize, cols: usize, along_k: bool, copy: bool) -> TileFn {
    macro_rules! rows_of {
        ($nv:literal, $along:literal, $copy:literal) => {
            const {
                [
                    tile::<1, $nv, $along, $copy> as TileFn,
                    tile::<2, $nv, $along, $copy>,
                    tile::<3, $nv, $along, $copy>,
                    tile::<4, $nv, $along, $copy>,
                    tile::<5, $nv, $along, $copy>,
                    tile::<6, $nv, $along, $copy>,
                    tile::<7, $nv, $along, $copy>,
                    tile::<8, $nv, $along, $copy>,
                    tile::<9, $nv, $along, $copy>,
                    tile::<10, $nv, $along, $copy>,
                    tile::<11, $nv, $along, $copy>,
                    tile::<12, $nv, $along, $copy>,
                ]
            }
        };
    }
    let table = match (cols.div_ceil(NR), along_k, copy) {
        (1, false, false) => rows_of!(1, false, false),
        (1, true, false) => rows_of!(1, true, false),
        (1, false, true) => rows_of!(1, false, true),
        (1, true, true) => rows_of!(1, true, true),
        (2, false, false) => rows_of!(2, false, false),
        (2, true, false) => rows_of!(2, true, false),
        (2, false, true) => rows_of!(2, false, true),
        (2, true, true) => rows_of!(2, true, true),
        _ => unreachable!("no kernel of {cols} columns"),
    };
    table[rows - 1]
}

/// How many steps of k ahead the kernels that copy prefetch their rows.
const AHEAD: usize = 16;

/// How many steps of k ahead rows that are read in place are prefetched.
const ROWS_AHEAD: usize = 32;

/// How many steps of k ahead the others prefetch their panels.
pub(super) const PANEL_AHEAD: usize = 8;

/// Repeats a block for each row of a tile, with `$i` known to the compiler. As a loop,
/// it would be unrolled too late, and the sums would live in memory.
macro_rules! each {
    ($m:ident, |$i:ident| $body:block) => {
        $crate::gemm::avx512::each!(@ $m, $i, $body, 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $m:ident, $i:ident, $body:block, $($n:literal)*) => {
        $(if $m > $n {
            const $i: usize = $n;
            $body
        })*
    };
}
pub(super) use each;

/// The same address, hidden from the optimiser. Otherwise it computes the addresses, and even loads the floats, of four
/// steps at once, runs out of registers, and spills them to the stack: a median of 150 GFLOP/s becomes 110.
#[inline(always)]
#[expect(
    clippy::pointers_in_nomem_asm_block,
    reason = "nothing is read through it: there are no instructions"
)]
pub(super) fn opaque(mut at: *const f32) -> *const f32 {
    // SAFETY: there are no instructions in it.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) at, options(nomem, nostack, preserves_flags)) };
    at
}

/// The sums of a tile; those beyond its rows and vectors are never touched.
type TileSums = [[__m512; 2]; MR];

/// One tile of `M` rows and up to `16 * V` columns.
///
/// # Safety
/// The CPU has AVX-512. `p`, `q`, `copy` and `c` point at what [`Tile`] describes, for `M` rows.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn tile<const M: usize, const V: usize, const ALONG_K: bool, const COPY: bool>(t: &Tile) {
    // SAFETY: the caller promises that `p`, `q`, `copy` and `c` point at what `Tile` describes; every access below
    // stays inside that: rows `< M`, columns `< 16 * V` of whole panels, k `< t.k`.
    unsafe {
        // C is accessed last, and is in cache by then.
        if t.transposed {
            for j in 0..t.cols {
                _mm_prefetch::<_MM_HINT_T0>(t.c.add(j * t.c_row) as *const i8);
            }
        } else {
            for i in 0..M {
                _mm_prefetch::<_MM_HINT_T0>(t.c.add(i * t.c_row) as *const i8);
                _mm_prefetch::<_MM_HINT_T0>(t.c.add(i * t.c_row + t.cols - 1) as *const i8);
            }
        }
        let mut acc: TileSums = [[_mm512_setzero_ps(); 2]; MR];
        let (mut p, mut q, mut copy) = (t.p, t.q, t.copy);
        let (p_stride, q_stride, q_next, copy_next) = (t.p_stride, t.q_stride, t.q_next, t.k * NR);
        let (mut ahead, ahead_stride) = (t.ahead.at, t.ahead.stride);
        // The addresses p + {0,1,2}·stride, and the same from three later rows on, need four registers, not twelve.
        let later = |rows: usize| if ALONG_K && M > rows { p.add(rows * p_stride) } else { p };
        let (mut p3, mut p6, mut p9) = (later(3), later(6), later(9));
        // A step of k, `$u` steps after where the pointers are.
        macro_rules! step {
            ($u:literal) => {
                (p, q, ahead) = (opaque(p), opaque(q), opaque(ahead));
                if ALONG_K {
                    (p3, p6, p9) = (opaque(p3), opaque(p6), opaque(p9));
                }
                let b0 = _mm512_loadu_ps(q);
                let b1 = if V > 1 { _mm512_loadu_ps(q.add(q_next)) } else { b0 };
                if COPY {
                    _mm512_storeu_ps(copy.add($u * NR), b0);
                    _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(AHEAD * q_stride) as *const i8);
                    if V > 1 {
                        _mm512_storeu_ps(copy.add(copy_next + $u * NR), b1);
                        _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(AHEAD * q_stride + NR) as *const i8);
                    }
                } else {
                    _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(PANEL_AHEAD * NR) as *const i8);
                    if V > 1 {
                        _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(q_next + PANEL_AHEAD * NR) as *const i8);
                    }
                }
                q = q.add(q_stride);
                each!(M, |I| {
                    let at =
                        if !ALONG_K { p.add(I) } else { [p, p3, p6, p9][I / 3].add((I % 3) * p_stride + $u) };
                    let a = _mm512_set1_ps(*at);
                    acc[I][0] = _mm512_fmadd_ps(a, b0, acc[I][0]);
                    if V > 1 {
                        acc[I][1] = _mm512_fmadd_ps(a, b1, acc[I][1]);
                    }
                });
                if !ALONG_K {
                    p = p.add(p_stride);
                }
                _mm_prefetch::<_MM_HINT_T1>(ahead as *const i8);
                ahead = ahead.wrapping_add(ahead_stride);
            };
        }
        macro_rules! advance {
            ($steps:literal) => {
                if ALONG_K {
                    p = p.add($steps);
                    p3 = p3.add($steps);
                    p6 = p6.add($steps);
                    p9 = p9.add($steps);
                }
                if COPY {
                    copy = copy.add($steps * NR);
                }
            };
        }
        let mut fours = t.k / 4;
        while fours > 0 {
            let n = fours.min(t.ahead.rows / 4);
            for _ in 0..n {
                step!(0);
                step!(1);
                step!(2);
                step!(3);
                if ALONG_K {
                    // The rows are far apart, and too many for the hardware prefetcher.
                    each!(M, |I| {
                        let at = [p, p3, p6, p9][I / 3].wrapping_add((I % 3) * p_stride + ROWS_AHEAD);
                        _mm_prefetch::<_MM_HINT_T0>(at as *const i8);
                    });
                }
                advance!(4);
            }
            fours -= n;
            ahead = t.ahead.next(ahead);
        }
        for _ in 0..t.k % 4 {
            step!(0);
            advance!(1);
        }
        // Only a tile of one panel may have columns beyond those of C.
        let cols = lanes(t.cols.min(NR));
        macro_rules! store {
            ($v:literal) => {
                if t.transposed {
                    let mut rows = [_mm512_setzero_ps(); MR];
                    each!(M, |I| {
                        rows[I] = acc[I][$v];
                    });
                    store_turned::<M>(rows, t.c.add($v * NR * t.c_row), t.c_row, t.cols.min(NR), t.add);
                } else {
                    each!(M, |I| {
                        let at = t.c.add(I * t.c_row + $v * NR);
                        let mut sum = acc[I][$v];
                        if t.add {
                            sum = _mm512_add_ps(_mm512_maskz_loadu_ps(cols, at), sum);
                        }
                        store_first(at, cols, sum);
                    });
                }
            };
        }
        store!(0);
        if V > 1 {
            store!(1);
        }
    }
}

/// The first `n` of sixteen lanes.
#[inline(always)]
pub(super) fn lanes(n: usize) -> __mmask16 {
    debug_assert!(n <= 16);
    ((1u32 << n) - 1) as __mmask16
}

/// Stores the lanes of the mask. Mostly these are all, and a masked store takes longer than a whole one.
///
/// # Safety
/// The CPU has AVX-512, and those floats may be written.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(super) unsafe fn store_first(at: *mut f32, mask: __mmask16, x: __m512) {
    // SAFETY: the caller's promise.
    unsafe {
        if mask == !0 {
            _mm512_storeu_ps(at, x);
        } else {
            _mm512_mask_storeu_ps(at, mask, x);
        }
    }
}

/// Stores the transpose of `M` rows of 16: `cols` rows of `M` floats, `stride` apart.
///
/// # Safety
/// The CPU has AVX-512, and those floats may be written, and read if they are added to.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(super) unsafe fn store_turned<const M: usize>(
    r: [__m512; MR],
    to: *mut f32,
    stride: usize,
    cols: usize,
    add: bool,
) {
    let zero = _mm512_setzero_ps();
    // x[j] of four rows holds column 4L + j of them in its Lth quarter.
    let quad = |r: [__m512; 4]| {
        let (lo01, hi01) = (_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
        let (lo23, hi23) = (_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
        [
            _mm512_shuffle_ps::<0x44>(lo01, lo23),
            _mm512_shuffle_ps::<0xee>(lo01, lo23),
            _mm512_shuffle_ps::<0x44>(hi01, hi23),
            _mm512_shuffle_ps::<0xee>(hi01, hi23),
        ]
    };
    let x = quad([r[0], r[1], r[2], r[3]]);
    let y = if M > 4 { quad([r[4], r[5], r[6], r[7]]) } else { [zero; 4] };
    let z = if M > 8 { quad([r[8], r[9], r[10], r[11]]) } else { [zero; 4] };
    let mask = lanes(M);
    for j in 0..4 {
        // Quarters 0 and 2, then 1 and 3, of x and y; z's come behind them.
        let (xy02, xy13) =
            (_mm512_shuffle_f32x4::<0x88>(x[j], y[j]), _mm512_shuffle_f32x4::<0xdd>(x[j], y[j]));
        let (z02, z13) = (_mm512_shuffle_f32x4::<0x88>(z[j], z[j]), _mm512_shuffle_f32x4::<0xdd>(z[j], z[j]));
        let columns = [
            _mm512_shuffle_f32x4::<0x88>(xy02, z02),
            _mm512_shuffle_f32x4::<0x88>(xy13, z13),
            _mm512_shuffle_f32x4::<0xdd>(xy02, z02),
            _mm512_shuffle_f32x4::<0xdd>(xy13, z13),
        ];
        for (quarter, column) in columns.into_iter().enumerate() {
            let col = 4 * quarter + j;
            if col < cols {
                // SAFETY: column `col` of `M` floats, by the caller's promise.
                unsafe {
                    let at = to.add(col * stride);
                    let sum =
                        if add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), column) } else { column };
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }
}
