//! Softmax and log-softmax over one dim, and their gradients from the outputs.
//!
//! The dim is given as `[outer, axis, inner]`, all contiguous; `inner == 1` is the last dim and the fast case. As in
//! PyTorch, a row of `-inf` alone, or with a NaN or a `+inf` in it, gives NaN throughout: kernels that mask whole rows
//! must not call this on them. Each operand is in f32, f16 or bf16.

use crate::cx::SharedMut;
use crate::exp_rows::{exp_each, exp_into, exp_sum};
use crate::lanes::{max, sum_map, sum_map2, twin};
use crate::stage::RowStage;
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

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

impl SoftmaxDim {
    /// How many floats of scratch each function of this module needs; `halves`: whether an operand is stored in half.
    pub fn scratch_len(self, halves: bool, workers: usize) -> usize {
        // Two operands and a result.
        self.stage(halves, 3).len(workers)
    }

    /// How many columns are taken together where there are halves: all, or few enough that they stay in cache.
    fn wide(self) -> usize {
        self.inner.min(64)
    }

    fn stage(self, halves: bool, n_buffers: usize) -> RowStage {
        RowStage::new(halves, n_buffers, self.axis * self.wide())
    }
}

/// `y = e^x / Σ e^x`.
pub fn softmax(cx: &Cx, shape: SoftmaxDim, x: Floats, y: FloatsMut, scratch: &mut [f32]) {
    rows(cx, shape, [x], y, scratch, |[x], inner, y| match shape.inner {
        1 => softmax_rows(cx.isa, x, shape.axis, y),
        _ => forward_columns(cx.isa, x, shape.axis, inner, false, y),
    });
}

/// `y = x - ln Σ e^x`.
pub fn log_softmax(cx: &Cx, shape: SoftmaxDim, x: Floats, y: FloatsMut, scratch: &mut [f32]) {
    rows(cx, shape, [x], y, scratch, |[x], inner, y| match shape.inner {
        1 => log_softmax_rows(cx.isa, x, shape.axis, y),
        _ => forward_columns(cx.isa, x, shape.axis, inner, true, y),
    });
}

/// `dx = y * (dy - Σ dy y)`, from softmax's y.
pub fn softmax_backward(
    cx: &Cx,
    shape: SoftmaxDim,
    dy: Floats,
    y: Floats,
    dx: FloatsMut,
    scratch: &mut [f32],
) {
    rows(cx, shape, [dy, y], dx, scratch, |[dy, y], inner, dx| match shape.inner {
        1 => softmax_backward_rows(cx.isa, dy, y, shape.axis, dx),
        _ => backward_columns(cx.isa, dy, y, shape.axis, inner, false, dx),
    });
}

/// `dx = dy - e^y * Σ dy`, from log-softmax's y.
pub fn log_softmax_backward(
    cx: &Cx,
    shape: SoftmaxDim,
    dy: Floats,
    y: Floats,
    dx: FloatsMut,
    scratch: &mut [f32],
) {
    rows(cx, shape, [dy, y], dx, scratch, |[dy, y], inner, dx| match shape.inner {
        1 => log_softmax_backward_rows(cx.isa, dy, y, shape.axis, dx),
        _ => backward_columns(cx.isa, dy, y, shape.axis, inner, true, dx),
    });
}

/// Runs `f(operands, their inner length, their output)` on tasks of whole outer rows, about 8 Ki elements each. What is
/// in half is given a few rows, or a few columns of one row, at a time: columns do not depend on each other.
fn rows<const N: usize>(
    cx: &Cx,
    shape: SoftmaxDim,
    x: [Floats; N],
    out: FloatsMut,
    scratch: &mut [f32],
    f: impl Fn([&[f32]; N], usize, &mut [f32]) + Sync,
) {
    assert!(x.iter().all(|x| x.len() == shape.len()), "operands are [outer, axis, inner]");
    assert_eq!(out.len(), shape.len(), "the output is [outer, axis, inner]");
    let halves = out.is_half() || x.iter().any(|x| x.is_half());
    let stage = shape.stage(halves, 3);
    assert!(scratch.len() >= stage.len(cx.par.workers()), "scratch is too short");
    let (isa, inner) = (cx.isa, shape.inner);
    let row = shape.axis * inner;
    if row == 0 {
        return;
    }
    let step = (8 * 1024 / row).max(1);
    let (out, scratch) = (SharedFloats::new(out), SharedMut::new(scratch));
    cx.par.run(shape.outer.div_ceil(step), &|task, worker| {
        // SAFETY: workers have their own buffers.
        let [a, b, out_stage] = unsafe { stage.buffers(scratch, worker) };
        let mut buffers = [a, b].into_iter();
        let mut stages: [&mut [f32]; N] =
            std::array::from_fn(|_| buffers.next().expect("at most two operands"));
        let outer = task * step..((task + 1) * step).min(shape.outer);
        if !halves || shape.wide() == inner {
            for r in stage.cut(outer) {
                let (first, len) = (r.start * row, r.len() * row);
                // SAFETY: tasks have disjoint rows, and each runs once.
                let out = unsafe { out.part(first, len) };
                let mut stages = stages.iter_mut();
                let x = x.map(|x| x.staged(isa, first, len, stages.next().expect("one for each")));
                out.staged(isa, out_stage, |out| f(x, inner, out));
            }
            return;
        }
        for (o, first) in outer.flat_map(|o| (0..inner).step_by(shape.wide()).map(move |first| (o, first))) {
            let wide = shape.wide().min(inner - first);
            let at = |a: usize| o * row + a * inner + first;
            for (x, stage) in x.iter().zip(stages.iter_mut()) {
                for (a, to) in stage.chunks_exact_mut(wide).take(shape.axis).enumerate() {
                    x.part(at(a), wide).widen(isa, to);
                }
            }
            let mut filled = stages.iter();
            let x = std::array::from_fn(|_| &filled.next().expect("one for each")[..shape.axis * wide]);
            f(x, wide, &mut out_stage[..shape.axis * wide]);
            for (a, from) in out_stage.chunks_exact(wide).take(shape.axis).enumerate() {
                // SAFETY: tasks have disjoint rows, and each runs once.
                unsafe { out.part(at(a), wide) }.round(isa, from);
            }
        }
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
    use crate::floats::testing::{FORMATS, OwnedFloats, same_rounded};
    use crate::lanes::testing::{close, contexts, data, same_bits};
    use polyreme_dtype::DType;

    type Gradient = fn(&Cx, SoftmaxDim, Floats, Floats, FloatsMut, &mut [f32]);

    fn gradient(
        cx: &Cx,
        shape: SoftmaxDim,
        dy: &OwnedFloats,
        y: &OwnedFloats,
        to: DType,
        f: Gradient,
    ) -> OwnedFloats {
        let mut dx = OwnedFloats::unset(to, shape.len());
        let mut s = vec![f32::NAN; shape.scratch_len(true, cx.par.workers())];
        f(cx, shape, dy.get(), y.get(), dx.get_mut(), &mut s);
        dx
    }

    /// y and dx of softmax, and of log-softmax, in a format.
    fn run(cx: &Cx, shape: SoftmaxDim, [x, dy]: [&OwnedFloats; 2], to: DType) -> [OwnedFloats; 4] {
        let (mut y, mut ly) = (OwnedFloats::unset(to, shape.len()), OwnedFloats::unset(to, shape.len()));
        let mut s =
            vec![f32::NAN; shape.scratch_len(x.get().is_half() || to != DType::F32, cx.par.workers())];
        softmax(cx, shape, x.get(), y.get_mut(), &mut s);
        log_softmax(cx, shape, x.get(), ly.get_mut(), &mut s);
        let dx = gradient(cx, shape, dy, &y, to, softmax_backward);
        let ldx = gradient(cx, shape, dy, &ly, to, log_softmax_backward);
        [y, dx, ly, ldx]
    }

    fn check(shape: SoftmaxDim, x: &[f32]) {
        let len = shape.len();
        let dy = data(9, len);
        let mut runs = vec![];
        for cx in contexts() {
            let (x, dy) = (OwnedFloats::F32(x.to_vec()), OwnedFloats::F32(dy.clone()));
            let of_f32 = run(&cx, shape, [&x, &dy], DType::F32);
            runs.push(of_f32.map(|v| v.wide()).concat());
            for (from, to) in FORMATS.into_iter().flat_map(|from| FORMATS.map(|to| (from, to))) {
                let [x, dy] = [&x, &dy].map(|v| OwnedFloats::new(from, &v.wide()));
                let wide = [&x, &dy].map(|v| OwnedFloats::F32(v.wide()));
                let [y, dx, ly, ldx] = run(&cx, shape, [&wide[0], &wide[1]], DType::F32);
                let mut want = [y, dx, ly, ldx];
                // The gradients come from the rounded y.
                let forward = [0, 2].map(|k| OwnedFloats::F32(OwnedFloats::new(to, &want[k].wide()).wide()));
                want[1] = gradient(&cx, shape, &wide[1], &forward[0], DType::F32, softmax_backward);
                want[3] = gradient(&cx, shape, &wide[1], &forward[1], DType::F32, log_softmax_backward);
                same_rounded(&format!("{shape:?} {from} to {to}"), &run(&cx, shape, [&x, &dy], to), &want);
            }
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
            softmax(&Cx::serial(), shape, Floats::F32(&rows), FloatsMut::F32(&mut y), &mut []);
            log_softmax(&Cx::serial(), shape, Floats::F32(&rows), FloatsMut::F32(&mut ly), &mut []);
            let dead = if inner == 1 { [0, 1] } else { [0, 2] };
            assert!(dead.iter().all(|&i| y[i].is_nan() && ly[i].is_nan()));
            let (one, zero) = if inner == 1 { (2, 3) } else { (1, 3) };
            assert_eq!((y[one], y[zero], ly[one], ly[zero]), (1.0, 0.0, 0.0, NO));
        }
        let mut y = [0.0; 3];
        for bad in [f32::NAN, f32::INFINITY] {
            let (x, shape) = (Floats::F32(&[1.0, bad, 2.0]), SoftmaxDim::last(1, 3));
            softmax(&Cx::serial(), shape, x, FloatsMut::F32(&mut y), &mut []);
            assert!(y.iter().all(|v| v.is_nan()));
        }
    }
}
