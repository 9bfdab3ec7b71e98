//! A page of figures of a run, for Prometheus and `polyreme status` (`--metrics ADDR:PORT`).
//!
//! Rank 0's process serves it from a thread of its own. What a run tells its observer is copied under a lock that nobody holds for longer
//! than a copy takes; a reader, however slow, has the thread and not the run waiting for it.
//!
//! # Layout
//! - [`figures`]: what is known of the run, from its events. [`text`]: as Prometheus reads it. [`status`]: as JSON, and for people.
//! - [`page`]: the listener. [`watched`]: an observer that keeps the figures and passes events on.

pub(crate) mod figures;
pub(crate) mod page;
pub(crate) mod status;
pub(crate) mod text;
pub(crate) mod watched;
