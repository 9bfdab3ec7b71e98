//! Watching a metric over a run: which evaluation was the best, and when waiting for a better one ends. Both are small
//! state machines that a checkpoint keeps.
//!
//! Only finite values count as gains, so what is kept can always be written as JSON.

use serde::{Deserialize, Serialize};

/// Which way a metric gets better.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Less is better: losses, errors (`mae` too), perplexities.
    Smaller,
    /// More is better: everything else.
    Larger,
}

impl Direction {
    /// What a metric's name says: names that hold `loss`, `error`, `mae` or `perplexity` get better by getting
    /// smaller.
    pub fn of(metric: &str) -> Direction {
        let smaller = ["loss", "error", "mae", "perplexity"].iter().any(|word| metric.contains(word));
        if smaller { Direction::Smaller } else { Direction::Larger }
    }

    /// By how much `a` is better than `b`; negative if it is worse.
    pub fn gain(self, a: f64, b: f64) -> f64 {
        match self {
            Direction::Smaller => b - a,
            Direction::Larger => a - b,
        }
    }
}

/// Whether `a` is a better value of the metric than `b`. What is not finite is never better, and anything finite is
/// better than it.
pub fn better(metric: &str, a: f64, b: f64) -> bool {
    a.is_finite() && (!b.is_finite() || Direction::of(metric).gain(a, b) > 0.0)
}

/// The best value of a metric so far, and where it was.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Best {
    /// Which metric, such as `val_accuracy`.
    pub metric: String,
    /// The best value, once there is one.
    pub value: Option<f64>,
    /// The step that it was measured after.
    pub step: u64,
}

impl Best {
    /// Nothing seen yet.
    pub fn new(metric: impl Into<String>) -> Best {
        Best { metric: metric.into(), value: None, step: 0 }
    }

    /// Takes a new value; whether it is the best so far. An equal one is not: the earlier stays.
    pub fn observe(&mut self, step: u64, value: f64) -> bool {
        let gained = better(&self.metric, value, self.value.unwrap_or(f64::NAN));
        if gained {
            (self.value, self.step) = (Some(value), step);
        }
        gained
    }
}

/// What early stopping says after an evaluation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Better than all before by at least what counts as a gain.
    Gained,
    /// So many evaluations without a gain by now.
    Waiting(u64),
    /// There were as many as patience allows: the run ends.
    Stop,
}

/// Early stopping: counts the evaluations that brought no gain.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Patience {
    metric: String,
    patience: u64,
    min_delta: f64,
    best: Option<f64>,
    waited: u64,
}

impl Patience {
    /// Stops at the `patience`-th evaluation in a row without a gain (0 means the same as 1). A gain is more than
    /// `min_delta` better than the best before it.
    pub fn new(metric: impl Into<String>, patience: u64, min_delta: f64) -> Patience {
        Patience { metric: metric.into(), patience, min_delta, best: None, waited: 0 }
    }

    /// Which metric is watched.
    pub fn metric(&self) -> &str {
        &self.metric
    }

    /// The best value so far.
    pub fn best(&self) -> Option<f64> {
        self.best
    }

    /// Takes the value of the next evaluation.
    pub fn observe(&mut self, value: f64) -> Verdict {
        let direction = Direction::of(&self.metric);
        let gained =
            value.is_finite() && self.best.is_none_or(|best| direction.gain(value, best) > self.min_delta);
        if gained {
            (self.best, self.waited) = (Some(value), 0);
            return Verdict::Gained;
        }
        self.waited = self.waited.saturating_add(1);
        if self.waited >= self.patience { Verdict::Stop } else { Verdict::Waiting(self.waited) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Verdict::{Gained, Stop, Waiting};

    #[test]
    fn names_say_which_way_is_better() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        for (metric, a, b, want) in [
            ("val_loss", 1.0, 2.0, true),
            ("val_loss", 2.0, 1.0, false),
            ("loss", 1.0, 1.0, false),
            ("test_perplexity", 3.0, 9.0, true),
            ("val_accuracy", 0.9, 0.8, true),
            ("val_accuracy", 0.8, 0.9, false),
            ("val_top5", 0.9, 0.8, true),
            ("val_mae", 1.0, 2.0, true),
            ("val_r2", 0.9, 0.8, true),
            ("val_f1", 0.8, 0.9, false),
            ("val_loss", nan, 1.0, false),
            ("val_loss", 1.0, nan, true),
            ("val_loss", f64::NEG_INFINITY, 1.0, false),
            ("val_accuracy", inf, 1.0, false),
            ("val_accuracy", nan, nan, false),
        ] {
            assert_eq!(better(metric, a, b), want, "{metric}: {a} against {b}");
        }
    }

    #[test]
    fn the_earliest_best_stays() {
        let mut best = Best::new("val_accuracy");
        let gains = [f64::NAN, 0.5, 0.4, 0.5, 0.6].map(|value| best.observe(best.step + 10, value));
        assert_eq!(gains, [false, true, false, false, true]);
        assert_eq!((best.value, best.step), (Some(0.6), 20));
    }

    fn check(metric: &str, patience: u64, min_delta: f64, rows: &[(f64, Verdict)]) {
        let mut state = Patience::new(metric, patience, min_delta);
        for (i, &(value, want)) in rows.iter().enumerate() {
            // Through a checkpoint every time: it must hold everything.
            let text = serde_json::to_string(&state).unwrap();
            state = serde_json::from_str(&text).unwrap();
            assert_eq!(state.observe(value), want, "{metric} row {i} of {rows:?}");
        }
    }

    #[test]
    fn patience_runs_out() {
        let nan = f64::NAN;
        check("val_loss", 2, 0.0, &[(3.0, Gained), (2.0, Gained), (2.0, Waiting(1)), (2.5, Stop)]);
        check("val_loss", 2, 0.0, &[(3.0, Gained), (4.0, Waiting(1)), (2.0, Gained), (3.0, Waiting(1))]);
        check("val_loss", 3, 0.5, &[(3.0, Gained), (2.75, Waiting(1)), (2.5, Waiting(2)), (2.25, Gained)]);
        check(
            "val_accuracy",
            1,
            0.0,
            &[(0.5, Gained), (0.6, Gained), (0.6, Stop), (0.6, Stop), (0.7, Gained)],
        );
        check("val_accuracy", 0, 0.0, &[(0.5, Gained), (0.4, Stop)]);
        check(
            "val_loss",
            3,
            0.0,
            &[(nan, Waiting(1)), (f64::INFINITY, Waiting(2)), (1.0, Gained), (nan, Waiting(1))],
        );
        check("val_loss", 1, 0.0, &[(nan, Stop)]);
    }
}
