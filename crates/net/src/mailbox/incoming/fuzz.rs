//! Any bytes on a connection of a mailbox: letters that were posted, or an error that says what is wrong.

use polyreme_fuzz::{Random, Target};

use super::*;

const CLASS: Class = Class::Data;
const GENERATION: u64 = 9;
const LETTER_BYTES_MAX: usize = 1 << 20;
/// How much there is room for at a time.
const ROOM_BYTES: usize = 1 << 16;

fn frame(what: What, sequence: u64, total: u64, payload: &[u8]) -> Vec<u8> {
    let head = Head {
        what,
        class: CLASS,
        generation: GENERATION,
        sequence,
        label: Label { kind: 3, ticket: 4, place: 5 },
        total,
        length: payload.len() as u32,
        payload_crc: checksum::of(payload),
    };
    [&head.encode(false)[..], payload].concat()
}

/// Repairs the checksums of heads and payloads of all frames.
fn mend(input: &mut [u8], random: &mut Random) {
    let mut at = 0;
    while at + HEAD_BYTES <= input.len() {
        let (head, rest) = input[at..].split_at_mut(HEAD_BYTES);
        let length = usize::from(head[48]) | usize::from(head[49]) << 8 | usize::from(head[50]) << 16;
        let length = length.min(rest.len());
        if !random.one_in(16) {
            head[52..56].copy_from_slice(&checksum::of(&rest[..length]).to_le_bytes());
        }
        if !random.one_in(16) {
            let crc = crc32c::crc32c(&head[..60]);
            head[60..].copy_from_slice(&crc.to_le_bytes());
        }
        at += HEAD_BYTES + length;
    }
}

#[test]
fn letters() {
    let close = |n| frame(What::Close, n, 0, &[]);
    let target = Target {
        name: "letters",
        corpus: vec![
            [frame(What::Part, 0, 40, &[7; 40]), frame(What::Part, 1, 0, &[]), close(2)].concat(),
            [frame(What::Part, 0, 70, &[7; 40]), frame(What::Part, 1, 70, &[8; 30]), close(2)].concat(),
            [frame(What::Part, 0, 70, &[7; 40]), close(1)].concat(),
        ],
        words: &[b"PRL1", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\0\0\x10\0", b"\x02", b"\x28"],
        mend: &|input, random| mend(input, random),
        // Nothing beyond what there is room for, however long a letter says that it is.
        memory: &|len| 2 * ROOM_BYTES + 64 * len,
    };
    target.run(|mut input| {
        let mut incoming = Incoming::new(CLASS, GENERATION, LETTER_BYTES_MAX);
        let (mut n_letters, mut n_bytes, all) = (0, 0, input.len());
        let mut admit = |bytes: usize| {
            assert!(bytes <= LETTER_BYTES_MAX, "{bytes} bytes are asked for");
            Ok((bytes <= ROOM_BYTES).then(|| Vec::with_capacity(bytes)))
        };
        loop {
            match incoming.pull(&mut input, None, &mut admit) {
                Ok(Came::Frame) => {}
                Ok(Came::Letter(_, memory, length)) => {
                    assert!(length <= memory.len());
                    (n_letters, n_bytes) = (n_letters + 1, n_bytes + length);
                    assert!(n_bytes <= all, "more bytes than came");
                }
                Ok(Came::NoRoom) => return Ok(format!("no room behind {n_letters}")),
                Ok(Came::Close) => return Ok(format!("closed behind {n_letters}")),
                Ok(Came::Nothing) => panic!("a stream that ended has nothing more"),
                Err(LineTrouble::Gone) => return Ok(format!("gone behind {n_letters}")),
                Err(LineTrouble::Damaged(why) | LineTrouble::Disagrees(why)) => return Err(why),
                Err(LineTrouble::NoMemory(bytes)) => panic!("{bytes} bytes were not refused"),
            }
        }
    });
}
