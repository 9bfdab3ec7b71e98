//! Fills batches ahead of the step that needs them, in background threads.
//!
//! A thread takes the next span of the plan together with a number, fills a batch outside the lock, and puts it into the
//! queue under its number; the consumer takes batches from the queue in order. One thread fills one batch, so threads
//! wait for each other only at the queue. At most `prefetch` batches are in the queue, being filled or full, so memory
//! is bounded however slow the consumer is. Batches that the consumer drops are reused: once there are as
//! many as `prefetch` plus those that the consumer holds at a time, no more memory is allocated.
//!
//! An error takes its batch's place in the queue and ends it. A panic of the set or of the plan becomes an error. A
//! dropped loader stops its threads at the next sample and waits for them.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::augment::Address;
use crate::batch::{Batch, Span};
use crate::dataset::{Dataset, Scratch};
use crate::error::DataError;
use crate::remote::tell_ahead;
use crate::transform::Transform;

/// Options of a loader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoaderOptions {
    /// The longest span: memory is reserved for this many samples.
    pub batch_max: usize,
    /// Threads that fill batches; with 0 the consumer fills each when it asks for it.
    pub threads: usize,
    /// Batches that are full or being filled ahead of the consumer; at least 1. Threads beyond it have nothing to do.
    pub prefetch: usize,
    /// The seed of augmentation.
    pub seed: u64,
}

/// Batches in the order of a plan, filled ahead. An iterator; after an error it has ended.
pub struct Loader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Buffers for filling without threads.
    scratch: Scratch,
    waited: Duration,
}

/// A batch that is lent to the consumer; its memory is used again once this is dropped.
pub struct BatchGuard {
    /// `Some` until the drop.
    batch: Option<Batch>,
    shared: Arc<Shared>,
}

impl Loader {
    /// Starts to fill batches of `set` as `plan` says. `transform` was made for the set's spec. The plan is called under
    /// the loader's lock, so it should be fast. If the system cannot start a thread, fewer do the work, or the
    /// consumer itself.
    pub fn start(
        set: Arc<dyn Dataset>,
        transform: Transform,
        plan: impl Iterator<Item = Span> + Send + 'static,
        options: LoaderOptions,
    ) -> Loader {
        let window = options.prefetch.max(1);
        let line = Line {
            plan: Some(Box::new(plan)),
            // An unlimited prefetch must not reserve unlimited memory.
            slots: VecDeque::with_capacity(window.min(1024)),
            first: 0,
            free: Vec::with_capacity(window.min(1024) + 1),
            n_batches: 0,
        };
        let fits = transform.spec() == set.spec();
        let shared = Arc::new(Shared {
            set,
            transform,
            fits,
            options: LoaderOptions { prefetch: window, ..options },
            line: Mutex::new(line),
            room: Condvar::new(),
            ready: Condvar::new(),
            stopped: AtomicBool::new(false),
        });
        let threads = (0..options.threads.min(window))
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                thread::Builder::new().name(format!("load-{i}")).spawn(move || shared.work()).ok()
            })
            .collect();
        Loader { shared, threads, scratch: Scratch::default(), waited: Duration::ZERO }
    }

    /// The total time that the consumer has waited for batches.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// How many batches are filled and wait for the consumer.
    pub fn n_ready(&self) -> usize {
        self.shared.lock().slots.iter().flatten().count()
    }

    /// How many batches are allocated: those in the queue, free and lent.
    pub fn n_batches(&self) -> usize {
        self.shared.lock().n_batches
    }
}

impl Iterator for Loader {
    type Item = Result<BatchGuard, DataError>;

    /// The next batch; waits until it is filled.
    fn next(&mut self) -> Option<Result<BatchGuard, DataError>> {
        let asked = Instant::now();
        let mut line = self.shared.lock();
        if self.threads.is_empty() {
            let (number, task) = line.take()?;
            drop(line);
            let done = self.shared.run(task, &mut self.scratch);
            line = self.shared.lock();
            line.put(number, done);
            self.waited += asked.elapsed();
        } else if !line.is_decided() {
            while !line.is_decided() {
                line = self.shared.ready.wait(line).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            self.waited += asked.elapsed();
        }
        let done = line.pop()?;
        drop(line);
        self.shared.room.notify_one();
        Some(done.map(|batch| BatchGuard { batch: Some(batch), shared: Arc::clone(&self.shared) }))
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Under the lock, so that no thread is between its check and its wait.
        drop(self.shared.lock());
        self.shared.room.notify_all();
        for thread in self.threads.drain(..) {
            // The result of a join is ignored: panics of sets and plans are caught.
            let _ = thread.join();
        }
    }
}

impl Deref for BatchGuard {
    type Target = Batch;

    fn deref(&self) -> &Batch {
        self.batch.as_ref().expect("it is there until the drop")
    }
}

impl DerefMut for BatchGuard {
    fn deref_mut(&mut self) -> &mut Batch {
        self.batch.as_mut().expect("it is there until the drop")
    }
}

impl Drop for BatchGuard {
    fn drop(&mut self) {
        if let Some(batch) = self.batch.take() {
            self.shared.lock().free.push(batch);
        }
    }
}

/// The state that threads, consumer and lent batches share.
struct Shared {
    set: Arc<dyn Dataset>,
    transform: Transform,
    /// Whether the transform fits this set.
    fits: bool,
    options: LoaderOptions,
    line: Mutex<Line>,
    /// Signalled when the queue has room.
    room: Condvar,
    /// Signalled when the first of the queue is filled or failed.
    ready: Condvar,
    stopped: AtomicBool,
}

/// The batches ahead of the consumer.
struct Line {
    /// `None` when no more spans are to be taken.
    plan: Option<Box<dyn Iterator<Item = Span> + Send>>,
    /// Batches that were started and not yet handed out; `None` while one is being filled.
    slots: VecDeque<Option<Result<Batch, DataError>>>,
    /// The number of the first slot.
    first: u64,
    free: Vec<Batch>,
    n_batches: usize,
}

/// The next task of a thread: a span, and a free batch if there is one; or the error of a plan that panicked.
type Task = Result<(Span, Option<Batch>), DataError>;

impl Line {
    /// The next task and its number; `None` when there is none.
    fn take(&mut self) -> Option<(u64, Task)> {
        let plan = self.plan.as_mut()?;
        let task = match catch_unwind(AssertUnwindSafe(|| plan.next())) {
            Ok(Some(span)) => Ok((span, self.free.pop())),
            Ok(None) => {
                self.plan = None;
                return None;
            }
            Err(panic) => {
                self.plan = None;
                Err(panicked("choosing samples".into(), &*panic))
            }
        };
        self.slots.push_back(None);
        Some((self.first + self.slots.len() as u64 - 1, task))
    }

    /// Puts the result of a task in its slot. No task is started after an error.
    fn put(&mut self, number: u64, done: Result<Batch, DataError>) {
        if done.is_err() {
            self.plan = None;
        }
        // The queue was cleared past this number if an error came before it.
        let slot = number.checked_sub(self.first).and_then(|i| self.slots.get_mut(usize::try_from(i).ok()?));
        if let Some(slot) = slot {
            *slot = Some(done);
        }
    }

    /// Whether the next result is known.
    fn is_decided(&self) -> bool {
        match self.slots.front() {
            Some(slot) => slot.is_some(),
            None => self.plan.is_none(),
        }
    }

    /// Takes the next result, which is known.
    fn pop(&mut self) -> Option<Result<Batch, DataError>> {
        let done = self.slots.pop_front()??;
        self.first += 1;
        if done.is_err() {
            // Batches after the error are dropped.
            self.first += self.slots.len() as u64;
            self.slots.clear();
        }
        Some(done)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Line> {
        // Only the plan can panic under the lock, and that is caught.
        self.line.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The loop of a thread.
    fn work(&self) {
        let mut scratch = Scratch::default();
        loop {
            let mut line = self.lock();
            let stopped = || self.stopped.load(Ordering::Relaxed);
            while !stopped() && line.plan.is_some() && line.slots.len() >= self.options.prefetch {
                line = self.room.wait(line).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            if stopped() {
                return;
            }
            let Some((number, task)) = line.take() else {
                // The consumer may be waiting for a batch that will not come, and other threads for room.
                drop(line);
                self.ready.notify_one();
                self.room.notify_all();
                return;
            };
            drop(line);
            let done = self.run(task, &mut scratch);
            let mut line = self.lock();
            line.put(number, done);
            if line.is_decided() {
                self.ready.notify_one();
            }
            if line.plan.is_none() {
                self.room.notify_all();
            }
        }
    }

    /// Fills a batch; whatever goes wrong is an error.
    fn run(&self, task: Task, scratch: &mut Scratch) -> Result<Batch, DataError> {
        let (span, free) = task?;
        // The sample that is being read, in case the set panics.
        let mut at = None;
        catch_unwind(AssertUnwindSafe(|| self.fill(span, free, scratch, &mut at))).unwrap_or_else(|panic| {
            let what =
                at.map_or_else(|| "reading samples".into(), |idx: usize| format!("reading sample {idx}"));
            Err(panicked(what, &*panic))
        })
    }

    fn fill(
        &self,
        span: Span,
        free: Option<Batch>,
        scratch: &mut Scratch,
        at: &mut Option<usize>,
    ) -> Result<Batch, DataError> {
        self.check(span)?;
        let spec = self.set.spec();
        let mut batch = match free {
            Some(batch) => batch,
            None => {
                let batch = Batch::reserve(spec, self.options.batch_max)?;
                self.lock().n_batches += 1;
                batch
            }
        };
        batch.resize(spec, span.len, span.time);
        batch.span = span;
        let read = self.read(&mut batch, scratch, at);
        // Checked first: the content of a file that was cut may be wrong in any way, or in none.
        self.set.intact()?;
        read.map(|()| batch)
    }

    /// Reads the samples of the batch's span into it.
    fn read(
        &self,
        batch: &mut Batch,
        scratch: &mut Scratch,
        at: &mut Option<usize>,
    ) -> Result<(), DataError> {
        let span = batch.span;
        let (seed, epoch) = (self.options.seed, span.order.epoch);
        let samples = || span.order.walk(span.start).take(span.len);
        tell_ahead(&*self.set, span.order, span.start);
        self.set.ahead(&mut samples(), scratch)?;
        for (i, idx) in samples().enumerate() {
            if self.stopped.load(Ordering::Relaxed) {
                // This batch will not be used.
                break;
            }
            *at = Some(idx);
            let sample = self.set.fetch(idx, scratch)?;
            let (x, labels) = batch.slot(i);
            self.transform.write(sample, Address { seed, epoch, idx }, x, labels)?;
            // Of what was read, not of what was planned: that is what makes it worth comparing with the plan.
            batch.tally.note(epoch, idx as u64);
        }
        Ok(())
    }

    /// Checks that the span is one of this set, and fits.
    fn check(&self, span: Span) -> Result<(), DataError> {
        let (len, max) = (span.len, self.options.batch_max);
        let epoch_len = span.order.epoch_len();
        let why = if !self.fits {
            "the transform was made for another set".into()
        } else if len > max {
            format!("a span of {len} samples is longer than batch_max, {max}")
        } else if span.order.len > self.set.len() {
            format!("an order of {} samples is longer than the set, {}", span.order.len, self.set.len())
        } else if span.start.checked_add(len).is_none_or(|end| end > epoch_len) {
            format!("{len} positions from {} are not in an epoch of {epoch_len}", span.start)
        } else {
            return Ok(());
        };
        Err(DataError::Setting { why })
    }
}

fn panicked(what: String, panic: &(dyn Any + Send)) -> DataError {
    let text = panic.downcast_ref::<&str>().copied();
    let why =
        text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message");
    DataError::Panicked { what, why: why.into() }
}

#[cfg(test)]
mod tests;
