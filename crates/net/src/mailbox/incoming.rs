//! The letter that is being read from one connection. Nothing is reserved before its length was compared with what is
//! allowed and there is room for it; until then the rest stays in the socket, and its sender waits.

use std::io::{ErrorKind, Read};

use super::head::{FRAME_BYTES_MAX, HEAD_BYTES, Head, What};
use super::limits::{Class, Label};
use super::line::LineTrouble;
use crate::checksum;
use crate::seal::{Forged, Opener, SEAL_BYTES};

/// The result of one read.
#[derive(Debug)]
pub(super) enum Came {
    /// Nothing more has come.
    Nothing,
    /// There is no room for the next letter.
    NoRoom,
    /// A frame is whole, and its letter is not.
    Frame,
    /// A letter is complete: its label, memory, and length in it.
    Letter(Label, Vec<u8>, usize),
    /// The other side sends nothing more.
    Close,
}

/// What is being read.
pub(super) struct Incoming {
    class: Class,
    generation: u64,
    letter_bytes_max: usize,
    head: [u8; HEAD_BYTES + SEAL_BYTES],
    n_head: usize,
    /// The frame whose payload comes, and how much of it is there.
    frame: Option<Head>,
    n_payload: usize,
    letter: Option<PartialLetter>,
    /// The number of the next frame.
    n_heard: u64,
}

/// A letter that has arrived in part.
struct PartialLetter {
    label: Label,
    total: usize,
    memory: Vec<u8>,
    /// Bytes in frames that are whole.
    at: usize,
}

/// Gives memory for a letter of this many bytes, if there is room.
pub(super) type Admit<'a> = &'a mut dyn FnMut(usize) -> Result<Option<Vec<u8>>, LineTrouble>;

impl Incoming {
    pub(super) fn new(class: Class, generation: u64, letter_bytes_max: usize) -> Incoming {
        Incoming {
            class,
            generation,
            letter_bytes_max,
            head: [0; HEAD_BYTES + SEAL_BYTES],
            n_head: 0,
            frame: None,
            n_payload: 0,
            letter: None,
            n_heard: 0,
        }
    }

    /// Bytes of the incomplete letter that room was reserved for.
    pub(super) fn unfinished(&self) -> Option<usize> {
        self.letter.as_ref().map(|letter| letter.total)
    }

    /// Reads up to the end of a frame, without waiting.
    pub(super) fn pull(
        &mut self,
        mut stream: impl Read,
        mut opener: Option<&mut Opener>,
        admit: Admit,
    ) -> Result<Came, LineTrouble> {
        let frame = match self.frame {
            Some(frame) => frame,
            None => {
                let head_bytes = HEAD_BYTES + opener.as_ref().map_or(0, |_| SEAL_BYTES);
                if !fill(&mut stream, &mut self.head[..head_bytes], &mut self.n_head)? {
                    return Ok(Came::Nothing);
                }
                let frame = self.open(opener.as_deref_mut())?;
                (self.n_head, self.n_payload) = (0, 0);
                *self.frame.insert(frame)
            }
        };
        if frame.what == What::Close {
            self.check(&frame, opener, &mut [])?;
            return Ok(Came::Close);
        }
        let mut letter = match self.letter.take() {
            Some(letter) => letter,
            None => {
                let total = frame.total as usize;
                let Some(memory) = admit(total)? else { return Ok(Came::NoRoom) };
                PartialLetter { label: frame.label, total, memory, at: 0 }
            }
        };
        let end = letter.at + frame.length as usize;
        if letter.memory.len() < end {
            // One frame at a time: its pages are in cache when the payload is written to them.
            letter.memory.resize(end, 0);
        }
        let payload = &mut letter.memory[letter.at..end];
        let read = fill(&mut stream, payload, &mut self.n_payload);
        if !matches!(read, Ok(true)) {
            self.letter = Some(letter);
            return read.map(|_| Came::Nothing);
        }
        let checked = self.check(&frame, opener, payload);
        letter.at = end;
        if checked.is_ok() && letter.at == letter.total {
            return Ok(Came::Letter(letter.label, letter.memory, letter.total));
        }
        self.letter = Some(letter);
        checked.map(|()| Came::Frame)
    }

    /// The head that has come, if it is one that may come here.
    fn open(&mut self, opener: Option<&mut Opener>) -> Result<Head, LineTrouble> {
        let sealed = opener.is_some();
        if let Some(opener) = opener {
            let forged = |Forged| LineTrouble::Damaged("a head failed authentication".into());
            opener.open_head(&mut self.head).map_err(forged)?;
        }
        let head = self.head.first_chunk().expect("what is read begins with a head");
        let head = Head::decode(head, sealed).map_err(|what| LineTrouble::Damaged(what.into()))?;
        let place = (head.class, head.generation, head.sequence);
        if place != (self.class, self.generation, self.n_heard) {
            let what = format!(
                "it sent frame {} ({}, generation {}) instead of frame {} ({}, generation {})",
                head.sequence,
                head.class.name(),
                head.generation,
                self.n_heard,
                self.class.name(),
                self.generation
            );
            return Err(LineTrouble::Disagrees(what));
        }
        let (total, max) = (head.total, self.letter_bytes_max);
        if total > max as u64 {
            let what = format!("it sent a letter of {total} bytes; at most {max} are allowed");
            return Err(LineTrouble::Disagrees(what));
        }
        let (at, goes_on) = match &self.letter {
            Some(letter) => (letter.at, (letter.label, letter.total as u64) == (head.label, total)),
            None => (0, true),
        };
        let length = head.length as usize;
        let part = goes_on
            && length <= FRAME_BYTES_MAX
            && at + length <= total as usize
            && (length > 0 || total == 0);
        match head.what {
            What::Part if part => Ok(head),
            What::Close if length == 0 => Ok(head),
            _ => Err(LineTrouble::Damaged("a frame does not go on with its letter".into())),
        }
    }

    /// The payload of a frame is whole.
    fn check(
        &mut self,
        frame: &Head,
        opener: Option<&mut Opener>,
        payload: &mut [u8],
    ) -> Result<(), LineTrouble> {
        let whole = match opener {
            Some(opener) => opener.open_payload(payload).is_ok(),
            None => checksum::of(payload) == frame.payload_crc,
        };
        if !whole {
            return Err(LineTrouble::Damaged(format!("frame {} is damaged", self.n_heard)));
        }
        self.frame = None;
        self.n_heard += 1;
        Ok(())
    }
}

/// Reads until all of it is there or the socket is empty. Returns whether all is there.
fn fill(stream: &mut impl Read, into: &mut [u8], n: &mut usize) -> Result<bool, LineTrouble> {
    while *n < into.len() {
        match stream.read(&mut into[*n..]) {
            Ok(0) => return Err(LineTrouble::Gone),
            Ok(read) => *n += read,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(LineTrouble::Gone),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod fuzz;
