//! The barrier by dissemination: nobody leaves before everybody came, and nobody is in the middle.
//!
//! `ceil(log2 n)` rounds. In round `k` rank `r` sends one byte to rank `r + 2^k` and waits for one of rank `r - 2^k`. What it sends
//! in a round says that it has heard everything of the rounds before; so after round `k` it has heard, directly or not,
//! of `2^(k + 1)` ranks, itself included, and after the last one of all. The byte is the same one in all rounds: sending it
//! waits for having received it, which is what makes the rounds follow each other.
//!
//! If a rank dies, those who wait for it see the connection close, and tell everybody.

use polyreme_net::Move;

/// Bytes of memory that a barrier needs.
pub(super) const BYTES: usize = 1;

/// Afterwards everybody has come.
pub(super) fn barrier(rank: usize, n: usize, list: &mut Vec<Move>) {
    let mut distance = 1;
    while distance < n {
        list.push(Move::send((rank + distance) % n, 0..BYTES));
        list.push(Move::recv((rank + n - distance) % n, 0..BYTES));
        distance *= 2;
    }
}
