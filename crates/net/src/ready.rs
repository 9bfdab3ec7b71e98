//! What to wait for on a socket.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags};

/// Waits until a socket can be read, or with `write` also until it can be written.
pub(crate) fn interest(fd: BorrowedFd<'_>, write: bool) -> PollFd<'_> {
    let flags = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    PollFd::from_borrowed_fd(fd, flags)
}

/// Waits until a socket can be written.
pub(crate) fn writable(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::OUT)
}
