//! Parameter servers: who may read and change the weights, and in which order. Decisions only; bytes, threads and arithmetic are
//! elsewhere.
//!
//! **Servers** hold the parameters of a model in **ranges**, each range at one server. **Workers** compute gradients of **blocks** of
//! samples, push them range by range, and pull the weights back.
//!
//! ```text
//!  worker                                       server of a range
//!    join                                 -->   counts from now on
//!    push (clock c, block b, gradient)    -->   apply it, once
//!    pull (clock c + 1)                   -->   ... when the discipline allows it:
//!                                         <--   the weights, with their version
//!    push (clock c + 1, block b', ...)    -->
//!    leave                                -->   others no longer wait for it
//! ```
//!
//! # Clocks
//! A worker's clock is the number of its finished pushes. The [`Discipline`] says when a pull at clock `c` is answered:
//! - [`Discipline::Lockstep`]: gradients of one step are kept until those of all workers are there. They are applied together, and then
//!   their pulls are answered;
//! - [`Discipline::Bounded`]: when the clock of every worker is at least `c - s` (Ho et al., 2013). So clocks differ by at most
//!   `s + 1`, but for a worker that has just joined: the one that is ahead has had its pull at clock `c` answered, and pushes once more;
//! - [`Discipline::Free`]: at once.
//!
//! A worker that joins while others train starts at the clock of the slowest of them, as the server beside the leases knows it; one that leaves is
//! not waited for. Each server counts for itself and never asks another one, but a clock starts at the same number at all of them: otherwise one worker could be ahead
//! at one server and behind at another, and two workers could wait for each other. Whoever went on before a server heard of the one that
//! joined waits there until it has caught up.
//!
//! # Exactly once
//! A block is numbered from the beginning of the run, so its number says its epoch too. Each range has the set of blocks that were
//! applied to it, which is state beside its parameters: a push that comes twice, from one worker or from two that had the same
//! block, is applied once. A worker that dies between two servers does no harm: the block goes to another worker, and the server
//! that has it refuses the second push.
//!
//! # Leases
//! [`Leases`] hands out blocks: each to one worker at a time, and to another if that one leaves before the block is done. Blocks are handed
//! out in **segments**. At the end of a segment every block of it is applied to every range, exactly once, and nothing is under way:
//! then all workers meet, and evaluate and save what the servers have. A worker for which there is no block rests until the segment is
//! over, or until a block comes back. A rank that only serves rests from the beginning of a segment to its end.
//!
//! # Messages that are lost, doubled, delayed or reordered
//! Every message carries the worker's session and clock, so an old one is known as such, and a repeated one gets its answer again and
//! changes nothing. Over a mailbox none of that happens; the tests do it all.
//!
//! # When a peer dies
//! A worker that is lost leaves, here and at the leases. A server that is lost takes its ranges with it: the run goes back to its last
//! checkpoint. In elastic runs ranks keep what the servers had when they met, and go back to that whoever is lost: new servers and
//! leases begin with the blocks that were done then (`crates/train/src/run/servers.rs`).
//!
//! # Layout
//! [`ParamServer`]: the ranges of one server. [`Leases`]: blocks. [`BlockSet`]: which blocks.

mod blocks;
mod leases;
mod server;
#[cfg(test)]
mod tests;

pub use blocks::BlockSet;
pub use leases::{LeaseAction, LeaseEvent, Leases};
pub use server::{Discipline, ParamServer, Refusal, ServerAction, ServerEvent, Staleness, WorkerId};
