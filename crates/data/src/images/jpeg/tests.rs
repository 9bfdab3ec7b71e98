//! The common kinds of JPEG against PIL's pixels, parts against the whole, and what is left to the other decoder.

use std::fs;
use std::path::Path;

use super::*;
use crate::images::resize::Lines;

pub(super) fn file(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("references").join(name)).unwrap()
}

pub(super) fn whole(decoder: &mut Decoder, file: &[u8], grey: bool) -> Option<(ImageSize, Vec<u8>)> {
    let mut rows = decoder.decode(file, grey, ResizePart::whole)?;
    let size = rows.size();
    let mut pixels = vec![0; size.pixels() * if grey { 1 } else { 3 }];
    rows.write(&mut pixels);
    Some((size, pixels))
}

pub(super) const COMMON: [&str; 8] = [
    "baseline.jpg",
    "whole.jpg",
    "restarts.jpg",
    "grey.jpg",
    "half.jpg",
    "upright.jpg",
    "narrow.jpg",
    "coarse.jpg",
];

#[test]
fn common_files_are_to_the_bit_as_pil_decodes_them() {
    // One decoder for all: nothing of one file may leak into the next.
    let mut decoder = Decoder::default();
    for isa in [Isa::detect(), Isa::SCALAR] {
        decoder.isa = isa;
        for name in COMMON {
            let want = file(&format!("{name}.rgb"));
            let (size, got) = whole(&mut decoder, &file(name), false).expect(name);
            assert_eq!(want[..4], (size.height as u32).to_le_bytes(), "{name}");
            assert_eq!(want[4..8], (size.width as u32).to_le_bytes(), "{name}");
            assert!(got == want[8..], "{name}, {}", isa.name());
        }
    }
}

#[test]
fn a_part_is_that_of_the_whole() {
    let mut decoder = Decoder::default();
    for name in COMMON {
        for (grey, channels) in [(false, 3), (true, 1)] {
            let (size, pixels) = whole(&mut decoder, &file(name), grey).expect(name);
            let ranges = |n: usize| [0..n, 0..1, n - 1..n, n / 3..n - n / 3, n / 2..n, 0..n / 2 + 1];
            for rows in ranges(size.height) {
                for columns in ranges(size.width) {
                    let part = ResizePart { rows: rows.clone(), columns: columns.clone() };
                    let mut got = decoder.decode(&file(name), grey, |_| part).expect(name);
                    // Once as a whole, and once by lines from top to bottom, some of them twice.
                    let mut copied = vec![0; rows.len() * columns.len() * channels];
                    got.write(&mut copied);
                    for (i, y) in rows.clone().enumerate() {
                        let at = (y * size.width + columns.start) * channels;
                        let want = &pixels[at..at + columns.len() * channels];
                        assert_eq!(
                            &copied[i * want.len()..][..want.len()],
                            want,
                            "{name} {rows:?} {columns:?}"
                        );
                        let (lines, stride) = got.lines(y..(y + 1 + i % 3).min(rows.end));
                        assert_eq!(&lines[..want.len()], want, "{name} {rows:?} {columns:?}");
                        if i % 3 > 0 && y + 1 < rows.end {
                            let below = &pixels[at + size.width * channels..][..want.len()];
                            assert_eq!(&lines[stride..stride + want.len()], below, "{name}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn other_kinds_and_broken_files_are_left_to_others() {
    let mut decoder = Decoder::default();
    let mut none = |what: &str, file: &[u8]| {
        assert!(whole(&mut decoder, file, false).is_none(), "{what}");
    };
    for name in ["progressive.jpg", "cmyk.jpg", "alpha.png"] {
        none(name, &file(name));
    }
    for name in COMMON {
        let good = file(name);
        for keep in 0..good.len() {
            none(name, &good[..keep]);
        }
    }
    let good = file("restarts.jpg");
    let with = |from: &[u8], to: &[u8]| {
        let at = good.windows(from.len()).position(|w| w == from).unwrap();
        [&good[..at], to, &good[at + from.len()..]].concat()
    };
    none("a restart is missing", &with(b"\xff\xd1", b""));
    none("restarts out of order", &with(b"\xff\xd1", b"\xff\xd3"));
    none("a byte too much", &with(b"\xff\xd1", b"\0\xff\xd1"));
    none("a scan too much", &with(b"\xff\xd9", b"\xff\xda"));
    none("too few rows", &with(&[0xff, 0xc0, 0, 17, 8, 0, 23], &[0xff, 0xc0, 0, 17, 8, 0, 7]));
    none("too many rows", &with(&[0xff, 0xc0, 0, 17, 8, 0, 23], &[0xff, 0xc0, 0, 17, 8, 0, 33]));
    none("no rows", &with(&[0xff, 0xc0, 0, 17, 8, 0, 23], &[0xff, 0xc0, 0, 17, 8, 0, 0]));
    none("12 bits", &with(&[0xff, 0xc0, 0, 17, 8], &[0xff, 0xc0, 0, 17, 12]));
    none("lossless", &with(&[0xff, 0xc0], &[0xff, 0xc3]));
    // Data after the image is accepted, and so are fill bytes before a marker.
    let good = [&with(b"\xff\xc0", b"\xff\xff\xff\xc0")[..], b"more"].concat();
    assert!(whole(&mut decoder, &good, false).is_some());
}

/// A grey strip of 300 blocks, each its own restart interval.
#[test]
fn a_file_of_three_hundred_restart_intervals_is_read() {
    let segment = |marker: u8, body: &[u8]| {
        [&[0xff, marker], &(body.len() as u16 + 2).to_be_bytes()[..], body].concat()
    };
    // One code of one bit: nothing changes, and the block ends.
    let codes = |class: u8| [&[class, 1][..], &[0; 15], &[0]].concat();
    let mut file = vec![0xff, 0xd8];
    file.extend(segment(0xdb, &[&[0][..], &[1; 64]].concat()));
    file.extend(segment(0xc0, &[8, (2400u16 >> 8) as u8, 2400u16 as u8, 0, 8, 1, 1, 0x11, 0]));
    file.extend(segment(0xc4, &codes(0)));
    file.extend(segment(0xc4, &codes(0x10)));
    file.extend(segment(0xdd, &[0, 1]));
    file.extend(segment(0xda, &[1, 1, 0, 0, 63, 0]));
    for interval in 0..300 {
        file.extend([0b0011_1111, 0xff, RESTART + (interval % 8) as u8]);
    }
    *file.last_mut().unwrap() = END;
    let (size, pixels) = whole(&mut Decoder::default(), &file, true).unwrap();
    assert_eq!((size.height, size.width), (2400, 8));
    assert!(pixels.iter().all(|&p| p == 128));
}
