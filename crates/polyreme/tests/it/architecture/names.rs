//! One word means one thing: a type's name is declared in two modules of the workspace at most.

use std::collections::BTreeMap;

use super::sources::{all_sources, crates};

/// How many modules may declare a type of the same name.
const MODULES_MAX: usize = 2;

/// Names that more modules may have, and why.
const EXCEPTIONS: &[(&str, &str)] =
    &[("Sealed", "the name that Rust gives to a trait which nothing outside its module can implement")];

/// Names that too many modules still have. The list may only get shorter: rename types until a name fits, then take it
/// out.
const TO_RENAME: &[&str] = &[];

/// The types that a file declares. Associated types do not count.
fn declared(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for line in text.lines() {
        let mut words = line
            .split_whitespace()
            .skip_while(|w| w.starts_with("pub") || *w == "unsafe" || w.ends_with(')'));
        let (Some(keyword), Some(rest)) = (words.next(), words.next()) else { continue };
        let declares = match keyword {
            "struct" | "enum" | "trait" | "union" => true,
            "type" => !line.starts_with(' '),
            _ => false,
        };
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        if declares && name.starts_with(|c: char| c.is_ascii_uppercase()) {
            names.push(name);
        }
    }
    names
}

#[test]
fn one_word_means_one_thing() {
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in crates() {
        for source in all_sources(&name) {
            for declared in declared(&source.text) {
                modules.entry(declared.into()).or_default().push(format!("crates/{name}/{}", source.path));
            }
        }
    }
    assert!(modules.len() > 500, "only {} types were found", modules.len());
    modules.retain(|_, files| files.len() > MODULES_MAX);

    let known = |name: &str| TO_RENAME.contains(&name) || EXCEPTIONS.iter().any(|(n, _)| *n == name);
    let new: Vec<_> = modules.iter().filter(|(name, _)| !known(name)).collect();
    assert!(
        new.is_empty(),
        "type names that are declared in more than {MODULES_MAX} modules do not say what is meant: rename some of the \
         types for what they are (a `Place` in a file: `FilePlace`): {new:#?}"
    );
    for name in TO_RENAME.iter().chain(EXCEPTIONS.iter().map(|(name, _)| name)) {
        assert!(
            modules.contains_key(*name),
            "`{name}` is no longer declared too often: take it out of {}",
            file!()
        );
    }
}

#[test]
fn declarations_are_recognised() {
    let text = "pub(super) struct A<T>(T);\n    enum B {\n    type Item = A;\ntype C = A;\nunsafe trait D {}\nimpl A {}\n";
    assert_eq!(declared(text), ["A", "B", "C", "D"]);
}
