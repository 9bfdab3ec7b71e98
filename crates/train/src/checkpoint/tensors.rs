//! Safetensors files, streamed: numbers go from an arena to the file and back in pieces, without a second copy.
//!
//! The header is the `safetensors` crate's; its functions for whole files want all bytes in memory at once.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Read};
use std::path::Path;

use polyreme_dtype::{DType, Stored, bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::CheckpointError;
use super::disk::Sink;
use crate::weights::{Integers, View, Weight, WeightsFile};

/// The longest header that readers of the format accept.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The reader's piece.
const PIECE_BYTES: usize = 256 * 1024;

/// The last part of the name of a batch norm's mean, and of the counter that PyTorch keeps beside it.
const MEAN: &str = "running_mean";
pub(crate) const COUNTER: &str = "num_batches_tracked";

/// A file to be written: its header, made and checked, and its numbers, still where they are.
pub(crate) struct Layout<'a> {
    header: Vec<u8>,
    n_counters: usize,
    counter: i64,
    views: &'a [View<'a>],
    data_bytes: usize,
}

impl<'a> Layout<'a> {
    /// The layout of `views` in their order. With `counter`, each batch norm gets the counter of steps that PyTorch
    /// expects beside its mean. `file` is for errors.
    pub(crate) fn new(
        views: &'a [View<'a>],
        counter: Option<u64>,
        file: &str,
    ) -> Result<Layout<'a>, CheckpointError> {
        let wrong = |why: String| CheckpointError::Snapshot { file: file.into(), why };
        let mut infos: Vec<(String, TensorInfo)> = Vec::with_capacity(views.len());
        let mut end: usize = 0;
        // Counters come first: eight-byte numbers then lie at multiples of eight.
        let layers = views.iter().filter_map(|view| match view.name.rsplit_once('.') {
            Some((layer, MEAN)) => Some(format!("{layer}.{COUNTER}")),
            None if view.name == MEAN => Some(COUNTER.to_string()),
            _ => None,
        });
        for name in layers.filter(|_| counter.is_some()) {
            infos.push((
                name,
                TensorInfo { dtype: Dtype::I64, shape: Vec::new(), data_offsets: (end, end + 8) },
            ));
            end += 8;
        }
        let n_counters = infos.len();
        for View { name, dims, data } in views {
            let n = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
            if n != Some(data.len()) {
                return Err(wrong(format!("tensor {name}: {} numbers for dims {dims:?}", data.len())));
            }
            let start = end;
            end += size_of_val(*data);
            let info = TensorInfo { dtype: Dtype::F32, shape: dims.to_vec(), data_offsets: (start, end) };
            infos.push((name.to_string(), info));
        }
        let mut names = BTreeSet::new();
        for (name, _) in &infos {
            if !names.insert(name.as_str()) || name == "__metadata__" {
                return Err(wrong(format!("tensor {name}: the name is taken")));
            }
        }
        let about = HashMap::from([("format".to_string(), "pt".to_string())]);
        let metadata = Metadata::new(Some(about), infos).map_err(|e| wrong(e.to_string()))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|e| wrong(e.to_string()))?;
        header.resize(header.len().next_multiple_of(8), b' ');
        if header.len() as u64 > HEADER_BYTES_MAX {
            return Err(wrong(format!("{} tensors are too many for one file", views.len())));
        }
        let counter = counter.unwrap_or(0).try_into().unwrap_or(i64::MAX);
        Ok(Layout { header, n_counters, counter, views, data_bytes: end })
    }

    /// The length of the file.
    pub(crate) fn n_bytes(&self) -> u64 {
        8 + self.header.len() as u64 + self.data_bytes as u64
    }

    /// How many tensors the file has.
    pub(crate) fn n_tensors(&self) -> u64 {
        (self.n_counters + self.views.len()) as u64
    }

    /// Writes everything.
    pub(crate) fn write(&self, sink: &mut Sink<'_>) -> Result<(), CheckpointError> {
        sink.bytes(&(self.header.len() as u64).to_le_bytes())?;
        sink.bytes(&self.header)?;
        for _ in 0..self.n_counters {
            sink.bytes(&self.counter.to_le_bytes())?;
        }
        self.views.iter().try_for_each(|view| sink.numbers(view.data))
    }
}

/// Reads all tensors of numbers in a safetensors file of `n_bytes` bytes, as f32, in the file's order. Integers and
/// booleans are passed over: counters and masks, never weights. `path` is for errors.
pub(crate) fn read(
    reader: &mut impl Read,
    n_bytes: u64,
    path: &Path,
) -> Result<Vec<Weight>, CheckpointError> {
    Ok(read_all(reader, n_bytes, path)?.weights)
}

/// The same, and what is known of those that are passed over.
pub(crate) fn read_all(
    reader: &mut impl Read,
    n_bytes: u64,
    path: &Path,
) -> Result<WeightsFile, CheckpointError> {
    let corrupt = |offset: u64, why: String| CheckpointError::corrupt(path, offset, why);
    if n_bytes < 8 {
        return Err(corrupt(n_bytes, "too short for a safetensors file".into()));
    }
    let mut length = [0; 8];
    fill(reader, &mut length, path)?;
    let n_header = u64::from_le_bytes(length);
    if n_header > HEADER_BYTES_MAX || n_header > n_bytes - 8 {
        return Err(corrupt(0, format!("not a safetensors file, or cut off: a header of {n_header} bytes")));
    }
    let mut header = vec![0; n_header as usize];
    fill(reader, &mut header, path)?;
    // Whoever can be read as `Metadata` has been checked: no gaps, no overlaps, and dims that fit the bytes.
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|e| corrupt(8, format!("the header is damaged: {e}")))?;
    drop(header);
    let start = 8 + n_header;
    if (metadata.data_len() as u64).checked_add(start) != Some(n_bytes) {
        let want = (metadata.data_len() as u64).saturating_add(start);
        return Err(corrupt(n_bytes, format!("{n_bytes} bytes long where the header says {want}; cut off?")));
    }
    let (mut weights, mut integers) = (Vec::new(), Vec::new());
    let mut piece = vec![0; PIECE_BYTES];
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let n_left = info.data_offsets.1 - info.data_offsets.0;
        let mut data = Vec::new();
        let dtype = Stored::parse(&info.dtype.to_string()).ok_or_else(|| {
            let why =
                format!("tensor {name} has type {}; only F64, F32, F16 and BF16 can be read", info.dtype);
            corrupt(start + info.data_offsets.0 as u64, why)
        })?;
        if dtype.is_float() {
            // The file's length bounds this, but a file may be larger than memory.
            let reserved = data.try_reserve_exact(n_left / dtype.bytes());
            reserved.map_err(|_| CheckpointError::Io {
                path: path.into(),
                source: io::ErrorKind::OutOfMemory.into(),
            })?;
        }
        let mut n_left = n_left;
        while n_left > 0 {
            // The piece is a multiple of every element's size, so that none is cut.
            let n = n_left.min(PIECE_BYTES);
            fill(reader, &mut piece[..n], path)?;
            convert(dtype, &piece[..n], &mut data);
            n_left -= n;
        }
        if dtype.is_float() {
            weights.push(Weight { name, dims: info.shape.clone(), data });
            continue;
        }
        let alone = dtype == Stored::Element(DType::I64)
            && info.data_offsets.1 - info.data_offsets.0 == dtype.bytes();
        let value = piece.first_chunk().filter(|_| alone).map(|bytes| i64::from_le_bytes(*bytes));
        integers.push(Integers { name, dtype, value });
    }
    Ok(WeightsFile { weights, integers })
}

fn fill(reader: &mut impl Read, bytes: &mut [u8], path: &Path) -> Result<(), CheckpointError> {
    reader.read_exact(bytes).map_err(|source| CheckpointError::Io { path: path.into(), source })
}

/// Appends the numbers of a floating type as f32; nothing of another type.
fn convert(dtype: Stored, bytes: &[u8], to: &mut Vec<f32>) {
    let Stored::Element(dtype) = dtype else { return };
    match dtype {
        DType::F64 => to.extend(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b) as f32)),
        DType::F32 => to.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        DType::F16 => to.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        DType::Bf16 => to.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => {}
    }
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_is_what_its_bits_mean() {
        for bits in 0..=u16::MAX {
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
            let size = match exponent {
                0 => fraction / 1024.0 * 2f64.powi(-14),
                31 if fraction == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
            };
            let mut got = Vec::new();
            convert(Stored::Element(DType::F16), &bits.to_le_bytes(), &mut got);
            let [got] = got[..] else { panic!("one number") };
            assert_eq!(got.is_sign_negative(), bits >> 15 == 1, "{bits:x}");
            assert!(f64::from(got.abs()) == size || got.is_nan() && size.is_nan(), "{bits:x}: {got}");
        }
    }
}
