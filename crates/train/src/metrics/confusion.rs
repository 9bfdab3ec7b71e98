//! Which classes are taken for which. How it is printed stands in `table`.

use serde::{Deserialize, Serialize};

/// The most classes of a confusion matrix: 8 MB of counts.
pub const CLASSES_MAX: usize = 1000;

/// A confusion matrix: rows are what was true, columns what was predicted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Cells", into = "Cells")]
pub struct Confusion {
    classes: usize,
    cells: Vec<u64>,
}

/// A mistake and how often it was made.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Pair {
    /// What it was.
    pub truth: usize,
    /// What it was taken for.
    pub predicted: usize,
    /// How often.
    pub count: u64,
    /// In which share of all samples of that class.
    pub share: f64,
}

/// The form in files: a matrix whose sides have not been checked.
#[derive(Serialize, Deserialize)]
struct Cells {
    rows: Vec<Vec<u64>>,
}

impl Confusion {
    /// No counts; `None` for more than [`CLASSES_MAX`] classes.
    pub fn new(classes: usize) -> Option<Confusion> {
        (classes <= CLASSES_MAX).then(|| Confusion { classes, cells: vec![0; classes * classes] })
    }

    /// From rows of counts, a row a true class; `None` if they are not a square of at most [`CLASSES_MAX`].
    pub fn from_rows(rows: &[Vec<u64>]) -> Option<Confusion> {
        let classes = rows.len();
        let square = classes <= CLASSES_MAX && rows.iter().all(|row| row.len() == classes);
        square.then(|| Confusion { classes, cells: rows.concat() })
    }

    /// Counts one sample.
    ///
    /// # Panics
    /// If either is no class.
    pub fn count(&mut self, truth: usize, predicted: usize) {
        assert!(truth < self.classes && predicted < self.classes, "both are one of {} classes", self.classes);
        self.cells[truth * self.classes + predicted] += 1;
    }

    /// All counts, row by row.
    pub(crate) fn cells(&self) -> &[u64] {
        &self.cells
    }

    /// The same, to set.
    pub(crate) fn cells_mut(&mut self) -> &mut [u64] {
        &mut self.cells
    }

    /// How many classes there are.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// How often `truth` was taken for `predicted`.
    pub fn get(&self, truth: usize, predicted: usize) -> u64 {
        self.cells[truth * self.classes + predicted]
    }

    /// How the samples of one true class were predicted.
    pub fn row(&self, truth: usize) -> &[u64] {
        &self.cells[truth * self.classes..][..self.classes]
    }

    /// How many samples of a true class there were.
    pub fn support(&self, truth: usize) -> u64 {
        self.row(truth).iter().fold(0, |sum, &n| sum.saturating_add(n))
    }

    /// How often a class was predicted.
    pub fn predictions(&self, predicted: usize) -> u64 {
        (0..self.classes).fold(0, |sum, truth| sum.saturating_add(self.get(truth, predicted)))
    }

    /// How many samples were counted.
    pub fn total(&self) -> u64 {
        self.cells.iter().fold(0, |sum, &n| sum.saturating_add(n))
    }

    /// The share of a class's predictions that were right; `None` if it was never predicted.
    pub fn precision(&self, class: usize) -> Option<f64> {
        share(self.get(class, class), self.predictions(class))
    }

    /// The share of a class's samples that were found; `None` if there were none.
    pub fn recall(&self, class: usize) -> Option<f64> {
        share(self.get(class, class), self.support(class))
    }

    /// The share of all samples that were right; `None` if there were none.
    pub fn accuracy(&self) -> Option<f64> {
        let right = (0..self.classes).fold(0u64, |sum, i| sum.saturating_add(self.get(i, i)));
        share(right, self.total())
    }

    /// The most frequent mistakes, the worst first; among equals, the lower classes first.
    pub fn worst_pairs(&self, n_max: usize) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for truth in 0..self.classes {
            let support = self.support(truth);
            for (predicted, &count) in self.row(truth).iter().enumerate() {
                if count > 0 && predicted != truth {
                    pairs.push(Pair { truth, predicted, count, share: count as f64 / support as f64 });
                }
            }
        }
        // Stable: pairs stand in order of classes before.
        pairs.sort_by_key(|pair| std::cmp::Reverse(pair.count));
        pairs.truncate(n_max);
        pairs
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl From<Confusion> for Cells {
    fn from(confusion: Confusion) -> Cells {
        Cells { rows: (0..confusion.classes).map(|truth| confusion.row(truth).to_vec()).collect() }
    }
}

impl TryFrom<Cells> for Confusion {
    type Error = String;

    fn try_from(cells: Cells) -> Result<Confusion, String> {
        Confusion::from_rows(&cells.rows)
            .ok_or_else(|| format!("a confusion matrix is a square of at most {CLASSES_MAX} classes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        rows: &[&[u64]],
        precision: &[Option<f64>],
        recall: &[Option<f64>],
        worst: &[(usize, usize, u64)],
    ) {
        let rows: Vec<Vec<u64>> = rows.iter().map(|row| row.to_vec()).collect();
        let confusion = Confusion::from_rows(&rows).unwrap();
        let mut counted = Confusion::new(rows.len()).unwrap();
        for truth in 0..rows.len() {
            for predicted in 0..rows.len() {
                (0..rows[truth][predicted]).for_each(|_| counted.count(truth, predicted));
            }
        }
        assert_eq!(counted, confusion);
        let classes = 0..confusion.classes();
        assert_eq!(classes.clone().map(|i| confusion.precision(i)).collect::<Vec<_>>(), precision);
        assert_eq!(classes.map(|i| confusion.recall(i)).collect::<Vec<_>>(), recall);
        let pairs = confusion.worst_pairs(2);
        assert_eq!(pairs.iter().map(|p| (p.truth, p.predicted, p.count)).collect::<Vec<_>>(), worst);
        let text = serde_json::to_string(&confusion).unwrap();
        assert_eq!(serde_json::from_str::<Confusion>(&text).unwrap(), confusion);
    }

    #[test]
    fn counts_become_shares() {
        check(&[], &[], &[], &[]);
        check(&[&[0]], &[None], &[None], &[]);
        check(
            &[&[3, 1, 0], &[2, 2, 0], &[1, 0, 0]],
            &[Some(0.5), Some(2.0 / 3.0), None],
            &[Some(0.75), Some(0.5), Some(0.0)],
            &[(1, 0, 2), (0, 1, 1)],
        );
    }

    #[test]
    fn only_squares_are_read() {
        for text in [r#"{"rows":[[1,2]]}"#, r#"{"rows":[[1],[2]]}"#, r#"{"rows":[[-1]]}"#] {
            assert!(serde_json::from_str::<Confusion>(text).is_err(), "{text}");
        }
        assert_eq!(Confusion::new(CLASSES_MAX + 1), None);
        let huge = Confusion::from_rows(&[vec![u64::MAX, u64::MAX], vec![1, 1]]).unwrap();
        assert_eq!((huge.total(), huge.support(0), huge.predictions(1)), (u64::MAX, u64::MAX, u64::MAX));
    }
}
