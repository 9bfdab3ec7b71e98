//! Steps that are slowed down on purpose (`--chaos "sleep=20ms,slow=80ms@0.1,slow_rank=3:4x"`): what a way to agree makes of ranks of uneven
//! speed can be seen on one host, and seen again.
//!
//! How long a rank sleeps before a step is a function of seed, rank and step, so a run can be repeated, and two ways to agree meet the
//! same steps. Nothing that is learnt depends on it, unless ranks take steps as they come to them.

use std::time::Duration;

use crate::draw::Draw;

/// How steps are slowed down.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Slowness {
    /// How long each rank sleeps in each of its steps.
    pub sleep: Duration,
    /// How long it sleeps instead in some of them, and in which share.
    pub slow: Option<(Duration, f64)>,
    /// Ranks that take so many times as long as they would: sleeping and computing.
    pub ranks: Vec<(usize, f64)>,
    /// From which slow steps are drawn.
    pub seed: u64,
}

impl Slowness {
    /// Whether any step is slowed down.
    pub fn is_any(&self) -> bool {
        !self.sleep.is_zero() || self.slow.is_some() || !self.ranks.is_empty()
    }

    /// How long a rank sleeps in a step, if computing one takes it `computes`.
    pub fn pause(&self, rank: usize, step: u64, computes: Duration) -> Duration {
        let slow = self.slow.filter(|(_, share)| self.draw(rank, step) < *share);
        let sleep = slow.map_or(self.sleep, |(sleep, _)| sleep);
        match self.ranks.iter().find(|(slowed, _)| *slowed == rank) {
            Some((_, times)) => sleep.mul_f64(*times) + computes.mul_f64(times - 1.0),
            None => sleep,
        }
    }

    /// In (0, 1). A stream of its own for each rank and step: which rank does which step may be decided while they run.
    fn draw(&self, rank: usize, step: u64) -> f64 {
        let stream = Draw::new(self.seed).bits() ^ Draw::new(step).bits().rotate_left(21);
        Draw::new(stream ^ Draw::new(rank as u64).bits().rotate_left(42)).uniform()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn slow_steps_are_as_many_as_asked_for_and_each_ranks_own() {
        let slowness = Slowness { sleep: 20 * MS, slow: Some((80 * MS, 0.1)), ranks: vec![], seed: 1 };
        let of = |slowness: &Slowness, rank| -> Vec<bool> {
            (0..10_000).map(|step| slowness.pause(rank, step, MS) == 80 * MS).collect()
        };
        let slow = |all: &[bool]| all.iter().filter(|slow| **slow).count();
        let ranks: Vec<_> = (0..4).map(|rank| of(&slowness, rank)).collect();
        for all in &ranks {
            assert!((900..1100).contains(&slow(all)), "{}", slow(all));
        }
        // 1 - 0.9^4 of the steps are slow on some rank.
        let together = (0..10_000).filter(|k| ranks.iter().any(|all| all[*k])).count();
        assert!((3300..3580).contains(&together), "{together}");
        assert_eq!(of(&slowness, 2), ranks[2]);
        assert_ne!(of(&Slowness { seed: 2, ..slowness }, 2), ranks[2]);
    }

    #[test]
    fn a_slow_rank_sleeps_for_what_it_computes_too() {
        let slowness = Slowness { ranks: vec![(3, 4.0)], ..Slowness::default() };
        assert!(slowness.is_any() && !Slowness::default().is_any());
        assert_eq!(slowness.pause(3, 9, 10 * MS), 30 * MS);
        assert_eq!(slowness.pause(2, 9, 10 * MS), Duration::ZERO);
        let slowness = Slowness { sleep: 20 * MS, ..slowness };
        assert_eq!(slowness.pause(3, 9, 10 * MS), 110 * MS);
        assert_eq!(slowness.pause(0, 9, 10 * MS), 20 * MS);
    }
}
