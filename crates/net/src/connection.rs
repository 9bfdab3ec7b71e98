//! A connection whose other end has proved who it is: what joining leaves, and what channels and links take over.

use std::net::SocketAddr;

use crate::rendezvous::hello::Hello;
use crate::seal::Seals;
use crate::socket::Stream;

/// A connection to another rank.
#[derive(Debug)]
pub struct Connection {
    pub(crate) stream: Stream,
    /// What frames are sealed with, if this connection is encrypted.
    pub(crate) seals: Option<Box<Seals>>,
}

/// A connection and what its other end said of itself, which is proved. Whether it is the rank that was expected is for
/// the caller to judge.
pub(crate) struct Proven {
    pub(crate) connection: Connection,
    pub(crate) addr: SocketAddr,
    pub(crate) hello: Hello,
}

impl Connection {
    /// The stream below it.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether what goes over it is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.seals.is_some()
    }
}

/// A plain connection inside a test or a measurement, which nobody had to prove anything for.
impl From<Stream> for Connection {
    fn from(stream: Stream) -> Connection {
        Connection { stream, seals: None }
    }
}
