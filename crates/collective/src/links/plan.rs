//! Operations as moves, kept for the next time: a step of training does the same ones again and again.

use polyreme_net::frame::Op;
use polyreme_net::{Move, Moves};

use super::choose::Algorithm;
use super::{barrier, direct, halving, ring, tree};
use crate::work::Cuts;

/// More plans than a step has operations; the oldest ones make room.
const PLANS_MAX: usize = 256;

/// What a plan depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Key {
    pub(super) op: Op,
    pub(super) algorithm: Algorithm,
    pub(super) count: usize,
    pub(super) element_bytes: usize,
    /// The root, or the other rank.
    pub(super) root: usize,
    /// Of the two of a send and receive: whether this is the one that receives.
    pub(super) receives: bool,
    /// Whose is what; the second ones of an all-to-all are about what is received.
    pub(super) cuts: Option<Cuts>,
    pub(super) received: Option<Cuts>,
}

impl Key {
    /// Without cuts.
    pub(super) fn new(op: Op, algorithm: Algorithm, count: usize, element_bytes: usize, root: usize) -> Key {
        Key { op, algorithm, count, element_bytes, root, receives: false, cuts: None, received: None }
    }
}

/// Plans of one rank.
#[derive(Default)]
pub(super) struct Plans {
    kept: Vec<(Key, Moves)>,
    next: usize,
}

impl Plans {
    pub(super) fn get(&mut self, rank: usize, ranks: usize, key: &Key) -> &Moves {
        let at = self.kept.iter().position(|(k, _)| k == key).unwrap_or_else(|| {
            let plan = (key.clone(), Moves::new(plan(rank, ranks, key)));
            if self.kept.len() < PLANS_MAX {
                self.kept.push(plan);
                return self.kept.len() - 1;
            }
            let at = self.next;
            self.kept[at] = plan;
            self.next = (at + 1) % PLANS_MAX;
            at
        });
        &self.kept[at].1
    }
}

/// What a rank does in an operation.
pub(super) fn plan(rank: usize, n: usize, key: &Key) -> Vec<Move> {
    use Algorithm::*;
    let list = &mut Vec::new();
    let bytes = key.count * key.element_bytes;
    let even = |parts: usize| -> Vec<usize> {
        (0..=parts).map(|r| share(key.count, r, parts) * key.element_bytes).collect()
    };
    let of = |cuts: &Option<Cuts>| -> Vec<usize> {
        let cuts = cuts.as_deref().expect("this operation has cuts");
        cuts.iter().map(|cut| cut * key.element_bytes).collect()
    };
    let cuts = || of(&key.cuts);
    match (key.op, key.algorithm) {
        (Op::AllReduce, Direct) => {
            direct::reduce_scatter(rank, &even(n), list);
            direct::all_gather(rank, &even(n), list);
        }
        (Op::AllReduce, Doubling) => halving::all_reduce_whole(rank, n, bytes, list),
        (Op::AllReduce, Halving) => halving::all_reduce(rank, n, even, list),
        (Op::AllReduce, Ring) => {
            ring::reduce_scatter(rank, &even(n), list);
            ring::all_gather(rank, &even(n), list);
        }
        (Op::AllReduce, Tree) => {
            tree::reduce(rank, n, bytes, 0, list);
            tree::broadcast(rank, n, bytes, 0, list);
        }
        (Op::ReduceScatter, Direct) => direct::reduce_scatter(rank, &cuts(), list),
        (Op::ReduceScatter, Halving) => halving::reduce_scatter(rank, &cuts(), list),
        (Op::ReduceScatter, _) => ring::reduce_scatter(rank, &cuts(), list),
        (Op::AllGather, Direct) => direct::all_gather(rank, &cuts(), list),
        (Op::AllGather, Halving) => halving::all_gather(rank, &cuts(), list),
        (Op::AllGather, _) => ring::all_gather(rank, &cuts(), list),
        (Op::Broadcast, Ring) => ring::broadcast(rank, n, bytes, key.root, list),
        (Op::Broadcast, _) => tree::broadcast(rank, n, bytes, key.root, list),
        (Op::Reduce, Ring) => ring::reduce(rank, n, bytes, key.root, list),
        (Op::Reduce, _) => tree::reduce(rank, n, bytes, key.root, list),
        (Op::Gather, _) => direct::gather(rank, &cuts(), key.root, list),
        (Op::Scatter, _) => direct::scatter(rank, &cuts(), key.root, list),
        (Op::AllToAll, _) => direct::all_to_all(rank, &cuts(), &of(&key.received), list),
        (Op::Barrier, _) => barrier::barrier(rank, n, list),
        (Op::Send, _) if key.receives => list.push(Move::recv(key.root, 0..bytes)),
        (Op::Send, _) => list.push(Move::send_from(key.root, 0..bytes)),
        (Op::Farewell, _) => {}
    }
    std::mem::take(list)
}

/// Where part `r` of so many even parts starts.
fn share(count: usize, r: usize, parts: usize) -> usize {
    count / parts * r + (count % parts).min(r)
}
