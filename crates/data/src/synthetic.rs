//! A synthetic set: each class is a blob of normal noise around a random centre. Samples are generated when they are read,
//! from the seed and their index; nothing is stored.

use std::f32::consts::FRAC_1_SQRT_2;

use polyreme_kernels::{Cx, Isa, random};

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::draw::{Purpose, stream};
use crate::error::DataError;
use crate::spec::{Features, Layout, Spec, Target};

/// A synthetic set of blobs around random centres.
#[derive(Clone, Debug)]
pub struct Synthetic {
    spec: Spec,
    samples: usize,
    classes: usize,
    noise: f32,
    seed: u64,
    first_idx: usize,
    isa: Isa,
}

impl Synthetic {
    /// Samples number `first_idx..first_idx + samples` of the infinite set that `seed` and the other settings describe,
    /// so a test set that starts where the training set ends has the same classes and other samples.
    ///
    /// `shape` is `[width]` or `[channels, height, width]`. Classes take turns. In each element two centres are 1
    /// apart (root mean square), and samples deviate from their centre by `noise`.
    pub fn new(
        samples: usize,
        shape: &[usize],
        classes: usize,
        noise: f64,
        seed: u64,
        first_idx: usize,
    ) -> Result<Synthetic, DataError> {
        // Twice: centre and noise are made side by side.
        let numel = shape.iter().try_fold(2_usize, |product, &dim| product.checked_mul(dim));
        let features = match (shape, numel) {
            (&[width], Some(1..)) => Features::Row { width },
            (&[channels, height, width], Some(1..)) => {
                Features::Image { channels, height, width, layout: Layout::Planes }
            }
            _ => {
                let why = format!(
                    "shape {shape:?} is neither [width] nor [channels, height, width] with sizes from 1"
                );
                return Err(DataError::Setting { why });
            }
        };
        if classes == 0 {
            return Err(DataError::Setting { why: "there are 0 classes; give at least 1".into() });
        }
        if !(noise >= 0.0 && noise <= f64::from(f32::MAX)) {
            return Err(DataError::Setting { why: format!("noise is {noise}; give 0 or more") });
        }
        if first_idx.checked_add(samples).is_none() {
            return Err(DataError::Setting { why: format!("{samples} samples are too many") });
        }
        let spec = Spec { features, target: Target::Class { classes, names: vec![] } };
        Ok(Synthetic { spec, samples, classes, noise: noise as f32, seed, first_idx, isa: Isa::detect() })
    }

    /// The same, drawn with these CPU features at most.
    pub fn with_isa(self, isa: Isa) -> Synthetic {
        Synthetic { isa, ..self }
    }
}

impl Dataset for Synthetic {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.samples
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let number = self.first_idx + idx;
        let class = number % self.classes;
        let numel = self.spec.features.numel();
        scratch.numbers.resize(2 * numel, 0.0);
        let (centre, noise) = scratch.numbers.split_at_mut(numel);
        let cx = Cx { isa: self.isa, ..Cx::serial() };
        random::normal(&cx, stream(self.seed, Purpose::Centre), class as u64, 0, 0.0, FRAC_1_SQRT_2, centre);
        random::normal(&cx, stream(self.seed, Purpose::Noise), number as u64, 0, 0.0, self.noise, noise);
        for (x, noise) in centre.iter_mut().zip(noise) {
            *x += *noise;
        }
        Ok(Fetched { values: Values::F32(centre), label: Label::Class(class) })
    }

    fn intact(&self) -> Result<(), DataError> {
        Ok(())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some((self.first_idx + idx) % self.classes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &Synthetic, idx: usize) -> (Vec<f32>, usize) {
        let mut scratch = Scratch::default();
        let sample = set.fetch(idx, &mut scratch).unwrap();
        let (Values::F32(x), Label::Class(class)) = (sample.values, sample.label) else {
            panic!("{sample:?}")
        };
        assert_eq!(set.class(idx).unwrap(), Some(class));
        (x.to_vec(), class)
    }

    /// The root mean square of the difference.
    fn distance(a: &[f32], b: &[f32]) -> f32 {
        (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / a.len() as f32).sqrt()
    }

    #[test]
    fn classes_are_one_apart_and_samples_deviate_by_the_noise() {
        let set = Synthetic::new(100, &[3, 20, 20], 4, 0.25, 9, 0).unwrap();
        let centres = Synthetic::new(4, &[3, 20, 20], 4, 0.0, 9, 0).unwrap();
        for idx in 0..100 {
            let (x, class) = read(&set, idx);
            for other in 0..4 {
                let distance = distance(&x, &read(&centres, other).0);
                let expected = if other == class { 0.25 } else { (1.0 + 0.25_f32.powi(2)).sqrt() };
                assert!((distance / expected - 1.0).abs() < 0.1, "{idx}: {distance} from class {other}");
            }
        }
    }

    #[test]
    fn a_later_start_gives_the_samples_behind() {
        let all = Synthetic::new(50, &[7], 3, 1.0, 5, 0).unwrap();
        let test = Synthetic::new(10, &[7], 3, 1.0, 5, 40).unwrap();
        let other = Synthetic::new(50, &[7], 3, 1.0, 6, 0).unwrap();
        for idx in 0..10 {
            assert_eq!(read(&test, idx), read(&all, 40 + idx));
            assert_ne!(read(&test, idx).0, read(&all, idx).0);
            assert_ne!(read(&all, idx).0, read(&other, idx).0);
        }
    }

    #[test]
    fn impossible_settings_are_errors() {
        let big = usize::MAX;
        for (samples, shape, classes, noise, first_idx, part) in [
            (9, &[][..], 2, 0.1, 0, "neither"),
            (9, &[3, 4], 2, 0.1, 0, "neither"),
            (9, &[0], 2, 0.1, 0, "neither"),
            (9, &[big, big, 2], 2, 0.1, 0, "neither"),
            (9, &[3], 0, 0.1, 0, "0 classes"),
            (9, &[3], 2, -0.1, 0, "noise is -0.1"),
            (9, &[3], 2, f64::NAN, 0, "noise is NaN"),
            (9, &[3], 2, f64::INFINITY, 0, "noise is inf"),
            (big, &[3], 2, 0.1, 1, "too many"),
        ] {
            let error = Synthetic::new(samples, shape, classes, noise, 0, first_idx).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
