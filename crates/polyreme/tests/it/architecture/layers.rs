//! Layers: which crate may use which, and what each knows nothing of, as claimed by ARCHITECTURE.md and the heads of
//! the `lib.rs`.

use super::sources::{SourceFile, dependencies, head, product};
use super::{MapRow, code_map};

/// A word that follows "knows nothing of", and what would make the claim wrong.
struct Ignorance {
    word: &'static str,
    /// Crates that must not be used then.
    crates: &'static [&'static str],
    /// Text that must not be in product code then.
    code: &'static [&'static str],
}

const fn ignorance(
    word: &'static str,
    crates: &'static [&'static str],
    code: &'static [&'static str],
) -> Ignorance {
    Ignorance { word, crates, code }
}

const WORDS: &[Ignorance] = &[
    ignorance("IO", &["net", "data", "train"], &["std::fs", "std::net", "std::io", "println!"]),
    ignorance("collectives", &["collective"], &[]),
    ignorance("datasets", &["data"], &[]),
    ignorance("element types", &["dtype"], &[]),
    ignorance("flags", &["polyreme"], &["clap::", "env::args"]),
    ignorance("graphs", &["graph"], &[]),
    ignorance("how ranks are reached", &["net", "collective"], &[]),
    ignorance("job files", &["train"], &["toml::"]),
    ignorance("kernels", &["kernels"], &[]),
    ignorance("layers", &["nn"], &[]),
    ignorance("messages", &["net"], &[]),
    ignorance("models", &["nn"], &[]),
    ignorance("pools", &["exec"], &[]),
    ignorance("ranks", &["net", "collective", "parallel"], &[]),
    ignorance("sockets", &["net"], &["std::net", "TcpStream", "rustix::net"]),
    ignorance("tensors", &["graph"], &[]),
    ignorance("terminal", &[], &["is_terminal", "termios"]),
    ignorance("threads", &["sync"], &["std::thread", "thread::spawn", "rayon::"]),
];

/// What is wrong with a list such as `tensors, graphs or threads` after "knows nothing of".
fn wrong(list: &str, uses: &[String], sources: &[SourceFile]) -> Vec<String> {
    let mut found = Vec::new();
    for word in list.replace(" or ", ", ").split(", ").map(str::trim) {
        if word == "everything else" {
            found.extend(uses.iter().map(|used| format!("`everything else`, but it uses {used}")));
            continue;
        }
        let Some(known) = WORDS.iter().find(|w| w.word == word) else {
            found.push(format!("`{word}`, which no check knows: add a row to WORDS in {}", file!()));
            continue;
        };
        for used in uses.iter().filter(|used| known.crates.contains(&used.as_str())) {
            found.push(format!("`{word}`, but its Cargo.toml has polyreme-{used}"));
        }
        for (source, code) in sources.iter().flat_map(|s| known.code.iter().map(move |code| (s, code))) {
            if source.text.contains(code) {
                found.push(format!("`{word}`, but {} has `{code}`", source.path));
            }
        }
    }
    found
}

/// The lists after "knows nothing of" in the head of a `lib.rs`.
fn said_in(head: &str) -> Vec<String> {
    let openings = ["knows nothing of ", "nothing is known of ", "Nothing here knows of "];
    let behind = openings.iter().flat_map(|opening| head.split(opening).skip(1));
    let list = |text: &str| text.split(['.', ':', ';']).next().unwrap_or_default().to_string();
    behind.map(|text| list(text.split(", and ").next().unwrap_or_default())).collect()
}

#[test]
fn arrows_point_down() {
    let map = code_map();
    for (i, MapRow { name, .. }) in map.iter().enumerate() {
        for other in dependencies(name) {
            let at = map.iter().position(|row| row.name == other);
            assert!(
                at.is_some_and(|at| at > i),
                "{name} uses {other}, which the code map of ARCHITECTURE.md does not have below it: drop the \
                 dependency from crates/{name}/Cargo.toml, or move a row"
            );
        }
    }
}

#[test]
fn the_code_map_says_what_each_crate_uses() {
    for MapRow { name, uses: mut said, .. } in code_map() {
        said.sort();
        assert_eq!(
            said,
            dependencies(&name),
            "left: what {name} uses by the code map of ARCHITECTURE.md; right: the dependencies in \
             crates/{name}/Cargo.toml; correct the one that is wrong"
        );
    }
}

#[test]
fn crates_know_nothing_of_what_they_say() {
    let mut n_claims = 0;
    let mut lies = Vec::new();
    for MapRow { name, ignores, .. } in code_map() {
        let (uses, sources) = (dependencies(&name), product(&name));
        let of_page = Some(("ARCHITECTURE.md", ignores)).filter(|(_, list)| list != "—");
        let of_head = said_in(&head(&name)).into_iter().map(|list| ("its lib.rs", list));
        for (place, list) in of_page.into_iter().chain(of_head) {
            n_claims += 1;
            let found = wrong(&list, &uses, &sources);
            lies.extend(found.into_iter().map(|w| format!("{place} says that {name} knows nothing of {w}")));
        }
    }
    assert!(lies.is_empty(), "correct the claim, or the crate:\n{}", lies.join("\n"));
    assert!(n_claims > 15, "only {n_claims} claims were found: has their wording changed?");
}

#[test]
fn fuzzing_is_for_tests_only() {
    for MapRow { name, .. } in code_map() {
        assert!(
            !dependencies(&name).contains(&"fuzz".to_string()),
            "ARCHITECTURE.md says that fuzz is for tests: make it a dev-dependency in crates/{name}/Cargo.toml"
        );
    }
}

#[test]
fn wrong_claims_are_found() {
    let source = |text: &str| [SourceFile { path: "src/a.rs".into(), text: text.into() }];
    let wrong = |list, text| wrong(list, &["net".to_string()], &source(text));
    assert_eq!(wrong("sockets", ""), ["`sockets`, but its Cargo.toml has polyreme-net"]);
    assert_eq!(
        wrong("tensors or threads", "std::thread::spawn"),
        ["`threads`, but src/a.rs has `std::thread`", "`threads`, but src/a.rs has `thread::spawn`"]
    );
    assert_eq!(wrong("everything else", "").len(), 1);
    assert!(wrong("fairies", "")[0].contains("WORDS"));
    assert_eq!(said_in("It knows nothing of a, b or c. More."), ["a, b or c"]);
    assert_eq!(said_in("It knows nothing of a or b, and makes nothing."), ["a or b"]);
}
