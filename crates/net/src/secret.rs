//! The secret that the ranks of a job share, and how they prove it without revealing it.
//!
//! Both sides of a connection prove it, each over everything that both sent so far and under its own role. A reflected
//! proof has the wrong role; a replayed one covers other keys. An eavesdropper can test guesses against a proof
//! offline, so a secret is 256 random bits and never words.

use std::fmt;

use ring::hkdf;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use thiserror::Error;

/// Bytes of a secret, of a public key and of a proof.
pub const SECRET_BYTES: usize = 32;

/// How the placeholder for a secret in the manifests of `deploy` begins.
const PLACEHOLDER: &str = "change me";

/// The job's secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; SECRET_BYTES]);

/// Why there is no secret.
#[derive(Debug, Error)]
pub enum SecretError {
    /// The manifest's placeholder was not replaced.
    #[error(
        "the secret is still the placeholder `{PLACEHOLDER}` of the manifest: put 64 hexadecimal digits in its place, as \
         `openssl rand -hex 32` prints them"
    )]
    Placeholder,
    /// Words can be guessed.
    #[error(
        "a job secret is 64 hexadecimal digits and this one is not ({chars} characters; words can be guessed): take what \
         `openssl rand -hex 32` prints, the same for every rank"
    )]
    NotHex {
        /// How long it is.
        chars: usize,
    },
    /// The system gave no random bytes.
    #[error("the system gave no random bytes for a secret")]
    NoRandom,
}

/// Which end of a connection proves the secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// The end that connected.
    Connector,
    /// The end that listened.
    Acceptor,
}

impl Role {
    fn label(self) -> &'static [u8] {
        match self {
            Role::Connector => b"polyreme connector 2\0",
            Role::Acceptor => b"polyreme acceptor 2\0",
        }
    }
}

impl Secret {
    /// A new one.
    pub fn random() -> Result<Secret, SecretError> {
        let mut bytes = [0; SECRET_BYTES];
        SystemRandom::new().fill(&mut bytes).map_err(|_| SecretError::NoRandom)?;
        Ok(Secret(bytes))
    }

    /// Parses 64 hexadecimal digits.
    pub fn from_text(text: &str) -> Result<Secret, SecretError> {
        let text = text.trim();
        if let Some(bytes) = from_hex(text) {
            return Ok(Secret(bytes));
        }
        let placeholder = text.get(..PLACEHOLDER.len()).is_some_and(|t| t.eq_ignore_ascii_case(PLACEHOLDER));
        match placeholder {
            true => Err(SecretError::Placeholder),
            false => Err(SecretError::NotHex { chars: text.chars().count() }),
        }
    }

    /// As 64 hex digits, for [`Secret::from_text`] in another process. Keep it out of logs and command lines.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Proof that this end knows the secret, over what both ends sent and under this end's role.
    pub(crate) fn proof(&self, role: Role, connector: &[u8], acceptor: &[u8]) -> [u8; SECRET_BYTES] {
        hmac::sign(&self.key(), &transcript(role.label(), connector, acceptor))
            .as_ref()
            .try_into()
            .expect("SHA-256 has 32 bytes")
    }

    /// Whether that end proved it. Takes the same time for every wrong proof.
    pub(crate) fn proved(&self, proof: &[u8], role: Role, connector: &[u8], acceptor: &[u8]) -> bool {
        hmac::verify(&self.key(), &transcript(role.label(), connector, acceptor), proof).is_ok()
    }

    /// What only the two ends of a connection know, derived from the secret, the key exchange and the transcript. The
    /// keys of each direction come from it.
    pub(crate) fn session(&self, agreed: &[u8]) -> hkdf::Prk {
        hkdf::Salt::new(hkdf::HKDF_SHA256, &self.0).extract(agreed)
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0)
    }
}

/// Shows no byte of it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What both ends sent, under a label. Lengths keep the boundary between the two unambiguous.
fn transcript(label: &[u8], connector: &[u8], acceptor: &[u8]) -> Vec<u8> {
    let length = |said: &[u8]| (said.len() as u64).to_le_bytes();
    [label, &length(connector), connector, &length(acceptor), acceptor].concat()
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
pub(crate) mod tests {
    use ring::digest::{SHA256, digest};

    use super::*;

    /// The secret that a word stands for in tests.
    pub(crate) fn secret(word: &str) -> Secret {
        Secret(digest(&SHA256, word.as_bytes()).as_ref().try_into().unwrap())
    }

    #[test]
    fn only_digits_are_a_secret_and_a_placeholder_is_called_one() {
        let hex = "00ff".repeat(16);
        for text in [hex.clone(), hex.to_uppercase(), format!(" {hex}\n")] {
            assert_eq!(Secret::from_text(&text).unwrap().to_hex(), hex, "{text:?}");
        }
        let rows = [
            ("", "64 hexadecimal digits and this one is not (0 characters"),
            ("correct horse battery staple", "openssl rand -hex 32"),
            (&hex[1..], "(63 characters"),
            (&format!("{}g", &hex[1..]), "(64 characters"),
            ("change me: 64 hexadecimal digits", "still the placeholder"),
            (" Change me", "still the placeholder"),
        ];
        for (text, says) in rows {
            let e = Secret::from_text(text).unwrap_err().to_string();
            assert!(e.contains(says) && e.contains("openssl rand -hex 32"), "{text:?}: {e}");
            assert!(text.is_empty() || !e.contains("horse"), "a secret stands in no message");
        }
        assert_ne!(Secret::random().unwrap(), Secret::random().unwrap());
        assert!(!format!("{:?}", Secret::from_text(&hex).unwrap()).contains("ff"));
    }

    /// What a proof must not prove: another role, another transcript, another boundary, another secret.
    #[test]
    fn a_proof_holds_only_for_what_was_said() {
        let secret = secret("correct horse");
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
        check(&super::tests::secret("other horse"), &proof, Role::Connector, b"abc", b"de", false);
    }
}
