//! Tables whose rows stay in their files, beside the same tables in memory.

use std::fs;

use super::*;
use crate::stats::Stats;

/// A folder with a file of this content.
fn file(name: &str, content: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, content).unwrap();
    (folder, path)
}

/// What a table says and what its samples are, to the bit; or its error.
fn content(table: Result<Table, DataError>) -> Result<String, String> {
    let table = table.map_err(|e| e.to_string())?;
    let (mut all, mut scratch) =
        (format!("{:?} {:?} {:?}\n", table.spec, table.columns, table.schema), Scratch::default());
    // In an order that goes back and forth, as training does.
    for i in 0..table.len() {
        let idx = i * 7919 % table.len();
        let sample = table.fetch(idx, &mut scratch).map_err(|e| e.to_string())?;
        all += &format!("{idx} {sample:?} {:?}\n", table.class(idx));
    }
    table.intact().unwrap();
    Ok(all)
}

/// The table is the same where it lies, in chunks of any size.
#[track_caller]
fn check(name: &str, text: &str, options: &TableOptions) -> Result<String, String> {
    let (_folder, path) = file(name, text);
    let format = TableFormat::of(&path).unwrap();
    let options = TableOptions { format, ..options.clone() };
    let memory = content(Table::open(&path, &options));
    let stored = TableOptions { stored: true, ..options.clone() };
    assert_eq!(content(Table::open(&path, &stored)), memory);
    // What was learnt of the columns is the same for all; so the pieces are tried by it.
    let Ok(known) = Table::open(&path, &options) else { return memory };
    let by = TableOptions { schema: known.schema.clone(), ..stored };
    for (bytes, threads) in [(1, 1), (40, 3), (300, 2)] {
        let text = Text::open(&path, &by).unwrap();
        let heading = text.heading().unwrap();
        let labels = labels_of(&text, &heading, &by).unwrap();
        let indexed = Table::index(text, heading, &labels, None, Chunks { bytes, threads })
            .map_err(DataError::from)
            .unwrap();
        let indexed = indexed.with_target(&known.spec.target);
        assert!(indexed.as_ref().is_ok_and(Table::is_stored));
        assert_eq!(content(indexed), memory, "{bytes} {threads}");
    }
    memory
}

fn options(label: &str) -> TableOptions {
    TableOptions { labels: vec![label.into()], ..TableOptions::default() }
}

fn rows(n: usize, row: impl Fn(usize) -> String) -> String {
    (0..n).map(row).collect()
}

#[test]
fn samples_are_those_of_the_table_in_memory() {
    let numbers = rows(100, |i| format!("{},{}.5,{}\r\n", i, i * i, ["b", "a", "c"][i % 3]));
    check("t.csv", &format!("x,z,y\r\n{numbers}"), &options("y")).unwrap();
    check("t.csv", &numbers, &TableOptions::default()).unwrap();
    let mixed = |i: usize| {
        let town = if i % 13 == 5 { String::new() } else { format!("\"town,\n{}\"", i % 45) };
        let age = if i.is_multiple_of(7) { "NA".into() } else { (i * 3 % 50).to_string() };
        format!("{age},{town},2024-0{}-01,{},{}\n", i % 9 + 1, ["yes", "no"][i % 2], i % 4)
    };
    let table = format!("age,town,day,member,y\n{}", rows(200, mixed));
    check("t.csv", &table, &options("y")).unwrap();
    check("t.csv", &table, &TableOptions { kind: LabelKind::Numbers, ..options("y") }).unwrap();
    let noted = |i: usize| {
        let note = if i % 11 == 4 {
            String::new()
        } else {
            format!("\"on day {i}, it rained {} in the {}\"", ["a lot", "not"][i % 2], i % 7)
        };
        format!("{note},{},town {},{}\n", i * 3 % 50, i % 45, i % 2)
    };
    let noted = format!("note,age,town,y\n{}", rows(200, noted));
    let content = check("t.csv", &noted, &options("y")).unwrap();
    assert!(content.contains("texts: [TextIds { ids: "), "{content}");
    let line = |i: usize| match i % 5 {
        0 => format!("{{\"y\": {}, \"x\": {i}}}\n\n", i % 2),
        _ => format!("{{\"x\": {i}.25, \"city\": \"{}\", \"y\": {}}}\n", ["Rome", "Oslo"][i % 2], i % 2),
    };
    check("t.jsonl", &rows(120, line), &options("y")).unwrap();
}

#[test]
fn errors_are_those_of_the_table_in_memory() {
    for (text, part) in [
        ("a,b,y\n", "no rows under the header"),
        ("a,b,y\n1,2,0\n3,4\n", "line 3, column 4: 2 fields, but the first row has 3"),
        ("a,b,y\n1,2,0\n3,1e39,1\n", "\"1e39\" is not a finite number"),
        ("a,b,y\n1,2,0\n3,4,\n", "line 3, column 5: field \"y\": is empty"),
        ("a,b,y\n1,2,0\n2,3,1\n3,red,1\n", "\"red\" is not a number, but 2 of 3"),
        ("a,b,y\n1,2,0\n2,\"3,1\n", "a quote opens here and is never closed"),
    ] {
        let named = TableOptions { header: Some(true), ..options("y") };
        let error = check("t.csv", text, &named).unwrap_err();
        assert!(error.contains(part), "{error} lacks {part}");
    }
    let (_folder, path) = file("t.jsonl", "[{\"x\": 1, \"y\": 0}]");
    let stored = TableOptions { stored: true, format: TableFormat::JsonLines, ..options("y") };
    let error = Table::open(&path, &stored).unwrap_err().to_string();
    assert!(error.contains("`data.in_memory`"), "{error}");
}

#[test]
fn ids_are_pointed_out_and_statistics_are_the_same() {
    let text = format!("id,x,y\n{}", rows(60, |i| format!("{},{},{}\n", i + 5, i * 7 % 11, i % 2)));
    let (_folder, path) = file("t.csv", &text);
    let open = |stored| Table::open(&path, &TableOptions { stored, ..options("y") }).unwrap();
    let (memory, stored) = (open(false), open(true));
    assert!(stored.is_stored() && !memory.is_stored());
    assert_eq!((memory.like_ids(), stored.like_ids()), (vec!["id".to_string()], vec!["id".to_string()]));
    assert_eq!(Stats::of(&memory, 1000).unwrap(), Stats::of(&stored, 1000).unwrap());
}

/// A file that is cut after it was opened is an error, not rows of zeros.
#[test]
fn a_file_that_is_cut_is_an_error() {
    let text = rows(5000, |i| format!("{i},{i},{}\n", i % 2));
    let (_folder, path) = file("t.csv", &text);
    let table = Table::open(&path, &TableOptions { stored: true, ..TableOptions::default() }).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let mut scratch = Scratch::default();
    let outcome = table.fetch(4999, &mut scratch).map(drop).and_then(|()| table.intact());
    assert!(outcome.is_err() || table.intact().is_err());
}

/// What is found in the columns does not depend on how the file is cut.
#[test]
fn surveys_of_chunks_are_those_of_the_file() {
    let row = |i: usize| {
        let size = if i % 9 == 4 { "?".into() } else { format!("{}.25", i * 37 % 101) };
        format!("{i},{size},{},2021-03-{:02},{}\n", ["a", "b", "c"][i * i % 3], i % 28 + 1, ["t", "f"][i % 2])
    };
    let text = format!("id,size,kind,day,is\n{}", rows(300, row));
    let (_folder, path) = file("t.csv", &text);
    let surveyed = |chunks: Chunks| {
        let text = Text::open(&path, &TableOptions::default()).unwrap();
        let heading = text.heading().unwrap();
        let mut surveys: Vec<_> = heading.names.iter().map(|name| ColumnSurvey::new(name, true)).collect();
        look(&text, &heading, &[0, 1, 2, 3, 4], &mut surveys, None, chunks).unwrap();
        surveys
    };
    let whole = surveyed(Chunks { bytes: 1 << 20, threads: 1 });
    for bytes in [1, 100, 3000] {
        let cut = surveyed(Chunks { bytes, threads: 2 });
        for (a, b) in whole.iter().zip(&cut) {
            assert_eq!(
                (a.kind(), a.rows, a.blanks, a.range_text()),
                (b.kind(), b.rows, b.blanks, b.range_text())
            );
            assert_eq!(
                (a.values(), a.counts_rows(), a.n_distinct()),
                (b.values(), b.counts_rows(), b.n_distinct())
            );
            assert!((a.mean() - b.mean()).abs() < 1e-9 && a.histogram(8) == b.histogram(8), "{}", a.name);
            assert_eq!(a.parts().len(), b.parts().len());
        }
    }
}
