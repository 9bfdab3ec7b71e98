//! The fixed tree in which the gradients of logical shards are added up: the same sums, in the same order, whichever
//! rank computes them.
//!
//! The tree over shards `0..n` is cut at the largest power of two below `n`, and so on in both halves. A rank that has
//! a run of shards adds up every subtree that it has whole; what is left are at most `2·log2(n)` sums. The owner of a
//! range of elements gets those of all ranks and adds them up along the same tree.

use std::ops::Range;

/// A subtree: the shards below it.
pub type Subtree = Range<usize>;

/// Where a subtree of more than one shard is cut.
pub fn cut(node: &Subtree) -> usize {
    debug_assert!(node.len() > 1, "a shard is not cut");
    node.start + (node.len().next_power_of_two() / 2)
}

/// Whether a run of shards is a subtree of the tree over `0..shards`.
pub fn is_subtree(shards: usize, run: &Range<usize>) -> bool {
    !run.is_empty() && whole_subtrees(shards, run) == [run.clone()]
}

/// The largest subtrees of the tree over `0..shards` that lie wholly within `run`, from left to right.
pub fn whole_subtrees(shards: usize, run: &Range<usize>) -> Vec<Subtree> {
    fn descend(node: Subtree, run: &Range<usize>, found: &mut Vec<Subtree>) {
        if node.is_empty() || node.end <= run.start || run.end <= node.start {
            return;
        }
        if run.start <= node.start && node.end <= run.end {
            found.push(node);
            return;
        }
        let at = cut(&node);
        descend(node.start..at, run, found);
        descend(at..node.end, run, found);
    }
    let mut found = Vec::new();
    descend(0..shards, run, &mut found);
    found
}

/// The run of shards that a rank computes.
pub fn run_of(shards: usize, ranks: usize, rank: usize) -> Range<usize> {
    shards * rank / ranks..shards * (rank + 1) / ranks
}

/// One addition on the way from the given sums to the total.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Add {
    /// The sum that is added to, by its number among those given.
    pub into: usize,
    /// The one that is added.
    pub from: usize,
}

/// What becomes of the sums of several ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SumsOfRanks {
    /// How many each rank has.
    pub counts: Vec<usize>,
    /// The additions that turn all of them, in the order of ranks, into the sum of all, which ends up in the first. What is added comes behind
    /// what it is added to.
    pub adds: Vec<Add>,
}

impl SumsOfRanks {
    /// Of ranks that each have added up the whole subtrees of such a run of shards.
    pub fn new(shards: usize, runs: &[Range<usize>]) -> SumsOfRanks {
        let nodes: Vec<Vec<Subtree>> = runs.iter().map(|run| whole_subtrees(shards, run)).collect();
        let counts = nodes.iter().map(Vec::len).collect();
        let all: Vec<Subtree> = nodes.into_iter().flatten().collect();
        SumsOfRanks { counts, adds: additions(shards, &all) }
    }
}

/// The additions that turn the sums of `nodes` (from left to right, together all shards) into the sum of all, which
/// ends up in the first.
pub fn additions(shards: usize, nodes: &[Subtree]) -> Vec<Add> {
    fn descend(node: Subtree, nodes: &[Subtree], adds: &mut Vec<Add>) -> usize {
        if let Some(at) = nodes.iter().position(|n| *n == node) {
            return at;
        }
        let at = cut(&node);
        let left = descend(node.start..at, nodes, adds);
        let right = descend(at..node.end, nodes, adds);
        adds.push(Add { into: left, from: right });
        left
    }
    let mut adds = Vec::new();
    if shards > 0 {
        descend(0..shards, nodes, &mut adds);
    }
    adds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds up in the tree, as text.
    fn sum(shards: usize, ranks: usize) -> String {
        let whole = |node: &Subtree| {
            let leaves: Vec<Subtree> = node.clone().map(|k| k..k + 1).collect();
            fn text(node: Subtree) -> String {
                match node.len() {
                    1 => node.start.to_string(),
                    _ => {
                        let at = cut(&node);
                        format!("({}+{})", text(node.start..at), text(at..node.end))
                    }
                }
            }
            assert!(!leaves.is_empty());
            text(node.clone())
        };
        let runs: Vec<Range<usize>> = (0..ranks).map(|r| run_of(shards, ranks, r)).collect();
        let nodes: Vec<Subtree> = runs.iter().flat_map(|run| whole_subtrees(shards, run)).collect();
        let mut sums: Vec<String> = nodes.iter().map(whole).collect();
        let SumsOfRanks { counts, adds } = SumsOfRanks::new(shards, &runs);
        assert_eq!(counts.iter().sum::<usize>(), nodes.len());
        for add in adds {
            assert!(add.into < add.from, "{add:?}");
            sums[add.into] = format!("({}+{})", sums[add.into], sums[add.from]);
        }
        sums.swap_remove(0)
    }

    #[test]
    fn the_sum_does_not_depend_on_the_ranks() {
        for shards in 1..20 {
            let one = sum(shards, 1);
            for ranks in 1..=shards + 2 {
                assert_eq!(sum(shards, ranks), one, "{shards} shards, {ranks} ranks");
            }
        }
        assert_eq!(sum(5, 2), "(((0+1)+(2+3))+4)");
    }
}
