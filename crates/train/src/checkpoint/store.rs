//! The store of a run: snapshots go in, a thread of its own writes them, buffers come back.
//!
//! One snapshot is in flight at most. So memory holds one copy at most, and a run that saves faster than its disk writes is
//! slowed down to the disk. A lone rank lends what it has learnt instead, and is held where an update overtakes the disk.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::write::{Keep, write};
use super::{CheckpointError, Disk, Lock, Snapshot, Written, folder};

/// The checkpoints of a run that is being trained. While it lives, no other process can train into the folder.
pub struct Store {
    best: Option<String>,
    /// The newest step that was there, or was handed over since.
    newest: Option<u64>,
    writer: Option<Writer>,
    is_writing: bool,
    buffers: Vec<Vec<f32>>,
    failed: Option<CheckpointError>,
    written: Vec<Written>,
    lock: Lock,
}

struct Writer {
    to: Sender<Snapshot>,
    from: Receiver<WriteOutcome>,
    thread: JoinHandle<()>,
}

struct WriteOutcome {
    result: Result<Written, CheckpointError>,
    buffers: Vec<Vec<f32>>,
}

impl Store {
    /// Opens the store of the run in the folder `run`, which is made if need be, and removes what a killed process
    /// left behind. After each save the newest `keep` checkpoints stay (at least one), and the one whose metric
    /// `best` is best; less is better for a loss, an error or a perplexity, more for anything else.
    pub fn open(run: &Path, keep: usize, best: Option<String>) -> Result<Store, CheckpointError> {
        Store::open_held(Lock::take(run)?, keep, best)
    }

    /// The same, for who holds the run's lock already.
    pub fn open_held(lock: Lock, keep: usize, best: Option<String>) -> Result<Store, CheckpointError> {
        let (disk, root) = (lock.disk().another(), lock.root().to_path_buf());
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
            .map_err(|source| CheckpointError::Io { path: root, source })?;
        Ok(Store {
            best,
            newest,
            writer: Some(Writer { to, from, thread }),
            is_writing: false,
            buffers: Vec::new(),
            failed: None,
            written: Vec::new(),
            lock,
        })
    }

    /// What is to be said about the file system: each thing once.
    pub fn take_notes(&self) -> Vec<&'static str> {
        self.lock.disk().take_notes()
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
            return Err(CheckpointError::Backwards {
                run: self.lock.run().into(),
                step: snapshot.step,
                newest,
            });
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

    /// Goes back to `step`: all later checkpoints get other names, which are given with their steps. Those of `damaged`
    /// steps are removed when a newer one is whole, the others stay. For a run that resumes from a checkpoint that is
    /// not the newest.
    pub fn go_back(&mut self, step: u64, damaged: &[u64]) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
        self.wait();
        let (disk, root) = (self.lock.disk(), self.lock.root());
        // First, so that `best` never means one that has gone.
        folder::elect(disk, root, self.best.as_deref(), step)?;
        let moved = folder::go_back(disk, root, step, damaged)?;
        self.newest = folder::steps(root)?.into_keys().next_back();
        Ok(moved)
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

    fn take_outcome(&mut self, outcome: WriteOutcome) {
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
    outcomes: &Sender<WriteOutcome>,
) {
    for snapshot in snapshots {
        let result = write(disk, root, keep, &snapshot);
        let buffers = snapshot.shards.into_iter().map(|shard| shard.data).collect();
        // A store that was dropped needs neither.
        let _ = outcomes.send(WriteOutcome { result, buffers });
    }
}
