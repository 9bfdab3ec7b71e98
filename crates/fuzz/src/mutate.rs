//! Mutations of bytes that know a little about formats: numbers of all widths, decimal numbers, lines, tokens,
//! and words of the format.

use std::ops::Range;

use crate::random::Random;

/// Numbers at which code tends to go wrong.
const EDGES: [u64; 22] = [
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    63,
    64,
    127,
    128,
    255,
    256,
    0x7fff,
    0x8000,
    0xffff,
    0x00ff_ffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    i64::MAX as u64,
    u64::MAX,
];

/// The same for text.
const NUMERALS: [&str; 24] = [
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "10",
    "255",
    "256",
    "65536",
    "16777216",
    "2147483648",
    "4294967295",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "99999999999999999999999999",
    "0.5",
    "1e308",
    "1e400",
    "1e-9",
    "nan",
    "-inf",
];

/// Mutates inputs.
#[derive(Clone, Copy, Debug)]
pub struct Mutator<'a> {
    /// Words of the format.
    pub words: &'a [&'a [u8]],
    /// The longest that an input may become.
    pub bytes_max: usize,
}

impl Mutator<'_> {
    /// One change; `other` is another input, of which parts may be taken.
    pub fn change(&self, input: &mut Vec<u8>, other: &[u8], random: &mut Random) {
        let at = random.below(input.len() + 1);
        match random.below(20) {
            0 => with(input, at, |byte| *byte ^= 1 << random.below(8)),
            1 => with(input, at, |byte| *byte = random.number() as u8),
            2..4 => number(input, at, random),
            4 => drop(input.drain(short(input.len(), at, random))),
            5 => {
                let copy = input[short(input.len(), at, random)].to_vec();
                let to = random.below(input.len() + 1);
                input.splice(to..to, copy);
            }
            6 => {
                let bytes: Vec<u8> = (0..1 + random.below(8)).map(|_| random.number() as u8).collect();
                input.splice(at..at, bytes);
            }
            7 => {
                let byte = *random.pick(&[0, 0xff, b' ', b'0', b'9', b'a']);
                let range = short(input.len(), at, random);
                input[range].fill(byte);
            }
            8 if random.one_in(4) => input.truncate(at),
            8 | 9 => {
                let part = short(other.len(), random.below(other.len() + 1), random);
                let over = short(input.len(), at, random);
                let end = if random.one_in(2) { at } else { over.end };
                input.splice(at..end, other[part].iter().copied());
            }
            10..13 => self.word(input, at, random),
            13 | 14 => numeral(input, at, random),
            15 => rearrange(input, at, b"\n", random),
            16 | 17 => rearrange(input, at, b",;:=[]{}() \n\"", random),
            18 => {
                // Depth: brackets in brackets, where there are brackets.
                let range = short(input.len(), at, random);
                let copy = input[range.start..range.end.min(range.start + 3)].to_vec();
                let n = 1 << random.below(12);
                let many = copy.repeat(n).into_iter().take(self.bytes_max / 2);
                input.splice(range.start..range.start, many.collect::<Vec<_>>());
            }
            _ => {
                let range = short(input.len(), at, random);
                input[range].reverse();
            }
        }
        input.truncate(self.bytes_max);
    }

    /// Overwrites or inserts a word of the format.
    fn word(&self, input: &mut Vec<u8>, at: usize, random: &mut Random) {
        if self.words.is_empty() {
            return number(input, at, random);
        }
        let word = *random.pick(self.words);
        let end = match random.below(3) {
            0 => at,
            1 => (at + word.len()).min(input.len()),
            _ => token(input, at, b",;:=[]{}() \n").end,
        };
        let start = if random.one_in(2) { token(input, at, b",;:=[]{}() \n").start } else { at };
        input.splice(start..end.max(start), word.iter().copied());
    }
}

/// Removes one of the parts, doubles it, or swaps two.
pub fn shuffle<T: Clone>(parts: &mut Vec<T>, random: &mut Random) {
    if parts.is_empty() {
        return;
    }
    let (at, to) = (random.below(parts.len()), random.below(parts.len()));
    match random.below(3) {
        0 => drop(parts.remove(at)),
        1 => parts.insert(to, parts[at].clone()),
        _ => parts.swap(at, to),
    }
}

/// Changes a byte, if there is one.
fn with(input: &mut [u8], at: usize, change: impl FnOnce(&mut u8)) {
    if let Some(byte) = input.get_mut(at) {
        change(byte);
    }
}

/// A range from `at`, mostly short.
fn short(len: usize, at: usize, random: &mut Random) -> Range<usize> {
    let at = at.min(len);
    let most = if random.one_in(4) { len - at } else { 16 };
    at..(at + 1 + random.below(most)).min(len)
}

/// Overwrites 1 to 8 bytes with a number of either byte order, or adds to the number there.
fn number(input: &mut [u8], at: usize, random: &mut Random) {
    let width = 1 << random.below(4);
    // The start of a file is where most numbers are.
    let at = if random.one_in(3) { random.below(64) } else { at };
    let len = input.len() as u64;
    let Some(bytes) = input.get_mut(at..at + width) else { return };
    let big = random.one_in(2);
    let value = match random.below(3) {
        0 => *random.pick(&EDGES),
        1 => len.wrapping_add(random.below(17) as u64).wrapping_sub(8),
        _ => {
            let old = bytes.iter().enumerate().fold(0, |sum, (i, &byte)| {
                let place = if big { width - 1 - i } else { i };
                sum | u64::from(byte) << (8 * place)
            });
            old.wrapping_add(random.below(65) as u64).wrapping_sub(32)
        }
    };
    for (i, byte) in bytes.iter_mut().enumerate() {
        let place = if big { width - 1 - i } else { i };
        *byte = (value >> (8 * place)) as u8;
    }
}

/// Replaces the first decimal number at or after `at`.
fn numeral(input: &mut Vec<u8>, at: usize, random: &mut Random) {
    let Some(start) = input[at..].iter().position(u8::is_ascii_digit).map(|n| at + n) else { return };
    let start = input[..start].iter().rposition(|b| !b.is_ascii_digit()).map_or(0, |n| n + 1);
    let end = input[start..].iter().position(|b| !b.is_ascii_digit()).map_or(input.len(), |n| start + n);
    input.splice(start..end, random.pick(&NUMERALS).bytes());
}

/// The range around `at` that contains none of `marks`.
fn token(input: &[u8], at: usize, marks: &[u8]) -> Range<usize> {
    let is_mark = |byte: &u8| marks.contains(byte);
    let start = input[..at].iter().rposition(is_mark).map_or(0, |n| n + 1);
    let end = input[at..].iter().position(is_mark).map_or(input.len(), |n| at + n);
    start..end
}

/// Removes a token between marks, or moves or copies it, with its mark, to somewhere else.
fn rearrange(input: &mut Vec<u8>, at: usize, marks: &[u8], random: &mut Random) {
    let Range { start, end } = token(input, at, marks);
    let range = start..(end + 1).min(input.len());
    let part = input[range.clone()].to_vec();
    let there = random.below(input.len() + 1);
    let to = token(input, there, marks);
    match random.below(4) {
        0 => drop(input.drain(range)),
        1 => drop(input.splice(to.start..to.start, part)),
        2 => drop(input.splice(to.start..(to.end + 1).min(input.len()), part)),
        _ => drop(input.splice(range, input[to].to_vec())),
    }
}
