//! The order of samples as a function: which sample is at a position of an epoch follows from the seed and the
//! epoch's number. Nothing is stored, and any position is computed directly.
//!
//! Epochs walk through *passes*. A pass is a permutation of the whole set, a different one each time. An epoch of a whole
//! set is one pass. An epoch of a fraction goes on where the epoch before it stopped, and into the next pass where one
//! ends. So after any number of epochs all samples have been visited equally often, or some once more; only the epoch that
//! crosses from one pass into the next may see a sample twice.

use crate::draw::{Purpose, below64, word64};
use crate::permute::Permutation;

/// How the samples of a pass are shuffled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// In the order of the set.
    InOrder,
    /// All samples in random order.
    Sample,
    /// Blocks of this many neighbours in random order, and random order inside a block: for files larger than memory.
    /// The last block may be shorter; 0 counts as 1.
    Block(usize),
    /// The set is cut into as many contiguous parts as a batch has samples, and every batch takes one sample of each part,
    /// in the order of the parts; at random inside a part. So the first half of every batch comes from the first
    /// half of the set, and so on: ranks that split batches in the same way read only their own part of the files.
    /// 0 counts as 1. In epochs of a fraction of the set that do not begin with a pass, parts and places are shifted.
    Parts(usize),
    /// The set is arranged by length ([`crate::by_length`]), and batches are neighbours in it: samples are in random order inside
    /// a length, and batches in random order. The short batch of a pass comes last, and is taken from anywhere. In epochs of a
    /// fraction of the set that do not begin with a pass, steps are no longer such batches, and more of them mix lengths.
    Lengths {
        /// Samples of a batch; 0 counts as 1.
        batch: usize,
        /// Where each length ends in the set, ascending; the last is its end.
        ends: [usize; LENGTHS_MAX],
    },
}

/// How many lengths [`Mode::Lengths`] tells apart.
pub const LENGTHS_MAX: usize = 16;

/// The order of one epoch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Order {
    /// How many samples the set has.
    pub len: usize,
    /// The seed, which with the epoch determines the order.
    pub seed: u64,
    /// The number of the epoch.
    pub epoch: u64,
    /// How samples are shuffled.
    pub mode: Mode,
    /// The fraction of the set that an epoch visits, in (0, 1].
    pub fraction: f64,
}

impl Order {
    /// All samples in the order of the set, as an evaluation reads them.
    pub fn in_order(len: usize) -> Order {
        Order { len, seed: 0, epoch: 0, mode: Mode::InOrder, fraction: 1.0 }
    }

    /// The same order in another epoch.
    pub fn of_epoch(self, epoch: u64) -> Order {
        Order { epoch, ..self }
    }

    /// The number of positions of an epoch: the fraction of the set, rounded, and at least one if the set is not empty.
    pub fn epoch_len(&self) -> usize {
        if self.fraction >= 1.0 || self.len == 0 {
            return self.len;
        }
        // A fraction that is NaN becomes 0 and then 1.
        ((self.fraction * self.len as f64).round() as usize).clamp(1, self.len)
    }

    /// The sample at a position of the epoch, which is below [`Order::epoch_len`].
    pub fn at(&self, position: usize) -> usize {
        assert!(position < self.epoch_len(), "position {position} of an epoch of {}", self.epoch_len());
        self.walk(position).next().expect("the position is inside the epoch")
    }

    /// The samples from a position to the end of the epoch.
    pub fn walk(&self, position: usize) -> Walk {
        let epoch_len = self.epoch_len();
        let global = u128::from(self.epoch) * epoch_len as u128 + position as u128;
        let len = (self.len as u128).max(1);
        // An epoch is no longer than a pass, so there are no more passes than epochs.
        let (number, within) = ((global / len) as u64, (global % len) as usize);
        Walk {
            pass: Pass::new(self, number),
            number,
            within,
            left: epoch_len.saturating_sub(position),
            order: *self,
        }
    }
}

/// The samples of an epoch, one after the other; see [`Order::walk`].
#[derive(Clone, Debug)]
pub struct Walk {
    order: Order,
    pass: Pass,
    /// The number of the pass.
    number: u64,
    /// The position in the pass.
    within: usize,
    left: usize,
}

impl Iterator for Walk {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        if self.within == self.order.len {
            (self.number, self.within) = (self.number.wrapping_add(1), 0);
            self.pass = Pass::new(&self.order, self.number);
        }
        self.within += 1;
        Some(self.pass.at(self.within - 1))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Walk {}

/// One permutation of the set, prepared.
#[derive(Clone, Debug)]
enum Pass {
    InOrder,
    Sample(Permutation),
    Block(Blocks),
    Parts(Parts),
    Lengths(Lengths),
}

impl Pass {
    fn new(order: &Order, number: u64) -> Pass {
        match order.mode {
            Mode::InOrder => Pass::InOrder,
            Mode::Sample => {
                Pass::Sample(Permutation::new(order.len, word64(order.seed, Purpose::Pass, number, 0)))
            }
            Mode::Block(size) => Pass::Block(Blocks::new(order, size.max(1), number)),
            Mode::Parts(batch) => Pass::Parts(Parts {
                seed: order.seed,
                number,
                len: order.len,
                batch: batch.clamp(1, order.len.max(1)),
            }),
            Mode::Lengths { batch, ends } => Pass::Lengths(Lengths::new(order, batch.max(1), ends, number)),
        }
    }

    fn at(&mut self, within: usize) -> usize {
        match self {
            Pass::InOrder => within,
            Pass::Sample(permutation) => permutation.at(within),
            Pass::Block(blocks) => blocks.at(within),
            Pass::Parts(parts) => parts.at(within),
            Pass::Lengths(lengths) => lengths.at(within),
        }
    }
}

/// A pass of batches of neighbours in a set that is arranged by length. Whole batches are permuted; the short one, if there is one,
/// comes last, and lies at a random place among the others.
#[derive(Clone, Debug)]
struct Lengths {
    seed: u64,
    number: u64,
    batch: usize,
    ends: [usize; LENGTHS_MAX],
    whole: Permutation,
    n_whole: usize,
    short_len: usize,
    /// How many whole batches lie before the short one.
    before_short: usize,
    /// The length that was read last and the order inside it.
    open: Option<(usize, Permutation)>,
}

impl Lengths {
    fn new(order: &Order, batch: usize, ends: [usize; LENGTHS_MAX], number: u64) -> Lengths {
        let (n_whole, short_len) = (order.len / batch, order.len % batch);
        Lengths {
            seed: order.seed,
            number,
            batch,
            ends,
            whole: Permutation::new(n_whole, word64(order.seed, Purpose::Pass, number, 0)),
            n_whole,
            short_len,
            before_short: below64(word64(order.seed, Purpose::ShortBlock, number, 0), n_whole + 1),
            open: None,
        }
    }

    fn at(&mut self, within: usize) -> usize {
        let (batch, offset) = (within / self.batch, within % self.batch);
        let start = match batch < self.n_whole {
            true => {
                let place = self.whole.at(batch);
                place * self.batch + if place < self.before_short { 0 } else { self.short_len }
            }
            false => self.before_short * self.batch,
        };
        let at = start + offset;
        // Samples beyond the last end would be ones that nobody counted; they are of the last length.
        let length = self.ends.iter().position(|end| at < *end).unwrap_or(LENGTHS_MAX - 1);
        let first = if length == 0 { 0 } else { self.ends[length - 1] };
        let inside = match self.open {
            Some((open, inside)) if open == length => inside,
            _ => {
                let key = word64(self.seed, Purpose::Block, self.number, length as u64);
                self.open.insert((length, Permutation::new(self.ends[length] - first, key))).1
            }
        };
        first + inside.at(at - first)
    }
}

/// A pass in blocks. Full blocks are permuted; the short one, if there is one, is put at a random place among them.
#[derive(Clone, Debug)]
struct Blocks {
    seed: u64,
    number: u64,
    size: usize,
    full: Permutation,
    n_full: usize,
    /// Where the short block starts in the pass, and how many samples it has.
    short_start: usize,
    short_len: usize,
    /// The block that was read last and the order inside it; walking stays in a block for a while.
    open: Option<(usize, Permutation)>,
}

impl Blocks {
    fn new(order: &Order, size: usize, number: u64) -> Blocks {
        let (n_full, short_len) = (order.len / size, order.len % size);
        let place = below64(word64(order.seed, Purpose::ShortBlock, number, 0), n_full + 1);
        Blocks {
            seed: order.seed,
            number,
            size,
            full: Permutation::new(n_full, word64(order.seed, Purpose::Pass, number, 0)),
            n_full,
            short_start: place * size,
            short_len,
            open: None,
        }
    }

    fn at(&mut self, within: usize) -> usize {
        let after_short = within.wrapping_sub(self.short_start);
        let (block, offset) = if within >= self.short_start && after_short < self.short_len {
            (self.n_full, after_short)
        } else {
            let among_full = if within < self.short_start { within } else { within - self.short_len };
            (self.full.at(among_full / self.size), among_full % self.size)
        };
        let inside = match self.open {
            Some((open, inside)) if open == block => inside,
            _ => {
                let len = if block == self.n_full { self.short_len } else { self.size };
                let key = word64(self.seed, Purpose::Block, self.number, block as u64);
                self.open.insert((block, Permutation::new(len, key))).1
            }
        };
        block * self.size + inside.at(offset)
    }
}

/// A pass in batches that take one sample of each part. Parts differ by one sample at most, and the last batch, if it is
/// short, takes the extra samples of the longer ones.
#[derive(Clone, Copy, Debug)]
struct Parts {
    seed: u64,
    number: u64,
    len: usize,
    /// The samples of a batch, which is also the number of parts.
    batch: usize,
}

impl Parts {
    fn at(&self, within: usize) -> usize {
        let (step, place) = (within / self.batch, within % self.batch);
        let (whole, longer) = (self.len / self.batch, self.len % self.batch);
        let part = match step < whole {
            true => place,
            // Before part p there are ⌊p·longer/batch⌋ longer ones.
            false => ((place as u128 + 1) * self.batch as u128).div_ceil(longer as u128) as usize - 1,
        };
        let (start, end) = (self.start(part), self.start(part + 1));
        let key = word64(self.seed, Purpose::Block, self.number, part as u64);
        start + Permutation::new(end - start, key).at(step)
    }

    fn start(&self, part: usize) -> usize {
        (part as u128 * self.len as u128 / self.batch as u128) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::spans;

    fn order(len: usize, seed: u64, epoch: u64, mode: Mode, fraction: f64) -> Order {
        Order { len, seed, epoch, mode, fraction }
    }

    fn modes() -> impl Strategy<Value = Mode> {
        prop_oneof![
            Just(Mode::InOrder),
            Just(Mode::Sample),
            (0_usize..100).prop_map(Mode::Block),
            Just(Mode::Block(usize::MAX)),
            (0_usize..100).prop_map(Mode::Parts),
            Just(Mode::Parts(usize::MAX)),
        ]
    }

    proptest! {
        #[test]
        fn an_epoch_visits_every_sample_once(
            len in 0_usize..1000, seed: u64, epoch: u64, mode in modes(), batch in 1_usize..300,
        ) {
            let order = order(len, seed, epoch, mode, 1.0);
            let mut visits = vec![0; len];
            for span in spans(order, batch) {
                prop_assert!(span.len >= 1 && span.len <= batch);
                for sample in span.order.walk(span.start).take(span.len) {
                    visits[sample] += 1;
                }
            }
            prop_assert!(visits.iter().all(|&n| n == 1), "{visits:?}");
        }

        #[test]
        fn seeking_is_walking(
            len in 1_usize..300, seed: u64, epoch in 0_u64..50, mode in modes(), fraction in 0.0..1.2_f64,
        ) {
            let order = order(len, seed, epoch, mode, fraction);
            let walked: Vec<usize> = order.walk(0).collect();
            prop_assert_eq!(walked.len(), order.epoch_len());
            let sought: Vec<usize> = (0..order.epoch_len()).map(|position| order.at(position)).collect();
            prop_assert_eq!(&walked, &sought);
            let middle = walked.len() / 2;
            prop_assert_eq!(&walked[middle..], &order.walk(middle).collect::<Vec<_>>());
        }

        #[test]
        fn fractions_go_round_evenly(
            len in 1_usize..200, seed: u64, mode in modes(), fraction in 0.0..1.0_f64, epochs in 1_u64..30,
        ) {
            let mut visits = vec![0_usize; len];
            let first = order(len, seed, 0, mode, fraction);
            for epoch in 0..epochs {
                for sample in first.of_epoch(epoch).walk(0) {
                    visits[sample] += 1;
                }
            }
            let each = epochs as usize * first.epoch_len() / len;
            prop_assert!(visits.iter().all(|&n| n == each || n == each + 1), "{each}: {visits:?}");
        }

        #[test]
        fn a_block_is_read_in_one_go(len in 1_usize..1000, seed: u64, epoch: u64, size in 1_usize..70) {
            let mut blocks: Vec<usize> =
                order(len, seed, epoch, Mode::Block(size), 1.0).walk(0).map(|sample| sample / size).collect();
            blocks.dedup();
            prop_assert_eq!(blocks.len(), len.div_ceil(size));
        }
    }

    proptest! {
        #[test]
        fn places_of_a_batch_have_their_part_of_the_set(
            len in 1_usize..1000, seed: u64, epoch in 0_u64..9, batch in 1_usize..70,
        ) {
            let batch = batch.min(len);
            let order = order(len, seed, epoch, Mode::Parts(batch), 1.0);
            for (position, sample) in order.walk(0).enumerate() {
                let (step, place) = (position / batch, position % batch);
                let n = batch.min(len - step * batch);
                // The fraction of the batch before this sample, and that of the set; a short batch skips parts.
                let (of_batch, of_set) = (place as f64 / n as f64, sample as f64 / len as f64);
                let (part, one) = (1.0 / n as f64 + 1.0 / batch as f64, 1.0 / len as f64);
                prop_assert!(of_set > of_batch - one && of_set < of_batch + part, "{}: {}", position, sample);
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        for mode in [Mode::Parts(4), Mode::Sample, Mode::Block(1), Mode::Block(10), Mode::Block(1000)] {
            let read = |seed, epoch| order(100, seed, epoch, mode, 1.0).walk(0).collect::<Vec<_>>();
            let base = read(3, 0);
            assert_eq!(base, read(3, 0));
            for other in [read(3, 1), read(3, 1 << 40), read(4, 0), read(3 + (1 << 40), 0)] {
                let same = base.iter().zip(&other).filter(|(a, b)| a == b).count();
                // One in expectation, or a tenth where blocks of ten happen to meet.
                assert!(same < 20, "{mode:?}: {same} of 100 in the same place");
            }
        }
    }

    #[test]
    fn the_length_of_an_epoch_is_the_fraction_rounded() {
        for (len, fraction, expected) in [
            (0, 0.5, 0),
            (1, 0.001, 1),
            (1000, 0.25, 250),
            (10, 0.25, 3),
            (10, 1.0, 10),
            (10, 7.0, 10),
            (10, f64::NAN, 1),
            (usize::MAX, 1.0, usize::MAX),
        ] {
            assert_eq!(order(len, 0, 0, Mode::Sample, fraction).epoch_len(), expected, "{len} {fraction}");
        }
    }

    #[test]
    fn the_short_block_is_not_always_last() {
        let place = |seed| order(25, seed, 0, Mode::Block(10), 1.0).walk(0).position(|sample| sample >= 20);
        let mut places: Vec<_> = (0..50).filter_map(place).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places, [0, 10, 20]);
    }
}
