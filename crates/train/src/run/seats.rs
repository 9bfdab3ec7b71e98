//! How many ranks there are, and how many threads each has, where the job leaves it open: a pure function.
//!
//! Ranks need no meeting inside a step, threads of one rank meet at every product; so ranks come first, as long as
//! each has enough samples to keep its kernels busy. Batch norm takes its statistics from a rank's own samples (unless
//! they are synchronised), so there a rank has more.

use crate::job::{Balance, ParallelSpec};

/// The fewest samples of a rank that is started without having been asked for.
const SAMPLES_MIN: usize = 16;
/// The same where statistics are taken from them.
const STATISTICS_MIN: usize = 32;

/// Who sits where on one machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seats {
    /// Ranks.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
}

/// What a job on a machine of `cores` cores comes to. `batch` is a whole step's; `has_statistics` says whether the
/// network takes statistics from the samples that it sees together.
pub fn seats(spec: &ParallelSpec, cores: usize, batch: usize, has_statistics: bool) -> Seats {
    let cores = cores.max(1);
    let each = spec.replica_ranks();
    let asked = match &spec.balance {
        Balance::Given(weights) => spec.asked_ranks().or(Some(weights.len() * each)),
        _ => spec.asked_ranks(),
    };
    // Copies of the model, each on `each` ranks.
    let room = (cores / spec.threads.unwrap_or(1) / each).max(1);
    let ranks = asked.unwrap_or_else(|| {
        let least = if has_statistics && !spec.sync_batch_norm { STATISTICS_MIN } else { SAMPLES_MIN };
        let most = match spec.reproducible {
            true => spec.shards,
            false => (batch / least).max(1),
        };
        // Cores that cannot be split evenly would idle.
        (1..=room.min(most)).rev().find(|r| room.is_multiple_of(*r)).unwrap_or(1) * each
    });
    let threads = spec.threads.unwrap_or_else(|| (cores / ranks).max(1));
    Seats { ranks, threads }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_become_ranks_as_far_as_samples_go() {
        let check = |spec: ParallelSpec, cores, batch, statistics, want: (usize, usize)| {
            let got = seats(&spec, cores, batch, statistics);
            assert_eq!((got.ranks, got.threads), want, "{spec:?}, {cores} cores, batch {batch}");
        };
        let auto = ParallelSpec::default;
        check(auto(), 2, 64, false, (2, 1));
        check(auto(), 8, 64, false, (4, 2));
        check(auto(), 64, 64, false, (4, 16));
        check(auto(), 6, 64, false, (3, 2));
        check(auto(), 8, 64, true, (2, 4));
        check(ParallelSpec { sync_batch_norm: true, ..auto() }, 8, 64, true, (4, 2));
        check(auto(), 4, 8, false, (1, 4));
        check(auto(), 0, 64, false, (1, 1));
        check(ParallelSpec { ranks: Some(3), ..auto() }, 8, 4, true, (3, 2));
        check(ParallelSpec { ranks: Some(3), ..auto() }, 2, 64, true, (3, 1));
        check(ParallelSpec { threads: Some(2), ..auto() }, 8, 64, false, (4, 2));
        check(ParallelSpec { threads: Some(16), ..auto() }, 8, 64, false, (1, 16));
        check(ParallelSpec { balance: Balance::Given(vec![1.0, 2.0]), ..auto() }, 8, 64, false, (2, 4));
        check(ParallelSpec { reproducible: true, ..auto() }, 32, 64, true, (8, 4));
    }
}
