//! The store of a run: snapshots go in, a thread of its own writes them, buffers come back.
//!
//! One snapshot is in flight at most. So memory holds one copy of the arenas, and a run that saves faster than its
//! disk writes is slowed down to the disk.

use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::write::{Keep, write};
use super::{CheckpointError, Disk, Snapshot, Written, folder};

/// How long a lock is waited for.
const LOCK_WAIT: Duration = Duration::from_millis(500);

/// The checkpoints of a run that is being trained. While it lives, no other process can train into the folder.
pub struct Store {
    run: PathBuf,
    root: PathBuf,
    best: Option<String>,
    /// The newest step that was there, or was handed over since.
    newest: Option<u64>,
    writer: Option<Writer>,
    is_writing: bool,
    buffers: Vec<Vec<f32>>,
    failed: Option<CheckpointError>,
    written: Vec<Written>,
    /// The system lets go of it when the process ends, however that ends.
    _lock: File,
}

struct Writer {
    to: Sender<Snapshot>,
    from: Receiver<Outcome>,
    thread: JoinHandle<()>,
}

struct Outcome {
    result: Result<Written, CheckpointError>,
    buffers: Vec<Vec<f32>>,
}

impl Store {
    /// Opens the store of the run in the folder `run`, which is made if need be, and removes what a killed process
    /// left behind. After each save the newest `keep` checkpoints stay (at least one), and the one whose metric
    /// `best` is best; less is better for a loss, an error or a perplexity, more for anything else.
    pub fn open(run: &Path, keep: usize, best: Option<String>) -> Result<Store, CheckpointError> {
        Store::open_on(Disk::default(), run, keep, best)
    }

    pub(super) fn open_on(
        disk: Disk,
        run: &Path,
        keep: usize,
        best: Option<String>,
    ) -> Result<Store, CheckpointError> {
        let root = folder::root(run);
        fs::create_dir_all(&root).map_err(|e| CheckpointError::writing(&root, e))?;
        let lock = lock(run, &root)?;
        folder::clean(&disk, &root)?;
        let newest = folder::steps(&root)?.into_keys().next_back();
        let keep = Keep { newest: keep.max(1), best };
        let best = keep.best.clone();
        let (to, snapshots) = channel();
        let (outcomes, from) = channel();
        let at = root.clone();
        let thread = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || run_writer(&disk, &at, &keep, &snapshots, &outcomes))
            .map_err(|source| CheckpointError::Io { path: root.clone(), source })?;
        Ok(Store {
            run: run.into(),
            root,
            best,
            newest,
            writer: Some(Writer { to, from, thread }),
            is_writing: false,
            buffers: Vec::new(),
            failed: None,
            written: Vec::new(),
            _lock: lock,
        })
    }

    /// The buffers of the last snapshot, in the order of its shards, to be filled again ([`super::Shard::copy`]).
    /// Waits for the write in flight. Before the first save there are none.
    pub fn take_buffers(&mut self) -> Vec<Vec<f32>> {
        self.wait();
        std::mem::take(&mut self.buffers)
    }

    /// Whether a checkpoint is being written, so that a save would have to wait.
    pub fn is_busy(&mut self) -> bool {
        if let Some(writer) = &self.writer
            && self.is_writing
            && let Ok(outcome) = writer.from.try_recv()
        {
            self.take_outcome(outcome);
        }
        self.is_writing
    }

    /// Hands a snapshot over to be written, and returns at once; if one is still being written, waits for that first.
    ///
    /// The error, if any, is that of the write before: the new snapshot was handed over all the same, training can
    /// go on, and the checkpoints that were there are whole. The exception is [`CheckpointError::Backwards`]: then
    /// nothing was handed over.
    pub fn save(&mut self, snapshot: Snapshot) -> Result<(), CheckpointError> {
        if let Some(newest) = self.newest.filter(|newest| snapshot.step < *newest) {
            return Err(CheckpointError::Backwards { run: self.run.clone(), step: snapshot.step, newest });
        }
        self.wait();
        self.newest = Some(snapshot.step);
        if let Some(writer) = &self.writer {
            self.is_writing = writer.to.send(snapshot).is_ok();
            // A writer that is gone has panicked, which is a bug of ours: let it be seen.
            if !self.is_writing {
                self.stop();
            }
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Waits for the write in flight. The error is that of the last write.
    pub fn finish(&mut self) -> Result<(), CheckpointError> {
        self.wait();
        self.failed.take().map_or(Ok(()), Err)
    }

    /// What was written since this was asked last.
    pub fn take_written(&mut self) -> Vec<Written> {
        self.is_busy();
        std::mem::take(&mut self.written)
    }

    /// Goes back to `step`: deletes all later checkpoints, whole or not, and gives their steps. For a run that
    /// resumes from a checkpoint that is not the newest.
    pub fn go_back(&mut self, step: u64) -> Result<Vec<u64>, CheckpointError> {
        self.wait();
        let disk = Disk::default();
        let later = folder::steps(&self.root)?.split_off(&step.saturating_add(1));
        let mut gone = Vec::new();
        for (step, path) in later.into_iter().rev() {
            folder::discard(&disk, &self.root, &path)?;
            gone.push(step);
        }
        folder::elect(&disk, &self.root, self.best.as_deref())?;
        self.newest = folder::steps(&self.root)?.into_keys().next_back();
        Ok(gone)
    }

    fn wait(&mut self) {
        if let Some(writer) = &self.writer
            && self.is_writing
        {
            match writer.from.recv() {
                Ok(outcome) => self.take_outcome(outcome),
                Err(_) => self.stop(),
            }
        }
    }

    fn take_outcome(&mut self, outcome: Outcome) {
        self.is_writing = false;
        self.buffers = outcome.buffers;
        match outcome.result {
            Ok(written) => self.written.push(written),
            Err(error) => self.failed = Some(error),
        }
    }

    /// Ends the writer; if it panicked, so does this.
    fn stop(&mut self) {
        self.is_writing = false;
        if let Some(Writer { to, from, thread }) = self.writer.take() {
            drop((to, from));
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

impl Drop for Store {
    /// Waits for the write in flight, before the lock goes.
    fn drop(&mut self) {
        if let Some(Writer { to, from, thread }) = self.writer.take() {
            drop((to, from));
            let _ = thread.join();
        }
    }
}

fn run_writer(
    disk: &Disk,
    root: &Path,
    keep: &Keep,
    snapshots: &Receiver<Snapshot>,
    outcomes: &Sender<Outcome>,
) {
    for snapshot in snapshots {
        let result = write(disk, root, keep, &snapshot);
        let buffers = snapshot.shards.into_iter().map(|shard| shard.data).collect();
        // A store that was dropped needs neither.
        let _ = outcomes.send(Outcome { result, buffers });
    }
}

/// Takes the folder's lock, and writes into it who holds it.
fn lock(run: &Path, root: &Path) -> Result<File, CheckpointError> {
    let path = root.join(".lock");
    let writing = |e| CheckpointError::writing(&path, e);
    let mut file =
        File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(writing)?;
    let began = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => break,
            // A child that somebody started holds what its parent held until it has become another program, so a lock
            // whose owner has gone may stay for a moment.
            Err(TryLockError::WouldBlock) if began.elapsed() < LOCK_WAIT => thread::sleep(LOCK_WAIT / 50),
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let _ = file.take(32).read_to_string(&mut text);
                return Err(CheckpointError::Locked { run: run.into(), pid: text.trim().parse().ok() });
            }
            Err(TryLockError::Error(e)) => return Err(writing(e)),
        }
    }
    // The number is for the other's message only: on a full disk it may be missing.
    let _ =
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}
