//! ARCHITECTURE.md and the crates agree: the code map lists each crate once, paths exist, arrows point down.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The crates of the code map, from the top down.
fn code_map() -> Vec<String> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let row = |l: &str| l.strip_prefix("| `crates/")?.split_once('`').map(|(name, _)| name.to_string());
    text.lines().filter_map(row).filter(|name| !name.contains('/')).collect()
}

#[test]
fn the_code_map_lists_every_crate_once() {
    let mut listed = code_map();
    listed.sort();
    let mut crates: Vec<_> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    crates.sort();
    assert_eq!(listed, crates);
}

#[test]
fn arrows_point_down() {
    let map = code_map();
    for (i, name) in map.iter().enumerate() {
        let manifest = fs::read_to_string(root().join(format!("crates/{name}/Cargo.toml"))).unwrap();
        // Tests may look up: a layer is judged by what runs it.
        let uses = manifest.split("[dev-dependencies]").next().unwrap();
        for other in uses.lines().filter_map(|l| l.strip_prefix("polyreme-")?.split(['.', ' ']).next()) {
            let at = map.iter().position(|n| n == other);
            assert!(at.is_some_and(|at| at > i), "{name} uses {other}, which is not below it");
        }
    }
}

#[test]
fn every_path_exists() {
    for document in ["ARCHITECTURE.md", "README.md", "BENCHMARKS.md"] {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let paths = text.split('`').filter(|p| p.starts_with("crates/") && !p.contains(' '));
        for path in paths {
            assert!(root().join(path).exists(), "{document} names {path}");
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
