//! How ranks that share memory meet: each counts up on its own desk, and waits for the desks of the others.
//!
//! A desk has two counters. `posted` counts the operations that its rank has published; `phase` counts the phases that
//! it has completed inside operations. Every rank goes through the same phases in the same order, so "all ranks have
//! reached phase p" is a barrier: one store, and one load of each other rank's line.
//!
//! # When a rank is lost
//! The rank that notices first posts the notice and wakes all sleepers. Every wait ends with that same report:
//! - a killed process is reported by the kernel, and seen within 100 ms;
//! - a rank that left without finishing is marked on its desk;
//! - a rank that is alive is waited for. When nothing has moved for the whole stall timeout ([`Lateness`]), the rank
//!   that is furthest behind is named, since the others may be waiting for it too;
//! - what raised this process's alarm also ends the waits of the other processes, and vice versa.
//!
//! # Memory of a rank that gives up
//! Threads read and write each other's memory in place. A rank whose operation ends with a report may free that memory
//! at once, so it first waits until no other rank is accessing any: a rank sets `busy` before an access and then checks
//! the notice, and a rank that gives up checks `busy` after posting the notice.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use polyreme_net::{Alarm, Block, Cause, Counter, Look, Notice, Pace, Peers, Report};

use super::call::{Call, Grounds, SharedOp};
use super::lateness::Lateness;
use super::layout::{Desk, HERE, LEFT, ShmLayout};

/// How long the end of a process may take from when its files are closed, and how often it is looked for.
const CLOSING: Duration = Duration::from_secs(2);
const GLANCE: Duration = Duration::from_millis(1);

/// One rank's end of the meetings.
pub(super) struct Meet {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) layout: ShmLayout,
    pub(super) memory: Block,
    pub(super) alarm: Alarm,
    pub(super) lateness: Lateness,
    pub(super) host: String,
    /// The ranks' numbers in the whole job, for reports.
    pub(super) world: Vec<usize>,
    /// Their processes; none if they are threads of this one.
    pub(super) peers: Option<Peers>,
    pub(super) step: u64,
    pub(super) op: &'static str,
    /// The assumptions by which algorithms are chosen; the same on all ranks.
    pub(super) grounds: Grounds,
    /// What a test makes this rank assume instead, without telling the others.
    #[cfg(test)]
    pub(super) forced_roomy: Option<bool>,
    pace: Pace,
    phase: u32,
    /// The phase that all ranks are known to have reached.
    seen_phase: u32,
    seen_posted: u32,
}

/// How many cores this rank may run on; other ranks may have other numbers.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Which counter of a desk.
#[derive(Clone, Copy)]
enum Which {
    Posted,
    Phase,
}

impl Meet {
    pub(super) fn new(
        rank: usize,
        layout: ShmLayout,
        memory: Block,
        alarm: Alarm,
        lateness: Lateness,
        host: String,
        world: Vec<usize>,
    ) -> Meet {
        let cores = cores();
        Meet {
            rank,
            size: layout.ranks,
            layout,
            memory,
            alarm,
            lateness,
            host,
            world,
            peers: None,
            step: 0,
            op: "joining",
            grounds: Grounds::default(),
            #[cfg(test)]
            forced_roomy: None,
            pace: Pace::of(layout.ranks, cores),
            phase: 0,
            seen_phase: 0,
            seen_posted: 0,
        }
    }

    /// Sets the assumptions by which algorithms are chosen, from the smallest number of cores. All ranks have been told
    /// the same.
    pub(super) fn agree_on_cores(&mut self, fewest: usize) {
        self.grounds = Grounds { roomy: self.size <= fewest };
    }

    /// Whether a call may count on a core for each rank.
    pub(super) fn is_roomy(&self, call: &Call) -> bool {
        #[cfg(test)]
        if let Some(forced) = self.forced_roomy {
            return forced;
        }
        call.grounds.roomy
    }

    pub(super) fn desk(&self, rank: usize) -> &Desk {
        self.memory.at(self.layout.desk(rank))
    }

    pub(super) fn my_desk(&self) -> &Desk {
        self.desk(self.rank)
    }

    fn notice(&self) -> &Notice {
        self.memory.at(self.layout.notice())
    }

    /// Records which operation follows, for reports.
    pub(super) fn enter(&mut self, op: SharedOp) {
        self.op = op.name();
    }

    /// Completes a phase that the others can wait for; it has the same number on every rank.
    pub(super) fn post(&mut self) -> u32 {
        self.phase = self.phase.wrapping_add(1);
        self.my_desk().phase.post(self.phase);
        self.phase
    }

    /// Waits until all ranks have reached a phase.
    pub(super) fn wait_phase(&mut self, target: u32) -> Result<(), Report> {
        if (self.seen_phase.wrapping_sub(target) as i32) < 0 {
            self.wait_all(Which::Phase, target)?;
            self.seen_phase = target;
        }
        Ok(())
    }

    /// Waits until all ranks have published this many operations.
    pub(super) fn wait_posted(&mut self, target: u32) -> Result<(), Report> {
        if (self.seen_posted.wrapping_sub(target) as i32) < 0 {
            self.wait_all(Which::Posted, target)?;
            self.seen_posted = target;
        }
        Ok(())
    }

    /// Completes a phase and waits until all ranks have.
    pub(super) fn gather_here(&mut self) -> Result<(), Report> {
        let here = self.post();
        self.wait_phase(here)
    }

    fn wait_all(&self, which: Which, target: u32) -> Result<(), Report> {
        for i in 1..self.size {
            let rank = (self.rank + i) % self.size;
            let desk = self.desk(rank);
            let counter = match which {
                Which::Posted => &desk.posted,
                Which::Phase => &desk.phase,
            };
            self.wait_counter(counter, rank, target)?;
        }
        Ok(())
    }

    /// Waits for a counter that a rank counts up.
    pub(super) fn wait_counter(&self, counter: &Counter, of: usize, target: u32) -> Result<(), Report> {
        self.wait_unless(counter, of, target, || None)
    }

    /// Waits for a counter that a rank counts up. Whenever it calls back, `stuck` may name a rank that never will, and
    /// why.
    pub(super) fn wait_unless(
        &self,
        counter: &Counter,
        of: usize,
        target: u32,
        stuck: impl Fn() -> Option<(usize, Cause)>,
    ) -> Result<(), Report> {
        counter.wait(target, self.pace, |look| {
            self.look(look, counter, of, target)?;
            match look {
                Look::Glance => Ok(()),
                Look::Around(_) => stuck().map_or(Ok(()), |(rank, cause)| Err(self.raise(rank, cause))),
            }
        })
    }

    /// Whether a rank has left.
    pub(super) fn is_gone(&self, rank: usize) -> bool {
        let ended = self.peers.as_ref().is_some_and(|peers| peers.ended(rank));
        ended || self.desk(rank).state.load(Ordering::SeqCst) != HERE
    }

    /// Yields in a wait without a counter, and checks that the group can go on and `of` has not left.
    pub(super) fn pause(&self, of: usize) -> Result<(), Report> {
        self.check()?;
        if self.is_gone(of) {
            return Err(self.raise(of, Cause::Gone));
        }
        polyreme_sync::thread::yield_now();
        Ok(())
    }

    /// A file of a rank cannot be opened: whether that is because the rank is gone. The system closes what a killed process had open a
    /// moment before it says that the process has ended.
    pub(super) fn without_files(&self, of: usize) -> Result<(), Report> {
        let until = Instant::now() + CLOSING;
        while Instant::now() < until {
            self.pause(of)?;
            std::thread::sleep(GLANCE);
        }
        Ok(())
    }

    fn look(&self, look: Look, counter: &Counter, of: usize, target: u32) -> Result<(), Report> {
        self.check()?;
        let Look::Around(quiet) = look else { return Ok(()) };
        // A rank posts before it leaves, so the counter is read after the state.
        if self.desk(of).state.load(Ordering::SeqCst) != HERE && !counter.reached(target) {
            return Err(self.raise(of, Cause::Gone));
        }
        if let Some(lost) = self.lost() {
            return Err(self.raise(lost, Cause::Gone));
        }
        let late = self.furthest_behind(of, counter);
        self.lateness.say(quiet, late);
        match self.lateness.judge(quiet, self.counted()) {
            Some(still) => Err(self.raise(late, Cause::Stalled { ms: still.as_millis() as u64 })),
            None => Ok(()),
        }
    }

    /// Whether the group can go on.
    pub(super) fn check(&self) -> Result<(), Report> {
        if self.notice().is_up() {
            return Err(self.noticed());
        }
        match self.alarm.raised() {
            Some(report) => Err(self.put_up(report)),
            None => Ok(()),
        }
    }

    /// A report of a rank whose process ended before it finished, or that has left the group, if there is one.
    pub(super) fn gone(&self) -> Option<Report> {
        let left = |rank: &usize| self.desk(*rank).state.load(Ordering::SeqCst) == LEFT;
        let gone = self.lost().or_else(|| (0..self.size).filter(|rank| *rank != self.rank).find(left));
        gone.map(|rank| self.report(rank, self.op, Cause::Gone))
    }

    /// A rank whose process ended before it finished.
    fn lost(&self) -> Option<usize> {
        let peers = self.peers.as_ref()?;
        // The state is read after the process has ended, when nothing changes it any more.
        let lost = |r: &usize| peers.ended(*r) && self.desk(*r).state.load(Ordering::SeqCst) == HERE;
        (0..self.size).filter(|r| *r != self.rank).find(lost)
    }

    /// The sum of all counters: it changes when any rank makes progress.
    fn counted(&self) -> u32 {
        let desks = (0..self.size).map(|rank| self.desk(rank));
        desks.fold(0, |sum: u32, desk| sum.wrapping_add(desk.posted.get()).wrapping_add(desk.phase.get()))
    }

    /// The rank with the lowest phase; for a ring, the rank at its other end.
    fn furthest_behind(&self, of: usize, counter: &Counter) -> usize {
        let desk = self.desk(of);
        if !std::ptr::eq(counter, &desk.posted) && !std::ptr::eq(counter, &desk.phase) {
            return of;
        }
        let mine = self.my_desk();
        let ahead = |r: usize| {
            let desk = self.desk(r);
            let ahead = |theirs: &Counter, mine: &Counter| theirs.get().wrapping_sub(mine.get()) as i32;
            (ahead(&desk.phase, &mine.phase), ahead(&desk.posted, &mine.posted))
        };
        (0..self.size).filter(|r| *r != self.rank).min_by_key(|r| ahead(*r)).unwrap_or(of)
    }

    /// A report about a rank of this group, at this place.
    pub(super) fn report(&self, rank: usize, op: &str, cause: Cause) -> Report {
        let rank = self.world.get(rank).copied().unwrap_or(rank);
        Report { rank, host: self.host.clone(), step: self.step, op: op.into(), cause }
    }

    /// Ends every wait. Returns the report that all ranks give: this one, or the one posted before.
    pub(super) fn raise(&self, rank: usize, cause: Cause) -> Report {
        self.put_up(self.report(rank, self.op, cause))
    }

    pub(super) fn put_up(&self, report: Report) -> Report {
        if self.notice().put_up(&report) {
            for rank in 0..self.size {
                self.wake(rank);
            }
        }
        self.noticed()
    }

    /// Wakes the ranks that wait for a rank.
    pub(super) fn wake(&self, rank: usize) {
        self.desk(rank).posted.wake();
        self.desk(rank).phase.wake();
    }

    fn noticed(&self) -> Report {
        let report = self.notice().read().expect("a notice that is up can be read, and is never taken down");
        self.alarm.raise(report.clone());
        report
    }

    /// Reads or writes memory of other ranks, unless the group has failed.
    pub(super) fn touch(&self, work: impl FnOnce()) -> Result<(), Report> {
        /// Reset even if the work panics.
        struct Busy<'a>(&'a Desk);
        impl Drop for Busy<'_> {
            fn drop(&mut self) {
                self.0.busy.store(0, Ordering::SeqCst);
            }
        }
        let desk = self.my_desk();
        desk.busy.store(1, Ordering::SeqCst);
        let busy = Busy(desk);
        if self.notice().is_up() {
            drop(busy);
            return Err(self.noticed());
        }
        work();
        Ok(())
    }

    /// After the group has failed: waits until no thread accesses another's memory, which never takes long. Other
    /// processes have their own mappings, and access nothing of ours that could go away.
    pub(super) fn stand_back(&self) {
        if self.peers.is_some() || !self.notice().is_up() {
            return;
        }
        for rank in (0..self.size).filter(|r| *r != self.rank) {
            while self.desk(rank).busy.load(Ordering::SeqCst) != 0 {
                polyreme_sync::thread::yield_now();
            }
        }
    }
}
