//! What is written on letters between workers and servers.
//!
//! The ticket is the worker's session and clock, 32 bits each. The place is a range, or a range in 16 bits and a block, or which state of
//! the optimizer. Gradients and weights
//! are f32 in little-endian order, as all numbers on the wire; a push has two numbers before them.

use polyreme_net::mailbox::{Label, Letter};
use polyreme_net::servers::WorkerId;

/// What kind of letter it is.
pub(super) mod kind {
    pub(crate) const JOIN: u16 = 1;
    pub(crate) const LEAVE: u16 = 2;
    pub(crate) const PUSH: u16 = 3;
    pub(crate) const PULL: u16 = 4;
    pub(crate) const OPEN: u16 = 5;
    pub(crate) const ASK: u16 = 6;
    pub(crate) const ASK_AND_STOP: u16 = 7;
    pub(crate) const STOP: u16 = 8;
    pub(crate) const WEIGHTS: u16 = 9;
    pub(crate) const LEASE: u16 = 10;
    pub(crate) const REST: u16 = 11;
    pub(crate) const OVER: u16 = 12;
    pub(crate) const REFUSED: u16 = 13;
    pub(crate) const PULL_STATE: u16 = 14;
    pub(crate) const STATE: u16 = 15;
    pub(crate) const WATCH: u16 = 16;
    pub(crate) const WATCH_AND_STOP: u16 = 17;
}

/// Bytes of a push before its gradients: the weight of its samples, and what its gradients are multiplied by.
pub(super) const PUSH_HEAD: usize = 16;
/// The place of an ask that reports no block, and of a worker that joins without a clock.
pub(super) const NO_BLOCK: u64 = u64::MAX;
/// More ranges than this have no number.
const RANGE_BITS: u32 = 16;

/// A label of a worker's session and clock.
pub(super) fn label(kind: u16, session: u64, clock: u64, place: u64) -> Label {
    Label { kind, ticket: session << 32 | (clock & 0xffff_ffff), place }
}

/// The session and the clock of a ticket.
pub(super) fn session_and_clock(ticket: u64) -> (u64, u64) {
    (ticket >> 32, ticket & 0xffff_ffff)
}

/// Who posted a letter.
pub(super) fn sender(letter: &Letter) -> (WorkerId, u64) {
    let (session, clock) = session_and_clock(letter.label.ticket);
    (WorkerId { worker: letter.from, session }, clock)
}

/// A range and the number of an optimizer state as a place.
pub(super) fn place_of_state(range: usize, which: usize) -> u64 {
    place_of(which as u64, range)
}

/// A block and a range as a place.
pub(super) fn place_of(block: u64, range: usize) -> u64 {
    block << RANGE_BITS | range as u64
}

/// The block and the range of a place.
pub(super) fn block_and_range(place: u64) -> (u64, usize) {
    (place >> RANGE_BITS, (place & ((1 << RANGE_BITS) - 1)) as usize)
}

/// A gradient as it came.
pub struct PushedGradient(pub(super) Letter);

impl PushedGradient {
    /// Who pushed it.
    pub fn worker(&self) -> usize {
        self.0.from
    }

    /// What its samples weigh: the mean of a step is the sum over its gradients divided by the sum of these.
    pub fn weight(&self) -> f64 {
        f64::from_le_bytes(self.0[..8].try_into().expect("the length was checked"))
    }

    /// What it is multiplied by beside that.
    pub fn scale(&self) -> f64 {
        f64::from_le_bytes(self.0[8..16].try_into().expect("the length was checked"))
    }

    /// Writes its numbers.
    pub fn copy_to(&self, into: &mut [f32]) {
        read_floats(&self.0[PUSH_HEAD..], into);
    }

    /// Adds its numbers.
    pub fn add_to(&self, into: &mut [f32]) {
        let numbers = self.0[PUSH_HEAD..].chunks_exact(4);
        into.iter_mut().zip(numbers).for_each(|(to, bytes)| *to += float(bytes));
    }
}

fn float(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

/// Reads numbers as they travel.
pub(super) fn read_floats(bytes: &[u8], into: &mut [f32]) {
    into.iter_mut().zip(bytes.chunks_exact(4)).for_each(|(to, bytes)| *to = float(bytes));
}

/// Writes numbers as they travel.
pub(super) fn write_floats(numbers: &[f32], into: &mut [u8]) {
    let to = into.chunks_exact_mut(4);
    to.zip(numbers).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
}
