//! Image folders: a folder per class with PNG and JPEG files in it, as torchvision's `ImageFolder` reads it. Files are
//! decoded when a sample is asked for, and what was decoded is kept in memory up to a limit, so that later epochs read
//! memory.
//!
//! What a pixel is made of is said in `decode` (transparency is dropped), how sizes are matched in `resize`.

mod decode;
mod folder;
mod resize;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::spec::{Features, Layout, Spec, Target};
use decode::SIDE_MAX;
pub use folder::{Found, find};
use resize::Size;

/// No file may be longer: the largest image, unpacked, is shorter.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// How images are read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageOptions {
    /// Height and width of every sample: images are scaled to cover it, and the middle is cut out. Without it, all must
    /// be as large as the first.
    pub size: Option<(usize, usize)>,
    /// One channel instead of three.
    pub grey: bool,
    /// How much memory decoded images may take.
    pub cache_bytes: usize,
}

impl Default for ImageOptions {
    fn default() -> ImageOptions {
        ImageOptions { size: None, grey: false, cache_bytes: 1 << 30 }
    }
}

/// Images with labels.
#[derive(Debug)]
pub struct Images {
    spec: Spec,
    how: How,
    files: Vec<PathBuf>,
    labels: Vec<u32>,
    /// Decoded images; one lock each, taken by whoever decodes it and never again.
    cache: Vec<OnceLock<Box<[u8]>>>,
    cache_left: AtomicUsize,
}

impl Images {
    /// Opens the folder of a set. Only names are read, and the first image where `size` is to be found.
    pub fn open(folder: &Path, options: &ImageOptions) -> Result<Images, DataError> {
        let channels = if options.grey { 1 } else { 3 };
        let listing = folder::list(folder)?;
        let (size, scale) = match options.size {
            Some((height, width)) => (checked(height, width)?, true),
            None => {
                let mut scratch = Scratch::default();
                read(&listing.files[0], &mut scratch.file)?;
                (decoded(&listing.files[0], &scratch.file, options.grey, &mut scratch.bytes)?, false)
            }
        };
        let features =
            Features::Image { channels, height: size.height, width: size.width, layout: Layout::Interleaved };
        let target = Target::Class { classes: listing.classes.len(), names: listing.classes };
        let cache = listing.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Images {
            spec: Spec { features, target },
            how: How { size, scale, channels },
            files: listing.files,
            labels: listing.labels,
            cache,
            cache_left: AtomicUsize::new(options.cache_bytes),
        })
    }

    /// The same with the classes of another set, by name, so that a test set has those of its training set. It need not
    /// have samples of all.
    pub fn with_classes(mut self, names: &[String]) -> Result<Images, DataError> {
        let Target::Class { names: own, .. } = &self.spec.target else {
            unreachable!("images have classes");
        };
        let mut class_of = Vec::with_capacity(own.len());
        for (class, name) in own.iter().enumerate() {
            let Some(found) = names.iter().position(|n| n == name) else {
                let first = self.labels.iter().position(|&l| l as usize == class).unwrap_or(0);
                let why = format!("class {name:?} is not among the {} of the training set", names.len());
                return Err(DataError::corrupt(&self.files[first], 0, why));
            };
            class_of.push(found as u32);
        }
        self.labels.iter_mut().for_each(|l| *l = class_of[*l as usize]);
        self.spec.target = Target::Class { classes: names.len(), names: names.to_vec() };
        Ok(self)
    }

    /// The file of a sample.
    pub fn path(&self, idx: usize) -> &Path {
        &self.files[idx]
    }

    /// Keeps a copy if there is room.
    fn keep(&self, idx: usize, pixels: &[u8]) {
        let take = |left: usize| left.checked_sub(pixels.len());
        // Only the sum counts, no order: relaxed.
        if self.cache_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            return;
        }
        if self.cache[idx].set(pixels.into()).is_err() {
            // Another thread decoded the same image meanwhile.
            self.cache_left.fetch_add(pixels.len(), Ordering::Relaxed);
        }
    }
}

impl Dataset for Images {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let label = Label::Class(self.labels[idx] as usize);
        let pixels = match self.cache[idx].get() {
            Some(kept) => kept,
            None => {
                let pixels = self.how.sample(&self.files[idx], scratch)?;
                self.keep(idx, pixels);
                pixels
            }
        };
        Ok(Fetched { values: Values::U8(pixels), label })
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some(self.labels[idx] as usize))
    }
}

/// Decodes one file into what a model of `features` takes, in their layout: scaled to cover the size, the middle cut out,
/// in one channel or three.
pub fn decode_file(path: &Path, features: &Features) -> Result<Vec<u8>, DataError> {
    let Features::Image { channels: channels @ (1 | 3), height, width, layout } = *features else {
        return Err(DataError::Setting {
            why: "an image file has one channel or three; this model takes others".into(),
        });
    };
    let how = How { size: checked(height, width)?, scale: true, channels };
    let mut scratch = Scratch::default();
    let pixels = how.sample(path, &mut scratch)?;
    Ok(match layout {
        Layout::Interleaved => pixels.to_vec(),
        Layout::Planes => {
            (0..channels).flat_map(|c| pixels.iter().skip(c).step_by(channels).copied()).collect()
        }
    })
}

/// How a file becomes a sample.
#[derive(Clone, Copy, Debug)]
struct How {
    size: Size,
    /// Whether other sizes are scaled to it.
    scale: bool,
    channels: usize,
}

impl How {
    fn sample<'a>(&self, path: &Path, scratch: &'a mut Scratch) -> Result<&'a [u8], DataError> {
        let (to, channels) = (self.size, self.channels);
        read(path, &mut scratch.file)?;
        let from = decoded(path, &scratch.file, channels == 1, &mut scratch.bytes)?;
        if from == to {
            return Ok(&scratch.bytes[..to.pixels() * channels]);
        }
        if !self.scale {
            let why = format!(
                "{} x {} pixels, but the first image has {} x {}; set `size` to bring all to one size",
                from.height, from.width, to.height, to.width
            );
            return Err(DataError::corrupt(path, 0, why));
        }
        // The result goes behind the source.
        let (source_len, len) = (from.pixels() * channels, to.pixels() * channels);
        if scratch.bytes.len() < source_len + len {
            scratch.bytes.resize(source_len + len, 0);
        }
        let (source, rest) = scratch.bytes.split_at_mut(source_len);
        resize::cover(source, from, &mut rest[..len], to, channels, &mut scratch.numbers);
        Ok(&rest[..len])
    }
}

fn checked(height: usize, width: usize) -> Result<Size, DataError> {
    if height == 0 || width == 0 || height > SIDE_MAX || width > SIDE_MAX {
        let why = format!("size is {height} x {width}; sides are 1 to {SIDE_MAX} pixels");
        return Err(DataError::Setting { why });
    }
    Ok(Size { height, width })
}

/// The whole file into `content`.
fn read(path: &Path, content: &mut Vec<u8>) -> Result<(), DataError> {
    let fail = |e: io::Error| DataError::io(path, e);
    // Asked before opening, because opening a pipe waits for whoever writes into it.
    let found = fs::metadata(path).map_err(fail)?;
    if !found.is_file() {
        return Err(fail(io::Error::other("not a file; give a PNG or JPEG file")));
    }
    if found.len() > FILE_BYTES_MAX {
        return Err(DataError::corrupt(path, FILE_BYTES_MAX, "too long for an image"));
    }
    content.clear();
    File::open(path).map_err(fail)?.take(FILE_BYTES_MAX).read_to_end(content).map_err(fail)?;
    Ok(())
}

fn decoded(path: &Path, file: &[u8], grey: bool, pixels: &mut Vec<u8>) -> Result<Size, DataError> {
    decode::decode(file, grey, pixels).map_err(|flaw| DataError::Corrupt {
        path: path.into(),
        offset: flaw.offset,
        why: flaw.why,
    })
}
#[cfg(test)]
mod tests;
