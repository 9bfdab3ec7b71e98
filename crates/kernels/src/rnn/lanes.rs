//! The cells with vectors: one sequence, one step, a vector of units at a time.

use super::{gru, lstm};
use crate::simd::twins;

twins! {
    /// Up to `WIDTH` floats from `j` on; lanes after the `n`-th are zeros.
    fn at(x: &[f32], j: usize, n: usize) -> V {
        let x = &x[j..j + n];
        // SAFETY: `n` floats are there.
        unsafe { if n == WIDTH { load(x.as_ptr()) } else { load_first(x.as_ptr(), n) } }
    }

    /// Writes the first `n` lanes from `j` on.
    fn put(x: &mut [f32], j: usize, n: usize, value: V) {
        let x = &mut x[j..j + n];
        // SAFETY: `n` floats are there.
        unsafe { if n == WIDTH { store(x.as_mut_ptr(), value) } else { store_first(x.as_mut_ptr(), n, value) } }
    }

    /// `1 − x`.
    fn rest(x: V) -> V {
        sub(splat(1.0), x)
    }

    /// `1 − x²`.
    fn rest2(x: V) -> V {
        fnmadd(x, x, splat(1.0))
    }

    /// The product of three.
    fn mul3(a: V, b: V, c: V) -> V {
        mul(mul(a, b), c)
    }

    /// As the scalar twin.
    pub(in super::super) fn lstm_forward(h: usize, x: lstm::ForwardStep, state: &mut [f32]) {
        for j in (0..h).step_by(WIDTH) {
            let n = (h - j).min(WIDTH);
            let mut pre = [zero(); 4];
            for (gate, pre) in pre.iter_mut().enumerate() {
                let first = gate * h + j;
                *pre = add(at(x.z, first, n), at(x.xp, first, n));
                if let Some(bias) = x.bias {
                    *pre = add(*pre, at(bias, first, n));
                }
            }
            let (i, f, g, o) = (sigmoid(pre[0]), sigmoid(pre[1]), tanh(pre[2]), sigmoid(pre[3]));
            put(x.gates, j, n, i);
            put(x.gates, h + j, n, f);
            put(x.gates, 2 * h + j, n, g);
            put(x.gates, 3 * h + j, n, o);
            let c = fmadd(f, at(x.c_before, j, n), mul(i, g));
            put(x.c, j, n, c);
            let y = mul(o, tanh(c));
            put(x.y, j, n, y);
            put(state, j, n, y);
        }
    }

    /// As the scalar twin.
    pub(in super::super) fn lstm_backward(h: usize, x: lstm::BackwardStep) {
        for j in (0..h).step_by(WIDTH) {
            let n = (h - j).min(WIDTH);
            let (i, f) = (at(x.gates, j, n), at(x.gates, h + j, n));
            let (g, o) = (at(x.gates, 2 * h + j, n), at(x.gates, 3 * h + j, n));
            let tanh_c = tanh(at(x.c, j, n));
            let dh = add(at(x.dh, j, n), at(x.dy, j, n));
            let dc = fmadd(mul(dh, o), rest2(tanh_c), at(x.dc, j, n));
            put(x.dz, j, n, mul3(mul(dc, g), i, rest(i)));
            put(x.dz, h + j, n, mul3(mul(dc, at(x.c_before, j, n)), f, rest(f)));
            put(x.dz, 2 * h + j, n, mul3(dc, i, rest2(g)));
            put(x.dz, 3 * h + j, n, mul3(mul(dh, tanh_c), o, rest(o)));
            put(x.dc, j, n, mul(dc, f));
        }
    }

    /// As the scalar twin.
    pub(in super::super) fn gru_forward(h: usize, x: gru::ForwardStep) {
        for j in (0..h).step_by(WIDTH) {
            let n_lanes = (h - j).min(WIDTH);
            let mut hp = [zero(); 3];
            for (gate, hp) in hp.iter_mut().enumerate() {
                *hp = at(x.hp, gate * h + j, n_lanes);
                if let Some(bias) = x.bias {
                    *hp = add(*hp, at(bias, gate * h + j, n_lanes));
                }
            }
            let r = sigmoid(add(at(x.xp, j, n_lanes), hp[0]));
            let z = sigmoid(add(at(x.xp, h + j, n_lanes), hp[1]));
            let n = tanh(fmadd(r, hp[2], at(x.xp, 2 * h + j, n_lanes)));
            put(x.gates, j, n_lanes, r);
            put(x.gates, h + j, n_lanes, z);
            put(x.gates, 2 * h + j, n_lanes, n);
            put(x.gates, 3 * h + j, n_lanes, hp[2]);
            let y = fmadd(z, sub(at(x.state, j, n_lanes), n), n);
            put(x.state, j, n_lanes, y);
            put(x.y, j, n_lanes, y);
        }
    }

    /// As the scalar twin.
    pub(in super::super) fn gru_backward(h: usize, x: gru::BackwardStep) {
        for j in (0..h).step_by(WIDTH) {
            let n_lanes = (h - j).min(WIDTH);
            let (r, z) = (at(x.gates, j, n_lanes), at(x.gates, h + j, n_lanes));
            let (n, hp_n) = (at(x.gates, 2 * h + j, n_lanes), at(x.gates, 3 * h + j, n_lanes));
            let dh = add(at(x.dh, j, n_lanes), at(x.dy, j, n_lanes));
            let dn = mul3(dh, rest(z), rest2(n));
            let dr = mul3(mul(dn, hp_n), r, rest(r));
            let dz = mul3(mul(dh, sub(at(x.before, j, n_lanes), n)), z, rest(z));
            put(x.dh, j, n_lanes, mul(dh, z));
            put(x.dxp, j, n_lanes, dr);
            put(x.dxp, h + j, n_lanes, dz);
            put(x.dxp, 2 * h + j, n_lanes, dn);
            put(x.dhp, j, n_lanes, dr);
            put(x.dhp, h + j, n_lanes, dz);
            put(x.dhp, 2 * h + j, n_lanes, mul(dn, r));
        }
    }
}
