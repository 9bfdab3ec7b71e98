//! A safetensors file in memory and the arrays in it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use polyreme_dtype::{DType, Stored};
use safetensors::{SafeTensorError, SafeTensors};

use crate::error::DataError;
use crate::map::{self, Bytes};

/// The bytes of the header's length, which comes first.
const LENGTH_BYTES: usize = 8;

#[derive(Debug)]
pub(super) struct ArrayFile {
    path: PathBuf,
    bytes: Bytes,
    arrays: safetensors::tensor::Metadata,
    /// The offset at which the arrays' bytes start.
    data: usize,
}

/// The location of an array and its element type and shape.
#[derive(Debug)]
pub(super) struct Array {
    name: String,
    pub(super) dtype: Stored,
    pub(super) shape: Vec<usize>,
    start: usize,
}

impl ArrayFile {
    pub(super) fn open(path: &Path) -> Result<ArrayFile, DataError> {
        let bytes = map::open(path)?;
        let (header, arrays) = SafeTensors::read_metadata(&bytes).map_err(|e| broken(path, &bytes, &e))?;
        Ok(ArrayFile { path: path.into(), bytes, arrays, data: LENGTH_BYTES + header })
    }

    pub(super) fn array(&self, name: &str) -> Result<Array, DataError> {
        let Some(info) = self.arrays.info(name) else {
            let mut names = self.arrays.offset_keys();
            names.truncate(20);
            let why = format!("no array {name:?}; the file has {}", names.join(", "));
            return Err(DataError::corrupt(&self.path, LENGTH_BYTES as u64, why));
        };
        let start = self.data + info.data_offsets.0;
        let Some(dtype) = Stored::parse(&info.dtype.to_string()) else {
            let why = format!(
                "array {name:?} has elements of type {}, which cannot be read; save it as F32, U8 or I32",
                info.dtype
            );
            return Err(DataError::corrupt(&self.path, start as u64, why));
        };
        Ok(Array { name: name.into(), dtype, shape: info.shape.clone(), start })
    }

    /// The bytes of some elements.
    pub(super) fn bytes(&self, array: &Array, elements: Range<usize>) -> &[u8] {
        let size = array.dtype.bytes();
        &self.bytes[array.start + elements.start * size..array.start + elements.end * size]
    }

    pub(super) fn intact(&self) -> Result<(), DataError> {
        self.bytes.intact()
    }

    /// One more than the largest element; elements must not be negative or exceed the largest id.
    pub(super) fn count(&self, array: &Array, what: &str) -> Result<usize, DataError> {
        self.check(array, what, i32::MAX as usize, "at most")
    }

    /// Checks that all elements are below `limit`; returns one more than the largest.
    pub(super) fn check(
        &self,
        array: &Array,
        what: &str,
        limit: usize,
        of: &str,
    ) -> Result<usize, DataError> {
        let n = array.shape.iter().product();
        let mut max = -1;
        for (i, element) in self.bytes(array, 0..n).chunks_exact(array.dtype.bytes()).enumerate() {
            let value = array.integer(element);
            if value < 0 || value as u64 >= limit as u64 {
                return Err(self.error(array, i, &format!("{what} {value}, but there are {limit} {of}")));
            }
            max = max.max(value);
        }
        Ok((max + 1) as usize)
    }

    /// Checks all elements of an array as numbers; `what` is said of one that does not fit.
    pub(super) fn check_numbers(
        &self,
        array: &Array,
        what: &str,
        fits: impl Fn(f32) -> bool,
    ) -> Result<(), DataError> {
        let n = array.shape.iter().product();
        for (i, element) in self.bytes(array, 0..n).chunks_exact(array.dtype.bytes()).enumerate() {
            let value = array.number(element);
            if !fits(value) {
                return Err(self.error(array, i, &format!("label {value} {what}")));
            }
        }
        Ok(())
    }

    /// The error of classes that are given as floats: at the first that is no class.
    pub(super) fn no_class(&self, array: &Array) -> DataError {
        let n = array.shape.iter().product();
        let values = self.bytes(array, 0..n).chunks_exact(array.dtype.bytes()).map(|b| array.number(b));
        let found = values.enumerate().find(|(_, v)| v.fract() != 0.0 || *v < 0.0);
        let (at, why) = match found {
            Some((at, value)) => (at, format!("label {value} is not a class")),
            None => (0, "labels of a floating-point type are not classes; save them as integers".into()),
        };
        self.error(array, at, &format!("{why}; for a numeric target set `train.loss = \"mse\"`"))
    }

    /// An error at an element.
    pub(super) fn error(&self, array: &Array, element: usize, why: &str) -> DataError {
        let offset = array.start + element * array.dtype.bytes();
        let why =
            format!("array {:?} {} {:?}, element {element}: {why}", array.name, array.dtype, array.shape);
        DataError::corrupt(&self.path, offset as u64, why)
    }
}

impl Array {
    pub(super) fn is_float(&self) -> bool {
        matches!(self.dtype, Stored::Element(DType::F32 | DType::F64))
    }

    /// Whether [`Array::number`] reads it.
    pub(super) fn is_number(&self) -> bool {
        self.is_float() || self.dtype.is_integer() || self.dtype == Stored::Element(DType::Bool)
    }

    /// Elements of one sample.
    pub(super) fn row(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// An element of an array of numbers.
    pub(super) fn number(&self, b: &[u8]) -> f32 {
        match (self.dtype, b) {
            (Stored::Element(DType::F32), &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Stored::Element(DType::F64), &[a, b, c, d, e, f, g, h]) => {
                f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32
            }
            (Stored::Element(DType::Bool), &[a]) => f32::from(u8::from(a != 0)),
            _ => self.integer(b) as f32,
        }
    }

    pub(super) fn is_image_type(&self) -> bool {
        self.is_float() || self.dtype == Stored::Element(DType::U8)
    }

    /// An element of an array of integers; those beyond i64 become negative, and so are rejected.
    pub(super) fn integer(&self, b: &[u8]) -> i64 {
        match (self.dtype, b) {
            (Stored::Element(DType::U8), &[a]) => a.into(),
            (Stored::Element(DType::I8), &[a]) => (a as i8).into(),
            (Stored::U16, &[a, b]) => u16::from_le_bytes([a, b]).into(),
            (Stored::I16, &[a, b]) => i16::from_le_bytes([a, b]).into(),
            (Stored::U32, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]).into(),
            (Stored::Element(DType::I32), &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]).into(),
            (Stored::Element(DType::I64) | Stored::U64, &[a, b, c, d, e, f, g, h]) => {
                i64::from_le_bytes([a, b, c, d, e, f, g, h])
            }
            (dtype, _) => unreachable!("{dtype} elements of {} bytes are not integers", b.len()),
        }
    }
}

fn broken(path: &Path, bytes: &[u8], error: &SafeTensorError) -> DataError {
    let offset = match error {
        SafeTensorError::HeaderTooSmall | SafeTensorError::MetadataIncompleteBuffer => bytes.len(),
        SafeTensorError::HeaderTooLarge => 0,
        SafeTensorError::InvalidHeaderLength => bytes.len(),
        // Every writer makes a header of one line, so the error's column is its offset.
        SafeTensorError::InvalidHeaderDeserialization(json) if json.line() == 1 => {
            LENGTH_BYTES + json.column() - 1
        }
        _ => LENGTH_BYTES,
    };
    let what = match error {
        SafeTensorError::MetadataIncompleteBuffer => "the file does not end where its header says".into(),
        SafeTensorError::InvalidHeaderLength => "the file ends here, inside its header".into(),
        SafeTensorError::HeaderTooSmall => "the file ends here, before its header".into(),
        other => other.to_string(),
    };
    DataError::corrupt(path, offset.min(bytes.len()) as u64, format!("not a whole safetensors file: {what}"))
}
