//! How well numbers are predicted: mean absolute error and R², as scikit-learn's `mean_absolute_error` and `r2_score`, the
//! mean over targets where there are several.
//!
//! Sums are made block by block and put together in the order of the set, so that any number of ranks comes to the same
//! bits. The spread of the targets is kept as mean and sum of squares about it (Chan's way), which loses nothing where the
//! mean is large. All is in units of the normalised targets: R² is the same in any, and the error is brought back.

/// What a block has for each target: the sum, the squares about its mean, and the squared and absolute errors.
const SUMS: usize = 4;

/// Adds up an evaluation, block by block.
#[derive(Clone, PartialEq, Debug)]
pub struct NumberScores {
    /// By target: what one unit of the normalised numbers is.
    units: Vec<f32>,
    targets: Vec<Spread>,
    rows: f64,
    loss_sum: f64,
    loss_weight: f64,
}

/// One target's sums.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Spread {
    mean: f64,
    /// Squares of the distances from the mean.
    squares: f64,
    squared_errors: f64,
    absolute_errors: f64,
}

impl NumberScores {
    /// Nothing added yet; one unit for each target.
    pub fn new(units: Vec<f32>) -> NumberScores {
        let targets = vec![Spread::default(); units.len()];
        NumberScores { units, targets, rows: 0.0, loss_sum: 0.0, loss_weight: 0.0 }
    }

    /// How many sums a block has.
    pub(crate) fn sums(&self) -> usize {
        SUMS * self.targets.len()
    }

    /// The sums of a block of predictions and numbers, row by row.
    pub(crate) fn block(&self, predicted: &[f32], numbers: &[f32], sums: &mut [f64]) {
        let n = self.targets.len();
        let rows = numbers.len() / n.max(1);
        for (k, own) in sums.chunks_exact_mut(SUMS).enumerate() {
            let column = || numbers[k..].iter().step_by(n).map(|&y| f64::from(y));
            let errors = column().zip(predicted[k..].iter().step_by(n)).map(|(y, p)| y - f64::from(*p));
            let sum: f64 = column().sum();
            let mean = sum / rows.max(1) as f64;
            own[0] = sum;
            own[1] = column().map(|y| (y - mean) * (y - mean)).sum();
            (own[2], own[3]) =
                errors.fold((0.0, 0.0), |(squared, absolute), e| (squared + e * e, absolute + e.abs()));
        }
    }

    /// Adds the losses of a block, their number, and its sums.
    pub(crate) fn add_block(&mut self, loss_sum: f64, n_losses: f64, sums: &[f64]) {
        self.loss_sum += loss_sum;
        self.loss_weight += n_losses;
        let (before, rows) = (self.rows, n_losses / self.targets.len().max(1) as f64);
        if rows == 0.0 {
            return;
        }
        self.rows = before + rows;
        for (target, own) in self.targets.iter_mut().zip(sums.chunks_exact(SUMS)) {
            let distance = own[0] / rows - target.mean;
            target.squares += own[1] + distance * distance * before * rows / self.rows;
            target.mean += distance * rows / self.rows;
            target.squared_errors += own[2];
            target.absolute_errors += own[3];
        }
    }

    /// The mean loss, in units of the normalised targets; NaN if nothing was added.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.loss_weight
    }

    /// The mean absolute error in units of the data, over all targets; NaN if nothing was added.
    pub fn mae(&self) -> f64 {
        let each = self.targets.iter().zip(&self.units);
        self.mean(each.map(|(target, unit)| f64::from(*unit) * target.absolute_errors / self.rows))
    }

    /// The share of the targets' spread that is explained, the mean over all targets. A target that does not vary counts 1
    /// if it is met exactly and 0 otherwise, as in scikit-learn; NaN if nothing was added.
    pub fn r2(&self) -> f64 {
        if self.rows == 0.0 {
            return f64::NAN;
        }
        self.mean(self.targets.iter().map(|target| match target {
            Spread { squares, squared_errors, .. } if *squares > 0.0 => 1.0 - squared_errors / squares,
            Spread { squared_errors, .. } => f64::from(u8::from(*squared_errors == 0.0)),
        }))
    }

    fn mean(&self, each: impl Iterator<Item = f64>) -> f64 {
        each.sum::<f64>() / self.targets.len() as f64
    }

    /// The metrics under their names: with the prefix `val`, `val_loss`, `val_r2` and `val_mae`.
    pub fn named(&self, prefix: &str) -> Vec<(String, f64)> {
        let named = [("loss", self.loss()), ("r2", self.r2()), ("mae", self.mae())];
        named.into_iter().map(|(name, value)| (format!("{prefix}_{name}"), value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two targets, row by row.
    const Y: [f32; 10] = [1000.5, -2.0, 1003.0, 0.5, 999.25, 0.5, 1001.0, 3.0, 1010.0, -1.0];
    const PREDICTED: [f32; 10] = [1001.0, -1.5, 1002.0, 0.0, 1000.0, 1.0, 1001.5, 2.0, 1008.0, 0.0];

    /// The scores of blocks of so many rows.
    fn scores(y: &[f32], predicted: &[f32], units: &[f32], block: usize) -> NumberScores {
        let n = units.len();
        let mut scores = NumberScores::new(units.to_vec());
        for (y, predicted) in y.chunks(block * n).zip(predicted.chunks(block * n)) {
            let mut sums = vec![0.0; scores.sums()];
            scores.block(predicted, y, &mut sums);
            scores.add_block(2.0 * y.len() as f64, y.len() as f64, &sums);
        }
        scores
    }

    /// scikit-learn 1.9: `r2_score` and `mean_absolute_error`.
    #[test]
    fn scores_are_those_of_scikit_learn_however_blocks_are_cut() {
        for block in [1, 2, 3, 5] {
            let scores = scores(&Y, &PREDICTED, &[1.0, 1.0], block);
            assert!((scores.r2() - 0.862_322_181_243_414_1).abs() < 1e-12, "{}", scores.r2());
            assert!((scores.mae() - 0.825).abs() < 1e-12, "{}", scores.mae());
            assert_eq!(scores.loss(), 2.0);
        }
        // Errors are in the units of each target, and R² is in none.
        let scaled = scores(&Y, &PREDICTED, &[2.0, 4.0], 2);
        assert!((scaled.r2() - 0.862_322_181_243_414_1).abs() < 1e-12);
        assert!((scaled.mae() - (2.0 * 0.95 + 4.0 * 0.7) / 2.0).abs() < 1e-12, "{}", scaled.mae());
        let names: Vec<_> = scaled.named("val").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["val_loss", "val_r2", "val_mae"]);
    }

    #[test]
    fn targets_that_do_not_vary_are_met_or_not() {
        assert_eq!(scores(&[2.0; 3], &[2.0; 3], &[1.0], 2).r2(), 1.0);
        assert_eq!(scores(&[2.0; 3], &[3.0; 3], &[1.0], 2).r2(), 0.0);
        assert!(NumberScores::new(vec![1.0]).r2().is_nan());
        assert!(scores(&[1.0, 2.0], &[f32::NAN, 2.0], &[1.0], 1).r2().is_nan());
    }
}
