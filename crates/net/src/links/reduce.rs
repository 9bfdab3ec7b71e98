//! Reducing a segment into local data and computing both checksums in the same pass.

use super::Combine;
use crate::checksum;

/// How much is summed and reduced at a time: together with what arrived, half of an L1 cache of 32 KiB. CPU time of an
/// all-reduce of 64 MiB between four ranks on two cores of a Xeon of 2023, medians: 118 ms without prefetching the
/// local data, 112 ms with 16 KiB, 107 ms with 8 KiB.
const BLOCK_BYTES: usize = 8 * 1024;

/// Reduces block by block, so that each is summed while it is in L1. Returns the checksum of what arrived, which the
/// caller compares (if it is wrong, the contents of `into` are unspecified), and that of the result if it is wanted.
pub(super) fn reduce(
    into: &mut [u8],
    arrived: &[u8],
    theirs_first: bool,
    wanted: bool,
    combine: Combine,
) -> (u32, Option<u32>) {
    let (mut came, mut made) = (0, wanted.then_some(0));
    let mut left = into;
    for arrived in arrived.chunks(BLOCK_BYTES) {
        let (into, rest) = left.split_at_mut(arrived.len());
        // Local data come from memory: the next block is prefetched while this one is summed, in two halves.
        let next = &rest[..rest.len().min(BLOCK_BYTES)];
        let (first, second) = next.split_at(next.len() / 2);
        came = checksum::append(came, arrived, first);
        combine(into, arrived, theirs_first);
        made = made.map(|sum| checksum::append(sum, into, second));
        left = rest;
    }
    (came, made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_make_the_sums_of_the_whole() {
        for length in [0, 1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 300] {
            let mut into: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let arrived: Vec<u8> = (0..length).map(|i| (i % 241) as u8).collect();
            let want: Vec<u8> = into.iter().zip(&arrived).map(|(a, b)| a ^ b).collect();
            let mut combine = |into: &mut [u8], arrived: &[u8], theirs_first: bool| {
                assert!(theirs_first);
                into.iter_mut().zip(arrived).for_each(|(a, b)| *a ^= b);
            };
            let before = into.clone();
            let sums = reduce(&mut into, &arrived, true, true, &mut combine);
            assert_eq!(sums, (checksum::of(&arrived), Some(checksum::of(&want))), "{length} bytes");
            assert_eq!(into, want);
            let sums = reduce(&mut into, &arrived, true, false, &mut combine);
            assert_eq!(sums, (checksum::of(&arrived), None));
            assert_eq!(into, before);
        }
    }
}
