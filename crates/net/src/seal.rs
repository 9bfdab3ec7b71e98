//! Encryption of one connection: the setting, the keys, and sealed frames.
//!
//! A sealed frame is a head and a payload, both encrypted with AES-256 in Galois/counter mode. The payload's tag is
//! inside the head, and the head's follows it, so a receiver reads a head of known length, opens it, and then knows the
//! payload's length and tag. No length is trusted before it is authenticated, and none is visible on the wire.
//!
//! Each direction has its own key, derived for this connection from the job's secret, an X25519 exchange with ephemeral
//! keys, and both hellos. A nonce is the number of the frame and which part of it this is, so a frame that is changed,
//! left out, repeated or moved does not open. Learning the secret later does not decrypt earlier captures.

use std::fmt;
use std::time::{Duration, Instant};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::rand::SystemRandom;

use crate::frame::{HEADER_BYTES, SEGMENT_BYTES_MAX};
use crate::secret::{Role, SECRET_BYTES, Secret, SecretError};

/// Bytes of a tag.
const TAG_BYTES: usize = 16;

/// What sealing adds to a head: the tag of the payload and its own.
pub(crate) const SEAL_BYTES: usize = 2 * TAG_BYTES;

/// Whether connections between ranks are encrypted. All ranks of a job have the same setting.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Encrypt {
    /// Those that leave a host.
    #[default]
    Auto,
    /// All.
    Always,
    /// None.
    Never,
}

/// Its value in a job file.
impl fmt::Display for Encrypt {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Encrypt::Auto => "\"auto\"",
            Encrypt::Always => "true",
            Encrypt::Never => "false",
        })
    }
}

/// A key pair for one connection. The private half is used once.
pub(crate) struct KeyPair {
    private: EphemeralPrivateKey,
    pub(crate) public: [u8; SECRET_BYTES],
}

impl KeyPair {
    pub(crate) fn new() -> Result<KeyPair, SecretError> {
        let failed = |_| SecretError::NoRandom;
        let private = EphemeralPrivateKey::generate(&X25519, &SystemRandom::new()).map_err(failed)?;
        let public = private.compute_public_key().map_err(failed)?;
        Ok(KeyPair { public: public.as_ref().try_into().expect("keys of X25519 have 32 bytes"), private })
    }

    /// The seals of a connection with these hellos; `None` if the other side's key is invalid.
    pub(crate) fn agree(
        self,
        theirs: &[u8; SECRET_BYTES],
        secret: &Secret,
        role: Role,
        connector: &[u8],
        acceptor: &[u8],
    ) -> Option<Seals> {
        agree_ephemeral(self.private, &UnparsedPublicKey::new(&X25519, theirs), |agreed| {
            let session = secret.session(agreed);
            let key = |from: &'static [u8]| {
                // Hellos have one length each, so nothing can move between the parts.
                let info = [&b"polyreme seals 2\0"[..], from, connector, acceptor];
                let key = session.expand(&info, &AES_256_GCM).expect("a key is short enough to derive");
                LessSafeKey::new(UnboundKey::from(key))
            };
            let (of_connector, of_acceptor) = (key(b"connector\0"), key(b"acceptor\0"));
            let (out, into) = match role {
                Role::Connector => (of_connector, of_acceptor),
                Role::Acceptor => (of_acceptor, of_connector),
            };
            Seals { out: Sealer { key: out, n: 0 }, into: Opener { key: into, n: 0, payload_tag: None } }
        })
        .ok()
    }
}

/// Both directions of one connection.
pub(crate) struct Seals {
    pub(crate) out: Sealer,
    pub(crate) into: Opener,
}

impl fmt::Debug for Seals {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Seals(..)")
    }
}

/// Seals frames, in their order.
pub(crate) struct Sealer {
    key: LessSafeKey,
    n: u64,
}

/// Opens frames, in their order.
pub(crate) struct Opener {
    key: LessSafeKey,
    n: u64,
    /// The tag of the payload whose head was opened, until the payload is opened too.
    payload_tag: Option<[u8; TAG_BYTES]>,
}

/// What arrived is not the frame that the other side sealed next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Forged;

#[derive(Clone, Copy)]
enum FramePart {
    Head = 1,
    Payload = 2,
}

fn nonce(n: u64, part: FramePart) -> Nonce {
    let mut bytes = [0; 12];
    bytes[0] = part as u8;
    bytes[4..].copy_from_slice(&n.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl Sealer {
    /// Seals the next frame in place. The last [`SEAL_BYTES`] of the head are room for the tags.
    pub(crate) fn seal(&mut self, head: &mut [u8], payload: &mut [u8]) {
        let n = self.n;
        self.n += 1;
        let seal = |bytes: &mut [u8], part| {
            let tag = self.key.seal_in_place_separate_tag(nonce(n, part), Aad::empty(), bytes);
            tag.expect("frames are far shorter than a key allows")
        };
        let tag = seal(payload, FramePart::Payload);
        let (text, room) = head.split_at_mut(head.len() - TAG_BYTES);
        let at = text.len() - TAG_BYTES;
        text[at..].copy_from_slice(tag.as_ref());
        room.copy_from_slice(seal(text, FramePart::Head).as_ref());
    }
}

impl Opener {
    /// Opens the head of the next frame in place; its payload comes next.
    pub(crate) fn open_head(&mut self, head: &mut [u8]) -> Result<(), Forged> {
        self.payload_tag = Some(self.open_ahead(0, head)?);
        Ok(())
    }

    /// Opens, in place, the payload of the frame whose head was opened.
    pub(crate) fn open_payload(&mut self, payload: &mut [u8]) -> Result<(), Forged> {
        let tag = self.payload_tag.take().ok_or(Forged)?;
        let n = self.n;
        self.n += 1;
        self.open(n, FramePart::Payload, payload, tag)
    }

    /// Goes on to the next frame without opening the payload of this one.
    pub(crate) fn skip_payload(&mut self) {
        self.payload_tag = None;
        self.n += 1;
    }

    /// Opens, in place, the head of the frame `ahead` frames further on, and changes nothing else. Returns the tag of
    /// the payload.
    pub(crate) fn open_ahead(&self, ahead: u64, head: &mut [u8]) -> Result<[u8; TAG_BYTES], Forged> {
        let (text, tag) = head.split_last_chunk_mut::<TAG_BYTES>().ok_or(Forged)?;
        self.open(self.n + ahead, FramePart::Head, text, *tag)?;
        text.last_chunk::<TAG_BYTES>().copied().ok_or(Forged)
    }

    /// Opens from the first frame on again.
    #[cfg(test)]
    pub(crate) fn rewind(&mut self) {
        (self.n, self.payload_tag) = (0, None);
    }

    fn open(&self, n: u64, part: FramePart, bytes: &mut [u8], tag: [u8; TAG_BYTES]) -> Result<(), Forged> {
        let opened =
            self.key.open_in_place_separate_tag(nonce(n, part), Aad::empty(), Tag::from(tag), bytes, 0..);
        opened.map(drop).map_err(|_| Forged)
    }
}

/// Bytes that are copied at a time.
const COPY_BYTES: usize = 1024;

/// Copies what is to be sealed. A long copy is one string instruction where the CPU claims to be good at it, and on an
/// EPYC that drops to 2 GB/s for unlucky alignments. Parts that are too short for it always copy at 20 to 46 GB/s.
pub(crate) fn copy(into: &mut [u8], from: &[u8]) {
    let (whole, rest) = into.as_chunks_mut::<COPY_BYTES>();
    let (from, from_rest) = from.as_chunks::<COPY_BYTES>();
    for (into, from) in whole.iter_mut().zip(from) {
        *into = *from;
    }
    rest.copy_from_slice(from_rest);
}

/// A connection's two ends, for tests and for measuring.
pub(crate) fn pair() -> Result<(Seals, Seals), SecretError> {
    let (secret, one, two) = (Secret::random()?, KeyPair::new()?, KeyPair::new()?);
    let keys = (one.public, two.public);
    let one = one.agree(&keys.1, &secret, Role::Connector, &keys.0, &keys.1);
    let two = two.agree(&keys.0, &secret, Role::Acceptor, &keys.0, &keys.1);
    one.zip(two).ok_or(SecretError::NoRandom)
}

/// How fast one core seals and opens, in GB/s.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// Copying a segment out of the caller's memory and sealing it, as links do.
    pub seal_gbs: f64,
    /// Opening it in place.
    pub open_gbs: f64,
}

/// Measures segments of the length that large messages are cut into, for about a tenth of a second.
pub fn speed() -> Result<Speed, SecretError> {
    let (mut one, mut two) = pair()?;
    let source = vec![1; SEGMENT_BYTES_MAX];
    let (mut head, mut segment) = ([0; HEADER_BYTES + SEAL_BYTES], vec![0; SEGMENT_BYTES_MAX]);
    let (mut sealing, mut opening) = (Vec::new(), Vec::new());
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        let begun = Instant::now();
        copy(&mut segment, &source);
        one.out.seal(&mut head, &mut segment);
        sealing.push(begun.elapsed());
        let begun = Instant::now();
        let opened = two.into.open_head(&mut head).and_then(|()| two.into.open_payload(&mut segment));
        assert_eq!(opened, Ok(()), "what was sealed opens");
        opening.push(begun.elapsed());
    }
    let gbs = |mut times: Vec<Duration>| {
        times.sort_unstable();
        SEGMENT_BYTES_MAX as f64 / times[times.len() / 2].as_secs_f64() / 1e9
    };
    Ok(Speed { seal_gbs: gbs(sealing), open_gbs: gbs(opening) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::tests::secret;

    const HEAD: &[u8; 20] = b"which step, which op";

    /// A frame as it goes over the wire: the head and the payload.
    fn sealed(sealer: &mut Sealer, payload: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let mut head = [&HEAD[..], &[0; SEAL_BYTES]].concat();
        let mut payload = payload.to_vec();
        sealer.seal(&mut head, &mut payload);
        (head, payload)
    }

    fn open(opener: &mut Opener, (head, payload): &(Vec<u8>, Vec<u8>)) -> Result<Vec<u8>, Forged> {
        let (mut head, mut payload) = (head.clone(), payload.clone());
        opener.open_head(&mut head)?;
        assert_eq!(&head[..HEAD.len()], HEAD);
        opener.open_payload(&mut payload)?;
        Ok(payload)
    }

    #[test]
    fn what_is_sealed_opens_on_the_other_side_and_shows_nothing() {
        let (mut one, mut two) = pair().unwrap();
        for n in [0, 1, 1000, 70_000] {
            let payload: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
            for _ in 0..2 {
                let there = sealed(&mut one.out, &payload);
                let back = sealed(&mut two.out, &payload);
                assert!(there.0[..HEAD.len()] != HEAD[..] && (n < 16 || there.1 != payload));
                assert!(there.0 != back.0 && (n < 16 || there.1 != back.1), "a key for each direction");
                assert_eq!(open(&mut two.into, &there), Ok(payload.clone()));
                assert_eq!(open(&mut one.into, &back), Ok(payload.clone()));
            }
        }
    }

    #[test]
    fn what_is_changed_repeated_moved_or_sent_back_does_not_open() {
        let bits = |frame: &(Vec<u8>, Vec<u8>)| 8 * (frame.0.len() + frame.1.len());
        let (mut one, mut two) = pair().unwrap();
        let first = sealed(&mut one.out, b"some gradients");
        for bit in 0..bits(&first) {
            let mut bent = first.clone();
            match bit.checked_sub(8 * bent.0.len()) {
                None => bent.0[bit / 8] ^= 1 << (bit % 8),
                Some(bit) => bent.1[bit / 8] ^= 1 << (bit % 8),
            }
            // A fresh count each time: a payload that does not open ends a connection.
            two.into.n = 0;
            assert_eq!(open(&mut two.into, &bent), Err(Forged), "bit {bit}");
        }
        two.into.n = 0;
        let second = sealed(&mut one.out, b"some gradients");
        assert_eq!(open(&mut two.into, &second), Err(Forged), "the first was left out");
        assert!(open(&mut two.into, &first).is_ok());
        assert_eq!(open(&mut two.into, &first), Err(Forged), "repeated");
        assert_eq!(open(&mut two.into, &(second.0.clone(), first.1)), Err(Forged), "another frame's payload");
        two.into.n = 1;
        assert_eq!(open(&mut two.into, &(second.0.clone(), second.1[1..].to_vec())), Err(Forged), "cut");
        two.into.n = 1;
        assert_eq!(two.into.open_payload(&mut second.1.clone()), Err(Forged), "a payload without a head");
        assert!(two.into.open_ahead(0, &mut second.0.clone()).is_ok());
        two.into.n = 0;
        assert!(two.into.open_ahead(1, &mut second.0.clone()).is_ok(), "seen from a frame before");
        let mut mirror = sealed(&mut two.out, b"x");
        assert_eq!(two.into.open_head(&mut mirror.0), Err(Forged), "its own frame, sent back");
        assert_eq!(two.into.open_head(&mut []), Err(Forged));
    }

    #[test]
    fn copies_are_whole() {
        for n in [0, 1, COPY_BYTES - 1, COPY_BYTES, 3 * COPY_BYTES + 5] {
            let from: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
            let mut into = vec![9; n];
            copy(&mut into, &from);
            assert_eq!(into, from);
        }
    }

    /// Another secret, another field of a hello or another connection gives other keys.
    #[test]
    fn keys_are_bound_to_the_secret_and_to_all_that_was_said() {
        let check = |words: [&str; 2], hellos: [&[u8]; 2], opens: bool| {
            let (one, two) = (KeyPair::new().unwrap(), KeyPair::new().unwrap());
            let keys = (one.public, two.public);
            let one = one.agree(&keys.1, &secret(words[0]), Role::Connector, hellos[0], b"b").unwrap();
            let two = two.agree(&keys.0, &secret(words[1]), Role::Acceptor, hellos[1], b"b").unwrap();
            let (mut out, mut into) = (one.out, two.into);
            assert_eq!(open(&mut into, &sealed(&mut out, b"x")).is_ok(), opens, "{words:?} {hellos:?}");
        };
        check(["horse", "horse"], [b"a", b"a"], true);
        check(["horse", "house"], [b"a", b"a"], false);
        check(["horse", "horse"], [b"a", b"c"], false);
        let zero = KeyPair::new().unwrap().agree(&[0; 32], &secret("horse"), Role::Connector, b"a", b"b");
        assert!(zero.is_none(), "a key that would make the agreed number known");
        let (mut one, _) = pair().unwrap();
        let (_, mut other) = pair().unwrap();
        assert_eq!(open(&mut other.into, &sealed(&mut one.out, b"x")), Err(Forged));
    }
}
