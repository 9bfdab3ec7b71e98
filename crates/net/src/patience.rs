//! How long ranks wait for one of which nothing is heard, and for one that lives.
//!
//! A process that ends is seen at once, by its closed connections or by its pidfd; neither bound has to do with that. They
//! are for a host that vanishes without a word, and for a rank that lives and does not get on.

use std::time::Duration;

/// The two bounds, the same on all ranks and over all transports. Rank 0 says them to the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// A rank of which nothing is heard for so long is lost. Its signs of life come from a thread of their own, so a rank
    /// that computes, reads or writes is heard; one whose process or machine stands still is not.
    pub silence: Duration,
    /// When no rank gets on for so long, though all of them live, the run ends. A rank that uses its processor gets on.
    pub stall: Duration,
}

/// A machine that swaps, or is moved to another host, may stand still for half a minute.
pub const SILENCE: Duration = Duration::from_secs(60);
/// Longer than any exchange should take; whatever is computed, read or written alone does not count.
pub const STALL: Duration = Duration::from_secs(30 * 60);

/// Between two signs of life, unless silence is judged very soon.
const BEAT: Duration = Duration::from_millis(500);
/// So many signs of life in a row must be missing.
const BEATS: u32 = 8;

impl Default for Patience {
    fn default() -> Patience {
        Patience { silence: SILENCE, stall: STALL }
    }
}

impl Patience {
    /// Between two signs of life.
    pub(crate) fn beat(&self) -> Duration {
        BEAT.min(self.silence / BEATS).max(Duration::from_millis(1))
    }
}
