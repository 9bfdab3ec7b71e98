//! Mailboxes of threads of one process: senders put letters directly into the receiver's inbox.

use std::sync::Arc;

use super::inbox::Inbox;
use super::limits::Limits;
use super::{Mailbox, Reached};
use crate::alarm::Alarm;
use crate::report::{Cause, Report};
use crate::system::Os;

/// The inboxes of all ranks, and what ends their waits.
#[derive(Clone)]
pub(super) struct Neighbours {
    /// What the job calls each.
    names: Arc<[usize]>,
    inboxes: Arc<[Arc<Inbox>]>,
    alarm: Alarm,
}

/// Mailboxes for `ranks` threads of this process; the alarm ends the waits of all. A rank whose mailbox is
/// dropped before it was closed is lost.
pub fn within(ranks: usize, limits: Limits, alarm: Alarm) -> Vec<Mailbox> {
    among(&(0..ranks).collect::<Vec<_>>(), limits, alarm)
}

/// The same for some ranks of a job, in this order. Reports name them as the job does.
pub fn among(names: &[usize], limits: Limits, alarm: Alarm) -> Vec<Mailbox> {
    let inboxes = names.iter().map(|_| Inbox::new(names.len(), limits)).collect();
    let neighbours = Neighbours { names: names.into(), inboxes, alarm };
    let mailbox = |(rank, inbox): (usize, &Arc<Inbox>)| {
        let (system, way) = (Arc::new(Os), Reached::Threads(neighbours.clone()));
        Mailbox { system, rank, limits, inbox: inbox.clone(), way }
    };
    neighbours.inboxes.iter().enumerate().map(mailbox).collect()
}

impl Neighbours {
    pub(super) fn inbox(&self, rank: usize) -> &Inbox {
        &self.inboxes[rank]
    }

    pub(super) fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// A rank ended without closing: all waits end at once.
    pub(super) fn lose(&self, rank: usize) {
        let (rank, op) = (self.names[rank], "mailbox".to_owned());
        self.alarm.raise(Report { rank, host: String::new(), step: 0, op, cause: Cause::Gone });
        for inbox in self.inboxes.iter() {
            inbox.came.notify_all();
            inbox.room.notify_all();
        }
    }
}
