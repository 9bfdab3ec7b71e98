//! Connecting to a listener of another rank and proving the secret to it, without waiting.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::PollFd;
use rustix::net::sockopt;

use super::hello::{Handshake, Hello, HelloProgress, Turned};
use crate::connection::{Connection, Proven};
use crate::ready;
use crate::secret::{Role, Secret};
use crate::socket::Stream;
use crate::system::System;

/// Buffers of a data connection: a whole bucket of gradients fits.
const BUFFER_BYTES: usize = 4 << 20;

/// A connection that is being made.
pub(crate) struct Dial {
    stream: Stream,
    addr: SocketAddr,
    secret: Secret,
    hello: Hello,
    /// `None` before the connection is made: the hello depends on its addresses.
    handshake: Option<Handshake>,
    writes: bool,
}

/// The state of a dial.
pub(crate) enum Dialled {
    /// Not there yet.
    Pending(Box<Dial>),
    /// The other side proved itself.
    Proved(Proven),
    /// The connection was not made.
    Unconnected(io::Error),
    /// It was made, and ended before the proof.
    Turned(Turned),
    /// It timed out; `connected` says whether the other side had accepted.
    Overdue { connected: bool },
}

impl Dial {
    /// Begins to connect.
    pub(crate) fn start(
        system: &dyn System,
        addr: SocketAddr,
        secret: Secret,
        hello: Hello,
    ) -> io::Result<Box<Dial>> {
        let (stream, connected) = system.connect(addr, &|socket| widen(socket))?;
        let mut dial = Dial { stream, addr, secret, hello, handshake: None, writes: true };
        if connected {
            dial.greet()?;
        }
        Ok(Box::new(dial))
    }

    /// What to wait for before the next turn.
    pub(crate) fn interest(&self) -> PollFd<'_> {
        match self.connected() {
            false => ready::writable(self.stream.as_fd()),
            true => ready::interest(self.stream.as_fd(), self.writes),
        }
    }

    /// Makes progress without waiting.
    pub(crate) fn turn(mut self: Box<Dial>) -> Dialled {
        if !self.connected() {
            match self.stream.take_error() {
                Ok(None) => {}
                Ok(Some(e)) | Err(e) => return Dialled::Unconnected(e),
            }
            match (self.stream.peer_addr(), self.stream.local_addr()) {
                // Linux connects a socket to itself if it picks the target port as its own and nothing listens there.
                (Ok(peer), Ok(local)) if peer == local => {
                    return Dialled::Unconnected(io::ErrorKind::ConnectionRefused.into());
                }
                (Ok(_), _) => {}
                (Err(e), _) if e.kind() == io::ErrorKind::NotConnected => return Dialled::Pending(self),
                (Err(e), _) => return Dialled::Unconnected(e),
            }
            if let Err(e) = self.greet() {
                return Dialled::Unconnected(e);
            }
        }
        let Some(handshake) = &mut self.handshake else { return Dialled::Pending(self) };
        match handshake.advance(&mut self.stream) {
            HelloProgress::Proved(hello) => {
                let seals = handshake.take_seals();
                let connection = Connection { stream: self.stream, seals };
                Dialled::Proved(Proven { connection, addr: self.addr, hello })
            }
            HelloProgress::Turned(turned) => Dialled::Turned(turned),
            HelloProgress::Read => {
                self.writes = false;
                Dialled::Pending(self)
            }
            HelloProgress::Write => {
                self.writes = true;
                Dialled::Pending(self)
            }
        }
    }

    /// Whether the other side has accepted the connection, even if it has sent nothing yet.
    pub(crate) fn connected(&self) -> bool {
        self.handshake.is_some()
    }

    /// The connection is made: sends the hello.
    fn greet(&mut self) -> io::Result<()> {
        self.stream.set_nodelay()?;
        let hello = Hello { here: self.stream.stays_on_host()?, ..self.hello };
        let handshake = Handshake::new(Role::Connector, self.secret.clone(), hello);
        self.handshake = Some(handshake.map_err(io::Error::other)?);
        Ok(())
    }

    /// Waits for the end, at most until then.
    pub(crate) fn wait(mut self: Box<Dial>, system: &dyn System, until: Instant) -> Dialled {
        loop {
            match self.turn() {
                Dialled::Pending(dial) if system.now() >= until => {
                    return Dialled::Overdue { connected: dial.connected() };
                }
                Dialled::Pending(dial) => self = dial,
                done => return done,
            }
            if let Err(e) = system.wait(&mut [self.interest()], until) {
                return Dialled::Unconnected(e);
            }
        }
    }
}

/// Gives a socket large buffers if the system allows them. Otherwise it is left alone: an explicit size is capped low
/// on most systems, and turns off the kernel's autotuning, which grows beyond the cap.
pub(crate) fn widen(socket: impl AsFd) {
    let allowed = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).unwrap_or_default();
        text.trim().parse::<usize>().is_ok_and(|max| max >= BUFFER_BYTES)
    };
    // A failure only costs speed.
    if allowed("wmem_max") {
        let _ = sockopt::set_socket_send_buffer_size(&socket, BUFFER_BYTES);
    }
    if allowed("rmem_max") {
        let _ = sockopt::set_socket_recv_buffer_size(&socket, BUFFER_BYTES);
    }
}

/// An error without the number that the system gives it.
pub(crate) fn explain(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::TimedOut => "connection timed out".into(),
        io::ErrorKind::ConnectionRefused => "connection refused".into(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "it closed the connection".into(),
        _ => e.to_string(),
    }
}
