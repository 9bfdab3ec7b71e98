//! Ranks that see each other's memory: threads of one process, or processes of one host.
//!
//! # Direct and staged
//! *Direct*: every rank publishes where its memory is, and the others read and write it in place. Nothing is copied to
//! be communicated. Threads can do so with any memory, processes with that of a block.
//!
//! *Staged*: every rank copies what others need into its own staging areas, piece by piece, and they take it from
//! there. The pieces are small enough to stay in cache, so main memory traffic is that of the direct way. Short data
//! are staged too where ranks share cores: a copy costs less than the second meeting that the direct way needs.
//!
//! # Pieces
//! A rank has [`layout::PIECES`] staging areas and uses them in turn, over all operations. One rule makes that safe: a
//! rank that has posted piece `p` has finished reading the pieces up to `p - 2` of the others. So piece `q` may be
//! written, over `q - 4`, when all ranks have posted `q - 2`.
//!
//! # An operation
//! `start` publishes the operation and where its memory is; `wait` does this rank's share of the work. Before a rank
//! reads anything of others it has read what all of them published ([`call`]), and every rank comes to the same
//! verdict. Every operation has a phase in which all ranks wait for all; so when an operation has ended on a rank, all
//! others have at least begun it, and what was published for the one before is no longer needed.
//!
//! [`meet`] describes what happens when a rank is lost.
//!
//! # Layout
//! [`layout`]: the layout of the memory. [`join`]: how a group is formed. [`meet`]: counters, waits, failures.
//! [`lateness`]: when a wait is too long. [`call`]: what is published. [`blocks`]: memory that others see. [`letters`]:
//! messages with tags. [`memory`]: copies and sums, and the unsafe code. [`reduce`], [`spread`], [`exchange`],
//! [`pair`]: the operations.

mod blocks;
mod call;
mod exchange;
mod join;
mod lateness;
mod layout;
mod letters;
mod meet;
mod memory;
mod pair;
mod reduce;
mod spread;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use polyreme_net::control::Voice;
use polyreme_net::{Cause, Report};

use crate::element::Reduce;
use crate::work::{Cuts, Span, Work};

pub(crate) use blocks::no_memory;
use blocks::{GroupBlocks, Handover};
use call::{Call, MemoryRef, ReadEntry, SharedOp};
pub use join::ShmSetup;

/// Bytes of the staging buffers of each rank, in a group of `ranks` that share memory. They do not depend on what is exchanged.
pub fn staging_bytes(ranks: usize) -> usize {
    layout::ShmLayout::of(ranks).staging_bytes()
}
use layout::{ENTRIES, FINISHED, HERE, LEFT};
use letters::Letters;
use meet::Meet;
use memory::Area;

/// Data up to this size go through staging areas even where the direct way is possible, and every rank reduces them
/// itself. With four ranks on two cores one meeting of 4 KiB takes 7 us and two take 10; at 16 KiB it is 15 and 13.
const SHORT_BYTES: usize = 4 << 10;

/// One rank's end of shared memory.
pub(crate) struct ShmComm {
    meet: Meet,
    blocks: GroupBlocks,
    /// How threads hand over a block; none for processes.
    handover: Option<Handover>,
    letters: Letters,
    /// What was started and is not done; the front is operation number `done`.
    queue: VecDeque<Call>,
    published: u32,
    done: u32,
    /// The next piece, and the phases in which the two before it were posted.
    piece: u32,
    piece_posts: [u32; 2],
    /// What all ranks published about the current operation.
    said: Vec<ReadEntry>,
}

impl ShmComm {
    /// Sets what is called about a long wait of this rank.
    pub(crate) fn on_long_wait(&mut self, voice: Voice) {
        self.meet.lateness.set_voice(voice);
    }

    pub(crate) fn fail(&mut self, step: u64, why: &str) {
        self.meet.step = step;
        // If another rank is lost, that is why this one fails.
        let found = self.meet.alarm.raised().or_else(|| self.meet.gone());
        let failed = || self.meet.report(self.meet.rank, "its own work", Cause::Failed { why: why.into() });
        self.meet.put_up(found.unwrap_or_else(failed));
    }

    /// Publishes an operation, or queues it until there is room on the desk.
    ///
    /// # Safety
    /// The memory stays valid and nothing else accesses it until the operation was waited for.
    pub(crate) unsafe fn start(&mut self, work: Work, step: u64) {
        self.meet.step = step;
        let call = match work {
            Work::AllReduce(span, reduce) => self.on(SharedOp::AllReduce, span, None, 0, reduce),
            Work::ReduceScatter(span, cuts, reduce) => {
                self.on(SharedOp::ReduceScatter, span, Some(cuts), 0, reduce)
            }
            Work::AllGather(span, cuts) => self.on(SharedOp::AllGather, span, Some(cuts), 0, Reduce::Sum),
            Work::Broadcast(span, root) => self.on(SharedOp::Broadcast, span, None, root, Reduce::Sum),
            Work::CodedSum(_) => unreachable!("nothing is coded in memory"),
            Work::Barrier
            | Work::Gather { .. }
            | Work::Scatter { .. }
            | Work::AllToAll { .. }
            | Work::Send { .. }
            | Work::Receive { .. } => unreachable!("by functions of their own"),
        };
        self.check_call(&call);
        self.queue.push_back(call);
        self.publish();
    }

    /// Makes this rank choose as if every rank had its own core, or not, whatever the others assume. `openly` if it
    /// publishes that, as every call does.
    #[cfg(test)]
    pub(crate) fn force_roomy(&mut self, roomy: bool, openly: bool) {
        match openly {
            true => self.meet.grounds.roomy = roomy,
            false => self.meet.forced_roomy = Some(roomy),
        }
    }

    fn on(&self, op: SharedOp, mine: Span, cuts: Option<Cuts>, root: usize, reduce: Reduce) -> Call {
        let bytes = mine.count * mine.dtype.bytes();
        let place = self.blocks.find(mine.ptr, bytes, self.handover.is_some());
        Call { op, reduce, root, count: mine.count, cuts, mine, place, grounds: self.meet.grounds }
    }

    /// An impossible call fails the group before any rank begins.
    fn check_call(&self, call: &Call) {
        if let Some(what) = wrong_with(call, self.meet.size) {
            self.meet.put_up(self.meet.report(self.meet.rank, call.op.name(), Cause::Disagrees { what }));
        }
    }

    /// Runs the operation that was started first.
    pub(crate) fn run_first(&mut self, step: u64) -> Result<(), Report> {
        let Some(call) = self.queue.front().cloned() else { return Ok(()) };
        self.run(call, step, |shared, call| match call.op {
            _ if shared.meet.size == 1 => Ok(()),
            SharedOp::AllReduce | SharedOp::ReduceScatter => shared.reduce(call),
            SharedOp::AllGather => shared.all_gather(call),
            SharedOp::Broadcast => shared.broadcast(call),
            SharedOp::Barrier
            | SharedOp::Gather
            | SharedOp::Scatter
            | SharedOp::AllToAll
            | SharedOp::Block
            | SharedOp::SharedBlock
            | SharedOp::Finish => {
                unreachable!("only what `start` knows is queued")
            }
        })
    }

    pub(crate) fn barrier(&mut self, step: u64) -> Result<(), Report> {
        self.call(Call::bare(SharedOp::Barrier, 0), step, |shared, call| {
            let here = shared.meet.post();
            shared.agree(call)?;
            shared.meet.wait_phase(here)
        })
    }

    /// The last operation: afterwards a rank that goes away is not missed.
    pub(crate) fn finish(mut self, step: u64) -> Result<(), Report> {
        self.call(Call::bare(SharedOp::Finish, 0), step, |shared, call| {
            shared.agree(call)?;
            shared.meet.gather_here()
        })?;
        self.meet.my_desk().state.store(FINISHED, Ordering::SeqCst);
        Ok(())
    }

    /// Runs an operation, or fails the group with the reason why it cannot.
    fn call_unless<R>(
        &mut self,
        wrong: Option<String>,
        call: Call,
        step: u64,
        work: impl FnOnce(&mut ShmComm, &Call) -> Result<R, Report>,
    ) -> Result<R, Report> {
        if let Some(what) = wrong {
            let report = self.meet.report(self.meet.rank, call.op.name(), Cause::Disagrees { what });
            return Err(self.meet.put_up(report));
        }
        self.call(call, step, work)
    }

    /// Runs an operation now, after those that were started before it.
    fn call<R>(
        &mut self,
        call: Call,
        step: u64,
        work: impl FnOnce(&mut ShmComm, &Call) -> Result<R, Report>,
    ) -> Result<R, Report> {
        while !self.queue.is_empty() {
            self.run_first(step)?;
        }
        self.meet.step = step;
        self.check_call(&call);
        self.queue.push_back(call.clone());
        self.publish();
        self.run(call, step, work)
    }

    /// Runs the operation at the front of the queue.
    fn run<R>(
        &mut self,
        call: Call,
        step: u64,
        work: impl FnOnce(&mut ShmComm, &Call) -> Result<R, Report>,
    ) -> Result<R, Report> {
        self.meet.step = step;
        self.meet.enter(call.op);
        let result = self.meet.check().and_then(|()| work(self, &call));
        match result {
            Ok(_) => {
                self.queue.pop_front();
                self.done = self.done.wrapping_add(1);
                self.publish();
            }
            Err(_) => self.meet.stand_back(),
        }
        result
    }

    /// Publishes what is queued, as far as there is room: others may still read the last two that were done.
    fn publish(&mut self) {
        loop {
            let ahead = self.published.wrapping_sub(self.done);
            let Some(call) = self.queue.get(ahead as usize).filter(|_| ahead < ENTRIES - 2) else { return };
            let desk = self.meet.my_desk();
            call.said().write(&desk.entries[(self.published % ENTRIES) as usize]);
            self.published = self.published.wrapping_add(1);
            desk.posted.post(self.published);
        }
    }

    /// Waits until all ranks have published this operation, and compares.
    fn agree(&mut self, call: &Call) -> Result<(), Report> {
        self.meet.wait_posted(self.done.wrapping_add(1))?;
        let (mine, idx) = (call.said(), (self.done % ENTRIES) as usize);
        self.said.clear();
        for r in 0..self.meet.size {
            let said =
                if r == self.meet.rank { mine } else { ReadEntry::read(&self.meet.desk(r).entries[idx]) };
            self.said.push(said);
        }
        match who_differs(&self.said) {
            None => Ok(()),
            Some((rank, usual)) => {
                let (odd, other) = (self.said[rank], self.said[usual]);
                let what = match odd.other_grounds(&other) {
                    Some(what) => what.to_string(),
                    None => format!("it calls {odd}, rank {usual} calls {other}"),
                };
                // Compared with what most ranks do, so that all report the same.
                let report = self.meet.report(rank, self.said[usual].name(), Cause::Disagrees { what });
                Err(self.meet.put_up(report))
            }
        }
    }

    /// Whether all ranks can access all memory of this operation. Comes after [`ShmComm::agree`].
    fn all_visible(&self) -> bool {
        self.said.iter().all(|said| said.place != MemoryRef::Private)
    }

    /// Another rank's memory in an operation that all agreed on.
    fn area_of(&self, rank: usize, bytes: usize) -> Result<Area, Report> {
        // SAFETY: addresses are those of threads that do not return from this operation before this rank has completed
        // its last phase, or has stopped accessing memory (`stand_back`).
        let area = unsafe { self.blocks.area(self.said[rank].place, rank, bytes, self.handover.is_some()) };
        area.ok_or_else(|| {
            let what = "it published memory outside of its blocks".into();
            self.meet.raise(rank, Cause::Damaged { what })
        })
    }

    /// This rank's memory.
    fn mine(&self, call: &Call) -> Area {
        // SAFETY: promised by the caller that started the operation.
        unsafe { Area::new(call.mine.ptr, call.mine.count * call.dtype().bytes()) }
    }

    /// Waits until this rank's next staging area is free; returns its number.
    fn next_piece(&mut self) -> Result<u32, Report> {
        let q = self.piece;
        self.meet.wait_phase(self.piece_posts[(q % 2) as usize])?;
        self.piece = q.wrapping_add(1);
        Ok(q)
    }

    /// Tells the others that a piece is written, and that this rank is done with all pieces but the last two.
    fn post_piece(&mut self, q: u32) -> u32 {
        let step = self.meet.post();
        self.piece_posts[(q % 2) as usize] = step;
        step
    }

    /// A rank's staging area of a piece.
    fn stage(&self, rank: usize, q: u32) -> Area {
        let (offset, bytes) = (self.meet.layout.piece(rank, q), self.meet.layout.piece_bytes);
        assert!(offset + bytes <= self.meet.memory.bytes(), "staging areas are inside the segment");
        // SAFETY: inside the segment, which lives as long as this rank; the rule of pieces decides whose turn it is.
        unsafe { Area::new(self.meet.memory.ptr().as_ptr().wrapping_add(offset), bytes) }
    }
}

impl Drop for ShmComm {
    fn drop(&mut self) {
        self.take_back_letters();
        let state = &self.meet.my_desk().state;
        if state.load(Ordering::SeqCst) != HERE {
            return;
        }
        if !self.queue.is_empty() {
            // Others may be about to access published memory: they are stopped first.
            self.meet.raise(self.meet.rank, Cause::Gone);
            self.meet.stand_back();
        }
        // A failure in another group of this process is why it leaves this one.
        if let Some(report) = self.meet.alarm.raised() {
            self.meet.put_up(report);
        }
        self.meet.my_desk().state.store(LEFT, Ordering::SeqCst);
        self.meet.wake(self.meet.rank);
    }
}

/// What makes a call impossible.
fn wrong_with(call: &Call, size: usize) -> Option<String> {
    if call.root >= size {
        return Some(format!("root {} is not one of {size} ranks", call.root));
    }
    let cuts = call.cuts.as_deref()?;
    if cuts.len() != size + 1 {
        return Some(format!(
            "there are {} cuts for {size} ranks; one more than ranks are needed",
            cuts.len()
        ));
    }
    let fits = cuts.windows(2).all(|w| w[0] <= w[1]) && cuts[size] <= call.count;
    (!fits).then(|| format!("the cuts {cuts:?} do not ascend up to {}", call.count))
}

/// The first rank that differs from the majority, and the first of the majority.
fn who_differs(said: &[ReadEntry]) -> Option<(usize, usize)> {
    if said.iter().all(|s| s.agrees(&said[0])) {
        return None;
    }
    let votes = |r: usize| said.iter().filter(|s| s.agrees(&said[r])).count();
    // `max_by_key` keeps the last of equals: the first rank wins a tie.
    let usual = (0..said.len()).rev().max_by_key(|r| votes(*r))?;
    let odd = (0..said.len()).find(|r| !said[*r].agrees(&said[usual]))?;
    Some((odd, usual))
}

/// Memory that the caller lends for the duration of the call.
fn area(span: Span) -> Area {
    // SAFETY: made from a slice that is borrowed until the call returns.
    unsafe { Area::new(span.ptr, span.count * span.dtype.bytes()) }
}
