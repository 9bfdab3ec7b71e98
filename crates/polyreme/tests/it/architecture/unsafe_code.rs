//! `unsafe` is used where ARCHITECTURE.md says and nowhere else, and an `unsafe fn` says what its caller must ensure.

use std::collections::BTreeMap;

use super::sources::{all_sources, crates, head, product, root};
use super::{page, ticked};

/// The rows of the page's table: a crate, and the modules of it that have `unsafe`.
fn table() -> BTreeMap<String, Vec<String>> {
    let page = page();
    let section =
        page.split("## Unsafe code\n").nth(1).expect("ARCHITECTURE.md has a section `## Unsafe code`");
    let rows = section.lines().skip_while(|l| !l.starts_with('|')).take_while(|l| l.starts_with('|'));
    rows.filter(|l| l.starts_with("| `"))
        .map(|line| {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').to_string(), ticked(cells[2]))
        })
        .collect()
}

/// Whether a line of code, comments apart, has the keyword.
fn has_unsafe(code: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let keyword = |(at, _): (usize, &str)| {
        let (before, after) = (&code[..at], &code[at + "unsafe".len()..]);
        // In a message the word is not followed by one of these.
        let whole = !before.ends_with(word) && !after.starts_with(word);
        let next = after.trim_start();
        whole && ["{", "fn", "impl", "trait", "extern"].iter().any(|n| next.starts_with(n))
    };
    code.match_indices("unsafe").any(keyword)
}

/// Whether a module such as `links/lend` is or holds a file.
fn holds(module: &str, path: &str) -> bool {
    let rest = path.strip_prefix("src/").and_then(|path| path.strip_prefix(module));
    rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

#[test]
fn unsafe_code_is_where_the_page_says() {
    let table = table();
    assert!(!table.is_empty(), "ARCHITECTURE.md: no row was found in the table of `## Unsafe code`");
    for name in table.keys() {
        assert!(
            crates().contains(name),
            "ARCHITECTURE.md: `## Unsafe code` names {name}, which is not a crate"
        );
    }
    for name in crates() {
        let sources = product(&name);
        let files: Vec<_> = sources.iter().filter(|s| has_unsafe(&s.text)).map(|s| s.path.as_str()).collect();
        let lib = std::fs::read_to_string(root().join(format!("crates/{name}/src/lib.rs"))).unwrap();
        let forbids = lib.contains("#![forbid(unsafe_code)]");
        let Some(modules) = table.get(&name) else {
            assert!(
                files.is_empty(),
                "ARCHITECTURE.md says that {name} has no unsafe code, but {files:?} have"
            );
            assert!(forbids, "{name} has no unsafe code: add `#![forbid(unsafe_code)]` to its lib.rs");
            continue;
        };
        assert!(
            !forbids,
            "{name} forbids unsafe code: take its row out of `## Unsafe code` in ARCHITECTURE.md"
        );
        // A row without modules is for the whole crate.
        if modules.is_empty() {
            assert!(!files.is_empty(), "{name} has no unsafe code: forbid it in lib.rs and take its row out");
            continue;
        }
        for file in &files {
            assert!(
                modules.iter().any(|m| holds(m, file)),
                "crates/{name}/{file} has unsafe code: move it into one of {modules:?}, or add the module to its \
                 row under `## Unsafe code` in ARCHITECTURE.md"
            );
        }
        for module in modules {
            assert!(
                files.iter().any(|file| holds(module, file)),
                "`{module}` of {name} has no unsafe code: take it out of `## Unsafe code` in ARCHITECTURE.md"
            );
        }
    }
}

/// No head of a `lib.rs` claims that its crate has no unsafe code when it has.
#[test]
fn heads_say_nothing_else_of_unsafe_code() {
    for name in table().keys() {
        let head = head(name).to_lowercase();
        let lie = ["no unsafe", "without unsafe", "no `unsafe`", "without `unsafe`"]
            .iter()
            .find(|l| head.contains(**l));
        assert!(lie.is_none(), "the lib.rs of {name} says {lie:?}, but ARCHITECTURE.md gives it a row");
    }
}

/// The names of the `unsafe fn` of a file whose docs lack a section `# Safety`. Methods of `impl Trait for` have the
/// trait's, and a function that a macro names has that of its uses.
fn undocumented(text: &str) -> Vec<String> {
    let lines: Vec<_> = text.lines().collect();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let Some((before, after)) = line.split_once("unsafe fn ") else { continue };
        let declares =
            before.split_whitespace().all(|w| w.starts_with("pub") || w == "const" || w.ends_with(')'));
        if !declares || after.starts_with('$') {
            continue;
        }
        let indent = |l: &str| l.len() - l.trim_start().len();
        let above = lines[..i].iter().rev();
        let mut docs =
            above.clone().take_while(|l| l.trim_start().starts_with("//") || l.trim_start().starts_with('#'));
        let around = above.clone().find(|l| {
            !l.trim().is_empty()
                && indent(l) < indent(line)
                && !l.trim_start().starts_with(['/', '#', '}', ')'])
        });
        let of_a_trait =
            indent(line) > 0 && around.is_some_and(|l| l.contains("impl") && l.contains(" for "));
        if !of_a_trait && !docs.any(|l| l.trim() == "/// # Safety") {
            found.push(after.split(['(', '<']).next().unwrap_or(after).to_string());
        }
    }
    found
}

#[test]
fn every_unsafe_fn_says_what_its_caller_owes() {
    for name in crates() {
        for source in all_sources(&name) {
            let missing = undocumented(&source.text);
            assert!(
                missing.is_empty(),
                "crates/{name}/{}: unsafe fn without a section `# Safety` in its docs: {missing:?}",
                source.path
            );
        }
    }
}

#[test]
fn unsafe_code_is_recognised() {
    assert!(has_unsafe("let a = unsafe { b() };") && has_unsafe("unsafe impl Send for A {}"));
    assert!(!has_unsafe("#![forbid(unsafe_code)]") && !has_unsafe("not_unsafe {}"));
    assert!(holds("links/lend", "src/links/lend.rs") && holds("map", "src/map/cut.rs"));
    assert!(!holds("map", "src/maps.rs"));
    let bare = "/// Doc.\n#[inline]\npub(crate) unsafe fn bare<T>(x: T) {}\n";
    assert_eq!(undocumented(bare), ["bare"]);
    assert!(undocumented("/// # Safety\n/// None.\nunsafe fn told() {}\n").is_empty());
    assert!(undocumented("impl A for B {\n    unsafe fn method() {}\n}\n").is_empty());
    assert_eq!(undocumented("impl B {\n    unsafe fn method() {}\n}\n"), ["method"]);
}
