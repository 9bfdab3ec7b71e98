//! The letter that is being written to one connection, frame by frame.

use std::io::{ErrorKind, IoSlice};

use super::head::{FRAME_BYTES_MAX, HEAD_BYTES, Head, What};
use super::letter::Payload;
use super::limits::{Class, Label};
use super::line::LineTrouble;
use crate::checksum;
use crate::seal::{self, SEAL_BYTES, Sealer};
use crate::socket::Stream;

/// The result of one write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sent {
    /// The socket takes no more.
    Blocked,
    /// A frame is whole, and its letter is not.
    Frame,
    /// A letter of this many bytes is complete.
    Letter(usize),
    /// The last frame is whole.
    Close,
}

/// What is being written.
pub(super) struct Outgoing {
    class: Class,
    generation: u64,
    letter: Option<(Label, Payload)>,
    /// Bytes of the letter in frames that are whole.
    at: usize,
    /// The frame: its head, its payload's length, how much of both is written, and whether there is one.
    head: [u8; HEAD_BYTES + SEAL_BYTES],
    length: usize,
    wrote: usize,
    writing: bool,
    closing: bool,
    /// Its payload, sealed: what was posted must stay readable.
    sealed: Vec<u8>,
    /// The number of the next frame.
    n_sent: u64,
}

impl Outgoing {
    pub(super) fn new(class: Class, generation: u64) -> Outgoing {
        Outgoing {
            class,
            generation,
            letter: None,
            at: 0,
            head: [0; HEAD_BYTES + SEAL_BYTES],
            length: 0,
            wrote: 0,
            writing: false,
            closing: false,
            sealed: Vec::new(),
            n_sent: 0,
        }
    }

    /// Whether there is something to push.
    pub(super) fn busy(&self) -> bool {
        self.writing || self.closing || self.letter.is_some()
    }

    /// Begins a letter.
    pub(super) fn begin(&mut self, label: Label, payload: Payload) {
        (self.letter, self.at) = (Some((label, payload)), 0);
    }

    /// Begins the last frame; it comes behind the frame that is being written, and instead of the rest of its letter.
    pub(super) fn begin_close(&mut self) {
        self.closing = true;
        if !self.writing {
            self.letter = None;
        }
    }

    /// Writes up to the end of a frame, without waiting.
    pub(super) fn push(&mut self, stream: &Stream, sealer: Option<&mut Sealer>) -> Result<Sent, LineTrouble> {
        let head_bytes = HEAD_BYTES + sealer.as_ref().map_or(0, |_| SEAL_BYTES);
        let seals = sealer.is_some();
        if !self.writing {
            self.open(sealer);
        }
        let payload: &[u8] = match &self.letter {
            _ if seals => &self.sealed[..self.length],
            Some((_, payload)) => &payload[self.at..self.at + self.length],
            None => &[],
        };
        let more = self.letter.as_ref().is_some_and(|(_, payload)| self.at + self.length < payload.len());
        while self.wrote < head_bytes + self.length {
            let head = &self.head[self.wrote.min(head_bytes)..head_bytes];
            let rest = &payload[self.wrote.saturating_sub(head_bytes)..];
            match stream.send(&[IoSlice::new(head), IoSlice::new(rest)], more && !self.closing) {
                Ok(n) => self.wrote += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Sent::Blocked),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(LineTrouble::Gone),
            }
        }
        self.writing = false;
        self.n_sent += 1;
        self.at += self.length;
        let Some((_, payload)) = &self.letter else {
            self.closing = false;
            return Ok(Sent::Close);
        };
        let whole = payload.len();
        if self.at < whole && !self.closing {
            return Ok(Sent::Frame);
        }
        self.letter = None;
        Ok(Sent::Letter(whole))
    }

    /// Begins a frame: of the letter, or the last one.
    fn open(&mut self, sealer: Option<&mut Sealer>) {
        let (what, label, rest) = match &self.letter {
            Some((label, payload)) => (What::Part, *label, &payload[self.at..]),
            None => (What::Close, Label::default(), &[][..]),
        };
        let payload = &rest[..rest.len().min(FRAME_BYTES_MAX)];
        let head = Head {
            what,
            class: self.class,
            generation: self.generation,
            sequence: self.n_sent,
            label,
            total: self.letter.as_ref().map_or(0, |(_, payload)| payload.len() as u64),
            length: payload.len() as u32,
            payload_crc: if sealer.is_some() { 0 } else { checksum::of(payload) },
        };
        self.head[..HEAD_BYTES].copy_from_slice(&head.encode(sealer.is_some()));
        if let Some(sealer) = sealer {
            if self.sealed.len() < payload.len() {
                self.sealed.resize(payload.len(), 0);
            }
            let sealed = &mut self.sealed[..payload.len()];
            seal::copy(sealed, payload);
            sealer.seal(&mut self.head, sealed);
        }
        (self.length, self.wrote, self.writing) = (payload.len(), 0, true);
    }
}
