//! Everything that changes the disk: each operation here is one moment at which a process can be killed.
//!
//! Tests count these operations and let them fail from a given one on, as after a kill, or one alone; and they keep a
//! journal of them, to find out what a power cut would leave.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CheckpointError;
use super::lacks::{Lack, Lacks, is_lacking};

/// Elements and bytes go to the system in pieces of this size: large enough that calls cost nothing, small enough to
/// stay in the second-level cache between conversion, checksum and copy.
const PIECE_BYTES: usize = 256 * 1024;

/// The disk.
#[derive(Default)]
pub(crate) struct Disk {
    /// Bytes written since [`Disk::start_count`].
    bytes: Cell<u64>,
    lacks: Arc<Lacks>,
    #[cfg(test)]
    faults: Arc<Faults>,
}

/// One change of the disk, or one wait for it.
#[cfg_attr(not(test), allow(dead_code, reason = "only tests keep a journal"))]
#[derive(Clone, Copy, Debug)]
pub(super) enum Op<'a> {
    CreateDir(&'a Path),
    Create(&'a Path),
    /// Path, offset, bytes.
    Write(&'a Path, u64, &'a [u8]),
    Sync(&'a Path),
    SyncDir(&'a Path),
    /// From, to.
    Rename(&'a Path, &'a Path),
    /// Target, place.
    Link(&'a Path, &'a Path),
    Remove(&'a Path),
}

/// Which operations fail, in tests, and what happened.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Faults {
    /// Operations so far.
    pub(super) n_ops: std::sync::atomic::AtomicU64,
    /// The first operation that fails, counted from 1; 0: none does.
    pub(super) first: std::sync::atomic::AtomicU64,
    /// Whether the operations after it fail too: to the disk, that is a kill.
    pub(super) onward: std::sync::atomic::AtomicBool,
    /// What this file system cannot do.
    pub(super) without: Vec<Lack>,
    /// What was done.
    pub(super) journal: std::sync::Mutex<Vec<super::crash::Record>>,
}

impl Disk {
    #[cfg(test)]
    pub(super) fn with_faults(faults: Arc<Faults>) -> Disk {
        Disk { faults, ..Disk::default() }
    }

    /// The same disk, for another thread.
    pub(super) fn another(&self) -> Disk {
        Disk {
            bytes: Cell::default(),
            lacks: self.lacks.clone(),
            #[cfg(test)]
            faults: self.faults.clone(),
        }
    }

    /// From now on [`Disk::counted`] counts anew.
    pub(super) fn start_count(&self) {
        self.bytes.set(0);
    }

    /// Bytes written since [`Disk::start_count`].
    pub(crate) fn counted(&self) -> u64 {
        self.bytes.get()
    }

    /// What the file system was found to lack since this was asked last.
    pub(super) fn take_notes(&self) -> Vec<&'static str> {
        self.lacks.take()
    }

    pub(super) fn create_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        self.op(Op::CreateDir(path), || fs::create_dir(path)).map_err(|e| CheckpointError::writing(path, e))
    }

    /// Makes a folder and those above it that are not there, and brings their names to the disk. Gives those that
    /// were made, the topmost first.
    pub(super) fn create_dirs(&self, path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        let missing = |at: &&Path| !at.as_os_str().is_empty() && !at.exists();
        let mut missing: Vec<&Path> = path.ancestors().take_while(missing).collect();
        missing.reverse();
        let mut made = Vec::new();
        for at in missing {
            match self.op(Op::CreateDir(at), || fs::create_dir(at)) {
                Ok(()) => made.push(at.to_path_buf()),
                // Another process was faster.
                Err(_) if at.is_dir() => {}
                Err(e) => return Err(CheckpointError::writing(at, e)),
            }
            self.sync_dir(above(at))?;
        }
        Ok(made)
    }

    /// Opens an empty file for writing.
    pub(crate) fn create<'a>(&'a self, path: &'a Path) -> Result<Sink<'a>, CheckpointError> {
        let file = self.op(Op::Create(path), || File::create(path));
        let file = file.map_err(|e| CheckpointError::writing(path, e))?;
        let piece = vec![0; PIECE_BYTES].into_boxed_slice();
        Ok(Sink { disk: self, path, file, piece, n_filled: 0, hasher: blake3::Hasher::new(), n_bytes: 0 })
    }

    /// Writes a small file: whole, or the old one stays.
    pub(crate) fn write_whole(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = path.with_file_name(format!(".writing-{name}-{}", std::process::id()));
        let write = || {
            let mut sink = self.create(&aside)?;
            sink.bytes(bytes)?;
            sink.finish()?;
            self.rename(&aside, path)?;
            self.sync_dir(above(path))
        };
        write().inspect_err(|_| drop(self.remove(&aside)))
    }

    /// Brings a folder's names to the disk, if the file system can.
    pub(crate) fn sync_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        let sync = || self.can(Lack::FolderSync).and_then(|()| File::open(path)?.sync_all());
        match self.op(Op::SyncDir(path), sync) {
            Err(e) if is_lacking(&e, Lack::FolderSync) => self.lacks.add(Lack::FolderSync),
            synced => synced.map_err(|e| CheckpointError::writing(path, e))?,
        }
        Ok(())
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        let renamed = self.op(Op::Rename(from, to), || fs::rename(from, to));
        renamed.map_err(|e| CheckpointError::writing(to, e))
    }

    /// Makes a link; where there are none, a file with the target's name in it.
    pub(super) fn link(&self, target: &Path, at: &Path) -> Result<(), CheckpointError> {
        let link = || self.can(Lack::Links).and_then(|()| std::os::unix::fs::symlink(target, at));
        match self.op(Op::Link(target, at), link) {
            Err(e) if is_lacking(&e, Lack::Links) => {
                self.lacks.add(Lack::Links);
                let mut sink = self.create(at)?;
                sink.bytes(target.as_os_str().as_encoded_bytes())?;
                sink.finish().map(|_| ())
            }
            linked => linked.map_err(|e| CheckpointError::writing(at, e)),
        }
    }

    /// Tries to take a file's lock: whether it is this process's now. Where there are no locks, it is.
    pub(super) fn try_lock(&self, file: &File) -> io::Result<bool> {
        match self.can(Lack::Locks).map_err(fs::TryLockError::Error).and_then(|()| file.try_lock()) {
            Ok(()) => Ok(true),
            Err(fs::TryLockError::WouldBlock) => Ok(false),
            Err(fs::TryLockError::Error(e)) if is_lacking(&e, Lack::Locks) => {
                self.lacks.add(Lack::Locks);
                Ok(true)
            }
            Err(fs::TryLockError::Error(e)) => Err(e),
        }
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
            return self.op(Op::Remove(path), || fs::remove_file(path));
        }
        for entry in fs::read_dir(path)? {
            self.remove_all(&entry?.path())?;
        }
        self.op(Op::Remove(path), || fs::remove_dir(path))
    }

    /// Does one more operation.
    #[cfg(test)]
    fn op<T>(&self, op: Op<'_>, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        use std::sync::atomic::Ordering::SeqCst;
        let number = self.faults.n_ops.fetch_add(1, SeqCst) + 1;
        let first = self.faults.first.load(SeqCst);
        if first != 0 && (number == first || number > first && self.faults.onward.load(SeqCst)) {
            return Err(io::Error::other("an injected fault"));
        }
        let done = act()?;
        self.faults.journal.lock().unwrap().push(super::crash::Record::of(op));
        Ok(done)
    }

    #[cfg(not(test))]
    fn op<T>(&self, _: Op<'_>, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        act()
    }

    /// Whether the file system has this, as far as a test says.
    #[cfg(test)]
    fn can(&self, what: Lack) -> io::Result<()> {
        const EOPNOTSUPP: i32 = 95;
        let lacks = self.faults.without.contains(&what);
        if lacks { Err(io::Error::from_raw_os_error(EOPNOTSUPP)) } else { Ok(()) }
    }

    #[cfg(not(test))]
    fn can(&self, _: Lack) -> io::Result<()> {
        Ok(())
    }
}

/// The folder that something lies in.
pub(crate) fn above(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
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
            let (space, _) = self.space(size_of::<f32>())?.as_chunks_mut::<{ size_of::<f32>() }>();
            let n = numbers.len().min(space.len());
            for (bytes, x) in space.iter_mut().zip(&numbers[..n]) {
                *bytes = x.to_le_bytes();
            }
            self.n_filled += size_of_val(&numbers[..n]);
            numbers = &numbers[n..];
        }
        Ok(())
    }

    /// Brings everything to the disk. Gives the file's length and checksum.
    pub(crate) fn finish(mut self) -> Result<(u64, blake3::Hash), CheckpointError> {
        self.flush()?;
        let synced = self.disk.op(Op::Sync(self.path), || self.file.sync_all());
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
        let (piece, path) = (&self.piece[..self.n_filled], self.path);
        let (disk, offset) = (self.disk, self.n_bytes);
        let mut rest = piece;
        let written = disk.op(Op::Write(path, offset, piece), || {
            // Not `write_all`: it does not say how much went through before the disk was full.
            while !rest.is_empty() {
                let n = match self.file.write(rest) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => n,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(e) => return Err(e),
                };
                disk.bytes.set(disk.bytes.get() + n as u64);
                rest = &rest[n..];
            }
            Ok(())
        });
        #[cfg(test)]
        if written.is_err() && rest.len() == piece.len() {
            // A kill inside a write leaves a part of it.
            let _ = self.file.write_all(&piece[..piece.len() / 2]);
        }
        written.map_err(|e| CheckpointError::writing(path, e))?;
        self.n_bytes += piece.len() as u64;
        self.hasher.update(piece);
        self.n_filled = 0;
        Ok(())
    }
}
