//! Any two files as images and labels: an error or a set, raw or packed.

use flate2::read::MultiGzDecoder;
use polyreme_fuzz::mutate::Mutator;
use polyreme_fuzz::{InFile, Random, Target, scale};

use super::tests::{file, packed};
use super::*;
use crate::damage;

/// Both files as one input: labels with their length, then images.
fn joined(images: &[u8], labels: &[u8]) -> Vec<u8> {
    [&(labels.len() as u16).to_le_bytes(), labels, images].concat()
}

fn parted(input: &[u8]) -> (&[u8], &[u8]) {
    let Some((length, rest)) = input.split_first_chunk() else { return (input, &[]) };
    let (labels, images) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
    (images, labels)
}

/// Makes a header agree with the length of the file, and a packed file complete.
fn mended(part: &[u8], random: &mut Random) -> Vec<u8> {
    if part.starts_with(&[0x1f, 0x8b]) {
        let mut content = Vec::new();
        // As much of it as can still be unpacked.
        let _ = MultiGzDecoder::new(part).take(4096).read_to_end(&mut content);
        if !random.one_in(3) {
            Mutator { words: &[], bytes_max: 4096 }.change(&mut content, part, random);
        }
        return packed(&mended(&content, random));
    }
    let mut part = part.to_vec();
    let rank = part.get(3).map_or(0, |&rank| usize::from(rank));
    if random.one_in(3) || part.len() < 4 + 4 * rank || rank == 0 {
        return part;
    }
    let dims = part[4..4 + 4 * rank].chunks_exact(4).map(|d| u32::from_be_bytes(d.try_into().unwrap()));
    let n = dims.fold(1u64, |n, d| n.saturating_mul(d.into()));
    if n <= 4096 {
        part.resize(4 + 4 * rank + n as usize, 7);
    }
    part
}

#[test]
fn idx() {
    let (images, labels) = (file(&[3, 2, 4], &[9; 24]), file(&[3], &[1, 0, 4]));
    let planes = file(&[3, 3, 1, 2], &[7; 18]);
    let mend = |input: &mut Vec<u8>, random: &mut Random| {
        let (images, labels) = parted(input);
        *input = joined(&mended(images, random), &mended(labels, random));
    };
    let target = Target {
        name: "idx",
        corpus: vec![
            joined(&images, &labels),
            joined(&packed(&images), &packed(&labels)),
            joined(&planes, &packed(&labels)),
        ],
        words: &[b"\0\0\x08\x01", b"\0\0\x08\x03", b"\0\0\0\x03", b"\x1f\x8b\x08"],
        mend: &mend,
        // A packed header may promise as much as deflate can hold.
        memory: &|len| (64 << 10) + 2 * DEFLATE_RATIO_MAX * len,
    };
    let (images, labels) = (InFile::new("images"), InFile::new("labels"));
    target.run(|input| {
        let (i, l) = parted(input);
        let packed = i.starts_with(&[0x1f, 0x8b]);
        let set = Idx::open(images.with(i), labels.with(l)).map_err(|e| e.to_string())?;
        damage::read_all(&set).unwrap();
        set.intact().unwrap();
        // The set, written and read again.
        let Features::Image { channels, height, width, .. } = set.spec().features else { panic!("images") };
        let [n, c, h, w] = [set.len(), channels, height, width].map(|n| n as u32);
        let again = (file(&[n, c, h, w], set.images.elements()), file(&[n], set.labels.elements()));
        let again = Idx::open(images.with(&again.0), labels.with(&again.1)).unwrap();
        assert_eq!(again.spec(), set.spec());
        Ok(format!("{packed} {} {} {}", scale(set.len()), scale(channels), scale(height * width)))
    });
}
