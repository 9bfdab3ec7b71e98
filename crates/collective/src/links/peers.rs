//! The ranks that a rank talks with in the usual operations of a group: worth connecting and checking before the first
//! of them.
//!
//! Rings, halving, trees of any root and barriers turn to ranks at distances that are powers of two, or one: of `n`
//! ranks at most `3 log2 n`. Other pairs talk only if they send messages to each other or in an all-to-all, and are
//! connected then.

use polyreme_net::frame::FrameOp;

use super::choose::{Algorithm, candidates};
use super::plan::{Key, plan};

/// The ranks that a rank of a group of `n` talks with, in order. The relation is symmetric.
pub fn peers(rank: usize, n: usize) -> Vec<usize> {
    let barrier = Key::new(FrameOp::Barrier, Algorithm::Doubling, 0, 1, 0);
    let usual = candidates(FrameOp::AllReduce).iter().filter(|algorithm| **algorithm != Algorithm::Direct);
    let sums = usual.map(|algorithm| Key::new(FrameOp::AllReduce, *algorithm, n, 1, 0));
    let plans = sums.chain([barrier]).flat_map(|key| plan(rank, n, &key));
    let mut peers: Vec<usize> = plans.map(|this| this.peer).collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_agree_that_they_talk_and_there_are_few() {
        for n in 1..=70 {
            let all: Vec<_> = (0..n).map(|rank| peers(rank, n)).collect();
            for (rank, theirs) in all.iter().enumerate() {
                assert!(
                    theirs.iter().all(|peer| *peer != rank && all[*peer].contains(&rank)),
                    "{rank} of {n}"
                );
                let log = n.next_power_of_two().ilog2() as usize;
                assert!(theirs.len() <= 3 * log, "rank {rank} of {n} talks with {theirs:?}");
            }
        }
    }

    /// Trees and chains of any root, and operations with cuts, need no other pairs.
    #[test]
    fn no_usual_operation_talks_with_others() {
        let ops = [
            FrameOp::AllReduce,
            FrameOp::ReduceScatter,
            FrameOp::AllGather,
            FrameOp::Broadcast,
            FrameOp::Reduce,
            FrameOp::Barrier,
        ];
        for n in 2..=20 {
            for op in ops {
                for &algorithm in candidates(op).iter().filter(|a| **a != Algorithm::Direct) {
                    for root in 0..n {
                        let cuts = Some((0..=n).collect());
                        let key = Key { cuts, ..Key::new(op, algorithm, n, 1, root) };
                        for rank in 0..n {
                            let known = peers(rank, n);
                            let stranger = plan(rank, n, &key).into_iter().find(|m| !known.contains(&m.peer));
                            assert_eq!(stranger, None, "{op:?} by {algorithm:?}, rank {rank} of {n}");
                        }
                    }
                }
            }
        }
    }
}
