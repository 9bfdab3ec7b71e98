//! Layer norm and RMS norm: each row of `[rows, d]` by itself.
//!
//! A row stays in L1 while it is read two or three times, so these are bound by memory too. RMS norm is layer norm
//! with the mean taken as 0, and both share their passes. x, y and their gradients may be stored in half; weights and
//! statistics are f32.

use crate::cx::SharedMut;
use crate::lanes::{LANES, fold, sum_map, twin};
use crate::stage::RowStage;
use crate::{Cx, Floats, FloatsMut, SharedFloats};
use std::ops::Range;

/// Layer norm over the last dim: `y = (x - mean) * rstd * weight + bias`, with the biased variance.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// How many rows.
    pub rows: usize,
    /// The length of a row.
    pub d: usize,
    /// Added to the variance.
    pub eps: f32,
}

/// RMS norm over the last dim: `y = x * rstd * weight` with `rstd = 1 / sqrt(mean(x²) + eps)`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// How many rows.
    pub rows: usize,
    /// The length of a row.
    pub d: usize,
    /// Added to the mean square.
    pub eps: f32,
}

impl LayerNorm {
    /// How many floats of scratch `forward` needs; `halves`: whether x or y is stored in half.
    pub fn forward_scratch_len(&self, halves: bool, workers: usize) -> usize {
        forward_stage(halves, self.d).len(workers)
    }

    /// How many floats of scratch `backward` needs; `halves`: whether dy, x or dx is stored in half.
    pub fn backward_scratch_len(&self, halves: bool, workers: usize) -> usize {
        slabs(self.rows, self.d) * 2 * self.d + backward_stage(halves, self.d).len(workers)
    }

    /// Writes y, and `mean[rows]` and `rstd[rows]` for the backward. A missing weight is 1, a missing bias 0.
    pub fn forward(
        &self,
        cx: &Cx,
        x: Floats,
        weight: Option<&[f32]>,
        bias: Option<&[f32]>,
        y: FloatsMut,
        mean: &mut [f32],
        rstd: &mut [f32],
        scratch: &mut [f32],
    ) {
        assert_eq!(mean.len(), self.rows, "mean is [rows]");
        forward(cx, self.rows, self.d, self.eps, x, weight, bias, y, Some(mean), rstd, scratch);
    }

    /// The gradients, from the forward's x, mean and rstd.
    ///
    /// With `h = (x - mean) * rstd` and `g = dy * weight`: `dx = rstd * (g - mean(g) - h * mean(g h))`,
    /// `dweight = Σ dy h` and `dbias = Σ dy` over the rows.
    pub fn backward(
        &self,
        cx: &Cx,
        dy: Floats,
        x: Floats,
        weight: Option<&[f32]>,
        mean: &[f32],
        rstd: &[f32],
        dx: FloatsMut,
        dweight: Option<&mut [f32]>,
        dbias: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) {
        assert_eq!(mean.len(), self.rows, "mean is [rows]");
        backward(cx, self.rows, self.d, dy, x, weight, Some(mean), rstd, dx, dweight, dbias, scratch);
    }
}

impl RmsNorm {
    /// How many floats of scratch `forward` needs; `halves`: whether x or y is stored in half.
    pub fn forward_scratch_len(&self, halves: bool, workers: usize) -> usize {
        forward_stage(halves, self.d).len(workers)
    }

    /// How many floats of scratch `backward` needs; `halves`: whether dy, x or dx is stored in half.
    pub fn backward_scratch_len(&self, halves: bool, workers: usize) -> usize {
        slabs(self.rows, self.d) * 2 * self.d + backward_stage(halves, self.d).len(workers)
    }

    /// Writes y, and `rstd[rows]` for the backward. A missing weight is 1.
    pub fn forward(
        &self,
        cx: &Cx,
        x: Floats,
        weight: Option<&[f32]>,
        y: FloatsMut,
        rstd: &mut [f32],
        scratch: &mut [f32],
    ) {
        forward(cx, self.rows, self.d, self.eps, x, weight, None, y, None, rstd, scratch);
    }

    /// The gradients, from the forward's x and rstd: those of [`LayerNorm::backward`] without the terms of the mean.
    pub fn backward(
        &self,
        cx: &Cx,
        dy: Floats,
        x: Floats,
        weight: Option<&[f32]>,
        rstd: &[f32],
        dx: FloatsMut,
        dweight: Option<&mut [f32]>,
        scratch: &mut [f32],
    ) {
        backward(cx, self.rows, self.d, dy, x, weight, None, rstd, dx, dweight, None, scratch);
    }
}

/// Rows of a forward task: 16 Ki floats.
fn task_rows(d: usize) -> usize {
    (16 * 1024 / d.max(1)).max(1)
}

/// Rows of a backward slab: at most 32 slabs, whose sums of columns are added up at the end.
fn slab_rows(rows: usize, d: usize) -> usize {
    rows.div_ceil(32).max(task_rows(d))
}

fn slabs(rows: usize, d: usize) -> usize {
    rows.div_ceil(slab_rows(rows, d))
}

/// Buffers for rows of x and y.
fn forward_stage(halves: bool, d: usize) -> RowStage {
    RowStage::new(halves, 2, d)
}

/// Buffers for rows of dy, x and dx.
fn backward_stage(halves: bool, d: usize) -> RowStage {
    RowStage::new(halves, 3, d)
}

fn forward(
    cx: &Cx,
    rows: usize,
    d: usize,
    eps: f32,
    x: Floats,
    weight: Option<&[f32]>,
    bias: Option<&[f32]>,
    y: FloatsMut,
    mean: Option<&mut [f32]>,
    rstd: &mut [f32],
    scratch: &mut [f32],
) {
    assert_eq!(x.len(), rows * d, "x is [rows, d]");
    assert_eq!(y.len(), rows * d, "y is [rows, d]");
    assert_eq!(rstd.len(), rows, "rstd is [rows]");
    assert!(weight.is_none_or(|w| w.len() == d), "weight is [d]");
    assert!(bias.is_none_or(|b| b.len() == d), "bias is [d]");
    let stage = forward_stage(x.is_half() || y.is_half(), d);
    assert!(scratch.len() >= stage.len(cx.par.workers()), "scratch is too short");
    if d == 0 {
        return;
    }
    let step = task_rows(d);
    let (y, rstd, mean) = (SharedFloats::new(y), SharedMut::new(rstd), mean.map(SharedMut::new));
    let scratch = SharedMut::new(scratch);
    cx.par.run(rows.div_ceil(step), &|task, worker| {
        // SAFETY: workers have their own buffers.
        let [x_stage, y_stage] = unsafe { stage.buffers(scratch, worker) };
        for r in stage.cut(task * step..((task + 1) * step).min(rows)) {
            // SAFETY: tasks have disjoint rows, and each runs once.
            let (y, rstd) = unsafe { (y.part(r.start * d, r.len() * d), rstd.slice(r.start, r.len())) };
            // SAFETY: as above.
            let mean = mean.map(|m| unsafe { m.slice(r.start, r.len()) });
            let x = x.staged(cx.isa, r.start * d, r.len() * d, x_stage);
            y.staged(cx.isa, y_stage, |y| {
                forward_rows(cx.isa, x, d, eps, weight, bias, y, mean, rstd);
            });
        }
    });
}

twin! {
    fn forward_rows(
        x: &[f32], d: usize, eps: f32, weight: Option<&[f32]>, bias: Option<&[f32]>, y: &mut [f32],
        mean: Option<&mut [f32]>, rstd: &mut [f32],
    ) = forward_rows_body
}

#[inline(always)]
fn forward_rows_body(
    x: &[f32],
    d: usize,
    eps: f32,
    weight: Option<&[f32]>,
    bias: Option<&[f32]>,
    y: &mut [f32],
    mut mean: Option<&mut [f32]>,
    rstd: &mut [f32],
) {
    let inv_d = 1.0 / d as f32;
    for (i, (x, y)) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).enumerate() {
        let mut mu = 0.0;
        if let Some(mean) = &mut mean {
            mu = sum_map(x, |v| v) * inv_d;
            mean[i] = mu;
        }
        let var = sum_map(x, |v| (v - mu) * (v - mu)) * inv_d;
        let r = 1.0 / (var + eps).sqrt();
        rstd[i] = r;
        match (weight, bias) {
            (Some(w), Some(b)) => {
                let (w, b) = (&w[..d], &b[..d]);
                for j in 0..d {
                    y[j] = (x[j] - mu) * r * w[j] + b[j];
                }
            }
            (Some(w), None) => y.iter_mut().zip(x).zip(w).for_each(|((y, &x), &w)| *y = (x - mu) * r * w),
            (None, Some(b)) => y.iter_mut().zip(x).zip(b).for_each(|((y, &x), &b)| *y = (x - mu) * r + b),
            (None, None) => y.iter_mut().zip(x).for_each(|(y, &x)| *y = (x - mu) * r),
        }
    }
}

fn backward(
    cx: &Cx,
    rows: usize,
    d: usize,
    dy: Floats,
    x: Floats,
    weight: Option<&[f32]>,
    mean: Option<&[f32]>,
    rstd: &[f32],
    dx: FloatsMut,
    dweight: Option<&mut [f32]>,
    dbias: Option<&mut [f32]>,
    scratch: &mut [f32],
) {
    assert_eq!(x.len(), rows * d, "x is [rows, d]");
    assert_eq!(dy.len(), rows * d, "dy is [rows, d]");
    assert_eq!(dx.len(), rows * d, "dx is [rows, d]");
    assert_eq!(rstd.len(), rows, "rstd is [rows]");
    assert!(weight.is_none_or(|w| w.len() == d), "weight is [d]");
    assert!(dweight.as_ref().is_none_or(|w| w.len() == d), "dweight is [d]");
    assert!(dbias.as_ref().is_none_or(|b| b.len() == d), "dbias is [d]");
    let (n, step) = (slabs(rows, d), slab_rows(rows, d));
    let stage = backward_stage(dy.is_half() || x.is_half() || dx.is_half(), d);
    assert!(scratch.len() >= n * 2 * d + stage.len(cx.par.workers()), "scratch is too short");
    if d == 0 {
        return;
    }
    let columns = dweight.is_some() || dbias.is_some();
    let (sums, rest) = scratch.split_at_mut(n * 2 * d);
    let (dx, shared, rest) = (SharedFloats::new(dx), SharedMut::new(sums), SharedMut::new(rest));
    cx.par.run(n, &|slab, worker| {
        // SAFETY: workers have their own buffers.
        let [dy_stage, x_stage, dx_stage] = unsafe { stage.buffers(rest, worker) };
        // SAFETY: slabs have their own sums, and each task runs once.
        let mut sums = columns.then(|| unsafe { shared.slice(slab * 2 * d, 2 * d) });
        if let Some(sums) = &mut sums {
            sums.fill(0.0);
        }
        for r in stage.cut(slab * step..((slab + 1) * step).min(rows)) {
            let (first, len) = (r.start * d, r.len() * d);
            // SAFETY: slabs have disjoint rows, and each task runs once.
            let dx = unsafe { dx.part(first, len) };
            let dy = dy.staged(cx.isa, first, len, dy_stage);
            let x = x.staged(cx.isa, first, len, x_stage);
            let (mean, rstd) = (mean.map(|m| &m[r.clone()]), &rstd[r]);
            dx.staged(cx.isa, dx_stage, |dx| {
                backward_rows(cx.isa, dy, x, d, weight, mean, rstd, dx, sums.as_deref_mut());
            });
        }
    });
    let sums = &*sums;
    if let Some(dweight) = dweight {
        sum_slabs(cx, sums, d, 0, dweight);
    }
    if let Some(dbias) = dbias {
        sum_slabs(cx, sums, d, d, dbias);
    }
}

twin! {
    fn backward_rows(
        dy: &[f32], x: &[f32], d: usize, weight: Option<&[f32]>, mean: Option<&[f32]>, rstd: &[f32],
        dx: &mut [f32], sums: Option<&mut [f32]>,
    ) = backward_rows_body
}

#[inline(always)]
fn backward_rows_body(
    dy: &[f32],
    x: &[f32],
    d: usize,
    weight: Option<&[f32]>,
    mean: Option<&[f32]>,
    rstd: &[f32],
    dx: &mut [f32],
    mut sums: Option<&mut [f32]>,
) {
    let inv_d = 1.0 / d as f32;
    for (i, ((dy, x), dx)) in
        dy.chunks_exact(d).zip(x.chunks_exact(d)).zip(dx.chunks_exact_mut(d)).enumerate()
    {
        let (mu, r) = (mean.map_or(0.0, |m| m[i]), rstd[i]);
        if let Some(sums) = &mut sums {
            let (dweight, dbias) = sums.split_at_mut(d);
            let dbias = &mut dbias[..d];
            for j in 0..d {
                dweight[j] += dy[j] * ((x[j] - mu) * r);
                dbias[j] += dy[j];
            }
        }
        // g = dy * weight waits in dx for its means.
        match weight {
            Some(w) => dx.iter_mut().zip(dy).zip(w).for_each(|((g, &dy), &w)| *g = dy * w),
            None => dx.copy_from_slice(dy),
        }
        let (sum_g, sum_gx) = sums_of_products(dx, x, mu);
        let k1 = if mean.is_some() { sum_g * inv_d } else { 0.0 };
        let k2 = sum_gx * r * r * inv_d;
        for (g, &x) in dx.iter_mut().zip(x) {
            *g = (*g - k1 - (x - mu) * k2) * r;
        }
    }
}

/// `Σ g` and `Σ g (x - mean)`.
#[inline(always)]
fn sums_of_products(g: &[f32], x: &[f32], mean: f32) -> (f32, f32) {
    let (mut s, mut p) = ([0.0f32; LANES], [0.0f32; LANES]);
    let ((g_chunks, g_rest), (x_chunks, x_rest)) = (g.as_chunks::<LANES>(), x.as_chunks::<LANES>());
    for (g, x) in g_chunks.iter().zip(x_chunks) {
        for l in 0..LANES {
            s[l] += g[l];
            p[l] += g[l] * (x[l] - mean);
        }
    }
    for (l, (&g, &x)) in g_rest.iter().zip(x_rest).enumerate() {
        s[l] += g;
        p[l] += g * (x - mean);
    }
    (fold(s), fold(p))
}

/// Adds up columns `offset..offset + d` of each slab's `2 * d` sums, in f64, in the order of the slabs.
fn sum_slabs(cx: &Cx, sums: &[f32], d: usize, offset: usize, out: &mut [f32]) {
    const WIDE: usize = 64;
    for (block, out) in out.chunks_mut(WIDE).enumerate() {
        let first = offset + block * WIDE;
        sum_columns(cx.isa, sums, 2 * d, first..first + out.len(), out);
    }
}

twin! {
    fn sum_columns(sums: &[f32], stride: usize, columns: Range<usize>, out: &mut [f32]) = sum_columns_body
}

#[inline(always)]
fn sum_columns_body(sums: &[f32], stride: usize, columns: Range<usize>, out: &mut [f32]) {
    let mut acc = [0.0f64; 64];
    for slab in sums.chunks_exact(stride) {
        for (a, &v) in acc.iter_mut().zip(&slab[columns.clone()]) {
            *a += f64::from(v);
        }
    }
    for (o, &a) in out.iter_mut().zip(&acc) {
        *o = a as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floats::testing::{HALVES, OwnedFloats, same_rounded};
    use crate::lanes::testing::{close, contexts, data, same_bits};

    /// y, mean, rstd, dx, dweight and dbias, with x, y, dy and dx in a format.
    fn run(
        cx: &Cx,
        [x, dy]: [&OwnedFloats; 2],
        d: usize,
        weight: Option<&[f32]>,
        bias: Option<&[f32]>,
        center: bool,
    ) -> [OwnedFloats; 6] {
        let (eps, dtype, halves) = (1e-5, x.get().dtype(), x.get().is_half());
        let rows = x.get().len().checked_div(d).unwrap_or(3);
        let (mut y, mut dx) = (OwnedFloats::unset(dtype, rows * d), OwnedFloats::unset(dtype, rows * d));
        let (mut mean, mut rstd) = (vec![0.0; rows], vec![f32::NAN; rows]);
        let (mut dw, mut db) = (vec![0.0; d], vec![0.0; d]);
        let (x, dy, workers) = (x.get(), dy.get(), cx.par.workers());
        if center {
            let n = LayerNorm { rows, d, eps };
            let mut s = vec![f32::NAN; n.forward_scratch_len(halves, workers)];
            n.forward(cx, x, weight, bias, y.get_mut(), &mut mean, &mut rstd, &mut s);
            let mut s = vec![f32::NAN; n.backward_scratch_len(halves, workers)];
            let (w, b) = (Some(&mut dw[..]), Some(&mut db[..]));
            n.backward(cx, dy, x, weight, &mean, &rstd, dx.get_mut(), w, b, &mut s);
        } else {
            let n = RmsNorm { rows, d, eps };
            let mut s = vec![f32::NAN; n.forward_scratch_len(halves, workers)];
            n.forward(cx, x, weight, y.get_mut(), &mut rstd, &mut s);
            let mut s = vec![f32::NAN; n.backward_scratch_len(halves, workers)];
            n.backward(cx, dy, x, weight, &rstd, dx.get_mut(), Some(&mut dw), &mut s);
        }
        [y, OwnedFloats::F32(mean), OwnedFloats::F32(rstd), dx, OwnedFloats::F32(dw), OwnedFloats::F32(db)]
    }

    fn check(rows: usize, d: usize, center: bool, affine: bool) {
        let eps = 1e-5;
        let (x, dy, w, b) = (data(1, rows * d), data(2, rows * d), data(3, d), data(4, d));
        let (weight, bias) = (affine.then_some(&w[..]), (affine && center).then_some(&b[..]));
        let mut runs = vec![];
        for cx in contexts() {
            let of_f32 = [&OwnedFloats::F32(x.clone()), &OwnedFloats::F32(dy.clone())];
            runs.push(run(&cx, of_f32, d, weight, bias, center).map(|v| v.wide()).concat());
            for dtype in HALVES {
                let [x, dy] = [&x, &dy].map(|v| OwnedFloats::new(dtype, v));
                let wide = [&OwnedFloats::F32(x.wide()), &OwnedFloats::F32(dy.wide())];
                let want = run(&cx, wide, d, weight, bias, center);
                let got = run(&cx, [&x, &dy], d, weight, bias, center);
                same_rounded(&format!("{rows}x{d}"), &got, &want);
            }
        }
        same_bits("row norm", &runs);

        let f = |v: f32| f64::from(v);
        let (mut y, mut dx) = (vec![0.0; rows * d], vec![0.0; rows * d]);
        let (mut means, mut rstds, mut dw, mut db) = (vec![], vec![], vec![0.0; d], vec![0.0; d]);
        for i in 0..rows {
            let (x, dy) = (&x[i * d..][..d], &dy[i * d..][..d]);
            let n = d as f64;
            let mu = if center { x.iter().map(|&v| f(v)).sum::<f64>() / n } else { 0.0 };
            let r = 1.0 / (x.iter().map(|&v| (f(v) - mu).powi(2)).sum::<f64>() / n + f(eps)).sqrt();
            let hat: Vec<f64> = x.iter().map(|&v| (f(v) - mu) * r).collect();
            let g: Vec<f64> = (0..d).map(|j| f(dy[j]) * weight.map_or(1.0, |w| f(w[j]))).collect();
            let mg = if center { g.iter().sum::<f64>() / n } else { 0.0 };
            let mgh = g.iter().zip(&hat).map(|(a, b)| a * b).sum::<f64>() / n;
            for j in 0..d {
                y[i * d + j] = hat[j] * weight.map_or(1.0, |w| f(w[j])) + bias.map_or(0.0, |b| f(b[j]));
                dx[i * d + j] = r * (g[j] - mg - hat[j] * mgh);
                dw[j] += f(dy[j]) * hat[j];
                db[j] += if center { f(dy[j]) } else { 0.0 };
            }
            means.push(mu);
            rstds.push(r);
        }
        let mut at = 0;
        for (name, want) in ["y", "mean", "rstd", "dx", "dw", "db"].iter().zip([y, means, rstds, dx, dw, db])
        {
            let tol = if d == 1 { 1e-3 } else { 2e-5 };
            close(&format!("{rows}x{d} {name}"), &runs[0][at..at + want.len()], &want, tol);
            at += want.len();
        }
    }

    #[test]
    fn matches_the_textbook() {
        for (rows, d) in
            [(0, 5), (3, 0), (2, 2), (3, 7), (4, 8), (5, 9), (3, 31), (3, 33), (67, 384), (1000, 65)]
        {
            for (center, affine) in [(true, true), (true, false), (false, true), (false, false)] {
                if d > 0 || !center {
                    check(rows, d, center, affine);
                }
            }
        }
    }

    #[test]
    fn a_large_offset_does_not_drown_the_variance() {
        let (rows, d) = (1, 384);
        let x: Vec<f32> = data(5, d).iter().map(|v| v + 1000.0).collect();
        let (mut y, mut mean, mut rstd) = (vec![0.0; d], vec![0.0; 1], vec![0.0; 1]);
        let (norm, cx) = (LayerNorm { rows, d, eps: 1e-5 }, Cx::serial());
        let y = FloatsMut::F32(&mut y);
        norm.forward(&cx, Floats::F32(&x), None, None, y, &mut mean, &mut rstd, &mut []);
        let mu = x.iter().map(|&v| f64::from(v)).sum::<f64>() / d as f64;
        let var = x.iter().map(|&v| (f64::from(v) - mu).powi(2)).sum::<f64>() / d as f64;
        close("rstd", &rstd, &[1.0 / (var + 1e-5).sqrt()], 1e-6);
    }
}
