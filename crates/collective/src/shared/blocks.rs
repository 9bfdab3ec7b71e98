//! Memory that others access without a copy: which blocks there are, and which block an address is in.
//!
//! Threads see every address, and need a list only of blocks that all ranks share. Processes see what they have mapped:
//! each rank's block is a memfd, its number goes over the desks, and every rank maps the files of all. Blocks are
//! numbered, and as all ranks ask for them in the same order, a number names the same block everywhere. They live as
//! long as the group: a rank cannot know which of them another one still uses.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use polyreme_net::segment::path_of;
use polyreme_net::{Block, Cause, Report, Segment, SegmentError};

use super::ShmComm;
use super::call::{Call, MemoryRef, SharedOp};
use super::memory::Area;

/// How a thread hands a block to the others.
pub(super) type Handover = Arc<Mutex<Option<Block>>>;

/// The blocks of a group.
#[derive(Default)]
pub(super) struct GroupBlocks {
    sets: Vec<Set>,
}

struct Set {
    /// Whether there is one block for all ranks, or one per rank.
    common: bool,
    mine: Block,
    /// Each rank's, as this process sees them; empty if the ranks are threads.
    of: Vec<Block>,
}

impl GroupBlocks {
    /// The same blocks, for a group of some of the ranks in which this one has another number. All of its ranks take
    /// over the same ones, so that a number still names the same block everywhere.
    pub(super) fn of_members(&self, members: &[usize], rank: usize) -> GroupBlocks {
        let of = |set: &Set| {
            let of: Vec<Block> = members.iter().filter_map(|&member| set.of.get(member)).cloned().collect();
            let mine = of.get(rank).unwrap_or(&set.mine).clone();
            Set { common: set.common, mine, of }
        };
        GroupBlocks { sets: self.sets.iter().map(of).collect() }
    }

    /// How the others can access memory of this rank.
    pub(super) fn find(&self, ptr: *mut u8, bytes: usize, threads: bool) -> MemoryRef {
        if bytes == 0 {
            return MemoryRef::Nothing;
        }
        for (id, set) in self.sets.iter().enumerate() {
            let start = set.mine.ptr().as_ptr() as usize;
            let Some(offset) = (ptr as usize).checked_sub(start) else { continue };
            if offset.checked_add(bytes).is_some_and(|end| end <= set.mine.bytes()) {
                let (id, offset) = (id as u32, offset as u64);
                return if set.common {
                    MemoryRef::Common { id, offset }
                } else {
                    MemoryRef::Block { id, offset }
                };
            }
        }
        if threads { MemoryRef::Address(ptr as u64) } else { MemoryRef::Private }
    }

    /// What another rank published, as this rank sees it; `None` if it is outside the shared memory.
    ///
    /// # Safety
    /// An address comes from a thread of this process whose memory stays valid until the operation has ended.
    pub(super) unsafe fn area(
        &self,
        place: MemoryRef,
        rank: usize,
        bytes: usize,
        threads: bool,
    ) -> Option<Area> {
        let (id, offset) = match place {
            MemoryRef::Private => return None,
            MemoryRef::Nothing => return (bytes == 0).then(Area::nothing),
            MemoryRef::Address(address) => {
                // SAFETY: promised by the caller.
                return threads.then(|| unsafe { Area::new(address as *mut u8, bytes) });
            }
            MemoryRef::Block { id, offset } | MemoryRef::Common { id, offset } => (id as usize, offset),
        };
        let set = self.sets.get(id)?;
        let block = if set.of.is_empty() && set.common { &set.mine } else { set.of.get(rank)? };
        let offset = usize::try_from(offset).ok()?;
        let fits = offset.checked_add(bytes)? <= block.bytes();
        // SAFETY: inside a block that this group keeps.
        fits.then(|| unsafe { Area::new(block.ptr().as_ptr().wrapping_add(offset), bytes) })
    }
}

/// The error of a rank that has no memory for `what`.
pub(crate) fn no_memory(what: &str, error: &SegmentError) -> String {
    format!("no memory for {what}: {error}")
}

impl ShmComm {
    /// A block of this rank that the others see.
    pub(crate) fn block(&mut self, bytes: usize, what: &str, step: u64) -> Result<Block, Report> {
        if self.meet.peers.is_none() {
            let (rank, made) = (self.meet.rank, Segment::local(bytes));
            return made.map(|s| s.block().clone()).map_err(|e| failed(self, rank, what, &e));
        }
        self.call(Call::bare(SharedOp::Block, bytes), step, |shared, call| {
            shared.agree(call)?;
            shared.exchange_blocks(bytes, what, false)
        })
    }

    /// A block that all ranks see.
    pub(crate) fn shared_block(&mut self, bytes: usize, what: &str, step: u64) -> Result<Block, Report> {
        self.call(Call::bare(SharedOp::SharedBlock, bytes), step, |shared, call| {
            shared.agree(call)?;
            let Some(handover) = shared.handover.clone() else {
                return shared.exchange_blocks(bytes, what, true);
            };
            let here = || handover.lock().unwrap_or_else(PoisonError::into_inner);
            if shared.meet.rank == 0 {
                let made = Segment::local(bytes).map_err(|e| failed(shared, 0, what, &e))?;
                *here() = Some(made.block().clone());
            }
            shared.meet.gather_here()?;
            let block = here().clone().expect("rank 0 handed it over before the ranks met");
            shared.blocks.sets.push(Set { common: true, mine: block.clone(), of: Vec::new() });
            shared.meet.gather_here()?;
            Ok(block)
        })
    }

    /// Every rank, or rank 0 for all, creates a file; every rank maps them.
    fn exchange_blocks(&mut self, bytes: usize, what: &str, common: bool) -> Result<Block, Report> {
        let (rank, size) = (self.meet.rank, self.meet.size);
        let made = if !common || rank == 0 {
            let made = Segment::create(bytes, bytes).map_err(|e| failed(self, rank, what, &e))?;
            self.meet.my_desk().file.store(made.file_number().unwrap_or(0), Ordering::Release);
            Some(made)
        } else {
            None
        };
        self.meet.gather_here()?;
        let mut of = Vec::with_capacity(size);
        for r in if common { 0..1 } else { 0..size } {
            if let Some(made) = made.as_ref().filter(|_| r == rank) {
                of.push(made.block().clone());
                continue;
            }
            let desk = self.meet.desk(r);
            let path = path_of(desk.pid.load(Ordering::Acquire), desk.file.load(Ordering::Acquire));
            let theirs = Segment::open(&path, bytes, bytes);
            // Who is gone, or has given up, has closed its files.
            let theirs = theirs.map_err(|e| match self.meet.without_files(r) {
                Err(report) => report,
                Ok(()) => failed(self, rank, what, &e),
            })?;
            of.push(theirs.block().clone());
        }
        // The file may be closed, and the desk's number reused, when every rank has mapped it.
        self.meet.gather_here()?;
        if common {
            of = vec![of[0].clone(); size];
        }
        let mine = of[rank].clone();
        self.blocks.sets.push(Set { common, mine: mine.clone(), of });
        Ok(mine)
    }
}

/// Tells the others that this rank has no memory for `what`.
fn failed(shared: &ShmComm, rank: usize, what: &str, error: &SegmentError) -> Report {
    shared.meet.raise(rank, Cause::Failed { why: no_memory(what, error) })
}
