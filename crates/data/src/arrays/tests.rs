//! Good, cut, mislabelled and damaged files of arrays.

use std::fs;

use serde_json::json;

use super::*;
use crate::damage;

/// A file as the format says, written by hand so that alignment can be chosen: `pad` spaces after the header.
pub(super) fn file(arrays: &[(&str, &str, &[usize], &[u8])], pad: usize) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in arrays {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.to_string(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    header.extend(std::iter::repeat_n(' ', (8 - header.len() % 8) % 8 + pad));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn open(content: &[u8]) -> Result<Arrays, DataError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), content).unwrap();
    Arrays::open(file.path(), "x", "y")
}

pub(super) fn le<const N: usize, T: Copy>(values: &[T], bytes: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| bytes(v)).collect()
}

const NUMBERS: [f32; 6] = [0.5, -1.0, 2.0, 3.0, 4.25, 5.0];

#[test]
fn good_files_are_read_at_every_alignment() {
    #[track_caller]
    fn check(x: (&str, &[usize], &[u8]), y: (&str, &[u8]), features: Features, last: Values) {
        for pad in 0..4 {
            let content = file(&[("x", x.0, x.1, x.2), ("y", y.0, &[x.1[0]], y.1)], pad);
            let arrays = open(&content).unwrap();
            let target = Target::Class { classes: 3, names: Vec::new() };
            assert_eq!(*arrays.spec(), Spec { features: features.clone(), target });
            damage::read_all(&arrays).unwrap();
            let mut scratch = Scratch::default();
            let want = Fetched { values: last, label: Label::Class(2) };
            assert_eq!(arrays.fetch(x.1[0] - 1, &mut scratch).unwrap(), want);
            assert_eq!(arrays.with_classes(9).unwrap().spec().classes(), 9);
        }
    }
    let image = |channels, height, width| Features::Image { channels, height, width, layout: Layout::Planes };
    let f32s = le(&NUMBERS, f32::to_le_bytes);
    let f64s = le(&NUMBERS.map(f64::from), f64::to_le_bytes);
    let (u8y, i32y, i64y) = ([0u8, 2], le(&[0i32, 2], i32::to_le_bytes), le(&[0i64, 2], i64::to_le_bytes));
    let last = Values::F32(&NUMBERS[3..]);
    check(("F32", &[2, 3], &f32s), ("U8", &u8y), Features::Row { width: 3 }, last);
    check(("F64", &[2, 3], &f64s), ("I32", &i32y), Features::Row { width: 3 }, last);
    check(("F32", &[2, 1, 3], &f32s), ("I64", &i64y), image(1, 1, 3), last);
    check(("F32", &[2, 3, 1, 1], &f32s), ("I64", &i64y), image(3, 1, 1), last);
    check(("U8", &[2, 1, 2], &[1, 2, 3, 255]), ("U8", &u8y), image(1, 1, 2), Values::U8(&[3, 255]));
    let ids = Features::Ids { time: 2, vocab: 8 };
    let want = Values::I32(&[7, 0]);
    check(("I32", &[2, 2], &le(&[1, 2, 7, 0], i32::to_le_bytes)), ("U8", &u8y), ids.clone(), want);
    check(("I64", &[2, 2], &le(&[1, 2, 7, 0], i64::to_le_bytes)), ("U8", &u8y), ids.clone(), want);
    check(("U16", &[2, 2], &le(&[1, 2, 7, 0], u16::to_le_bytes)), ("U8", &u8y), ids.clone(), want);
    check(("U8", &[2, 2], &[1, 2, 7, 0]), ("U8", &u8y), ids, Values::U8(&[7, 0]));
}

#[test]
fn bad_files_are_errors_with_file_and_offset() {
    #[track_caller]
    fn check(content: &[u8], want: &str) {
        let error = open(content).expect_err(want).to_string();
        let (_, error) = error.split_once(": at byte ").unwrap();
        assert!(error.contains(want), "{error:?} lacks {want:?}");
    }
    let f32s = le(&NUMBERS, f32::to_le_bytes);
    let good = file(&[("x", "F32", &[2, 3], &f32s), ("y", "U8", &[2], &[0, 1])], 0);
    let data = good.len() - 26;
    check(b"", "0: not a whole safetensors file: the file ends here, before its header");
    check(&good[..50], "50: not a whole safetensors file: the file ends here, inside its header");
    let cut = good.len() - 1;
    check(&good[..cut], &format!("{cut}: not a whole safetensors file: the file does not end where"));
    check(&[&good[..], b"x"].concat(), &format!("{}: not a whole", good.len() + 1));
    check(&[0xff; 64], "0: not a whole safetensors file");
    let mut comma = good.clone();
    comma[9 + 4] = b',';
    check(&comma, "13: not a whole");
    check(&file(&[("x", "F32", &[2, 3], &f32s)], 0), "8: no array \"y\"; the file has x");
    let with = |x: (&str, &[usize], &[u8]), y: (&str, &[usize], &[u8])| {
        file(&[("x", x.0, x.1, x.2), ("y", y.0, y.1, y.2)], 0)
    };
    let x: (&str, &[usize], &[u8]) = ("F32", &[2, 3], &f32s);
    let y: (&str, &[usize], &[u8]) = ("U8", &[2], &[0, 1]);
    check(
        &with(x, ("U8", &[3], &[0; 3])),
        &format!("{data}: array \"x\" F32 [2, 3], element 0: the first dim counts samples"),
    );
    check(&with(x, ("F32", &[2], &[0; 8])), "element 0: labels of a floating-point type are not classes");
    check(&with(x, ("U8", &[2, 1], &[0; 2])), "element 0: labels are integers");
    check(&with(("F32", &[0, 3], &[]), ("U8", &[0], &[])), "element 0: labels are integers");
    check(&with(("F32", &[2, 0], &[]), y), "element 0: samples are empty");
    check(&with(("F16", &[2, 3], &[0; 12]), y), "element 0: features are rows");
    let unknown = with(("F8_E4M3", &[2, 3], &[0; 6]), y);
    check(&unknown, &format!("{}: array \"x\" has elements of type F8_E4M3", unknown.len() - 8));
    check(&with(x, ("BOOL", &[2], &[0; 2])), "element 0: labels are integers");
    check(&with(("I64", &[2, 1, 1], &[0; 16]), y), "element 0: features are rows");
    check(&with(("F32", &[2], &[0; 8]), y), "element 0: features are rows");
    let ids = le(&[0i32, 1, 2, -1], i32::to_le_bytes);
    let negative = with(("I32", &[2, 2], &ids), y);
    check(&negative, &format!("{}: array \"x\" I32 [2, 2], element 3: id -1", negative.len() - 6));
    let labels = with(x, ("I64", &[2], &le(&[0, 1i64 << 40], i64::to_le_bytes)));
    check(&labels, &format!("{}: array \"y\" I64 [2], element 1: label 1099511627776", labels.len() - 8));

    let error = open(&good).unwrap().with_classes(1).unwrap_err().to_string();
    let want = format!(
        "at byte {}: array \"y\" U8 [2], element 1: label 1, but there are 1 classes",
        good.len() - 1
    );
    assert!(error.contains(&want), "{error}");
    let ids = with(("U8", &[2, 2], &[0, 1, 5, 2]), y);
    let error = open(&ids).unwrap().with_vocab(5).unwrap_err().to_string();
    assert!(error.contains("element 2: id 5, but there are 5 ids"), "{error}");
    assert_eq!(
        open(&ids).unwrap().with_vocab(50).unwrap().spec().features,
        Features::Ids { time: 2, vocab: 50 }
    );
    assert!(matches!(open(&good).unwrap().with_vocab(5), Err(DataError::Setting { .. })));
}

#[test]
fn damaged_files_never_panic() {
    let path = tempfile::NamedTempFile::new().unwrap();
    let ids = le(&[3i64, 4, 5, 6], i64::to_le_bytes);
    let f32s = le(&NUMBERS, f32::to_le_bytes);
    for good in [
        file(&[("x", "F32", &[2, 3], &f32s), ("y", "U8", &[2], &[0, 1])], 0),
        file(&[("x", "I64", &[2, 2], &ids), ("y", "I32", &[2], &[0; 8])], 1),
    ] {
        let read = || damage::read_all(&Arrays::open(path.path(), "x", "y")?);
        damage::each(&good, 400, path.path(), read);
    }
}

#[test]
fn labels_of_any_type_are_numbers_or_zeros_and_ones() {
    let read = |dtype: &str, shape: &[usize], bytes: &[u8], kind| {
        let x = le(&NUMBERS, f32::to_le_bytes);
        let content = file(&[("x", "F32", &[2, 3], &x), ("y", dtype, shape, bytes)], 1);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), content).unwrap();
        Arrays::open_as(file.path(), "x", "y", kind)
    };
    let check = |dtype: &str, shape: &[usize], bytes: &[u8], kind, last: &[f32]| {
        let arrays = read(dtype, shape, bytes, kind).unwrap();
        assert_eq!((arrays.spec().n_labels(), arrays.spec().outputs()), (last.len(), last.len()));
        assert_eq!(arrays.spec().target.kind(), Some(kind));
        let mut scratch = Scratch::default();
        assert_eq!(arrays.fetch(1, &mut scratch).unwrap().label, Label::Values(last), "{dtype} {shape:?}");
        assert_eq!(arrays.class(1).unwrap(), None);
    };
    let (numbers, labels) = (LabelKind::Numbers, LabelKind::Labels);
    let f32s = le(&[0.5_f32, -1.0, 2.0, 3.5], f32::to_le_bytes);
    check("F32", &[2, 2], &f32s, numbers, &[2.0, 3.5]);
    check("F32", &[2], &f32s[..8], numbers, &[-1.0]);
    check("F64", &[2], &le(&[0.5_f64, -7.25], f64::to_le_bytes), numbers, &[-7.25]);
    check("I64", &[2, 1], &le(&[3_i64, -9], i64::to_le_bytes), numbers, &[-9.0]);
    check("U8", &[2, 2], &[0, 1, 1, 0], labels, &[1.0, 0.0]);
    check("BOOL", &[2, 2], &[0, 1, 1, 1], labels, &[1.0, 1.0]);
    check("F32", &[2], &le(&[1.0_f32, 0.0], f32::to_le_bytes), labels, &[0.0]);
    let refused = |dtype: &str, shape: &[usize], bytes: &[u8], kind, want: &str| {
        let error = read(dtype, shape, bytes, kind).unwrap_err().to_string();
        assert!(error.contains(want), "{error:?} lacks {want:?}");
    };
    let nan = le(&[1.0_f32, f32::NAN], f32::to_le_bytes);
    refused("F32", &[2], &nan, numbers, "element 1: label NaN is not a finite number");
    refused("F32", &[2], &f32s[..8], labels, "element 0: label 0.5 is not 0 or 1");
    refused("U8", &[1, 1, 2], &[0, 1], numbers, "[n] or [n, k]");
    let classes = LabelKind::Classes;
    let class = "element 0: label 0.5 is not a class; for a numeric target set `train.loss = \"mse\"`";
    refused("F32", &[2], &f32s[..8], classes, class);
    refused("F32", &[2], &le(&[1.0_f32, 0.0], f32::to_le_bytes), classes, "save them as integers");
    refused("U8", &[2, 2], &[0, 1, 1, 0], classes, "labels are integers, one per sample");
    refused("U8", &[2, 2], &[0, 1, 1, 0], classes, "for several numbers set `train.loss = \"mse\"`");
}
