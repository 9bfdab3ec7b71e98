//! Any bytes as a control message: an error, or a message that is the same when it is written and read again.

use polyreme_fuzz::{BadInput, ReadResult, Target};

use super::super::bytes::TEXT_BYTES_MAX;
use super::tests::samples;
use super::*;

fn target(name: &str) -> Target<'_> {
    Target {
        name,
        // The longest of them would only slow this down.
        corpus: samples().iter().map(Message::encode).filter(|bytes| bytes.len() < 4096).collect(),
        words: &[b"\0\0\0\0", b"\x04\0\0\0", b"127.0.0.1:1", b"[::1]:65535", b"\xc3\xa4", b"\xff"],
        mend: &|_, _| {},
        memory: &|len| 4096 + 64 * len,
    }
}

fn check(input: &[u8], decode: impl Fn(&[u8]) -> Result<Message, Malformed>) -> ReadResult {
    let message = decode(input).map_err(|Malformed| "malformed")?;
    let written = message.encode();
    assert_eq!(Message::decode(&written).as_ref(), Ok(&message));
    assert!(written.len() <= input.len() + TEXT_BYTES_MAX, "{message:?}");
    let kind = format!("{message:?}");
    Ok(kind.chars().filter(|c| !c.is_ascii_punctuation()).take(40).collect())
}

#[test]
fn control_message() {
    target("control message").run(|input| check(input, Message::decode));
}

/// The search finds a reader that reserves as much memory as a message claims.
#[test]
fn a_count_that_is_believed_is_found() {
    let believes = |bytes: &[u8]| {
        if let [8, _, _, _, _, _, _, _, _, count @ ..] = bytes
            && let Some(count) = count.first_chunk()
        {
            drop(Vec::<Vec<u8>>::with_capacity(u32::from_le_bytes(*count) as usize / 16));
        }
        Message::decode(bytes)
    };
    let found = target("believed count").hunt(2000, 0, |input| check(input, believes));
    let BadInput { why, number, .. } = found.expect_err("the bug is found");
    assert!(why.contains("bytes of memory for an input of"), "input {number}: {why}");
}
