//! The thread that carries one class of letters between this process and the others.
//!
//! Callers put letters into outboxes, one per rank, and wake the thread. It has each rank connected at the first letter
//! ([`crate::rendezvous`]), writes as much as sockets take, and puts what arrives into the inbox.
//!
//! # When a peer dies
//! Its connection ends without a last frame. The control plane mostly knows why, and gets a moment to say so; then this
//! rank suspects the peer, and rank 0 decides, as with links. So a caller that waits at a mailbox gets the report that
//! all ranks get.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::inbox::Inbox;
use super::letter::{Letter, Payload, Shelf};
use super::limits::{Class, ClassBounds, Label, fits, weight};
use super::line::{LineHandler, LineTrouble, MailLine};
use super::{PostError, look};
use crate::alarm::Alarm;
use crate::pulse::Pulse;
use crate::ready;
use crate::rendezvous::Member;
use crate::rendezvous::door::{Door, bell, ring};
use crate::rendezvous::mesh::Edge;
use crate::report::{Cause, Report};
#[cfg(test)]
use crate::simulation::{Bug, makes};
use crate::system::System;

/// The timeout of a wait that has none.
const LONG: Duration = Duration::from_secs(3600);

/// What a courier is started with.
pub(super) struct Route {
    pub(super) system: Arc<dyn System>,
    /// This rank's place among the members.
    pub(super) rank: usize,
    /// The ranks that letters go between; the job may call them otherwise than this mailbox does.
    pub(super) members: Arc<[Member]>,
    pub(super) generation: u64,
    pub(super) class: Class,
    /// The group that its connections have.
    pub(super) group: u16,
    pub(super) bounds: ClassBounds,
    pub(super) door: Door,
    pub(super) alarm: Alarm,
    pub(super) pulse: Pulse,
    /// How long after a connection ended the control plane may say why.
    pub(super) grace: Duration,
    pub(super) inbox: Arc<Inbox>,
}

/// This process's end of a class.
pub(super) struct Courier {
    shared: Arc<CourierShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread and its callers share.
struct CourierShared {
    route: Route,
    boxes: Mutex<Boxes>,
    /// Something was sent, a rank closed, or all is settled.
    room: Condvar,
    wake: Arc<OwnedFd>,
    stop: AtomicBool,
}

struct Boxes {
    out: Vec<Outbox>,
    closing: bool,
    /// Whether everything that was posted was sent, and no connection is left.
    settled: bool,
    /// What this rank suspects.
    found: Option<Report>,
}

#[derive(Default)]
struct Outbox {
    queue: VecDeque<(Label, Payload)>,
    /// How much of the bound the unsent letters take.
    held: usize,
    /// Whether that rank takes no more.
    closed: bool,
}

impl Courier {
    pub(super) fn start(route: Route) -> std::io::Result<Courier> {
        let wake = Arc::new(bell()?);
        route.inbox.set_courier(route.class, wake.clone());
        let arrivals = route.door.bell(route.group)?;
        let out = route.members.iter().map(|_| Outbox::default()).collect();
        let boxes = Mutex::new(Boxes { out, closing: false, settled: false, found: None });
        let (system, name) = (route.system.clone(), format!("mail-{}", route.class.name()));
        let stop = AtomicBool::new(false);
        let shared = Arc::new(CourierShared { route, boxes, room: Condvar::new(), wake, stop });
        let its = shared.clone();
        let thread = system.spawn(&name, Box::new(move || Thread::new(&its).run(&arrivals)))?;
        Ok(Courier { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Puts a letter into an outbox, when there is room in it.
    pub(super) fn post(
        &self,
        to: usize,
        label: Label,
        payload: Payload,
        until: Instant,
    ) -> Result<(), PostError> {
        let CourierShared { route, .. } = &*self.shared;
        let mut boxes = self.shared.boxes();
        loop {
            if let Some(report) = self.shared.over(&boxes) {
                return Err(PostError::Lost(report));
            }
            if boxes.closing || boxes.out[to].closed {
                let rank = if boxes.closing { route.rank } else { to };
                return Err(PostError::Closed { rank });
            }
            let outbox = &mut boxes.out[to];
            if fits(outbox.held, payload.len(), route.bounds.outbox_bytes_max) {
                outbox.held += weight(payload.len());
                outbox.queue.push_back((label, payload));
                drop(boxes);
                ring(&self.shared.wake);
                return Ok(());
            }
            let Some(within) = look(&*route.system, until) else { return Err(PostError::Full { rank: to }) };
            boxes = route.system.wait_on(&self.shared.room, &self.shared.boxes, boxes, within);
        }
    }

    /// From now on nothing can be posted, and what arrives is dropped.
    pub(super) fn begin_close(&self) {
        self.shared.boxes().closing = true;
        ring(&self.shared.wake);
    }

    /// Waits until everything is sent and each rank that this one talked with knows that nothing more comes. Returns
    /// whether that happened in time.
    pub(super) fn closed(&self, until: Instant) -> Result<bool, Report> {
        let system = &self.shared.route.system;
        let mut boxes = self.shared.boxes();
        loop {
            if boxes.settled {
                return Ok(true);
            }
            if let Some(report) = self.shared.over(&boxes) {
                return Err(report);
            }
            let Some(within) = look(&**system, until) else { return Ok(false) };
            boxes = system.wait_on(&self.shared.room, &self.shared.boxes, boxes, within);
        }
    }

    /// Bytes that were posted and not sent.
    pub(super) fn held_bytes(&self) -> usize {
        self.shared.boxes().out.iter().map(|outbox| outbox.held).sum()
    }

    /// The report that ends all waits, if there is one.
    pub(super) fn over(&self) -> Option<Report> {
        self.shared.over(&self.shared.boxes())
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        ring(&self.shared.wake);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of the thread has raised the alarm already.
        let _ = thread.map(|thread| self.shared.route.system.join(thread));
    }
}

impl CourierShared {
    fn boxes(&self) -> MutexGuard<'_, Boxes> {
        self.boxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn over(&self, boxes: &Boxes) -> Option<Report> {
        let alarm = &self.route.alarm;
        if alarm.raised().is_none()
            && let Some(found) = &boxes.found
            && !alarm.judged()
        {
            // The control plane ended without an answer.
            alarm.raise(found.clone());
        }
        alarm.raised()
    }

    /// What the job is told of a member.
    fn report(&self, rank: usize, cause: Cause) -> Report {
        let place = self.route.pulse.place();
        let Member { rank, host, .. } = self.route.members[rank].clone();
        Report { rank, host, step: place.step, op: place.doing.name().to_owned(), cause }
    }
}

/// What the thread owns.
struct Thread<'a> {
    shared: &'a CourierShared,
    lines: BTreeMap<usize, MailLine>,
    /// Which ranks the door was asked for.
    asked: Vec<bool>,
    /// Lines that ended, why, and until when the control plane has time to say more.
    lost: Vec<(Instant, usize, Cause)>,
    shelf: Arc<Shelf>,
}

impl<'a> Thread<'a> {
    fn new(shared: &'a CourierShared) -> Thread<'a> {
        let Route { members, bounds, .. } = &shared.route;
        let shelf = Shelf::new(bounds.inbox_bytes_max);
        Thread { shared, lines: BTreeMap::new(), asked: vec![false; members.len()], lost: Vec::new(), shelf }
    }

    fn run(mut self, arrivals: &OwnedFd) {
        let _guard = CourierGuard(self.shared);
        let system = self.shared.route.system.clone();
        while !self.shared.stop.load(Ordering::Acquire) {
            for file in [&*self.shared.wake, arrivals] {
                // It is empty if something else woke the thread.
                let _ = rustix::io::read(file, &mut [0; 8]);
            }
            let more = self.turn();
            if more {
                continue;
            }
            let mut fds = vec![
                ready::interest(self.shared.wake.as_fd(), false),
                ready::interest(arrivals.as_fd(), false),
            ];
            fds.extend(self.lines.values().filter_map(MailLine::interest));
            let until = self.lost.iter().map(|lost| lost.0).min().unwrap_or_else(|| system.now() + LONG);
            if let Err(e) = system.wait(&mut fds, until) {
                return self.fail(format!("it cannot wait for letters: {e}"));
            }
        }
    }

    /// Everything that can be done without waiting. Returns whether there is more of it.
    fn turn(&mut self) -> bool {
        let Route { door, group, generation, class, bounds, members, .. } = &self.shared.route;
        for (name, connection) in door.take_all(*group) {
            let Some(peer) = members.iter().position(|member| member.rank == name) else {
                self.fail(format!("rank {name} connects for a mailbox that it has no part in"));
                continue;
            };
            match MailLine::new(connection, *class, *generation, *bounds) {
                Ok(line) => drop(self.lines.insert(peer, line)),
                Err(e) => self.fail(format!("it cannot use a new connection: {e}")),
            }
        }
        let closing = self.want();
        let mut more = false;
        for peer in self.lines.keys().copied().collect::<Vec<_>>() {
            let Some(line) = self.lines.get_mut(&peer) else { continue };
            let turned = line.turn(closing, &mut Desk { shared: self.shared, peer, shelf: &self.shelf });
            if line.heard_close() {
                self.forget(peer);
            }
            match turned {
                Ok(_) if self.lines[&peer].is_over() => self.end(peer),
                Ok(goes_on) => more |= goes_on,
                Err(trouble) => {
                    self.end(peer);
                    self.lose(peer, trouble);
                }
            }
        }
        self.judge();
        self.settle(closing);
        more
    }

    /// Asks for connections to ranks that have letters waiting. Returns whether this mailbox is closing.
    fn want(&mut self) -> bool {
        let boxes = self.shared.boxes();
        for (peer, outbox) in boxes.out.iter().enumerate() {
            let wants = !outbox.queue.is_empty() && !self.lines.contains_key(&peer);
            if wants && !std::mem::replace(&mut self.asked[peer], true) {
                let Route { door, group, members, .. } = &self.shared.route;
                door.want(Edge { group: *group, peer: members[peer].rank });
            }
        }
        boxes.closing
    }

    /// A rank has closed: letters that wait for it are dropped.
    fn forget(&self, peer: usize) {
        let mut boxes = self.shared.boxes();
        let outbox = &mut boxes.out[peer];
        if !outbox.closed {
            *outbox = Outbox { closed: true, ..Outbox::default() };
            self.shared.room.notify_all();
        }
    }

    fn end(&mut self, peer: usize) {
        let Route { inbox, class, .. } = &self.shared.route;
        if let Some(bytes) = self.lines.remove(&peer).and_then(|line| line.unfinished()) {
            inbox.release(*class, peer, bytes);
        }
    }

    fn lose(&mut self, peer: usize, trouble: LineTrouble) {
        let now = self.shared.route.system.now();
        let (grace, cause) = match trouble {
            LineTrouble::Gone => (self.shared.route.grace, Cause::Gone),
            LineTrouble::Damaged(what) => (Duration::ZERO, Cause::Damaged { what }),
            LineTrouble::Disagrees(what) => (Duration::ZERO, Cause::Disagrees { what }),
            LineTrouble::NoMemory(bytes) => {
                let name = self.shared.route.members[peer].rank;
                return self.fail(format!("no memory for a letter of {bytes} bytes from rank {name}"));
            }
        };
        self.lost.push((now + grace, peer, cause));
    }

    /// Suspects the peers of lost connections, if nothing more is known by now.
    fn judge(&mut self) {
        let Route { system, alarm, .. } = &self.shared.route;
        if self.lost.is_empty() {
            return;
        }
        let now = system.now();
        for (_, peer, cause) in self.lost.extract_if(.., |lost| lost.0 <= now) {
            let report = self.shared.report(peer, cause);
            if alarm.raised().is_none() && !alarm.suspect(report.clone()) {
                alarm.raise(report.clone());
            }
            self.shared.boxes().found.get_or_insert(report);
        }
    }

    fn settle(&self, closing: bool) {
        let mut boxes = self.shared.boxes();
        let sent = boxes.out.iter().all(|outbox| outbox.held == 0);
        let settled = closing && sent && self.lines.is_empty() && self.lost.is_empty();
        #[cfg(test)]
        let settled = settled || (closing && makes(Bug::ClosesAtOnce));
        // It may start again: a rank that connects later is told too.
        boxes.settled = settled && boxes.found.is_none();
        if boxes.settled {
            self.shared.room.notify_all();
        }
    }

    /// This rank cannot go on.
    fn fail(&self, why: String) {
        let report = self.shared.report(self.shared.route.rank, Cause::Failed { why });
        self.shared.route.alarm.raise(report);
    }
}

/// The in- and outbox of one peer.
struct Desk<'a> {
    shared: &'a CourierShared,
    peer: usize,
    shelf: &'a Arc<Shelf>,
}

impl LineHandler for Desk<'_> {
    fn next(&mut self) -> Option<(Label, Payload)> {
        self.shared.boxes().out[self.peer].queue.pop_front()
    }

    fn sent(&mut self, bytes: usize) {
        let mut boxes = self.shared.boxes();
        let outbox = &mut boxes.out[self.peer];
        // A rank that has closed holds nothing.
        outbox.held = outbox.held.saturating_sub(weight(bytes));
        drop(boxes);
        self.shared.room.notify_all();
    }

    fn admit(&mut self, bytes: usize) -> Result<Option<Vec<u8>>, LineTrouble> {
        let Route { inbox, class, .. } = &self.shared.route;
        if !inbox.reserve(*class, self.peer, bytes) {
            return Ok(None);
        }
        match self.shelf.take(bytes) {
            Some(memory) => Ok(Some(memory)),
            None => {
                inbox.release(*class, self.peer, bytes);
                Err(LineTrouble::NoMemory(bytes))
            }
        }
    }

    fn came(&mut self, label: Label, memory: Vec<u8>, length: usize) {
        let Route { inbox, class, .. } = &self.shared.route;
        inbox.put(Letter::came(self.peer, *class, label, (memory, length), self.shelf.clone()));
    }
}

/// A panic of the thread is a bug, and must not leave a caller waiting.
struct CourierGuard<'a>(&'a CourierShared);

impl Drop for CourierGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let cause =
                Cause::Failed { why: "the thread that carries its letters stopped because of a bug".into() };
            self.0.route.alarm.raise(self.0.report(self.0.route.rank, cause));
        }
    }
}
