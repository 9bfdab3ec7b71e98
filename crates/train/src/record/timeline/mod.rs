//! A step of a timeline as a picture: ranks over time, a bar for each thing that a rank did.
//!
//! ```text
//!  trace.json ──read──▶ Trace ──step──▶ StepTimeline ──svg──▶ picture.svg
//! ```
//!
//! All that is known is the file ([`super::trace`] writes it), so it does not matter whether a run or a simulator made it. Two
//! steps, such as a measured and a simulated one, are drawn one above the other on the same scale.
//!
//! - `read`: the file. `step`: which step is drawn, and what each rank did in it. `draw`: the picture; `bars` has its colours,
//!   `caption` its words, `lettering` its letters.
//!
//! # What is idle
//! A rank works while it runs instructions, and is idle while it waits for a message or for an exchange of a few bytes (hatched), and
//! before and after its own part of the step (blank). Any other collective is a bar of its own kind: whether a rank waits there for a
//! slower one or adds up numbers is not known, since ranks that share memory do both in one place.

mod bars;
mod caption;
mod draw;
#[cfg(test)]
mod fuzz;
mod lettering;
mod read;
mod step;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

pub use draw::svg;
pub use read::Trace;
pub use step::StepTimeline;

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub enum TimelineError {
    /// The system could not read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is some other file.
    #[error("{}: not a timeline: {why}; `polyreme train JOB.toml --trace FILE` writes one", path.display())]
    NotATrace {
        /// The file.
        path: PathBuf,
        /// What was found.
        why: String,
    },
    /// It is a trace of something else, or of a run that recorded no step.
    #[error(
        "{}: a timeline without a step that all ranks recorded whole; record one with `polyreme train JOB.toml --trace FILE`",
        path.display()
    )]
    NoSteps {
        /// The file.
        path: PathBuf,
    },
    /// It has other steps.
    #[error("{}: step {step} is not in it: it has {has}", path.display())]
    NoStep {
        /// The file.
        path: PathBuf,
        /// The step that was asked for.
        step: u64,
        /// The steps that it has, in words.
        has: String,
    },
}
