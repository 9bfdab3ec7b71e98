//! Softmax and log-softmax over one dim, and their gradients from the outputs.
//!
//! The dim is given as `[outer, axis, inner]`, all contiguous; `inner == 1` is the last dim and the fast case. As in
//! PyTorch, a row of `-inf` alone, or with a NaN or a `+inf` in it, gives NaN throughout: kernels that mask whole rows
//! must not call this on them.

use crate::cx::SharedMut;
use crate::exp_rows::{exp_each, exp_into, exp_sum};
use crate::lanes::{max, sum_map, sum_map2, twin};
use crate::{Cx, Isa};

/// Which dim of a contiguous array is normalised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SoftmaxDim {
    /// The product of the dims before it.
    pub outer: usize,
    /// Its own length.
    pub axis: usize,
    /// The product of the dims after it.
    pub inner: usize,
}

impl SoftmaxDim {
    /// The last dim of `[rows, d]`.
    pub fn last(rows: usize, d: usize) -> SoftmaxDim {
        SoftmaxDim { outer: rows, axis: d, inner: 1 }
    }
    fn len(self) -> usize {
        self.outer * self.axis * self.inner
    }
}

/// `y = e^x / Σ e^x`.
pub fn softmax(cx: &Cx, shape: SoftmaxDim, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), shape.len(), "x is [outer, axis, inner]");
    rows(cx, shape, y, |r, y| match shape.inner {
        1 => softmax_rows(cx.isa, &x[r], shape.axis, y),
        _ => forward_columns(cx.isa, &x[r], shape.axis, shape.inner, false, y),
    });
}

/// `y = x - ln Σ e^x`.
pub fn log_softmax(cx: &Cx, shape: SoftmaxDim, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), shape.len(), "x is [outer, axis, inner]");
    rows(cx, shape, y, |r, y| match shape.inner {
        1 => log_softmax_rows(cx.isa, &x[r], shape.axis, y),
        _ => forward_columns(cx.isa, &x[r], shape.axis, shape.inner, true, y),
    });
}

/// `dx = y * (dy - Σ dy y)`, from softmax's y.
pub fn softmax_backward(cx: &Cx, shape: SoftmaxDim, dy: &[f32], y: &[f32], dx: &mut [f32]) {
    assert_eq!(dy.len(), shape.len(), "dy is [outer, axis, inner]");
    assert_eq!(y.len(), shape.len(), "y is [outer, axis, inner]");
    rows(cx, shape, dx, |r, dx| match shape.inner {
        1 => softmax_backward_rows(cx.isa, &dy[r.clone()], &y[r], shape.axis, dx),
        _ => backward_columns(cx.isa, &dy[r.clone()], &y[r], shape.axis, shape.inner, false, dx),
    });
}

/// `dx = dy - e^y * Σ dy`, from log-softmax's y.
pub fn log_softmax_backward(cx: &Cx, shape: SoftmaxDim, dy: &[f32], y: &[f32], dx: &mut [f32]) {
    assert_eq!(dy.len(), shape.len(), "dy is [outer, axis, inner]");
    assert_eq!(y.len(), shape.len(), "y is [outer, axis, inner]");
    rows(cx, shape, dx, |r, dx| match shape.inner {
        1 => log_softmax_backward_rows(cx.isa, &dy[r.clone()], &y[r], shape.axis, dx),
        _ => backward_columns(cx.isa, &dy[r.clone()], &y[r], shape.axis, shape.inner, true, dx),
    });
}

/// Runs `f(elements, their output)` on tasks of whole outer rows, about 8 Ki elements each.
fn rows(cx: &Cx, shape: SoftmaxDim, out: &mut [f32], f: impl Fn(std::ops::Range<usize>, &mut [f32]) + Sync) {
    assert_eq!(out.len(), shape.len(), "the output is [outer, axis, inner]");
    let row = shape.axis * shape.inner;
    if row == 0 {
        return;
    }
    let step = (8 * 1024 / row).max(1);
    let out = SharedMut::new(out);
    cx.par.run(shape.outer.div_ceil(step), &|task, _| {
        let r = task * step * row..((task + 1) * step).min(shape.outer) * row;
        // SAFETY: tasks have disjoint rows, and each runs once.
        let out = unsafe { out.slice(r.start, r.len()) };
        f(r, out);
    });
}

twin! { fn softmax_rows(isa; x: &[f32], d: usize, y: &mut [f32]) = softmax_rows_body }
twin! { fn log_softmax_rows(isa; x: &[f32], d: usize, y: &mut [f32]) = log_softmax_rows_body }
twin! { fn softmax_backward_rows(dy: &[f32], y: &[f32], d: usize, dx: &mut [f32]) = softmax_backward_rows_body }
twin! { fn log_softmax_backward_rows(isa; dy: &[f32], y: &[f32], d: usize, dx: &mut [f32]) = log_softmax_backward_rows_body }
twin! { fn forward_columns(isa; x: &[f32], d: usize, inner: usize, log: bool, y: &mut [f32]) = forward_columns_body }
twin! {
    fn backward_columns(isa; dy: &[f32], y: &[f32], d: usize, inner: usize, log: bool, dx: &mut [f32])
        = backward_columns_body
}

#[inline(always)]
fn softmax_rows_body(isa: Isa, x: &[f32], d: usize, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
        let m = max(x);
        let inv = 1.0 / exp_into(isa, x, m, y);
        for y in y.iter_mut() {
            *y *= inv;
        }
    }
}

#[inline(always)]
fn log_softmax_rows_body(isa: Isa, x: &[f32], d: usize, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
        let m = max(x);
        let log_sum = exp_sum(isa, x, m).ln();
        for (y, &x) in y.iter_mut().zip(x) {
            *y = (x - m) - log_sum;
        }
    }
}

#[inline(always)]
fn softmax_backward_rows_body(dy: &[f32], y: &[f32], d: usize, dx: &mut [f32]) {
    for ((dy, y), dx) in dy.chunks_exact(d).zip(y.chunks_exact(d)).zip(dx.chunks_exact_mut(d)) {
        let dot = sum_map2(dy, y, |a, b| a * b);
        for ((dx, &dy), &y) in dx.iter_mut().zip(dy).zip(y) {
            *dx = y * (dy - dot);
        }
    }
}

#[inline(always)]
fn log_softmax_backward_rows_body(isa: Isa, dy: &[f32], y: &[f32], d: usize, dx: &mut [f32]) {
    for ((dy, y), dx) in dy.chunks_exact(d).zip(y.chunks_exact(d)).zip(dx.chunks_exact_mut(d)) {
        let sum = sum_map(dy, |v| v);
        exp_into(isa, y, 0.0, dx);
        for (dx, &dy) in dx.iter_mut().zip(dy) {
            *dx = dy - *dx * sum;
        }
    }
}

/// Columns of the inner dims that are taken together: their maxima and sums stay in L1, and runs of 2 KiB keep a
/// stride of a power of two from wasting the cache's sets (64 columns took twice as long on `[64, 48, 1024]`).
const WIDE: usize = 512;

#[inline(always)]
fn forward_columns_body(isa: Isa, x: &[f32], d: usize, inner: usize, log: bool, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(d * inner).zip(y.chunks_exact_mut(d * inner)) {
        for first in (0..inner).step_by(WIDE) {
            let wide = WIDE.min(inner - first);
            let (mut m, mut sum) = ([f32::NEG_INFINITY; WIDE], [0.0f32; WIDE]);
            let (m, sum) = (&mut m[..wide], &mut sum[..wide]);
            for x in x.chunks_exact(inner) {
                let x = &x[first..][..wide];
                for j in 0..wide {
                    // Not an `if`: that becomes masked stores, which are very slow on AMD.
                    m[j] = m[j].max(x[j]);
                }
            }
            for (x, y) in x.chunks_exact(inner).zip(y.chunks_exact_mut(inner)) {
                let (x, y) = (&x[first..][..wide], &mut y[first..][..wide]);
                exp_each(isa, x, m, y);
                for j in 0..wide {
                    sum[j] += y[j];
                }
            }
            for s in sum.iter_mut() {
                *s = if log { s.ln() } else { 1.0 / *s };
            }
            for (x, y) in x.chunks_exact(inner).zip(y.chunks_exact_mut(inner)) {
                let (x, y) = (&x[first..][..wide], &mut y[first..][..wide]);
                for j in 0..wide {
                    y[j] = if log { (x[j] - m[j]) - sum[j] } else { y[j] * sum[j] };
                }
            }
        }
    }
}

#[inline(always)]
fn backward_columns_body(isa: Isa, dy: &[f32], y: &[f32], d: usize, inner: usize, log: bool, dx: &mut [f32]) {
    let whole = d * inner;
    for ((dy, y), dx) in dy.chunks_exact(whole).zip(y.chunks_exact(whole)).zip(dx.chunks_exact_mut(whole)) {
        for first in (0..inner).step_by(WIDE) {
            let wide = WIDE.min(inner - first);
            let mut sum = [0.0f32; WIDE];
            let sum = &mut sum[..wide];
            for (dy, y) in dy.chunks_exact(inner).zip(y.chunks_exact(inner)) {
                let (dy, y) = (&dy[first..][..wide], &y[first..][..wide]);
                for j in 0..wide {
                    sum[j] += if log { dy[j] } else { dy[j] * y[j] };
                }
            }
            for (i, dx) in dx.chunks_exact_mut(inner).enumerate() {
                let at = i * inner + first;
                let (dy, y, dx) = (&dy[at..][..wide], &y[at..][..wide], &mut dx[first..][..wide]);
                if log {
                    exp_into(isa, y, 0.0, dx);
                    for j in 0..wide {
                        dx[j] = dy[j] - dx[j] * sum[j];
                    }
                } else {
                    for j in 0..wide {
                        dx[j] = y[j] * (dy[j] - sum[j]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::testing::{close, contexts, data, same_bits};

    fn check(shape: SoftmaxDim, x: &[f32]) {
        let len = shape.len();
        let dy = data(9, len);
        let mut runs = vec![];
        for cx in contexts() {
            let [mut y, mut dx, mut ly, mut ldx] = std::array::from_fn(|_| vec![f32::INFINITY; len]);
            softmax(&cx, shape, x, &mut y);
            softmax_backward(&cx, shape, &dy, &y, &mut dx);
            log_softmax(&cx, shape, x, &mut ly);
            log_softmax_backward(&cx, shape, &dy, &ly, &mut ldx);
            runs.push([y, dx, ly, ldx].concat());
        }
        same_bits("softmax", &runs[1..]);
        let f = |v: f32| f64::from(v);
        let [mut y, mut dx, mut ly, mut ldx] = std::array::from_fn(|_| vec![0.0; len]);
        for o in 0..shape.outer {
            for i in 0..shape.inner {
                let at: Vec<usize> =
                    (0..shape.axis).map(|a| (o * shape.axis + a) * shape.inner + i).collect();
                let m = at.iter().map(|&i| f(x[i])).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = at.iter().map(|&i| (f(x[i]) - m).exp()).sum();
                for &i in &at {
                    y[i] = (f(x[i]) - m).exp() / sum;
                    ly[i] = f(x[i]) - m - sum.ln();
                }
                let dot: f64 = at.iter().map(|&i| f(dy[i]) * y[i]).sum();
                let sum_dy: f64 = at.iter().map(|&i| f(dy[i])).sum();
                for &i in &at {
                    dx[i] = y[i] * (f(dy[i]) - dot);
                    ldx[i] = f(dy[i]) - ly[i].exp() * sum_dy;
                }
            }
        }
        for (k, (name, want)) in ["y", "dx", "log y", "log dx"].iter().zip([y, dx, ly, ldx]).enumerate() {
            for run in &runs[..2] {
                close(&format!("{shape:?} {name}"), &run[k * len..(k + 1) * len], &want, 2e-5);
            }
        }
    }

    #[test]
    fn matches_the_textbook() {
        for (outer, axis, inner) in [
            (0, 3, 1),
            (3, 0, 1),
            (3, 4, 0),
            (3, 1, 1),
            (5, 7, 1),
            (2, 8, 1),
            (2, 9, 1),
            (3, 33, 1),
            (70, 257, 1),
            (2, 5, 3),
            (3, 10, 64),
            (2, 17, 65),
            (1, 300, 130),
        ] {
            let shape = SoftmaxDim { outer, axis, inner };
            let x: Vec<f32> = data(3, shape.len()).iter().map(|v| v * 30.0).collect();
            check(shape, &x);
        }
    }

    #[test]
    fn masked_elements_are_exact_zeros_and_masked_rows_are_nan() {
        const NO: f32 = f32::NEG_INFINITY;
        check(SoftmaxDim::last(2, 3), &[NO, 1.0, 2.0, NO, NO, 5.0]);
        for (outer, inner) in [(2, 1), (1, 2)] {
            let shape = SoftmaxDim { outer, axis: 2, inner };
            let (mut y, mut ly) = ([0.0; 4], [0.0; 4]);
            let rows = if inner == 1 { [NO, NO, 0.0, NO] } else { [NO, 0.0, NO, NO] };
            softmax(&Cx::serial(), shape, &rows, &mut y);
            log_softmax(&Cx::serial(), shape, &rows, &mut ly);
            let dead = if inner == 1 { [0, 1] } else { [0, 2] };
            assert!(dead.iter().all(|&i| y[i].is_nan() && ly[i].is_nan()));
            let (one, zero) = if inner == 1 { (2, 3) } else { (1, 3) };
            assert_eq!((y[one], y[zero], ly[one], ly[zero]), (1.0, 0.0, 0.0, NO));
        }
        let mut y = [0.0; 3];
        for bad in [f32::NAN, f32::INFINITY] {
            softmax(&Cx::serial(), SoftmaxDim::last(1, 3), &[1.0, bad, 2.0], &mut y);
            assert!(y.iter().all(|v| v.is_nan()));
        }
    }
}
