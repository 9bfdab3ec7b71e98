//! A record of the operations that a rank has called, to compare with what its program lists.

use polyreme_net::Doing;

use crate::comm::Comm;
use crate::element::DType;
use crate::work::{Span, Work};

/// An operation that was called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Called {
    /// The operation.
    pub op: Doing,
    /// Its elements, if it has any: their type, how many, and their address.
    pub of: Option<(DType, usize, *mut u8)>,
}

/// The calls that were made.
#[derive(Default)]
pub(crate) struct CallRecord {
    n_calls: u64,
    kept: Option<Vec<Called>>,
}

// SAFETY: the addresses are only compared.
unsafe impl Send for CallRecord {}

impl Comm {
    /// How many operations this rank has called on this group, started ones included.
    pub fn n_calls(&self) -> u64 {
        self.record.n_calls
    }

    /// Keeps every call from now on, for [`Comm::recorded`].
    pub fn record(&mut self) {
        self.record.kept = Some(Vec::new());
    }

    /// The calls since [`Comm::record`] or the last call of this function.
    pub fn recorded(&mut self) -> Vec<Called> {
        self.record.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Notes a call.
    pub(crate) fn note(&mut self, op: Doing, of: Option<Span>) {
        self.record.n_calls += 1;
        if let Some(kept) = &mut self.record.kept {
            kept.push(Called { op, of: of.map(|span| (span.dtype, span.count, span.ptr)) });
        }
    }

    /// Notes the call of an operation from its description.
    pub(crate) fn note_work(&mut self, work: &Work) {
        let of = match work {
            Work::AllReduce(span, _)
            | Work::ReduceScatter(span, ..)
            | Work::AllGather(span, _)
            | Work::Broadcast(span, _)
            | Work::Send { span, .. }
            | Work::Receive { span, .. } => Some(*span),
            Work::CodedSum(sum) => Some(sum.span),
            Work::Gather { mine, .. } | Work::Scatter { mine, .. } => Some(*mine),
            Work::AllToAll { send, .. } => Some(*send),
            Work::Barrier => None,
        };
        self.note(work.doing(), of);
    }
}
