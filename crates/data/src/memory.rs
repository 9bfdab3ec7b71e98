//! A set in vectors: for programs that bring their own data, and for tests.

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::spec::{Features, Spec, Target};

/// A set of samples in vectors.
#[derive(Clone, Debug)]
pub struct InMemory {
    spec: Spec,
    values: Store,
    labels: Vec<usize>,
    /// Labels that are numbers; empty for others.
    targets: Vec<f32>,
    len: usize,
    /// How many values a sample has.
    each: usize,
}

/// The features of all samples, one after the other.
#[derive(Clone, PartialEq, Debug)]
pub enum Store {
    /// Pixels, or byte tokens.
    U8(Vec<u8>),
    /// Numbers of images or rows.
    F32(Vec<f32>),
    /// Token ids of sequences.
    I32(Vec<i32>),
}

impl InMemory {
    /// A set of `values`, with as many per sample as [`Features::numel`] says and one more for [`Target::NextId`], and
    /// `labels`, one per sample for classes and none for [`Target::NextId`].
    pub fn new(spec: Spec, values: impl Into<Store>, labels: Vec<usize>) -> Result<InMemory, DataError> {
        InMemory::build(spec, values.into(), labels, Vec::new())
    }

    /// The same with labels that are numbers, as many a sample as [`Spec::n_labels`] says: for [`Target::Numbers`], and
    /// zeros and ones for [`Target::Labels`].
    pub fn with_values(
        spec: Spec,
        values: impl Into<Store>,
        targets: Vec<f32>,
    ) -> Result<InMemory, DataError> {
        InMemory::build(spec, values.into(), Vec::new(), targets)
    }

    fn build(
        spec: Spec,
        values: Store,
        labels: Vec<usize>,
        targets: Vec<f32>,
    ) -> Result<InMemory, DataError> {
        let each = match spec.target {
            Target::Class { .. } | Target::Tags { .. } | Target::Numbers { .. } | Target::Labels { .. } => {
                spec.features.numel()
            }
            Target::NextId => spec.features.numel().saturating_add(1),
        };
        if each == 0 {
            return wrong("a sample has no values; give it a shape without zeros".into());
        }
        if !values.len().is_multiple_of(each) {
            return wrong(format!("{} values are not a whole number of samples of {each}", values.len()));
        }
        let len = values.len() / each;
        match &spec.target {
            Target::Class { classes, names } => {
                if !names.is_empty() && names.len() != *classes {
                    return wrong(format!("{classes} classes have {} names; name all or none", names.len()));
                }
                if labels.len() != len {
                    return wrong(format!("{len} samples have {} labels; give one to each", labels.len()));
                }
                if let Some(at) = labels.iter().position(|label| label >= classes) {
                    return wrong(format!(
                        "sample {at}: label {} is not below {classes} classes",
                        labels[at]
                    ));
                }
            }
            Target::Tags { .. } => {
                return wrong("tags of words are read from tables; give a class to each sample".into());
            }
            Target::NextId if !spec.features.is_ids() => {
                return wrong("only ids have a next id; use classes for images and rows".into());
            }
            Target::NextId if !labels.is_empty() => {
                return wrong("labels are given, but the labels of ids are the next ids; give none".into());
            }
            Target::NextId => {}
            Target::Numbers { n, names } | Target::Labels { n, names } => {
                if !names.is_empty() && names.len() != *n {
                    return wrong(format!(
                        "{n} labels per sample have {} names; name all or none",
                        names.len()
                    ));
                }
                if Some(targets.len()) != len.checked_mul(*n) || *n == 0 {
                    let have = targets.len();
                    return wrong(format!(
                        "{len} samples have {have} labels; give {n} to each, with `with_values`"
                    ));
                }
                let are_labels = matches!(spec.target, Target::Labels { .. });
                let fits = |t: &f32| if are_labels { *t == 0.0 || *t == 1.0 } else { t.is_finite() };
                if let Some(at) = targets.iter().position(|t| !fits(t)) {
                    let what = if are_labels { "0 or 1" } else { "a finite number" };
                    return wrong(format!("sample {}: label {} is not {what}", at / n, targets[at]));
                }
            }
        }
        if let Features::Ids { vocab, .. } = spec.features {
            let strange = match &values {
                Store::I32(ids) => {
                    ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= vocab))
                }
                Store::U8(ids) => ids.iter().position(|&id| usize::from(id) >= vocab),
                Store::F32(_) => return wrong("ids are given as f32; give them as i32".into()),
            };
            if let Some(at) = strange {
                return wrong(format!("sample {}: an id is not in 0..{vocab}", at / each));
            }
        } else if let Store::I32(_) = values {
            return wrong("numbers are given as i32; give them as f32 or u8".into());
        }
        Ok(InMemory { spec, values, labels, targets, len, each })
    }
}

impl Dataset for InMemory {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.len
    }

    fn fetch<'a>(&'a self, idx: usize, _: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let range = idx * self.each..(idx + 1) * self.each;
        let values = match &self.values {
            Store::U8(values) => Values::U8(&values[range]),
            Store::F32(values) => Values::F32(&values[range]),
            Store::I32(values) => Values::I32(&values[range]),
        };
        let n = self.spec.n_labels();
        let label = match self.spec.target {
            Target::Class { .. } => Label::Class(self.labels[idx]),
            Target::Tags { .. } => unreachable!("refused when the set is made"),
            Target::NextId => Label::NextId,
            Target::Numbers { .. } | Target::Labels { .. } => Label::Values(&self.targets[idx * n..][..n]),
        };
        Ok(Fetched { values, label })
    }

    fn intact(&self) -> Result<(), DataError> {
        Ok(())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(self.labels.get(idx).copied())
    }
}

impl Store {
    fn len(&self) -> usize {
        match self {
            Store::U8(values) => values.len(),
            Store::F32(values) => values.len(),
            Store::I32(values) => values.len(),
        }
    }
}

impl From<Vec<u8>> for Store {
    fn from(values: Vec<u8>) -> Store {
        Store::U8(values)
    }
}

impl From<Vec<f32>> for Store {
    fn from(values: Vec<f32>) -> Store {
        Store::F32(values)
    }
}

impl From<Vec<i32>> for Store {
    fn from(values: Vec<i32>) -> Store {
        Store::I32(values)
    }
}

fn wrong<T>(why: String) -> Result<T, DataError> {
    Err(DataError::Setting { why })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(features: Features, classes: usize) -> Spec {
        Spec { features, target: Target::Class { classes, names: vec![] } }
    }

    fn row() -> Features {
        Features::Row { width: 2 }
    }

    fn ids() -> Features {
        Features::Ids { time: 2, vocab: 5 }
    }

    #[test]
    fn samples_come_back() {
        let set = InMemory::new(classes(row(), 3), vec![1.0, 2.0, 3.0, 4.0], vec![2, 0]).unwrap();
        assert_eq!((set.len(), set.class(0).unwrap()), (2, Some(2)));
        let mut scratch = Scratch::default();
        let sample = set.fetch(1, &mut scratch).unwrap();
        assert_eq!(sample, Fetched { values: Values::F32(&[3.0, 4.0]), label: Label::Class(0) });

        let text = Spec { features: ids(), target: Target::NextId };
        let set = InMemory::new(text, b"\x00\x01\x02\x02\x03\x04".to_vec(), vec![]).unwrap();
        assert_eq!((set.len(), set.class(1).unwrap()), (2, None));
        let sample = set.fetch(1, &mut scratch).unwrap();
        assert_eq!(sample, Fetched { values: Values::U8(&[2, 3, 4]), label: Label::NextId });
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let next = |features| Spec { features, target: Target::NextId };
        let named = Target::Class { classes: 2, names: vec!["cat".into()] };
        let named = Spec { features: row(), target: named };
        for (spec, values, labels, part) in [
            (classes(row(), 3), Store::F32(vec![0.0; 5]), vec![0, 1], "5 values are not a whole number"),
            (classes(row(), 3), Store::F32(vec![0.0; 4]), vec![0], "2 samples have 1 labels"),
            (classes(row(), 3), Store::F32(vec![0.0; 4]), vec![0, 3], "sample 1: label 3 is not below 3"),
            (classes(row(), 3), Store::I32(vec![0; 4]), vec![0, 1], "give them as f32"),
            (classes(Features::Row { width: 0 }, 3), Store::U8(vec![]), vec![], "no values"),
            (classes(ids(), 3), Store::F32(vec![0.0; 2]), vec![0], "give them as i32"),
            (classes(ids(), 3), Store::I32(vec![0, 1, 2, 5]), vec![0, 1], "sample 1: an id is not in 0..5"),
            (next(ids()), Store::I32(vec![0, 1, -1]), vec![], "sample 0: an id is not in 0..5"),
            (next(ids()), Store::U8(vec![0, 1, 9]), vec![], "sample 0: an id is not in 0..5"),
            (next(ids()), Store::U8(vec![0, 1, 1]), vec![1], "give none"),
            (next(row()), Store::U8(vec![0, 1, 1]), vec![], "only ids"),
            (named, Store::U8(vec![0, 1]), vec![1], "2 classes have 1 names"),
        ] {
            let error = InMemory::new(spec, values, labels).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
