//! Any bytes as a tar: an error, or samples that can all be read or say why not.

use polyreme_fuzz::mutate::Mutator;
use polyreme_fuzz::{InFile, Random, Target, scale};

use super::tests::{png, tar_of};
use super::*;

/// Makes the checksums of headers right, wherever headers may be.
fn mend(input: &mut [u8], random: &mut Random) {
    if random.one_in(4) {
        return;
    }
    let blocks = input.len() / 512;
    if blocks > 0 && random.one_in(2) {
        let block = random.below(blocks);
        let (at, other) = (block * 512, random.below(blocks) * 512);
        let mut header = input[at..at + 512].to_vec();
        let other = input[other..other + 512].to_vec();
        Mutator { words: &[b"0000000", b"7777777", b"../", b"x", b"L", b"S", b"1"], bytes_max: 512 }.change(
            &mut header,
            &other,
            random,
        );
        header.resize(512, 0);
        input[at..at + 512].copy_from_slice(&header);
    }
    for header in input.chunks_exact_mut(512) {
        if &header[257..262] != b"ustar" {
            continue;
        }
        let sum: u32 = header
            .iter()
            .enumerate()
            .map(|(i, &b)| if (148..156).contains(&i) { 32 } else { b.into() })
            .sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
}

#[test]
fn tar() {
    let (image, long) = (png(9), format!("{}.png", "k".repeat(150)));
    let target = Target {
        name: "tar",
        corpus: vec![
            tar_of(&[("a.png", &image), ("a.cls", b"1")]),
            tar_of(&[
                ("a.json", b"{\"y\": [1, 2.5]}"),
                ("a.png", &image),
                ("a.cls", b"cat"),
                ("b/c.cls", b"dog"),
                ("b/c.png", &image),
            ]),
            tar_of(&[(&long, &image), ("n.txt", b"words")]),
        ],
        words: &[b".png", b".cls", b".json", b"ustar", b"../", b"0000000", b"path=", b"size="],
        mend: &|input: &mut Vec<u8>, random: &mut Random| mend(input, random),
        // Names are kept while samples are gathered, and an image of a byte may have many pixels.
        memory: &|len| (1 << 20) + 64 * len,
    };
    let place = InFile::new("tar");
    let wanted = |key: Option<&str>, kind| LabelWanted { kind, key: key.map(String::from) };
    target.run(|input| {
        let path = place.with(input).to_path_buf();
        for wanted in [
            wanted(Some("y"), Some(LabelKind::Numbers)),
            wanted(Some("y"), Some(LabelKind::Classes)),
            wanted(None, Some(LabelKind::Labels)),
            wanted(None, None),
        ] {
            if let Ok(index) = TarIndex::read(&path, input, &wanted) {
                let ends = index.images.iter().map(|i| i.offset + u64::from(i.len));
                assert!(ends.max().unwrap() <= input.len() as u64);
                // What goes into a cache comes out again.
                let kept = serde_json::to_vec(&index).unwrap();
                assert_eq!(serde_json::from_slice::<TarIndex>(&kept).unwrap(), index);
            }
        }
        let index = TarIndex::read(&path, input, &wanted(None, Some(LabelKind::Classes))).map_err(|e| {
            // What is wrong, without where and without names.
            e.to_string().rsplit(": ").next().unwrap_or_default().chars().take(24).collect::<String>()
        })?;
        assert_eq!(index.labels.len(), index.images.len());
        assert_eq!(index.words.iter().map(|w| w.samples).sum::<usize>(), index.labels.len());
        Ok(format!("{} {}", scale(index.images.len()), scale(index.words.len())))
    });
}
