//! All-gather, broadcast, gather and scatter between ranks that share memory: data move, nothing is computed.
//!
//! `N` ranks, `S` bytes in all; rank `r` has the range `r` of the cuts.
//!
//! # Direct
//! 1. All ranks have published. A rank that needs data copies them from their owner's memory: all-gather, every rank
//!    the ranges of the others; broadcast, every rank but the root all of the root's; gather, the root the range of
//!    each rank; scatter, every rank its range of the root's.
//! 2. All ranks have posted: no rank reads another's memory any more.
//!
//! In a block that all ranks share there is nothing to copy, only the two meetings.
//!
//! # Staged
//! Piece by piece: the sources copy into their areas and post; the targets wait for the posts of their sources and copy
//! out. All-gather and gather: each rank is a source, of its own range. Broadcast: the root, of everything. Scatter:
//! the root, with a region of its area for each rank. Ranks that are not a source post too, which says that they are
//! done with the previous piece. Each source copies its part once, each target what it gets.
//!
//! When a rank dies the others' waits end with a report; targets are then partly written.

use polyreme_net::Report;

use crate::element::Reduce;
use crate::work::{Cuts, Span};

use super::call::{Call, SharedOp};
use super::memory::Area;
use super::{SHORT_BYTES, ShmComm, area};

/// Bytes from one offset to another, of the data of an operation.
type Range = (usize, usize);

impl ShmComm {
    /// The root's `into` gets `mine` of all ranks, by the cuts.
    pub(crate) fn gather(
        &mut self,
        mine: Span,
        into: Option<Span>,
        cuts: &Cuts,
        root: usize,
        step: u64,
    ) -> Result<(), Report> {
        let count = cuts.last().copied().unwrap_or(0);
        let call = Call { count, ..self.on(SharedOp::Gather, mine, Some(cuts.clone()), root, Reduce::Sum) };
        let wrong = self.wrong_shares(mine.count, into, cuts, root);
        self.call_unless(wrong, call, step, |shared, call| shared.gather_to(call, into.map(area)))
    }

    /// Each rank's `mine` gets its range of the root's `from`.
    pub(crate) fn scatter(
        &mut self,
        mine: Span,
        from: Option<Span>,
        cuts: &Cuts,
        root: usize,
        step: u64,
    ) -> Result<(), Report> {
        let count = cuts.last().copied().unwrap_or(0);
        let nothing = Span { count: 0, ..mine };
        let call = self.on(SharedOp::Scatter, from.unwrap_or(nothing), Some(cuts.clone()), root, Reduce::Sum);
        let wrong = self.wrong_shares(mine.count, from, cuts, root);
        self.call_unless(wrong, Call { count, ..call }, step, |shared, call| {
            shared.scatter_from(call, area(mine), from.map(area))
        })
    }

    pub(super) fn all_gather(&mut self, call: &Call) -> Result<(), Report> {
        let (rank, size, mine) = (self.meet.rank, self.meet.size, self.mine(call));
        let ranges = ranges(call);
        if self.goes_direct(call, mine.bytes())? {
            let others = self.areas(call, 0..size)?;
            self.meet.touch(|| {
                for r in (0..size).filter(|r| *r != rank) {
                    let (from, to) = ranges[r];
                    others[r].part(from, to - from).copy_to(mine.part(from, to - from));
                }
            })?;
            return self.meet.gather_here();
        }
        let cell = self.meet.layout.piece_bytes;
        self.pieces(call, longest(&ranges), cell, |shared, k, q, written| {
            let piece = |r: usize| within(ranges[r], k, cell);
            if !written {
                let (from, bytes) = piece(rank);
                mine.part(from, bytes).copy_to(shared.stage(rank, q).part(0, bytes));
                return;
            }
            for r in (0..size).filter(|r| *r != rank) {
                let (from, bytes) = piece(r);
                shared.stage(r, q).part(0, bytes).copy_to(mine.part(from, bytes));
            }
        })
    }

    pub(super) fn broadcast(&mut self, call: &Call) -> Result<(), Report> {
        let (rank, root, mine) = (self.meet.rank, call.root, self.mine(call));
        if self.goes_direct(call, mine.bytes())? {
            let source = self.areas(call, root..root + 1)?[0];
            if rank != root {
                self.meet.touch(|| source.copy_to(mine))?;
            }
            return self.meet.gather_here();
        }
        let cell = self.meet.layout.piece_bytes;
        self.pieces(call, mine.bytes(), cell, |shared, k, q, written| {
            let (from, bytes) = within((0, mine.bytes()), k, cell);
            let staged = shared.stage(root, q).part(0, bytes);
            match (written, rank == root) {
                (false, true) => mine.part(from, bytes).copy_to(staged),
                (true, false) => staged.copy_to(mine.part(from, bytes)),
                _ => {}
            }
        })
    }

    /// The root's `into` gets `mine` of all ranks.
    pub(super) fn gather_to(&mut self, call: &Call, into: Option<Area>) -> Result<(), Report> {
        let (rank, size, mine) = (self.meet.rank, self.meet.size, self.mine(call));
        let ranges = ranges(call);
        let bytes = |r: usize| ranges[r].1 - ranges[r].0;
        if let Some(into) = into {
            mine.copy_to(into.part(ranges[rank].0, bytes(rank)));
        }
        if self.goes_direct(call, longest(&ranges))? {
            if let Some(into) = into {
                let mut others = Vec::with_capacity(size);
                for r in 0..size {
                    others.push(self.area_of(r, bytes(r))?);
                }
                self.meet.touch(|| {
                    for r in (0..size).filter(|r| *r != rank) {
                        others[r].copy_to(into.part(ranges[r].0, bytes(r)));
                    }
                })?;
            }
            return self.meet.gather_here();
        }
        let cell = self.meet.layout.piece_bytes;
        self.pieces(call, longest(&ranges), cell, |shared, k, q, written| {
            if !written {
                let (from, bytes) = within((0, mine.bytes()), k, cell);
                mine.part(from, bytes).copy_to(shared.stage(rank, q).part(0, bytes));
            } else if let Some(into) = into {
                for r in (0..size).filter(|r| *r != rank) {
                    let (from, bytes) = within(ranges[r], k, cell);
                    shared.stage(r, q).part(0, bytes).copy_to(into.part(from, bytes));
                }
            }
        })
    }

    /// Each rank's `mine` gets its range of the root's `from`, which the root published.
    pub(super) fn scatter_from(
        &mut self,
        call: &Call,
        mine: Area,
        whole: Option<Area>,
    ) -> Result<(), Report> {
        let (rank, size, root) = (self.meet.rank, self.meet.size, call.root);
        let ranges = ranges(call);
        let own = |whole: &Area| whole.part(ranges[rank].0, mine.bytes());
        if let Some(whole) = &whole {
            own(whole).copy_to(mine);
        }
        let all = ranges[size - 1].1;
        if self.goes_direct(call, longest(&ranges))? {
            if rank != root {
                let source = self.area_of(root, all)?;
                self.meet.touch(|| own(&source).copy_to(mine))?;
            }
            return self.meet.gather_here();
        }
        let cell = self.meet.layout.region_bytes();
        self.pieces(call, longest(&ranges), cell, |shared, k, q, written| match (written, whole) {
            (false, Some(whole)) => {
                let area = shared.stage(rank, q);
                for r in (0..size).filter(|r| *r != rank) {
                    let (from, bytes) = within(ranges[r], k, cell);
                    whole.part(from, bytes).copy_to(area.part(r * cell, bytes));
                }
            }
            (true, None) => {
                let (from, bytes) = within((0, mine.bytes()), k, cell);
                shared.stage(root, q).part(rank * cell, bytes).copy_to(mine.part(from, bytes));
            }
            _ => {}
        })
    }

    /// Whether to go the direct way: the data are long, and visible on all ranks. All ranks come to the same answer.
    pub(super) fn goes_direct(&mut self, call: &Call, bytes: usize) -> Result<bool, Report> {
        if !call.is_visible() || (bytes <= SHORT_BYTES && !call.is_common()) {
            return Ok(false);
        }
        self.agree(call)?;
        Ok(self.all_visible())
    }

    fn areas(&self, call: &Call, ranks: std::ops::Range<usize>) -> Result<Vec<Area>, Report> {
        ranks.map(|r| self.area_of(r, call.count * call.dtype().bytes())).collect()
    }

    /// Goes through `longest` bytes in cells: `work` writes a piece, all ranks post, `work` reads it.
    pub(super) fn pieces(
        &mut self,
        call: &Call,
        longest: usize,
        cell: usize,
        mut work: impl FnMut(&mut ShmComm, usize, u32, bool),
    ) -> Result<(), Report> {
        // Even without elements the ranks meet once and compare.
        for k in 0..longest.div_ceil(cell).max(1) {
            let q = self.next_piece()?;
            work(self, k, q, false);
            let posted = self.post_piece(q);
            if k == 0 {
                self.agree(call)?;
            }
            self.meet.wait_phase(posted)?;
            work(self, k, q, true);
        }
        Ok(())
    }

    /// What is wrong with one rank's share and the root's whole.
    fn wrong_shares(&self, mine: usize, whole: Option<Span>, cuts: &Cuts, root: usize) -> Option<String> {
        let rank = self.meet.rank;
        let (from, to) = (*cuts.get(rank)?, *cuts.get(rank + 1)?);
        if to.checked_sub(from) != Some(mine) {
            return Some(format!("its share has {mine} elements, its cuts are {from} and {to}"));
        }
        match whole {
            None if rank == root => Some("the root has no memory for the whole".into()),
            Some(_) if rank != root => Some("it gives memory for the whole but is not the root".into()),
            Some(whole) if whole.count < cuts.last().copied().unwrap_or(0) => {
                Some(format!("the whole has {} elements, the cuts end at {:?}", whole.count, cuts.last()))
            }
            _ => None,
        }
    }
}

/// Each rank's range in bytes.
fn ranges(call: &Call) -> Vec<Range> {
    let each = call.dtype().bytes();
    let cuts = call.cuts.as_deref().unwrap_or_default();
    cuts.windows(2).map(|w| (w[0] * each, w[1] * each)).collect()
}

fn longest(ranges: &[Range]) -> usize {
    ranges.iter().map(|(from, to)| to - from).max().unwrap_or(0)
}

/// Where cell `k` of a range starts, and how many bytes it has.
fn within((from, to): Range, k: usize, cell: usize) -> (usize, usize) {
    let start = (from + k * cell).min(to);
    (start, cell.min(to - start))
}
