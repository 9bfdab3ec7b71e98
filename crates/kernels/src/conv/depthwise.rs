//! Depthwise convolution: one input channel per group, with `m = c_out / c_in` filters each. There is nothing to sum
//! over channels, so lanes are channels and every tap is one vector multiply-add.
//!
//! All channels are counted as output channels: where `m > 1` the view repeats each input channel `m` times, and the
//! input gradient is made for `c_out` channels and then summed by `m`. Views and weights are padded to whole vectors,
//! so only loads of `dy` and stores of results know about a ragged last vector. Units, phases and slabs are those of
//! the direct algorithm.
//!
//! It is bound by loads, one per multiply-add: four neighbouring pixels share the load of a weight.

use std::arch::x86_64::*;

use super::direct::Gather;
use super::geometry::{Direction, pieces};
use super::micro::{ALIGN_SLACK, aligned, mask, padded, store};
use super::{Conv2d, ConvPass, Operands};
use crate::cx::SharedMut;
use crate::floats::{Float, Floats, SharedFloats, each};
use crate::{Cx, Isa};

/// Enough for 16 workers.
const SLABS_MAX: usize = 16;

pub(super) struct Depthwise {
    gather: Gather,
    /// Channels of `y`, and that in whole vectors.
    c: usize,
    c_pad: usize,
    /// Output channels per input channel.
    m: usize,
}

impl Depthwise {
    pub(super) fn new(s: &Conv2d, way: Direction) -> Depthwise {
        Depthwise { gather: Gather::new(s, way), c: s.c_out, c_pad: padded(s.c_out), m: s.c_out / s.c_in }
    }

    /// Whether rows are made in scratch and summed by `m` after.
    fn folds(&self) -> bool {
        self.gather.rows.way == Direction::Backward && self.m > 1
    }

    fn view_len(&self) -> usize {
        let g = &self.gather;
        g.rows.reads_max(g.unit_rows) * g.cols.reads_max(g.cols.made().max(1)) * self.c_pad
    }

    fn fold_len(&self) -> usize {
        if self.folds() { self.gather.unit_rows * self.gather.cols.made() * self.c_pad } else { 0 }
    }

    fn taps(&self) -> usize {
        self.gather.rows.k * self.gather.cols.k
    }

    fn units(&self) -> usize {
        self.gather.n * self.gather.units_per_image()
    }

    fn slabs(&self) -> (usize, usize) {
        let slabs = SLABS_MAX.min(self.units().div_ceil(self.gather.units_per_task())).max(1);
        let per_slab = self.units().div_ceil(slabs);
        (self.units().div_ceil(per_slab.max(1)), per_slab)
    }

    /// Copies what rows `from..to` read, channels repeated and padded, zeros around.
    /// Returns the first row, the first column and the width of the view.
    fn fill(
        &self,
        isa: Isa,
        read: Floats,
        image: usize,
        from: usize,
        to: usize,
        view: &mut [f32],
    ) -> (isize, isize, usize) {
        let g = &self.gather;
        let (h, w) = (g.rows.read() as isize, g.cols.read() as isize);
        let (top, bottom) = g.rows.reads(from, to);
        let (left, right) = g.cols.reads(0, g.cols.made());
        let width = (right - left) as usize;
        let repeat = self.c / g.c_read;
        let view = &mut view[..(bottom - top) as usize * width * self.c_pad];
        for (i, target) in view.chunks_exact_mut(self.c_pad).enumerate() {
            let (row, col) = (top + (i / width) as isize, left + (i % width) as isize);
            if row < 0 || row >= h || col < 0 || col >= w {
                target.fill(0.0);
                continue;
            }
            let at = ((image as isize * h + row) * w + col) as usize * g.c_read;
            let source = read.part(at, g.c_read);
            if repeat == 1 {
                source.widen(isa, &mut target[..self.c]);
            } else {
                each!(Floats, source, source => for (t, v) in target.chunks_exact_mut(repeat).zip(source) {
                    t.fill(v.wide());
                });
            }
            target[self.c..].fill(0.0);
        }
        (top, left, width)
    }

    /// `[phase][tap][channel]`.
    fn pack<W: Float>(&self, weight: &[W], packed: &mut [f32]) {
        let mut target = packed.chunks_exact_mut(self.c_pad);
        self.for_each_phase(|rh, rw| {
            let (lh, lw) = (self.gather.rows.lattice(rh), self.gather.cols.lattice(rw));
            for (jh, jw) in (0..lh.taps * lw.taps).map(|j| (j / lw.taps, j % lw.taps)) {
                let Some(target) = target.next() else { return };
                let tap = lh.tap(jh) * self.gather.cols.k + lw.tap(jw);
                for (c, v) in target.iter_mut().enumerate() {
                    *v = if c < self.c { weight[c * self.taps() + tap].wide() } else { 0.0 };
                }
            }
        });
    }

    fn for_each_phase(&self, mut f: impl FnMut(usize, usize)) {
        for rh in 0..self.gather.rows.phases() {
            for rw in 0..self.gather.cols.phases() {
                f(rh, rw);
            }
        }
    }

    fn scratch_len(&self, half: bool, workers: usize) -> usize {
        let stage = if half { self.gather.made_stage_len() } else { 0 };
        (self.taps() + 1) * self.c_pad + workers * (self.view_len() + self.fold_len() + stage) + ALIGN_SLACK
    }

    pub(super) fn run(&self, cx: &Cx, operands: Operands, scratch: &mut [f32]) {
        let Operands { read, weight, bias, made, epilogue } = operands;
        let g = &self.gather;
        let (packed, rest) = aligned(scratch).split_at_mut(self.taps() * self.c_pad);
        let (init, rest) = rest.split_at_mut(self.c_pad);
        each!(Floats, weight, weight => self.pack(weight, packed));
        init.fill(0.0);
        if let Some(bias) = bias {
            init[..self.c].copy_from_slice(bias);
        }
        let (packed, init) = (&*packed, &*init);
        let (own, made) = (SharedMut::new(rest), SharedFloats::new(made));
        let stage_len = if made.is_f32() { 0 } else { g.made_stage_len() };
        let own_len = self.view_len() + self.fold_len() + stage_len;
        let row_len = g.cols.made() * g.c_made;
        let per_task = g.units_per_task();
        cx.par.run(self.units().div_ceil(per_task), &|task, worker| {
            // SAFETY: a worker runs one task at a time.
            let own = unsafe { own.slice(worker * own_len, own_len) };
            let (view, rest) = own.split_at_mut(self.view_len());
            let (fold, stage) = rest.split_at_mut(self.fold_len());
            for idx in task * per_task..((task + 1) * per_task).min(self.units()) {
                let (image, from, to) = g.unit(idx);
                let line = image * g.rows.made() + from;
                // SAFETY: units are disjoint ranges of rows.
                let out = unsafe { made.part(line * row_len, (to - from) * row_len) };
                let place = self.fill(cx.isa, read, image, from, to, view);
                out.staged(cx.isa, stage, |out| {
                    if self.folds() {
                        // SAFETY: this runs only on a CPU with AVX2; the view is of these rows.
                        unsafe { self.make(view, place, packed, init, from, to, fold, self.c_pad) };
                        for (out, sums) in out.chunks_exact_mut(g.c_made).zip(fold.chunks_exact(self.c_pad)) {
                            for (v, sums) in out.iter_mut().zip(sums.chunks_exact(self.m)) {
                                *v = sums.iter().sum();
                            }
                        }
                    } else {
                        // SAFETY: as above.
                        unsafe { self.make(view, place, packed, init, from, to, out, self.c) };
                    }
                    if let Some(epilogue) = epilogue {
                        epilogue(line * g.cols.made() * g.c_made, out);
                    }
                });
            }
        });
    }

    /// Makes rows `from..to` of one image, with pixels `pitch` floats apart.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA, and the view is of these rows.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn make(
        &self,
        view: &[f32],
        (top, left, width): (isize, isize, usize),
        packed: &[f32],
        init: &[f32],
        from: usize,
        to: usize,
        out: &mut [f32],
        pitch: usize,
    ) {
        let g = &self.gather;
        let mut weights = packed;
        self.for_each_phase(|rh, rw| {
            let (lh, lw) = (g.rows.lattice(rh), g.cols.lattice(rw));
            let (w, rest) = weights.split_at(lh.taps * lw.taps * self.c_pad);
            weights = rest;
            let taps = Taps {
                rows: lh.taps,
                cols: lw.taps,
                row_step: lh.tap_step * width * self.c_pad,
                col_step: lw.tap_step * self.c_pad,
                pixel: lw.read_step * self.c_pad,
                c_pad: self.c_pad,
            };
            for idx in lh.within(from, to) {
                let line = lh.made_first + idx * lh.made_step - from;
                for (px, count) in pieces(lw.count, 4) {
                    let at = (line * g.cols.made() + lw.made_first + px * lw.made_step) * pitch;
                    let source = if w.is_empty() {
                        0
                    } else {
                        let row = lh.read_first + (idx * lh.read_step) as isize - top;
                        let col = lw.read_first + (px * lw.read_step) as isize - left;
                        (row as usize * width + col as usize) * self.c_pad
                    };
                    for c in (0..self.c).step_by(8) {
                        let lanes = pitch - c;
                        // SAFETY: the view covers every tap of these pixels in whole vectors; `out` has the pixels.
                        unsafe {
                            let a = view.as_ptr().add(source + c);
                            let w = w.as_ptr().add(c);
                            let i = init.as_ptr().add(c);
                            let o = out.as_mut_ptr().add(at + c);
                            match count {
                                1 => pixels::<1>(&taps, a, w, i, o, lw.made_step * pitch, lanes),
                                2 => pixels::<2>(&taps, a, w, i, o, lw.made_step * pitch, lanes),
                                3 => pixels::<3>(&taps, a, w, i, o, lw.made_step * pitch, lanes),
                                _ => pixels::<4>(&taps, a, w, i, o, lw.made_step * pitch, lanes),
                            }
                        }
                    }
                }
            }
        });
    }
}

struct Taps {
    rows: usize,
    cols: usize,
    row_step: usize,
    col_step: usize,
    pixel: usize,
    c_pad: usize,
}

/// Eight channels of `P` neighbouring pixels.
///
/// # Safety
/// The CPU has AVX2 and FMA. `a` is readable in whole vectors at every tap of the `P` pixels, `w` at every tap,
/// `init` for one vector; `out` is writable for `lanes` floats (at most 8) of each pixel.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn pixels<const P: usize>(
    taps: &Taps,
    a: *const f32,
    w: *const f32,
    init: *const f32,
    out: *mut f32,
    out_step: usize,
    lanes: usize,
) {
    // SAFETY: the caller's promise: all taps of all pixels are in the view, weights and `init` in whole vectors.
    unsafe {
        let mut acc = [_mm256_loadu_ps(init); P];
        let mut w = w;
        for i in 0..taps.rows {
            for j in 0..taps.cols {
                let a = a.add(i * taps.row_step + j * taps.col_step);
                let wv = _mm256_loadu_ps(w);
                w = w.wrapping_add(taps.c_pad);
                for p in 0..P {
                    acc[p] = _mm256_fmadd_ps(_mm256_loadu_ps(a.add(p * taps.pixel)), wv, acc[p]);
                }
            }
        }
        for p in 0..P {
            store(out.add(p * out_step), acc[p], lanes);
        }
    }
}

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, pass: ConvPass, half: bool, workers: usize) -> usize {
    match pass {
        ConvPass::Forward => Depthwise::new(s, Direction::Forward).scratch_len(half, workers),
        ConvPass::GradInput => Depthwise::new(s, Direction::Backward).scratch_len(half, workers),
        ConvPass::GradWeight => {
            let d = Depthwise::new(s, Direction::Forward);
            let stage = if half { d.gather.made_stage_len() } else { 0 };
            d.slabs().0 * d.taps() * d.c_pad + workers * (d.view_len() + stage) + ALIGN_SLACK
        }
    }
}

/// `dweight` from `x` and `dy`: slabs of units, each with a partial gradient `[tap][channel]`, added in order.
pub(super) fn grad_weight(
    s: &Conv2d,
    cx: &Cx,
    x: Floats,
    dy: Floats,
    dweight: &mut [f32],
    scratch: &mut [f32],
) {
    let d = Depthwise::new(s, Direction::Forward);
    let (slabs, per_slab) = d.slabs();
    let partial_len = d.taps() * d.c_pad;
    let (partials, own) = aligned(scratch).split_at_mut(slabs * partial_len);
    let own_len = d.view_len() + if dy.is_half() { d.gather.made_stage_len() } else { 0 };
    {
        let (partials, own) = (SharedMut::new(partials), SharedMut::new(own));
        cx.par.run(slabs, &|slab, worker| {
            // SAFETY: a worker runs one task at a time; a slab is one task.
            let (own, sums) = unsafe {
                (own.slice(worker * own_len, own_len), partials.slice(slab * partial_len, partial_len))
            };
            let (view, stage) = own.split_at_mut(d.view_len());
            sums.fill(0.0);
            for unit in slab * per_slab..((slab + 1) * per_slab).min(d.units()) {
                let (image, from, to) = d.gather.unit(unit);
                let (_, _, width) = d.fill(cx.isa, x, image, from, to, view);
                let (line, row_len) = (image * s.out_h() + from, s.out_w() * d.c);
                let dy = dy.staged(cx.isa, line * row_len, (to - from) * row_len, stage);
                // SAFETY: this runs only on a CPU with AVX2; `dy` and the view are of these rows.
                unsafe { add_unit(s, &d, view, width, dy, to - from, sums) };
            }
        });
    }
    let taps = d.taps();
    for (c, filter) in dweight.chunks_exact_mut(taps).enumerate() {
        for (tap, v) in filter.iter_mut().enumerate() {
            *v = (0..slabs).map(|slab| partials[slab * partial_len + tap * d.c_pad + c]).sum();
        }
    }
}

/// Taps that share one load of `dy`.
const TAPS: usize = 12;

/// Adds what one unit of `lines` output lines contributes to the gradient of every tap.
///
/// # Safety
/// The CPU has AVX2 and FMA. The view covers every tap of these lines in whole vectors, `dy` has `d.c` floats at each
/// pixel, and `sums` has whole vectors for every tap.
#[target_feature(enable = "avx2,fma")]
unsafe fn add_unit(
    s: &Conv2d,
    d: &Depthwise,
    view: &[f32],
    width: usize,
    dy: &[f32],
    lines: usize,
    sums: &mut [f32],
) {
    let (line_step, pixel_step) = (s.stride.0 * width * d.c_pad, s.stride.1 * d.c_pad);
    for (first, count) in pieces(d.taps(), TAPS) {
        let mut offsets = [0; TAPS];
        for (i, offset) in offsets[..count].iter_mut().enumerate() {
            let (kh, kw) = ((first + i) / s.kw, (first + i) % s.kw);
            *offset = (kh * s.dilation.0 * width + kw * s.dilation.1) * d.c_pad;
        }
        for c in (0..d.c).step_by(8) {
            let walk = LineSpan { lines, pixels: s.out_w(), line_step, pixel_step, c: d.c, lanes: d.c - c };
            // SAFETY: the view covers every tap of these rows in whole vectors, `dy` has `lanes` floats at each
            // pixel from `c` on, and `sums` has whole vectors for every tap.
            unsafe {
                let (a, b) = (view.as_ptr().add(c), dy.as_ptr().add(c));
                let out = sums.as_mut_ptr().add(first * d.c_pad + c);
                macro_rules! pick {
                    ($($n:literal)*) => {
                        match count { $($n => tap_sums::<$n>(&walk, &offsets, a, b, out, d.c_pad),)* _ => {} }
                    };
                }
                pick!(1 2 3 4 5 6 7 8 9 10 11 12);
            }
        }
    }
}

struct LineSpan {
    lines: usize,
    pixels: usize,
    line_step: usize,
    pixel_step: usize,
    c: usize,
    lanes: usize,
}

/// Eight channels of `N` taps, over all pixels of a unit.
///
/// # Safety
/// The CPU has AVX2 and FMA. `a` is readable in whole vectors along the walk from each of the `N` offsets, `b` for
/// `walk.lanes` floats of each pixel; `out` is valid for a vector of each tap, `out_step` floats apart.
#[target_feature(enable = "avx2,fma")]
unsafe fn tap_sums<const N: usize>(
    walk: &LineSpan,
    offsets: &[usize; TAPS],
    a: *const f32,
    b: *const f32,
    out: *mut f32,
    out_step: usize,
) {
    let lanes = mask(walk.lanes.min(8));
    let mut acc = [_mm256_setzero_ps(); N];
    // SAFETY: the caller's promise.
    unsafe {
        for line in 0..walk.lines {
            for px in 0..walk.pixels {
                let dy = _mm256_maskload_ps(b.add((line * walk.pixels + px) * walk.c), lanes);
                let a = a.add(line * walk.line_step + px * walk.pixel_step);
                for t in 0..N {
                    acc[t] = _mm256_fmadd_ps(_mm256_loadu_ps(a.add(offsets[t])), dy, acc[t]);
                }
            }
        }
        for t in 0..N {
            let at = out.add(t * out_step);
            _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), acc[t]));
        }
    }
}
