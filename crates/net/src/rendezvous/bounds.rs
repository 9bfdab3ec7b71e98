//! How long the steps of joining and connecting may take. All of them grow with the number of ranks: rank 0 talks with
//! all, every rank gets a table of all, and those of one host share its cores.

use std::time::Duration;

use crate::patience::Patience;

/// A fixed part, and one for each rank.
const fn grown(first: Duration, each: Duration, ranks: usize) -> Duration {
    first.saturating_add(each.saturating_mul(ranks as u32))
}

/// The check of the pairs that talk first, or of one that talks later, takes this long at most if every rank runs.
const MESH_TIME: Duration = Duration::from_secs(10);
const MESH_TIME_PER_RANK: Duration = Duration::from_millis(50);

/// How long pairs may take to be connected: one of the ranks may stand still for as long as patience lasts.
pub(crate) fn mesh_time(ranks: usize, patience: Patience) -> Duration {
    grown(MESH_TIME, MESH_TIME_PER_RANK, ranks) + patience.silence
}

/// Time for a message to get through. Rank 0 sends every rank a table of all, about 200 bytes for each: 40 MB for 450 ranks,
/// which take 3.5 s on a line of 100 Mbit/s.
const SLACK: Duration = Duration::from_secs(3);
const SLACK_PER_RANK: Duration = Duration::from_millis(20);

/// Time for a message from rank 0 to get through to this many ranks, or from them to it.
pub(crate) fn slack(ranks: usize) -> Duration {
    grown(SLACK, SLACK_PER_RANK, ranks)
}

/// Time for an unknown peer to prove that it is a rank: ranks need milliseconds, if they have a core.
const STRANGER_TIME: Duration = Duration::from_secs(2);
const STRANGER_TIME_PER_RANK: Duration = Duration::from_millis(10);

/// Time to prove the secret to a listener that this many ranks may connect to at once.
pub(crate) fn stranger_time(ranks: usize) -> Duration {
    grown(STRANGER_TIME, STRANGER_TIME_PER_RANK, ranks)
}

/// A connection that is not made and proved in this time is tried again. Longer than a stranger has, so that the
/// listener gives up first and reports it.
const DIAL_TIME: Duration = Duration::from_secs(3);
const DIAL_TIME_PER_RANK: Duration = Duration::from_millis(15);

/// Time to connect to a listener that this many ranks may connect to at once, and to prove the secret to it.
pub(crate) fn dial_time(ranks: usize) -> Duration {
    grown(DIAL_TIME, DIAL_TIME_PER_RANK, ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_grow_with_ranks_and_keep_their_order() {
        for ranks in [1, 2, 64, 1000, super::super::RANKS_MAX] {
            assert!(dial_time(ranks) > stranger_time(ranks), "{ranks} ranks");
            assert!(mesh_time(ranks, Patience::default()) > 2 * dial_time(ranks), "{ranks} ranks");
            for bound in [stranger_time, dial_time, slack] {
                assert!(bound(ranks + 1) > bound(ranks), "{ranks} ranks");
            }
        }
    }
}
