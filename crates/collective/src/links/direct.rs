//! Every rank talks directly with the ranks that need its data.
//!
//! With `n` ranks and `b` bytes:
//!
//! - **All-to-all**: rank `r` sends a range to each and receives one from each, `n - 1` messages each way. All go at
//!   the same time, but they start with the neighbour at distance 1, then 2 and so on, so that not all ranks begin with
//!   the same one.
//! - **Gather and scatter**: the root receives from, or sends to, each of the others: `n - 1` messages at the root, one
//!   elsewhere.
//! - **Send and receive**: one message.
//! - **Reduce-scatter**: rank `r` sends each rank that rank's chunk, and reduces what it gets in a fixed order: one
//!   round, `n - 1` messages, `b (n - 1) / n` bytes. **All-gather** likewise. **All-reduce** is one after the other:
//!   two rounds. Each chunk is reduced by one rank, so all get the same bits.
//!
//! One round instead of the ring's `n - 1`, but `n - 1` senders that meet at one receiver: for data that fit into the
//! receiver's socket buffers. A rank that dies is noticed by all ranks that talk with it, here by all.

use polyreme_net::Move;

/// The peers in order: the one to send to, and the one to receive from.
fn rounds(rank: usize, n: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..n).map(move |k| ((rank + k) % n, (rank + n - k) % n))
}

/// Afterwards the rank holds the reduction of `cuts[rank]..cuts[rank + 1]`.
pub(super) fn reduce_scatter(rank: usize, cuts: &[usize], list: &mut Vec<Move>) {
    for (to, from) in rounds(rank, cuts.len() - 1) {
        list.push(Move::send(to, cuts[to]..cuts[to + 1]));
        list.push(Move::reduce(from, cuts[rank]..cuts[rank + 1], false));
    }
}

/// Afterwards the rank holds all chunks.
pub(super) fn all_gather(rank: usize, cuts: &[usize], list: &mut Vec<Move>) {
    for (to, from) in rounds(rank, cuts.len() - 1) {
        list.push(Move::send(to, cuts[rank]..cuts[rank + 1]));
        list.push(Move::recv(from, cuts[from]..cuts[from + 1]));
    }
}

/// Afterwards the rank holds a range of each; `sent` cuts the read-only memory.
pub(super) fn all_to_all(rank: usize, sent: &[usize], received: &[usize], list: &mut Vec<Move>) {
    for (to, from) in rounds(rank, sent.len() - 1) {
        list.push(Move::send_from(to, sent[to]..sent[to + 1]));
        list.push(Move::recv(from, received[from]..received[from + 1]));
    }
}

/// Afterwards `root` holds the ranges of all. A rank's own range is at the start of the read-only memory.
pub(super) fn gather(rank: usize, cuts: &[usize], root: usize, list: &mut Vec<Move>) {
    if rank != root {
        list.push(Move::send_from(root, 0..cuts[rank + 1] - cuts[rank]));
        return;
    }
    list.extend(rounds(rank, cuts.len() - 1).map(|(_, from)| Move::recv(from, cuts[from]..cuts[from + 1])));
}

/// Afterwards each rank holds its range of the root's data, at the start of its memory.
pub(super) fn scatter(rank: usize, cuts: &[usize], root: usize, list: &mut Vec<Move>) {
    if rank != root {
        list.push(Move::recv(root, 0..cuts[rank + 1] - cuts[rank]));
        return;
    }
    list.extend(rounds(rank, cuts.len() - 1).map(|(to, _)| Move::send_from(to, cuts[to]..cuts[to + 1])));
}
