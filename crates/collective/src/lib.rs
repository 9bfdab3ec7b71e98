//! Collectives: all-reduce and its family, and messages between ranks.
//!
//! A [`Comm`] is one rank's end of a group. All ranks call the same operations in the same order; each call ends when
//! this rank's part is done, or with a [`polyreme_net::Report`] that names the rank that failed. It knows nothing of
//! tensors.
//!
//! # Layout
//! - [`comm`]: one rank's end. [`element`]: element types and reducers. [`work`]: operations that are started and waited for.
//! - [`mpi`]: MPI's own collectives, through a library that is loaded at run time.
//! - [`split`]: subgroups of a group. [`mailbox`]: letters between any two ranks of a group.
//! - [`servers`]: parameter servers and their workers.
//! - [`record`]: a record of the calls made. [`buffer`]: memory that the others access without a copy.
//! - `shared`: ranks with shared memory.
//! - [`links`]: ranks connected by sockets. `background`: a thread that communicates while the rank computes.
//!   `carrier`: the transport that it drives. `coded`: sums that travel in fewer bytes. `lane`: messages over sockets. `inbox`: where messages meet receives.

mod background;
pub mod buffer;
mod carrier;
mod coded;
pub mod comm;
#[cfg(test)]
mod differences;
pub mod element;
mod inbox;
mod lane;
pub mod links;
pub mod mailbox;
pub mod mpi;
pub mod record;
pub mod servers;
mod shared;
pub mod split;
pub mod work;

pub use buffer::Buffer;
pub use coded::{TRIAL_BYTES, sum_seconds};
pub use comm::Comm;
pub use element::{Bool, DType, Element, Reduce};
pub use links::Linked;
pub use mailbox::TcpOptions;
pub use polyreme_net::{Block, Cause, Doing, Report, patience};
pub use record::Called;
pub use shared::{ShmSetup, staging_bytes};
pub use split::{Connect, along};
pub use work::{CodedSum, Cuts, Span, Ticket, Work};
