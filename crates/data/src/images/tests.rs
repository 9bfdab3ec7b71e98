//! Image files against PIL and torchvision (`references/make.py` made them), and good, cut, misplaced and damaged ones.

use std::thread;

use png::{BitDepth, ColorType, Encoder};
use tempfile::TempDir;

use super::*;
use crate::damage;

pub(super) fn reference(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("references").join(name)).unwrap()
}

/// The pixels of a reference, with their height and width.
fn pixels(name: &str) -> (ImageSize, Vec<u8>) {
    let bytes = reference(name);
    let dim = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    (ImageSize { height: dim(0), width: dim(4) }, bytes[8..].to_vec())
}

fn image(size: ImageSize, channels: usize, layout: Layout) -> Features {
    Features::Image { channels, height: size.height, width: size.width, layout }
}

fn png(height: usize, width: usize, colour: ColorType, depth: BitDepth, data: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(colour);
    encoder.set_depth(depth);
    let mut writer = encoder.write_header().unwrap();
    writer.write_image_data(data).unwrap();
    writer.finish().unwrap();
    file
}

/// An RGB image whose bytes count up from `first`.
pub(super) fn counting(height: usize, width: usize, first: u8) -> (Vec<u8>, Vec<u8>) {
    let data: Vec<u8> = (0..3 * height * width).map(|i| first.wrapping_add(i as u8)).collect();
    (png(height, width, ColorType::Rgb, BitDepth::Eight, &data), data)
}

pub(super) fn folder(files: &[(&str, Vec<u8>)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    folder
}

#[test]
fn files_decode_as_pil_decodes_them() {
    // The two decoders round the inverse cosine transform and the colours differently, and blend colours differently that are
    // stored at half size; so the largest and the mean difference are bounded, each with its reason.
    for (name, largest, mean) in [
        ("palette.png", 0, 0.0),
        ("bits.png", 0, 0.0),
        ("alpha.png", 0, 0.0),
        ("grey.jpg", 1, 0.1),
        ("whole.jpg", 3, 0.5),
        ("cmyk.jpg", 3, 0.5),
        ("baseline.jpg", 6, 0.6),
        ("progressive.jpg", 6, 0.6),
        ("restarts.jpg", 6, 0.6),
        ("half.jpg", 6, 0.6),
    ] {
        for (channels, kind) in [(3, "rgb"), (1, "grey")] {
            let (size, want) = pixels(&format!("{name}.{kind}"));
            let mut got = Vec::new();
            assert_eq!(
                decode::decode_any(&reference(name), channels == 1, &mut got).unwrap(),
                size,
                "{name}"
            );
            let differences: Vec<u8> = got.iter().zip(&want).map(|(g, w)| g.abs_diff(*w)).collect();
            let worst = differences.iter().copied().max().unwrap();
            let average = differences.iter().map(|&d| f64::from(d)).sum::<f64>() / want.len() as f64;
            assert!(worst <= largest && average <= mean, "{name} {kind}: largest {worst}, mean {average}");
        }
    }
}

#[test]
fn sizes_are_matched_as_torchvision_matches_them() {
    for (name, side) in [("shrunk", 20), ("tall", 32), ("grown", 16), ("odd", 15), ("same", 12)] {
        let (size, want) = pixels(&format!("{name}.png.{side}"));
        let folder = folder(&[("file", reference(&format!("{name}.png")))]);
        let got =
            decode_file(&folder.path().join("file"), &image(size, 3, Layout::Interleaved), Isa::detect())
                .unwrap();
        let worst = got.iter().zip(&want).map(|(g, w)| g.abs_diff(*w)).max().unwrap();
        assert_eq!((size.height, got.len()), (side, want.len()));
        assert!(worst <= 1, "{name}: {worst}");
    }
}

#[test]
fn every_kind_of_png_is_read() {
    let check = |colour, depth, data: &[u8], rgb: [u8; 3], grey: u8| {
        let file = png(1, 1, colour, depth, data);
        let mut got = Vec::new();
        decode::decode_any(&file, false, &mut got).unwrap();
        assert_eq!(got[..3], rgb, "{colour:?} {depth:?}");
        decode::decode_any(&file, true, &mut got).unwrap();
        assert_eq!(got[0], grey, "{colour:?} {depth:?}");
    };
    use BitDepth::{Eight, Four, One, Sixteen};
    check(ColorType::Grayscale, Eight, &[7], [7; 3], 7);
    check(ColorType::Grayscale, One, &[0x80], [255; 3], 255);
    check(ColorType::Grayscale, Four, &[0x30], [51; 3], 51);
    check(ColorType::Grayscale, Sixteen, &[9, 200], [9; 3], 9);
    check(ColorType::GrayscaleAlpha, Eight, &[7, 0], [7; 3], 7);
    check(ColorType::Rgb, Eight, &[255, 0, 0], [255, 0, 0], 76);
    check(ColorType::Rgb, Sixteen, &[1, 2, 3, 4, 5, 6], [1, 3, 5], 3);
    check(ColorType::Rgba, Eight, &[0, 255, 0, 128], [0, 255, 0], 150);
}

/// The decoder relies on whole colours and on no more transparency than colours; it used to panic, and the loader thread with it.
#[test]
fn a_png_with_a_broken_palette_is_an_error_and_not_a_crash() {
    let indexed = |palette: &[u8], alphas: &[u8]| {
        let mut file = Vec::new();
        let mut encoder = Encoder::new(&mut file, 2, 1);
        encoder.set_color(ColorType::Indexed);
        encoder.set_palette(palette);
        encoder.set_trns(alphas);
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(&[0, 1]).unwrap();
        writer.finish().unwrap();
        let mut pixels = Vec::new();
        decode::decode_any(&file, false, &mut pixels).map(|_| pixels).map_err(|flaw| flaw.why)
    };
    assert_eq!(indexed(&[1, 2, 3, 4, 5, 6], &[7, 8]).unwrap()[..6], [1, 2, 3, 4, 5, 6]);
    for (palette, alphas, says) in [
        (&[0; 8][..], &[7][..], "broken PNG: a palette of 8 bytes, which is not a multiple of 3"),
        (&[0; 771], &[7], "broken PNG: Chunk length wrong"),
        (&[0; 6], &[7, 8, 9], "broken PNG: transparency of 3 colours, but the palette has 2"),
    ] {
        let why = indexed(palette, alphas).unwrap_err();
        assert!(why.starts_with(says), "{why}");
    }
}

#[test]
fn a_folder_is_read_and_kept() {
    let (first, first_data) = counting(2, 3, 0);
    let (second, second_data) = counting(2, 3, 100);
    let (third, third_data) = counting(2, 3, 200);
    let folder = folder(&[
        ("dog/b.PNG", second.clone()),
        ("cat/a.jpeg", first),
        ("dog/inside/c.png", third),
        ("dog/notes.txt", b"no image".to_vec()),
        ("dog/.hidden", b"no image".to_vec()),
        (".git/x.png", b"no image".to_vec()),
        ("readme.png", second),
    ]);
    // Room for none, one and all.
    for cache_bytes in [0, 20, 1000] {
        let images =
            Images::open(folder.path(), &ImageOptions { cache_bytes, ..ImageOptions::default() }).unwrap();
        let names = vec!["cat".to_string(), "dog".into()];
        let features = image(ImageSize { height: 2, width: 3 }, 3, Layout::Interleaved);
        assert_eq!(*images.spec(), Spec { features, target: Target::Class { classes: 2, names } });
        assert_eq!(images.len(), 3);
        let read = || {
            let mut scratch = Scratch::default();
            for i in [0, 1, 2, 2, 1, 0, 1] {
                let (data, label) = [(&first_data, 0), (&second_data, 1), (&third_data, 1)][i];
                let want = Fetched { values: Values::U8(data), label: Label::Class(label) };
                assert_eq!(images.fetch(i, &mut scratch).unwrap(), want);
            }
        };
        thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(read))));
        let kept = (0..images.len()).filter(|&i| images.kept.get(i).is_some()).count();
        assert_eq!(
            (kept, images.kept.bytes_left()),
            ((cache_bytes / 18).min(3), cache_bytes - 18 * kept.min(3))
        );
        damage::read_all(&images).unwrap();
    }
    let sized = ImageOptions { size: Some((4, 2)), grey: true, ..ImageOptions::default() };
    let images = Images::open(folder.path(), &sized).unwrap();
    assert_eq!(images.spec().features, image(ImageSize { height: 4, width: 2 }, 1, Layout::Interleaved));
    damage::read_all(&images).unwrap();
    assert!(images.path(0).ends_with("cat/a.jpeg"));
}

#[test]
fn classes_are_shared_by_name() {
    let file = counting(2, 2, 0).0;
    let test = folder(&[("b/x.png", file.clone()), ("c/x.png", file)]);
    let open = || Images::open(test.path(), &ImageOptions::default()).unwrap();
    let names = ["a".to_string(), "b".into(), "c".into()];
    let images = open().with_classes(&names).unwrap();
    assert_eq!((images.class(0).unwrap(), images.class(1).unwrap()), (Some(1), Some(2)));
    assert_eq!(images.spec().classes(), 3);
    let error = open().with_classes(&names[..2]).unwrap_err().to_string();
    assert!(error.contains("c/x.png: at byte 0: class \"c\" is not among the 2"), "{error}");
}

#[test]
fn parts_are_found() {
    let file = || counting(1, 1, 0).0;
    let whole = folder(&[("train/a/x.png", file()), ("valid/a/x.png", file()), ("test/a/x.png", file())]);
    let at = |name: &str| whole.path().join(name);
    let want = FoundImages { train: at("train"), validation: Some(at("valid")), test: Some(at("test")) };
    assert_eq!(find(whole.path()).unwrap(), want);
    let flat = folder(&[("a/x.png", file()), ("b/x.png", file())]);
    assert_eq!(
        find(flat.path()).unwrap(),
        FoundImages { train: flat.path().into(), validation: None, test: None }
    );
    let bare = folder(&[("x.png", file())]);
    assert!(find(bare.path()).unwrap_err().to_string().contains("has a folder per class"));
    let odd = folder(&[("train/a/x.png", file()), ("val/x.png", file())]);
    assert!(find(odd.path()).unwrap_err().to_string().contains("val/*/: not found"));
}

#[test]
fn bad_files_are_errors_with_file_and_offset() {
    #[track_caller]
    fn check(files: &[(&str, Vec<u8>)], size: Option<(usize, usize)>, want: &str) {
        let folder = folder(files);
        let options = ImageOptions { size, ..ImageOptions::default() };
        let result = Images::open(folder.path(), &options).and_then(|images| damage::read_all(&images));
        let error = result.expect_err(want).to_string();
        assert!(error.contains(want), "{error:?} lacks {want:?}");
    }
    let (good, _) = counting(4, 4, 0);
    let jpeg = reference("baseline.jpg");
    let one = |content: &[u8]| vec![("a/x.png", content.to_vec())];
    check(&one(b""), None, "a/x.png: at byte 0: neither PNG nor JPEG");
    check(&one(b"GIF89a"), None, "a/x.png: at byte 0: neither PNG nor JPEG");
    check(&one(&good[..20]), None, "a/x.png: at byte 20: broken PNG");
    check(&one(&good[..good.len() - 20]), None, &format!("a/x.png: at byte {}: broken PNG", good.len() - 20));
    check(&one(&good[..good.len() - 12]), None, &format!("a/x.png: at byte {}: broken PNG", good.len() - 12));
    let mut flipped = good.clone();
    flipped[50] ^= 0x10;
    check(&one(&flipped), None, "broken PNG");
    let mut large = good.clone();
    large[16..20].copy_from_slice(&70_000u32.to_be_bytes());
    let sum = crc(&large[12..29]);
    large[29..33].copy_from_slice(&sum.to_be_bytes());
    check(&one(&large), None, "4 x 70000 pixels; sides are 1 to 16384");
    large[16..24].copy_from_slice(&[16_384u32.to_be_bytes(), 16_384u32.to_be_bytes()].concat());
    let sum = crc(&large[12..29]);
    large[29..33].copy_from_slice(&sum.to_be_bytes());
    check(
        &one(&large),
        None,
        "claims 16384 x 16384 pixels (268.4 million), but at most 33.6 million are read from",
    );

    for keep in [3, 30, 400, 700, jpeg.len() - 40, jpeg.len() - 2, jpeg.len() - 1] {
        check(&one(&jpeg[..keep]), None, &format!("a/x.png: at byte {keep}: broken JPEG"));
    }
    let sof = jpeg.windows(2).position(|m| m == [0xff, 0xc0]).unwrap();
    let mut large = jpeg.clone();
    large[sof + 5..sof + 9].copy_from_slice(&[0x40, 0, 0x40, 0]);
    check(
        &one(&large),
        None,
        "claims 16384 x 16384 pixels (268.4 million), but at most 33.6 million are read from",
    );
    large[sof + 5] = 0x41;
    check(&one(&large), None, "a/x.png: at byte");

    let other = counting(4, 5, 0).0;
    let want = "b/y.png: at byte 0: 4 x 5 pixels, but the first image has 4 x 4; set `size`";
    check(&[("a/x.png", good.clone()), ("b/y.png", other)], None, want);
    check(
        &[("a/x.png", good.clone()), ("b/y.txt", vec![])],
        None,
        "b/*.png, *.jpg, *.jpeg: not found; every class",
    );
    check(&[("x.png", good.clone())], None, "not found; the folder of a set has a folder per class");
    check(&one(&good), Some((0, 4)), "size is 0 x 4; sides are 1 to 16384 pixels");

    let absent = decode_file(
        Path::new("/no/such.png"),
        &image(ImageSize { height: 1, width: 1 }, 3, Layout::Planes),
        Isa::detect(),
    );
    assert!(absent.unwrap_err().to_string().contains("/no/such.png: not found"));
    let row = decode_file(Path::new("/no/such.png"), &Features::Row { width: 3 }, Isa::detect());
    assert!(matches!(row, Err(DataError::Setting { .. })));
}

/// Half a megabyte like that of a photograph, whose header claims 800 MB of pixels.
#[test]
fn a_file_that_claims_far_more_than_it_holds_is_refused_before_memory_is_taken() {
    let mut jpeg = reference("baseline.jpg");
    let sof = jpeg.windows(2).position(|m| m == [0xff, 0xc0]).unwrap();
    jpeg[sof + 5..sof + 9].copy_from_slice(&[0x40, 0, 0x40, 0]);
    let end = jpeg.len() - 2;
    jpeg.splice(end..end, vec![0x55; (512 << 10) - end - 2]);
    let folder = folder(&[("x.jpg", jpeg)]);
    let path = folder.path().join("x.jpg");
    let mut scratch = Scratch::default();
    let how = SampleFormat {
        size: ImageSize { height: 8, width: 8 },
        scale: true,
        channels: 3,
        isa: Isa::detect(),
    };
    let error = how.sample(&path, &mut scratch).unwrap_err().to_string();
    let want =
        "claims 16384 x 16384 pixels (268.4 million), but at most 33.6 million are read from 524288 bytes";
    assert!(error.contains("x.jpg: at byte ") && error.contains(want), "{error}");
    assert!(scratch.bytes.capacity() < 1 << 20, "{} bytes were taken", scratch.bytes.capacity());
    // A photograph of 200 million pixels, 24 MB of it.
    assert!(decode::check_size(ImageSize { height: 12_240, width: 16_320 }, 24 << 20).is_ok());
}

/// The checksum of a PNG's chunk.
fn crc(bytes: &[u8]) -> u32 {
    let mut sum = flate2::Crc::new();
    sum.update(bytes);
    sum.sum()
}

#[test]
fn one_file_is_decoded_into_planes() {
    let (file, data) = counting(1, 2, 10);
    let folder = folder(&[("x.png", file)]);
    let size = ImageSize { height: 1, width: 2 };
    let planes =
        decode_file(&folder.path().join("x.png"), &image(size, 3, Layout::Planes), Isa::detect()).unwrap();
    assert_eq!(planes, [data[0], data[3], data[1], data[4], data[2], data[5]]);
}

#[test]
fn damaged_files_never_panic() {
    let folder = folder(&[("x", vec![])]);
    let path = folder.path().join("x");
    let names = [
        "baseline.jpg",
        "progressive.jpg",
        "restarts.jpg",
        "half.jpg",
        "whole.jpg",
        "cmyk.jpg",
        "grey.jpg",
        "palette.png",
        "alpha.png",
    ];
    for name in names {
        let read = || {
            let features = image(ImageSize { height: 8, width: 8 }, 3, Layout::Planes);
            let all = decode_file(&path, &features, Isa::detect())?;
            assert_eq!(all.len(), 3 * 8 * 8);
            Ok(())
        };
        damage::each(&reference(name), 300, &path, read);
    }
}
