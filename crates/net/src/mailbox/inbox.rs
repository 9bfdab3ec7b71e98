//! Letters that have come and were not taken. Senders of this process put them here themselves; those of others have a courier do it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::letter::Letter;
use super::limits::{Class, Limits, fits, weight};
use crate::rendezvous::door::ring;
#[cfg(test)]
use crate::simulation::{Bug, makes};

/// One rank's inbox.
pub(super) struct Inbox {
    limits: Limits,
    state: Mutex<InboxState>,
    /// Something came, or the mailbox was closed.
    pub(super) came: Condvar,
    /// Something was taken.
    pub(super) room: Condvar,
}

/// What is in it, by class.
pub(super) struct InboxState {
    queues: [VecDeque<Letter>; 2],
    /// What counts of each sender: letters that are here, and those of which a part has come.
    held: [Vec<usize>; 2],
    /// Who reads that class from sockets, and whether it waits for room.
    couriers: [Option<Arc<OwnedFd>>; 2],
    starved: [bool; 2],
    /// Whether its owner wants no more.
    pub(super) closed: bool,
}

impl Inbox {
    pub(super) fn new(ranks: usize, limits: Limits) -> Arc<Inbox> {
        let state = InboxState {
            queues: [VecDeque::new(), VecDeque::new()],
            held: [vec![0; ranks], vec![0; ranks]],
            couriers: [None, None],
            starved: [false; 2],
            closed: false,
        };
        Arc::new(Inbox { limits, state: Mutex::new(state), came: Condvar::new(), room: Condvar::new() })
    }

    /// Says what to write to when there is room again for letters that are read from sockets.
    pub(super) fn set_courier(&self, class: Class, wake: Arc<OwnedFd>) {
        self.lock().couriers[class as usize] = Some(wake);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For waits on its conditions.
    pub(super) fn mutex(&self) -> &Mutex<InboxState> {
        &self.state
    }

    /// Makes room for a letter, for a courier; if there is none it is woken when there is.
    pub(super) fn reserve(&self, class: Class, from: usize, bytes: usize) -> bool {
        let mut state = self.lock();
        let reserved = self.admits(&state, class, from, bytes);
        #[cfg(test)]
        let reserved = reserved || makes(Bug::ReadsWithoutRoom);
        match reserved {
            true => state.held[class as usize][from] += weight(bytes),
            false => state.starved[class as usize] = true,
        }
        reserved
    }

    /// Gives back what was reserved for a letter that does not come.
    pub(super) fn release(&self, class: Class, from: usize, bytes: usize) {
        self.lock().release(class, from, bytes);
    }

    /// Whether a letter can be put in now. One that nobody wants any more can.
    pub(super) fn admits(&self, state: &InboxState, class: Class, from: usize, bytes: usize) -> bool {
        let held = state.held[class as usize][from];
        state.closed || fits(held, bytes, self.limits.of(class).inbox_bytes_max)
    }

    /// Puts a letter in for which room was reserved. One that nobody wants any more is dropped.
    pub(super) fn put(&self, letter: Letter) {
        let mut state = self.lock();
        if state.closed {
            return state.release(letter.class, letter.from, letter.len());
        }
        self.push(state, letter);
    }

    /// Puts a letter in that [`Inbox::admits`].
    pub(super) fn give(&self, mut state: MutexGuard<'_, InboxState>, letter: Letter) {
        state.held[letter.class as usize][letter.from] += weight(letter.len());
        self.push(state, letter);
    }

    fn push(&self, mut state: MutexGuard<'_, InboxState>, letter: Letter) {
        state.queues[letter.class as usize].push_back(letter);
        drop(state);
        // All, because each may wait for another class.
        self.came.notify_all();
    }

    /// The first letter of the first of these classes that has one.
    pub(super) fn take(&self, state: &mut InboxState, classes: &[Class]) -> Option<Letter> {
        let letter = classes.iter().find_map(|&class| state.queues[class as usize].pop_front())?;
        let class = letter.class as usize;
        state.release(letter.class, letter.from, letter.len());
        let starved = std::mem::take(&mut state.starved[class]);
        #[cfg(test)]
        let starved = starved && !makes(Bug::ForgetsRoom);
        if let Some(wake) = state.couriers[class].as_ref().filter(|_| starved) {
            ring(wake);
        }
        self.room.notify_all();
        Some(letter)
    }

    /// What counts of all senders together.
    pub(super) fn held_bytes(&self, class: Class) -> usize {
        self.lock().held[class as usize].iter().sum()
    }

    /// Its owner wants no more. What has come can still be taken.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.couriers.iter().flatten().for_each(|wake| ring(wake));
        self.came.notify_all();
        self.room.notify_all();
    }
}

impl InboxState {
    fn release(&mut self, class: Class, from: usize, bytes: usize) {
        self.held[class as usize][from] -= weight(bytes);
    }
}
