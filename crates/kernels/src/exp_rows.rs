//! Passes over one row with an exponential in them, for softmax and cross entropy.
//!
//! The vector forms pad the last vector with `-inf`, whose exponential is 0: a row of 10 classes needs no tail loop.
//! They have the same bits, because their sums have 16 lanes whatever the vectors have, and an exponential of 0 changes
//! none. The scalar twin differs by the rounding of its exponentials.

use crate::Isa;
use crate::simd::twins;

/// `y = e^(x - shift)`; returns the sum of y.
pub(crate) fn exp_into(isa: Isa, x: &[f32], shift: f32, y: &mut [f32]) -> f32 {
    assert_eq!(x.len(), y.len(), "a result for each element");
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512() {
        // SAFETY: an `Isa` with these comes from detection alone, so this CPU has the instructions.
        return unsafe { avx512::exp_into(x, shift, y) };
    } else if isa.has_avx2() {
        // SAFETY: as above.
        return unsafe { avx2::exp_into(x, shift, y) };
    }
    let _ = isa;
    scalar::exp_into(x, shift, y)
}

/// The sum of `e^(x - shift)`.
pub(crate) fn exp_sum(isa: Isa, x: &[f32], shift: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512() {
        // SAFETY: as above.
        return unsafe { avx512::exp_sum(x, shift) };
    } else if isa.has_avx2() {
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
    if isa.has_avx512() {
        // SAFETY: as above.
        return unsafe { avx512::exp_each(x, shifts, y) };
    } else if isa.has_avx2() {
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

twins! {
    pub(super) fn exp_into(x: &[f32], shift: f32, y: &mut [f32]) -> f32 {
        let shift = splat(shift);
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<WIDTH>(), y.as_chunks_mut::<WIDTH>());
        let mut sum = LaneSum::new();
        for (x, y) in x.iter().zip(y) {
            // SAFETY: both have `WIDTH` floats.
            unsafe {
                let e = exp(sub(load(x.as_ptr()), shift));
                store(y.as_mut_ptr(), e);
                sum.push(e);
            }
        }
        let n = x_rest.len().min(y_rest.len());
        if n > 0 {
            // SAFETY: both have `n` floats.
            unsafe {
                let e = exp(sub(hide_after(n, load_first(x_rest.as_ptr(), n)), shift));
                store_first(y_rest.as_mut_ptr(), n, e);
                sum.push(e);
            }
        }
        sum.total()
    }

    pub(super) fn exp_sum(x: &[f32], shift: f32) -> f32 {
        let shift = splat(shift);
        let (x, rest) = x.as_chunks::<WIDTH>();
        let mut sum = LaneSum::new();
        for x in x {
            // SAFETY: there are `WIDTH` floats.
            sum.push(exp(sub(unsafe { load(x.as_ptr()) }, shift)));
        }
        if !rest.is_empty() {
            // SAFETY: no more than there are.
            let x = unsafe { load_first(rest.as_ptr(), rest.len()) };
            sum.push(exp(sub(hide_after(rest.len(), x), shift)));
        }
        sum.total()
    }

    pub(super) fn exp_each(x: &[f32], shifts: &[f32], y: &mut [f32]) {
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<WIDTH>(), y.as_chunks_mut::<WIDTH>());
        let (s, s_rest) = shifts.as_chunks::<WIDTH>();
        for ((x, s), y) in x.iter().zip(s).zip(y) {
            // SAFETY: all have `WIDTH` floats.
            unsafe { store(y.as_mut_ptr(), exp(sub(load(x.as_ptr()), load(s.as_ptr())))) };
        }
        let n = x_rest.len().min(s_rest.len()).min(y_rest.len());
        // SAFETY: all have `n` floats.
        unsafe {
            let e = exp(sub(load_first(x_rest.as_ptr(), n), load_first(s_rest.as_ptr(), n)));
            store_first(y_rest.as_mut_ptr(), n, e);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::testing::{close, data, same_bits};

    #[test]
    fn matches_f64_on_awkward_lengths() {
        for isa in Isa::available() {
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
    #[test]
    fn vectors_of_any_width_give_the_same_bits() {
        for n in [0, 1, 7, 8, 9, 15, 16, 17, 24, 31, 33, 47, 100, 1000] {
            let x: Vec<f32> = data(1, n).iter().map(|v| v * 20.0).collect();
            let shifts = data(2, n);
            let mut runs = vec![];
            for isa in Isa::available().filter(|isa| isa.has_avx2()) {
                let (mut y, mut z) = (vec![f32::NAN; n], vec![f32::NAN; n]);
                let sums = [exp_into(isa, &x, 3.0, &mut y), exp_sum(isa, &x, 3.0)];
                exp_each(isa, &x, &shifts, &mut z);
                runs.push([&sums[..], &y, &z].concat());
            }
            if !runs.is_empty() {
                same_bits("exponentials", &runs);
            }
        }
    }
}
