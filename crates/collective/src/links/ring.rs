//! The ring: rank `r` only ever sends to `r + 1` and receives from `r - 1`.
//!
//! The data are cut into a chunk per rank. With `n` ranks and `b` bytes:
//!
//! - **Reduce-scatter**, `n - 1` rounds. In round `k` (from 1) rank `r` sends chunk `r - k` and adds what it receives
//!   to its chunk `r - k - 1`. So chunk `c` starts at rank `c + 1`, visits every rank once, and ends, complete, at rank
//!   `c`. After round `k` the chunk that a rank has just received holds the reduction of `k + 1` ranks. Each rank sends
//!   `b (n - 1) / n` bytes.
//! - **All-gather**, `n - 1` rounds. In round `k` (from 0) rank `r` sends chunk `r - k`, which is complete, and
//!   receives chunk `r - k - 1` in place. As many bytes again.
//! - **All-reduce** is one after the other: `2 (n - 1)` rounds, `2 b (n - 1) / n` bytes per rank, which is the least that is
//!   possible; each chunk is reduced along one path, so all ranks get the same bits.
//! - **Broadcast and reduce** along the chain: from the root on (or towards it), every rank passes on what it got. Each
//!   rank sends `b` bytes.
//!
//! Rounds are not barriers: a chunk travels in segments, and a segment is sent on as soon as it was received and
//! reduced. So the network stays busy while ranks compute, and a high latency is paid once per lap, not once per chunk.
//!
//! The ring is bandwidth-optimal and has many rounds: it is for large data. If a rank dies, its successor sees a closed
//! connection and its predecessor cannot send; both tell all others.

use polyreme_net::Move;

/// Afterwards the rank holds the reduction of chunk `cuts[rank]..cuts[rank + 1]`.
pub(super) fn reduce_scatter(rank: usize, cuts: &[usize], list: &mut Vec<Move>) {
    let n = cuts.len() - 1;
    let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
    for k in 1..n {
        let (sent, received) = ((rank + n - k) % n, (rank + 2 * n - k - 1) % n);
        list.push(Move::send(next, cuts[sent]..cuts[sent + 1]));
        list.push(Move::reduce(before, cuts[received]..cuts[received + 1], true));
    }
}

/// Afterwards the rank holds all chunks.
pub(super) fn all_gather(rank: usize, cuts: &[usize], list: &mut Vec<Move>) {
    let n = cuts.len() - 1;
    let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
    for k in 0..n - 1 {
        let (sent, received) = ((rank + n - k) % n, (rank + 2 * n - k - 1) % n);
        list.push(Move::send(next, cuts[sent]..cuts[sent + 1]));
        list.push(Move::recv(before, cuts[received]..cuts[received + 1]));
    }
}

/// Afterwards the rank holds what `root` had.
pub(super) fn broadcast(rank: usize, n: usize, bytes: usize, root: usize, list: &mut Vec<Move>) {
    let away = (rank + n - root) % n;
    if away > 0 {
        list.push(Move::recv((rank + n - 1) % n, 0..bytes));
    }
    if away + 1 < n {
        list.push(Move::send((rank + 1) % n, 0..bytes));
    }
}

/// Afterwards `root` holds the reduction of all.
pub(super) fn reduce(rank: usize, n: usize, bytes: usize, root: usize, list: &mut Vec<Move>) {
    let away = (rank + n - root) % n;
    if away + 1 < n {
        list.push(Move::reduce((rank + 1) % n, 0..bytes, false));
    }
    if away > 0 {
        list.push(Move::send((rank + n - 1) % n, 0..bytes));
    }
}
