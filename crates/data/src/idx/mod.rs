//! IDX, the format of MNIST and Fashion-MNIST: a file of images and a file of labels, gzipped or raw. Only unsigned
//! bytes are read: the other element types of the format are not used by any set of images we know of.
//!
//! A file is: two zero bytes, the element type (8: unsigned byte), the rank, the dims as big-endian u32, the elements.
//! Images are `[n, height, width]` or `[n, channels, height, width]`, labels `[n]`.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::map::{self, Bytes};
use crate::spec::{Features, Layout, Spec, Target};

/// The element type of unsigned bytes.
const UNSIGNED_BYTE: u8 = 8;
/// Deflate packs at most this many bytes into one, so a header that promises more is wrong.
const DEFLATE_RATIO_MAX: usize = 1032;

/// An IDX set: images with labels.
#[derive(Debug)]
pub struct Idx {
    spec: Spec,
    images: Content,
    labels: Content,
}

/// Where the files of a set are, as pairs of images and labels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdxFiles {
    /// The training set.
    pub train: (PathBuf, PathBuf),
    /// The test set, if there is one.
    pub test: Option<(PathBuf, PathBuf)>,
}

impl Idx {
    /// Opens a pair of files. The number of classes follows from the largest label; see [`Idx::with_classes`].
    pub fn open(images: &Path, labels: &Path) -> Result<Idx, DataError> {
        let labels = Content::open(labels, &[1])?;
        let images = Content::open(images, &[3, 4])?;
        if images.dims[0] != labels.dims[0] {
            let why = format!(
                "{} labels, but {} has {} images; take the two files from the same set",
                labels.dims[0],
                images.path.display(),
                images.dims[0]
            );
            return Err(DataError::corrupt(&labels.path, 4, why));
        }
        let (channels, height, width) = match images.dims[1..] {
            [height, width] => (1, height, width),
            [channels, height, width] => (channels, height, width),
            _ => unreachable!("images have rank 3 or 4"),
        };
        let classes = labels.elements().iter().max().map_or(0, |&l| l as usize + 1);
        let features = Features::Image { channels, height, width, layout: Layout::Planes };
        let target = Target::Class { classes, names: Vec::new() };
        Ok(Idx { spec: Spec { features, target }, images, labels })
    }

    /// The same with `classes` classes, so that a test set has as many as its training set.
    pub fn with_classes(mut self, classes: usize) -> Result<Idx, DataError> {
        if let Some(i) = self.labels.elements().iter().position(|&l| l as usize >= classes) {
            let label = self.labels.elements()[i];
            return Err(self
                .labels
                .corrupt(i, format!("label {label} of sample {i}, but there are {classes} classes")));
        }
        self.spec.target = Target::Class { classes, names: Vec::new() };
        Ok(self)
    }
}

impl Dataset for Idx {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.images.dims[0]
    }

    fn fetch<'a>(&'a self, idx: usize, _scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let numel = self.spec.features.numel();
        let values = Values::U8(&self.images.elements()[idx * numel..][..numel]);
        Ok(Fetched { values, label: Label::Class(self.labels.elements()[idx] as usize) })
    }

    fn intact(&self) -> Result<(), DataError> {
        self.images.bytes.intact().and_then(|()| self.labels.bytes.intact())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some(self.labels.elements()[idx] as usize))
    }
}

/// Finds the files of a set in `folder` by their usual names: `train-images-idx3-ubyte` and its variants (with `.` for `-`,
/// ending in `.idx`, gzipped or not), `train-labels-..`, and `t10k-..` or `test-..`. Raw files are preferred to gzipped ones.
pub fn find(folder: &Path) -> Result<IdxFiles, DataError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| DataError::io(folder, e))? {
        let entry = entry.map_err(|e| DataError::io(folder, e))?;
        names.extend(entry.file_name().into_string().ok());
    }
    names.sort();
    let file = |part: &str, what: &str| {
        let of_part = |name: &&String, packed: bool| {
            let plain = name.to_ascii_lowercase().replace(['.', '_'], "-");
            let (plain, gz) = plain.strip_suffix("-gz").map_or((plain.as_str(), false), |p| (p, true));
            let ending = plain.strip_prefix(part).and_then(|p| p.strip_prefix(what));
            gz == packed && ending.is_some_and(is_ending)
        };
        let found =
            names.iter().find(|n| of_part(n, false)).or_else(|| names.iter().find(|n| of_part(n, true)));
        found.map(|name| folder.join(name))
    };
    let pair = |part: &str| match (file(part, "-images"), file(part, "-labels")) {
        (Some(images), Some(labels)) => Ok(Some((images, labels))),
        (None, None) => Ok(None),
        (images, _) => {
            let (there, absent) =
                if images.is_some() { ("images", "labels-idx1") } else { ("labels", "images-idx3") };
            let path = folder.join(format!("{part}-{absent}-ubyte"));
            Err(DataError::Missing { path, hint: format!("the {there} exist; put both files in the folder") })
        }
    };
    let train = pair("train")?.ok_or_else(|| DataError::Missing {
        path: folder.join("train-images-idx3-ubyte"),
        hint: "give a folder with the IDX files of a set, or name the files".into(),
    })?;
    let test = match pair("t10k")? {
        Some(test) => Some(test),
        None => pair("test")?,
    };
    Ok(IdxFiles { train, test })
}

/// What may follow `train-images`, in lower case and with dashes as separators.
fn is_ending(ending: &str) -> bool {
    let ending = ending.strip_suffix("-idx").unwrap_or(ending);
    matches!(
        ending,
        "" | "-ubyte" | "-idx1" | "-idx1-ubyte" | "-idx3" | "-idx3-ubyte" | "-idx4" | "-idx4-ubyte"
    )
}

/// The content of one file, checked to be whole.
#[derive(Debug)]
struct Content {
    path: PathBuf,
    /// The bytes, header included.
    bytes: Bytes,
    packed: bool,
    dims: Vec<usize>,
}

impl Content {
    fn open(path: &Path, ranks: &[u8]) -> Result<Content, DataError> {
        let bytes = map::open(path)?;
        let packed = bytes.starts_with(&[0x1f, 0x8b]);
        let mut content = Content { path: path.into(), bytes, packed, dims: Vec::new() };
        if packed {
            content.unpack(ranks)?;
        } else {
            let (dims, total) = content.header(&content.bytes, ranks)?;
            content.dims = dims;
            let len = content.bytes.len();
            if len < total {
                return Err(content.at(len, format!("the file ends here; its header promises {total} bytes")));
            }
            if len > total {
                return Err(content.at(total, format!("{} bytes after the last element", len - total)));
            }
        }
        Ok(content)
    }

    /// Replaces packed bytes by their content: the header first, then exactly what it promises.
    fn unpack(&mut self, ranks: &[u8]) -> Result<(), DataError> {
        let file: &[u8] = &self.bytes;
        let mut decoder = MultiGzDecoder::new(file);
        let mut header = vec![0; 4];
        self.read(&mut decoder, &mut header)?;
        let rank = self.rank(&header, ranks)?;
        header.resize(4 + 4 * rank, 0);
        self.read(&mut decoder, &mut header[4..])?;
        let (dims, total) = self.header(&header, ranks)?;
        if total > file.len().saturating_mul(DEFLATE_RATIO_MAX) {
            let why =
                format!("the header promises {total} bytes, more than {} packed bytes can hold", file.len());
            return Err(self.at(4, why));
        }
        let read = header.len();
        if header.try_reserve_exact(total - read).is_err() {
            let why = format!("no memory for {total} unpacked bytes; unpack the file, which is then mapped");
            return Err(self.at(4, why));
        }
        header.resize(total, 0);
        self.read(&mut decoder, &mut header[read..])?;
        // The end of the stream also proves the checksum.
        let mut beyond = [0];
        match decoder.read(&mut beyond) {
            Ok(0) => {}
            Ok(_) => return Err(self.at(total, "more bytes after the last element".into())),
            Err(e) => return Err(self.unpacking(&decoder, &e)),
        }
        self.dims = dims;
        self.bytes = Bytes::Owned(header);
        Ok(())
    }

    fn read(&self, decoder: &mut MultiGzDecoder<&[u8]>, into: &mut [u8]) -> Result<(), DataError> {
        decoder.read_exact(into).map_err(|e| self.unpacking(decoder, &e))
    }

    fn unpacking(&self, decoder: &MultiGzDecoder<&[u8]>, error: &std::io::Error) -> DataError {
        let offset = self.bytes.len() - decoder.get_ref().len();
        DataError::corrupt(&self.path, offset as u64, format!("cannot unpack: {error}; fetch the file again"))
    }

    /// The rank that the first four bytes state.
    fn rank(&self, header: &[u8], ranks: &[u8]) -> Result<usize, DataError> {
        let Some(&[a, b, kind, rank]) = header.get(..4) else {
            return Err(self.at(header.len(), "the file ends here, inside the magic number".into()));
        };
        if (a, b) != (0, 0) {
            return Err(
                self.at(0, format!("not an IDX file: it starts with bytes {a:#04x} {b:#04x}, not two zeros"))
            );
        }
        if kind != UNSIGNED_BYTE {
            return Err(self.at(2, format!("element type {kind:#04x}; only unsigned bytes (0x08) are read")));
        }
        if !ranks.contains(&rank) {
            let (is, want) = if ranks.contains(&1) { ("labels", "1") } else { ("images", "3 or 4") };
            return Err(
                self.at(3, format!("rank {rank}, but {is} have rank {want}; are the two files swapped?"))
            );
        }
        Ok(rank as usize)
    }

    /// The dims, and how long the whole content is.
    fn header(&self, header: &[u8], ranks: &[u8]) -> Result<(Vec<usize>, usize), DataError> {
        let rank = self.rank(header, ranks)?;
        let Some(dims) = header.get(4..4 + 4 * rank) else {
            return Err(self.at(header.len(), "the file ends here, inside the dims".into()));
        };
        let dim = |d: &[u8]| u32::from_be_bytes([d[0], d[1], d[2], d[3]]) as usize;
        let dims: Vec<usize> = dims.chunks_exact(4).map(dim).collect();
        if let Some(zero) = dims.iter().position(|&d| d == 0) {
            return Err(self.at(4 + 4 * zero, format!("dims {dims:?} are empty")));
        }
        let numel = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let total = numel.and_then(|n| n.checked_add(4 + 4 * rank));
        let total = total.ok_or_else(|| self.at(4, format!("dims {dims:?} exceed the address space")))?;
        Ok((dims, total))
    }

    fn elements(&self) -> &[u8] {
        &self.bytes[4 + 4 * self.dims.len()..]
    }

    /// An error at an offset of the content, which is not the offset in the file if it is packed.
    fn at(&self, offset: usize, mut why: String) -> DataError {
        if self.packed {
            why.push_str(" (the offset counts unpacked bytes)");
        }
        DataError::corrupt(&self.path, offset as u64, why)
    }

    fn corrupt(&self, element: usize, why: String) -> DataError {
        self.at(4 + 4 * self.dims.len() + element, why)
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
