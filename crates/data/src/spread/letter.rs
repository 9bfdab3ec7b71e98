//! A sample as bytes, from the member that has it to the one that reads it.
//!
//! A byte says what the values are, four how many, then come the values; a byte says what the label is, four how many numbers it has, then
//! those. Everything is little-endian. A class is one number of four bytes.

use crate::dataset::{Fetched, Label, Values};
use crate::error::DataError;

/// What values are.
const BYTES: u8 = 0;
const FLOATS: u8 = 1;
const IDS: u8 = 2;
/// What a label is.
const CLASS: u8 = 3;
const NEXT_ID: u8 = 4;
const NUMBERS: u8 = 5;
const TAGS: u8 = 6;

/// Adds a sample to a letter.
pub fn write_sample(sample: &Fetched, letter: &mut Vec<u8>) {
    match sample.values {
        Values::U8(values) => {
            head(BYTES, values.len(), letter);
            letter.extend_from_slice(values);
        }
        Values::F32(values) => {
            head(FLOATS, values.len(), letter);
            values.iter().for_each(|x| letter.extend_from_slice(&x.to_le_bytes()));
        }
        Values::I32(values) => {
            head(IDS, values.len(), letter);
            values.iter().for_each(|x| letter.extend_from_slice(&x.to_le_bytes()));
        }
    }
    match sample.label {
        Label::Class(class) => {
            head(CLASS, 1, letter);
            letter.extend_from_slice(&(class as u32).to_le_bytes());
        }
        Label::NextId => head(NEXT_ID, 0, letter),
        Label::Values(values) => {
            head(NUMBERS, values.len(), letter);
            values.iter().for_each(|x| letter.extend_from_slice(&x.to_le_bytes()));
        }
        Label::Tags(tags) => {
            head(TAGS, tags.len(), letter);
            tags.iter().for_each(|x| letter.extend_from_slice(&x.to_le_bytes()));
        }
    }
}

/// The first sample of `bytes`, and how long it is there; `None` if that is no sample. Numbers are put where they are aligned. Tags of
/// tokens are not read: a sample has one vector for ids, and it is the tokens'.
pub fn read_sample<'a>(
    bytes: &'a [u8],
    numbers: &'a mut Vec<f32>,
    targets: &'a mut Vec<f32>,
    ids: &'a mut Vec<i32>,
) -> Option<(Fetched<'a>, usize)> {
    let (kind, values, label) = take(bytes)?;
    let values = match kind {
        BYTES => Values::U8(values),
        FLOATS => Values::F32(floats(values, numbers)),
        IDS => {
            ids.clear();
            ids.extend(fours(values).map(i32::from_le_bytes));
            Values::I32(ids)
        }
        _ => return None,
    };
    let (kind, content, rest) = take(label)?;
    let label = match kind {
        CLASS => Label::Class(fours(content).next().map(u32::from_le_bytes)? as usize),
        NEXT_ID => Label::NextId,
        NUMBERS => Label::Values(floats(content, targets)),
        _ => return None,
    };
    Some((Fetched { values, label }, bytes.len() - rest.len()))
}

/// How long the first sample of `bytes` is.
pub(super) fn length(bytes: &[u8]) -> Option<usize> {
    let (_, _, label) = take(bytes)?;
    let (_, _, rest) = take(label)?;
    Some(bytes.len() - rest.len())
}

/// The error for a letter that is none.
pub(super) fn corrupt(member: usize) -> DataError {
    let why = format!("samples that rank {member} sent cannot be read; give all ranks the same version");
    DataError::Setting { why }
}

fn head(kind: u8, n: usize, letter: &mut Vec<u8>) {
    letter.push(kind);
    letter.extend_from_slice(&(n as u32).to_le_bytes());
}

/// What kind of values the bytes begin with, these values, and what follows them.
fn take(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(5)?;
    let n = u32::from_le_bytes(head[1..].try_into().ok()?) as usize;
    let width = if head[0] == BYTES { 1 } else { 4 };
    let (values, rest) = rest.split_at_checked(n.checked_mul(width)?)?;
    Some((head[0], values, rest))
}

fn fours(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> + '_ {
    bytes.chunks_exact(4).map(|four| four.try_into().expect("a chunk of four has four bytes"))
}

fn floats<'a>(bytes: &[u8], into: &'a mut Vec<f32>) -> &'a [f32] {
    into.clear();
    into.extend(fours(bytes).map(f32::from_le_bytes));
    into
}
