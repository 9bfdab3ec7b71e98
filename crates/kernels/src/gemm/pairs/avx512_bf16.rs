//! The kernel of [`super::PairOrder::Pairs`], with VDPBF16PS: tiles of at most 8×48 outputs, kept in 24 registers.
//!
//! A pair of steps of k costs a full tile 24 multiply-adds of pairs and eleven loads: a pair of each row, broadcast, and
//! sixteen of each of three panels.

use std::arch::x86_64::*;

use super::super::avx512::each;
use super::blocks::{UNIT, UNIT_LEN};
use super::task::PackedBlock;

/// Rows of a full tile: half a strip.
const MR: usize = 8;
/// Panels of a full tile.
const NV: usize = 3;

/// Multiplies a block.
///
/// # Safety
/// The CPU has AVX512-BF16; the pointers are as [`PackedBlock`] says, and nothing else accesses C.
pub(super) unsafe fn multiply(block: &PackedBlock) {
    for panel in (0..block.panels).step_by(NV) {
        let v = NV.min(block.panels - panel);
        for row in (0..block.rows).step_by(MR) {
            let tile = tile_fn(MR.min(block.rows - row), v);
            let (a, b, c) = block.at(row, panel);
            // SAFETY: these rows are inside the strips and C, these panels inside B and C.
            unsafe { tile(block, a, b, c) };
        }
    }
}

type PairTileFn = unsafe fn(&PackedBlock, *const u32, *const u32, *mut f32);

/// The kernel of tiles with this many rows and panels.
fn tile_fn(rows: usize, panels: usize) -> PairTileFn {
    macro_rules! rows_of {
        ($nv:literal) => {
            const {
                [
                    tile::<1, $nv> as PairTileFn,
                    tile::<2, $nv>,
                    tile::<3, $nv>,
                    tile::<4, $nv>,
                    tile::<5, $nv>,
                    tile::<6, $nv>,
                    tile::<7, $nv>,
                    tile::<8, $nv>,
                ]
            }
        };
    }
    [rows_of!(1), rows_of!(2), rows_of!(3)][panels - 1][rows - 1]
}

/// The sums of a tile. There are as many rows as `each!` can name; those beyond the tile's are never touched.
type PairTileSums = [[__m512; NV]; 12];

/// One tile of `M` rows and `V` panels; `a`, `b` and `c` are its first elements.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn tile<const M: usize, const V: usize>(
    block: &PackedBlock,
    mut a: *const u32,
    mut b: *const u32,
    c: *mut f32,
) {
    let (c_row, next) = (block.c_row, block.b_next);
    // SAFETY: rows `< M` of a strip, panels `< V`, all runs of them, and as much of C.
    unsafe {
        let mut acc: PairTileSums = [[_mm512_setzero_ps(); NV]; 12];
        if block.add {
            each!(M, |I| {
                for v in 0..V {
                    acc[I][v] = _mm512_loadu_ps(c.add(I * c_row + v * UNIT));
                }
            });
        }
        for _ in 0..block.runs {
            for p in 0..UNIT {
                let pairs = |v: usize| _mm512_loadu_si512(b.add(v * next + p * UNIT).cast());
                let b0 = pairs(0);
                let b1 = if V > 1 { pairs(1) } else { b0 };
                let b2 = if V > 2 { pairs(2) } else { b0 };
                each!(M, |I| {
                    let x = _mm512_set1_epi32(*a.add(I * UNIT + p) as i32);
                    acc[I][0] = add_pairs(acc[I][0], x, b0);
                    if V > 1 {
                        acc[I][1] = add_pairs(acc[I][1], x, b1);
                    }
                    if V > 2 {
                        acc[I][2] = add_pairs(acc[I][2], x, b2);
                    }
                });
            }
            a = a.add(UNIT_LEN);
            b = b.add(UNIT_LEN);
        }
        each!(M, |I| {
            for v in 0..V {
                _mm512_storeu_ps(c.add(I * c_row + v * UNIT), acc[I][v]);
            }
        });
    }
}

/// `sum + a·b`, of both elements of each pair.
#[inline]
#[target_feature(enable = "avx512bf16,avx512f")]
fn add_pairs(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: both types are 64 bytes of any bits.
    let [a, b] = [a, b].map(|x| unsafe { std::mem::transmute::<__m512i, __m512bh>(x) });
    _mm512_dpbf16_ps(sum, a, b)
}
