//! Job files, good and bad: what is read, what is said about mistakes, and that what is written reads the same.

mod bad;
mod declared;
mod good;
mod page;
mod shapes;
mod written;

use std::path::Path;

use super::{Job, JobErrors};

/// Reads a job as if it lay in `/jobs`.
fn read(text: &str, sets: &[&str]) -> Result<Job, JobErrors> {
    let sets: Vec<_> = sets.iter().map(|s| s.to_string()).collect();
    Job::from_text(text, "job.toml", Path::new("/jobs"), &sets)
}

/// Reads a job that is right.
fn good(text: &str, sets: &[&str]) -> Job {
    read(text, sets).unwrap_or_else(|e| panic!("{e}\n\n{text}"))
}

/// A job that is right, as far as its `[model]` and `[data]` go.
pub(super) const SMALL: &str = "[model]\nkind = \"mlp\"\n[data]\nkind = \"synthetic\"\n";
