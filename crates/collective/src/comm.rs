//! One rank's end of a group of ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use polyreme_net::control::Voice;
use polyreme_net::patience::STALL;
use polyreme_net::{Alarm, Block, Control, Doing, Links, Pulse, Report, Segment, SegmentError};

use crate::background::Background;
use crate::carrier::{Carrier, measured};
use crate::element::{Element, Reduce};
use crate::lane::Lane;
use crate::links::{Linked, TwoLevel};
use crate::mpi::{self, Mpi, MpiMail};
use crate::record::CallRecord;
use crate::shared::{ShmComm, ShmSetup, no_memory};
use crate::split::Ways;
use crate::work::{Cuts, Span, Ticket, Work};

/// One rank's end of a group. Every rank calls the same operations in the same order.
///
/// An operation that returns a [`Report`] has ended the group: every other rank's waits end with the same report, and
/// so does every later call. An end that is dropped without [`Comm::finish`] counts as lost for ranks that still wait
/// for it.
pub struct Comm {
    rank: usize,
    size: usize,
    /// The step that operations belong to; one for all groups of a rank.
    step: Arc<AtomicU64>,
    pub(crate) inner: CommKind,
    pub(crate) ways: Ways,
    /// Messages, where they do not use the operations' path; and why one was not started.
    pub(crate) mail: Option<Mail>,
    no_mail: Option<Report>,
    /// Operations that were started, and that were done.
    started: u64,
    done: u64,
    /// Where this rank records its progress.
    pulse: Pulse,
    /// The kind of the operation that was started last.
    last: Doing,
    /// The calls that were made.
    pub(crate) record: CallRecord,
}

/// How the ranks are connected.
pub(crate) enum CommKind {
    Shared(Box<ShmComm>),
    /// Sockets or MPI, with a thread that does the exchanges.
    Background(Background),
}

/// Messages that go beside the operations of a group.
pub(crate) enum Mail {
    Links(Lane),
    Mpi(MpiMail),
}

/// The bit that marks tickets of messages.
const MESSAGE: u64 = 1 << 62;

impl Comm {
    /// A group of one.
    pub fn alone() -> Comm {
        Comm::local(1).pop().expect("a group of one has a member")
    }

    /// A group of threads of this process: one end per thread.
    ///
    /// # Panics
    /// If there is no memory for them to meet in; see [`Comm::try_threads`].
    pub fn local(size: usize) -> Vec<Comm> {
        Comm::threads(size, &Alarm::default(), STALL)
    }

    /// The same, with an alarm that ends all waits, and a timeout for when all of them stand still.
    ///
    /// # Panics
    /// As [`Comm::local`].
    pub fn threads(size: usize, alarm: &Alarm, stall: Duration) -> Vec<Comm> {
        Comm::try_threads(size, alarm, stall).unwrap_or_else(|error| panic!("{error}"))
    }

    /// [`Comm::threads`]; an error if there is no memory for the threads to meet in.
    pub fn try_threads(size: usize, alarm: &Alarm, stall: Duration) -> Result<Vec<Comm>, SegmentError> {
        let pulses: Vec<Pulse> = (0..size).map(|_| Pulse::default()).collect();
        let ways = Ways::threads(alarm, stall, &pulses);
        let ends = ShmComm::local(alarm, stall, &pulses, &ways.names)?.into_iter().zip(pulses).enumerate();
        let end = |(rank, (end, pulse))| Comm {
            pulse,
            ..Comm::new(rank, size, CommKind::Shared(Box::new(end)), ways.clone())
        };
        Ok(ends.map(end).collect())
    }

    /// One process of a group that shares memory. Returns when all have joined.
    pub fn shm(setup: ShmSetup) -> Result<Comm, Report> {
        let (rank, size) = (setup.rank, setup.size);
        let ways = Ways::processes(&setup);
        Ok(Comm::new(rank, size, CommKind::Shared(Box::new(ShmComm::shm(setup)?)), ways))
    }

    /// Memory for a group of processes. One of them, or their parent, creates it, keeps it until all have joined, and
    /// tells the others its path. Ranks of another generation of the job cannot open it.
    pub fn segment(size: usize, generation: u64) -> Result<Segment, SegmentError> {
        ShmComm::segment(size, generation)
    }

    /// Opens what another process created with [`Comm::segment`].
    pub fn open_segment(path: &str, size: usize, generation: u64) -> Result<Segment, SegmentError> {
        ShmComm::open_segment(path, size, generation)
    }

    /// One process of a group connected by links.
    pub fn tcp(links: Links) -> Result<Comm, Report> {
        let (rank, size) = (links.rank(), links.size());
        let carrier = Carrier::Links(Box::new(measured(Linked::over(links))?));
        Ok(Comm::new(rank, size, CommKind::Background(Background::new(carrier)), Ways::apart(size)))
    }

    /// One process of a group on several hosts that have several ranks each: memory inside hosts, links between their
    /// first ranks (`between`, which only those have), and links between any two for what does not involve all. `hosts`
    /// has the ranks of each host.
    pub fn two_level(
        hosts: Vec<Vec<usize>>,
        inside: Comm,
        between: Option<Links>,
        every_two: Links,
    ) -> Result<Comm, Report> {
        let (rank, size) = (every_two.rank(), every_two.size());
        let between = between.map(|links| measured(Linked::over(links))).transpose()?;
        let ways = Ways::levels(&hosts, &inside.ways);
        let levels = Box::new(TwoLevel::new(rank, hosts, inside, between));
        // Operations over these have only one algorithm, so no costs are measured, and pairs that never talk this way
        // stay unconnected.
        let every_two = Box::new(Linked::over(every_two));
        let carrier = Carrier::Levels { levels, every_two };
        Ok(Comm::new(rank, size, CommKind::Background(Background::new(carrier)), ways))
    }

    /// One process that `mpirun` or `srun` started: MPI's own collectives, through a library that was found.
    pub fn mpi(library: &mpi::MpiLibrary) -> Result<Comm, String> {
        let mpi = Mpi::start(library)?;
        let (rank, size) = (mpi.rank(), mpi.size());
        let inner = CommKind::Background(Background::new(Carrier::Mpi(Box::new(mpi))));
        Ok(Comm::new(rank, size, inner, Ways::apart(size)))
    }

    fn new(rank: usize, size: usize, inner: CommKind, ways: Ways) -> Comm {
        let (pulse, last) = (Pulse::default(), Doing::OwnWork);
        Comm {
            rank,
            size,
            step: Arc::default(),
            inner,
            ways,
            mail: None,
            no_mail: None,
            started: 0,
            done: 0,
            pulse,
            last,
            record: CallRecord::default(),
        }
    }

    /// This rank's end of a group that was split from this one.
    pub(crate) fn child(&self, rank: usize, size: usize, inner: CommKind, ways: Ways) -> Comm {
        let (step, pulse) = (self.step.clone(), self.pulse.clone());
        Comm { step, pulse, ..Comm::new(rank, size, inner, ways) }
    }

    /// Where this rank records its progress.
    pub(crate) fn pulse(&self) -> Pulse {
        self.pulse.clone()
    }

    /// The step that operations belong to.
    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// From now on sends, with every heartbeat, in which step and operation this rank is.
    pub fn tell(&mut self, control: &Control) {
        self.pulse = control.pulse();
    }

    /// Sets what is called about a long wait, for ranks that are threads; others use the control plane's.
    pub fn on_long_wait(&mut self, voice: Voice) {
        match &mut self.inner {
            CommKind::Shared(shared) => shared.on_long_wait(voice),
            CommKind::Background(_) => {}
        }
    }

    /// Records what this rank does alone, until its next exchange.
    pub fn set_doing(&mut self, doing: Doing) {
        self.pulse.at(self.step(), doing);
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether all ranks see each other's memory, so that blocks of [`Comm::shared_block`] are one for all.
    pub fn shares_memory(&self) -> bool {
        match &self.inner {
            CommKind::Shared(_) => true,
            CommKind::Background(_) => false,
        }
    }

    /// Whether messages of this group run in the order of its operations, while those of a group that is split from it would go
    /// beside them: so it is under MPI before the first split. Ranks that pass messages round a ring need the latter.
    pub fn orders_messages(&self) -> bool {
        matches!(&self.inner, CommKind::Background(background) if background.is_mpi()) && self.mail.is_none()
    }

    /// Bytes that this rank has sent in this group, over whatever connects ranks that do not share memory; frames and their heads
    /// are not counted. `None` under MPI, which chooses its own algorithms.
    pub fn sent_bytes(&self) -> Option<u64> {
        let messages = match &self.mail {
            Some(Mail::Links(lane)) => lane.sent_bytes(),
            Some(Mail::Mpi(_)) | None => 0,
        };
        match &self.inner {
            CommKind::Shared(_) => Some(0),
            CommKind::Background(background) => Some(background.sent_bytes()? + messages),
        }
    }

    /// Sets the step that the next operations belong to, for reports: for this group, and all groups split from it or
    /// that it was split from.
    pub fn set_step(&mut self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        self.pulse.at(step, Doing::OwnWork);
    }

    /// Tells the others that this rank fails: their waits end with a report that says so.
    pub fn fail(&mut self, why: &str) {
        let step = self.step();
        match &mut self.inner {
            CommKind::Shared(shared) => shared.fail(step, why),
            CommKind::Background(background) => {
                background.set_step(step);
                drop(background.fail(why));
            }
        }
    }

    /// Waits until every rank is here, and leaves. After that this rank is not missed.
    pub fn finish(mut self) -> Result<(), Report> {
        if matches!(self.inner, CommKind::Background(_)) {
            self.barrier()?;
        }
        let step = self.step();
        self.pulse.at(step, Doing::Finish);
        if let Some(Mail::Links(lane)) = self.mail.take() {
            lane.finish();
        }
        self.leave_rendezvous()?;
        match self.inner {
            CommKind::Shared(shared) => shared.finish(step),
            CommKind::Background(_) => Ok(()),
        }
    }

    /// Memory of this rank that the others can read without a copy. All ranks must ask for the same size at the same
    /// time. It lives as long as the group. If there is not enough memory, the report says for `what`.
    pub fn block(&mut self, bytes: usize, what: &str) -> Result<Block, Report> {
        self.during(Doing::Block, |comm, step| {
            comm.wait_started()?;
            match &mut comm.inner {
                CommKind::Shared(shared) => shared.block(bytes, what, step),
                CommKind::Background(background) => own_block(background, bytes, what),
            }
        })
    }

    /// Memory that all ranks see, if they share memory; this rank's own otherwise. It lives as long as the group. If
    /// there is not enough memory, the report says for `what`.
    pub fn shared_block(&mut self, bytes: usize, what: &str) -> Result<Block, Report> {
        self.during(Doing::Block, |comm, step| {
            comm.wait_started()?;
            match &mut comm.inner {
                CommKind::Shared(shared) => shared.shared_block(bytes, what, step),
                CommKind::Background(background) => own_block(background, bytes, what),
            }
        })
    }

    /// Starts an operation; at most a few dozen at a time. They run in the order in which they were started, and every
    /// other operation waits for them. Between ranks that share memory this only announces it; the work is done in the
    /// wait.
    ///
    /// Messages go beside them: a send and a receive wait for nothing but each other, are matched by tag, and a send never waits for
    /// the other rank's receive, so ranks may start them in any order. That takes a way of their own: over sockets
    /// [`Comm::set_connect`], under MPI a group that was split or is the result of it. Otherwise they run in order too.
    ///
    /// # Safety
    /// The memory is there, aligned for its elements, and stays, and nothing else accesses it, until the operation was
    /// waited for.
    pub unsafe fn start(&mut self, work: Work) -> Ticket {
        self.note_work(&work);
        // SAFETY: promised by the caller.
        unsafe { self.start_noted(work) }
    }

    /// # Safety
    /// As [`Comm::start`].
    unsafe fn start_noted(&mut self, work: Work) -> Ticket {
        self.last = work.doing();
        let step = self.step();
        if matches!(work, Work::Send { .. } | Work::Receive { .. }) && self.has_mail() {
            // SAFETY: promised by the caller.
            return unsafe { self.start_message(work, step) };
        }
        match &mut self.inner {
            CommKind::Shared(shared) => {
                let work = if let Work::CodedSum(sum) = work { sum.plain() } else { work };
                // SAFETY: promised by the caller.
                unsafe { shared.start(work, step) }
            }
            CommKind::Background(background) => {
                background.set_step(step);
                // SAFETY: promised by the caller.
                return unsafe { background.start(work) };
            }
        }
        self.started += 1;
        Ticket(self.started)
    }

    /// Whether messages go beside other operations.
    fn has_mail(&self) -> bool {
        matches!(self.inner, CommKind::Shared(_)) || self.mail.is_some()
    }

    /// # Safety
    /// As [`Comm::start`].
    unsafe fn start_message(&mut self, work: Work, step: u64) -> Ticket {
        // SAFETY: promised by the caller, to each of them.
        let started = unsafe {
            match (&mut self.inner, &mut self.mail, work) {
                (_, Some(Mail::Mpi(mail)), work) => mail.start(&work, step),
                (_, Some(Mail::Links(lane)), Work::Send { to, tag, span }) => {
                    lane.send(to, tag, span, step).map(|()| 0)
                }
                (_, Some(Mail::Links(lane)), Work::Receive { from, tag, span }) => {
                    lane.receive(from, tag, span, step)
                }
                (CommKind::Shared(shared), None, Work::Send { to, tag, span }) => {
                    shared.send_letter(to, tag, span, step).map(|()| 0)
                }
                (CommKind::Shared(shared), None, Work::Receive { from, tag, span }) => {
                    shared.expect_letter(from, tag, span, step)
                }
                (_, _, work) => unreachable!("{} is not a message that goes beside others", work.name()),
            }
        };
        let id = started.unwrap_or_else(|report| {
            self.no_mail.get_or_insert(report);
            0
        });
        Ticket(MESSAGE | id)
    }

    fn wait_message(&mut self, id: u64, step: u64) -> Result<(), Report> {
        if let Some(report) = &self.no_mail {
            return Err(report.clone());
        }
        match (&mut self.inner, &mut self.mail) {
            (_, Some(Mail::Mpi(mail))) => mail.wait(id, step),
            (_, Some(Mail::Links(lane))) => lane.wait(id, step),
            (CommKind::Shared(shared), None) => shared.wait_letter(id, step),
            (CommKind::Background(_), None) => Ok(()),
        }
    }

    /// Waits until an operation, and those started before it, are done; or until a message is, whatever was started before it.
    pub fn wait(&mut self, ticket: Ticket) -> Result<(), Report> {
        if ticket.0 >> 62 == 1 {
            return self.during(self.last, |comm, step| comm.wait_message(ticket.0 & !MESSAGE, step));
        }
        self.during(self.last, |comm, step| match &mut comm.inner {
            CommKind::Background(background) => background.wait(ticket),
            CommKind::Shared(shared) => {
                while comm.done < ticket.0.min(comm.started) {
                    shared.run_first(step)?;
                    comm.done += 1;
                }
                Ok(())
            }
        })
    }

    /// Waits until every rank is here.
    pub fn barrier(&mut self) -> Result<(), Report> {
        self.note(Doing::Barrier, None);
        self.wait_started()?;
        self.during(Doing::Barrier, |comm, step| match &mut comm.inner {
            CommKind::Shared(shared) => shared.barrier(step),
            CommKind::Background(_) => comm.run(Work::Barrier),
        })
    }

    /// Every rank gets the reduction of all.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], reduce: Reduce) -> Result<(), Report> {
        self.call(Work::AllReduce(Span::of(data), reduce))
    }

    /// Each rank gets the reduction of its own range.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        data: &mut [T],
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), Report> {
        self.call(Work::ReduceScatter(Span::of(data), cuts.clone(), reduce))
    }

    /// Every rank gets the ranges of all.
    pub fn all_gather<T: Element>(&mut self, data: &mut [T], cuts: &Cuts) -> Result<(), Report> {
        self.call(Work::AllGather(Span::of(data), cuts.clone()))
    }

    /// Every rank gets the data of `root`.
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<(), Report> {
        self.call(Work::Broadcast(Span::of(data), root))
    }

    /// The root gets the ranges of all: `mine` is this rank's, `into` is the whole, which only the root has.
    pub fn gather<T: Element>(
        &mut self,
        mine: &[T],
        into: Option<&mut [T]>,
        cuts: &Cuts,
        root: usize,
    ) -> Result<(), Report> {
        self.note(Doing::Gather, Some(Span::read(mine)));
        self.wait_started()?;
        self.during(Doing::Gather, |comm, step| match &mut comm.inner {
            CommKind::Shared(shared) => shared.gather(Span::read(mine), into.map(Span::of), cuts, root, step),
            CommKind::Background(_) => {
                let (mine, into, cuts) = (Span::read(mine), into.map(Span::of), cuts.clone());
                comm.run(Work::Gather { mine, into, cuts, root })
            }
        })
    }

    /// Each rank gets its range of what the root has: `mine` is this rank's, `from` is the whole, which only the root
    /// has.
    pub fn scatter<T: Element>(
        &mut self,
        mine: &mut [T],
        from: Option<&[T]>,
        cuts: &Cuts,
        root: usize,
    ) -> Result<(), Report> {
        self.note(Doing::Scatter, Some(Span::of(mine)));
        self.wait_started()?;
        self.during(Doing::Scatter, |comm, step| match &mut comm.inner {
            CommKind::Shared(shared) => {
                shared.scatter(Span::of(mine), from.map(Span::read), cuts, root, step)
            }
            CommKind::Background(_) => {
                let (mine, from, cuts) = (Span::of(mine), from.map(Span::read), cuts.clone());
                comm.run(Work::Scatter { mine, from, cuts, root })
            }
        })
    }

    /// Sends range `r` to rank `r`, and receives range `r` from rank `r`.
    pub fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_cuts: &Cuts,
        recv: &mut [T],
        recv_cuts: &Cuts,
    ) -> Result<(), Report> {
        // SAFETY: two slices that are borrowed until it returns.
        unsafe { self.all_to_all_spans(Span::read(send), send_cuts, Span::of(recv), recv_cuts) }
    }

    /// The same for memory that is named by its address.
    ///
    /// # Safety
    /// Both are there, aligned for their elements, and do not overlap, and nothing else accesses them meanwhile.
    pub unsafe fn all_to_all_spans(
        &mut self,
        send: Span,
        send_cuts: &Cuts,
        recv: Span,
        recv_cuts: &Cuts,
    ) -> Result<(), Report> {
        self.note(Doing::AllToAll, Some(send));
        self.wait_started()?;
        self.during(Doing::AllToAll, |comm, step| match &mut comm.inner {
            CommKind::Shared(shared) => shared.all_to_all(send, send_cuts, recv, recv_cuts, step),
            CommKind::Background(_) => {
                let (send_cuts, recv_cuts) = (send_cuts.clone(), recv_cuts.clone());
                comm.run(Work::AllToAll { send, send_cuts, recv, recv_cuts })
            }
        })
    }

    /// Sends to one rank, which must receive as many elements. Like `MPI_Send`, it may return before that or wait for
    /// it: short messages are kept for the receiver, long ones wait until it receives them. So ranks that send to each
    /// other, two or more in a cycle, and receive only afterwards depend on the length of their messages. One of them
    /// must receive first, or all must call [`Comm::all_to_all`]. Otherwise long messages end in a report that says so:
    /// at once between ranks that share memory, after some seconds over sockets for two ranks, and with the stall
    /// timeout for more. MPI reports nothing, and waits.
    pub fn send<T: Element>(&mut self, to: usize, data: &[T]) -> Result<(), Report> {
        self.note(Doing::Send, Some(Span::read(data)));
        self.during(Doing::Send, |comm, step| match &mut comm.inner {
            CommKind::Shared(shared) => shared.send(to, Span::read(data), step),
            CommKind::Background(_) => comm.run(Work::Send { to, tag: 0, span: Span::read(data) }),
        })
    }

    /// Receives what one rank sends with [`Comm::send`].
    pub fn recv<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), Report> {
        self.note(Doing::Receive, Some(Span::of(data)));
        self.during(Doing::Receive, |comm, step| match &mut comm.inner {
            CommKind::Shared(shared) => shared.recv(from, Span::of(data), step),
            CommKind::Background(_) => comm.run(Work::Receive { from, tag: 0, span: Span::of(data) }),
        })
    }

    /// Runs something in which this rank waits for others.
    fn during<R>(&mut self, doing: Doing, work: impl FnOnce(&mut Comm, u64) -> R) -> R {
        let step = self.step();
        self.pulse.at(step, doing);
        if let CommKind::Background(background) = &mut self.inner {
            background.set_step(step);
        }
        let done = work(self, step);
        self.pulse.at(self.step(), Doing::OwnWork);
        done
    }

    /// See [`ShmComm::force_roomy`].
    #[cfg(test)]
    pub(crate) fn force_roomy(&mut self, roomy: bool, openly: bool) {
        match &mut self.inner {
            CommKind::Shared(shared) => shared.force_roomy(roomy, openly),
            CommKind::Background(_) => panic!("only ranks that share memory choose by their cores"),
        }
    }

    fn call(&mut self, work: Work) -> Result<(), Report> {
        self.note_work(&work);
        self.run(work)
    }

    fn run(&mut self, work: Work) -> Result<(), Report> {
        if let CommKind::Background(_) = &self.inner {
            return self.during(work.doing(), |comm, _| match &mut comm.inner {
                // SAFETY: the caller's borrow lasts until this returns, and no operation uses it after that.
                CommKind::Background(background) => unsafe { background.run(work) },
                CommKind::Shared(_) => unreachable!("asked above"),
            });
        }
        // SAFETY: the caller's borrow lasts until this returns, and nothing runs in the background after that.
        let ticket = unsafe { self.start_noted(work) };
        self.wait(ticket)
    }

    /// Waits for everything that was started.
    fn wait_started(&mut self) -> Result<(), Report> {
        match self.inner {
            // They run in order.
            CommKind::Background(_) => Ok(()),
            CommKind::Shared(_) => self.wait(Ticket(self.started)),
        }
    }
}

/// Memory of this process, for transports without shared memory.
fn own_block(background: &mut Background, bytes: usize, what: &str) -> Result<Block, Report> {
    let made = Segment::local(bytes).map(|segment| segment.block().clone());
    made.map_err(|error| background.fail(&no_memory(what, &error)))
}
