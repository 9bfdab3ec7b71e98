//! How a run is cut into epochs, steps and pieces: pure arithmetic on positions.
//!
//! Position `p` of epoch `e` belongs to step `p / batch` of that epoch. The last step of an epoch may be short, and a
//! step is cut into pieces of at most `micro` samples, whose gradients are added up.

use crate::job::Length;

/// The sizes that everything follows from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// Samples of an epoch.
    pub samples: usize,
    /// Samples of a step.
    pub batch: usize,
    /// Samples of a piece.
    pub micro: usize,
}

/// A part of a step that goes through the engine at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its first position in the epoch.
    pub start: usize,
    /// Its first position in the step.
    pub offset: usize,
    /// Samples.
    pub len: usize,
    /// Whether it is the last of its step.
    pub last: bool,
}

impl Pace {
    /// Steps of an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.samples.div_ceil(self.batch) as u64
    }

    /// Steps of a run.
    pub fn total_steps(&self, length: Length) -> u64 {
        match length {
            Length::Epochs(epochs) => epochs * self.steps_per_epoch(),
            Length::Steps(steps) => steps,
        }
    }

    /// The epoch of a step, counted from 0.
    pub fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// Whether a step is the last of its epoch.
    pub fn ends_epoch(&self, step: u64) -> bool {
        (step + 1).is_multiple_of(self.steps_per_epoch())
    }

    /// The size of the one kind of piece that is shorter than `micro`; 0 if there is none.
    pub fn tail(&self) -> usize {
        (self.samples % self.batch) % self.micro
    }

    /// Samples of a step.
    pub fn len(&self, step: u64) -> usize {
        let start = self.start(step);
        self.batch.min(self.samples - start)
    }

    /// The pieces of a step.
    pub fn pieces(self, step: u64) -> impl Iterator<Item = Piece> {
        let (start, len) = (self.start(step), self.len(step));
        (0..len.div_ceil(self.micro)).map(move |k| {
            let offset = k * self.micro;
            let piece = self.micro.min(len - offset);
            Piece { start: start + offset, offset, len: piece, last: offset + piece == len }
        })
    }

    fn start(&self, step: u64) -> usize {
        (step % self.steps_per_epoch()) as usize * self.batch
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_cover_an_epoch_once(samples in 1usize..500, batch in 1usize..80, cut in 1usize..5) {
            let pace = Pace { samples, batch, micro: batch.div_ceil(cut) };
            let first = 3 * pace.steps_per_epoch();
            let mut next = 0;
            for step in first..first + pace.steps_per_epoch() {
                let mut len = 0;
                for piece in pace.pieces(step) {
                    prop_assert_eq!((piece.start, piece.offset), (next, len));
                    prop_assert!(piece.len == pace.micro || piece.len == pace.tail() || batch % pace.micro != 0);
                    next += piece.len;
                    len += piece.len;
                    prop_assert_eq!(piece.last, len == pace.len(step));
                }
                prop_assert_eq!(pace.epoch(step), 3);
            }
            prop_assert_eq!(next, samples);
            prop_assert!(pace.ends_epoch(first + pace.steps_per_epoch() - 1));
        }
    }
}
