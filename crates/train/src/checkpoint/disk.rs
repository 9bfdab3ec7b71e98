//! Everything that changes the disk: each operation here is one moment at which a process can be killed.
//!
//! Tests count these operations and let them fail from a given one on, as after a kill, or one alone; and they keep a
//! journal of them, to find out what a power cut would leave.

use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CheckpointError;
use super::lacks::{Lack, Lacks, is_lacking};

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
pub(super) enum DiskOp<'a> {
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
        self.op(DiskOp::CreateDir(path), || fs::create_dir(path))
            .map_err(|e| CheckpointError::writing(path, e))
    }

    /// Makes a folder and those above it that are not there, and brings their names to the disk. Gives those that
    /// were made, the topmost first.
    pub(super) fn create_dirs(&self, path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        let missing = |at: &&Path| !at.as_os_str().is_empty() && !at.exists();
        let mut missing: Vec<&Path> = path.ancestors().take_while(missing).collect();
        missing.reverse();
        let mut made = Vec::new();
        for at in missing {
            match self.op(DiskOp::CreateDir(at), || fs::create_dir(at)) {
                Ok(()) => made.push(at.to_path_buf()),
                // Another process was faster.
                Err(_) if at.is_dir() => {}
                Err(e) => return Err(CheckpointError::writing(at, e)),
            }
            self.sync_dir(above(at))?;
        }
        Ok(made)
    }

    /// Counts bytes that were written.
    pub(super) fn count(&self, n_bytes: u64) {
        self.bytes.set(self.bytes.get() + n_bytes);
    }

    /// Writes a small file and brings it to the disk.
    pub(super) fn write_small(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        let write = || {
            let file = self.op(DiskOp::Create(path), || File::create(path))?;
            self.write_at(&file, path, 0, bytes)?;
            self.op(DiskOp::Sync(path), || file.sync_all())
        };
        write().map_err(|e| CheckpointError::writing(path, e))
    }

    /// Writes a small file: whole, or the old one stays.
    pub(crate) fn write_whole(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = path.with_file_name(format!(".writing-{name}-{}", std::process::id()));
        let write = || {
            self.write_small(&aside, bytes)?;
            self.rename(&aside, path)?;
            self.sync_dir(above(path))
        };
        write().inspect_err(|_| drop(self.remove(&aside)))
    }

    /// Brings a folder's names to the disk, if the file system can.
    pub(crate) fn sync_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        let sync = || self.can(Lack::FolderSync).and_then(|()| File::open(path)?.sync_all());
        match self.op(DiskOp::SyncDir(path), sync) {
            Err(e) if is_lacking(&e, Lack::FolderSync) => self.lacks.add(Lack::FolderSync),
            synced => synced.map_err(|e| CheckpointError::writing(path, e))?,
        }
        Ok(())
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        let renamed = self.op(DiskOp::Rename(from, to), || fs::rename(from, to));
        renamed.map_err(|e| CheckpointError::writing(to, e))
    }

    /// Makes a link; where there are none, a file with the target's name in it.
    pub(super) fn link(&self, target: &Path, at: &Path) -> Result<(), CheckpointError> {
        let link = || self.can(Lack::Links).and_then(|()| std::os::unix::fs::symlink(target, at));
        match self.op(DiskOp::Link(target, at), link) {
            Err(e) if is_lacking(&e, Lack::Links) => {
                self.lacks.add(Lack::Links);
                self.write_small(at, target.as_os_str().as_encoded_bytes())
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
            return self.op(DiskOp::Remove(path), || fs::remove_file(path));
        }
        for entry in fs::read_dir(path)? {
            self.remove_all(&entry?.path())?;
        }
        self.op(DiskOp::Remove(path), || fs::remove_dir(path))
    }

    /// Does one more operation.
    #[cfg(test)]
    pub(super) fn op<T>(&self, op: DiskOp<'_>, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
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
    pub(super) fn op<T>(&self, _: DiskOp<'_>, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
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
