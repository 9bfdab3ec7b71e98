//! A coordinator that holds its post in a store: a thread that renews it, and that writes the record of each generation before its ranks
//! are told of it.
//!
//! While the store cannot be reached, the coordinator stays and decides nothing new: a record that is not written holds back what
//! ranks would be told, and they train on. A coordinator ends when the store says that another one has its post, and not before:
//! as long as nobody can ask the store, nobody can have it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::store::{Begins, GenerationRecord, MemberStore, Post, Term};
use crate::system::{Os, System};

/// The pause between two tries to reach the store.
const PAUSE: Duration = Duration::from_millis(50);

/// How many times the post is renewed before it would lapse.
const RENEWALS: u32 = 4;

struct TenureShared {
    wake: OwnedFd,
    /// Records that are not written yet.
    pending: AtomicUsize,
    /// Whether the thread is to end without waiting for the store.
    ends: AtomicBool,
    /// When it was asked for the last time whether the post is held, and it was: nobody can have it until it has lapsed from then.
    held_at: Mutex<Instant>,
    /// Why the post is lost, if it is.
    lost: Mutex<Option<String>>,
}

/// The post of a coordinator.
pub struct Tenure {
    shared: Arc<TenureShared>,
    /// The last generation when the post was taken.
    record: Option<GenerationRecord>,
    lapses_after: Duration,
    asks: Sender<TenureAsk>,
    thread: Option<JoinHandle<()>>,
    /// Whether the run is over.
    over: bool,
}

enum TenureAsk {
    Commit(GenerationRecord),
    Resign { over: bool },
}

impl Tenure {
    /// Holds a post that was taken.
    pub fn hold(store: Arc<dyn MemberStore>, post: Post, term: Term) -> io::Result<Tenure> {
        let shared = Arc::new(TenureShared {
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            pending: AtomicUsize::new(0),
            ends: AtomicBool::new(false),
            held_at: Mutex::new(Instant::now()),
            lost: Mutex::default(),
        });
        let lapses_after = store.lapses_after();
        let (asks, asked) = channel();
        let record = term.record.clone();
        let holder = Holder { store, post, term, written: record.clone(), shared: shared.clone(), asked };
        let body = move || holder.run();
        let thread = Os.spawn("tenure", Box::new(body))?;
        Ok(Tenure { shared, record, lapses_after, asks, thread: Some(thread), over: false })
    }

    /// The last generation when the post was taken.
    pub fn record(&self) -> Option<&GenerationRecord> {
        self.record.as_ref()
    }

    /// Writes the record of a generation. Until [`Tenure::waits`] says no, no rank may be told of it.
    pub(super) fn commit(&self, record: GenerationRecord) {
        self.shared.pending.fetch_add(1, Ordering::AcqRel);
        // The thread ends only when the post is lost, which `check` says.
        let _ = self.asks.send(TenureAsk::Commit(record));
    }

    /// Whether a record is not written yet.
    pub(super) fn waits(&self) -> bool {
        self.shared.pending.load(Ordering::Acquire) > 0
    }

    /// Whether no other process can have the post. It is not sure after this process was paused, or the store was away, for as long as
    /// a post holds.
    pub(super) fn is_sure(&self, now: Instant) -> bool {
        let held_at = *self.shared.held_at.lock().unwrap_or_else(PoisonError::into_inner);
        now < held_at + self.lapses_after
    }

    /// Fails if another process has the post. What woke the caller is forgotten.
    pub(super) fn check(&self) -> io::Result<()> {
        // It fails if nothing woke the caller.
        let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        let lost = self.shared.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.as_ref().map_or(Ok(()), |why| Err(io::Error::other(why.clone())))
    }

    /// The run is over: the next one under the same name begins anew.
    pub(super) fn is_over(&mut self) {
        self.over = true;
    }
}

impl AsFd for Tenure {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        // If the thread has ended, the post is lost.
        let _ = self.asks.send(TenureAsk::Resign { over: self.over });
        self.thread.take().map(JoinHandle::join);
    }
}

struct Holder {
    store: Arc<dyn MemberStore>,
    post: Post,
    term: Term,
    /// The record as it was written last.
    written: Option<GenerationRecord>,
    shared: Arc<TenureShared>,
    asked: Receiver<TenureAsk>,
}

impl Holder {
    fn run(mut self) {
        let renewal = self.store.lapses_after() / RENEWALS;
        loop {
            let holds = match self.asked.recv_timeout(renewal) {
                Ok(TenureAsk::Commit(record)) => {
                    let holds = self.insist(|store, term| store.commit(term, &record));
                    if holds {
                        self.written = Some(record);
                        self.shared.pending.fetch_sub(1, Ordering::AcqRel);
                    }
                    holds
                }
                Ok(TenureAsk::Resign { over }) => {
                    // If it fails, the post lapses.
                    let _ = self.store.resign(&self.term, over);
                    return;
                }
                Err(RecvTimeoutError::Timeout) => self.insist(|store, term| store.renew(term)),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let ends = self.shared.ends.load(Ordering::Acquire);
            if !holds && !ends {
                let why = "another process coordinates this run now, and this one ends".to_string();
                *self.shared.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
            }
            // It fails only if the counter is full, and then the coordinator is awake anyway.
            let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
            if !holds && !ends {
                return;
            }
        }
    }

    /// Asks until there is an answer; takes the post again if it has lapsed and nobody else had it. Whether it is held.
    fn insist(&mut self, ask: impl Fn(&dyn MemberStore, &Term) -> io::Result<bool>) -> bool {
        while !self.shared.ends.load(Ordering::Acquire) {
            let asked_at = Instant::now();
            match ask(&*self.store, &self.term) {
                Ok(true) => {
                    *self.shared.held_at.lock().unwrap_or_else(PoisonError::into_inner) = asked_at;
                    return true;
                }
                Ok(false) => match self.store.claim(&self.post, 0, Begins::GoesOn) {
                    // Another one that came and went has written a record.
                    Ok(Some(term)) if term.record != self.written => {
                        let _ = self.store.resign(&term, false);
                        return false;
                    }
                    Ok(Some(term)) => self.term = term,
                    Ok(None) => return false,
                    Err(_) => std::thread::sleep(PAUSE),
                },
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
        false
    }
}
