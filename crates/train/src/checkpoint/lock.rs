//! The lock of a run's folder: while one process holds it, no other trains into the folder, cleans it or replaces what
//! is in it.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::disk::above;
use super::{CheckpointError, Disk, folder};

/// How long a lock is waited for.
const LOCK_WAIT: Duration = Duration::from_millis(500);

/// The right to write into a run's folder. The system takes it back when the process ends, however that ends.
pub struct Lock {
    run: PathBuf,
    root: PathBuf,
    disk: Disk,
    /// Folders that were made for it, the topmost first.
    made: Vec<PathBuf>,
    _file: File,
}

impl Lock {
    /// Takes the lock of the run in the folder `run`, which is made if need be.
    pub fn take(run: &Path) -> Result<Lock, CheckpointError> {
        Lock::take_on(Disk::default(), run)
    }

    /// Makes the folder `run` and takes its lock; `None` if there is such a folder, or another process was faster.
    pub fn take_new(run: &Path) -> Result<Option<Lock>, CheckpointError> {
        let disk = Disk::default();
        let mut made = disk.create_dirs(above(run))?;
        match fs::create_dir(run) {
            Ok(()) => made.push(run.into()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(e) => return Err(CheckpointError::writing(run, e)),
        }
        disk.sync_dir(above(run))?;
        match Lock::take_on(disk, run) {
            Ok(mut lock) => {
                made.append(&mut lock.made);
                Ok(Some(Lock { made, ..lock }))
            }
            Err(CheckpointError::Locked { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn take_on(disk: Disk, run: &Path) -> Result<Lock, CheckpointError> {
        let root = folder::root(run);
        let path = root.join(".lock");
        let writing = |e| CheckpointError::writing(&path, e);
        let mut made = Vec::new();
        let began = Instant::now();
        let mut file = loop {
            made.extend(disk.create_dirs(&root)?);
            let opened = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            let file = match opened {
                // Another process has just given up the folder that it had made.
                Err(_) if !root.is_dir() && began.elapsed() < LOCK_WAIT => continue,
                opened => opened.map_err(writing)?,
            };
            match disk.try_lock(&file).map_err(writing)? {
                true if is_at(&file, &path) => break file,
                // The lock of a file that is gone keeps nobody out.
                true => {}
                // A child that somebody started holds what its parent held until it has become another program, so a
                // lock whose owner has gone may stay for a moment.
                false if began.elapsed() < LOCK_WAIT => thread::sleep(LOCK_WAIT / 50),
                false => {
                    let mut text = String::new();
                    let _ = file.take(32).read_to_string(&mut text);
                    return Err(CheckpointError::Locked { run: run.into(), pid: text.trim().parse().ok() });
                }
            }
        };
        // The number is for the other's message only: on a full disk it may be missing.
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Lock { run: run.into(), root, disk, made, _file: file })
    }

    /// The run's folder.
    pub fn run(&self) -> &Path {
        &self.run
    }

    /// Where the checkpoints are.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The disk.
    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Whether there is a checkpoint, whole or not.
    pub fn has_checkpoints(&self) -> Result<bool, CheckpointError> {
        Ok(!folder::steps(&self.root)?.is_empty())
    }

    /// Removes every checkpoint. The lock stays.
    pub(crate) fn remove_checkpoints(&self) -> Result<(), CheckpointError> {
        folder::clean(&self.disk, &self.root)?;
        folder::remove_all(&self.disk, &self.root)
    }

    /// Gives the folder up. What was made for the lock goes again, as far as nothing else is in it.
    pub(crate) fn give_up(self) {
        if self.made.is_empty() {
            return;
        }
        // Whoever waits for this lock sees that its file is gone, and makes the folder anew.
        let _ = fs::remove_file(self.root.join(".lock"));
        for folder in self.made.iter().rev() {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Whether the file under this name is still the one that was opened.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |about: fs::Metadata| (about.dev(), about.ino());
    match (file.metadata(), fs::metadata(path)) {
        (Ok(mine), Ok(there)) => id(mine) == id(there),
        _ => false,
    }
}
