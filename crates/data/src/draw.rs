//! Random words by address: a draw depends on the seed, the purpose and two numbers, and not on what
//! was drawn before. Not a generator with a state.

use polyreme_kernels::random::philox;

/// What a word is drawn for. Words of different purposes are independent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// The order of samples, or of blocks, in a pass over the set.
    Pass = 1,
    /// The order of samples inside a block.
    Block,
    /// The position of the short block.
    ShortBlock,
    /// Which samples are for validation.
    Split,
    /// The centres of synthetic classes.
    Centre,
    /// The noise of synthetic samples.
    Noise,
    /// A random crop.
    Crop,
    /// Whether an image is flipped.
    Flip,
    /// The shift of an image.
    Shift,
    /// The rectangle that is erased.
    Erase,
}

/// An odd number without pattern: the golden ratio in 64 bits.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The stream of a purpose.
pub(crate) fn stream(seed: u64, purpose: Purpose) -> u64 {
    scramble(seed.wrapping_add(GOLDEN.wrapping_mul(purpose as u64)))
}

/// The four random words of an address.
pub(crate) fn words(seed: u64, purpose: Purpose, a: u64, b: u64) -> [u32; 4] {
    block(stream(seed, purpose), a, b)
}

/// The 64 random bits of an address.
pub(crate) fn word64(seed: u64, purpose: Purpose, a: u64, b: u64) -> u64 {
    let [low, high, ..] = words(seed, purpose, a, b);
    u64::from(low) | u64::from(high) << 32
}

/// A number below `n`, from a random word; 0 if `n` is 0. The bias is below n/2³².
pub(crate) fn below(word: u32, n: usize) -> usize {
    ((u128::from(word) * n as u128) >> 32) as usize
}

/// A number below `n`, from 64 random bits; 0 if `n` is 0.
pub(crate) fn below64(word: u64, n: usize) -> usize {
    ((u128::from(word) * n as u128) >> 64) as usize
}

/// A number in 0..1, from a random word.
pub(crate) fn unit(word: u32) -> f64 {
    f64::from(word) / 4_294_967_296.0
}

/// As many words of one address as are asked for.
pub(crate) struct Words {
    stream: u64,
    a: u64,
    b: u64,
    ready: [u32; 4],
    used: usize,
}

impl Words {
    pub(crate) fn new(seed: u64, purpose: Purpose, a: u64, b: u64) -> Words {
        let stream = stream(seed, purpose);
        Words { stream, a, b, ready: block(stream, a, b), used: 0 }
    }

    pub(crate) fn next(&mut self) -> u32 {
        if self.used == self.ready.len() {
            // The address fills the counter, so further words come from another stream.
            self.stream = scramble(self.stream.wrapping_add(GOLDEN));
            self.ready = block(self.stream, self.a, self.b);
            self.used = 0;
        }
        self.used += 1;
        self.ready[self.used - 1]
    }
}

/// A bijection of 64 bits in which every output bit depends on every input bit.
pub(crate) fn scramble(x: u64) -> u64 {
    let x = (x ^ x >> 32).wrapping_mul(0xbea2_25f9_eb34_556d);
    let x = (x ^ x >> 29).wrapping_mul(0xbea2_25f9_eb34_556d);
    x ^ x >> 32
}

fn block(stream: u64, a: u64, b: u64) -> [u32; 4] {
    philox([a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32], [stream as u32, (stream >> 32) as u32])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_differ_by_every_part_of_their_address() {
        let base = words(1, Purpose::Pass, 2, 3);
        assert_eq!(base, words(1, Purpose::Pass, 2, 3));
        for other in [
            words(2, Purpose::Pass, 2, 3),
            words(1, Purpose::Block, 2, 3),
            words(1, Purpose::Pass, 3, 3),
            words(1, Purpose::Pass, 2, 1 << 40),
        ] {
            assert!(base.iter().zip(other).all(|(a, b)| *a != b), "{base:?} {other:?}");
        }
    }

    #[test]
    fn more_words_than_a_block_go_on_without_repeating() {
        let mut drawn = Words::new(7, Purpose::Erase, 1, 2);
        let mut seen: Vec<u32> = (0..64).map(|_| drawn.next()).collect();
        assert_eq!(seen[..4], words(7, Purpose::Erase, 1, 2));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 64);
    }

    #[test]
    fn numbers_below_n_reach_both_ends() {
        for (word, n, expected) in
            [(0, 5, 0), (u32::MAX, 5, 4), (u32::MAX, 1, 0), (1 << 31, 2, 1), (u32::MAX, 0, 0)]
        {
            assert_eq!(below(word, n), expected, "{word} {n}");
            assert_eq!(below64(u64::from(word) << 32 | u64::from(word), n), expected, "{word} {n}");
        }
    }
}
