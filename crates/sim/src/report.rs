//! What a simulation found: the time of a step, what each rank does with it, what goes over each link, and what it takes of memory.

use polyreme_graph::{Axis, Moment};
use serde::Serialize;

/// The result of a simulation. Times and bytes are those of one step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SimReport {
    /// How long a step takes: from the end of one to the end of the next, on the last rank.
    pub step_us: f64,
    /// The share of the time that ranks wait for others, on average.
    pub waiting: f64,
    /// The share of the time that ranks wait for other stages: the bubble of the pipeline, and messages on their way.
    pub bubble: f64,
    /// What the largest rank takes.
    pub memory_bytes: usize,
    /// By rank.
    pub ranks: Vec<RankUse>,
    /// By host.
    pub hosts: Vec<HostUse>,
    /// What the traced ranks did; not among the numbers.
    #[serde(skip)]
    pub timeline: Vec<RankTimeline>,
}

/// What a rank does with its time.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RankUse {
    /// Its host.
    pub host: usize,
    /// Its places along data, tensor, stage and sequence.
    pub places: [usize; 4],
    /// For how long it computes, copies of messages included.
    pub computing_us: f64,
    /// For how long it waits for exchanges along data, tensor, stage and sequence.
    pub waiting_us: [f64; 4],
    /// When it ends its first step.
    pub first_end_us: f64,
    /// What it takes.
    pub memory_bytes: usize,
}

impl RankUse {
    /// For how long it waits.
    pub fn waits_us(&self) -> f64 {
        self.waiting_us.iter().sum()
    }
}

/// What a host does.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct HostUse {
    /// Bytes that it sends over its link for exchanges along data, tensor, stage and sequence.
    pub link_bytes: [f64; 4],
    /// Bytes that pass its memory in exchanges.
    pub exchanged_bytes: f64,
    /// What its ranks take together. Weights that they share count for each of them.
    pub memory_bytes: usize,
}

/// What a traced rank did.
#[derive(Clone, PartialEq, Debug)]
pub struct RankTimeline {
    /// The rank.
    pub rank: usize,
    /// What it did, as an engine would have recorded it.
    pub moments: Vec<Moment>,
}

impl SimReport {
    /// Samples per second, if a step has so many.
    pub fn samples_per_s(&self, samples: usize) -> f64 {
        samples as f64 / (self.step_us / 1e6)
    }

    /// For how long ranks wait along an axis, on average.
    pub fn waits_along(&self, axis: Axis) -> f64 {
        self.ranks.iter().map(|rank| rank.waiting_us[axis as usize]).sum::<f64>() / self.ranks.len() as f64
    }
}
