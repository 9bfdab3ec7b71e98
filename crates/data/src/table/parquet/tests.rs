//! Parquet files that pyarrow wrote, beside a CSV of the same rows (`references/tables.py`); and any bytes as a Parquet file.

use std::path::PathBuf;

use polyreme_fuzz::{InFile, Target, scale};

use super::super::{ColumnChoice, Table, TableFormat, TableOptions, survey};
use super::*;
use crate::damage;
use crate::dataset::{Dataset, Scratch};
use crate::spec::LabelKind;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables").join(name)
}

fn options(format: TableFormat) -> TableOptions {
    TableOptions { format, labels: vec!["y".into()], ..TableOptions::default() }
}

const WRITTEN: [&str; 4] = ["snappy.parquet", "zstd.parquet", "gzip.parquet", "plain.parquet"];

#[test]
fn rows_are_those_of_the_csv() {
    let csv = Table::open(&fixture("same.csv"), &options(TableFormat::Csv)).unwrap();
    let lines = csv.schema().unwrap().lines();
    assert!(
        lines[0].starts_with("7 numbers, 1 yes or no, 2 dates, 1 category (one-hot); 5 with blanks"),
        "{lines:?}"
    );
    assert!(lines.iter().any(|line| line.contains("\"tags.list.element\" is left out")), "{lines:?}");
    for name in WRITTEN {
        let read = Table::open(&fixture(name), &options(TableFormat::Parquet)).unwrap();
        assert_eq!(
            (read.schema(), read.spec(), read.columns()),
            (csv.schema(), csv.spec(), csv.columns()),
            "{name}"
        );
        let (mut a, mut b) = (Scratch::default(), Scratch::default());
        for row in 0..csv.len() {
            assert_eq!(read.fetch(row, &mut a).unwrap(), csv.fetch(row, &mut b).unwrap(), "{name} row {row}");
        }
        // What was learnt of one is what the other is read by.
        let known = TableOptions { schema: csv.schema().cloned(), ..options(TableFormat::Parquet) };
        let used = Table::open_as(&fixture(name), &known, &csv.spec().target).unwrap();
        assert_eq!(used.len(), csv.len());
    }
}

#[test]
fn wrong_files_say_what_is_wrong() {
    let open = |path: &Path, options: &TableOptions| Table::open(path, options).unwrap_err().to_string();
    let plain = options(TableFormat::Parquet);
    let csv = open(&fixture("same.csv"), &plain);
    assert!(csv.contains("same.csv: not a Parquet file, or a damaged one"), "{csv}");
    let kind = TableOptions { kind: LabelKind::Numbers, ..plain.clone() };
    let words = open(&fixture("snappy.parquet"), &kind);
    assert!(words.contains("snappy.parquet: row 1: field \"y\": \"no\" is not a number"), "{words}");
    let missing =
        open(&fixture("snappy.parquet"), &TableOptions { labels: vec!["z".into()], ..plain.clone() });
    assert!(missing.contains("snappy.parquet: no column \"z\""), "{missing}");
    let folder = tempfile::tempdir().unwrap();
    let cut = folder.path().join("cut.parquet");
    let whole = std::fs::read(fixture("snappy.parquet")).unwrap();
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    assert!(open(&cut, &plain).contains("not a Parquet file, or a damaged one"));
}

#[test]
fn small_values_are_written_exactly() {
    let check = |meaning: Meaning, n: i128, text: &str| {
        let mut to = Vec::new();
        meaning.write(n, &mut to);
        assert_eq!(String::from_utf8(to).unwrap(), text);
    };
    check(Meaning::Decimal(2), -5, "-0.05");
    check(Meaning::Decimal(0), 12, "12");
    check(Meaning::Day, -1, "1969-12-31");
    check(Meaning::Time { per_second: 1000 }, -1, "1969-12-31T23:59:59");
    for (bits, is) in [
        (0x3c00u16, 1.0f32),
        (0xc000, -2.0),
        (0x0001, 5.960_464_5e-8),
        (0x7bff, 65504.0),
        (0xfc00, f32::NEG_INFINITY),
    ] {
        assert_eq!(f16(bits), is);
    }
    let mut to = Vec::new();
    Meaning::Decimal(1).write_bytes(&[0xff, 0xf6], &mut to);
    assert_eq!(to, b"-1.0");
}

#[test]
fn fuzz() {
    let corpus = WRITTEN.map(|name| std::fs::read(fixture(name)).unwrap());
    let target = Target {
        name: "parquet",
        corpus: corpus.into(),
        words: &[
            b"PAR1",
            b"\x15\x00",
            b"\x15\x02",
            b"\x15\x06",
            b"\x2c",
            b"\x4c",
            b"\x19\x1c",
            b"\xff\xff\xff\xff\x0f",
        ],
        mend: &|_, _| {},
        // A page is as large as its header says, up to 2 GiB; what is allocated for it is touched only as it is unpacked.
        memory: &|_| 4 << 30,
    };
    let file = InFile::new("parquet");
    target.run(|input| {
        let path = file.with(input);
        let choice = ColumnChoice::default();
        let options = TableOptions { choice, ..options(TableFormat::Parquet) };
        survey(&[path.to_path_buf()], &options).map_err(|e| e.to_string())?;
        let table = Table::open(path, &options).map_err(|e| e.to_string())?;
        damage::read_all(&table).unwrap();
        Ok(format!("{} {}", scale(table.spec().features.numel()), scale(table.len())))
    });
}
