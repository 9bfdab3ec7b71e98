//! Jobs: what to train, on what, how, with what, and what to leave behind.

mod spec;

pub use spec::*;
