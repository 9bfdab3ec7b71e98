//! A set of block numbers that grows nearly in order: everything below a number, and a few beyond it.

use std::collections::BTreeSet;

/// Which blocks were applied.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct BlockSet {
    below: u64,
    beyond: BTreeSet<u64>,
}

impl BlockSet {
    /// All blocks before this one.
    pub fn below(end: u64) -> BlockSet {
        BlockSet { below: end, beyond: BTreeSet::new() }
    }

    /// Adds a block; whether it was not there.
    pub fn insert(&mut self, block: u64) -> bool {
        let new = !self.contains(block) && self.beyond.insert(block);
        while self.beyond.remove(&self.below) {
            self.below += 1;
        }
        new
    }

    /// Whether a block is there.
    pub fn contains(&self, block: u64) -> bool {
        block < self.below || self.beyond.contains(&block)
    }

    /// The first block that is not there.
    pub fn first_missing(&self) -> u64 {
        self.below
    }

    /// How many blocks there are.
    pub fn len(&self) -> u64 {
        self.below + self.beyond.len() as u64
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
