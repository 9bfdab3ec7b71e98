//! The five transforms of F(4x4, 3x3), eight channels at a time. With channels last a vector of channels is one load,
//! so each transform is the same few lines of arithmetic on whole vectors, first along columns, then along rows.
//!
//! ```text
//!      ⎡4  0 −5  0 1 0⎤        ⎡  6   0   0⎤
//!      ⎢0 −4 −4  1 1 0⎥        ⎢ −4  −4  −4⎥         ⎡1 1  1 1  1 0⎤
//! Bᵀ = ⎢0  4 −4 −1 1 0⎥   24G= ⎢ −4   4  −4⎥    Aᵀ = ⎢0 1 −1 2 −2 0⎥
//!      ⎢0 −2 −1  2 1 0⎥        ⎢  1   2   4⎥         ⎢0 1  1 4  4 0⎥
//!      ⎢0  2 −1 −2 1 0⎥        ⎢  1  −2   4⎥         ⎣0 1 −1 8 −8 1⎦
//!      ⎣0  4  0 −5 0 1⎦        ⎣  0   0  24⎦
//! ```
//!
//! Each [`Line`] below is one of them on a vector of vectors; [`square`] applies one to both sides of a square.

use std::arch::x86_64::*;

use super::super::micro::{mask, store};
use super::POINTS;

/// Eight channels. Its operations may only run in functions with AVX2 and FMA enabled, into which they are inlined.
#[derive(Clone, Copy)]
struct V(__m256);

impl V {
    #[inline(always)]
    fn splat(v: f32) -> V {
        // SAFETY: only used where AVX2 is enabled.
        V(unsafe { _mm256_set1_ps(v) })
    }
    /// `self · k + add`.
    #[inline(always)]
    fn mul_add(self, k: f32, add: V) -> V {
        // SAFETY: as above.
        V(unsafe { _mm256_fmadd_ps(self.0, _mm256_set1_ps(k), add.0) })
    }
    #[inline(always)]
    fn scale(self, k: f32) -> V {
        // SAFETY: as above.
        V(unsafe { _mm256_mul_ps(self.0, _mm256_set1_ps(k)) })
    }
}

impl std::ops::Add for V {
    type Output = V;
    #[inline(always)]
    fn add(self, other: V) -> V {
        // SAFETY: only used where AVX2 is enabled.
        V(unsafe { _mm256_add_ps(self.0, other.0) })
    }
}

impl std::ops::Sub for V {
    type Output = V;
    #[inline(always)]
    fn sub(self, other: V) -> V {
        // SAFETY: only used where AVX2 is enabled.
        V(unsafe { _mm256_sub_ps(self.0, other.0) })
    }
}

/// One transform along one dimension. A trait and not a function argument: calls through `Fn` go by a shim without
/// AVX2, into which nothing is inlined.
trait Line<const I: usize, const O: usize> {
    /// The matrix times a column.
    fn apply(column: [V; I]) -> [V; O];
}

/// `Bᵀ d`.
struct Patch;

impl Line<6, 6> for Patch {
    #[inline(always)]
    fn apply(d: [V; 6]) -> [V; 6] {
        let p = d[2].mul_add(-4.0, d[4]);
        let q = d[1].mul_add(-4.0, d[3]);
        let r = d[4] - d[2];
        let s = d[3] - d[1];
        [
            d[0].mul_add(4.0, d[2].mul_add(-5.0, d[4])),
            p + q,
            p - q,
            s.mul_add(2.0, r),
            s.mul_add(-2.0, r),
            d[1].mul_add(4.0, d[3].mul_add(-5.0, d[5])),
        ]
    }
}

/// `Aᵀ m`.
struct Tile;

impl Line<6, 4> for Tile {
    #[inline(always)]
    fn apply(m: [V; 6]) -> [V; 4] {
        let (p, q) = (m[1] + m[2], m[1] - m[2]);
        let (r, s) = (m[3] + m[4], m[3] - m[4]);
        [m[0] + p + r, s.mul_add(2.0, q), r.mul_add(4.0, p), s.mul_add(8.0, q) + m[5]]
    }
}

/// `A y`.
struct Spread;

impl Line<4, 6> for Spread {
    #[inline(always)]
    fn apply(y: [V; 4]) -> [V; 6] {
        let (p, q) = (y[0] + y[2], y[1] + y[3]);
        let (r, s) = (y[2].mul_add(4.0, y[0]), y[3].mul_add(8.0, y[1].scale(2.0)));
        [y[0], p + q, p - q, r + s, r - s, y[3]]
    }
}

/// `G g`.
struct Filter;

impl Line<3, 6> for Filter {
    #[inline(always)]
    fn apply(g: [V; 3]) -> [V; 6] {
        let p = (g[0] + g[2]).scale(-1.0 / 6.0);
        let q = g[1].scale(1.0 / 6.0);
        let r = g[0].mul_add(1.0 / 24.0, g[2].scale(1.0 / 6.0));
        let s = g[1].scale(1.0 / 12.0);
        [g[0].scale(0.25), p - q, p + q, r + s, r - s, g[2]]
    }
}

/// `Gᵀ u`.
struct Unfilter;

impl Line<6, 3> for Unfilter {
    #[inline(always)]
    fn apply(u: [V; 6]) -> [V; 3] {
        let (p, q) = (u[1] + u[2], u[2] - u[1]);
        let (r, s) = (u[3] + u[4], u[3] - u[4]);
        [
            u[0].mul_add(0.25, r.mul_add(1.0 / 24.0, p.scale(-1.0 / 6.0))),
            q.mul_add(1.0 / 6.0, s.scale(1.0 / 12.0)),
            (r - p).mul_add(1.0 / 6.0, u[5]),
        ]
    }
}

/// Applies a line's transform to the columns and then to the rows of a square.
#[inline(always)]
fn square<const I: usize, const O: usize, L: Line<I, O>>(
    load: impl Fn(usize, usize) -> V,
    mut store: impl FnMut(usize, usize, V),
) {
    let mut half = [[V::splat(0.0); I]; O];
    for j in 0..I {
        let mut column = [V::splat(0.0); I];
        for i in 0..I {
            column[i] = load(i, j);
        }
        let column = L::apply(column);
        for i in 0..O {
            half[i][j] = column[i];
        }
    }
    for i in 0..O {
        let row = L::apply(half[i]);
        for j in 0..O {
            store(i, j, row[j]);
        }
    }
}

/// Prefetches the cache line at channel `c` of each pixel, once a line.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn ask_for(pixels: &[*const f32], c: usize) {
    if c.is_multiple_of(16) {
        for pixel in pixels {
            _mm_prefetch::<_MM_HINT_T0>(pixel.wrapping_add(c).cast());
        }
    }
}

/// A full load, or the first `lanes` lanes and zeros.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn load<const FULL: bool>(ptr: *const f32, lanes: usize) -> V {
    // SAFETY: the caller has that many floats there.
    V(unsafe { if FULL { _mm256_loadu_ps(ptr) } else { _mm256_maskload_ps(ptr, mask(lanes)) } })
}

/// `Bᵀ d B` of the patch behind a tile: point `p` of channel `c` goes to `out[p * plane + c]`, in whole vectors.
/// Meanwhile the pixels of `ahead`, the next patch, are asked for: 36 short streams are more than the CPU's own
/// prefetcher follows. It is worth
/// 2 to 5 % of a whole pass of `cnn`.
///
/// # Safety
/// The CPU has AVX2 and FMA; the pixels have `channels` floats; `out` has whole vectors for them in 36 planes.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn patch(
    pixels: &[*const f32; POINTS],
    ahead: &[*const f32; POINTS],
    channels: usize,
    out: *mut f32,
    plane: usize,
) {
    let whole = channels / 8 * 8;
    for c in (0..whole).step_by(8) {
        ask_for(ahead, c);
        // SAFETY: the caller's promise.
        unsafe { patch_vector::<true>(pixels, c, 8, out, plane) };
    }
    if whole < channels {
        // SAFETY: as above.
        unsafe { patch_vector::<false>(pixels, whole, channels - whole, out, plane) };
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn patch_vector<const FULL: bool>(
    pixels: &[*const f32; POINTS],
    c: usize,
    lanes: usize,
    out: *mut f32,
    plane: usize,
) {
    square::<6, 6, Patch>(
        // SAFETY: the caller's promise.
        |i, j| unsafe { load::<FULL>(pixels[i * 6 + j].add(c), lanes) },
        // SAFETY: the caller's promise.
        |i, j, v| unsafe { _mm256_storeu_ps(out.add((i * 6 + j) * plane + c), v.0) },
    );
}

/// `A dy Aᵀ` of a tile's 16 pixels, eight channels from `c` on, of which there are `lanes`: point `p` goes to
/// `out[p * plane ..]`.
///
/// # Safety
/// The CPU has AVX2 and FMA; the pixels have `c + lanes` floats; `out` has a vector in 36 planes.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn spread(
    pixels: &[*const f32; 16],
    ahead: &[*const f32; 16],
    c: usize,
    lanes: usize,
    out: *mut f32,
    plane: usize,
) {
    ask_for(ahead, c);
    if lanes >= 8 {
        // SAFETY: the caller's promise.
        unsafe { spread_vector::<true>(pixels, c, 8, out, plane) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { spread_vector::<false>(pixels, c, lanes, out, plane) }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn spread_vector<const FULL: bool>(
    pixels: &[*const f32; 16],
    c: usize,
    lanes: usize,
    out: *mut f32,
    plane: usize,
) {
    square::<4, 6, Spread>(
        // SAFETY: the caller's promise.
        |i, j| unsafe { load::<FULL>(pixels[i * 4 + j].add(c), lanes) },
        // SAFETY: the caller's promise.
        |i, j, v| unsafe { _mm256_storeu_ps(out.add((i * 6 + j) * plane), v.0) },
    );
}

/// Where a tile of output goes.
pub(super) struct TileTarget {
    /// The first pixel.
    pub(super) ptr: *mut f32,
    /// Floats from one row of pixels to the next.
    pub(super) row: usize,
    /// Pixels that exist: fewer than 4 at the image's edges.
    pub(super) rows: usize,
    /// As `rows`.
    pub(super) cols: usize,
    /// Channels of a pixel.
    pub(super) channels: usize,
}

/// `Aᵀ m A + bias` of one tile, from `m[p * plane + c]`.
///
/// # Safety
/// The CPU has AVX2 and FMA; `m` has whole vectors in 36 planes; the target's pixels are writable.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn tile(m: *const f32, plane: usize, bias: Option<&[f32]>, target: &TileTarget) {
    for c in (0..target.channels).step_by(8) {
        let lanes = target.channels - c;
        let mut add = [0.0; 8];
        if let Some(bias) = bias {
            let n = lanes.min(8);
            add[..n].copy_from_slice(&bias[c..c + n]);
        }
        // SAFETY: the caller's promise.
        unsafe {
            let add = V(_mm256_loadu_ps(add.as_ptr()));
            let ptr = target.ptr.add(c);
            let from = |i: usize, j: usize| V(_mm256_loadu_ps(m.add((i * 6 + j) * plane + c)));
            if lanes >= 8 && target.rows == 4 && target.cols == 4 {
                square::<6, 4, Tile>(from, |i, j, v| {
                    _mm256_storeu_ps(ptr.add(i * target.row + j * target.channels), (v + add).0);
                });
            } else {
                square::<6, 4, Tile>(from, |i, j, v| {
                    if i < target.rows && j < target.cols {
                        store(ptr.add(i * target.row + j * target.channels), (v + add).0, lanes);
                    }
                });
            }
        }
    }
}

/// `G g Gᵀ` of eight filters: tap `k` is read from `taps[k * tap_step ..]`, point `p` goes to `out[p * plane ..]`.
///
/// # Safety
/// The CPU has AVX2 and FMA; there are nine vectors to read and 36 to write.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn filter(taps: *const f32, tap_step: usize, out: *mut f32, plane: usize) {
    square::<3, 6, Filter>(
        // SAFETY: the caller's promise.
        |i, j| V(unsafe { _mm256_loadu_ps(taps.add((i * 3 + j) * tap_step)) }),
        // SAFETY: the caller's promise.
        |i, j, v| unsafe { _mm256_storeu_ps(out.add((i * 6 + j) * plane), v.0) },
    );
}

/// `Gᵀ u G` of eight filters: the reverse of [`filter`] in shapes.
///
/// # Safety
/// The CPU has AVX2 and FMA; there are 36 vectors to read and nine to write.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn unfilter(sums: *const f32, plane: usize, taps: *mut f32, tap_step: usize) {
    square::<6, 3, Unfilter>(
        // SAFETY: the caller's promise.
        |i, j| V(unsafe { _mm256_loadu_ps(sums.add((i * 6 + j) * plane)) }),
        // SAFETY: the caller's promise.
        |i, j, v| unsafe { _mm256_storeu_ps(taps.add((i * 3 + j) * tap_step), v.0) },
    );
}
