//! Tables with words, dates and blanks.

use std::fs;

use super::schema::{DatePart, Reading};
use super::*;
use crate::damage;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }
}

fn options(label: &str) -> TableOptions {
    TableOptions { labels: vec![label.into()], ..TableOptions::default() }
}

fn words(of: &[&str]) -> Vec<String> {
    of.iter().map(|word| word.to_string()).collect()
}

fn open(content: &str, options: &TableOptions) -> Result<Table, DataError> {
    let folder = Folder::new();
    Table::open(&folder.file("t.csv", content), options)
}

#[track_caller]
fn check(table: &Table, rows: &[&[f32]]) {
    assert_eq!(table.len(), rows.len());
    damage::read_all(table).unwrap();
    for (i, row) in rows.iter().enumerate() {
        let fetched = table.fetch(i, &mut Scratch::default()).map(|f| f.values == Values::F32(row));
        assert!(fetched.unwrap(), "row {i}: {:?}", &table.values[i * table.width()..][..table.width()]);
    }
}

#[test]
fn words_blanks_and_booleans_become_numbers() {
    let content = "age,city,member,y\n10,Rome,yes,1\n,Oslo,no,0\n20,,yes,1\n30,Rome,YES,0\n";
    let table = open(content, &options("y")).unwrap();
    // Age and whether it is blank; Oslo, Rome, blank; member.
    check(
        &table,
        &[
            &[10.0, 0.0, 0.0, 1.0, 0.0, 1.0],
            &[20.0, 1.0, 1.0, 0.0, 0.0, 0.0],
            &[20.0, 0.0, 0.0, 0.0, 1.0, 1.0],
            &[30.0, 0.0, 0.0, 1.0, 0.0, 1.0],
        ],
    );
    assert_eq!(table.columns().features, ["age", "city", "member"]);
    assert_eq!(
        *table.spec(),
        Spec { features: Features::Row { width: 6 }, target: table.spec().target.clone() }
    );
    let schema = table.schema().unwrap();
    assert_eq!(schema.lines(), ["1 number, 1 yes or no, 1 category (one-hot); 2 with blanks; 6 inputs"]);
    let kept: TableSchema = serde_json::from_str(&serde_json::to_string(&**schema).unwrap()).unwrap();
    assert_eq!(kept, **schema);
}

/// A table of numbers is read as before, and the same numbers come out where columns are chosen.
#[test]
fn numbers_stay_numbers() {
    let content = "a,b,c,y\n1.5,2,3,0\n-4e3,0.1,6,1\n";
    let plain = open(content, &options("y")).unwrap();
    assert!(plain.schema().is_none());
    let choice = ColumnChoice { columns: words(&["a", "b", "c"]), ..ColumnChoice::default() };
    let chosen = open(content, &TableOptions { choice, ..options("y") }).unwrap();
    assert!(chosen.schema().is_some());
    assert_eq!(plain.values, chosen.values);
    let choice = ColumnChoice { ignore: words(&["b"]), ..ColumnChoice::default() };
    check(&open(content, &TableOptions { choice, ..options("y") }).unwrap(), &[&[1.5, 3.0], &[-4e3, 6.0]]);
}

#[test]
fn dates_become_what_varies_of_them() {
    let table = open("day,x,y\n2020-01-01,1,0\n2021-01-01,2,1\n,3,1\n", &options("y")).unwrap();
    let Reading::Date { parts } = &table.schema().unwrap().rules[0].reading else { panic!("a date") };
    let which: Vec<_> = parts.iter().map(|(part, _)| *part).collect();
    assert_eq!(which, [DatePart::Year, DatePart::WeekdaySin, DatePart::WeekdayCos]);
    assert_eq!(table.width(), 5);
    let year = |row: usize| table.values[row * 5];
    assert!((year(0) - 2020.0).abs() < 0.01 && (year(1) - 2021.0).abs() < 0.01);
    // A blank has the means, and its mark.
    assert!((year(2) - 2020.5).abs() < 0.01);
    assert_eq!((table.values[3], table.values[13]), (0.0, 1.0));
}

/// Categories with many values are ids after the numbers; what occurs once shares its id with what is not known.
#[test]
fn many_categories_are_ids() {
    let folder = Folder::new();
    let row = |i: usize| {
        format!("{},k{},{}\n", if i == 7 { String::new() } else { format!("v{}", i % 40) }, i % 3, i % 2)
    };
    let content = "town,kind,y\n".to_string() + &(0..120).map(row).collect::<String>() + "alone,k0,1\n";
    let path = folder.file("t.csv", &content);
    let table = Table::open(&path, &options("y")).unwrap();
    let features = Features::Mixed { numbers: 3, ids: vec![42], texts: Vec::new() };
    assert_eq!(table.spec().features, features);
    let schema = table.schema().unwrap().clone();
    assert!(schema.lines()[0].contains("1 category (learnt vectors)"), "{:?}", schema.lines());
    // Sorted, so that v0 is the first and v9 the last.
    let row = |i: usize| table.values[i * 4..][..4].to_vec();
    assert_eq!(row(0), [1.0, 0.0, 0.0, 1.0]);
    assert_eq!(row(9), [1.0, 0.0, 0.0, 40.0]);
    assert_eq!(row(7), [0.0, 1.0, 0.0, 41.0], "blank");
    assert_eq!(row(120)[3], 0.0, "alone");
    let small = ColumnChoice { one_hot: 50, ..ColumnChoice::default() };
    let one_hot = Table::open(&path, &TableOptions { choice: small, ..options("y") }).unwrap();
    assert_eq!(one_hot.spec().features, Features::Row { width: 3 + 42 });
    // In use: other order, more columns, values that are new, blanks where there were none.
    let new = folder.file("new.csv", "x,kind,town\n1,k9,v3\n2,k2,\n3,,nowhere\n");
    let known =
        TableOptions { columns: table.columns().clone(), schema: Some(schema), ..TableOptions::default() };
    let read = Table::features_only(&new, 4, &known).unwrap();
    let id_of_v3 = row(3)[3];
    check(&read, &[&[0.0, 0.0, 0.0, id_of_v3], &[0.0, 0.0, 1.0, 41.0], &[0.0, 0.0, 0.0, 0.0]]);
}

/// Texts are ids of their words, after all others; a word of one row shares its id with what is not known.
#[test]
fn texts_are_ids_of_words() {
    let folder = Folder::new();
    let row = |i: usize| {
        let note = match i {
            3 => String::new(),
            5 => "Wet!".into(),
            _ => format!(
                "\"The {} was {}, and it was number-{i}.\"",
                ["car", "boat"][i % 2],
                ["old", "new"][i / 2 % 2]
            ),
        };
        format!("{note},{i},town {},{}\n", i % 40, i % 2)
    };
    let content = "note,size,town,y\n".to_string() + &(0..80).map(row).collect::<String>();
    let path = folder.file("t.csv", &content);
    let table = Table::open(&path, &options("y")).unwrap();
    // The, was, and, it; car, boat; old, new.
    let texts = vec![crate::TextIds { ids: 10, length: 8 }];
    assert_eq!(table.spec().features, Features::Mixed { numbers: 1, ids: vec![41], texts: texts.clone() });
    let schema = table.schema().unwrap().clone();
    let Reading::Text { words: known, .. } = &schema.rules[0].reading else { panic!("a text") };
    assert_eq!(known[..4], words(&["and", "it", "the", "was"]));
    let id = |word: &str| known.iter().position(|known| known == word).unwrap() as f32 + 2.0;
    let ids = |i: usize| table.values[i * 10 + 2..][..8].to_vec();
    let mut want = ["the", "boat", "was", "old", "and", "it", "was"].map(id).to_vec();
    want.push(1.0);
    assert_eq!((ids(1), ids(3)), (want, vec![0.0; 8]));
    assert_eq!((ids(5)[..2].to_vec(), table.values[10]), (vec![1.0, 0.0], 1.0));
    let lines = schema.lines();
    assert!(
        lines[0].starts_with("1 number, 1 category (learnt vectors), 1 text; 1 with blanks; 10 inputs"),
        "{lines:?}"
    );
    assert!(lines[1].starts_with("\"note\" is a text of up to 8 words, of which 8 are known"), "{lines:?}");
    let kept: TableSchema = serde_json::from_str(&serde_json::to_string(&*schema).unwrap()).unwrap();
    assert_eq!(kept, *schema);
    // In use: another order, words that are new, blanks, more words than there is room for.
    let new = folder.file(
        "new.csv",
        "town,size,note\ntown 1,7,a BOAT\ntown 1,7,\ntown 1,7,car car car car car car car car boat\n",
    );
    let known = TableOptions {
        columns: table.columns().clone(),
        schema: Some(schema.clone()),
        ..TableOptions::default()
    };
    let read = Table::features_only(&new, 10, &known).unwrap();
    let town = table.values[11];
    let row = |words: &[f32]| {
        let mut row = vec![7.0, town];
        row.extend(words);
        row.resize(10, 0.0);
        row
    };
    check(&read, &[&row(&[1.0, id("boat")]), &row(&[]), &row(&[id("car"); 8])]);
    let numbers = folder.file("numbers.csv", "town,size,note\ntown 1,7,12\ntown 2,8,13\n");
    let said = Table::features_only(&numbers, 10, &known).unwrap_err().to_string();
    assert!(
        said.contains("column \"note\" has only numbers") && said.contains("words such as \"and\""),
        "{said}"
    );

    let learnt = |choice: ColumnChoice, finds_texts: bool| {
        let options = TableOptions { choice, finds_texts, ..options("y") };
        Table::open(&path, &options).unwrap().schema().unwrap().lines()
    };
    let lines = learnt(ColumnChoice::default(), false);
    assert!(lines[1].contains("\"note\" is left out: it looks like a text (79 different"), "{lines:?}");
    let short = ColumnChoice {
        texts: words(&["note", "size"]),
        text: TextChoice { length: Some(3), ..TextChoice::default() },
        ..ColumnChoice::default()
    };
    // A column that is named is a text whatever it looks like; one without a word that occurs twice teaches nothing.
    let lines = learnt(short, false);
    assert!(lines[1].contains("\"note\" is a text of up to 3 words, of which 8"), "{lines:?}");
    assert!(lines[2].contains("\"size\" is left out: it has no word that two rows have"), "{lines:?}");
}

#[test]
fn what_looks_like_an_id_is_said() {
    let row = |i: usize| format!("{i},name {i},{},{}\n", i * i % 17, ["a", "b"][i % 2]);
    let rows = (0..30).map(row).collect::<String>();
    let table = open(&format!("nr,name,x,y\n{rows}"), &options("y")).unwrap();
    let schema = table.schema().unwrap();
    // Words that nearly all differ are left out; numbers that count are used.
    assert_eq!(schema.names(), ["nr", "x"]);
    let lines = schema.lines();
    assert!(
        lines[1].contains("\"name\" is left out: it looks like an id or a name (30 different"),
        "{lines:?}"
    );
    assert!(lines[2].contains("\"nr\" counts the rows"), "{lines:?}");
    let choice =
        ColumnChoice { categories: words(&["name"]), ignore: words(&["nr"]), ..ColumnChoice::default() };
    let table = open(&format!("nr,name,x,y\n{rows}"), &TableOptions { choice, ..options("y") }).unwrap();
    assert_eq!(table.schema().unwrap().names(), ["name", "x"]);
    // Of numbers alone the same is said.
    let numbers = (0..30).map(|i| format!("{i},{},{}\n", i * i % 17, i % 2)).collect::<String>();
    let table = open(&format!("nr,x,y\n{numbers}"), &options("y")).unwrap();
    assert!(table.schema().is_none());
    assert_eq!(table.like_ids(), ["nr"]);
}

#[test]
fn numbers_can_be_categories() {
    let choice = ColumnChoice { categories: words(&["zip"]), ..ColumnChoice::default() };
    let table =
        open("zip,x,y\n100,1,0\n200,2,1\n100,3,0\n", &TableOptions { choice, ..options("y") }).unwrap();
    check(&table, &[&[1.0, 0.0, 1.0], &[0.0, 1.0, 2.0], &[1.0, 0.0, 3.0]]);
}

/// Parts of one table are learnt from together, and another file has the same columns in another order.
#[test]
fn parts_are_one_table() {
    let folder = Folder::new();
    let paths = [
        folder.file("1.csv", "c,x,y\nred,1,0\nblue,2,1\n"),
        folder.file("2.csv", "y,x,c\n1,,green\n0,6,red\n"),
    ];
    let tables = Table::open_all(&paths, &options("y")).unwrap();
    check(&tables[0], &[&[0.0, 0.0, 1.0, 1.0, 0.0], &[1.0, 0.0, 0.0, 2.0, 0.0]]);
    check(&tables[1], &[&[0.0, 1.0, 0.0, 3.0, 1.0], &[0.0, 0.0, 1.0, 6.0, 0.0]]);
    let error =
        Table::open_all(&[paths[0].clone(), folder.file("3.csv", "y,c\n1,red\n0,red\n")], &options("y"));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("3.csv") && error.contains("lacks \"x\""), "{error}");
}

#[test]
fn tables_without_a_header_have_numbers_for_names() {
    let folder = Folder::new();
    let table =
        Table::open(&folder.file("t.csv", "red,1,0\nblue,2,1\nred,,0\n"), &TableOptions::default()).unwrap();
    check(&table, &[&[0.0, 1.0, 1.0, 0.0], &[1.0, 0.0, 2.0, 0.0], &[0.0, 1.0, 1.5, 1.0]]);
    assert!(table.columns().is_empty());
    let schema = table.schema().cloned();
    let known = TableOptions { schema, ..TableOptions::default() };
    for content in ["blue,7,0\n", "blue,7\n", "blue,7,\n"] {
        let read = Table::features_only(&folder.file("new.csv", content), 4, &known).unwrap();
        check(&read, &[&[1.0, 0.0, 7.0, 0.0]]);
    }
    let error = Table::features_only(&folder.file("new.csv", "blue\n"), 4, &known).unwrap_err().to_string();
    assert!(error.contains("1 columns, but the training file has 3 and no header"), "{error}");
}

#[test]
fn a_header_over_words_is_found() {
    let content = "sky,wind,play\nsun,weak,no\nrain,strong,yes\nsun,weak,yes\n";
    let table = open(content, &TableOptions::default()).unwrap();
    assert_eq!((table.len(), table.columns().labels.as_slice()), (3, words(&["play"]).as_slice()));
    // Words that occur again are values.
    let table = open("sun,weak,no\nrain,strong,yes\nsun,weak,yes\n", &TableOptions::default()).unwrap();
    assert_eq!((table.len(), table.columns().is_empty()), (3, true));
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    #[track_caller]
    fn check(content: &str, options: &TableOptions, parts: &[&str]) {
        let error = open(content, options).expect_err(content).to_string();
        parts.iter().for_each(|part| assert!(error.contains(part), "{error:?} lacks {part:?}"));
    }
    let y = options("y");
    let number = "a,c,y\n1,red,0\n2,red,1\n3x,blue,1\n";
    check(
        number,
        &y,
        &["line 4, column 1", "field \"a\": \"3x\" is not a number, but 2 of 3 fields", "data.blanks"],
    );
    let date = "a,y\n2020-01-01,0\n2020-02-31,1\n2020-03-01,1\n";
    check(date, &y, &["line 3, column 1", "\"2020-02-31\" is not a date, but 2 of 3"]);
    check(
        "a,c,y\n1,red,0\n,blue,NA\n",
        &y,
        &["line 3, column 7", "field \"y\": \"NA\" is blank", "leave out the row"],
    );
    check("a,c,y\n1,red,0\n2,blue,\n", &y, &["line 3, column 8", "is blank"]);
    check("a,c,y\n1,red,0\n2,blue\n", &y, &["line 3, column 7", "2 fields, but the first row has 3"]);
    check("a,a,y\n1,red,0\n2,blue,1\n", &y, &["column \"a\" occurs twice"]);
    check("a,c,y\n1,red,0\n2,red,1\n", &options("z"), &["no column \"z\""]);
    check("c,y\nred,0\nred,1\n", &y, &["no column is left to learn from: \"c\" is \"red\" everywhere"]);
    check("a,c,y\n1,red,0\n1e999,blue,1\n", &y, &["line 3", "\"1e999\" is not a finite number"]);
    let choice = ColumnChoice { columns: words(&["b*"]), ..ColumnChoice::default() };
    check("a,c,y\n1,red,0\n", &TableOptions { choice, ..y }, &["`data.columns` has \"b*\", and no column"]);
}

#[test]
fn what_changed_since_training_is_said() {
    let folder = Folder::new();
    let train = "a,city,day,ok,y\n1,Rome,2020-01-01,true,0\n2,Oslo,2021-05-05,false,1\n";
    let table = Table::open(&folder.file("t.csv", train), &options("y")).unwrap();
    let known = TableOptions {
        columns: table.columns().clone(),
        schema: table.schema().cloned(),
        ..TableOptions::default()
    };
    let check = |content: &str, part: &str| {
        let path = folder.file("new.csv", content);
        let error = Table::features_only(&path, table.width(), &known).expect_err(content).to_string();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    };
    check("city,a,day\nRome,1,2020-01-01\n", "the header lacks \"ok\"");
    check("city,a,day,ok\nRome,high,2020-01-01,true\n", "\"high\" is not a number, as it was in training");
    check(
        "city,a,day,ok\nRome,1,soon,true\n",
        "\"soon\" is not a date such as 2024-03-31, as it was in training",
    );
    check("city,a,day,ok\nRome,1,2020-01-01,often\n", "\"often\" is not true or false");
    check("city,a,day,ok\n17,1,2020-01-01,true\n18,1,2020-01-01,true\n", "column \"city\" has only numbers");
    check("city,a,a,day,ok\nRome,1,1,2020-01-01,true\n", "column \"a\" occurs twice");
    check("Rome,1,2020-01-01,true\n", "no header");
    let others = |content: &str| open(content, &options("y")).unwrap().schema().unwrap().as_ref().clone();
    let schema = table.schema().unwrap();
    assert_eq!(schema.misfit(&others(&train.replace("\n1,", "\n9,"))), None);
    let said = schema.misfit(&others(&train.replace("Rome", "Bern"))).unwrap();
    assert!(said.contains("column \"city\" is category of 2 values"), "{said}");
    let said = schema.misfit(&others(&train.replace("\n1,", "\n,"))).unwrap();
    assert!(said.contains("column \"a\" is number with blanks and was number without blanks"), "{said}");
}

#[test]
fn damaged_tables_never_panic() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let good = "a,c,d,y\n1,red,2020-01-01,x\n,blue,,z\n3.5,red,2021-02-02,x\n";
    let known = Table::open(&Folder::new().file("t.csv", good), &TableOptions::default()).unwrap();
    let options = TableOptions {
        columns: known.columns().clone(),
        schema: known.schema().cloned(),
        ..TableOptions::default()
    };
    damage::each(good.as_bytes(), 400, file.path(), || {
        let alone = Table::features_only(file.path(), known.width(), &options).map(drop);
        let surveyed = survey(&[file.path().into()], &TableOptions::default()).map(drop);
        damage::read_all(&Table::open(file.path(), &TableOptions::default())?)?;
        alone.and(surveyed)
    });
}

#[test]
fn columns_are_described() {
    let folder = Folder::new();
    let row = |i: usize| {
        format!(
            "{i},{},{},{}\n",
            i % 4,
            ["a", "b", "b"][i % 3],
            if i.is_multiple_of(5) { "" } else { "true" }
        )
    };
    let path = folder.file("t.csv", &("n,m,w,t\n".to_string() + &(0..9000).map(row).collect::<String>()));
    let found = survey(&[path], &TableOptions::default()).unwrap();
    let kinds: Vec<_> = found.iter().map(ColumnSurvey::kind).collect();
    assert_eq!(kinds, [ColumnType::Number, ColumnType::Number, ColumnType::Category, ColumnType::Boolean]);
    assert_eq!(
        (found[0].range(), found[0].n_distinct(), found[0].counts_rows()),
        (Some((0.0, 8999.0)), (9000, false), true)
    );
    assert_eq!((found[1].n_distinct().0, found[3].blanks), (4, 1800));
    assert_eq!(found[2].values(), [("b".into(), 6000), ("a".into(), 3000)]);
    // Evenly spread numbers fill all bins alike, also where a sample stands for them.
    let bins = found[0].histogram(8);
    assert!(bins.iter().all(|&n| n.abs_diff(bins.iter().sum::<usize>() / 8) <= 2), "{bins:?}");
}

/// The same table as JSON lines, as an array and as CSV has the same rows.
#[test]
fn json_lines_are_read_as_csv_is() {
    let folder = Folder::new();
    let csv = folder.file("t.csv", "a,city,ok,y\n1.5,Rome,true,0\n,Oslo,false,1\n-2e3,,true,0\n");
    let want = Table::open(&csv, &options("y")).unwrap();
    let rows = [
        "{\"city\": \"Rome\", \"a\": 1.5, \"ok\": true, \"y\": 0}",
        "{\"y\": 1, \"city\": \"Oslo\", \"a\": null, \"ok\": false}",
        "{\"a\": -2000, \"ok\": true, \"y\": 0}",
    ];
    let json = TableOptions { format: TableFormat::JsonLines, ..options("y") };
    for content in [rows.join("\n") + "\n\n", rows.join("\r\n"), format!(" [{}]", rows.join(",\n"))] {
        let table = Table::open(&folder.file("t.jsonl", &content), &json).unwrap();
        assert_eq!(
            (&table.values, table.spec(), table.columns()),
            (&want.values, want.spec(), want.columns())
        );
        assert_eq!(table.schema(), want.schema());
    }
    // Numbers alone are read without a schema.
    let plain = Table::open(
        &folder.file("n.jsonl", "{\"b\": 2, \"a\": 1, \"y\": 0}\n{\"a\": 3, \"b\": 4, \"y\": 1}\n"),
        &json,
    )
    .unwrap();
    assert!(plain.schema().is_none());
    check(&plain, &[&[1.0, 2.0], &[3.0, 4.0]]);
    let file = |content: &str| folder.file("t.jsonl", content);
    for (content, label, part) in [
        ("{\"a\": 1}\n{\"a\": \n", "a", "line 2, column 1: EOF"),
        ("[1, 2]\n", "a", "array of JSON objects"),
        ("3\n", "a", "each line is one JSON object"),
        ("\n\n", "a", "the file is empty"),
        ("{\"a\": 1, \"y\": 2}\n", "z", "no column \"z\""),
    ] {
        let error = Table::open(&file(content), &TableOptions { labels: words(&[label]), ..json.clone() });
        let error = error.expect_err(content).to_string();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    let none = TableOptions { labels: Vec::new(), ..json.clone() };
    let error = Table::open(&file("{\"a\": 1, \"y\": 2}\n"), &none).unwrap_err().to_string();
    assert!(error.contains("name the label's key with `data.label`; there are a, y"), "{error}");
    let scratch = tempfile::NamedTempFile::new().unwrap();
    damage::each(rows.join("\n").as_bytes(), 400, scratch.path(), || {
        damage::read_all(&Table::open(scratch.path(), &json)?)
    });
}
