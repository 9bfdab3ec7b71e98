//! One connection of one class: what is written to it, what is read from it, and how it ends.
//!
//! A side that closes sends a last frame behind all that it posted, and reads on until the other side's last frame
//! comes. The other side answers with it at once, instead of what it still wanted to send. So neither closes a socket
//! into which the other one still writes, which would discard what is under way; and a connection that ends without a
//! last frame is a loss.

use std::io;
use std::os::fd::AsFd;

use rustix::event::PollFd;

use super::incoming::{Admit, Came, Incoming};
use super::letter::Payload;
use super::limits::{Class, ClassBounds, Label};
use super::outgoing::{Outgoing, Sent};
use crate::connection::Connection;
use crate::loopback;
use crate::ready;
use crate::seal::Seals;
use crate::socket::Stream;

/// Frames of one connection per turn and direction, so that none starves the others: 2 MiB.
const FRAMES_A_TURN: usize = 8;

/// Why a connection cannot go on.
#[derive(Debug)]
pub(super) enum LineTrouble {
    /// It ended.
    Gone,
    /// What came is not what the other side sent.
    Damaged(String),
    /// The other side follows another protocol or generation.
    Disagrees(String),
    /// This process has no memory for what arrives.
    NoMemory(usize),
}

/// What the courier does for a line.
pub(super) trait LineHandler {
    /// The next letter for the peer.
    fn next(&mut self) -> Option<(Label, Payload)>;
    /// A letter of this many bytes was sent.
    fn sent(&mut self, bytes: usize);
    /// Memory for a letter, if there is room.
    fn admit(&mut self, bytes: usize) -> Result<Option<Vec<u8>>, LineTrouble>;
    /// A letter has come.
    fn came(&mut self, label: Label, memory: Vec<u8>, length: usize);
}

/// A connection.
pub(super) struct MailLine {
    stream: Stream,
    seals: Option<Box<Seals>>,
    out: Outgoing,
    into: Incoming,
    /// Whether the socket takes no more, and whether there is no room for what has come.
    blocked: bool,
    full: bool,
    /// Whether this side began its last frame, whether that is whole, and whether the other side's has come.
    closing: bool,
    closed: bool,
    heard_close: bool,
}

impl MailLine {
    pub(super) fn new(
        connection: Connection,
        class: Class,
        generation: u64,
        bounds: ClassBounds,
    ) -> io::Result<MailLine> {
        let Connection { stream, seals } = connection;
        stream.set_nonblocking(true)?;
        stream.set_nodelay()?;
        if stream.stays_here()? {
            loopback::unpaced(&stream);
        }
        Ok(MailLine {
            stream,
            seals,
            out: Outgoing::new(class, generation),
            into: Incoming::new(class, generation, bounds.letter_bytes_max),
            blocked: false,
            full: false,
            closing: false,
            closed: false,
            heard_close: false,
        })
    }

    /// Makes progress in both directions, without waiting. Returns whether more can be done at once.
    pub(super) fn turn(&mut self, closing: bool, ends: &mut dyn LineHandler) -> Result<bool, LineTrouble> {
        let wrote = self.write(closing, ends)?;
        let read = self.read(&mut *ends)?;
        // The other side's last frame may have arrived, which is answered.
        let answered = if self.heard_close { self.write(closing, ends)? } else { false };
        Ok(wrote || read || answered)
    }

    /// Whether both sides have closed.
    pub(super) fn is_over(&self) -> bool {
        self.closed && self.heard_close
    }

    /// Whether the other side has closed.
    pub(super) fn heard_close(&self) -> bool {
        self.heard_close
    }

    /// Bytes of an incomplete letter.
    pub(super) fn unfinished(&self) -> Option<usize> {
        self.into.unfinished()
    }

    /// What to wait for. A line without room for its next letter is only waited on for writing.
    pub(super) fn interest(&self) -> Option<PollFd<'_>> {
        let reads = !self.full && !self.heard_close;
        match (reads, self.blocked) {
            (true, blocked) => Some(ready::interest(self.stream.as_fd(), blocked)),
            (false, true) => Some(ready::writable(self.stream.as_fd())),
            (false, false) => None,
        }
    }

    fn begin_close(&mut self) {
        self.closing = true;
        self.out.begin_close();
    }

    fn write(&mut self, closing: bool, ends: &mut dyn LineHandler) -> Result<bool, LineTrouble> {
        self.blocked = false;
        for _ in 0..FRAMES_A_TURN {
            if self.heard_close && !self.closing {
                self.begin_close();
            }
            if !self.out.busy() {
                let next = if self.closing { None } else { ends.next() };
                match next {
                    Some((label, payload)) => self.out.begin(label, payload),
                    None if closing && !self.closing => self.begin_close(),
                    None => return Ok(false),
                }
            }
            match self.out.push(&self.stream, self.seals.as_mut().map(|seals| &mut seals.out))? {
                Sent::Blocked => {
                    self.blocked = true;
                    return Ok(false);
                }
                Sent::Frame => {}
                Sent::Letter(bytes) => ends.sent(bytes),
                Sent::Close => self.closed = true,
            }
        }
        Ok(true)
    }

    fn read(&mut self, ends: &mut dyn LineHandler) -> Result<bool, LineTrouble> {
        self.full = false;
        for _ in 0..FRAMES_A_TURN {
            if self.heard_close {
                return Ok(false);
            }
            let opener = self.seals.as_mut().map(|seals| &mut seals.into);
            let admit: Admit = &mut |bytes| ends.admit(bytes);
            match self.into.pull(&self.stream, opener, admit)? {
                Came::Nothing => return Ok(false),
                Came::NoRoom => {
                    self.full = true;
                    return Ok(false);
                }
                Came::Frame => {}
                Came::Letter(label, memory, length) => ends.came(label, memory, length),
                Came::Close => self.heard_close = true,
            }
        }
        Ok(true)
    }
}
