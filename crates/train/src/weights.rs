//! Files of weights: PyTorch's safetensors read, and ours written so that PyTorch reads them.
//!
//! Names and layouts are PyTorch's on both sides, so that nothing is translated here.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

use crate::checkpoint::tensors::{self, Layout};
use crate::checkpoint::{CheckpointError, Difference, Disk, Shape, above};

/// A tensor from a file.
#[derive(Clone, PartialEq, Debug)]
pub struct Weight {
    /// Its name.
    pub name: String,
    /// Its dims.
    pub dims: Vec<usize>,
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
    /// Its numbers: as many as the dims say.
    pub data: &'a [f32],
}

impl Weight {
    /// The tensor, to be written.
    pub fn view(&self) -> View<'_> {
        View { name: &self.name, dims: &self.dims, data: &self.data }
    }
}

/// Reads a safetensors file. Numbers of any floating type become f32; integers, such as the counters of batch norms,
/// are passed over.
pub fn read_weights(path: &Path) -> Result<Vec<Weight>, CheckpointError> {
    let reading = |e| CheckpointError::reading(path, e);
    // Asked by path, before opening: a pipe would wait for a writer.
    if !fs::metadata(path).map_err(reading)?.is_file() {
        return Err(CheckpointError::missing(path, "this is no file; give a .safetensors file"));
    }
    let mut file = File::open(path).map_err(reading)?;
    let n_bytes = file.metadata().map_err(reading)?.len();
    tensors::read(&mut file, n_bytes, path)
}

/// The weights of `file` in the order of `model`. Both must have the same names and dims; if not, the error says what
/// is missing, unknown or of another shape. `path` is for the error.
pub fn match_weights(
    model: &[Shape],
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

pub(crate) fn write_weights_on(
    disk: &Disk,
    path: &Path,
    tensors: &[View<'_>],
    batch_norm_steps: Option<u64>,
) -> Result<(), CheckpointError> {
    let Some(name) = path.file_name() else {
        return Err(CheckpointError::missing(path, "give the path of a file"));
    };
    let name = name.to_string_lossy();
    let folder = above(path);
    let layout = Layout::new(tensors, batch_norm_steps, &name)?;
    let aside = folder.join(format!(".writing-{name}-{}", std::process::id()));
    let write = || -> Result<(), CheckpointError> {
        let mut sink = disk.create(&aside)?;
        layout.write(&mut sink)?;
        sink.finish()?;
        disk.rename(&aside, path)?;
        disk.sync_dir(folder)
    };
    write().map_err(|error| {
        let _ = disk.remove(&aside);
        error.with_room(layout.n_bytes(), disk.counted(), None)
    })
}
