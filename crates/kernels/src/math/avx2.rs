//! Eight lanes at a time, for AVX2 with FMA. Straight-line code: no branches but the rare one of [`sin`] and [`cos`].
//!
//! Operand order of `min` and `max` matters: they return their second operand when either is NaN, so the value
//! comes second and its NaN goes on.
//!
//! The functions are safe to call from functions with the same target features; elsewhere the caller must know that
//! the CPU has AVX2 and FMA.

#![allow(clippy::missing_safety_doc, reason = "unsafe only without the target features, as said above")]

use super::scalar::{self, ERF_LARGE, ERF_SMALL, ERF_SPLIT};
use std::arch::x86_64::*;

/// 1.5·2²³: adding it rounds to an integer and leaves that integer in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has trailing zeros, so that its multiples are exact.
const LN2_HI: f32 = 0.693_145_75;
const LN2_LO: f32 = 1.428_606_8e-6;
/// (eʳ − 1 − r) / r² for |r| ≤ ln(2)/2, highest power first; relative error 3e-9.
const EXP: [f32; 5] = [0.001_395_054, 0.008_368_918, 0.041_666_205, 0.166_665_2, 0.5];
/// (ln(1+f) − f + f²/2) / f³ for 1+f in √½..√2, highest power first; relative error 6e-9.
const LN: [f32; 8] = [
    -0.076_344_94,
    0.127_615_75,
    -0.131_601_82,
    0.142_017_58,
    -0.166_233_57,
    0.200_012_27,
    -0.250_008_2,
    0.333_333_3,
];
/// (sin r − r) / r³ in r², highest power first, for |r| ≤ π/4.
const SIN: [f32; 3] = [-0.000_195_166_56, 0.008_332_174, -0.166_666_55];
/// (cos r − 1 + r²/2) / r⁴ in r², highest power first, for |r| ≤ π/4.
const COS: [f32; 3] = [2.443_773e-5, -0.001_388_736_1, 0.041_666_647];
/// Beyond this the three-part reduction of [`sin`] and [`cos`] is not trusted.
const TRIG_MAX: f32 = 1e5;

/// A polynomial, highest power first. Even and odd powers apart: half the latency of Horner's rule, which is what
/// bounds these functions, for one more multiplication. `x2` is x².
#[inline]
#[target_feature(enable = "avx2,fma")]
fn poly<const N: usize>(c: &[f32; N], x: __m256, x2: __m256) -> __m256 {
    let (mut a, mut b) = (_mm256_set1_ps(c[0]), _mm256_set1_ps(c[1]));
    let mut i = 2;
    while i + 1 < N {
        a = _mm256_fmadd_ps(a, x2, _mm256_set1_ps(c[i]));
        b = _mm256_fmadd_ps(b, x2, _mm256_set1_ps(c[i + 1]));
        i += 2;
    }
    if i < N {
        _mm256_fmadd_ps(b, x, _mm256_fmadd_ps(a, x2, _mm256_set1_ps(c[i])))
    } else {
        _mm256_fmadd_ps(a, x, b)
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn abs(x: __m256) -> __m256 {
    _mm256_andnot_ps(_mm256_set1_ps(-0.0), x)
}

/// `y` with the sign bit of `x`, for `y` without one.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn with_sign(y: __m256, x: __m256) -> __m256 {
    _mm256_or_ps(y, _mm256_and_ps(_mm256_set1_ps(-0.0), x))
}

/// x = n·ln 2 + r: returns n still added to [`ROUND`], and r.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn reduce_exp(x: __m256) -> (__m256, __m256) {
    let round = _mm256_set1_ps(ROUND);
    let shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E), round);
    let n = _mm256_sub_ps(shifted, round);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_HI), x);
    (shifted, _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_LO), r))
}

/// 2^(n + bias − 127) from a shifted n.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn power_of_two(shifted: __m256, bias: i32) -> __m256 {
    let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
    _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(bias << 23)))
}

/// eˣ.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn exp(x: __m256) -> __m256 {
    // From -87.5 down n is -126 and the scale 2^(n-1) has exponent bits 0: the result is 0. From 88.73 up, n is 128
    // and doubling overflows to infinity.
    let x = _mm256_max_ps(_mm256_set1_ps(-87.5), _mm256_min_ps(_mm256_set1_ps(88.8), x));
    let (shifted, r) = reduce_exp(x);
    let r2 = _mm256_mul_ps(r, r);
    let p = _mm256_add_ps(_mm256_fmadd_ps(poly(&EXP, r, r2), r2, r), _mm256_set1_ps(1.0));
    let half = _mm256_mul_ps(p, power_of_two(shifted, 126));
    _mm256_add_ps(half, half)
}

/// eˣ − 1 for x from −80 to 0.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn expm1_negative(x: __m256) -> __m256 {
    let (shifted, r) = reduce_exp(x);
    let r2 = _mm256_mul_ps(r, r);
    let p = _mm256_fmadd_ps(poly(&EXP, r, r2), r2, r);
    let scale = power_of_two(shifted, 127);
    _mm256_fmadd_ps(p, scale, _mm256_sub_ps(scale, _mm256_set1_ps(1.0)))
}

/// eˣ − 1, accurate near 0.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn expm1(x: __m256) -> __m256 {
    let x = _mm256_max_ps(_mm256_set1_ps(-40.0), _mm256_min_ps(_mm256_set1_ps(88.8), x));
    let (shifted, r) = reduce_exp(x);
    let r2 = _mm256_mul_ps(r, r);
    let p = _mm256_fmadd_ps(poly(&EXP, r, r2), r2, r);
    // Half the result first, as in `exp`: 2ⁿ itself overflows a little before the result does.
    let scale = power_of_two(shifted, 126);
    let half = _mm256_fmadd_ps(p, scale, _mm256_sub_ps(scale, _mm256_set1_ps(0.5)));
    _mm256_add_ps(half, half)
}

/// The natural logarithm.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn ln(x: __m256) -> __m256 {
    // Subnormals are lifted by 2²³ first.
    let tiny = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(f32::MIN_POSITIVE));
    let lifted = _mm256_blendv_ps(x, _mm256_mul_ps(x, _mm256_set1_ps(8_388_608.0)), tiny);
    // Cutting the exponent at √½ instead of 1 puts the mantissa in √½..√2.
    let bits = _mm256_castps_si256(lifted);
    let from_half = _mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f35_04f3));
    let exponent = _mm256_srai_epi32::<23>(from_half);
    let mantissa = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32::<23>(exponent)));
    let n = _mm256_sub_ps(_mm256_cvtepi32_ps(exponent), _mm256_and_ps(tiny, _mm256_set1_ps(23.0)));
    let f = _mm256_sub_ps(mantissa, _mm256_set1_ps(1.0));
    let f2 = _mm256_mul_ps(f, f);
    let p = _mm256_mul_ps(_mm256_mul_ps(poly(&LN, f, f2), f), f2);
    let low = _mm256_fmadd_ps(n, _mm256_set1_ps(LN2_LO), _mm256_fnmadd_ps(f2, _mm256_set1_ps(0.5), p));
    let y = _mm256_fmadd_ps(n, _mm256_set1_ps(LN2_HI), _mm256_add_ps(f, low));
    // The ends: +inf and NaN keep themselves, 0 is -inf, below 0 is NaN.
    let zero = _mm256_setzero_ps();
    let inf = _mm256_set1_ps(f32::INFINITY);
    let y = _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, inf));
    let y = _mm256_blendv_ps(y, _mm256_set1_ps(f32::NEG_INFINITY), _mm256_cmp_ps::<_CMP_EQ_OQ>(x, zero));
    _mm256_blendv_ps(y, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_LT_OQ>(x, zero))
}

/// ln(1 + x), accurate near 0, for finite x.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn ln1p(x: __m256) -> __m256 {
    let one = _mm256_set1_ps(1.0);
    let w = _mm256_add_ps(one, x);
    // What the rounding of 1 + x lost, to first order.
    let lost = _mm256_sub_ps(x, _mm256_sub_ps(w, one));
    _mm256_add_ps(ln(w), _mm256_div_ps(lost, w))
}

/// The hyperbolic tangent.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn tanh(x: __m256) -> __m256 {
    // With m = e^(-2|x|) - 1: tanh|x| = -m / (2 + m), which loses nothing near 0 and rounds to 1 from 9.02 up.
    let t = _mm256_min_ps(_mm256_set1_ps(9.5), abs(x));
    let m = expm1_negative(_mm256_mul_ps(t, _mm256_set1_ps(-2.0)));
    let y = _mm256_div_ps(m, _mm256_add_ps(m, _mm256_set1_ps(2.0)));
    with_sign(abs(y), x)
}

/// 1 / (1 + e⁻ˣ).
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn sigmoid(x: __m256) -> __m256 {
    let one = _mm256_set1_ps(1.0);
    let e = exp(_mm256_xor_ps(x, _mm256_set1_ps(-0.0)));
    _mm256_div_ps(one, _mm256_add_ps(one, e))
}

/// The error function.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn erf(x: __m256) -> __m256 {
    let t = _mm256_min_ps(_mm256_set1_ps(4.0), abs(x));
    let [c0, c1, c2, c3, c4, c5] = ERF_SMALL;
    let t2 = _mm256_mul_ps(t, t);
    let small = poly(&[c5, c4, c3, c2, c1, c0], t2, _mm256_mul_ps(t2, t2));
    let small = _mm256_fmadd_ps(small, t, t);
    let [c0, c1, c2, c3, c4, c5] = ERF_LARGE;
    let large = _mm256_mul_ps(poly(&[c5, c4, c3, c2, c1, c0], t, t2), t);
    let large = _mm256_sub_ps(_mm256_set1_ps(1.0), exp(_mm256_xor_ps(large, _mm256_set1_ps(-0.0))));
    let is_large = _mm256_cmp_ps::<_CMP_GT_OQ>(t, _mm256_set1_ps(ERF_SPLIT));
    with_sign(_mm256_blendv_ps(small, large, is_large), x)
}

/// The sine.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn sin(x: __m256) -> __m256 {
    trig(x, 0, scalar::sin)
}

/// The cosine.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn cos(x: __m256) -> __m256 {
    trig(x, 1, scalar::cos)
}

/// sin(x + quarters·π/2), with `twin` for arguments that are too large, infinite or NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn trig(x: __m256, quarters: i32, twin: fn(f32) -> f32) -> __m256 {
    let round = _mm256_set1_ps(ROUND);
    let shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(std::f32::consts::FRAC_2_PI), round);
    let n = _mm256_sub_ps(shifted, round);
    // π/2 in three parts: 24 bits each.
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.570_796_4), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-4.371_139e-8), r);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-1.715_124_5e-15), r);
    let r2 = _mm256_mul_ps(r, r);
    let r4 = _mm256_mul_ps(r2, r2);
    let s = _mm256_fmadd_ps(_mm256_mul_ps(poly(&SIN, r2, r4), r2), r, r);
    let c = _mm256_fmadd_ps(poly(&COS, r2, r4), r2, _mm256_set1_ps(-0.5));
    let c = _mm256_fmadd_ps(c, r2, _mm256_set1_ps(1.0));
    let q = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(quarters));
    let odd = _mm256_castsi256_ps(_mm256_slli_epi32::<31>(q));
    let minus = _mm256_slli_epi32::<30>(_mm256_and_si256(q, _mm256_set1_epi32(2)));
    let y = _mm256_xor_ps(_mm256_blendv_ps(s, c, odd), _mm256_castsi256_ps(minus));
    let wild = _mm256_cmp_ps::<_CMP_NLE_UQ>(abs(x), _mm256_set1_ps(TRIG_MAX));
    if _mm256_movemask_ps(wild) == 0 { y } else { trig_wild(x, y, _mm256_movemask_ps(wild), twin) }
}

/// Replaces the lanes of `y` in `mask` by the twin's.
#[cold]
#[target_feature(enable = "avx2,fma")]
fn trig_wild(x: __m256, y: __m256, mask: i32, twin: fn(f32) -> f32) -> __m256 {
    let (mut xs, mut ys) = ([0.0f32; 8], [0.0f32; 8]);
    // SAFETY: both arrays have eight floats.
    unsafe {
        _mm256_storeu_ps(xs.as_mut_ptr(), x);
        _mm256_storeu_ps(ys.as_mut_ptr(), y);
    }
    for i in 0..8 {
        if mask >> i & 1 == 1 {
            ys[i] = twin(xs[i]);
        }
    }
    // SAFETY: the array has eight floats.
    unsafe { _mm256_loadu_ps(ys.as_ptr()) }
}
