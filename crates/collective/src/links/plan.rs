//! Operations as moves, kept for the next time: a step of training does the same ones again and again.

use std::ops::Range;

use polyreme_net::frame::FrameOp;
use polyreme_net::{Move, Moves};

use super::choose::Algorithm;
use super::{barrier, direct, halving, ring, tree};
use crate::work::Cuts;

/// More plans than a step has operations; the oldest ones are dropped.
const PLANS_MAX: usize = 256;

/// Bytes of a block of an all-reduce. CPU time of 23 all-reduces of 64 MiB over loopback on two cores, with blocks of 2, 4 and
/// 8 MiB and in one: two ranks 1.55, 1.58, 1.61 and 1.63 s, four ranks 3.83, 3.81, 3.73 and 3.99 s.
const BLOCK_BYTES: usize = 4 << 20;

/// Plans stay short: blocks of very large data are larger.
const BLOCKS_MAX: usize = 64;

/// What a plan depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Key {
    pub(super) op: FrameOp,
    pub(super) algorithm: Algorithm,
    pub(super) count: usize,
    pub(super) element_bytes: usize,
    /// The root, or the other rank.
    pub(super) root: usize,
    /// For a send and receive: whether this rank receives.
    pub(super) receives: bool,
    /// Which elements belong to which rank; the second cuts of an all-to-all are those of what is received.
    pub(super) cuts: Option<Cuts>,
    pub(super) received: Option<Cuts>,
}

impl Key {
    /// Without cuts.
    pub(super) fn new(
        op: FrameOp,
        algorithm: Algorithm,
        count: usize,
        element_bytes: usize,
        root: usize,
    ) -> Key {
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
            let moves = Moves::new(plan(rank, ranks, key));
            let moves = match (key.op, key.algorithm) {
                // Two ranks that both send before they receive rely on sends that end once the socket has the data.
                (FrameOp::Send, _) => moves,
                // It sends what it also reduces.
                (FrameOp::AllReduce, Algorithm::Doubling) => moves.lending(false),
                // A rank gets results from ranks that have received all of its data.
                (FrameOp::AllReduce, _) => moves.lending(true),
                _ => moves.lending(false),
            };
            let plan = (key.clone(), moves);
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

/// The moves of a rank in an operation.
pub(super) fn plan(rank: usize, n: usize, key: &Key) -> Vec<Move> {
    use Algorithm::*;
    let list = &mut Vec::new();
    let bytes = key.count * key.element_bytes;
    let within = |block: Range<usize>, parts: usize| -> Vec<usize> {
        (0..=parts).map(|r| (block.start + share(block.len(), r, parts)) * key.element_bytes).collect()
    };
    let even = |parts: usize| within(0..key.count, parts);
    let n_blocks = n_blocks(bytes);
    let blocks = (0..n_blocks).map(|k| share(key.count, k, n_blocks)..share(key.count, k + 1, n_blocks));
    let of = |cuts: &Option<Cuts>| -> Vec<usize> {
        let cuts = cuts.as_deref().expect("this operation has cuts");
        cuts.iter().map(|cut| cut * key.element_bytes).collect()
    };
    let cuts = || of(&key.cuts);
    match (key.op, key.algorithm) {
        (FrameOp::AllReduce, Direct) => {
            direct::reduce_scatter(rank, &even(n), list);
            direct::all_gather(rank, &even(n), list);
        }
        (FrameOp::AllReduce, Doubling) => halving::all_reduce_whole(rank, n, bytes, list),
        (FrameOp::AllReduce, Halving) => {
            let cuts: Vec<_> = blocks.map(|block| within(block, halving::parts(n))).collect();
            in_blocks(
                &cuts,
                list,
                |cuts, list| halving::all_reduce_in(rank, n, cuts, list),
                |cuts, list| halving::all_reduce_out(rank, n, cuts, list),
            );
        }
        (FrameOp::AllReduce, Ring) => {
            let cuts: Vec<_> = blocks.map(|block| within(block, n)).collect();
            in_blocks(
                &cuts,
                list,
                |cuts, list| ring::reduce_scatter(rank, cuts, list),
                |cuts, list| ring::all_gather(rank, cuts, list),
            );
        }
        (FrameOp::AllReduce, Tree) => {
            tree::reduce(rank, n, bytes, 0, list);
            tree::broadcast(rank, n, bytes, 0, list);
        }
        (FrameOp::ReduceScatter, Direct) => direct::reduce_scatter(rank, &cuts(), list),
        (FrameOp::ReduceScatter, Halving) => halving::reduce_scatter(rank, &cuts(), list),
        (FrameOp::ReduceScatter, _) => ring::reduce_scatter(rank, &cuts(), list),
        (FrameOp::AllGather, Direct) => direct::all_gather(rank, &cuts(), list),
        (FrameOp::AllGather, Halving) => halving::all_gather(rank, &cuts(), list),
        (FrameOp::AllGather, _) => ring::all_gather(rank, &cuts(), list),
        (FrameOp::Broadcast, Ring) => ring::broadcast(rank, n, bytes, key.root, list),
        (FrameOp::Broadcast, _) => tree::broadcast(rank, n, bytes, key.root, list),
        (FrameOp::Reduce, Ring) => ring::reduce(rank, n, bytes, key.root, list),
        (FrameOp::Reduce, _) => tree::reduce(rank, n, bytes, key.root, list),
        (FrameOp::Gather, _) => direct::gather(rank, &cuts(), key.root, list),
        (FrameOp::Scatter, _) => direct::scatter(rank, &cuts(), key.root, list),
        (FrameOp::AllToAll, _) => direct::all_to_all(rank, &cuts(), &of(&key.received), list),
        (FrameOp::Barrier, _) => barrier::barrier(rank, n, list),
        (FrameOp::Send, _) if key.receives => list.push(Move::recv(key.root, 0..bytes)),
        (FrameOp::Send, _) => list.push(Move::send_from(key.root, 0..bytes)),
        (FrameOp::Receipt | FrameOp::Farewell, _) => {}
    }
    std::mem::take(list)
}

/// How many blocks an all-reduce of this many bytes has.
pub(super) fn n_blocks(bytes: usize) -> usize {
    bytes.div_ceil(BLOCK_BYTES).clamp(1, BLOCKS_MAX)
}

/// An all-reduce block by block: each is reduced and scattered (`first`), then gathered (`second`), and each block is
/// gathered only after the next one is reduced. So what is gathered was reduced a short while ago and is still in
/// cache, and no rank waits for the end of one block before it begins the next.
fn in_blocks(
    cuts: &[Vec<usize>],
    list: &mut Vec<Move>,
    first: impl Fn(&[usize], &mut Vec<Move>),
    second: impl Fn(&[usize], &mut Vec<Move>),
) {
    for (k, block) in cuts.iter().enumerate() {
        first(block, list);
        if k > 0 {
            second(&cuts[k - 1], list);
        }
    }
    if let Some(last) = cuts.last() {
        second(last, list);
    }
}

/// Where part `r` of `parts` even parts starts.
fn share(count: usize, r: usize, parts: usize) -> usize {
    count / parts * r + (count % parts).min(r)
}
