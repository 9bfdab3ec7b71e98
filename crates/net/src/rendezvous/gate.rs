//! A listener that admits only peers that prove the secret, and that strangers cannot keep busy.
//!
//! Every unproven connection gets some seconds and a few dozen bytes. There is room for a limited number of them; when
//! one more comes, the oldest is dropped. Ranks need milliseconds, so the oldest is the least likely to be one, and a
//! rank that is dropped tries again.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::bounds::stranger_time;
use super::hello::{Handshake, Hello, HelloProgress, Turned};
use super::knock::{Knocks, Tell};
use crate::connection::{Connection, Proven};
use crate::ready;
use crate::secret::{Role, Secret};
use crate::socket::{Listener, Stream};

/// How many unproven connections are held, besides one per rank.
pub(crate) const STRANGERS: usize = 64;
/// How many reasons are kept for the error message; the others are only counted.
const NOTES_MAX: usize = 8;
/// Connections accepted per turn, so that a flood leaves time for those already accepted.
const ACCEPTS_A_TURN: usize = 256;
/// How long not to accept after an accept failed for lack of a resource, such as file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// The listener and its unproven connections.
pub(crate) struct Gate {
    listener: Listener,
    secret: Secret,
    /// This side's hello; the key is new each time.
    hello: Hello,
    pending: Vec<Pending>,
    n_pending_max: usize,
    /// How long each of them has.
    time: Duration,
    notes: Vec<String>,
    n_turned: usize,
    knocks: Knocks,
    /// The last peer that proved the secret but has another encryption setting.
    pub(crate) unlike: Option<Hello>,
    paused_until: Option<Instant>,
}

struct Pending {
    stream: Stream,
    addr: SocketAddr,
    handshake: Handshake,
    until: Instant,
    writes: bool,
}

impl Gate {
    /// Guards a listener for `n_expected` ranks.
    pub(crate) fn new(
        listener: Listener,
        secret: Secret,
        hello: Hello,
        n_expected: usize,
        tell: Tell,
    ) -> io::Result<Gate> {
        listener.set_nonblocking(true)?;
        // All ranks may connect at the same moment.
        listener.set_backlog(4096)?;
        let n_pending_max = n_expected + STRANGERS;
        let pending = Vec::new();
        Ok(Gate {
            listener,
            secret,
            hello,
            pending,
            n_pending_max,
            time: stranger_time(n_expected),
            notes: Vec::new(),
            n_turned: 0,
            knocks: Knocks::new(tell),
            unlike: None,
            paused_until: None,
        })
    }

    /// Where it listens.
    pub(crate) fn addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// What to wait for before the next turn.
    pub(crate) fn interests<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        if self.paused_until.is_none() {
            fds.push(ready::interest(self.listener.as_fd(), false));
        }
        fds.extend(self.pending.iter().map(|p| ready::interest(p.stream.as_fd(), p.writes)));
    }

    /// When the next turn is due even if nothing comes.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.pending.iter().map(|p| p.until).chain(self.paused_until).min()
    }

    /// Makes progress with every connection, and returns those that have proved the secret.
    pub(crate) fn turn(&mut self, now: Instant) -> Vec<Proven> {
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
        }
        if self.paused_until.is_none() {
            self.accept(now);
        }
        let mut arrivals = Vec::new();
        let mut kept = Vec::with_capacity(self.pending.len());
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.handshake.advance(&mut pending.stream) {
                HelloProgress::Proved(hello) => {
                    let Pending { stream, addr, mut handshake, .. } = pending;
                    let connection = Connection { stream, seals: handshake.take_seals() };
                    arrivals.push(Proven { connection, addr, hello });
                }
                HelloProgress::Turned(turned) => self.note_turned(now, &pending, &turned),
                HelloProgress::Read | HelloProgress::Write if pending.until <= now => {
                    self.note(format!("{}: said too little in {:?}", pending.addr, self.time));
                }
                HelloProgress::Read => kept.push(Pending { writes: false, ..pending }),
                HelloProgress::Write => kept.push(Pending { writes: true, ..pending }),
            }
        }
        self.pending = kept;
        arrivals
    }

    /// Records why a connection was turned away.
    pub(crate) fn note(&mut self, note: String) {
        self.n_turned += 1;
        if self.notes.len() < NOTES_MAX {
            self.notes.push(note);
        }
    }

    /// Which connections were turned away and why, as the end of a sentence; empty if none was.
    pub(crate) fn turned_away(&self) -> String {
        if self.n_turned == 0 {
            return String::new();
        }
        let more = match self.n_turned - self.notes.len() {
            0 => String::new(),
            n => format!("; and {n} more"),
        };
        format!("; turned away: {}{more}", self.notes.join("; "))
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_A_TURN {
            let (stream, addr) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {
                    continue;
                }
                Err(e) => {
                    self.note(format!("a connection could not be accepted: {e}"));
                    self.paused_until = Some(now + PAUSE);
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() || stream.set_nodelay().is_err() {
                continue;
            }
            let Ok(here) = stream.stays_on_host() else { continue };
            let hello = Hello { here, ..self.hello };
            let Ok(handshake) = Handshake::new(Role::Acceptor, self.secret.clone(), hello) else { return };
            if self.pending.len() >= self.n_pending_max {
                let oldest = self.pending.remove(0);
                self.note(format!("{}: too many strangers at once", oldest.addr));
            }
            self.pending.push(Pending { stream, addr, handshake, until: now + self.time, writes: false });
        }
    }

    fn note_turned(&mut self, now: Instant, pending: &Pending, turned: &Turned) {
        let addr = pending.addr;
        let claim = match pending.handshake.claimed() {
            Some(hello) => format!("{addr}, as rank {}", hello.rank),
            None => addr.to_string(),
        };
        let note = match turned {
            Turned::Stranger => format!("{claim}: not a rank"),
            Turned::Version(theirs) => {
                let ours = super::PROTOCOL_VERSION;
                format!("{claim}: speaks version {theirs} of the protocol and this is version {ours}")
            }
            Turned::WrongSecret => format!("{claim}: wrong secret"),
            Turned::Encryption(theirs) => {
                let ours = self.hello.encrypt;
                format!("{claim}: has parallel.encrypt = {theirs} and this rank has {ours}")
            }
            Turned::Closed => format!("{claim}: closed without a proof"),
            Turned::Failed(kind) => format!("{claim}: {kind}"),
        };
        // A peer that speaks like a rank may be one that was started wrongly: the user should know at once.
        match turned {
            Turned::Version(_) | Turned::WrongSecret => self.knocks.note(now, &note),
            Turned::Encryption(_) => {
                self.unlike = pending.handshake.claimed();
                self.knocks.note(now, &note);
            }
            Turned::Stranger | Turned::Closed | Turned::Failed(_) => {}
        }
        self.note(note);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::super::hello::Purpose;
    use super::*;
    use crate::seal::Encrypt;
    use crate::system::{Os, System};

    fn gate() -> (Gate, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let secret = crate::secret::tests::secret("correct horse");
        let purpose = Purpose::Control;
        let (encrypt, here, key) = (Encrypt::Auto, false, [0; 32]);
        let (job, generation, rank, size, peer, group) = (1, 0, 0, 2, 0, 0);
        let hello = Hello { purpose, job, generation, rank, size, peer, group, encrypt, here, key };
        (Gate::new(listener.into(), secret, hello, 2, Tell::default()).unwrap(), addr)
    }

    /// Whether the other side closed it.
    fn closed(stream: &mut TcpStream) -> bool {
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0; 8]);
        !matches!(read, Err(e) if e.kind() == ErrorKind::WouldBlock)
    }

    /// Sending a byte now and then does not extend the deadline, which is for the whole handshake.
    #[test]
    fn strangers_have_some_seconds_in_all() {
        let (mut gate, addr) = gate();
        let time = stranger_time(2);
        let mut silent = TcpStream::connect(addr).unwrap();
        let mut slow = TcpStream::connect(addr).unwrap();
        let begun = Instant::now();
        while gate.pending.len() < 2 {
            let mut fds = [ready::interest(gate.listener.as_fd(), false)];
            Os.wait(&mut fds, begun + time).unwrap();
            assert!(gate.turn(begun).is_empty());
        }
        for tenth in 1..20 {
            slow.write_all(b"P").unwrap();
            gate.turn(begun + tenth * time / 20);
            assert!(!closed(&mut silent));
        }
        assert_eq!(gate.due(), Some(begun + time));
        gate.turn(begun + time);
        assert!(closed(&mut silent) && closed(&mut slow) && gate.pending.is_empty());
        assert!(gate.turned_away().contains("said too little in 2.02s"), "{}", gate.turned_away());
    }

    #[test]
    fn there_is_room_for_so_many_strangers_and_the_newest_is_let_in() {
        let (mut gate, addr) = gate();
        let begun = Instant::now();
        let mut strangers: Vec<TcpStream> = (0..150)
            .map(|_| {
                let stranger = TcpStream::connect(addr).unwrap();
                gate.turn(begun);
                assert!(gate.pending.len() <= 2 + STRANGERS);
                stranger
            })
            .collect();
        while gate.n_turned < 150 - 2 - STRANGERS {
            let mut fds = [ready::interest(gate.listener.as_fd(), false)];
            Os.wait(&mut fds, begun + stranger_time(2)).unwrap();
            gate.turn(begun);
        }
        assert!(closed(&mut strangers[0]) && !closed(&mut strangers[149]));
        assert!(gate.turned_away().ends_with(&format!("and {} more", 150 - 2 - STRANGERS - NOTES_MAX)));
    }
}
