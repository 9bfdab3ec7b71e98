//! Files of weights: PyTorch's safetensors read, and ours written so that PyTorch reads them.
//!
//! Names and layouts are PyTorch's on both sides, so that nothing is translated here.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use polyreme_dtype::{DType, Stored};

use crate::checkpoint::tensors::{self, Layout, TensorSource};
use crate::checkpoint::{CheckpointError, Difference, Disk, TensorShape, above};

/// A tensor from a file.
#[derive(Clone, PartialEq, Debug)]
pub struct Weight {
    /// Its name.
    pub name: String,
    /// Its dims.
    pub dims: Vec<usize>,
    /// What the file has its numbers in, one of the floating types.
    pub dtype: DType,
    /// Its numbers.
    pub data: Vec<f32>,
}

/// A tensor to be written, where it lies.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct View<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dims.
    pub dims: &'a [usize],
    /// What the file will have its numbers in, one of the floating types: rounded to the nearest, ties to even.
    pub dtype: DType,
    /// Its numbers: as many as the dims say.
    pub data: &'a [f32],
}

impl Weight {
    /// The tensor, to be written.
    pub fn view(&self) -> View<'_> {
        View { name: &self.name, dims: &self.dims, dtype: self.dtype, data: &self.data }
    }
}

/// What a file of weights holds.
#[derive(Clone, PartialEq, Debug)]
pub struct WeightsFile {
    /// Tensors of floating types, as f32.
    pub weights: Vec<Weight>,
    /// Tensors of integers and booleans.
    pub integers: Vec<Integers>,
    /// What its header says beside them.
    pub about: BTreeMap<String, String>,
}

/// A tensor of integers: a counter or a mask, never weights.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Integers {
    /// Its name.
    pub name: String,
    /// Its type, as the format calls it.
    pub dtype: Stored,
    /// Its only element, if it is one of 64 bits.
    pub value: Option<i64>,
}

impl WeightsFile {
    /// Reads a safetensors file.
    pub fn read(path: &Path) -> Result<WeightsFile, CheckpointError> {
        let reading = |e| CheckpointError::reading(path, e);
        // Asked by path, before opening: a pipe would wait for a writer.
        if !fs::metadata(path).map_err(reading)?.is_file() {
            return Err(CheckpointError::missing(path, "this is no file; give a .safetensors file"));
        }
        let mut file = File::open(path).map_err(reading)?;
        let n_bytes = file.metadata().map_err(reading)?.len();
        tensors::read_all(&mut file, n_bytes, path).map_err(|error| match is_pickled(path) {
            true => CheckpointError::Weights { path: path.into(), why: how_to_convert(path) },
            false => error,
        })
    }

    /// An error if one of the tensors that are `wanted` is of integers, or has numbers that are not finite.
    pub fn check<'a>(
        &self,
        wanted: impl IntoIterator<Item = &'a str>,
        path: &Path,
    ) -> Result<(), CheckpointError> {
        let wrong = |why: String| Err(CheckpointError::Weights { path: path.into(), why });
        let wanted: HashSet<&str> = wanted.into_iter().collect();
        if let Some(tensor) = self.integers.iter().find(|t| wanted.contains(t.name.as_str())) {
            return wrong(format!(
                "tensor {} has elements of type {}, and weights are of a floating type; convert it, in PyTorch with \
                 `.float()`, and save the file again",
                tensor.name, tensor.dtype
            ));
        }
        for Weight { name, data, .. } in self.weights.iter().filter(|w| wanted.contains(w.name.as_str())) {
            if let Some(first) = data.iter().position(|x| !x.is_finite()) {
                let n = data.iter().filter(|x| !x.is_finite()).count();
                return wrong(format!(
                    "tensor {name}: {n} of {} numbers are not finite, the first is {} (element {first}); the file is \
                     damaged, or the training that wrote it had failed: take weights from before that",
                    data.len(),
                    data[first]
                ));
            }
        }
        Ok(())
    }

    /// How many batches the batch norms have seen: the most that one of them has counted.
    pub fn batches_tracked(&self) -> u64 {
        let counters = self.integers.iter().filter(|t| t.name.rsplit('.').next() == Some(tensors::COUNTER));
        counters.filter_map(|t| u64::try_from(t.value?).ok()).max().unwrap_or(0)
    }
}

/// Reads a safetensors file. Numbers of any floating type become f32; integers, such as the counters of batch norms,
/// are passed over.
pub fn read_weights(path: &Path) -> Result<Vec<Weight>, CheckpointError> {
    Ok(WeightsFile::read(path)?.weights)
}

/// Whether a file is one of `torch.save`: a zip archive, or a pickle by itself as earlier versions wrote.
fn is_pickled(path: &Path) -> bool {
    let mut start = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && (start == *b"PK\x03\x04" || start[0] == 0x80 && (2..=5).contains(&start[1]))
}

/// What to do with such a file.
fn how_to_convert(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    format!(
        "this is a file of `torch.save`, a format that can carry code and is not read; convert it once, in Python (`pip \
         install torch safetensors`), and give the .safetensors file:\n\
         \x20   import torch, safetensors.torch\n\
         \x20   state = torch.load({file:?}, map_location=\"cpu\", weights_only=True)\n\
         \x20   safetensors.torch.save_file({{k: v.clone().contiguous() for k, v in state.items()}}, \"{stem}.safetensors\")"
    )
}

/// The weights of `file` in the order of `model`. Both must have the same names and dims; if not, the error says what
/// is missing, unknown or of another shape. `path` is for the error.
pub fn match_weights(
    model: &[TensorShape],
    file: Vec<Weight>,
    path: &Path,
) -> Result<Vec<Weight>, CheckpointError> {
    let shapes = file.iter().map(|w| (w.name.as_str(), w.dims.as_slice()));
    if let Some(difference) = Difference::between(model, shapes) {
        return Err(CheckpointError::OtherModel { path: path.into(), difference: Box::new(difference) });
    }
    let mut by_name: HashMap<String, Weight> = file.into_iter().map(|w| (w.name.clone(), w)).collect();
    let ordered = model.iter().map(|t| by_name.remove(&t.name).expect("names were compared just now"));
    Ok(ordered.collect())
}

/// Writes a safetensors file: whole, or the old one stays. With `batch_norm_steps`, each `X.running_mean` gets the
/// counter `X.num_batches_tracked` beside it, which PyTorch's strict `load_state_dict` wants.
pub fn write_weights(
    path: &Path,
    tensors: &[View<'_>],
    batch_norm_steps: Option<u64>,
) -> Result<(), CheckpointError> {
    write_weights_on(&Disk::default(), path, tensors, batch_norm_steps)
}

/// Writes a safetensors file as [`write_weights`] does, of tensors by name, dims and type whose numbers come from anywhere, with
/// texts about it in its header.
pub(crate) fn write_tensors<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a str, &'a [usize], DType)> + Clone,
    batch_norm_steps: Option<u64>,
    about: &[(String, String)],
    numbers: &(impl TensorSource + ?Sized),
) -> Result<(), CheckpointError> {
    write_tensors_on(&Disk::default(), path, tensors, batch_norm_steps, about, numbers)
}

pub(crate) fn write_weights_on(
    disk: &Disk,
    path: &Path,
    tensors: &[View<'_>],
    batch_norm_steps: Option<u64>,
) -> Result<(), CheckpointError> {
    for View { name: tensor, dims, data, .. } in tensors {
        if dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim)) != Some(data.len()) {
            let why = format!("tensor {tensor}: {} numbers for dims {dims:?}", data.len());
            let file = path.file_name().unwrap_or_default().to_string_lossy().into();
            return Err(CheckpointError::Snapshot { file, why });
        }
    }
    let heads = tensors.iter().map(|t| (t.name, t.dims, t.dtype));
    write_tensors_on(disk, path, heads, batch_norm_steps, &[], tensors)
}

fn write_tensors_on<'a>(
    disk: &Disk,
    path: &Path,
    tensors: impl Iterator<Item = (&'a str, &'a [usize], DType)> + Clone,
    batch_norm_steps: Option<u64>,
    about: &[(String, String)],
    numbers: &(impl TensorSource + ?Sized),
) -> Result<(), CheckpointError> {
    let Some(name) = path.file_name() else {
        return Err(CheckpointError::missing(path, "give the path of a file"));
    };
    let name = name.to_string_lossy();
    let folder = above(path);
    let layout = Layout::new(tensors, batch_norm_steps, about, &name)?;
    let aside = folder.join(format!(".writing-{name}-{}", std::process::id()));
    let write = || -> Result<(), CheckpointError> {
        layout.write(disk, &aside, numbers)?;
        disk.rename(&aside, path)?;
        disk.sync_dir(folder)
    };
    write().map_err(|error| {
        let _ = disk.remove(&aside);
        error.with_room(layout.n_bytes(), disk.counted(), None)
    })
}
