//! The report that every rank gives when one is lost: rank, host, step and operation.

use std::fmt;

/// Why a job of several ranks cannot go on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The rank that failed.
    pub rank: usize,
    /// Its host; empty if unknown.
    pub host: String,
    /// The step in which the others noticed.
    pub step: u64,
    /// The operation in which they noticed.
    pub op: String,
    /// What happened.
    pub cause: Cause,
}

/// What happened to a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Its process ended, or its connection closed.
    Gone,
    /// It has been silent for this many milliseconds.
    Silent {
        /// How long.
        ms: u64,
    },
    /// It is alive, but neither it nor any other rank has made progress for this many milliseconds.
    Stalled {
        /// How long.
        ms: u64,
    },
    /// Another rank wanted to talk with it for the first time, and cannot connect to it.
    Unreachable {
        /// Which rank, and what is in the way.
        what: String,
    },
    /// It did something else than the others.
    Disagrees {
        /// What it did and what was expected.
        what: String,
    },
    /// It failed and said why.
    Failed {
        /// Its error.
        why: String,
    },
    /// What it sent arrived damaged.
    Damaged {
        /// What is wrong with it.
        what: String,
    },
}

impl Cause {
    /// These ranks, at least two, send to each other in a cycle, and none of them receives.
    pub fn crossed(mut ranks: Vec<usize>) -> Cause {
        ranks.sort_unstable();
        let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let why = format!(
            "ranks {} send to each other and none of them receives; let one of them receive first, or call all_to_all",
            names.join(", ")
        );
        Cause::Failed { why }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if !self.host.is_empty() {
            write!(f, " on {}", self.host)?;
        }
        match &self.cause {
            Cause::Gone => write!(f, " is gone")?,
            Cause::Silent { ms } => write!(f, " has been silent for {:.1} s", *ms as f64 / 1e3)?,
            Cause::Stalled { ms } => {
                let s = *ms as f64 / 1e3;
                write!(
                    f,
                    " is alive, but nothing has moved for {s:.0} s, which is the limit `parallel.stall`"
                )?;
            }
            Cause::Unreachable { what } => write!(f, " cannot be reached: {what}")?,
            Cause::Disagrees { what } => write!(f, " disagrees with the others: {what}")?,
            Cause::Failed { why } => write!(f, " failed: {why}")?,
            Cause::Damaged { what } => write!(f, " sent damaged data: {what}")?,
        }
        write!(f, " (at step {}, in {})", self.step, self.op)
    }
}

impl std::error::Error for Report {}
