//! Runs programs: arenas, a team of threads, kernels.
//!
//! An [`Engine`] is one rank. It prepares a program once (descriptors of kernels, a memory plan, arenas) and then runs
//! it any number of times without allocating. Results do not depend on the number of threads, bit for bit.
//!
//! It knows nothing of job files, datasets or other ranks.
//!
//! # Layout
//! - [`engine`]: the engine. [`weights`]: what it has learnt, as whole arenas. [`finite`]: where a NaN came from.
//! - `launch`, `run`: the row of each op: which kernel, with which slices.
//! - `memory`, `arena`: where values lie, as slices.
//! - [`pool`]: the team of threads.
//! - [`error`]: what can go wrong.

mod arena;
pub mod engine;
pub mod error;
pub mod finite;
mod launch;
mod memory;
pub mod pool;
mod run;
pub mod weights;

pub use engine::{Engine, Footprint, Options};
pub use error::{DataError, ExecError};
pub use finite::NonFinite;
pub use pool::Pool;
pub use weights::{Kept, Slot};
