//! Tars against folders with the same images, and wrong ones; written by the `tar` crate and by GNU tar.

use std::fs;
use std::process::Command;

use png::{BitDepth, ColorType, Encoder};
use tar::{Builder, Header};
use tempfile::TempDir;

use super::*;
use crate::damage;
use crate::images::Images;

/// An RGB image of 2 x 3 pixels whose bytes count up from `first`.
pub(super) fn png(first: u8) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = Encoder::new(&mut file, 3, 2);
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(&(0..18).map(|i| first.wrapping_add(i)).collect::<Vec<u8>>()).unwrap();
    writer.finish().unwrap();
    file
}

/// A tar with these members. Names are put in as they are, whatever they are.
pub(super) fn tar_of(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        if name.len() > 99 {
            builder.append_data(&mut header, name, *content).unwrap();
            continue;
        }
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

fn written(folder: &TempDir, name: &str, members: &[(&str, &[u8])]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, tar_of(members)).unwrap();
    path
}

fn pixels(set: &dyn Dataset, idx: usize) -> (Vec<u8>, Option<usize>) {
    let mut scratch = Scratch::default();
    let Fetched { values: Values::U8(values), label } = set.fetch(idx, &mut scratch).unwrap() else {
        panic!("images are bytes")
    };
    let class = if let Label::Class(class) = label { Some(class) } else { None };
    (values.to_vec(), class)
}

/// GNU tar writes the folders of a set of images, in the order of the disk; samples are those of the folder.
#[test]
fn a_tar_has_the_samples_of_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let long = format!("cat/{}", "n".repeat(120));
    for (name, first) in [("cat/1", 1), ("dog/2", 2), ("cat/3", 3), (long.as_str(), 4)] {
        let class = name.split('/').next().unwrap();
        fs::create_dir_all(folder.path().join("set").join(class)).unwrap();
        fs::write(folder.path().join(format!("set/{name}.png")), png(first)).unwrap();
        fs::write(folder.path().join(format!("set/{name}.cls")), format!("{class}\n")).unwrap();
        fs::write(
            folder.path().join(format!("set/{name}.json")),
            format!("{{\"is\": {:?}, \"x\": [1, {first}.5]}}", class),
        )
        .unwrap();
    }
    let images = Images::open(&folder.path().join("set"), &ImageOptions::default()).unwrap();
    for format in ["gnu", "pax", "ustar"] {
        let path = folder.path().join(format!("{format}.tar"));
        let done = Command::new("tar")
            .args(["--sort=name", &format!("--format={format}"), "-cf"])
            .arg(&path)
            .args(["-C".as_ref(), folder.path().join("set").as_os_str(), ".".as_ref()])
            .status();
        // GNU tar has no ustar header for the long name if its folder is short.
        if !done.unwrap().success() {
            assert_eq!(format, "ustar");
            continue;
        }
        let set = Shards::open(std::slice::from_ref(&path), &ShardOptions::default()).unwrap();
        assert_eq!((set.len(), set.spec()), (4, images.spec()), "{format}");
        damage::read_all(&set).unwrap();
        set.intact().unwrap();
        for idx in 0..4 {
            assert_eq!(pixels(&set, idx), pixels(&images, idx), "{format} {idx}");
        }
        let by_key = ShardOptions { label: Some("is".into()), ..ShardOptions::default() };
        let by_key = Shards::open(std::slice::from_ref(&path), &by_key).unwrap();
        assert_eq!((by_key.spec(), by_key.labels.as_slice()), (images.spec(), set.labels.as_slice()));
        let numbers =
            ShardOptions { label: Some("x".into()), kind: LabelKind::Numbers, ..ShardOptions::default() };
        let numbers = Shards::open(std::slice::from_ref(&path), &numbers).unwrap();
        damage::read_all(&numbers).unwrap();
        assert_eq!(numbers.spec().target, Target::Numbers { n: 2, names: Vec::new() });
        assert_eq!(numbers.targets[2..4], [1.0, 3.5]);
        let decoded = decode_tar(&path, &images.spec().features, Isa::detect()).unwrap();
        assert_eq!((decoded.len(), &decoded[1].1), (4, &pixels(&images, 1).0));
        assert!(decoded[0].0.ends_with("cat/1.png"), "{}", decoded[0].0);
    }
}

#[test]
fn shards_are_one_set_with_the_classes_of_all() {
    let folder = tempfile::tempdir().unwrap();
    let image = [png(0), png(50), png(100)];
    let (a, b) = (
        written(&folder, "s-0.tar", &[("a.png", &image[0]), ("a.cls", b"7")]),
        written(
            &folder,
            "s-1.tar",
            &[
                ("a.png", &image[1]),
                ("a.txt", b"words"),
                ("b.png", &image[2]),
                ("a.cls", b"2"),
                ("b.cls", b"0"),
            ],
        ),
    );
    let set = Shards::open(&[a.clone(), b.clone()], &ShardOptions::default()).unwrap();
    assert_eq!((set.len(), set.spec().classes()), (3, 8));
    let found: Vec<_> = (0..3).map(|idx| pixels(&set, idx)).collect();
    assert_eq!(
        found.iter().map(|(p, class)| (p[0], class.unwrap())).collect::<Vec<_>>(),
        [(0, 7), (50, 2), (100, 0)]
    );
    assert_eq!(pixels(&set, 1), found[1], "what is kept");
    let test =
        Shards::open_as(std::slice::from_ref(&b), &ShardOptions::default(), &set.spec().target).unwrap();
    assert_eq!((test.spec(), test.class(0).unwrap()), (set.spec(), Some(2)));
    let few = Target::Class { classes: 3, names: Vec::new() };
    let error = Shards::open_as(&[b, a], &ShardOptions::default(), &few).unwrap_err().to_string();
    assert!(error.contains("s-0.tar") && error.contains("a.cls: label \"7\" is not among"), "{error}");
}

#[test]
fn wrong_tars_are_named_with_the_member() {
    let folder = tempfile::tempdir().unwrap();
    let image = png(0);
    let good: &[(&str, &[u8])] = &[("a.png", &image), ("a.cls", b"1")];
    let whole = tar_of(good);
    let path = folder.path().join("x.tar");
    let check = |content: &[u8], options: &ShardOptions, expected: &[&str]| {
        fs::write(&path, content).unwrap();
        let error = Shards::open(std::slice::from_ref(&path), options).unwrap_err().to_string();
        for part in expected.iter().chain(&["x.tar: at byte"]) {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
    };
    let with = |more: &[(&str, &[u8])]| tar_of(&[good, more].concat());
    let default = ShardOptions::default();
    let numbers = ShardOptions { kind: LabelKind::Numbers, ..ShardOptions::default() };
    let key = ShardOptions { label: Some("y".into()), ..ShardOptions::default() };
    for (content, options, expected) in [
        (with(&[("../b.png", &image)]), &default, ["../b.png", "leaves the folder"]),
        (with(&[("/b.png", &image)]), &default, ["/b.png", "leaves the folder"]),
        (with(&[("c/../../b.png", &image)]), &default, ["c/../../b.png", "leaves the folder"]),
        (with(&[("b.png", &image)]), &default, ["sample \"b\" has no label", "no b.cls"]),
        (with(&[("b.cls", b"1")]), &default, ["sample \"b\" has no image", "b.jpg"]),
        (with(&[("a.png", &image)]), &default, ["a.png: sample \"a\" has a.png already", "remove one"]),
        (with(&[("a.jpg", &image)]), &default, ["a.jpg: sample \"a\" has a.png already", "remove one"]),
        (
            with(&[("b.cls", b"1"), ("b.jpg", b"this is a text")]),
            &default,
            ["b.jpg: neither PNG nor JPEG", "convert"],
        ),
        (with(&[("b.cls", b" \n"), ("b.png", &image)]), &default, ["b.cls: \"\" is not a class", "needed"]),
        (with(&[("b.cls", b"\xff"), ("b.png", &image)]), &default, ["b.cls: not a text", ""]),
        (
            with(&[("b.cls", b"one"), ("b.png", &image)]),
            &numbers,
            ["b.cls: \"one\" is not a number", "cross-entropy"],
        ),
        (with(&[("b.cls", b"1 2"), ("b.png", &image)]), &numbers, ["b.cls: 2 numbers", "have 1"]),
        (with(&[("a.json", b"{\"z\": 1}")]), &key, ["a.json: has no key \"y\"", "it has z"]),
        (with(&[("a.json", b"{")]), &key, ["a.json: not JSON", ""]),
        (whole.clone(), &key, ["sample \"a\" has no label", "no a.json"]),
        (whole[..700].to_vec(), &default, ["", ""]),
        (whole[..512].to_vec(), &default, ["a.png: the tar ends here, before", "copy it again"]),
        (whole[..2048].to_vec(), &default, ["without the block of zeros", "cut"]),
        (Vec::new(), &default, ["without the block of zeros", ""]),
        (b"some text that is not a tar at all".to_vec(), &default, ["", ""]),
        (tar_of(&[("notes.txt", b"hello")]), &default, ["no samples", "0001.cls"]),
    ] {
        check(&content, options, &expected);
    }
    // Images of different sizes, and one that is broken inside: found when they are decoded.
    let mut cut = image.clone();
    cut.truncate(image.len() - 20);
    fs::write(&path, with(&[("b.cls", b"1"), ("b.png", &cut)])).unwrap();
    let set = Shards::open(std::slice::from_ref(&path), &default).unwrap();
    let error = set.fetch(1, &mut Scratch::default()).unwrap_err().to_string();
    assert!(error.contains("x.tar") && error.contains("b.png: broken PNG"), "{error}");
}

#[test]
fn links_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut builder = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    builder.append_link(&mut header, "a.png", "/etc/passwd").unwrap();
    let path = folder.path().join("x.tar");
    fs::write(&path, builder.into_inner().unwrap()).unwrap();
    let error = Shards::open(&[path], &ShardOptions::default()).unwrap_err().to_string();
    assert!(error.contains("a.png: a link") && error.contains("--dereference"), "{error}");
}

#[test]
fn damaged_tars_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let image = png(3);
    let good = tar_of(&[("a.png", &image), ("a.cls", b"1"), ("b.cls", b"0"), ("b.png", &image)]);
    let path = folder.path().join("x.tar");
    damage::each(&good, 200, &path, || {
        let set = Shards::open(std::slice::from_ref(&path), &ShardOptions::default())?;
        damage::read_all(&set)
    });
}
