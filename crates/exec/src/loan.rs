//! Lends the learnt state of an engine to another thread, which writes a checkpoint of it while training goes on.
//!
//! Parameters, moments and averages do not change between the end of an update and the start of the next one. So they are read
//! in place, best in the order in which they will be updated, and only what an update overtakes is copied
//! ([`crate::ledger`]).

use std::ops::Range;
use std::sync::Arc;

use polyreme_dtype::{Element, bf16};
use polyreme_graph::{Instr, Place};

use crate::arena::Arena;
use crate::engine::Engine;
use crate::ledger::Ledger;
use crate::state::State;
use crate::weights::{Kept, Slot};

/// Copies of what an update overtakes take at most this fraction of what is lent.
const ROOM: usize = 16;
/// Elements of bf16 that are widened at a time.
const STAGE: usize = 1024;

/// The learnt state as of one moment. Until it is dropped, updates wait before they overwrite what has not been read.
pub struct Loan {
    lent: Arc<Lent>,
}

/// What is lent, shared by the engine and the reader.
pub(crate) struct Lent {
    exact: Lending<f32>,
    /// Moments that are stored as bf16.
    halves: Lending<bf16>,
    order: Vec<Range<usize>>,
}

/// Arenas of one element type.
struct Lending<T> {
    arenas: Vec<(Kept, Arc<Arena>, usize)>,
    ledger: Ledger<T>,
}

/// The most memory that copies take when this many bytes are lent.
pub fn loan_copies(bytes: usize) -> usize {
    bytes / ROOM
}

impl Loan {
    /// The length of a lent arena in elements; 0 if it is not lent.
    pub fn len(&self, what: Kept) -> usize {
        self.lent.arenas().find(|(kept, ..)| *kept == what).map_or(0, |(.., len)| *len)
    }

    /// Ranges of the parameters in the order of their updates, which is the best order to read them in.
    pub fn order(&self) -> &[Range<usize>] {
        &self.lent.order
    }

    /// Reads a range of what was lent, as f32; `read` gets parts of it in order. Every element is read once.
    pub fn read(&self, what: Kept, range: Range<usize>, read: &mut dyn FnMut(&[f32])) {
        if self.lent.exact.read(what, range.clone(), read) {
            return;
        }
        let mut wide = [0.0; STAGE];
        let lent = self.lent.halves.read(what, range, &mut |halves| {
            for part in halves.chunks(STAGE) {
                wide.iter_mut().zip(part).for_each(|(wide, half)| *wide = half.to_f32());
                read(&wide[..part.len()]);
            }
        });
        assert!(lent, "an arena that was lent");
    }
}

impl std::fmt::Debug for Loan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lens: Vec<_> = self.lent.arenas().map(|(what, _, len)| (what, len)).collect();
        f.debug_tuple("Loan").field(&lens).finish()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.lent.exact.ledger.close();
        self.lent.halves.ledger.close();
    }
}

impl Lent {
    fn arenas(&self) -> impl Iterator<Item = &(Kept, Arc<Arena>, usize)> {
        self.exact.arenas.iter().chain(&self.halves.arenas)
    }

    /// Waits until a range may be overwritten.
    pub(crate) fn settle(&self, what: Kept, range: Range<usize>) {
        self.exact.settle(what, range.clone());
        self.halves.settle(what, range);
    }

    fn is_closed(&self) -> bool {
        self.exact.ledger.is_closed() && self.halves.ledger.is_closed()
    }
}

impl<T: Element> Lending<T> {
    /// Lends those of the arenas that have elements of this type; `ranges` are the tensors in each.
    fn new(state: &State, ranges: impl Fn(Kept) -> Vec<Range<usize>>) -> Lending<T> {
        let arenas: Vec<_> = [Kept::Params, Kept::Moment1, Kept::Moment2, Kept::Average]
            .into_iter()
            .filter(|what| state.dtype(*what) == T::DTYPE)
            .filter_map(|what| state.lendable(what).map(|(arena, len)| (what, arena, len)))
            .collect();
        let room = loan_copies(arenas.iter().map(|(.., len)| len).sum());
        let ledger = Ledger::new(arenas.iter().map(|(what, ..)| ranges(*what)), room);
        Lending { arenas, ledger }
    }

    fn find(&self, what: Kept) -> Option<(usize, &Arena, usize)> {
        let at = self.arenas.iter().position(|(kept, ..)| *kept == what)?;
        let (_, arena, len) = &self.arenas[at];
        Some((at, arena, *len))
    }

    /// Reads a range; whether the arena is one of these.
    fn read(&self, what: Kept, range: Range<usize>, read: &mut dyn FnMut(&[T])) -> bool {
        let Some((at, arena, len)) = self.find(what) else { return false };
        assert!(range.end <= len, "inside the arena");
        self.ledger.read(at, range, |part| lies(arena, part), read);
        true
    }

    /// Waits until a range may be overwritten, if the arena is one of these.
    fn settle(&self, what: Kept, range: Range<usize>) {
        if let Some((at, arena, len)) = self.find(what) {
            self.ledger.settle(at, len, range, |part| lies(arena, part));
        }
    }
}

/// A part of an arena, in place.
fn lies<T: Element>(arena: &Arena, part: Range<usize>) -> &[T] {
    // SAFETY: asked for by the ledger, under its lock, for elements that it has not settled; an engine overwrites what was
    // settled only, and the slice ends before the lock is released.
    unsafe { arena.slice(part.start * size_of::<T>(), part.len()) }
}

impl Engine {
    /// Lends parameters, moments and averages as they are now, to one reader. `None` if other ranks update them too,
    /// which would have to wait as well.
    pub fn lend(&mut self) -> Option<Loan> {
        if self.first().role.as_ref().is_some_and(|role| role.ranks > 1) {
            return None;
        }
        let ranges = |slots: Vec<Slot>| slots.into_iter().map(|slot| slot.range).collect();
        let params: Vec<Range<usize>> = ranges(self.param_slots());
        let moments = [Kept::Moment1, Kept::Moment2].map(|what| (what, ranges(self.moment_slots(what))));
        let all = [(Kept::Average, params.clone()), (Kept::Params, params)].into_iter().chain(moments);
        Some(self.lend_ranges(&all.collect::<Vec<_>>()))
    }

    /// Lends ranges of parameters, moments and averages as they are now, each to be read once. Only what this rank alone updates can
    /// be lent.
    pub(crate) fn lend_ranges(&mut self, ranges: &[(Kept, Vec<Range<usize>>)]) -> Loan {
        let of = |what: Kept| -> Vec<Range<usize>> {
            ranges.iter().filter(|(kept, _)| *kept == what).flat_map(|(_, ranges)| ranges.clone()).collect()
        };
        let state = &self.memory.state;
        let (exact, halves) = (Lending::new(state, of), Lending::new(state, of));
        let lent = Arc::new(Lent { exact, halves, order: self.order_of_updates() });
        self.memory.state.lent.retain(|lent| !lent.is_closed());
        self.memory.state.lent.push(lent.clone());
        Loan { lent }
    }

    /// Ranges of the parameters in the order in which a step updates them.
    pub(crate) fn order_of_updates(&self) -> Vec<Range<usize>> {
        let (program, ready) = (self.first(), self.layout());
        let param = |p: usize| {
            let value = ready.body.graph.params[p].value;
            let Place::Param(start) = ready.plan.places[value.idx()] else {
                unreachable!("parameters lie in their own arena")
            };
            start..start + ready.body.graph.shape(value).numel()
        };
        let range = |instr: &Instr| match instr {
            Instr::Update { params, .. } => Some(params.clone()),
            Instr::Run { block, .. } => program.blocks[*block].update.map(param),
            _ => None,
        };
        program.instrs.iter().filter_map(range).collect()
    }
}
