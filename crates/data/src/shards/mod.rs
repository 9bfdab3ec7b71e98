//! Shards of tar, as WebDataset writes them: members of one key are a sample, an image with its label.
//!
//! A tar is read once for its headers and labels (`index`); from then on a sample is a range of bytes, so that samples are
//! random access as those of any other set: their order is a function of seed, epoch and step, ranks read their own, and a run
//! that resumes goes on with the next. The index takes 16 bytes a sample and 4 for each label. Images are decoded as those of
//! folders are, by the same code, and decoded ones are kept in memory up to the same limit.
//!
//! Tars are not compressed: the images in them are, and what is packed as a whole cannot be read from the middle.

mod index;
mod label;

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_kernels::Isa;

use crate::classes::{self, Distinct, LabelPlace};
use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::images::{Flaw, ImageOptions, ImageSize, KeptImages, SampleFormat, size_of};
use crate::map::{self, Bytes};
use crate::remote::{FarFile, Files};
use crate::spec::{Features, LabelKind, Layout, Spec, Target};
pub(crate) use index::TarIndex;
use index::{ImageRange, member_name, name_at, names_by_start};
pub use label::LabelWanted;

/// How shards are read.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// How their images are.
    pub images: ImageOptions,
    /// As what labels are read.
    pub kind: LabelKind,
    /// The key of the `.json` with the label; `None`: the label is the `.cls`.
    pub label: Option<String>,
    /// Whether labels are classes, however many there are.
    pub surely_classes: bool,
    /// Where the tars are.
    pub places: Files,
}

impl Default for ShardOptions {
    fn default() -> ShardOptions {
        let (kind, label) = (LabelKind::Classes, None);
        let places = Files::default();
        ShardOptions { images: ImageOptions::default(), kind, label, surely_classes: false, places }
    }
}

/// The samples of some tars, one after the other.
#[derive(Debug)]
pub struct Shards {
    spec: Spec,
    how: SampleFormat,
    files: Vec<ShardFile>,
    /// The index after the last sample of each file.
    ends: Vec<usize>,
    images: Vec<ImageRange>,
    /// The class of each sample; empty where labels are numbers.
    labels: Vec<u32>,
    /// Labels that are numbers, sample by sample.
    targets: Vec<f32>,
    kept: KeptImages,
}

/// A tar.
#[derive(Debug)]
struct ShardFile {
    path: PathBuf,
    /// Its content, if it is on this host; that of an object is opened whenever an image is read, since its copy may have to make
    /// room for others.
    here: Option<Bytes>,
    places: Files,
}

/// The content of a tar that is open.
enum ShardBytes<'a> {
    Here(&'a Bytes),
    Opened(Bytes),
}

impl Deref for ShardBytes<'_> {
    type Target = Bytes;

    fn deref(&self) -> &Bytes {
        match self {
            ShardBytes::Here(bytes) => bytes,
            ShardBytes::Opened(bytes) => bytes,
        }
    }
}

impl ShardFile {
    fn open(path: &Path, places: &Files) -> Result<ShardFile, DataError> {
        let here = places.far(path).is_none().then(|| places.open(path)).transpose()?;
        Ok(ShardFile { path: path.into(), here, places: places.clone() })
    }

    fn bytes(&self) -> Result<ShardBytes<'_>, DataError> {
        Ok(match &self.here {
            Some(bytes) => ShardBytes::Here(bytes),
            None => ShardBytes::Opened(self.places.open(&self.path)?),
        })
    }

    /// Fails if the tar was cut since it was opened. Nobody cuts the copy of an object.
    fn intact(&self) -> Result<(), DataError> {
        self.here.as_ref().map_or(Ok(()), Bytes::intact)
    }
}

/// An error of the image that starts there.
fn flawed(path: &Path, bytes: &[u8], image: ImageRange, flaw: Flaw) -> DataError {
    let member = name_at(bytes, image.offset);
    DataError::corrupt(path, image.offset + flaw.offset, format!("{member}: {}", flaw.why))
}

/// The bytes of an image in its tar.
fn image_in(bytes: &[u8], image: ImageRange) -> &[u8] {
    let start = image.offset as usize;
    &bytes[start..start + image.len as usize]
}

/// Where a label is written.
#[derive(Clone, Debug)]
struct MemberPlace {
    path: Arc<Path>,
    header: u64,
}

impl LabelPlace for MemberPlace {
    fn error(&self, why: &str) -> DataError {
        // Its name is found when it is needed. If the file is gone, what is wrong is known all the same.
        let member = map::open(&self.path).map(|bytes| format!("{}: ", member_name(&bytes, self.header)));
        DataError::corrupt(&*self.path, self.header, member.unwrap_or_default() + why)
    }
}

impl Shards {
    /// Opens tars as one set: their classes are those of all of them together. Labels that are all small integers are classes as
    /// they are; others are names, sorted. Headers and labels are read, and the first image where `size` is to be found.
    pub fn open(paths: &[PathBuf], options: &ShardOptions) -> Result<Shards, DataError> {
        Shards::indexed(paths, options)?.into_set(options, None)
    }

    /// The same with the target of another set, so that a test set has the classes of its training set.
    pub fn open_as(paths: &[PathBuf], options: &ShardOptions, target: &Target) -> Result<Shards, DataError> {
        let options = &ShardOptions { kind: target.kind().unwrap_or_default(), ..options.clone() };
        Shards::indexed(paths, options)?.into_set(options, Some(target))
    }

    fn indexed(paths: &[PathBuf], options: &ShardOptions) -> Result<IndexedShards, DataError> {
        let wanted = LabelWanted { kind: Some(options.kind), key: options.label.clone() };
        let mut shards = IndexedShards::default();
        for (k, path) in paths.iter().enumerate() {
            options.places.soon(&paths[k..]);
            let file = ShardFile::open(path, &options.places)?;
            let index = {
                let bytes = file.bytes()?;
                let index = TarIndex::read(path, &bytes, &wanted)?;
                // What was read must be what the file holds.
                bytes.intact()?;
                bytes.read_at_random();
                index
            };
            shards.push(file, index)?;
        }
        Ok(shards)
    }

    /// The file and the place in it of a sample.
    fn find(&self, idx: usize) -> (&ShardFile, ImageRange) {
        let shard = self.ends.partition_point(|&end| end <= idx);
        (&self.files[shard], self.images[idx])
    }
}

/// Tars with what is in them, before labels are classes.
#[derive(Default)]
struct IndexedShards {
    files: Vec<ShardFile>,
    ends: Vec<usize>,
    images: Vec<ImageRange>,
    labels: Vec<u32>,
    words: Vec<Distinct<MemberPlace>>,
    known: HashMap<String, u32>,
    targets: Vec<f32>,
}

impl IndexedShards {
    /// Adds a tar.
    fn push(&mut self, file: ShardFile, index: TarIndex) -> Result<(), DataError> {
        let (before, here) = (self.targets_per_sample(), index.targets_per_sample());
        if let Some(first) = self.files.first().filter(|_| before != here) {
            let why = format!(
                "{}: {here} numbers to predict for each sample, and those of {} have {before}",
                file.path.display(),
                first.path.display()
            );
            return Err(DataError::Setting { why });
        }
        let path: Arc<Path> = file.path.as_path().into();
        let mut numbers = Vec::with_capacity(index.words.len());
        for word in index.words {
            let number = match self.known.get(&word.text) {
                Some(&number) => number,
                None => {
                    let place = MemberPlace { path: path.clone(), header: word.header };
                    if self.words.len() == classes::CLASSES_MAX {
                        return Err(place.error(&classes::too_many(None)));
                    }
                    let number = self.words.len() as u32;
                    self.known.insert(word.text.clone(), number);
                    self.words.push(Distinct { text: word.text, place, rows: 0 });
                    number
                }
            };
            self.words[number as usize].rows += word.samples;
            numbers.push(number);
        }
        self.labels.extend(index.labels.into_iter().map(|label| numbers[label as usize]));
        self.targets.extend(index.target_bits.into_iter().map(f32::from_bits));
        self.images.extend(index.images);
        self.ends.push(self.images.len());
        self.files.push(file);
        Ok(())
    }

    fn targets_per_sample(&self) -> usize {
        self.targets.len().checked_div(self.images.len()).unwrap_or(0)
    }

    /// The set, with classes of its own or with a given target.
    fn into_set(self, options: &ShardOptions, target: Option<&Target>) -> Result<Shards, DataError> {
        let n = self.targets_per_sample();
        let (Some(&image), Some(first)) = (self.images.first(), self.files.first()) else {
            return Err(DataError::Setting { why: "a set has at least one tar".into() });
        };
        let own = match options.kind {
            LabelKind::Classes => None,
            LabelKind::Numbers => Some(Target::Numbers { n, names: Vec::new() }),
            LabelKind::Labels => Some(Target::Labels { n, names: Vec::new() }),
        };
        let target = match (own, target) {
            (None, Some(given)) => given.clone(),
            (None, None) => classes::number(options.label.as_deref(), &self.words, options.surely_classes)?,
            (Some(own), None) => own,
            (Some(_), Some(given)) => {
                let spec = Spec { features: Features::Row { width: 1 }, target: given.clone() };
                if spec.n_labels() != n {
                    let why = format!(
                        "{}: {n} numbers to predict for each sample, and the training set has {}",
                        first.path.display(),
                        spec.n_labels()
                    );
                    return Err(DataError::Setting { why });
                }
                given.clone()
            }
        };
        let mut labels = self.labels;
        if let Target::Class { classes, names } = &target {
            let class_of = classes::look_up(&self.words, *classes, names)?;
            labels.iter_mut().for_each(|label| *label = class_of[*label as usize]);
        }
        let size = || -> Result<ImageSize, DataError> {
            let bytes = first.bytes()?;
            let size = size_of(image_in(&bytes, image), &options.images);
            size.map_err(|flaw| flawed(&first.path, &bytes, image, flaw))
        };
        let how = SampleFormat::new(&options.images, size)?;
        Ok(Shards {
            spec: Spec { features: how.features(), target },
            how,
            kept: KeptImages::new(self.images.len(), options.images.cache_bytes),
            files: self.files,
            ends: self.ends,
            images: self.images,
            labels,
            targets: self.targets,
        })
    }
}

impl Dataset for Shards {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.images.len()
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let label = match self.labels.get(idx) {
            Some(&class) => Label::Class(class as usize),
            None => {
                let n = self.spec.n_labels();
                Label::Values(&self.targets[idx * n..(idx + 1) * n])
            }
        };
        let pixels = match self.kept.get(idx) {
            Some(kept) => kept,
            None => {
                let (file, image) = self.find(idx);
                let content = file.bytes()?;
                let Scratch { bytes, numbers, images, .. } = scratch;
                let pixels = self.how.decode(image_in(&content, image), bytes, numbers, images);
                let pixels = match pixels {
                    Ok(pixels) => pixels,
                    // What a cut file reads as is no image; that it was cut is the better error.
                    Err(flaw) => {
                        return Err(content
                            .intact()
                            .err()
                            .unwrap_or_else(|| flawed(&file.path, &content, image, flaw)));
                    }
                };
                self.kept.keep(idx, pixels);
                pixels
            }
        };
        Ok(Fetched { values: Values::U8(pixels), label })
    }

    fn far(&self, idx: usize) -> Option<FarFile<'_>> {
        // What is kept is not read again.
        let file = self.find(idx).0;
        file.places.far(&file.path).filter(|_| self.kept.get(idx).is_none())
    }

    fn intact(&self) -> Result<(), DataError> {
        self.files.iter().try_for_each(ShardFile::intact)
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(self.labels.get(idx).map(|&class| class as usize))
    }
}

/// The images of a tar for prediction, in the layout of `features`, each with the name of its member. Labels are not looked at.
pub fn decode_tar(path: &Path, features: &Features, isa: Isa) -> Result<Vec<(String, Vec<u8>)>, DataError> {
    let Features::Image { channels: channels @ (1 | 3), height, width, layout: Layout::Interleaved } =
        *features
    else {
        return Err(DataError::Setting {
            why: "an image has one channel or three; this model takes others".into(),
        });
    };
    let content = map::open(path)?;
    let index = TarIndex::read(path, &content, &LabelWanted { kind: None, key: None })?;
    let options =
        ImageOptions { size: Some((height, width)), grey: channels == 1, isa, ..ImageOptions::default() };
    let how = SampleFormat::new(&options, || unreachable!("the size is given"))?;
    let mut names = names_by_start(&content);
    let mut scratch = Scratch::default();
    let mut decoded = |image: ImageRange| {
        let Scratch { bytes, numbers, images, .. } = &mut scratch;
        let pixels = how.decode(image_in(&content, image), bytes, numbers, images);
        let pixels = pixels.map_err(|flaw| flawed(path, &content, image, flaw))?;
        Ok((names.remove(&image.offset).unwrap_or_default(), pixels.to_vec()))
    };
    let all = index.images.iter().map(|&image| decoded(image)).collect();
    content.intact()?;
    all
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
