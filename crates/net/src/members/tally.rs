//! What changes of membership cost: counts, and how long training stood still.

use std::time::Duration;

/// One time during which training stood still.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stall {
    /// From the cause, if it is known, until the coordinator noticed it.
    pub noticing: Duration,
    /// Until all survivors had stopped.
    pub cancelling: Duration,
    /// Until the next generation was connected, had the state, and trained.
    pub reforming: Duration,
}

impl Stall {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.noticing + self.cancelling + self.reforming
    }
}

/// What has happened so far.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Tally {
    /// Ranks of a generation that were lost.
    pub ranks_lost: u64,
    /// Ranks that joined after the first generation.
    pub ranks_joined: u64,
    /// Steps that were begun, not finished, and done again.
    pub steps_redone: u64,
    /// Stalls after losses, in their order.
    pub stalls: Vec<Stall>,
}

/// What a summary says about a run's membership.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TallySummary {
    /// Ranks of a generation that were lost.
    pub ranks_lost: u64,
    /// Ranks that joined after the first generation.
    pub ranks_joined: u64,
    /// Steps that were done again.
    pub steps_redone: u64,
    /// Half of the stalls were at most this long.
    pub stall_us_p50: u64,
    /// Ninety-nine of a hundred were.
    pub stall_us_p99: u64,
    /// The longest.
    pub stall_us_max: u64,
    /// Medians of the parts: noticing, cancelling, forming the next generation.
    pub parts_us_p50: [u64; 3],
}

impl Tally {
    /// Goes on from what another coordinator had counted; its stalls are not known one by one.
    pub fn take_over(&mut self, counted: TallySummary) {
        let TallySummary { ranks_lost, ranks_joined, steps_redone, .. } = counted;
        self.ranks_lost = self.ranks_lost.max(ranks_lost);
        self.ranks_joined = self.ranks_joined.max(ranks_joined);
        self.steps_redone = self.steps_redone.max(steps_redone);
    }

    /// The figures of a summary.
    pub fn summary(&self) -> TallySummary {
        let of = |part: &dyn Fn(&Stall) -> Duration| -> Vec<u64> {
            let mut all: Vec<u64> = self.stalls.iter().map(|stall| part(stall).as_micros() as u64).collect();
            all.sort_unstable();
            all
        };
        let total = of(&Stall::total);
        let parts = [of(&|s| s.noticing), of(&|s| s.cancelling), of(&|s| s.reforming)];
        TallySummary {
            ranks_lost: self.ranks_lost,
            ranks_joined: self.ranks_joined,
            steps_redone: self.steps_redone,
            stall_us_p50: quantile(&total, 50),
            stall_us_p99: quantile(&total, 99),
            stall_us_max: quantile(&total, 100),
            parts_us_p50: parts.map(|part| quantile(&part, 50)),
        }
    }
}

/// The smallest of these ascending numbers that `percent` of them do not exceed; 0 of none.
fn quantile(ascending: &[u64], percent: usize) -> u64 {
    let rank = (ascending.len() * percent).div_ceil(100);
    ascending.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
mod quantiles {
    use super::*;

    #[test]
    fn quantiles_are_numbers_that_occurred() {
        let all: Vec<u64> = (1..=200).collect();
        assert_eq!([50, 99, 100].map(|p| quantile(&all, p)), [100, 198, 200]);
        assert_eq!([50, 99].map(|p| quantile(&[7], p)), [7, 7]);
        assert_eq!(quantile(&[], 99), 0);
    }
}
