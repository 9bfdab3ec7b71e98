//! The layout of the memory that the ranks share.
//!
//! In this order: a page with the size of the group and the notice of a failure; a desk for each rank; staging areas,
//! [`PIECES`] for each rank; a ring for each ordered pair of ranks, and a page for its messages with tags. All zeros is
//! a group that has not begun. Desks and staging areas are faulted in ahead, rings at their first use.

use polyreme_net::{Counter, Notice, Shareable};
use polyreme_sync::CHECKED;
use polyreme_sync::atomic::{AtomicU32, AtomicU64};

/// Staging areas of a rank: one that is written, two that others may still read, and one that is no longer needed.
pub(super) const PIECES: u32 = 4;

/// How many of a rank's last operations the others can see; older ones have been done by all.
pub(super) const ENTRIES: u32 = 32;

/// How many messages from one process to another may be unread; they and their counters fit in a page.
pub(super) const LETTERS: u32 = 32;

/// The most ranks of a group: each pair has a ring.
pub(super) const RANKS_MAX: usize = 1024;

const PAGE: usize = 4096;
const LINE: usize = 64;

/// The first page.
#[repr(C, align(64))]
pub(super) struct Front {
    /// What this memory is, in which version, and for how many ranks.
    pub(super) mark: AtomicU64,
    /// Of which generation of the job its ranks are.
    pub(super) generation: AtomicU64,
}
// SAFETY: atomics, in C's order.
unsafe impl Shareable for Front {}

/// Where a rank publishes its progress. The first cache line is read by all, and written by its rank only.
#[repr(C, align(64))]
pub(super) struct Desk {
    /// Operations that were published.
    pub(super) posted: Counter,
    /// Phases completed inside operations, in total.
    pub(super) phase: Counter,
    /// [`HERE`], [`LEFT`] or [`FINISHED`].
    pub(super) state: AtomicU32,
    /// Its process.
    pub(super) pid: AtomicU32,
    /// The file of a block that it offers.
    pub(super) file: AtomicU32,
    /// How many cores it may run on.
    pub(super) cores: AtomicU32,
    _room: [AtomicU32; 8],
    /// On a separate cache line: whether it is accessing another rank's memory.
    pub(super) busy: AtomicU32,
    _gap: AtomicU32,
    /// The rank that it sends to and the cell that it waits for, if it has waited for long; 0 otherwise.
    pub(super) sending: AtomicU64,
    _rest: [AtomicU64; 6],
    pub(super) entries: [DeskEntry; ENTRIES as usize],
}
// SAFETY: atomics and counters, in C's order.
unsafe impl Shareable for Desk {}

/// One published operation.
#[repr(C, align(64))]
pub(super) struct DeskEntry {
    /// Code, element type, reducer, root.
    pub(super) what: AtomicU64,
    pub(super) count: AtomicU64,
    /// A hash of the cuts.
    pub(super) cuts: AtomicU64,
    /// The kind of memory, and which block.
    pub(super) place: AtomicU64,
    /// The address or the offset.
    pub(super) offset: AtomicU64,
    _room: [AtomicU64; 3],
}

// SAFETY: atomics, in C's order.
unsafe impl Shareable for DeskEntry {}

/// The rank takes part.
pub(super) const HERE: u32 = 0;
/// It left without finishing.
pub(super) const LEFT: u32 = 1;
/// It has finished its work.
pub(super) const FINISHED: u32 = 2;

/// A ring from one rank to another, before its cells.
#[repr(C, align(64))]
pub(super) struct Ring {
    /// Cells that were written; the sender's line.
    pub(super) head: Counter,
    _room: [AtomicU64; 7],
    /// Cells that were read; the receiver's line.
    pub(super) tail: Counter,
    _rest: [AtomicU64; 7],
}
// SAFETY: counters and atomics, in C's order.
unsafe impl Shareable for Ring {}

/// Sizes and offsets for a number of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShmLayout {
    pub(super) ranks: usize,
    /// Bytes of a staging area.
    pub(super) piece_bytes: usize,
    /// Bytes of a ring's cells.
    pub(super) ring_bytes: usize,
}

const DESK_BYTES: usize = size_of::<Desk>().next_multiple_of(PAGE);
const NOTICE: usize = 1024;
const _: () = assert!(size_of::<Ring>() + LETTERS as usize * size_of::<DeskEntry>() <= PAGE);
const _: () = assert!(NOTICE + size_of::<Notice>() <= PAGE);

impl ShmLayout {
    pub(super) fn of(ranks: usize) -> ShmLayout {
        let ring_bytes = ((1 << 20) / ranks.next_power_of_two()).clamp(PAGE, RING_BYTES_MAX);
        // A lone rank exchanges nothing, and should not take megabytes for it.
        let piece_bytes = if ranks > 1 { PIECE_BYTES } else { PAGE };
        ShmLayout { ranks, piece_bytes, ring_bytes }
    }

    /// Bytes of the staging areas of one rank.
    pub(super) fn staging_bytes(&self) -> usize {
        PIECES as usize * self.piece_bytes
    }

    /// The first word of memory with this layout.
    pub(super) fn mark(&self) -> u64 {
        0x706f_6c79_0003_0000 | self.ranks as u64
    }

    pub(super) fn notice(&self) -> usize {
        NOTICE
    }

    pub(super) fn desk(&self, rank: usize) -> usize {
        PAGE + rank * DESK_BYTES
    }

    pub(super) fn piece(&self, rank: usize, piece: u32) -> usize {
        let idx = rank * PIECES as usize + (piece % PIECES) as usize;
        self.desk(self.ranks) + idx * self.piece_bytes
    }

    pub(super) fn ring(&self, from: usize, to: usize) -> usize {
        let stride = self.ring_bytes + 2 * PAGE;
        self.piece(self.ranks, 0) + (from * self.ranks + to) * stride
    }

    pub(super) fn cells(&self, from: usize, to: usize) -> usize {
        self.ring(from, to) + PAGE
    }

    /// The counters of messages with tags, followed by their cells.
    pub(super) fn letters(&self, from: usize, to: usize) -> usize {
        self.cells(from, to) + self.ring_bytes
    }

    pub(super) fn warm_bytes(&self) -> usize {
        self.ring(0, 0)
    }

    pub(super) fn bytes(&self) -> usize {
        self.ring(self.ranks, 0)
    }

    /// Bytes of each rank's region when all share a staging area: whole cache lines, so that no two ranks write to the
    /// same.
    pub(super) fn region_bytes(&self) -> usize {
        self.piece_bytes / self.ranks / LINE * LINE
    }
}

/// Bytes of a staging area. Measured with 128 KiB to 2 MiB on a machine with 512 KiB of L2 per core: with smaller ones
/// four ranks on two cores meet more often, larger ones do not stay in cache (16 MiB: 9.0, 6.3, 8.5 and 11.9 ms with
/// 256 KiB, 512 KiB, 1 MiB and 2 MiB).
const PIECE_BYTES: usize = if CHECKED { 8 << 10 } else { 512 << 10 };

/// Bytes of the cells of a ring, with few ranks.
const RING_BYTES_MAX: usize = if CHECKED { PAGE } else { 64 << 10 };

/// Cuts that give every rank about the same number of elements, in whole cache lines.
pub(super) fn even_cuts(count: usize, ranks: usize, bytes: usize) -> Vec<usize> {
    let (unit, mut cuts) = (LINE / bytes, Vec::with_capacity(ranks + 1));
    let units = count.div_ceil(unit);
    // Quotient and remainder separately: a product could overflow.
    let (each, more) = (units / ranks, units % ranks);
    cuts.extend((0..=ranks).map(|r| ((each * r + r.min(more)) * unit).min(count)));
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for ranks in [1, 2, 3, 16, 100, RANKS_MAX] {
            let l = ShmLayout::of(ranks);
            assert!(l.desk(0) >= l.notice() + size_of::<Notice>());
            assert!(l.desk(1) - l.desk(0) >= size_of::<Desk>());
            assert_eq!(l.piece(0, 0), l.desk(ranks - 1) + DESK_BYTES);
            assert_eq!(l.piece(ranks - 1, 3) + l.piece_bytes, l.ring(0, 0));
            assert_eq!(l.piece(0, 0), l.piece(0, 4));
            assert!(l.cells(0, 0) >= l.ring(0, 0) + size_of::<Ring>());
            assert_eq!(l.letters(0, 0), l.cells(0, 0) + l.ring_bytes);
            assert_eq!(l.letters(ranks - 1, ranks - 1) + PAGE, l.bytes());
            assert!(l.region_bytes() >= LINE && l.region_bytes() * ranks <= l.piece_bytes);
            assert!(l.ring_bytes.is_power_of_two());
        }
    }

    #[test]
    fn even_cuts_cover_everything_in_whole_lines() {
        for (count, ranks, bytes) in [(0, 3, 4), (1, 4, 8), (1000, 3, 4), (100_003, 13, 2), (5, 16, 1)] {
            let cuts = even_cuts(count, ranks, bytes);
            assert_eq!((cuts.len(), cuts[0], cuts[ranks]), (ranks + 1, 0, count));
            assert!(cuts.windows(2).all(|w| w[0] <= w[1]));
            assert!(cuts[1..ranks].iter().all(|c| c * bytes % LINE == 0 || *c == count), "{cuts:?}");
        }
    }
}
