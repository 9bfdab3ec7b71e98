//! Max and average pooling of channels-last images `[n, h, w, c]`, with fixed or adaptive windows.
//!
//! A [`Pool2d`] holds the window of each output row and column, made once; the kernels know nothing of strides and
//! padding. Outputs are `[n, out_h, out_w, c]`, and all loops run along the channels of a pixel. Images and gradients may be
//! stored in half: the rows of a window are widened together, and gradients are rounded once no later window adds to them.
//!
//! # Layout
//! - [`max`][]: maxima and where they were.
//! - [`avg`][]: means.

pub mod avg;
pub mod max;
#[cfg(target_arch = "x86_64")]
mod pairs;

use crate::cx::SharedMut;
use crate::stage::RowStage;
use crate::{Cx, Floats, FloatsMut, SharedFloats};
use std::ops::Range;

/// The inputs of one output along one dim, and by how many to divide.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// The first input.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// What the mean divides by along this dim: `end - start`, or with the padding counted too.
    pub count: usize,
}

/// The fixed windows of an ordinary pooling layer; dilation is 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fixed {
    /// Height and width of the window.
    pub kernel: [usize; 2],
    /// Steps from one window to the next.
    pub stride: [usize; 2],
    /// Rows and columns of padding on each side, at most half the kernel.
    pub padding: [usize; 2],
    /// Whether means divide by the padding too; PyTorch's default is true. Maxima never see the padding.
    pub count_include_pad: bool,
}

/// Pooling of `[n, h, w, c]` images.
#[derive(Clone, Debug)]
pub struct Pool2d {
    /// Images.
    pub n: usize,
    /// Input height.
    pub h: usize,
    /// Input width.
    pub w: usize,
    /// Channels.
    pub c: usize,
    /// The window of each output row.
    rows: Vec<Window>,
    /// The window of each output column.
    cols: Vec<Window>,
}

impl Pool2d {
    /// Windows of one size at one stride; the output has `(h + 2·padding - kernel) / stride + 1` rows, or none if the
    /// window is larger than the padded image.
    ///
    /// Panics if a stride or kernel is 0 or a padding is more than half its kernel: such a window could be empty.
    pub fn fixed(n: usize, h: usize, w: usize, c: usize, f: Fixed) -> Pool2d {
        let windows = |len: usize, k: usize| {
            let (kernel, stride, pad) = (f.kernel[k], f.stride[k], f.padding[k]);
            assert!(kernel > 0 && stride > 0, "kernel and stride are at least 1");
            assert!(pad <= kernel / 2, "padding {pad} is more than half of kernel {kernel}");
            let outputs = if len == 0 { 0 } else { (len + 2 * pad + stride).saturating_sub(kernel) / stride };
            (0..outputs)
                .map(|i| {
                    let (start, end) =
                        ((i * stride).saturating_sub(pad), (i * stride + kernel - pad).min(len));
                    Window { start, end, count: if f.count_include_pad { kernel } else { end - start } }
                })
                .collect()
        };
        let (rows, cols) = (windows(h, 0), windows(w, 1));
        Pool2d { n, h, w, c, rows, cols }
    }

    /// Windows that divide the input between `out_h × out_w` outputs: `floor(i·h/out) .. ceil((i+1)·h/out)`.
    /// `1 × 1` is the global mean or maximum.
    pub fn adaptive(n: usize, h: usize, w: usize, c: usize, out_h: usize, out_w: usize) -> Pool2d {
        let windows = |len: usize, out: usize| {
            let out = if len == 0 { 0 } else { out };
            (0..out)
                .map(|i| {
                    let (start, end) = (i * len / out, ((i + 1) * len).div_ceil(out));
                    Window { start, end, count: end - start }
                })
                .collect()
        };
        let (rows, cols) = (windows(h, out_h), windows(w, out_w));
        Pool2d { n, h, w, c, rows, cols }
    }

    /// Output height.
    pub fn out_h(&self) -> usize {
        self.rows.len()
    }
    /// Output width.
    pub fn out_w(&self) -> usize {
        self.cols.len()
    }
    /// Elements of the input.
    pub fn in_len(&self) -> usize {
        self.n * self.h * self.w * self.c
    }
    /// Elements of the output.
    pub fn out_len(&self) -> usize {
        self.n * self.out_h() * self.out_w() * self.c
    }

    /// How many floats of scratch each method needs; `halves`: whether what is read or written is stored in half.
    pub fn scratch_len(&self, halves: bool, workers: usize) -> usize {
        self.stage(halves).len(workers)
    }

    /// A buffer for each worker: the input rows of a window, and a row of outputs.
    fn stage(&self, halves: bool) -> RowStage {
        RowStage::of_rows(halves, 1, 1, self.window_len() + self.out_w() * self.c)
    }

    /// Elements of the input rows of the highest window.
    fn window_len(&self) -> usize {
        self.rows.iter().map(|r| r.end - r.start).max().unwrap_or(0) * self.w * self.c
    }

    /// How many output rows (of all images) make a forward task: about 16 Ki inputs are read.
    fn task_rows(&self) -> usize {
        let read = self.rows.first().map_or(1, |r| r.end - r.start) * self.w * self.c;
        (16 * 1024 / read.max(1)).max(1)
    }

    /// How a backward pass is cut: each output row owns the input rows up to the next one's window if no two windows
    /// share a row; otherwise a task is a whole image.
    fn disjoint_rows(&self) -> bool {
        self.rows.windows(2).all(|r| r[0].end <= r[1].start)
    }

    /// Runs `f(output row of all images, its image or the rows of its window in f32, its window there, how many rows that
    /// window was moved up, buffer for outputs)` on tasks of output rows.
    fn outputs(
        &self,
        cx: &Cx,
        x: Floats,
        halves: bool,
        scratch: &mut [f32],
        f: impl Fn(usize, &[f32], Window, usize, &mut [f32]) + Sync,
    ) {
        let (out_h, step, line) = (self.out_h(), self.task_rows(), self.w * self.c);
        let all = self.n * out_h;
        let stage = self.stage(halves);
        assert!(scratch.len() >= stage.len(cx.par.workers()), "scratch is too short");
        let scratch = SharedMut::new(scratch);
        cx.par.run(all.div_ceil(step), &|task, worker| {
            // SAFETY: workers have their own buffers.
            let [buffer] = unsafe { stage.buffers(scratch, worker) };
            let (rows, out) = buffer.split_at_mut(if halves { self.window_len() } else { 0 });
            for row in task * step..((task + 1) * step).min(all) {
                let (image, window) = (row / out_h, self.rows[row % out_h]);
                if let Floats::F32(x) = x {
                    f(row, &x[image * self.h * line..][..self.h * line], window, 0, out);
                    continue;
                }
                let (first, n) = (window.start, window.end - window.start);
                let x = x.staged(cx.isa, (image * self.h + first) * line, n * line, rows);
                f(row, x, Window { start: 0, end: n, ..window }, first, out);
            }
        });
    }

    /// Zeroes dx and runs `f(output row of all images, its dy, its window, the input row that dx starts at, dx from that
    /// row on)` for the output rows of each, in an order that no two tasks share inputs.
    fn inputs(
        &self,
        cx: &Cx,
        dy: Floats,
        mut dx: FloatsMut,
        scratch: &mut [f32],
        f: impl Fn(usize, &[f32], Window, usize, &mut [f32]) + Sync,
    ) {
        let halves = dy.is_half() || dx.is_half();
        let stage = self.stage(halves);
        assert!(scratch.len() >= stage.len(cx.par.workers()), "scratch is too short");
        let (out_h, line, out) = (self.out_h(), self.w * self.c, self.out_w() * self.c);
        if line == 0 || out_h == 0 || out == 0 {
            return dx.clear();
        }
        let disjoint = self.disjoint_rows();
        let step = if disjoint { self.task_rows().min(out_h) } else { out_h };
        let per_image = out_h.div_ceil(step);
        let (dx, scratch) = (SharedFloats::new(dx), SharedMut::new(scratch));
        cx.par.run(self.n * per_image, &|task, worker| {
            // SAFETY: workers have their own buffers.
            let [buffer] = unsafe { stage.buffers(scratch, worker) };
            let (rows, dy_stage) = buffer.split_at_mut(if halves { self.window_len() } else { 0 });
            let image = task / per_image;
            let outs = task % per_image * step..((task % per_image + 1) * step).min(out_h);
            let mut run = |row: usize, from: usize, part: &mut [f32]| {
                let dy = dy.staged(cx.isa, (image * out_h + row) * out, out, dy_stage);
                f(image * out_h + row, dy, self.rows[row], from, part);
            };
            // One output row at a time, so that its inputs are still in cache after they are zeroed.
            let cut = if disjoint { 1 } else { step };
            for first in outs.step_by(cut) {
                let last = (first + cut).min(out_h);
                let owned = self.owned(first, last);
                // SAFETY: the input rows between the starts of disjoint windows, or whole images, do not overlap, and
                // each task runs once.
                let part = unsafe { dx.part((image * self.h + owned.start) * line, owned.len() * line) };
                match part {
                    FloatsMut::F32(part) => {
                        part.fill(0.0);
                        (first..last).for_each(|row| run(row, owned.start, part));
                    }
                    half => self.roll(cx, first..last, owned, half, rows, &mut run),
                }
            }
        });
    }

    /// Sums the input rows `owned` of the output rows `outs` in `buffer`, which has room for those of one window: rows are
    /// rounded into `dx` as soon as the next window starts below them.
    fn roll(
        &self,
        cx: &Cx,
        outs: Range<usize>,
        owned: Range<usize>,
        mut dx: FloatsMut,
        buffer: &mut [f32],
        run: &mut impl FnMut(usize, usize, &mut [f32]),
    ) {
        let line = self.w * self.c;
        // The buffer holds the rows from `from` on; those after the last window so far are zero.
        let mut from = owned.start;
        buffer.fill(0.0);
        for row in outs.clone() {
            let end = self.rows[row].end;
            run(row, from, buffer);
            let next = if row + 1 == outs.end { owned.end } else { self.rows[row + 1].start };
            let done = next.min(end) - from;
            dx.part((from - owned.start) * line, done * line).round(cx.isa, &buffer[..done * line]);
            dx.part((from + done - owned.start) * line, (next - from - done) * line).clear();
            if row + 1 < outs.end {
                buffer.copy_within(done * line.., 0);
                let kept = buffer.len() - done * line;
                buffer[kept..].fill(0.0);
                from = next;
            }
        }
    }

    /// The input rows that output rows `first..last` own: all, if all of them are asked for.
    fn owned(&self, first: usize, last: usize) -> Range<usize> {
        let start = if first == 0 { 0 } else { self.rows[first].start };
        let end = if last == self.rows.len() { self.h } else { self.rows[last].start };
        start..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{HALVES, OwnedFloats, same_rounded};
    use crate::lanes::testing::{close, contexts, data, same_bits};

    fn fixed(kernel: usize, stride: usize, padding: usize, count_include_pad: bool) -> Fixed {
        Fixed { kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 2], count_include_pad }
    }

    /// Maxima, where they were, means, and the gradients of both, in a format.
    fn run(cx: &Cx, p: &Pool2d, [x, dy]: [&OwnedFloats; 2]) -> [OwnedFloats; 5] {
        let (dtype, x, dy) = (x.get().dtype(), x.get(), dy.get());
        let [mut y, mut ya] = [(); 2].map(|()| OwnedFloats::unset(dtype, p.out_len()));
        let [mut dx, mut dxa] = [(); 2].map(|()| OwnedFloats::unset(dtype, p.in_len()));
        let mut argmax = vec![-1i32; p.out_len()];
        let s = &mut vec![f32::NAN; p.scratch_len(x.is_half(), cx.par.workers())];
        p.max_forward(cx, x, y.get_mut(), &mut argmax, s);
        p.max_backward(cx, dy, &argmax, dx.get_mut(), s);
        p.avg_forward(cx, x, ya.get_mut(), s);
        p.avg_backward(cx, dy, dxa.get_mut(), s);
        [y, OwnedFloats::F32(argmax.iter().map(|&i| i as f32).collect()), ya, dx, dxa]
    }

    fn check(p: &Pool2d, x: &[f32]) {
        let (dy, out) = (data(8, p.out_len()), p.out_len());
        let mut runs = vec![];
        for cx in contexts() {
            let of_f32 = [&OwnedFloats::F32(x.to_vec()), &OwnedFloats::F32(dy.clone())];
            runs.push(run(&cx, p, of_f32).map(|v| v.wide()).concat());
            for half in HALVES {
                let [x, dy] = [x, &dy].map(|v| OwnedFloats::new(half, v));
                let wide = [&x, &dy].map(|v| OwnedFloats::F32(v.wide()));
                same_rounded(&format!("{p:?}"), &run(&cx, p, [&x, &dy]), &run(&cx, p, [&wide[0], &wide[1]]));
            }
        }
        same_bits("pool", &runs);
        let [mut y, mut arg, mut ya] = [vec![0.0; out], vec![0.0; out], vec![0.0; out]];
        let [mut dx, mut dxa] = [vec![0.0; p.in_len()], vec![0.0; p.in_len()]];
        for o in 0..out {
            let (j, rest) = (o % p.c, o / p.c);
            let (ox, rest) = (rest % p.out_w(), rest / p.out_w());
            let (oy, image) = (rest % p.out_h(), rest / p.out_h());
            let (r, c) = (p.rows[oy], p.cols[ox]);
            let (mut best, mut at) = (f32::NEG_INFINITY, r.start * p.w + c.start);
            let base = image * p.h * p.w;
            let share = f64::from(dy[o]) / (r.count * c.count) as f64;
            for iy in r.start..r.end {
                for ix in c.start..c.end {
                    let pixel = iy * p.w + ix;
                    let v = x[(base + pixel) * p.c + j];
                    if v > best || v.is_nan() {
                        (best, at) = (v, pixel);
                    }
                    ya[o] += f64::from(v) / (r.count * c.count) as f64;
                    dxa[(base + pixel) * p.c + j] += share;
                }
            }
            (y[o], arg[o]) = (f64::from(best), at as f64);
            dx[(base + at) * p.c + j] += f64::from(dy[o]);
        }
        let mut at = 0;
        for (name, want) in ["max", "argmax", "avg", "max dx", "avg dx"].iter().zip([y, arg, ya, dx, dxa]) {
            close(&format!("{p:?} {name}"), &runs[0][at..at + want.len()], &want, 1e-5);
            at += want.len();
        }
    }

    #[test]
    fn matches_the_textbook() {
        for (n, h, w, c) in [
            (0, 4, 4, 3),
            (1, 1, 1, 1),
            (2, 4, 4, 3),
            (2, 5, 38, 6),
            (1, 4, 23, 1),
            (1, 2, 40, 7),
            (1, 5, 7, 9),
            (3, 8, 6, 64),
            (2, 7, 7, 65),
        ] {
            // Coarse values make many ties.
            let x: Vec<f32> = data(5, n * h * w * c).iter().map(|v| (v * 4.0).round()).collect();
            for f in [
                fixed(1, 1, 0, true),
                fixed(2, 2, 0, true),
                fixed(2, 1, 1, true),
                fixed(3, 2, 1, true),
                fixed(3, 2, 1, false),
                fixed(2, 3, 0, true),
                Fixed { kernel: [3, 2], stride: [1, 2], padding: [0, 1], count_include_pad: false },
            ] {
                check(&Pool2d::fixed(n, h, w, c, f), &x);
            }
            for (oh, ow) in [(1, 1), (2, 3), (3, 3), (h, w), (0, 2), (9, 4)] {
                check(&Pool2d::adaptive(n, h, w, c, oh, ow), &x);
            }
        }
    }

    #[test]
    fn shapes_are_pytorchs() {
        let p = Pool2d::fixed(1, 7, 8, 1, fixed(3, 2, 1, true));
        assert_eq!((p.out_h(), p.out_w()), (4, 4));
        assert_eq!(Pool2d::fixed(1, 1, 1, 1, fixed(3, 1, 0, true)).out_len(), 0);
        let p = Pool2d::adaptive(1, 7, 1, 1, 3, 1);
        assert_eq!(p.rows.iter().map(|r| (r.start, r.end)).collect::<Vec<_>>(), [(0, 3), (2, 5), (4, 7)]);
    }

    #[test]
    fn nan_and_minus_infinity_go_through_as_in_pytorch() {
        const NO: f32 = f32::NEG_INFINITY;
        for (h, w) in [(2, 2), (1, 4)] {
            let p = Pool2d::adaptive(1, h, w, 1, 1, 1);
            for (x, want, at) in [
                ([1.0, f32::NAN, 5.0, 2.0], f32::NAN, 1),
                ([f32::NAN, 9.0, f32::NAN, 2.0], f32::NAN, 2),
                ([NO; 4], NO, 0),
                ([NO, 3.0, 3.0, NO], 3.0, 1),
            ] {
                for cx in contexts() {
                    let (mut y, mut argmax) = ([0.0], [9]);
                    p.max_forward(&cx, Floats::F32(&x), FloatsMut::F32(&mut y), &mut argmax, &mut []);
                    assert_eq!((y[0].to_bits() << 10, argmax[0]), (want.to_bits() << 10, at), "{x:?}");
                }
            }
        }
    }
}
