//! A member's connection to the coordinator: a thread that listens, beats, and wakes the rank.
//!
//! The rank itself trains and asks this for little: to stand ready for the next generation, to say that it trains, and whether to end
//! the generation at the end of this step. A cancel raises the alarm of the generation's group, which ends every wait.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel as queue};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use thiserror::Error;

use super::message::{
    Formation, JobMark, MESSAGE_BYTES_MAX, MemberId, MemoryUse, OwnShare, Ready, Returned, ToCoordinator,
    ToMember,
};
use super::office::member_hello;
use super::seat::{Seat, SeatAction};
use super::store::CoordinatorPlace;
use super::succession::{self, OpenOffice};
use super::tally::TallySummary;
use crate::alarm::Alarm;
use crate::connection::Proven;
use crate::control::channel::Channel;
use crate::ready;
use crate::rendezvous::dial::{Dial, Dialled, explain};
use crate::rendezvous::hello::Turned;
use crate::report::{Cause, Report};
use crate::seal::Encrypt;
use crate::secret::Secret;
use crate::system::{Os, System};

/// How long the coordinator is tried to be reached.
const REACH: Duration = Duration::from_secs(10);
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a run that is to stop waits for a generation in which all save and stop together.
const STOPS_TOGETHER: Duration = Duration::from_secs(2);
/// How many beats fit into patience, and how often there is one at least, so that `polyreme status` is not of long ago.
const BEATS: u32 = 10;
const BEAT_MAX: Duration = Duration::from_secs(1);
/// How long the end of a run that is complete waits for the coordinator to hear of it, and for one that is being started again.
const HEARD: Duration = Duration::from_secs(1);
const HEARD_AGAIN: Duration = Duration::from_secs(10);

/// What a member needs.
#[derive(Clone)]
pub struct EnterOptions {
    /// Where the coordinator is.
    pub coordinator: CoordinatorPlace,
    /// The job's secret.
    pub secret: Secret,
    /// The job.
    pub job: JobMark,
    /// Which of the coordinator's own children this is.
    pub child: Option<u64>,
    /// Whether connections are encrypted.
    pub encrypt: Encrypt,
    /// Equal for processes that can share memory with this one.
    pub host_key: String,
    /// How this process becomes the coordinator, if that is wanted when the coordinator is lost.
    pub succeed: Option<OpenOffice>,
}

/// Why a process is no member.
#[derive(Debug, Error)]
pub enum EnterError {
    /// Nothing answers.
    #[error("the coordinator at {at} cannot be reached: {why}")]
    Unreachable {
        /// Where it should be.
        at: String,
        /// The last failure.
        why: String,
    },
    /// The secrets differ.
    #[error("the coordinator at {at} has another secret: set POLYREME_SECRET to the run's own")]
    WrongSecret {
        /// Where it is.
        at: String,
    },
    /// It refuses this process.
    #[error("the coordinator refuses this process: {why}")]
    Refused {
        /// What it says.
        why: String,
    },
    /// It is gone.
    #[error(
        "the coordinator is gone, and the run ends with it; `polyreme resume` goes on from the last checkpoint"
    )]
    Gone,
    /// The system failed.
    #[error("while entering: {0}")]
    Io(#[from] std::io::Error),
}

/// What the user of a member wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// To take part.
    Nothing,
    /// To leave, while the others go on.
    Leave,
    /// That the run saves and stops.
    Stop,
}

/// What a member that stands ready is told.
#[derive(Debug)]
pub enum Apart {
    /// It is a rank of a new generation.
    Form(Box<Formation>),
    /// The run is over, or this member was let go.
    End {
        /// Why; nothing if the run is finished.
        why: Option<String>,
    },
}

/// What the thread and the rank share.
struct SessionShared {
    wake: OwnedFd,
    /// Of the group that the rank is in, with its rank.
    alarm: Mutex<Option<(Alarm, usize)>>,
    cancelled: AtomicBool,
    /// The coordinator is gone for good.
    gone: AtomicBool,
    /// The coordinator was lost, and another is waited for.
    away: AtomicBool,
    leaves: AtomicBool,
    /// It has said that it wants to leave.
    left: AtomicBool,
    step: AtomicU64,
    own: Mutex<OwnShare>,
    tally: Mutex<TallySummary>,
    seat: Mutex<Seat>,
}

/// A member.
pub struct Membership {
    local: IpAddr,
    shared: Arc<SessionShared>,
    says: Sender<ToCoordinator>,
    told: Receiver<Apart>,
}

impl Membership {
    /// Connects to the coordinator and becomes a member.
    pub fn enter(options: &EnterOptions) -> Result<Membership, EnterError> {
        let Proven { connection, .. } = connect(options, Instant::now() + REACH)?;
        let local = connection.stream().local_addr()?.ip();
        let mut channel: Channel<ToCoordinator, ToMember> = Channel::new(connection, MESSAGE_BYTES_MAX)?;
        let (host, pid, job) = (crate::rendezvous::host_name(), std::process::id(), options.job.clone());
        let (host_key, child) = (options.host_key.clone(), options.child);
        channel.send(&ToCoordinator::Enter { host, host_key, pid, job, child, was: None });
        let (id, patience, place) = match wait(&mut channel, Instant::now() + REACH)? {
            ToMember::Welcome { id, patience_ms, runs_on, succession, memory } => {
                (id, Duration::from_millis(patience_ms), (runs_on, succession, memory))
            }
            ToMember::Refused { why } => return Err(EnterError::Refused { why }),
            _ => return Err(EnterError::Gone),
        };
        let shared = Arc::new(SessionShared {
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?,
            alarm: Mutex::new(None),
            cancelled: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            away: AtomicBool::new(false),
            leaves: AtomicBool::new(false),
            left: AtomicBool::new(false),
            step: AtomicU64::new(0),
            own: Mutex::default(),
            tally: Mutex::default(),
            seat: Mutex::default(),
        });
        let (says, said) = queue();
        let (tell, told) = queue();
        let (ranks, note) = (Vec::new(), Vec::new());
        let (runs_on, succession, memory) = place;
        let known = Journal { id, ranks, stand: None, trained: false, note, runs_on, succession, memory };
        let (shared_too, options) = (shared.clone(), options.clone());
        let thread =
            SessionThread { channel, options, shared: shared_too, known, said, tell, patience, local };
        Os.spawn("member", Box::new(move || thread.run()))?;
        Ok(Membership { local, shared, says, told })
    }

    /// The address of this host that reaches the coordinator: where other members reach this one.
    pub fn local(&self) -> IpAddr {
        self.local
    }

    /// Stands ready, and waits until it is told what to do. `generation` of `ready` is filled in. `wish` is asked now and then: a
    /// member that wants to leave says so at once; one whose run is to stop does so only if no generation is formed soon, because the ranks of
    /// one save and stop together.
    pub fn ready(&self, mut ready: Ready, wish: &dyn Fn() -> Wish) -> Result<Apart, EnterError> {
        {
            let mut seat = self.shared.seat.lock().unwrap_or_else(PoisonError::into_inner);
            seat.left();
            ready.generation = seat.generation();
        }
        self.shared.cancelled.store(false, Ordering::Release);
        self.shared.leaves.store(false, Ordering::Release);
        self.say(ToCoordinator::Ready(ready));
        let mut stops = None;
        loop {
            match self.told.recv_timeout(PAUSE) {
                Ok(apart) => return Ok(apart),
                Err(RecvTimeoutError::Timeout) => match wish() {
                    Wish::Nothing => {}
                    Wish::Leave => self.leave(),
                    Wish::Stop => {
                        let since: &Instant = stops.get_or_insert_with(Instant::now);
                        if since.elapsed() >= STOPS_TOGETHER {
                            self.leave();
                        }
                    }
                },
                Err(RecvTimeoutError::Disconnected) => return Err(EnterError::Gone),
            }
        }
    }

    /// Whether the generation was cancelled: for waits that have no alarm yet.
    pub fn is_cancelled(&self) -> bool {
        self.shared.cancelled.load(Ordering::Acquire)
    }

    /// Whether the coordinator is gone: then the ranks finish their step, save and end.
    pub fn is_orphan(&self) -> bool {
        self.shared.gone.load(Ordering::Acquire)
    }

    /// From here on a cancel raises this alarm of the group in which this is `rank`.
    pub fn watch(&self, alarm: Alarm, rank: usize) {
        *self.shared.alarm.lock().unwrap_or_else(PoisonError::into_inner) = Some((alarm, rank));
        if self.is_cancelled() {
            raise(&self.shared);
        }
    }

    /// The generation is over for this rank.
    pub fn unwatch(&self) {
        *self.shared.alarm.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// This rank trains.
    pub fn running(&self, generation: u64) {
        self.say(ToCoordinator::Running { generation });
    }

    /// As rank 0: leaves a note for later ranks, whichever process they are.
    pub fn note(&self, note: Vec<u8>) {
        self.say(ToCoordinator::Note(note));
    }

    /// Steps that are done.
    pub fn at(&self, step: u64) {
        self.shared.step.store(step, Ordering::Relaxed);
    }

    /// What the rank had to do in that step.
    pub fn had(&self, own: OwnShare) {
        *self.shared.own.lock().unwrap_or_else(PoisonError::into_inner) = own;
    }

    /// Whether the generation ends with this step.
    pub fn leaves_at_step_end(&self) -> bool {
        self.shared.leaves.load(Ordering::Acquire)
    }

    /// This member wants to leave at the end of a step. It can be said again.
    pub fn leave(&self) {
        if !self.shared.left.swap(true, Ordering::AcqRel) {
            self.say(ToCoordinator::Leaves);
        }
    }

    /// Training is complete and everything is written.
    pub fn done(&self, generation: u64) {
        self.say(ToCoordinator::Done { generation });
        // The process may end right after this.
        let until = Instant::now() + HEARD_AGAIN;
        while let Err(RecvTimeoutError::Timeout) = self.told.recv_timeout(HEARD) {
            if !self.shared.away.load(Ordering::Acquire) || Instant::now() >= until {
                return;
            }
        }
    }

    /// What has happened so far.
    pub fn tally(&self) -> TallySummary {
        *self.shared.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, message: ToCoordinator) {
        // If the thread has ended, the coordinator is gone, which the next wait says.
        let _ = self.says.send(message);
        // It fails only if the counter is full, and then the thread is awake anyway.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
    }
}

struct SessionThread {
    channel: Channel<ToCoordinator, ToMember>,
    options: EnterOptions,
    shared: Arc<SessionShared>,
    known: Journal,
    said: Receiver<ToCoordinator>,
    tell: Sender<Apart>,
    patience: Duration,
    /// The address at which others reach this host.
    local: IpAddr,
}

/// What this member would tell another coordinator.
struct Journal {
    id: MemberId,
    /// Of the last generation.
    ranks: Vec<MemberId>,
    /// What it said last of where it stands in that generation, or after it.
    stand: Option<ToCoordinator>,
    /// Whether it has trained.
    trained: bool,
    note: Vec<u8>,
    /// The member whose process had the last coordinator.
    runs_on: Option<MemberId>,
    /// Whether a member takes that one's place.
    succession: bool,
    /// Whether ranks may share memory.
    memory: MemoryUse,
}

impl Journal {
    fn note(&mut self, message: &ToCoordinator) {
        match message {
            ToCoordinator::Ready(_) | ToCoordinator::Done { .. } => self.stand = Some(message.clone()),
            ToCoordinator::Running { .. } => (self.stand, self.trained) = (Some(message.clone()), true),
            ToCoordinator::Note(note) => self.note.clone_from(note),
            ToCoordinator::Enter { .. }
            | ToCoordinator::Return { .. }
            | ToCoordinator::Beat { .. }
            | ToCoordinator::Leaves
            | ToCoordinator::Ask => {}
        }
    }
}

impl SessionThread {
    fn run(mut self) {
        let mut due = Instant::now();
        // With a store another process may have the place of a coordinator that is silent; without one its address is all there is.
        let mut heard = matches!(self.options.coordinator, CoordinatorPlace::InStore(_)).then(Instant::now);
        loop {
            loop {
                match self.said.try_recv() {
                    Ok(message) => {
                        self.known.note(&message);
                        self.channel.send(&message);
                    }
                    Err(TryRecvError::Empty) => break,
                    // The rank has ended.
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            let now = Instant::now();
            if now >= due {
                let own = *self.shared.own.lock().unwrap_or_else(PoisonError::into_inner);
                let step = self.shared.step.load(Ordering::Relaxed);
                self.channel.send(&ToCoordinator::Beat { step, own });
                due = now + (self.patience / BEATS).min(BEAT_MAX);
            }
            let mut lost = false;
            while !lost {
                match self.channel.receive() {
                    Ok(Some(message)) => {
                        heard = heard.map(|_| Instant::now());
                        self.hear(message);
                    }
                    Ok(None) => break,
                    Err(_) => lost = true,
                }
            }
            lost |= heard.is_some_and(|heard| heard.elapsed() >= self.patience);
            if lost {
                if !self.go_back() {
                    return self.shared.gone.store(true, Ordering::Release);
                }
                heard = heard.map(|_| Instant::now());
                continue;
            }
            self.channel.flush();
            let sending = self.channel.sending();
            let mut fds = [
                ready::interest(self.channel.as_fd(), sending),
                ready::interest(self.shared.wake.as_fd(), false),
            ];
            if Os.wait(&mut fds, due).is_err() {
                self.shared.gone.store(true, Ordering::Release);
                return;
            }
            // It fails if nothing woke it.
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        }
    }

    /// The connection to the coordinator is lost: connects to its successor, and says where this member stands. The rank trains in the
    /// meantime. Whether there is one within patience.
    fn go_back(&mut self) -> bool {
        // A child of a coordinator without a successor ends with it.
        if self.options.child.is_some() && !self.known.succession {
            return false;
        }
        self.shared.away.store(true, Ordering::Release);
        let since = Instant::now();
        let until = since + self.patience;
        while Instant::now() < until {
            // The rank may end meanwhile; what it says is said to the successor.
            match self.said.try_recv() {
                Ok(message) => {
                    self.known.note(&message);
                    continue;
                }
                Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => {}
            }
            self.succeed(since);
            match self.reach(until) {
                Ok(()) => {
                    self.shared.away.store(false, Ordering::Release);
                    return true;
                }
                Err(EnterError::Refused { why }) => {
                    // The rank may have ended.
                    drop(self.tell.send(Apart::End { why: Some(why) }));
                    return false;
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
        false
    }

    /// Becomes the coordinator itself, if it may and nobody else is.
    fn succeed(&self, since: Instant) {
        let Journal { id, ref ranks, runs_on, memory, .. } = self.known;
        let Some(open) = self.options.succeed.as_ref().filter(|_| self.known.succession) else { return };
        let before = ranks.iter().position(|rank| *rank == id).unwrap_or(ranks.len());
        if let Some(vacancy) =
            succession::take(&self.options.coordinator, since, before, (id, self.local), (runs_on, memory))
        {
            // If it fails, the place is free again, and the next try is another rank's too.
            drop(open(vacancy));
        }
    }

    /// Connects to a coordinator that may know nothing of this member.
    fn reach(&mut self, until: Instant) -> Result<(), EnterError> {
        let Proven { connection, .. } = connect(&self.options, until.min(Instant::now() + 2 * PAUSE))?;
        let mut channel = Channel::new(connection, MESSAGE_BYTES_MAX)?;
        let generation = self.shared.seat.lock().unwrap_or_else(PoisonError::into_inner).generation();
        channel.send(&self.returns(generation));
        match wait(&mut channel, Instant::now() + REACH)? {
            ToMember::Welcome { runs_on, succession, memory, .. } => {
                (self.known.runs_on, self.known.succession) = (runs_on, succession);
                self.known.memory = memory;
            }
            ToMember::Refused { why } => return Err(EnterError::Refused { why }),
            _ => return Err(EnterError::Gone),
        }
        if !self.known.note.is_empty() {
            channel.send(&ToCoordinator::Note(self.known.note.clone()));
        }
        if let Some(stand) = &self.known.stand {
            channel.send(stand);
        }
        if self.shared.left.load(Ordering::Acquire) {
            channel.send(&ToCoordinator::Leaves);
        }
        self.channel = channel;
        Ok(())
    }

    fn returns(&self, generation: u64) -> ToCoordinator {
        let (host, pid) = (crate::rendezvous::host_name(), std::process::id());
        let Journal { id, ref ranks, ref stand, trained, .. } = self.known;
        let tally = *self.shared.tally.lock().unwrap_or_else(PoisonError::into_inner);
        let running = matches!(stand, Some(ToCoordinator::Running { .. }));
        let returned = Returned { generation, ranks: ranks.clone(), running, trained, tally };
        let (host_key, job) = (self.options.host_key.clone(), self.options.job.clone());
        ToCoordinator::Return { host, host_key, pid, job, id, returned }
    }

    fn hear(&mut self, message: ToMember) {
        if let ToMember::Tally(tally) = &message {
            *self.shared.tally.lock().unwrap_or_else(PoisonError::into_inner) = *tally;
        }
        let action = self.shared.seat.lock().unwrap_or_else(PoisonError::into_inner).told(message);
        match action {
            SeatAction::Enter(form) => {
                (self.known.ranks, self.known.stand) = (form.ranks.clone(), None);
                // The rank may have ended.
                drop(self.tell.send(Apart::Form(form)));
            }
            SeatAction::End { why } => drop(self.tell.send(Apart::End { why })),
            SeatAction::Cancel => {
                self.shared.cancelled.store(true, Ordering::Release);
                raise(&self.shared);
            }
            SeatAction::LeaveAtStepEnd => self.shared.leaves.store(true, Ordering::Release),
            SeatAction::Nothing => {}
        }
    }
}

/// Ends the waits of the rank.
fn raise(shared: &SessionShared) {
    let alarm = shared.alarm.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((alarm, rank)) = &*alarm {
        let (host, op) = (String::new(), "a change of membership".to_string());
        let step = shared.step.load(Ordering::Relaxed);
        alarm.raise(Report { rank: *rank, host, step, op, cause: Cause::Gone });
    }
}

/// Asks a coordinator how things stand; the answer is JSON.
pub fn ask_status(
    coordinator: CoordinatorPlace,
    secret: &Secret,
    encrypt: Encrypt,
) -> Result<String, EnterError> {
    let job = JobMark { name: String::new(), digest: 0 };
    let secret = secret.clone();
    let host_key = String::new();
    let options = EnterOptions { coordinator, secret, job, child: None, encrypt, host_key, succeed: None };
    let Proven { connection, .. } = connect(&options, Instant::now() + REACH)?;
    let mut channel: Channel<ToCoordinator, ToMember> = Channel::new(connection, MESSAGE_BYTES_MAX)?;
    channel.send(&ToCoordinator::Ask);
    match wait(&mut channel, Instant::now() + REACH)? {
        ToMember::Status(text) => Ok(text),
        _ => Err(EnterError::Gone),
    }
}

/// The next message.
fn wait(channel: &mut Channel<ToCoordinator, ToMember>, until: Instant) -> Result<ToMember, EnterError> {
    loop {
        match channel.receive() {
            Ok(Some(message)) => return Ok(message),
            Ok(None) if Instant::now() < until => {}
            Ok(None) | Err(_) => return Err(EnterError::Gone),
        }
        channel.flush();
        let sending = channel.sending();
        Os.wait(&mut [ready::interest(channel.as_fd(), sending)], until)?;
    }
}

fn connect(options: &EnterOptions, until: Instant) -> Result<Proven, EnterError> {
    let EnterOptions { coordinator, secret, encrypt, .. } = options;
    let at = || coordinator.name();
    let mut why = String::from("it has no address");
    loop {
        let addrs: Vec<SocketAddr> = coordinator.addresses().unwrap_or_else(|error| {
            why = error.to_string();
            Vec::new()
        });
        for addr in addrs {
            let dialled = Dial::start(&Os, addr, secret.clone(), member_hello(*encrypt))
                .map(|dial| dial.wait(&Os, until));
            match dialled {
                Ok(Dialled::Proved(proven)) => return Ok(proven),
                Ok(Dialled::Turned(Turned::WrongSecret)) => {
                    return Err(EnterError::WrongSecret { at: at() });
                }
                Ok(Dialled::Turned(turned)) => why = format!("what answers is no coordinator ({turned:?})"),
                Ok(Dialled::Unconnected(error)) | Err(error) => why = explain(&error),
                Ok(Dialled::Pending(_) | Dialled::Overdue { .. }) => why = "it does not answer".into(),
            }
        }
        if Instant::now() + PAUSE >= until {
            return Err(EnterError::Unreachable { at: at(), why });
        }
        std::thread::sleep(PAUSE);
    }
}
