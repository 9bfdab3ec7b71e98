//! How long ranks wait for a silent rank, and for one that is alive but stalled.
//!
//! A process that ends is seen at once, by its closed connections or by its pidfd; neither timeout matters for that.
//! They are for a host that vanishes silently, and for a rank that is alive but makes no progress.

use std::time::Duration;

/// The two bounds, the same on all ranks and over all transports. Rank 0 tells the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience {
    /// A rank that is silent for this long is lost. Heartbeats come from a separate thread, so a rank that computes,
    /// reads or writes still sends them; one whose process or machine stands still does not.
    pub silence: Duration,
    /// When no rank makes progress for this long although all are alive, the run ends. A rank that uses its CPU makes
    /// progress.
    pub stall: Duration,
}

/// A machine that swaps, or is moved to another host, may stand still for half a minute.
pub const SILENCE: Duration = Duration::from_secs(60);
/// Longer than any exchange should take; whatever is computed, read or written alone does not count.
pub const STALL: Duration = Duration::from_secs(30 * 60);

/// The time between two heartbeats, unless the silence timeout is very short.
const BEAT: Duration = Duration::from_millis(500);
/// How many heartbeats in a row must be missing.
const BEATS: u32 = 8;

impl Default for Patience {
    fn default() -> Patience {
        Patience { silence: SILENCE, stall: STALL }
    }
}

impl Patience {
    /// The time between two heartbeats.
    pub(crate) fn beat(&self) -> Duration {
        BEAT.min(self.silence / BEATS).max(Duration::from_millis(1))
    }
}
