//! Collectives: what several ranks do together to bytes of one element type.
//!
//! A [`Comm`] is one rank's end of a group. All ranks call the same operations in the same order; each call ends when
//! this rank's part is done, or with a [`polyreme_net::Report`] that names who failed. It knows nothing of tensors.
//!
//! # Layout
//! - [`comm`]: one rank's end. [`element`]: element types and reducers. [`work`]: operations that are started and waited for.
//! - [`mpi`]: MPI's own collectives, through a library that is loaded at run time.
//! - [`split`]: groups of some ranks of a group.
//! - [`record`]: what was called. [`buffer`]: numbers that the others reach without a copy.
//! - `shared`: ranks that see each other's memory.
//! - [`links`]: ranks that can only send each other bytes. `background`: a thread that exchanges while the rank computes.
//!   `carrier`: what it may own. `lane`: messages over sockets, beside it. `inbox`: where messages meet receives.

mod background;
pub mod buffer;
mod carrier;
pub mod comm;
#[cfg(test)]
mod differences;
pub mod element;
mod inbox;
mod lane;
pub mod links;
pub mod mpi;
pub mod record;
mod shared;
pub mod split;
pub mod work;

pub use buffer::Buffer;
pub use comm::Comm;
pub use element::{Bool, DType, Element, Reduce};
pub use links::Linked;
pub use polyreme_net::{Block, Cause, Doing, Report, patience};
pub use record::Called;
pub use shared::ShmSetup;
pub use split::{Connect, along};
pub use work::{Cuts, Span, Ticket, Work};
