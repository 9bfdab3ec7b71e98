//! The events of a simulation, in order: two runs of the same seed have the same trace.

use std::fmt;

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SimEvent {
    /// A thread got its turn.
    Ran {
        /// Its rank.
        rank: usize,
        /// Its number.
        task: usize,
    },
    /// Bytes arrived.
    Bytes {
        /// The sending rank.
        from: usize,
        /// The receiving rank.
        to: usize,
        /// How many.
        bytes: usize,
    },
    /// Something else arrived.
    Arrived {
        /// The sending rank.
        from: usize,
        /// The receiving rank.
        to: usize,
        /// What.
        what: &'static str,
    },
    /// Something went wrong: the number of the fault.
    Fault {
        /// Its index in the settings.
        nth: usize,
    },
    /// A thread ended.
    Ended {
        /// Its rank.
        rank: usize,
        /// Its number.
        task: usize,
    },
}

/// All of it, with the virtual time in nanoseconds.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Trace(pub Vec<(u64, SimEvent)>);

impl Trace {
    pub(super) fn add(&mut self, now: u64, event: SimEvent) {
        self.0.push((now, event));
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for (now, event) in &self.0 {
            write!(f, "{:13.6} s  ", *now as f64 / 1e9)?;
            match event {
                SimEvent::Ran { rank, task } => writeln!(f, "rank {rank}: thread {task} goes on")?,
                SimEvent::Bytes { from, to, bytes } => writeln!(f, "{from} -> {to}: {bytes} bytes")?,
                SimEvent::Arrived { from, to, what } => writeln!(f, "{from} -> {to}: {what}")?,
                SimEvent::Fault { nth } => writeln!(f, "fault {nth}")?,
                SimEvent::Ended { rank, task } => writeln!(f, "rank {rank}: thread {task} ends")?,
            }
        }
        Ok(())
    }
}
