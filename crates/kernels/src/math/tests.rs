//! Dense sweeps against f64, and the ends of the range.

use super::scalar;

/// erf in f64: the Taylor series below 3, where it is exact enough, and the continued fraction of erfc above.
fn erf64(x: f64) -> f64 {
    let t = x.abs();
    if t < 3.0 {
        let (mut term, mut sum) = (x, x);
        for k in 1..100 {
            term *= -x * x / k as f64;
            sum += term / (2 * k + 1) as f64;
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let tail = (1..60).rev().fold(t, |f, k| t + k as f64 / 2.0 / f);
        (1.0 - (-t * t).exp() / std::f64::consts::PI.sqrt() / tail).copysign(x)
    }
}

/// The error of `got` in units in the last place of the true value.
fn ulps(got: f32, want: f64) -> f64 {
    let near = want as f32;
    if got.is_nan() || near.is_nan() {
        return if got.is_nan() && near.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if got == near {
        return 0.0;
    }
    if near.is_infinite() || got.is_infinite() {
        return f64::INFINITY;
    }
    let exponent = near.abs().max(f32::MIN_POSITIVE).log2().floor() as i32;
    (f64::from(got) - want).abs() / 2f64.powi(exponent - 23)
}

struct FunctionRow {
    name: &'static str,
    twin: fn(f32) -> f32,
    truth: fn(f64) -> f64,
    range: (f32, f32),
    bound: f64,
}

const ROWS: &[FunctionRow] = &[
    FunctionRow { name: "exp", twin: scalar::exp, truth: f64::exp, range: (-86.6, 88.72), bound: 2.0 },
    FunctionRow { name: "expm1", twin: scalar::expm1, truth: f64::exp_m1, range: (-50.0, 88.72), bound: 4.0 },
    FunctionRow { name: "expm1", twin: scalar::expm1, truth: f64::exp_m1, range: (-0.5, 0.5), bound: 4.0 },
    FunctionRow { name: "ln", twin: scalar::ln, truth: f64::ln, range: (1e-45, 3.4e38), bound: 2.0 },
    FunctionRow { name: "ln", twin: scalar::ln, truth: f64::ln, range: (0.5, 2.0), bound: 2.0 },
    FunctionRow { name: "ln1p", twin: scalar::ln1p, truth: f64::ln_1p, range: (0.0, 1.0), bound: 4.0 },
    FunctionRow { name: "tanh", twin: scalar::tanh, truth: f64::tanh, range: (-10.0, 10.0), bound: 4.0 },
    FunctionRow { name: "tanh", twin: scalar::tanh, truth: f64::tanh, range: (-0.5, 0.5), bound: 4.0 },
    FunctionRow {
        name: "sigmoid",
        twin: scalar::sigmoid,
        truth: |x| 1.0 / (1.0 + (-x).exp()),
        range: (-87.0, 100.0),
        bound: 4.0,
    },
    FunctionRow { name: "erf", twin: scalar::erf, truth: erf64, range: (-5.0, 5.0), bound: 3.0 },
    FunctionRow { name: "sin", twin: scalar::sin, truth: f64::sin, range: (-10.0, 10.0), bound: 2.0 },
    FunctionRow { name: "sin", twin: scalar::sin, truth: f64::sin, range: (-2e5, 2e5), bound: 2.0 },
    FunctionRow { name: "cos", twin: scalar::cos, truth: f64::cos, range: (-10.0, 10.0), bound: 2.0 },
    FunctionRow { name: "cos", twin: scalar::cos, truth: f64::cos, range: (-2e5, 2e5), bound: 2.0 },
];

/// Evenly spaced in value and, for wide ranges, evenly spaced in the bits.
fn sweep((lo, hi): (f32, f32)) -> Vec<f32> {
    let n = 200_000;
    let mut xs: Vec<f32> = (0..=n).map(|i| lo + (hi - lo) * (i as f32 / n as f32)).collect();
    for i in 0..n {
        let x = f32::from_bits(((i as u64 * 0x7f80_0000) / n as u64) as u32 | (i as u32 & 7));
        xs.extend([x, -x].into_iter().filter(|v| *v >= lo && *v <= hi));
    }
    xs.resize(xs.len().next_multiple_of(8), lo);
    xs
}

fn check(row: &FunctionRow, xs: &[f32], ys: &[f32]) {
    let mut worst = (0.0, 0.0f32, 0.0f32);
    for (&x, &y) in xs.iter().zip(ys) {
        let e = ulps(y, (row.truth)(f64::from(x)));
        if e > worst.0 {
            worst = (e, x, y);
        }
    }
    println!("{} {:?}: {:.2} ulp at {} -> {}", row.name, row.range, worst.0, worst.1, worst.2);
    assert!(worst.0 <= row.bound, "{} {:?}: {:?} ulp", row.name, row.range, worst);
}

#[test]
fn scalar_bounds() {
    for row in ROWS {
        let xs = sweep(row.range);
        let ys: Vec<f32> = xs.iter().map(|&x| (row.twin)(x)).collect();
        check(row, &xs, &ys);
    }
}

#[cfg(target_arch = "x86_64")]
mod lanes {
    use super::*;
    use crate::Isa;

    crate::simd::twins! {
        pub(super) fn map(name: &str, xs: &[f32], ys: &mut [f32]) {
            for (x, y) in xs.chunks_exact(WIDTH).zip(ys.chunks_exact_mut(WIDTH)) {
                // SAFETY: the chunks have `WIDTH` floats.
                let v = unsafe { load(x.as_ptr()) };
                let v = match name {
                    "exp" => exp(v),
                    "expm1" => expm1(v),
                    "ln" => ln(v),
                    "ln1p" => ln1p(v),
                    "tanh" => tanh(v),
                    "sigmoid" => sigmoid(v),
                    "erf" => erf(v),
                    "sin" => sin(v),
                    "cos" => cos(v),
                    _ => panic!("no {name}"),
                };
                // SAFETY: as above.
                unsafe { store(y.as_mut_ptr(), v) };
            }
        }
    }

    /// The values by the widest vectors, which are the bits of any.
    fn run(name: &str, xs: &[f32]) -> Vec<f32> {
        let mut padded = xs.to_vec();
        padded.resize(xs.len().next_multiple_of(16), 1.0);
        let mut ys = vec![0.0; padded.len()];
        // SAFETY: callers checked the instruction set.
        unsafe { avx2::map(name, &padded, &mut ys) };
        if Isa::detect().has_avx512() {
            let mut wide = vec![0.0; padded.len()];
            // SAFETY: the instruction set was detected.
            unsafe { avx512::map(name, &padded, &mut wide) };
            for (x, (y, w)) in padded.iter().zip(ys.iter().zip(&wide)) {
                assert_eq!(y.to_bits(), w.to_bits(), "{name}({x}) in 8 lanes and in 16: {y} and {w}");
            }
        }
        ys.truncate(xs.len());
        ys
    }

    #[test]
    fn lanes_bounds() {
        if !Isa::detect().has_avx2() {
            return;
        }
        for row in ROWS {
            let xs = sweep(row.range);
            check(row, &xs, &run(row.name, &xs));
        }
    }

    #[test]
    fn ends() {
        if !Isa::detect().has_avx2() {
            return;
        }
        let inf = f32::INFINITY;
        let rows: &[(&str, [f32; 8], [f32; 8])] = &[
            (
                "exp",
                [-inf, inf, 0.0, -0.0, 88.8, -88.0, f32::MAX, f32::MIN],
                [0.0, inf, 1.0, 1.0, inf, 0.0, inf, 0.0],
            ),
            (
                "expm1",
                [-inf, inf, 0.0, -0.0, 89.0, -88.0, 1e-30, f32::MIN],
                [-1.0, inf, 0.0, 0.0, inf, -1.0, 1e-30, -1.0],
            ),
            (
                "ln",
                [0.0, -0.0, inf, 1.0, -1.0, -inf, 1e-45, 2.0],
                [-inf, -inf, inf, 0.0, f32::NAN, f32::NAN, -103.27893, 2f32.ln()],
            ),
            (
                "tanh",
                [-inf, inf, 0.0, -0.0, 20.0, -20.0, 1e-30, -1e-45],
                [-1.0, 1.0, 0.0, -0.0, 1.0, -1.0, 1e-30, -1e-45],
            ),
            (
                "sigmoid",
                [-inf, inf, 0.0, -0.0, 20.0, -100.0, 1e-30, f32::MAX],
                [0.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.5, 1.0],
            ),
            (
                "erf",
                [-inf, inf, 0.0, -0.0, 20.0, -20.0, 4.5, -4.1],
                [-1.0, 1.0, 0.0, -0.0, 1.0, -1.0, 1.0, -1.0],
            ),
            (
                "sin",
                [-inf, inf, 0.0, -0.0, 1e30, f32::MAX, -1e30, 1e-30],
                [f32::NAN, f32::NAN, 0.0, -0.0, 1e30f32.sin(), f32::MAX.sin(), -1e30f32.sin(), 1e-30],
            ),
            (
                "cos",
                [-inf, inf, 0.0, -0.0, 1e30, f32::MAX, -1e30, 1e-30],
                [f32::NAN, f32::NAN, 1.0, 1.0, 1e30f32.cos(), f32::MAX.cos(), 1e30f32.cos(), 1.0],
            ),
        ];
        for (name, xs, want) in rows {
            for (i, (y, w)) in run(name, xs).iter().zip(want).enumerate() {
                assert!(y == w || (y.is_nan() && w.is_nan()), "{name}({}) = {y}, not {w}", xs[i]);
            }
        }
        for name in ["exp", "expm1", "ln", "ln1p", "tanh", "sigmoid", "erf", "sin", "cos"] {
            assert!(run(name, &[f32::NAN; 8]).iter().all(|y| y.is_nan()), "{name}(NaN)");
        }
    }
}
