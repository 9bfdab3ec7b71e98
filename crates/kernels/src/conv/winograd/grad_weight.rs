//! The weight gradient: `dg = Gᵀ [ Σ_tiles (A dy Aᵀ) ⊙ (Bᵀ d B) ] G`.
//!
//! Two phases alternate over chunks of tiles, small enough that the transformed chunk stays in L3:
//!
//! 1. transform the chunk: `u[36][tile][c_in]` from `x`, `v[36][panel of c_out][tile][lanes]` from `dy`; a task is a few
//!    tiles;
//! 2. at each of the 36 points `sums[c_in × c_out] += uᵀ v` over the chunk's tiles; a task is a point and a range of
//!    input channels.
//!
//! Last, the sums are transformed back to 3x3 and written as OIHW. Every sum belongs to one task per chunk and chunks
//! come in order, so the bits do not depend on the workers, and there are no partial sums to keep by slab: with 256
//! channels on both sides each would be 9 MB.

use super::super::Conv2d;
use super::super::geometry::pieces;
use super::super::micro::{self, ALIGN_SLACK, Strip, Sweep, aligned, padded, panel, panels, strips};
use super::{POINTS, SKEW, Tiling, transform};
use crate::cx::SharedMut;
use crate::floats::Floats;
use crate::{Cx, Isa};

/// Floats of one transformed chunk: 10 MB of a 32 MB L3.
const CHUNK_FLOATS: usize = 5 << 19;
/// Tiles of a chunk. Measured on `cnn`, 16x16, 128 to 128 channels: 19.0 ms with 96 to 144 tiles, 22.0 with 256.
const CHUNK_TILES_MAX: usize = 128;
/// Tiles that one task transforms.
const TRANSFORM_TILES: usize = 16;

struct WeightSums {
    tiling: Tiling,
    c_in: usize,
    c_out: usize,
    chunk: usize,
    u_pitch: usize,
    u_plane: usize,
    v_plane: usize,
    sum_plane: usize,
    /// Input channels that one task multiplies.
    rows: usize,
}

impl WeightSums {
    fn new(s: &Conv2d) -> WeightSums {
        let tiling = Tiling {
            n: s.n,
            h: s.out_h(),
            w: s.out_w(),
            read_h: s.h,
            read_w: s.w,
            pad_h: s.padding.0 as isize,
            pad_w: s.padding.1 as isize,
        };
        // An odd number of cache lines: a column of u does not fall into few sets.
        let u_pitch = s.c_in.next_multiple_of(32) + SKEW;
        let max = (CHUNK_FLOATS / (POINTS * (u_pitch + padded(s.c_out)))).clamp(48, CHUNK_TILES_MAX);
        let tiles = tiling.count().max(1);
        let chunk = tiles.div_ceil(tiles.div_ceil(max));
        WeightSums {
            tiling,
            c_in: s.c_in,
            c_out: s.c_out,
            chunk,
            u_pitch,
            u_plane: chunk * u_pitch + SKEW,
            v_plane: chunk * padded(s.c_out) + SKEW,
            sum_plane: s.c_in * padded(s.c_out),
            rows: s.c_in.div_ceil(2).next_multiple_of(6),
        }
    }

    fn zeros_len(&self) -> usize {
        padded(self.c_in.max(self.c_out)).next_multiple_of(16)
    }

    /// Floats of two tiles' patches and pixels, widened.
    fn stages_len(&self) -> usize {
        (2 * (POINTS * self.c_in + 16 * self.c_out)).next_multiple_of(32)
    }

    /// Transforms tiles `from..to` of the image into tiles `at..` of the chunk.
    ///
    /// # Safety
    /// `isa` has AVX2; nothing else writes these tiles of the planes.
    unsafe fn transform(
        &self,
        isa: Isa,
        x: Floats,
        dy: Floats,
        zeros: *const f32,
        from: usize,
        to: usize,
        at: usize,
        u: SharedMut<f32>,
        v: SharedMut<f32>,
        stages: &mut [f32],
    ) {
        let t = &self.tiling;
        assert!(at + (to - from) <= self.chunk);
        // A tile and the next one: of each its patch and its pixels.
        let (even, odd) = stages.split_at_mut(stages.len() / 2);
        let mut find = |idx: usize| {
            let stage = if idx.is_multiple_of(2) { &mut *even } else { &mut *odd };
            let (patch, pixels) = stage.split_at_mut((POINTS * self.c_in).min(stage.len()));
            let idx = idx.min(to - 1);
            (t.patch(isa, idx, x, self.c_in, zeros, patch), t.pixels(isa, idx, dy, self.c_out, zeros, pixels))
        };
        let mut ahead = find(from);
        for (idx, at) in (from..to).zip(at..) {
            let (patch, pixels) = ahead;
            ahead = find(idx + 1);
            // SAFETY: the pixels have `c_in` floats, each plane has `u_pitch` for this tile.
            unsafe {
                let out = u.as_mut_ptr().add(at * self.u_pitch);
                transform::patch(isa, &patch, &ahead.0, self.c_in, out, self.u_plane);
            }
            for (first, width, lanes) in panels(self.c_out) {
                // SAFETY: the pixels have `c_out` floats, each plane has a row of `width` for this tile.
                unsafe {
                    let out = v.as_mut_ptr().add(self.chunk * first + at * width);
                    transform::spread(isa, &pixels, &ahead.1, first, lanes, width, out, self.v_plane);
                }
            }
        }
    }

    /// Adds a chunk of `tiles` tiles to rows `from..to` of the sums at one point.
    ///
    /// # Safety
    /// `isa` has AVX2; these rows of the sums are the caller's.
    unsafe fn multiply(
        &self,
        isa: Isa,
        u: &[f32],
        v: &[f32],
        tiles: usize,
        from: usize,
        to: usize,
        sums: SharedMut<f32>,
        point: usize,
        add: bool,
    ) {
        for strip in strips(isa, self.c_out) {
            let Strip { first, width, .. } = strip;
            let sweep = Sweep {
                lines: 1,
                pixels: tiles,
                a_line: 0,
                a_pixel: self.u_pitch,
                b_line: 0,
                b_pixel: strip.panel_width(),
                b_panel: self.chunk * micro::PANEL,
                out_panel: self.c_in * micro::PANEL,
            };
            let v = &v[self.chunk * first..];
            for (row, rows) in pieces(to - from, micro::rows_max(isa, width)) {
                let at = point * self.sum_plane + self.c_in * first + (from + row) * strip.panel_width();
                debug_assert!(
                    at + (strip.panels() - 1) * sweep.out_panel + rows * strip.panel_width() <= sums.len()
                );
                // SAFETY: these rows of each panel are this task's; u has `c_in` floats per tile, v a panel's width.
                unsafe {
                    let a = u[from + row..].as_ptr();
                    let sums = sums.as_mut_ptr().add(at);
                    micro::reduce(isa, rows, width, width, &sweep, a, v.as_ptr(), sums, add);
                }
            }
        }
    }

    /// Transforms one panel of the sums back into `dweight`, which is `[lane][c_in][9]`.
    ///
    /// # Safety
    /// `isa` has AVX2.
    unsafe fn finish(&self, isa: Isa, sums: &[f32], idx: usize, dweight: &mut [f32]) {
        let (first, width, lanes) = panel(self.c_out, idx);
        let mut taps = [[0.0; micro::PANEL]; 9];
        assert!(sums.len() >= POINTS * self.sum_plane);
        for c in 0..self.c_in {
            // SAFETY: every plane has the row of `width` sums of this panel and channel.
            unsafe {
                let from = sums.as_ptr().add(self.c_in * first + c * width);
                let taps = taps.as_mut_ptr().cast();
                transform::unfilter(isa, from, self.sum_plane, width, taps, micro::PANEL);
            }
            for lane in 0..lanes {
                for k in 0..9 {
                    dweight[(lane * self.c_in + c) * 9 + k] = taps[k][lane];
                }
            }
        }
    }
}

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, half: bool, workers: usize) -> usize {
    let sums = WeightSums::new(s);
    let stages = if half { workers * sums.stages_len() } else { 0 };
    sums.zeros_len() + POINTS * (sums.u_plane + sums.v_plane + sums.sum_plane) + stages + ALIGN_SLACK
}

/// `dweight` from `x` and `dy`.
pub(in super::super) fn grad_weight(
    s: &Conv2d,
    cx: &Cx,
    x: Floats,
    dy: Floats,
    dweight: &mut [f32],
    scratch: &mut [f32],
) {
    let g = WeightSums::new(s);
    let (zeros, rest) = aligned(scratch).split_at_mut(g.zeros_len());
    let (u, rest) = rest.split_at_mut(POINTS * g.u_plane);
    let (v, rest) = rest.split_at_mut(POINTS * g.v_plane);
    let (sums, stages) = rest.split_at_mut(POINTS * g.sum_plane);
    let stages_len = if x.is_half() || dy.is_half() { g.stages_len() } else { 0 };
    let stages = SharedMut::new(stages);
    zeros.fill(0.0);
    // An address that tasks may share: they only read behind it.
    let zeros = &*zeros;
    let tiles = g.tiling.count();
    for start in (0..tiles).step_by(g.chunk) {
        let len = g.chunk.min(tiles - start);
        {
            let (u, v) = (SharedMut::new(u), SharedMut::new(v));
            cx.par.run(len.div_ceil(TRANSFORM_TILES), &|task, worker| {
                let at = task * TRANSFORM_TILES;
                let end = (at + TRANSFORM_TILES).min(len);
                let (zeros, from, to) = (zeros.as_ptr(), start + at, start + end);
                // SAFETY: this runs only on a CPU with AVX2; tiles are disjoint rows of the planes; a worker runs one
                // task at a time.
                unsafe {
                    let stages = stages.slice(worker * stages_len, stages_len);
                    g.transform(cx.isa, x, dy, zeros, from, to, at, u, v, stages);
                }
            });
        }
        let (u, v) = (&*u, &*v);
        let sums = SharedMut::new(sums);
        let ranges = g.c_in.div_ceil(g.rows);
        cx.par.run(POINTS * ranges, &|task, _| {
            let (point, from) = (task / ranges, task % ranges * g.rows);
            let to = (from + g.rows).min(g.c_in);
            let (u, v) = (&u[point * g.u_plane..][..g.u_plane], &v[point * g.v_plane..][..g.v_plane]);
            // SAFETY: this runs only on a CPU with AVX2; tasks own disjoint rows of the sums.
            unsafe { g.multiply(cx.isa, u, v, len, from, to, sums, point, start > 0) };
        });
    }
    let sums = &*sums;
    cx.for_each_chunk(dweight, micro::PANEL * g.c_in * 9, |idx, dweight| {
        // SAFETY: this runs only on a CPU with AVX2.
        unsafe { g.finish(cx.isa, sums, idx, dweight) };
    });
}
