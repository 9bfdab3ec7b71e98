//! A vector at a time, for AVX2 and AVX-512. Straight-line code: no branches but the rare one of `sin` and `cos`.
//!
//! Operand order of `min` and `max` matters: they return their second operand when either is NaN, so the value
//! comes second and its NaN goes on.

use super::scalar::{self, ERF_LARGE, ERF_SMALL, ERF_SPLIT};
use crate::simd::twins;

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
/// Beyond this the three-part reduction of `sin` and `cos` is not trusted.
const TRIG_MAX: f32 = 1e5;

twins! {
    /// A polynomial, highest power first. Even and odd powers separately: half the latency of Horner's rule, which
    /// bounds these functions, for one more multiplication. `x2` is x².
    fn poly<const N: usize>(c: &[f32; N], x: V, x2: V) -> V {
        let (mut a, mut b) = (splat(c[0]), splat(c[1]));
        let mut i = 2;
        while i + 1 < N {
            a = fmadd(a, x2, splat(c[i]));
            b = fmadd(b, x2, splat(c[i + 1]));
            i += 2;
        }
        if i < N {
            fmadd(b, x, fmadd(a, x2, splat(c[i])))
        } else {
            fmadd(a, x, b)
        }
    }

    fn abs(x: V) -> V {
        andnot(splat(-0.0), x)
    }

    /// `y` with the sign bit of `x`, for `y` without one.
    fn with_sign(y: V, x: V) -> V {
        or(y, and(splat(-0.0), x))
    }

    /// x = n·ln 2 + r: returns n still added to [`ROUND`], and r.
    fn reduce_exp(x: V) -> (V, V) {
        let round = splat(ROUND);
        let shifted = fmadd(x, splat(std::f32::consts::LOG2_E), round);
        let n = sub(shifted, round);
        let r = fnmadd(n, splat(LN2_HI), x);
        (shifted, fnmadd(n, splat(LN2_LO), r))
    }

    /// 2^(n + bias − 127) from a shifted n.
    fn power_of_two(shifted: V, bias: i32) -> V {
        let n = shift_left_23(bits(shifted));
        from_bits(add_i(n, splat_i(bias << 23)))
    }

    /// eˣ.
    pub(crate) fn exp(x: V) -> V {
        // From -87.5 down n is -126 and the scale 2^(n-1) has exponent bits 0: the result is 0. From 88.73 up, n is 128
        // and doubling overflows to infinity.
        let x = max(splat(-87.5), min(splat(88.8), x));
        let (shifted, r) = reduce_exp(x);
        let r2 = mul(r, r);
        let p = add(fmadd(poly(&EXP, r, r2), r2, r), splat(1.0));
        let half = mul(p, power_of_two(shifted, 126));
        add(half, half)
    }

    /// eˣ − 1 for x from −80 to 0.
    fn expm1_negative(x: V) -> V {
        let (shifted, r) = reduce_exp(x);
        let r2 = mul(r, r);
        let p = fmadd(poly(&EXP, r, r2), r2, r);
        let scale = power_of_two(shifted, 127);
        fmadd(p, scale, sub(scale, splat(1.0)))
    }

    /// eˣ − 1, accurate near 0.
    pub(crate) fn expm1(x: V) -> V {
        let x = max(splat(-40.0), min(splat(88.8), x));
        let (shifted, r) = reduce_exp(x);
        let r2 = mul(r, r);
        let p = fmadd(poly(&EXP, r, r2), r2, r);
        // Half the result first, as in `exp`: 2ⁿ itself overflows a little before the result does.
        let scale = power_of_two(shifted, 126);
        let half = fmadd(p, scale, sub(scale, splat(0.5)));
        add(half, half)
    }

    /// The natural logarithm.
    pub(crate) fn ln(x: V) -> V {
        // Subnormals are lifted by 2²³ first.
        let tiny = lt(x, splat(f32::MIN_POSITIVE));
        let lifted = select(tiny, mul(x, splat(8_388_608.0)), x);
        // Cutting the exponent at √½ instead of 1 puts the mantissa in √½..√2.
        let bits = bits(lifted);
        let from_half = sub_i(bits, splat_i(0x3f35_04f3));
        let exponent = shift_right_23(from_half);
        let mantissa = from_bits(sub_i(bits, shift_left_23(exponent)));
        let n = sub(to_float(exponent), keep(tiny, splat(23.0)));
        let f = sub(mantissa, splat(1.0));
        let f2 = mul(f, f);
        let p = mul(mul(poly(&LN, f, f2), f), f2);
        let low = fmadd(n, splat(LN2_LO), fnmadd(f2, splat(0.5), p));
        let y = fmadd(n, splat(LN2_HI), add(f, low));
        // The ends: +inf and NaN keep themselves, 0 is -inf, below 0 is NaN.
        let zero = zero();
        let inf = splat(f32::INFINITY);
        let y = select(not_lt(x, inf), x, y);
        let y = select(eq(x, zero), splat(f32::NEG_INFINITY), y);
        select(lt(x, zero), splat(f32::NAN), y)
    }

    /// ln(1 + x), accurate near 0, for finite x.
    pub(crate) fn ln1p(x: V) -> V {
        let one = splat(1.0);
        let w = add(one, x);
        // What the rounding of 1 + x lost, to first order.
        let lost = sub(x, sub(w, one));
        add(ln(w), div(lost, w))
    }

    /// The hyperbolic tangent.
    pub(crate) fn tanh(x: V) -> V {
        // With m = e^(-2|x|) - 1: tanh|x| = -m / (2 + m), which loses nothing near 0 and rounds to 1 from 9.02 up.
        let t = min(splat(9.5), abs(x));
        let m = expm1_negative(mul(t, splat(-2.0)));
        let y = div(m, add(m, splat(2.0)));
        with_sign(abs(y), x)
    }

    /// 1 / (1 + e⁻ˣ).
    pub(crate) fn sigmoid(x: V) -> V {
        let one = splat(1.0);
        let e = exp(xor(x, splat(-0.0)));
        div(one, add(one, e))
    }

    /// The error function.
    pub(crate) fn erf(x: V) -> V {
        let t = min(splat(4.0), abs(x));
        let [c0, c1, c2, c3, c4, c5] = ERF_SMALL;
        let t2 = mul(t, t);
        let small = poly(&[c5, c4, c3, c2, c1, c0], t2, mul(t2, t2));
        let small = fmadd(small, t, t);
        let [c0, c1, c2, c3, c4, c5] = ERF_LARGE;
        let large = mul(poly(&[c5, c4, c3, c2, c1, c0], t, t2), t);
        let large = sub(splat(1.0), exp(xor(large, splat(-0.0))));
        let is_large = gt(t, splat(ERF_SPLIT));
        with_sign(select(is_large, large, small), x)
    }

    /// The sine.
    pub(crate) fn sin(x: V) -> V {
        trig(x, 0, scalar::sin)
    }

    /// The cosine.
    pub(crate) fn cos(x: V) -> V {
        trig(x, 1, scalar::cos)
    }

    /// sin(x + quarters·π/2), with `twin` for arguments that are too large, infinite or NaN.
    fn trig(x: V, quarters: i32, twin: fn(f32) -> f32) -> V {
        let round = splat(ROUND);
        let shifted = fmadd(x, splat(std::f32::consts::FRAC_2_PI), round);
        let n = sub(shifted, round);
        // π/2 in three parts: 24 bits each.
        let r = fnmadd(n, splat(1.570_796_4), x);
        let r = fnmadd(n, splat(-4.371_139e-8), r);
        let r = fnmadd(n, splat(-1.715_124_5e-15), r);
        let r2 = mul(r, r);
        let r4 = mul(r2, r2);
        let s = fmadd(mul(poly(&SIN, r2, r4), r2), r, r);
        let c = fmadd(poly(&COS, r2, r4), r2, splat(-0.5));
        let c = fmadd(c, r2, splat(1.0));
        let q = add_i(bits(shifted), splat_i(quarters));
        let minus = shift_left_30(and_i(q, splat_i(2)));
        let y = xor(select(odd(q), c, s), from_bits(minus));
        let wild = not_le(abs(x), splat(TRIG_MAX));
        if lanes_set(wild) == 0 { y } else { trig_wild(x, y, lanes_set(wild), twin) }
    }

    /// Replaces the lanes of `y` in `mask` by the twin's.
    #[cold]
    fn trig_wild(x: V, y: V, mask: u32, twin: fn(f32) -> f32) -> V {
        let (mut xs, mut ys) = ([0.0f32; WIDTH], [0.0f32; WIDTH]);
        // SAFETY: both arrays have `WIDTH` floats.
        unsafe {
            store(xs.as_mut_ptr(), x);
            store(ys.as_mut_ptr(), y);
        }
        for i in 0..WIDTH {
            if mask >> i & 1 == 1 {
                ys[i] = twin(xs[i]);
            }
        }
        // SAFETY: the array has `WIDTH` floats.
        unsafe { load(ys.as_ptr()) }
    }
}
