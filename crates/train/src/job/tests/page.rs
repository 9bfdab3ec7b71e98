//! `docs/job-file.md` has the keys that are declared, and examples that are right. The tables between its marks are
//! generated; `UPDATE_PAGE=1 cargo test -p polyreme-train job_file_page` writes them anew.

use std::collections::BTreeSet;

use super::super::outline::{Outline, Row};
use super::super::read::outlines;
use super::super::shape::{Shape, or};
use super::good;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/job-file.md");
const END: &str = "<!-- end -->";

/// What is to be generated after a mark such as `<!-- keys of train.optimizer -->`.
fn table(what: &str, path: &str) -> String {
    let outline = |path: &str| {
        let path = if path == "job.toml" { "" } else { path };
        outlines().into_iter().find(|o| o.path == path).unwrap_or_else(|| panic!("no table is {path}"))
    };
    match what {
        "keys" => keys(outline(path)),
        "kinds" => names(&outline(path).kinds, "kind"),
        "names" => {
            let (parent, key) = path.rsplit_once('.').unwrap_or_else(|| panic!("{path} names a key"));
            let row = outline(parent).rows.iter().find(|row| row.name == key);
            match row.map(|row| &row.shape) {
                Some(Shape::Names(rows)) => names(rows, key),
                Some(Shape::Either(first, _)) => match &**first {
                    Shape::Names(rows) => names(rows, key),
                    _ => panic!("{path} is no choice of names"),
                },
                _ => panic!("{path} is no choice of names"),
            }
        }
        _ => panic!("`{what}` is none of keys, kinds, names"),
    }
}

fn keys(outline: &Outline) -> String {
    let has_kinds = !outline.kinds.is_empty();
    let mut text = match has_kinds {
        true => "| key | kinds | type | default | what |\n|---|---|---|---|---|\n".to_string(),
        false => "| key | type | default | what |\n|---|---|---|---|\n".to_string(),
    };
    for row in &outline.rows {
        let kinds = if has_kinds { format!(" {} |", kinds(outline, row)) } else { String::new() };
        let (name, of, default, words) = (row.name, type_of(&row.shape), &row.default, row.words);
        text += &format!("| `{name}` |{kinds} {of} | {default} | {words} |\n");
    }
    text
}

/// The kinds of a key, in few words.
fn kinds(outline: &Outline, row: &Row) -> String {
    let others: Vec<_> = outline.kinds.iter().map(|(k, _)| *k).filter(|k| !row.kinds.contains(k)).collect();
    match others.len() {
        0 => "all".into(),
        n if n < row.kinds.len() / 2 => format!("all but {}", others.join(", ")),
        _ => row.kinds.join(", "),
    }
}

/// What the page says under "type".
fn type_of(shape: &Shape) -> String {
    match shape {
        Shape::Flag => "true or false".into(),
        Shape::Whole { least, .. } => format!("whole number from {least}"),
        Shape::Real(bounds) => format!("number, {}", bounds.words()),
        Shape::Text => "string".into(),
        Shape::Path => "path".into(),
        Shape::Names(names) if names.len() > 6 => "name".into(),
        Shape::Names(names) => or(names.iter().map(|(name, _)| format!("`{name:?}`")).collect()),
        Shape::List { words, .. } if words.starts_with('[') => {
            format!("`{}`", words.replace(" or ", "` or `"))
        }
        Shape::List { words, .. } => words.trim_start_matches("an ").into(),
        Shape::Either(a, b) => or(vec![type_of(a), type_of(b)]),
        Shape::Table(outline) if outline().short => "name or table".into(),
        Shape::Table(outline) if outline().path.contains('.') => "table".into(),
        Shape::Table(_) => "section".into(),
    }
}

/// Names with the same words share a line.
fn names(rows: &[(&'static str, &'static str)], title: &str) -> String {
    let mut text = format!("| {title} | what |\n|---|---|\n");
    for group in rows.chunk_by(|a, b| a.1 == b.1) {
        let names: Vec<_> = group.iter().map(|(name, _)| format!("`{name}`")).collect();
        text += &format!("| {} | {} |\n", names.join(" "), group[0].1);
    }
    text
}

/// The path and the sort of table that a mark asks for.
fn mark(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("<!-- ")?.strip_suffix(" -->")?.split_once(" of ")
}

fn generated(page: &str) -> String {
    let (mut text, mut skips) = (String::new(), false);
    for line in page.lines() {
        skips &= line != END;
        if skips {
            continue;
        }
        text += &format!("{line}\n");
        if let Some((what, path)) = mark(line) {
            text += &table(what, path);
            skips = true;
        }
    }
    assert!(!skips, "a mark has no {END}");
    text
}

#[test]
fn job_file_page() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let want = generated(&page);
    if std::env::var_os("UPDATE_PAGE").is_some() {
        std::fs::write(PAGE, &want).unwrap();
    } else if let Some((n, (got, want))) = page
        .lines()
        .chain([""])
        .zip(want.lines().chain([""]))
        .enumerate()
        .find(|(_, (got, want))| got != want)
    {
        panic!(
            "docs/job-file.md, line {}, is not what the declared keys say:\n    {got}\nshould be\n    {want}\n\
             run `UPDATE_PAGE=1 cargo test -p polyreme-train job_file_page` to write its tables anew",
            n + 1
        );
    }
    let marks: BTreeSet<_> = want.lines().filter_map(mark).collect();
    for outline in outlines() {
        let path = if outline.path.is_empty() { "job.toml" } else { outline.path };
        assert!(marks.contains(&("keys", path)), "the page has no table `<!-- keys of {path} -->`");
        let is_told = outline.kinds.is_empty() || marks.contains(&("kinds", path));
        assert!(is_told, "the page has no table `<!-- kinds of {path} -->`");
    }
}

#[test]
fn every_key_and_kind_has_words() {
    for outline in outlines() {
        let words = outline.rows.iter().map(|row| (row.name, row.words)).chain(outline.kinds.iter().copied());
        for (name, words) in words {
            assert!(words.len() > 3 && !words.ends_with('.'), "{} {name}: {words:?}", outline.path);
            assert!(!words.contains('|'), "{} {name}: {words:?} would end a cell", outline.path);
        }
    }
}

#[test]
fn examples() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let blocks: Vec<_> = page.split("```toml\n").skip(1).filter_map(|b| b.split("```").next()).collect();
    assert!(blocks.len() >= 2);
    for block in blocks {
        good(block, &[]);
    }
}
