//! All-to-all between ranks that share memory: rank `r` sends its range `s` to rank `s`, whatever their lengths.
//!
//! Only the sender knows the lengths, so they go first, as a separate piece: every rank writes its cuts into its
//! staging area, posts, and reads the cuts of all. A rank that would receive another length than it expects reports it
//! before any data move.
//!
//! # Direct
//! Every rank copies its range from each of the others and posts; once all have posted, no rank reads another's memory.
//! Each byte is copied once.
//!
//! # Staged
//! A staging area has a region for each rank. Piece by piece: every rank copies what is next for each of the others
//! into their regions and posts; then it reads its own region of each area. The longest range determines the number of
//! pieces, and every rank knows it from the cuts of all. Each byte is copied twice.
//!
//! When a rank dies the others' waits end with a report; targets are then partly written.

use polyreme_net::{Cause, Report};

use crate::element::Reduce;
use crate::work::{Cuts, Span};

use super::call::{Call, SharedOp};
use super::memory::Area;
use super::{ShmComm, area, wrong_with};

impl ShmComm {
    /// Range `r` of every rank goes to rank `r`.
    pub(crate) fn all_to_all(
        &mut self,
        send: Span,
        send_cuts: &Cuts,
        recv: Span,
        recv_cuts: &Cuts,
        step: u64,
    ) -> Result<(), Report> {
        let size = self.meet.size;
        let wrong = [(send, send_cuts), (recv, recv_cuts)].into_iter().find_map(|(span, cuts)| {
            wrong_with(&self.on(SharedOp::AllToAll, span, Some(cuts.clone()), 0, Reduce::Sum), size)
        });
        // Lengths differ from rank to rank, so they are not compared here.
        let call = Call { count: 0, ..self.on(SharedOp::AllToAll, send, None, 0, Reduce::Sum) };
        self.call_unless(wrong, call, step, |shared, call| {
            shared.exchange(call, send_cuts, area(recv), recv_cuts)
        })
    }

    /// `mine` of the call is what is sent. Both cuts were checked against the memory they cut.
    pub(super) fn exchange(
        &mut self,
        call: &Call,
        send_cuts: &[usize],
        target: Area,
        recv_cuts: &[usize],
    ) -> Result<(), Report> {
        let (rank, size, each) = (self.meet.rank, self.meet.size, call.dtype().bytes());
        let cuts = self.exchange_cuts(call, send_cuts, recv_cuts)?;
        let range = |from: usize, to: usize| -> (usize, usize) {
            let row = &cuts[from * (size + 1)..];
            (row[to] * each, (row[to + 1] - row[to]) * each)
        };
        let source = self.mine(call);
        let (from, bytes) = range(rank, rank);
        source.part(from, bytes).copy_to(target.part(recv_cuts[rank] * each, bytes));
        if call.is_visible() && self.all_visible() {
            let mut others = Vec::with_capacity(size);
            for r in 0..size {
                others.push(self.area_of(r, cuts[r * (size + 1) + size] * each)?);
            }
            self.meet.touch(|| {
                for r in (0..size).filter(|r| *r != rank) {
                    let (from, bytes) = range(r, rank);
                    others[r].part(from, bytes).copy_to(target.part(recv_cuts[r] * each, bytes));
                }
            })?;
            return self.meet.gather_here();
        }
        let cell = self.meet.layout.region_bytes();
        let pairs = (0..size).flat_map(|a| (0..size).filter(move |b| *b != a).map(move |b| (a, b)));
        let longest = pairs.map(|(a, b)| range(a, b).1).max().unwrap_or(0);
        let within =
            |k: usize, bytes: usize| ((k * cell).min(bytes), cell.min(bytes - (k * cell).min(bytes)));
        self.pieces(call, longest, cell, |shared, k, q, written| {
            for r in (0..size).filter(|r| *r != rank) {
                let (a, b) = if written { (r, rank) } else { (rank, r) };
                let (start, whole) = range(a, b);
                let (from, bytes) = within(k, whole);
                let staged = shared.stage(a, q).part(b * cell, bytes);
                if written {
                    staged.copy_to(target.part(recv_cuts[r] * each + from, bytes));
                } else {
                    source.part(start + from, bytes).copy_to(staged);
                }
            }
        })
    }

    /// The cuts of all ranks, row by row; checked against what this rank expects and published.
    fn exchange_cuts(
        &mut self,
        call: &Call,
        send_cuts: &[usize],
        recv_cuts: &[usize],
    ) -> Result<Vec<usize>, Report> {
        let (rank, size) = (self.meet.rank, self.meet.size);
        let mut words: Vec<u64> = send_cuts.iter().map(|c| *c as u64).collect();
        // SAFETY: valid until the end of this function, and only this rank sees it.
        let row = unsafe { Area::new(words.as_mut_ptr().cast(), words.len() * 8) };
        let mut all = vec![0u64; size * (size + 1)];
        // SAFETY: as above.
        let rows = unsafe { Area::new(all.as_mut_ptr().cast(), all.len() * 8) };
        self.pieces(call, row.bytes(), self.meet.layout.piece_bytes, |shared, _, q, written| {
            if !written {
                row.copy_to(shared.stage(rank, q).part(0, row.bytes()));
                return;
            }
            for r in 0..size {
                let staged = shared.stage(r, q).part(0, row.bytes());
                staged.copy_to(rows.part(r * row.bytes(), row.bytes()));
            }
        })?;
        for (r, row) in all.chunks_exact(size + 1).enumerate() {
            let sane = row.windows(2).all(|w| w[0] <= w[1]) && row[size] <= isize::MAX as u64 / 8;
            let sent = row[rank + 1].wrapping_sub(row[rank]);
            let wanted = (recv_cuts[r + 1] - recv_cuts[r]) as u64;
            if !sane || sent != wanted {
                let what = format!("it sends {sent} elements to rank {rank}, which expects {wanted}");
                return Err(self.meet.raise(r, Cause::Disagrees { what }));
            }
        }
        Ok(all.into_iter().map(|c| c as usize).collect())
    }
}
