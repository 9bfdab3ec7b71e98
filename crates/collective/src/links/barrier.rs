//! The dissemination barrier: no rank leaves before all have entered, and there is no central rank.
//!
//! `ceil(log2 n)` rounds. In round `k` rank `r` sends one byte to rank `r + 2^k` and waits for one from rank `r - 2^k`.
//! Sending in a round implies that everything of the earlier rounds was received; so after round `k` it has heard,
//! directly or not, from `2^(k + 1)` ranks, itself included, and after the last one from all. The byte is the same one
//! in all rounds: sending it waits for having received it, which orders the rounds.
//!
//! If a rank dies, the ranks that wait for it see the connection close, and tell all others.

use polyreme_net::Move;

/// Bytes of memory that a barrier needs.
pub(super) const BYTES: usize = 1;

/// Afterwards all ranks have entered.
pub(super) fn barrier(rank: usize, n: usize, list: &mut Vec<Move>) {
    let mut distance = 1;
    while distance < n {
        list.push(Move::send((rank + distance) % n, 0..BYTES));
        list.push(Move::recv((rank + n - distance) % n, 0..BYTES));
        distance *= 2;
    }
}
