//! What holds for every mailbox, however letters travel; and thousands of exchanges on failing networks.

mod inside;
mod real;
mod simulated;

use super::{Class, Label};

/// What letter `n` of a sender holds.
fn text(from: usize, to: usize, class: Class, n: u64, bytes: usize) -> Vec<u8> {
    let first = from * 31 + to * 17 + class as usize * 101 + n as usize * 7;
    (0..bytes).map(|i| (first + i + (i >> 8)) as u8).collect()
}

fn label(kind: u16, n: u64) -> Label {
    Label { kind, ticket: n, place: !n }
}
