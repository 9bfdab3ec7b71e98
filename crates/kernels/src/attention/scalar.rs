//! The scalar twin of attention: one query at a time, by the formulas in the module's head.

use std::ops::Range;

use super::{Attention, HeadInputs, Out, Saved};
use crate::cx::SharedMut;

pub(super) fn forward_len(at: &Attention) -> usize {
    at.t_k
}

pub(super) fn backward_len(at: &Attention) -> usize {
    at.t_k
}

/// Queries `rows` of one head.
///
/// # Safety
/// Nothing else accesses these rows of `o` and `lse`.
pub(super) unsafe fn forward(
    at: &Attention,
    head: &HeadInputs,
    rows: Range<usize>,
    o: SharedMut<f32>,
    lse: SharedMut<f32>,
    scratch: &mut [f32],
) {
    let lse_range = at.lse_range(head, rows.clone());
    // SAFETY: the caller's promise.
    let lse = unsafe { lse.slice(lse_range.start, rows.len()) };
    for (t, lse) in rows.zip(lse) {
        let p = &mut scratch[..at.keys(t)];
        scores(at, head, t, p);
        let max = p.iter().fold(f32::NEG_INFINITY, |m, &s| m.max(s));
        // SAFETY: the caller's promise.
        let o = unsafe { o.slice(at.o.at(head.b, head.h) + t * at.o.time, at.d) };
        o.fill(0.0);
        *lse = max;
        if p.iter().all(|&s| s == f32::NEG_INFINITY) {
            continue;
        }
        let mut sum = 0.0;
        for p in p.iter_mut() {
            *p = (*p - max).exp();
            sum += *p;
        }
        *lse += sum.ln();
        for (j, &p) in p.iter().enumerate() {
            add(o, p / sum, &head.v[j * at.v.time..][..at.d]);
        }
    }
}

/// All gradients of one head.
///
/// # Safety
/// Nothing else accesses this head's rows of the gradients, and they do not overlap each other.
pub(super) unsafe fn backward(
    at: &Attention,
    head: &HeadInputs,
    saved: &Saved,
    out: &Out,
    scratch: &mut [f32],
) {
    let (k_at, v_at) = (at.k.at(head.b, head.h), at.v.at(head.b, head.h));
    // SAFETY: the caller's promise; a row of dk or dv is held no longer than its statement.
    let dk = |j: usize| unsafe { out.dk.slice(k_at + j * at.k.time, at.d) };
    // SAFETY: as above.
    let dv = |j: usize| unsafe { out.dv.slice(v_at + j * at.v.time, at.d) };
    for j in 0..at.t_k {
        dk(j).fill(0.0);
        dv(j).fill(0.0);
    }
    for t in 0..at.t_q {
        // SAFETY: as above; one row of dq at a time.
        let dq = unsafe { out.dq.slice(at.q.at(head.b, head.h) + t * at.q.time, at.d) };
        dq.fill(0.0);
        if saved.lse[t] == f32::NEG_INFINITY {
            continue;
        }
        let p = &mut scratch[..at.keys(t)];
        scores(at, head, t, p);
        let dy = &saved.dy[t * at.o.time..][..at.d];
        let delta = dot(dy, &saved.o[t * at.o.time..][..at.d]);
        let q = &head.q[t * at.q.time..][..at.d];
        for (j, &s) in p.iter().enumerate() {
            let p = (s - saved.lse[t]).exp();
            let ds = p * (dot(dy, &head.v[j * at.v.time..][..at.d]) - delta);
            add(dq, at.scale * ds, &head.k[j * at.k.time..][..at.d]);
            add(dk(j), at.scale * ds, q);
            add(dv(j), p, dy);
        }
    }
}

/// The scores of query `t` with the keys that it sees.
fn scores(at: &Attention, head: &HeadInputs, t: usize, s: &mut [f32]) {
    let q = &head.q[t * at.q.time..][..at.d];
    for (j, s) in s.iter_mut().enumerate() {
        *s = at.scale * dot(q, &head.k[j * at.k.time..][..at.d]);
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
