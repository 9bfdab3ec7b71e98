//! Any bytes as a JPEG: pixels or nothing from the fast decoder, pixels or an error from the other one.

use polyreme_fuzz::mutate::{Mutator, shuffle};
use polyreme_fuzz::{Random, Target, scale};

use super::tests::{COMMON, file, whole};
use super::*;
use crate::images::decode::{self, decode_any};

/// The segments before the scan, each as its marker and its body, and the rest.
fn segments(file: &[u8]) -> (Vec<(u8, Vec<u8>)>, Vec<u8>) {
    let (mut parts, mut rest) = (Vec::new(), file.get(2..).unwrap_or(&[]));
    while let [0xff, marker, high, low, ..] = *rest {
        let length = usize::from(u16::from_be_bytes([high, low])).clamp(2, rest.len() - 2);
        parts.push((marker, rest[4..2 + length].to_vec()));
        rest = &rest[2 + length..];
        if marker == 0xda {
            break;
        }
    }
    (parts, rest.to_vec())
}

/// Changes segments as a whole, or inside with the length following, or bits of the scan.
fn mend(input: &mut Vec<u8>, random: &mut Random) {
    let (mut parts, mut scan) = segments(input);
    if parts.is_empty() {
        return;
    }
    let (at, to) = (random.below(parts.len()), random.below(parts.len()));
    match random.below(8) {
        0..3 => shuffle(&mut parts, random),
        3 => {
            let other = parts[to].1.clone();
            Mutator { words: &[], bytes_max: 1024 }.change(&mut parts[at].1, &other, random);
        }
        4 => {
            // Sides, and how components are sampled.
            let frame = parts.iter_mut().find(|(marker, _)| matches!(marker, 0xc0..=0xc2));
            if let Some((_, body)) = frame.filter(|(_, body)| body.len() > 8) {
                let at = *random.pick(&[1, 2, 3, 4, 5, 7]);
                body[at] =
                    *random.pick(&[0, 1, 2, 3, 8, 9, 16, 17, 33, 0x11, 0x12, 0x21, 0x22, 0x41, 64, 255]);
            }
        }
        _ => {
            for _ in 0..1 + random.below(4) {
                let at = random.below(scan.len());
                if let Some(byte) = scan.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
        }
    }
    *input = vec![0xff, 0xd8];
    for (marker, body) in parts {
        input.extend([0xff, marker]);
        input.extend((body.len() as u16 + 2).to_be_bytes());
        input.extend(body);
    }
    input.extend(scan);
    if !random.one_in(8) && !input.ends_with(&[0xff, END]) {
        input.extend([0xff, END]);
    }
}

#[test]
fn jpeg() {
    let names = COMMON.iter().chain(&["progressive.jpg", "cmyk.jpg"]);
    let target = Target {
        name: "jpeg",
        corpus: names.map(|name| file(name)).collect(),
        words: &[
            b"\xff\xd8",
            b"\xff\xd9",
            b"\xff\xda",
            b"\xff\xdd\0\x04",
            b"\xff\xd0",
            b"\xff\xc2",
            b"\xff\0",
            b"Adobe",
            b"JFIF\0",
        ],
        mend: &mend,
        // Planes, pixels, and the coefficients of the other decoder: 32 bytes a pixel.
        memory: &|len| (1 << 20) + 32 * decode::JPEG_PIXELS_A_BYTE_MAX * len,
    };
    let mut used = Decoder::default();
    let mut scalar = Decoder { isa: Isa::SCALAR, ..Decoder::default() };
    target.run(|input| {
        let mut pixels = Vec::new();
        let mut answer = String::new();
        for (grey, channels) in [(false, 3), (true, 1)] {
            let Some((size, got)) = whole(&mut used, input, grey) else { continue };
            // A file gives the same pixels whatever was decoded before and with any instruction set; and so does a part of it.
            let anew = whole(&mut scalar, input, grey).expect("the same file is read again");
            assert_eq!((size.height, size.width), (anew.0.height, anew.0.width));
            assert!(got == anew.1, "scalar and vector code differ, grey {grey}");
            let part = ResizePart { rows: size.height / 3..size.height, columns: size.width / 2..size.width };
            let (first, n) = (part.rows.start, part.columns.len() * channels);
            let mut out = vec![0; part.rows.len() * n];
            let start = part.columns.start * channels;
            used.decode(input, grey, |_| part).expect("a part of it").write(&mut out);
            for (i, row) in out.chunks_exact(n).enumerate() {
                let at = (first + i) * size.width * channels + start;
                assert!(row == &got[at..at + n], "row {i} of a part, grey {grey}");
            }
            answer = format!("fast {} {} ", scale(size.height), scale(size.width));
        }
        let size = decode_any(input, input.len() % 2 == 0, &mut pixels);
        match (size, answer.is_empty()) {
            (Ok(size), _) => Ok(format!("{answer}other {} {}", scale(size.height), scale(size.width))),
            (Err(_), false) => Ok(answer),
            (Err(flaw), true) => {
                assert!(flaw.offset <= input.len() as u64, "{flaw:?}");
                Err(flaw.why)
            }
        }
    });
}
