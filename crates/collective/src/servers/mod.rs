//! Parameter servers over mailboxes: the thin shell around the decisions of [`polyreme_net::servers`].
//!
//! A server is a thread ([`ServerHost`]) of a rank, which is a worker too or only serves. Every rank has a [`ServerClient`]. Two mailboxes connect them, one for
//! each direction, so that a thread only takes what is meant for it: between processes over TCP, between threads in memory.
//!
//! ```text
//!  worker                                server thread
//!    push: place = range, block            the decision says: apply, keep, or refuse
//!      [weight, scale, gradients]  -->     ... the store adds up and updates ([`RangeStore`])
//!    pull: place = range           -->     ... when it may be answered:
//!                                  <--   weights: place = range [f32 ...]
//!    pull state: place = range, which -->  what the optimizer keeps, when nothing is under way
//!                                  <--   state: place = range, which [f32 ...]
//!    ask: place = done block       -->     only server 0, which has the leases
//!                                  <--   lease, rest, or over: place = block; with a lease, where the clock of whoever joins starts
//!    watch                         -->     the same for a rank that wants no block
//!                                  <--   rest, over
//! ```
//!
//! # Bytes
//! A worker sends each gradient once and receives each weight once per step: with `M` bytes of parameters, `2·M` per worker and step,
//! whatever the number of servers; a server of `n` workers with a share `s` of the parameters moves `2·n·s·M`.
//!
//! # Memory
//! Letters are bounded by the mailboxes. A server that is slow takes no more letters, so its workers' pushes wait. A worker pulls only
//! when it has posted all its pushes, so a server that waits for room in a worker's inbox never waits for a worker that waits for it.
//!
//! # When a peer dies
//! All waits at mailboxes end with the report that all ranks get.
//!
//! # Layout
//! `letters`: what labels and payloads mean. [`ServerCounts`]: what a server came to. [`ServerClient`]: the worker's end. [`ServerHost`]: the thread.

mod client;
mod counts;
mod host;
mod letters;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use polyreme_net::mailbox::{Limits, Mailbox, PostError};
use polyreme_net::{Cause, Report};

pub use client::{GradientLetter, LeaseAnswer, ServerClient};
pub use counts::{STALENESS_BOUNDS, ServerCounts};
pub use host::{HostOptions, RangeStore, ServerHost};
pub use letters::PushedGradient;
pub use polyreme_net::servers::{Discipline, Staleness};

use crate::comm::Comm;

/// What connects the workers and servers of a group.
#[derive(Clone)]
pub struct ServerMail {
    to_servers: Arc<Mailbox>,
    to_workers: Arc<Mailbox>,
    /// Whether letters leave the process.
    wired: bool,
}

impl ServerMail {
    /// Makes both mailboxes. Collective.
    pub fn new(comm: &mut Comm) -> Result<ServerMail, Report> {
        let to_servers = Arc::new(comm.mailbox(Limits::default())?);
        let to_workers = Arc::new(comm.mailbox(Limits::default())?);
        Ok(ServerMail { to_servers, to_workers, wired: comm.ways.lobby().is_none() })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.to_servers.rank()
    }

    /// Closes both, when no rank posts any more.
    pub fn close(&self) -> Result<(), Report> {
        self.to_servers.close()?;
        self.to_workers.close()
    }

    /// How many bytes a letter of `bytes` bytes to a rank puts on the wire.
    fn wire_bytes(&self, to: usize, bytes: usize) -> u64 {
        if self.wired && to != self.rank() { bytes as u64 } else { 0 }
    }
}

/// Why a letter could not be posted, as the report of a rank.
fn report_of(error: PostError, rank: usize) -> Report {
    match error {
        PostError::Lost(report) => report,
        PostError::TooLong { .. } | PostError::Full { .. } | PostError::Closed { .. } => {
            failed(rank, error.to_string())
        }
    }
}

/// A report of a rank that broke the protocol, or could not go on with it.
fn failed(rank: usize, why: String) -> Report {
    Report { rank, host: String::new(), step: 0, op: "parameter server".into(), cause: Cause::Failed { why } }
}
