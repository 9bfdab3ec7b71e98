//! What is known of a run that is under way, from what it tells its observer.

use std::time::{Duration, Instant};

use polyreme_collective::servers::ServerCounts;
use polyreme_train::event::{Event, StepDone};

/// Rates are taken over at least this long.
const WINDOW: Duration = Duration::from_secs(1);

/// Where a run is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Phase {
    /// It has not begun to train.
    #[default]
    Prepares,
    /// It trains.
    Trains,
    /// It is over.
    Over,
}

impl Phase {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Phase::Prepares => "prepares",
            Phase::Trains => "trains",
            Phase::Over => "over",
        }
    }
}

/// A count that grows, and how fast.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunCounter {
    /// The count.
    pub(crate) total: u64,
    /// How much it grew in a second, over the last second or more.
    pub(crate) per_s: f64,
    since: Option<(Instant, u64)>,
}

impl RunCounter {
    fn set(&mut self, now: Instant, total: u64) {
        self.total = total;
        let (at, before) = *self.since.get_or_insert((now, total));
        let passed = now.duration_since(at);
        if passed >= WINDOW {
            self.per_s = total.saturating_sub(before) as f64 / passed.as_secs_f64();
            self.since = Some((now, total));
        }
    }
}

/// What is known of a server.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ServerState {
    /// What it came to.
    pub(crate) counts: ServerCounts,
    /// Gradients that it applied to ranges.
    pub(crate) applied: RunCounter,
}

/// What is known of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunFigures {
    /// The job's name.
    pub(crate) name: String,
    /// Where it is.
    pub(crate) phase: Phase,
    /// How many ranks there are.
    pub(crate) ranks: usize,
    /// The number of this group of ranks, in an elastic run.
    pub(crate) generation: u64,
    /// Steps done.
    pub(crate) steps: RunCounter,
    /// Samples of the steps that were done since this process began.
    pub(crate) samples: RunCounter,
    /// The last step.
    pub(crate) last: Option<StepDone>,
    /// The loss of the last step that has one.
    pub(crate) loss: Option<f64>,
    /// What the last evaluation gave.
    pub(crate) metrics: Vec<(String, f64)>,
    /// Checkpoints that were handed to the writer, and how long that held training.
    pub(crate) checkpoints: u64,
    /// How long training was held for them.
    pub(crate) held: Duration,
    /// Warnings.
    pub(crate) warnings: u64,
    /// The parameter servers.
    pub(crate) servers: Vec<ServerState>,
}

impl RunFigures {
    /// Something happened.
    pub(crate) fn note(&mut self, now: Instant, event: &Event<'_>) {
        match event {
            Event::Started(outline) => {
                (self.name, self.ranks, self.phase) = (outline.name.clone(), outline.ranks, Phase::Trains);
                self.steps.set(now, outline.first_step);
                self.samples.set(now, 0);
            }
            Event::Step(done) => {
                self.phase = Phase::Trains;
                self.steps.set(now, done.step);
                self.samples.set(now, self.samples.total + done.samples as u64);
                self.loss = done.loss.or(self.loss);
                self.last = Some(**done);
            }
            Event::Evaluated { metrics, .. } => self.metrics = metrics.to_vec(),
            Event::Saving { held, .. } => {
                self.checkpoints += 1;
                self.held += *held;
            }
            Event::Membership { generation, ranks, .. } => {
                (self.generation, self.ranks) = (*generation, *ranks);
            }
            Event::Servers(counts) => {
                self.servers.resize_with(counts.len(), ServerState::default);
                for (state, counts) in self.servers.iter_mut().zip(*counts) {
                    state.counts = *counts;
                    state.applied.set(now, counts.staleness.count);
                }
            }
            Event::Warning(_) => self.warnings += 1,
            Event::Finished(_) => self.phase = Phase::Over,
            Event::Turned { .. } => {
                // Those of the way before have ended.
                self.servers.clear();
            }
            Event::Balanced { .. } | Event::Followed { .. } | Event::TooSlow => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_over_a_second_or_more() {
        let (start, mut counter) = (Instant::now(), RunCounter::default());
        let at = |ms: u64| start + Duration::from_millis(ms);
        counter.set(at(0), 10);
        counter.set(at(500), 30);
        assert_eq!((counter.total, counter.per_s), (30, 0.0));
        counter.set(at(2000), 110);
        assert_eq!((counter.total, counter.per_s), (110, 50.0));
        counter.set(at(2500), 111);
        assert_eq!((counter.total, counter.per_s), (111, 50.0));
    }
}
