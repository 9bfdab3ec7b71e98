//! Messages between two ranks that share memory, started and waited for, with tags.
//!
//! A message never waits for its receiver. If the receive was started before, and the ranks are threads, the sender
//! copies straight into the receiver's memory: one copy. Otherwise it leaves a copy and is done: two copies. So ranks
//! may send to each other in any order and in any cycle, whatever the lengths, and no rank has to be in a wait for
//! others to make progress.
//!
//! Messages from one rank with one tag arrive in the order in which they were sent; those with different tags are
//! independent.
//!
//! - *Threads* have a [`Inbox`] each, which the others put messages into.
//! - *Processes* each have a private one. A sender writes into its own buffer, a memfd, and puts a description into a
//!   cell for the receiver. A rank that waits for a message moves what has arrived from the cells into its inbox, and
//!   frees the buffer for the sender's next message. Buffers live as long as the group; there are as many as messages
//!   were in flight at once.
//!
//! For each ordered pair of ranks one counter says how many messages were sent, and another one how many cells were
//! read. A rank that waits for a message waits for the first, and notices a lost sender as in every other wait.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use polyreme_net::segment::path_of;
use polyreme_net::{Cause, Report, Segment, Shareable};

use super::ShmComm;
use super::blocks::no_memory;
use super::layout::{DeskEntry, LETTERS, Ring};
use crate::inbox::Inbox;
use crate::work::Span;

/// Bytes before the message in a buffer.
const HEAD_BYTES: usize = 4096;
/// Buffers are no shorter than this.
const BUFFER_BYTES_MIN: usize = 64 << 10;

/// One rank's messages.
pub(super) struct Letters {
    /// Of all ranks if they are threads; otherwise this one's.
    boxes: Arc<Vec<Inbox>>,
    /// Receives that were started.
    next: u64,
    /// The sender of each receive that was not waited for.
    from: HashMap<u64, usize>,
    /// Buffers of this rank, if it is a process.
    out: Vec<LetterBuffer>,
    /// Other ranks' buffers, by rank and file.
    seen: HashMap<(usize, u32), Segment>,
}

struct LetterBuffer {
    segment: Segment,
    file: u32,
}

/// The first page of a buffer.
#[repr(C)]
struct RingHead {
    /// Whether it holds an unread message.
    full: AtomicU32,
}
// SAFETY: an atomic.
unsafe impl Shareable for RingHead {}

impl Letters {
    pub(super) fn new(boxes: Arc<Vec<Inbox>>) -> Letters {
        Letters { boxes, next: 0, from: HashMap::new(), out: Vec::new(), seen: HashMap::new() }
    }

    /// One inbox per thread.
    pub(super) fn boxes(n: usize) -> Arc<Vec<Inbox>> {
        Arc::new((0..n).map(|_| Inbox::default()).collect())
    }
}

impl ShmComm {
    /// Sends a message. When this returns, the memory is the caller's again.
    ///
    /// # Safety
    /// The memory is valid and nothing writes to it until this returns.
    pub(crate) unsafe fn send_letter(
        &mut self,
        to: usize,
        tag: u16,
        span: Span,
        step: u64,
    ) -> Result<(), Report> {
        self.enter_pair(to, step, "send")?;
        let bytes: &[u8] = match span.count {
            0 => &[],
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(span.ptr, span.bytes()) },
        };
        let (rank, dtype) = (self.meet.rank, span.dtype as u8);
        let offset = self.meet.layout.letters(rank, to);
        if self.handover.is_some() {
            // SAFETY: receives that were started are waited for or cancelled, see `expect_letter`.
            self.meet.touch(|| unsafe { self.letters.boxes[to].deliver(rank, tag, dtype, bytes) })?;
        } else {
            self.wait_cell(to)?;
            let at = self.fill_buffer(bytes)?;
            let buffer = &self.letters.out[at];
            let (file, size) = (u64::from(buffer.file), buffer.segment.block().bytes() as u64);
            let ring: &Ring = self.meet.memory.at(offset);
            let cell: &DeskEntry = self.meet.memory.at(cell_offset(offset, ring.head.get()));
            let words = [&cell.what, &cell.count, &cell.cuts, &cell.place, &cell.offset];
            let values = [u64::from(dtype), bytes.len() as u64, u64::from(tag), file, size];
            words.into_iter().zip(values).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        }
        let ring: &Ring = self.meet.memory.at(offset);
        ring.head.post(ring.head.get().wrapping_add(1));
        Ok(())
    }

    /// Starts to receive a message; returns the number to wait for.
    ///
    /// # Safety
    /// The memory is valid and nothing else accesses it until the number was waited for or this rank's end is dropped.
    pub(crate) unsafe fn expect_letter(
        &mut self,
        from: usize,
        tag: u16,
        span: Span,
        step: u64,
    ) -> Result<u64, Report> {
        self.enter_pair(from, step, "receive")?;
        self.letters.next += 1;
        let id = self.letters.next;
        self.letters.from.insert(id, from);
        // SAFETY: the caller's promise; giving up cancels it.
        unsafe { self.inbox().want(id, from, tag, span) };
        Ok(id)
    }

    /// Waits until a message has come.
    pub(crate) fn wait_letter(&mut self, id: u64, step: u64) -> Result<(), Report> {
        let Some(from) = self.letters.from.get(&id).copied() else { return self.meet.check() };
        (self.meet.step, self.meet.op) = (step, "receive");
        let end = self.wait_letter_from(id, from);
        self.letters.from.remove(&id);
        if end.is_err() {
            self.inbox().take_back();
        }
        end
    }

    /// Cancels all receives, so that nothing writes to their memory.
    pub(super) fn take_back_letters(&self) {
        self.inbox().take_back();
    }

    fn wait_letter_from(&mut self, id: u64, from: usize) -> Result<(), Report> {
        let offset = self.meet.layout.letters(from, self.meet.rank);
        loop {
            // Read before the inbox is checked: what arrives later is waited for.
            let sent = self.meet.memory.at::<Ring>(offset).head.get();
            if self.handover.is_none() {
                self.take_in(from)?;
            }
            match self.inbox().end_of(id) {
                Some(Ok(())) => return Ok(()),
                Some(Err(what)) => return Err(self.meet.raise(from, Cause::Disagrees { what })),
                None => {
                    let ring: &Ring = self.meet.memory.at(offset);
                    self.meet.wait_counter(&ring.head, from, sent.wrapping_add(1))?;
                }
            }
        }
    }

    fn inbox(&self) -> &Inbox {
        match self.handover {
            Some(_) => &self.letters.boxes[self.meet.rank],
            None => &self.letters.boxes[0],
        }
    }

    /// Moves what has arrived from a process into the inbox.
    fn take_in(&mut self, from: usize) -> Result<(), Report> {
        let offset = self.meet.layout.letters(from, self.meet.rank);
        loop {
            let ring: &Ring = self.meet.memory.at(offset);
            let tail = ring.tail.get();
            if ring.head.get() == tail {
                return Ok(());
            }
            let cell: &DeskEntry = self.meet.memory.at(cell_offset(offset, tail));
            let words = [&cell.what, &cell.count, &cell.cuts, &cell.place, &cell.offset];
            let [dtype, count, tag, file, size] = words.map(|word| word.load(Ordering::Relaxed));
            self.open_buffer(from, file as u32, size as usize)?;
            let buffer = self.letters.seen[&(from, file as u32)].block();
            let count = count as usize;
            if count > buffer.bytes().saturating_sub(HEAD_BYTES) {
                let what = "a message is longer than its buffer".into();
                return Err(self.meet.raise(from, Cause::Damaged { what }));
            }
            // SAFETY: inside the buffer, which the sender does not write to while it is full.
            let bytes = unsafe {
                std::slice::from_raw_parts(buffer.ptr().as_ptr().add(HEAD_BYTES).cast_const(), count)
            };
            // SAFETY: receives that were started are waited for or cancelled, see `expect_letter`.
            unsafe { self.inbox().deliver(from, tag as u16, dtype as u8, bytes) };
            buffer.at::<RingHead>(0).full.store(0, Ordering::Release);
            self.meet.memory.at::<Ring>(offset).tail.post(tail.wrapping_add(1));
        }
    }

    /// Waits until there is a free cell for a message to a process. The other process may be waiting for one too, so
    /// what has arrived from it is taken in meanwhile.
    fn wait_cell(&mut self, to: usize) -> Result<(), Report> {
        let offset = self.meet.layout.letters(self.meet.rank, to);
        loop {
            let ring: &Ring = self.meet.memory.at(offset);
            if ring.head.get().wrapping_sub(ring.tail.get()) < LETTERS {
                return Ok(());
            }
            let (rank, size) = (self.meet.rank, self.meet.size);
            for from in (0..size).filter(|from| *from != rank) {
                self.take_in(from)?;
            }
            self.meet.pause(to)?;
        }
    }

    /// Copies a message into a buffer that is free, or a new one.
    fn fill_buffer(&mut self, bytes: &[u8]) -> Result<usize, Report> {
        let fits = |buffer: &LetterBuffer| {
            let block = buffer.segment.block();
            let free = block.at::<RingHead>(0).full.load(Ordering::Acquire) == 0;
            free && block.bytes() - HEAD_BYTES >= bytes.len()
        };
        let smallest = |at: &usize| self.letters.out[*at].segment.block().bytes();
        let free = (0..self.letters.out.len()).filter(|at| fits(&self.letters.out[*at])).min_by_key(smallest);
        let at = match free {
            Some(at) => at,
            None => {
                let size = (bytes.len() + HEAD_BYTES).next_power_of_two().max(BUFFER_BYTES_MIN);
                let made = Segment::create(size, size);
                let failed = |error| Cause::Failed { why: no_memory("a message", &error) };
                let segment = made.map_err(|e| self.meet.raise(self.meet.rank, failed(e)))?;
                let file = segment.file_number().unwrap_or(0);
                self.letters.out.push(LetterBuffer { segment, file });
                self.letters.out.len() - 1
            }
        };
        let block = self.letters.out[at].segment.block();
        // SAFETY: the buffer is this rank's, free and long enough; it is marked full only after it was written.
        unsafe {
            let target = block.ptr().as_ptr().add(HEAD_BYTES);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
        block.at::<RingHead>(0).full.store(1, Ordering::Release);
        Ok(at)
    }

    /// Maps another process's buffer, the first time that it is used.
    fn open_buffer(&mut self, from: usize, file: u32, size: usize) -> Result<(), Report> {
        if self.letters.seen.contains_key(&(from, file)) {
            return Ok(());
        }
        let path = path_of(self.meet.desk(from).pid.load(Ordering::Acquire), file);
        let opened = Segment::open(&path, size, size);
        let segment = opened.map_err(|error| {
            // A message from a process that has ended is lost with it.
            match self.meet.without_files(from) {
                Err(report) => report,
                Ok(()) => {
                    let why = no_memory("a message", &error);
                    self.meet.raise(self.meet.rank, Cause::Failed { why })
                }
            }
        })?;
        self.letters.seen.insert((from, file), segment);
        Ok(())
    }
}

fn cell_offset(ring: usize, cell: u32) -> usize {
    ring + size_of::<Ring>() + (cell % LETTERS) as usize * size_of::<DeskEntry>()
}
