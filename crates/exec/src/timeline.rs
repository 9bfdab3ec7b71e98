//! Where the time of steps goes, as a list of spans: what was computed, when this rank waited for others, which
//! exchanges were in flight.

use std::time::Instant;

/// What kind of work a span of time was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MomentKind {
    /// Computing: a node or an update.
    Compute,
    /// An exchange, from its start until it was waited for; others may overlap it.
    Exchange,
    /// Waiting for an exchange.
    Wait,
}

/// A span of time.
#[derive(Clone, PartialEq, Debug)]
pub struct Moment {
    /// The name of the work.
    pub name: String,
    /// The kind of work.
    pub kind: MomentKind,
    /// The number of the step.
    pub step: u64,
    /// The node of the body, if it computed one.
    pub node: Option<usize>,
    /// Microseconds since the timeline began.
    pub start_us: f64,
    /// Its duration in microseconds.
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
    /// A recording of at most `max` spans, with times counted from `origin`.
    pub fn new(origin: Instant, max: usize) -> Timeline {
        Timeline { origin, moments: Vec::new(), max }
    }

    /// The recorded spans.
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
