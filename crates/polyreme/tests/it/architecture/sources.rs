//! The sources of the workspace as text: which crates there are, what they depend on, and their product code, that is
//! without tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The names of the folders in `crates/`, sorted.
pub(super) fn crates() -> Vec<String> {
    let folders = fs::read_dir(root().join("crates")).unwrap();
    let mut names: Vec<_> = folders.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The crates of this workspace that a crate depends on. Those of its tests do not count: a layer is judged by what
/// runs it.
pub(super) fn dependencies(name: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join(format!("crates/{name}/Cargo.toml"))).unwrap();
    let (mut uses, mut counts) = (BTreeSet::new(), false);
    for line in manifest.lines() {
        if line.starts_with('[') {
            counts = line.ends_with("dependencies]") && !line.contains("dev-dependencies");
        } else if let Some(used) = line.strip_prefix("polyreme-").filter(|_| counts) {
            uses.extend(used.split(['.', ' ', '=']).next().map(str::to_string));
        }
    }
    uses.into_iter().collect()
}

/// A file of a crate and its text.
pub(super) struct SourceFile {
    /// Relative to the crate's folder.
    pub(super) path: String,
    pub(super) text: String,
}

/// All Rust files of a crate: sources, tests and examples.
pub(super) fn all_sources(name: &str) -> Vec<SourceFile> {
    let folder = root().join("crates").join(name);
    let mut files = Vec::new();
    collect(&folder, &mut files);
    files.sort();
    let read = |file: &PathBuf| SourceFile {
        path: file.strip_prefix(&folder).unwrap().to_str().unwrap().into(),
        text: fs::read_to_string(file).unwrap(),
    };
    files.iter().map(read).collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

/// The product code of a crate: no tests, no examples, no comments.
pub(super) fn product(name: &str) -> Vec<SourceFile> {
    let sources: Vec<_> = all_sources(name).into_iter().filter(|s| s.path.starts_with("src/")).collect();
    let tests: Vec<_> = sources.iter().flat_map(|s| test_modules(&s.path, &s.text)).collect();
    let of_tests = |path: &str| {
        tests.iter().any(|module| {
            path.strip_prefix(module.as_str()).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        })
    };
    sources
        .into_iter()
        .filter(|s| !of_tests(&s.path))
        .map(|s| SourceFile { text: without_comments(before_tests(&s.text)), path: s.path })
        .collect()
}

/// The test modules that a file declares, if they are separate files, as paths without `.rs`.
fn test_modules(path: &str, text: &str) -> Vec<String> {
    let folder = match path.strip_suffix(".rs").unwrap() {
        "src/lib" | "src/main" => "src".to_string(),
        stem => stem.strip_suffix("/mod").unwrap_or(stem).to_string(),
    };
    let mut modules = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let declared = lines.peek().and_then(|l| l.trim().strip_suffix(';'));
            let name = declared.and_then(|l| l.rsplit_once("mod ")).map(|(_, name)| name);
            modules.extend(name.map(|name| format!("{folder}/{name}")));
        }
    }
    modules
}

/// The part of a file above its tests, which come last.
fn before_tests(text: &str) -> &str {
    let mut at = 0;
    while let Some(found) = text[at..].find("#[cfg(test)]\n") {
        let after = &text[at + found + "#[cfg(test)]\n".len()..];
        let next = after.lines().next().unwrap_or_default();
        if next.contains("mod ") && next.ends_with('{') {
            return &text[..at + found];
        }
        at = text.len() - after.len();
    }
    text
}

fn without_comments(text: &str) -> String {
    let code = text.lines().map(|l| if l.trim_start().starts_with("//") { "" } else { l });
    // A comment after code; `//` without spaces may be part of a URL.
    code.map(|l| l.split(" // ").next().unwrap_or(l)).collect::<Vec<_>>().join("\n")
}

/// The doc comment at the head of a crate's `lib.rs`, as one line.
pub(super) fn head(name: &str) -> String {
    let text = fs::read_to_string(root().join(format!("crates/{name}/src/lib.rs"))).unwrap();
    let lines = text.lines().map_while(|l| l.strip_prefix("//!"));
    lines.map(str::trim).collect::<Vec<_>>().join(" ")
}

#[test]
fn tests_are_no_product_code() {
    let text = "a();\n#[cfg(test)]\nmod tests {\n    b();\n}\n";
    assert_eq!(before_tests(text), "a();\n");
    assert_eq!(before_tests("#[cfg(test)]\nuse c;\nd();\n"), "#[cfg(test)]\nuse c;\nd();\n");
    assert_eq!(test_modules("src/lib.rs", "#[cfg(test)]\nmod oracle;\nmod b;\n"), ["src/oracle"]);
    assert_eq!(test_modules("src/a/mod.rs", "#[cfg(test)]\npub(crate) mod b;\n"), ["src/a/b"]);
    assert_eq!(without_comments("a(); // unsafe\n// unsafe\nb();"), "a();\n\nb();");
}
