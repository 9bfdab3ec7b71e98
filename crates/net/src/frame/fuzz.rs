//! Any bytes as a header: an error, or one that is the same when it is written and read again. The search finds a
//! reader that loses something.

use polyreme_fuzz::{BadInput, FuzzSummary, Random, ReadResult, Target};

use super::tests::{TAG, TERMS};
use super::*;

/// Repairs the checksum.
fn mend(input: &mut Vec<u8>, _: &mut Random) {
    input.resize(HEADER_BYTES, 0);
    let crc = crc32c::crc32c(&input[..52]);
    input[52..].copy_from_slice(&crc.to_le_bytes());
}

fn target<'a>(name: &'a str, mend: &'a dyn Fn(&mut Vec<u8>, &mut Random)) -> Target<'a> {
    let lent = Header { lent: true, payload_crc: 99, ..Header::of(&TAG, 3, 12, 4000) };
    let plain = Tag { op: FrameOp::Farewell, terms: Terms { algorithm: 0, ..TERMS }, ..TAG };
    Target {
        name,
        corpus: vec![
            lent.encode().to_vec(),
            Header::of(&plain, u64::MAX, 0, SEGMENT_BYTES_MAX).encode().to_vec(),
        ],
        words: &[b"PRF3", b"\xff\xff\xff\xff"],
        mend,
        memory: &|_| 4096,
    }
}

/// Reads a header with `decode`; encoding what was read must give the same bytes.
fn check(input: &[u8], decode: impl Fn(&[u8; HEADER_BYTES]) -> Result<Header, &'static str>) -> ReadResult {
    let header = decode(input.first_chunk().ok_or("too short")?)?;
    let expected = Header::of(&TAG, 3, 12, 4000);
    let differs = header.disagreement(&expected);
    assert_eq!(differs.is_none(), Header { lent: false, payload_crc: 0, ..header } == expected);
    let written = header.encode();
    assert_eq!(Header::decode(&written), Ok(header));
    // Three bits have no meaning; all others come back.
    let mut meant = *input.first_chunk::<HEADER_BYTES>().ok_or("too short")?;
    meant[6] &= 0xf1;
    assert_eq!(written[..52], meant[..52]);
    assert!(header.length <= LENGTH_MAX);
    Ok(differs.unwrap_or_default())
}

#[test]
fn frame_header() {
    target("frame header", &mend).run(|input| check(input, Header::decode));
}

/// Each mistake of a reader is found, and only because checksums are repaired.
#[test]
fn a_reader_of_headers_that_makes_mistakes_is_found() {
    type Twin = fn(&[u8; HEADER_BYTES]) -> Result<Header, &'static str>;
    let twins: [(&str, Twin); 3] = [
        ("reads counts of 32 bits", |bytes| {
            let header = Header::decode(bytes)?;
            Ok(Header { count: u64::from(header.count as u32), ..header })
        }),
        ("reserves what a header claims", |bytes| {
            let header = Header::decode(bytes)?;
            drop(Vec::<u8>::with_capacity(header.count.min(1 << 24) as usize));
            Ok(header)
        }),
        ("counts steps from one", |bytes| {
            let header = Header::decode(bytes)?;
            Ok(Header { step: header.step - 1 + 1, ..header })
        }),
    ];
    let hunt = |twin: Twin, mend| -> Result<FuzzSummary, BadInput> {
        target("broken header", mend).hunt(2000, 0, |input| check(input, twin))
    };
    for (what, twin) in twins {
        let BadInput { why, number, .. } = hunt(twin, &mend).expect_err(what);
        assert!(number >= 2, "{what}: the good headers do not show it");
        eprintln!("{what}: input {number}: {why}");
    }
    let blind = hunt(twins[2].1, &|_, _| {}).unwrap();
    assert!(blind.read * 2 < blind.inputs, "most inputs end at the checksum: {blind:?}");
}
