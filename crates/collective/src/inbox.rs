//! Where messages for one rank meet the receives that it started.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::element::DType;
use crate::work::Span;

/// Where messages for one rank meet its receives.
#[derive(Default)]
pub(crate) struct Inbox {
    inside: Mutex<Inside>,
    /// Something came.
    came: Condvar,
}

#[derive(Default)]
struct Inside {
    /// Receives without a message, in the order in which they were started.
    wanted: Vec<Wanted>,
    /// Unexpected messages, in the order in which they arrived.
    unasked: Vec<ArrivedMessage>,
    /// Completed receives that were not waited for.
    done: HashMap<u64, Result<(), String>>,
}

struct Wanted {
    id: u64,
    from: usize,
    tag: u16,
    span: Span,
}

struct ArrivedMessage {
    from: usize,
    tag: u16,
    dtype: u8,
    bytes: Vec<u8>,
}

impl Inbox {
    /// Delivers a message.
    ///
    /// # Safety
    /// The memory of started receives is valid until they were waited for or cancelled.
    pub(crate) unsafe fn deliver(&self, from: usize, tag: u16, dtype: u8, bytes: &[u8]) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = inside.wanted.iter().position(|w| (w.from, w.tag) == (from, tag)) else {
            inside.unasked.push(ArrivedMessage { from, tag, dtype, bytes: bytes.to_vec() });
            return;
        };
        let wanted = inside.wanted.remove(at);
        // SAFETY: the caller's promise. The lock is held, so the receive is not cancelled meanwhile.
        let end = unsafe { put(&wanted.span, dtype, bytes) };
        inside.done.insert(wanted.id, end);
        self.came.notify_all();
    }

    /// Starts a receive.
    ///
    /// # Safety
    /// The memory is valid and nothing else accesses it until the receive was waited for or taken back.
    pub(crate) unsafe fn want(&self, id: u64, from: usize, tag: u16, span: Span) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        match inside.unasked.iter().position(|letter| (letter.from, letter.tag) == (from, tag)) {
            None => inside.wanted.push(Wanted { id, from, tag, span }),
            Some(at) => {
                let letter = inside.unasked.remove(at);
                // SAFETY: the caller's promise.
                let end = unsafe { put(&span, letter.dtype, &letter.bytes) };
                inside.done.insert(id, end);
            }
        }
    }

    /// The end of a receive, if it has come.
    pub(crate) fn end_of(&self, id: u64) -> Option<Result<(), String>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).done.remove(&id)
    }

    /// The same with a timeout.
    pub(crate) fn wait_end(&self, id: u64, longest: Duration) -> Option<Result<(), String>> {
        let inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |inside: &mut Inside| !inside.done.contains_key(&id);
        let waited = self.came.wait_timeout_while(inside, longest, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.done.remove(&id)
    }

    /// Cancels all receives: from now on nothing writes to their memory.
    pub(crate) fn take_back(&self) {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner).wanted.clear();
    }
}

/// Copies a message to its receive, or returns what is wrong with it.
///
/// # Safety
/// The span's memory is valid, and nothing else accesses it.
unsafe fn put(span: &Span, dtype: u8, bytes: &[u8]) -> Result<(), String> {
    if (dtype, bytes.len()) != (span.dtype as u8, span.bytes()) {
        let sent = DType::ALL.get(usize::from(dtype)).map_or("unknown".into(), ToString::to_string);
        return Err(format!(
            "it sends {} bytes of {sent} and {} of {} are expected",
            bytes.len(),
            span.bytes(),
            span.dtype
        ));
    }
    // SAFETY: the caller's promise; they are equally long.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), span.ptr, bytes.len()) };
    Ok(())
}
