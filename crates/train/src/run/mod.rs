//! A run: a prepared job, its ranks, its folder, and the loop over its steps.
//!
//! # Layout
//! - [`Prepared`]: the job with its data and its network, checked, before anything is reserved or written. `seats`: how
//!   many ranks and threads that makes. `layer_paths`, `tuned`: whether the layers and parameters that it names are there. [`Hold`]: where a run writes, under its lock; [`FoundRun`]: a run that goes on.
//! - [`fit`]: whether it fits into memory. [`advice`]: what would.
//! - [`run_ranks`]: the ranks of this process. `train`: the loop that each of them runs. `step`, `judged`:
//!   its steps and its evaluations.
//! - `measured_cuts`: where a network is cut into stages, by measured times.
//! - [`kernels`]: which kernels sum products, and what it means if they are others than before. [`degrees`]: the same of how many
//!   ranks split sums.
//! - [`planned_step`]: what a planner predicted of a run, to compare with what was measured.
//! - [`elastic`]: one generation of an elastic run, and what ranks carry to the next.
//! - `files`: what rank 0 writes. `snapshot`: to and from checkpoints; `replicas`: of ranks that take steps by themselves; `apart`, `served`: of a model that several ranks
//!   have together.

pub mod advice;
pub(crate) mod apart;
pub mod degrees;
pub mod elastic;
mod entering;
mod factors;
mod files;
pub mod fit;
mod folder;
pub(crate) mod frozen;
mod judged;
pub mod kernels;
mod layer_paths;
mod measured_cuts;
pub mod planned_step;
mod prepared;
mod ranks;
mod replicas;
mod seats;
pub(crate) mod served;
mod servers;
mod snapshot;
mod step;
mod train;
mod trial_run;
mod tuned;
mod turns;
mod wire_trial;

#[cfg(test)]
mod tests;

pub use fit::{Limit, Lodging, Need, Scope, TooLarge};
pub use folder::{FoundRun, Hold, likely_folder};
pub use measured_cuts::CutsFrom;
pub use prepared::{Given, Prepared, plan};
pub use ranks::{run_ranks, run_ranks_at};
pub use seats::{Seats, seats};
pub use snapshot::{AVERAGE_FILE, Progress};
