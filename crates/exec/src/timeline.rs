//! Where the time of steps goes, as a list of moments: what was computed, when this rank waited for others, which
//! exchanges were under way.

use std::time::Instant;

/// What a stretch of time went into.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MomentKind {
    /// A node, an update.
    Compute,
    /// An exchange, from its start until it was waited for; others may overlap it.
    Exchange,
    /// Waiting for an exchange.
    Wait,
}

/// A stretch of time.
#[derive(Clone, PartialEq, Debug)]
pub struct Moment {
    /// What it was.
    pub name: String,
    /// Of which kind.
    pub kind: MomentKind,
    /// The step.
    pub step: u64,
    /// The node of its body, if it computed one.
    pub node: Option<usize>,
    /// Microseconds since the timeline began.
    pub start_us: f64,
    /// How long it took.
    pub us: f64,
}

/// A recording. It stops when it is full.
#[derive(Clone, Debug)]
pub struct Timeline {
    origin: Instant,
    moments: Vec<Moment>,
    max: usize,
}

impl Timeline {
    /// A recording of at most `max` moments, counted from `origin`.
    pub fn new(origin: Instant, max: usize) -> Timeline {
        Timeline { origin, moments: Vec::new(), max }
    }

    /// What was recorded.
    pub fn moments(&self) -> &[Moment] {
        &self.moments
    }

    pub(crate) fn push(
        &mut self,
        name: impl FnOnce() -> String,
        kind: MomentKind,
        step: u64,
        start: Instant,
        node: Option<usize>,
    ) {
        if self.moments.len() < self.max {
            let start_us = start.duration_since(self.origin).as_secs_f64() * 1e6;
            let us = start.elapsed().as_secs_f64() * 1e6;
            self.moments.push(Moment { name: name(), kind, step, node, start_us, us });
        }
    }
}
