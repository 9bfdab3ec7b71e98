//! Connections and listeners as a simulated rank has them: one end of a pair of local sockets, whose other end the
//! simulated network holds. So the code that polls, fills and drains sockets is the one that runs on real ones.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// The state of a connection that a rank asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Made {
    /// On its way.
    Pending,
    /// There.
    Done,
    /// Nothing listens there.
    Refused,
}

/// The same, seen by the rank and by the network.
#[derive(Debug)]
pub(super) struct Making(AtomicU8);

impl Making {
    pub(super) fn new(made: Made) -> Arc<Making> {
        let making = Making(AtomicU8::new(0));
        making.set(made);
        Arc::new(making)
    }

    pub(super) fn set(&self, made: Made) {
        self.0.store(made as u8, Ordering::SeqCst);
    }

    pub(super) fn get(&self) -> Made {
        match self.0.load(Ordering::SeqCst) {
            0 => Made::Pending,
            1 => Made::Done,
            _ => Made::Refused,
        }
    }
}

/// A rank's end of a connection.
#[derive(Debug)]
pub struct LocalStream {
    pub(super) socket: UnixStream,
    /// The addresses that it stands for: this side's and the other's.
    pub(super) ends: (SocketAddr, SocketAddr),
    pub(super) making: Arc<Making>,
}

impl LocalStream {
    /// The socket.
    pub(crate) fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// The address that this side stands for.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.ends.0
    }

    /// The other side's, once it is connected.
    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        match self.making.get() {
            Made::Done => Ok(self.ends.1),
            Made::Pending | Made::Refused => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// What became of a connection that was not made.
    pub(crate) fn take_error(&self) -> io::Result<Option<io::Error>> {
        match self.making.get() {
            Made::Refused => Ok(Some(io::ErrorKind::ConnectionRefused.into())),
            Made::Pending | Made::Done => self.socket.take_error(),
        }
    }
}

/// A connection that is given up before it is made is no longer waited for, and its descriptor may be reused.
impl Drop for LocalStream {
    fn drop(&mut self) {
        if self.making.get() == Made::Pending {
            self.making.set(Made::Refused);
        }
    }
}

/// Where connections arrive at a rank.
#[derive(Debug)]
pub struct LocalListener {
    pub(super) addr: SocketAddr,
    pub(super) backlog: Arc<Backlog>,
}

/// Connections that wait to be accepted.
#[derive(Debug)]
pub(super) struct Backlog {
    queue: Mutex<VecDeque<LocalStream>>,
    /// As many as wait.
    ready: OwnedFd,
}

impl Backlog {
    fn new() -> io::Result<Backlog> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE;
        Ok(Backlog { queue: Mutex::default(), ready: eventfd(0, flags)? })
    }

    /// One more.
    pub(super) fn push(&self, stream: LocalStream) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(stream);
        // It fails only if the counter is full.
        let _ = rustix::io::write(&self.ready, &1u64.to_ne_bytes());
    }
}

impl LocalListener {
    pub(super) fn new(addr: SocketAddr) -> io::Result<LocalListener> {
        Ok(LocalListener { addr, backlog: Arc::new(Backlog::new()?) })
    }

    /// The address that it stands for.
    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Takes a connection that waits. It never blocks.
    pub(crate) fn accept(&self) -> io::Result<(LocalStream, SocketAddr)> {
        rustix::io::read(&self.backlog.ready, &mut [0u8; 8])?;
        let first = self.backlog.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let stream = first.ok_or(io::ErrorKind::WouldBlock)?;
        let from = stream.ends.1;
        Ok((stream, from))
    }
}

impl AsFd for LocalListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.backlog.ready.as_fd()
    }
}
