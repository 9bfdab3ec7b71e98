//! Steps over a block, eight lanes at a time.

use super::expr::{Binary, Unary};
use super::fused::Lane;
use super::plan::{Op, Step};
use super::scalar::{self, GELU_CUBE, GELU_SCALE, NORMAL_PEAK};
use crate::math::avx2 as math;
use std::arch::x86_64::*;

/// Evaluates one step over `len` elements.
///
/// # Safety
/// The slots that the step names point to `len` floats with step 8, or to eight with step 0.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn step(step: &Step, table: *const Lane, len: usize) {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let a = *table.add(usize::from(step.args[0]));
        let d = (*table.add(usize::from(step.dest))).ptr;
        match step.op {
            Op::Copy => map1(a, d, len, |x| x),
            Op::Unary(op) => unary(op, a, d, len),
            Op::Binary(op) => binary(op, a, *table.add(usize::from(step.args[1])), d, len),
            Op::Select => {
                let b = *table.add(usize::from(step.args[1]));
                let c = *table.add(usize::from(step.args[2]));
                map3(a, b, c, d, len, |cond, a, b| {
                    _mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_NEQ_UQ>(cond, _mm256_setzero_ps()))
                });
            }
        }
    }
}

/// The first `n` of eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn first(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn map1(mut a: Lane, mut d: *mut f32, len: usize, f: impl Fn(__m256) -> __m256) {
    // SAFETY: `len` floats, by the promise to `step`; the masked tail touches only those below `len`.
    unsafe {
        for _ in 0..len / 8 {
            _mm256_storeu_ps(d, f(_mm256_loadu_ps(a.ptr)));
            a.ptr = a.ptr.add(a.step);
            d = d.add(8);
        }
        if !len.is_multiple_of(8) {
            let mask = first(len % 8);
            _mm256_maskstore_ps(d, mask, f(_mm256_maskload_ps(a.ptr, mask)));
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn map2(mut a: Lane, mut b: Lane, mut d: *mut f32, len: usize, f: impl Fn(__m256, __m256) -> __m256) {
    // SAFETY: as in `map1`.
    unsafe {
        for _ in 0..len / 8 {
            _mm256_storeu_ps(d, f(_mm256_loadu_ps(a.ptr), _mm256_loadu_ps(b.ptr)));
            a.ptr = a.ptr.add(a.step);
            b.ptr = b.ptr.add(b.step);
            d = d.add(8);
        }
        if !len.is_multiple_of(8) {
            let mask = first(len % 8);
            let v = f(_mm256_maskload_ps(a.ptr, mask), _mm256_maskload_ps(b.ptr, mask));
            _mm256_maskstore_ps(d, mask, v);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn map3(
    mut a: Lane,
    mut b: Lane,
    mut c: Lane,
    mut d: *mut f32,
    len: usize,
    f: impl Fn(__m256, __m256, __m256) -> __m256,
) {
    // SAFETY: as in `map1`.
    unsafe {
        for _ in 0..len / 8 {
            _mm256_storeu_ps(d, f(_mm256_loadu_ps(a.ptr), _mm256_loadu_ps(b.ptr), _mm256_loadu_ps(c.ptr)));
            a.ptr = a.ptr.add(a.step);
            b.ptr = b.ptr.add(b.step);
            c.ptr = c.ptr.add(c.step);
            d = d.add(8);
        }
        if !len.is_multiple_of(8) {
            let mask = first(len % 8);
            let load = |l: Lane| _mm256_maskload_ps(l.ptr, mask);
            _mm256_maskstore_ps(d, mask, f(load(a), load(b), load(c)));
        }
    }
}

/// For functions that have no lanes: one value after the other.
#[cold]
#[target_feature(enable = "avx2,fma")]
fn by_value(a: __m256, b: __m256, f: impl Fn(f32, f32) -> f32) -> __m256 {
    let (mut x, mut y) = ([0.0f32; 8], [0.0f32; 8]);
    // SAFETY: the arrays have eight floats.
    unsafe {
        _mm256_storeu_ps(x.as_mut_ptr(), a);
        _mm256_storeu_ps(y.as_mut_ptr(), b);
        for i in 0..8 {
            x[i] = f(x[i], y[i]);
        }
        _mm256_loadu_ps(x.as_ptr())
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn flag(mask: __m256) -> __m256 {
    _mm256_and_ps(mask, _mm256_set1_ps(1.0))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn positive(x: __m256) -> __m256 {
    _mm256_cmp_ps::<_CMP_GT_OQ>(x, _mm256_setzero_ps())
}

/// sigmoid(2u) with u = √(2/π)·(x + 0.044715·x³); see the scalar twin.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn gelu_gate(x: __m256) -> __m256 {
    let x2 = _mm256_mul_ps(x, x);
    let slope =
        _mm256_fmadd_ps(x2, _mm256_set1_ps(2.0 * GELU_SCALE * GELU_CUBE), _mm256_set1_ps(2.0 * GELU_SCALE));
    math::sigmoid(_mm256_mul_ps(slope, x))
}

/// Φ(x), the distribution of the unit normal.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn normal_cdf(x: __m256) -> __m256 {
    let e = math::erf(_mm256_mul_ps(x, _mm256_set1_ps(std::f32::consts::FRAC_1_SQRT_2)));
    _mm256_fmadd_ps(e, _mm256_set1_ps(0.5), _mm256_set1_ps(0.5))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn unary(op: Unary, a: Lane, d: *mut f32, n: usize) {
    let one = _mm256_set1_ps(1.0);
    let zero = _mm256_setzero_ps();
    let sign = _mm256_set1_ps(-0.0);
    // SAFETY: the promise to `step`.
    unsafe {
        match op {
            Unary::Neg => map1(a, d, n, |x| _mm256_xor_ps(x, sign)),
            Unary::Exp => map1(a, d, n, |x| math::exp(x)),
            Unary::Ln => map1(a, d, n, |x| math::ln(x)),
            Unary::Sqrt => map1(a, d, n, |x| _mm256_sqrt_ps(x)),
            Unary::Rsqrt => map1(a, d, n, |x| _mm256_div_ps(one, _mm256_sqrt_ps(x))),
            Unary::Recip => map1(a, d, n, |x| _mm256_div_ps(one, x)),
            Unary::Tanh => map1(a, d, n, |x| math::tanh(x)),
            Unary::Sigmoid => map1(a, d, n, |x| math::sigmoid(x)),
            // The value second: NaN and -0 stay.
            Unary::Relu => map1(a, d, n, |x| _mm256_max_ps(zero, x)),
            Unary::LeakyRelu(alpha) => {
                let alpha = _mm256_set1_ps(alpha);
                map1(a, d, n, |x| _mm256_blendv_ps(_mm256_mul_ps(x, alpha), x, positive(x)));
            }
            Unary::Elu(alpha) => {
                let alpha = _mm256_set1_ps(alpha);
                map1(a, d, n, |x| _mm256_blendv_ps(_mm256_mul_ps(math::expm1(x), alpha), x, positive(x)));
            }
            Unary::Gelu => map1(a, d, n, |x| _mm256_mul_ps(x, normal_cdf(x))),
            Unary::GeluTanh => map1(a, d, n, |x| _mm256_mul_ps(x, gelu_gate(x))),
            Unary::Silu => map1(a, d, n, |x| _mm256_mul_ps(x, math::sigmoid(x))),
            Unary::Erf => map1(a, d, n, |x| math::erf(x)),
            Unary::Abs => map1(a, d, n, |x| _mm256_andnot_ps(sign, x)),
            Unary::Square => map1(a, d, n, |x| _mm256_mul_ps(x, x)),
            Unary::Sin => map1(a, d, n, |x| math::sin(x)),
            Unary::Cos => map1(a, d, n, |x| math::cos(x)),
            Unary::Softplus => map1(a, d, n, |x| {
                let e = math::exp(_mm256_or_ps(x, sign));
                _mm256_add_ps(_mm256_max_ps(zero, x), math::ln1p(e))
            }),
            Unary::Sign => map1(a, d, n, |x| {
                _mm256_sub_ps(flag(positive(x)), flag(_mm256_cmp_ps::<_CMP_LT_OQ>(x, zero)))
            }),
            Unary::Floor => map1(a, d, n, |x| _mm256_floor_ps(x)),
            Unary::Scale(c) => {
                let c = _mm256_set1_ps(c);
                map1(a, d, n, |x| _mm256_mul_ps(x, c));
            }
            Unary::Offset(c) => {
                let c = _mm256_set1_ps(c);
                map1(a, d, n, |x| _mm256_add_ps(x, c));
            }
            Unary::Powf(p) => match p {
                1.0 => map1(a, d, n, |x| x),
                2.0 => map1(a, d, n, |x| _mm256_mul_ps(x, x)),
                3.0 => map1(a, d, n, |x| _mm256_mul_ps(_mm256_mul_ps(x, x), x)),
                -1.0 => map1(a, d, n, |x| _mm256_div_ps(one, x)),
                _ => map1(a, d, n, |x| by_value(x, x, |x, _| x.powf(p))),
            },
            Unary::Clamp(lo, hi) => {
                let (lo, hi) = (_mm256_set1_ps(lo), _mm256_set1_ps(hi));
                map1(a, d, n, |x| _mm256_min_ps(hi, _mm256_max_ps(lo, x)));
            }
            Unary::Positive => map1(a, d, n, |x| flag(positive(x))),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn binary(op: Binary, a: Lane, b: Lane, d: *mut f32, n: usize) {
    let one = _mm256_set1_ps(1.0);
    // SAFETY: the promise to `step`.
    unsafe {
        match op {
            Binary::Add => map2(a, b, d, n, |a, b| _mm256_add_ps(a, b)),
            Binary::Sub => map2(a, b, d, n, |a, b| _mm256_sub_ps(a, b)),
            Binary::Mul => map2(a, b, d, n, |a, b| _mm256_mul_ps(a, b)),
            Binary::Div => map2(a, b, d, n, |a, b| _mm256_div_ps(a, b)),
            // The instruction gives its second operand when either is NaN; a NaN in the first is put back.
            Binary::Max => map2(a, b, d, n, |a, b| {
                _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a))
            }),
            Binary::Min => map2(a, b, d, n, |a, b| {
                _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, a))
            }),
            Binary::Pow => map2(a, b, d, n, |a, b| by_value(a, b, |a, b| scalar::binary(Binary::Pow, a, b))),
            Binary::Greater => map2(a, b, d, n, |a, b| flag(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b))),
            Binary::GreaterEqual => map2(a, b, d, n, |a, b| flag(_mm256_cmp_ps::<_CMP_GE_OQ>(a, b))),
            Binary::Equal => map2(a, b, d, n, |a, b| flag(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))),
            Binary::ReluGrad => map2(a, b, d, n, |dy, y| _mm256_and_ps(dy, positive(y))),
            Binary::TanhGrad => map2(a, b, d, n, |dy, y| _mm256_mul_ps(dy, _mm256_fnmadd_ps(y, y, one))),
            Binary::SigmoidGrad => {
                map2(a, b, d, n, |dy, y| _mm256_mul_ps(dy, _mm256_mul_ps(y, _mm256_sub_ps(one, y))))
            }
            Binary::GeluGrad => map2(a, b, d, n, |dy, x| {
                let e = math::exp(_mm256_mul_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(-0.5)));
                let density = _mm256_mul_ps(_mm256_mul_ps(x, _mm256_set1_ps(NORMAL_PEAK)), e);
                _mm256_mul_ps(dy, _mm256_add_ps(normal_cdf(x), density))
            }),
            Binary::GeluTanhGrad => map2(a, b, d, n, |dy, x| {
                let s = gelu_gate(x);
                let two_du = _mm256_fmadd_ps(
                    _mm256_mul_ps(x, x),
                    _mm256_set1_ps(6.0 * GELU_SCALE * GELU_CUBE),
                    _mm256_set1_ps(2.0 * GELU_SCALE),
                );
                let ds = _mm256_fnmadd_ps(s, s, s);
                _mm256_mul_ps(dy, _mm256_fmadd_ps(_mm256_mul_ps(x, two_du), ds, s))
            }),
            Binary::SiluGrad => map2(a, b, d, n, |dy, x| {
                let s = math::sigmoid(x);
                let t = _mm256_fmadd_ps(x, _mm256_sub_ps(one, s), one);
                _mm256_mul_ps(dy, _mm256_mul_ps(s, t))
            }),
            Binary::SoftplusGrad => map2(a, b, d, n, |dy, x| _mm256_mul_ps(dy, math::sigmoid(x))),
            Binary::LeakyReluGrad(alpha) => {
                let alpha = _mm256_set1_ps(alpha);
                map2(a, b, d, n, |dy, x| _mm256_blendv_ps(_mm256_mul_ps(dy, alpha), dy, positive(x)));
            }
            Binary::EluGrad(alpha) => {
                let alpha = _mm256_set1_ps(alpha);
                map2(a, b, d, n, |dy, x| {
                    let slope = _mm256_mul_ps(alpha, math::exp(x));
                    _mm256_mul_ps(dy, _mm256_blendv_ps(slope, one, positive(x)))
                });
            }
        }
    }
}
