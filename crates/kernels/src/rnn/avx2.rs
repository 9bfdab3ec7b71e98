//! The cells with AVX2 and FMA: one sequence, one step, 8 units at a time.

use std::arch::x86_64::*;

use super::{gru, lstm};
use crate::math::avx2::{sigmoid, tanh};

/// Up to 8 floats from `j` on; lanes after the `n`-th are zeros.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn load(x: &[f32], j: usize, n: usize) -> __m256 {
    let x = &x[j..j + n];
    if n == 8 {
        // SAFETY: 8 floats.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    } else {
        // SAFETY: the mask reads `n` floats.
        unsafe { _mm256_maskload_ps(x.as_ptr(), first(n)) }
    }
}

/// Writes the first `n` lanes from `j` on.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn store(x: &mut [f32], j: usize, n: usize, value: __m256) {
    let x = &mut x[j..j + n];
    if n == 8 {
        // SAFETY: 8 floats.
        unsafe { _mm256_storeu_ps(x.as_mut_ptr(), value) }
    } else {
        // SAFETY: the mask writes `n` floats.
        unsafe { _mm256_maskstore_ps(x.as_mut_ptr(), first(n), value) }
    }
}

/// The mask of the first `n` lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn first(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// `1 − x`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn rest(x: __m256) -> __m256 {
    _mm256_sub_ps(_mm256_set1_ps(1.0), x)
}

/// `1 − x²`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn rest2(x: __m256) -> __m256 {
    _mm256_fnmadd_ps(x, x, _mm256_set1_ps(1.0))
}

/// The product of three.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn mul3(a: __m256, b: __m256, c: __m256) -> __m256 {
    _mm256_mul_ps(_mm256_mul_ps(a, b), c)
}

/// As the scalar twin.
#[target_feature(enable = "avx2,fma")]
pub(super) fn lstm_forward(h: usize, x: lstm::ForwardStep, state: &mut [f32]) {
    for j in (0..h).step_by(8) {
        let n = (h - j).min(8);
        let mut pre = [_mm256_setzero_ps(); 4];
        for (gate, pre) in pre.iter_mut().enumerate() {
            let at = gate * h + j;
            *pre = _mm256_add_ps(load(x.z, at, n), load(x.xp, at, n));
            if let Some(bias) = x.bias {
                *pre = _mm256_add_ps(*pre, load(bias, at, n));
            }
        }
        let (i, f, g, o) = (sigmoid(pre[0]), sigmoid(pre[1]), tanh(pre[2]), sigmoid(pre[3]));
        store(x.gates, j, n, i);
        store(x.gates, h + j, n, f);
        store(x.gates, 2 * h + j, n, g);
        store(x.gates, 3 * h + j, n, o);
        let c = _mm256_fmadd_ps(f, load(x.c_before, j, n), _mm256_mul_ps(i, g));
        store(x.c, j, n, c);
        let y = _mm256_mul_ps(o, tanh(c));
        store(x.y, j, n, y);
        store(state, j, n, y);
    }
}

/// As the scalar twin.
#[target_feature(enable = "avx2,fma")]
pub(super) fn lstm_backward(h: usize, x: lstm::BackwardStep) {
    for j in (0..h).step_by(8) {
        let n = (h - j).min(8);
        let (i, f) = (load(x.gates, j, n), load(x.gates, h + j, n));
        let (g, o) = (load(x.gates, 2 * h + j, n), load(x.gates, 3 * h + j, n));
        let tanh_c = tanh(load(x.c, j, n));
        let dh = _mm256_add_ps(load(x.dh, j, n), load(x.dy, j, n));
        let dc = _mm256_fmadd_ps(_mm256_mul_ps(dh, o), rest2(tanh_c), load(x.dc, j, n));
        store(x.dz, j, n, mul3(_mm256_mul_ps(dc, g), i, rest(i)));
        store(x.dz, h + j, n, mul3(_mm256_mul_ps(dc, load(x.c_before, j, n)), f, rest(f)));
        store(x.dz, 2 * h + j, n, mul3(dc, i, rest2(g)));
        store(x.dz, 3 * h + j, n, mul3(_mm256_mul_ps(dh, tanh_c), o, rest(o)));
        store(x.dc, j, n, _mm256_mul_ps(dc, f));
    }
}

/// As the scalar twin.
#[target_feature(enable = "avx2,fma")]
pub(super) fn gru_forward(h: usize, x: gru::ForwardStep) {
    for j in (0..h).step_by(8) {
        let n_lanes = (h - j).min(8);
        let mut hp = [_mm256_setzero_ps(); 3];
        for (gate, hp) in hp.iter_mut().enumerate() {
            *hp = load(x.hp, gate * h + j, n_lanes);
            if let Some(bias) = x.bias {
                *hp = _mm256_add_ps(*hp, load(bias, gate * h + j, n_lanes));
            }
        }
        let r = sigmoid(_mm256_add_ps(load(x.xp, j, n_lanes), hp[0]));
        let z = sigmoid(_mm256_add_ps(load(x.xp, h + j, n_lanes), hp[1]));
        let n = tanh(_mm256_fmadd_ps(r, hp[2], load(x.xp, 2 * h + j, n_lanes)));
        store(x.gates, j, n_lanes, r);
        store(x.gates, h + j, n_lanes, z);
        store(x.gates, 2 * h + j, n_lanes, n);
        store(x.gates, 3 * h + j, n_lanes, hp[2]);
        let y = _mm256_fmadd_ps(z, _mm256_sub_ps(load(x.state, j, n_lanes), n), n);
        store(x.state, j, n_lanes, y);
        store(x.y, j, n_lanes, y);
    }
}

/// As the scalar twin.
#[target_feature(enable = "avx2,fma")]
pub(super) fn gru_backward(h: usize, x: gru::BackwardStep) {
    for j in (0..h).step_by(8) {
        let n_lanes = (h - j).min(8);
        let (r, z) = (load(x.gates, j, n_lanes), load(x.gates, h + j, n_lanes));
        let (n, hp_n) = (load(x.gates, 2 * h + j, n_lanes), load(x.gates, 3 * h + j, n_lanes));
        let dh = _mm256_add_ps(load(x.dh, j, n_lanes), load(x.dy, j, n_lanes));
        let dn = mul3(dh, rest(z), rest2(n));
        let dr = mul3(_mm256_mul_ps(dn, hp_n), r, rest(r));
        let dz = mul3(_mm256_mul_ps(dh, _mm256_sub_ps(load(x.before, j, n_lanes), n)), z, rest(z));
        store(x.dh, j, n_lanes, _mm256_mul_ps(dh, z));
        store(x.dxp, j, n_lanes, dr);
        store(x.dxp, h + j, n_lanes, dz);
        store(x.dxp, 2 * h + j, n_lanes, dn);
        store(x.dhp, j, n_lanes, dr);
        store(x.dhp, h + j, n_lanes, dz);
        store(x.dhp, 2 * h + j, n_lanes, _mm256_mul_ps(dn, r));
    }
}
