//! Mixup: each sample is mixed with another of its batch, and so is the loss.
//!
//! One share a step, drawn from a beta distribution as a function of seed and step, so that a run that resumes draws
//! what it would have drawn. Sample `i` of `n` is mixed with sample `n - 1 - i`: the batch is in random order already.

use crate::draw::Draw;

/// The share of the first sample at `step`: Beta(alpha, alpha), as a ratio of two gamma variates.
pub fn share(alpha: f64, seed: u64, step: u64) -> f32 {
    let mut draw = Draw::new(seed ^ (step + 1).wrapping_mul(0xD1B5_4A32_D192_ED03) ^ 0x6D69_7875_7000_0000);
    let (a, b) = (draw.gamma(alpha), draw.gamma(alpha));
    // Both underflow for tiny alphas: then the distribution is a coin.
    if a + b > 0.0 { (a / (a + b)) as f32 } else { f32::from(draw.uniform() < 0.5) }
}

/// Mixes `n` samples in `x`, in place: `x[i] = share·x[i] + (1-share)·x[n-1-i]`, both ways at once.
pub fn mix(x: &mut [f32], n: usize, share: f32) {
    let width = x.len() / n.max(1);
    let (head, tail) = x.split_at_mut(n / 2 * width);
    // The middle one of an odd number is mixed with itself.
    let tail = &mut tail[n % 2 * width..];
    for (k, first) in head.chunks_exact_mut(width.max(1)).enumerate() {
        let at = tail.len() - (k + 1) * width;
        for (a, b) in first.iter_mut().zip(&mut tail[at..at + width]) {
            (*a, *b) = (share * *a + (1.0 - share) * *b, share * *b + (1.0 - share) * *a);
        }
    }
}

impl Draw {
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Marsaglia and Tsang's method; below 1 by way of `alpha + 1`.
    fn gamma(&mut self, alpha: f64) -> f64 {
        if alpha < 1.0 {
            return self.gamma(alpha + 1.0) * self.uniform().powf(1.0 / alpha);
        }
        let d = alpha - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.uniform().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_have_the_mean_and_variance_of_the_beta_distribution() {
        for alpha in [0.1, 0.4, 1.0, 3.0] {
            let n = 20_000;
            let draws: Vec<f64> = (0..n).map(|s| f64::from(share(alpha, 7, s))).collect();
            let mean = draws.iter().sum::<f64>() / n as f64;
            let var = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            let want = 1.0 / (4.0 * (2.0 * alpha + 1.0));
            assert!((mean - 0.5).abs() < 0.015, "alpha {alpha}: mean {mean}");
            assert!((var - want).abs() < 0.05 * want, "alpha {alpha}: variance {var}, not {want}");
            assert!(draws.iter().all(|x| (0.0..=1.0).contains(x)));
        }
    }

    #[test]
    fn pairs_are_mixed_both_ways() {
        for n in [1, 2, 5] {
            let mut x: Vec<f32> = (0..n * 2).map(|i| i as f32).collect();
            let before = x.clone();
            mix(&mut x, n, 0.75);
            for i in 0..n {
                for j in 0..2 {
                    let (a, b) = (before[i * 2 + j], before[(n - 1 - i) * 2 + j]);
                    assert_eq!(x[i * 2 + j], 0.75 * a + 0.25 * b, "n {n}, sample {i}");
                }
            }
        }
    }
}
