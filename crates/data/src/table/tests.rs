//! Good, ragged, mislabelled and damaged tables.

use std::fs;

use super::*;
use crate::damage;

fn open(content: impl AsRef<[u8]>, options: &TableOptions) -> Result<Table, DataError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), content).unwrap();
    Table::open(file.path(), options)
}

fn label(label: &str) -> TableOptions {
    TableOptions { labels: vec![label.into()], ..TableOptions::default() }
}

/// Rows, their classes, names of classes.
type Content<'a> = (&'a [&'a [f32]], &'a [usize], usize, &'a [&'a str]);

#[track_caller]
fn check(content: impl AsRef<[u8]>, options: &TableOptions, (rows, labels, n, names): Content) {
    let table = open(content, options).unwrap();
    let target = Target::Class { classes: n, names: names.iter().map(|n| n.to_string()).collect() };
    assert_eq!(*table.spec(), Spec { features: Features::Row { width: rows[0].len() }, target });
    assert_eq!(table.len(), rows.len());
    damage::read_all(&table).unwrap();
    for (i, (row, &label)) in rows.iter().zip(labels).enumerate() {
        let mut scratch = Scratch::default();
        let want = Fetched { values: Values::F32(row), label: Label::Class(label) };
        assert_eq!(table.fetch(i, &mut scratch).unwrap(), want);
    }
}

#[test]
fn good_tables_are_read() {
    let plain = TableOptions::default();
    check("1,2.5,0\n-3e1,4,2\n", &plain, (&[&[1.0, 2.5], &[-30.0, 4.0]], &[0, 2], 3, &[]));
    check("a,b,y\n1,2,1.0\n3,4,0.0", &plain, (&[&[1.0, 2.0], &[3.0, 4.0]], &[1, 0], 2, &[]));
    check("1,cat\n2,ant\n3,cat\n", &plain, (&[&[1.0], &[2.0], &[3.0]], &[1, 0, 1], 2, &["ant", "cat"]));
    check("1,-1\n2,10\n3,2\n", &plain, (&[&[1.0], &[2.0], &[3.0]], &[0, 2, 1], 3, &["-1", "2", "10"]));
    check("1,70000\n2,5\n", &plain, (&[&[1.0], &[2.0]], &[1, 0], 2, &["5", "70000"]));
    check("y,a,b\n1,7,8\n0,9,9\n", &label("y"), (&[&[7.0, 8.0], &[9.0, 9.0]], &[1, 0], 2, &[]));
    check("1,7,8\n0,9,9\n", &label("0"), (&[&[7.0, 8.0], &[9.0, 9.0]], &[1, 0], 2, &[]));
    check("7,1,8\n9,0,9\n", &label("-2"), (&[&[7.0, 8.0], &[9.0, 9.0]], &[1, 0], 2, &[]));
    check("\u{feff}a,y\r\n1, 1\r\n\r\n\"2\" ,0\r\n\n", &plain, (&[&[1.0], &[2.0]], &[1, 0], 2, &[]));
    check("1,\"a \"\"b\"\", c\"\n2,d\n", &plain, (&[&[1.0], &[2.0]], &[0, 1], 2, &["a \"b\", c", "d"]));
    let tabs = TableOptions { delimiter: b'\t', header: Some(false), ..plain.clone() };
    check("1\t0\n2\t1\n", &tabs, (&[&[1.0], &[2.0]], &[0, 1], 2, &[]));
    let numbers_as_names = TableOptions { header: Some(true), ..plain };
    check("10,20\n1,0\n", &numbers_as_names, (&[&[1.0]], &[0], 1, &[]));
    assert_eq!(open("y,a,b\n1,7,8\n", &label("y")).unwrap().columns().features, ["a", "b"]);
}

#[test]
fn bad_tables_are_errors_with_file_offset_line_and_column() {
    #[track_caller]
    fn check(content: impl AsRef<[u8]>, options: &TableOptions, want: &str) {
        let error = open(content, options).expect_err(want).to_string();
        assert!(error.contains(&format!(": at byte {want}")), "{error:?} lacks {want:?}");
    }
    let plain = TableOptions::default();
    check("", &plain, "0: line 1, column 1: the file is empty");
    check("a,b,y\n", &TableOptions { header: Some(true), ..plain.clone() }, "6: line 2, column 1: no rows");
    check("1,2,0\n3,4\n", &plain, "9: line 2, column 4: 2 fields, but the first row has 3");
    check("1,2,0\n3,4,5,6\n", &plain, "12: line 2, column 7: 4 fields, but the first row has 3");
    check("1,2,0\n3,4,\n", &plain, "10: line 2, column 5: field 2: is empty");
    check("1,2,0\n3,1e39,1\n", &plain, "8: line 2, column 3: field 1: \"1e39\" is not a finite number");
    check(
        "1,2,0\n3,red,1\n",
        &plain,
        "8: line 2, column 3: field \"1\": \"red\" is not a number, but 1 of 2",
    );
    check("1,0\n2,nan\n", &plain, "6: line 2, column 3: field 1: \"nan\" is not a label");
    check(
        "1,0.5\n2,1\n",
        &plain,
        "2: line 1, column 3: label 0.5 is not a class; for a numeric target set `train.loss = \"mse\"`",
    );
    check("1,a\n2,\"b\n3,c\n", &plain, "6: line 2, column 3: a quote opens here and is never closed");
    let missing =
        "6: line 2, column 3: a quote opens here and closes at line 4, column 3, where the field goes on";
    check("1,a\n2,\"b\n3,c\n4,\"d\n", &plain, missing);
    check("1,a\n2,\"b\n3,c\"\n", &plain, "6: line 2, column 3: field 1: \"b\\n3,c\" goes on in another line");
    check("1\n2\n", &plain, "0: line 1, column 1: only one column");
    check("a,b\n1,0\n", &label("c"), "0: line 1, column 1: no column \"c\"; the header has a, b");
    check("1,0\n2,0\n", &label("c"), "0: line 1, column 1: no column \"c\": the table has no header");
    check("1,0\n2,0\n", &label("2"), "0: line 1, column 1: no column 2: the table has 2, counted from 0");
    check(
        "\"1\",5\" nail,x,0\n2,3,4,0\n",
        &TableOptions { header: Some(false), ..plain.clone() },
        "4: line 1, column 5",
    );
    check("\"a\"\",\",b,y\n1,2,0\n3,q,0\n", &plain, "19: line 3, column 3: field \"b\"");
    check(b"1,0\n\xff,1\n", &plain, "4: line 2, column 1: field \"0\": \"\u{fffd}\" is not a number");
    check(b"1,a\n2,\xff\n", &plain, "6: line 2, column 3: field 1: \"\u{fffd}\" is not UTF-8");
    check(
        "\"a\nb\",y\n1,0\n\"2\n\",x\nq,0\n",
        &plain,
        "19: line 6, column 1: field \"a\\nb\": \"q\" is not a number",
    );
    let quote = TableOptions { delimiter: b'"', ..plain };
    assert!(matches!(open("1,0\n", &quote), Err(DataError::Setting { .. })));
}

#[test]
fn classes_are_shared() {
    let plain = TableOptions::default();
    let train = open("1,b\n2,c\n3,a\n", &plain).unwrap();
    let test = open("1,c\n2,b\n", &plain).unwrap().with_target(&train.spec().target).unwrap();
    assert_eq!(test.spec(), train.spec());
    assert_eq!((test.class(0).unwrap(), test.class(1).unwrap()), (Some(2), Some(1)));
    // Where a label is, is looked for in the file when it is wrong.
    let file = tempfile::NamedTempFile::new().unwrap();
    let kept = |content: &str| {
        fs::write(file.path(), content).unwrap();
        Table::open(file.path(), &plain).unwrap()
    };
    let error = kept("1,c\n2,d\n").with_target(&train.spec().target).unwrap_err().to_string();
    assert!(error.contains(
        "at byte 6: line 2, column 3: label \"d\" is not among those of the training set: a, b, c"
    ));

    let numbers = open("1,0\n2,3\n", &plain).unwrap();
    let test = open("1,2\n", &plain).unwrap().with_target(&numbers.spec().target).unwrap();
    assert_eq!((test.spec().classes(), test.class(0).unwrap()), (4, Some(2)));
    let error = kept("1,4\n").with_target(&numbers.spec().target).unwrap_err().to_string();
    assert!(error.contains("at byte 2: line 1, column 3: label \"4\" is not among"), "{error}");
    let signed = open("1,-1\n2,1\n", &plain).unwrap();
    let test = open("1,1.0\n", &plain).unwrap().with_target(&signed.spec().target).unwrap();
    assert_eq!(test.class(0).unwrap(), Some(1));
}

#[test]
fn features_alone_are_read_with_or_without_labels() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let read = |content: &str, width, options: &TableOptions| {
        fs::write(file.path(), content).unwrap();
        Table::features_only(file.path(), width, options)
    };
    let plain = TableOptions::default();
    for (content, options) in [
        ("1,2\n3,4\n", &plain),
        ("a,b\n1,2\n3,4\n", &plain),
        ("1,2,\n3,4,\n", &plain),
        ("a,b,y\n1,2,cat\n3,4,dog\n", &plain),
        ("y,a,b\n,1,2\n,3,4\n", &label("y")),
    ] {
        let table = read(content, 2, options).unwrap();
        assert_eq!((table.len(), table.has_labels()), (2, false), "{content}");
        let mut scratch = Scratch::default();
        assert_eq!(table.fetch(1, &mut scratch).unwrap().values, Values::F32(&[3.0, 4.0]), "{content}");
        damage::read_all(&table).unwrap();
        let target = Target::Class { classes: 7, names: Vec::new() };
        assert_eq!(table.with_target(&target).unwrap().spec().classes(), 7);
    }
    let error = read("1,2\n", 5, &plain).unwrap_err().to_string();
    assert!(error.contains("2 columns, but the model takes 5 features"), "{error}");
    assert!(read("1\n", 0, &plain).is_err());
}

#[test]
fn damaged_tables_never_panic() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for good in ["a,b,y\n1,2,cat\n3.5,4e2,dog\n-1,0,\"a cow\"\n", "1,2,0\r\n3,4,1\r\n5,6,2\r\n"] {
        let path = file.path();
        let both = || {
            let alone = Table::features_only(path, 2, &TableOptions::default()).map(drop);
            damage::read_all(&Table::open(path, &TableOptions::default())?)?;
            alone
        };
        damage::each(good.as_bytes(), 400, path, both);
    }
}

fn of_kind(kind: LabelKind, labels: &[&str]) -> TableOptions {
    TableOptions { kind, labels: labels.iter().map(|l| l.to_string()).collect(), ..TableOptions::default() }
}

#[test]
fn numbers_and_labels_are_read() {
    #[track_caller]
    fn check(content: &str, options: &TableOptions, target: Target, rows: &[(&[f32], &[f32])]) {
        let table = open(content, options).unwrap();
        assert_eq!((&table.spec().target, table.len()), (&target, rows.len()), "{content}");
        for (i, (values, label)) in rows.iter().enumerate() {
            let want = Fetched { values: Values::F32(values), label: Label::Values(label) };
            assert_eq!(table.fetch(i, &mut Scratch::default()).unwrap(), want, "{content}");
            assert_eq!(table.class(i).unwrap(), None);
        }
    }
    let names = |of: &[&str]| of.iter().map(|n| n.to_string()).collect::<Vec<_>>();
    let numbers = |labels: &[&str]| of_kind(LabelKind::Numbers, labels);
    let (plain, n) = (Target::Numbers { n: 1, names: vec![] }, LabelKind::Labels);
    check("1,2,3.5\n4,5,-6e2\n", &numbers(&[]), plain, &[(&[1.0, 2.0], &[3.5]), (&[4.0, 5.0], &[-600.0])]);
    let price = Target::Numbers { n: 1, names: names(&["price"]) };
    check("price,a\n10,2\n", &numbers(&["price"]), price, &[(&[2.0], &[10.0])]);
    // In the order in which they were asked for.
    let two = Target::Numbers { n: 2, names: names(&["c", "a"]) };
    check(
        "a,b,c\n1,2,3\n4,5,6\n",
        &numbers(&["c", "a"]),
        two,
        &[(&[2.0], &[3.0, 1.0]), (&[5.0], &[6.0, 4.0])],
    );
    let labels = Target::Labels { n: 2, names: names(&["wet", "cold"]) };
    let content = "x,wet,cold\n.5,1,0.0\n2,0,1\n";
    check(content, &of_kind(n, &["wet", "cold"]), labels, &[(&[0.5], &[1.0, 0.0]), (&[2.0], &[0.0, 1.0])]);
}

#[test]
fn targets_that_are_none_are_refused_with_their_line() {
    #[track_caller]
    fn check(content: &str, options: &TableOptions, parts: &[&str]) {
        let error = open(content, options).expect_err(content).to_string();
        parts.iter().for_each(|part| assert!(error.contains(part), "{error:?} lacks {part:?}"));
    }
    let numbers = of_kind(LabelKind::Numbers, &["y"]);
    check(
        "a,y\n1,2\n2,dear\n",
        &numbers,
        &["line 3, column 3", "\"dear\" is not a number", "data.label", "train.loss"],
    );
    check("a,y\n1,2\n2,\n", &numbers, &["line 3, column 3", "field \"y\": is empty; fill it"]);
    check("a,y\n1,2\n2,nan\n", &numbers, &["line 3, column 3", "is not a finite number"]);
    let labels = of_kind(LabelKind::Labels, &["y"]);
    check("a,y\n1,1\n2,2\n", &labels, &["line 3, column 3", "\"2\" is not 0 or 1", "bce"]);
    check("a,y\n1,1\n2,\n", &labels, &["line 3, column 3", "is empty"]);
    check("a,b,y\n1,2,3\n", &of_kind(LabelKind::Classes, &["a", "y"]), &["one label's column", "mse", "bce"]);
    check("a,y\n1,2\n", &of_kind(LabelKind::Numbers, &["a", "y"]), &["at least one feature"]);
    check("a,b,y\n1,2,3\n", &of_kind(LabelKind::Numbers, &["y", "-1"]), &["twice"]);
}

#[test]
fn several_targets_are_left_out_or_found_by_name() {
    let columns = Columns { features: vec!["a".into(), "b".into()], labels: vec!["y".into(), "z".into()] };
    let target = Target::Numbers { n: 2, names: columns.labels.clone() };
    let options = TableOptions { columns, ..of_kind(LabelKind::Numbers, &["y", "z"]) };
    let file = tempfile::NamedTempFile::new().unwrap();
    for content in ["b,a\n2,1\n", "z,a,b\n9,1,2\n", "y,a,z,b\nx,1,,2\n", "1,2\n", "1,2,8,9\n"] {
        fs::write(file.path(), content).unwrap();
        // Without a header, labels are where they were.
        let options = match content.starts_with('1') {
            true => {
                TableOptions { labels: vec!["2".into(), "3".into()], header: Some(false), ..options.clone() }
            }
            false => options.clone(),
        };
        let table = Table::features_only(file.path(), 2, &options).unwrap().with_target(&target).unwrap();
        let want = Fetched { values: Values::F32(&[1.0, 2.0]), label: Label::Values(&[0.0, 0.0]) };
        assert_eq!(table.fetch(0, &mut Scratch::default()).unwrap(), want, "{content}");
    }
    let read = |content: &str| {
        fs::write(file.path(), content).unwrap();
        Table::open_as(file.path(), &options, &target)
    };
    let table = read("z,b,y,a\n4,2,3,1\n").unwrap();
    let want = Fetched { values: Values::F32(&[1.0, 2.0]), label: Label::Values(&[3.0, 4.0]) };
    assert_eq!(table.fetch(0, &mut Scratch::default()).unwrap(), want);
    let error = read("a,b,y\n1,2,3\n").unwrap_err().to_string();
    assert!(error.contains("no column \"z\""), "{error}");
}
