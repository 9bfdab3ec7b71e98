//! Samples that ranks borrow from each other, over a mailbox.
//!
//! A request names a set, and parts of it with an index in each; it is short and goes in the urgent class. The answer is the samples, one after
//! the other, in the class for data. Each class has a thread: one answers requests, the other takes answers and wakes whoever waits for them.
//! So a rank whose answers find no room (a borrower does not keep up) still takes what it borrowed itself, and no two ranks can wait for
//! each other.
//!
//! What is on its way is bounded: a reader asks for one batch at a time, and a request for samples of at most some megabytes.
//!
//! When the job cannot go on, both threads end, and all who wait get the report. A sample that cannot be read is an answer too, which says
//! why.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use polyreme_collective::mailbox::{Class, Label, Letter, Limits, Mailbox};
use polyreme_collective::{Comm, Report};
use polyreme_data::spread::{Lender, write_sample};
use polyreme_data::{DataError, Dataset, Scratch};

use crate::error::TrainError;

/// A request; its place is the set.
const ASK: u16 = 1;
/// Samples.
const SAMPLES: u16 = 2;
/// Why there are none.
const REFUSED: u16 = 3;
/// A part and an index.
const SAMPLE_BYTES: usize = 12;
/// How many samples a request may name: what fits into an urgent letter.
const ASKED_MAX: usize = (1 << 20) / SAMPLE_BYTES - 16;
/// How often a thread looks whether it is to end.
const LOOK: Duration = Duration::from_millis(500);

/// The parts of a set, by number; `None` for those that only others have.
type Shelf = Vec<Option<Arc<dyn Dataset>>>;

/// What a rank lends to others, and borrows from them.
pub struct Lending {
    desk: Arc<LendingDesk>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the threads of a rank share.
struct LendingDesk {
    mailbox: Mailbox,
    shelves: Mutex<HashMap<u32, Shelf>>,
    tickets: AtomicU64,
    borrowed: Mutex<Borrowed>,
    came: Condvar,
}

/// What was asked for.
#[derive(Default)]
struct Borrowed {
    /// By ticket; `None` until it has come.
    answers: HashMap<u64, Option<Result<Vec<u8>, String>>>,
    /// Why nothing comes any more.
    over: Option<String>,
    /// Whether this rank borrows and lends no more.
    closed: bool,
}

impl Lending {
    /// Starts to lend and borrow among the ranks of a group. Collective.
    pub(crate) fn start(comm: &mut Comm) -> Result<Arc<Lending>, TrainError> {
        let rank = comm.rank();
        let desk = Arc::new(LendingDesk {
            mailbox: comm.mailbox(Limits::default())?,
            shelves: Mutex::default(),
            tickets: AtomicU64::new(1),
            borrowed: Mutex::default(),
            came: Condvar::new(),
        });
        let mut threads = Vec::new();
        for (name, class, work) in [
            ("lend", Class::Urgent, LendingDesk::answer as fn(&LendingDesk, &Letter, &mut Scratch)),
            ("borrow", Class::Data, LendingDesk::receive),
        ] {
            let desk = desk.clone();
            let body = move || desk.serve(class, work);
            let thread = thread::Builder::new().name(name.into()).spawn(body);
            threads.push(thread.map_err(|source| TrainError::Thread { rank, source })?);
        }
        Ok(Arc::new(Lending { desk, threads: Mutex::new(threads) }))
    }

    /// From now on others may have samples of these parts.
    pub(crate) fn lend(&self, set: u32, parts: Shelf) {
        lock(&self.desk.shelves).insert(set, parts);
    }

    /// Ends it, when no rank asks any more.
    pub(crate) fn close(&self) -> Result<(), Report> {
        lock(&self.desk.borrowed).closed = true;
        self.desk.mailbox.close()?;
        for thread in lock(&self.threads).drain(..) {
            // They do not panic, and if they did, nobody needs them any more.
            let _ = thread.join();
        }
        Ok(())
    }
}

impl LendingDesk {
    /// The loop of a thread: what it does with each letter of a class.
    fn serve(&self, class: Class, work: fn(&LendingDesk, &Letter, &mut Scratch)) {
        let mut scratch = Scratch::default();
        loop {
            match self.mailbox.take_of(&[class], Instant::now() + LOOK) {
                Ok(Some(letter)) => work(self, &letter, &mut scratch),
                Ok(None) if lock(&self.borrowed).closed => return,
                Ok(None) => {}
                Err(report) => return self.end(report.to_string()),
            }
        }
    }

    /// Nothing comes any more; all who wait learn why.
    fn end(&self, why: String) {
        lock(&self.borrowed).over.get_or_insert(why);
        self.came.notify_all();
    }

    /// Answers a request.
    fn answer(&self, letter: &Letter, scratch: &mut Scratch) {
        let Label { ticket, place, .. } = letter.label;
        let (kind, answer) = match self.read(place as u32, letter, scratch) {
            Ok(samples) => (SAMPLES, samples),
            Err(error) => (REFUSED, error.to_string().into_bytes()),
        };
        let label = Label { kind, ticket, place };
        if let Err(error) = self.mailbox.post(letter.from, Class::Data, label, answer) {
            self.end(error.to_string());
        }
    }

    /// The samples that a request names.
    fn read(&self, set: u32, asked: &[u8], scratch: &mut Scratch) -> Result<Vec<u8>, DataError> {
        let shelf = lock(&self.shelves).get(&set).cloned().unwrap_or_default();
        let mut samples = Vec::new();
        for one in asked.chunks_exact(SAMPLE_BYTES) {
            let (part, idx) = one.split_at(4);
            let part = u32::from_le_bytes(part.try_into().expect("four bytes were split off"));
            let idx = u64::from_le_bytes(idx.try_into().expect("eight bytes are left")) as usize;
            let set = shelf.get(part as usize).and_then(Option::as_ref).filter(|set| idx < set.len());
            let Some(set) = set else {
                let why = format!("there is no sample {idx} in part {part}; give all ranks the same version");
                return Err(DataError::Setting { why });
            };
            write_sample(&set.fetch(idx, scratch)?, &mut samples);
        }
        // Checked afterwards: a file that was cut meanwhile reads as zeros.
        shelf.iter().flatten().try_for_each(|set| set.intact())?;
        Ok(samples)
    }

    /// Takes an answer.
    fn receive(&self, letter: &Letter, _: &mut Scratch) {
        let answer = match letter.label.kind {
            SAMPLES => Ok(letter.to_vec()),
            _ => Err(format!("rank {}: {}", letter.from, String::from_utf8_lossy(letter))),
        };
        if let Some(slot) = lock(&self.borrowed).answers.get_mut(&letter.label.ticket) {
            *slot = Some(answer);
        }
        self.came.notify_all();
    }
}

impl Lender for Lending {
    fn ask(&self, member: usize, set: u32, samples: &[(u32, u64)]) -> Result<u64, DataError> {
        if samples.len() > ASKED_MAX {
            let why =
                format!("{} samples are asked for at once, and at most {ASKED_MAX} can be", samples.len());
            return Err(DataError::Setting { why });
        }
        let ticket = self.desk.tickets.fetch_add(1, Ordering::Relaxed);
        let mut asked = Vec::with_capacity(samples.len() * SAMPLE_BYTES);
        for (part, idx) in samples {
            asked.extend_from_slice(&part.to_le_bytes());
            asked.extend_from_slice(&idx.to_le_bytes());
        }
        lock(&self.desk.borrowed).answers.insert(ticket, None);
        let label = Label { kind: ASK, ticket, place: u64::from(set) };
        self.desk
            .mailbox
            .post(member, Class::Urgent, label, asked)
            .map_err(|error| lost(error.to_string()))?;
        Ok(ticket)
    }

    fn wait(&self, ticket: u64) -> Result<Vec<u8>, DataError> {
        let mut borrowed = lock(&self.desk.borrowed);
        loop {
            if let Some(Some(answer)) = borrowed.answers.get_mut(&ticket).map(Option::take) {
                borrowed.answers.remove(&ticket);
                return answer.map_err(lost);
            }
            if let Some(why) = &borrowed.over {
                return Err(lost(why.clone()));
            }
            borrowed = self.desk.came.wait(borrowed).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn lost(why: String) -> DataError {
    DataError::Setting { why }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is inside is whole after every statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
