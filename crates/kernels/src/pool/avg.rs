//! Average pooling. The divisor is the product of the counts of the row's and the column's window.

use super::{Pool2d, Window};
use crate::lanes::twin;
use crate::{Cx, Floats, FloatsMut, SharedFloats};

impl Pool2d {
    /// The means.
    pub fn avg_forward(&self, cx: &Cx, x: Floats, y: FloatsMut, scratch: &mut [f32]) {
        assert_eq!(x.len(), self.in_len(), "x is [n, h, w, c]");
        assert_eq!(y.len(), self.out_len(), "y is [n, out_h, out_w, c]");
        let out = self.out_w() * self.c;
        if out == 0 {
            return;
        }
        let halves = x.is_half() || y.is_half();
        let y = SharedFloats::new(y);
        self.outputs(cx, x, halves, scratch, |row, x, window, _, y_stage| {
            // SAFETY: output rows do not overlap, and each is visited once.
            let y = unsafe { y.part(row * out, out) };
            y.staged(cx.isa, y_stage, |y| forward_row(cx.isa, self, x, window, y));
        });
    }

    /// `dx` gets each `dy`, divided as in the forward, at every pixel of its window; it overwrites.
    pub fn avg_backward(&self, cx: &Cx, dy: Floats, dx: FloatsMut, scratch: &mut [f32]) {
        assert_eq!(dx.len(), self.in_len(), "dx is [n, h, w, c]");
        assert_eq!(dy.len(), self.out_len(), "dy is [n, out_h, out_w, c]");
        self.inputs(cx, dy, dx, scratch, |_, dy, window, from, dx| {
            backward_row(cx.isa, self, dy, window, from, dx);
        });
    }
}

twin! { fn forward_row(p: &Pool2d, x: &[f32], rows: Window, y: &mut [f32]) = forward_row_body }
twin! { fn backward_row(p: &Pool2d, dy: &[f32], rows: Window, from: usize, dx: &mut [f32]) = backward_row_body }

#[inline(always)]
fn forward_row_body(p: &Pool2d, x: &[f32], rows: Window, y: &mut [f32]) {
    let (c, w) = (p.c, p.w);
    for (cols, y) in p.cols.iter().zip(y.chunks_exact_mut(c)) {
        y.fill(0.0);
        for iy in rows.start..rows.end {
            // A row of the window is contiguous; two pixels at a time halve the traffic on y.
            let line = &x[(iy * w + cols.start) * c..(iy * w + cols.end) * c];
            let pairs = line.chunks_exact(2 * c);
            for (y, &v) in y.iter_mut().zip(pairs.remainder()) {
                *y += v;
            }
            for pair in pairs {
                let (a, b) = (&pair[..c], &pair[c..2 * c]);
                for j in 0..c {
                    y[j] += a[j] + b[j];
                }
            }
        }
        let inv = 1.0 / (rows.count * cols.count) as f32;
        for y in y.iter_mut() {
            *y *= inv;
        }
    }
}

#[inline(always)]
fn backward_row_body(p: &Pool2d, dy: &[f32], rows: Window, from: usize, dx: &mut [f32]) {
    let (c, w) = (p.c, p.w);
    for (cols, dy) in p.cols.iter().zip(dy.chunks_exact(c)) {
        let inv = 1.0 / (rows.count * cols.count) as f32;
        for iy in rows.start..rows.end {
            let line = &mut dx[((iy - from) * w + cols.start) * c..((iy - from) * w + cols.end) * c];
            for dx in line.chunks_exact_mut(c) {
                for j in 0..c {
                    dx[j] += dy[j] * inv;
                }
            }
        }
    }
}
