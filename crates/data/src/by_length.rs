//! A set of texts, arranged by the length that each is filled up to, so that those of one length are neighbours.
//!
//! [`crate::Mode::Lengths`] makes batches of neighbours: nearly all texts of a batch are then filled up to one length. Inside a length
//! texts stay in the order of the set.

use std::sync::Arc;

use crate::dataset::{Dataset, Fetched, Scratch};
use crate::error::DataError;
use crate::order::LENGTHS_MAX;
use crate::remote::FarFile;
use crate::spec::{Features, Spec};

/// Texts, the shortest first.
pub struct ByLength {
    set: Arc<dyn Dataset>,
    /// The index in the set of each sample.
    places: Vec<u32>,
}

impl ByLength {
    /// The set arranged by length; as it is if its samples are all filled up to one length.
    pub fn arrange(set: Arc<dyn Dataset>) -> Arc<dyn Dataset> {
        let features = set.spec().features.clone();
        let several = matches!(&features, Features::Texts { times, .. } if times.len() > 1);
        let Some(n) = u32::try_from(set.len()).ok().filter(|_| several) else { return set };
        let mut places: Vec<u32> = (0..n).collect();
        places.sort_by_key(|&idx| features.time_for(set.tokens(idx as usize).unwrap_or(usize::MAX)));
        Arc::new(ByLength { set, places })
    }
}

/// Where the samples of each length end in a set that is arranged by length; those beyond the last are all at its end.
pub fn length_ends(set: &dyn Dataset) -> [usize; LENGTHS_MAX] {
    let mut ends = [set.len(); LENGTHS_MAX];
    let Features::Texts { times, .. } = &set.spec().features else { return ends };
    for (end, time) in ends.iter_mut().zip(times) {
        // The first sample that is longer.
        let (mut low, mut high) = (0, set.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match set.tokens(middle).unwrap_or(usize::MAX) <= *time {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        *end = low;
    }
    ends
}

impl Dataset for ByLength {
    fn spec(&self) -> &Spec {
        self.set.spec()
    }

    fn len(&self) -> usize {
        self.places.len()
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        self.set.fetch(self.places[idx] as usize, scratch)
    }

    fn ahead(
        &self,
        samples: &mut dyn Iterator<Item = usize>,
        scratch: &mut Scratch,
    ) -> Result<(), DataError> {
        self.set.ahead(&mut samples.map(|idx| self.places[idx] as usize), scratch)
    }

    fn far(&self, idx: usize) -> Option<FarFile<'_>> {
        self.set.far(self.places[idx] as usize)
    }

    fn intact(&self) -> Result<(), DataError> {
        self.set.intact()
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        self.set.class(self.places[idx] as usize)
    }

    fn tokens(&self, idx: usize) -> Option<usize> {
        self.set.tokens(self.places[idx] as usize)
    }

    fn n_counted(&self, idx: usize) -> Option<usize> {
        self.set.n_counted(self.places[idx] as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::time_of;
    use crate::order::{Mode, Order};
    use crate::table::{Table, TableOptions, TextColumns, choose_times};
    use crate::{Span, TextTokenizer};

    /// Texts of very different lengths.
    fn texts(n: usize) -> Arc<dyn Dataset> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("texts.csv");
        let row = |i: usize| {
            format!(
                "{},{}\n",
                "x".repeat(1 + i * i * 31 % (if i.is_multiple_of(9) { 90 } else { 20 })),
                i % 2
            )
        };
        std::fs::write(&path, "body,kind\n".to_string() + &(0..n).map(row).collect::<String>()).unwrap();
        let columns = vec!["body".to_string()];
        let tokenizer = Arc::new(TextTokenizer::bytes());
        let texts = Some(TextColumns {
            columns,
            tokenizer,
            length: 64,
            times: Vec::new(),
            tagged: false,
            typed: false,
        });
        let table = Table::open(&path, &TableOptions { texts, ..TableOptions::default() }).unwrap();
        let times = choose_times(table.lengths(), 3);
        assert_eq!(times.len(), 3, "{times:?}");
        ByLength::arrange(Arc::new(table.with_times(&times)))
    }

    #[test]
    fn every_epoch_has_each_sample_once_and_little_padding() {
        for (n, batch) in [(200, 8), (203, 8), (7, 8), (64, 64), (65, 64), (30, 1)] {
            let set = texts(n.max(30));
            let n = set.len();
            let ends = length_ends(set.as_ref());
            assert!(ends.is_sorted() && ends[LENGTHS_MAX - 1] == n, "{ends:?}");
            let mode = Mode::Lengths { batch, ends };
            let mut last = Vec::new();
            for epoch in 0..3 {
                let order = Order { len: n, seed: 5, epoch, mode, fraction: 1.0 };
                let all: Vec<usize> = order.walk(0).collect();
                assert_eq!(all, (0..n).map(|p| order.at(p)).collect::<Vec<_>>());
                let mut sorted = all.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..n).collect::<Vec<_>>(), "{n} by {batch}");
                assert!(all != last || n == 1, "epoch {epoch} is like the one before");
                // Batches of more than one length are those at the two borders, and perhaps the short one.
                let mixed = |start: &usize| {
                    let times = order
                        .walk(*start)
                        .take(batch)
                        .map(|i| set.spec().features.time_for(set.tokens(i).unwrap()));
                    let times: std::collections::BTreeSet<usize> = times.collect();
                    times.len() > 1
                };
                assert!((0..n).step_by(batch).filter(mixed).count() <= 3);
                last = all;
            }
        }
    }

    #[test]
    fn the_length_of_a_step_holds_all_of_its_texts() {
        let set = texts(100);
        for mode in [Mode::Sample, Mode::Lengths { batch: 10, ends: length_ends(set.as_ref()) }] {
            for fraction in [1.0, 0.37] {
                let order = Order { len: 100, seed: 1, epoch: 2, mode, fraction };
                for start in (0..order.epoch_len()).step_by(10) {
                    let len = 10.min(order.epoch_len() - start);
                    let time = time_of(set.as_ref(), order, start, len).unwrap();
                    let longest = order.walk(start).take(len).map(|i| set.tokens(i).unwrap()).max().unwrap();
                    assert_eq!(time, set.spec().features.time_for(longest));
                }
            }
        }
        let order = Order::in_order(100);
        assert_eq!(Span::new(order, 0, 3).time, None);
    }
}
