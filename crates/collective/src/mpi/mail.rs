//! Messages with tags under MPI, started at once and polled in the wait.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Arc;

use super::abi::Handle;
use super::group::pieces;
use super::runtime::Runtime;
use crate::work::{Span, Work};

/// One rank's messages in a communicator. Started messages make progress whenever any thread of the rank makes a call.
pub(super) struct Mail<H: Handle> {
    pub(super) runtime: Arc<Runtime<H>>,
    pub(super) comm: H,
    pub(super) next: u64,
    /// The requests of each message that was not waited for.
    pub(super) requests: HashMap<u64, Vec<H>>,
}

impl<H: Handle> Mail<H> {
    /// Starts a message; returns the number to wait for.
    ///
    /// # Safety
    /// The memory is valid and nothing else accesses it until the number was waited for.
    pub(super) unsafe fn start(&mut self, work: &Work) -> Result<u64, String> {
        let calls = &self.runtime.calls;
        let mut requests = Vec::new();
        let (span, tag): (&Span, &u16) = match work {
            Work::Send { span, tag, .. } | Work::Receive { span, tag, .. } => (span, tag),
            other => return Err(format!("{} is not a message", other.name())),
        };
        let (dtype, tag) = (self.runtime.dtype(span.dtype), c_int::from(*tag));
        for (ptr, count) in pieces(span) {
            let mut request = H::UNSET;
            let _turn = self.runtime.turn();
            // SAFETY: the caller's promise; the request is there.
            let code = unsafe {
                match work {
                    Work::Send { to, .. } => {
                        (calls.start_send)(ptr, count, dtype, *to as c_int, tag, self.comm, &mut request)
                    }
                    Work::Receive { from, .. } => {
                        (calls.start_recv)(ptr, count, dtype, *from as c_int, tag, self.comm, &mut request)
                    }
                    _ => unreachable!("asked above"),
                }
            };
            self.runtime.check(code)?;
            requests.push(request);
        }
        self.next += 1;
        self.requests.insert(self.next, requests);
        Ok(self.next)
    }

    /// Waits until a message was sent, or has come.
    pub(super) fn wait(&mut self, id: u64) -> Result<(), String> {
        let requests = self.requests.remove(&id).unwrap_or_default();
        requests.into_iter().try_for_each(|request| self.runtime.wait(request))
    }
}
