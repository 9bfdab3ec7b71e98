//! Transports between the ranks of a job: shared memory and sockets.
//!
//! It moves bytes and reports lost ranks. It knows nothing of collectives, element types or graphs.
//!
//! # Layout
//! - [`block`]: memory that the ranks of one host share.
//! - [`segment`]: such memory between processes. [`wait`]: counters in them that a rank can wait for.
//! - [`notice`]: a failure that every rank of such memory sees. [`peers`]: whether the other processes still run.
//! - [`frame`]: the header of every message. [`moves`]: which rank sends which bytes to which, in which order.
//! - [`links`]: connections to other ranks, made when two first talk, over which moves are run. [`loopback`]: links
//!   between ranks of one process.
//! - [`members`]: who the ranks of an elastic job are, and how that changes.
//! - [`mailbox`]: letters between any two ranks, in any order. [`servers`]: who may read and change the weights that servers hold.
//! - [`secret`]: the secret that the ranks of a job share. [`seal`]: encryption between hosts. [`rendezvous`]: how
//!   processes become ranks, and how two of them are connected. [`control`]: which ranks are alive. [`environment`]:
//!   what an external launcher says.
//! - [`connection`]: a proven connection between two ranks. [`socket`], [`system`]: streams, time and waiting, real
//!   or simulated. `simulation`: the simulated ones, for tests.
//! - [`patience`]: how long ranks wait for each other. [`pulse`]: where a rank is, and whether it makes progress.
//! - [`alarm`]: a failure that every wait of this process sees.
//! - [`report`]: who failed, where and in which operation.
//! - `checksum`: of what goes over sockets. `pieces`: which segments of a plan have the same bytes. `ready`: waiting
//!   for several sockets.

pub mod alarm;
pub mod block;
mod checksum;
pub mod connection;
pub mod control;
pub mod environment;
pub mod frame;
pub mod links;
pub mod loopback;
pub mod mailbox;
pub mod members;
pub mod moves;
pub mod notice;
pub mod patience;
pub mod peers;
mod pieces;
pub mod pulse;
mod ready;
pub mod rendezvous;
pub mod report;
pub mod seal;
pub mod secret;
pub mod segment;
pub mod servers;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
pub mod socket;
pub mod system;
pub mod wait;

pub use alarm::Alarm;
pub use block::{Block, Shareable};
pub use connection::Connection;
pub use control::Control;
pub use links::Links;
pub use mailbox::Mailbox;
pub use moves::{Move, Moves};
pub use notice::Notice;
pub use patience::Patience;
pub use peers::Peers;
pub use pulse::{Doing, Pulse};
pub use rendezvous::{First, JoinError, JoinOptions, Joined, Member, Tell, join};
pub use report::{Cause, Report};
pub use seal::Encrypt;
pub use secret::Secret;
pub use segment::{Segment, SegmentError};
pub use socket::{Listener, Stream};
pub use system::{Os, System};
pub use wait::{Counter, Look, Pace};
