//! Messages over one proven connection, without waiting: what cannot be sent now waits here, and what has come in
//! part is kept until the rest is there.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use super::message::Message;
use crate::connection::Connection;
use crate::socket::Stream;

/// Bytes of the length in front of each message.
const LENGTH_BYTES: usize = 4;
/// Read at once; also all that is reserved before the bytes are there.
const CHUNK_BYTES: usize = 16 << 10;

/// Why nothing more comes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// The other side closed it, or its process ended.
    Closed,
    /// What came is no message of ours.
    Malformed {
        /// What is wrong with it.
        what: String,
    },
}

/// One connection.
pub(crate) struct Channel {
    stream: Stream,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    message_bytes_max: usize,
    ended: Option<Ended>,
}

impl Channel {
    /// Takes over a connection; incoming messages may be that long.
    pub(crate) fn new(
        connection: impl Into<Connection>,
        message_bytes_max: usize,
    ) -> std::io::Result<Channel> {
        let Connection { stream } = connection.into();
        stream.set_nonblocking(true)?;
        stream.set_nodelay()?;
        Ok(Channel { stream, inbox: Vec::new(), outbox: Vec::new(), message_bytes_max, ended: None })
    }

    /// Sends a message, now or by a later [`Channel::flush`]. One to a connection that has ended is dropped.
    pub(crate) fn send(&mut self, message: &Message) {
        let bytes = message.encode();
        self.outbox.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.outbox.extend_from_slice(&bytes);
        self.flush();
    }

    /// Sends what waits, as far as it goes. Returns whether nothing is left.
    pub(crate) fn flush(&mut self) -> bool {
        let mut sent = 0;
        while sent < self.outbox.len() {
            match self.stream.write(&self.outbox[sent..]) {
                Ok(n) if n > 0 => sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // The reading side says what became of the connection: messages may still be in it.
                _ => sent = self.outbox.len(),
            }
        }
        self.outbox.drain(..sent);
        self.outbox.is_empty()
    }

    /// Whether messages wait to be sent.
    pub(crate) fn sending(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// The next message that has come whole, if any. After the last one the reason why no more come.
    pub(crate) fn receive(&mut self) -> Result<Option<Message>, Ended> {
        loop {
            if let Some(message) = self.next_whole()? {
                return Ok(Some(message));
            }
            if let Some(ended) = &self.ended {
                return Err(ended.clone());
            }
            let mut chunk = [0; CHUNK_BYTES];
            match self.stream.read(&mut chunk) {
                Ok(0) => self.ended = Some(Ended::Closed),
                Ok(n) => self.inbox.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(_) => self.ended = Some(Ended::Closed),
            }
        }
    }

    /// Sends what waits, then says that no more comes, and drops some of what the other side still sends. Returns whether
    /// it may send more: call it again until it does not.
    pub(crate) fn close(&mut self) -> bool {
        if self.flush() {
            // It fails only if the connection is gone, and then there is nothing to close.
            let _ = self.stream.shutdown_write();
        }
        match self.stream.read(&mut [0; CHUNK_BYTES]) {
            Ok(n) => n > 0,
            Err(e) => matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock),
        }
    }

    fn next_whole(&mut self) -> Result<Option<Message>, Ended> {
        let Some((length, rest)) = self.inbox.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        let max = self.message_bytes_max;
        if length > max {
            return Err(Ended::Malformed {
                what: format!("a message of {length} bytes, and {max} are allowed"),
            });
        }
        let Some(bytes) = rest.get(..length) else { return Ok(None) };
        let message = Message::decode(bytes);
        self.inbox.drain(..LENGTH_BYTES + length);
        message.map(Some).map_err(|_| Ended::Malformed { what: "a control message that is none".into() })
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
