//! Safetensors files, streamed: numbers go from an arena to the file and back in parts, without a second copy.
//!
//! The header is the `safetensors` crate's; its functions for whole files want all bytes in memory at once.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use polyreme_dtype::{DType, Stored, bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::blocks::{BlockBuffer, BlockFile};
use super::{CheckpointError, Disk};
use crate::weights::{Integers, View, Weight, WeightsFile};

/// The longest header that readers of the format accept.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// What is read at once.
const PART_BYTES: usize = 256 * 1024;

/// The last part of the name of a batch norm's mean, and of the counter that PyTorch keeps beside it.
const MEAN: &str = "running_mean";
pub(crate) const COUNTER: &str = "num_batches_tracked";

/// A file to be written: its first bytes, made and checked, and where its numbers go.
pub(crate) struct Layout {
    /// The header and the counters.
    head: Vec<u8>,
    /// In the file's order.
    tensors: Vec<Place>,
    n_tensors: u64,
}

/// Where a tensor goes.
struct Place {
    /// Which one it is, of those that the layout was made of.
    tensor: usize,
    dtype: DType,
    /// Its bytes in the file.
    bytes: Range<u64>,
}

/// Where the numbers of a file come from.
pub(crate) trait TensorSource {
    /// Reads numbers of a tensor, in parts, in their order.
    fn read(
        &self,
        tensor: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(&[f32]),
    ) -> Result<(), CheckpointError>;
}

impl TensorSource for [View<'_>] {
    fn read(
        &self,
        tensor: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(&[f32]),
    ) -> Result<(), CheckpointError> {
        read(&self[tensor].data[range]);
        Ok(())
    }
}

/// The header as JSON. The crate keeps texts in an order that is another in each process, and the same run is to write the same file.
fn header_of(about: &BTreeMap<String, String>, tensors: &Metadata) -> serde_json::Result<Vec<u8>> {
    let (about, tensors) = (serde_json::to_vec(about)?, serde_json::to_vec(tensors)?);
    let begin: &[u8] = if tensors == b"{}" { b"" } else { b"," };
    Ok([b"{\"__metadata__\":", about.as_slice(), begin, &tensors[1..]].concat())
}

impl Layout {
    /// The layout of tensors, by name, dims and what their numbers are rounded to: those of larger numbers first, as the
    /// format wants it so that all are aligned, else in their order. With `counter`, each batch norm gets the counter of
    /// steps that PyTorch expects beside its mean. `about` is said in the header. `file` is for errors.
    pub(crate) fn new<'a>(
        tensors: impl Iterator<Item = (&'a str, &'a [usize], DType)> + Clone,
        counter: Option<u64>,
        about: &[(String, String)],
        file: &str,
    ) -> Result<Layout, CheckpointError> {
        let wrong = |why: String| CheckpointError::Snapshot { file: file.into(), why };
        let mut infos: Vec<(String, TensorInfo)> = Vec::new();
        let mut end: usize = 0;
        // Counters come first: eight-byte numbers then lie at multiples of eight.
        let layers = tensors.clone().filter_map(|(name, ..)| match name.rsplit_once('.') {
            Some((layer, MEAN)) => Some(format!("{layer}.{COUNTER}")),
            None if name == MEAN => Some(COUNTER.to_string()),
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
        let mut ordered: Vec<_> = tensors.enumerate().collect();
        ordered.sort_by_key(|(_, (_, _, dtype))| std::cmp::Reverse(dtype.bytes()));
        for &(_, (name, dims, dtype)) in &ordered {
            let Some(stored) = float(dtype) else {
                return Err(wrong(format!("tensor {name}: weights cannot be written as {dtype}")));
            };
            let n_bytes = dims.iter().try_fold(dtype.bytes(), |n, dim| n.checked_mul(*dim));
            let start = end;
            let Some(next) = n_bytes.and_then(|n| start.checked_add(n)) else {
                return Err(wrong(format!(
                    "tensor {name}: more numbers than there can be, by dims {dims:?}"
                )));
            };
            end = next;
            let info = TensorInfo { dtype: stored, shape: dims.to_vec(), data_offsets: (start, end) };
            infos.push((name.to_string(), info));
        }
        let mut names = BTreeSet::new();
        for (name, _) in &infos {
            if !names.insert(name.as_str()) || name == "__metadata__" {
                return Err(wrong(format!("tensor {name}: the name is taken")));
            }
        }
        let ranges: Vec<_> = infos[n_counters..].iter().map(|(_, info)| info.data_offsets).collect();
        let n_tensors = infos.len();
        let format = ("format".to_string(), "pt".to_string());
        let about: BTreeMap<_, _> = about.iter().cloned().chain([format]).collect();
        let tensors = Metadata::new(None, infos).map_err(|e| wrong(e.to_string()))?;
        let mut header = header_of(&about, &tensors).map_err(|e| wrong(e.to_string()))?;
        header.resize(header.len().next_multiple_of(8), b' ');
        if header.len() as u64 > HEADER_BYTES_MAX {
            return Err(wrong(format!("{n_tensors} tensors are too many for one file")));
        }
        let counter: i64 = counter.unwrap_or(0).try_into().unwrap_or(i64::MAX);
        let mut head = (header.len() as u64).to_le_bytes().to_vec();
        head.append(&mut header);
        let first = head.len() as u64;
        head.extend((0..n_counters).flat_map(|_| counter.to_le_bytes()));
        let place = |((tensor, (_, _, dtype)), (start, end)): ((usize, (_, _, DType)), (usize, usize))| {
            Place { tensor, dtype, bytes: first + start as u64..first + end as u64 }
        };
        let tensors = ordered.into_iter().zip(ranges).map(place).collect();
        Ok(Layout { head, tensors, n_tensors: n_tensors as u64 })
    }

    /// The length of the file.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.tensors.last().map_or(self.head.len() as u64, |last| last.bytes.end)
    }

    /// How many tensors the file has.
    pub(crate) fn n_tensors(&self) -> u64 {
        self.n_tensors
    }

    /// The tensors that lie in a range of the file, and which of their numbers do.
    pub(super) fn numbers_in(&self, range: Range<u64>) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.places_in(range).map(|(place, numbers)| (place.tensor, numbers))
    }

    fn places_in(&self, range: Range<u64>) -> impl Iterator<Item = (&Place, Range<usize>)> {
        let first = self.tensors.partition_point(|place| place.bytes.end <= range.start);
        let places = self.tensors[first..].iter();
        places.take_while(move |place| place.bytes.start < range.end).map(move |place| {
            let Range { start, end } = place.bytes;
            let within = start.max(range.start)..end.min(range.end);
            // Tensors begin at multiples of a number's length, and so do blocks: no number is cut.
            let at = |byte: u64| (byte - start) as usize / place.dtype.bytes();
            (place, at(within.start)..at(within.end))
        })
    }

    /// Puts together what the file holds from the byte `start` on.
    pub(super) fn fill(
        &self,
        numbers: &(impl TensorSource + ?Sized),
        start: u64,
        block: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let head = self.head.get(start as usize..).unwrap_or(&[]);
        let n_head = head.len().min(block.len());
        let (of_head, mut rest) = block.split_at_mut(n_head);
        of_head.copy_from_slice(&head[..n_head]);
        let first = start + n_head as u64;
        for (place, range) in self.places_in(first..first + rest.len() as u64) {
            numbers.read(place.tensor, range, &mut |numbers| {
                let n_bytes = numbers.len() * place.dtype.bytes();
                let (to, after) = std::mem::take(&mut rest).split_at_mut(n_bytes);
                store(place.dtype, numbers, to);
                rest = after;
            })?;
        }
        debug_assert!(rest.is_empty(), "a file has no gaps");
        Ok(())
    }

    /// Writes a file in its order. Gives its checksum.
    pub(crate) fn write(
        &self,
        disk: &Disk,
        path: &Path,
        numbers: &(impl TensorSource + ?Sized),
    ) -> Result<blake3::Hash, CheckpointError> {
        let mut file = BlockFile::create(disk, path, self.n_bytes())?;
        let mut buffer = BlockBuffer::new();
        for number in 0..file.n_blocks() {
            file.put(number, &mut buffer, |start, block| self.fill(numbers, start, block))?;
        }
        file.finish()
    }
}

/// A tensor of a file.
pub(super) struct Head {
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    dtype: Stored,
    n_bytes: usize,
}

/// The tensors of a safetensors file of `n_bytes` bytes, in the order of their numbers, which come next. `path` is for
/// errors.
pub(super) fn read_heads(
    reader: &mut impl Read,
    n_bytes: u64,
    path: &Path,
) -> Result<Vec<Head>, CheckpointError> {
    Ok(read_header(reader, n_bytes, path)?.0)
}

/// The same, and what the header says beside them.
fn read_header(
    reader: &mut impl Read,
    n_bytes: u64,
    path: &Path,
) -> Result<(Vec<Head>, BTreeMap<String, String>), CheckpointError> {
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
    let head = |name: String| {
        let info = metadata.info(&name)?;
        let (first, end) = info.data_offsets;
        let dtype = Stored::parse(&info.dtype.to_string()).ok_or_else(|| {
            let why =
                format!("tensor {name} has type {}; only F64, F32, F16 and BF16 can be read", info.dtype);
            corrupt(start + first as u64, why)
        });
        Some(dtype.map(|dtype| Head { name, dims: info.shape.clone(), dtype, n_bytes: end - first }))
    };
    let heads = metadata.offset_keys().into_iter().filter_map(head).collect::<Result<_, _>>()?;
    let about = metadata.metadata().iter().flatten().map(|(key, text)| (key.clone(), text.clone()));
    Ok((heads, about.collect()))
}

impl Head {
    /// Whether it has numbers of a floating type; integers and booleans are counters and masks, never weights.
    pub(super) fn is_float(&self) -> bool {
        self.dtype.is_float()
    }

    /// Reads its numbers, which come next, and gives them as f32 in parts. Of another type nothing is given.
    pub(super) fn read(
        &self,
        reader: &mut impl Read,
        path: &Path,
        put: &mut dyn FnMut(&[f32]),
    ) -> Result<Option<i64>, CheckpointError> {
        let mut bytes = vec![0; self.n_bytes.min(PART_BYTES)];
        let mut numbers =
            Vec::with_capacity(if self.is_float() { bytes.len() / self.dtype.bytes() } else { 0 });
        let mut n_left = self.n_bytes;
        while n_left > 0 {
            // A part is a multiple of every element's size, so that none is cut.
            let part = &mut bytes[..n_left.min(PART_BYTES)];
            fill(reader, part, path)?;
            numbers.clear();
            convert(self.dtype, part, &mut numbers);
            put(&numbers);
            n_left -= part.len();
        }
        let alone = self.dtype == Stored::Element(DType::I64) && self.n_bytes == self.dtype.bytes();
        Ok(bytes.first_chunk().filter(|_| alone).map(|bytes| i64::from_le_bytes(*bytes)))
    }
}

/// Reads all tensors of numbers in a safetensors file of `n_bytes` bytes, as f32, in the file's order, and what is known of
/// the others. `path` is for errors.
pub(crate) fn read_all(
    reader: &mut impl Read,
    n_bytes: u64,
    path: &Path,
) -> Result<WeightsFile, CheckpointError> {
    let (mut weights, mut integers) = (Vec::new(), Vec::new());
    let (heads, about) = read_header(reader, n_bytes, path)?;
    for head in heads {
        let mut data: Vec<f32> = Vec::new();
        if head.is_float() {
            // The file's length bounds this, but a file may be larger than memory.
            let reserved = data.try_reserve_exact(head.n_bytes / head.dtype.bytes());
            reserved.map_err(|_| CheckpointError::Io {
                path: path.into(),
                source: io::ErrorKind::OutOfMemory.into(),
            })?;
        }
        let value = head.read(reader, path, &mut |part| data.extend_from_slice(part))?;
        match head.dtype {
            Stored::Element(dtype) if dtype.is_float() => {
                weights.push(Weight { name: head.name, dims: head.dims, dtype, data })
            }
            _ => integers.push(Integers { name: head.name, dtype: head.dtype, value }),
        }
    }
    Ok(WeightsFile { weights, integers, about })
}

fn fill(reader: &mut impl Read, bytes: &mut [u8], path: &Path) -> Result<(), CheckpointError> {
    reader.read_exact(bytes).map_err(|source| CheckpointError::Io { path: path.into(), source })
}

/// What the format calls a floating type.
fn float(dtype: DType) -> Option<Dtype> {
    match dtype {
        DType::F64 => Some(Dtype::F64),
        DType::F32 => Some(Dtype::F32),
        DType::F16 => Some(Dtype::F16),
        DType::Bf16 => Some(Dtype::BF16),
        DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => None,
    }
}

/// Writes numbers in a floating type, rounded to the nearest, ties to even.
fn store(dtype: DType, numbers: &[f32], to: &mut [u8]) {
    fn each<const N: usize>(numbers: &[f32], to: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
        to.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(to, x)| *to = bytes(*x));
    }
    match dtype {
        DType::F64 => each(numbers, to, |x| f64::from(x).to_le_bytes()),
        DType::F32 => each(numbers, to, f32::to_le_bytes),
        DType::F16 => each(numbers, to, |x| f16::from_f32(x).to_le_bytes()),
        DType::Bf16 => each(numbers, to, |x| bf16::from_f32(x).to_le_bytes()),
        DType::I32 | DType::I64 | DType::U8 | DType::I8 | DType::Bool => {
            unreachable!("a layout has floating types only")
        }
    }
}

/// Rounds numbers to those that a file has of them.
pub(crate) fn round(dtype: DType, numbers: &mut [f32]) {
    let mut bytes = vec![0; PART_BYTES];
    let mut rounded = Vec::with_capacity(PART_BYTES / dtype.bytes());
    for part in numbers.chunks_mut(PART_BYTES / dtype.bytes()) {
        let bytes = &mut bytes[..part.len() * dtype.bytes()];
        store(dtype, part, bytes);
        rounded.clear();
        convert(Stored::Element(dtype), bytes, &mut rounded);
        part.copy_from_slice(&rounded);
    }
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
