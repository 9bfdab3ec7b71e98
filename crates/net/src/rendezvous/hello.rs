//! The handshake of every connection: identity, proof of the job's secret, and keys for what follows.
//!
//! ```text
//! connector                          acceptor
//!   hello (72 bytes)          -->              magic or version wrong: closed
//!                             <--    hello (72 bytes)
//!   proof over both hellos    -->              wrong: status 1, closed
//!                             <--    status, proof over both hellos
//! ```
//!
//! A hello holds a public key that was made for this connection. So it is never the same twice, and on an encrypted
//! connection both sides derive the same keys from it ([`crate::seal`]). Whether to encrypt is part of what is proved:
//! a rank with another setting is refused, and a man in the middle cannot turn encryption off.
//!
//! Both sides read a fixed number of bytes and nothing else before the proof, and neither blocks: a [`Handshake`]
//! advances whenever its socket is ready. Which ranks may join (rank, size, job) is decided afterwards, by the caller.

use std::io::{self, ErrorKind, Read, Write};

use ring::digest::{SHA256, digest};

use crate::seal::{Encrypt, KeyPair, Seals};
use crate::secret::{Role, SECRET_BYTES, Secret, SecretError};

/// The version of the protocol between ranks. Ranks of one job must have the same.
pub const PROTOCOL_VERSION: u16 = 4;
/// Bytes of a [`Hello`]: the same in every version, so that two versions can name each other.
pub(crate) const HELLO_BYTES: usize = 72;
const MAGIC: [u8; 8] = *b"POLYREME";
const STATUS_WELCOME: u8 = 0;
const STATUS_WRONG_SECRET: u8 = 1;
const VERDICT_BYTES: usize = 1 + SECRET_BYTES;

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// A rank's control connection to rank 0.
    Control,
    /// Data between two ranks.
    Data,
    /// Only a request: the sender wants a data connection, which the other rank has to make.
    Call,
    /// A member's connection to the coordinator of an elastic job.
    Member,
}

/// The sender's identity. Everything in it is part of the proof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    /// What the connection is for.
    pub(crate) purpose: Purpose,
    /// Fingerprint of the job's id.
    pub(crate) job: u64,
    /// Which start of the job.
    pub(crate) generation: u64,
    /// The speaker's rank.
    pub(crate) rank: u32,
    /// How many ranks the speaker thinks there are.
    pub(crate) size: u32,
    /// The rank that it wants to talk with.
    pub(crate) peer: u16,
    /// The group of ranks: two ranks have one data connection per group that both belong to.
    pub(crate) group: u16,
    /// Whether it wants connections encrypted.
    pub(crate) encrypt: Encrypt,
    /// Whether it sees this connection stay on its host.
    pub(crate) here: bool,
    /// Its half of the keys. New for each connection: a [`Handshake`] makes it.
    pub(crate) key: [u8; SECRET_BYTES],
}

/// Why a connection went no further.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Turned {
    /// The other side is not a rank.
    Stranger,
    /// A rank of another version.
    Version(u16),
    /// The other side does not know the secret, or says that this one does not.
    WrongSecret,
    /// It knows the secret, but has this encryption setting instead of ours.
    Encryption(Encrypt),
    /// It closed before the end.
    Closed,
    /// The socket failed.
    Failed(ErrorKind),
}

/// What the next turn needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum HelloProgress {
    /// The socket has to become readable.
    Read,
    /// The socket has to become writable.
    Write,
    /// The other side proved itself. This is its hello.
    Proved(Hello),
    /// The handshake failed.
    Turned(Turned),
}

/// One side of the exchange above.
pub(crate) struct Handshake {
    role: Role,
    secret: Secret,
    hello: Hello,
    pair: Option<KeyPair>,
    seals: Option<Box<Seals>>,
    mine: [u8; HELLO_BYTES],
    theirs: [u8; HELLO_BYTES],
    peer: Option<Hello>,
    state: HelloState,
    input: [u8; HELLO_BYTES],
    n_input: usize,
    output: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq)]
enum HelloState {
    Hello,
    /// The acceptor waits for a proof, the connector for status and proof.
    Proof,
    /// Send what is left to send, then end with this.
    End(Result<Hello, Turned>),
}

/// The fingerprint of a job's id in a hello.
pub(crate) fn fingerprint(job: &str) -> u64 {
    let hash = digest(&SHA256, job.as_bytes());
    u64::from_le_bytes(hash.as_ref()[..8].try_into().expect("eight bytes of a hash"))
}

impl Hello {
    pub(crate) fn to_bytes(self) -> [u8; HELLO_BYTES] {
        let purpose = match self.purpose {
            Purpose::Control => 1,
            Purpose::Data => 2,
            Purpose::Call => 3,
            Purpose::Member => 4,
        };
        let encrypt = match self.encrypt {
            Encrypt::Auto => 0,
            Encrypt::Always => 1,
            Encrypt::Never => 2,
        };
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        bytes[10] = purpose;
        bytes[11] = encrypt | u8::from(self.here) << 7;
        bytes[12..20].copy_from_slice(&self.job.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.generation.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.rank.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.size.to_le_bytes());
        bytes[36..38].copy_from_slice(&self.peer.to_le_bytes());
        bytes[38..40].copy_from_slice(&self.group.to_le_bytes());
        bytes[40..].copy_from_slice(&self.key);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, Turned> {
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"));
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[..8] != MAGIC {
            return Err(Turned::Stranger);
        }
        let version = u16_at(8);
        if version != PROTOCOL_VERSION {
            return Err(Turned::Version(version));
        }
        let purpose = match bytes[10] {
            1 => Purpose::Control,
            2 => Purpose::Data,
            3 => Purpose::Call,
            4 => Purpose::Member,
            _ => return Err(Turned::Stranger),
        };
        let encrypt = match bytes[11] & 0x7f {
            0 => Encrypt::Auto,
            1 => Encrypt::Always,
            2 => Encrypt::Never,
            _ => return Err(Turned::Stranger),
        };
        Ok(Hello {
            purpose,
            job: u64_at(12),
            generation: u64_at(20),
            rank: u32_at(28),
            size: u32_at(32),
            peer: u16_at(36),
            group: u16_at(38),
            encrypt,
            here: bytes[11] & 0x80 != 0,
            key: bytes[40..].try_into().expect("the key is the rest"),
        })
    }

    /// Whether a connection between the two is encrypted; `None` if their settings differ.
    fn encrypts(&self, theirs: &Hello) -> Option<bool> {
        match self.encrypt {
            _ if self.encrypt != theirs.encrypt => None,
            Encrypt::Always => Some(true),
            Encrypt::Never => Some(false),
            // Addresses may be translated on the way: it stays on the host only if both sides see it stay.
            Encrypt::Auto => Some(!(self.here && theirs.here)),
        }
    }
}

impl Handshake {
    /// The start, with a new key. The connector speaks first.
    pub(crate) fn new(role: Role, secret: Secret, hello: Hello) -> Result<Handshake, SecretError> {
        let pair = KeyPair::new()?;
        let hello = Hello { key: pair.public, ..hello };
        let mine = hello.to_bytes();
        Ok(Handshake {
            role,
            secret,
            hello,
            pair: Some(pair),
            seals: None,
            mine,
            theirs: [0; HELLO_BYTES],
            peer: None,
            state: HelloState::Hello,
            input: [0; HELLO_BYTES],
            n_input: 0,
            output: if role == Role::Connector { mine.to_vec() } else { Vec::new() },
        })
    }

    /// Takes the seals of a proven, encrypted connection.
    pub(crate) fn take_seals(&mut self) -> Option<Box<Seals>> {
        self.seals.take()
    }

    /// Advances as far as the socket allows, without waiting.
    pub(crate) fn advance(&mut self, stream: &mut (impl Read + Write)) -> HelloProgress {
        loop {
            match self.turn(stream) {
                Ok(None) => {}
                Ok(Some(progress)) => return progress,
                Err(turned) => return HelloProgress::Turned(turned),
            }
        }
    }

    /// Whether the other side's hello has come: it speaks like a rank.
    pub(crate) fn claimed(&self) -> Option<Hello> {
        self.peer
    }

    fn turn(&mut self, stream: &mut (impl Read + Write)) -> Result<Option<HelloProgress>, Turned> {
        while !self.output.is_empty() {
            match stream.write(&self.output) {
                Ok(0) => return Err(Turned::Closed),
                Ok(n) => drop(self.output.drain(..n)),
                Err(e) => match wait_or_fail(e)? {
                    true => return Ok(Some(HelloProgress::Write)),
                    false => continue,
                },
            }
        }
        let need = match (&self.state, self.role) {
            (HelloState::Hello, _) => HELLO_BYTES,
            (HelloState::Proof, Role::Acceptor) => SECRET_BYTES,
            (HelloState::Proof, Role::Connector) => VERDICT_BYTES,
            (HelloState::End(Ok(hello)), _) => return Ok(Some(HelloProgress::Proved(*hello))),
            (HelloState::End(Err(turned)), _) => return Err(turned.clone()),
        };
        // Not one byte more than needed: what follows belongs to the next user of the stream.
        while self.n_input < need {
            match stream.read(&mut self.input[self.n_input..need]) {
                Ok(0) => return Err(Turned::Closed),
                Ok(n) => self.n_input += n,
                Err(e) => match wait_or_fail(e)? {
                    true => return Ok(Some(HelloProgress::Read)),
                    false => continue,
                },
            }
        }
        self.n_input = 0;
        match self.state {
            HelloState::Hello => self.take_hello()?,
            HelloState::Proof => self.take_proof(),
            HelloState::End(_) => {}
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
                self.state = HelloState::End(Err(Turned::Version(theirs)));
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
        self.state = HelloState::Proof;
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
                    self.agree(peer)
                } else {
                    // Nothing that depends on the secret is sent to a peer that does not know it.
                    self.output.push(STATUS_WRONG_SECRET);
                    self.output.extend_from_slice(&[0; SECRET_BYTES]);
                    Err(Turned::WrongSecret)
                }
            }
            Role::Connector => {
                let proof = &self.input[1..VERDICT_BYTES];
                let proved = self.secret.proved(proof, Role::Acceptor, &self.mine, &self.theirs);
                match self.input[0] == STATUS_WELCOME && proved {
                    true => self.agree(peer),
                    false => Err(Turned::WrongSecret),
                }
            }
        };
        self.state = HelloState::End(end);
    }

    /// The other side is proved: derives keys, if both want encryption.
    fn agree(&mut self, peer: Hello) -> Result<Hello, Turned> {
        if self.hello.encrypts(&peer).ok_or(Turned::Encryption(peer.encrypt))? {
            let (connector, acceptor) = match self.role {
                Role::Connector => (&self.mine, &self.theirs),
                Role::Acceptor => (&self.theirs, &self.mine),
            };
            let pair = self.pair.take().ok_or(Turned::Stranger)?;
            let seals = pair.agree(&peer.key, &self.secret, self.role, connector, acceptor);
            self.seals = Some(Box::new(seals.ok_or(Turned::Stranger)?));
        }
        Ok(peer)
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
mod fuzz;

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::secret::tests::secret;

    /// A peer that has already sent all of this, and records what it receives.
    pub(super) struct Tape {
        pub(super) says: Cursor<Vec<u8>>,
        pub(super) hears: Vec<u8>,
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

    pub(super) fn hello(rank: u32) -> Hello {
        Hello {
            purpose: Purpose::Data,
            job: 7,
            generation: 1,
            rank,
            size: 3,
            peer: 0,
            group: 0,
            encrypt: Encrypt::Auto,
            here: false,
            key: [0; 32],
        }
    }

    /// The outcome without the key, which differs each time.
    fn outcome(progress: HelloProgress) -> HelloProgress {
        match progress {
            HelloProgress::Proved(hello) => HelloProgress::Proved(Hello { key: [0; 32], ..hello }),
            other => other,
        }
    }

    struct Met {
        one: HelloProgress,
        two: HelloProgress,
        /// What the connector said, and what the acceptor did.
        said: Vec<u8>,
        heard: Vec<u8>,
        seals: (Option<Box<Seals>>, Option<Box<Seals>>),
    }

    /// Both sides in turns, until both know. What the connector says goes through `bend`, with where it begins.
    fn meet_through(
        connector: (&str, Hello),
        acceptor: (&str, Hello),
        bend: &dyn Fn(usize, &mut [u8]),
    ) -> Met {
        let mut one = Handshake::new(Role::Connector, secret(connector.0), connector.1).unwrap();
        let mut two = Handshake::new(Role::Acceptor, secret(acceptor.0), acceptor.1).unwrap();
        let (mut to_one, mut to_two) = (Vec::new(), Vec::new());
        let (mut said, mut heard) = (Vec::new(), Vec::new());
        for _ in 0..4 {
            let mut tape = Tape { says: Cursor::new(std::mem::take(&mut to_one)), hears: Vec::new() };
            let first = one.advance(&mut tape);
            bend(said.len(), &mut tape.hears);
            said.extend_from_slice(&tape.hears);
            to_two.extend(tape.hears);
            let mut tape = Tape { says: Cursor::new(std::mem::take(&mut to_two)), hears: Vec::new() };
            let second = two.advance(&mut tape);
            heard.extend_from_slice(&tape.hears);
            to_one.extend(tape.hears);
            let ended = matches!(second, HelloProgress::Turned(_)) && to_one.is_empty();
            if first != HelloProgress::Read || ended {
                let seals = (one.take_seals(), two.take_seals());
                return Met { one: outcome(first), two: outcome(second), said, heard, seals };
            }
        }
        panic!("a handshake ends after two messages each way");
    }

    fn meet(connector: (&str, Hello), acceptor: (&str, Hello)) -> Met {
        meet_through(connector, acceptor, &|_, _| {})
    }

    #[test]
    fn two_ranks_that_know_the_secret_meet_and_others_do_not() {
        let met = meet(("correct horse", hello(2)), ("correct horse", hello(0)));
        assert_eq!((met.one, met.two), (HelloProgress::Proved(hello(0)), HelloProgress::Proved(hello(2))));
        assert_eq!(met.said.len(), HELLO_BYTES + SECRET_BYTES);
        let again = meet(("correct horse", hello(2)), ("correct horse", hello(0)));
        assert!(again.said != met.said && again.heard != met.heard, "new keys, new proofs");
        let met = meet(("wrong horse", hello(2)), ("correct horse", hello(0)));
        assert_eq!(met.one, HelloProgress::Turned(Turned::WrongSecret));
        assert_eq!(met.two, HelloProgress::Turned(Turned::WrongSecret));
        assert!(met.seals.0.is_none() && met.seals.1.is_none());
    }

    /// Equal settings are followed; different ones are refused by both sides, naming the other's.
    #[test]
    fn both_sides_must_want_the_same_of_encryption() {
        use Encrypt::*;
        let all = [Auto, Always, Never];
        for one in all {
            for two in all {
                for (here, there) in [(false, false), (true, false), (false, true), (true, true)] {
                    let connector = Hello { encrypt: one, here, ..hello(2) };
                    let acceptor = Hello { encrypt: two, here: there, ..hello(0) };
                    let met = meet(("correct horse", connector), ("correct horse", acceptor));
                    let row = format!("{one} {here}, {two} {there}");
                    if one != two {
                        assert_eq!(met.one, HelloProgress::Turned(Turned::Encryption(two)), "{row}");
                        assert_eq!(met.two, HelloProgress::Turned(Turned::Encryption(one)), "{row}");
                        continue;
                    }
                    assert_eq!(met.two, HelloProgress::Proved(connector), "{row}");
                    let sealed = one == Always || one == Auto && !(here && there);
                    let (Some(mut one), Some(mut two)) = met.seals else {
                        assert!(!sealed, "{row}");
                        continue;
                    };
                    assert!(sealed, "{row}");
                    let mut head = [7; 40];
                    one.out.seal(&mut head, &mut []);
                    assert!(two.into.open_head(&mut head).is_ok() && head[..8] == [7; 8], "{row}");
                }
            }
        }
    }

    #[test]
    fn strangers_learn_nothing_and_get_nowhere() {
        let genuine = meet(("correct horse", hello(2)), ("correct horse", hello(0))).said;
        let check = |role: Role, says: &[u8], expected: HelloProgress, n_heard: usize| {
            let mut handshake = Handshake::new(role, secret("correct horse"), hello(0)).unwrap();
            let mut tape = Tape { says: Cursor::new(says.to_vec()), hears: Vec::new() };
            assert_eq!(handshake.advance(&mut tape), expected, "{role:?}, {} bytes", says.len());
            assert_eq!(tape.hears.len(), n_heard, "{role:?}, {} bytes", says.len());
        };
        let wrong = || HelloProgress::Turned(Turned::WrongSecret);
        let stranger = || HelloProgress::Turned(Turned::Stranger);
        // A replay of an earlier connection: the key differs now.
        check(Role::Acceptor, &genuine, wrong(), HELLO_BYTES + VERDICT_BYTES);
        // Nothing, half a hello, something else, a frame of 2^60 bytes.
        check(Role::Acceptor, b"", HelloProgress::Read, 0);
        check(Role::Acceptor, &genuine[..HELLO_BYTES - 1], HelloProgress::Read, 0);
        check(Role::Acceptor, &genuine[..HELLO_BYTES], HelloProgress::Read, HELLO_BYTES);
        check(Role::Acceptor, &[b'G'; 100], stranger(), 0);
        let huge = [(1u64 << 60).to_le_bytes().as_slice(), &[0; 64]].concat();
        check(Role::Acceptor, &huge, stranger(), 0);
        let mut purpose = genuine.clone();
        purpose[10] = 5;
        check(Role::Acceptor, &purpose, stranger(), 0);
        let mut encrypt = genuine.clone();
        encrypt[11] = 3;
        check(Role::Acceptor, &encrypt, stranger(), 0);
        // Another version is told ours.
        let mut version = genuine.clone();
        version[8] = 9;
        check(Role::Acceptor, &version, HelloProgress::Turned(Turned::Version(9)), HELLO_BYTES);
        check(Role::Connector, &version, HelloProgress::Turned(Turned::Version(9)), HELLO_BYTES);
        // A listener that sends back what it hears: the connector's own proof has the wrong role.
        let mut handshake = Handshake::new(Role::Connector, secret("correct horse"), hello(1)).unwrap();
        let mut tape = Tape { says: Cursor::new(Vec::new()), hears: Vec::new() };
        assert_eq!(handshake.advance(&mut tape), HelloProgress::Read);
        let mut mirror = Tape { says: Cursor::new(tape.hears), hears: Vec::new() };
        assert_eq!(handshake.advance(&mut mirror), HelloProgress::Read);
        let back = [&[STATUS_WELCOME], mirror.hears.as_slice()].concat();
        let mut mirror = Tape { says: Cursor::new(back), hears: Vec::new() };
        assert_eq!(handshake.advance(&mut mirror), wrong());
    }

    /// A man in the middle that changes one bit, for instance the encryption setting, ends the handshake.
    #[test]
    fn each_word_of_a_hello_is_proved() {
        let met = meet(("correct horse", hello(2)), ("correct horse", hello(0)));
        for at in 0..met.said.len() {
            let bend = |from: usize, said: &mut [u8]| {
                if let Some(byte) = at.checked_sub(from).and_then(|at| said.get_mut(at)) {
                    *byte ^= 1;
                }
            };
            let met = meet_through(("correct horse", hello(2)), ("correct horse", hello(0)), &bend);
            assert!(matches!(met.two, HelloProgress::Turned(_)), "byte {at}: {:?}", met.two);
            assert!(!matches!(met.one, HelloProgress::Proved(_)) && met.seals.1.is_none(), "byte {at}");
        }
    }
}
