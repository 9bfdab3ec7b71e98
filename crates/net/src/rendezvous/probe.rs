//! The first message that each of a pair sends the other: longer than a packet, so that a path that carries the proof but
//! loses full packets is found before anything depends on it.

use std::io::{self, ErrorKind, Read, Write};

use super::dial::explain;
use crate::connection::Connection;
use crate::seal::SEAL_BYTES;

/// More than the largest packet in use (jumbo frames of 9000 bytes).
const PROBE_BYTES: usize = 16 << 10;

/// The message that each of a pair sends the other: the first frame of the connection, sealed if it is encrypted.
pub(crate) struct Probe {
    output: Vec<u8>,
    n_sent: usize,
    input: Vec<u8>,
    n_received: usize,
    peer: usize,
}

impl Probe {
    /// The message of this rank to that peer; it is sealed here.
    pub(crate) fn new(rank: usize, peer: usize, connection: &mut Connection) -> Probe {
        let mut output: Vec<u8> = (0..PROBE_BYTES).map(|i| pattern(rank, i)).collect();
        if let Some(seals) = &mut connection.seals {
            let mut head = [0; SEAL_BYTES];
            seals.out.seal(&mut head, &mut output);
            output.splice(..0, head);
        }
        Probe { n_sent: 0, input: vec![0; output.len()], output, n_received: 0, peer }
    }

    /// Whether some of it is still to be sent.
    pub(crate) fn writes(&self) -> bool {
        self.n_sent < self.output.len()
    }

    /// What is wrong if it does not finish.
    pub(crate) fn stalled(&self) -> String {
        let Probe { n_sent, n_received, .. } = self;
        format!(
            "connected, but a message of {} bytes does not get through ({n_sent} bytes sent, {n_received} received)",
            self.output.len()
        )
    }

    /// Whether both messages have got through.
    pub(crate) fn advance(&mut self, connection: &mut Connection) -> Result<bool, String> {
        let (mut can_write, mut can_read) = (true, true);
        while can_write && self.writes() {
            match connection.stream.write(&self.output[self.n_sent..]) {
                Ok(n) => self.n_sent += n,
                Err(e) => can_write = interrupted(e)?,
            }
        }
        while can_read && self.n_received < self.input.len() {
            match connection.stream.read(&mut self.input[self.n_received..]) {
                Ok(0) => return Err("it closed the connection".into()),
                Ok(n) => self.n_received += n,
                Err(e) => can_read = interrupted(e)?,
            }
            if self.n_received == self.input.len() && !self.is_whole(connection) {
                return Err("what it sent arrived damaged".into());
            }
        }
        Ok(!self.writes() && self.n_received == self.input.len())
    }

    /// Whether the other side's message arrived intact.
    fn is_whole(&mut self, connection: &mut Connection) -> bool {
        let mut input = &mut self.input[..];
        if let Some(seals) = &mut connection.seals {
            let (head, payload) = input.split_at_mut(SEAL_BYTES);
            let opened = seals.into.open_head(head).and_then(|()| seals.into.open_payload(payload));
            if opened.is_err() {
                return false;
            }
            input = payload;
        }
        input.iter().copied().eq((0..PROBE_BYTES).map(|i| pattern(self.peer, i)))
    }
}

fn pattern(rank: usize, i: usize) -> u8 {
    (rank.wrapping_mul(31).wrapping_add(i.wrapping_mul(7)).wrapping_add(i >> 8)) as u8
}

/// Whether to try again at once.
fn interrupted(e: io::Error) -> Result<bool, String> {
    match e.kind() {
        ErrorKind::Interrupted => Ok(true),
        ErrorKind::WouldBlock => Ok(false),
        _ => Err(explain(&e)),
    }
}
