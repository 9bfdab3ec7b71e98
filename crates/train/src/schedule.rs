//! How the learning rate changes over a run: a pure function of the step. Nothing is remembered between steps, so a
//! resumed run has the rates of one that never stopped.
//!
//! A run is a warm-up and then a shape over the steps that are left; "step 0" and "epoch 0" of a shape are those after
//! the warm-up. The shapes are PyTorch's: `fixtures/make_schedules.py` makes the rates that the tests compare with.

use std::f64::consts::PI;

/// How the learning rate changes. The default is the base rate from the first step to the last.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Schedule {
    /// What follows the warm-up.
    pub shape: ScheduleShape,
    /// Steps in which the rate grows linearly from nearly nothing to the base rate.
    pub warmup: u64,
}

/// The shape of a schedule after its warm-up.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum ScheduleShape {
    /// The base rate.
    #[default]
    Constant,
    /// Times `factor` after every so many epochs.
    Step {
        /// Epochs between two falls.
        every_epochs: u64,
        /// What a fall multiplies the rate by.
        factor: f64,
    },
    /// Times `factor` after every epoch.
    Exponential {
        /// What an epoch multiplies the rate by.
        factor: f64,
    },
    /// Half a cosine, from the base rate down to a floor.
    Cosine {
        /// The share of the base rate at the end of a cycle.
        floor: f64,
        /// How often the rate jumps back to the base rate: cycles of one length, one more than restarts.
        restarts: u64,
    },
    /// Half a cosine up to the base rate, and half a cosine down to nearly nothing.
    OneCycle {
        /// The share of the steps in which the rate grows; usually 0.3.
        start_share: f64,
        /// The base rate divided by the first rate; usually 25.
        div: f64,
        /// The first rate divided by the last one; usually 1e4.
        final_div: f64,
    },
    /// A straight line from the base rate down to a floor.
    Linear {
        /// The share of the base rate at the end.
        floor: f64,
    },
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
    /// The rate of step `step`, counted from 0. Steps past the horizon have the rate of its end.
    pub fn rate(&self, base: f64, step: u64, horizon: Horizon) -> f64 {
        if step < self.warmup {
            return base * (step + 1) as f64 / self.warmup as f64;
        }
        let step = step - self.warmup;
        let steps = horizon.steps.saturating_sub(self.warmup);
        let epoch = step / horizon.steps_per_epoch.max(1);
        match self.shape {
            ScheduleShape::Constant => base,
            ScheduleShape::Step { every_epochs, factor } => base * power(factor, epoch / every_epochs.max(1)),
            ScheduleShape::Exponential { factor } => base * power(factor, epoch),
            ScheduleShape::Cosine { floor, restarts } => {
                half_cosine(base, base * floor, share_of_cycle(step, steps, restarts))
            }
            ScheduleShape::OneCycle { start_share, div, final_div } => {
                one_cycle(base, step, steps, start_share, base / div, base / div / final_div)
            }
            ScheduleShape::Linear { floor } => base * (1.0 + (floor - 1.0) * share_of_cycle(step, steps, 0)),
        }
    }
}

/// `factor` to the power of `n`, for any `n`.
fn power(factor: f64, n: u64) -> f64 {
    factor.powi(i32::try_from(n).unwrap_or(i32::MAX))
}

/// How much of its cycle has passed before step `step` of `steps`; 1 when all is over. Cycles have the same length to
/// a fraction of a step, so that they fill the run whatever its length is.
fn share_of_cycle(step: u64, steps: u64, restarts: u64) -> f64 {
    if step >= steps {
        return 1.0;
    }
    let steps = u128::from(steps);
    // At most (2^64 - 1) * 2^64: it fits.
    let passed = u128::from(step) * (u128::from(restarts) + 1) % steps;
    passed as f64 / steps as f64
}

/// From `first` at share 0 to `last` at share 1, flat at both ends.
fn half_cosine(first: f64, last: f64, share: f64) -> f64 {
    last + (first - last) * (1.0 + (PI * share).cos()) / 2.0
}

/// PyTorch's `OneCycleLR` with two phases. The peak lies at `start_share * steps - 1` and the end at `steps - 1`; the
/// peak may lie between two steps, or before the first.
fn one_cycle(base: f64, step: u64, steps: u64, start_share: f64, first: f64, last: f64) -> f64 {
    let (at, end) = (step as f64, steps as f64 - 1.0);
    let peak = (start_share * steps as f64 - 1.0).min(end);
    let share =
        |from: f64, to: f64| if to > from { ((at - from) / (to - from)).clamp(0.0, 1.0) } else { 1.0 };
    if at <= peak {
        half_cosine(first, base, share(0.0, peak))
    } else {
        half_cosine(base, last, share(peak, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn shape(value: &Value) -> ScheduleShape {
        let number = |key: &str| value[key].as_f64().unwrap();
        let count = |key: &str| value[key].as_u64().unwrap();
        match value["kind"].as_str().unwrap() {
            "constant" => ScheduleShape::Constant,
            "step" => ScheduleShape::Step { every_epochs: count("every_epochs"), factor: number("factor") },
            "exponential" => ScheduleShape::Exponential { factor: number("factor") },
            "cosine" => ScheduleShape::Cosine { floor: number("floor"), restarts: count("restarts") },
            "one-cycle" => ScheduleShape::OneCycle {
                start_share: number("start_share"),
                div: number("div"),
                final_div: number("final_div"),
            },
            "linear" => ScheduleShape::Linear { floor: number("floor") },
            kind => panic!("unknown shape {kind}"),
        }
    }

    #[test]
    fn rates_are_those_of_pytorch() {
        let cases: Vec<Value> = serde_json::from_str(include_str!("../fixtures/schedules.json")).unwrap();
        assert!(cases.len() >= 16);
        for case in &cases {
            let schedule =
                Schedule { shape: shape(&case["shape"]), warmup: case["warmup"].as_u64().unwrap() };
            let horizon = Horizon {
                steps: case["steps"].as_u64().unwrap(),
                steps_per_epoch: case["steps_per_epoch"].as_u64().unwrap(),
            };
            let base = case["base"].as_f64().unwrap();
            let rates = case["rates"].as_array().unwrap();
            assert_eq!(rates.len() as u64, horizon.steps);
            // From the last step to the first: nothing may depend on the order.
            for (step, want) in rates.iter().enumerate().rev() {
                let want = want.as_f64().unwrap();
                let got = schedule.rate(base, step as u64, horizon);
                assert!((got - want).abs() <= 1e-12 * base, "{schedule:?} step {step}: {got}, not {want}");
            }
        }
    }

    fn check(schedule: Schedule, steps: u64, step: u64, want: f64) {
        let got = schedule.rate(2.0, step, Horizon { steps, steps_per_epoch: 0 });
        assert!((got - want).abs() < 1e-12, "{schedule:?} step {step} of {steps}: {got}, not {want}");
    }

    #[test]
    fn odd_lengths_have_rates_too() {
        let cosine = |restarts| Schedule { shape: ScheduleShape::Cosine { floor: 0.5, restarts }, warmup: 0 };
        let cycle = Schedule {
            shape: ScheduleShape::OneCycle { start_share: 0.5, div: 10.0, final_div: 10.0 },
            warmup: 0,
        };
        let linear = Schedule { shape: ScheduleShape::Linear { floor: 0.25 }, warmup: 4 };
        check(Schedule::default(), 0, 7, 2.0);
        // Past the end, and a run that is all warm-up.
        check(cosine(0), 10, 10, 1.0);
        check(cosine(3), 10, u64::MAX, 1.0);
        check(cosine(0), 0, 0, 1.0);
        check(linear, 3, 2, 1.5);
        check(linear, 3, 9, 0.5);
        // Two cycles in nine steps: the second begins in the middle of step 4, so step 5 is a ninth into it.
        check(cosine(1), 9, 5, 1.0 + (1.0 + (PI / 9.0).cos()) / 2.0);
        check(cosine(u64::MAX), 9, 0, 2.0);
        // A peak exactly on the first step, where PyTorch divides by zero; and one step only.
        check(cycle, 2, 0, 2.0);
        check(cycle, 2, 1, 0.02);
        check(cycle, 1, 0, 0.02);
        check(cycle, 0, 0, 0.02);
        check(
            Schedule { shape: ScheduleShape::Step { every_epochs: 0, factor: 0.5 }, warmup: 0 },
            9,
            3,
            0.25,
        );
        check(Schedule { shape: ScheduleShape::Exponential { factor: 0.5 }, warmup: 0 }, 9, u64::MAX, 0.0);
    }
}
