//! Membership of an elastic job: which processes are its ranks now, and how that changes while it trains.
//!
//! A **member** is a process that may be a rank. A **generation** is one group of ranks: numbers from 0 without gaps, one master,
//! one set of connections. It never changes; a change of membership is a new generation. One **coordinator** numbers them.
//!
//! ```text
//!  member                                   coordinator
//!    enter                            -->   a new member
//!    ready (which state it holds)     -->   ... when all that must be ready are:
//!                                     <--   form generation g: rank, size, master, whose state counts
//!    the ranks connect, share the state
//!    running g                        -->
//!    beat, beat, beat ...             -->   signs of life, with the steps done
//!                                     <--   change g: at the end of this step       (a member wants in or out)
//!                                     <--   cancel g: now                           (a rank is lost)
//!    ready ...                        -->
//! ```
//!
//! A generation ends on all its ranks before the next one begins: the coordinator waits until each rank of it is either ready again
//! or gone. So no two generations train at the same time. Frames between ranks carry the generation, and one of another
//! generation is refused. A member that was taken for dead and comes back is a new one: its state is worth nothing, since the
//! others may have gone on without it. One that the coordinator's host runs is killed before the others go on, so that it cannot write
//! into the run's folder either.
//!
//! # What a step needs to survive
//! Every rank of an elastic job keeps the whole state, and a rank changes it only when all sums of the step have come: from there
//! on it needs no other rank to finish the step. So a survivor has the state after step `s` or the state after step `s + 1`, whole;
//! two ranks are never further apart, because nobody can finish step `s + 1` without what all ranks send for it. The state that is
//! furthest is that of the next generation, and ranks behind it receive it. A step that nobody finished is done again,
//! with the same samples.
//!
//! # Who may go on
//! A change of membership needs half of the last generation, together with the coordinator that formed it, or more than half. Ranks whose end their own host
//! reports, or whose connection it closed, do not count: only those that fell silent. Otherwise the coordinator waits: the missing ranks may be alive on the other side of a cut network.
//!
//! # Ranks that share memory
//! If all ranks of a generation are on the coordinator's host, and nobody asks for sockets, they exchange their data through memory, which is
//! made anew for each generation: what a lost rank has half written belongs to a generation that is over. The coordinator watches
//! their processes, also those that are not its children, and kills one that is removed; the next generation is formed when it was seen
//! dead. A process of another host that joins makes the next generation one over sockets, or is refused.
//!
//! # Leaving
//! A member that wants to leave says so; the generation ends with a step, and the member is let go when its state is also that of a rank that
//! stays, or is saved. If all want to leave, they form a generation that only saves.
//!
//! # When a peer dies
//! The coordinator learns of it from the host that ran it, from a closed connection, or from silence longer than patience, whichever
//! comes first. It cancels the generation on all others, which also notice it in their own connections.
//!
//! # When the coordinator dies
//! Members go on training, and knock at its address. One that is started there again, or one of its children that takes its place
//! (`succession.rs`; where that is not wanted, children save and stop), knows nothing,
//! and is told everything by whoever comes back: the last generation and its members, because a generation takes effect only when all
//! its ranks were told of it. Who does not come back is silent, and lost after patience. If no coordinator comes within
//! patience, they save and stop.
//!
//! # With a store
//! Where the coordinator is and which generation was the last can be kept outside of the run (`store.rs`). Then any rank can take the
//! coordinator's place, on any host, and no majority is asked for: a coordinator forms a generation only if the store takes its record, and the
//! store takes that from the one process that has the post (`tenure.rs`).
//!
//! # Layout
//! - [`Coordinator`]: the decisions, a pure function of time, state and event; `coordinator/forming.rs` chooses the members of a generation,
//!   `coordinator/returning.rs` takes ranks back. [`Seat`]: the member's side of the same.
//! - [`message`]: what the two tell each other. [`Office`]: the coordinator's sockets. [`Membership`]: the member's.
//! - [`tally`]: what changes cost.

mod coordinator;
mod decision;
pub mod message;
mod office;
mod seat;
mod session;
pub mod store;
mod succession;
pub mod tally;
mod tenure;
#[cfg(test)]
mod tests;

pub use coordinator::{Coordinator, Rules};
pub use decision::{Decision, MemberAction, MemberEvent, Reason};
pub use message::{
    Formation, HeldSteps, JobMark, MemberId, MemoryUse, OwnShare, Ready, Returned, ToCoordinator, ToMember,
};
pub use office::{MemberRow, Office, OfficeOptions, OfficeOrder};
pub use seat::{Seat, SeatAction};
pub use session::{Apart, EnterError, EnterOptions, Membership, Wish, ask_status};
pub use store::{CoordinatorPlace, MemberStore};
pub use succession::{OpenOffice, Vacancy};
pub use tally::{Stall, Tally, TallySummary};
pub use tenure::Tenure;

/// Equal for processes that can share memory and watch each other, and that the user did not tell apart: `named` is the host's name
/// that the user gave.
pub fn host_key(named: Option<&str>) -> String {
    format!("{} {}", crate::rendezvous::host_key(), named.unwrap_or_default())
}
