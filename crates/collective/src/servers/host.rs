//! The thread of a server: takes letters, asks the decisions, updates and answers.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use polyreme_net::Report;
use polyreme_net::mailbox::{Class, Label, Letter, Payload};
use polyreme_net::servers::{
    Discipline, LeaseAction, LeaseEvent, Leases, ParamServer, ServerAction, ServerEvent, Staleness, WorkerId,
};

use super::letters::{
    NO_BLOCK, PUSH_HEAD, PushedGradient, block_and_range, kind, label, sender, session_and_clock,
    write_floats,
};
use super::{ServerCounts, ServerMail, report_of};

/// How often the leases look at the time while no letter comes.
const TICK: Duration = Duration::from_millis(50);

/// The numbers behind a server's ranges: parameters, optimizer state, and the arithmetic.
pub trait RangeStore: Send {
    /// Elements of a range.
    fn len_of(&self, range: usize) -> usize;

    /// How many sums of gradients a worker pushes of each range; they travel one after the other.
    fn sums_of(&self, worker: usize) -> usize;

    /// Updates a range with these gradients, added up in their order; it is the range's update number `version`, from 1.
    fn apply(&mut self, range: usize, version: u64, gradients: &[PushedGradient]);

    /// The weights of a range.
    fn weights(&self, range: usize) -> &[f32];

    /// The optimizer's state number `which` of a range; `None` if it has no such state.
    fn state(&self, range: usize, which: usize) -> Option<&[f32]>;
}

/// How a server works.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// In which order gradients and pulls take effect.
    pub discipline: Discipline,
    /// How many ranges it has.
    pub n_ranges: usize,
    /// The blocks before this one are applied.
    pub done: u64,
    /// Whether this server has the leases.
    pub leases: bool,
}

/// A server's thread. Dropping it ends it.
pub struct ServerHost {
    mail: ServerMail,
    thread: Option<JoinHandle<()>>,
    noted: Arc<Noted>,
}

/// What others may know of a server.
#[derive(Default)]
struct Noted {
    counts: Mutex<ServerCounts>,
    sent_bytes: AtomicU64,
}

impl ServerHost {
    /// Starts the thread of the server beside this rank.
    pub fn start<S: RangeStore + 'static>(
        mail: ServerMail,
        store: Arc<Mutex<S>>,
        options: HostOptions,
    ) -> io::Result<ServerHost> {
        let HostOptions { discipline, n_ranges, done, leases } = options;
        let params = (0..n_ranges).map(|range| lock(&store).len_of(range) as u64).sum();
        let counts =
            ServerCounts { ranges: n_ranges as u64, params, version: done, ..ServerCounts::default() };
        let noted = Arc::new(Noted { counts: Mutex::new(counts), ..Noted::default() });
        let mut desk = ServerDesk {
            mail: mail.clone(),
            noted: noted.clone(),
            store,
            server: ParamServer::new(discipline, n_ranges, done),
            leases: leases.then(|| Leases::new(done)),
            written: BTreeMap::new(),
            clock: 0,
        };
        let name = format!("server {}", mail.rank());
        let thread = thread::Builder::new().name(name).spawn(move || {
            // What ends all waits has been reported; a post to a worker that is gone likewise.
            let _ended: Result<(), Report> = desk.serve();
        })?;
        Ok(ServerHost { mail, thread: Some(thread), noted })
    }

    /// How old the gradients were that it applied.
    pub fn staleness(&self) -> Staleness {
        lock(&self.noted.counts).staleness
    }

    /// What it came to.
    pub fn counts(&self) -> ServerCounts {
        let queued_bytes =
            Class::ALL.iter().map(|class| self.mail.to_servers.held_bytes(*class).0 as u64).sum();
        ServerCounts { sent_bytes: self.sent_bytes(), queued_bytes, ..*lock(&self.noted.counts) }
    }

    /// Bytes that it has put on the wire.
    pub fn sent_bytes(&self) -> u64 {
        self.noted.sent_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for ServerHost {
    fn drop(&mut self) {
        let label = Label { kind: kind::STOP, ..Label::default() };
        // If it cannot be told, all waits have ended, and its own too.
        drop(self.mail.to_servers.post(self.mail.rank(), Class::Urgent, label, Vec::new()));
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the thread works with.
struct ServerDesk<S> {
    mail: ServerMail,
    noted: Arc<Noted>,
    store: Arc<Mutex<S>>,
    server: ParamServer<PushedGradient>,
    leases: Option<Leases>,
    /// By range: its weights as they were last sent.
    written: BTreeMap<usize, WrittenRange>,
    /// Where the clock of a worker starts that joins now.
    clock: u64,
}

/// The weights of a range as they travel.
#[derive(Default)]
struct WrittenRange {
    version: Option<u64>,
    bytes: Arc<Vec<u8>>,
}

impl<S: RangeStore> ServerDesk<S> {
    fn serve(&mut self) -> Result<(), Report> {
        loop {
            let taken = match self.leases {
                Some(_) => self.mail.to_servers.take_until(Instant::now() + TICK)?,
                None => self.mail.to_servers.take()?,
            };
            let Some(letter) = taken else {
                if self.leases.is_none() {
                    return Ok(());
                }
                self.lease(LeaseEvent::Tick)?;
                continue;
            };
            if letter.label.kind == kind::STOP && letter.from == self.mail.rank() {
                return Ok(());
            }
            self.letter(letter)?;
        }
    }

    fn letter(&mut self, letter: Letter) -> Result<(), Report> {
        let ((from, clock), place) = (sender(&letter), letter.label.place);
        let event = match letter.label.kind {
            kind::JOIN => ServerEvent::Join { id: from, clock: (place != NO_BLOCK).then_some(place) },
            kind::LEAVE => ServerEvent::Leave(from),
            kind::PULL => ServerEvent::Pull { from, clock, range: place as usize },
            kind::PUSH => {
                let (block, range) = block_and_range(place);
                let want = (range < self.ranges()).then(|| {
                    let store = lock(&self.store);
                    PUSH_HEAD + 4 * store.len_of(range) * store.sums_of(letter.from)
                });
                if want.is_some_and(|want| want != letter.len()) {
                    let why = format!("a gradient of {} bytes for range {range}", letter.len());
                    return self.refuse(from, &why);
                }
                ServerEvent::Push { from, clock, block, range, gradient: PushedGradient(letter) }
            }
            kind::PULL_STATE => return self.send_state(from, place),
            kind::OPEN if letter.from == self.mail.rank() && letter.len() == 16 => {
                let number =
                    |at: usize| u64::from_le_bytes(letter[at..at + 8].try_into().expect("eight bytes"));
                let (blocks, longest) = (place..number(0), Duration::from_micros(number(8)));
                return self.lease(LeaseEvent::Open { segment: letter.label.ticket, blocks, longest });
            }
            asks @ (kind::ASK | kind::ASK_AND_STOP | kind::WATCH | kind::WATCH_AND_STOP) => {
                let (segment, number) = session_and_clock(letter.label.ticket);
                let done = Some(place).filter(|block| *block != NO_BLOCK);
                let stop = matches!(asks, kind::ASK_AND_STOP | kind::WATCH_AND_STOP);
                let watches = matches!(asks, kind::WATCH | kind::WATCH_AND_STOP);
                let worker = letter.from;
                return self.lease(LeaseEvent::Ask { worker, segment, number, done, stop, watches });
            }
            other => return self.refuse(from, &format!("a letter of kind {other}")),
        };
        let actions = self.server.step(event);
        self.count();
        for action in actions {
            match action {
                ServerAction::Apply { range, gradients, version, staleness, .. } => {
                    lock(&self.noted.counts).note(staleness);
                    lock(&self.store).apply(range, version, &gradients);
                }
                ServerAction::Answer { to, range, clock, version } => {
                    self.send(to, range, clock, version)?;
                }
                ServerAction::Refuse { to, why } if why.is_fault() => self.refuse(to, &why.to_string())?,
                ServerAction::Refuse { .. } => {}
            }
        }
        Ok(())
    }

    fn ranges(&self) -> usize {
        self.server.n_ranges()
    }

    fn count(&self) {
        let mut counts = lock(&self.noted.counts);
        counts.clients = self.server.n_clients() as u64;
        (counts.version, counts.staleness) = (self.server.version(), self.server.staleness());
    }

    /// Sends the weights of a range; several workers that ask for one version get the same letter.
    fn send(&mut self, to: WorkerId, range: usize, clock: u64, version: u64) -> Result<(), Report> {
        let written = self.written.entry(range).or_default();
        if written.version != Some(version) {
            let mut bytes = Arc::get_mut(&mut written.bytes).map(std::mem::take).unwrap_or_default();
            let store = lock(&self.store);
            let weights = store.weights(range);
            bytes.resize(4 * weights.len(), 0);
            write_floats(weights, &mut bytes);
            *written = WrittenRange { version: Some(version), bytes: Arc::new(bytes) };
        }
        let payload = Payload::from(written.bytes.clone());
        self.post(to.worker, label(kind::WEIGHTS, to.session, clock, range as u64), payload)
    }

    fn send_state(&mut self, to: WorkerId, place: u64) -> Result<(), Report> {
        let (which, range) = block_and_range(place);
        let store = lock(&self.store);
        let state = (range < self.ranges()).then(|| store.state(range, which as usize)).flatten();
        let bytes = state.map(|state| {
            let mut bytes = vec![0; 4 * state.len()];
            write_floats(state, &mut bytes);
            bytes
        });
        drop(store);
        match bytes {
            Some(bytes) => self.post(to.worker, label(kind::STATE, to.session, 0, place), bytes),
            None => self.refuse(to, &format!("there is no state {which} of range {range} at this server")),
        }
    }

    fn refuse(&mut self, to: WorkerId, why: &str) -> Result<(), Report> {
        self.post(to.worker, label(kind::REFUSED, to.session, 0, 0), why.as_bytes().to_vec())
    }

    fn lease(&mut self, event: LeaseEvent) -> Result<(), Report> {
        let Some(leases) = &mut self.leases else { return Ok(()) };
        // While nobody has joined, workers may be on their way with a clock that they were told.
        self.clock = self.server.slowest().unwrap_or(self.clock);
        let clock = self.clock.to_le_bytes();
        for action in leases.step(Instant::now(), event) {
            let (worker, kind, number, place, bytes) = match action {
                LeaseAction::Lease { worker, number, block } => {
                    (worker, kind::LEASE, number, block, clock.to_vec())
                }
                LeaseAction::Rest { worker, number } => (worker, kind::REST, number, 0, Vec::new()),
                LeaseAction::Over { worker, number, end } => (worker, kind::OVER, number, end, Vec::new()),
            };
            self.post(worker, Label { kind, ticket: number, place }, bytes)?;
        }
        Ok(())
    }

    fn post(&mut self, to: usize, label: Label, bytes: impl Into<Payload>) -> Result<(), Report> {
        let bytes = bytes.into();
        self.noted.sent_bytes.fetch_add(self.mail.wire_bytes(to, bytes.len()), Ordering::Relaxed);
        let posted = self.mail.to_workers.post(to, Class::Data, label, bytes);
        posted.map_err(|error| report_of(error, to))
    }
}
