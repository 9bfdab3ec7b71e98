//! What a run leaves behind for people and tools: `metrics.jsonl`, event files for TensorBoard, and at the end
//! `report.html`. No checkpoints, and nothing that training needs to go on.
//!
//! - [`Recorder`] ties them together.
//! - [`jsonl`] and [`tensorboard`] write, [`history`] reads back, [`report`] draws.
//! - [`trace`] writes where the time of every rank went, if asked to; [`timeline`] draws a step of it.
//! - `axis` and `escape` are what drawings share.
//! - [`progress`] is the text of the line that a terminal shows meanwhile.

pub mod history;
pub mod jsonl;
pub mod progress;
pub mod report;
pub mod tensorboard;
pub mod timeline;
pub mod trace;

mod append;
mod axis;
mod error;
mod escape;
mod recorder;
mod wording;

pub use error::RecordError;
pub use recorder::{METRICS, Options, REPORT, Recorder};
pub(crate) use tensorboard::is_event_file;
pub use wording::thousands;
