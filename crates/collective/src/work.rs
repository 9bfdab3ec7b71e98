//! Operations that are started and waited for, so that a rank can compute meanwhile.

use std::sync::Arc;

use polyreme_kernels::Isa;
use polyreme_kernels::codec::SumLayout;
use polyreme_net::Doing;

use crate::element::{DType, Element, Reduce};

/// Memory that an operation works on: an address, not a borrow.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The first element.
    pub ptr: *mut u8,
    /// How many.
    pub count: usize,
    /// Their type.
    pub dtype: DType,
}

// SAFETY: the caller that starts an operation promises that nothing else accesses the memory until it is waited for.
unsafe impl Send for Span {}

impl Span {
    /// The elements of a slice.
    pub fn of<T: Element>(data: &mut [T]) -> Span {
        Span { ptr: data.as_mut_ptr().cast(), count: data.len(), dtype: T::DTYPE }
    }

    /// The elements of a slice that is only read.
    pub fn read<T: Element>(data: &[T]) -> Span {
        Span { ptr: data.as_ptr().cast_mut().cast(), count: data.len(), dtype: T::DTYPE }
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.bytes()
    }
}

/// Which elements belong to which rank: rank `r` has `cuts[r]..cuts[r + 1]`; as many entries as ranks and one more.
pub type Cuts = Arc<[usize]>;

/// A hash of cuts, never 0; different cuts almost certainly have different hashes.
pub(crate) fn digest(cuts: &[usize]) -> u64 {
    let step = |h: u64, c: &usize| (h ^ *c as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    cuts.iter().fold(cuts.len() as u64 + 1, step) | 1
}

/// A collective or a message.
#[derive(Clone, Debug)]
pub enum Work {
    /// Afterwards every rank has the reduction of all.
    AllReduce(Span, Reduce),
    /// Afterwards each rank has the reduction of its own range; the rest of the memory is unspecified.
    ReduceScatter(Span, Cuts, Reduce),
    /// A sum that travels in fewer bytes where ranks are connected by a network.
    CodedSum(CodedSum),
    /// Afterwards every rank has the ranges of all.
    AllGather(Span, Cuts),
    /// Afterwards every rank has the data of this one.
    Broadcast(Span, usize),
    /// Waits until every rank is here.
    Barrier,
    /// Afterwards `root` has the elements of all ranks, one after the other.
    Gather {
        /// This rank's.
        mine: Span,
        /// Where the root puts all of them.
        into: Option<Span>,
        /// Which elements belong to which rank.
        cuts: Cuts,
        /// The rank that gets them.
        root: usize,
    },
    /// Afterwards each rank has its range of what `root` had.
    Scatter {
        /// Where this rank puts its own.
        mine: Span,
        /// Those of all, at the root.
        from: Option<Span>,
        /// Which elements belong to which rank.
        cuts: Cuts,
        /// The rank that has them.
        root: usize,
    },
    /// Afterwards each rank has what every rank sent to it.
    AllToAll {
        /// What this rank sends.
        send: Span,
        /// Which elements go to which rank.
        send_cuts: Cuts,
        /// Where it puts what it receives.
        recv: Span,
        /// Which elements come from which rank.
        recv_cuts: Cuts,
    },
    /// Sends elements to one rank, which receives as many. Messages from one rank to another with one tag arrive in the
    /// order in which they were started; those with different tags are independent.
    Send {
        /// The rank that gets them.
        to: usize,
        /// The tag, which the receive must match; MPI guarantees tags up to 32,767.
        tag: u16,
        /// The elements.
        span: Span,
    },
    /// Receives elements from one rank.
    Receive {
        /// The rank that sends them.
        from: usize,
        /// The tag of the send.
        tag: u16,
        /// Where they go.
        span: Span,
    },
}

impl Work {
    /// What a rank that waits for it is doing.
    pub fn doing(&self) -> Doing {
        match self {
            Work::AllReduce(..) => Doing::AllReduce,
            Work::ReduceScatter(..) => Doing::ReduceScatter,
            Work::CodedSum(sum) if sum.scattered => Doing::ReduceScatter,
            Work::CodedSum(_) => Doing::AllReduce,
            Work::AllGather(..) => Doing::AllGather,
            Work::Broadcast(..) => Doing::Broadcast,
            Work::Barrier => Doing::Barrier,
            Work::Gather { .. } => Doing::Gather,
            Work::Scatter { .. } => Doing::Scatter,
            Work::AllToAll { .. } => Doing::AllToAll,
            Work::Send { .. } => Doing::Send,
            Work::Receive { .. } => Doing::Receive,
        }
    }

    /// Its name in reports.
    pub fn name(&self) -> &'static str {
        self.doing().name()
    }
}

/// A sum of f32 over the ranks that travels coded.
#[derive(Clone, Debug)]
pub struct CodedSum {
    /// The numbers.
    pub span: Span,
    /// Their format on the wire, and where the parts lie.
    pub layout: SumLayout,
    /// What earlier codes lost, as many f32.
    pub residual: Span,
    /// What it travels through, as much as the layout asks for: bytes, or f32 for factors.
    pub coded: Span,
    /// The right factors of the last sum, if matrices travel as factors.
    pub factors: Option<Span>,
    /// Whether each rank gets the sum of its own part only.
    pub scattered: bool,
    /// What codes and decodes.
    pub isa: Isa,
}

impl CodedSum {
    /// The same sum as it is where ranks see each other's memory: nothing travels, so nothing is coded.
    pub(crate) fn plain(self) -> Work {
        match &self.layout {
            SumLayout::Blocks(layout) if self.scattered => {
                Work::ReduceScatter(self.span, layout.cuts.clone(), Reduce::Sum)
            }
            SumLayout::Blocks(_) | SumLayout::LowRank(_) => Work::AllReduce(self.span, Reduce::Sum),
        }
    }
}

/// An operation that was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket(pub u64);
