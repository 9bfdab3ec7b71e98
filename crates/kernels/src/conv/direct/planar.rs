//! The gather for few channels made, with AVX-512: lanes are neighbouring pixels of a row, not channels.
//!
//! With 6 channels a vector of channels is a third full. So the view of a unit is laid out by planes instead,
//! `[row][channel read][column]`, and a tile makes up to 6 channels of up to four vectors of 16 pixels: each tap of
//! each channel read is one vector from the view and one broadcast weight per channel made. The result is woven back
//! into pixels on its way out. Taps are added in the order of the other gather, so the bits are the same.

use super::super::geometry::pieces;
use super::super::micro::{self, Lanes, Loops, VECTORS_MAX, padded};
use super::Gather;
use crate::Isa;
use crate::copy::TransposeTile;
use crate::floats::Floats;

/// Pixels of a vector.
const PIXELS: usize = 16;
/// Channels made must not fill a vector anyway.
const MADE_MAX: usize = PIXELS - 1;

/// Whether this way is faster for the gather: pixels are adjacent on both sides, and rows of them fill vectors better
/// than channels do.
pub(super) fn pays(g: &Gather) -> bool {
    let filled = |len: usize| len as f32 / len.next_multiple_of(PIXELS) as f32;
    g.groups == 1
        && g.cols.stride == 1
        && g.c_made <= MADE_MAX
        && filled(g.cols.made()) >= 1.25 * filled(g.c_made)
}

/// Floats of a row of one channel of the view.
fn pitch(g: &Gather) -> usize {
    (g.cols.made().next_multiple_of(PIXELS) + (g.cols.k - 1) * g.cols.dilation).next_multiple_of(PIXELS)
}

/// Floats of the largest view.
pub(super) fn view_len(g: &Gather) -> usize {
    g.rows.reads_max(g.unit_rows) * g.c_read * pitch(g)
}

/// Floats of a row of the image, which is widened before it is woven if it is in half.
pub(super) fn row_len(g: &Gather) -> usize {
    g.cols.read() * g.c_read
}

/// Fills the view of rows `from..to` of one image and returns its first row. Rows in half are widened in `row_stage`.
fn fill(
    isa: Isa,
    g: &Gather,
    image: Floats,
    from: usize,
    to: usize,
    view: &mut [f32],
    row_stage: &mut [f32],
) -> isize {
    let (h, w, c) = (g.rows.read() as isize, g.cols.read(), g.c_read);
    let (top, bottom) = g.rows.reads(from, to);
    let (left, pitch) = (g.cols.lattice(0).read_first, pitch(g));
    // The columns of the image that the view has.
    let cut = left.clamp(0, w as isize) as usize;
    let lead = ((cut as isize - left) as usize).min(pitch);
    let len = (w - cut).min(pitch - lead);
    for (row, lines) in (top..bottom).zip(view.chunks_exact_mut(c * pitch)) {
        // All of it, since many short fills take longer than a long one.
        lines.fill(0.0);
        if row < 0 || row >= h || len == 0 {
            continue;
        }
        let source = image.staged(isa, (row as usize * w + cut) * c, len * c, row_stage);
        let tile = TransposeTile { across: c, along: len, source_stride: c, target_stride: pitch };
        // SAFETY: `len` pixels of `c` channels, and `c` lines that have `len` columns from `lead` on.
        unsafe { tile.run(isa, source.as_ptr().cast(), lines[lead..].as_mut_ptr().cast()) };
    }
    top
}

/// Makes rows `from..to` of one image, with `packed` and `init` as [`Gather::make`] has them.
pub(super) fn make(
    isa: Isa,
    g: &Gather,
    image: Floats,
    view: &mut [f32],
    row_stage: &mut [f32],
    packed: &[f32],
    init: &[f32],
    from: usize,
    to: usize,
    out: &mut [f32],
) {
    assert!(isa.has_avx512(), "planes are for AVX-512");
    let top = fill(isa, g, image, from, to, view, row_stage);
    let (pitch, width, lw) = (pitch(g), padded(g.c_made), g.cols.lattice(0));
    let (row_len, per_row) = (g.c_read * pitch, lw.count.div_ceil(PIXELS));
    let mut made = [0.0; MADE_MAX * VECTORS_MAX * PIXELS];
    for r in 0..g.rows.phases() {
        let lh = g.rows.lattice(r);
        let packed = &packed[g.phase_start(r, 0) * width..][..lh.taps * lw.taps * g.c_read * width];
        let numbers = lh.within(from, to);
        // The next vector's row, with the steps it takes part in, and its first pixel.
        let (mut row, mut px, mut active) = (numbers.start, 0, None);
        for (_, n) in pieces(numbers.len() * per_row, VECTORS_MAX) {
            let mut lanes =
                [const { Lanes { a: std::ptr::null(), out: 0, len: PIXELS, active: 0..0 } }; VECTORS_MAX];
            let mut places = [(0, 0); VECTORS_MAX];
            for (i, (lane, place)) in lanes.iter_mut().zip(&mut places).take(n).enumerate() {
                let read = lh.read_first + (row * lh.read_step) as isize;
                lane.active = active.get_or_insert_with(|| lh.taps_inside(read, g.rows.read())).clone();
                lane.out = i * PIXELS;
                if !lane.active.is_empty() {
                    lane.a = view[(read - top) as usize * row_len + px..].as_ptr();
                }
                let line = lh.made_first + row * lh.made_step - from;
                *place = (line * lw.count + px, (lw.count - px).min(PIXELS));
                px += PIXELS;
                if px >= lw.count {
                    (row, px, active) = (row + 1, 0, None);
                }
            }
            let lanes = &lanes[..n];
            let start = lanes.iter().map(|l| l.active.start).min().unwrap_or(0);
            let end = lanes.iter().map(|l| l.active.end).max().unwrap_or(0);
            let loops = Loops {
                outer: start..end,
                middle: lw.taps,
                inner: g.c_read,
                a: [lh.tap_step * row_len, lw.tap_step, pitch],
                b: [lw.taps * g.c_read * width, g.c_read * width, width],
            };
            for (c, rows) in pieces(g.c_made, micro::ROWS_MAX) {
                let (init, made) = (Some(&init[c..c + rows]), &mut made[c * VECTORS_MAX * PIXELS..]);
                let b = packed[c.min(packed.len())..].as_ptr();
                // SAFETY: AVX-512 was asked for; the view has every active tap of these pixels, and columns up to the
                // end of the last vector; the packed weights have `width` floats for each.
                unsafe {
                    let row = VECTORS_MAX * PIXELS;
                    micro::along(rows, &loops, lanes, b, init, made.as_mut_ptr(), row, false);
                }
            }
            for (i, (pixel, len)) in places.into_iter().take(n).enumerate() {
                let out = &mut out[pixel * g.c_made..][..len * g.c_made];
                let tile = TransposeTile {
                    across: len,
                    along: g.c_made,
                    source_stride: VECTORS_MAX * PIXELS,
                    target_stride: g.c_made,
                };
                // SAFETY: `made` has a vector for each channel, `out` has `len` pixels.
                unsafe { tile.run(isa, made[i * PIXELS..].as_ptr().cast(), out.as_mut_ptr().cast()) };
            }
        }
    }
}
