//! Everything that changes the disk: each operation here is one moment at which a process can be killed.
//!
//! Tests count these operations and let them fail from a given one on, as after a kill, or one alone.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use super::CheckpointError;

/// Elements and bytes go to the system in pieces of this size: large enough that calls cost nothing, small enough to
/// stay in the second-level cache between conversion, checksum and copy.
const PIECE_BYTES: usize = 256 * 1024;

/// The disk.
#[derive(Default)]
pub(crate) struct Disk {
    /// Bytes written since [`Disk::start_count`].
    bytes: Cell<u64>,
    #[cfg(test)]
    faults: std::sync::Arc<Faults>,
}

/// Which operations fail, in tests.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Faults {
    /// Operations so far.
    pub(super) n_ops: std::sync::atomic::AtomicU64,
    /// The first operation that fails, counted from 1; 0: none does.
    pub(super) first: std::sync::atomic::AtomicU64,
    /// Whether the operations after it fail too: to the disk, that is a kill.
    pub(super) onward: std::sync::atomic::AtomicBool,
}

impl Disk {
    #[cfg(test)]
    pub(super) fn with_faults(faults: std::sync::Arc<Faults>) -> Disk {
        Disk { faults, ..Disk::default() }
    }

    /// From now on [`Disk::counted`] counts anew.
    pub(super) fn start_count(&self) {
        self.bytes.set(0);
    }

    /// Bytes written since [`Disk::start_count`].
    pub(crate) fn counted(&self) -> u64 {
        self.bytes.get()
    }

    pub(super) fn create_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        self.op().and_then(|()| fs::create_dir(path)).map_err(|e| CheckpointError::writing(path, e))
    }

    /// Opens an empty file for writing.
    pub(crate) fn create<'a>(&'a self, path: &'a Path) -> Result<Sink<'a>, CheckpointError> {
        let file =
            self.op().and_then(|()| File::create(path)).map_err(|e| CheckpointError::writing(path, e))?;
        let piece = vec![0; PIECE_BYTES].into_boxed_slice();
        Ok(Sink { disk: self, path, file, piece, n_filled: 0, hasher: blake3::Hasher::new(), n_bytes: 0 })
    }

    /// Brings a folder's names to the disk.
    pub(crate) fn sync_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        let synced = self.op().and_then(|()| File::open(path)?.sync_all());
        synced.map_err(|e| CheckpointError::writing(path, e))
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.op().and_then(|()| fs::rename(from, to)).map_err(|e| CheckpointError::writing(to, e))
    }

    pub(super) fn link(&self, target: &Path, at: &Path) -> Result<(), CheckpointError> {
        let linked = self.op().and_then(|()| std::os::unix::fs::symlink(target, at));
        linked.map_err(|e| CheckpointError::writing(at, e))
    }

    /// Removes a file, a link or a folder with all that is in it. What is not there is removed already.
    pub(crate) fn remove(&self, path: &Path) -> Result<(), CheckpointError> {
        match self.remove_all(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(CheckpointError::writing(path, e)),
            _ => Ok(()),
        }
    }

    fn remove_all(&self, path: &Path) -> io::Result<()> {
        if !fs::symlink_metadata(path)?.is_dir() {
            return self.op().and_then(|()| fs::remove_file(path));
        }
        for entry in fs::read_dir(path)? {
            self.remove_all(&entry?.path())?;
        }
        self.op().and_then(|()| fs::remove_dir(path))
    }

    /// One more operation: may it happen?
    #[cfg(test)]
    fn op(&self) -> io::Result<()> {
        use std::sync::atomic::Ordering::SeqCst;
        let op = self.faults.n_ops.fetch_add(1, SeqCst) + 1;
        let first = self.faults.first.load(SeqCst);
        if first != 0 && (op == first || op > first && self.faults.onward.load(SeqCst)) {
            return Err(io::Error::other("an injected fault"));
        }
        Ok(())
    }

    #[cfg(not(test))]
    fn op(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A file being written: in pieces, with a checksum on the way.
pub(crate) struct Sink<'a> {
    disk: &'a Disk,
    path: &'a Path,
    file: File,
    piece: Box<[u8]>,
    n_filled: usize,
    hasher: blake3::Hasher,
    n_bytes: u64,
}

impl Sink<'_> {
    pub(crate) fn bytes(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        while !bytes.is_empty() {
            let space = self.space(1)?;
            let n = bytes.len().min(space.len());
            space[..n].copy_from_slice(&bytes[..n]);
            self.n_filled += n;
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Writes numbers in little-endian order, bit for bit.
    pub(crate) fn numbers(&mut self, mut numbers: &[f32]) -> Result<(), CheckpointError> {
        while !numbers.is_empty() {
            let (space, _) = self.space(4)?.as_chunks_mut::<4>();
            let n = numbers.len().min(space.len());
            for (four, x) in space.iter_mut().zip(&numbers[..n]) {
                *four = x.to_le_bytes();
            }
            self.n_filled += 4 * n;
            numbers = &numbers[n..];
        }
        Ok(())
    }

    /// Brings everything to the disk. Gives the file's length and checksum.
    pub(crate) fn finish(mut self) -> Result<(u64, blake3::Hash), CheckpointError> {
        self.flush()?;
        let synced = self.disk.op().and_then(|()| self.file.sync_all());
        synced.map_err(|e| CheckpointError::writing(self.path, e))?;
        Ok((self.n_bytes, self.hasher.finalize()))
    }

    /// The rest of the piece, at least `n` bytes of it.
    fn space(&mut self, n: usize) -> Result<&mut [u8], CheckpointError> {
        if self.piece.len() - self.n_filled < n {
            self.flush()?;
        }
        Ok(&mut self.piece[self.n_filled..])
    }

    fn flush(&mut self) -> Result<(), CheckpointError> {
        if self.n_filled == 0 {
            return Ok(());
        }
        let piece = &self.piece[..self.n_filled];
        if let Err(fault) = self.disk.op() {
            // A kill inside a write leaves a part of it.
            let _ = self.file.write_all(&piece[..piece.len() / 2]);
            return Err(CheckpointError::writing(self.path, fault));
        }
        // Not `write_all`: it does not say how much went through before the disk was full.
        let mut rest = piece;
        while !rest.is_empty() {
            let n = match self.file.write(rest) {
                Ok(0) => return Err(CheckpointError::writing(self.path, io::ErrorKind::WriteZero.into())),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(CheckpointError::writing(self.path, e)),
            };
            self.disk.bytes.set(self.disk.bytes.get() + n as u64);
            self.n_bytes += n as u64;
            rest = &rest[n..];
        }
        self.hasher.update(piece);
        self.n_filled = 0;
        Ok(())
    }
}
