//! One rank's end of an MPI communicator: each operation as MPI's own call.
//!
//! A rank that is in one communicator only makes blocking calls. Once it was split, its communicators have a thread
//! each, and MPI allows one call at a time: a blocking call would hold up the others, on which it may itself depend. So
//! from then on operations are started and polled until they are done, releasing the lock in between; all communicators
//! make progress whenever one of them polls. All ranks of a communicator know whether it was split, as they have to: a
//! blocking call of one does not match a started one of another.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::abi::Handle;
use super::mail::Mail;
use super::runtime::Runtime;
use crate::work::{Span, Work};

/// Elements of one call of MPI, which counts in 32 bits.
const COUNT_MAX: usize = 1 << 30;

/// One rank's end. A communicator that was made by [`MpiGroup::split`] is kept until MPI ends: freeing it is a
/// collective operation, and its ranks may be done with it at different times.
pub(super) struct MpiGroup<H: Handle> {
    runtime: Arc<Runtime<H>>,
    comm: H,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// This rank's number in the job.
    pub(super) name: usize,
    /// Whether other communicators of this rank may be active.
    beside_others: bool,
    /// Where this rank's part of a reduction is computed.
    own: Vec<u64>,
}

/// Makes a call blocking, or starts and polls it.
macro_rules! call {
    ($group:expr, $blocking:ident, $started:ident, $($arg:expr),*) => {{
        let group: &MpiGroup<_> = $group;
        let calls = &group.runtime.calls;
        match group.beside_others {
            // SAFETY: promised where it is used.
            false => unsafe { group.runtime.check((calls.$blocking)($($arg),*)) },
            // SAFETY: promised where it is used; memory and counts stay until this returns.
            true => group.until_done(|request| unsafe { (calls.$started)($($arg,)* request) }),
        }
    }};
}

impl<H: Handle> MpiGroup<H> {
    /// All ranks that the launcher started.
    pub(super) fn world(runtime: Runtime<H>) -> Result<MpiGroup<H>, String> {
        let comm = runtime.world;
        MpiGroup::of(Arc::new(runtime), comm, None)
    }

    fn of(runtime: Arc<Runtime<H>>, comm: H, names: Option<&[usize]>) -> Result<MpiGroup<H>, String> {
        let (mut rank, mut size) = (0, 0);
        let turn = runtime.turn();
        // SAFETY: the communicator's handle is the library's own, and out-parameters are valid.
        unsafe {
            runtime.check((runtime.calls.rank)(comm, &mut rank))?;
            runtime.check((runtime.calls.size)(comm, &mut size))?;
        }
        drop(turn);
        let (rank, size) = (rank as usize, size as usize);
        let name = names.map_or(rank, |names| names[rank]);
        Ok(MpiGroup { runtime, comm, rank, size, name, beside_others: names.is_some(), own: Vec::new() })
    }

    /// Splits by color; ranks of one color are ordered by `place`. All ranks of the communicator call it, and no
    /// operation may be pending in any.
    pub(super) fn split(
        &mut self,
        color: usize,
        place: usize,
        names: &[usize],
    ) -> Result<MpiGroup<H>, String> {
        self.beside_others = true;
        let mut comm = H::UNSET;
        let turn = self.runtime.turn();
        // SAFETY: the communicator's handle is the library's own, and the out-parameter is valid.
        let code =
            unsafe { (self.runtime.calls.comm_split)(self.comm, color as c_int, place as c_int, &mut comm) };
        drop(turn);
        self.runtime.check(code)?;
        MpiGroup::of(self.runtime.clone(), comm, Some(names))
    }

    /// Ends all ranks.
    pub(super) fn abort(&self) {
        self.runtime.abort();
    }

    /// Starts an operation, and polls it until it is done.
    fn until_done(&self, start: impl FnOnce(*mut H) -> c_int) -> Result<(), String> {
        let mut request = H::UNSET;
        let turn = self.runtime.turn();
        let code = start(&mut request);
        drop(turn);
        self.runtime.check(code)?;
        self.runtime.wait(request)
    }

    /// Messages beside operations; only after a split, as calls block before that.
    pub(super) fn mail(&self) -> Option<Mail<H>> {
        let mail =
            || Mail { runtime: self.runtime.clone(), comm: self.comm, next: 0, requests: HashMap::new() };
        self.beside_others.then(mail)
    }

    /// Runs this rank's part of an operation.
    ///
    /// # Safety
    /// The memory that `work` names is valid, and nothing else accesses it meanwhile.
    pub(super) unsafe fn run(&mut self, work: &Work) -> Result<(), String> {
        let comm = self.comm;
        let dtype = |span: &Span| self.runtime.dtype(span.dtype);
        // Every call below: the caller's promise; parts lie inside their spans by `parts`, and there is one for each rank.
        match work {
            Work::CodedSum(_) => unreachable!("made of other operations"),
            Work::Barrier => call!(self, barrier, start_barrier, comm),
            Work::AllReduce(span, reduce) => pieces(span).try_for_each(|(ptr, count)| {
                let (from, op) = (self.runtime.in_place(), self.runtime.op(span.dtype, *reduce));
                call!(self, all_reduce, start_all_reduce, from, ptr, count, dtype(span), op, comm)
            }),
            Work::Broadcast(span, root) => pieces(span).try_for_each(|(ptr, count)| {
                call!(self, broadcast, start_broadcast, ptr, count, dtype(span), *root as c_int, comm)
            }),
            Work::ReduceScatter(span, cuts, reduce) => {
                let parts = self.parts(cuts, span.count)?;
                let (start, end) = (cuts[self.rank], cuts[self.rank + 1]);
                let size = span.dtype.bytes();
                let bytes = (end - start) * size;
                let op = self.runtime.op(span.dtype, *reduce);
                let (from, counts, dtype) = (address(span), parts.counts.as_ptr(), dtype(span));
                self.own.resize(bytes.div_ceil(8).max(1), 0);
                let own = self.own.as_mut_ptr().cast::<u8>();
                call!(self, reduce_scatter, start_reduce_scatter, from, own.cast(), counts, dtype, op, comm)?;
                // SAFETY: the caller's promise; `own` is as long as this rank's part.
                unsafe { std::ptr::copy_nonoverlapping(own, span.ptr.add(start * size), bytes) };
                Ok(())
            }
            Work::AllGather(span, cuts) => {
                let parts = self.parts(cuts, span.count)?;
                let (counts, starts) = (parts.counts.as_ptr(), parts.starts.as_ptr());
                let (from, null, into) = (self.runtime.in_place(), self.runtime.null_type, address(span));
                let dtype = dtype(span);
                call!(self, all_gather, start_all_gather, from, 0, null, into, counts, starts, dtype, comm)
            }
            Work::Gather { mine, into, cuts, root } => {
                let parts = self.parts(cuts, into.map_or(cuts[self.size], |s| s.count))?;
                let into = into.map_or(std::ptr::null_mut(), |s| address(&s));
                let (from, n, dtype, root) = (address(mine), count(mine.count)?, dtype(mine), *root as c_int);
                let (counts, starts) = (parts.counts.as_ptr(), parts.starts.as_ptr());
                call!(self, gather, start_gather, from, n, dtype, into, counts, starts, dtype, root, comm)
            }
            Work::Scatter { mine, from, cuts, root } => {
                let parts = self.parts(cuts, from.map_or(cuts[self.size], |s| s.count))?;
                let from = from.map_or(std::ptr::null_mut(), |s| address(&s));
                let (into, n, dtype, root) = (address(mine), count(mine.count)?, dtype(mine), *root as c_int);
                let (counts, starts) = (parts.counts.as_ptr(), parts.starts.as_ptr());
                call!(self, scatter, start_scatter, from, counts, starts, dtype, into, n, dtype, root, comm)
            }
            Work::AllToAll { send, send_cuts, recv, recv_cuts } => {
                let sends = self.parts(send_cuts, send.count)?;
                let recvs = self.parts(recv_cuts, recv.count)?;
                let (from, into, dtype) = (address(send), address(recv), dtype(send));
                let (n_from, at_from) = (sends.counts.as_ptr(), sends.starts.as_ptr());
                let (n_into, at_into) = (recvs.counts.as_ptr(), recvs.starts.as_ptr());
                call!(
                    self,
                    all_to_all,
                    start_all_to_all,
                    from,
                    n_from,
                    at_from,
                    dtype,
                    into,
                    n_into,
                    at_into,
                    dtype,
                    comm
                )
            }
            Work::Send { to, tag, span } => pieces(span).try_for_each(|(ptr, count)| {
                let (calls, dtype) = (&self.runtime.calls, dtype(span));
                // SAFETY: see above.
                self.until_done(|request| unsafe {
                    (calls.start_send)(ptr, count, dtype, *to as c_int, c_int::from(*tag), comm, request)
                })
            }),
            Work::Receive { from, tag, span } => pieces(span).try_for_each(|(ptr, count)| {
                let (calls, dtype) = (&self.runtime.calls, dtype(span));
                // SAFETY: see above.
                self.until_done(|request| unsafe {
                    (calls.start_recv)(ptr, count, dtype, *from as c_int, c_int::from(*tag), comm, request)
                })
            }),
        }
    }

    /// Cuts in MPI's form; they must be inside `count` elements.
    fn parts(&self, cuts: &[usize], count: usize) -> Result<RankRanges, String> {
        let rising = cuts.windows(2).all(|c| c[0] <= c[1]);
        if cuts.len() != self.size + 1 || !rising || cuts[self.size] > count {
            return Err(format!("cuts {cuts:?} do not fit {count} elements and {} ranks", self.size));
        }
        RankRanges::of(cuts).ok_or_else(|| format!("{count} elements are more than MPI can count"))
    }
}

/// Ranges of a buffer, one for each rank.
struct RankRanges {
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

impl RankRanges {
    /// From cuts; `None` if a number is too large for MPI.
    fn of(cuts: &[usize]) -> Option<RankRanges> {
        let counts = cuts.windows(2).map(|c| c_int::try_from(c[1] - c[0]).ok()).collect::<Option<_>>()?;
        let starts =
            cuts[..cuts.len() - 1].iter().map(|&c| c_int::try_from(c).ok()).collect::<Option<_>>()?;
        Some(RankRanges { counts, starts })
    }
}

/// The address of a span. An empty one may have address 1, which means `MPI_IN_PLACE` to some libraries.
fn address(span: &Span) -> *mut c_void {
    static NOWHERE: u64 = 0;
    if span.count == 0 { (&raw const NOWHERE).cast_mut().cast() } else { span.ptr.cast() }
}

fn count(n: usize) -> Result<c_int, String> {
    c_int::try_from(n).map_err(|_| format!("{n} elements are more than MPI can count"))
}

/// A span in parts that MPI can count; at least one, even if it is empty, as all ranks make the same calls.
pub(super) fn pieces(span: &Span) -> impl Iterator<Item = (*mut c_void, c_int)> {
    let (ptr, total, size) = (address(span), span.count, span.dtype.bytes());
    (0..total.div_ceil(COUNT_MAX).max(1)).map(move |k| {
        let start = k * COUNT_MAX;
        (ptr.wrapping_byte_add(start * size), COUNT_MAX.min(total - start) as c_int)
    })
}
