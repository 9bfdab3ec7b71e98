//! Zero-copy sends between ranks of one host: the socket is given the pages themselves.
//!
//! A copy into the kernel and one out of it are most of what loopback costs. Pages that go through a pipe into a socket
//! are not copied there: the receiver's kernel reads them where they are, so one of the two copies is saved. In return
//! they must not change until the receiver has read them, which is later than when the socket took them. So a frame
//! says that it is lent, its receiver sends a receipt once it has read all of a run, and the sender's run does not end
//! before that. The plan says which bytes stay unchanged for that long ([`crate::moves::Moves`]).
//!
//! Bytes that change too early are found by the receiver: their checksum was computed before they were lent. That is
//! also so when a run fails, and its memory is used again while a peer has not read it yet. There is no read of freed
//! memory: the kernel holds the pages for as long as it needs them.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::pipe::{IoSliceRaw, PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice, vmsplice};

use crate::frame::SEGMENT_BYTES_MAX;
use crate::socket::Stream;

/// The pipe that pages go through on their way to a socket.
pub(super) struct Pipe {
    from: OwnedFd,
    to: OwnedFd,
    /// Bytes in it.
    held: usize,
}

impl Pipe {
    pub(super) fn new() -> io::Result<Pipe> {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // Room for a whole segment wherever its pages begin. A user with many pipes is refused that much, and sends
        // smaller parts.
        let _: Result<usize, Errno> = fcntl_setpipe_size(&to, 2 * SEGMENT_BYTES_MAX);
        Ok(Pipe { from, to, held: 0 })
    }

    /// Gives a socket as many of these bytes as it takes, without a copy; `more` says that others follow at once. The
    /// next call continues with those that were not taken.
    pub(super) fn lend(&mut self, stream: &Stream, bytes: &[u8], more: bool) -> io::Result<usize> {
        if self.held == 0 {
            let part = [IoSliceRaw::from_slice(bytes)];
            // SAFETY: the bytes are there, and are only read. The plan and the receipt keep them unchanged; if they did
            // change, the receiver would get wrong bytes and notice by their checksum.
            self.held = unsafe { vmsplice(&self.to, &part, SpliceFlags::NONBLOCK)? };
        }
        let more = more || self.held < bytes.len();
        let flags = if more { SpliceFlags::NONBLOCK | SpliceFlags::MORE } else { SpliceFlags::NONBLOCK };
        let taken = splice(&self.from, None, stream, None, self.held, flags)?;
        self.held -= taken;
        Ok(taken)
    }
}
