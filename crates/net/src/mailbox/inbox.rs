//! Letters that have arrived and were not taken. Senders in this process put them here directly; for those of other
//! processes a courier does.

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
    /// How much of its bound each sender uses: letters that are here, and those that have arrived in part.
    held: [Vec<usize>; 2],
    /// Who reads that class from sockets, and whether it waits for room.
    couriers: [Option<Arc<OwnedFd>>; 2],
    starved: [bool; 2],
    /// Whether its owner has closed it.
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

    /// Sets what to wake when there is room again for letters from sockets.
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

    /// Reserves room for a letter on behalf of a courier; if there is none, the courier is woken when there is.
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

    /// Whether a letter can be put in now. A closed inbox takes letters and drops them.
    pub(super) fn admits(&self, state: &InboxState, class: Class, from: usize, bytes: usize) -> bool {
        let held = state.held[class as usize][from];
        state.closed || fits(held, bytes, self.limits.of(class).inbox_bytes_max)
    }

    /// Puts a letter in for which room was reserved. A closed inbox drops it.
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
        // Wakes all, because each may wait for another class.
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

    /// How much all senders together use.
    pub(super) fn held_bytes(&self, class: Class) -> usize {
        self.lock().held[class as usize].iter().sum()
    }

    /// Closes it. Letters that have arrived can still be taken.
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
