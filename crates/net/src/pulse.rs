//! Where a rank is in the job and whether it makes progress, cheap enough to record around every exchange.
//!
//! A rank's [`Pulse`] is two words that its own threads write and others read. The control plane sends them with every
//! heartbeat, so that a report can say where a rank was, a long wait can say which rank it waits for, and a stalled run
//! can be ended.
//!
//! A rank that computes, reads or writes for half an hour without an exchange does not show up here. Its process uses
//! the CPU all the while, though, and one that waits does not: [`Effort`] tells the two apart.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a rank does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Doing {
    /// Its process has joined the others.
    Start,
    /// Anything that it does alone.
    OwnWork,
    /// Opening data and measuring them.
    Preparing,
    /// Reading weights.
    Loading,
    /// Evaluating.
    Evaluating,
    /// Writing a checkpoint or the model.
    Saving,
    /// A barrier. Everything from here on is an exchange, in which it waits for others.
    Barrier,
    /// An all-reduce.
    AllReduce,
    /// As above.
    ReduceScatter,
    /// As above.
    AllGather,
    /// As above.
    Broadcast,
    /// As above.
    Gather,
    /// As above.
    Scatter,
    /// As above.
    AllToAll,
    /// As above.
    Send,
    /// As above.
    Receive,
    /// Making shared memory.
    Block,
    /// The last exchange.
    Finish,
}

impl Doing {
    const ALL: [(Doing, &str); 18] = [
        (Doing::Start, "start"),
        (Doing::OwnWork, "its own work"),
        (Doing::Preparing, "preparing data"),
        (Doing::Loading, "loading weights"),
        (Doing::Evaluating, "evaluating"),
        (Doing::Saving, "saving"),
        (Doing::Barrier, "barrier"),
        (Doing::AllReduce, "all-reduce"),
        (Doing::ReduceScatter, "reduce-scatter"),
        (Doing::AllGather, "all-gather"),
        (Doing::Broadcast, "broadcast"),
        (Doing::Gather, "gather"),
        (Doing::Scatter, "scatter"),
        (Doing::AllToAll, "all-to-all"),
        (Doing::Send, "send"),
        (Doing::Receive, "receive"),
        (Doing::Block, "sharing memory"),
        (Doing::Finish, "finish"),
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        Doing::ALL[self as usize].1
    }

    /// Whether it waits for other ranks in it.
    pub fn waits(self) -> bool {
        self as u8 >= Doing::Barrier as u8
    }

    pub(crate) fn of_code(code: u8) -> Option<Doing> {
        Doing::ALL.get(usize::from(code)).map(|(doing, _)| *doing)
    }
}

/// Where a rank is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// The step.
    pub step: u64,
    /// What it does there.
    pub doing: Doing,
    /// Changes with every exchange that it enters or leaves.
    pub count: u64,
    /// Changes while its process uses the CPU; see [`Effort`].
    pub effort: u64,
}

impl Position {
    /// The position before anything was recorded.
    pub const START: Position = Position { step: 0, doing: Doing::Start, count: 0, effort: 0 };
}

/// Where one rank is, as its threads record it. Clones share it.
#[derive(Clone, Default, Debug)]
pub struct Pulse(Arc<PulseWords>);

/// Alone on their cache line: written around every exchange, read rarely.
#[derive(Default, Debug)]
#[repr(align(128))]
struct PulseWords {
    /// The step in the upper 56 bits, and what it does.
    place: AtomicU64,
    count: AtomicU64,
}

impl Pulse {
    /// Records where this rank is. Costs two stores.
    pub fn at(&self, step: u64, doing: Doing) {
        self.0.place.store(step << 8 | doing as u64, Ordering::Relaxed);
        // Two threads at the same time may count as one: it has changed all the same.
        self.0.count.store(self.0.count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Where this rank is.
    pub fn place(&self) -> Position {
        let place = self.0.place.load(Ordering::Relaxed);
        let doing = Doing::of_code(place as u8).unwrap_or(Doing::OwnWork);
        Position { step: place >> 8, doing, count: self.0.count.load(Ordering::Relaxed), effort: 0 }
    }
}

/// The rank to name when none makes progress: one that works alone before one that waits, and among those the one
/// furthest behind.
pub fn furthest_behind<'a>(places: impl Iterator<Item = (usize, &'a Position)>) -> Option<usize> {
    places.min_by_key(|(_, place)| (place.doing.waits(), place.step)).map(|(rank, _)| rank)
}

/// How often CPU time is sampled.
const WINDOW: Duration = Duration::from_secs(1);
/// A process that waits wakes up ten times a second per rank, and uses less than this share of a core; one that reads
/// from a slow disk uses more.
const WORKING_SHARE: f64 = 0.02;

/// Whether a process works, judged by its CPU time.
#[derive(Debug)]
pub struct Effort {
    since: Instant,
    used: Duration,
}

impl Effort {
    /// Starts to measure now.
    pub fn new(now: Instant, used: Duration) -> Effort {
        Effort { since: now, used }
    }

    /// Whether it has worked since the last sample; `None` if that was too recent. `used` is the CPU time so far.
    pub fn worked(&mut self, now: Instant, used: Duration) -> Option<bool> {
        let window = now.saturating_duration_since(self.since);
        if window < WINDOW {
            return None;
        }
        let share = used.saturating_sub(self.used).as_secs_f64() / window.as_secs_f64();
        *self = Effort { since: now, used };
        Some(share > WORKING_SHARE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read() {
        let pulse = Pulse::default();
        assert_eq!(pulse.place(), Position::START);
        for (i, (doing, _)) in Doing::ALL.into_iter().enumerate() {
            assert_eq!(doing as usize, i, "the table has the order of the names");
            pulse.at(1 << 40, doing);
            assert_eq!(pulse.place(), Position { step: 1 << 40, doing, count: i as u64 + 1, effort: 0 });
        }
        assert!(Doing::AllReduce.waits() && !Doing::Saving.waits());
    }

    #[test]
    fn the_rank_that_works_alone_is_the_one_that_others_wait_for() {
        let place = |step, doing| Position { step, doing, ..Position::START };
        let check = |places: &[Position], rank| {
            assert_eq!(furthest_behind(places.iter().enumerate()), rank, "{places:?}");
        };
        check(&[place(7, Doing::AllReduce), place(7, Doing::OwnWork), place(7, Doing::AllReduce)], Some(1));
        check(&[place(7, Doing::AllReduce), place(7, Doing::AllReduce), place(6, Doing::AllReduce)], Some(2));
        check(&[place(7, Doing::Saving), place(6, Doing::OwnWork)], Some(1));
        check(&[], None);
    }

    #[test]
    fn a_process_that_waits_does_not_work_and_one_that_reads_does() {
        let start = Instant::now();
        let mut effort = Effort::new(start, Duration::ZERO);
        let mut look = |s: u64, used_ms: u64| {
            effort.worked(start + Duration::from_secs(s), Duration::from_millis(used_ms))
        };
        assert_eq!(look(0, 900), None);
        assert_eq!(look(1, 900), Some(true));
        assert_eq!(look(2, 901), Some(false));
        assert_eq!(look(12, 921), Some(false));
        assert_eq!(look(13, 950), Some(true));
    }
}
