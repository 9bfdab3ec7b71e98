//! What the ranks of a job know and strangers do not, and how they prove it without saying it.
//!
//! Both sides of a connection prove it, each over everything that both said so far and under its own role. A proof
//! sent back to its sender has the wrong role; one from an earlier connection has the wrong nonces. It is proof of
//! who connects, not encryption: the network between hosts is trusted to carry what was sent.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use thiserror::Error;

/// Bytes of a secret, of a nonce and of a proof.
pub const SECRET_BYTES: usize = 32;
/// A passphrase shorter than this could be guessed by trying.
const PHRASE_CHARS_MIN: usize = 8;
/// Keeps hashed passphrases apart from other uses of the same hash.
const PHRASE_LABEL: &[u8] = b"polyreme passphrase 1\0";

/// The job's secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

/// Why there is no secret.
#[derive(Debug, Error)]
pub enum SecretError {
    /// Too short to keep anybody out.
    #[error("a job secret needs {PHRASE_CHARS_MIN} characters or more, and this one has {chars}")]
    TooShort {
        /// How long it is.
        chars: usize,
    },
    /// The system gave no random bytes.
    #[error("the system gave no random bytes for a secret: {0}")]
    NoRandom(String),
}

/// Which end of a connection proves the secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// The end that connected.
    Connector,
    /// The end that listened.
    Acceptor,
}

impl Secret {
    /// A new one.
    pub fn random() -> Result<Secret, SecretError> {
        Ok(Secret(nonce()?))
    }

    /// The one that a text stands for: 64 hex digits are the secret itself, anything else is a passphrase.
    pub fn from_text(text: &str) -> Result<Secret, SecretError> {
        let text = text.trim();
        if let Some(bytes) = from_hex(text) {
            return Ok(Secret(bytes));
        }
        let chars = text.chars().count();
        if chars < PHRASE_CHARS_MIN {
            return Err(SecretError::TooShort { chars });
        }
        let hash = Sha256::new().chain_update(PHRASE_LABEL).chain_update(text.as_bytes());
        Ok(Secret(hash.finalize().into()))
    }

    /// As 64 hex digits, for [`Secret::from_text`] in another process. Keep it out of logs and command lines.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Proof that this end knows the secret: over what both ends said, and under this end's role.
    pub(crate) fn proof(&self, role: Role, connector: &[u8], acceptor: &[u8]) -> [u8; SECRET_BYTES] {
        let label: &[u8] = match role {
            Role::Connector => b"polyreme connector 1\0",
            Role::Acceptor => b"polyreme acceptor 1\0",
        };
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("hmac takes keys of any length");
        mac.update(label);
        // The lengths keep the border between the two from moving.
        for said in [connector, acceptor] {
            mac.update(&(said.len() as u64).to_le_bytes());
            mac.update(said);
        }
        mac.finalize().into_bytes().into()
    }

    /// Whether that end proved it. Takes the same time for every wrong proof.
    pub(crate) fn proved(&self, proof: &[u8], role: Role, connector: &[u8], acceptor: &[u8]) -> bool {
        self.proof(role, connector, acceptor).as_slice().ct_eq(proof).into()
    }
}

/// Names no byte of it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Bytes that nobody saw before.
pub(crate) fn nonce() -> Result<[u8; SECRET_BYTES], SecretError> {
    let mut bytes = [0; SECRET_BYTES];
    getrandom::fill(&mut bytes).map_err(|e| SecretError::NoRandom(e.to_string()))?;
    Ok(bytes)
}

fn from_hex(text: &str) -> Option<[u8; SECRET_BYTES]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * SECRET_BYTES {
        return None;
    }
    let mut bytes = [0; SECRET_BYTES];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = (high * 16 + low) as u8;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_what_they_stand_for() {
        let hex = "00ff".repeat(16);
        let check = |text: &str, same_as: Option<&str>| match (Secret::from_text(text), same_as) {
            (Ok(a), Some(b)) => assert_eq!(a, Secret::from_text(b).unwrap(), "{text:?}"),
            (Err(SecretError::TooShort { .. }), None) => {}
            (got, _) => panic!("{text:?}: {got:?}"),
        };
        check(&hex, Some(&hex.to_uppercase()));
        check(&format!(" {hex}\n"), Some(&hex));
        check("correct horse", Some("correct horse "));
        check("", None);
        check("  1234567  ", None);
        assert_eq!(Secret::from_text(&hex).unwrap().to_hex(), hex);
        assert_ne!(Secret::from_text("correct horse").unwrap(), Secret::from_text("correct hors3").unwrap());
        assert_ne!(Secret::random().unwrap(), Secret::random().unwrap());
        assert!(!format!("{:?}", Secret::from_text(&hex).unwrap()).contains("ff"));
    }

    /// Everything that a proof must not prove: another role, other words, another border, another secret.
    #[test]
    fn a_proof_holds_only_for_what_was_said() {
        let secret = Secret::from_text("correct horse").unwrap();
        let proof = secret.proof(Role::Connector, b"abc", b"de");
        let check = |secret: &Secret, proof: &[u8], role, connector: &[u8], acceptor: &[u8], holds| {
            assert_eq!(secret.proved(proof, role, connector, acceptor), holds, "{connector:?} {acceptor:?}");
        };
        check(&secret, &proof, Role::Connector, b"abc", b"de", true);
        check(&secret, &proof, Role::Acceptor, b"abc", b"de", false);
        check(&secret, &proof, Role::Connector, b"ab", b"cde", false);
        check(&secret, &proof, Role::Connector, b"de", b"abc", false);
        check(&secret, &proof, Role::Connector, b"abd", b"de", false);
        check(&secret, &proof[..31], Role::Connector, b"abc", b"de", false);
        check(&secret, &[0; 32], Role::Connector, b"abc", b"de", false);
        check(&secret, &[], Role::Connector, b"abc", b"de", false);
        check(&Secret::from_text("other horse").unwrap(), &proof, Role::Connector, b"abc", b"de", false);
    }
}
