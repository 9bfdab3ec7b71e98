//! How the learning rate changes over a run: a pure function of the step.

/// How the learning rate changes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Schedule {
    /// What follows the warm-up.
    pub shape: Shape,
    /// Steps in which the rate grows from nearly nothing.
    pub warmup: u64,
}

/// The shape of a schedule after its warm-up.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Shape {
    /// The base rate.
    Constant,
}

/// How long a run is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Horizon {
    /// Steps of the whole run.
    pub steps: u64,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
}

impl Schedule {
    /// The rate of step `step`, counted from 0.
    pub fn rate(&self, base: f64, step: u64, _horizon: Horizon) -> f64 {
        let Schedule { shape: Shape::Constant, warmup } = *self;
        if step < warmup { base * (step + 1) as f64 / warmup as f64 } else { base }
    }
}
