//! One rank's end of an MPI communicator: each operation as MPI's own call.

use std::ffi::c_int;

use super::abi::Handle;
use super::runtime::Runtime;
use crate::work::{Span, Work};

/// Elements of one call of MPI, which counts in 32 bits.
const COUNT_MAX: usize = 1 << 30;
/// What messages between two ranks carry.
const TAG: c_int = 7;

/// One rank's end.
pub(super) struct Group<H: Handle> {
    runtime: Runtime<H>,
    comm: H,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Where this rank's part of a reduction is made.
    own: Vec<u64>,
}

impl<H: Handle> Group<H> {
    /// All ranks that the launcher started.
    pub(super) fn world(runtime: Runtime<H>) -> Result<Group<H>, String> {
        let (comm, mut rank, mut size) = (runtime.world, 0, 0);
        // SAFETY: the world's handle is the library's own, and out-parameters are there.
        unsafe {
            runtime.check((runtime.calls.rank)(comm, &mut rank))?;
            runtime.check((runtime.calls.size)(comm, &mut size))?;
        }
        Ok(Group { runtime, comm, rank: rank as usize, size: size as usize, own: Vec::new() })
    }

    /// Ends all ranks.
    pub(super) fn abort(&self) {
        self.runtime.abort();
    }

    /// Does its part of an operation; one thread at a time.
    ///
    /// # Safety
    /// The memory that `work` names is there, and nobody else touches it meanwhile.
    pub(super) unsafe fn run(&mut self, work: &Work) -> Result<(), String> {
        let (calls, comm) = (&self.runtime.calls, self.comm);
        let dtype = |span: &Span| self.runtime.dtype(span.dtype);
        let check = |code| self.runtime.check(code);
        // SAFETY (of every call below): the caller's promise; parts lie inside their spans by `parts`, and there is one
        // for each rank.
        match work {
            // SAFETY: no memory is given.
            Work::Barrier => check(unsafe { (calls.barrier)(comm) }),
            Work::AllReduce(span, reduce) => pieces(span).try_for_each(|(ptr, count)| {
                let (from, op) = (self.runtime.in_place(), self.runtime.op(span.dtype, *reduce));
                // SAFETY: see above.
                check(unsafe { (calls.all_reduce)(from, ptr.cast(), count, dtype(span), op, comm) })
            }),
            Work::Broadcast(span, root) => pieces(span).try_for_each(|(ptr, count)| {
                // SAFETY: see above.
                check(unsafe { (calls.broadcast)(ptr.cast(), count, dtype(span), *root as c_int, comm) })
            }),
            Work::ReduceScatter(span, cuts, reduce) => {
                let parts = self.parts(cuts, span.count)?;
                let (start, end) = (cuts[self.rank], cuts[self.rank + 1]);
                let size = span.dtype.bytes();
                let bytes = (end - start) * size;
                let op = self.runtime.op(span.dtype, *reduce);
                let (from, counts, dtype) = (span.ptr.cast(), parts.counts.as_ptr(), dtype(span));
                self.own.resize(bytes.div_ceil(8).max(1), 0);
                let own = self.own.as_mut_ptr().cast::<u8>();
                // SAFETY: see above; `own` is as long as this rank's part.
                unsafe {
                    let code = (calls.reduce_scatter)(from, own.cast(), counts, dtype, op, comm);
                    self.runtime.check(code)?;
                    std::ptr::copy_nonoverlapping(own, span.ptr.add(start * size), bytes);
                }
                Ok(())
            }
            Work::AllGather(span, cuts) => {
                let parts = self.parts(cuts, span.count)?;
                let (counts, starts) = (parts.counts.as_ptr(), parts.starts.as_ptr());
                let (from, null, into) = (self.runtime.in_place(), self.runtime.null_type, span.ptr.cast());
                // SAFETY: see above.
                check(unsafe { (calls.all_gather)(from, 0, null, into, counts, starts, dtype(span), comm) })
            }
            Work::Gather { mine, into, cuts, root } => {
                let parts = self.parts(cuts, into.map_or(cuts[self.size], |s| s.count))?;
                let into = into.map_or(std::ptr::null_mut(), |s| s.ptr.cast());
                let (from, n, dtype, root) =
                    (mine.ptr.cast(), count(mine.count)?, dtype(mine), *root as c_int);
                let (counts, starts) = (parts.counts.as_ptr(), parts.starts.as_ptr());
                // SAFETY: see above.
                check(unsafe { (calls.gather)(from, n, dtype, into, counts, starts, dtype, root, comm) })
            }
            Work::Scatter { mine, from, cuts, root } => {
                let parts = self.parts(cuts, from.map_or(cuts[self.size], |s| s.count))?;
                let from = from.map_or(std::ptr::null(), |s| s.ptr.cast_const().cast());
                let (into, n, dtype, root) =
                    (mine.ptr.cast(), count(mine.count)?, dtype(mine), *root as c_int);
                let (counts, starts) = (parts.counts.as_ptr(), parts.starts.as_ptr());
                // SAFETY: see above.
                check(unsafe { (calls.scatter)(from, counts, starts, dtype, into, n, dtype, root, comm) })
            }
            Work::AllToAll { send, send_cuts, recv, recv_cuts } => {
                let sends = self.parts(send_cuts, send.count)?;
                let recvs = self.parts(recv_cuts, recv.count)?;
                let (from, into, dtype) = (send.ptr.cast(), recv.ptr.cast(), dtype(send));
                let (n_from, at_from) = (sends.counts.as_ptr(), sends.starts.as_ptr());
                let (n_into, at_into) = (recvs.counts.as_ptr(), recvs.starts.as_ptr());
                // SAFETY: see above.
                check(unsafe {
                    (calls.all_to_all)(from, n_from, at_from, dtype, into, n_into, at_into, dtype, comm)
                })
            }
            Work::Send(span, to) => pieces(span).try_for_each(|(ptr, count)| {
                // SAFETY: see above.
                check(unsafe { (calls.send)(ptr.cast(), count, dtype(span), *to as c_int, TAG, comm) })
            }),
            Work::Recv(span, from) => pieces(span).try_for_each(|(ptr, count)| {
                let (from, status) = (*from as c_int, self.runtime.abi.status_ignore());
                // SAFETY: see above.
                check(unsafe { (calls.recv)(ptr.cast(), count, dtype(span), from, TAG, comm, status) })
            }),
        }
    }

    /// Cuts as MPI wants them; they must lie inside `count` elements.
    fn parts(&self, cuts: &[usize], count: usize) -> Result<Parts, String> {
        let rising = cuts.windows(2).all(|c| c[0] <= c[1]);
        if cuts.len() != self.size + 1 || !rising || cuts[self.size] > count {
            return Err(format!("cuts {cuts:?} do not fit {count} elements and {} ranks", self.size));
        }
        Parts::of(cuts).ok_or_else(|| format!("{count} elements are more than MPI counts"))
    }
}

/// Ranges of a buffer, one for each rank.
struct Parts {
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

impl Parts {
    /// From cuts; `None` if a number is too large for MPI.
    fn of(cuts: &[usize]) -> Option<Parts> {
        let counts = cuts.windows(2).map(|c| c_int::try_from(c[1] - c[0]).ok()).collect::<Option<_>>()?;
        let starts =
            cuts[..cuts.len() - 1].iter().map(|&c| c_int::try_from(c).ok()).collect::<Option<_>>()?;
        Some(Parts { counts, starts })
    }
}

fn count(n: usize) -> Result<c_int, String> {
    c_int::try_from(n).map_err(|_| format!("{n} elements are more than MPI counts"))
}

/// A span in pieces that MPI can count; one even if it is empty, as all ranks make the same calls.
fn pieces(span: &Span) -> impl Iterator<Item = (*mut u8, c_int)> {
    let (ptr, total, size) = (span.ptr, span.count, span.dtype.bytes());
    (0..total.div_ceil(COUNT_MAX).max(1)).map(move |k| {
        let start = k * COUNT_MAX;
        (ptr.wrapping_add(start * size), COUNT_MAX.min(total - start) as c_int)
    })
}
