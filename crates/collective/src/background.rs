//! Operations over sockets or MPI that make progress while their rank computes.
//!
//! A named thread per rank runs what was started, in order. A rank that waits for an operation that has not begun yet
//! runs it itself: then nothing is handed over, and a blocking operation costs no more than without the thread. Only
//! one of the two has the [`Carrier`] at a time, so the order is always that of the calls.
//!
//! Errors are sticky: every later operation and every later wait returns the first one.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use polyreme_net::{Alarm, Cause, Report};

use crate::carrier::Carrier;
use crate::mpi::MpiMail;
use crate::work::{Ticket, Work};

/// How many operations may be started and not yet done; starting one more first runs some of them.
const STARTED_MAX: usize = 256;

/// How long a rank spins before it sleeps: longer than a wake-up takes.
const LOOK: Duration = Duration::from_micros(30);

/// What the others are told if this rank's operation panicked.
const PANICKED: &str = "an operation panicked";

/// A [`Carrier`] with a thread that works for it.
pub(crate) struct Background {
    step: u64,
    next: u64,
    /// This rank's number in reports, and its host.
    name: (usize, String),
    alarm: Alarm,
    mpi: bool,
    shared: Arc<BackgroundShared>,
    thread: Option<JoinHandle<()>>,
}

struct BackgroundShared {
    state: Mutex<BackgroundState>,
    /// Something was started, or the thread is to end.
    started: Condvar,
    /// Something is done.
    moved: Condvar,
    /// The last operation that is done.
    done: AtomicU64,
    /// Bytes that operations have sent.
    sent_bytes: AtomicU64,
}

struct BackgroundState {
    queue: VecDeque<Started>,
    /// The carrier, unless an operation is running.
    carrier: Option<Box<Carrier>>,
    failed: Option<Report>,
    ends: bool,
}

struct Started {
    ticket: u64,
    step: u64,
    work: Work,
}

impl Background {
    /// Starts the thread.
    pub(crate) fn new(carrier: Carrier) -> Background {
        let (name, alarm, mpi) = (carrier.name(), carrier.alarm(), matches!(carrier, Carrier::Mpi(_)));
        let sent_bytes = AtomicU64::new(carrier.sent_bytes());
        let state = BackgroundState {
            queue: VecDeque::with_capacity(STARTED_MAX),
            carrier: Some(Box::new(carrier)),
            failed: None,
            ends: false,
        };
        let state = Mutex::new(state);
        let (started, moved) = (Condvar::new(), Condvar::new());
        let shared =
            Arc::new(BackgroundShared { state, started, moved, done: AtomicU64::new(0), sent_bytes });
        let for_thread = shared.clone();
        let thread = std::thread::Builder::new().name(format!("links of rank {}", name.0));
        let thread = thread.spawn(move || for_thread.work()).expect("the system can start a thread");
        Background { step: 0, next: 0, name, alarm, mpi, shared, thread: Some(thread) }
    }

    /// Whether MPI carries the data.
    pub(crate) fn is_mpi(&self) -> bool {
        self.mpi
    }

    /// The alarm that ends this rank's waits.
    pub(crate) fn alarm(&self) -> Alarm {
        self.alarm.clone()
    }

    /// Bytes that operations which are done have sent; not known of MPI.
    pub(crate) fn sent_bytes(&self) -> Option<u64> {
        (!self.mpi).then(|| self.shared.sent_bytes.load(Ordering::Acquire))
    }

    /// Messages beside the operations of an MPI group that was split.
    pub(crate) fn mpi_mail(&self) -> Option<MpiMail> {
        match self.shared.lock().carrier.as_deref() {
            Some(Carrier::Mpi(mpi)) => mpi.mail(),
            _ => None,
        }
    }

    /// Splits an MPI group; no operation may be pending. See [`Mpi::split`].
    pub(crate) fn split_mpi(
        &mut self,
        color: usize,
        place: usize,
        names: &[usize],
    ) -> Result<Background, Report> {
        self.wait(Ticket(u64::MAX))?;
        let mut state = self.shared.lock();
        let split = match state.carrier.as_deref_mut() {
            Some(Carrier::Mpi(mpi)) => mpi.split(color, place, names),
            _ => Err("it is not an MPI group, or an operation is pending".into()),
        };
        drop(state);
        let split = split.map_err(|why| self.fail(&format!("a group cannot be made: {why}")))?;
        Ok(Background::new(Carrier::Mpi(Box::new(split))))
    }

    /// Says which step the next operations belong to. All ranks must set the same.
    pub(crate) fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Tells the others that this rank fails: their waits end with a report that says so. Operations that have not
    /// begun are dropped; the running one ends with this report, which is returned.
    pub(crate) fn fail(&mut self, why: &str) -> Report {
        let (rank, host) = self.name.clone();
        let cause = Cause::Failed { why: why.into() };
        let report = Report { rank, host, step: self.step, op: "its own work".into(), cause };
        let mut state = self.shared.lock();
        state.queue.clear();
        match &mut state.carrier {
            Some(carrier) => carrier.fail(&report),
            // The thread that has the carrier sees the alarm, and tells the others.
            None => drop(self.alarm.raise(report.clone())),
        }
        state.failed.get_or_insert(report).clone()
    }

    /// Runs an operation now, after those that were started before it. If there are none, the thread is not woken: it
    /// would only compete for the carrier.
    ///
    /// # Safety
    /// The memory stays valid and nothing else accesses it until this returns.
    pub(crate) unsafe fn run(&mut self, work: Work) -> Result<(), Report> {
        let mut state = self.shared.lock();
        if !state.queue.is_empty() || state.carrier.is_none() || state.failed.is_some() {
            drop(state);
            // SAFETY: the caller's promise.
            let ticket = unsafe { self.start(work) };
            return self.wait(ticket);
        }
        self.next += 1;
        state.queue.push_back(Started { ticket: self.next, step: self.step, work });
        let state = self.shared.run_first(state, true);
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Starts an operation; they run in the order in which they were started.
    ///
    /// # Safety
    /// The memory stays valid and nothing else accesses it until the operation was waited for, or this is dropped.
    pub(crate) unsafe fn start(&mut self, work: Work) -> Ticket {
        self.next += 1;
        let mut state = self.shared.lock();
        while state.queue.len() >= STARTED_MAX && state.failed.is_none() {
            state = self.shared.help(state);
        }
        if state.failed.is_none() {
            state.queue.push_back(Started { ticket: self.next, step: self.step, work });
            drop(state);
            self.shared.started.notify_one();
        }
        Ticket(self.next)
    }

    /// Waits until an operation, and those started before it, are done.
    pub(crate) fn wait(&mut self, ticket: Ticket) -> Result<(), Report> {
        let ticket = ticket.0.min(self.next);
        let done = || self.shared.done.load(Ordering::Acquire) >= ticket;
        let mut looked = false;
        let mut state = self.shared.lock();
        while !done() && state.failed.is_none() {
            if state.carrier.is_none() && !looked {
                // The thread is running it, and may be nearly done.
                drop(state);
                let start = Instant::now();
                while !done() && start.elapsed() < LOOK {
                    std::hint::spin_loop();
                }
                looked = true;
                state = self.shared.lock();
                continue;
            }
            state = self.shared.help(state);
        }
        // Even after a failure the memory is the caller's again only when no operation works on it.
        while state.failed.is_some() && state.carrier.is_none() {
            state = self.shared.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Background {
    /// Operations that have not begun are dropped; the running one ends with an error, here and on the other ranks.
    fn drop(&mut self) {
        if self.shared.lock().carrier.is_none() {
            self.fail("it ended in the middle of an operation");
        }
        let mut state = self.shared.lock();
        state.queue.clear();
        state.ends = true;
        drop(state);
        self.shared.started.notify_one();
        if let Some(thread) = self.thread.take() {
            // It only panics because of a bug, which was reported there.
            let _ = thread.join();
        }
    }
}

impl BackgroundShared {
    fn lock(&self) -> MutexGuard<'_, BackgroundState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the thread does.
    fn work(&self) {
        let mut state = self.lock();
        while !state.ends {
            if state.queue.is_empty() || state.carrier.is_none() || state.failed.is_some() {
                state = self.started.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state = self.run_first(state, false);
        }
    }

    /// Runs the first operation if it can, or waits for progress.
    fn help<'a>(&'a self, state: MutexGuard<'a, BackgroundState>) -> MutexGuard<'a, BackgroundState> {
        if state.carrier.is_some() && !state.queue.is_empty() {
            return self.run_first(state, true);
        }
        self.moved.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the first operation. `spins` if the core has nothing else to do: the thread's core is needed for the rank's
    /// own work.
    fn run_first<'a>(
        &'a self,
        mut state: MutexGuard<'a, BackgroundState>,
        spins: bool,
    ) -> MutexGuard<'a, BackgroundState> {
        let first = state.queue.pop_front().expect("there is one");
        let mut carrier = state.carrier.take().expect("it is not in use");
        drop(state);
        // SAFETY: the caller that started it promised that the memory stays valid until it was waited for.
        let work = AssertUnwindSafe(|| unsafe { carrier.run(&first.work, first.step, spins) });
        // A bug of the caller, which must not leave it waiting for a thread that is gone.
        let done = std::panic::catch_unwind(work).unwrap_or_else(|_| {
            let (rank, host) = carrier.name();
            let cause = Cause::Failed { why: PANICKED.into() };
            let report = Report { rank, host, step: first.step, op: first.work.name().into(), cause };
            carrier.fail(&report);
            Err(report)
        });
        self.sent_bytes.store(carrier.sent_bytes(), Ordering::Release);
        let mut state = self.lock();
        state.carrier = Some(carrier);
        match done {
            Ok(()) => self.done.store(first.ticket, Ordering::Release),
            Err(report) => {
                state.failed.get_or_insert(report);
                state.queue.clear();
            }
        }
        if !state.queue.is_empty() {
            self.started.notify_one();
        }
        self.moved.notify_all();
        state
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use polyreme_net::loopback;

    use super::*;
    use crate::comm::Comm;
    use crate::element::Reduce;
    use crate::links::Linked;
    use crate::work::{Cuts, Span};

    fn on_all<R: Send>(ranks: usize, run: impl Fn(Comm) -> R + Sync) -> Vec<R> {
        let run = &run;
        thread::scope(|scope| {
            let ranks: Vec<_> = loopback::links(ranks)
                .unwrap()
                .into_iter()
                .map(|links| scope.spawn(move || run(Comm::tcp(links).unwrap())))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Many operations are started, some are waited for late, blocking ones come in between: the order is kept.
    #[test]
    fn the_order_of_calls_is_kept() {
        on_all(3, |mut back| {
            let r = back.rank();
            let mut buckets = vec![vec![0.0f32; 5000]; 2 * STARTED_MAX + 10];
            let mut tickets = Vec::new();
            for (k, bucket) in buckets.iter_mut().enumerate() {
                bucket.fill((r + k) as f32);
                // SAFETY: the buckets stay where they are until the last ticket was waited for.
                tickets.push(unsafe { back.start(Work::AllReduce(Span::of(bucket), Reduce::Sum)) });
                if k % 100 == 50 {
                    let mut one = [r as i32];
                    back.all_reduce(&mut one, Reduce::Max).unwrap();
                    assert_eq!(one, [2]);
                    back.wait(tickets[k / 2]).unwrap();
                }
            }
            for ticket in tickets.into_iter().rev() {
                back.wait(ticket).unwrap();
            }
            back.wait(Ticket(u64::MAX)).unwrap();
            for (k, bucket) in buckets.iter().enumerate() {
                assert!(bucket.iter().all(|x| *x == (3 + 3 * k) as f32), "bucket {k}");
            }
        });
    }

    /// Started operations complete without anyone waiting for them.
    #[test]
    fn the_thread_works_by_itself() {
        let work = |links| {
            let mut back = Background::new(Carrier::Links(Box::new(Linked::over(links))));
            let mut data = vec![1i64; 1000];
            // SAFETY: the data stay until the ticket was waited for.
            let ticket = unsafe { back.start(Work::AllReduce(Span::of(&mut data), Reduce::Sum)) };
            let start = Instant::now();
            while back.shared.done.load(Ordering::Acquire) < ticket.0 {
                assert!(start.elapsed() < Duration::from_secs(20), "the thread does nothing");
                thread::yield_now();
            }
            back.wait(ticket).unwrap();
            assert_eq!(data, [2; 1000]);
        };
        let links = loopback::links(2).unwrap();
        let ranks: Vec<_> = links.into_iter().map(|links| thread::spawn(move || work(links))).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }

    #[test]
    fn an_error_stays() {
        let reports = on_all(3, |mut back| {
            let mut data = vec![1.0f32; 100_000];
            back.all_reduce(&mut data, Reduce::Sum).unwrap();
            if back.rank() == 1 {
                back.fail("out of luck");
            }
            // SAFETY: the data stay until the ticket was waited for.
            let ticket = unsafe { back.start(Work::AllReduce(Span::of(&mut data), Reduce::Sum)) };
            let report = back.wait(ticket).unwrap_err();
            assert_eq!(back.wait(Ticket(1)), Err(report.clone()));
            assert_eq!(back.barrier(), Err(report.clone()));
            report
        });
        for report in reports {
            assert!(report.rank == 1 && report.to_string().contains("failed: out of luck"), "{report}");
        }
    }

    /// A rank that ends while its thread waits for the others does not hang, and they get a report.
    #[test]
    fn dropping_in_the_middle_ends() {
        let ends = on_all(2, |mut back| {
            let mut data = vec![1.0f32; 1_000_000];
            if back.rank() == 1 {
                // SAFETY: the data outlive `back`, which is dropped first.
                unsafe { back.start(Work::AllReduce(Span::of(&mut data), Reduce::Sum)) };
                drop(back);
                return None;
            }
            Some(back.recv(1, &mut [0.0f32; 10]).unwrap_err())
        });
        assert_eq!(ends[0].as_ref().unwrap().rank, 1);
    }

    /// A bug in a started operation is an error of its rank, not an endless wait.
    #[test]
    fn wrong_cuts_do_not_hang() {
        let reports = on_all(2, |mut back| {
            let mut data = vec![1.0f32; 10];
            let cuts: Cuts = if back.rank() == 0 { [0, 5, 10].into() } else { [0, 50, 100].into() };
            // SAFETY: the data stay until the ticket was waited for.
            let ticket = unsafe { back.start(Work::AllGather(Span::of(&mut data), cuts)) };
            back.wait(ticket).unwrap_err()
        });
        assert!(reports.iter().all(|r| r.to_string().contains("an operation panicked") && r.rank == 1));
    }
}
