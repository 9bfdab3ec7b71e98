//! ARCHITECTURE.md and the crates agree: the code map lists each crate once with the crates that it uses, paths exist,
//! arrows point down, and claims about `unsafe` and about what a crate knows nothing of are true.

mod layers;
mod names;
mod sources;
mod unsafe_code;

use std::fs;

use sources::root;

/// A row of the code map.
struct MapRow {
    name: String,
    /// The crates that it uses, as the page says.
    uses: Vec<String>,
    /// What the page says it knows nothing of.
    ignores: String,
}

fn page() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap()
}

/// The words in backticks.
fn ticked(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

/// The code map, from the top down.
fn code_map() -> Vec<MapRow> {
    let mut rows = Vec::new();
    for line in page().lines().filter(|l| l.starts_with("| `crates/")) {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let name = cells[1].trim_matches('`').strip_prefix("crates/").unwrap();
        // Rows of other tables name files.
        if !name.contains('/') {
            assert_eq!(cells.len(), 6, "ARCHITECTURE.md: a row of the code map has four cells: {line}");
            rows.push(MapRow { name: name.into(), uses: ticked(cells[3]), ignores: cells[4].into() });
        }
    }
    rows
}

#[test]
fn the_code_map_lists_every_crate_once() {
    let mut listed: Vec<_> = code_map().into_iter().map(|row| row.name).collect();
    listed.sort();
    assert_eq!(
        listed,
        sources::crates(),
        "left: the code map of ARCHITECTURE.md; right: the folders in crates/"
    );
}

#[test]
fn every_path_exists() {
    for document in ["ARCHITECTURE.md", "README.md", "BENCHMARKS.md"] {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let paths = text.split('`').filter(|p| p.starts_with("crates/") && !p.contains(' '));
        for path in paths {
            assert!(root().join(path).exists(), "{document} names {path}, which does not exist");
        }
    }
}

#[test]
fn decisions_are_numbered_without_gaps() {
    let mut names: Vec<_> = fs::read_dir(root().join("docs/decisions"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(!names.is_empty());
    for (i, name) in names.iter().enumerate() {
        assert!(name.starts_with(&format!("{:03}-", i + 1)), "{name} is number {}", i + 1);
    }
}
