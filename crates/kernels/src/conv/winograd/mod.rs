//! F(4x4, 3x3): a 3x3 convolution with stride 1 by 4x4 tiles of output, with 36 multiplications per tile and channel
//! pair instead of 144.
//!
//! With `g` a 3x3 filter, `d` the 6x6 patch behind a 4x4 tile of output `y`, and the matrices of the points
//! 0, ±5/8, ±3/2, ∞ written out in [`transform`]:
//!
//! ```text
//! forward        y  = Aᵀ [ Σ_c (G g Gᵀ) ⊙ (Bᵀ d B) ] A
//! input gradient the same on dy, with filters turned by 180° and channels exchanged, padding 2 − p
//! weight         dg = Gᵀ [ Σ_tiles (A dy Aᵀ) ⊙ (Bᵀ d B) ] G       (the forward map is bilinear; this is its transpose)
//! ```
//!
//! The core is 36 independent matrix products, one for each point of the 6x6 square: `[tiles × c_in]·[c_in × c_out]`,
//! or for the weight gradient `[c_in × tiles]·[tiles × c_out]`. They run on the register tiles of `micro` with no
//! packing at all, because the transforms write what the tiles read.
//!
//! [`Correlate`] (forward, input gradient) transforms the weights once into panels, then a task takes a block of tiles
//! through input transform, 36 products and output transform, in its own scratch, which stays in L2/L3; see
//! [`Correlate::block`]. With more channels than tiles it is the tiles that are transformed once; see [`by_channels`]. The
//! weight gradient is in [`grad_weight`].
//!
//! Planes of the 36 points are a cache line further apart than their size: with 64 or 256 channels the 36 stores of a
//! transform would otherwise all fall into one set of the L1 cache.
//!
//! Pixels in half are widened patch by patch into a worker's scratch, 9 KB of it with 64 channels: a pixel is then widened
//! 2.25 times, but always in L1. Tiles are made there too, and rounded from it.
//!
//! Error: about one decimal digit on the worst element. At 256 channels, of the largest magnitude: 1.6e-5 at most and
//! 8e-7 in the root of the mean square, where the direct way has 2e-6 at most. Tests hold 1e-4.

mod by_channels;
mod grad_weight;
mod transform;

pub(super) use grad_weight::grad_weight;

use super::direct::turn;
use super::geometry::pieces;
use super::micro::{self, ALIGN_SLACK, GatherTarget, GatherWalk, Strip, aligned, padded, panel, strips};
use super::{Conv2d, ConvPass, Operands, RunEpilogue};
use crate::cx::SharedMut;
use crate::floats::{Float, Floats, SharedFloats, each};
use crate::{Cx, Isa};
use std::ops::Range;

/// Points of the transformed square.
const POINTS: usize = 36;
/// Floats between planes beyond their size: one cache line.
const SKEW: usize = 16;

/// The tiles that cover an image of `h` by `w` outputs, and where their patches are in the image that is read.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    n: usize,
    /// The tiled image.
    h: usize,
    w: usize,
    /// The image that patches are read from.
    read_h: usize,
    read_w: usize,
    /// How far patches start before their tile; may be negative.
    pad_h: isize,
    pad_w: isize,
}

impl Tiling {
    fn across(&self) -> usize {
        self.w.div_ceil(4)
    }

    fn count(&self) -> usize {
        self.n * self.h.div_ceil(4) * self.across()
    }

    /// Image, first row and first column of a tile.
    fn tile(&self, idx: usize) -> (usize, usize, usize) {
        let (across, down) = (self.across(), self.h.div_ceil(4));
        (idx / (across * down), idx / across % down * 4, idx % across * 4)
    }

    /// The 36 pixels of a tile's patch; `zeros` stands for those outside. Pixels in half are in `stage`.
    fn patch(
        &self,
        isa: Isa,
        idx: usize,
        read: Floats,
        c: usize,
        zeros: *const f32,
        stage: &mut [f32],
    ) -> [*const f32; POINTS] {
        let (image, row, col) = self.tile(idx);
        let mut ptrs = [zeros; POINTS];
        // The patch's columns that the image has.
        let left = col as isize - self.pad_w;
        let inside = |x: isize| (x - left).clamp(0, 6) as usize;
        let (from, to) = (inside(0), inside(self.read_w as isize));
        let mut stages = stage.chunks_exact_mut(6 * c);
        for i in 0..6 {
            let y = (row + i) as isize - self.pad_h;
            if y < 0 || y >= self.read_h as isize || from >= to {
                continue;
            }
            let line = (image * self.read_h + y as usize) * self.read_w;
            let first = line + (left + from as isize) as usize;
            let len = (to - from) * c;
            if read.is_half() {
                // What the next tile reads beyond this one.
                read.prefetch(first * c + len, 4 * c);
            }
            let pixels = read.staged(isa, first * c, len, stages.next().unwrap_or_default());
            for (ptr, pixel) in ptrs[i * 6 + from..i * 6 + to].iter_mut().zip(pixels.chunks_exact(c)) {
                *ptr = pixel.as_ptr();
            }
        }
        ptrs
    }

    /// The 16 pixels of a tile itself, of the image `tiled`; `zeros` stands for those outside. Pixels in half are in
    /// `stage`.
    fn pixels(
        &self,
        isa: Isa,
        idx: usize,
        tiled: Floats,
        c: usize,
        zeros: *const f32,
        stage: &mut [f32],
    ) -> [*const f32; 16] {
        let (image, row, col) = self.tile(idx);
        let mut ptrs = [zeros; 16];
        let cols = (self.w - col).min(4);
        let mut stages = stage.chunks_exact_mut(4 * c);
        for i in 0..(self.h - row).min(4) {
            let first = (image * self.h + row + i) * self.w + col;
            let pixels = tiled.staged(isa, first * c, cols * c, stages.next().unwrap_or_default());
            for (ptr, pixel) in ptrs[i * 4..].iter_mut().zip(pixels.chunks_exact(c)) {
                *ptr = pixel.as_ptr();
            }
        }
        ptrs
    }
}

/// Forward or input gradient.
pub(super) struct Correlate {
    tiling: Tiling,
    c_read: usize,
    c_made: usize,
    /// Floats between the filters of neighbouring channels made, and read.
    made_step: usize,
    read_step: usize,
    /// Whether filters are turned by 180°.
    turned: bool,
}

impl Correlate {
    pub(super) fn new(s: &Conv2d, pass: ConvPass) -> Correlate {
        let (oh, ow, p) = (s.out_h(), s.out_w(), (s.padding.0 as isize, s.padding.1 as isize));
        if pass == ConvPass::Forward {
            let tiling = Tiling { n: s.n, h: oh, w: ow, read_h: s.h, read_w: s.w, pad_h: p.0, pad_w: p.1 };
            let (c_read, c_made) = (s.c_in, s.c_out);
            Correlate { tiling, c_read, c_made, made_step: 9 * s.c_in, read_step: 9, turned: false }
        } else {
            let tiling =
                Tiling { n: s.n, h: s.h, w: s.w, read_h: oh, read_w: ow, pad_h: 2 - p.0, pad_w: 2 - p.1 };
            let (c_read, c_made) = (s.c_out, s.c_in);
            Correlate { tiling, c_read, c_made, made_step: 9, read_step: 9 * s.c_in, turned: true }
        }
    }

    /// Tiles that one task takes.
    ///
    /// A block's planes (`36 · tiles · (c_read + c_made)` floats) are written and read twice and the weights (`36 ·
    /// c_read · c_made`) are read once per block, so small blocks keep the first in L2 and large ones read the second
    /// less often. Measured on the layers of `cnn`, blocks of 18 to 96 tiles differ by less than 5 %; small ones leave
    /// more tasks where there are few tiles.
    fn block(&self) -> usize {
        let tiles = self.tiling.count();
        let blocks = tiles.div_ceil(BLOCK_MAX).max(tiles.div_ceil(BLOCK_MIN).min(16));
        tiles.div_ceil(blocks.max(1)).max(1)
    }

    /// Floats of the transformed weights at one point.
    fn weight_plane(&self) -> usize {
        self.c_read * padded(self.c_made)
    }

    fn read_plane(&self) -> usize {
        self.block() * padded(self.c_read) + SKEW
    }

    fn made_plane(&self) -> usize {
        self.block() * padded(self.c_made) + SKEW
    }

    fn planes_len(&self) -> usize {
        POINTS * (self.read_plane() + self.made_plane())
    }

    /// Floats of two widened patches and of a tile that is not made in place.
    fn stages_len(&self) -> usize {
        (2 * POINTS * self.c_read + 16 * self.c_made).next_multiple_of(16)
    }

    fn zeros_len(&self) -> usize {
        padded(self.c_read.max(self.c_made)).next_multiple_of(16)
    }

    fn scratch_len(&self, half: bool, workers: usize) -> usize {
        let stages_len = if half { self.stages_len() } else { 0 };
        let (shared, own) = match self.goes_by_channels() {
            true => self.lens_by_channels(),
            false => self.lens_by_tiles(),
        };
        self.zeros_len() + shared + workers * (own + stages_len) + ALIGN_SLACK
    }

    /// Floats of what all workers share, and of what each has, without what halves need.
    fn lens_by_tiles(&self) -> (usize, usize) {
        (POINTS * self.weight_plane(), self.planes_len())
    }

    pub(super) fn run(&self, cx: &Cx, operands: Operands, scratch: &mut [f32]) {
        let (zeros, rest) = aligned(scratch).split_at_mut(self.zeros_len());
        zeros.fill(0.0);
        if self.goes_by_channels() {
            self.run_by_channels(cx, operands, zeros, rest);
        } else {
            self.run_by_tiles(cx, operands, zeros, rest);
        }
    }

    fn run_by_tiles(&self, cx: &Cx, operands: Operands, zeros: &[f32], scratch: &mut [f32]) {
        let Operands { read, weight, bias, made, epilogue } = operands;
        let (filters, rest) = scratch.split_at_mut(POINTS * self.weight_plane());
        {
            // A panel of channels made by a range of channels read is a task.
            let filters = SharedMut::new(filters);
            let ranges = self.c_read.div_ceil(WEIGHT_CHANNELS);
            let n_panels = self.c_made.div_ceil(micro::PANEL);
            each!(Floats, weight, weight => cx.par.run(n_panels * ranges, &|task, _| {
                let (idx, from) = (task / ranges, task % ranges * WEIGHT_CHANNELS);
                let to = (from + WEIGHT_CHANNELS).min(self.c_read);
                // SAFETY: this runs only on a CPU with AVX2; tasks write disjoint parts of each plane.
                unsafe {
                    let out = filters.as_mut_ptr().add(self.c_read * panel(self.c_made, idx).0);
                    self.transform_filters(cx.isa, weight, idx, from, to, out, self.weight_plane());
                }
            }));
        }
        let filters = &*filters;
        let (own, made) = (SharedMut::new(rest), SharedFloats::new(made));
        let stages_len = if !read.is_half() && made.is_f32() { 0 } else { self.stages_len() };
        let own_len = self.planes_len() + stages_len;
        let (block, tiles) = (self.block(), self.tiling.count());
        cx.par.run(tiles.div_ceil(block), &|task, worker| {
            // SAFETY: a worker runs one task at a time.
            let own = unsafe { own.slice(worker * own_len, own_len) };
            let (u, rest) = own.split_at_mut(POINTS * self.read_plane());
            let (m, stages) = rest.split_at_mut(POINTS * self.made_plane());
            let u = Planes { ptr: u.as_mut_ptr(), plane: self.read_plane(), pitch: padded(self.c_read) };
            let m = Planes { ptr: m.as_mut_ptr(), plane: self.made_plane(), pitch: padded(self.c_made) };
            let (from, to) = (task * block, ((task + 1) * block).min(tiles));
            // SAFETY: this runs only on a CPU with AVX2; planes have room for a block of tiles; tiles are disjoint parts of
            // the image that is made.
            unsafe {
                self.transform_patches(cx.isa, read, zeros, from, to, u, stages);
                let filters = (filters.as_ptr(), self.weight_plane());
                self.multiply(cx.isa, filters, self.c_made, to - from, zeros, u, m);
                self.transform_tiles(cx.isa, m, from, to, 0..self.c_made, bias, made, epilogue, stages);
            }
        });
    }

    /// Fills channels `from..to` of panel `idx` of the transformed weights: `out` is the panel's `[c_read][lanes]` at the
    /// first point, `plane` floats before that at the next.
    ///
    /// # Safety
    /// `isa` has AVX2; the planes have the panel, and nothing else accesses that part of it.
    unsafe fn transform_filters<W: Float>(
        &self,
        isa: Isa,
        weight: &[W],
        idx: usize,
        from: usize,
        to: usize,
        out: *mut f32,
        plane: usize,
    ) {
        let (first, width, lanes) = panel(self.c_made, idx);
        let mut taps = turn::NO_COLUMNS;
        let mut stage = turn::NO_COLUMNS;
        for from in (from..to).step_by(FILTERS) {
            let n = FILTERS.min(to - from);
            let start = first * self.made_step + from * self.read_step;
            let tap = |k: usize| if self.turned { 8 - k } else { k };
            if let (Some(weight), micro::PANEL) = (W::as_f32(weight), lanes) {
                // Forward, taps of all channels read are one run; backward, those of one.
                let (runs, run) = if self.read_step == 9 { (1, n) } else { (n, 1) };
                let last = (micro::PANEL - 1) * self.made_step + (runs - 1) * self.read_step + run * 9;
                let weight = &weight[start..][..last];
                for i in 0..runs {
                    let target = |j: usize| taps[(i + j / 9) * 9 + tap(j % 9)].as_mut_ptr();
                    // SAFETY: the CPU has AVX2; the weights have 16 rows of these columns, targets are rows of 16.
                    unsafe {
                        let source = weight.as_ptr().add(i * self.read_step);
                        turn::into_panel(source, self.made_step, run * 9, &mut stage, target);
                    }
                }
            } else {
                for (i, lane) in (0..n * lanes).map(|at| (at / lanes, at % lanes)) {
                    let filter = &weight[start + lane * self.made_step + i * self.read_step..][..9];
                    for (k, v) in filter.iter().enumerate() {
                        taps[i * 9 + tap(k)][lane] = v.wide();
                    }
                }
            }
            for (i, taps) in taps.chunks_exact(9).take(n).enumerate() {
                // SAFETY: `taps` has a panel, and every plane has this one.
                unsafe {
                    let out = out.add((from + i) * width);
                    transform::filter(isa, taps.as_ptr().cast(), micro::PANEL, width, out, plane);
                }
            }
        }
    }

    /// `u[36][tile][c_read] = Bᵀ d B`, tile `from` being the first of the planes.
    ///
    /// # Safety
    /// `isa` has AVX2; the planes have these tiles, and nothing else accesses them.
    unsafe fn transform_patches(
        &self,
        isa: Isa,
        read: Floats,
        zeros: &[f32],
        from: usize,
        to: usize,
        u: Planes,
        stages: &mut [f32],
    ) {
        assert!(zeros.len() >= padded(self.c_read));
        // A patch and the next one.
        let (even, odd) = stages.split_at_mut((POINTS * self.c_read).min(stages.len()));
        let mut find = |idx: usize| {
            let stage = if idx.is_multiple_of(2) { &mut *even } else { &mut *odd };
            self.tiling.patch(isa, idx.min(to - 1), read, self.c_read, zeros.as_ptr(), stage)
        };
        let mut ahead = find(from);
        for idx in from..to {
            let patch = ahead;
            ahead = find(idx + 1);
            // SAFETY: each of the pixels has `c_read` floats; the planes have this tile in whole vectors.
            unsafe {
                let out = u.ptr.add((idx - from) * u.pitch);
                transform::patch(isa, &patch, &ahead, self.c_read, out, u.plane);
            }
        }
    }

    /// `m[36][tile][channels] = u · filters`, point by point; `filters` are the first of their planes, and how far these
    /// are apart.
    ///
    /// # Safety
    /// `isa` has AVX2; the planes have `tiles` tiles, and nothing else accesses `m`.
    unsafe fn multiply(
        &self,
        isa: Isa,
        filters: (*const f32, usize),
        channels: usize,
        tiles: usize,
        zeros: &[f32],
        u: Planes,
        m: Planes,
    ) {
        let walk = GatherWalk {
            row: u.pitch,
            outer: 1,
            outer_step: 0,
            inner: 1,
            inner_step: 0,
            len: self.c_read,
            b_panel: self.c_read * micro::PANEL,
        };
        for point in 0..POINTS {
            for Strip { first, width, .. } in strips(isa, channels) {
                for (tile, rows) in pieces(tiles, micro::rows_max(isa, width)) {
                    // SAFETY: rows are tiles of these planes; panels and rows are padded to `width` lanes.
                    unsafe {
                        let a = u.ptr.add(point * u.plane + tile * u.pitch);
                        let b = filters.0.add(point * filters.1 + self.c_read * first);
                        let ptr = m.ptr.add(point * m.plane + tile * m.pitch + first);
                        let target = GatherTarget { ptr, row: m.pitch, lanes: width };
                        micro::gather(isa, rows, width, &walk, a, b, zeros.as_ptr(), target);
                    }
                }
            }
        }
    }

    /// `made = Aᵀ m A + bias` of some channels, cut at the image's edges, and the epilogue. Tile `from` is the first of the
    /// planes.
    ///
    /// # Safety
    /// `isa` has AVX2; the planes have these tiles; nothing else accesses these channels of them in `made`.
    unsafe fn transform_tiles(
        &self,
        isa: Isa,
        m: Planes,
        from: usize,
        to: usize,
        channels: Range<usize>,
        bias: Option<&[f32]>,
        made: SharedFloats,
        epilogue: Option<&RunEpilogue>,
        stages: &mut [f32],
    ) {
        let (t, c, n_channels) = (&self.tiling, self.c_made, channels.len());
        let bias = bias.map(|bias| &bias[channels.clone()]);
        for idx in from..to {
            let (image, row, col) = t.tile(idx);
            let (rows, cols) = ((t.h - row).min(4), (t.w - col).min(4));
            let first = ((image * t.h + row) * t.w + col) * c + channels.start;
            debug_assert!(first + ((rows - 1) * t.w + cols - 1) * c + n_channels <= made.len());
            // Where the tile is made: in place, or in scratch.
            let (ptr, row_len, pixel) = match made {
                SharedFloats::F32(made) => (made.as_mut_ptr().wrapping_add(first), t.w * c, c),
                _ => (stages[..rows * cols * n_channels].as_mut_ptr(), cols * n_channels, n_channels),
            };
            // SAFETY: the planes have this tile in whole vectors, and there are `rows` by `cols` pixels to be written.
            unsafe {
                let source = m.ptr.add((idx - from) * m.pitch);
                let target =
                    transform::TileTarget { ptr, row: row_len, pixel, rows, cols, channels: n_channels };
                transform::tile(isa, source, m.plane, bias, &target);
            }
            if epilogue.is_none() && made.is_f32() {
                continue;
            }
            // A row of all channels is one run.
            let (runs, run_len) = if n_channels == c { (1, cols * c) } else { (cols, n_channels) };
            for (i, j) in (0..rows * runs).map(|at| (at / runs, at % runs)) {
                let at = first + (i * t.w + j) * c;
                // SAFETY: these channels of the tile are this task's, and have just been made, in place or in scratch.
                let run =
                    unsafe { std::slice::from_raw_parts_mut(ptr.add(i * row_len + j * pixel), run_len) };
                if let Some(epilogue) = epilogue {
                    epilogue(at, run);
                }
                if !made.is_f32() {
                    // SAFETY: as above.
                    unsafe { made.part(at, run_len) }.round(isa, run);
                }
            }
        }
    }
}

/// 36 planes of rows, one for each tile: row `r` of point `p` starts `p * plane + r * pitch` floats behind `ptr`.
#[derive(Clone, Copy)]
struct Planes {
    ptr: *mut f32,
    plane: usize,
    pitch: usize,
}

/// Filters of each channel made that are turned into vectors of channels at once.
const FILTERS: usize = turn::COLS / 9;
/// Channels whose filters one task transforms.
const WEIGHT_CHANNELS: usize = 64;
/// See [`Correlate::block`].
const BLOCK_MAX: usize = 48;
const BLOCK_MIN: usize = 24;

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, pass: ConvPass, half: bool, workers: usize) -> usize {
    match pass {
        ConvPass::GradWeight => grad_weight::scratch_len(s, half, workers),
        pass => Correlate::new(s, pass).scratch_len(half, workers),
    }
}
