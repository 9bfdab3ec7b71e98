//! One connection: the frame that is being written, the frame that is being read.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::sync::Arc;
use std::time::Duration;

use super::farewell;
use super::lend::Pipe;
use crate::checksum;
use crate::connection::Connection;
use crate::frame::{FrameOp, HEADER_BYTES, Header, SEGMENT_BYTES_MAX, Tag};
use crate::report::Report;
use crate::seal::{self, Forged, SEAL_BYTES, Seals};
use crate::socket::Stream;
use crate::system::System;

/// How much of what a peer wrote before it ended is searched for a farewell.
const LAST_WORDS_BYTES_MAX: usize = 64 << 20;

/// A header, and what sealing adds to it.
const HEAD_BYTES_MAX: usize = HEADER_BYTES + SEAL_BYTES;

/// How long the rest of a farewell that has begun may take.
const FAREWELL_TIME_MAX: Duration = Duration::from_millis(100);

/// The result of one read or write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IoStep {
    /// The socket would block, and nothing moved.
    Blocked,
    /// Some bytes moved.
    Moved,
    /// The frame is whole.
    Whole,
}

/// Why a connection cannot go on.
#[derive(Debug)]
pub(super) enum LinkTrouble {
    Gone,
    Damaged(String),
    Disagrees(String),
    Farewell(Report),
}

pub(super) struct LinkPeer {
    pub(super) stream: Stream,
    /// What frames are sealed with, if they are.
    seals: Option<Box<Seals>>,
    system: Arc<dyn System>,
    /// The number of the next frame that is written, and of the next that is read.
    pub(super) sent: u64,
    pub(super) heard: u64,
    /// The frame that is being written: its header, how much of it is written, and whether there is one.
    head: [u8; HEAD_BYTES_MAX],
    wrote: usize,
    pub(super) writing: bool,
    /// Its payload, sealed: what is sent must stay readable here.
    sealed: Vec<u8>,
    /// Whether that frame is lent, and what it goes through.
    lending: bool,
    pipe: Option<Pipe>,
    /// Whether frames may be lent to this peer at all.
    pub(super) lends: bool,
    /// Whether the peer owes a receipt for what was lent to it in this run, and whether it is owed one.
    pub(super) lent: bool,
    pub(super) borrowed: bool,
    /// The frame that is being read.
    header: [u8; HEAD_BYTES_MAX],
    read: usize,
    payload_crc: u32,
    came_lent: bool,
    /// A received segment that is to be reduced.
    pub(super) staging: Vec<u8>,
    /// Whether it is complete and checked, and waits for the data that it is reduced into.
    pub(super) staged: bool,
}

impl LinkPeer {
    /// Takes over a connection; `here` if it leads to a rank of this host. Lent pages cannot be sealed.
    pub(super) fn new(connection: Connection, system: Arc<dyn System>, here: bool) -> LinkPeer {
        let Connection { stream, seals } = connection;
        LinkPeer {
            lends: here && seals.is_none(),
            stream,
            seals,
            system,
            sent: 0,
            heard: 0,
            head: [0; HEAD_BYTES_MAX],
            wrote: 0,
            writing: false,
            sealed: Vec::new(),
            lending: false,
            pipe: None,
            lent: false,
            borrowed: false,
            header: [0; HEAD_BYTES_MAX],
            read: 0,
            payload_crc: 0,
            came_lent: false,
            staging: Vec::new(),
            staged: false,
        }
    }

    /// Whether frames are sealed: then they have no checksums.
    pub(super) fn seals(&self) -> bool {
        self.seals.is_some()
    }

    /// Bytes of a header on this connection.
    pub(super) fn head_bytes(&self) -> usize {
        if self.seals() { HEAD_BYTES_MAX } else { HEADER_BYTES }
    }

    /// Begins a frame. The payload stays as it is until the frame is whole, or if it is lent until the peer has taken it.
    pub(super) fn open(&mut self, header: Header, payload: &[u8]) {
        match &mut self.seals {
            None => self.head[..HEADER_BYTES].copy_from_slice(&header.encode()),
            Some(seals) => {
                self.head[..HEADER_BYTES].copy_from_slice(&header.encode_unsummed());
                // Once, for all segments that follow.
                self.sealed.resize(SEGMENT_BYTES_MAX, 0);
                let sealed = &mut self.sealed[..payload.len()];
                seal::copy(sealed, payload);
                seals.out.seal(&mut self.head, sealed);
            }
        }
        (self.wrote, self.writing, self.lending) = (0, true, header.lent);
        self.lent |= header.lent;
    }

    /// Writes what the socket takes of the frame that was opened; `more` says that another one follows at once.
    pub(super) fn push(&mut self, payload: &[u8], more: bool) -> Result<IoStep, LinkTrouble> {
        let mut step = IoStep::Blocked;
        while self.wrote < self.head_bytes() + payload.len() {
            match self.write(payload, more) {
                Ok(n) => (self.wrote, step) = (self.wrote + n, IoStep::Moved),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(step),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // Pipes and pages may be refused where sockets are not: then the rest is copied, and so is all that
                // follows.
                Err(_) if self.lending => (self.lending, self.lends, self.pipe) = (false, false, None),
                Err(_) => return Err(self.last_words()),
            }
        }
        self.writing = false;
        self.sent += 1;
        Ok(IoStep::Whole)
    }

    fn write(&mut self, payload: &[u8], more: bool) -> io::Result<usize> {
        let (head, rest) = self.unwritten(payload);
        if !self.lending {
            return self.stream.send(&[IoSlice::new(head), IoSlice::new(rest)], more);
        }
        if !head.is_empty() {
            return self.stream.send(&[IoSlice::new(head)], true);
        }
        if self.pipe.is_none() {
            self.pipe = Some(Pipe::new()?);
        }
        let pipe = self.pipe.as_mut().expect("made above");
        pipe.lend(&self.stream, &payload[self.wrote - HEADER_BYTES..], more)
    }

    /// What is left to write of the frame that was opened.
    pub(super) fn unwritten<'a>(&'a self, payload: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        let whole = self.head_bytes();
        let payload = if self.seals() { &self.sealed[..payload.len()] } else { payload };
        (&self.head[self.wrote.min(whole)..whole], &payload[self.wrote.saturating_sub(whole)..])
    }

    /// Reads what has come of a frame whose payload goes to `target`. The header is checked; once the frame is
    /// complete, a sealed payload is opened; the caller checks the sum of another one with [`LinkPeer::checked`].
    pub(super) fn pull(&mut self, target: &mut [u8], expected: &Header) -> Result<IoStep, LinkTrouble> {
        let head_bytes = self.head_bytes();
        let whole = head_bytes + target.len();
        let mut step = IoStep::Blocked;
        while self.read < whole {
            let (head, payload_at) = (
                &mut self.header[self.read.min(head_bytes)..head_bytes],
                self.read.saturating_sub(head_bytes),
            );
            let headless = head.is_empty();
            let n = if headless {
                (&self.stream).read(&mut target[payload_at..])
            } else {
                let mut parts = [IoSliceMut::new(head), IoSliceMut::new(&mut target[..])];
                (&self.stream).read_vectored(&mut parts)
            };
            match n {
                Ok(0) => return Err(LinkTrouble::Gone),
                Ok(n) => (self.read, step) = (self.read + n, IoStep::Moved),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(step),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Err(LinkTrouble::Gone),
            }
            if !headless && self.read >= head_bytes {
                self.check(target, expected)?;
            }
        }
        if let Some(seals) = &mut self.seals {
            let forged =
                |Forged| LinkTrouble::Damaged(format!("segment {} failed authentication", self.heard));
            seals.into.open_payload(target).map_err(forged)?;
        }
        self.read = 0;
        self.heard += 1;
        Ok(IoStep::Whole)
    }

    /// Compares the checksum of the payload that came last with what its header says.
    pub(super) fn checked(&mut self, sum: u32) -> Result<u32, LinkTrouble> {
        if sum == self.payload_crc {
            return Ok(sum);
        }
        let damaged = LinkTrouble::Damaged(format!("the checksum of segment {} is wrong", self.heard - 1));
        // A peer whose run failed may have changed what it had lent; then it has said why it failed.
        Err(if self.came_lent { self.farewell_or(damaged) } else { damaged })
    }

    /// Sends the receipt for what the peer lent in this run, if it lent anything. Returns whether anything moved.
    pub(super) fn push_receipt(&mut self, tag: &Tag, generation: u64) -> Result<bool, LinkTrouble> {
        if !self.borrowed {
            return Ok(false);
        }
        if !self.writing {
            self.open(Header::of(&Tag { op: FrameOp::Receipt, ..*tag }, generation, self.sent, 0), &[]);
        }
        let step = self.push(&[], false)?;
        self.borrowed = step != IoStep::Whole;
        Ok(step != IoStep::Blocked)
    }

    /// Receives the receipt for what was lent to the peer in this run, if anything was. Returns whether anything moved.
    pub(super) fn pull_receipt(&mut self, tag: &Tag, generation: u64) -> Result<bool, LinkTrouble> {
        if !self.lent {
            return Ok(false);
        }
        let expected = Header::of(&Tag { op: FrameOp::Receipt, ..*tag }, generation, self.heard, 0);
        let step = self.pull(&mut [], &expected)?;
        self.lent = step != IoStep::Whole;
        Ok(step != IoStep::Blocked)
    }

    fn check(&mut self, target: &mut [u8], expected: &Header) -> Result<(), LinkTrouble> {
        let header = self.decode().map_err(|what| LinkTrouble::Damaged(what.into()))?;
        if header.op == FrameOp::Farewell as u8 {
            let got = self.read - self.head_bytes();
            return Err(self.farewell(&header, &target[..got]));
        }
        if let Some(what) = header.disagreement(expected) {
            return Err(LinkTrouble::Disagrees(what));
        }
        self.payload_crc = header.payload_crc;
        self.borrowed |= header.lent;
        self.came_lent = header.lent;
        Ok(())
    }

    /// The header that has come.
    fn decode(&mut self) -> Result<Header, &'static str> {
        let (header, _) = self.header.split_first_chunk_mut().expect("a head begins with a header");
        let Some(seals) = &mut self.seals else { return Header::decode(header) };
        match seals.into.open_head(&mut self.header) {
            Ok(()) => {
                Header::decode_unsummed(self.header.first_chunk().expect("a head begins with a header"))
            }
            Err(Forged) => Err("a header failed authentication"),
        }
    }

    /// The header of the frame `ahead` frames further on, from bytes that were received but not consumed.
    pub(super) fn decode_ahead(&self, ahead: u64, head: &[u8]) -> Option<Header> {
        let Some(seals) = &self.seals else { return Header::decode(head.first_chunk()?).ok() };
        let mut head: [u8; HEAD_BYTES_MAX] = head.try_into().ok()?;
        seals.into.open_ahead(ahead, &mut head).ok()?;
        Header::decode_unsummed(head.first_chunk()?).ok()
    }

    /// The frame of a farewell as it goes over the wire; it comes behind the frame that is being written, if there is one.
    pub(super) fn letter(&mut self, tag: &Tag, generation: u64, text: &[u8]) -> Vec<u8> {
        let header = Header::of(tag, generation, self.sent + u64::from(self.writing), text.len());
        match &mut self.seals {
            None => [&Header { payload_crc: checksum::of(text), ..header }.encode()[..], text].concat(),
            Some(seals) => {
                let mut head = [0; HEAD_BYTES_MAX];
                head[..HEADER_BYTES].copy_from_slice(&header.encode_unsummed());
                let mut text = text.to_vec();
                seals.out.seal(&mut head, &mut text);
                [&head[..], &text].concat()
            }
        }
    }

    /// Reads the rest of a farewell, of which `got` came already.
    fn farewell(&mut self, header: &Header, got: &[u8]) -> LinkTrouble {
        let mut bytes = [0; farewell::BYTES_MAX];
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        let Some(bytes) = bytes.get_mut(..length).filter(|b| b.len() >= got.len()) else {
            return LinkTrouble::Damaged("a farewell is too long".into());
        };
        bytes[..got.len()].copy_from_slice(got);
        let (mut at, until) = (got.len(), self.system.now() + FAREWELL_TIME_MAX);
        while at < bytes.len() {
            match (&self.stream).read(&mut bytes[at..]) {
                Ok(0) => return LinkTrouble::Gone,
                Ok(n) => at += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if self.system.now() > until {
                        return LinkTrouble::Gone;
                    }
                    self.system.sleep(Duration::from_millis(1));
                }
                Err(_) => return LinkTrouble::Gone,
            }
        }
        let whole = match &mut self.seals {
            None => checksum::of(bytes) == header.payload_crc,
            Some(seals) => seals.into.open_payload(bytes).is_ok(),
        };
        if !whole {
            return LinkTrouble::Damaged("a farewell is damaged".into());
        }
        match farewell::decode(bytes) {
            Some(report) => LinkTrouble::Farewell(report),
            None => LinkTrouble::Damaged("a farewell cannot be read".into()),
        }
    }

    fn farewell_or(&mut self, trouble: LinkTrouble) -> LinkTrouble {
        match self.last_words() {
            LinkTrouble::Farewell(report) => LinkTrouble::Farewell(report),
            _ => trouble,
        }
    }

    /// A peer that closed may have sent a farewell, after frames that have not been read yet.
    fn last_words(&mut self) -> LinkTrouble {
        let mut scratch = vec![0; SEGMENT_BYTES_MAX];
        let head_bytes = self.head_bytes();
        let mut seen = 0;
        // A header that is complete was opened when it came.
        let mut opened = self.read >= head_bytes;
        while seen < LAST_WORDS_BYTES_MAX {
            while self.read < head_bytes {
                match (&self.stream).read(&mut self.header[self.read..head_bytes]) {
                    Ok(n) if n > 0 => self.read += n,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    _ => return LinkTrouble::Gone,
                }
            }
            let header = match (opened, self.header.first_chunk()) {
                (true, Some(header)) if self.seals() => Header::decode_unsummed(header),
                _ => self.decode(),
            };
            opened = false;
            let Ok(header) = header else { return LinkTrouble::Gone };
            let skip = usize::try_from(header.length).unwrap_or(usize::MAX);
            if header.op == FrameOp::Farewell as u8 {
                return self.farewell(&header, &[]);
            }
            let mut at = self.read - head_bytes;
            while at < skip.min(SEGMENT_BYTES_MAX) {
                match (&self.stream).read(&mut scratch[..skip.min(SEGMENT_BYTES_MAX) - at]) {
                    Ok(n) if n > 0 => at += n,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    _ => return LinkTrouble::Gone,
                }
            }
            if let Some(seals) = &mut self.seals {
                seals.into.skip_payload();
            }
            self.read = 0;
            seen += head_bytes + at;
        }
        LinkTrouble::Gone
    }
}

#[cfg(test)]
mod fuzz;
