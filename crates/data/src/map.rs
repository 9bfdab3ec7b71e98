//! The bytes of a file: mapped into memory where the file is raw, owned where it had to be unpacked. The one module of
//! this crate with unsafe code; the formats interpret the bytes.
//!
//! # Why a map is sound enough
//! A map is a view of a file, and other processes may own the file. This process never writes to it and maps it
//! read-only and private. If another process changes the file while we train, samples change; if it cuts the file short,
//! reads give zeros and [`Bytes::intact`] gives an error (`cut` says how); replacing a file by rename, as every tool that
//! replaces data does, is safe. Memory safety never depends on the content of mapped bytes: lengths
//! are the map's own, every index is checked, numbers are read as types for which every bit pattern is a value, and
//! nothing mapped is ever lent as `str`.

mod cut;

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use cut::Watch;

use crate::error::DataError;
use crate::remote::HeldFile;

/// The bytes of a file.
#[derive(Debug)]
pub enum Bytes {
    /// The mapped file.
    Mapped(Map),
    /// The mapped copy of an object of a store.
    Held(Arc<HeldFile>),
    /// The unpacked content of a file.
    Owned(Vec<u8>),
}

/// A mapped file.
pub struct Map {
    /// Declared before the map, so that it is dropped before its addresses can be reused.
    watch: Watch,
    map: memmap2::Mmap,
}

impl Bytes {
    /// Fails if the file was cut, or could not be read, since it was mapped: what was read may then have been zeros.
    pub fn intact(&self) -> Result<(), DataError> {
        match self {
            Bytes::Mapped(map) => map.watch.intact(),
            Bytes::Held(file) => file.bytes().intact(),
            Bytes::Owned(_) => Ok(()),
        }
    }
}

impl Bytes {
    /// Tells the system that what is read next lies anywhere, so that it reads no neighbours with it. A hint: that it is not
    /// taken changes no result.
    pub(crate) fn read_at_random(&self) {
        if let Bytes::Mapped(map) = self {
            let _ = map.map.advise(memmap2::Advice::Random);
        }
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Map").field(&self.map).finish()
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => &map.map,
            Bytes::Held(file) => file.bytes(),
            Bytes::Owned(bytes) => bytes,
        }
    }
}

/// Maps the file at `path`; an empty file is an empty slice.
#[allow(unsafe_code)]
pub fn open(path: &Path) -> Result<Bytes, DataError> {
    check_is_file(path)?;
    let file = File::open(path).map_err(|e| DataError::io(path, e))?;
    // SAFETY: the map is read-only and this process never writes to a file that it maps; what happens if another does is
    // documented at the head of this file.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| DataError::io(path, e))?;
    let found = file.metadata().map_err(|e| DataError::io(path, e))?;
    Ok(Bytes::Mapped(Map { watch: Watch::new(path, &found, &map), map }))
}

/// Reads the whole file at `path`: for content that must not change while it is used, such as text.
pub fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    check_is_file(path)?;
    fs::read(path).map_err(|e| DataError::io(path, e))
}

/// Fails if any file that this process has mapped was cut, or could not be read, since then.
pub fn all_intact() -> Result<(), DataError> {
    cut::all_intact()
}

/// Checked before opening, because opening a pipe waits for a writer.
fn check_is_file(path: &Path) -> Result<(), DataError> {
    let found = fs::metadata(path).map_err(|e| DataError::io(path, e))?;
    if found.is_file() {
        return Ok(());
    }
    let kind = if found.is_dir() { "a folder" } else { "a device or a pipe" };
    let why = format!("this is {kind}; give a file");
    Err(DataError::Io { path: path.into(), source: io::Error::other(why) })
}

/// A number that may be read from any bytes in place.
pub(crate) trait Number: Copy + number::Sealed {
    /// The number whose little-endian bytes these are.
    fn from_le(bytes: &[u8]) -> Self;
}

mod number {
    /// Restricts [`super::in_place`] to types for which every bit pattern is a value.
    pub(crate) trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
}

impl Number for f32 {
    fn from_le(bytes: &[u8]) -> f32 {
        f32::from_le_bytes(bytes.try_into().expect("the caller cuts four bytes"))
    }
}

impl Number for i32 {
    fn from_le(bytes: &[u8]) -> i32 {
        i32::from_le_bytes(bytes.try_into().expect("the caller cuts four bytes"))
    }
}

/// Little-endian bytes as numbers: borrowed where they are aligned on a little-endian machine, else copied into `scratch`.
#[allow(unsafe_code)]
pub(crate) fn in_place<'a, T: Number>(bytes: &'a [u8], scratch: &'a mut Vec<T>) -> &'a [T] {
    if cfg!(target_endian = "little") {
        // SAFETY: `Number` is sealed to f32 and i32, for which every bit pattern is a value; `align_to` gives a middle
        // part that is aligned.
        let (before, numbers, after) = unsafe { bytes.align_to::<T>() };
        if before.is_empty() && after.is_empty() {
            return numbers;
        }
    }
    scratch.clear();
    scratch.extend(bytes.chunks_exact(size_of::<T>()).map(T::from_le));
    scratch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for content in [&b""[..], b"x", b"some bytes"] {
            fs::write(&path, content).unwrap();
            let bytes = open(&path).unwrap();
            assert!(matches!(bytes, Bytes::Mapped(_)));
            assert_eq!(&bytes[..], content);
        }
    }

    #[test]
    fn what_is_not_a_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let absent = open(&folder.path().join("absent")).unwrap_err();
        assert!(matches!(absent, DataError::Missing { .. }), "{absent}");
        let own = open(folder.path()).unwrap_err().to_string();
        assert!(own.contains("this is a folder"), "{own}");
    }

    #[test]
    fn numbers_are_the_same_at_every_alignment() {
        let numbers = [1.5f32, -0.25, f32::MAX, 0.0];
        let mut padded = vec![0u8; 4];
        padded.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
        for shift in 0..4 {
            let moved: Vec<u8> = padded[4 - shift..].to_vec();
            let mut scratch = Vec::new();
            assert_eq!(in_place::<f32>(&moved[shift..], &mut scratch), numbers);
        }
    }
}
