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
//!
//! Where all tiles are one chunk, not even these are kept: a task takes two panels of `dy`'s channels through all points and
//! transforms their sums back at once. All sums of 512 channels on both sides are 38 MB, which would be written to memory and
//! read again: 8 images of 7x7 took 11.0 ms on one thread and 7.5 on two, and take 7.2 and 4.4.

use super::super::Conv2d;
use super::super::direct::turn;
use super::super::geometry::pieces;
use super::super::micro::{self, ALIGN_SLACK, Strip, Sweep, aligned, padded, panel, panels};
use super::{POINTS, SKEW, Tiling, transform};
use crate::cx::SharedMut;
use crate::floats::Floats;
use crate::{Cx, Isa};
use std::ops::Range;

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

    /// Adds a chunk of `tiles` tiles to rows `from..to` of some panels' sums at one point; `sums` are those of the first.
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
        panels: Range<usize>,
        sums: *mut f32,
        add: bool,
    ) {
        let start = panels.start * micro::PANEL;
        let mut idx = panels.start;
        while idx < panels.end {
            let strip = Strip::at(isa, self.c_out, idx, panels.end);
            idx += strip.panels();
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
                let at = self.c_in * (first - start) + (from + row) * strip.panel_width();
                // SAFETY: these rows of each panel are this task's; u has `c_in` floats per tile, v a panel's width.
                unsafe {
                    let a = u[from + row..].as_ptr();
                    micro::reduce(isa, rows, width, width, &sweep, a, v.as_ptr(), sums.add(at), add);
                }
            }
        }
    }

    /// Transforms the sums of panel `idx` back into `dweight`, which is `[lane][c_in][9]`; `sums` are its own at the first
    /// point, those of the next are `plane` floats behind.
    ///
    /// # Safety
    /// `isa` has AVX2; every plane has `c_in` rows of the panel.
    unsafe fn finish(&self, isa: Isa, sums: *const f32, plane: usize, idx: usize, dweight: &mut [f32]) {
        let (_, width, lanes) = panel(self.c_out, idx);
        let mut taps = [[0.0; micro::PANEL]; 9];
        let unfilter = |c: usize, taps: &mut [[f32; micro::PANEL]; 9]| {
            // SAFETY: every plane has the row of `width` sums of this panel and channel.
            unsafe {
                let taps = taps.as_mut_ptr().cast();
                transform::unfilter(isa, sums.add(c * width), plane, width, taps, micro::PANEL);
            }
        };
        let filter = 9 * self.c_in;
        assert_eq!(dweight.len(), lanes * filter);
        if lanes == micro::PANEL {
            let column = |j: usize, to: &mut [f32; micro::PANEL]| {
                if j.is_multiple_of(9) {
                    unfilter(j / 9, &mut taps);
                }
                *to = taps[j % 9];
            };
            // SAFETY: the CPU has AVX2; there are 16 rows of `filter` floats.
            return unsafe { turn::from_panel(column, filter, dweight.as_mut_ptr(), filter) };
        }
        for c in 0..self.c_in {
            unfilter(c, &mut taps);
            for lane in 0..lanes {
                for k in 0..9 {
                    dweight[lane * filter + c * 9 + k] = taps[k][lane];
                }
            }
        }
    }

    /// Floats between the sums of two points in a task's own scratch.
    fn own_plane(&self) -> usize {
        self.c_in * micro::STRIP_MAX + SKEW
    }

    /// Whether sums are kept from chunk to chunk.
    fn keeps_sums(&self) -> bool {
        self.chunk < self.tiling.count()
    }

    /// Floats of sums: all of them, or those of each worker's task.
    fn sums_len(&self, kept: bool, workers: usize) -> usize {
        POINTS * if kept { self.sum_plane } else { workers * self.own_plane() }
    }

    /// Floats of scratch, without what halves need.
    fn planes_len(&self, kept: bool, workers: usize) -> usize {
        self.zeros_len() + POINTS * (self.u_plane + self.v_plane) + self.sums_len(kept, workers)
    }

    /// From the chunk of all tiles to `dweight`: a task is two panels.
    fn multiply_once(&self, cx: &Cx, u: &[f32], v: &[f32], sums: &mut [f32], dweight: &mut [f32]) {
        let (plane, tiles, filter) = (self.own_plane(), self.tiling.count(), 9 * self.c_in);
        let (sums, dweight) = (SharedMut::new(sums), SharedMut::new(dweight));
        let n_panels = self.c_out.div_ceil(micro::PANEL);
        cx.par.run(n_panels.div_ceil(2), &|task, worker| {
            let panels = 2 * task..(2 * task + 2).min(n_panels);
            // SAFETY: a worker runs one task at a time.
            let sums = unsafe { sums.slice(worker * POINTS * plane, POINTS * plane) };
            for point in 0..POINTS {
                let (u, v) =
                    (&u[point * self.u_plane..][..self.u_plane], &v[point * self.v_plane..][..self.v_plane]);
                let sums = sums[point * plane..].as_mut_ptr();
                // SAFETY: this runs only on a CPU with AVX2; each plane has room for `c_in` rows of two panels.
                unsafe { self.multiply(cx.isa, u, v, tiles, 0, self.c_in, panels.clone(), sums, false) };
            }
            for idx in panels.clone() {
                let (first, _, lanes) = panel(self.c_out, idx);
                // SAFETY: panels are disjoint ranges of output channels; the sums are as above.
                unsafe {
                    let dweight = dweight.slice(first * filter, lanes * filter);
                    let sums = sums[self.c_in * micro::PANEL * (idx - panels.start)..].as_ptr();
                    self.finish(cx.isa, sums, plane, idx, dweight);
                }
            }
        });
    }

    /// `dweight` from `x` and `dy`. Sums must be kept if there are several chunks; the bits are the same.
    fn run(&self, cx: &Cx, x: Floats, dy: Floats, kept: bool, dweight: &mut [f32], scratch: &mut [f32]) {
        let (zeros, rest) = scratch.split_at_mut(self.zeros_len());
        let (u, rest) = rest.split_at_mut(POINTS * self.u_plane);
        let (v, rest) = rest.split_at_mut(POINTS * self.v_plane);
        let (sums, stages) = rest.split_at_mut(self.sums_len(kept, cx.par.workers()));
        let stages_len = if x.is_half() || dy.is_half() { self.stages_len() } else { 0 };
        let stages = SharedMut::new(stages);
        zeros.fill(0.0);
        // An address that tasks may share: they only read behind it.
        let zeros = &*zeros;
        let tiles = self.tiling.count();
        assert!(kept || !self.keeps_sums());
        for start in (0..tiles).step_by(self.chunk) {
            let len = self.chunk.min(tiles - start);
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
                        self.transform(cx.isa, x, dy, zeros, from, to, at, u, v, stages);
                    }
                });
            }
            match kept {
                true => self.add_chunk(cx, u, v, len, sums, start > 0),
                false => return self.multiply_once(cx, u, v, sums, dweight),
            }
        }
        let sums = &*sums;
        cx.for_each_chunk(dweight, micro::PANEL * self.c_in * 9, |idx, dweight| {
            let sums = &sums[self.c_in * idx * micro::PANEL..];
            // SAFETY: this runs only on a CPU with AVX2; each plane has the sums of all panels.
            unsafe { self.finish(cx.isa, sums.as_ptr(), self.sum_plane, idx, dweight) };
        });
    }

    /// Adds a chunk of `tiles` tiles to all sums.
    fn add_chunk(&self, cx: &Cx, u: &[f32], v: &[f32], tiles: usize, sums: &mut [f32], add: bool) {
        let sums = SharedMut::new(sums);
        let (ranges, n_panels) = (self.c_in.div_ceil(self.rows), self.c_out.div_ceil(micro::PANEL));
        debug_assert_eq!(sums.len(), POINTS * self.sum_plane);
        cx.par.run(POINTS * ranges, &|task, _| {
            let (point, from) = (task / ranges, task % ranges * self.rows);
            let to = (from + self.rows).min(self.c_in);
            let (u, v) =
                (&u[point * self.u_plane..][..self.u_plane], &v[point * self.v_plane..][..self.v_plane]);
            // SAFETY: this runs only on a CPU with AVX2; tasks own disjoint rows of the sums.
            unsafe {
                let sums = sums.as_mut_ptr().add(point * self.sum_plane);
                self.multiply(cx.isa, u, v, tiles, from, to, 0..n_panels, sums, add);
            }
        });
    }
}

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, half: bool, workers: usize) -> usize {
    let sums = WeightSums::new(s);
    let stages = if half { workers * sums.stages_len() } else { 0 };
    sums.planes_len(sums.keeps_sums(), workers) + stages + ALIGN_SLACK
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
    let sums = WeightSums::new(s);
    sums.run(cx, x, dy, sums.keeps_sums(), dweight, aligned(scratch));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::testing::{Reverse, data};

    /// Sums of one chunk have the same bits, kept or not.
    #[test]
    fn sums_that_are_not_kept_have_the_same_bits() {
        for (n, side, c_in, c_out) in [(1, 4, 16, 16), (2, 7, 33, 90), (8, 14, 20, 40), (3, 9, 130, 17)] {
            let s = Conv2d {
                n,
                h: side,
                w: side,
                c_in,
                c_out,
                kh: 3,
                kw: 3,
                stride: (1, 1),
                padding: (1, 1),
                dilation: (1, 1),
                groups: 1,
                strict: false,
            };
            let sums = WeightSums::new(&s);
            assert!(!sums.keeps_sums(), "{s:?}");
            let (x, dy) = (data(1, s.x_len()), data(2, s.y_len()));
            let run = |isa: Isa, workers: usize, kept: bool| {
                let mut scratch = vec![f32::NAN; sums.planes_len(kept, workers) + ALIGN_SLACK];
                let mut dweight = vec![f32::NAN; s.weight_len()];
                let cx = Cx { isa, par: &Reverse(workers) };
                let (x, dy) = (Floats::F32(&x), Floats::F32(&dy));
                sums.run(&cx, x, dy, kept, &mut dweight, aligned(&mut scratch));
                dweight.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            for isa in Isa::available().filter(|isa| isa.has_avx2()) {
                let want = run(isa, 1, true);
                assert!(want.iter().all(|v| f32::from_bits(*v).is_finite()));
                for workers in [1, 3] {
                    assert!(run(isa, workers, false) == want, "{s:?} on {}", isa.name());
                }
            }
        }
    }
}
