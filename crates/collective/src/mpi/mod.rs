//! Ranks that `mpirun` or `srun` started: MPI's own collectives, through the library that the machine has.
//!
//! MPI is fail-stop: when a rank dies, its launcher ends the others and says so; a rank that fails by itself says why
//! and aborts the job. Calls come from one thread at a time. Counts are 32-bit in MPI: all-reduces and
//! broadcasts of more elements are cut, other operations refuse them.

mod ffi;

use std::ffi::c_int;

use polyreme_net::{Cause, Report};

use crate::work::{Span, Work};

/// Elements of one call of MPI.
const COUNT_MAX: usize = 1 << 30;

/// This rank's end of `MPI_COMM_WORLD`.
pub struct Mpi {
    rank: usize,
    size: usize,
    /// Where this rank's part of a reduction is made.
    own: Vec<u64>,
}

impl Mpi {
    /// Starts MPI.
    pub fn start() -> Result<Mpi, String> {
        let (rank, size) = ffi::init()?;
        Ok(Mpi { rank, size, own: Vec::new() })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Says why, and ends all ranks.
    pub fn abort(&self, report: &Report) {
        eprintln!("{report}; the job is aborted");
        ffi::abort(1);
    }

    /// Does its part of an operation; one thread at a time.
    ///
    /// # Safety
    /// The memory that `work` names is there, and nobody else touches it meanwhile.
    pub unsafe fn run(&mut self, work: &Work, step: u64) -> Result<(), Report> {
        // SAFETY: the caller's promise.
        let outcome = unsafe { self.call(work) };
        outcome.map_err(|why| Report {
            rank: self.rank,
            host: String::new(),
            step,
            op: work.name().into(),
            cause: Cause::Failed { why },
        })
    }

    unsafe fn call(&mut self, work: &Work) -> Result<(), String> {
        // SAFETY (of every call below): the caller's promise; parts lie inside their spans by `parts`.
        match work {
            Work::Barrier => ffi::barrier(),
            Work::AllReduce(span, reduce) => pieces(span).try_for_each(|(ptr, count)| {
                // SAFETY: see above.
                unsafe { ffi::all_reduce(ptr, count, span.dtype, *reduce) }
            }),
            Work::Broadcast(span, root) => pieces(span).try_for_each(|(ptr, count)| {
                // SAFETY: see above.
                unsafe { ffi::broadcast(ptr, count, span.dtype, *root) }
            }),
            Work::ReduceScatter(span, cuts, reduce) => {
                let parts = self.parts(cuts, span.count)?;
                let (start, end) = (cuts[self.rank], cuts[self.rank + 1]);
                let size = span.dtype.bytes();
                let bytes = (end - start) * size;
                self.own.resize(bytes.div_ceil(8).max(1), 0);
                let own = self.own.as_mut_ptr().cast::<u8>();
                // SAFETY: see above; `own` is as long as this rank's part.
                unsafe {
                    ffi::reduce_scatter(span.ptr, own, &parts, span.dtype, *reduce)?;
                    std::ptr::copy_nonoverlapping(own, span.ptr.add(start * size), bytes);
                }
                Ok(())
            }
            Work::AllGather(span, cuts) => {
                let parts = self.parts(cuts, span.count)?;
                // SAFETY: see above.
                unsafe { ffi::all_gather(span.ptr, &parts, span.dtype) }
            }
            Work::Gather { mine, into, cuts, root } => {
                let parts = self.parts(cuts, into.map_or(cuts[self.size], |s| s.count))?;
                let into = into.map_or(std::ptr::null_mut(), |s| s.ptr);
                // SAFETY: see above.
                unsafe { ffi::gather(mine.ptr, count(mine.count)?, into, &parts, mine.dtype, *root) }
            }
            Work::Scatter { mine, from, cuts, root } => {
                let parts = self.parts(cuts, from.map_or(cuts[self.size], |s| s.count))?;
                let from = from.map_or(std::ptr::null(), |s| s.ptr.cast_const());
                // SAFETY: see above.
                unsafe { ffi::scatter(mine.ptr, count(mine.count)?, from, &parts, mine.dtype, *root) }
            }
            Work::AllToAll { send, send_cuts, recv, recv_cuts } => {
                let sends = self.parts(send_cuts, send.count)?;
                let recvs = self.parts(recv_cuts, recv.count)?;
                // SAFETY: see above.
                unsafe { ffi::all_to_all(send.ptr, &sends, recv.ptr, &recvs, send.dtype) }
            }
            Work::Send(span, to) => pieces(span).try_for_each(|(ptr, count)| {
                // SAFETY: see above.
                unsafe { ffi::send(ptr, count, span.dtype, *to) }
            }),
            Work::Recv(span, from) => pieces(span).try_for_each(|(ptr, count)| {
                // SAFETY: see above.
                unsafe { ffi::recv(ptr, count, span.dtype, *from) }
            }),
        }
    }

    /// Cuts as MPI wants them; they must lie inside `count` elements.
    fn parts(&self, cuts: &[usize], count: usize) -> Result<ffi::Parts, String> {
        let rising = cuts.windows(2).all(|c| c[0] <= c[1]);
        if cuts.len() != self.size + 1 || !rising || cuts[self.size] > count {
            return Err(format!("cuts {cuts:?} do not fit {count} elements and {} ranks", self.size));
        }
        ffi::Parts::of(cuts).ok_or_else(|| format!("{count} elements are more than MPI counts"))
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

impl Drop for Mpi {
    /// Ends MPI; all ranks at the same time.
    fn drop(&mut self) {
        // Nobody is left to tell.
        drop(ffi::finalize());
    }
}
