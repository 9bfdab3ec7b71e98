//! Coefficients from bits: Huffman codes, each followed by the bits of a number.
//!
//! Where code and number together have at most [`PEEK`] bits, one table look-up gives the number and how many bits to
//! skip, which covers most. The stream is unstuffed beforehand ([`clean`]), so that eight bytes here are eight of its bytes.

use super::header::Codes;

/// Bits that are looked up at once; 12 are no faster, and take twice the space in the L1 cache.
const PEEK: u32 = 11;
/// Zeros after a cleaned stream, for reading ahead of its last bits.
const AHEAD: usize = 16;
/// How far the end of a block jumps: past the 64, and past the end of a run that is too long (63 + 15 + 1).
const END: u32 = 80;

/// A look-up table of codes.
///
/// An entry has the number of bits to skip (bits 0 to 5), how many zeros come before the number (8 to 15) and the number
/// (16 to 31). One with [`PARTLY`] has only the code: the number's bits are its bits 16 to 19.
#[derive(Debug)]
pub(super) struct HuffmanTable {
    counts: [u8; 16],
    symbols: Vec<u8>,
    lookup: Box<[u32; 1 << PEEK]>,
    /// For each length above `PEEK` bits: its codes, left-aligned in 16 bits, and where their entries start.
    long: [Long; 17],
    entries: Vec<u32>,
}

/// The number has still to be read.
const PARTLY: u32 = 0x80;

#[derive(Clone, Copy, Default, Debug)]
struct Long {
    first: u32,
    end: u32,
    start: usize,
}

impl Default for HuffmanTable {
    fn default() -> HuffmanTable {
        HuffmanTable {
            counts: [0; 16],
            symbols: Vec::new(),
            lookup: Box::new([PARTLY; 1 << PEEK]),
            long: [Long::default(); 17],
            entries: Vec::new(),
        }
    }
}

impl HuffmanTable {
    /// Makes it the table of `codes`, unless it is already. `None`: the codes are invalid.
    pub(super) fn set(&mut self, codes: Codes<'_>, dc: bool) -> Option<()> {
        if self.counts == *codes.counts && self.symbols == codes.symbols {
            return Some(());
        }
        // Not valid until it is complete.
        self.symbols.clear();
        self.counts = [0; 16];
        self.lookup.fill(PARTLY);
        self.long = [Long::default(); 17];
        self.entries.clear();
        let mut code = 0;
        for (length, &n) in (1..).zip(codes.counts) {
            let (first, start) = (code, self.entries.len());
            for _ in 0..n {
                let entry = entry(codes.symbols[self.entries.len()], length, dc);
                self.entries.push(entry);
                if code >= 1 << length {
                    return None;
                }
                if length <= PEEK {
                    let head = (code as usize) << (PEEK - length);
                    let spare = PEEK - length;
                    for (bits, place) in (0..).zip(&mut self.lookup[head..head + (1 << spare)]) {
                        *place = with_number(entry, bits, spare);
                    }
                }
                code += 1;
            }
            if length > PEEK {
                let shift = 16 - length;
                self.long[length as usize] = Long { first: first << shift, end: code << shift, start };
            }
            code <<= 1;
        }
        self.counts = *codes.counts;
        self.symbols.extend_from_slice(codes.symbols);
        Some(())
    }

    /// The full entry for the code at the head of `bits`, if the table has `entry` for it, which is partial; [`PARTLY`]: there
    /// is no such code.
    #[inline(never)]
    fn finish(&self, mut entry: u32, bits: u64) -> u32 {
        if entry == PARTLY {
            let head = (bits >> 48) as u32;
            let long =
                (PEEK as usize + 1..17).find(|&n| (self.long[n].first..self.long[n].end).contains(&head));
            let Some(length) = long else { return PARTLY };
            let Long { first, start, .. } = self.long[length];
            entry = self.entries[start + ((head - first) >> (16 - length)) as usize];
        }
        let code = entry & 63;
        with_number(entry, (bits << code >> 32) as u32, 32)
    }
}

/// The entry of a code without its number; [`PARTLY`] alone means no entry.
fn entry(symbol: u8, length: u32, dc: bool) -> u32 {
    let (zeros, size) =
        if dc { (0, u32::from(symbol)) } else { (u32::from(symbol >> 4), u32::from(symbol & 15)) };
    let zeros = match (dc, zeros, size) {
        (true, _, 0..=11) | (false, _, 1..=10) => zeros,
        // Sixteen zeros: fifteen, and the number 0.
        (false, 15, 0) => 15,
        (false, _, 0) => END,
        // Samples of 8 bits have no such large numbers.
        _ => return PARTLY,
    };
    length | PARTLY | zeros << 8 | size << 16
}

/// The entry with its number, which is at the head of the lower `n` of `bits`; unchanged if there are too few bits. No entry
/// stays no entry.
fn with_number(entry: u32, bits: u32, n: u32) -> u32 {
    let size = entry >> 16;
    if size > n || entry == PARTLY {
        return entry;
    }
    let number = ((u64::from(bits) << size >> n) & ((1 << size) - 1)) as i32;
    // Numbers that start with a zero bit are negative.
    let number = if number >> size.saturating_sub(1) == 0 { number - (1 << size) + 1 } else { number };
    ((entry & 0xff3f) + size) | (number as u32) << 16
}

/// Where the coefficients of a block go by their index in the zigzag; all past the 64 go to one slot that is ignored.
pub(super) const ZIGZAG: [u8; 256] = zigzag();
/// The length of a block, with that slot.
pub(super) const BLOCK: usize = 256;

const fn zigzag() -> [u8; 256] {
    let mut places = [64; 256];
    let (mut row, mut column, mut up) = (0, 0, true);
    let mut k = 0;
    while k < 64 {
        places[k] = polyreme_kernels::jpeg::PLACES[8 * row + column];
        match (up, row, column) {
            (true, _, 7) => (row, up) = (row + 1, false),
            (true, 0, _) => (column, up) = (column + 1, false),
            (true, _, _) => (row, column) = (row - 1, column + 1),
            (false, 7, _) => (column, up) = (column + 1, true),
            (false, _, 0) => (row, up) = (row + 1, true),
            (false, _, _) => (row, column) = (row + 1, column - 1),
        }
        k += 1;
    }
    places
}

/// A cleaned stream, bit by bit.
pub(super) struct Bits<'a> {
    /// The next bits, highest first.
    bits: u64,
    /// How many of them count as read from the stream; those after them are valid, but will be read again.
    n: u32,
    rest: &'a [u8],
    /// The length of the stream, without the zeros after it.
    len: usize,
    whole: usize,
}

impl<'a> Bits<'a> {
    /// Reads the first `len` bytes of `stream`, as [`clean`] made it.
    pub(super) fn new(stream: &'a [u8], len: usize) -> Bits<'a> {
        Bits { bits: 0, n: 0, rest: stream, len, whole: stream.len() }
    }

    /// Whether all bits of the stream are used, except for the rest of a byte. `None`: more than all were.
    pub(super) fn at_end(&self) -> Option<bool> {
        let used = 8 * (self.whole - self.rest.len()) - self.n as usize;
        Some((8 * self.len).checked_sub(used)? < 8)
    }

    /// Reads a block's coefficients into `block`, whose coefficients are zero; the first is added to `last`. Returns how
    /// far in the zigzag there are some. `None`: no such code, too many coefficients, or nothing more to read.
    pub(super) fn block(
        &mut self,
        dc: &HuffmanTable,
        ac: &HuffmanTable,
        block: &mut [i16; BLOCK],
        last: &mut i16,
    ) -> Option<usize> {
        let (mut bits, mut n, mut rest) = (self.bits, self.n, self.rest);
        // At least 56 bits: two codes with numbers of 16 + 11 and 16 + 10.
        macro_rules! refill {
            () => {
                let bytes = rest.first_chunk::<8>()?;
                bits |= u64::from_be_bytes(*bytes) >> n;
                rest = &rest[((63 - n) as usize >> 3) & 7..];
                n |= 56;
            };
        }
        macro_rules! next {
            ($table:expr) => {{
                let mut entry = $table.lookup[(bits >> (64 - PEEK)) as usize];
                if entry & PARTLY != 0 {
                    entry = $table.finish(entry, bits);
                    if entry & PARTLY != 0 {
                        return None;
                    }
                }
                bits <<= entry & 63;
                n -= entry & 63;
                entry
            }};
        }
        macro_rules! put {
            ($entry:expr, $k:expr) => {
                $k = $k.wrapping_add(($entry >> 8) as u8);
                block[usize::from(ZIGZAG[usize::from($k)])] = ($entry >> 16) as i16;
                $k = $k.wrapping_add(1);
            };
        }
        refill!();
        let number = next!(dc) >> 16;
        *last = last.wrapping_add(number as i16);
        block[0] = *last;
        let mut k = 1u8;
        loop {
            let entry = next!(ac);
            put!(entry, k);
            if k >= 64 {
                break;
            }
            refill!();
            let entry = next!(ac);
            put!(entry, k);
            if k >= 64 {
                break;
            }
        }
        (self.bits, self.n, self.rest) = (bits, n, rest);
        match u32::from(k) {
            64 => Some(64),
            65..=END => None,
            k => Some((k - END - 1) as usize),
        }
    }
}

/// Copies what is before the next marker of `from` to the front of `into`, without the zeros that follow each 0xff, and
/// zeros after it. Returns its length, the marker, and what follows it; `None`: there is no marker.
pub(super) fn clean<'a>(from: &'a [u8], into: &mut Vec<u8>) -> Option<(usize, u8, &'a [u8])> {
    if into.len() < from.len() + AHEAD {
        into.resize(from.len() + AHEAD, 0);
    }
    let (mut rest, mut at) = (from, 0);
    loop {
        // Eight bytes at a time where none of them is 0xff.
        while let Some((eight, behind)) = rest.split_first_chunk::<8>() {
            let word = u64::from_ne_bytes(*eight);
            let low = 0x7f7f_7f7f_7f7f_7f7f;
            if ((word & low) + 0x0101_0101_0101_0101) & word & !low != 0 {
                break;
            }
            into[at..at + 8].copy_from_slice(eight);
            at += 8;
            rest = behind;
        }
        for _ in 0..8 {
            let (&byte, behind) = rest.split_first()?;
            rest = behind;
            if byte == 0xff {
                let (&next, behind) = rest.split_first()?;
                match next {
                    0 => rest = behind,
                    // A marker may have more than one 0xff.
                    0xff => continue,
                    marker => {
                        into[at..at + AHEAD].fill(0);
                        return Some((at, marker, behind));
                    }
                }
            }
            into[at] = byte;
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One code of each length, and two of the last.
    const COUNTS: [u8; 16] = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    const SYMBOLS: [u8; 16] =
        [0x01, 0x00, 0x12, 0xf0, 0x03, 0x21, 0x04, 0x15, 0x2a, 0x06, 0x37, 0x08, 0x59, 0xea, 0x72, 0x0b];

    fn table(dc: bool) -> HuffmanTable {
        let mut table = HuffmanTable::default();
        table.set(Codes { number: 0, counts: &COUNTS, symbols: &SYMBOLS }, dc).unwrap();
        table
    }

    #[test]
    fn every_code_and_number_is_found() {
        let table = table(false);
        for (i, &symbol) in SYMBOLS.iter().enumerate() {
            // Code `i` is `i` ones and a zero.
            let (length, size) = (i as u32 + 1, u32::from(symbol & 15));
            let code = (1u64 << length) - 2;
            for number in 0..1u64 << size {
                for noise in [0, u64::MAX] {
                    let tail = noise >> length >> size;
                    let bits = code << (64 - length) | (number << 1) << (63 - length - size) | tail;
                    let mut got = table.lookup[(bits >> (64 - PEEK)) as usize];
                    assert_eq!(got & PARTLY == 0, length + size <= PEEK);
                    if got & PARTLY != 0 {
                        got = table.finish(got, bits);
                    }
                    if size > 10 {
                        assert_eq!(got, PARTLY, "{symbol:x}");
                        continue;
                    }
                    let positive = size > 0 && number >> (size - 1) == 1;
                    let value = number as i32 + if positive { 0 } else { 1 - (1 << size) };
                    let zeros = if symbol == 0 { END } else { u32::from(symbol >> 4) };
                    assert_eq!(
                        (got & 63, got >> 8 & 255, got as i32 >> 16),
                        (length + size, zeros, value),
                        "{symbol:x} {number}"
                    );
                }
            }
        }
        let ones = table.lookup[(1 << PEEK) - 1];
        assert_eq!((ones, table.finish(ones, u64::MAX)), (PARTLY, PARTLY));
    }

    #[test]
    fn a_table_is_set_anew() {
        let mut table = table(false);
        let counts = std::array::from_fn(|i| if i == 1 { 3 } else { 0 });
        table.set(Codes { number: 0, counts: &counts, symbols: &[2, 0, 1] }, true).unwrap();
        assert_eq!(table.lookup[0] & 63, 4);
        assert_eq!(table.lookup[1 << (PEEK - 2)] & 63, 2);
        assert_eq!(table.lookup[(1 << PEEK) - 1], PARTLY);
        let too_many = std::array::from_fn(|i| if i == 0 { 3 } else { 0 });
        assert!(table.set(Codes { number: 0, counts: &too_many, symbols: &[0, 1, 2] }, true).is_none());
        table.set(Codes { number: 0, counts: &counts, symbols: &[2, 0, 1] }, true).unwrap();
        assert_eq!(table.lookup[0] & 63, 4);
    }

    #[test]
    fn streams_are_cleaned() {
        let mut into = Vec::new();
        let long: Vec<u8> = (1..=40).collect();
        for (from, want) in [
            (&b"\xff\xd9"[..], Some((&b""[..], 0xd9, &b""[..]))),
            (b"abc\xff\x00d\xff\xd0rest", Some((b"abc\xffd", 0xd0, b"rest"))),
            (b"\xff\x00\xff\x00\xff\xff\xff\xd9", Some((b"\xff\xff", 0xd9, b""))),
            (b"abcdefghijklmnop\xff\x00q\xff\xd9", Some((b"abcdefghijklmnop\xffq", 0xd9, b""))),
            (b"abc\xff\x00", None),
            (b"abcdefghijk\xff", None),
            (b"", None),
            (&long, None),
        ] {
            let got = clean(from, &mut into);
            let got = got.map(|(len, marker, rest)| {
                (into[..len].to_vec(), marker, rest, into[len..len + AHEAD].to_vec())
            });
            let want = want.map(|(stream, marker, rest)| (stream.to_vec(), marker, rest, vec![0; AHEAD]));
            assert_eq!(got, want);
        }
    }
}
