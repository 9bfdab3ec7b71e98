//! Arrays in a safetensors file: one array of features and one of labels, with samples along the first dim. The file is mapped,
//! so a set may be larger than memory.
//!
//! | features | are |
//! |---|---|
//! | `[n, width]` f32, f64 | rows |
//! | `[n, height, width]`, `[n, channels, height, width]` u8, f32, f64 | images, in planes |
//! | `[n, time]` integers | ids |
//!
//! | labels | are |
//! |---|---|
//! | `[n]` integers | classes |
//! | `[n]`, `[n, k]` f32, f64, integers | a number, or several |
//! | `[n]`, `[n, k]` zeros and ones of any of these types, or bool | labels, each for itself |

mod file;

use std::path::Path;

use polyreme_dtype::{DType, Stored};

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::map;
use crate::spec::{Features, LabelKind, Layout, Spec, Target};
use file::{Array, ArrayFile};

/// A set of arrays with labels.
#[derive(Debug)]
pub struct Arrays {
    spec: Spec,
    file: ArrayFile,
    x: Array,
    labels: Array,
    n: usize,
}

impl Arrays {
    /// Opens the arrays named `x` and `labels` of the file at `path`. Ids and labels are read once to be checked and
    /// counted; see [`Arrays::with_classes`] and [`Arrays::with_vocab`].
    pub fn open(path: &Path, x: &str, labels: &str) -> Result<Arrays, DataError> {
        Arrays::open_as(path, x, labels, LabelKind::Classes)
    }

    /// The same, where labels are read as `kind`.
    pub fn open_as(path: &Path, x: &str, labels: &str, kind: LabelKind) -> Result<Arrays, DataError> {
        let file = ArrayFile::open(path)?;
        let (x, labels) = (file.array(x)?, file.array(labels)?);
        let has_rows = !labels.shape.contains(&0);
        let target = match (kind, &labels.shape[..]) {
            (LabelKind::Classes, [_]) if has_rows && labels.dtype.is_integer() => {
                Target::Class { classes: file.count(&labels, "label")?, names: Vec::new() }
            }
            (LabelKind::Classes, [_]) if has_rows && labels.is_float() => return Err(file.no_class(&labels)),
            (LabelKind::Classes, _) => {
                let why = "labels are integers, one per sample: [n] with n at least 1; for several numbers set \
                           `train.loss = \"mse\"`, for several labels of 0 or 1 `train.loss = \"bce\"`";
                return Err(file.error(&labels, 0, why));
            }
            (LabelKind::Numbers, [_] | [_, _]) if has_rows && labels.is_number() => {
                file.check_numbers(&labels, "is not a finite number of 32 bits", f32::is_finite)?;
                Target::Numbers { n: labels.row(), names: Vec::new() }
            }
            (LabelKind::Labels, [_] | [_, _]) if has_rows && labels.is_number() => {
                file.check_numbers(&labels, "is not 0 or 1", |v| v == 0.0 || v == 1.0)?;
                Target::Labels { n: labels.row(), names: Vec::new() }
            }
            (LabelKind::Numbers | LabelKind::Labels, _) => {
                let why =
                    "labels are numbers, one or several per sample: [n] or [n, k] of f32, f64 or integers";
                return Err(file.error(&labels, 0, why));
            }
        };
        let n = labels.shape[0];
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
        Ok(Arrays { spec: Spec { features, target }, file, x, labels, n })
    }

    /// The same with `classes` classes, so that a test set has as many as its training set.
    pub fn with_classes(mut self, classes: usize) -> Result<Arrays, DataError> {
        if self.spec.target.is_values() {
            return Err(DataError::Setting { why: "these labels are numbers, not classes".into() });
        }
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
        let label = match self.spec.target.is_values() {
            false => Label::Class(self.label(idx)),
            true => {
                let n = self.spec.n_labels();
                let bytes = self.file.bytes(&self.labels, idx * n..(idx + 1) * n);
                Label::Values(match self.labels.dtype {
                    Stored::Element(DType::F32) => map::in_place(bytes, &mut scratch.targets),
                    _ => {
                        let each = bytes.chunks_exact(self.labels.dtype.bytes());
                        scratch.targets.clear();
                        scratch.targets.extend(each.map(|b| self.labels.number(b)));
                        &scratch.targets
                    }
                })
            }
        };
        Ok(Fetched { values, label })
    }

    fn intact(&self) -> Result<(), DataError> {
        self.file.intact()
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok((!self.spec.target.is_values()).then(|| self.label(idx)))
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
