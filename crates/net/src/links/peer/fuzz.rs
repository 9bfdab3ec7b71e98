//! Any bytes on a connection between ranks: expected frames, or an error that says what is wrong.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use polyreme_fuzz::{Random, Target};

use super::*;
use crate::frame::Terms;
use crate::report::Cause;
use crate::system::Os;

const TERMS: Terms = Terms { reducer: 1, algorithm: 2, root: 3, cuts: 4, turn: 5 };
const TAG: Tag = Tag { step: 7, op: FrameOp::AllReduce, dtype: 2, count: 20, terms: TERMS };
const PAYLOAD: [u8; 40] = [7; 40];
const GENERATION: u64 = 9;

fn frame(header: Header, payload: &[u8]) -> Vec<u8> {
    [&Header { payload_crc: checksum::of(payload), ..header }.encode()[..], payload].concat()
}

/// Repairs the checksums of headers and payloads of all frames.
fn mend(input: &mut [u8], random: &mut Random) {
    let mut at = 0;
    while at + HEADER_BYTES <= input.len() {
        let (head, rest) = input[at..].split_at_mut(HEADER_BYTES);
        let length = usize::from(head[40]) | usize::from(head[41]) << 8 | usize::from(head[42]) << 16;
        let length = length.min(rest.len());
        if !random.one_in(16) {
            head[48..52].copy_from_slice(&checksum::of(&rest[..length]).to_le_bytes());
        }
        if !random.one_in(16) {
            let crc = crc32c::crc32c(&head[..52]);
            head[52..].copy_from_slice(&crc.to_le_bytes());
        }
        at += HEADER_BYTES + length;
    }
}

#[test]
fn frames() {
    let report = Report { rank: 3, host: "b".into(), step: 17, op: "all-reduce".into(), cause: Cause::Gone };
    let text = farewell::encode(&report);
    let failed = farewell::encode(&Report { cause: Cause::Failed { why: "no room".into() }, ..report });
    let bye = |n, text: &[u8]| {
        frame(Header::of(&Tag { op: FrameOp::Farewell, ..TAG }, GENERATION, n, text.len()), text)
    };
    let good = |n| frame(Header::of(&TAG, GENERATION, n, PAYLOAD.len()), &PAYLOAD);
    let lent = frame(Header { lent: true, ..Header::of(&TAG, GENERATION, 0, PAYLOAD.len()) }, &PAYLOAD);
    let target = Target {
        name: "frames",
        corpus: vec![
            [good(0), good(1), good(2)].concat(),
            [good(0), bye(1, &text)].concat(),
            [lent, bye(1, &failed)].concat(),
        ],
        words: &[b"PRF3", b"\xff\xff\xff", b"\x28\0\0", b"\xfe", b"\xff", b"\x02"],
        mend: &|input, random| mend(input, random),
        // A segment to pass over what a peer that ended had still sent.
        memory: &|len| 2 * SEGMENT_BYTES_MAX + 64 * len,
    };
    let system: Arc<dyn System> = Arc::new(Os);
    target.run(|input| {
        let (mut give, take) = UnixStream::pair().unwrap();
        give.write_all(input).unwrap();
        drop(give);
        let stream = Stream::Tcp(TcpStream::from(OwnedFd::from(take)));
        let mut peer = LinkPeer::new(Connection { stream, seals: None }, system.clone(), true);
        let mut whole = 0;
        let trouble = loop {
            let mut target = [0; PAYLOAD.len()];
            let expected = Header::of(&TAG, GENERATION, peer.heard, PAYLOAD.len());
            let step = peer.pull(&mut target, &expected).and_then(|step| match step {
                IoStep::Whole => peer.checked(checksum::of(&target)).map(drop),
                other => panic!("{other:?} on a closed connection"),
            });
            match step {
                Err(trouble) => break trouble,
                Ok(()) => {
                    // It is a part of the input, and it is where frames are.
                    let at = whole * (HEADER_BYTES + PAYLOAD.len()) + HEADER_BYTES;
                    assert_eq!(input.get(at..at + target.len()), Some(&target[..]));
                    whole += 1;
                }
            }
        };
        // What came last may not be what its header says.
        assert!(peer.heard - whole as u64 <= 1, "{} frames are heard, and {whole} are whole", peer.heard);
        match trouble {
            LinkTrouble::Gone => Ok("gone".into()),
            LinkTrouble::Farewell(report) => {
                // Texts longer than any that is sent are cut when they are written.
                let written = farewell::encode(&report);
                let again = farewell::decode(&written).expect("what is written is read");
                assert_eq!(farewell::encode(&again), written);
                Ok(format!("farewell {:?}", report.cause))
            }
            LinkTrouble::Damaged(why) | LinkTrouble::Disagrees(why) => Err(why),
        }
    });
}
