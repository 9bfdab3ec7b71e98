//! Letters between any two ranks, in any order: what servers, workers and membership say to each other.
//!
//! Links ([`crate::links`]) run moves that both sides know beforehand. A mailbox is for everything else. A rank posts
//! to any other without it expecting that, and takes the next letter from any rank.
//!
//! ```
//! use polyreme_net::Alarm;
//! use polyreme_net::mailbox::{Class, Label, Limits, within};
//!
//! let ranks = within(2, Limits::default(), Alarm::default());
//! let label = Label { kind: 7, ticket: 1, place: 4096 };
//! ranks[0].post(1, Class::Data, label, vec![1, 2, 3])?;
//! let letter = ranks[1].take()?.expect("this mailbox is open");
//! assert_eq!((letter.from, letter.label, &letter[..]), (0, label, &[1, 2, 3][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What holds
//! - Letters of one sender and one class come in the order in which they were posted, each once, and none is left out while
//!   both ranks live and neither has closed. There is no order between senders or between classes.
//! - The two classes share nothing: each has a connection for each pair of ranks that talk, a thread (`courier`) and
//!   bounds. An urgent letter overtakes data wherever they wait: in an outbox, on the wire, or in a full inbox.
//! - Memory is bounded ([`Limits`]). A receiver that does not take stops reading from that sender; TCP stops the
//!   sender's socket; its outbox fills; and its posts wait. Other senders are not held up.
//! - A letter's length is compared with what is allowed before memory is reserved for it.
//! - Every wait ends: with what was waited for, at a time that the caller gives, with the close of this mailbox, or with the
//!   report that all ranks get. Two ranks that only post and never take wait for each other; the control plane reports that as
//!   it does every stall.
//!
//! # Between processes, and inside one
//! Between processes letters go over TCP, whatever carries the collectives, over connections that are made when two
//! ranks first talk ([`crate::rendezvous`]): proved, and sealed between hosts, like all others. Each frame has its number and
//! the generation of the job. Between threads of one process ([`within`]), and from a rank to itself, a post puts the letter
//! into the receiver's inbox, and its bytes are shared. Order, bounds and ends are the same.
//!
//! # Why a connection for each class
//! One connection for frames of both classes would be enough as long as the receiver reads. Once it has no room for
//! data it must stop reading, and everything urgent behind them stops too, unless each class has credits of its own in
//! both directions. TCP has them already, for each connection; a second one costs a file for each pair that talks, and
//! is made only when something is posted in that class.
//!
//! # The end
//! [`Mailbox::close`] sends all that was posted and tells every rank that this one talked with. From then on no rank
//! can post to it, and what still arrives is dropped. Ranks close before they say goodbye to the control plane. A
//! mailbox that is dropped without it looks to the others like a rank that was lost.
//!
//! # Layout
//! `limits`: classes, labels, bounds. `letter`: letters and their memory. `inbox`: letters that arrived. `courier`: the
//! thread of a class. `line`: a connection; `outgoing`, `incoming`, `head`: frames on it. `local`: threads of one
//! process.

mod courier;
mod head;
mod inbox;
mod incoming;
mod letter;
mod limits;
mod line;
mod local;
mod outgoing;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::control::Control;
use crate::links;
use crate::rendezvous::door::Door;
use crate::rendezvous::{Member, WAIT_MAX};
use crate::report::Report;
use crate::system::System;
use courier::{Courier, Route};
use inbox::Inbox;
pub use letter::{Letter, Payload};
pub use limits::{Class, ClassBounds, Label, Limits};
use local::Neighbours;
pub use local::{among, within};

/// How many mailboxes a process may have at the same time; it bounds their numbers.
pub const MAILBOXES_MAX: u8 = 64;
/// The first group number of mailboxes' connections; each mailbox has two.
pub(crate) const GROUPS_FROM: u16 = 0xff00;
/// How often a wait checks the alarm.
const LOOK: Duration = Duration::from_millis(100);
/// The same in simulated time, where nothing wakes a wait.
const SIMULATED_LOOK: Duration = Duration::from_millis(25);

/// The groups of a mailbox's connections, for [`crate::First::Some`]: pairs that are known to talk are connected while ranks join, so that
/// the first letter need not wait for it.
pub fn groups(number: u8) -> [u16; 2] {
    Class::ALL.map(|class| GROUPS_FROM + 2 * u16::from(number.min(MAILBOXES_MAX - 1)) + class as u16)
}

/// Why a letter was not posted.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum PostError {
    /// It is longer than any letter may be.
    #[error("a letter of {bytes} bytes; at most {max} are allowed: split it into several")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The longest that is allowed.
        max: usize,
    },
    /// There was no room in time: the receiver does not take what it has.
    #[error("rank {rank} takes letters more slowly than they are posted: post less, or allow more time")]
    Full {
        /// The receiver.
        rank: usize,
    },
    /// A mailbox was closed: the receiver's, or this one.
    #[error("the mailbox of rank {rank} is closed")]
    Closed {
        /// Whose.
        rank: usize,
    },
    /// The job cannot go on.
    #[error(transparent)]
    Lost(#[from] Report),
}

/// One rank's mailbox. Threads may share it.
pub struct Mailbox {
    system: Arc<dyn System>,
    rank: usize,
    limits: Limits,
    inbox: Arc<Inbox>,
    way: Reached,
}

/// How other ranks are reached.
enum Reached {
    /// They are other processes; a courier for each class.
    Processes([Courier; 2]),
    /// They are threads of this one.
    Threads(Neighbours),
}

/// What a mailbox between processes needs.
pub(crate) struct MailboxOptions<'a> {
    pub(crate) system: Arc<dyn System>,
    /// This rank's place among the members.
    pub(crate) rank: usize,
    /// Those who have a part in it, in the order in which it counts them.
    pub(crate) members: Vec<Member>,
    pub(crate) generation: u64,
    pub(crate) number: u8,
    pub(crate) limits: Limits,
    pub(crate) door: Door,
    pub(crate) control: &'a Control,
}

impl Mailbox {
    /// A mailbox between processes.
    pub(crate) fn start(options: MailboxOptions) -> io::Result<Mailbox> {
        let MailboxOptions { system, rank, members, generation, number, limits, door, control } = options;
        if number >= MAILBOXES_MAX {
            let why = format!("mailbox {number} of at most {MAILBOXES_MAX}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let inbox = Inbox::new(members.len(), limits);
        let members: Arc<[Member]> = members.into();
        let courier = |class: Class| {
            Courier::start(Route {
                system: system.clone(),
                rank,
                members: members.clone(),
                generation,
                class,
                group: groups(number)[class as usize],
                bounds: limits.of(class),
                door: door.clone(),
                alarm: control.alarm(),
                pulse: control.pulse(),
                grace: links::WaitBounds::watched(control.patience()).grace,
                inbox: inbox.clone(),
            })
        };
        let way = Reached::Processes([courier(Class::Urgent)?, courier(Class::Data)?]);
        Ok(Mailbox { system, rank, limits, inbox, way })
    }

    /// This rank, as the mailbox counts those who have a part in it.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Posts a letter to a rank, which may be this one. Waits while there is no room.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn post(
        &self,
        to: usize,
        class: Class,
        label: Label,
        payload: impl Into<Payload>,
    ) -> Result<(), PostError> {
        self.post_until(to, class, label, payload, self.system.now() + WAIT_MAX)
    }

    /// The same with a deadline.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn post_until(
        &self,
        to: usize,
        class: Class,
        label: Label,
        payload: impl Into<Payload>,
        until: Instant,
    ) -> Result<(), PostError> {
        let payload = payload.into();
        let (bytes, max) = (payload.len(), self.limits.of(class).letter_bytes_max);
        if bytes > max {
            return Err(PostError::TooLong { bytes, max });
        }
        let inbox = match &self.way {
            _ if to == self.rank => &self.inbox,
            Reached::Processes(couriers) => return couriers[class as usize].post(to, label, payload, until),
            Reached::Threads(neighbours) => neighbours.inbox(to),
        };
        let letter = Letter::given(self.rank, class, label, payload);
        self.give(inbox, to, letter, until)
    }

    /// The next letter: urgent ones first. None if this mailbox was closed and all that had come was taken.
    pub fn take(&self) -> Result<Option<Letter>, Report> {
        self.take_until(self.system.now() + WAIT_MAX)
    }

    /// The same with a deadline, after which it returns `None`.
    pub fn take_until(&self, until: Instant) -> Result<Option<Letter>, Report> {
        self.take_of(&Class::ALL, until)
    }

    /// The next letter of these classes, for a thread that serves only one.
    pub fn take_of(&self, classes: &[Class], until: Instant) -> Result<Option<Letter>, Report> {
        let mut state = self.inbox.lock();
        loop {
            if let Some(letter) = self.inbox.take(&mut state, classes) {
                return Ok(Some(letter));
            }
            if let Some(report) = self.over() {
                return Err(report);
            }
            let Some(within) = look(&*self.system, until).filter(|_| !state.closed) else { return Ok(None) };
            state = self.system.wait_on(&self.inbox.came, self.inbox.mutex(), state, within);
        }
    }

    /// Bytes of a class that arrived and were not taken, and that were posted and not sent; each letter counts a little
    /// more than its payload.
    pub fn held_bytes(&self, class: Class) -> (usize, usize) {
        let posted = match &self.way {
            Reached::Processes(couriers) => couriers[class as usize].held_bytes(),
            Reached::Threads(_) => 0,
        };
        (self.inbox.held_bytes(class), posted)
    }

    /// Ends it: sends what was posted, tells the others, and waits until they know. What had come can still be taken.
    pub fn close(&self) -> Result<(), Report> {
        self.close_until(self.system.now() + WAIT_MAX).map(drop)
    }

    /// The same with a deadline. Returns whether all was done by then.
    pub fn close_until(&self, until: Instant) -> Result<bool, Report> {
        self.inbox.close();
        let Reached::Processes(couriers) = &self.way else { return Ok(true) };
        couriers.iter().for_each(Courier::begin_close);
        Ok(couriers[0].closed(until)? && couriers[1].closed(until)?)
    }

    /// Puts a letter into an inbox of this process, when there is room.
    fn give(&self, inbox: &Inbox, to: usize, letter: Letter, until: Instant) -> Result<(), PostError> {
        let mut state = inbox.lock();
        loop {
            if let Some(report) = self.over() {
                return Err(PostError::Lost(report));
            }
            if state.closed {
                return Err(PostError::Closed { rank: to });
            }
            if inbox.admits(&state, letter.class, letter.from, letter.len()) {
                inbox.give(state, letter);
                return Ok(());
            }
            let Some(within) = look(&*self.system, until) else { return Err(PostError::Full { rank: to }) };
            state = self.system.wait_on(&inbox.room, inbox.mutex(), state, within);
        }
    }

    fn over(&self) -> Option<Report> {
        match &self.way {
            Reached::Processes(couriers) => couriers.iter().find_map(Courier::over),
            Reached::Threads(neighbours) => neighbours.alarm().raised(),
        }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        if let Reached::Threads(neighbours) = &self.way
            && !self.inbox.lock().closed
        {
            neighbours.lose(self.rank);
        }
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Mailbox of rank {}", self.rank)
    }
}

/// How long to wait before the alarm is checked again; `None` at the deadline.
fn look(system: &dyn System, until: Instant) -> Option<Duration> {
    let left = until.saturating_duration_since(system.now());
    let look = if system.is_simulated() { SIMULATED_LOOK } else { LOOK };
    (!left.is_zero()).then_some(left.min(look))
}
