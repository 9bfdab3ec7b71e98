//! The header of every message between ranks.
//!
//! A message is cut into segments; each is a header of [`HEADER_BYTES`] and a payload, each with its checksum. Both
//! sides know how long a message is before it starts, so a length on the wire is compared and never trusted: no memory
//! is reserved because of a peer's claim. On an encrypted connection both are sealed ([`crate::seal`]), and no checksum
//! is computed.

/// Bytes of a header: little endian, no padding.
pub const HEADER_BYTES: usize = 56;

/// The longest payload of one segment. CPU time of 23 all-reduces of 64 MiB between two ranks on loopback, best of three:
/// 2.1 s with 32 KiB, 1.7 s with 64 KiB, 1.5 s with 128 KiB, 1.4 s with 256 KiB, 1.5 s with 512 KiB and 1 MiB.
pub const SEGMENT_BYTES_MAX: usize = 256 * 1024;

/// Messages are cut finely enough that checking, copying and reducing overlap, but not below this.
const SEGMENT_BYTES_MIN: usize = 64 * 1024;

/// The longest payload that a header can express.
const LENGTH_MAX: u64 = (1 << 24) - 1;
const _: () = assert!(SEGMENT_BYTES_MAX as u64 <= LENGTH_MAX);

pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"PRF3");

/// The operation that a message belongs to. New operations get new numbers; old ones keep theirs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum FrameOp {
    /// All ranks wait for each other.
    Barrier = 1,
    /// Every rank gets the reduction of all.
    AllReduce = 2,
    /// Each rank gets the reduction of its range.
    ReduceScatter = 3,
    /// Every rank gets the ranges of all.
    AllGather = 4,
    /// Every rank gets the root's data.
    Broadcast = 5,
    /// The root gets the reduction of all.
    Reduce = 6,
    /// The root gets the ranges of all.
    Gather = 7,
    /// Each rank gets its range of the root's data.
    Scatter = 8,
    /// Each rank gets a range from every other.
    AllToAll = 9,
    /// Point to point.
    Send = 10,
    /// Not an operation: the sender has taken all that was lent to it.
    Receipt = 254,
    /// Not an operation: the sender ends, and says why.
    Farewell = 255,
}

impl FrameOp {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            FrameOp::Barrier => "barrier",
            FrameOp::AllReduce => "all-reduce",
            FrameOp::ReduceScatter => "reduce-scatter",
            FrameOp::AllGather => "all-gather",
            FrameOp::Broadcast => "broadcast",
            FrameOp::Reduce => "reduce",
            FrameOp::Gather => "gather",
            FrameOp::Scatter => "scatter",
            FrameOp::AllToAll => "all-to-all",
            FrameOp::Send => "send and receive",
            FrameOp::Receipt => "receipt",
            FrameOp::Farewell => "farewell",
        }
    }

    fn of_code(code: u8) -> Option<FrameOp> {
        use FrameOp::*;
        [
            Barrier,
            AllReduce,
            ReduceScatter,
            AllGather,
            Broadcast,
            Reduce,
            Gather,
            Scatter,
            AllToAll,
            Send,
            Receipt,
            Farewell,
        ]
        .into_iter()
        .find(|op| *op as u8 == code)
    }
}

/// What all messages of one operation have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    /// The step that it belongs to.
    pub step: u64,
    /// The operation.
    pub op: FrameOp,
    /// Its element type, as a number.
    pub dtype: u8,
    /// How many elements the whole operation covers.
    pub count: u64,
    /// How it is done.
    pub terms: Terms,
}

/// What ranks must agree on beside an operation's name, element type and length: numbers that are only compared here.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Terms {
    /// The reduction.
    pub reducer: u8,
    /// Which algorithm; below 16.
    pub algorithm: u8,
    /// The rank that sends to or receives from all others.
    pub root: u16,
    /// A hash of the cuts.
    pub cuts: u16,
    /// The number of the operation in its group, modulo 256.
    pub turn: u8,
}

impl std::fmt::Display for Terms {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Terms { reducer, algorithm, root, cuts, turn } = self;
        write!(f, "reducer {reducer}, algorithm {algorithm}, root {root}, cuts {cuts:04x}, turn {turn}")
    }
}

/// The header of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The operation's number; see [`FrameOp`].
    pub op: u8,
    /// As in [`Tag`].
    pub dtype: u8,
    /// Whether the payload is still in the sender's memory, which waits for a [`FrameOp::Receipt`].
    pub lent: bool,
    /// The generation of the job's membership.
    pub generation: u64,
    /// As in [`Tag`].
    pub step: u64,
    /// The segment's number on this connection and in this direction.
    pub sequence: u64,
    /// As in [`Tag`].
    pub count: u64,
    /// As in [`Tag`].
    pub terms: Terms,
    /// Bytes of the payload.
    pub length: u64,
    /// The payload's checksum.
    pub payload_crc: u32,
}

impl Header {
    /// The header of a segment of an operation that is not lent; `payload_crc` is left at zero.
    pub fn of(tag: &Tag, generation: u64, sequence: u64, length: usize) -> Header {
        Header {
            op: tag.op as u8,
            dtype: tag.dtype,
            lent: false,
            generation,
            step: tag.step,
            sequence,
            count: tag.count,
            terms: tag.terms,
            length: length as u64,
            payload_crc: 0,
        }
    }

    /// As bytes, with its own checksum at the end.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = self.encode_unsummed();
        let crc = crc32c::crc32c(&bytes[..52]);
        bytes[52..56].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// As bytes, without a checksum: for a header that is sealed.
    pub(crate) fn encode_unsummed(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.op;
        bytes[5] = self.dtype;
        bytes[6] = u8::from(self.lent) | self.terms.algorithm << 4;
        bytes[7] = self.terms.reducer;
        // A segment's length needs few bits, which leaves room in its word.
        let Terms { root, cuts, turn, .. } = self.terms;
        let beside = u64::from(turn) << 24 | u64::from(root) << 32 | u64::from(cuts) << 48;
        let length = self.length.min(LENGTH_MAX) | beside;
        let words = [self.generation, self.step, self.sequence, self.count, length];
        for (k, word) in words.into_iter().enumerate() {
            bytes[8 + 8 * k..16 + 8 * k].copy_from_slice(&word.to_le_bytes());
        }
        bytes[48..52].copy_from_slice(&self.payload_crc.to_le_bytes());
        bytes
    }

    /// Decodes a header, or says what is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, &'static str> {
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if half(0) == MAGIC && half(52) != crc32c::crc32c(&bytes[..52]) {
            return Err("the checksum of a header is wrong");
        }
        Header::decode_unsummed(bytes)
    }

    /// From bytes of a header that was sealed.
    pub(crate) fn decode_unsummed(bytes: &[u8; HEADER_BYTES]) -> Result<Header, &'static str> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if half(0) != MAGIC {
            return Err("what came is not a frame of this version");
        }
        Ok(Header {
            op: bytes[4],
            dtype: bytes[5],
            lent: bytes[6] & 1 != 0,
            generation: word(8),
            step: word(16),
            sequence: word(24),
            count: word(32),
            terms: Terms {
                reducer: bytes[7],
                algorithm: bytes[6] >> 4,
                root: (word(40) >> 32) as u16,
                cuts: (word(40) >> 48) as u16,
                turn: (word(40) >> 24) as u8,
            },
            length: word(40) & LENGTH_MAX,
            payload_crc: half(48),
        })
    }

    /// How this differs from what was expected, in words; the payload's checksum and whether it is lent are not
    /// compared.
    pub fn disagreement(&self, expected: &Header) -> Option<String> {
        if *expected == (Header { payload_crc: expected.payload_crc, lent: expected.lent, ..*self }) {
            return None;
        }
        let what = |name: &str, got: u64, want: u64| Some(format!("it has {name} {got}, expected {want}"));
        if self.generation != expected.generation {
            return what("generation", self.generation, expected.generation);
        }
        let one = (self.op, self.dtype, self.count, self.step);
        let other = (expected.op, expected.dtype, expected.count, expected.step);
        if one != other {
            let name = |op: u8| FrameOp::of_code(op).map_or("an unknown operation", FrameOp::name);
            let say = |h: &Header| {
                format!("{} of {} elements of type {} at step {}", name(h.op), h.count, h.dtype, h.step)
            };
            return Some(format!("it is in {}, expected {}", say(self), say(expected)));
        }
        if self.terms != expected.terms {
            let name = FrameOp::of_code(self.op).map_or("an unknown operation", FrameOp::name);
            return Some(format!("it is in {name} with {}, expected {}", self.terms, expected.terms));
        }
        if self.sequence != expected.sequence {
            return what("segment", self.sequence, expected.sequence);
        }
        what("a payload of bytes", self.length, expected.length)
    }
}

/// The payload bytes of each segment of a message, except the last one. A function of the message's length alone, so
/// that both sides cut it alike. Always a multiple of every element's size.
pub fn segment_bytes(message: usize) -> usize {
    (message / 4).next_multiple_of(64).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const TERMS: Terms =
        Terms { reducer: 1, algorithm: 15, root: 40_000, cuts: 0xbeef, turn: 200 };
    pub(super) const TAG: Tag = Tag { step: 7, op: FrameOp::AllReduce, dtype: 2, count: 1000, terms: TERMS };

    #[test]
    fn what_is_written_is_read() {
        for lent in [false, true] {
            let header = Header { payload_crc: 99, lent, ..Header::of(&TAG, 3, 12, 4000) };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let good = Header::of(&TAG, 3, 12, 4000).encode();
        for bit in 0..8 * HEADER_BYTES {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_disagreement_is_named() {
        let want = Header::of(&TAG, 3, 12, 4000);
        let rows = [
            (Header { generation: 2, ..want }, "generation 2, expected 3"),
            (Header { op: FrameOp::Broadcast as u8, ..want }, "in broadcast of 1000"),
            (Header { op: 77, ..want }, "an unknown operation"),
            (Header { count: 1001, ..want }, "of 1001 elements"),
            (Header { dtype: 4, ..want }, "of type 4"),
            (Header { step: 8, ..want }, "at step 8"),
            (
                Header { terms: Terms { reducer: 2, ..TERMS }, ..want },
                "all-reduce with reducer 2, algorithm 15, root 40000, cuts beef, turn 200, expected reducer 1",
            ),
            (Header { terms: Terms { algorithm: 3, ..TERMS }, ..want }, "algorithm 3"),
            (Header { terms: Terms { root: 5, ..TERMS }, ..want }, "root 5"),
            (Header { terms: Terms { turn: 201, ..TERMS }, ..want }, "turn 201, expected"),
            (Header { terms: Terms { cuts: 0, ..TERMS }, ..want }, "cuts 0000, turn"),
            (Header { sequence: 13, ..want }, "segment 13, expected 12"),
            (Header { length: 1 << 60, ..want }, "1152921504606846976, expected 4000"),
        ];
        for (got, says) in rows {
            let what = got.disagreement(&want).expect("they differ");
            assert!(what.contains(says), "{what}");
        }
        assert_eq!(Header { payload_crc: 5, lent: true, ..want }.disagreement(&want), None);
    }

    #[test]
    fn segments_hold_whole_elements() {
        for message in [0, 1, 63, 4096, 300_001, 1 << 20, usize::MAX / 2] {
            let bytes = segment_bytes(message);
            assert!(bytes.is_multiple_of(64) && (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes));
        }
    }
}
