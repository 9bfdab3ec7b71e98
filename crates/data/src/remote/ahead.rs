//! What is fetched next, before it is needed.
//!
//! Which samples come next is a function of seed, epoch and step, so a loader that fills a batch can say in which files the following
//! ones lie, in the order in which they are needed ([`tell_ahead`]). Of these, as many as fit into the cache together are wanted: they are
//! marked as used, so that others are evicted, and the ones that are not there are fetched by threads of their own. Nothing depends on
//! it but time: an error is met again, and said, by who reads the file.
//!
//! The same threads close copies that stayed open and that no thread has read for a moment: another process may wait for their room.

use std::collections::{HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use super::{IDLE, Remote, lock};
use crate::dataset::Dataset;
use crate::order::Order;

/// Threads that fetch; each fetches several ranges at a time.
const THREADS: usize = 2;
/// Positions of an epoch that are looked at, and how far apart they are at first; the distance doubles after each quarter of them.
const PROBES: usize = 512;
const STEP: usize = 64;

/// Files that are wanted next.
#[derive(Default)]
pub(super) struct Ahead {
    line: Mutex<AheadLine>,
    changed: Condvar,
}

#[derive(Default)]
struct AheadLine {
    /// What was said last, and what is left of it.
    said: HashSet<PathBuf>,
    left: VecDeque<PathBuf>,
    /// Whether copies may be open that no thread reads.
    looks: bool,
    stopped: bool,
}

/// What a thread does next.
enum AheadTask {
    Fetch(PathBuf),
    /// Closes copies that no thread reads.
    Look,
    Stop,
}

impl Ahead {
    /// Starts the threads; they end with `remote`. If the system has no thread to give, files are fetched when they are needed.
    pub(super) fn start(remote: &Arc<Remote>) {
        for i in 0..THREADS {
            let (ahead, remote) = (remote.ahead.clone(), Arc::downgrade(remote));
            let work = move || ahead.work(&remote);
            if thread::Builder::new().name(format!("ahead-{i}")).spawn(work).is_err() {
                return;
            }
        }
    }

    pub(super) fn stop(&self) {
        lock(&self.line).stopped = true;
        self.changed.notify_all();
    }

    /// Says that a copy was opened.
    pub(super) fn look(&self) {
        lock(&self.line).looks = true;
        self.changed.notify_one();
    }

    fn work(&self, remote: &Weak<Remote>) {
        loop {
            let task = self.next();
            let Some(remote) = remote.upgrade() else { return };
            match task {
                // Let go at once: it is in the cache, and was used now.
                AheadTask::Fetch(path) => drop(remote.hold(&path, Duration::ZERO)),
                AheadTask::Look if remote.release_idle() => self.look(),
                AheadTask::Look => {}
                AheadTask::Stop => return,
            }
        }
    }

    fn next(&self) -> AheadTask {
        let mut line = lock(&self.line);
        loop {
            if line.stopped {
                return AheadTask::Stop;
            }
            if let Some(path) = line.left.pop_front() {
                return AheadTask::Fetch(path);
            }
            if !line.looks {
                line = self.changed.wait(line).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.changed.wait_timeout(line, IDLE).unwrap_or_else(PoisonError::into_inner);
            line = waited.0;
            if waited.1.timed_out() {
                line.looks = false;
                return AheadTask::Look;
            }
        }
    }
}

impl Remote {
    /// Says which files are needed next, in this order, from those in use on: as many as fit are fetched.
    pub(super) fn soon<'a>(&self, paths: impl Iterator<Item = &'a Path>) {
        let mut room = self.bytes_max();
        let mut fits = Vec::new();
        for path in paths {
            let Some(bytes) = self.bytes_of(path).filter(|bytes| *bytes <= room) else { break };
            room -= bytes;
            fits.push(path.to_path_buf());
        }
        let mut line = lock(&self.ahead.line);
        // Inside a block the order of its files changes from batch to batch, and means nothing.
        let said: HashSet<PathBuf> = fits.iter().cloned().collect();
        if line.said != said {
            (line.left, line.said) = (fits.into(), said);
            self.ahead.changed.notify_all();
        }
    }

    fn bytes_of(&self, path: &Path) -> Option<u64> {
        lock(&self.known).get(path).map(|facts| facts.bytes)
    }
}

/// Says in which files the samples of an epoch lie from `start` on, and those of the next one, if they are not on this host.
pub(crate) fn tell_ahead(set: &dyn Dataset, order: Order, start: usize) {
    let len = order.epoch_len();
    let first = (start < len).then(|| order.at(start)).and_then(|idx| set.far(idx));
    let Some(remote) = first.map(|file| file.remote) else { return };
    let (mut order, mut at, mut step) = (order, start, STEP);
    let (mut seen, mut files) = (HashSet::new(), Vec::new());
    for probe in 1..=PROBES {
        if let Some(file) = set.far(order.at(at))
            && seen.insert(file.path)
        {
            files.push(file.path);
        }
        if probe % (PROBES / 4) == 0 {
            step *= 2;
        }
        at += step;
        if at >= len {
            order = order.of_epoch(order.epoch + (at / len) as u64);
            at %= len;
        }
    }
    remote.soon(files.into_iter());
}
