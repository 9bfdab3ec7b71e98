//! How many samples each rank gets where machines differ in speed: decided now and then, from what was measured.
//!
//! A step takes as long as its slowest rank. If a rank gets samples in proportion to its speed, all are done at the
//! same time. The gradient stays exact: every piece counts by its samples. A change has a price (batches that were
//! read ahead are thrown away, programs for other lengths are compiled), so a small gain is left alone.

use std::fmt;

use crate::share::counts;

/// Speeds are looked at after so many steps.
pub const EVERY_STEPS: u64 = 20;

/// What a change must win of a step's time.
pub const GAIN_MIN: f64 = 0.05;

/// What a rank did since the last look.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Measured {
    /// Samples that it ran.
    pub samples: f64,
    /// Seconds that it took for them; waiting for data or for others not counted.
    pub seconds: f64,
}

/// What to do about it.
#[derive(Clone, PartialEq, Debug)]
pub enum Decision {
    /// Nothing.
    Stay(Reason),
    /// Share out by these weights from now on.
    Change {
        /// One for each rank.
        weights: Vec<f64>,
        /// Samples of each rank in a whole step.
        samples: Vec<usize>,
        /// The share of a step's time that it wins.
        gain: f64,
    },
}

/// Why nothing is changed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reason {
    /// No rank has run anything yet.
    Unknown,
    /// The samples of a step are shared out so already.
    Same,
    /// It would win too little.
    Small {
        /// The share of a step's time.
        gain: f64,
    },
}

/// Whether to share out a step of `batch` samples in another way than by `weights`.
pub fn decide(batch: usize, weights: &[f64], measured: &[Measured]) -> Decision {
    let speed = |m: &Measured| {
        (m.samples > 0.0 && m.seconds > 0.0).then(|| m.samples / m.seconds).filter(|s| s.is_finite())
    };
    let known: Vec<f64> = measured.iter().filter_map(speed).collect();
    let Some(slowest) = known.iter().copied().reduce(f64::min) else {
        return Decision::Stay(Reason::Unknown);
    };
    // A rank that had nothing to do is tried as if it were the slowest.
    let speeds: Vec<f64> = measured.iter().map(|m| speed(m).unwrap_or(slowest)).collect();
    let (now, then) = (counts(batch, weights), counts(batch, &speeds));
    if now == then {
        return Decision::Stay(Reason::Same);
    }
    let seconds =
        |counts: &[usize]| counts.iter().zip(&speeds).map(|(&n, speed)| n as f64 / speed).fold(0.0, f64::max);
    let gain = 1.0 - seconds(&then) / seconds(&now);
    if gain < GAIN_MIN || gain.is_nan() {
        return Decision::Stay(Reason::Small { gain });
    }
    Decision::Change { weights: speeds, samples: then, gain }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Decision::Stay(Reason::Unknown) => f.write_str("no rank has been measured yet"),
            Decision::Stay(Reason::Same) => f.write_str("samples are shared out by speed already"),
            Decision::Stay(Reason::Small { gain }) => {
                write!(f, "another sharing would win {:.1} % of a step, too little", gain * 100.0)
            }
            Decision::Change { samples, gain, .. } => {
                let samples: Vec<_> = samples.iter().map(usize::to_string).collect();
                let (samples, gain) = (samples.join(", "), gain * 100.0);
                write!(
                    f,
                    "ranks take {samples} samples a step from now on, by their speed; that wins {gain:.0} %"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(speeds: &[f64]) -> Vec<Measured> {
        let measured = |&speed: &f64| match speed {
            0.0 => Measured::default(),
            speed => Measured { samples: 10.0 * speed, seconds: 10.0 },
        };
        speeds.iter().map(measured).collect()
    }

    /// What becomes of 30 samples, or why nothing does.
    fn check(weights: &[f64], speeds: &[f64], want: Result<(&[usize], f64), Reason>) {
        let got = decide(30, weights, &at(speeds));
        match (&got, want) {
            (Decision::Change { samples, gain, weights }, Ok((want, want_gain))) => {
                assert_eq!(samples, want);
                assert_eq!(counts(30, weights), *samples);
                assert!((gain - want_gain).abs() < 1e-9, "{gain}");
            }
            (Decision::Stay(got), Err(want)) => assert_eq!(*got, want),
            (got, want) => panic!("{got:?} and not {want:?}"),
        }
    }

    #[test]
    fn a_slow_rank_gets_fewer_samples() {
        let even = [1.0; 3];
        check(&even, &[100.0, 100.0, 100.0], Err(Reason::Same));
        // Ten samples at half the speed took 0.2 s; twelve and six take 0.12 s.
        check(&even, &[100.0, 50.0, 100.0], Ok((&[12, 6, 12], 0.4)));
        check(&[100.0, 50.0, 100.0], &[100.0, 50.0, 100.0], Err(Reason::Same));
        // Less than a sample's worth.
        check(&even, &[100.0, 97.0, 100.0], Err(Reason::Same));
        check(&[20.0, 5.0, 5.0], &[100.0, 100.0, 100.0], Ok((&[10, 10, 10], 0.5)));
        check(&even, &[0.0, 0.0, 0.0], Err(Reason::Unknown));
        // One that had nothing to do is tried.
        check(&[1.0, 1.0, 1e-9], &[100.0, 100.0, 0.0], Ok((&[10, 10, 10], 1.0 / 3.0)));
    }

    #[test]
    fn small_gains_are_left_alone() {
        let speeds = at(&[100.0, 96.0]);
        let Decision::Stay(Reason::Small { gain }) = decide(100, &[1.0, 1.0], &speeds) else { panic!() };
        assert!(gain > 0.0 && gain < GAIN_MIN, "{gain}");
        let text = decide(30, &[1.0, 1.0], &at(&[100.0, 50.0])).to_string();
        assert_eq!(text, "ranks take 20, 10 samples a step from now on, by their speed; that wins 33 %");
    }
}
