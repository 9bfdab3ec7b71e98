//! Connections and listeners. Between ranks they are TCP's; a simulated network hands out pairs of local sockets
//! instead, so the same code is tested there.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

#[cfg(any(test, feature = "simulation"))]
use crate::simulation::{LocalListener, LocalStream};

/// A connection to another rank.
#[derive(Debug)]
pub enum Stream {
    /// Over the network.
    Tcp(TcpStream),
    /// One end of a pair of local sockets; the simulated network has the other.
    #[cfg(any(test, feature = "simulation"))]
    Local(LocalStream),
}

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// Over the network.
    Tcp(TcpListener),
    /// Where the simulated network connects.
    #[cfg(any(test, feature = "simulation"))]
    Local(LocalListener),
}

impl Stream {
    /// Sets whether reading and writing wait.
    pub fn set_nonblocking(&self, yes: bool) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_nonblocking(yes),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => stream.socket().set_nonblocking(yes),
        }
    }

    /// Sends small messages at once.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_nodelay(true),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(_) => Ok(()),
        }
    }

    /// This side's address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Stream::Tcp(stream) => stream.local_addr(),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => Ok(stream.local_addr()),
        }
    }

    /// The other side's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Stream::Tcp(stream) => stream.peer_addr(),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => stream.peer_addr(),
        }
    }

    /// The pending error, for instance of a connection that was not made.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        match self {
            Stream::Tcp(stream) => stream.take_error(),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => stream.take_error(),
        }
    }

    /// Tells the other side that no more follows.
    pub fn shutdown_write(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => stream.socket().shutdown(Shutdown::Write),
        }
    }

    /// Whether no network is between the two ends: one address, or both of the loopback interface.
    pub(crate) fn stays_on_host(&self) -> io::Result<bool> {
        let (one, two) = (self.local_addr()?.ip(), self.peer_addr()?.ip());
        Ok(one == two || (one.is_loopback() && two.is_loopback()))
    }

    /// Whether both ends are on one host, and the kernel can pass pages from one to the other. A connection that its peer has broken
    /// off is no longer connected to anything; that is no fault of this rank, and whoever reads it next finds the peer gone.
    pub(crate) fn stays_here(&self) -> io::Result<bool> {
        match self {
            Stream::Tcp(stream) => match stream.peer_addr() {
                Ok(peer) => Ok(stream.local_addr()?.ip() == peer.ip()),
                Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(false),
                Err(e) => Err(e),
            },
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(_) => Ok(false),
        }
    }

    /// Writes without a signal if the other side has closed; `more` says that more follows at once.
    pub(crate) fn send(&self, parts: &[IoSlice], more: bool) -> io::Result<usize> {
        let flags = if more { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
        Ok(sendmsg(self, parts, &mut SendAncillaryBuffer::default(), flags)?)
    }

    /// Reads what has arrived without consuming it.
    pub(crate) fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self, into, RecvFlags::PEEK)?.0)
    }
}

impl Read for &Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(into),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => (&mut stream.socket()).read(into),
        }
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read_vectored(into),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => (&mut stream.socket()).read_vectored(into),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(&[IoSlice::new(bytes)], false)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&mut &*self).read(into)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&mut &*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            #[cfg(any(test, feature = "simulation"))]
            Stream::Local(stream) => stream.socket().as_fd(),
        }
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Stream {
        Stream::Tcp(stream)
    }
}

impl Listener {
    /// Where it listens.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Listener::Tcp(listener) => listener.local_addr(),
            #[cfg(any(test, feature = "simulation"))]
            Listener::Local(listener) => Ok(listener.local_addr()),
        }
    }

    /// Sets whether accepting waits.
    pub(crate) fn set_nonblocking(&self, yes: bool) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => listener.set_nonblocking(yes),
            #[cfg(any(test, feature = "simulation"))]
            // It never waits.
            Listener::Local(_) => Ok(()),
        }
    }

    /// Sets how many connections may wait to be accepted.
    pub(crate) fn set_backlog(&self, connections: i32) -> io::Result<()> {
        match self {
            Listener::Tcp(listener) => Ok(rustix::net::listen(listener, connections)?),
            #[cfg(any(test, feature = "simulation"))]
            Listener::Local(_) => Ok(()),
        }
    }

    /// Accepts a connection, and returns its source address.
    pub(crate) fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        match self {
            Listener::Tcp(listener) => listener.accept().map(|(stream, addr)| (Stream::Tcp(stream), addr)),
            #[cfg(any(test, feature = "simulation"))]
            Listener::Local(listener) => {
                listener.accept().map(|(stream, addr)| (Stream::Local(stream), addr))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            #[cfg(any(test, feature = "simulation"))]
            Listener::Local(listener) => listener.as_fd(),
        }
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Listener {
        Listener::Tcp(listener)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_was_broken_off_is_no_error_until_it_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let killed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        // What the kernel does with the sockets of a process that is killed before it has read everything.
        rustix::net::sockopt::set_socket_linger(&killed, Some(std::time::Duration::ZERO)).unwrap();
        drop(killed);
        while here.peer_addr().is_ok() {
            std::thread::yield_now();
        }
        let mut here = Stream::Tcp(here);
        assert!(!here.stays_here().unwrap());
        assert!(here.read(&mut [0; 8]).is_err());
    }
}
