//! Images: a folder per class with PNG and JPEG files in it, as torchvision's `ImageFolder` reads it, or files that a table names beside
//! their labels (`listed`). Files are
//! decoded when a sample is fetched, and decoded images are cached up to a limit, so that later epochs read
//! memory.
//!
//! `decode` documents how pixels are converted (transparency is dropped), `resize` how sizes are matched. The common kind
//! of JPEG goes through `jpeg`, which is faster; what that rejects goes through `decode`.

mod decode;
mod folder;
mod jpeg;
mod kept;
mod listed;
mod resize;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use polyreme_kernels::Isa;

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::spec::{Features, Layout, Spec, Target};
use crate::table::Table;
use decode::SIDE_MAX;
pub(crate) use decode::{Flaw, starts_as_image};
pub use folder::{FoundImages, find};
pub(crate) use kept::KeptImages;
pub use listed::listed;
pub(crate) use resize::ImageSize;
use resize::{CoverCrop, Pixels, ResizePart};

/// The largest file that is read: the largest image, unpacked, is smaller.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Options for reading images.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageOptions {
    /// Height and width of every sample: images are scaled to cover it, and cropped to the middle. Without it, all must
    /// be as large as the first.
    pub size: Option<(usize, usize)>,
    /// Whether images have one channel instead of three.
    pub grey: bool,
    /// How much memory decoded images may take.
    pub cache_bytes: usize,
    /// The CPU features for decoding and scaling; pixels are the same with any.
    pub isa: Isa,
}

impl Default for ImageOptions {
    fn default() -> ImageOptions {
        ImageOptions { size: None, grey: false, cache_bytes: 1 << 30, isa: Isa::detect() }
    }
}

/// Images with labels.
#[derive(Debug)]
pub struct Images {
    spec: Spec,
    how: SampleFormat,
    files: Vec<PathBuf>,
    labels: ImageLabels,
    kept: KeptImages,
}

/// What the labels of images are.
#[derive(Debug)]
enum ImageLabels {
    /// The class of each: the folder that it is in.
    Folders(Vec<u32>),
    /// Those of a table with a row for each.
    Table(Box<Table>),
}

impl Images {
    /// Opens the folder of a set. Only names are read, and the first image where `size` is to be found.
    pub fn open(folder: &Path, options: &ImageOptions) -> Result<Images, DataError> {
        let listing = folder::list(folder)?;
        let target = Target::Class { classes: listing.classes.len(), names: listing.classes };
        Images::of(listing.files, ImageLabels::Folders(listing.labels), target, options)
    }

    /// Opens the images in `folder` that a table names. All must be there.
    pub fn open_listed(folder: &Path, table: Table, options: &ImageOptions) -> Result<Images, DataError> {
        let files = listed(folder, &table)?;
        let target = table.spec().target.clone();
        Images::of(files, ImageLabels::Table(Box::new(table)), target, options)
    }

    fn of(
        files: Vec<PathBuf>,
        labels: ImageLabels,
        target: Target,
        options: &ImageOptions,
    ) -> Result<Images, DataError> {
        let first = || {
            let mut content = Vec::new();
            read(&files[0], &mut content)?;
            size_of(&content, options).map_err(|flaw| flaw.of(&files[0]))
        };
        let how = SampleFormat::new(options, first)?;
        Ok(Images {
            spec: Spec { features: how.features(), target },
            how,
            kept: KeptImages::new(files.len(), options.cache_bytes),
            files,
            labels,
        })
    }

    /// The same with the classes of another set, by name, so that a test set has those of its training set. It need not
    /// have samples of all.
    pub fn with_classes(mut self, names: &[String]) -> Result<Images, DataError> {
        let (Target::Class { names: own, .. }, ImageLabels::Folders(labels)) =
            (&self.spec.target, &mut self.labels)
        else {
            let why = "labels of a table have the classes that it was opened with".into();
            return Err(DataError::Setting { why });
        };
        let mut class_of = Vec::with_capacity(own.len());
        for (class, name) in own.iter().enumerate() {
            let Some(found) = names.iter().position(|n| n == name) else {
                let first = labels.iter().position(|&l| l as usize == class).unwrap_or(0);
                let why = format!("class {name:?} is not among the {} of the training set", names.len());
                return Err(DataError::corrupt(&self.files[first], 0, why));
            };
            class_of.push(found as u32);
        }
        labels.iter_mut().for_each(|l| *l = class_of[*l as usize]);
        self.spec.target = Target::Class { classes: names.len(), names: names.to_vec() };
        Ok(self)
    }

    /// The file of a sample.
    pub fn path(&self, idx: usize) -> &Path {
        &self.files[idx]
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
        let label = match &self.labels {
            ImageLabels::Folders(labels) => Label::Class(labels[idx] as usize),
            ImageLabels::Table(table) => table.label(idx),
        };
        let pixels = match self.kept.get(idx) {
            Some(kept) => kept,
            None => {
                let pixels = self.how.sample(&self.files[idx], scratch)?;
                self.kept.keep(idx, pixels);
                pixels
            }
        };
        Ok(Fetched { values: Values::U8(pixels), label })
    }

    fn intact(&self) -> Result<(), DataError> {
        Ok(())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        match &self.labels {
            ImageLabels::Folders(labels) => Ok(Some(labels[idx] as usize)),
            ImageLabels::Table(table) => table.class(idx),
        }
    }
}

/// Decodes one file into what a model of `features` takes, in their layout: scaled to cover the size, cropped to the middle,
/// in one channel or three.
pub fn decode_file(path: &Path, features: &Features, isa: Isa) -> Result<Vec<u8>, DataError> {
    let Features::Image { channels: channels @ (1 | 3), height, width, layout } = *features else {
        return Err(DataError::Setting {
            why: "an image file has one channel or three; this model takes others".into(),
        });
    };
    let how = SampleFormat { size: checked(height, width)?, scale: true, channels, isa };
    let mut scratch = Scratch::default();
    let pixels = how.sample(path, &mut scratch)?;
    Ok(match layout {
        Layout::Interleaved => pixels.to_vec(),
        Layout::Planes => {
            (0..channels).flat_map(|c| pixels.iter().skip(c).step_by(channels).copied()).collect()
        }
    })
}

/// Settings by which a file becomes a sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleFormat {
    size: ImageSize,
    /// Whether other sizes are scaled to it.
    scale: bool,
    channels: usize,
    isa: Isa,
}

/// A thread's buffers for decoding and scaling images, which it reuses.
#[derive(Default, Debug)]
pub(crate) struct ImageBuffers {
    jpeg: jpeg::Decoder,
    /// The scaling of the last image: mostly all have the same size.
    cut: Option<CoverCrop>,
    levels: Vec<i16>,
}

/// The size of an image, which is decoded for it: where a decoder would fail, this does.
pub(crate) fn size_of(content: &[u8], options: &ImageOptions) -> Result<ImageSize, Flaw> {
    let mut jpeg = jpeg::Decoder::default();
    jpeg.isa = options.isa;
    decode::decode(content, options.grey, &mut Vec::new(), &mut jpeg)
}

impl SampleFormat {
    /// As the options say; without a size in them, that of the first image.
    pub(crate) fn new(
        options: &ImageOptions,
        first: impl FnOnce() -> Result<ImageSize, DataError>,
    ) -> Result<SampleFormat, DataError> {
        let (size, scale) = match options.size {
            Some((height, width)) => (checked(height, width)?, true),
            None => (first()?, false),
        };
        Ok(SampleFormat { size, scale, channels: if options.grey { 1 } else { 3 }, isa: options.isa })
    }

    /// What a sample of this format is to a model.
    pub(crate) fn features(&self) -> Features {
        let ImageSize { height, width } = self.size;
        Features::Image { channels: self.channels, height, width, layout: Layout::Interleaved }
    }

    fn sample<'a>(&self, path: &Path, scratch: &'a mut Scratch) -> Result<&'a [u8], DataError> {
        let Scratch { file, bytes, numbers, images, .. } = scratch;
        read(path, file)?;
        self.decode(file, bytes, numbers, images).map_err(|flaw| flaw.of(path))
    }

    /// The pixels of a file with this content.
    pub(crate) fn decode<'a>(
        &self,
        file: &[u8],
        bytes: &'a mut Vec<u8>,
        numbers: &mut Vec<f32>,
        buffers: &mut ImageBuffers,
    ) -> Result<&'a [u8], Flaw> {
        let ImageBuffers { jpeg, cut, levels } = buffers;
        let (to, channels) = (self.size, self.channels);
        let len = to.pixels() * channels;
        jpeg.isa = self.isa;
        if let Some(mut rows) = jpeg.decode(file, channels == 1, |from| self.part(from, cut)) {
            self.check(rows.size())?;
            decode::grow(bytes, len);
            match cut {
                Some(cut) if rows.size() != to => {
                    cut.write(self.isa, &mut rows, &mut bytes[..len], channels, numbers, levels)
                }
                _ => rows.write(&mut bytes[..len]),
            }
            return Ok(&bytes[..len]);
        }
        let from = decode::decode_any(file, channels == 1, bytes)?;
        self.check(from)?;
        if from == to {
            return Ok(&bytes[..len]);
        }
        let cut = CoverCrop::again(cut, from, to);
        // The result goes after the source.
        let source_len = from.pixels() * channels;
        decode::grow(bytes, source_len + len);
        let (source, rest) = bytes.split_at_mut(source_len);
        let (stride, first) = (from.width * channels, cut.part().columns.start * channels);
        let source = &mut Pixels { bytes: source, stride, first };
        cut.write(self.isa, source, &mut rest[..len], channels, numbers, levels);
        Ok(&rest[..len])
    }

    /// Which part of an image is needed; prepares the scaling for it.
    fn part(&self, from: ImageSize, cut: &mut Option<CoverCrop>) -> ResizePart {
        if from == self.size || !self.scale {
            return ResizePart::whole(from);
        }
        CoverCrop::again(cut, from, self.size).part().clone()
    }

    fn check(&self, from: ImageSize) -> Result<(), Flaw> {
        let to = self.size;
        if self.scale || from == to {
            return Ok(());
        }
        let why = format!(
            "{} x {} pixels, but the first image has {} x {}; set `size` to bring all to one size",
            from.height, from.width, to.height, to.width
        );
        Err(Flaw::new(0, why))
    }
}

fn checked(height: usize, width: usize) -> Result<ImageSize, DataError> {
    if height == 0 || width == 0 || height > SIDE_MAX || width > SIDE_MAX {
        let why = format!("size is {height} x {width}; sides are 1 to {SIDE_MAX} pixels");
        return Err(DataError::Setting { why });
    }
    Ok(ImageSize { height, width })
}

/// The whole file into `content`.
fn read(path: &Path, content: &mut Vec<u8>) -> Result<(), DataError> {
    let fail = |e: io::Error| DataError::io(path, e);
    // Checked before opening, because opening a pipe waits for a writer.
    let found = fs::metadata(path).map_err(fail)?;
    if !found.is_file() {
        return Err(fail(io::Error::other("not a file; give a PNG or JPEG file")));
    }
    if found.len() > FILE_BYTES_MAX {
        return Err(DataError::corrupt(path, FILE_BYTES_MAX, "too long for an image"));
    }
    // The memory of the last file is reused without clearing: what is too long is truncated afterwards.
    let len = found.len() as usize;
    decode::grow(content, len);
    let mut file = File::open(path).map_err(fail)?;
    let mut at = 0;
    while at < len {
        match file.read(&mut content[at..len]) {
            Ok(0) => break,
            Ok(n) => at += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(fail(e)),
        }
    }
    content.truncate(at);
    Ok(())
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod listed_tests;
#[cfg(test)]
mod tests;
