//! Merging the bytes of one piece: always the pair of lowest rank, the leftmost of equals, until no pair has a merge.
//!
//! Symbols are a linked list in an array and candidates a heap, so a piece of n bytes takes O(n log n), even when it is a
//! whole file without a space.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// The merges of a tokenizer.
#[derive(Clone, Debug)]
pub(super) struct Merges {
    /// The id of each byte.
    pub(super) bytes: [u32; 256],
    /// For a pair of ids, its rank and the merged id.
    pairs: HashMap<u64, (u32, u32), BuildHasherDefault<PairHasher>>,
}

impl Merges {
    pub(super) fn new(bytes: [u32; 256]) -> Merges {
        Merges { bytes, pairs: HashMap::default() }
    }

    pub(super) fn insert(&mut self, left: u32, right: u32, rank: u32, id: u32) {
        self.pairs.insert(pair(left, right), (rank, id));
    }

    fn get(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        self.pairs.get(&pair(left, right)).copied()
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Merges pieces one after another, reusing its memory.
pub(super) struct Merger<'a> {
    merges: &'a Merges,
    symbols: Vec<Symbol>,
    candidates: BinaryHeap<Reverse<(u32, usize)>>,
}

/// A symbol of the piece; `prev` and `next` are indices, [`NONE`] at the ends.
struct Symbol {
    id: u32,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;
/// The id of a symbol that has become part of the one before it. Ids of tokens are far below.
const GONE: u32 = u32::MAX;

impl<'a> Merger<'a> {
    pub(super) fn new(merges: &'a Merges) -> Merger<'a> {
        Merger { merges, symbols: Vec::new(), candidates: BinaryHeap::new() }
    }

    /// Adds the ids of `piece` to `ids`.
    pub(super) fn merge(&mut self, piece: &[u8], ids: &mut Vec<i32>) {
        self.symbols.clear();
        self.candidates.clear();
        for (at, &byte) in piece.iter().enumerate() {
            let next = if at + 1 < piece.len() { at + 1 } else { NONE };
            self.symbols.push(Symbol {
                id: self.merges.bytes[usize::from(byte)],
                prev: at.wrapping_sub(1),
                next,
            });
        }
        for at in 0..piece.len() {
            self.consider(at);
        }
        while let Some(Reverse((rank, at))) = self.candidates.pop() {
            let Symbol { id: left, next, .. } = self.symbols[at];
            // A candidate is stale when one of its symbols has been merged since: then its pair has another rank.
            if left == GONE || next == NONE {
                continue;
            }
            match self.merges.get(left, self.symbols[next].id) {
                Some((found, id)) if found == rank => self.join(at, next, id),
                _ => {}
            }
        }
        // The first symbol is never merged into another one, so the list begins at 0.
        let mut at = if piece.is_empty() { NONE } else { 0 };
        while at != NONE {
            ids.push(self.symbols[at].id as i32);
            at = self.symbols[at].next;
        }
    }

    fn join(&mut self, at: usize, right: usize, id: u32) {
        let after = self.symbols[right].next;
        self.symbols[right].id = GONE;
        self.symbols[at].id = id;
        self.symbols[at].next = after;
        if after != NONE {
            self.symbols[after].prev = at;
        }
        let prev = self.symbols[at].prev;
        if prev != NONE {
            self.consider(prev);
        }
        self.consider(at);
    }

    /// Makes the pair that begins at `at` a candidate, if it has a merge.
    fn consider(&mut self, at: usize) {
        let Symbol { id, next, .. } = self.symbols[at];
        if next == NONE {
            return;
        }
        if let Some((rank, _)) = self.merges.get(id, self.symbols[next].id) {
            self.candidates.push(Reverse((rank, at)));
        }
    }
}

/// A hash that multiplies and folds: enough for a pair of ids, and this is the innermost look-up of encoding.
#[derive(Default, Clone, Copy, Debug)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: scans all pairs each time.
    fn merge_slowly(merges: &Merges, piece: &[u8]) -> Vec<i32> {
        let mut ids: Vec<u32> = piece.iter().map(|&byte| merges.bytes[usize::from(byte)]).collect();
        loop {
            let best = (1..ids.len())
                .filter_map(|at| merges.get(ids[at - 1], ids[at]).map(|(rank, id)| (rank, at, id)))
                .min();
            let Some((_, at, id)) = best else {
                return ids.into_iter().map(|id| id as i32).collect();
            };
            ids[at - 1] = id;
            ids.remove(at);
        }
    }

    #[test]
    fn merges_as_by_definition() {
        let bytes = std::array::from_fn(|byte| byte as u32);
        let mut merges = Merges::new(bytes);
        let (a, b) = (u32::from(b'a'), u32::from(b'b'));
        // aa, ab, aaab, ba, abba, and a second way to make aaab.
        for (rank, (left, right, id)) in
            [(a, a, 256), (a, b, 257), (256, 257, 258), (b, a, 259), (257, 259, 260), (a, 261, 258)]
                .into_iter()
                .enumerate()
        {
            merges.insert(left, right, rank as u32, id);
        }
        let mut merger = Merger::new(&merges);
        let mut state = 1_u32;
        for n in 0..200 {
            let piece: Vec<u8> = (0..n % 40)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    b"aaab"[(state >> 30) as usize]
                })
                .collect();
            let mut ids = Vec::new();
            merger.merge(&piece, &mut ids);
            assert_eq!(ids, merge_slowly(&merges, &piece), "{piece:?}");
        }
    }

    #[test]
    fn a_megabyte_without_a_space_is_no_worse_than_n_log_n() {
        let mut merges = Merges::new([0; 256]);
        for level in 0..16 {
            merges.insert(level, level, level, level + 1);
        }
        let mut ids = Vec::new();
        Merger::new(&merges).merge(&vec![0; 1 << 20], &mut ids);
        assert_eq!(ids, [16; 1 << 4]);
    }
}
