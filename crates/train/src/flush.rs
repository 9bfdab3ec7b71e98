//! Where a pipeline that goes on from step to step (`parallel.schedule = "2bw"`) is emptied all the same: a pure function of step
//! numbers and the job's settings.
//!
//! A *run* is a number of steps between two flushes; it is one program, and between runs the weights are those that the last step
//! made. So a run ends
//! - where they are needed: before an evaluation, before a checkpoint that the job asks for after so many steps or epochs, and at the
//!   end of training;
//! - before the short last step of an epoch, which is a run of its own;
//! - after `parallel.flush_every` steps, counted from the last of these places. Requests to stop, and checkpoints after some minutes,
//!   wait for the next end of a run.
//!
//! Gradients are one step old within a run, and not in its first step, so where runs end is part of the numerics. As it depends on
//! nothing but step numbers and settings, training that was stopped at the end of a run goes on with the same runs, and comes to the same
//! bits.
//!
//! Runs of other lengths are other programs. Counting anew from each evaluation or checkpoint keeps them few: two lengths for each distance
//! between such places, the longest and what is left of it.

use crate::job::Job;
use crate::pace::Pace;

/// So many runs are looked at to find out how long they are; those that come later are compiled when they do.
const LOOKED_AT: usize = 10_000;

/// Where runs of steps end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Flushes {
    /// The most steps of a run.
    most: u64,
    /// A run ends where the number of steps done is a multiple of one of these.
    every: Vec<u64>,
    /// Steps of the whole training.
    total: u64,
    /// Whether a run may end before its last step, so that the next one is counted from there.
    ends_early: bool,
}

impl Flushes {
    /// After every step.
    pub fn every_step() -> Flushes {
        Flushes { most: 1, every: Vec::new(), total: 0, ends_early: false }
    }

    /// After `most` steps at most, at multiples of each of `every`, and after `total` steps.
    pub fn new(most: usize, every: Vec<u64>, total: u64) -> Flushes {
        let every = every.into_iter().map(|n| n.max(1)).collect();
        Flushes { most: (most as u64).max(1), every, total, ends_early: false }
    }

    /// The same where a run may end before its last step: `most` steps are counted from wherever one begins, and training that goes on does so where
    /// one ended.
    pub fn that_end_early(self) -> Flushes {
        Flushes { ends_early: true, ..self }
    }

    /// How many steps run without a flush, from this step on.
    pub fn run_from(&self, pace: Pace, step: u64) -> usize {
        if self.most == 1 {
            return 1;
        }
        let (mut begin, mut end) = (0, if step < self.total { self.total } else { u64::MAX });
        let mut multiples = |n: u64, before: u64| {
            // Places `k * n - before`.
            let last = ((step + before) / n * n).saturating_sub(before);
            begin = begin.max(last);
            end = end.min(((step + before) / n + 1).saturating_mul(n) - before);
        };
        self.every.iter().for_each(|n| multiples(*n, 0));
        if pace.tail() > 0 {
            multiples(pace.steps_per_epoch(), 0);
            multiples(pace.steps_per_epoch(), 1);
        }
        let most = self.most;
        if self.ends_early {
            begin = step;
        }
        let end = end.min(begin + ((step - begin) / most + 1) * most);
        usize::try_from(end - step).unwrap_or(1)
    }

    /// The lengths of runs of whole steps, each once, the longest first. At least one.
    pub fn lengths(&self, pace: Pace) -> Vec<usize> {
        let mut lengths = Vec::new();
        let mut step = 0;
        for _ in 0..LOOKED_AT {
            if step >= self.total {
                break;
            }
            let run = self.run_from(pace, step);
            if pace.len(step) == pace.batch && !lengths.contains(&run) {
                lengths.push(run);
            }
            step += run as u64;
        }
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        if lengths.is_empty() { vec![1] } else { lengths }
    }
}

impl Job {
    /// Evaluations come after every so many steps, and at the end.
    pub(crate) fn evaluates_every(&self, pace: Pace) -> u64 {
        self.train.evaluate_every_steps.map_or(pace.steps_per_epoch(), |n| n.max(1))
    }

    /// Checkpoints come after every so many steps, for each of these numbers; others come after some minutes.
    pub(crate) fn saves_every(&self, pace: Pace) -> impl Iterator<Item = u64> + use<> {
        let (steps, epochs) = (self.output.every_steps, self.output.every_epochs);
        let of_epochs = epochs.map(|n| n.max(1).saturating_mul(pace.steps_per_epoch()));
        [steps.map(|n| n.max(1)), of_epochs].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_end_where_weights_are_needed_and_nowhere_twice(
            samples in 1usize..300, batch in 1usize..40, most in 2usize..20, total in 1u64..200,
            every in prop::collection::vec(1u64..60, 0..3), from in 0u64..200,
        ) {
            let pace = Pace { samples, batch: batch.min(samples) };
            let flushes = Flushes::new(most, every.clone(), total);
            let mut ends = vec![0];
            let mut step = 0;
            while step < total {
                let run = flushes.run_from(pace, step);
                prop_assert!((1..=most).contains(&run));
                let whole = (step..step + run as u64).all(|s| pace.len(s) == pace.batch);
                prop_assert!(whole || run == 1, "a short step is alone");
                prop_assert!(!whole || flushes.lengths(pace).contains(&run));
                step += run as u64;
                ends.push(step);
            }
            prop_assert_eq!(step, total);
            for place in 1..total {
                if every.iter().any(|n| place.is_multiple_of(*n)) {
                    prop_assert!(ends.contains(&place), "{} is not the end of a run: {:?}", place, ends);
                }
            }
            // From the middle of a run, training goes on with what is left of it.
            let from = from % total;
            let end = ends.iter().find(|end| **end > from).copied().unwrap();
            prop_assert_eq!(from + flushes.run_from(pace, from) as u64, end);
        }
    }

    #[test]
    fn runs_that_end_early_are_followed_by_long_ones() {
        let pace = Pace { samples: 1000, batch: 10 };
        let flushes = Flushes::new(16, vec![100], 1000);
        let early = flushes.clone().that_end_early();
        assert_eq!([0, 16, 90, 100].map(|step| early.run_from(pace, step)), [16, 16, 10, 16]);
        // After a run that left after 5 steps.
        assert_eq!((flushes.run_from(pace, 5), early.run_from(pace, 5)), (11, 16));
        assert_eq!(early.lengths(pace), flushes.lengths(pace));
    }

    #[test]
    fn there_are_few_lengths() {
        let pace = Pace { samples: 1050, batch: 10 };
        let lengths = |most, every: &[u64]| Flushes::new(most, every.to_vec(), 1000).lengths(pace);
        assert_eq!(lengths(16, &[100]), [16, 4]);
        assert_eq!(lengths(16, &[]), [16, 8]);
        assert_eq!(lengths(16, &[4]), [4]);
        // An epoch of 106 steps, the last one short.
        let pace = Pace { samples: 1051, batch: 10 };
        assert_eq!(Flushes::new(16, vec![106], 106 * 9).lengths(pace), [16, 9]);
        assert_eq!(Flushes::every_step().lengths(pace), [1]);
    }
}
