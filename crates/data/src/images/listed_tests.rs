//! Images that a table names: labels of every kind beside the same pixels, in every format, and what is wrong with names and files.

use super::tests::{counting, folder};
use super::*;
use crate::spec::LabelKind;
use crate::table::{FileColumn, TableFormat, TableOptions};

fn options(format: TableFormat, image: Option<&str>, labels: &[&str], kind: LabelKind) -> TableOptions {
    TableOptions {
        format,
        labels: labels.iter().map(|label| label.to_string()).collect(),
        kind,
        files: Some(FileColumn { name: image.map(String::from) }),
        ..TableOptions::default()
    }
}

/// Three images of 2x2, and a text that is called an image.
fn pictures() -> tempfile::TempDir {
    folder(&[
        ("a.png", counting(2, 2, 0).0),
        ("more/b.png", counting(2, 2, 50).0),
        ("c.png", counting(2, 2, 100).0),
        ("text.png", b"not an image".to_vec()),
    ])
}

fn open(folder: &Path, table: &str, options: &TableOptions) -> Result<Images, DataError> {
    let path = folder.join("labels");
    fs::write(&path, table).unwrap();
    Images::open_listed(folder, Table::open(&path, options)?, &ImageOptions::default())
}

#[test]
fn labels_of_a_table_are_those_of_its_images() {
    let folder = pictures();
    let classes = |format, image, label: &str, table: &str| {
        let labels: Vec<&str> = Some(label).filter(|label| !label.is_empty()).into_iter().collect();
        let images =
            open(folder.path(), table, &options(format, image, &labels, LabelKind::Classes)).unwrap();
        let Target::Class { names, .. } = images.spec().target.clone() else { panic!("classes") };
        let mut seen = Vec::new();
        for idx in 0..images.len() {
            let mut scratch = Scratch::default();
            let Fetched { values: Values::U8(pixels), label: Label::Class(class) } =
                images.fetch(idx, &mut scratch).unwrap()
            else {
                panic!("pixels and a class")
            };
            seen.push((pixels[0], names[class].clone()));
            assert_eq!(images.class(idx).unwrap(), Some(class));
        }
        seen
    };
    let want = [(0, "cat".to_string()), (50, "dog".into()), (100, "cat".into()), (0, "dog".into())];
    let csv = TableFormat::Csv;
    // Found by a usual name, by another name, by number; a file that occurs twice; without a header.
    let rows = "a.png,cat\nmore/b.png,dog\n./c.png,cat\na.png,dog\n";
    assert_eq!(classes(csv, None, "", &format!("file,species\n{rows}")), want);
    assert_eq!(classes(csv, Some("photo"), "species", &format!("photo,species\n{rows}")), want);
    assert_eq!(classes(csv, Some("0"), "1", rows), want);
    assert_eq!(classes(csv, None, "", rows), want);
    let swapped = "species,n,file\ncat,1,a.png\ndog,2,more/b.png\ncat,3,c.png\ndog,4,a.png\n";
    assert_eq!(classes(csv, None, "species", swapped), want);
    let lines = "{\"image\": \"a.png\", \"is\": \"cat\"}\n{\"is\": \"dog\", \"image\": \"more/b.png\"}\n\
                 {\"image\": \"c.png\", \"is\": \"cat\"}\n{\"image\": \"a.png\", \"is\": \"dog\"}\n";
    assert_eq!(classes(TableFormat::JsonLines, None, "is", lines), want);
}

#[test]
fn numbers_and_several_labels_are_read_as_tables_have_them() {
    let folder = pictures();
    for (kind, table, want) in [
        (LabelKind::Numbers, "file,x,y\na.png,1.5,2\nc.png,-3,4e2\n", [[1.5, 2.0], [-3.0, 400.0]]),
        (LabelKind::Labels, "file,x,y\na.png,1,0\nc.png,0,0\n", [[1.0, 0.0], [0.0, 0.0]]),
    ] {
        let images = open(folder.path(), table, &options(TableFormat::Csv, None, &["x", "y"], kind)).unwrap();
        assert_eq!(images.spec().target.kind(), Some(kind));
        for (idx, want) in want.iter().enumerate() {
            let mut scratch = Scratch::default();
            let Label::Values(got) = images.fetch(idx, &mut scratch).unwrap().label else {
                panic!("numbers")
            };
            assert_eq!(got, want);
        }
    }
}

#[test]
fn what_is_wrong_with_a_table_of_images_is_said_with_its_line() {
    let folder = pictures();
    for (table, parts) in [
        (
            "file,species\na.png,cat\nd.png,dog\ne.png,dog\nf.png,cat\n",
            &["line 3, column 1", "\"d.png\" is not in", "nor are 2 more", "relative to `data.path`"][..],
        ),
        ("file,species\na.png,cat\n../a.png,dog\n", &["line 3", "\"../a.png\" leaves the folder"]),
        ("file,species\na.png,cat\n/etc/a.png,dog\n", &["line 3", "leaves the folder"]),
        ("file,species\na.png,cat\nmore/../../a.png,dog\n", &["line 3", "leaves the folder"]),
        ("file,species\na.png,cat\ntext.png,dog\n", &["text.png", "neither PNG nor JPEG"]),
        ("file,species\na.png,cat\nc.png,\n", &["line 3", "field \"species\"", "blank"]),
        ("file,species\na.png,cat\nc.png,NA\n", &["line 3", "field \"species\"", "blank"]),
        ("file,species\na.png,cat\n,dog\n", &["line 3", "field \"file\"", "is empty"]),
        ("file,species\na.png,cat\nmore,dog\n", &["more", "not a file"]),
    ] {
        let error = open(folder.path(), table, &options(TableFormat::Csv, None, &[], LabelKind::Classes));
        let said = error.unwrap_err().to_string();
        parts.iter().for_each(|part| assert!(said.contains(part), "{part} is not in {said}"));
    }
    let both = options(TableFormat::Csv, Some("file"), &["file"], LabelKind::Classes);
    let said = open(folder.path(), "file,species\na.png,cat\n", &both).unwrap_err().to_string();
    assert!(said.contains("names the images and is the label"), "{said}");
}
