//! The binomial tree: the fewest rounds for data that go to one rank or come from one.
//!
//! Ranks are counted from the root: `v = rank - root`, modulo `n`. The parent of `v` is `v` without its lowest set bit, and the
//! children of `v` are `v + 1`, `v + 2`, `v + 4` and so on, below that bit. With `b` bytes and `h = ceil(log2 n)`:
//!
//! - **Broadcast**, `h` rounds: the root sends to its largest subtree first; ranks that have the data send them on.
//!   After round `k`, `2^k` ranks have them. The root sends `h b` bytes, a leaf none.
//! - **Reduce**, `h` rounds the other way: always smallest subtree first, so that the same data give the same bits in
//!   every run. After round `k` the data of `2^k` neighbouring ranks are in one of them. Every rank but the root sends
//!   `b` bytes.
//! - **All-reduce** is a reduce to rank 0 and a broadcast from it: `2 h` rounds. All ranks get rank 0's bits.
//!
//! Long data go through in segments: a rank sends on what has arrived. If a rank dies, its parent and its children see
//! a closed connection and tell all others.

use polyreme_net::Move;

/// Afterwards the rank holds what `root` had.
pub(super) fn broadcast(rank: usize, n: usize, bytes: usize, root: usize, list: &mut Vec<Move>) {
    let (parent, children) = family(rank, n, root);
    list.extend(parent.map(|parent| Move::recv(parent, 0..bytes)));
    list.extend(children.rev().map(|child| Move::send(child, 0..bytes)));
}

/// Afterwards `root` holds the reduction of all.
pub(super) fn reduce(rank: usize, n: usize, bytes: usize, root: usize, list: &mut Vec<Move>) {
    let (parent, children) = family(rank, n, root);
    list.extend(children.map(|child| Move::reduce(child, 0..bytes, false)));
    list.extend(parent.map(|parent| Move::send(parent, 0..bytes)));
}

/// The parent, and the children from the smallest subtree to the largest.
fn family(rank: usize, n: usize, root: usize) -> (Option<usize>, impl DoubleEndedIterator<Item = usize>) {
    let v = (rank + n - root) % n;
    let name = move |v: usize| (v + root) % n;
    let parent = (v > 0).then(|| name(v & (v - 1)));
    let rounds = if v == 0 { n.next_power_of_two().ilog2() } else { v.trailing_zeros() };
    let children = (0..rounds).map(move |k| v + (1 << k)).filter(move |&child| child < n).map(name);
    (parent, children)
}
