//! Collectives over links, that is, by sending bytes.
//!
//! An algorithm is a function that writes down what a rank sends and receives ([`polyreme_net::Moves`]); the links run
//! it. So the files of the algorithms have neither sockets nor loops over bytes, and what they state about rounds and
//! bytes can be checked.
//!
//! # Layout
//! - [`ring`], [`halving`], [`tree`], [`direct`], [`barrier`]: the algorithms. `docs/algorithms.md` has a row for each.
//! - [`choose`](mod@choose): which one is used. [`measure`](mod@measure): what communication costs here.
//! - [`peers`](mod@peers): which ranks talk with each other in them.
//! - [`levels`]: inside hosts, then between them.
//! - `plan`: operations as moves. `combine`: reducing bytes. `bytes`: elements as bytes.

pub mod barrier;
pub(crate) mod bytes;
pub mod choose;
mod combine;
pub mod direct;
pub mod halving;
pub mod levels;
pub mod measure;
pub mod peers;
mod plan;
pub mod ring;
#[cfg(test)]
mod tests;
pub mod tree;

use polyreme_net::frame::{Tag, Terms};
use polyreme_net::{Alarm, Cause, Links, Report};

pub use choose::{Algorithm, Choice, Costs, Effort, FrameOp, choose};
pub use levels::{Level, TwoLevel};
pub use measure::measure;
pub use peers::peers;

use crate::element::{DType, Element, Reduce};
use crate::work::{Cuts, Work, digest};
use plan::{Key, Plans};

/// One rank's end of a group connected by links. Every rank calls the same operations in the same order.
///
/// Cuts that do not fit the data, a root that is not a rank and a range of the wrong length are bugs of the caller:
/// they panic before anything is sent.
pub struct Linked {
    links: Links,
    step: u64,
    costs: Costs,
    forced: Option<Algorithm>,
    plans: Plans,
    /// The number of the group's next operation, modulo 256.
    turn: u8,
    /// The number of the message that is sent or received.
    message: u16,
}

impl Linked {
    /// A group over these links. Algorithms are chosen by default costs until [`Linked::set_costs`].
    pub fn over(links: Links) -> Linked {
        Linked {
            links,
            step: 0,
            costs: Costs::default(),
            forced: None,
            plans: Plans::default(),
            turn: 0,
            message: 0,
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.links.rank()
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.links.size()
    }

    /// This rank's number in reports, and its host.
    pub fn name(&self) -> (usize, String) {
        self.links.name()
    }

    /// The alarm that ends this rank's waits.
    pub fn alarm(&self) -> Alarm {
        self.links.alarm().clone()
    }

    /// Bytes that this rank has sent.
    pub fn sent_bytes(&self) -> u64 {
        self.links.sent_bytes()
    }

    /// The links.
    pub fn links(&mut self) -> &mut Links {
        &mut self.links
    }

    /// Says which step the next operations belong to. All ranks must set the same.
    pub fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Sets the costs by which algorithms are chosen. All ranks must set the same.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }

    /// The costs by which algorithms are chosen.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Uses this algorithm wherever an operation has it. All ranks must set the same.
    pub fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.forced = algorithm;
    }

    /// Tells the others that this rank fails: their waits end with a report that says so.
    pub fn fail(&mut self, why: &str) {
        let (rank, host) = self.links.name();
        let cause = Cause::Failed { why: why.into() };
        self.links.fail(Report { rank, host, step: self.step, op: "its own work".into(), cause });
    }

    /// Waits until every rank is here.
    pub fn barrier(&mut self) -> Result<(), Report> {
        let key = self.key(FrameOp::Barrier, DType::U8, 0, 0, None);
        self.run(key, DType::U8, &[], &mut [0; barrier::BYTES], Reduce::Sum)
    }

    /// Every rank gets the reduction of all.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], reduce: Reduce) -> Result<(), Report> {
        self.all_reduce_bytes(bytes::of_mut(data), T::DTYPE, reduce)
    }

    /// The root gets the reduction of all; the others' memory is unspecified.
    pub fn reduce<T: Element>(&mut self, data: &mut [T], reduce: Reduce, root: usize) -> Result<(), Report> {
        let key = self.key(FrameOp::Reduce, T::DTYPE, data.len(), root, None);
        self.run(key, T::DTYPE, &[], bytes::of_mut(data), reduce)
    }

    /// Each rank gets the reduction of its own range; the rest of the memory is unspecified.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        data: &mut [T],
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), Report> {
        self.reduce_scatter_bytes(bytes::of_mut(data), T::DTYPE, cuts, reduce)
    }

    /// Every rank gets the ranges of all.
    pub fn all_gather<T: Element>(&mut self, data: &mut [T], cuts: &Cuts) -> Result<(), Report> {
        self.all_gather_bytes(bytes::of_mut(data), T::DTYPE, cuts)
    }

    /// Every rank gets the data of `root`.
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<(), Report> {
        self.broadcast_bytes(bytes::of_mut(data), T::DTYPE, root)
    }

    /// The root gets the ranges of all: `mine` is this rank's range, `into` the whole, at the root only.
    pub fn gather<T: Element>(
        &mut self,
        mine: &[T],
        into: Option<&mut [T]>,
        cuts: &Cuts,
        root: usize,
    ) -> Result<(), Report> {
        let into = into.map_or(&mut [] as &mut [u8], |into| bytes::of_mut(into));
        self.gather_bytes(bytes::of(mine), into, T::DTYPE, cuts, root)
    }

    /// Each rank gets its range of what the root has: `from` is the whole, at the root only.
    pub fn scatter<T: Element>(
        &mut self,
        mine: &mut [T],
        from: Option<&[T]>,
        cuts: &Cuts,
        root: usize,
    ) -> Result<(), Report> {
        self.scatter_bytes(bytes::of_mut(mine), bytes::of(from.unwrap_or(&[])), T::DTYPE, cuts, root)
    }

    /// Each rank gets a range from every other: rank `r` gets `send_cuts[r]..` of this one's `send`, and what rank `r`
    /// sends goes to `recv_cuts[r]..` of `recv`.
    pub fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_cuts: &Cuts,
        recv: &mut [T],
        recv_cuts: &Cuts,
    ) -> Result<(), Report> {
        self.all_to_all_bytes(bytes::of(send), send_cuts, bytes::of_mut(recv), recv_cuts, T::DTYPE)
    }

    /// Sends to one rank, which receives as many elements.
    pub fn send<T: Element>(&mut self, to: usize, data: &[T]) -> Result<(), Report> {
        self.send_bytes(to, 0, bytes::of(data), T::DTYPE)
    }

    /// Receives from one rank, which sends as many elements.
    pub fn recv<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), Report> {
        self.recv_bytes(from, 0, bytes::of_mut(data), T::DTYPE)
    }

    /// Runs an operation that is described by addresses.
    ///
    /// # Safety
    /// The memory is valid and nothing else accesses it until this returns.
    pub unsafe fn work(&mut self, work: &Work) -> Result<(), Report> {
        // SAFETY: the caller's promise is what `of_span` asks for.
        let bytes = |span| unsafe { bytes::of_span(span) };
        match work {
            Work::AllReduce(span, reduce) => self.all_reduce_bytes(bytes(span), span.dtype, *reduce),
            Work::ReduceScatter(span, cuts, reduce) => {
                self.reduce_scatter_bytes(bytes(span), span.dtype, cuts, *reduce)
            }
            Work::AllGather(span, cuts) => self.all_gather_bytes(bytes(span), span.dtype, cuts),
            Work::Broadcast(span, root) => self.broadcast_bytes(bytes(span), span.dtype, *root),
            Work::CodedSum(_) => unreachable!("made of other operations"),
            Work::Barrier => self.barrier(),
            Work::Gather { mine, into, cuts, root } => {
                let into = into.as_ref().map_or(&mut [] as &mut [u8], bytes);
                self.gather_bytes(bytes(mine), into, mine.dtype, cuts, *root)
            }
            Work::Scatter { mine, from, cuts, root } => {
                let from = from.as_ref().map_or(&mut [] as &mut [u8], bytes);
                self.scatter_bytes(bytes(mine), from, mine.dtype, cuts, *root)
            }
            Work::AllToAll { send, send_cuts, recv, recv_cuts } => {
                self.all_to_all_bytes(bytes(send), send_cuts, bytes(recv), recv_cuts, send.dtype)
            }
            Work::Send { to, tag, span } => self.send_bytes(*to, *tag, bytes(span), span.dtype),
            Work::Receive { from, tag, span } => self.recv_bytes(*from, *tag, bytes(span), span.dtype),
        }
    }

    fn all_reduce_bytes(&mut self, data: &mut [u8], dtype: DType, reduce: Reduce) -> Result<(), Report> {
        let key = self.key(FrameOp::AllReduce, dtype, data.len() / dtype.bytes(), 0, None);
        self.run(key, dtype, &[], data, reduce)
    }

    fn reduce_scatter_bytes(
        &mut self,
        data: &mut [u8],
        dtype: DType,
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), Report> {
        let key = self.key(FrameOp::ReduceScatter, dtype, data.len() / dtype.bytes(), 0, Some(cuts));
        self.run(key, dtype, &[], data, reduce)
    }

    fn all_gather_bytes(&mut self, data: &mut [u8], dtype: DType, cuts: &Cuts) -> Result<(), Report> {
        let key = self.key(FrameOp::AllGather, dtype, data.len() / dtype.bytes(), 0, Some(cuts));
        self.run(key, dtype, &[], data, Reduce::Sum)
    }

    fn broadcast_bytes(&mut self, data: &mut [u8], dtype: DType, root: usize) -> Result<(), Report> {
        let key = self.key(FrameOp::Broadcast, dtype, data.len() / dtype.bytes(), root, None);
        self.run(key, dtype, &[], data, Reduce::Sum)
    }

    pub(crate) fn gather_bytes(
        &mut self,
        mine: &[u8],
        into: &mut [u8],
        dtype: DType,
        cuts: &Cuts,
        root: usize,
    ) -> Result<(), Report> {
        let key = self.key(FrameOp::Gather, dtype, cuts[cuts.len() - 1], root, Some(cuts));
        let own = self.own(cuts, dtype);
        assert_eq!(mine.len(), own.len(), "a rank sends its own range");
        if self.rank() == root {
            into[own].copy_from_slice(mine);
        }
        self.run(key, dtype, mine, into, Reduce::Sum)
    }

    pub(crate) fn scatter_bytes(
        &mut self,
        mine: &mut [u8],
        from: &[u8],
        dtype: DType,
        cuts: &Cuts,
        root: usize,
    ) -> Result<(), Report> {
        let key = self.key(FrameOp::Scatter, dtype, cuts[cuts.len() - 1], root, Some(cuts));
        let own = self.own(cuts, dtype);
        assert_eq!(mine.len(), own.len(), "a rank gets its own range");
        if self.rank() == root {
            mine.copy_from_slice(&from[own]);
        }
        self.run(key, dtype, from, mine, Reduce::Sum)
    }

    pub(crate) fn all_to_all_bytes(
        &mut self,
        send: &[u8],
        send_cuts: &Cuts,
        recv: &mut [u8],
        recv_cuts: &Cuts,
        dtype: DType,
    ) -> Result<(), Report> {
        check_cuts(recv_cuts, self.size(), recv.len() / dtype.bytes());
        check_cuts(send_cuts, self.size(), send.len() / dtype.bytes());
        // Only the two ranks of a pair know how much goes between them.
        let mut key = self.key(FrameOp::AllToAll, dtype, 0, 0, None);
        (key.cuts, key.received) = (Some(send_cuts.clone()), Some(recv_cuts.clone()));
        recv[self.own(recv_cuts, dtype)].copy_from_slice(&send[self.own(send_cuts, dtype)]);
        self.run(key, dtype, send, recv, Reduce::Sum)
    }

    pub(crate) fn send_bytes(
        &mut self,
        to: usize,
        tag: u16,
        data: &[u8],
        dtype: DType,
    ) -> Result<(), Report> {
        assert_ne!(to, self.rank(), "the peer is another rank");
        self.message = tag;
        let key = self.key(FrameOp::Send, dtype, data.len() / dtype.bytes(), to, None);
        self.run(key, dtype, data, &mut [], Reduce::Sum)
    }

    pub(crate) fn recv_bytes(
        &mut self,
        from: usize,
        tag: u16,
        data: &mut [u8],
        dtype: DType,
    ) -> Result<(), Report> {
        assert_ne!(from, self.rank(), "the peer is another rank");
        self.message = tag;
        let mut key = self.key(FrameOp::Send, dtype, data.len() / dtype.bytes(), from, None);
        key.receives = true;
        self.run(key, dtype, &[], data, Reduce::Sum)
    }

    /// A rank's own range, in bytes.
    fn own(&self, cuts: &Cuts, dtype: DType) -> std::ops::Range<usize> {
        let rank = self.rank();
        cuts[rank] * dtype.bytes()..cuts[rank + 1] * dtype.bytes()
    }

    fn key(&self, op: FrameOp, dtype: DType, count: usize, root: usize, cuts: Option<&Cuts>) -> Key {
        assert!(root < self.size(), "the root is a rank");
        if let Some(cuts) = cuts {
            check_cuts(cuts, self.size(), count);
        }
        let forced = self.forced.filter(|a| choose::candidates(op).contains(a));
        let algorithm =
            forced.unwrap_or_else(|| choose::quickly(op, count * dtype.bytes(), self.size(), &self.costs));
        let key = Key::new(op, algorithm, count, dtype.bytes(), root);
        Key { cuts: cuts.cloned(), ..key }
    }

    /// What all ranks must agree on for their next operation. What concerns only two of them is left out: a send, whose
    /// other end has another root, and the cuts of an all-to-all.
    fn terms(&mut self, key: &Key, reduce: Reduce) -> Terms {
        if key.op == FrameOp::Send {
            return Terms { cuts: self.message, ..Terms::default() };
        }
        self.turn = self.turn.wrapping_add(1);
        let cuts = key.cuts.as_deref().filter(|_| key.op != FrameOp::AllToAll);
        Terms {
            reducer: reduce as u8,
            algorithm: key.algorithm as u8,
            // It is only compared, so the lower half is enough.
            root: key.root as u16,
            cuts: cuts.map_or(0, digest) as u16,
            turn: self.turn,
        }
    }

    fn run(
        &mut self,
        key: Key,
        dtype: DType,
        from: &[u8],
        into: &mut [u8],
        reduce: Reduce,
    ) -> Result<(), Report> {
        let (rank, size) = (self.rank(), self.size());
        if size == 1 {
            return Ok(());
        }
        let terms = self.terms(&key, reduce);
        let moves = self.plans.get(rank, size, &key);
        let tag = Tag { step: self.step, op: key.op, dtype: dtype as u8, count: key.count as u64, terms };
        self.links.run(&tag, moves, from, into, &mut |into, arrived, theirs_first| {
            combine::combine(dtype, reduce, into, arrived, theirs_first);
        })
    }
}

fn check_cuts(cuts: &Cuts, size: usize, count: usize) {
    let rising = cuts.is_sorted() && cuts.last().is_some_and(|last| *last <= count);
    assert!(cuts.len() == size + 1 && rising, "cuts {cuts:?} of {count} elements for {size} ranks");
}
