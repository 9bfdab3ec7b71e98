//! The scalar twin of attention: one query at a time, by the formulas in the module's head.

use std::ops::Range;

use super::rows::RowPasses;
use super::stored::HeadRowsMut;
use super::{Attention, HeadGrads, HeadInputs, Saved};
use crate::Isa;
use crate::cx::SharedMut;

/// The scores of a query, k and v, and rows of q and o.
pub(super) fn forward_len(at: &Attention) -> usize {
    at.t_k + 2 * at.t_k * at.d + 2 * at.d
}

/// The scores of a query, k, v and their gradients, and rows of q, dq, dy and o.
pub(super) fn backward_len(at: &Attention) -> usize {
    at.t_k + 4 * at.t_k * at.d + 4 * at.d
}

/// Queries `rows` of one head.
///
/// # Safety
/// Nothing else accesses these rows of `o` and `lse`.
pub(super) unsafe fn forward(
    at: &Attention,
    isa: Isa,
    head: &HeadInputs,
    rows: Range<usize>,
    o: HeadRowsMut,
    lse: SharedMut<f32>,
    scratch: &mut [f32],
) {
    let d = at.d;
    let (p, rest) = scratch.split_at_mut(at.t_k);
    let (k, rest) = rest.split_at_mut(at.t_k * d);
    let (v, rest) = rest.split_at_mut(at.t_k * d);
    let (q, rest) = rest.split_at_mut(d);
    let sums = &mut rest[..d];
    let keys = rows.end.checked_sub(1).map_or(0, |last| at.keys(last));
    let (k, v) = (head.k.all(isa, keys, d, k), head.v.all(isa, keys, d, v));
    let lse_range = at.lse_range(head, rows.clone());
    // SAFETY: the caller's promise.
    let lse = unsafe { lse.slice(lse_range.start, rows.len()) };
    for (t, lse) in rows.zip(lse) {
        let p = &mut p[..at.keys(t)];
        scores(at, head, t, head.q.row(isa, t, d, q), k, p);
        let max = p.iter().fold(f32::NEG_INFINITY, |m, &s| m.max(s));
        sums.fill(0.0);
        *lse = max;
        if p.iter().any(|&s| s != f32::NEG_INFINITY) {
            let mut sum = 0.0;
            for p in p.iter_mut() {
                *p = (*p - max).exp();
                sum += *p;
            }
            *lse += sum.ln();
            for (j, &p) in p.iter().enumerate() {
                add(sums, p / sum, &v.0[j * v.1..][..d]);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { o.write(isa, t, sums) };
    }
}

/// All gradients of one head.
///
/// # Safety
/// Nothing else accesses this head's rows of the gradients, and they do not overlap each other.
pub(super) unsafe fn backward(
    at: &Attention,
    isa: Isa,
    head: &HeadInputs,
    saved: &Saved,
    out: &HeadGrads,
    scratch: &mut [f32],
) {
    let (d, kv) = (at.d, at.t_k * at.d);
    let (p, rest) = scratch.split_at_mut(at.t_k);
    let (k, rest) = rest.split_at_mut(kv);
    let (v, rest) = rest.split_at_mut(kv);
    let (dk, rest) = rest.split_at_mut(kv);
    let (dv, rest) = rest.split_at_mut(kv);
    let (q, rest) = rest.split_at_mut(d);
    let (dq, rest) = rest.split_at_mut(d);
    let (dy, rest) = rest.split_at_mut(d);
    let o = &mut rest[..d];
    let keys = at.t_q.checked_sub(1).map_or(0, |last| at.keys(last));
    let (k, v) = (head.k.all(isa, keys, d, k), head.v.all(isa, keys, d, v));
    dk.fill(0.0);
    dv.fill(0.0);
    for t in 0..at.t_q {
        dq.fill(0.0);
        if saved.lse[t] != f32::NEG_INFINITY {
            let p = &mut p[..at.keys(t)];
            let (q, dy) = (head.q.row(isa, t, d, q), saved.dy.row(isa, t, d, dy));
            scores(at, head, t, q, k, p);
            let delta = dot(dy, saved.o.row(isa, t, d, o));
            for (j, &s) in p.iter().enumerate() {
                let p = (s - saved.lse[t]).exp();
                let ds = p * (dot(dy, &v.0[j * v.1..][..d]) - delta);
                add(dq, at.scale * ds, &k.0[j * k.1..][..d]);
                add(&mut dk[j * d..][..d], at.scale * ds, q);
                add(&mut dv[j * d..][..d], p, dy);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { out.dq.write(isa, t, dq) };
    }
    for (j, (dk, dv)) in dk.chunks_exact(d).zip(dv.chunks_exact(d)).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            out.dk.write(isa, j, dk);
            out.dv.write(isa, j, dv);
        }
    }
}

/// The scores of query `t`, whose row is `q`, with the keys that it sees.
fn scores(at: &Attention, head: &HeadInputs, t: usize, q: &[f32], k: (&[f32], usize), s: &mut [f32]) {
    for (j, s) in s.iter_mut().enumerate() {
        *s = at.scale * dot(q, &k.0[j * k.1..][..at.d]);
    }
    if let Some(mask) = head.mask_row(t, 0, s.len()) {
        for (s, m) in s.iter_mut().zip(mask) {
            *s += m;
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// Passes over a row of scores, in plain Rust.
pub(super) struct Scalar;

impl RowPasses for Scalar {
    unsafe fn exponentials(row: &mut [f32], n: usize, scale: f32, mask: Option<&[f32]>) -> (f32, f32) {
        shift_scores(row, n, scale, mask);
        let row = &mut row[..n];
        let max = row.iter().fold(f32::NEG_INFINITY, |m, &s| m.max(s));
        if row.iter().all(|&s| s == f32::NEG_INFINITY) {
            row.fill(0.0);
            return (max, 0.0);
        }
        let mut sum = 0.0;
        for s in row {
            *s = (*s - max).exp();
            sum += *s;
        }
        (max, sum)
    }

    unsafe fn probabilities(
        p: &mut [f32],
        ds: &mut [f32],
        n: usize,
        scale: f32,
        mask: Option<&[f32]>,
        lse: f32,
        delta: f32,
    ) {
        shift_scores(p, n, scale, mask);
        ds[n..].fill(0.0);
        for (p, ds) in p[..n].iter_mut().zip(ds) {
            let hidden = lse == f32::NEG_INFINITY;
            (*p, *ds) =
                if hidden { (0.0, 0.0) } else { ((*p - lse).exp(), (*p - lse).exp() * (*ds - delta)) };
        }
    }

    unsafe fn dot(a: &[f32], b: &[f32]) -> f32 {
        dot(a, b)
    }

    unsafe fn scaled_copy(scale: f32, src: &[f32], dst: &mut [f32]) {
        for (y, x) in dst.iter_mut().zip(src) {
            *y = scale * x;
        }
    }
}

/// `scale·s + mask` of `n` scores, and zeros behind them.
fn shift_scores(row: &mut [f32], n: usize, scale: f32, mask: Option<&[f32]>) {
    for (j, s) in row[..n].iter_mut().enumerate() {
        *s = *s * scale + mask.map_or(0.0, |m| m[j]);
    }
    row[n..].fill(0.0);
}
