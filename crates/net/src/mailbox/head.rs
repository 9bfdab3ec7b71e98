//! The header of each frame of a mailbox.
//!
//! A letter is cut into frames. Each has the letter's label, its total length, the number of the frame on its
//! connection, and the generation. On an encrypted connection head and payload are sealed ([`crate::seal`]); otherwise
//! each has a checksum.

use super::limits::{Class, Label};

/// Bytes of a head: little endian.
pub(super) const HEAD_BYTES: usize = 64;
/// The longest payload of one frame: that of segments of links, for the same reason.
pub(super) const FRAME_BYTES_MAX: usize = crate::frame::SEGMENT_BYTES_MAX;
const MAGIC: [u8; 4] = *b"PRL1";
/// The offset of the head's checksum.
const CRC_AT: usize = 60;

/// The kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// A part of a letter.
    Part,
    /// The sender posts nothing more, and drops what it still receives.
    Close,
}

/// The head of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    pub(super) what: What,
    pub(super) class: Class,
    pub(super) generation: u64,
    /// The frame's number on this connection and in this direction.
    pub(super) sequence: u64,
    pub(super) label: Label,
    /// Bytes of the whole letter.
    pub(super) total: u64,
    /// Bytes of this frame's payload.
    pub(super) length: u32,
    pub(super) payload_crc: u32,
}

impl Head {
    /// As bytes. A head that is sealed needs no checksum.
    pub(super) fn encode(&self, sealed: bool) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = match self.what {
            What::Part => 1,
            What::Close => 2,
        };
        bytes[5] = self.class as u8;
        bytes[6..8].copy_from_slice(&self.label.kind.to_le_bytes());
        let words = [self.generation, self.sequence, self.label.ticket, self.label.place, self.total];
        for (k, word) in words.into_iter().enumerate() {
            bytes[8 + 8 * k..16 + 8 * k].copy_from_slice(&word.to_le_bytes());
        }
        bytes[48..52].copy_from_slice(&self.length.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.payload_crc.to_le_bytes());
        if !sealed {
            let crc = crc32c::crc32c(&bytes[..CRC_AT]);
            bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        }
        bytes
    }

    /// Decodes bytes that were opened, or that have a checksum.
    pub(super) fn decode(bytes: &[u8; HEAD_BYTES], sealed: bool) -> Result<Head, &'static str> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if !sealed && u32_at(CRC_AT) != crc32c::crc32c(&bytes[..CRC_AT]) {
            return Err("the checksum of a head is wrong");
        }
        if bytes[..4] != MAGIC {
            return Err("it does not begin like a letter");
        }
        let what = match bytes[4] {
            1 => What::Part,
            2 => What::Close,
            _ => return Err("a frame of an unknown kind"),
        };
        let class = match bytes[5] {
            0 => Class::Urgent,
            1 => Class::Data,
            _ => return Err("a letter of an unknown class"),
        };
        let kind = u16::from_le_bytes([bytes[6], bytes[7]]);
        Ok(Head {
            what,
            class,
            generation: u64_at(8),
            sequence: u64_at(16),
            label: Label { kind, ticket: u64_at(24), place: u64_at(32) },
            total: u64_at(40),
            length: u32_at(48),
            payload_crc: u32_at(52),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_through_and_each_changed_bit_is_found() {
        let label = Label { kind: 0x1234, ticket: 5 << 40, place: u64::MAX };
        for (what, class) in [(What::Part, Class::Urgent), (What::Close, Class::Data)] {
            let (generation, sequence) = (3, 1 << 50);
            let head =
                Head { what, class, generation, sequence, label, total: 1 << 35, length: 7, payload_crc: 9 };
            for sealed in [false, true] {
                assert_eq!(Head::decode(&head.encode(sealed), sealed), Ok(head));
            }
            for bit in 0..8 * HEAD_BYTES {
                let mut bent = head.encode(false);
                bent[bit / 8] ^= 1 << (bit % 8);
                assert!(Head::decode(&bent, false).is_err(), "bit {bit}");
            }
        }
    }
}
