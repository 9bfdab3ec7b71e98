//! Parts of a set, and the split into training and validation.
//!
//! A random split cuts the set into as many stripes of neighbours as the smaller part has samples, and takes one sample
//! of each stripe at random. So it needs no list; a set that is sorted by class is split in proportion
//! without looking at labels; and the parts keep the order of the set, so that reading in blocks still reads neighbours.
//!
//! Text is split at one point instead: neighbouring samples of a text share words, and a validation part among them would
//! measure memorisation.

use std::sync::Arc;

use crate::dataset::{Dataset, Fetched, Scratch};
use crate::draw::{Purpose, below64, word64};
use crate::error::DataError;
use crate::remote::FarFile;
use crate::spec::{Spec, Target};

/// A part of a set, itself a set.
#[derive(Clone)]
pub struct Subset {
    set: Arc<dyn Dataset>,
    part: SplitPart,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
enum SplitPart {
    /// A contiguous range from this sample on.
    Range { first: usize },
    /// One sample of each of `stripes`.
    Picked { stripes: usize, seed: u64 },
    /// All samples that the stripes leave.
    Rest { stripes: usize, seed: u64 },
}

/// The training part, and the validation part, if there is one.
pub type Parts = (Arc<dyn Dataset>, Option<Arc<dyn Dataset>>);

/// Splits a set into training and validation: at a point for [`Target::NextId`], the end being for validation, and at
/// random, by `seed`, for others. `validation` is the fraction of the validation part, in 0..1; with 0 there is none. A
/// fraction that leaves either part empty is an error.
pub fn split(set: Arc<dyn Dataset>, validation: f64, seed: u64) -> Result<Parts, DataError> {
    if validation == 0.0 {
        return Ok((set, None));
    }
    if !(validation > 0.0 && validation < 1.0) {
        let why = format!("validation is {validation}; give a share of the training set, from 0 to below 1");
        return Err(DataError::Setting { why });
    }
    let n = set.len();
    let n_validation = (validation * n as f64).round() as usize;
    if n_validation == 0 || n_validation >= n {
        let (part, change) =
            if n_validation == 0 { ("validation", "larger") } else { ("training", "smaller") };
        let why = format!(
            "a validation share of {validation} of {n} samples leaves nothing for {part}; give a {change} share"
        );
        return Err(DataError::Setting { why });
    }
    let (train, validation) = match set.spec().target {
        Target::NextId => {
            let first = n - n_validation;
            (Subset::range(Arc::clone(&set), 0, first)?, Subset::range(set, first, n_validation)?)
        }
        Target::Class { .. } | Target::Tags { .. } | Target::Numbers { .. } | Target::Labels { .. }
            if n_validation <= n / 2 =>
        {
            let (picked, rest) = Subset::stripes(set, n_validation, seed);
            (rest, picked)
        }
        Target::Class { .. } | Target::Tags { .. } | Target::Numbers { .. } | Target::Labels { .. } => {
            Subset::stripes(set, n - n_validation, seed)
        }
    };
    Ok((Arc::new(train), Some(Arc::new(validation))))
}

impl Subset {
    /// The samples `first..first + len`.
    pub fn range(set: Arc<dyn Dataset>, first: usize, len: usize) -> Result<Subset, DataError> {
        if first.checked_add(len).is_none_or(|end| end > set.len()) {
            let why = format!("{len} samples from {first} are more than the {} of the set", set.len());
            return Err(DataError::Setting { why });
        }
        Ok(Subset { set, part: SplitPart::Range { first }, len })
    }

    /// A random sample of each of `stripes` stripes, which have at least two each; and all others.
    fn stripes(set: Arc<dyn Dataset>, stripes: usize, seed: u64) -> (Subset, Subset) {
        let len = set.len() - stripes;
        let picked =
            Subset { set: Arc::clone(&set), part: SplitPart::Picked { stripes, seed }, len: stripes };
        (picked, Subset { set, part: SplitPart::Rest { stripes, seed }, len })
    }

    /// The index in the whole set of the part's sample `idx`.
    pub fn place(&self, idx: usize) -> usize {
        assert!(idx < self.len, "sample {idx} of a part of {}", self.len);
        match self.part {
            SplitPart::Range { first } => first + idx,
            SplitPart::Picked { stripes, seed } => pick(self.set.len(), stripes, seed, idx),
            SplitPart::Rest { stripes, seed } => {
                // Stripe s starts at ⌊s·n/stripes⌋, and s samples before it were picked: ⌊s·rest/stripes⌋ were not.
                // The stripe of the rest's sample i is the last for which that is at most i.
                let (rest, i) = (self.len as u128, idx as u128);
                let stripe = ((i + 1) * stripes as u128).div_ceil(rest) - 1;
                let before = (stripe * rest / stripes as u128) as usize;
                let stripe = stripe as usize;
                let place = before + stripe + (idx - before);
                place + usize::from(place >= pick(self.set.len(), stripes, seed, stripe))
            }
        }
    }
}

/// The sample that is picked from a stripe.
fn pick(n: usize, stripes: usize, seed: u64, stripe: usize) -> usize {
    let start = |stripe: usize| (stripe as u128 * n as u128 / stripes as u128) as usize;
    let (first, end) = (start(stripe), start(stripe + 1));
    first + below64(word64(seed, Purpose::Split, stripe as u64, 0), end - first)
}

impl Dataset for Subset {
    fn spec(&self) -> &Spec {
        self.set.spec()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        self.set.fetch(self.place(idx), scratch)
    }

    fn ahead(
        &self,
        samples: &mut dyn Iterator<Item = usize>,
        scratch: &mut Scratch,
    ) -> Result<(), DataError> {
        self.set.ahead(&mut samples.map(|idx| self.place(idx)), scratch)
    }

    fn far(&self, idx: usize) -> Option<FarFile<'_>> {
        self.set.far(self.place(idx))
    }

    fn intact(&self) -> Result<(), DataError> {
        self.set.intact()
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        self.set.class(self.place(idx))
    }

    fn tokens(&self, idx: usize) -> Option<usize> {
        self.set.tokens(self.place(idx))
    }

    fn n_counted(&self, idx: usize) -> Option<usize> {
        self.set.n_counted(self.place(idx))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dataset::Values;
    use crate::memory::InMemory;
    use crate::spec::Features;

    /// A set whose samples are their own numbers.
    fn numbered(n: usize) -> Arc<dyn Dataset> {
        let spec = Spec {
            features: Features::Row { width: 1 },
            target: Target::Class { classes: 1, names: vec![] },
        };
        Arc::new(InMemory::new(spec, (0..n).map(|i| i as f32).collect::<Vec<_>>(), vec![0; n]).unwrap())
    }

    fn places(set: &dyn Dataset) -> Vec<usize> {
        let mut scratch = Scratch::default();
        let read = |idx| match set.fetch(idx, &mut scratch).unwrap().values {
            Values::F32(x) => x[0] as usize,
            Values::I32(x) => x[0] as usize,
            Values::U8(_) => unreachable!(),
        };
        (0..set.len()).map(read).collect()
    }

    proptest! {
        #[test]
        fn parts_are_disjoint_and_whole_and_in_order(n in 2_usize..500, share in 0.0..1.0_f64, seed: u64) {
            let expected = (share * n as f64).round() as usize;
            prop_assume!(share > 0.0 && expected > 0 && expected < n);
            let (train, validation) = split(numbered(n), share, seed).unwrap();
            let (train, validation) = (places(&*train), places(&*validation.unwrap()));
            prop_assert_eq!(validation.len(), expected);
            prop_assert!(train.is_sorted() && validation.is_sorted());
            let mut all = [train, validation].concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_sample_is_kept_for_validation_equally_often() {
        for share in [0.1, 0.3, 0.8] {
            let mut counts = [0_usize; 37];
            for seed in 0..2000 {
                for place in places(&*split(numbered(37), share, seed).unwrap().1.unwrap()) {
                    counts[place] += 1;
                }
            }
            // Stripes differ in length by one, so chances differ a little.
            let expected = (share * 37.0_f64).round() / 37.0 * 2000.0;
            let near = |n: &usize| (*n as f64 / expected - 1.0).abs() < 0.3;
            assert!(counts.iter().all(near), "{share}: {expected} in {counts:?}");
        }
    }

    #[test]
    fn text_is_split_at_a_point() {
        let spec = Spec { features: Features::Ids { time: 1, vocab: 99 }, target: Target::NextId };
        let set = InMemory::new(spec, (0..20).flat_map(|i| [i, i]).collect::<Vec<i32>>(), vec![]).unwrap();
        let (train, validation) = split(Arc::new(set), 0.25, 1).unwrap();
        assert_eq!(places(&*train), (0..15).collect::<Vec<_>>());
        assert_eq!(places(&*validation.unwrap()), (15..20).collect::<Vec<_>>());
    }

    #[test]
    fn shares_that_cannot_be_are_errors() {
        for (n, share, part) in [
            (10, 0.01, "nothing for validation; give a larger share"),
            (10, 0.99, "nothing for training; give a smaller share"),
            (1, 0.5, "nothing for training"),
            (0, 0.5, "nothing for validation"),
            (10, 1.0, "from 0 to below 1"),
            (10, -0.1, "from 0 to below 1"),
            (10, f64::NAN, "from 0 to below 1"),
        ] {
            let error = split(numbered(n), share, 0).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(part), "{n} {share}: {error}");
        }
        assert!(split(numbered(10), 0.0, 0).unwrap().1.is_none());
        assert!(Subset::range(numbered(10), 8, 3).is_err());
        assert!(Subset::range(numbered(10), usize::MAX, 3).is_err());
    }

    #[test]
    fn no_set_is_too_large() {
        /// A set of `usize::MAX` samples, none of which is read.
        struct Endless(Spec);
        impl Dataset for Endless {
            fn spec(&self) -> &Spec {
                &self.0
            }
            fn len(&self) -> usize {
                usize::MAX
            }
            fn fetch<'a>(&'a self, _: usize, _: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
                unreachable!()
            }
            fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
                Ok(Some(idx))
            }
        }
        let (train, validation) = split(Arc::new(Endless(numbered(1).spec().clone())), 0.3, 1).unwrap();
        for set in [train, validation.unwrap()] {
            assert!(set.class(set.len() - 1).unwrap().unwrap() > set.len() / 2);
        }
    }
}
