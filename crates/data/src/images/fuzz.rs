//! Any bytes as a PNG: pixels or an error, and grey agrees with the colours.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use polyreme_fuzz::mutate::{Mutator, shuffle};
use polyreme_fuzz::{Random, Target, scale};

use super::decode::decode_any;
use super::tests::reference;

const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";
/// Unpacked images are kept this short.
const UNPACKED_BYTES_MAX: u64 = 16 << 10;

type Chunk = ([u8; 4], Vec<u8>);

fn chunks(file: &[u8]) -> Vec<Chunk> {
    let (mut chunks, mut rest) = (Vec::new(), file.get(SIGNATURE.len()..).unwrap_or(&[]));
    while let Some((&[a, b, c, d, name @ ..], behind)) = rest.split_first_chunk::<8>() {
        let length = (u32::from_be_bytes([a, b, c, d]) as usize).min(behind.len());
        chunks.push((name, behind[..length].to_vec()));
        rest = behind.get(length + 4..).unwrap_or(&[]);
    }
    chunks
}

/// Changes chunks, or the lines of pixels inside them, and packs everything again.
fn mend(input: &mut Vec<u8>, random: &mut Random) {
    let mut parts = chunks(input);
    if parts.is_empty() {
        return;
    }
    let mutator = Mutator { words: &[], bytes_max: UNPACKED_BYTES_MAX as usize };
    let (at, to) = (random.below(parts.len()), random.below(parts.len()));
    match random.below(8) {
        0..3 => shuffle(&mut parts, random),
        3 => {
            let other = parts[to].1.clone();
            mutator.change(&mut parts[at].1, &other, random);
        }
        4 => repack(&mut parts, random, |pixels, random| {
            for _ in 0..1 + random.below(3) {
                mutator.change(pixels, &[], random);
            }
        }),
        5 | 6 => {
            // Another kind of image, with as many bytes as it takes.
            let Some((_, head)) = parts.iter_mut().find(|(name, head)| name == b"IHDR" && head.len() == 13)
            else {
                return;
            };
            head[..4].copy_from_slice(&(1 + random.below(20) as u32).to_be_bytes());
            head[4..8].copy_from_slice(&(1 + random.below(20) as u32).to_be_bytes());
            head[8] = *random.pick(&[1, 2, 4, 8, 16]);
            head[9] = *random.pick(&[0, 2, 3, 4, 6]);
            head[12] = u8::from(random.one_in(4));
            let [.., w, _, _, _, h, bits, colour, _, _, laced] = head[..] else { return };
            let samples = [1, 1, 3, 1, 2, 1, 4][usize::from(colour)];
            let line = |width: usize| 1 + (width * samples * usize::from(bits)).div_ceil(8);
            let (w, h) = (usize::from(w), usize::from(h));
            let lines = |x0: usize, y0: usize, dx: usize, dy: usize| match (
                w.saturating_sub(x0),
                h.saturating_sub(y0),
            ) {
                (0, _) | (_, 0) => 0,
                (w, h) => line(w.div_ceil(dx)) * h.div_ceil(dy),
            };
            let passes = [
                (0, 0, 8, 8),
                (4, 0, 8, 8),
                (0, 4, 4, 8),
                (2, 0, 4, 4),
                (0, 2, 2, 4),
                (1, 0, 2, 2),
                (0, 1, 1, 2),
            ];
            let n = match laced {
                0 => line(w) * h,
                _ => passes.iter().map(|&(x0, y0, dx, dy)| lines(x0, y0, dx, dy)).sum(),
            };
            repack(&mut parts, random, |pixels, random| {
                pixels.resize(n, 0);
                // The first byte of each line says how it is filtered.
                pixels.iter_mut().for_each(|byte| *byte %= if random.one_in(64) { 7 } else { 5 });
            });
        }
        _ => {}
    }
    *input = SIGNATURE.to_vec();
    for (name, body) in parts {
        let checked = [&name[..], &body].concat();
        input.extend((body.len() as u32).to_be_bytes());
        input.extend(&checked);
        input.extend(flate2_crc(&checked).to_be_bytes());
    }
}

fn flate2_crc(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Unpacks the pixels, changes them, and packs them into one chunk or two.
fn repack(parts: &mut Vec<Chunk>, random: &mut Random, change: impl FnOnce(&mut Vec<u8>, &mut Random)) {
    let Some(first) = parts.iter().position(|(name, _)| name == b"IDAT") else { return };
    let packed: Vec<u8> =
        parts.iter().filter(|(name, _)| name == b"IDAT").flat_map(|(_, body)| body.clone()).collect();
    let mut pixels = Vec::new();
    // As much of it as can still be unpacked.
    let _ = ZlibDecoder::new(&packed[..]).take(UNPACKED_BYTES_MAX).read_to_end(&mut pixels);
    change(&mut pixels, random);
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&pixels).unwrap();
    let packed = encoder.finish().unwrap();
    parts.retain(|(name, _)| name != b"IDAT");
    let cut = if random.one_in(2) { random.below(packed.len()) } else { packed.len() };
    let (one, two) = packed.split_at(cut);
    if !two.is_empty() {
        parts.insert(first, (*b"IDAT", two.to_vec()));
    }
    parts.insert(first, (*b"IDAT", one.to_vec()));
}

#[test]
fn png() {
    let target = Target {
        name: "png",
        corpus: ["alpha.png", "bits.png", "palette.png", "grown.png", "same.png", "odd.png"]
            .map(reference)
            .into(),
        words: &[
            b"IDAT", b"PLTE", b"tRNS", b"IEND", b"acTL", b"fcTL", b"fdAT", b"gAMA", b"iCCP", b"tEXt", b"eXIf",
        ],
        mend: &mend,
        // A bit may be a pixel of three channels, and deflate packs 1032 bytes into one; lines and limits of the decoder.
        memory: &|len| (1 << 20) + 1032 * 8 * 6 * len,
    };
    target.run(|input| {
        let (mut colour, mut grey) = (Vec::new(), Vec::new());
        let size = decode_any(input, false, &mut colour).map_err(|flaw| {
            assert!(flaw.offset <= input.len() as u64, "{flaw:?}");
            flaw.why
        })?;
        let again = decode_any(input, true, &mut grey).expect("what is read in colour is read in grey");
        assert_eq!((size.height, size.width), (again.height, again.width));
        for (i, pixel) in colour[..3 * size.pixels()].chunks_exact(3).enumerate() {
            let [r, g, b] = [pixel[0], pixel[1], pixel[2]].map(u32::from);
            assert_eq!(u32::from(grey[i]), (19_595 * r + 38_470 * g + 7_471 * b + 0x8000) >> 16, "pixel {i}");
        }
        let kind = input
            .get(24..29)
            .map_or(String::new(), |head| head.iter().map(|b| char::from(b'a' + b % 26)).collect());
        Ok(format!("{kind} {} {}", scale(size.height), scale(size.width)))
    });
}
