//! What a rank tells the others about an operation before it begins: its code, element type, reducer, root, count,
//! cuts, and where its memory is.
//!
//! All ranks read what all have published, and come to the same verdict. So a disagreement is one report on every rank,
//! and no rank uses another's numbers before they are known to match its own.

use std::sync::atomic::Ordering;

use crate::element::{DType, Reduce};
use crate::work::{Cuts, Span, digest};

use super::layout::DeskEntry;

macro_rules! ops {
    ($($op:ident = $name:literal),* $(,)?) => {
        /// What ranks do together.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum SharedOp { $($op),* }

        const OPS: &[(SharedOp, &str)] = &[$((SharedOp::$op, $name)),*];
    };
}
ops! {
    Barrier = "barrier", AllReduce = "all-reduce", ReduceScatter = "reduce-scatter", AllGather = "all-gather",
    Broadcast = "broadcast", Gather = "gather", Scatter = "scatter", AllToAll = "all-to-all", Block = "block",
    SharedBlock = "shared block", Finish = "finish",
}

impl SharedOp {
    pub(super) fn name(self) -> &'static str {
        OPS[self as usize].1
    }
}

/// One operation of this rank.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) op: SharedOp,
    pub(super) reduce: Reduce,
    pub(super) root: usize,
    /// What all ranks must agree on: elements, or bytes of a block.
    pub(super) count: usize,
    pub(super) cuts: Option<Cuts>,
    /// The memory that others may access.
    pub(super) mine: Span,
    pub(super) place: MemoryRef,
    /// What this rank assumes when it chooses an algorithm.
    pub(super) grounds: Grounds,
}

/// What the choice of an algorithm depends on beside the call itself. Ranks agree on it when they join.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Grounds {
    /// Whether every rank has its own core.
    pub(super) roomy: bool,
}

/// Bits of an entry: all ranks work on the same memory; those of [`Grounds`].
const COMMON: u8 = 1;
const ROOMY: u8 = 2;

/// Where a rank's memory is, in a form that the others understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MemoryRef {
    /// In memory that no other rank can see.
    Private,
    /// There is none that others need.
    Nothing,
    /// At this address of the process that all ranks are threads of.
    Address(u64),
    /// In a block that each rank has its own of.
    Block { id: u32, offset: u64 },
    /// In a block that all ranks share.
    Common { id: u32, offset: u64 },
}

/// What was read from another rank's desk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReadEntry {
    what: u64,
    count: u64,
    cuts: u64,
    pub(super) place: MemoryRef,
}

impl Call {
    /// An operation without data.
    pub(super) fn bare(op: SharedOp, count: usize) -> Call {
        let mine = Span { ptr: std::ptr::null_mut(), count: 0, dtype: DType::U8 };
        let (place, grounds) = (MemoryRef::Private, Grounds::default());
        Call { op, reduce: Reduce::Sum, root: 0, count, cuts: None, mine, place, grounds }
    }

    pub(super) fn dtype(&self) -> DType {
        self.mine.dtype
    }

    /// Whether the others can see this rank's memory.
    pub(super) fn is_visible(&self) -> bool {
        self.place != MemoryRef::Private
    }

    /// Whether all ranks work on the same memory: then no rank may copy to where another reads. Either all of them
    /// publish this, or they disagree.
    pub(super) fn is_common(&self) -> bool {
        let whole = matches!(
            self.op,
            SharedOp::AllReduce | SharedOp::ReduceScatter | SharedOp::AllGather | SharedOp::Broadcast
        );
        whole && matches!(self.place, MemoryRef::Common { .. })
    }

    pub(super) fn said(&self) -> ReadEntry {
        let how = if self.is_common() { COMMON } else { 0 } | if self.grounds.roomy { ROOMY } else { 0 };
        let parts = [self.op as u8, self.dtype() as u8, self.reduce as u8, how];
        let what = u64::from(u32::from_le_bytes(parts)) | (self.root as u64) << 32;
        let cuts = self.cuts.as_deref().map_or(0, digest);
        ReadEntry { what, count: self.count as u64, cuts, place: self.place }
    }
}

impl ReadEntry {
    pub(super) fn write(&self, to: &DeskEntry) {
        let (place, offset) = match self.place {
            MemoryRef::Private => (0, 0),
            MemoryRef::Nothing => (4, 0),
            MemoryRef::Address(address) => (1, address),
            MemoryRef::Block { id, offset } => (2 | u64::from(id) << 8, offset),
            MemoryRef::Common { id, offset } => (3 | u64::from(id) << 8, offset),
        };
        let words = [&to.what, &to.count, &to.cuts, &to.place, &to.offset];
        for (to, word) in words.into_iter().zip([self.what, self.count, self.cuts, place, offset]) {
            to.store(word, Ordering::Relaxed);
        }
    }

    pub(super) fn read(from: &DeskEntry) -> ReadEntry {
        let words = [&from.what, &from.count, &from.cuts, &from.place, &from.offset];
        let [what, count, cuts, place, offset] = words.map(|word| word.load(Ordering::Relaxed));
        let id = (place >> 8) as u32;
        let place = match place & 0xff {
            1 => MemoryRef::Address(offset),
            2 => MemoryRef::Block { id, offset },
            3 => MemoryRef::Common { id, offset },
            4 => MemoryRef::Nothing,
            _ => MemoryRef::Private,
        };
        ReadEntry { what, count, cuts, place }
    }

    /// The operation.
    pub(super) fn name(&self) -> &'static str {
        OPS.get(usize::from(self.what as u8)).map_or("something unknown", |(_, name)| name)
    }

    /// Count and element type, without the operation.
    pub(super) fn elements(&self) -> String {
        let [_, dtype, ..] = self.what.to_le_bytes();
        match DType::ALL.get(usize::from(dtype)) {
            Some(dtype) => format!("{} {dtype}", self.count),
            None => format!("{} elements of unknown type", self.count),
        }
    }

    /// How their assumptions differ, if they do.
    pub(super) fn other_grounds(&self, other: &ReadEntry) -> Option<&'static str> {
        let of = |said: &ReadEntry| said.what.to_le_bytes()[3] & ROOMY != 0;
        (of(self) != of(other)).then_some(if of(self) {
            "it counts on a core for each rank and the others do not"
        } else {
            "it does not count on a core for each rank and the others do"
        })
    }

    /// Whether both call the same, under the same assumptions.
    pub(super) fn agrees(&self, other: &ReadEntry) -> bool {
        (self.what, self.count, self.cuts) == (other.what, other.count, other.cuts)
    }
}

impl std::fmt::Display for ReadEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let [op, _, reduce, how, ..] = self.what.to_le_bytes();
        write!(f, "{}", self.name())?;
        let Some((op, _)) = OPS.get(usize::from(op)) else { return Ok(()) };
        match op {
            SharedOp::Barrier | SharedOp::Finish => return Ok(()),
            SharedOp::Block | SharedOp::SharedBlock => return write!(f, " of {} bytes", self.count),
            SharedOp::AllReduce | SharedOp::ReduceScatter => {
                let name = ["sum", "max", "min"].get(usize::from(reduce)).unwrap_or(&"unknown");
                write!(f, " ({name}) of {}", self.elements())?;
            }
            SharedOp::AllToAll
            | SharedOp::AllGather
            | SharedOp::Broadcast
            | SharedOp::Gather
            | SharedOp::Scatter => {
                write!(f, " of {}", self.elements())?;
            }
        }
        if matches!(op, SharedOp::Broadcast | SharedOp::Gather | SharedOp::Scatter) {
            write!(f, " with root {}", self.what >> 32)?;
        }
        if self.cuts != 0 {
            write!(f, " with cuts {:04x}", self.cuts & 0xffff)?;
        }
        if how & COMMON != 0 {
            write!(f, " in a shared block")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_stand_in_the_same_order() {
        assert!(OPS.iter().enumerate().all(|(i, (op, _))| *op as usize == i));
    }

    #[test]
    fn what_is_said_can_be_read_and_printed() {
        let block = polyreme_net::Block::of_this_process(size_of::<super::super::layout::Desk>()).unwrap();
        let desk = block.at::<super::super::layout::Desk>(0);
        let mut call = Call::bare(SharedOp::Broadcast, 12);
        for place in [
            MemoryRef::Private,
            MemoryRef::Nothing,
            MemoryRef::Address(7),
            MemoryRef::Block { id: 3, offset: 1 << 40 },
        ] {
            call.place = place;
            call.said().write(&desk.entries[1]);
            assert_eq!(ReadEntry::read(&desk.entries[1]), call.said());
        }
        call.root = 2;
        assert_eq!(call.said().to_string(), "broadcast of 12 u8 with root 2");
        let mut call = Call::bare(SharedOp::ReduceScatter, 3);
        call.cuts = Some([0, 1, 3].into());
        assert!(call.said().to_string().starts_with("reduce-scatter (sum) of 3 u8 with cuts "));
        assert!(!call.said().agrees(&Call::bare(SharedOp::ReduceScatter, 3).said()));
        desk.entries[0].what.store(!0, Ordering::Relaxed);
        assert_eq!(ReadEntry::read(&desk.entries[0]).to_string(), "something unknown");
    }
}
