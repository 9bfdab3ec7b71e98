//! What this crate needs from the operating system while ranks talk: time, waiting, connecting, listening, and threads.
//!
//! Everything that waits or looks at a clock does so through a [`System`] that was passed in. [`Os`] is the real one. A
//! simulated one has virtual time and a network that can be late, cut or slow; the code above does not know.

use std::fmt::Debug;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use crate::loopback::unpaced;
use crate::socket::{Listener, Stream};

/// Time, waiting, sockets and threads.
pub trait System: Send + Sync + Debug {
    /// The time.
    fn now(&self) -> Instant;

    /// Waits until one of the files is ready, or until the deadline. May return early.
    fn wait(&self, fds: &mut [PollFd<'_>], until: Instant) -> io::Result<()>;

    /// Begins to connect, without waiting. Returns whether the connection is made already.
    fn connect(&self, to: SocketAddr, prepare: &dyn Fn(&Stream)) -> io::Result<(Stream, bool)>;

    /// Listens on the first of these addresses on which it can.
    fn listen(&self, on: &[SocketAddr]) -> io::Result<Listener>;

    /// Starts a thread with a name.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;

    /// Waits for the end of a thread that [`System::spawn`] started.
    fn join(&self, thread: JoinHandle<()>) -> std::thread::Result<()>;

    /// The CPU time that this process has used.
    fn processor_time(&self) -> Duration;

    /// Whether only calls of this trait may wait: simulated time stands still in all others.
    fn is_simulated(&self) -> bool;
}

impl dyn System {
    /// Sleeps for this long.
    pub(crate) fn sleep(&self, time: Duration) {
        let until = self.now() + time;
        while self.now() < until {
            // Nothing to wait for, so nothing can fail.
            let _ = self.wait(&mut [], until);
        }
    }

    /// Waits on a condition variable with a timeout; it may end early. In simulated time nothing wakes it.
    pub(crate) fn wait_on<'a, T>(
        &self,
        condition: &Condvar,
        mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
        within: Duration,
    ) -> MutexGuard<'a, T> {
        if !self.is_simulated() {
            let waited = condition.wait_timeout(guard, within);
            return waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        self.sleep(within);
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives from a queue with a timeout. It may be late by as much.
    pub(crate) fn receive<T>(&self, queue: &Receiver<T>, within: Duration) -> Result<T, RecvTimeoutError> {
        if !self.is_simulated() {
            return queue.recv_timeout(within);
        }
        match queue.try_recv() {
            Ok(item) => return Ok(item),
            Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
            Err(TryRecvError::Empty) => self.sleep(within),
        }
        queue.try_recv().map_err(|e| match e {
            TryRecvError::Empty => RecvTimeoutError::Timeout,
            TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
        })
    }
}

/// The operating system.
#[derive(Clone, Copy, Default, Debug)]
pub struct Os;

impl System for Os {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait(&self, fds: &mut [PollFd<'_>], until: Instant) -> io::Result<()> {
        let left = until.saturating_duration_since(Instant::now());
        // A wait is at most an hour long; callers that want more repeat it.
        let left = left.min(Duration::from_secs(3600));
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(fds, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn connect(&self, to: SocketAddr, prepare: &dyn Fn(&Stream)) -> io::Result<(Stream, bool)> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = Stream::Tcp(TcpStream::from(socket_with(family, SocketType::STREAM, flags, None)?));
        if to.ip().is_loopback() {
            unpaced(&socket);
        }
        prepare(&socket);
        match connect(&socket, &to) {
            Ok(()) => Ok((socket, true)),
            Err(Errno::INPROGRESS) => Ok((socket, false)),
            Err(e) => Err(e.into()),
        }
    }

    fn listen(&self, on: &[SocketAddr]) -> io::Result<Listener> {
        TcpListener::bind(on).map(Listener::Tcp)
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name.into()).spawn(body)
    }

    fn join(&self, thread: JoinHandle<()>) -> std::thread::Result<()> {
        thread.join()
    }

    fn processor_time(&self) -> Duration {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
    }

    fn is_simulated(&self) -> bool {
        false
    }
}
