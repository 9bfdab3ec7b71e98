//! Messages over sockets that are started and waited for, with tags, beside everything else that a group does.
//!
//! Each direction between two ranks has its own connection, made when the first message goes that way, with a thread at
//! either end. A send copies the message to the writing thread and is done: so ranks may send to each other in any
//! order and in any cycle. The reading thread puts all messages into the rank's inbox, whether or not a receive was
//! started for them. Unexpected messages wait in the receiver's memory, as many as the sender is ahead.
//!
//! A connection begins each message with a head: tag, element type and length. A last head marks the end. When a rank
//! is lost, the thread that reads from it or writes to it finds out, and raises the alarm of the process.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use polyreme_net::frame::{FrameOp, Tag, Terms};
use polyreme_net::links::WaitBounds;
use polyreme_net::{Alarm, Cause, Links, Move, Moves, Report};

use crate::element::DType;
use crate::inbox::Inbox;
use crate::links::bytes;
use crate::split::Connect;
use crate::work::Span;

/// Bytes of a head: tag, element type, length.
const HEAD_BYTES: usize = 16;
/// The length that marks the last head.
const LAST: u64 = u64::MAX;
/// How often a wait checks the alarm.
const LOOK: Duration = Duration::from_millis(100);
/// The longest message: a larger length means damaged data.
const MESSAGE_BYTES_MAX: u64 = 1 << 40;

/// One rank's messages.
pub(crate) struct Lane {
    rank: usize,
    names: Vec<usize>,
    connect: Connect,
    /// The number of the group; the two after it are those of its two directions.
    number: u16,
    inbox: Arc<Inbox>,
    writers: HashMap<usize, LaneWriter>,
    readers: HashMap<usize, JoinHandle<()>>,
    next: u64,
    sent_bytes: u64,
    /// The sender of each receive that was not waited for.
    from: HashMap<u64, usize>,
    shared: Arc<LaneShared>,
}

/// What the threads share with the rank.
struct LaneShared {
    alarm: Alarm,
    failed: Mutex<Option<Report>>,
}

struct LaneWriter {
    letters: Sender<OutgoingMessage>,
    thread: JoinHandle<()>,
}

/// A message for the writing thread; `None` marks the end.
type OutgoingMessage = Option<Sent>;

struct Sent {
    tag: u16,
    dtype: DType,
    bytes: Vec<u8>,
}

impl Lane {
    pub(crate) fn new(rank: usize, names: Vec<usize>, connect: Connect, number: u16, alarm: Alarm) -> Lane {
        let shared = Arc::new(LaneShared { alarm, failed: Mutex::new(None) });
        let (inbox, writers, readers, from) =
            (Arc::default(), HashMap::new(), HashMap::new(), HashMap::new());
        Lane { rank, names, connect, number, inbox, writers, readers, next: 0, sent_bytes: 0, from, shared }
    }

    /// Bytes of the messages that were sent.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Sends a message. When this returns, the memory is the caller's again.
    ///
    /// # Safety
    /// The memory is valid and nothing writes to it until this returns.
    pub(crate) unsafe fn send(&mut self, to: usize, tag: u16, span: Span, step: u64) -> Result<(), Report> {
        self.check_peer(to);
        self.shared.check()?;
        // SAFETY: the caller's promise.
        let (dtype, bytes) = (span.dtype, unsafe { bytes::of_span(&span) }.to_vec());
        if !self.writers.contains_key(&to) {
            let links = self.links(self.rank, to, step)?;
            let (letters, queue) = channel();
            let (place, shared) = (other(&links), self.shared.clone());
            let thread = self.thread("sends", to, move || shared.note(write(links, place, &queue)));
            self.writers.insert(to, LaneWriter { letters, thread });
        }
        self.sent_bytes += bytes.len() as u64;
        // A writer that ended has reported why.
        let _ = self.writers[&to].letters.send(Some(Sent { tag, dtype, bytes }));
        Ok(())
    }

    /// Starts to receive a message; returns the number to wait for.
    ///
    /// # Safety
    /// The memory is valid and nothing else accesses it until the number was waited for or this is dropped.
    pub(crate) unsafe fn receive(
        &mut self,
        from: usize,
        tag: u16,
        span: Span,
        step: u64,
    ) -> Result<u64, Report> {
        self.check_peer(from);
        self.shared.check()?;
        if !self.readers.contains_key(&from) {
            let links = self.links(from, self.rank, step)?;
            let (place, shared, inbox) = (other(&links), self.shared.clone(), self.inbox.clone());
            let thread = self.thread("receives", from, move || shared.note(read(links, place, from, &inbox)));
            self.readers.insert(from, thread);
        }
        self.next += 1;
        self.from.insert(self.next, from);
        // SAFETY: the caller's promise; dropping this cancels it.
        unsafe { self.inbox.want(self.next, from, tag, span) };
        Ok(self.next)
    }

    /// Waits until a message has come.
    pub(crate) fn wait(&mut self, id: u64, step: u64) -> Result<(), Report> {
        let Some(from) = self.from.remove(&id) else { return self.shared.check() };
        let end = loop {
            match self.inbox.wait_end(id, LOOK) {
                Some(Ok(())) => return Ok(()),
                Some(Err(what)) => {
                    let (rank, cause) = (self.names[from], Cause::Disagrees { what });
                    let report = Report { rank, host: String::new(), step, op: "receive".into(), cause };
                    break self.shared.fail(report);
                }
                None => {
                    if let Err(report) = self.shared.check() {
                        break report;
                    }
                }
            }
        };
        self.inbox.take_back();
        // The step of this rank, not that of its thread.
        Err(Report { step, op: "receive".into(), ..end })
    }

    /// Sends the last messages, and waits for those of the others. All ranks call it.
    pub(crate) fn finish(mut self) {
        for (_, writer) in self.writers.drain() {
            let _ = writer.letters.send(None);
            // A thread that failed has reported why.
            let _ = writer.thread.join();
        }
        for (_, reader) in self.readers.drain() {
            let _ = reader.join();
        }
    }

    /// This rank's end of the connection from one rank to another.
    fn links(&self, from: usize, to: usize, step: u64) -> Result<Links, Report> {
        let (low, high) = (from.min(to), from.max(to));
        let number = self.number + if from < to { 1 } else { 2 };
        let names = [self.names[low], self.names[high]];
        let made = (self.connect)(number, &names);
        let mut links = made.map_err(|error| {
            let why = format!("a connection for messages cannot be made: {error}");
            let (rank, cause) = (self.names[self.rank], Cause::Failed { why });
            let op = "send and receive".into();
            self.shared.fail(Report { rank, host: String::new(), step, op, cause })
        })?;
        links.set_names(names.to_vec());
        // Nothing arrives while the other rank sends nothing.
        links.set_bounds(WaitBounds { stall: Duration::MAX, ..links.bounds() });
        links.set_spins(false);
        Ok(links)
    }

    fn thread(&self, does: &str, peer: usize, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
        let name = format!("rank {} {does} {}", self.names[self.rank], self.names[peer]);
        std::thread::Builder::new().name(name).spawn(work).expect("the system can start a thread")
    }

    fn check_peer(&self, peer: usize) {
        assert!(peer < self.names.len() && peer != self.rank, "the peer is another rank");
    }
}

impl Drop for Lane {
    /// From here on nothing writes to the memory of receives. Threads end by themselves: writers because they have no
    /// more to do, readers when the other end is gone.
    fn drop(&mut self) {
        self.inbox.take_back();
    }
}

impl LaneShared {
    fn check(&self) -> Result<(), Report> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        failed.or_else(|| self.alarm.raised()).map_or(Ok(()), Err)
    }

    fn fail(&self, report: Report) -> Report {
        self.alarm.raise(report.clone());
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(report).clone()
    }

    fn note(&self, end: Result<(), Report>) {
        if let Err(report) = end {
            self.fail(report);
        }
    }
}

/// The other one of two.
fn other(links: &Links) -> usize {
    1 - links.rank()
}

/// The tag of a message, equal at both ends, which may be in different steps.
fn label(count: usize) -> Tag {
    Tag { step: 0, op: FrameOp::Send, dtype: DType::U8 as u8, count: count as u64, terms: Terms::default() }
}

/// The writing thread.
fn write(mut links: Links, to: usize, queue: &Receiver<OutgoingMessage>) -> Result<(), Report> {
    let mut put = |bytes: &[u8]| {
        let moves = Moves::new(vec![Move::send_from(to, 0..bytes.len())]);
        links.run(&label(bytes.len()), &moves, bytes, &mut [], &mut |_, _, _| {})
    };
    // A rank that ends without `finish` sends nothing more.
    while let Ok(letter) = queue.recv() {
        let Some(Sent { tag, dtype, bytes }) = letter else { return put(&head(0, 0, LAST)) };
        put(&head(tag, dtype as u8, bytes.len() as u64))?;
        put(&bytes)?;
    }
    Ok(())
}

fn head(tag: u16, dtype: u8, length: u64) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..2].copy_from_slice(&tag.to_le_bytes());
    head[2] = dtype;
    head[8..].copy_from_slice(&length.to_le_bytes());
    head
}

/// The reading thread.
fn read(mut links: Links, from: usize, rank: usize, inbox: &Inbox) -> Result<(), Report> {
    let take = |links: &mut Links, bytes: &mut [u8]| {
        let moves = Moves::new(vec![Move::recv(from, 0..bytes.len())]);
        links.run(&label(bytes.len()), &moves, &[], bytes, &mut |_, _, _| {})
    };
    loop {
        let mut head = [0; HEAD_BYTES];
        take(&mut links, &mut head)?;
        let [a, b, dtype, ..] = head;
        let length = u64::from_le_bytes(*head.last_chunk().expect("a head ends with a length"));
        if length == LAST {
            return Ok(());
        }
        if length > MESSAGE_BYTES_MAX {
            let (name, host) = links.name();
            let cause = Cause::Damaged { what: format!("a message of {length} bytes") };
            return Err(Report { rank: name, host, step: 0, op: "receive".into(), cause });
        }
        let mut bytes = vec![0; length as usize];
        take(&mut links, &mut bytes)?;
        // SAFETY: receives that were started are waited for or cancelled.
        unsafe { inbox.deliver(rank, u16::from_le_bytes([a, b]), dtype, &bytes) };
    }
}
