//! Tests of the search itself: it finds mistakes that a reader could make behind a checksum.

use std::hint::black_box;
use std::time::Duration;

use super::*;
use crate::hunt::processor_time;

/// What is wrong with a reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReaderBug {
    /// Trusts a length without checking that the bytes are there.
    Believes,
    /// Reserves as much memory as a count says.
    Reserves,
    /// Loops as often as a count says.
    Counts,
    /// Adds lengths in an integer that is too small.
    Overflows,
    /// Writes something else than it read.
    Forgets,
    /// Fails on what no valid example has.
    Assumes,
}

/// A record: a text, or numbers.
#[derive(Clone, PartialEq, Debug)]
enum Record {
    Text(String),
    Numbers(Vec<u32>),
}

const MAGIC: &[u8] = b"TWIN";

fn sum(bytes: &[u8]) -> [u8; 4] {
    bytes.iter().fold(1u32, |sum, &b| sum.wrapping_mul(16_777_619) ^ u32::from(b)).to_le_bytes()
}

fn take<'a>(from: &mut &'a [u8], n: usize, bug: Option<ReaderBug>) -> Result<&'a [u8], String> {
    if bug != Some(ReaderBug::Believes) && n > from.len() {
        return Err("cut off".into());
    }
    let (taken, rest) = from.split_at(n);
    *from = rest;
    Ok(taken)
}

/// Reads records: magic, then for each a kind, a length (or a count of four bytes) and what it says, then a checksum.
fn read(input: &[u8], bug: Option<ReaderBug>) -> Result<Vec<Record>, String> {
    let rest = input.strip_prefix(MAGIC).ok_or("another file")?;
    let (mut rest, found) = rest.split_last_chunk().ok_or("too short")?;
    if *found != sum(rest) {
        return Err("a checksum".into());
    }
    let (mut records, mut total) = (Vec::new(), 0u8);
    while !rest.is_empty() {
        match take(&mut rest, 1, None)?[0] {
            1 => {
                let length = take(&mut rest, 1, None)?[0];
                if bug == Some(ReaderBug::Overflows) {
                    total += length;
                }
                let text = take(&mut rest, usize::from(length), bug)?;
                if bug == Some(ReaderBug::Assumes) {
                    assert!(!text.contains(&b'/'), "a path in a name");
                }
                records.push(Record::Text(String::from_utf8(text.to_vec()).map_err(|_| "no text")?));
            }
            2 => {
                let count = u32::from_le_bytes(take(&mut rest, 4, None)?.try_into().unwrap());
                if bug == Some(ReaderBug::Reserves) {
                    black_box(Vec::<u32>::with_capacity(count as usize / 8));
                }
                if bug == Some(ReaderBug::Counts) {
                    // Just long enough to be noticed.
                    let enough = processor_time() + Duration::from_millis(1100);
                    (0..count).take_while(|_| processor_time() < enough).for_each(drop);
                }
                let bytes = take(&mut rest, 4 * count as usize, None)?;
                let number = |b: &[u8]| u32::from_le_bytes(b.try_into().unwrap());
                records.push(Record::Numbers(bytes.chunks_exact(4).map(number).collect()));
            }
            kind => return Err(format!("kind {kind} is not known")),
        }
    }
    black_box(total);
    Ok(records)
}

fn write(records: &[Record], bug: Option<ReaderBug>) -> Vec<u8> {
    let mut body = Vec::new();
    for record in records {
        match record {
            Record::Text(text) => body.extend([&[1, text.len() as u8], text.as_bytes()].concat()),
            Record::Numbers(numbers) => {
                body.push(2);
                body.extend((numbers.len() as u32).to_le_bytes());
                let mask = if bug == Some(ReaderBug::Forgets) { 0xffff } else { u32::MAX };
                body.extend(numbers.iter().flat_map(|n| (n & mask).to_le_bytes()));
            }
        }
    }
    let sum = sum(&body);
    [MAGIC, &body, &sum].concat()
}

fn mend(input: &mut [u8]) {
    if input.len() >= 8 {
        let end = input.len() - 4;
        let sum = sum(&input[4..end]);
        input[end..].copy_from_slice(&sum);
        input[..4].copy_from_slice(MAGIC);
    }
}

fn hunt(bug: Option<ReaderBug>, mends: bool) -> Result<FuzzSummary, BadInput> {
    let records = [Record::Text("name".into()), Record::Numbers(vec![1, 2, 3]), Record::Text("äöü".into())];
    let target = Target {
        name: &format!("twin {bug:?} {mends}"),
        corpus: vec![write(&records, None), write(&records[1..2], None)],
        words: &[b"/", b"\x01\x04"],
        mend: if mends { &|input, _| mend(input) } else { &|_, _| {} },
        memory: &|len| 4096 + 64 * len,
    };
    target.hunt(20_000, 0, |input| {
        let records = read(input, bug)?;
        assert_eq!(
            read(&write(&records, bug), None).as_ref(),
            Ok(&records),
            "written and read again it differs"
        );
        Ok(format!("{} records", records.len()))
    })
}

#[test]
fn mistakes_are_found() {
    for (bug, says) in [
        (ReaderBug::Believes, "mid > len"),
        (ReaderBug::Reserves, "bytes of memory for an input of"),
        (ReaderBug::Counts, "s for an input of"),
        (ReaderBug::Overflows, "attempt to add with overflow"),
        (ReaderBug::Forgets, "written and read again it differs"),
        (ReaderBug::Assumes, "a path in a name"),
    ] {
        let BadInput { input, why, number } =
            hunt(Some(bug), true).expect_err(&format!("{bug:?} is not found"));
        assert!(why.contains(says), "{bug:?} is found as {why:?}");
        eprintln!("{bug:?}: input {number}, {} bytes: {why}", input.len());
    }
}

/// Shows what repairing checksums is worth: without it the search gets nowhere.
#[test]
fn nothing_is_found_where_nothing_is_wrong_or_checksums_stay_broken() {
    let summary = hunt(None, true).unwrap_or_else(|found| panic!("{found:?}"));
    assert!(summary.read > 2000 && summary.kinds > 5, "{summary:?}");
    let summary = hunt(Some(ReaderBug::Assumes), false).unwrap_or_else(|found| panic!("{found:?}"));
    assert!(summary.read < 4000, "{summary:?}");
}

#[test]
fn a_seed_gives_the_same_inputs() {
    let inputs = |seed| {
        let mut all = Vec::new();
        let corpus = vec![b"[1, {\"a\": 2}]\nx = 3\n".to_vec()];
        let target =
            Target { name: "seeds", corpus, words: &[b"word"], mend: &|_, _| {}, memory: &|_| 1 << 20 };
        let check = |input: &[u8]| {
            all.push(input.to_vec());
            Err(format!("{}", input.len() % 7))
        };
        target.hunt(500, seed, check).unwrap();
        all
    };
    assert_eq!(inputs(1), inputs(1));
    assert_ne!(inputs(1), inputs(2));
}

#[test]
fn json_stays_json() {
    let mut random = Random::new(3);
    let mut value: serde_json::Value = serde_json::json!({"a": [1, 2.5, {"b": null}], "c": {"d": "text"}});
    for _ in 0..5000 {
        let kept = value.clone();
        json::change(&mut value, &[b"word"], &mut random);
        let text = value.to_string();
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap().to_string(), text);
        if text.len() < 4 || text.len() > 2000 {
            value = kept;
        }
    }
}
