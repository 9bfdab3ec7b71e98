//! The control plane: which ranks are alive, where they are in the job, and the report that all get when one is lost.
//!
//! One thread per process, named `control`, on the connections to rank 0 that joining made. It never carries data of a
//! step. Every wait here ends: with an answer, with the alarm, or with a timeout.
//!
//! # Layout
//! `watch`: the decisions. `plane`: the thread. `channel`, `message`, `bytes`: messages over a connection.

pub(crate) mod bytes;
pub(crate) mod channel;
pub(crate) mod message;
mod plane;
mod watch;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel as queue};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::alarm::Alarm;
use crate::patience::Patience;
use crate::pulse::Pulse;
use crate::rendezvous::Member;
use crate::report::{Cause, Report};
use crate::system::System;
use channel::Channel;
pub use message::SHARE_BYTES_MAX;
use plane::Plane;
pub use watch::Waiting;

/// How long a rank may take to send its last messages.
const FLUSH_TIME: Duration = Duration::from_secs(1);
/// How often a wait checks the alarm.
const LOOK: Duration = Duration::from_millis(20);

/// This rank's end of the control plane. Clones share it. When the last one is dropped without [`Control::goodbye`],
/// the other ranks take this one for lost.
#[derive(Clone)]
pub struct Control(Arc<ControlEnd>);

struct ControlEnd {
    rank: usize,
    patience: Patience,
    hosts: Vec<String>,
    shared: Arc<ControlShared>,
    commands: Sender<Command>,
    /// Held during an exchange: they happen one after the other.
    exchange: Mutex<()>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread and its callers share.
struct ControlShared {
    alarm: Alarm,
    system: Arc<dyn System>,
    pulse: Pulse,
    /// Called with a message about a long wait.
    voice: Mutex<Option<Voice>>,
    wake: OwnedFd,
}

/// Called with a message about a long wait. It must not block.
pub type Voice = Arc<dyn Fn(&Waiting) + Send + Sync>;

/// A request of a caller to the thread.
enum Command {
    Share { blob: Vec<u8>, answer: Sender<Vec<Vec<u8>>> },
    Flush { done: Sender<()> },
    Goodbye { done: Sender<()> },
    Stop,
}

impl Control {
    /// Starts the thread on connections by rank.
    pub(crate) fn start(
        system: Arc<dyn System>,
        rank: usize,
        members: &[Member],
        channels: Vec<Option<Channel>>,
        patience: Patience,
    ) -> std::io::Result<Control> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (alarm, pulse, voice) = (Alarm::default(), Pulse::default(), Mutex::new(None));
        let shared = Arc::new(ControlShared { alarm, system: system.clone(), pulse, voice, wake });
        let (commands, queued) = queue();
        let hosts: Vec<String> = members.iter().map(|member| member.host.clone()).collect();
        let plane = Plane::new(rank, hosts.clone(), channels, shared.clone(), queued, patience);
        let thread = system.spawn("control", Box::new(move || plane.run()))?;
        let thread = Mutex::new(Some(thread));
        Ok(Control(Arc::new(ControlEnd {
            rank,
            patience,
            hosts,
            shared,
            commands,
            exchange: Mutex::new(()),
            thread,
        })))
    }

    /// The alarm that is raised when the job cannot go on. Whichever thread of this process raises it, all ranks get
    /// the report.
    pub fn alarm(&self) -> Alarm {
        self.0.shared.alarm.clone()
    }

    /// Where this rank records its progress.
    pub fn pulse(&self) -> Pulse {
        self.0.shared.pulse.clone()
    }

    /// How patient all ranks are.
    pub fn patience(&self) -> Patience {
        self.0.patience
    }

    /// On rank 0: sets what is called about a long wait.
    pub fn on_long_wait(&self, voice: Voice) {
        *self.0.shared.voice.lock().unwrap_or_else(PoisonError::into_inner) = Some(voice);
    }

    /// Every rank gives some bytes, at most [`SHARE_BYTES_MAX`], and gets those of all by rank. All ranks call it
    /// the same number of times and in the same order.
    pub fn share(&self, blob: &[u8]) -> Result<Vec<Vec<u8>>, Report> {
        if blob.len() > SHARE_BYTES_MAX {
            let n = blob.len();
            return Err(self
                .fail(&format!("{n} bytes to share between ranks; at most {SHARE_BYTES_MAX} are allowed")));
        }
        let _one = self.0.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let (answer, answered) = queue();
        self.ask(Command::Share { blob: blob.to_vec(), answer });
        self.wait(&answered)
    }

    /// This rank cannot go on: all ranks get the reason, unless another report came first. Returns the report that all
    /// get.
    pub fn fail(&self, why: &str) -> Report {
        self.0.shared.alarm.raise(self.own(Cause::Failed { why: why.into() }));
        // The process may end right after this: make sure that the report has been sent.
        let (done, flushed) = queue();
        self.ask(Command::Flush { done });
        let _ = self.0.shared.system.receive(&flushed, FLUSH_TIME);
        self.raised_or(Cause::Failed { why: why.into() })
    }

    /// The regular end: the others do not take this rank for lost. Rank 0 waits until the others have ended too,
    /// because they need it until then.
    pub fn goodbye(&self) -> Result<(), Report> {
        let (done, left) = queue();
        self.ask(Command::Goodbye { done });
        // This tells the thread to end.
        while let Err(RecvTimeoutError::Timeout) = self.0.shared.system.receive(&left, LOOK) {}
        match self.0.shared.alarm.raised() {
            Some(report) => Err(report),
            None => Ok(()),
        }
    }

    fn ask(&self, command: Command) {
        // If the thread has ended, the queue drops the command, which wakes the caller that waits for the answer.
        let _ = self.0.commands.send(command);
        self.0.shared.wake();
    }

    /// An answer of the thread, or the alarm.
    fn wait<T>(&self, answered: &Receiver<T>) -> Result<T, Report> {
        loop {
            match self.0.shared.system.receive(answered, LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.raised_or(Cause::Failed { why: "its control plane has ended".into() }));
                }
            }
            if let Some(report) = self.0.shared.alarm.raised() {
                return Err(report);
            }
        }
    }

    fn raised_or(&self, cause: Cause) -> Report {
        self.0.shared.alarm.raised().unwrap_or_else(|| self.own(cause))
    }

    fn own(&self, cause: Cause) -> Report {
        let place = self.0.shared.pulse.place();
        let (rank, step, op) = (self.0.rank, place.step, place.doing.name().to_owned());
        Report { rank, host: self.0.hosts[rank].clone(), step, op, cause }
    }
}

impl ControlShared {
    fn wake(&self) {
        // It fails only if the counter is full, and then the thread is awake anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for ControlEnd {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        self.shared.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of the thread has raised the alarm already.
        let _ = thread.map(|thread| self.shared.system.join(thread));
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Control of rank {} of {}", self.0.rank, self.0.hosts.len())
    }
}
