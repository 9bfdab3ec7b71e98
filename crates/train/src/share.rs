//! How a number of things is shared out among ranks: pure arithmetic, the same on every rank.
//!
//! Each rank gets a contiguous part in proportion to its weight, by the method of largest remainders: first the whole
//! part of its quota, then what is left goes to those whose quotas were cut the most, the first of equals first. So
//! parts are disjoint and complete, and no part is off its quota by one or more. A part may be empty.

use std::cmp::Ordering;
use std::ops::Range;

/// The part of rank `rank` in `0..n`, in proportion to `weights`, which has one weight for each rank. Weights that are
/// no positive numbers count as 0; if all do, they count as equal.
pub fn share(n: usize, weights: &[f64], rank: usize) -> Range<usize> {
    let counts = counts(n, weights);
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// Part `k` of `0..n` cut into `parts` as equal as can be: what [`share`] gives for equal weights.
pub fn even(n: usize, parts: usize, k: usize) -> Range<usize> {
    let (each, more) = (n / parts.max(1), n % parts.max(1));
    let start = k * each + k.min(more);
    start..start + each + usize::from(k < more)
}

/// How many of `n` things each rank gets.
pub fn counts(n: usize, weights: &[f64]) -> Vec<usize> {
    let weight = |w: &f64| if w.is_finite() && *w > 0.0 { *w } else { 0.0 };
    // Scaled by the largest, so that sums stay finite.
    let most = weights.iter().map(weight).fold(0.0, f64::max);
    if most == 0.0 {
        return (0..weights.len()).map(|k| even(n, weights.len(), k).len()).collect();
    }
    let total: f64 = weights.iter().map(|w| weight(w) / most).sum();
    let quotas: Vec<f64> = weights.iter().map(|w| n as f64 * (weight(w) / most / total)).collect();
    let mut counts: Vec<usize> = quotas.iter().map(|q| q.floor() as usize).collect();
    let mut by_remainder: Vec<usize> = (0..weights.len()).filter(|&r| weight(&weights[r]) > 0.0).collect();
    let remainder = |r: usize| quotas[r] - quotas[r].floor();
    by_remainder.sort_by(|&a, &b| remainder(b).partial_cmp(&remainder(a)).unwrap_or(Ordering::Equal));
    // Rounding may leave a few more than there are ranks, or hand out one too many: hence both ways, round and round.
    let mut given: usize = counts.iter().sum();
    for &r in by_remainder.iter().cycle() {
        if given >= n {
            break;
        }
        counts[r] += 1;
        given += 1;
    }
    for &r in by_remainder.iter().rev().cycle() {
        if given <= n {
            break;
        }
        given -= usize::from(counts[r] > 0);
        counts[r] = counts[r].saturating_sub(1);
    }
    counts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_by_hand() {
        let check = |n: usize, weights: &[f64], want: &[usize]| {
            assert_eq!(counts(n, weights), want, "{n} by {weights:?}");
        };
        check(10, &[1.0, 1.0, 1.0], &[4, 3, 3]);
        check(3, &[1.0, 1.0, 1.0, 1.0, 1.0], &[1, 1, 1, 0, 0]);
        check(0, &[1.0, 2.0], &[0, 0]);
        check(12, &[1.0, 2.0, 3.0], &[2, 4, 6]);
        // Quotas 0.9, 2.7 and 5.4: the second was cut the most.
        check(9, &[1.0, 3.0, 6.0], &[1, 3, 5]);
        check(7, &[0.0, 1.0, f64::NAN], &[0, 7, 0]);
        check(7, &[0.0, -1.0], &[4, 3]);
        check(100, &[f64::MAX, f64::MAX], &[50, 50]);
        check(5, &[f64::MAX, f64::MIN_POSITIVE], &[5, 0]);
        assert_eq!(share(10, &[1.0, 1.0, 1.0], 1), 4..7);
    }

    proptest! {
        #[test]
        fn parts_are_disjoint_complete_and_near_their_quotas(
            n in 0usize..10_000,
            weights in prop::collection::vec(prop_oneof![1e-3f64..1e3, Just(1.0)], 1..20),
        ) {
            let total: f64 = weights.iter().sum();
            let mut next = 0;
            for (rank, weight) in weights.iter().enumerate() {
                let part = share(n, &weights, rank);
                prop_assert_eq!(part.start, next);
                next = part.end;
                let quota = n as f64 * weight / total;
                prop_assert!((part.len() as f64 - quota).abs() < 1.0 + 1e-6, "{} for a quota of {}", part.len(), quota);
            }
            prop_assert_eq!(next, n);
        }

        #[test]
        fn equal_weights_give_even_parts(n in 0usize..10_000, ranks in 1usize..40, weight in 1e-3f64..1e3) {
            let weights = vec![weight; ranks];
            for rank in 0..ranks {
                prop_assert_eq!(share(n, &weights, rank), even(n, ranks, rank));
            }
        }
    }
}
