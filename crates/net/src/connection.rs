//! A connection whose other end has proved its identity: joining makes it, channels and links take it over.

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

/// A connection and the proven identity of its other end. Whether it is the expected rank is for the caller to judge.
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

/// A plain connection inside a test or a measurement, without a proof.
impl From<Stream> for Connection {
    fn from(stream: Stream) -> Connection {
        Connection { stream, seals: None }
    }
}
