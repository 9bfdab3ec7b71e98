//! Messages over one proven connection, without waiting: what cannot be sent now waits here, and what has come in
//! part is kept until the rest is there. On an encrypted connection each message is a sealed frame; its head is the length.

use std::io::{ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};

use super::bytes::Malformed;
use super::message::Message;
use crate::connection::Connection;
use crate::seal::{SEAL_BYTES, Seals};
use crate::socket::Stream;

/// Bytes of the length in front of each message.
const LENGTH_BYTES: usize = 4;
/// How much is read at once; no more is reserved before the bytes have arrived.
const CHUNK_BYTES: usize = 16 << 10;

/// Why no more messages come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// The other side closed it, or its process ended.
    Closed,
    /// What came is not a message of this protocol.
    Malformed {
        /// What is wrong with it.
        what: String,
    },
}

/// A message that a channel carries.
pub(crate) trait Wire: Sized {
    /// Its bytes, without a length.
    fn encode(&self) -> Vec<u8>;
    /// Reads what [`Wire::encode`] writes.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed>;
}

/// One connection, over which messages `S` are sent and messages `R` received: control messages, if nothing else is said.
pub(crate) struct Channel<S = Message, R = S> {
    kinds: PhantomData<fn(S) -> R>,
    stream: Stream,
    seals: Option<Box<Seals>>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    message_bytes_max: usize,
    /// The length of the next message, once it is known.
    length: Option<usize>,
    malformed: bool,
    ended: Option<Ended>,
}

impl<S: Wire, R: Wire> Channel<S, R> {
    /// Takes over a connection; `bytes_max` bounds incoming messages.
    pub(crate) fn new(
        connection: impl Into<Connection>,
        message_bytes_max: usize,
    ) -> std::io::Result<Channel<S, R>> {
        let Connection { stream, seals } = connection.into();
        stream.set_nonblocking(true)?;
        stream.set_nodelay()?;
        let (inbox, outbox) = (Vec::new(), Vec::new());
        Ok(Channel {
            kinds: PhantomData,
            stream,
            seals,
            inbox,
            outbox,
            message_bytes_max,
            length: None,
            malformed: false,
            ended: None,
        })
    }

    /// Sends a message, now or by a later [`Channel::flush`]. One to a connection that has ended is dropped.
    pub(crate) fn send(&mut self, message: &S) {
        let mut bytes = message.encode();
        let length = (bytes.len() as u32).to_le_bytes();
        match &mut self.seals {
            None => self.outbox.extend_from_slice(&length),
            Some(seals) => {
                let mut head = [0; LENGTH_BYTES + SEAL_BYTES];
                head[..LENGTH_BYTES].copy_from_slice(&length);
                seals.out.seal(&mut head, &mut bytes);
                self.outbox.extend_from_slice(&head);
            }
        }
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
                // The reading side reports what happened to the connection: it may still hold messages.
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

    /// The next message that has come whole, if any. After the last one the reason why no more come. What follows
    /// something malformed cannot be trusted, and is dropped; messages can still be sent.
    pub(crate) fn receive(&mut self) -> Result<Option<R>, Ended> {
        loop {
            if self.malformed {
                self.inbox.clear();
            }
            match self.next_whole() {
                Ok(Some(message)) => return Ok(Some(message)),
                Ok(None) => {}
                Err(what) => {
                    self.malformed = true;
                    return Err(Ended::Malformed { what });
                }
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

    /// The next message if all of it is here; what is wrong with it, if something is.
    fn next_whole(&mut self) -> Result<Option<R>, String> {
        let changed = |_| "a control message failed authentication".to_owned();
        let length = match (self.length, &mut self.seals) {
            (Some(length), _) => length,
            (None, None) => {
                let Some(length) = self.inbox.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
                u32::from_le_bytes(*length) as usize
            }
            (None, Some(seals)) => {
                const HEAD_BYTES: usize = LENGTH_BYTES + SEAL_BYTES;
                let Some(head) = self.inbox.first_chunk_mut::<HEAD_BYTES>() else { return Ok(None) };
                seals.into.open_head(head).map_err(changed)?;
                u32::from_le_bytes(*head.first_chunk().expect("a head begins with the length")) as usize
            }
        };
        let max = self.message_bytes_max;
        if length > max {
            return Err(format!("a message of {length} bytes; at most {max} are allowed"));
        }
        self.length = Some(length);
        let head_bytes = LENGTH_BYTES + self.seals.as_ref().map_or(0, |_| SEAL_BYTES);
        let Some(bytes) = self.inbox.get_mut(head_bytes..head_bytes + length) else { return Ok(None) };
        if let Some(seals) = &mut self.seals {
            seals.into.open_payload(bytes).map_err(changed)?;
        }
        let message = R::decode(bytes);
        self.inbox.drain(..head_bytes + length);
        self.length = None;
        message.map(Some).map_err(|_| "a malformed control message".into())
    }
}

impl<S, R> AsFd for Channel<S, R> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pulse::Position;
    use crate::{loopback, seal};

    /// Two ends of a connection, with a stream between them that the test controls.
    fn ends(sealed: bool) -> (Channel, Stream, Stream, Channel) {
        let mut streams = (0..2).map(|_| loopback::streams(2).unwrap());
        let (mut one, mut two) = (streams.next().unwrap(), streams.next().unwrap());
        let (near, tap) = (one[0][1].take().unwrap(), one[1][0].take().unwrap());
        let (give, far) = (two[0][1].take().unwrap(), two[1][0].take().unwrap());
        let (ours, theirs) = seal::pair().unwrap();
        let end = |stream, seals| Connection { stream, seals: sealed.then(|| Box::new(seals)) };
        let channel = |connection| Channel::new(connection, 20_000).unwrap();
        (channel(end(near, ours)), tap, give, channel(end(far, theirs)))
    }

    fn share(bytes: usize) -> Message {
        Message::Share { seq: 3, blob: vec![b'x'; bytes] }
    }

    /// The next message of a channel, once all of it has come.
    fn hear(channel: &mut Channel) -> Result<Message, Ended> {
        loop {
            if let Some(message) = channel.receive()? {
                return Ok(message);
            }
            std::thread::yield_now();
        }
    }

    /// Sends messages through a pair of ends, and says what the other side heard of each; `meddle` may change the bytes
    /// in between.
    fn through(
        sealed: bool,
        messages: &[Message],
        meddle: impl FnOnce(&mut Vec<u8>),
    ) -> (Vec<Result<Message, Ended>>, Vec<u8>) {
        let (mut one, mut tap, mut give, mut two) = ends(sealed);
        messages.iter().for_each(|message| one.send(message));
        assert!(one.flush());
        drop(one);
        let mut wire = Vec::new();
        tap.read_to_end(&mut wire).unwrap();
        let seen = wire.clone();
        meddle(&mut wire);
        give.write_all(&wire).unwrap();
        drop(give);
        (messages.iter().map(|_| hear(&mut two)).collect(), seen)
    }

    #[test]
    fn messages_come_through_and_seals_hide_them() {
        let messages = [share(0), share(9000), Message::Beat(Position::START), share(100)];
        for sealed in [false, true] {
            let (heard, wire) = through(sealed, &messages, |_| {});
            assert!(heard.into_iter().eq(messages.iter().cloned().map(Ok)), "sealed: {sealed}");
            assert_eq!(wire.windows(50).any(|bytes| bytes == [b'x'; 50]), !sealed);
        }
    }

    #[test]
    fn a_sealed_message_that_was_changed_ends_the_connection() {
        let n = through(true, &[share(100)], |_| {}).1.len();
        let check = |name: &str, meddle: &dyn Fn(&mut Vec<u8>)| {
            let (heard, _) = through(true, &[share(100), share(100)], meddle);
            let ended = heard.into_iter().find_map(Result::err).expect(name);
            assert!(
                matches!(&ended, Ended::Malformed { what } if what.contains("authentication")),
                "{name}: {ended:?}"
            );
        };
        for at in [0, 3, 4, 35, 36, 90, n - 1, n, 2 * n - 1] {
            check(&format!("byte {at}"), &|wire| wire[at] ^= 1);
        }
        check("the first left out", &|wire| drop(wire.drain(..n)));
        check("the first twice", &|wire| wire.copy_within(..n, n));
    }

    /// A length that is not allowed is refused before anything is reserved for it, sealed or not.
    #[test]
    fn lengths_are_checked_before_memory_is_reserved() {
        for sealed in [false, true] {
            let (heard, _) = through(sealed, &[share(30_000)], |wire| wire.truncate(100));
            let what = "a message of 30013 bytes; at most 20000 are allowed".to_string();
            assert_eq!(heard, [Err(Ended::Malformed { what })], "sealed: {sealed}");
        }
    }
}
