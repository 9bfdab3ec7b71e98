//! Arrays in a safetensors file: one array of features and one of labels, with samples along the first dim. The file is mapped,
//! so a set may be larger than memory.
//!
//! | features | are |
//! |---|---|
//! | `[n, width]` f32, f64 | rows |
//! | `[n, height, width]`, `[n, channels, height, width]` u8, f32, f64 | images, in planes |
//! | `[n, time]` integers | ids |

mod file;

use std::path::Path;

use polyreme_dtype::{DType, Stored};

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::map;
use crate::spec::{Features, Layout, Spec, Target};
use file::{Array, File};

/// A set of arrays with labels.
#[derive(Debug)]
pub struct Arrays {
    spec: Spec,
    file: File,
    x: Array,
    labels: Array,
    n: usize,
}

impl Arrays {
    /// Opens the arrays named `x` and `labels` of the file at `path`. Ids and labels are read once to be checked and
    /// counted; see [`Arrays::with_classes`] and [`Arrays::with_vocab`].
    pub fn open(path: &Path, x: &str, labels: &str) -> Result<Arrays, DataError> {
        let file = File::open(path)?;
        let (x, labels) = (file.array(x)?, file.array(labels)?);
        let n = match labels.shape[..] {
            [n] if n > 0 && labels.dtype.is_integer() => n,
            _ => {
                return Err(file.error(
                    &labels,
                    0,
                    "labels are integers, one a sample: [n] with n at least 1",
                ));
            }
        };
        if x.shape.first() != Some(&n) {
            return Err(file.error(
                &x,
                0,
                &format!("the first dim counts samples, and there are {n} labels"),
            ));
        }
        let image =
            |channels, height, width| Features::Image { channels, height, width, layout: Layout::Planes };
        let features = match x.shape[1..] {
            [width] if x.is_float() => Features::Row { width },
            [time] if x.dtype.is_integer() => Features::Ids { time, vocab: file.count(&x, "id")? },
            [height, width] if x.is_image_type() => image(1, height, width),
            [channels, height, width] if x.is_image_type() => image(channels, height, width),
            _ => {
                let why = "features are rows [n, width] of f32 or f64, images [n, height, width] or [n, channels, \
                           height, width] of u8, f32 or f64, or ids [n, time] of integers";
                return Err(file.error(&x, 0, why));
            }
        };
        if features.numel() == 0 {
            return Err(file.error(&x, 0, "samples are empty"));
        }
        let target = Target::Class { classes: file.count(&labels, "label")?, names: Vec::new() };
        Ok(Arrays { spec: Spec { features, target }, file, x, labels, n })
    }

    /// The same with `classes` classes, so that a test set has as many as its training set.
    pub fn with_classes(mut self, classes: usize) -> Result<Arrays, DataError> {
        self.file.check(&self.labels, "label", classes, "classes")?;
        self.spec.target = Target::Class { classes, names: Vec::new() };
        Ok(self)
    }

    /// The same with ids below `vocab`, so that a test set has as many as its training set; only for ids.
    pub fn with_vocab(mut self, vocab: usize) -> Result<Arrays, DataError> {
        let Features::Ids { time, .. } = self.spec.features else {
            return Err(DataError::Setting {
                why: "only ids have a vocabulary; these features are numbers".into(),
            });
        };
        self.file.check(&self.x, "id", vocab, "ids")?;
        self.spec.features = Features::Ids { time, vocab };
        Ok(self)
    }

    fn label(&self, idx: usize) -> usize {
        // Checked at opening not to be negative; a file that changed since then may give a class that does not exist.
        self.labels.integer(self.file.bytes(&self.labels, idx..idx + 1)) as usize
    }
}

impl Dataset for Arrays {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.n
    }

    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let numel = self.spec.features.numel();
        let bytes = self.file.bytes(&self.x, idx * numel..(idx + 1) * numel);
        let values = match self.x.dtype {
            Stored::Element(DType::U8) => Values::U8(bytes),
            Stored::Element(DType::F32) => Values::F32(map::in_place(bytes, &mut scratch.numbers)),
            Stored::Element(DType::I32) => Values::I32(map::in_place(bytes, &mut scratch.ids)),
            Stored::Element(DType::F64) => {
                scratch.numbers.clear();
                let number = |b: &[u8]| f64::from_le_bytes(b.try_into().expect("cut to eight bytes")) as f32;
                scratch.numbers.extend(bytes.chunks_exact(8).map(number));
                Values::F32(&scratch.numbers)
            }
            _ => {
                scratch.ids.clear();
                scratch
                    .ids
                    .extend(bytes.chunks_exact(self.x.dtype.bytes()).map(|b| self.x.integer(b) as i32));
                Values::I32(&scratch.ids)
            }
        };
        Ok(Fetched { values, label: Label::Class(self.label(idx)) })
    }

    fn intact(&self) -> Result<(), DataError> {
        self.file.intact()
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some(self.label(idx)))
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
