//! From a sample as its set stores it to its slice of a batch: normalised, in planes, moved and flipped, in one pass over
//! the values. Bytes go through a table of 256 numbers per channel.

use crate::augment::{Address, Augment, Placement};
use crate::batch::SlotValues;
use crate::dataset::{Fetched, Label, Values};
use crate::error::DataError;
use crate::plane::Image;
use crate::spec::{Features, IGNORED, Spec, Target};
use crate::stats::Stats;

/// How every sample of a set is transformed.
#[derive(Clone, Debug)]
pub struct Transform {
    spec: Spec,
    /// The normalisation of each channel or column; `None`: values stay as they are.
    stats: Option<Stats>,
    /// The value of each byte, for each channel of an image.
    tables: Vec<[f32; 256]>,
    /// The augmentation; `None` where there is none.
    augment: Option<Augment>,
    /// Of numbers that are to be predicted; `None`: they stay as they are.
    targets: Option<Stats>,
}

impl Transform {
    /// For samples of `spec`: bytes become numbers in 0..1, numbers stay as they are; then both are normalised by
    /// `stats`, if there are any; and images are changed as `augment` says. What the samples do not allow is an error.
    pub fn new(spec: &Spec, stats: Option<&Stats>, augment: Augment) -> Result<Transform, DataError> {
        let n_groups = match spec.features {
            Features::Image { channels, .. } => channels,
            Features::Row { width } => width,
            Features::Mixed { numbers, .. } => numbers,
            Features::Ids { .. } | Features::Texts { .. } => 0,
        };
        // A row of ids alone has nothing to normalise.
        let mixed = matches!(spec.features, Features::Mixed { .. });
        if let Some(stats) = stats.filter(|stats| !(mixed && n_groups == 0 && stats.mean.is_empty())) {
            check_stats(stats, n_groups)?;
        }
        check_augment(&augment, &spec.features)?;
        if i32::try_from(spec.classes()).is_err() {
            return wrong(format!("{} classes do not fit into labels of 32 bits", spec.classes()));
        }
        let tables = match spec.features {
            Features::Image { channels, .. } => (0..channels).map(|channel| table(stats, channel)).collect(),
            Features::Row { .. } | Features::Mixed { .. } | Features::Ids { .. } | Features::Texts { .. } => {
                Vec::new()
            }
        };
        let augment = (augment != Augment::default()).then_some(augment);
        Ok(Transform { spec: spec.clone(), stats: stats.cloned(), tables, augment, targets: None })
    }

    /// The same, where numbers that are to be predicted are normalised by `stats`, if there are any.
    pub fn with_targets(mut self, stats: Option<&Stats>) -> Result<Transform, DataError> {
        if let (Some(stats), n) = (stats, self.spec.n_labels()) {
            if !matches!(self.spec.target, Target::Numbers { .. }) {
                return wrong("only numbers that are to be predicted can be normalised".into());
            }
            check_stats(stats, n)?;
        }
        self.targets = stats.cloned();
        Ok(self)
    }

    /// By what numbers that are to be predicted are normalised.
    pub fn targets(&self) -> Option<&Stats> {
        self.targets.as_ref()
    }

    /// The spec of the samples that this is for.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Writes `sample` into its slices: [`Features::numel`] values and [`Spec::n_labels`] labels. A sample that is not
    /// as the spec says is an error.
    pub fn write(
        &self,
        sample: Fetched<'_>,
        address: Address,
        x: SlotValues<'_>,
        labels: SlotValues<'_>,
    ) -> Result<(), DataError> {
        let (numel, idx) = (self.spec.features.numel(), address.idx);
        let expected = numel + usize::from(self.spec.target == Target::NextId);
        let is_text = matches!(self.spec.features, Features::Texts { .. });
        if is_text {
            let (n, room) = (sample.values.len(), x.len());
            if n == 0 || n > room {
                return wrong(format!("sample {idx} has {n} tokens, and 1 to {room} have room"));
            }
        } else if sample.values.len() != expected {
            let n = sample.values.len();
            return wrong(format!("sample {idx} has {n} values, but the set's samples have {expected}"));
        }
        // The places of the next ids, which are filled from the values.
        let next_ids = match (&self.spec.target, sample.label, labels) {
            (Target::Class { classes, .. }, Label::Class(class), SlotValues::I32(labels))
                if class < *classes =>
            {
                // `new` has checked that classes are below 2³¹.
                labels[0] = class as i32;
                None
            }
            (Target::Tags { classes, .. }, Label::Tags(tags), SlotValues::I32(labels))
                if is_text && tags.len() == sample.values.len() && labels.len() == x.len() =>
            {
                let is_tag =
                    |&&tag: &&i32| tag == IGNORED || usize::try_from(tag).is_ok_and(|tag| tag < *classes);
                if let Some(tag) = tags.iter().find(|tag| !is_tag(tag)) {
                    return wrong(format!("sample {idx} has the tag {tag}, which is not in 0..{classes}"));
                }
                let (own, rest) = labels.split_at_mut(tags.len());
                own.copy_from_slice(tags);
                rest.fill(IGNORED);
                None
            }
            (Target::NextId, Label::NextId, SlotValues::I32(labels)) => Some(labels),
            (
                Target::Numbers { n, .. } | Target::Labels { n, .. },
                Label::Values(values),
                SlotValues::F32(to),
            ) if values.len() == *n => {
                for (k, (to, value)) in to.iter_mut().zip(values).enumerate() {
                    let (mean, std) = normal(self.targets.as_ref(), k);
                    *to = (value - mean) / std;
                }
                None
            }
            (target, label, _) => {
                return wrong(format!(
                    "sample {idx} has the label {label:?}, which {target:?} does not have"
                ));
            }
        };
        match (&self.spec.features, x, sample.values) {
            (&Features::Image { channels, height, width, layout }, SlotValues::F32(x), values) => {
                let image = Image { channels, height, width, layout };
                let placement = self
                    .augment
                    .map_or_else(Placement::default, |augment| augment.draw(address, height, width));
                match values {
                    Values::U8(values) => image.planes(placement, values, x, |channel| {
                        let table = &self.tables[channel];
                        |byte: u8| table[usize::from(byte)]
                    }),
                    Values::F32(values) => image.planes(placement, values, x, |channel| {
                        let (mean, std) = normal(self.stats.as_ref(), channel);
                        move |value: f32| (value - mean) / std
                    }),
                    Values::I32(_) => return wrong(format!("sample {idx} has ids where numbers should be")),
                }
            }
            (Features::Row { .. }, SlotValues::F32(x), Values::F32(values)) => match &self.stats {
                None => x.copy_from_slice(values),
                Some(stats) => {
                    for (((x, value), mean), std) in x.iter_mut().zip(values).zip(&stats.mean).zip(&stats.std)
                    {
                        *x = (value - mean) / std;
                    }
                }
            },
            (Features::Mixed { numbers, ids, texts }, SlotValues::F32(x), Values::F32(values)) => {
                let (values, given) = values.split_at(*numbers);
                let (x, places) = x.split_at_mut(*numbers);
                for (column, (x, value)) in x.iter_mut().zip(values).enumerate() {
                    let (mean, std) = normal(self.stats.as_ref(), column);
                    *x = (value - mean) / std;
                }
                let words = texts.iter().flat_map(|text| std::iter::repeat_n(text.ids, text.length));
                let limits = ids.iter().copied().chain(words);
                let fits = |id: f32, n: usize| id.fract() == 0.0 && id >= 0.0 && (id as usize) < n;
                if let Some((id, n)) = given.iter().zip(limits).find(|(id, n)| !fits(**id, *n)) {
                    return wrong(format!("sample {idx} has the id {id}, which is not in 0..{n}"));
                }
                places.copy_from_slice(given);
            }
            (Features::Row { .. }, SlotValues::F32(x), Values::U8(values)) => {
                for (column, (x, &value)) in x.iter_mut().zip(values).enumerate() {
                    let (mean, std) = normal(self.stats.as_ref(), column);
                    *x = (f32::from(value) / 255.0 - mean) / std;
                }
            }
            (&Features::Ids { vocab, .. }, SlotValues::I32(x), Values::I32(values)) => {
                if let Some(id) =
                    values.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= vocab))
                {
                    return wrong(format!("sample {idx} has the id {id}, which is not in 0..{vocab}"));
                }
                x.copy_from_slice(&values[..numel]);
                if let Some(labels) = next_ids {
                    labels.copy_from_slice(&values[1..]);
                }
            }
            (&Features::Texts { vocab, padding, .. }, SlotValues::I32(x), Values::I32(values)) => {
                // Of the second text of a pair, where that is told: `-1 - id`.
                let plain = |id: i32| if id < 0 { -1 - id } else { id };
                let is_token =
                    |&&id: &&i32| usize::try_from(plain(id)).is_ok_and(|id| id < vocab && id != padding);
                if let Some(id) = values.iter().find(|id| !is_token(id)) {
                    return wrong(format!(
                        "sample {idx} has the id {id}, which is not a token's: those are in 0..{vocab} without {padding}"
                    ));
                }
                let (tokens, rest) = x.split_at_mut(values.len());
                tokens.copy_from_slice(values);
                rest.fill(padding as i32);
            }
            (&Features::Ids { vocab, .. }, SlotValues::I32(x), Values::U8(values)) => {
                if let Some(id) = values.iter().find(|&&id| usize::from(id) >= vocab) {
                    return wrong(format!("sample {idx} has the byte {id}, which is not in 0..{vocab}"));
                }
                widen(&values[..numel], x);
                if let Some(labels) = next_ids {
                    widen(&values[1..], labels);
                }
            }
            _ => return wrong(format!("sample {idx} has values of another kind than the set's spec says")),
        }
        Ok(())
    }
}

fn widen(bytes: &[u8], ids: &mut [i32]) {
    for (id, &byte) in ids.iter_mut().zip(bytes) {
        *id = i32::from(byte);
    }
}

/// Mean and standard deviation of a channel or column.
fn normal(stats: Option<&Stats>, group: usize) -> (f32, f32) {
    stats.map_or((0.0, 1.0), |stats| (stats.mean[group], stats.std[group]))
}

/// The value of each byte of a channel.
fn table(stats: Option<&Stats>, channel: usize) -> [f32; 256] {
    let (mean, std) = normal(stats, channel);
    std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / std)
}

fn check_stats(stats: &Stats, n_groups: usize) -> Result<(), DataError> {
    let (means, deviations) = (stats.mean.len(), stats.std.len());
    if n_groups == 0 {
        return wrong("ids cannot be normalised; set normalise = false".into());
    }
    if means != n_groups || deviations != n_groups {
        return wrong(format!(
            "{means} means and {deviations} standard deviations do not fit samples with {n_groups} channels or columns"
        ));
    }
    let usable = |(mean, std): (&f32, &f32)| mean.is_finite() && std.is_finite() && *std > 0.0;
    if !stats.mean.iter().zip(&stats.std).all(usable) {
        return wrong("means must be finite, and standard deviations finite and above 0".into());
    }
    Ok(())
}

fn check_augment(augment: &Augment, features: &Features) -> Result<(), DataError> {
    if *augment == Augment::default() {
        return Ok(());
    }
    let Features::Image { height, width, .. } = *features else {
        return wrong("only images can be augmented; leave augmentation out".into());
    };
    let side = height.min(width);
    for (name, reach) in [("crop", augment.crop), ("shift", augment.shift)] {
        if reach > 0 && reach >= side {
            return wrong(format!(
                "{name} is {reach}, but images are {height}x{width}; give less than {side}"
            ));
        }
    }
    if !(0.0..=1.0).contains(&augment.erase) {
        return wrong(format!("erase is {}; give a probability from 0 to 1", augment.erase));
    }
    Ok(())
}

fn wrong<T>(why: String) -> Result<T, DataError> {
    Err(DataError::Setting { why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Layout;

    const ADDRESS: Address = Address { seed: 1, epoch: 2, idx: 3 };

    fn classes(features: Features) -> Spec {
        Spec { features, target: Target::Class { classes: 3, names: vec![] } }
    }

    fn ids(target: Target) -> Spec {
        Spec { features: Features::Ids { time: 2, vocab: 200 }, target }
    }

    fn image(channels: usize, side: usize, layout: Layout) -> Spec {
        classes(Features::Image { channels, height: side, width: side, layout })
    }

    fn stats(mean: &[f32], std: &[f32]) -> Stats {
        Stats { mean: mean.to_vec(), std: std.to_vec() }
    }

    fn sample(values: Values<'_>) -> Fetched<'_> {
        Fetched { values, label: Label::Class(2) }
    }

    fn numbers(spec: &Spec, stats: Option<&Stats>, values: Values<'_>) -> Result<Vec<f32>, DataError> {
        let transform = Transform::new(spec, stats, Augment::default())?;
        let (mut x, mut labels) = (vec![f32::NAN; spec.features.numel()], [-1]);
        transform.write(sample(values), ADDRESS, SlotValues::F32(&mut x), SlotValues::I32(&mut labels))?;
        assert_eq!(labels, [2]);
        Ok(x)
    }

    #[test]
    fn values_are_scaled_normalised_and_put_into_planes() {
        let (planes, interleaved) = (image(2, 2, Layout::Planes), image(2, 2, Layout::Interleaved));
        let row = classes(Features::Row { width: 2 });
        let stats = stats(&[0.5, 1.0], &[2.0, 4.0]);
        let bytes = Values::U8(&[0, 51, 255, 0, 255, 0, 51, 0]);
        let counted = Values::F32(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        for (spec, stats, values, expected) in [
            (&planes, None, bytes, vec![0.0, 0.2, 1.0, 0.0, 1.0, 0.0, 0.2, 0.0]),
            (&planes, Some(&stats), bytes, vec![-0.25, -0.15, 0.25, -0.25, 0.0, -0.25, -0.2, -0.25]),
            (&interleaved, None, bytes, vec![0.0, 1.0, 1.0, 0.2, 0.2, 0.0, 0.0, 0.0]),
            (&interleaved, None, counted, vec![0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]),
            (&interleaved, Some(&stats), counted, vec![-0.25, 0.75, 1.75, 2.75, 0.0, 0.5, 1.0, 1.5]),
            (&row, None, Values::F32(&[-3.0, 3.0]), vec![-3.0, 3.0]),
            (&row, Some(&stats), Values::F32(&[2.5, 3.0]), vec![1.0, 0.5]),
            (&row, Some(&stats), Values::U8(&[255, 0]), vec![0.25, -0.25]),
        ] {
            let x = numbers(spec, stats, values).unwrap();
            assert!(x.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{x:?} is not {expected:?}");
        }
    }

    #[test]
    fn ids_become_features_and_labels() {
        let class = Target::Class { classes: 3, names: vec![] };
        for (target, values, label, expected) in [
            (Target::NextId, Values::I32(&[5, 6, 7]), Label::NextId, vec![6, 7]),
            (Target::NextId, Values::U8(&[5, 6, 7]), Label::NextId, vec![6, 7]),
            (class.clone(), Values::I32(&[5, 6]), Label::Class(1), vec![1]),
            (class, Values::U8(&[5, 6]), Label::Class(1), vec![1]),
        ] {
            let transform = Transform::new(&ids(target), None, Augment::default()).unwrap();
            let (mut x, mut labels) = ([-1; 2], vec![-1; expected.len()]);
            transform
                .write(
                    Fetched { values, label },
                    ADDRESS,
                    SlotValues::I32(&mut x),
                    SlotValues::I32(&mut labels),
                )
                .unwrap();
            assert_eq!((x, labels), ([5, 6], expected));
        }
    }

    #[test]
    fn samples_that_are_not_what_the_set_says_are_errors() {
        let row = classes(Features::Row { width: 2 });
        let check = |spec: &Spec, fetched, part: &str| {
            let transform = Transform::new(spec, None, Augment::default()).unwrap();
            let (mut numbers, mut ids, mut labels) = ([0.0; 2], [0; 2], vec![0; spec.n_labels()]);
            let x = match spec.features.is_ids() {
                true => SlotValues::I32(&mut ids),
                false => SlotValues::F32(&mut numbers),
            };
            let error =
                transform.write(fetched, ADDRESS, x, SlotValues::I32(&mut labels)).unwrap_err().to_string();
            assert!(error.contains("sample 3") && error.contains(part), "{error}");
        };
        let next = |values| Fetched { values, label: Label::NextId };
        check(&row, sample(Values::F32(&[1.0])), "1 values");
        check(&row, sample(Values::I32(&[1, 2])), "another kind");
        check(&row, next(Values::F32(&[1.0, 2.0])), "label NextId");
        check(&row, Fetched { values: Values::U8(&[1, 2]), label: Label::Class(3) }, "label Class(3)");
        check(&ids(Target::NextId), next(Values::I32(&[1, 2])), "2 values");
        check(&ids(Target::NextId), next(Values::I32(&[1, 2, 200])), "the id 200");
        check(&ids(Target::NextId), next(Values::I32(&[1, -2, 0])), "the id -2");
        check(&ids(Target::NextId), next(Values::U8(&[1, 2, 255])), "the byte 255");
        check(&ids(Target::NextId), next(Values::F32(&[1.0, 2.0, 0.0])), "another kind");
    }

    #[test]
    fn what_cannot_be_done_to_the_samples_is_an_error() {
        let grey = image(1, 8, Layout::Planes);
        let none = Augment::default();
        let text = ids(Target::NextId);
        let row = classes(Features::Row { width: 2 });
        for (spec, stats, augment, part) in [
            (&grey, Some(stats(&[0.0, 0.0], &[1.0, 1.0])), none, "2 means"),
            (&grey, Some(stats(&[0.0], &[0.0])), none, "above 0"),
            (&grey, Some(stats(&[f32::NAN], &[1.0])), none, "finite"),
            (&text, Some(stats(&[], &[])), none, "normalise = false"),
            (&text, None, Augment { flip: true, ..none }, "only images"),
            (&row, None, Augment { shift: 1, ..none }, "only images"),
            (&grey, None, Augment { crop: 8, ..none }, "crop is 8"),
            (&grey, None, Augment { shift: usize::MAX, ..none }, "shift is"),
            (&grey, None, Augment { erase: 1.5, ..none }, "erase is 1.5"),
            (&grey, None, Augment { erase: f64::NAN, ..none }, "erase is NaN"),
        ] {
            let error = Transform::new(spec, stats.as_ref(), augment).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn augmentation_follows_the_address_and_pads_with_what_a_zero_becomes() {
        let spec = image(1, 16, Layout::Planes);
        let augment = Augment { crop: 3, flip: true, shift: 2, erase: 0.5 };
        let transform = Transform::new(&spec, Some(&stats(&[0.5], &[0.5])), augment).unwrap();
        let write = |idx| {
            let mut x = vec![f32::NAN; 256];
            let address = Address { idx, ..ADDRESS };
            transform
                .write(
                    sample(Values::U8(&[255; 256])),
                    address,
                    SlotValues::F32(&mut x),
                    SlotValues::I32(&mut [0]),
                )
                .unwrap();
            x
        };
        let mut padded = 0;
        for idx in 0..100 {
            let x = write(idx);
            assert_eq!(x, write(idx));
            // White is 1, black and padding are -1, erased is 0.
            assert!(x.iter().all(|x| [1.0, -1.0, 0.0].contains(x)), "{x:?}");
            let placement = augment.draw(Address { idx, ..ADDRESS }, 16, 16);
            assert_eq!(x.contains(&0.0), placement.erased.is_some());
            padded += usize::from(x.contains(&-1.0));
        }
        assert!(padded > 50, "{padded}");
    }
}
