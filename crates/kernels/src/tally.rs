//! A digest of a bag of numbered things that does not depend on their order: how many there are, and the sum of a 128-bit hash of
//! each, modulo 2¹²⁸.
//!
//! Two bags with the same tally hold the same things, each as often, but for a chance of about 2⁻¹²⁸: one that is missing, doubled or
//! taken for another changes the sum by the difference of two hashes. A sum, not an exclusive or, in which two of a kind would
//! cancel. Tallies of disjoint parts add up to that of the whole, in any order and however the whole was split, which is
//! what makes them fit for ranks: each counts its own part, and the parts are added where sums are exchanged anyway.
//!
//! The hash is one block of Philox under a fixed key, a bijection of the 128 bits of its two numbers: different things never have
//! the same hash. It guards against mistakes, not against an attacker who searches for two sets with the same sum.

use std::ops::{Add, AddAssign};

use crate::random::philox;

/// The key of the hash: the square root of 2 in 64 bits, the same in all runs, so that tallies of any two can be compared.
const KEY: [u32; 2] = [0xf3bc_c908, 0x6a09_e667];
/// Bits of a part of the sum, as a number that ranks exchange.
const LIMB_BITS: u32 = 32;

/// How many things, and the sum of their hashes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// The sum of their hashes, modulo 2¹²⁸.
    pub sum: u128,
}

impl Tally {
    /// How many f64 a tally is exchanged as.
    pub const NUMBERS: usize = 5;

    /// Notes thing `b` of kind `a`.
    #[inline]
    pub fn note(&mut self, a: u64, b: u64) {
        let [h0, h1, h2, h3] = philox([b as u32, (b >> 32) as u32, a as u32, (a >> 32) as u32], KEY);
        let low = u128::from(u64::from(h0) | u64::from(h1) << 32);
        let high = u128::from(u64::from(h2) | u64::from(h3) << 32);
        *self += Tally { count: 1, sum: low | high << 64 };
    }

    /// As whole numbers in f64: the count, and the sum in four parts of 32 bits, the lowest first. The numbers of up to 2²¹ ranks can
    /// be added up without rounding, so it does not matter in which order they are.
    pub fn to_numbers(self) -> [f64; Tally::NUMBERS] {
        let limb = |k: u32| f64::from((self.sum >> (LIMB_BITS * k)) as u32);
        [self.count as f64, limb(0), limb(1), limb(2), limb(3)]
    }

    /// From sums of what [`Tally::to_numbers`] gave.
    ///
    /// # Panics
    /// If there are other than [`Tally::NUMBERS`].
    pub fn of_numbers(numbers: &[f64]) -> Tally {
        assert_eq!(numbers.len(), Tally::NUMBERS, "the numbers of a tally");
        let shifted = |(k, limb): (usize, &f64)| (*limb as u128).wrapping_shl(LIMB_BITS * k as u32);
        let sum = numbers[1..].iter().enumerate().map(shifted).fold(0, u128::wrapping_add);
        Tally { count: numbers[0] as u64, sum }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.count = self.count.wrapping_add(other.count);
        self.sum = self.sum.wrapping_add(other.sum);
    }
}

impl Add for Tally {
    type Output = Tally;

    fn add(mut self, other: Tally) -> Tally {
        self += other;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(things: impl IntoIterator<Item = (u64, u64)>) -> Tally {
        let mut tally = Tally::default();
        things.into_iter().for_each(|(a, b)| tally.note(a, b));
        tally
    }

    #[test]
    fn order_and_parts_do_not_matter() {
        let things: Vec<_> = (0..1000u64).map(|i| (i / 300, i % 300)).collect();
        let whole = of(things.iter().copied());
        assert_eq!(whole.count, 1000);
        assert_eq!(of(things.iter().rev().copied()), whole);
        for ranks in [1, 2, 3, 7, 1000] {
            let parts = (0..ranks).map(|r| of(things.iter().skip(r).step_by(ranks).copied()));
            let parts: Vec<Tally> = parts.collect();
            assert_eq!(parts.iter().copied().fold(Tally::default(), Tally::add), whole);
            let mut numbers = [0.0; Tally::NUMBERS];
            for part in &parts {
                numbers.iter_mut().zip(part.to_numbers()).for_each(|(sum, n)| *sum += n);
            }
            assert_eq!(Tally::of_numbers(&numbers), whole, "{ranks} ranks");
        }
    }

    #[test]
    fn what_is_missing_doubled_or_another_shows() {
        let whole = of((0..100).map(|i| (3, i)));
        let with = |missing: u64, more: &[(u64, u64)]| {
            of((0..100).filter(|i| *i != missing).map(|i| (3, i)).chain(more.iter().copied()))
        };
        assert_eq!(with(50, &[(3, 50)]), whole);
        for other in [
            with(50, &[]),
            with(50, &[(3, 51)]),
            with(50, &[(4, 50)]),
            with(50, &[(3, 51), (3, 51)]),
            with(200, &[(3, 7)]),
            with(200, &[(3, 7), (3, 7)]),
            with(50, &[(50, 3)]),
            with(50, &[(3, 50 + (1 << 32))]),
        ] {
            assert_ne!(other.sum, whole.sum);
        }
    }

    /// Checkpoints have tallies of earlier versions: the hash must stay as it is.
    #[test]
    fn the_hash_stays_as_it_is() {
        let all = of([(0, 0), (0, 1), (1, 0), (u64::MAX, u64::MAX)]);
        assert_eq!(format!("{:032x}", all.sum), "ab82b82e476aa1dedc418598e733fb68");
    }

    #[test]
    fn the_largest_sums_of_many_ranks_are_exact() {
        let most = Tally { count: u64::from(u32::MAX), sum: u128::MAX };
        let numbers = most.to_numbers().map(|n| n * 65_536.0);
        let (count, sum) = (most.count << 16, u128::MAX.wrapping_mul(1 << 16));
        assert_eq!(Tally::of_numbers(&numbers), Tally { count, sum });
    }
}
