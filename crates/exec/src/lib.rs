//! Runs programs: arenas, a thread pool, kernels.
//!
//! An [`Engine`] is one rank. It prepares a program once (descriptors of kernels, a memory plan, arenas) and then runs
//! it any number of times without allocating. Results do not depend on the number of threads, bit for bit.
//!
//! Several engines may be the ranks of one job: an engine that joined runs the exchanges of its program through a
//! [`polyreme_collective::Comm`]. It knows nothing of job files or datasets.
//!
//! # Layout
//! - [`engine`]: the engine. `reader`: the one reader of instructions. [`feed`]: inputs. `vectors`: instructions on
//!   long vectors.
//! - `state`: the learnt state. `moments`: where optimizer states lie. [`weights`]: the learnt state from outside, as whole
//!   arenas. `own`: parameters that each replica keeps for itself. `group`: joining, and what all ranks do between steps. [`loan`], [`ledger`]: lending it to the writer of a
//!   checkpoint, or to a rank that enters ([`incoming`]). [`finite`]: where a NaN came from. [`timeline`]: where the time goes. `node_times`: of each node. [`pace`]: blocks
//!   that take as long as they are told.
//! - `launch`, `run`, `product`, `convolution`, `apply`: which kernel runs each op, with which slices. `staging`: half precision for
//!   kernels that compute on f32. `kernel_types`: which types have kernels.
//! - [`served`]: what a parameter server beside an engine holds, and pushes and pulls.
//! - [`class`]: which kernels sum products, and so which bits a run has.
//! - `workspace`: prepared bodies, activations, inputs and buffers. `memory`, `arena`: where values lie, as slices.
//! - [`pool`]: the thread pool.
//! - [`error`]: what can go wrong.

mod apply;
mod arena;
pub mod class;
mod comms;
mod convolution;
pub mod engine;
pub mod error;
pub mod feed;
pub mod finite;
mod group;
pub mod incoming;
mod kernel_types;
mod launch;
pub mod ledger;
pub mod loan;
mod memory;
mod moments;
mod node_times;
mod own;
pub mod pace;
pub mod pool;
mod product;
mod reader;
mod run;
pub mod served;
mod staging;
mod state;
pub mod timeline;
mod vectors;
pub mod weights;
mod workspace;

pub use arena::{floats, make_room};
pub use class::KernelClass;
pub use comms::Comms;
pub use engine::{Engine, Footprint, Options};
pub use error::{ExecError, RejectedData};
pub use feed::{Counted, Feed, Filled, Inputs};
pub use finite::NonFinite;
pub use incoming::{Arrival, IncomingState, LearntPart, PART_BYTES_MAX};
pub use loan::{Loan, loan_copies};
pub use node_times::{node_seconds, step_seconds};
pub use pace::BlockPace;
pub use polyreme_kernels::Isa;
pub use pool::Pool;
pub use reader::{StepArgs, Totals};
pub use served::{RateOf, ServedRanges};
pub use state::LearntState;
pub use timeline::Timeline;
pub use weights::{Held, Kept, KeptArenas, Slot};
