//! What a simulated network is like, and what goes wrong in it.

use std::ops::Range;
use std::time::Duration;

/// A network and the machines on it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long bytes are under way.
    pub delay: Range<Duration>,
    /// How many packets in a thousand are lost: they, and all behind them, arrive when they have been sent again.
    pub losses: u32,
    /// How late a thread may run after what it waited for has arrived: most run much sooner, a few this late.
    pub lag: Duration,
    /// Size of a socket's buffer.
    pub buffer_bytes: usize,
    /// The run must end by then, or some wait never ended.
    pub time_max: Duration,
    /// What goes wrong, and when.
    pub faults: Vec<(Duration, Fault)>,
    /// A bug that is planted on purpose.
    pub bug: Option<Bug>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            delay: Duration::from_micros(50)..Duration::from_micros(500),
            losses: 0,
            lag: Duration::from_millis(1),
            buffer_bytes: 64 << 10,
            time_max: Duration::from_secs(3600),
            faults: Vec::new(),
            bug: None,
        }
    }
}

/// Something that goes wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A rank's threads do not run: its process is stopped, or its machine swaps. Its sockets stay open.
    Pause {
        /// Which rank.
        rank: usize,
        /// For how long.
        time: Duration,
    },
    /// A rank's first thread does not run, its others do.
    PauseMain {
        /// Which rank.
        rank: usize,
        /// For how long.
        time: Duration,
    },
    /// Nothing gets through between these ranks and the others; what was sent comes later.
    Hold {
        /// One side.
        ranks: Vec<usize>,
        /// For how long.
        time: Duration,
    },
    /// Nothing gets through between two ranks any more, in either direction, and neither is told.
    Part {
        /// One side.
        one: usize,
        /// The other side.
        other: usize,
    },
    /// One connection between two ranks breaks: both see its end, and what was under way may be lost.
    Cut {
        /// One side.
        one: usize,
        /// The other side.
        other: usize,
        /// Which of the connections between them, in the order in which they were made.
        nth: usize,
    },
    /// A rank's process is killed: its connections close.
    Kill {
        /// Which rank.
        rank: usize,
    },
    /// A rank's machine loses power: nothing more comes from it, not even the end of its connections.
    Vanish {
        /// Which rank.
        rank: usize,
    },
}

/// A bug that is planted on purpose, to show that a check finds it. Those of ranks exist in tests of this crate only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// The network delivers some bytes twice.
    Doubles,
    /// The network drops some bytes without a trace.
    Drops,
    /// The network lets some bytes overtake others.
    Overtakes,
    /// A rank does not ask rank 0 before it reports another one.
    JudgesAlone,
    /// A rank does not send on a report.
    KeepsReports,
    /// A rank takes the time in which it was stopped itself for silence of the others.
    JudgesAcrossPauses,
    /// A rank sends heartbeats only with other messages.
    ForgetsBeats,
    /// A rank leaves without a goodbye.
    ForgetsGoodbye,
    /// A run over links does not look at the alarm.
    IgnoresAlarm,
    /// A rank that wants to talk with a higher one waits until that one wants to.
    NeverCalls,
    /// A rank drops a connection that comes before it wants to talk.
    TakesOnlyWhatItWants,
    /// A mailbox reads letters for which its inbox has no room.
    ReadsWithoutRoom,
    /// A mailbox that has room again does not go on reading.
    ForgetsRoom,
    /// A mailbox that is closed does not wait until its letters are sent.
    ClosesAtOnce,
}
