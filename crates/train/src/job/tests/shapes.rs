//! Keys of every shape, in a section that only the tests have: lists of tables, a number or a table, a name or a list,
//! `"auto"` for a choice. One declaration is all that such a key takes.

use std::path::Path;

use toml::de::DeTable;

use super::super::cursor::{Cursor, Reading};
use super::super::declare::{keys, section};
use super::super::error::Sources;
use super::super::section::{Keyed, Section};
use super::super::shape::Bounds;
use super::super::tree::TreeTable;
use super::super::types::{auto, either, list, maybe, one_of, table, text, whole, within};

#[derive(Clone, PartialEq, Debug, Default)]
struct Spec {
    labels: Vec<String>,
    every: Every,
    groups: Vec<Group>,
    ways: Option<Way>,
}

#[derive(Clone, PartialEq, Debug, Default)]
struct Every {
    steps: u64,
    drift: Option<f64>,
}

#[derive(Clone, PartialEq, Debug, Default)]
struct Group {
    params: Vec<String>,
    lr: f64,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    Wide,
    Narrow,
}

section! { Spec => {
    let names = || list(text(), &[], "an array of names");
    let keys = keys! { Spec;
        /// a column, or several
        labels: either(text().map(|one| vec![one], |_| None), names()) => |s| Some(&mut s.labels);
        /// steps, or a table
        every: either(
            whole(1..=99).map(|steps| Every { steps, drift: None }, |e: &Every| e.drift.is_none().then_some(e.steps)),
            table(),
        ) => |s| Some(&mut s.every);
        /// several tables
        groups: list(table(), &[], "an array of groups") => |s| Some(&mut s.groups);
        /// one of two, or whichever fits
        ways: auto(one_of([("wide", Way::Wide, ""), ("narrow", Way::Narrow, "")])) => |s| Some(&mut s.ways);
    };
    Section::new("", "a spec", |_| Spec::default(), keys)
} }

section! { Every => {
    let keys = keys! { Every;
        /// steps
        steps: whole(1..=99) => |s| Some(&mut s.steps); needed "such as steps = 50";
        /// how far apart
        drift: maybe(within(Bounds::POSITIVE)) => |s| Some(&mut s.drift);
    };
    Section::new("every", "a table such as { steps = 50, drift = 0.02 }", |_| Every::default(), keys)
} }

section! { Group => {
    let keys = keys! { Group;
        /// patterns
        params: list(text(), &[], "an array of patterns") => |s| Some(&mut s.params);
        /// a rate
        lr: within(Bounds::POSITIVE) => |s| Some(&mut s.lr);
    };
    Section::new("groups.group", "a table such as { params = [\"head.*\"], lr = 0.1 }", |_| Group::default(), keys)
} }

fn read(text: &str) -> Result<Spec, Vec<String>> {
    let root = TreeTable::of(DeTable::parse(text).unwrap().get_ref(), 0, 0);
    let reading =
        Reading::new(Sources { file: "x".into(), text: text.into(), sets: Vec::new() }, Path::new("/"));
    let spec =
        Spec::section().read_into(Spec::default(), &Cursor::root(&reading, &root, &Spec::section().outline));
    let (_, faults) = reading.into_faults();
    if faults.is_empty() { Ok(spec) } else { Err(faults.into_iter().map(|e| e.message).collect()) }
}

#[test]
fn keys_of_any_shape_are_read_and_written() {
    let check = |text: &str, want: Spec| {
        assert_eq!(read(text), Ok(want.clone()), "{text}");
        let written = Spec::section().write(&want).toml();
        let again =
            written.trim_matches(['{', '}']).replace(", every", "\nevery").replace(", groups", "\ngroups");
        assert_eq!(read(&again.replace(", ways", "\nways")), Ok(want), "{written}");
    };
    let every = |steps, drift| Every { steps, drift };
    let names = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
    check(
        "labels = \"a\"\nevery = 5",
        Spec { labels: names(&["a"]), every: every(5, None), ..Spec::default() },
    );
    check(
        "labels = [\"a\", \"b\"]\nevery = { steps = 50, drift = 0.02 }\nways = \"narrow\"",
        Spec {
            labels: names(&["a", "b"]),
            every: every(50, Some(0.02)),
            ways: Some(Way::Narrow),
            ..Spec::default()
        },
    );
    let group = |pattern, lr| Group { params: names(&[pattern]), lr };
    check(
        "every = 1\nways = \"auto\"\ngroups = [{ params = [\"head.*\"], lr = 0.1 }, { params = [\"b\"], lr = 1 }]",
        Spec {
            every: every(1, None),
            groups: vec![group("head.*", 0.1), group("b", 1.0)],
            ..Spec::default()
        },
    );
}

#[test]
fn what_is_wrong_with_them_is_said() {
    let check = |text: &str, want: &[&str]| assert_eq!(read(text).unwrap_err(), want, "{text}");
    check("labels = 3", &["`labels` is the number 3; a string or an array of names is needed"]);
    check("every = 0", &["`every` is 0; it must be at least 1"]);
    check(
        "every = { drift = 0 }",
        &["[every] needs `steps`", "`every.drift` is 0.0; it must be more than 0"],
    );
    check(
        "groups = [{ lr = 0, para = 1 }, 3]",
        &[
            "`groups[0].lr` is 0.0; it must be more than 0",
            "unknown key `para` in `groups[0]`",
            "`groups[1]` is the number 3; a table such as { params = [\"head.*\"], lr = 0.1 } is needed",
        ],
    );
    check("ways = \"wied\"", &["`ways` is \"wied\", which is not known"]);
    check("ways = true", &["`ways` is `true`; \"auto\", \"wide\" or \"narrow\" is needed"]);
}
