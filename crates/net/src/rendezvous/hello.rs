//! The first words on every connection: who is there, and proof that it knows the job's secret.
//!
//! ```text
//! connector                          acceptor
//!   hello (72 bytes)          -->              magic or version wrong: closed
//!                             <--    hello (72 bytes)
//!   proof over both hellos    -->              wrong: status 1, closed
//!                             <--    status, proof over both hellos
//! ```
//!
//! Both sides read a fixed number of bytes and nothing else before the proof, and neither waits: a [`Handshake`] is
//! moved on whenever its socket has something. Who may join (rank, size, job) is decided after it, by the caller.

use std::io::{self, ErrorKind, Read, Write};

use sha2::{Digest, Sha256};

use crate::secret::{Role, SECRET_BYTES, Secret};

/// The version of everything that is said on connections between ranks. Ranks of one job have the same.
pub const PROTOCOL_VERSION: u16 = 1;
/// Bytes of a [`Hello`].
pub(crate) const HELLO_BYTES: usize = 72;
const MAGIC: [u8; 8] = *b"POLYREME";
const STATUS_WELCOME: u8 = 0;
const STATUS_WRONG_SECRET: u8 = 1;
const VERDICT_BYTES: usize = 1 + SECRET_BYTES;

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// A rank's line to rank 0.
    Control,
    /// Data between two ranks.
    Data,
}

/// Who speaks. Everything in it is part of the proof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    /// What for.
    pub(crate) purpose: Purpose,
    /// Fingerprint of the job's id.
    pub(crate) job: u64,
    /// Which start of the job.
    pub(crate) generation: u64,
    /// The speaker's rank.
    pub(crate) rank: u32,
    /// How many ranks the speaker thinks there are.
    pub(crate) size: u32,
    /// The rank that it wants to speak with.
    pub(crate) peer: u32,
    /// New for each connection.
    pub(crate) nonce: [u8; SECRET_BYTES],
}

/// Why a connection went no further.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Turned {
    /// Something else than a rank is there.
    Stranger,
    /// A rank of another version.
    Version(u16),
    /// The other side does not know the secret, or says that this one does not.
    WrongSecret,
    /// It closed before the end.
    Closed,
    /// The socket failed.
    Failed(ErrorKind),
}

/// What the next turn needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// The socket has to become readable.
    Read,
    /// The socket has to become writable.
    Write,
    /// The other side proved itself. This is its hello.
    Proved(Hello),
    /// It ends here.
    Turned(Turned),
}

/// One side of the exchange above.
pub(crate) struct Handshake {
    role: Role,
    secret: Secret,
    mine: [u8; HELLO_BYTES],
    theirs: [u8; HELLO_BYTES],
    peer: Option<Hello>,
    state: State,
    input: [u8; HELLO_BYTES],
    n_input: usize,
    output: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq)]
enum State {
    Hello,
    /// The acceptor waits for a proof, the connector for status and proof.
    Proof,
    /// Say what is left to say, then end with this.
    End(Result<Hello, Turned>),
}

/// A job's id as it stands in a hello.
pub(crate) fn fingerprint(job: &str) -> u64 {
    let hash = Sha256::digest(job.as_bytes());
    u64::from_le_bytes(hash[..8].try_into().expect("eight bytes of a hash"))
}

impl Hello {
    pub(crate) fn to_bytes(self) -> [u8; HELLO_BYTES] {
        let purpose: u16 = match self.purpose {
            Purpose::Control => 1,
            Purpose::Data => 2,
        };
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&purpose.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.job.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.generation.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.rank.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.size.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.peer.to_le_bytes());
        bytes[40..].copy_from_slice(&self.nonce);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, Turned> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[..8] != MAGIC {
            return Err(Turned::Stranger);
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != PROTOCOL_VERSION {
            return Err(Turned::Version(version));
        }
        let purpose = match u16::from_le_bytes([bytes[10], bytes[11]]) {
            1 => Purpose::Control,
            2 => Purpose::Data,
            _ => return Err(Turned::Stranger),
        };
        Ok(Hello {
            purpose,
            job: u64_at(12),
            generation: u64_at(20),
            rank: u32_at(28),
            size: u32_at(32),
            peer: u32_at(36),
            nonce: bytes[40..].try_into().expect("the nonce is the rest"),
        })
    }
}

impl Handshake {
    /// The start. The connector speaks first.
    pub(crate) fn new(role: Role, secret: Secret, hello: Hello) -> Handshake {
        let mine = hello.to_bytes();
        Handshake {
            role,
            secret,
            mine,
            theirs: [0; HELLO_BYTES],
            peer: None,
            state: State::Hello,
            input: [0; HELLO_BYTES],
            n_input: 0,
            output: if role == Role::Connector { mine.to_vec() } else { Vec::new() },
        }
    }

    /// Goes on as far as the socket lets it, without waiting.
    pub(crate) fn advance(&mut self, stream: &mut (impl Read + Write)) -> Progress {
        loop {
            match self.turn(stream) {
                Ok(None) => {}
                Ok(Some(progress)) => return progress,
                Err(turned) => return Progress::Turned(turned),
            }
        }
    }

    /// Whether the other side's hello has come: it speaks like a rank.
    pub(crate) fn claimed(&self) -> Option<Hello> {
        self.peer
    }

    fn turn(&mut self, stream: &mut (impl Read + Write)) -> Result<Option<Progress>, Turned> {
        while !self.output.is_empty() {
            match stream.write(&self.output) {
                Ok(0) => return Err(Turned::Closed),
                Ok(n) => drop(self.output.drain(..n)),
                Err(e) => match wait_or_fail(e)? {
                    true => return Ok(Some(Progress::Write)),
                    false => continue,
                },
            }
        }
        let need = match (&self.state, self.role) {
            (State::Hello, _) => HELLO_BYTES,
            (State::Proof, Role::Acceptor) => SECRET_BYTES,
            (State::Proof, Role::Connector) => VERDICT_BYTES,
            (State::End(Ok(hello)), _) => return Ok(Some(Progress::Proved(*hello))),
            (State::End(Err(turned)), _) => return Err(turned.clone()),
        };
        // Not one byte more than needed: what follows belongs to whoever uses the stream next.
        while self.n_input < need {
            match stream.read(&mut self.input[self.n_input..need]) {
                Ok(0) => return Err(Turned::Closed),
                Ok(n) => self.n_input += n,
                Err(e) => match wait_or_fail(e)? {
                    true => return Ok(Some(Progress::Read)),
                    false => continue,
                },
            }
        }
        self.n_input = 0;
        match self.state {
            State::Hello => self.take_hello()?,
            State::Proof => self.take_proof(),
            State::End(_) => {}
        }
        Ok(None)
    }

    fn take_hello(&mut self) -> Result<(), Turned> {
        self.theirs = self.input;
        let peer = match Hello::from_bytes(&self.theirs) {
            Ok(peer) => peer,
            Err(Turned::Version(theirs)) => {
                // Say which version this is, so that the other side can name both.
                if self.role == Role::Acceptor {
                    self.output.extend_from_slice(&self.mine);
                }
                self.state = State::End(Err(Turned::Version(theirs)));
                return Ok(());
            }
            Err(turned) => return Err(turned),
        };
        self.peer = Some(peer);
        match self.role {
            Role::Connector => {
                let proof = self.secret.proof(Role::Connector, &self.mine, &self.theirs);
                self.output.extend_from_slice(&proof);
            }
            Role::Acceptor => self.output.extend_from_slice(&self.mine),
        }
        self.state = State::Proof;
        Ok(())
    }

    fn take_proof(&mut self) {
        let peer = self.peer.expect("a proof follows a hello");
        let end = match self.role {
            Role::Acceptor => {
                let proof = &self.input[..SECRET_BYTES];
                if self.secret.proved(proof, Role::Connector, &self.theirs, &self.mine) {
                    self.output.push(STATUS_WELCOME);
                    let proof = self.secret.proof(Role::Acceptor, &self.theirs, &self.mine);
                    self.output.extend_from_slice(&proof);
                    Ok(peer)
                } else {
                    // Nothing that depends on the secret goes to somebody who does not know it.
                    self.output.push(STATUS_WRONG_SECRET);
                    self.output.extend_from_slice(&[0; SECRET_BYTES]);
                    Err(Turned::WrongSecret)
                }
            }
            Role::Connector => {
                let proof = &self.input[1..VERDICT_BYTES];
                let proved = self.secret.proved(proof, Role::Acceptor, &self.mine, &self.theirs);
                if self.input[0] == STATUS_WELCOME && proved { Ok(peer) } else { Err(Turned::WrongSecret) }
            }
        };
        self.state = State::End(end);
    }
}

/// Whether to wait for the socket; `false` is to try again at once.
fn wait_or_fail(e: io::Error) -> Result<bool, Turned> {
    match e.kind() {
        ErrorKind::WouldBlock => Ok(true),
        ErrorKind::Interrupted => Ok(false),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
            Err(Turned::Closed)
        }
        kind => Err(Turned::Failed(kind)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A peer that said all of this already, and hears what it is told.
    struct Tape {
        says: Cursor<Vec<u8>>,
        hears: Vec<u8>,
    }

    impl Read for Tape {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.says.read(buffer)? {
                0 => Err(ErrorKind::WouldBlock.into()),
                n => Ok(n),
            }
        }
    }

    impl Write for Tape {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.hears.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn hello(rank: u32, nonce: u8) -> Hello {
        Hello { purpose: Purpose::Data, job: 7, generation: 1, rank, size: 3, peer: 0, nonce: [nonce; 32] }
    }

    fn secret(text: &str) -> Secret {
        Secret::from_text(text).unwrap()
    }

    /// Both sides in turns, until both know. Also what the connector said.
    fn meet(connector: (&str, Hello), acceptor: (&str, Hello)) -> (Progress, Progress, Vec<u8>) {
        let mut one = Handshake::new(Role::Connector, secret(connector.0), connector.1);
        let mut two = Handshake::new(Role::Acceptor, secret(acceptor.0), acceptor.1);
        let (mut to_one, mut to_two) = (Vec::new(), Vec::new());
        let mut said = Vec::new();
        for _ in 0..4 {
            let mut tape = Tape { says: Cursor::new(std::mem::take(&mut to_one)), hears: Vec::new() };
            let first = one.advance(&mut tape);
            said.extend_from_slice(&tape.hears);
            to_two.extend(tape.hears);
            let mut tape = Tape { says: Cursor::new(std::mem::take(&mut to_two)), hears: Vec::new() };
            let second = two.advance(&mut tape);
            to_one.extend(tape.hears);
            if first != Progress::Read {
                return (first, second, said);
            }
        }
        panic!("a handshake ends after two messages each way");
    }

    #[test]
    fn two_ranks_that_know_the_secret_meet_and_others_do_not() {
        let (one, two, said) = meet(("correct horse", hello(2, 1)), ("correct horse", hello(0, 2)));
        assert_eq!((one, two), (Progress::Proved(hello(0, 2)), Progress::Proved(hello(2, 1))));
        assert_eq!(said.len(), HELLO_BYTES + SECRET_BYTES);
        let (one, two, _) = meet(("wrong horse", hello(2, 1)), ("correct horse", hello(0, 2)));
        assert_eq!(one, Progress::Turned(Turned::WrongSecret));
        assert_eq!(two, Progress::Turned(Turned::WrongSecret));
    }

    #[test]
    fn strangers_learn_nothing_and_get_nowhere() {
        let (_, _, genuine) = meet(("correct horse", hello(2, 1)), ("correct horse", hello(0, 2)));
        let check = |role: Role, says: &[u8], expected: Progress, n_heard: usize| {
            let mut handshake = Handshake::new(role, secret("correct horse"), hello(0, 3));
            let mut tape = Tape { says: Cursor::new(says.to_vec()), hears: Vec::new() };
            assert_eq!(handshake.advance(&mut tape), expected, "{role:?}, {} bytes", says.len());
            assert_eq!(tape.hears.len(), n_heard, "{role:?}, {} bytes", says.len());
        };
        let wrong = || Progress::Turned(Turned::WrongSecret);
        let stranger = || Progress::Turned(Turned::Stranger);
        // What was said on an earlier connection: the nonce is another one now.
        check(Role::Acceptor, &genuine, wrong(), HELLO_BYTES + VERDICT_BYTES);
        // Nothing, half a hello, something else, a frame of 2^60 bytes.
        check(Role::Acceptor, b"", Progress::Read, 0);
        check(Role::Acceptor, &genuine[..HELLO_BYTES - 1], Progress::Read, 0);
        check(Role::Acceptor, &genuine[..HELLO_BYTES], Progress::Read, HELLO_BYTES);
        check(Role::Acceptor, &[b'G'; 100], stranger(), 0);
        let huge = [(1u64 << 60).to_le_bytes().as_slice(), &[0; 64]].concat();
        check(Role::Acceptor, &huge, stranger(), 0);
        let mut purpose = genuine.clone();
        purpose[10] = 3;
        check(Role::Acceptor, &purpose, stranger(), 0);
        // Another version is told ours.
        let mut version = genuine.clone();
        version[8] = 9;
        check(Role::Acceptor, &version, Progress::Turned(Turned::Version(9)), HELLO_BYTES);
        check(Role::Connector, &version, Progress::Turned(Turned::Version(9)), HELLO_BYTES);
        // A listener that sends back what it hears: the connector's own proof has the wrong role.
        let mut handshake = Handshake::new(Role::Connector, secret("correct horse"), hello(1, 4));
        let mut tape = Tape { says: Cursor::new(Vec::new()), hears: Vec::new() };
        assert_eq!(handshake.advance(&mut tape), Progress::Read);
        let mut mirror = Tape { says: Cursor::new(tape.hears), hears: Vec::new() };
        assert_eq!(handshake.advance(&mut mirror), Progress::Read);
        let back = [&[STATUS_WELCOME], mirror.hears.as_slice()].concat();
        let mut mirror = Tape { says: Cursor::new(back), hears: Vec::new() };
        assert_eq!(handshake.advance(&mut mirror), wrong());
    }

    #[test]
    fn each_word_of_a_hello_is_proved() {
        let (_, _, genuine) = meet(("correct horse", hello(2, 1)), ("correct horse", hello(0, 2)));
        let check = |said: Vec<u8>, proved: bool| {
            let mut handshake = Handshake::new(Role::Acceptor, secret("correct horse"), hello(0, 2));
            let mut tape = Tape { says: Cursor::new(said.clone()), hears: Vec::new() };
            let progress = handshake.advance(&mut tape);
            assert_eq!(matches!(progress, Progress::Proved(_)), proved, "{said:?}");
        };
        check(genuine.clone(), true);
        for at in 0..genuine.len() {
            let mut changed = genuine.clone();
            changed[at] ^= 1;
            check(changed, false);
        }
    }
}
