//! Where the parts of a coded sum lie in the memory that it travels through.
//!
//! ```text
//!  numbers  [ part of rank 0 | part of rank 1 | part of rank 2 ]      cut at multiples of a block
//!  coded    [ for 0 | for 2 ] [ from 0 | from 2 ]                     at rank 1, while parts go to their owners
//!  coded    [ sum 0 | sum 1 | sum 2 ]                                 while sums are gathered
//! ```
//!
//! It depends on lengths alone, so it is made once for a program and not again in a step.

use std::sync::Arc;

use super::{BLOCK, BlockCodec};

/// The layout of a sum over ranks whose parts are coded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CodedLayout {
    /// The format of the parts.
    pub codec: BlockCodec,
    /// Which numbers belong to which rank.
    pub cuts: Arc<[usize]>,
    /// Which bytes go to which rank; none to this one.
    pub send: Arc<[usize]>,
    /// Which bytes come from which rank, counted from the end of those that are sent.
    pub recv: Arc<[usize]>,
    /// Which bytes are the sum of which rank's part.
    pub sums: Arc<[usize]>,
}

impl CodedLayout {
    /// The layout at one of the ranks that `cuts` divides numbers among.
    ///
    /// # Panics
    /// If a part begins in the middle of a block.
    pub fn new(codec: BlockCodec, cuts: Arc<[usize]>, rank: usize) -> CodedLayout {
        let ranks = cuts.len() - 1;
        assert!(
            cuts[..ranks].iter().all(|cut| cut.is_multiple_of(BLOCK) || *cut == cuts[ranks]),
            "parts are made of whole blocks: {cuts:?}"
        );
        let part = |q: usize| codec.coded_len(cuts[q + 1] - cuts[q]);
        let ends = |of: &dyn Fn(usize) -> usize| -> Arc<[usize]> {
            let mut end = 0;
            let next = |q: usize| {
                end += of(q);
                end
            };
            std::iter::once(0).chain((0..ranks).map(next)).collect()
        };
        CodedLayout {
            codec,
            send: ends(&|q| if q == rank { 0 } else { part(q) }),
            recv: ends(&|q| if q == rank { 0 } else { part(rank) }),
            sums: ends(&part),
            cuts,
        }
    }

    /// Nearly equal parts of `len` numbers that begin with a block.
    pub fn even(codec: BlockCodec, len: usize, ranks: usize, rank: usize) -> CodedLayout {
        let blocks = len.div_ceil(BLOCK);
        let cuts = (0..=ranks).map(|r| (blocks * r / ranks * BLOCK).min(len)).collect();
        CodedLayout::new(codec, cuts, rank)
    }

    /// Bytes that a sum travels through: enough for this layout, and for an even one over fewer ranks.
    pub fn room(&self) -> usize {
        let ranks = self.cuts.len() - 1;
        let own = self.recv[ranks];
        let whole = self.codec.coded_len(self.cuts[ranks]);
        // Twice a block for each rank: a part ends with a short block, whose length is rounded up.
        let even = 2 * whole + 2 * ranks * self.codec.coded_len(BLOCK);
        even.max(self.send[ranks] + own).max(self.sums[ranks])
    }

    /// Bytes that this rank sends for a sum that all ranks get, or of which each gets its part.
    pub fn sent_bytes(&self, rank: usize, scattered: bool) -> usize {
        let ranks = self.cuts.len() - 1;
        let gathered = (self.sums[rank + 1] - self.sums[rank]) * (ranks - 1);
        self.send[ranks] + if scattered { 0 } else { gathered }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_after_the_other() {
        let layout = CodedLayout::even(BlockCodec::Int8, 5 * BLOCK + 7, 3, 1);
        assert_eq!(*layout.cuts, [0, 2048, 4096, 5127]);
        let [a, c] = [2048, 1031].map(|n| BlockCodec::Int8.coded_len(n));
        assert_eq!(*layout.send, [0, a, a, a + c]);
        assert_eq!(*layout.recv, [0, a, a, 2 * a]);
        assert_eq!(*layout.sums, [0, a, 2 * a, 2 * a + c]);
        assert_eq!(layout.sent_bytes(1, false), a + c + 2 * a);
        assert_eq!(layout.sent_bytes(1, true), a + c);
    }

    #[test]
    fn there_is_room_for_fewer_ranks() {
        for (len, ranks) in [(0, 2), (1, 3), (1024, 5), (100_003, 7), (1 << 20, 16)] {
            for codec in BlockCodec::ALL {
                let room = CodedLayout::even(codec, len, ranks, 0).room();
                for (fewer, rank) in (1..=ranks).flat_map(|n| (0..n).map(move |rank| (n, rank))) {
                    let layout = CodedLayout::even(codec, len, fewer, rank);
                    let need = layout.send[fewer] + layout.recv[fewer];
                    assert!(need.max(layout.sums[fewer]) <= room, "{len} over {fewer} of {ranks}");
                }
            }
        }
    }
}
