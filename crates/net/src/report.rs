//! What every rank says when one of them is lost: one report, naming rank, host, step and operation.

use std::fmt;

/// Why a job of several ranks cannot go on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The rank that failed.
    pub rank: usize,
    /// Its host; empty if nobody knows it.
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
    /// Nothing was heard of it for so many milliseconds.
    Silent {
        /// How long.
        ms: u64,
    },
    /// It lives, and neither it nor any other rank has got on for so many milliseconds.
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
    /// It stopped by itself and said why.
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
    /// These ranks, at least two, send to each other in a circle, and none of them receives.
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
                write!(f, " lives, but nothing has moved for {s:.0} s (`parallel.stall` allows no more)")?;
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
