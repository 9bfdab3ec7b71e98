//! Ranks that come and go: the process that starts them, watches them and coordinates them, and how they form groups.
//!
//! `train --elastic --processes N` is one process that trains nothing. It starts N copies of this program, listens for
//! members (`polyreme_net::members`), and decides who the ranks are. Its children are members that it watches: it sees their end at
//! once, and kills one that has to be gone. Under `launch --elastic` they are at the far ends of ssh. Other processes join it with `polyreme join`. When it is lost, a rank takes its place if others could join,
//! and otherwise all ranks save and stop.
//!
//! # Layout
//! - [`launcher`]: the children and the coordinator, in one loop. `restarts`: when lost ones are started again. [`chaos`]: faults from a seed. [`network`]: links that can be cut.
//! - [`coordinator`]: the coordinator as a process of its own. [`successor`]: as a thread of a rank. `status`: how things stand.
//! - [`post`]: where the coordinator is, by address or by a store, and how its post is taken; `etcd`: that store.
//! - [`group`]: from a generation that a rank is told to form to a group that can talk.

pub mod chaos;
pub mod coordinator;
mod etcd;
pub mod group;
pub mod launcher;
pub mod network;
pub mod post;
mod restarts;
mod status;
pub mod successor;

use super::HOST;

/// What tells this host from others that cannot share memory with it. Ranks that the user told apart by [`HOST`] are apart.
pub fn host_key() -> String {
    polyreme_net::members::host_key(std::env::var(HOST).ok().as_deref())
}

/// Set in the children of an elastic launcher: which one it is.
pub const MEMBER: &str = "POLYREME_MEMBER";
