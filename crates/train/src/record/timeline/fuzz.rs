//! Any text as a timeline: an error, or a picture.

use std::path::Path;

use polyreme_fuzz::{Random, Target, json, scale};
use serde_json::Value;

use super::tests::{pipeline, text_of};
use super::{Trace, svg};

const WORDS: [&[u8]; 16] = [
    b"traceEvents",
    b"otherData",
    b"args",
    b"step",
    b"microbatch",
    b"chunk",
    b"receive",
    b"forward",
    b"wait",
    b"dur",
    b"ts",
    b"pid",
    b"X",
    b"M",
    b"process_name",
    b"1e300",
];

#[test]
fn timeline_file() {
    let mend = |input: &mut Vec<u8>, random: &mut Random| {
        let Ok(mut value) = serde_json::from_slice::<Value>(input) else { return };
        for _ in 0..random.below(4) {
            json::change(&mut value, &WORDS, random);
        }
        *input = value.to_string().into_bytes();
    };
    let target = Target {
        name: "timeline",
        corpus: vec![text_of(&pipeline(2, 2)).into_bytes(), b"{\"traceEvents\":[]}".to_vec()],
        words: &WORDS,
        mend: &mend,
        // A span takes more than its text, and a bar some hundred bytes of picture.
        memory: &|len| (256 << 10) + 64 * len,
    };
    target.run(|input| {
        let trace = Trace::from_text(Path::new("trace.json"), input).map_err(|e| e.to_string())?;
        let step = trace.step(None).map_err(|e| e.to_string())?;
        let (rows, bars) = (step.rows.len(), step.rows.iter().map(|row| row.bars.len()).sum());
        assert!(step.rows.iter().all(|row| (0.0..=1.0).contains(&row.idle)));
        let picture = svg(&[step]);
        assert!(!picture.contains("NaN") && !picture.contains("inf\""), "{picture}");
        Ok(format!("{} {}", scale(rows), scale(bars)))
    });
}
