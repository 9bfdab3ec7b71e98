//! Any bytes from a peer: refused or waited for, but never proved without the secret.

use std::io::Cursor;

use polyreme_fuzz::{Random, Target};

use super::tests::{Tape, hello};
use super::*;
use crate::secret::tests::secret;

#[test]
fn a_hello() {
    let other =
        Hello { purpose: Purpose::Control, here: true, encrypt: Encrypt::Never, key: [9; 32], ..hello(2) };
    // Magic and version: what is behind them is what matters.
    let mend = |input: &mut Vec<u8>, random: &mut Random| {
        input.resize(HELLO_BYTES, 0);
        if !random.one_in(8) {
            input[..10].copy_from_slice(&hello(0).to_bytes()[..10]);
        }
    };
    let target = Target {
        name: "hello",
        corpus: vec![hello(1).to_bytes().to_vec(), other.to_bytes().to_vec()],
        words: &[b"POLYREME", b"\x02\0", b"\x01\x80"],
        mend: &mend,
        memory: &|_| 4096,
    };
    target.run(|input| {
        let bytes = input.first_chunk().ok_or("too short")?;
        let read = Hello::from_bytes(bytes).map_err(|turned| format!("{turned:?}"))?;
        assert_eq!(read.to_bytes(), *bytes);
        for mine in [hello(0), other] {
            assert_eq!(mine.encrypts(&read), read.encrypts(&mine), "both sides decide alike");
        }
        Ok(format!("{:?} {:?} {}", read.purpose, read.encrypt, read.here))
    });
}

/// What a stranger says to both sides of a handshake. It has seen handshakes of the job, and not the secret.
#[test]
fn a_handshake() {
    let seen = {
        let [mut one, mut two] = [(Role::Connector, 1), (Role::Acceptor, 0)]
            .map(|(role, rank)| Handshake::new(role, secret("job"), hello(rank)).unwrap());
        let mut tape = Tape { says: Cursor::new(Vec::new()), hears: Vec::new() };
        let (mut said, mut heard) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            one.advance(&mut tape);
            said.append(&mut tape.hears.clone());
            tape = Tape { says: Cursor::new(std::mem::take(&mut tape.hears)), hears: Vec::new() };
            two.advance(&mut tape);
            heard.append(&mut tape.hears.clone());
            tape = Tape { says: Cursor::new(std::mem::take(&mut tape.hears)), hears: Vec::new() };
        }
        [said, heard]
    };
    assert_eq!(seen.each_ref().map(Vec::len), [HELLO_BYTES + SECRET_BYTES, HELLO_BYTES + VERDICT_BYTES]);
    let mend = |input: &mut Vec<u8>, random: &mut Random| {
        if !random.one_in(8) && input.len() >= 10 {
            input[..10].copy_from_slice(&seen[0][..10]);
        }
    };
    let target = Target {
        name: "handshake",
        corpus: seen.to_vec(),
        words: &[b"POLYREME", b"\x02\0", b"\x01\x80"],
        mend: &mend,
        memory: &|_| 8192,
    };
    target.run(|input| {
        let mut answers = String::new();
        for role in [Role::Connector, Role::Acceptor] {
            let mut side = Handshake::new(role, secret("job"), hello(0)).unwrap();
            let mut tape = Tape { says: Cursor::new(input.to_vec()), hears: Vec::new() };
            let progress = side.advance(&mut tape);
            assert!(!matches!(progress, HelloProgress::Proved(_)), "a stranger is proved");
            assert!(side.take_seals().is_none());
            assert!(
                tape.says.position() <= (HELLO_BYTES + VERDICT_BYTES) as u64,
                "more is read than is needed"
            );
            answers.push_str(&format!("{progress:?} "));
        }
        // A handshake that consumed all of the input counts as read.
        if answers.contains("WrongSecret") { Ok(answers) } else { Err(answers) }
    });
}
