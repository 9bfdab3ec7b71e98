//! Waiting for several sockets at once, with an end.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// A socket that is waited for: until it can be read, and written too if asked for.
pub(crate) fn interest(fd: BorrowedFd<'_>, write: bool) -> PollFd<'_> {
    let flags = if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    PollFd::from_borrowed_fd(fd, flags)
}

/// A socket that is waited for until it can be written.
pub(crate) fn writable(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::OUT)
}

/// Waits until one of them is ready, or that moment has come. May return early.
pub(crate) fn wait(fds: &mut [PollFd<'_>], until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    // A wait is at most an hour long; who wants more comes again.
    let left = left.min(Duration::from_secs(3600));
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(fds, Some(&left)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
