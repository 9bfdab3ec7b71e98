//! A run: a prepared job, its engines, its folder, and the loop over its steps.
//!
//! # Layout
//! - [`Prepared`]: the job with its data and its network, checked, before anything is reserved or written.
//! - `folder`: where a run writes. `snapshot`: to and from checkpoints. `train`: the loop.

mod folder;
mod prepared;
mod snapshot;
mod train;

pub use folder::choose as choose_folder;
pub use prepared::{Given, Prepared};
pub use snapshot::{AVERAGE_FILE, Progress, restore};
pub use train::Run;
