//! The definition of convolution and its two gradients as plain loops: the oracle of the fast algorithms, and the
//! fallback without SIMD. Sums are in f64, so that differences come from the other side.

use super::{Conv2d, RunEpilogue};
use crate::floats::{Float, FloatsMut, SharedFloats};
use crate::{Cx, Isa};

/// Values that are made together where they cannot be made in place.
const RUN: usize = 64;

/// Writes value `i` of `y` as `value(i)`, in f32; the epilogue sees them, counted from `first`, before they are rounded.
fn make(isa: Isa, y: FloatsMut, first: usize, value: impl Fn(usize) -> f32, epilogue: Option<&RunEpilogue>) {
    let run = if y.is_half() { RUN } else { y.len().max(1) };
    let (len, y) = (y.len(), SharedFloats::new(y));
    for start in (0..len).step_by(run) {
        // SAFETY: one part at a time.
        unsafe { y.part(start, (len - start).min(run)) }.staged(isa, &mut [0.0; RUN], |y| {
            for (i, v) in y.iter_mut().enumerate() {
                *v = value(start + i);
            }
            if let Some(epilogue) = epilogue {
                epilogue(first + start, y);
            }
        });
    }
}

/// Runs `f(line, pixels of the line)` for each of the lines of `len` elements, in parallel.
fn for_each_line(cx: &Cx, y: FloatsMut, len: usize, f: impl Fn(usize, FloatsMut) + Sync) {
    let y = SharedFloats::new(y);
    cx.par.run(y.len() / len.max(1), &|line, _| {
        // SAFETY: lines do not overlap, and each has one task.
        f(line, unsafe { y.part(line * len, len) });
    });
}

/// The input coordinate behind output `o` and tap `k`; `None` in the padding.
#[inline]
fn tap(o: usize, k: usize, stride: usize, padding: usize, dilation: usize, len: usize) -> Option<usize> {
    (o * stride + k * dilation).checked_sub(padding).filter(|&i| i < len)
}

impl Conv2d {
    #[inline]
    fn row_tap(&self, oh: usize, kh: usize) -> Option<usize> {
        tap(oh, kh, self.stride.0, self.padding.0, self.dilation.0, self.h)
    }
    #[inline]
    fn col_tap(&self, ow: usize, kw: usize) -> Option<usize> {
        tap(ow, kw, self.stride.1, self.padding.1, self.dilation.1, self.w)
    }
}

/// `y = conv(x, weight) + bias`, one row of output pixels per task.
pub(super) fn forward<X: Float, W: Float>(
    s: &Conv2d,
    cx: &Cx,
    x: &[X],
    weight: &[W],
    bias: Option<&[f32]>,
    y: FloatsMut,
    epilogue: Option<&RunEpilogue>,
) {
    let (oh_n, ow_n, cg, og) = (s.out_h(), s.out_w(), s.c_in / s.groups, s.c_out / s.groups);
    for_each_line(cx, y, ow_n * s.c_out, |line, y| {
        let (n, oh) = (line / oh_n, line % oh_n);
        let value = |at: usize| {
            let (ow, co) = (at / s.c_out, at % s.c_out);
            let mut sum = bias.map_or(0.0, |b| f64::from(b[co]));
            for kh in 0..s.kh {
                let Some(ih) = s.row_tap(oh, kh) else { continue };
                for kw in 0..s.kw {
                    let Some(iw) = s.col_tap(ow, kw) else { continue };
                    let x0 = ((n * s.h + ih) * s.w + iw) * s.c_in + co / og * cg;
                    for ci in 0..cg {
                        let w = weight[((co * cg + ci) * s.kh + kh) * s.kw + kw].wide();
                        sum += f64::from(x[x0 + ci].wide()) * f64::from(w);
                    }
                }
            }
            sum as f32
        };
        make(cx.isa, y, line * ow_n * s.c_out, value, epilogue);
    });
}

/// `dx[ih, iw] = Σ dy[oh, ow] · weight` over the outputs that read it; one row of input pixels per task.
pub(super) fn grad_input<Y: Float, W: Float>(s: &Conv2d, cx: &Cx, dy: &[Y], weight: &[W], dx: FloatsMut) {
    let (oh_n, ow_n, cg, og) = (s.out_h(), s.out_w(), s.c_in / s.groups, s.c_out / s.groups);
    // The output that sees input `i` through tap `k`, if there is one.
    let seen = |i: usize, k: usize, stride: usize, padding: usize, dilation: usize, n_out: usize| {
        let from = (i + padding).checked_sub(k * dilation)?;
        (from.is_multiple_of(stride) && from / stride < n_out).then_some(from / stride)
    };
    for_each_line(cx, dx, s.w * s.c_in, |line, dx| {
        let (n, ih) = (line / s.h, line % s.h);
        let value = |at: usize| {
            let (iw, ci) = (at / s.c_in, at % s.c_in);
            let mut sum = 0.0;
            for kh in 0..s.kh {
                let Some(oh) = seen(ih, kh, s.stride.0, s.padding.0, s.dilation.0, oh_n) else {
                    continue;
                };
                for kw in 0..s.kw {
                    let Some(ow) = seen(iw, kw, s.stride.1, s.padding.1, s.dilation.1, ow_n) else {
                        continue;
                    };
                    for co in ci / cg * og..(ci / cg + 1) * og {
                        let w = weight[((co * cg + ci % cg) * s.kh + kh) * s.kw + kw].wide();
                        let dy = dy[((n * oh_n + oh) * ow_n + ow) * s.c_out + co].wide();
                        sum += f64::from(dy) * f64::from(w);
                    }
                }
            }
            sum as f32
        };
        make(cx.isa, dx, 0, value, None);
    });
}

/// `dweight[co, ci, kh, kw] = Σ x[.., ih, iw, ci] · dy[.., oh, ow, co]`; one output channel per task.
pub(super) fn grad_weight<X: Float, Y: Float>(s: &Conv2d, cx: &Cx, x: &[X], dy: &[Y], dweight: &mut [f32]) {
    let (oh_n, ow_n, cg, og) = (s.out_h(), s.out_w(), s.c_in / s.groups, s.c_out / s.groups);
    cx.for_each_chunk(dweight, cg * s.kh * s.kw, |co, filter| {
        for (at, out) in filter.iter_mut().enumerate() {
            let (ci, kh, kw) = (at / (s.kh * s.kw), at / s.kw % s.kh, at % s.kw);
            let mut sum = 0.0;
            for n in 0..s.n {
                for oh in 0..oh_n {
                    let Some(ih) = s.row_tap(oh, kh) else { continue };
                    for ow in 0..ow_n {
                        let Some(iw) = s.col_tap(ow, kw) else { continue };
                        let xv = x[((n * s.h + ih) * s.w + iw) * s.c_in + co / og * cg + ci].wide();
                        let dyv = dy[((n * oh_n + oh) * ow_n + ow) * s.c_out + co].wide();
                        sum += f64::from(xv) * f64::from(dyv);
                    }
                }
            }
            *out = sum as f32;
        }
    });
}
