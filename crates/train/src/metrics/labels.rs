//! How well labels are told that each hold or not: F1 over all labels of all samples (micro), and the share of samples with
//! every label right, as scikit-learn's `f1_score` and `accuracy_score` of indicators.
//!
//! A label is predicted if its probability is above 0.5, that is if its logit is above 0; so one that is NaN is not. A sample
//! with NaN in it is not right.

/// Adds up an evaluation.
#[derive(Clone, PartialEq, Debug)]
pub struct LabelScores {
    labels: usize,
    rows: u64,
    /// Samples with every label right.
    right: u64,
    /// Labels that hold and are predicted, are predicted and do not hold, hold and are not predicted.
    found: u64,
    invented: u64,
    missed: u64,
    loss_sum: f64,
    loss_weight: f64,
}

impl LabelScores {
    /// Nothing added yet.
    pub fn new(labels: usize) -> LabelScores {
        LabelScores {
            labels,
            rows: 0,
            right: 0,
            found: 0,
            invented: 0,
            missed: 0,
            loss_sum: 0.0,
            loss_weight: 0.0,
        }
    }

    /// Adds a batch: logits and zeros and ones, sample by sample.
    pub(crate) fn add(&mut self, logits: &[f32], labels: &[f32]) {
        let each = self.labels.max(1);
        for (logits, labels) in logits.chunks_exact(each).zip(labels.chunks_exact(each)) {
            let mut right = true;
            for (&logit, &label) in logits.iter().zip(labels) {
                let (predicted, holds) = (logit > 0.0, label > 0.5);
                self.found += u64::from(predicted && holds);
                self.invented += u64::from(predicted && !holds);
                self.missed += u64::from(!predicted && holds);
                right &= predicted == holds && !logit.is_nan();
            }
            self.rows += 1;
            self.right += u64::from(right);
        }
    }

    /// Adds losses whose sum and number are known.
    pub(crate) fn add_losses(&mut self, sum: f64, n: f64) {
        self.loss_sum += sum;
        self.loss_weight += n;
    }

    /// Everything that was counted, to be added up over ranks.
    pub(crate) fn counts(&self) -> Vec<i64> {
        [self.rows, self.right, self.found, self.invented, self.missed].map(|n| n as i64).to_vec()
    }

    /// Takes counts over, laid out as [`LabelScores::counts`] gives them.
    pub(crate) fn set_counts(&mut self, counts: &[i64]) {
        let own = [&mut self.rows, &mut self.right, &mut self.found, &mut self.invented, &mut self.missed];
        own.into_iter().zip(counts).for_each(|(to, &n)| *to = n as u64);
    }

    /// The mean loss; NaN if nothing was added.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.loss_weight
    }

    /// F1 over all labels of all samples; 0 where no label holds and none is predicted.
    pub fn f1(&self) -> f64 {
        let wrong = self.invented + self.missed;
        if self.found == 0 { 0.0 } else { 2.0 * self.found as f64 / (2 * self.found + wrong) as f64 }
    }

    /// The share of samples with every label right; NaN if nothing was added.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.rows as f64
    }

    /// The metrics under their names: with the prefix `val`, `val_loss`, `val_f1` and `val_accuracy`.
    pub fn named(&self, prefix: &str) -> Vec<(String, f64)> {
        let named = [("loss", self.loss()), ("f1", self.f1()), ("accuracy", self.accuracy())];
        named.into_iter().map(|(name, value)| (format!("{prefix}_{name}"), value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 12] = [2.0, -1.0, 0.5, -3.0, 4.0, -0.1, 0.0, 0.2, -0.2, 1.0, 1.0, 1.0];
    const LABELS: [f32; 12] = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0];

    /// scikit-learn 1.9: `f1_score(average="micro")` and `accuracy_score`.
    #[test]
    fn scores_are_those_of_scikit_learn() {
        let mut whole = LabelScores::new(3);
        whole.add(&LOGITS, &LABELS);
        assert!((whole.f1() - 0.857_142_857_142_857_1).abs() < 1e-15, "{}", whole.f1());
        assert_eq!(whole.accuracy(), 0.5);
        let mut parts = LabelScores::new(3);
        parts.add(&LOGITS[..3], &LABELS[..3]);
        parts.add(&LOGITS[3..], &LABELS[3..]);
        assert_eq!(whole, parts);
        let mut again = LabelScores::new(3);
        again.set_counts(&whole.counts());
        assert_eq!(whole, again);
    }

    #[test]
    fn nothing_found_is_0_and_nan_is_wrong() {
        let mut none = LabelScores::new(2);
        none.add(&[-1.0, -1.0], &[0.0, 0.0]);
        assert_eq!((none.f1(), none.accuracy()), (0.0, 1.0));
        none.add(&[f32::NAN, -1.0], &[0.0, 0.0]);
        assert_eq!((none.f1(), none.accuracy()), (0.0, 0.5));
    }
}
