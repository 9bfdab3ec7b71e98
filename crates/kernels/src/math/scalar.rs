//! One value at a time: the standard library's where it has the function, a polynomial where it has none.

/// eˣ.
#[inline]
pub fn exp(x: f32) -> f32 {
    x.exp()
}

/// eˣ − 1, accurate near 0.
#[inline]
pub fn expm1(x: f32) -> f32 {
    x.exp_m1()
}

/// The natural logarithm.
#[inline]
pub fn ln(x: f32) -> f32 {
    x.ln()
}

/// ln(1 + x), accurate near 0.
#[inline]
pub fn ln1p(x: f32) -> f32 {
    x.ln_1p()
}

/// The hyperbolic tangent.
#[inline]
pub fn tanh(x: f32) -> f32 {
    x.tanh()
}

/// 1 / (1 + e⁻ˣ).
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The sine.
#[inline]
pub fn sin(x: f32) -> f32 {
    x.sin()
}

/// The cosine.
#[inline]
pub fn cos(x: f32) -> f32 {
    x.cos()
}

/// Where [`erf`] changes from its odd series to 1 − erfc.
pub(crate) const ERF_SPLIT: f32 = 0.92;
/// erf(x) = x + x·P(x²) for |x| up to [`ERF_SPLIT`]; lowest power first.
pub(crate) const ERF_SMALL: [f32; 6] =
    [0.128_379_14, -0.376_124_63, 0.112_814_665, -0.026_753_334, 0.004_973_117_3, -0.000_588_677_65];
/// −ln(erfc(t)) = t·Q(t) for t from 0.9 to 4, beyond which erf rounds to 1; lowest power first.
pub(crate) const ERF_LARGE: [f32; 6] =
    [1.128_52, 0.635_699_4, 0.105_286_85, -0.022_906_028, 0.003_219_974_5, -0.000_214_594_9];

/// The error function.
pub fn erf(x: f32) -> f32 {
    let t = x.abs();
    if x.is_nan() {
        return x;
    }
    // In f64, so that the twin is an oracle for the lanes and not their copy.
    let horner = |c: &[f32; 6], v: f64| c.iter().rev().fold(0.0, |sum, &k| sum * v + f64::from(k));
    let t64 = f64::from(t.min(4.0));
    let y = if t <= ERF_SPLIT {
        t64 + t64 * horner(&ERF_SMALL, t64 * t64)
    } else {
        -(-t64 * horner(&ERF_LARGE, t64)).exp_m1()
    };
    (y as f32).copysign(x)
}
