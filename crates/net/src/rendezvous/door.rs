//! How a rank is reached while the job runs: one thread per process, named `door`, connects pairs when they first talk.
//!
//! It drives the [`Mesh`] that joining left, so the listener stays open for as long as any links are, with the gate in
//! front of it. Because it is a separate thread, a rank that computes, reads or writes can still be connected to. It
//! keeps a connection until the links of its group take it, which may be later than the other side uses it.
//!
//! # When a pair cannot be connected
//! The rank that has to connect notices. Its door suspects the other rank, and rank 0 tells all, as with every
//! suspicion; so all have the same report, which names both and says why. If this thread itself ends because of a bug,
//! the alarm is raised.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::Member;
use super::mesh::{Edge, Mesh, Opened};
use crate::alarm::Alarm;
use crate::connection::Connection;
use crate::control::Control;
use crate::pulse::Pulse;
use crate::ready;
use crate::report::{Cause, Report};
use crate::system::System;

/// The timeout of a wait that has none.
const LONG: Duration = Duration::from_secs(3600);

/// This rank's door. Clones share it; when the last is dropped, no rank can connect to this one.
#[derive(Clone)]
pub(crate) struct Door(Arc<DoorEnd>);

struct DoorEnd {
    shared: Arc<DoorShared>,
    system: Arc<dyn System>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread and its callers share.
struct DoorShared {
    rank: usize,
    members: Arc<[Member]>,
    alarm: Alarm,
    pulse: Pulse,
    edges: Mutex<Edges>,
    stop: AtomicBool,
    wake: OwnedFd,
}

#[derive(Default)]
struct Edges {
    wanted: Vec<Edge>,
    open: BTreeMap<Edge, Connection>,
    /// Signalled when a connection of a group has been made.
    bells: Vec<(u16, Weak<OwnedFd>)>,
}

impl Door {
    /// Starts the thread; `open` are the connections that joining made.
    pub(super) fn start(
        system: Arc<dyn System>,
        rank: usize,
        members: Arc<[Member]>,
        mesh: Mesh,
        open: Opened,
        control: &Control,
    ) -> io::Result<Door> {
        let edges = Edges { open: open.into_iter().collect(), ..Edges::default() };
        let shared = Arc::new(DoorShared {
            rank,
            members,
            alarm: control.alarm(),
            pulse: control.pulse(),
            edges: Mutex::new(edges),
            stop: AtomicBool::new(false),
            wake: bell()?,
        });
        let (its, clock) = (shared.clone(), system.clone());
        let thread = system.spawn("door", Box::new(move || its.keep(mesh, &*clock)))?;
        Ok(Door(Arc::new(DoorEnd { shared, system, thread: Mutex::new(Some(thread)) })))
    }

    /// Asks for an edge to be connected. [`Door::take`] returns the connection once it is there; if it cannot be made,
    /// the alarm is raised.
    pub(crate) fn want(&self, edge: Edge) {
        self.0.shared.edges().wanted.push(edge);
        ring(&self.0.shared.wake);
    }

    /// Takes the connection of an edge, if it is there.
    pub(crate) fn take(&self, edge: Edge) -> Option<Connection> {
        self.0.shared.edges().open.remove(&edge)
    }

    /// The connections of a group that are there and were not taken, with the rank at their other end.
    pub(crate) fn take_all(&self, group: u16) -> Vec<(usize, Connection)> {
        let open = &mut self.0.shared.edges().open;
        let taken = open.extract_if(.., |edge, _| edge.group == group);
        taken.map(|(edge, connection)| (edge.peer, connection)).collect()
    }

    /// A file that becomes readable whenever a connection of a group has been made.
    pub(crate) fn bell(&self, group: u16) -> io::Result<Arc<OwnedFd>> {
        let file = Arc::new(bell()?);
        self.0.shared.edges().bells.push((group, Arc::downgrade(&file)));
        Ok(file)
    }
}

impl DoorShared {
    /// The thread.
    fn keep(&self, mut mesh: Mesh, system: &dyn System) {
        let _guard = DoorGuard(self);
        while !self.stop.load(Ordering::Acquire) {
            // It is empty if something else woke the thread.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            let wanted = std::mem::take(&mut self.edges().wanted);
            wanted.into_iter().for_each(|edge| mesh.want(edge));
            for (edge, settled) in mesh.turn() {
                match settled {
                    Ok(connection) => self.hand_over(edge, connection),
                    Err(why) => self.suspect(edge.peer, why),
                }
            }
            let mut fds = vec![ready::interest(self.wake.as_fd(), false)];
            mesh.interests(&mut fds);
            let until = mesh.due().unwrap_or_else(|| system.now() + LONG);
            if let Err(e) = system.wait(&mut fds, until) {
                let cause = Cause::Failed { why: format!("it cannot wait for connections: {e}") };
                self.alarm.raise(self.report(self.rank, cause));
                return;
            }
        }
    }

    fn hand_over(&self, edge: Edge, connection: Connection) {
        let mut edges = self.edges();
        edges.open.insert(edge, connection);
        edges.bells.retain(|(group, bell)| match bell.upgrade() {
            Some(bell) if *group == edge.group => {
                ring(&bell);
                true
            }
            bell => bell.is_some(),
        });
    }

    fn suspect(&self, peer: usize, why: String) {
        let addr = self.members[peer].addr;
        let (by, from) = (self.rank, &self.members[self.rank].host);
        let what = format!("rank {by} on {from} cannot connect to it at {addr}: {why}");
        let report = self.report(peer, Cause::Unreachable { what });
        if !self.alarm.suspect(report.clone()) {
            self.alarm.raise(report);
        }
    }

    fn report(&self, rank: usize, cause: Cause) -> Report {
        let place = self.pulse.place();
        let host = self.members[rank].host.clone();
        Report { rank, host, step: place.step, op: place.doing.name().to_owned(), cause }
    }

    fn edges(&self) -> MutexGuard<'_, Edges> {
        self.edges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A panic of the thread is a bug, and must not leave a caller waiting.
struct DoorGuard<'a>(&'a DoorShared);

impl Drop for DoorGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let cause = Cause::Failed { why: "the thread that connects it stopped because of a bug".into() };
            self.0.alarm.raise(self.0.report(self.0.rank, cause));
        }
    }
}

impl Drop for DoorEnd {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        ring(&self.shared.wake);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of the thread has raised the alarm already.
        let _ = thread.map(|thread| self.system.join(thread));
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Door of rank {}", self.0.shared.rank)
    }
}

/// A file to wake a thread with.
pub(crate) fn bell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

/// Makes it readable.
pub(crate) fn ring(bell: &OwnedFd) {
    // It fails only if the counter is full, and then it is readable.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}
