//! Statistics of a set: means and standard deviations for normalisation, and how often each class occurs.

use crate::dataset::{Dataset, Scratch, Values};
use crate::error::DataError;
use crate::spec::{Features, Layout, Target};

/// So many samples are announced at a time.
const AHEAD: usize = 256;

/// Mean and standard deviation of each channel of images, or of each column of rows.
///
/// Bytes count in units of 0..1: a value of 255 is 1.
#[derive(Clone, PartialEq, Debug)]
pub struct Stats {
    /// The mean of each channel or column.
    pub mean: Vec<f32>,
    /// The population standard deviations; 1 where all values are the same, so that dividing by them is safe.
    pub std: Vec<f32>,
}

impl Stats {
    /// The statistics of at most `limit` samples, evenly spaced over the set.
    pub fn of(set: &dyn Dataset, limit: usize) -> Result<Stats, DataError> {
        let (groups, group_of) = grouping(&set.spec().features)?;
        // Ids that follow the numbers of a row have no mean.
        let grouped = match &set.spec().features {
            Features::Mixed { numbers, .. } => *numbers,
            Features::Image { .. } | Features::Row { .. } | Features::Ids { .. } | Features::Texts { .. } => {
                set.spec().features.numel()
            }
        };
        let n = set.len().min(limit);
        if n == 0 {
            return Err(DataError::Setting {
                why: "there are no samples to take the mean and standard deviation of".into(),
            });
        }
        let mut sums = vec![Sums::default(); groups];
        let mut scratch = Scratch::default();
        let place = |i: usize| (i as u128 * set.len() as u128 / n as u128) as usize;
        for i in 0..n {
            let idx = place(i);
            if i.is_multiple_of(AHEAD) {
                set.ahead(&mut (i..n.min(i + AHEAD)).map(place), &mut scratch)?;
            }
            let values = set.fetch(idx, &mut scratch)?.values;
            let (n_values, numel) = (values.len(), set.spec().features.numel());
            if n_values != numel {
                let why = format!("sample {idx} has {n_values} values, but the set's samples have {numel}");
                return Err(DataError::Setting { why });
            }
            match values {
                Values::U8(values) => group_of.each(values, |group, values| sums[group].add_bytes(values)),
                Values::F32(values) => {
                    group_of.each(&values[..grouped], |group, values| sums[group].add_numbers(values))
                }
                Values::I32(_) => return Err(DataError::Setting { why: IDS.into() }),
            }
        }
        set.intact()?;
        let (mean, std) = sums.iter().map(Sums::mean_and_deviation).unzip();
        let stats = Stats { mean, std };
        match stats.mean.iter().zip(&stats.std).position(|(mean, std)| !mean.is_finite() || !std.is_finite())
        {
            Some(group) => {
                let what = if matches!(group_of, Grouping::Columns) { "column" } else { "channel" };
                let why = format!(
                    "{what} {group} (from 0) has values that are infinite or NaN; repair them, or do not normalise"
                );
                Err(DataError::Setting { why })
            }
            None => Ok(stats),
        }
    }
}

impl Stats {
    /// Mean and deviation of each number that is to be predicted, over all samples; only for [`Target::Numbers`].
    pub fn of_targets(set: &dyn Dataset) -> Result<Stats, DataError> {
        let Target::Numbers { n, .. } = set.spec().target else {
            return Err(DataError::Setting { why: "only numbers to be predicted have a mean".into() });
        };
        let mut sums = vec![Sums::default(); n];
        let mut scratch = Scratch::default();
        for idx in 0..set.len() {
            if idx.is_multiple_of(AHEAD) {
                set.ahead(&mut (idx..set.len().min(idx + AHEAD)), &mut scratch)?;
            }
            let label = set.fetch(idx, &mut scratch)?.label;
            let Some(values) = label.values().filter(|values| values.len() == n) else {
                let why =
                    format!("sample {idx} has the label {label:?}, but the set's samples have {n} numbers");
                return Err(DataError::Setting { why });
            };
            sums.iter_mut().zip(values).for_each(|(sums, value)| sums.add_numbers(&[*value]));
        }
        set.intact()?;
        let (mean, std): (Vec<f32>, Vec<f32>) = sums.iter().map(Sums::mean_and_deviation).unzip();
        match mean.iter().zip(&std).position(|(mean, std)| !mean.is_finite() || !std.is_finite()) {
            Some(k) => {
                let why =
                    format!("target {k} (from 0) has values that are infinite or no numbers; repair them");
                Err(DataError::Setting { why })
            }
            None => Ok(Stats { mean, std }),
        }
    }
}

/// How many samples of each class there are.
pub fn class_counts(set: &dyn Dataset) -> Result<Vec<usize>, DataError> {
    let Target::Class { classes, .. } = set.spec().target else {
        return Err(DataError::Setting {
            why: "labels that are not classes have no class weights; leave `data.class_weights` out".into(),
        });
    };
    let mut counts = vec![0; classes];
    for idx in 0..set.len() {
        let class = set.class(idx)?;
        let Some(count) = class.and_then(|class| counts.get_mut(class)) else {
            let why = format!("sample {idx}: label {class:?} is not below {classes} classes");
            return Err(DataError::Setting { why });
        };
        *count += 1;
    }
    set.intact()?;
    Ok(counts)
}

/// The weight of each class in inverse proportion to its frequency: samples / (classes · samples of the class). A class
/// without samples is an error.
pub fn balanced_weights(set: &dyn Dataset) -> Result<Vec<f32>, DataError> {
    let counts = class_counts(set)?;
    if let Some(class) = counts.iter().position(|&count| count == 0) {
        let name = match &set.spec().target {
            Target::Class { names, .. } => names.get(class),
            Target::Tags { .. } | Target::NextId | Target::Numbers { .. } | Target::Labels { .. } => None,
        };
        let name = name.map_or_else(|| class.to_string(), |name| format!("{class} ({name})"));
        let why = format!(
            "class {name} has no sample, so it has no balanced weight; give class weights as numbers"
        );
        return Err(DataError::Setting { why });
    }
    let even = set.len() as f64 / counts.len() as f64;
    Ok(counts.iter().map(|&count| (even / count as f64) as f32).collect())
}

const IDS: &str = "ids cannot be normalised; set normalise = false";

/// Which values of a sample belong to the same channel or column.
#[derive(Clone, Copy)]
enum Grouping {
    /// Each value is its own group.
    Columns,
    /// Each plane of this many values is a group.
    Planes(usize),
    /// Channels are interleaved, this many of them.
    Interleaved(usize),
}

fn grouping(features: &Features) -> Result<(usize, Grouping), DataError> {
    match *features {
        Features::Row { width } | Features::Mixed { numbers: width, .. } => Ok((width, Grouping::Columns)),
        Features::Image { channels, height, width, layout: Layout::Planes } => {
            Ok((channels, Grouping::Planes((height * width).max(1))))
        }
        Features::Image { channels, layout: Layout::Interleaved, .. } => {
            Ok((channels, Grouping::Interleaved(channels.max(1))))
        }
        Features::Ids { .. } | Features::Texts { .. } => Err(DataError::Setting { why: IDS.into() }),
    }
}

impl Grouping {
    /// Calls `add` with runs of values and the group that they belong to.
    fn each<T>(self, values: &[T], mut add: impl FnMut(usize, &[T])) {
        let run = match self {
            Grouping::Columns | Grouping::Interleaved(_) => 1,
            Grouping::Planes(run) => run,
        };
        let groups = match self {
            Grouping::Columns | Grouping::Planes(_) => usize::MAX,
            Grouping::Interleaved(channels) => channels,
        };
        for (i, values) in values.chunks(run).enumerate() {
            add(i % groups, values);
        }
    }
}

/// Sums of a group's values. Those of bytes are integers, hence exact; those of floats are of the difference from
/// the first value, so that a large mean does not cancel a small deviation.
#[derive(Clone, Default)]
struct Sums {
    n: u64,
    bytes: u128,
    squared_bytes: u128,
    origin: Option<f64>,
    distances: f64,
    squared_distances: f64,
}

impl Sums {
    fn add_bytes(&mut self, values: &[u8]) {
        self.n += values.len() as u64;
        // Runs of 2¹⁵ squares fit into 32 bits, in which SIMD lanes sum them.
        for run in values.chunks(1 << 15) {
            self.bytes += u128::from(run.iter().map(|&v| u32::from(v)).sum::<u32>());
            self.squared_bytes += u128::from(run.iter().map(|&v| u32::from(v) * u32::from(v)).sum::<u32>());
        }
    }

    fn add_numbers(&mut self, values: &[f32]) {
        let Some(&first) = values.first() else { return };
        self.n += values.len() as u64;
        let origin = *self.origin.get_or_insert(f64::from(first));
        for &value in values {
            let distance = f64::from(value) - origin;
            self.distances += distance;
            self.squared_distances += distance * distance;
        }
    }

    fn mean_and_deviation(&self) -> (f32, f32) {
        let n = self.n as f64;
        let (mean, variance) = match self.origin {
            Some(origin) => {
                let mean = self.distances / n;
                (origin + mean, self.squared_distances / n - mean * mean)
            }
            None => {
                let n_exact = u128::from(self.n);
                let variance = (n_exact * self.squared_bytes - self.bytes * self.bytes) as f64 / (n * n);
                (self.bytes as f64 / n / 255.0, variance / (255.0 * 255.0))
            }
        };
        let std = variance.max(0.0).sqrt() as f32;
        // A NaN is kept for the caller to find; `max` above would hide it.
        (
            mean as f32,
            if variance.is_nan() {
                f32::NAN
            } else if std == 0.0 {
                1.0
            } else {
                std
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{InMemory, Store};
    use crate::spec::Spec;

    fn set(features: Features, values: impl Into<Store>, labels: &[usize], names: &[&str]) -> InMemory {
        let names = names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let classes = names.len().max(3);
        InMemory::new(Spec { features, target: Target::Class { classes, names } }, values, labels.to_vec())
            .unwrap()
    }

    fn check(features: Features, values: impl Into<Store>, n: usize, mean: &[f32], std: &[f32]) {
        let set = set(features, values, &vec![0; n], &[]);
        let stats = Stats::of(&set, usize::MAX).unwrap();
        let near = |a: &[f32], b: &[f32]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs())
        };
        assert!(near(&stats.mean, mean) && near(&stats.std, std), "{stats:?} is not {mean:?} and {std:?}");
    }

    #[test]
    fn means_and_deviations_are_those_of_hand_sums() {
        let row = |width| Features::Row { width };
        let image = |layout| Features::Image { channels: 2, height: 1, width: 2, layout };
        check(row(2), vec![1.0, 10.0, 3.0, 10.0], 2, &[2.0, 10.0], &[1.0, 1.0]);
        // A deviation that f32 sums, or f64 sums of squares, would lose.
        check(row(1), vec![16_777_216.0, 16_777_214.0], 2, &[16_777_215.0], &[1.0]);
        check(row(2), vec![0_u8, 255, 255, 255], 2, &[0.5, 1.0], &[0.5, 1.0]);
        check(image(Layout::Planes), vec![0_u8, 51, 255, 255], 1, &[0.1, 1.0], &[0.1, 1.0]);
        check(image(Layout::Interleaved), vec![0_u8, 255, 51, 255], 1, &[0.1, 1.0], &[0.1, 1.0]);
        check(image(Layout::Interleaved), vec![0.0, 5.0, 1.0, 7.0], 1, &[0.5, 6.0], &[0.5, 1.0]);
        let tall = Features::Image { channels: 1, height: 300, width: 300, layout: Layout::Planes };
        check(tall, vec![255_u8; 90_000], 1, &[1.0], &[1.0]);
    }

    #[test]
    fn a_limit_takes_samples_from_the_whole_set() {
        let set =
            set(Features::Row { width: 1 }, (0..100).map(|i| i as f32).collect::<Vec<_>>(), &[0; 100], &[]);
        assert_eq!(Stats::of(&set, 4).unwrap().mean, [37.5]);
        assert!(Stats::of(&set, 0).is_err());
    }

    #[test]
    fn values_that_are_no_numbers_are_named() {
        for strange in [f32::NAN, f32::INFINITY] {
            let set = set(Features::Row { width: 2 }, vec![1.0, 2.0, 3.0, strange], &[0, 1], &[]);
            let error = Stats::of(&set, 9).unwrap_err().to_string();
            assert!(error.contains("column 1 "), "{error}");
        }
    }

    #[test]
    fn balanced_weights_follow_the_counts() {
        let row = Features::Row { width: 1 };
        let even = set(row.clone(), vec![0_u8; 6], &[0, 1, 1, 2, 2, 2], &[]);
        assert_eq!(class_counts(&even).unwrap(), [1, 2, 3]);
        assert_eq!(balanced_weights(&even).unwrap(), [2.0, 1.0, 6.0 / 9.0]);
        let error = balanced_weights(&set(row, vec![0_u8; 2], &[0, 2], &["cat", "dog", "cow"])).unwrap_err();
        assert!(error.to_string().contains("class 1 (dog) has no sample"), "{error}");
    }

    #[test]
    fn ids_have_neither() {
        let spec = Spec { features: Features::Ids { time: 1, vocab: 2 }, target: Target::NextId };
        let set = InMemory::new(spec, vec![0, 1], vec![]).unwrap();
        assert!(Stats::of(&set, 9).is_err() && balanced_weights(&set).is_err());
    }
}
