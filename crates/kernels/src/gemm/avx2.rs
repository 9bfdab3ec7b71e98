//! The inner loop: one tile of at most 6×16 outputs, kept in twelve registers, over one block of k.
//!
//! A Zen 3 or Haswell core starts two fused multiply-adds and two loads per cycle. A step of k costs a full tile
//! twelve multiply-adds (six cycles) and eight loads, so the adders are the limit and the loads have room to spare.
//! This file knows nothing of blocks, tasks or batches.

use std::arch::x86_64::*;

use super::block::{NR, Tile, TileFn};

/// Rows of a full tile.
pub(super) const MR: usize = 6;

/// The kernel of tiles with `rows` rows and `cols` columns, 16 at most. `along_k`: the rows' operand is contiguous
/// along k, else along its rows. `copy`: also copies the panel as it goes (for 16 columns only).
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
                ]
            }
        };
    }
    let table = match (cols.div_ceil(8), along_k, copy) {
        (1, false, false) => rows_of!(1, false, false),
        (1, true, false) => rows_of!(1, true, false),
        (2, false, false) => rows_of!(2, false, false),
        (2, true, false) => rows_of!(2, true, false),
        (2, false, true) => rows_of!(2, false, true),
        (2, true, true) => rows_of!(2, true, true),
        _ => unreachable!("no kernel of {cols} columns, copy {copy}"),
    };
    table[rows - 1]
}

/// How many steps of k ahead the kernels that copy prefetch their rows.
const AHEAD: usize = 16;

/// How many steps of k ahead the others prefetch their panel, which the first tile of a sweep finds in L2: worth 1 %
/// where k is long (91.6 becomes 92.7 GFLOP/s for 2048×1536 by 1536×384); 16 steps are worth nothing.
const PANEL_AHEAD: usize = 4;

/// Repeats a block for each row of a tile, with `$i` known to the compiler. As a loop,
/// it would be unrolled too late, and the sums would live in memory.
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

/// The sums of a tile; those beyond its rows and vectors are never touched.
type TileSums = [[__m256; 2]; MR];

/// One tile of `M` rows and up to `8 * V` columns.
///
/// # Safety
/// The CPU has AVX2 and FMA. `p`, `q`, `copy` and `c` point at what [`Tile`] describes, for `M` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize, const V: usize, const ALONG_K: bool, const COPY: bool>(t: &Tile) {
    // SAFETY: the caller promises that `p`, `q`, `copy` and `c` point at what `Tile` describes; every access below
    // stays inside that: rows `< M`, columns `< 8 * V`, k `< t.k`.
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
        let mut acc: TileSums = [[_mm256_setzero_ps(); 2]; MR];
        let (mut p, mut q, mut copy) = (t.p, t.q, t.copy);
        let (p_stride, q_stride) = (t.p_stride, t.q_stride);
        let (mut ahead, ahead_stride) = (t.ahead.at, t.ahead.stride);
        // The addresses p + {0,1,2}·stride and p3 + {0,1,2}·stride need two registers, not six.
        let mut p3 = if ALONG_K && M > 3 { p.add(3 * p_stride) } else { p };
        // A step of k, `$u` steps after where the pointers are.
        macro_rules! step {
            ($u:literal) => {
                let b0 = _mm256_loadu_ps(q);
                let b1 = if V > 1 { _mm256_loadu_ps(q.add(8)) } else { b0 };
                if COPY {
                    _mm256_storeu_ps(copy.add($u * NR), b0);
                    _mm256_storeu_ps(copy.add($u * NR + 8), b1);
                    _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(AHEAD * q_stride) as *const i8);
                }
                if !COPY {
                    _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(PANEL_AHEAD * NR) as *const i8);
                }
                q = q.add(q_stride);
                each!(M, |I| {
                    let at = if !ALONG_K {
                        p.add(I)
                    } else if I < 3 {
                        p.add(I * p_stride + $u)
                    } else {
                        p3.add((I % 3) * p_stride + $u)
                    };
                    let a = _mm256_broadcast_ss(&*at);
                    acc[I][0] = _mm256_fmadd_ps(a, b0, acc[I][0]);
                    if V > 1 {
                        acc[I][1] = _mm256_fmadd_ps(a, b1, acc[I][1]);
                    }
                });
                if !ALONG_K {
                    p = p.add(p_stride);
                }
            };
        }
        macro_rules! advance {
            ($steps:literal) => {
                if ALONG_K {
                    p = p.add($steps);
                    p3 = p3.add($steps);
                }
                if COPY {
                    copy = copy.add($steps * NR);
                }
            };
        }
        for _ in 0..t.k / 4 {
            step!(0);
            step!(1);
            step!(2);
            step!(3);
            advance!(4);
            _mm_prefetch::<_MM_HINT_T1>(ahead as *const i8);
            ahead = ahead.wrapping_add(ahead_stride);
        }
        for _ in 0..t.k % 4 {
            step!(0);
            advance!(1);
        }
        let whole = t.cols == 8 * V;
        if whole && !t.transposed {
            store::<M, V>(t, acc);
        } else if whole && M >= 4 {
            store_transposed::<M, V>(t, acc);
        } else {
            let mut sums = [0f32; MR * NR];
            each!(M, |I| {
                _mm256_storeu_ps(sums.as_mut_ptr().add(I * NR), acc[I][0]);
                _mm256_storeu_ps(sums.as_mut_ptr().add(I * NR + 8), acc[I][1]);
            });
            store_edge(t, M, &sums);
        }
    }
}

/// Stores a tile all of whose columns are inside C.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn store<const M: usize, const V: usize>(t: &Tile, acc: TileSums) {
    // SAFETY: as in `tile`.
    unsafe {
        let (c, row) = (t.c, t.c_row);
        if t.add {
            each!(M, |I| {
                let at = c.add(I * row);
                _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), acc[I][0]));
                if V > 1 {
                    let at = at.add(8);
                    _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), acc[I][1]));
                }
            });
        } else {
            each!(M, |I| {
                _mm256_storeu_ps(c.add(I * row), acc[I][0]);
                if V > 1 {
                    _mm256_storeu_ps(c.add(I * row + 8), acc[I][1]);
                }
            });
        }
    }
}

/// Stores the transpose of a tile of 4 to 6 rows: rows of C of 4 to 6 floats.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn store_transposed<const M: usize, const V: usize>(t: &Tile, acc: TileSums) {
    // SAFETY: as in `tile`.
    unsafe {
        let first = [acc[0][0], acc[1][0], acc[2][0], acc[3][0], acc[4][0], acc[5][0]];
        store_eight::<M>(first, t.c, t.c_row, t.add);
        if V > 1 {
            let second = [acc[0][1], acc[1][1], acc[2][1], acc[3][1], acc[4][1], acc[5][1]];
            store_eight::<M>(second, t.c.add(8 * t.c_row), t.c_row, t.add);
        }
    }
}

/// Stores the transpose of `M` rows of 8 as eight rows of `M` floats: four, then what is left.
///
/// # Safety
/// The CPU has AVX2. `c` is valid for eight rows of `M` floats, `c_row` apart.
#[inline(always)]
pub(super) unsafe fn store_eight<const M: usize>(r: [__m256; MR], c: *mut f32, c_row: usize, add: bool) {
    // SAFETY: the caller promises eight rows of M floats at `c`.
    unsafe {
        // A 4×4 transpose in each half: x<j> holds column j below and column j + 4 above.
        let (lo01, hi01) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
        let (lo23, hi23) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
        let x0 = _mm256_shuffle_ps::<0x44>(lo01, lo23);
        let x1 = _mm256_shuffle_ps::<0xee>(lo01, lo23);
        let x2 = _mm256_shuffle_ps::<0x44>(hi01, hi23);
        let x3 = _mm256_shuffle_ps::<0xee>(hi01, hi23);
        // Rows 4 and 5 as pairs: columns 0 and 1 of each half, then 2 and 3.
        let (y01, y23) = (_mm256_unpacklo_ps(r[4], r[5]), _mm256_unpackhi_ps(r[4], r[5]));
        macro_rules! row {
            ($j:literal, $x:expr, $y:expr) => {
                let at = c.add($j * c_row);
                let sum = if add { _mm_add_ps(_mm_loadu_ps(at), $x) } else { $x };
                _mm_storeu_ps(at, sum);
                let at = at.add(4);
                if M == 5 {
                    let sum = if add { _mm_add_ss(_mm_load_ss(at), $y) } else { $y };
                    _mm_store_ss(at, sum);
                } else if M == 6 {
                    let old = if add { _mm_loadl_epi64(at as *const __m128i) } else { _mm_setzero_si128() };
                    let sum = if add { _mm_add_ps(_mm_castsi128_ps(old), $y) } else { $y };
                    _mm_storel_epi64(at as *mut __m128i, _mm_castps_si128(sum));
                }
            };
        }
        let low = |v: __m256| _mm256_castps256_ps128(v);
        let high = |v: __m256| _mm256_extractf128_ps::<1>(v);
        let upper = |v: __m128| _mm_movehl_ps(v, v);
        row!(0, low(x0), low(y01));
        row!(1, low(x1), upper(low(y01)));
        row!(2, low(x2), low(y23));
        row!(3, low(x3), upper(low(y23)));
        row!(4, high(x0), high(y01));
        row!(5, high(x1), upper(high(y01)));
        row!(6, high(x2), high(y23));
        row!(7, high(x3), upper(high(y23)));
    }
}

/// Stores what the two above do not: columns that stop inside a vector, and transposes of low tiles.
///
/// # Safety
/// `t.c` is valid for `rows` rows of `t.cols` floats, or for their transpose.
#[inline(never)]
unsafe fn store_edge(t: &Tile, rows: usize, sums: &[f32; MR * NR]) {
    let (row, col) = if t.transposed { (1, t.c_row) } else { (t.c_row, 1) };
    for i in 0..rows {
        for j in 0..t.cols {
            // SAFETY: as in `tile`; only `t.cols` columns of C are touched.
            unsafe {
                let at = t.c.add(i * row + j * col);
                *at = if t.add { *at + sums[i * NR + j] } else { sums[i * NR + j] };
            }
        }
    }
}
