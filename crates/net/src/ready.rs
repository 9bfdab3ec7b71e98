//! What is waited for of a socket.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags};

/// A socket that is waited for: until it can be read, and written too if asked for.
pub(crate) fn interest(fd: BorrowedFd<'_>, write: bool) -> PollFd<'_> {
    let flags = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    PollFd::from_borrowed_fd(fd, flags)
}

/// A socket that is waited for until it can be written.
pub(crate) fn writable(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::OUT)
}
