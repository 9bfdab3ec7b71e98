//! Any text as a table: an error or numbers, which are the same after being written and read again.

use polyreme_fuzz::{InFile, Target, scale};

use super::*;
use crate::damage;

/// The options that the first byte of an input chooses.
fn options(choice: u8) -> TableOptions {
    let label = [None, Some("y"), Some("0"), Some("-2")][usize::from(choice & 3)];
    let labels = label.into_iter().map(String::from).collect();
    let header = [None, Some(true), Some(false), None][usize::from(choice >> 2 & 3)];
    let delimiter = b",;\t "[usize::from(choice >> 4 & 3)];
    TableOptions { labels, delimiter, header, ..TableOptions::default() }
}

#[test]
fn csv() {
    let corpus: [&[u8]; 8] = [
        b"@a,b,y\n1,2,cat\n3.5,4e2,dog\n-1,0,\"a cow\"\n",
        b"@1,2,0\r\n3,4,1\r\n5,6,2\r\n",
        b"A\xef\xbb\xbf\"x\",\"y\"\n 1 , 0\n.5,1\n",
        b"P1;2;0\n3;4;1\n",
        b"@\"a \"\"quoted\"\" name\",y\n\"1\",\"b\"\n2,c\n\n3,b",
        b"`1\t-2e-3\t7\n4\t5\t6\n",
        b"\xc0a,b,y\n1,2,0.5\n3.5,4e2,-7\n",
        b"\x80a,b,y\n1,2,0\n0,4e2,1\n",
    ];
    let target = Target {
        name: "csv",
        corpus: corpus.map(<[u8]>::to_vec).into(),
        words: &[
            b"\"",
            b"\"\"",
            b",",
            b";",
            b"\n",
            b"\r\n",
            b"\r",
            b"\t",
            b" ",
            b"nan",
            b"inf",
            b"-1e39",
            b"1e-50",
            b"\xff",
            b"y",
            b"\xef\xbb\xbf",
            b"0x10",
            b"1_000",
            b"1.0",
        ],
        mend: &|_, _| {},
        // What is known of a column before its type is takes more than the two bytes that a column can be.
        memory: &|len| (64 << 10) + 1024 * len,
    };
    let file = InFile::new("csv");
    target.run(|input| {
        let (&choice, text) = input.split_first().ok_or("no input")?;
        let (path, options) = (file.with(text), options(choice));
        let alone = Table::features_only(path, 2, &options);
        if let Ok(table) = &alone {
            damage::read_all(table).unwrap();
        }
        // As numbers or as labels, one or two of them.
        let kind = if choice >> 6 & 1 == 1 { LabelKind::Numbers } else { LabelKind::Labels };
        let labels = if choice >> 7 == 1 { vec!["0".into(), "-1".into()] } else { options.labels.clone() };
        if let Ok(table) = Table::open(path, &TableOptions { kind, labels, ..options.clone() }) {
            damage::read_all(&table).unwrap();
        }
        let table = Table::open(path, &options).map_err(|e| e.to_string())?;
        damage::read_all(&table).unwrap();
        let mut again = String::new();
        for (i, row) in table.values.chunks_exact(table.width()).enumerate() {
            row.iter().for_each(|x| again.push_str(&format!("{x},")));
            again.push_str(&format!("{}\n", table.class(i).unwrap().unwrap()));
        }
        let plain = TableOptions { header: Some(false), surely_classes: true, ..TableOptions::default() };
        let again = Table::open(file.with(again.as_bytes()), &plain).unwrap();
        assert_eq!(again.values, table.values);
        assert!((0..table.len()).all(|i| again.class(i).unwrap() == table.class(i).unwrap()));
        let columns = table.columns();
        let named = (columns.features.is_empty(), columns.labels.is_empty());
        Ok(format!(
            "{named:?} {} {} {}",
            scale(table.width()),
            scale(table.len()),
            scale(table.spec().classes())
        ))
    });
}
