//! What a server came to, in numbers that travel.

use polyreme_net::servers::Staleness;

/// Applied gradients are counted by their age, in updates: those that were at most as old as each of these.
pub const STALENESS_BOUNDS: [u64; 8] = [0, 1, 2, 4, 8, 16, 32, 64];

/// What a server came to since it was started.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ServerCounts {
    /// Ranges of the parameters that it has.
    pub ranges: u64,
    /// Parameters in them.
    pub params: u64,
    /// Workers that have a session with it.
    pub clients: u64,
    /// Steps that are applied to all of its ranges, those of before it was started included.
    pub version: u64,
    /// How old the gradients were that it applied.
    pub staleness: Staleness,
    /// How many of them were at most as old as each of [`STALENESS_BOUNDS`].
    pub staleness_up_to: [u64; STALENESS_BOUNDS.len()],
    /// Bytes that it has put on the wire.
    pub sent_bytes: u64,
    /// Bytes of letters that have come and that it has not taken.
    pub queued_bytes: u64,
}

impl ServerCounts {
    /// How many numbers they are.
    pub const NUMBERS: usize = 9 + STALENESS_BOUNDS.len();

    /// A gradient of this age was applied; the sums of all are in `staleness`.
    pub(super) fn note(&mut self, age: u64) {
        let counted = STALENESS_BOUNDS.iter().zip(&mut self.staleness_up_to);
        counted.filter(|(bound, _)| age <= **bound).for_each(|(_, count)| *count += 1);
    }

    /// As numbers, exact up to 2^53.
    pub fn to_numbers(&self) -> [f64; ServerCounts::NUMBERS] {
        let Staleness { sum, count, max } = self.staleness;
        let ServerCounts { ranges, params, clients, version, sent_bytes, queued_bytes, .. } = *self;
        let first = [ranges, params, clients, version, sum, count, max, sent_bytes, queued_bytes];
        let mut numbers = first.into_iter().chain(self.staleness_up_to);
        std::array::from_fn(|_| numbers.next().expect("there are as many") as f64)
    }

    /// What [`ServerCounts::to_numbers`] gave.
    ///
    /// # Panics
    /// If they are fewer.
    pub fn of_numbers(numbers: &[f64]) -> ServerCounts {
        let of = |k: usize| numbers[k] as u64;
        ServerCounts {
            ranges: of(0),
            params: of(1),
            clients: of(2),
            version: of(3),
            staleness: Staleness { sum: of(4), count: of(5), max: of(6) },
            staleness_up_to: std::array::from_fn(|k| of(9 + k)),
            sent_bytes: of(7),
            queued_bytes: of(8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_counted_and_numbers_come_back() {
        let mut counts = ServerCounts::default();
        [0, 0, 1, 3, 64, 65].into_iter().for_each(|age| counts.note(age));
        assert_eq!(counts.staleness_up_to, [2, 3, 3, 4, 4, 4, 4, 5]);
        let numbers: Vec<f64> = (1..=ServerCounts::NUMBERS).map(|n| n as f64).collect();
        assert_eq!(ServerCounts::of_numbers(&numbers).to_numbers(), numbers[..]);
    }
}
