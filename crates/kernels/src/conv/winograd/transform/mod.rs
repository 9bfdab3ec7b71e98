//! The five transforms of F(4x4, 3x3), a vector of channels at a time. With channels last a vector of channels is one
//! load, so each transform is the same few lines of arithmetic on whole vectors, first along columns, then along rows.
//!
//! With the points 0, ±a, ±b and ∞, `s = a² + b²`, `t = a² b²`, `u = 2a² (a² − b²)` and `v = 2b² (b² − a²)`:
//!
//! ```text
//!      ⎡t    0   −s  0 1 0⎤        ⎡1/t    0    0⎤
//!      ⎢0 −ab²  −b²  a 1 0⎥        ⎢1/u  a/u a²/u⎥         ⎡1  1   1  1   1 0⎤
//! Bᵀ = ⎢0  ab²  −b² −a 1 0⎥    G = ⎢1/u −a/u a²/u⎥    Aᵀ = ⎢0  a  −a  b  −b 0⎥
//!      ⎢0 −a²b  −a²  b 1 0⎥        ⎢1/v  b/v b²/v⎥         ⎢0 a²  a² b²  b² 0⎥
//!      ⎢0  a²b  −a² −b 1 0⎥        ⎢1/v −b/v b²/v⎥         ⎣0 a³ −a³ b³ −b³ 1⎦
//!      ⎣0    t    0 −s 0 1⎦        ⎣  0    0    1⎦
//! ```
//!
//! [`line`] has `a`, `b` and the errors that chose them.
//!
//! Each is written once, over [`vector::Vector`], and instantiated for every instruction set by [`levels`].

mod line;
mod vector;

use std::arch::x86_64::*;

use super::super::micro::padded;
use super::POINTS;
use crate::Isa;
use line::{Filter, OutputTile, Patch, Spread, Unfilter, square};
use vector::Vector;

/// Makes `unsafe fn name(isa, args..)` from an `#[inline(always)]` body that is generic over the vector.
macro_rules! levels {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        pub(super) unsafe fn $name(isa: Isa, $($arg: $ty),*) {
            /// Eight channels at a time.
            ///
            /// # Safety
            /// That of the function around it.
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $body::<__m256>($($arg),*) }
            }
            /// Sixteen channels at a time.
            ///
            /// # Safety
            /// That of the function around it; the CPU has AVX-512.
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $body::<__m512>($($arg),*) }
            }
            // SAFETY: the caller's promise; an `Isa` comes from detection alone.
            unsafe { if isa.has_avx512() { avx512($($arg),*) } else { avx2($($arg),*) } }
        }
    };
}

/// Where a tile of output goes.
pub(super) struct TileTarget {
    /// The first pixel.
    pub(super) ptr: *mut f32,
    /// Floats from one row of pixels to the next.
    pub(super) row: usize,
    /// Floats from one pixel to the next.
    pub(super) pixel: usize,
    /// Pixels that exist: fewer than 4 at the image's edges.
    pub(super) rows: usize,
    /// As `rows`.
    pub(super) cols: usize,
    /// Channels that are written of each pixel.
    pub(super) channels: usize,
}

levels! {
    /// `Bᵀ d B` of the patch behind a tile: point `p` of channel `c` goes to `out[p * plane + c]`, in whole eights.
    /// Meanwhile the pixels of `ahead`, the next patch, are prefetched: 36 short streams are more than the hardware
    /// prefetcher follows. It is worth 2 to 5 % of a whole pass of `cnn`.
    ///
    /// # Safety
    /// `isa` has AVX2; the pixels have `channels` floats; `out` has whole eights for them in 36 planes.
    fn patch(
        pixels: &[*const f32; POINTS],
        ahead: &[*const f32; POINTS],
        channels: usize,
        out: *mut f32,
        plane: usize,
    ) = patch_body
}
levels! {
    /// `A dy Aᵀ` of a tile's 16 pixels, of a panel of `width` channels from `first` on, of which there are `lanes`: point
    /// `p` goes to `out[p * plane ..]`.
    ///
    /// # Safety
    /// `isa` has AVX2; the pixels have `first + lanes` floats; `out` has `width` in 36 planes.
    fn spread(
        pixels: &[*const f32; 16],
        ahead: &[*const f32; 16],
        first: usize,
        lanes: usize,
        width: usize,
        out: *mut f32,
        plane: usize,
    ) = spread_body
}
levels! {
    /// `Aᵀ m A + bias` of one tile, from `m[p * plane + c]`.
    ///
    /// # Safety
    /// `isa` has AVX2; `m` has whole eights in 36 planes; the target's pixels are writable.
    fn tile(m: *const f32, plane: usize, bias: Option<&[f32]>, target: &TileTarget) = tile_body
}
levels! {
    /// `G g Gᵀ` of a panel of `width` filters: tap `k` is read from `taps[k * tap_step ..]`, point `p` goes to
    /// `out[p * plane ..]`.
    ///
    /// # Safety
    /// `isa` has AVX2; there are nine times `width` floats to read and 36 times to write.
    fn filter(taps: *const f32, tap_step: usize, width: usize, out: *mut f32, plane: usize) = filter_body
}
levels! {
    /// `Gᵀ u G` of a panel of `width` filters: the reverse of [`filter`] in shapes.
    ///
    /// # Safety
    /// `isa` has AVX2; there are 36 times `width` floats to read and nine times to write.
    fn unfilter(sums: *const f32, plane: usize, width: usize, taps: *mut f32, tap_step: usize) = unfilter_body
}

/// Prefetches the cache line at channel `c` of each pixel, once per line.
#[inline(always)]
fn ask_for(pixels: &[*const f32], c: usize) {
    if c.is_multiple_of(16) {
        for pixel in pixels {
            // SAFETY: a prefetch does not read, and every CPU of this architecture has it.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(pixel.wrapping_add(c).cast()) };
        }
    }
}

/// The body of [`patch`].
///
/// # Safety
/// As for [`patch`]; the CPU has the instructions of `V`.
#[inline(always)]
unsafe fn patch_body<V: Vector>(
    pixels: &[*const f32; POINTS],
    ahead: &[*const f32; POINTS],
    channels: usize,
    out: *mut f32,
    plane: usize,
) {
    for c in (0..channels).step_by(V::LANES) {
        ask_for(ahead, c);
        let lanes = channels - c;
        // SAFETY: the caller's promise.
        unsafe {
            if lanes >= V::LANES {
                square::<6, 6, Patch, V>(
                    |i, j| V::load(pixels[i * 6 + j].add(c)),
                    |i, j, v| v.store(out.add((i * 6 + j) * plane + c)),
                );
            } else {
                square::<6, 6, Patch, V>(
                    |i, j| V::load_first(pixels[i * 6 + j].add(c), lanes),
                    |i, j, v| v.store_first(out.add((i * 6 + j) * plane + c), padded(lanes)),
                );
            }
        }
    }
}

/// The body of [`spread`].
///
/// # Safety
/// As for [`spread`]; the CPU has the instructions of `V`.
#[inline(always)]
unsafe fn spread_body<V: Vector>(
    pixels: &[*const f32; 16],
    ahead: &[*const f32; 16],
    first: usize,
    lanes: usize,
    width: usize,
    out: *mut f32,
    plane: usize,
) {
    for c in (0..width).step_by(V::LANES) {
        ask_for(ahead, first + c);
        let lanes = lanes.saturating_sub(c);
        // SAFETY: the caller's promise.
        unsafe {
            if lanes >= V::LANES {
                square::<4, 6, Spread, V>(
                    |i, j| V::load(pixels[i * 4 + j].add(first + c)),
                    |i, j, v| v.store(out.add((i * 6 + j) * plane + c)),
                );
            } else {
                square::<4, 6, Spread, V>(
                    |i, j| V::load_first(pixels[i * 4 + j].wrapping_add(first + c), lanes),
                    |i, j, v| v.store_first(out.add((i * 6 + j) * plane + c), width - c),
                );
            }
        }
    }
}

/// The body of [`tile`].
///
/// # Safety
/// As for [`tile`]; the CPU has the instructions of `V`.
#[inline(always)]
unsafe fn tile_body<V: Vector>(m: *const f32, plane: usize, bias: Option<&[f32]>, target: &TileTarget) {
    for c in (0..target.channels).step_by(V::LANES) {
        let lanes = target.channels - c;
        let whole = lanes >= V::LANES;
        // SAFETY: the caller's promise; the bias has all channels.
        unsafe {
            let add = match bias {
                Some(bias) if whole => V::load(bias[c..c + V::LANES].as_ptr()),
                Some(bias) => V::load_first(bias[c..].as_ptr(), lanes),
                None => V::splat(0.0),
            };
            let ptr = target.ptr.add(c);
            if whole && target.rows == 4 && target.cols == 4 {
                square::<6, 4, OutputTile, V>(
                    |i, j| V::load(m.add((i * 6 + j) * plane + c)),
                    |i, j, v| v.add(add).store(ptr.add(i * target.row + j * target.pixel)),
                );
            } else {
                square::<6, 4, OutputTile, V>(
                    |i, j| V::load_first(m.add((i * 6 + j) * plane + c), padded(lanes)),
                    |i, j, v| {
                        if i < target.rows && j < target.cols {
                            v.add(add).store_first(ptr.add(i * target.row + j * target.pixel), lanes);
                        }
                    },
                );
            }
        }
    }
}

/// The body of [`filter`].
///
/// # Safety
/// As for [`filter`]; the CPU has the instructions of `V`.
#[inline(always)]
unsafe fn filter_body<V: Vector>(
    taps: *const f32,
    tap_step: usize,
    width: usize,
    out: *mut f32,
    plane: usize,
) {
    for c in (0..width).step_by(V::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            square::<3, 6, Filter, V>(
                |i, j| V::load_first(taps.add((i * 3 + j) * tap_step + c), width - c),
                |i, j, v| v.store_first(out.add((i * 6 + j) * plane + c), width - c),
            );
        }
    }
}

/// The body of [`unfilter`].
///
/// # Safety
/// As for [`unfilter`]; the CPU has the instructions of `V`.
#[inline(always)]
unsafe fn unfilter_body<V: Vector>(
    sums: *const f32,
    plane: usize,
    width: usize,
    taps: *mut f32,
    tap_step: usize,
) {
    for c in (0..width).step_by(V::LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            square::<6, 3, Unfilter, V>(
                |i, j| V::load_first(sums.add((i * 6 + j) * plane + c), width - c),
                |i, j, v| v.store_first(taps.add((i * 3 + j) * tap_step + c), width - c),
            );
        }
    }
}
