//! Passes over one row with an exponential in them, for softmax and cross entropy.
//!
//! The AVX2 forms fill the last vector up with `-inf`, whose exponential is 0: a row of 10 classes takes two vectors
//! and no loop over a tail. The twins differ by the rounding of their exponentials.

use crate::Isa;

/// `y = e^(x - shift)`; returns the sum of y.
pub(crate) fn exp_into(isa: Isa, x: &[f32], shift: f32, y: &mut [f32]) -> f32 {
    assert_eq!(x.len(), y.len(), "a result for each element");
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: an `Isa` with AVX2 comes from detection alone, so this CPU has the instructions.
        return unsafe { avx2::exp_into(x, shift, y) };
    }
    let _ = isa;
    scalar::exp_into(x, shift, y)
}

/// The sum of `e^(x - shift)`.
pub(crate) fn exp_sum(isa: Isa, x: &[f32], shift: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: as above.
        return unsafe { avx2::exp_sum(x, shift) };
    }
    let _ = isa;
    scalar::exp_sum(x, shift)
}

/// `y = e^(x - shifts)`, with a shift for each element.
pub(crate) fn exp_each(isa: Isa, x: &[f32], shifts: &[f32], y: &mut [f32]) {
    assert!(x.len() == y.len() && x.len() == shifts.len(), "a result and a shift for each element");
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx2() {
        // SAFETY: as above.
        return unsafe { avx2::exp_each(x, shifts, y) };
    }
    let _ = isa;
    scalar::exp_each(x, shifts, y);
}

mod scalar {
    use crate::lanes::sum_map;
    use crate::math::scalar::exp;

    pub(super) fn exp_into(x: &[f32], shift: f32, y: &mut [f32]) -> f32 {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = exp(x - shift);
        }
        sum_map(y, |v| v)
    }

    pub(super) fn exp_sum(x: &[f32], shift: f32) -> f32 {
        sum_map(x, |v| exp(v - shift))
    }

    pub(super) fn exp_each(x: &[f32], shifts: &[f32], y: &mut [f32]) {
        for ((y, &x), &shift) in y.iter_mut().zip(x).zip(shifts) {
            *y = exp(x - shift);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use crate::math::avx2::exp;
    use std::arch::x86_64::*;

    const WIDTH: usize = 8;
    type Lanes = [f32; WIDTH];

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn load(x: &Lanes) -> __m256 {
        // SAFETY: eight floats are there to be read.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn store(y: &mut Lanes, v: __m256) {
        // SAFETY: eight floats are there to be written.
        unsafe { _mm256_storeu_ps(y.as_mut_ptr(), v) }
    }

    /// A shorter piece, filled up with `-inf`.
    #[inline]
    fn padded(rest: &[f32]) -> Lanes {
        let mut lanes = [f32::NEG_INFINITY; WIDTH];
        lanes[..rest.len()].copy_from_slice(rest);
        lanes
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn fold(a: __m256, b: __m256) -> f32 {
        let mut lanes = [0.0; WIDTH];
        store(&mut lanes, _mm256_add_ps(a, b));
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn exp_into(x: &[f32], shift: f32, y: &mut [f32]) -> f32 {
        let shift = _mm256_set1_ps(shift);
        let ((x_lanes, x_rest), (y_lanes, y_rest)) = (x.as_chunks::<WIDTH>(), y.as_chunks_mut::<WIDTH>());
        let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for (x, y) in x_lanes.iter().zip(y_lanes) {
            let e = exp(_mm256_sub_ps(load(x), shift));
            store(y, e);
            // The sums change places, so that each takes every other vector.
            (even, odd) = (odd, _mm256_add_ps(even, e));
        }
        if !x_rest.is_empty() {
            let e = exp(_mm256_sub_ps(load(&padded(x_rest)), shift));
            let mut last = [0.0; WIDTH];
            store(&mut last, e);
            y_rest.copy_from_slice(&last[..y_rest.len()]);
            (even, odd) = (odd, _mm256_add_ps(even, e));
        }
        fold(even, odd)
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn exp_sum(x: &[f32], shift: f32) -> f32 {
        let shift = _mm256_set1_ps(shift);
        let (lanes, rest) = x.as_chunks::<WIDTH>();
        let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for x in lanes {
            let e = exp(_mm256_sub_ps(load(x), shift));
            (even, odd) = (odd, _mm256_add_ps(even, e));
        }
        if !rest.is_empty() {
            let e = exp(_mm256_sub_ps(load(&padded(rest)), shift));
            (even, odd) = (odd, _mm256_add_ps(even, e));
        }
        fold(even, odd)
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn exp_each(x: &[f32], shifts: &[f32], y: &mut [f32]) {
        let ((x_lanes, x_rest), (y_lanes, y_rest)) = (x.as_chunks::<WIDTH>(), y.as_chunks_mut::<WIDTH>());
        let (s_lanes, s_rest) = shifts.as_chunks::<WIDTH>();
        for ((x, s), y) in x_lanes.iter().zip(s_lanes).zip(y_lanes) {
            store(y, exp(_mm256_sub_ps(load(x), load(s))));
        }
        let mut last = [0.0; WIDTH];
        store(&mut last, exp(_mm256_sub_ps(load(&padded(x_rest)), load(&padded(s_rest)))));
        y_rest.copy_from_slice(&last[..y_rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::testing::{close, data};

    #[test]
    fn matches_f64_on_awkward_lengths() {
        for isa in [Isa::SCALAR, Isa::detect()] {
            for n in [0, 1, 7, 8, 9, 15, 16, 17, 100] {
                let x: Vec<f32> = data(1, n).iter().map(|v| v * 20.0).collect();
                let shifts = data(2, n);
                let want: Vec<f64> = x.iter().map(|&v| (f64::from(v) - 3.0).exp()).collect();
                let mut y = vec![f32::NAN; n];
                let total = [want.iter().sum::<f64>()];
                close("sum", &[exp_into(isa, &x, 3.0, &mut y)], &total, 1e-5);
                close("exp", &y, &want, 1e-5);
                close("sum alone", &[exp_sum(isa, &x, 3.0)], &total, 1e-5);
                let want: Vec<f64> =
                    x.iter().zip(&shifts).map(|(&v, &s)| (f64::from(v) - f64::from(s)).exp()).collect();
                exp_each(isa, &x, &shifts, &mut y);
                close("exp each", &y, &want, 1e-5);
            }
        }
    }
}
