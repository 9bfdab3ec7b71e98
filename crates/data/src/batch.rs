//! Batches: which positions of an epoch make one, and the memory that holds it.

use polyreme_kernels::tally::Tally;

use crate::dataset::{Dataset, Values};
use crate::error::DataError;
use crate::order::Order;
use crate::spec::{Features, Spec, Target};

/// A range of positions of an epoch, which make one batch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Span {
    /// The order of samples, which includes the epoch.
    pub order: Order,
    /// The first position of the range.
    pub start: usize,
    /// The number of positions.
    pub len: usize,
    /// The length that texts are filled up to; `None`: that of the longest of the set.
    pub time: Option<usize>,
}

impl Span {
    /// These positions, filled up as far as the longest text of the set.
    pub fn new(order: Order, start: usize, len: usize) -> Span {
        Span { order, start, len, time: None }
    }
}

/// The length that the texts at these positions are filled up to: the least of the set's that holds all of them. `None` if the
/// set's samples are all of one length. It depends on the positions alone, so all ranks of a step come to the same.
pub fn time_of(set: &dyn Dataset, order: Order, start: usize, len: usize) -> Option<usize> {
    let Features::Texts { times, .. } = &set.spec().features else { return None };
    if times.len() < 2 {
        return None;
    }
    let tokens = order.walk(start).take(len).map(|idx| set.tokens(idx).unwrap_or(usize::MAX));
    Some(set.spec().features.time_for(tokens.max().unwrap_or(0)))
}

/// How many labels of the samples at these positions count. It depends on the positions alone, as [`time_of`] does.
pub fn counted_of(set: &dyn Dataset, order: Order, start: usize, len: usize) -> usize {
    match set.spec().target {
        Target::Tags { .. } => order.walk(start).take(len).map(|idx| set.n_counted(idx).unwrap_or(0)).sum(),
        Target::Class { .. } | Target::NextId | Target::Numbers { .. } | Target::Labels { .. } => {
            len * set.spec().n_labels()
        }
    }
}

/// An epoch cut into batches; the last may be short. A `batch` of 0 counts as 1.
pub fn spans(order: Order, batch: usize) -> impl Iterator<Item = Span> + Send + 'static {
    let (epoch_len, batch) = (order.epoch_len(), batch.max(1));
    (0..epoch_len.div_ceil(batch)).map(move |i| {
        let start = i * batch;
        Span::new(order, start, batch.min(epoch_len - start))
    })
}

/// Samples in memory, ready for a step.
#[derive(Debug)]
pub struct Batch {
    /// The features of `n` samples, one after the other, planes for images.
    pub x: BatchValues,
    /// The labels: `n` classes, `n` times as many ids as a sample has positions, or `n` times the numbers of the target.
    pub labels: BatchValues,
    /// How many samples.
    pub n: usize,
    /// The range of positions that they come from.
    pub span: Span,
    /// The samples that were read into it: their epoch and their index in the set.
    pub tally: Tally,
}

/// The features or the labels of a batch.
#[derive(Clone, PartialEq, Debug)]
pub enum BatchValues {
    /// Images, rows, and labels that are numbers.
    F32(Vec<f32>),
    /// Ids and classes.
    I32(Vec<i32>),
}

/// The place of one sample's features or labels in a batch.
#[derive(Debug)]
pub enum SlotValues<'a> {
    /// Images, rows, and labels that are numbers.
    F32(&'a mut [f32]),
    /// Ids and classes.
    I32(&'a mut [i32]),
}

impl SlotValues<'_> {
    /// How many values have room.
    pub fn len(&self) -> usize {
        match self {
            SlotValues::F32(x) => x.len(),
            SlotValues::I32(x) => x.len(),
        }
    }

    /// Whether there is no room.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Batch {
    /// An empty batch with memory for `n_max` samples; an error if there is not enough.
    pub fn reserve(spec: &Spec, n_max: usize) -> Result<Batch, DataError> {
        fn reserved<T>(n_max: usize, each: usize) -> Result<Vec<T>, DataError> {
            let mut memory = Vec::new();
            n_max.checked_mul(each).and_then(|n| memory.try_reserve_exact(n).ok()).ok_or_else(|| {
                let why = format!(
                    "no memory for a batch of {n_max} samples of {each} values; make batches smaller"
                );
                DataError::Setting { why }
            })?;
            Ok(memory)
        }
        let values = |is_f32: bool, each: usize| match is_f32 {
            true => reserved(n_max, each).map(BatchValues::F32),
            false => reserved(n_max, each).map(BatchValues::I32),
        };
        let x = values(!spec.features.is_ids(), spec.features.numel())?;
        let labels = values(spec.target.is_values(), spec.n_labels())?;
        let span = Span::new(Order::in_order(0), 0, 0);
        Ok(Batch { x, labels, n: 0, span, tally: Tally::default() })
    }

    /// Makes this a batch of `n` samples, whose values are still to be written. Allocates nothing within the reserved size.
    pub(crate) fn resize(&mut self, spec: &Spec, n: usize, time: Option<usize>) {
        self.n = n;
        self.tally = Tally::default();
        let time = time.unwrap_or(spec.features.numel());
        self.labels
            .resize(n * if matches!(spec.target, Target::Tags { .. }) { time } else { spec.n_labels() });
        self.x.resize(n * time);
    }

    /// The slices of sample `i` of `n`.
    pub(crate) fn slot(&mut self, i: usize) -> (SlotValues<'_>, SlotValues<'_>) {
        (self.x.part(i, self.n), self.labels.part(i, self.n))
    }
}

impl BatchValues {
    fn resize(&mut self, len: usize) {
        match self {
            BatchValues::F32(x) => x.resize(len, 0.0),
            BatchValues::I32(x) => x.resize(len, 0),
        }
    }

    /// Part `i` of `n` equal ones.
    fn part(&mut self, i: usize, n: usize) -> SlotValues<'_> {
        match self {
            BatchValues::F32(x) => SlotValues::F32(part(x, i, n)),
            BatchValues::I32(x) => SlotValues::I32(part(x, i, n)),
        }
    }

    /// Lent, as samples are.
    pub fn values(&self) -> Values<'_> {
        match self {
            BatchValues::F32(x) => Values::F32(x),
            BatchValues::I32(x) => Values::I32(x),
        }
    }

    /// The features, if they are f32.
    pub fn f32(&self) -> Option<&[f32]> {
        match self {
            BatchValues::F32(x) => Some(x),
            BatchValues::I32(_) => None,
        }
    }

    /// The features, if they are token ids.
    pub fn i32(&self) -> Option<&[i32]> {
        match self {
            BatchValues::F32(_) => None,
            BatchValues::I32(x) => Some(x),
        }
    }
}

/// Part `i` of `n` equal ones.
fn part<T>(all: &mut [T], i: usize, n: usize) -> &mut [T] {
    let each = all.len() / n;
    &mut all[i * each..(i + 1) * each]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_an_epoch_and_end_short() {
        for (len, batch, expected) in [
            (10, 4, vec![(0, 4), (4, 4), (8, 2)]),
            (8, 4, vec![(0, 4), (4, 4)]),
            (3, 100, vec![(0, 3)]),
            (2, 0, vec![(0, 1), (1, 1)]),
            (0, 4, vec![]),
        ] {
            let cut: Vec<_> = spans(Order::in_order(len), batch).map(|span| (span.start, span.len)).collect();
            assert_eq!(cut, expected, "{len} by {batch}");
        }
    }

    #[test]
    fn a_batch_that_fits_nowhere_is_an_error() {
        let target = Target::Class { classes: 2, names: vec![] };
        let spec = Spec { features: Features::Row { width: 1 << 40 }, target };
        for n_max in [1 << 16, usize::MAX] {
            let error = Batch::reserve(&spec, n_max).unwrap_err().to_string();
            assert!(error.contains("make batches smaller"), "{error}");
        }
    }

    #[test]
    fn a_batch_changes_size_inside_its_memory() {
        let spec = Spec { features: Features::Ids { time: 3, vocab: 9 }, target: Target::NextId };
        let mut batch = Batch::reserve(&spec, 5).unwrap();
        let place = batch.labels.i32().unwrap().as_ptr();
        for n in [5, 2, 5, 0, 4] {
            batch.resize(&spec, n, None);
            assert_eq!(batch.x.i32().map(<[i32]>::len), Some(3 * n));
            let labels = batch.labels.i32().unwrap();
            assert_eq!((labels.len(), labels.as_ptr()), (3 * n, place));
        }
        let SlotValues::I32(labels) = batch.slot(1).1 else { panic!("ids are integers") };
        labels.fill(7);
        assert_eq!(batch.labels, BatchValues::I32(vec![0, 0, 0, 7, 7, 7, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn numbers_to_be_predicted_are_f32() {
        let target = Target::Numbers { n: 2, names: vec![] };
        let spec = Spec { features: Features::Row { width: 3 }, target };
        let mut batch = Batch::reserve(&spec, 2).unwrap();
        batch.resize(&spec, 2, None);
        let SlotValues::F32(labels) = batch.slot(1).1 else { panic!("numbers are f32") };
        labels.copy_from_slice(&[7.0, 8.0]);
        assert_eq!(batch.labels, BatchValues::F32(vec![0.0, 0.0, 7.0, 8.0]));
    }
}
