//! When a wait on shared memory is too long: no rank has made progress, and the process uses no CPU.
//!
//! Ranks that are processes have a control plane that decides this for all of them, and no timeout here. Ranks that are
//! threads of one process live and die together; a wait of theirs ends only when no rank makes progress and the process
//! does not use the CPU either: one that computes, reads or writes for an hour is waited for.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use polyreme_net::control::{Voice, Waiting};
use polyreme_net::pulse::Effort;
use polyreme_net::{Os, Pulse, System};

/// After this long a wait is announced, again after twice as long, and so on.
const LONG_WAIT: Duration = Duration::from_secs(10);

/// How long the waits of one rank may take, and when they are announced.
pub(super) struct Lateness {
    stall: Duration,
    /// Where the ranks are, if they are threads of this process.
    pulses: Vec<Pulse>,
    voice: Option<Voice>,
    seen: RefCell<Seen>,
}

struct Seen {
    effort: Effort,
    /// The sum of all ranks' counters, and when it last changed or the process last used the CPU.
    count: u32,
    moved: Instant,
    /// How long the wait must be for the next announcement.
    word: Duration,
}

impl Lateness {
    pub(super) fn new(stall: Duration, pulses: Vec<Pulse>) -> Lateness {
        let now = Instant::now();
        let effort = Effort::new(now, Os.processor_time());
        let seen = Seen { effort, count: 0, moved: now, word: LONG_WAIT };
        Lateness { stall, pulses, voice: None, seen: RefCell::new(seen) }
    }

    pub(super) fn set_voice(&mut self, voice: Voice) {
        self.voice = Some(voice);
    }

    /// Judges a wait whose counter has not moved for `quiet`; `count` is the sum of all ranks' counters. Returns for
    /// how long nothing has moved, if that is too long.
    pub(super) fn judge(&self, quiet: Duration, count: u32) -> Option<Duration> {
        if self.stall == Duration::MAX {
            return None;
        }
        let now = Instant::now();
        let mut seen = self.seen.borrow_mut();
        let worked = seen.effort.worked(now, Os.processor_time()) == Some(true);
        if worked || count != seen.count {
            (seen.count, seen.moved) = (count, now);
        }
        let still = quiet.min(now.saturating_duration_since(seen.moved));
        (still >= self.stall).then_some(still)
    }

    /// Announces which rank a long wait is for.
    pub(super) fn say(&self, quiet: Duration, late: usize) {
        let (Some(voice), Some(pulse)) = (&self.voice, self.pulses.get(late)) else { return };
        let mut seen = self.seen.borrow_mut();
        if quiet < LONG_WAIT {
            seen.word = LONG_WAIT;
        } else if quiet >= seen.word {
            seen.word *= 2;
            let ms = quiet.as_millis() as u64;
            voice(&Waiting { ms, rank: late, host: String::new(), place: pulse.place() });
        }
    }
}
