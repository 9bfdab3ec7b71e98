//! Send and receive between two ranks that share memory.
//!
//! Each ordered pair of ranks has a ring of cells, with a counter of written ones that the sender counts up and a
//! counter of read ones that the receiver counts up. A message is a cell with its element type, its count and its
//! location, and then:
//! - *direct*, if it is long and the receiver can see it: nothing more. The receiver copies it from the sender's
//!   memory, and the sender returns when the cell was read. One copy.
//! - *staged* otherwise: its bytes, in as many cells as it takes, a quarter of the ring at a time. The sender returns
//!   when the last of them is written: what fits in the ring is sent without waiting. Two copies.
//!
//! Messages of a pair arrive in the order in which they were sent; they are independent of started operations. Ranks
//! that send each other long messages at the same time would wait for each other: one of them must receive first, or
//! all use an all-to-all. A sender that has waited for long marks this on its desk, and finds out whether it is part of
//! such a cycle.
//!
//! When a rank dies, ranks that wait for it end with a report.

use std::sync::atomic::Ordering;

use polyreme_net::{Cause, Report};

use crate::work::Span;

use super::call::{Call, MemoryRef, ReadEntry, SharedOp};
use super::layout::{DeskEntry, Ring};
use super::memory::Area;
use super::{SHORT_BYTES, ShmComm};

const CELL: usize = 64;

impl ShmComm {
    pub(crate) fn send(&mut self, to: usize, data: Span, step: u64) -> Result<(), Report> {
        self.enter_pair(to, step, "send")?;
        let result = self.send_now(to, data);
        if result.is_err() {
            self.meet.stand_back();
        }
        result
    }

    pub(crate) fn recv(&mut self, from: usize, data: Span, step: u64) -> Result<(), Report> {
        self.enter_pair(from, step, "receive")?;
        self.recv_now(from, data)
    }

    pub(super) fn enter_pair(&mut self, other: usize, step: u64, op: &'static str) -> Result<(), Report> {
        (self.meet.step, self.meet.op) = (step, op);
        self.meet.check()?;
        if other >= self.meet.size || other == self.meet.rank {
            let what = format!("rank {other} is not another one of {} ranks", self.meet.size);
            return Err(self.meet.raise(self.meet.rank, Cause::Disagrees { what }));
        }
        Ok(())
    }

    fn send_now(&mut self, to: usize, data: Span) -> Result<(), Report> {
        let (rank, bytes) = (self.meet.rank, data.count * data.dtype.bytes());
        let mut place = MemoryRef::Private;
        if bytes > SHORT_BYTES {
            place = self.blocks.find(data.ptr, bytes, self.handover.is_some());
        }
        let ring: &Ring = self.meet.memory.at(self.meet.layout.ring(rank, to));
        let mut head = ring.head.get();
        self.wait_room(ring, head, 1, to)?;
        message(data, place).write(self.message_cell(rank, to, head));
        head = head.wrapping_add(1);
        ring.head.post(head);
        if place != MemoryRef::Private {
            return self.wait_read(ring, head, to);
        }
        // SAFETY: the caller's, borrowed until this returns.
        let source = unsafe { Area::new(data.ptr, bytes) };
        for (from, bytes) in self.bursts(bytes) {
            let cells = bytes.div_ceil(CELL);
            self.wait_room(ring, head, cells, to)?;
            self.through_ring(rank, to, head, bytes, |cells, offset| {
                source.part(from + offset, cells.bytes()).copy_to(cells);
            });
            head = head.wrapping_add(cells as u32);
            ring.head.post(head);
        }
        Ok(())
    }

    fn recv_now(&mut self, from: usize, data: Span) -> Result<(), Report> {
        let (rank, bytes) = (self.meet.rank, data.count * data.dtype.bytes());
        let ring: &Ring = self.meet.memory.at(self.meet.layout.ring(from, rank));
        let mut tail = ring.tail.get();
        self.meet.wait_counter(&ring.head, from, tail.wrapping_add(1))?;
        let sent = ReadEntry::read(self.message_cell(from, rank, tail));
        let wanted = message(data, MemoryRef::Private);
        if !sent.agrees(&wanted) {
            let what = format!("it sends {}, rank {rank} expects {}", sent.elements(), wanted.elements());
            return Err(self.meet.raise(from, Cause::Disagrees { what }));
        }
        tail = tail.wrapping_add(1);
        // SAFETY: the caller's, borrowed until this returns.
        let target = unsafe { Area::new(data.ptr, bytes) };
        if sent.place != MemoryRef::Private {
            // SAFETY: an address comes from a thread that waits until this cell was read, or until no access is in
            // progress.
            let source = unsafe { self.blocks.area(sent.place, from, bytes, self.handover.is_some()) };
            let Some(source) = source else {
                let what = "it published memory outside of its blocks".into();
                return Err(self.meet.raise(from, Cause::Damaged { what }));
            };
            self.meet.touch(|| source.copy_to(target))?;
            ring.tail.post(tail);
            return Ok(());
        }
        ring.tail.post(tail);
        for (start, bytes) in self.bursts(bytes) {
            let cells = bytes.div_ceil(CELL) as u32;
            self.meet.wait_counter(&ring.head, from, tail.wrapping_add(cells))?;
            self.through_ring(from, rank, tail, bytes, |cells, offset| {
                cells.copy_to(target.part(start + offset, cells.bytes()));
            });
            tail = tail.wrapping_add(cells);
            ring.tail.post(tail);
        }
        Ok(())
    }

    /// A quarter of the ring at a time.
    fn bursts(&self, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let burst = self.meet.layout.ring_bytes / 4;
        (0..bytes).step_by(burst).map(move |from| (from, burst.min(bytes - from)))
    }

    /// Waits until `cells` cells after `head` are free.
    fn wait_room(&self, ring: &Ring, head: u32, cells: usize, to: usize) -> Result<(), Report> {
        let all = (self.meet.layout.ring_bytes / CELL) as u32;
        self.wait_read(ring, head.wrapping_add(cells as u32).wrapping_sub(all), to)
    }

    /// Waits until the receiver has read up to a cell.
    fn wait_read(&self, ring: &Ring, cell: u32, to: usize) -> Result<(), Report> {
        let sending = &self.meet.my_desk().sending;
        let waited = self.meet.wait_unless(&ring.tail, to, cell, || {
            sending.store(((to as u64 + 1) << 32) | u64::from(cell), Ordering::SeqCst);
            let circle = self.circle(to)?;
            let names = circle.iter().map(|&rank| self.meet.world.get(rank).copied().unwrap_or(rank));
            Some((*circle.iter().min()?, Cause::crossed(names.collect())))
        });
        if sending.load(Ordering::Relaxed) != 0 {
            sending.store(0, Ordering::SeqCst);
        }
        waited
    }

    /// The cycle of ranks in which each waits for the next one to receive, if this rank's send to `to` closes one. The
    /// search goes backwards from this rank: a rank that waits for a stuck one is stuck too and stays so, so what was
    /// found stays true while the search goes on.
    fn circle(&self, to: usize) -> Option<Vec<usize>> {
        let (rank, size) = (self.meet.rank, self.meet.size);
        let mut next = vec![None; size];
        let mut stuck = vec![rank];
        let mut k = 0;
        while k < stuck.len() && next[to].is_none() {
            let waits = |sender: &usize| next[*sender].is_none() && self.waits_for(*sender) == Some(stuck[k]);
            let more: Vec<usize> = (0..size).filter(|sender| *sender != rank).filter(waits).collect();
            more.iter().for_each(|&sender| next[sender] = Some(stuck[k]));
            stuck.extend(more);
            k += 1;
        }
        let (mut circle, mut at) = (vec![rank], to);
        while at != rank {
            circle.push(at);
            at = next[at]?;
        }
        Some(circle)
    }

    /// The rank that `sender` sends to, if that has not read what it waits for.
    fn waits_for(&self, sender: usize) -> Option<usize> {
        let sending = self.meet.desk(sender).sending.load(Ordering::SeqCst);
        let to = ((sending >> 32) as usize).checked_sub(1).filter(|to| *to < self.meet.size)?;
        let ring: &Ring = self.meet.memory.at(self.meet.layout.ring(sender, to));
        (!ring.tail.reached(sending as u32)).then_some(to)
    }

    fn cell_offset(&self, from: usize, to: usize, cell: u32) -> usize {
        let all = (self.meet.layout.ring_bytes / CELL) as u32;
        self.meet.layout.cells(from, to) + (cell % all) as usize * CELL
    }

    fn message_cell(&self, from: usize, to: usize, cell: u32) -> &DeskEntry {
        self.meet.memory.at(self.cell_offset(from, to, cell))
    }

    /// Visits `bytes` bytes of the ring from a cell on: in one part, or in two if they wrap around.
    fn through_ring(
        &self,
        from: usize,
        to: usize,
        cell: u32,
        bytes: usize,
        mut work: impl FnMut(Area, usize),
    ) {
        let start = self.cell_offset(from, to, cell);
        let end = self.meet.layout.cells(from, to) + self.meet.layout.ring_bytes;
        let first = bytes.min(end - start);
        for (at, bytes, offset) in
            [(start, first, 0), (end - self.meet.layout.ring_bytes, bytes - first, first)]
        {
            assert!(at + bytes <= self.meet.memory.bytes(), "rings are inside the segment");
            if bytes > 0 {
                // SAFETY: inside the segment; the counters say whose turn it is with these cells.
                work(unsafe { Area::new(self.meet.memory.ptr().as_ptr().wrapping_add(at), bytes) }, offset);
            }
        }
    }
}

/// The first cell of a message.
fn message(data: Span, place: MemoryRef) -> ReadEntry {
    let mut call = Call::bare(SharedOp::AllToAll, data.count);
    (call.mine, call.place) = (data, place);
    call.said()
}
