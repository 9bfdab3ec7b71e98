//! Good, cut, mislabelled and damaged IDX files.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;

use super::*;
use crate::damage;

pub(super) fn file(dims: &[u32], elements: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, UNSIGNED_BYTE, dims.len() as u8];
    bytes.extend(dims.iter().flat_map(|d| d.to_be_bytes()));
    bytes.extend(elements);
    bytes
}

pub(super) fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Three images of 2x4 and their labels.
fn good() -> (Vec<u8>, Vec<u8>) {
    (file(&[3, 2, 4], &(0..24).collect::<Vec<u8>>()), file(&[3], &[1, 0, 4]))
}

fn open(folder: &TempDir, images: &[u8], labels: &[u8]) -> Result<Idx, DataError> {
    let (i, l) = (folder.path().join("images"), folder.path().join("labels"));
    fs::write(&i, images).unwrap();
    fs::write(&l, labels).unwrap();
    Idx::open(&i, &l)
}

#[test]
fn good_files_are_read_raw_and_packed() {
    let folder = tempfile::tempdir().unwrap();
    let (images, labels) = good();
    for (images, labels) in
        [(images.clone(), labels.clone()), (packed(&images), packed(&labels)), (images, packed(&labels))]
    {
        let idx = open(&folder, &images, &labels).unwrap();
        let features = Features::Image { channels: 1, height: 2, width: 4, layout: Layout::Planes };
        assert_eq!(*idx.spec(), Spec { features, target: Target::Class { classes: 5, names: vec![] } });
        assert_eq!(idx.len(), 3);
        let mut scratch = Scratch::default();
        let fetched = idx.fetch(2, &mut scratch).unwrap();
        let values = (16..24).collect::<Vec<u8>>();
        assert_eq!(fetched, Fetched { values: Values::U8(&values), label: Label::Class(4) });
        damage::read_all(&idx).unwrap();
        assert_eq!(idx.with_classes(10).unwrap().spec().classes(), 10);
    }
}

#[test]
fn channels_are_planes() {
    let folder = tempfile::tempdir().unwrap();
    let idx = open(&folder, &file(&[2, 3, 1, 2], &[7; 12]), &file(&[2], &[0, 1])).unwrap();
    let features = Features::Image { channels: 3, height: 1, width: 2, layout: Layout::Planes };
    assert_eq!(idx.spec().features, features);
}

#[test]
fn bad_files_are_errors_with_file_and_offset() {
    let folder = tempfile::tempdir().unwrap();
    let (images, labels) = good();
    let check = |images: &[u8], labels: &[u8], want: &str| {
        let error = open(&folder, images, labels).expect_err(want).to_string();
        assert!(
            error.replace(&folder.path().display().to_string(), "").contains(want),
            "{error:?} lacks {want:?}"
        );
    };
    let with = |at: usize, byte: u8| {
        let mut images = images.clone();
        images[at] = byte;
        images
    };
    check(b"", &labels, "/images: at byte 0: the file ends here, inside the magic number");
    check(&images[..3], &labels, "/images: at byte 3: the file ends here");
    check(&images[..9], &labels, "/images: at byte 9: the file ends here, inside the dims");
    check(&images[..30], &labels, "/images: at byte 30: the file ends here; its header promises 40 bytes");
    check(&[&images[..], b"xy"].concat(), &labels, "/images: at byte 40: 2 bytes after the last element");
    check(&with(0, 9), &labels, "/images: at byte 0: not an IDX file: it starts with bytes 0x09 0x00");
    check(&with(2, 13), &labels, "/images: at byte 2: element type 0x0d");
    check(&with(3, 1), &labels, "/images: at byte 3: rank 1, but images have rank 3 or 4");
    check(&labels, &images, "/labels: at byte 3: rank 3, but labels have rank 1; are the two files swapped?");
    check(&with(11, 0), &labels, "/images: at byte 8: dims [3, 0, 4] are empty");
    check(&file(&[u32::MAX; 4], &[]), &labels, "/images: at byte 4: dims");
    check(&images, &file(&[2], &[0, 1]), "/labels: at byte 4: 2 labels, but /images has 3 images");

    // Packed files: errors of the packing have offsets in the file, errors of the content say that theirs are unpacked.
    let gz = packed(&images);
    check(&gz[..gz.len() - 9], &labels, &format!("/images: at byte {}: cannot unpack", gz.len() - 9));
    check(&gz[..gz.len() - 1], &labels, &format!("/images: at byte {}: cannot unpack", gz.len() - 1));
    check(&gz[..5], &labels, "/images: at byte 5: cannot unpack");
    let mut wrong_sum = gz.clone();
    let sum = wrong_sum.len() - 6;
    wrong_sum[sum] ^= 1;
    check(&wrong_sum, &labels, "cannot unpack");
    check(&packed(&images[..30]), &labels, "cannot unpack");
    check(
        &packed(&[&images[..], b"x"].concat()),
        &labels,
        "/images: at byte 40: more bytes after the last element (the",
    );
    check(&packed(&with(2, 13)), &labels, "/images: at byte 2: element type 0x0d");
    check(
        &packed(&file(&[60000, 4096, 4096], &[0; 100])),
        &labels,
        "/images: at byte 4: the header promises",
    );

    let idx = open(&folder, &images, &labels).unwrap();
    let error = idx.with_classes(4).unwrap_err().to_string();
    assert!(error.ends_with("/labels: at byte 10: label 4 of sample 2, but there are 4 classes"), "{error}");
}

#[test]
fn damaged_files_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let (images, labels) = good();
    let (i, l) = (folder.path().join("images"), folder.path().join("labels"));
    let read = || damage::read_all(&Idx::open(&i, &l)?.with_classes(10)?);
    for (images, labels) in [(images.clone(), labels.clone()), (packed(&images), packed(&labels))] {
        fs::write(&l, &labels).unwrap();
        damage::each(&images, 400, &i, read);
        fs::write(&i, &images).unwrap();
        damage::each(&labels, 400, &l, read);
    }
}

#[test]
fn usual_names_are_found() {
    #[track_caller]
    fn check(names: &[&str], want: Result<&[&str], &str>) {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        match (find(folder.path()), want) {
            (Ok(found), Ok(want)) => {
                let test = found.test.clone().map(|(i, l)| vec![i, l]).unwrap_or_default();
                let got: Vec<PathBuf> = [vec![found.train.0, found.train.1], test].concat();
                assert_eq!(got, want.iter().map(|n| folder.path().join(n)).collect::<Vec<_>>());
            }
            (Err(error), Err(want)) => assert!(error.to_string().contains(want), "{error}"),
            (got, _) => panic!("{names:?}: {got:?}"),
        }
    }
    let four = [
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ];
    check(&four, Ok(&four));
    let packed = four.map(|n| format!("{n}.gz"));
    let packed = [&packed[0][..], &packed[1], &packed[2], &packed[3]];
    check(&packed, Ok(&packed));
    check(&[&four[..], &packed].concat(), Ok(&four));
    let dotted =
        ["train-images.idx3-ubyte", "train-labels.idx1-ubyte", "test-images.idx", "test-labels.idx.gz"];
    check(&dotted, Ok(&dotted));
    check(&four[..2], Ok(&four[..2]));
    check(
        &["train-images-idx3-ubyte.png", "notes"],
        Err("train-images-idx3-ubyte: not found; give a folder"),
    );
    check(&four[..1], Err("train-labels-idx1-ubyte: not found; the images exist"));
    check(&four[..3], Err("t10k-labels-idx1-ubyte: not found"));
}
