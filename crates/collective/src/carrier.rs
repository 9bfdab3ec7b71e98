//! The transports other than shared memory: links, two levels, MPI.

use polyreme_net::{Alarm, Report};

use crate::coded;
use crate::comm::Comm;
use crate::element::{Bool, DType, Element};
use crate::links::{Linked, TwoLevel};
use crate::mpi::Mpi;
use crate::work::{Span, Work};

/// A transport to the other ranks.
pub(crate) enum Carrier {
    /// Links.
    Links(Box<Linked>),
    /// Shared memory inside hosts and links between their first ranks for collectives; links between any two ranks for
    /// the rest.
    Levels { levels: Box<TwoLevel<Comm, Linked>>, every_two: Box<Linked> },
    /// MPI.
    Mpi(Box<Mpi>),
}

impl Carrier {
    /// Runs this rank's part of an operation. `spins` if the core has nothing else to do meanwhile.
    ///
    /// # Safety
    /// The memory that `work` names is valid, and nothing else accesses it meanwhile.
    pub(crate) unsafe fn run(&mut self, work: &Work, step: u64, spins: bool) -> Result<(), Report> {
        match self {
            Carrier::Links(linked) => {
                linked.set_step(step);
                let may = linked.links().spins();
                linked.links().set_spins(may && spins);
                let done = match work {
                    // SAFETY: the caller's promise.
                    Work::CodedSum(sum) => unsafe { coded::over_links(linked, sum) },
                    // SAFETY: the caller's promise.
                    _ => unsafe { linked.work(work) },
                };
                linked.links().set_spins(may);
                done
            }
            Carrier::Levels { levels, every_two } => {
                every_two.set_step(step);
                match work {
                    // SAFETY: the caller's promise.
                    Work::CodedSum(sum) => unsafe { coded::over_levels(levels, sum) },
                    // SAFETY: the caller's promise.
                    _ => unsafe { two_levels(levels, every_two, work) },
                }
            }
            Carrier::Mpi(mpi) => match work {
                Work::CodedSum(sum) => {
                    let rank = mpi.rank();
                    // SAFETY: the caller's promise, and parts of what it named.
                    unsafe { coded::sum(sum, rank, &mut |work| mpi.run(work, step)) }
                }
                // SAFETY: the caller's promise.
                _ => unsafe { mpi.run(work, step) },
            },
        }
    }

    /// Bytes that this rank has sent over links.
    pub(crate) fn sent_bytes(&self) -> u64 {
        match self {
            Carrier::Links(linked) => linked.sent_bytes(),
            Carrier::Levels { levels, every_two } => {
                every_two.sent_bytes() + levels.leading().map_or(0, Linked::sent_bytes)
            }
            Carrier::Mpi(_) => 0,
        }
    }

    /// Tells the others that this rank fails.
    pub(crate) fn fail(&mut self, report: &Report) {
        match self {
            Carrier::Links(linked) => linked.links().fail(report.clone()),
            Carrier::Levels { levels, every_two } => {
                levels.fail(&report.to_string());
                every_two.links().fail(report.clone());
            }
            Carrier::Mpi(mpi) => mpi.abort(report),
        }
    }

    /// This rank's number in reports, and its host.
    pub(crate) fn name(&self) -> (usize, String) {
        match self {
            Carrier::Links(linked) => linked.name(),
            Carrier::Levels { every_two, .. } => every_two.name(),
            Carrier::Mpi(mpi) => (mpi.name(), String::new()),
        }
    }

    /// The alarm that ends this rank's waits.
    pub(crate) fn alarm(&self) -> Alarm {
        match self {
            Carrier::Links(linked) => linked.alarm(),
            Carrier::Levels { every_two, .. } => every_two.alarm(),
            // MPI aborts its ranks itself.
            Carrier::Mpi(_) => Alarm::default(),
        }
    }
}

/// # Safety
/// As [`Carrier::run`].
unsafe fn two_levels(
    levels: &mut TwoLevel<Comm, Linked>,
    every_two: &mut Linked,
    work: &Work,
) -> Result<(), Report> {
    let span = match work {
        Work::AllReduce(span, _) | Work::Broadcast(span, _) => span,
        Work::ReduceScatter(span, ..) | Work::AllGather(span, _) => span,
        Work::Barrier => return levels.barrier(),
        Work::CodedSum(_) => unreachable!("made of other operations"),
        Work::Gather { .. }
        | Work::Scatter { .. }
        | Work::AllToAll { .. }
        | Work::Send { .. }
        | Work::Receive { .. } => {
            // SAFETY: the caller's promise.
            return unsafe { every_two.work(work) };
        }
    };
    macro_rules! of_type {
        ($t:ty) => {{
            // SAFETY: the caller's promise; the span's type is this one.
            let data = unsafe { elements::<$t>(span) };
            match work {
                Work::AllReduce(_, reduce) => levels.all_reduce(data, *reduce),
                Work::ReduceScatter(_, cuts, reduce) => levels.reduce_scatter(data, cuts, *reduce),
                Work::AllGather(_, cuts) => levels.all_gather(data, cuts),
                Work::Broadcast(_, root) => levels.broadcast(data, *root),
                _ => unreachable!("returned above"),
            }
        }};
    }
    match span.dtype {
        DType::F32 => of_type!(f32),
        DType::F64 => of_type!(f64),
        DType::F16 => of_type!(half::f16),
        DType::Bf16 => of_type!(half::bf16),
        DType::I32 => of_type!(i32),
        DType::I64 => of_type!(i64),
        DType::U8 => of_type!(u8),
        DType::I8 => of_type!(i8),
        DType::Bool => of_type!(Bool),
    }
}

/// # Safety
/// The span is of this type, its memory is valid, and nothing else accesses it while the slice lives.
pub(crate) unsafe fn elements<'a, T: Element>(span: &Span) -> &'a mut [T] {
    assert_eq!(span.dtype, T::DTYPE, "the span's type");
    if span.count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(span.ptr.cast(), span.count) }
}

/// Measures the costs of links before anything else goes over them.
pub(crate) fn measured(mut linked: Linked) -> Result<Linked, Report> {
    crate::links::measure(&mut linked)?;
    Ok(linked)
}
