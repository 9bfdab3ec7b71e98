//! Max pooling. Ties go to the first pixel in row-major order and a NaN wins over everything (the last one, if there
//! are several), as in PyTorch.

#[cfg(target_arch = "x86_64")]
use super::pairs;
use super::{Pool2d, Window};
use crate::cx::SharedMut;
use crate::lanes::twin;
use crate::{Cx, Floats, FloatsMut, SharedFloats};

impl Pool2d {
    /// The maxima, and for each the pixel `y * w + x` of its image where it was.
    pub fn max_forward(&self, cx: &Cx, x: Floats, y: FloatsMut, argmax: &mut [i32], scratch: &mut [f32]) {
        assert_eq!(x.len(), self.in_len(), "x is [n, h, w, c]");
        assert_eq!(y.len(), self.out_len(), "y is [n, out_h, out_w, c]");
        assert_eq!(argmax.len(), self.out_len(), "argmax is [n, out_h, out_w, c]");
        assert!(i32::try_from(self.h * self.w).is_ok(), "a pixel's number fits an i32");
        let out = self.out_w() * self.c;
        if out == 0 {
            return;
        }
        let halves = x.is_half() || y.is_half();
        let (y, argmax) = (SharedFloats::new(y), SharedMut::new(argmax));
        #[cfg(target_arch = "x86_64")]
        let pairs = cx.isa.has_avx512() && pairs::fit(self);
        self.outputs(cx, x, halves, scratch, |row, x, window, moved, y_stage| {
            // SAFETY: output rows do not overlap, and each is visited once.
            let (y, argmax) = unsafe { (y.part(row * out, out), argmax.slice(row * out, out)) };
            y.staged(cx.isa, y_stage, |y| {
                #[cfg(target_arch = "x86_64")]
                if pairs && window.end - window.start == 2 {
                    // SAFETY: the CPU has AVX-512, and the windows fit.
                    return unsafe { pairs::forward_row(self, x, window, y, argmax) };
                }
                forward_row(cx.isa, self, x, window, y, argmax);
            });
            if moved > 0 {
                argmax.iter_mut().for_each(|at| *at += (moved * self.w) as i32);
            }
        });
    }

    /// `dx` gets each `dy` at the pixel of its maximum and 0 elsewhere; it overwrites.
    pub fn max_backward(&self, cx: &Cx, dy: Floats, argmax: &[i32], dx: FloatsMut, scratch: &mut [f32]) {
        assert_eq!(dx.len(), self.in_len(), "dx is [n, h, w, c]");
        assert_eq!(dy.len(), self.out_len(), "dy is [n, out_h, out_w, c]");
        assert_eq!(argmax.len(), self.out_len(), "argmax is [n, out_h, out_w, c]");
        let out = self.out_w() * self.c;
        self.inputs(cx, dy, dx, scratch, |row, dy, window, from, dx| {
            backward_row(cx.isa, self, dy, &argmax[row * out..(row + 1) * out], window, from, dx);
        });
    }
}

twin! {
    fn forward_row(p: &Pool2d, x: &[f32], rows: Window, y: &mut [f32], argmax: &mut [i32]) = forward_row_body
}
twin! {
    fn backward_row(p: &Pool2d, dy: &[f32], argmax: &[i32], rows: Window, from: usize, dx: &mut [f32])
        = backward_row_body
}

/// Whether `v` takes the place of `best`.
#[inline(always)]
#[allow(clippy::eq_op)] // `v != v` is the vectorised form of `is_nan`.
fn wins(v: f32, best: f32) -> bool {
    (v > best) | (v != v)
}

#[inline(always)]
fn forward_row_body(p: &Pool2d, x: &[f32], rows: Window, y: &mut [f32], argmax: &mut [i32]) {
    // A number of channels below one vector is best known to the compiler.
    match p.c {
        1 => forward_narrow::<1>(p, x, rows, y, argmax),
        2 => forward_narrow::<2>(p, x, rows, y, argmax),
        3 => forward_narrow::<3>(p, x, rows, y, argmax),
        4 => forward_narrow::<4>(p, x, rows, y, argmax),
        5 => forward_narrow::<5>(p, x, rows, y, argmax),
        6 => forward_narrow::<6>(p, x, rows, y, argmax),
        7 => forward_narrow::<7>(p, x, rows, y, argmax),
        _ => forward_wide(p, x, rows, y, argmax),
    }
}

/// Few channels: each window's maxima in registers.
#[inline(always)]
fn forward_narrow<const C: usize>(p: &Pool2d, x: &[f32], rows: Window, y: &mut [f32], argmax: &mut [i32]) {
    let (ys, _) = y.as_chunks_mut::<C>();
    let (ats, _) = argmax.as_chunks_mut::<C>();
    let (pixels, _) = x.as_chunks::<C>();
    for (cols, (y, at)) in p.cols.iter().zip(ys.iter_mut().zip(ats)) {
        let (mut best, mut idx) = ([f32::NEG_INFINITY; C], [(rows.start * p.w + cols.start) as i32; C]);
        for iy in rows.start..rows.end {
            let line = iy * p.w;
            for (ix, v) in pixels[line + cols.start..line + cols.end].iter().enumerate() {
                let here = (line + cols.start + ix) as i32;
                for l in 0..C {
                    (best[l], idx[l]) = if wins(v[l], best[l]) { (v[l], here) } else { (best[l], idx[l]) };
                }
            }
        }
        (*y, *at) = (best, idx);
    }
}

#[inline(always)]
fn forward_wide(p: &Pool2d, x: &[f32], rows: Window, y: &mut [f32], argmax: &mut [i32]) {
    let (c, w) = (p.c, p.w);
    let pixel = |iy: usize, ix: usize| &x[(iy * w + ix) * c..][..c];
    let outputs = y.chunks_exact_mut(c).zip(argmax.chunks_exact_mut(c));
    for (cols, (y, at)) in p.cols.iter().zip(outputs) {
        if rows.end - rows.start == 2 && cols.end - cols.start == 2 {
            let (iy, ix) = (rows.start, cols.start);
            let (a, b, d, e) = (pixel(iy, ix), pixel(iy, ix + 1), pixel(iy + 1, ix), pixel(iy + 1, ix + 1));
            let first = (iy * w + ix) as i32;
            let below = first + w as i32;
            for j in 0..c {
                let (mut best, mut idx) = (a[j], first);
                (best, idx) = if wins(b[j], best) { (b[j], first + 1) } else { (best, idx) };
                (best, idx) = if wins(d[j], best) { (d[j], below) } else { (best, idx) };
                (best, idx) = if wins(e[j], best) { (e[j], below + 1) } else { (best, idx) };
                y[j] = best;
                at[j] = idx;
            }
            continue;
        }
        let whole = c - c % BLOCK;
        for first in (0..whole).step_by(BLOCK) {
            window::<BLOCK>(p, x, rows, *cols, first, y, at);
        }
        for first in whole..c {
            window::<1>(p, x, rows, *cols, first, y, at);
        }
    }
}

/// Channels whose maxima stay in registers: kept in memory, they would be written with masked stores, which are very
/// slow on AMD.
const BLOCK: usize = 16;

/// The maxima of one window, of `N` channels from `first` on.
#[inline(always)]
fn window<const N: usize>(
    p: &Pool2d,
    x: &[f32],
    rows: Window,
    cols: Window,
    first: usize,
    y: &mut [f32],
    at: &mut [i32],
) {
    let start = (rows.start * p.w + cols.start) as i32;
    let (mut best, mut idx) = ([f32::NEG_INFINITY; N], [start; N]);
    for iy in rows.start..rows.end {
        for ix in cols.start..cols.end {
            let (v, here) = (&x[(iy * p.w + ix) * p.c + first..][..N], (iy * p.w + ix) as i32);
            for l in 0..N {
                (best[l], idx[l]) = if wins(v[l], best[l]) { (v[l], here) } else { (best[l], idx[l]) };
            }
        }
    }
    y[first..first + N].copy_from_slice(&best);
    at[first..first + N].copy_from_slice(&idx);
}

#[inline(always)]
fn backward_row_body(p: &Pool2d, dy: &[f32], argmax: &[i32], rows: Window, from: usize, dx: &mut [f32]) {
    let (c, w) = (p.c, p.w);
    if c < 8 {
        // Vectors would be short: one value at a time goes to where its maximum was.
        for (dy, at) in dy.chunks_exact(c).zip(argmax.chunks_exact(c)) {
            for j in 0..c {
                dx[(at[j] as usize - from * w) * c + j] += dy[j];
            }
        }
        return;
    }
    // Every pixel of a window looks for its own number: compares vectorise, a scatter would not.
    for (cols, (dy, at)) in p.cols.iter().zip(dy.chunks_exact(c).zip(argmax.chunks_exact(c))) {
        for iy in rows.start..rows.end {
            for ix in cols.start..cols.end {
                let idx = (iy * w + ix) as i32;
                let dx = &mut dx[((iy - from) * w + ix) * c..][..c];
                for j in 0..c {
                    dx[j] += if at[j] == idx { dy[j] } else { 0.0 };
                }
            }
        }
    }
}
