//! The tile for few channels, with AVX-512: up to 6 channels by 4 vectors that lie along the image, 24 accumulators. Each
//! step loads 4 vectors and broadcasts 6 floats for 24 multiply-adds.

use std::arch::x86_64::*;
use std::ops::Range;

/// Channels of a tile.
pub(in super::super) const ROWS_MAX: usize = 6;
/// Vectors of a tile.
pub(in super::super) const VECTORS_MAX: usize = 4;

/// Three nested loops over `k`: how often, and how far `a` and `b` move for each step.
#[derive(Clone, Debug)]
pub(in super::super) struct Loops {
    /// The outermost loop; some vectors take part in a part of it only.
    pub(in super::super) outer: Range<usize>,
    pub(in super::super) middle: usize,
    pub(in super::super) inner: usize,
    pub(in super::super) a: [usize; 3],
    pub(in super::super) b: [usize; 3],
}

/// One vector of a tile.
#[derive(Clone, Debug)]
pub(in super::super) struct Lanes {
    /// Where it starts in `a`.
    pub(in super::super) a: *const f32,
    /// Where it goes in each row of the result.
    pub(in super::super) out: usize,
    /// How many of the 16 lanes there are.
    pub(in super::super) len: usize,
    /// The steps of the outermost loop that it takes part in.
    pub(in super::super) active: Range<usize>,
}

impl Lanes {
    fn mask(&self) -> __mmask16 {
        if self.len >= 16 { !0 } else { (1 << self.len) - 1 }
    }
}

/// One tile of `rows` channels by `lanes.len()` vectors: rows of `out` are `out_row` floats apart, start from `init`, or
/// from zero, and are added to what is there if `add`.
///
/// # Safety
/// The CPU has AVX-512. Each vector's lanes are readable along the loops' active steps, `b` is for `rows` floats, `init` has
/// `rows`; `out` is valid for the lanes of each row.
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
pub(in super::super) unsafe fn along(
    rows: usize,
    loops: &Loops,
    lanes: &[Lanes],
    b: *const f32,
    init: Option<&[f32]>,
    out: *mut f32,
    out_row: usize,
    add: bool,
) {
    macro_rules! pick {
        ($vectors:literal: $($rows:literal)*) => {{
            let Some(lanes) = lanes.first_chunk() else { return };
            match rows {
                // SAFETY: the caller's promise.
                $($rows => unsafe { tile::<$rows, $vectors>(loops, lanes, b, init, out, out_row, add) },)*
                _ => unreachable!("a tile has 1 to 6 channels"),
            }
        }};
    }
    match lanes.len() {
        1 => pick!(1: 1 2 3 4 5 6),
        2 => pick!(2: 1 2 3 4 5 6),
        3 => pick!(3: 1 2 3 4 5 6),
        _ => pick!(4: 1 2 3 4 5 6),
    }
}

/// [`along`] for a tile whose size is a constant.
///
/// # Safety
/// As for [`along`], with `R` rows and `V` vectors.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn tile<const R: usize, const V: usize>(
    loops: &Loops,
    lanes: &[Lanes; V],
    b: *const f32,
    init: Option<&[f32]>,
    out: *mut f32,
    out_row: usize,
    add: bool,
) {
    let mut acc = [[_mm512_setzero_ps(); V]; R];
    if let Some(init) = init {
        for r in 0..R {
            acc[r] = [_mm512_set1_ps(init[r]); V];
        }
    }
    for i in loops.outer.clone() {
        // A vector that does not take part is left as it is, not added zeros to: the same bits as if it were skipped.
        let mut masks = [0; V];
        for v in 0..V {
            masks[v] = if lanes[v].active.contains(&i) { lanes[v].mask() } else { 0 };
        }
        for j in 0..loops.middle {
            let mut a = [std::ptr::null(); V];
            for v in 0..V {
                a[v] = lanes[v].a.wrapping_add(i * loops.a[0] + j * loops.a[1]);
            }
            let mut b = b.wrapping_add(i * loops.b[0] + j * loops.b[1]);
            for _ in 0..loops.inner {
                let mut av = [_mm512_setzero_ps(); V];
                for v in 0..V {
                    // SAFETY: the mask is empty outside the active steps, and inside them the lanes are readable.
                    av[v] = unsafe { _mm512_maskz_loadu_ps(masks[v], a[v]) };
                    a[v] = a[v].wrapping_add(loops.a[2]);
                }
                for r in 0..R {
                    // SAFETY: `b` has `R` floats at each step.
                    let bv = _mm512_set1_ps(unsafe { *b.add(r) });
                    for v in 0..V {
                        acc[r][v] = _mm512_mask3_fmadd_ps(av[v], bv, acc[r][v], masks[v]);
                    }
                }
                b = b.wrapping_add(loops.b[2]);
            }
        }
    }
    for r in 0..R {
        for v in 0..V {
            let mask = lanes[v].mask();
            // SAFETY: each row of `out` has the lanes.
            unsafe {
                let at = out.add(r * out_row + lanes[v].out);
                let sum =
                    if add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), acc[r][v]) } else { acc[r][v] };
                _mm512_mask_storeu_ps(at, mask, sum);
            }
        }
    }
}
