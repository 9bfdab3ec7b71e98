//! The system as a simulated rank sees it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::world::World;
use crate::socket::{Listener, Stream};
use crate::system::System;

/// One rank's machine.
pub(super) struct Machine {
    pub(super) world: Arc<World>,
    pub(super) rank: usize,
}

impl System for Machine {
    fn now(&self) -> Instant {
        self.world.now()
    }

    fn wait(&self, fds: &mut [PollFd<'_>], until: Instant) -> io::Result<()> {
        self.world.wait(fds, until);
        Ok(())
    }

    fn connect(&self, to: SocketAddr, prepare: &dyn Fn(&Stream)) -> io::Result<(Stream, bool)> {
        // Buffers are what the simulation's settings say.
        let _ = prepare;
        let stream =
            self.world.with_network(|network, now, random| network.connect(self.rank, to, now, random))?;
        self.world.making(stream.socket.as_raw_fd(), &stream.making);
        Ok((Stream::Local(stream), false))
    }

    fn listen(&self, on: &[SocketAddr]) -> io::Result<Listener> {
        self.world.with_network(|network, _, _| network.listen(self.rank, on)).map(Listener::Local)
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        let world = self.world.clone();
        let task = world.add(self.rank, name, false, 0);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || world.live(task, body).unwrap_or(()))?;
        self.world.set_thread(task, thread.thread().id());
        Ok(thread)
    }

    fn join(&self, thread: JoinHandle<()>) -> std::thread::Result<()> {
        while !self.world.ended(thread.thread().id()) {
            self.world.wait(&[], self.world.now() + Duration::from_millis(1));
        }
        thread.join()
    }

    fn processor_time(&self) -> Duration {
        self.world.worked(self.rank)
    }

    fn is_simulated(&self) -> bool {
        true
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "the simulated machine of rank {}", self.rank)
    }
}
