//! The sums of one evaluation. The loss comes from the engine, which computed it anyway; the rest comes from logits and
//! labels.
//!
//! The rules, where there is a choice:
//! - The predicted class is the first of the greatest logits, as with PyTorch's `argmax` on a CPU.
//! - A label is among the top five if at most four other logits are at least as large as its own. PyTorch's `topk`
//!   breaks ties in no stated order; this is what it would give at worst, so a constant output scores 0 and not 1.
//! - A row with NaN in it is wrong, and stands in no cell of the confusion matrix. So is a label that is no class.
//! - Rows with negative labels are left out of everything.

use super::confusion::Confusion;
use super::row;

/// How many logits make the top five.
const TOP: usize = 5;

/// Adds up an evaluation, batch by batch.
#[derive(Clone, PartialEq, Debug)]
pub struct Scores {
    classes: usize,
    next_token: bool,
    rows: u64,
    right: u64,
    among_top: u64,
    loss_sum: f64,
    loss_weight: f64,
    confusion: Option<Confusion>,
}

impl Scores {
    /// Nothing added yet. The confusion matrix is kept if `keep_confusion`, and only up to
    /// [`CLASSES_MAX`](super::CLASSES_MAX) classes.
    pub fn new(classes: usize, keep_confusion: bool) -> Scores {
        let confusion = if keep_confusion { Confusion::new(classes) } else { None };
        Scores {
            classes,
            next_token: false,
            rows: 0,
            right: 0,
            among_top: 0,
            loss_sum: 0.0,
            loss_weight: 0.0,
            confusion,
        }
    }

    /// The same for a task of next tokens, where [`named`](Scores::named) has the perplexity too.
    pub fn next_token(self) -> Scores {
        Scores { next_token: true, ..self }
    }

    /// Adds a batch: logits `[labels, classes]`, labels, and the batch's mean loss with its weight (the number of
    /// labels behind it, or the sum of their class weights). A loss of weight 0 is left out, whatever it is.
    ///
    /// # Panics
    /// If there are not `classes` logits for each label: the caller's mistake, not the data's.
    pub fn add(&mut self, logits: &[f32], labels: &[i32], loss_mean: f64, loss_weight: f64) {
        assert_eq!(logits.len(), labels.len() * self.classes, "a row of {} logits a label", self.classes);
        if loss_weight != 0.0 {
            self.loss_sum += loss_mean * loss_weight;
            self.loss_weight += loss_weight;
        }
        for (i, &label) in labels.iter().enumerate() {
            // Negative labels do not convert.
            if let Ok(label) = usize::try_from(label) {
                self.add_row(&logits[i * self.classes..][..self.classes], label);
            }
        }
    }

    fn add_row(&mut self, logits: &[f32], label: usize) {
        self.rows += 1;
        let (Some(&own), Some(predicted)) = (logits.get(label), row::first_greatest(logits)) else { return };
        self.right += u64::from(predicted == label);
        if self.classes > TOP {
            self.among_top += u64::from(row::at_least(logits, own) <= TOP);
        }
        if let Some(confusion) = &mut self.confusion {
            confusion.count(label, predicted);
        }
    }

    /// Adds losses whose sum and number are known.
    pub(crate) fn add_losses(&mut self, sum: f64, n: f64) {
        self.loss_sum += sum;
        self.loss_weight += n;
    }

    /// Everything that was counted, to be added up over ranks.
    pub(crate) fn counts(&self) -> Vec<i64> {
        let cells = self.confusion.iter().flat_map(|c| c.cells());
        [self.rows, self.right, self.among_top].iter().chain(cells).map(|&n| n as i64).collect()
    }

    /// Takes counts over, laid out as [`Scores::counts`] gives them.
    pub(crate) fn set_counts(&mut self, counts: &[i64]) {
        let cells = self.confusion.iter_mut().flat_map(|c| c.cells_mut());
        let own = [&mut self.rows, &mut self.right, &mut self.among_top];
        own.into_iter().chain(cells).zip(counts).for_each(|(to, &n)| *to = n as u64);
    }

    /// How many labels were counted: all that are not negative.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The mean loss; NaN if nothing was added.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.loss_weight
    }

    /// The share of labels that were predicted; NaN if nothing was added.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.rows as f64
    }

    /// The share of labels among the five greatest logits; `None` where five are all of them, or nothing was added.
    pub fn top5(&self) -> Option<f64> {
        (self.classes > TOP && self.rows > 0).then(|| self.among_top as f64 / self.rows as f64)
    }

    /// The exponential of the mean loss: among how many equal choices the model is as unsure.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Which classes were taken for which, if that was kept.
    pub fn confusion(&self) -> Option<&Confusion> {
        self.confusion.as_ref()
    }

    /// The metrics under their names: with the prefix `val`, `val_loss`, `val_accuracy`, `val_top5` where there is one,
    /// and `val_perplexity` for next tokens.
    pub fn named(&self, prefix: &str) -> Vec<(String, f64)> {
        let mut named = vec![("loss", self.loss()), ("accuracy", self.accuracy())];
        named.extend(self.top5().map(|top5| ("top5", top5)));
        if self.next_token {
            named.push(("perplexity", self.perplexity()));
        }
        named.into_iter().map(|(name, value)| (format!("{prefix}_{name}"), value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAN: f32 = f32::NAN;

    /// Six classes, one batch: how many are right, among the top five, counted, and in the matrix.
    fn check(rows: &[([f32; 6], i32)], right: u64, top: u64, counted: u64, cells: u64) {
        let logits: Vec<f32> = rows.iter().flat_map(|(row, _)| *row).collect();
        let labels: Vec<i32> = rows.iter().map(|&(_, label)| label).collect();
        let mut whole = Scores::new(6, true);
        whole.add(&logits, &labels, 1.0, 1.0);
        let mut parts = Scores::new(6, true);
        for (row, label) in rows {
            parts.add(row, &[*label], 1.0, 1.0);
        }
        for scores in [whole, parts] {
            let got = (scores.right, scores.among_top, scores.rows);
            assert_eq!(got, (right, top, counted), "{rows:?}");
            assert_eq!(scores.confusion().unwrap().total(), cells, "{rows:?}");
        }
    }

    #[test]
    fn rows_are_counted_by_the_rules() {
        let up = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0];
        check(&[(up, 5)], 1, 1, 1, 1);
        check(&[(up, 1), (up, 0)], 0, 1, 2, 2);
        // Ignored labels, and one that is no class.
        check(&[(up, -1), (up, -100), (up, 5)], 1, 1, 1, 1);
        check(&[(up, 6)], 0, 0, 1, 0);
        // Ties: the first is predicted, and all equals stand before the label in the top five.
        check(&[([7.0; 6], 0), ([7.0; 6], 1)], 1, 0, 2, 2);
        check(&[([9.0, 7.0, 7.0, 7.0, 7.0, 0.0], 4)], 0, 1, 1, 1);
        // NaN anywhere is wrong.
        check(&[([NAN, 1.0, 2.0, 3.0, 4.0, 5.0], 5), ([NAN; 6], 0)], 0, 0, 2, 0);
        check(&[([f32::NEG_INFINITY, 1.0, 0.0, 0.0, 0.0, f32::INFINITY], 5)], 1, 1, 1, 1);
        check(&[], 0, 0, 0, 0);
    }

    #[test]
    fn counts_come_back() {
        let mut scores = Scores::new(6, true);
        scores.add(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0], &[5, 1], 0.0, 0.0);
        let mut again = Scores::new(6, true);
        again.set_counts(&scores.counts());
        assert_eq!(again, scores);
        let twice: Vec<i64> = scores.counts().iter().map(|n| 2 * n).collect();
        again.set_counts(&twice);
        assert_eq!((again.rows(), again.confusion().unwrap().total()), (4, 4));
    }

    #[test]
    fn a_short_last_batch_weighs_what_it_holds() {
        let mut scores = Scores::new(2, false);
        scores.add(&[1.0, 0.0, 1.0, 0.0, 1.0, 0.0], &[0, 0, 1], 2.0, 3.0);
        scores.add(&[1.0, 0.0], &[0], 6.0, 1.0);
        scores.add(&[1.0, 0.0], &[-1], f64::NAN, 0.0);
        assert_eq!((scores.loss(), scores.accuracy(), scores.rows()), (3.0, 0.75, 4));
        assert_eq!((scores.top5(), scores.confusion()), (None, None));
        let names = |scores: &Scores| scores.named("val").into_iter().map(|(n, _)| n).collect::<Vec<_>>();
        assert_eq!(names(&scores), ["val_loss", "val_accuracy"]);
        let tokens = Scores { classes: 6, ..scores.next_token() };
        assert_eq!(names(&tokens), ["val_loss", "val_accuracy", "val_top5", "val_perplexity"]);
        assert_eq!(tokens.named("test")[3], ("test_perplexity".into(), 3f64.exp()));
        assert!(Scores::new(3, true).loss().is_nan());
    }

    /// A bound that only a scan gone scalar or a build without optimisation would break: gpt's batch in a debug run.
    #[test]
    fn a_batch_of_tokens_is_scanned_fast() {
        let (rows, classes) = (2048, 256);
        let logits: Vec<f32> =
            (0..rows * classes).map(|i| (i as u32).wrapping_mul(2_654_435_761) as f32).collect();
        let labels: Vec<i32> = (0..rows).map(|i| (i * 31 % classes) as i32).collect();
        let best = (0..20)
            .map(|_| {
                let mut scores = Scores::new(classes, false);
                let start = std::time::Instant::now();
                scores.add(&logits, &labels, 1.0, 1.0);
                assert_eq!(scores.rows(), rows as u64);
                start.elapsed()
            })
            .min()
            .unwrap();
        let bytes_per_s = size_of_val(&logits[..]) as f64 / best.as_secs_f64();
        eprintln!("{:.1} GB/s", bytes_per_s / 1e9);
        assert!(bytes_per_s > 1e9, "{bytes_per_s} bytes a second");
    }
}
