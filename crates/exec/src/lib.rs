//! Runs programs: arenas, a team of threads, kernels.
//!
//! An [`Engine`] is one rank. It prepares a program once (descriptors of kernels, a memory plan, arenas) and then runs
//! it any number of times without allocating. Results do not depend on the number of threads, bit for bit.
//!
//! Several engines may be the ranks of one job: an engine that joined runs the exchanges of its program through a
//! [`polyreme_collective::Comm`]. It knows nothing of job files or datasets.
//!
//! # Layout
//! - [`engine`]: the engine. `reader`: the one reader of instructions. [`feed`]: what programs are fed. `vectors`: instructions on
//!   long vectors.
//! - `state`: what is learnt. `moments`: where the optimizer's part of it lies. [`weights`]: the same from outside, as whole
//!   arenas. `group`: joining, and what all ranks do between steps. [`loan`], [`ledger`]: lending it to whoever writes a
//!   checkpoint. [`finite`]: where a NaN came from. [`timeline`]: where the time goes.
//! - `launch`, `run`, `apply`: the row of each op: which kernel, with which slices. `kernel_types`: for which element types.
//! - `workspace`: prepared bodies, activations, inputs and buffers. `memory`, `arena`: where values lie, as slices.
//! - [`pool`]: the team of threads.
//! - [`error`]: what can go wrong.

mod apply;
mod arena;
pub mod engine;
pub mod error;
pub mod feed;
pub mod finite;
mod group;
mod kernel_types;
mod launch;
pub mod ledger;
pub mod loan;
mod memory;
mod moments;
pub mod pool;
mod reader;
mod run;
mod state;
pub mod timeline;
mod vectors;
pub mod weights;
mod workspace;

pub use arena::{floats, make_room};
pub use engine::{Engine, Footprint, Options};
pub use error::{DataError, ExecError};
pub use feed::{Feed, Filled, Inputs};
pub use finite::NonFinite;
pub use loan::{Loan, loan_copies};
pub use polyreme_kernels::Isa;
pub use pool::Pool;
pub use reader::{StepArgs, Totals};
pub use timeline::{Moment, MomentKind, Timeline};
pub use weights::{Held, Kept, Slot};
