//! The segments of a list of moves, and which of them are the same bytes.
//!
//! A checksum is worth keeping: what a rank received and checked it may pass on with its checksum, what it reduced is
//! summed while it is in L1, and what goes to several peers is summed once. Which segments are the same depends on the
//! plan alone, so it is computed once.

use std::ops::Range;

use crate::frame::segment_bytes;
use crate::moves::{Move, MoveKind};

/// The next segment of a message when `done` of its bytes are done.
pub(crate) fn piece(message: &Range<usize>, done: usize) -> Range<usize> {
    let start = message.start + done;
    start..message.end.min(start + segment_bytes(message.len()))
}

/// All segments of a list of moves, numbered in the order of the moves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pieces {
    /// For each move, the number of its first segment.
    first: Vec<usize>,
    /// For each segment, the first one with the same bytes: itself, unless it sends what an earlier one carried, and
    /// nothing has changed since.
    same: Vec<usize>,
    /// Whether another segment needs a segment's checksum.
    wanted: Vec<bool>,
}

impl Pieces {
    pub(crate) fn new(list: &[Move]) -> Pieces {
        let mut pieces = Pieces::default();
        for (k, this) in list.iter().enumerate() {
            pieces.first.push(pieces.same.len());
            let mut done = 0;
            loop {
                let bytes = piece(&this.bytes, done);
                let number = pieces.same.len();
                let same = if this.sends() { pieces.earlier(&list[..k], this.kind, &bytes) } else { None };
                pieces.same.push(same.unwrap_or(number));
                pieces.wanted.push(false);
                if let Some(same) = same {
                    pieces.wanted[same] = true;
                }
                done += bytes.len();
                if bytes.end == this.bytes.end {
                    break;
                }
            }
        }
        pieces
    }

    /// The first segment with exactly these bytes, if they have not changed since.
    fn earlier(&self, list: &[Move], kind: MoveKind, bytes: &Range<usize>) -> Option<usize> {
        for (j, other) in list.iter().enumerate().rev() {
            let same_memory = (other.kind == MoveKind::SendFrom) == (kind == MoveKind::SendFrom);
            let apart = bytes.start >= other.bytes.end || bytes.end <= other.bytes.start;
            if !same_memory || apart {
                continue;
            }
            let inside = bytes.start.checked_sub(other.bytes.start);
            let cut = inside.filter(|done| done.is_multiple_of(segment_bytes(other.bytes.len())));
            if let Some(done) = cut.filter(|done| piece(&other.bytes, *done) == *bytes) {
                return Some(self.same[self.number(j, &other.bytes, done)]);
            }
            if !other.sends() {
                return None;
            }
        }
        None
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.same.len()
    }

    /// The number of the next segment of move `k`, which moves `message`, when `done` of its bytes are done.
    pub(crate) fn number(&self, k: usize, message: &Range<usize>, done: usize) -> usize {
        self.first[k] + done / segment_bytes(message.len())
    }

    /// The first segment with the same bytes.
    pub(crate) fn same(&self, number: usize) -> usize {
        self.same[number]
    }

    /// Whether another segment will need this one's checksum.
    pub(crate) fn wanted(&self, number: usize) -> bool {
        self.wanted[number]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: usize = 64 * 1024;

    /// Checks the first equal segment of each segment.
    fn check(list: &[Move], same: &[usize]) {
        let pieces = Pieces::new(list);
        assert_eq!(pieces.same, same, "{list:?}");
        for (number, first) in same.iter().enumerate() {
            assert!(*first == number || pieces.wanted(*first), "{number} looks for {first}");
        }
    }

    #[test]
    fn what_was_received_or_reduced_is_passed_on() {
        check(&[Move::recv(1, 0..3 * S), Move::send(2, 0..3 * S)], &[0, 1, 2, 0, 1, 2]);
        check(&[Move::reduce(1, 0..2 * S, true), Move::send(2, 0..2 * S)], &[0, 1, 0, 1]);
        // A part of it, and more than it: what is cut alike.
        check(&[Move::reduce(1, 0..2 * S, true), Move::send(2, S..2 * S)], &[0, 1, 1]);
        check(&[Move::recv(1, S..2 * S), Move::send(2, 0..2 * S)], &[0, 1, 0]);
        check(&[Move::recv(1, 0..2 * S), Move::send(2, 5..2 * S)], &[0, 1, 2, 3]);
        check(&[Move::recv(1, 0..7), Move::send(2, 0..7), Move::send(3, 0..8)], &[0, 0, 2]);
        check(&[Move::recv(1, 0..0), Move::send(2, 0..0)], &[0, 1]);
    }

    #[test]
    fn what_goes_to_several_is_summed_once() {
        check(&[Move::send(1, 0..9), Move::send(2, 0..9), Move::send(3, 0..9)], &[0, 0, 0]);
        check(&[Move::send_from(1, 0..9), Move::send(2, 0..9), Move::send_from(3, 0..9)], &[0, 1, 0]);
    }

    #[test]
    fn what_has_changed_is_summed_again() {
        check(&[Move::send(1, 0..9), Move::recv(2, 3..4), Move::send(3, 0..9)], &[0, 1, 2]);
        check(&[Move::send(1, 0..9), Move::reduce(2, 0..9, true), Move::send(3, 0..9)], &[0, 1, 1]);
        check(&[Move::recv(1, 0..9), Move::recv(1, 0..9), Move::send(3, 0..9)], &[0, 1, 1]);
        // What is received needs the checksum that comes with it.
        check(&[Move::send(1, 0..9), Move::recv(2, 0..9)], &[0, 1]);
    }
}
