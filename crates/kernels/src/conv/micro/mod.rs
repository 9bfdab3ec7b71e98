//! The register tiles that all heavy work here ends in. None packs anything: their callers lay data out as the tiles
//! read it; images already are.
//!
//! - [`gather`]: `out[r, lane] = init[lane] + Σ_k a[r, k] · b[k, lane]`. A row is an output pixel (or a Winograd tile),
//!   `k` runs over its patch, lanes are output channels. `a` is broadcast from the image in place, `b` is a panel of
//!   repacked weights.
//! - [`reduce`]: `out[r, lane] (+)= Σ_p a[p, r] · b[p, lane]`. The weight gradient: `p` runs over pixels, rows are
//!   consecutive floats of the patch, lanes are channels of `dy`.
//!
//! With few channels both would leave most of a vector empty. For these there is, with AVX-512 only,
//!
//! - [`along`]: `out[r, lane] (+)= init[r] + Σ_k b[k, r] · a[k, lane]`. Rows are channels, and lanes lie along the image:
//!   they are neighbouring pixels of one channel, or neighbouring floats of the patch.
//!
//! Channels are in *panels* of 16, whatever the instruction set. A tile is some rows by a *strip* of channels: one
//! panel, or with AVX-512 two where there are. Tiles of all sizes add the same products in the same order, so the bits
//! of a sum do not depend on the tile that made it.

mod along;
mod avx2;
mod avx512;

pub(super) use along::{Lanes, Loops, ROWS_MAX, VECTORS_MAX, along};
pub(super) use avx2::{mask, store};

use crate::Isa;

/// Lanes of a whole panel.
pub(super) const PANEL: usize = 16;

/// Lanes of the widest strip: two panels.
pub(super) const STRIP_MAX: usize = 2 * PANEL;

/// Floats of the largest tile of any instruction set: AVX-512's over two panels.
pub(super) const TILE_MAX: usize = 14 * STRIP_MAX;

/// The most rows of a tile over a strip of `width` lanes.
pub(super) fn rows_max(isa: Isa, width: usize) -> usize {
    if isa.has_avx512() && width >= PANEL { avx512::rows_max(width) } else { avx2::rows_max(width) }
}

/// `len` rounded up to whole vectors.
pub(super) fn padded(len: usize) -> usize {
    len.next_multiple_of(8)
}

/// The panels of `channels`: `(first channel, width, channels in it)`. All are 16 wide but the last, which is 8 where
/// that is enough; a panel of `k` rows starts at `k * first` floats.
pub(super) fn panels(channels: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..channels.div_ceil(PANEL)).map(move |i| panel(channels, i))
}

/// Panel number `idx` of [`panels`].
pub(super) fn panel(channels: usize, idx: usize) -> (usize, usize, usize) {
    let first = idx * PANEL;
    let lanes = (channels - first).min(PANEL);
    (first, padded(lanes), lanes)
}

/// The channels of one tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strip {
    /// The first channel.
    pub(super) first: usize,
    /// Lanes: 8, 16 or, over two panels, 32.
    pub(super) width: usize,
    /// Lanes that are channels.
    pub(super) lanes: usize,
}

impl Strip {
    /// The strip that starts at panel `idx` and stays below panel `end`.
    pub(super) fn at(isa: Isa, channels: usize, idx: usize, end: usize) -> Strip {
        let (first, width, lanes) = panel(channels, idx);
        if isa.has_avx512() && idx + 1 < end && panel(channels, idx + 1).1 == PANEL {
            return Strip { first, width: STRIP_MAX, lanes: (channels - first).min(STRIP_MAX) };
        }
        Strip { first, width, lanes }
    }

    /// How many panels it has.
    pub(super) fn panels(&self) -> usize {
        self.width.div_ceil(PANEL)
    }

    /// Floats of a row of one of its panels.
    pub(super) fn panel_width(&self) -> usize {
        self.width.min(PANEL)
    }
}

/// The strips of `channels`.
pub(super) fn strips(isa: Isa, channels: usize) -> impl Iterator<Item = Strip> {
    let (mut idx, end) = (0, channels.div_ceil(PANEL));
    std::iter::from_fn(move || {
        let strip = (idx < end).then(|| Strip::at(isa, channels, idx, end))?;
        idx += strip.panels();
        Some(strip)
    })
}

/// How [`gather`] walks `a`: `outer × inner` runs of `len` contiguous floats.
#[derive(Clone, Copy, Debug)]
pub(super) struct GatherWalk {
    /// Floats from one row to the next.
    pub(super) row: usize,
    pub(super) outer: usize,
    pub(super) outer_step: usize,
    pub(super) inner: usize,
    pub(super) inner_step: usize,
    pub(super) len: usize,
    /// Floats from one panel of `b` to the next.
    pub(super) b_panel: usize,
}

/// Where [`gather`] writes: rows `row` floats apart, of which the first `lanes` are stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct GatherTarget {
    pub(super) ptr: *mut f32,
    pub(super) row: usize,
    pub(super) lanes: usize,
}

/// How [`reduce`] walks: `lines` lines of `pixels` pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sweep {
    pub(super) lines: usize,
    pub(super) pixels: usize,
    pub(super) a_line: usize,
    pub(super) a_pixel: usize,
    pub(super) b_line: usize,
    pub(super) b_pixel: usize,
    /// Floats from one panel of `b`, and of what is written, to the next.
    pub(super) b_panel: usize,
    pub(super) out_panel: usize,
}

/// One tile of `rows` by a strip's `width`; see the file's head.
///
/// # Safety
/// `isa` has AVX2. `a` is readable along the walk for each row, each panel of `b` for `outer·inner·len` rows of it,
/// `init` for `width`; the target is writable.
#[inline]
pub(super) unsafe fn gather(
    isa: Isa,
    rows: usize,
    width: usize,
    walk: &GatherWalk,
    a: *const f32,
    b: *const f32,
    init: *const f32,
    target: GatherTarget,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if isa.has_avx512() && width >= PANEL {
            avx512::gather(rows, width, walk, a, b, init, target);
        } else {
            avx2::gather(rows, width, walk, a, b, init, target);
        }
    }
}

/// One tile of `rows` by a strip's `width`, of which `b` has the first `lanes`; `out` has rows of a panel's width and
/// is added to if `add`, else overwritten.
///
/// # Safety
/// `isa` has AVX2. `a` is readable along the sweep for `rows` floats, `b` for `lanes`; each panel of `out` is valid for
/// `rows` rows of it.
#[inline]
pub(super) unsafe fn reduce(
    isa: Isa,
    rows: usize,
    width: usize,
    lanes: usize,
    sweep: &Sweep,
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if isa.has_avx512() && width >= PANEL {
            avx512::reduce(rows, width, lanes, sweep, a, b, out, add);
        } else {
            avx2::reduce(rows, width, lanes, sweep, a, b, out, add);
        }
    }
}

/// The part of `scratch` from the next cache line on. Scratch lengths have [`ALIGN_SLACK`] for it.
pub(super) fn aligned(scratch: &mut [f32]) -> &mut [f32] {
    let skip = scratch.as_ptr().align_offset(64).min(scratch.len());
    &mut scratch[skip..]
}

/// Floats that [`aligned`] may skip.
pub(super) const ALIGN_SLACK: usize = 16;
