//! Tables of the file, declared: each key once, with its type, the field of the job that it fills, and words about it.
//! Reading and writing go through the field; which kinds have a key, and what its default is, follow from the value
//! that each kind starts from. An [`Outline`] says all of it as plain data.

use super::cursor::{At, Cursor};
use super::error::ErrorPlace;
use super::key::Key;
use super::outline::{Outline, Row};
use super::shape::Shape;
use super::tree::{Entry, TreeNode, TreeTable, Value};

/// What has a section of the file.
pub(super) trait Keyed: Clone + Sized + 'static {
    /// Its keys.
    fn section() -> &'static Section<Self>;
}

/// A table of the file that fills an `S`.
pub(super) struct Section<S> {
    /// Everything about it but how it is read and written.
    pub(super) outline: Outline,
    kinds: Vec<Kind<S>>,
    kind_of: fn(&S) -> &'static str,
    keys: Vec<Key<S>>,
    unwritten: fn(&S, &str) -> bool,
    check: fn(&mut S, &Cursor),
}

/// A kind of a table.
pub(super) struct Kind<S> {
    name: &'static str,
    /// What it starts from, by its name.
    start: fn(&'static str) -> S,
    words: &'static str,
}

/// Kinds that start from the same value but for what follows from their names, and words about them.
pub(super) fn kinds<S>(
    names: &[&'static str],
    start: fn(&'static str) -> S,
    words: &'static str,
) -> Vec<Kind<S>> {
    names.iter().map(|name| Kind { name, start, words }).collect()
}

impl<S> Kind<S> {
    fn start(&self) -> S {
        (self.start)(self.name)
    }
}

impl<S: Keyed> Section<S> {
    /// A table without kinds.
    pub(super) fn new(
        path: &'static str,
        such_as: &'static str,
        start: fn(&'static str) -> S,
        keys: Vec<Key<S>>,
    ) -> Section<S> {
        Section::of_kinds(path, such_as, kinds(&[""], start, ""), |_| "", keys)
    }

    /// A table with kinds. `such_as` is what an error says is needed.
    pub(super) fn of_kinds(
        path: &'static str,
        such_as: &'static str,
        kinds: Vec<Kind<S>>,
        kind_of: fn(&S) -> &'static str,
        keys: Vec<Key<S>>,
    ) -> Section<S> {
        let named = kinds.iter().filter(|k| !k.name.is_empty()).map(|k| (k.name, k.words)).collect();
        let outline = Outline { path, such_as, short: false, kinds: named, fallback: None, rows: Vec::new() };
        Section { outline, kinds, kind_of, keys, unwritten: |_, _| false, check: |_, _| {} }
    }

    /// The kind alone may stand for a table.
    pub(super) fn short(mut self) -> Section<S> {
        self.outline.short = true;
        self
    }

    /// The kind where none is given; if a key is named, only where that key is there.
    pub(super) fn fallback(mut self, kind: &'static str, given: Option<&'static str>) -> Section<S> {
        self.outline.fallback = Some((kind, given));
        self
    }

    /// Keys that are left out when a value is written.
    pub(super) fn unwritten(self, unwritten: fn(&S, &str) -> bool) -> Section<S> {
        Section { unwritten, ..self }
    }

    /// What is done when all keys are read: what follows from several of them is set, and checked.
    pub(super) fn check(self, check: fn(&mut S, &Cursor)) -> Section<S> {
        Section { check, ..self }
    }

    /// Reads a table, or a kind alone. Nothing if its kind is not known, which has then been reported; a key that is
    /// wrong has been reported too, and is as if it were not there.
    pub(super) fn read(&'static self, at: &At) -> Option<S> {
        let Some(c) = at.cursor(&self.outline) else {
            return at.wrong(&Shape::Table(|| &S::section().outline));
        };
        let alone = matches!(at.node.value, Value::String(_)).then(|| at.clone());
        let Some(kind) = self.kind(&c, alone) else {
            self.read_common(&c);
            c.report_unknown(None);
            return None;
        };
        Some(self.read_into(kind.start(), &c))
    }

    /// Reads the keys of a table into what it starts from.
    pub(super) fn read_into(&'static self, mut spec: S, c: &Cursor) -> S {
        let start = &mut spec.clone();
        for key in self.keys.iter().filter(|key| key.is_of(start)) {
            match (c.get(key.name), key.needed) {
                (Some(at), _) => key.access.read(&mut spec, &at),
                (None, Some(hint)) => c.require(key.name, hint),
                (None, None) => {}
            }
        }
        for key in self.keys.iter().filter(|key| c.has(key.name)) {
            if let Some(other) = key.instead_of.filter(|other| c.has(other)) {
                let message = format!("`{}` and `{}` are both given", c.path_of(other), c.path_of(key.name));
                c.fault(key.name, message, "remove one of the two");
            }
        }
        c.report_unknown(Some((self.kind_of)(start)));
        (self.check)(&mut spec, c);
        spec
    }

    /// The kind, alone or by the key `kind`.
    fn kind(&self, c: &Cursor, alone: Option<At>) -> Option<&Kind<S>> {
        let known: Vec<_> = self.kinds.iter().map(|k| k.name).collect();
        let name = match (alone.or_else(|| c.get("kind")), self.outline.fallback) {
            _ if self.outline.kinds.is_empty() => "",
            (Some(at), _) => at.choice(&known)?,
            (None, Some((kind, given))) if given.is_none_or(|key| c.has(key)) => kind,
            (None, _) => {
                c.require("kind", &format!("known are {}", known.join(", ")));
                return None;
            }
        };
        self.kinds.iter().find(|k| k.name == name)
    }

    /// Checks the keys that all kinds have.
    fn read_common(&self, c: &Cursor) {
        let mut starts: Vec<_> = self.kinds.iter().map(|k| k.start()).collect();
        for key in &self.keys {
            if let (Some(at), true) = (c.get(key.name), starts.iter_mut().all(|s| key.is_of(s))) {
                key.access.read(&mut starts[0], &at);
            }
        }
    }

    /// The table with every key; or the kind alone, if it has no others.
    pub(super) fn write(&self, spec: &S) -> Value {
        let entry = |key: &str, value| Entry {
            key: key.into(),
            place: ErrorPlace::FILE,
            node: TreeNode::written(value),
        };
        let kind = (self.kind_of)(spec);
        let (mut spec, mut entries) = (spec.clone(), Vec::new());
        if !self.outline.kinds.is_empty() {
            entries.push(entry("kind", Value::String(kind.into())));
        }
        for key in &self.keys {
            if let Some(value) = self.value_of(key, &mut spec) {
                entries.push(entry(key.name, value));
            }
        }
        if self.outline.short && entries.len() == 1 {
            return Value::String(kind.into());
        }
        Value::Table(TreeTable { entries })
    }

    /// What a kind that starts is called.
    #[cfg(test)]
    pub(super) fn kind_of_start(&self, name: &str) -> Option<&'static str> {
        self.kinds.iter().find(|k| k.name == name).map(|k| (self.kind_of)(&k.start()))
    }

    /// What is written for a key, if anything.
    fn value_of(&self, key: &Key<S>, spec: &mut S) -> Option<Value> {
        if !key.is_of(spec) || (self.unwritten)(spec, key.name) {
            return None;
        }
        key.access.write(spec)
    }

    /// The declaration is complete: with the rows of its outline, which follow from everything else.
    pub(super) fn done(mut self) -> Section<S> {
        let mut rows = Vec::new();
        if !self.outline.kinds.is_empty() {
            let default = match self.outline.fallback {
                None => "needed".into(),
                Some((kind, None)) => format!("`{kind:?}`"),
                Some((kind, Some(key))) => format!("`{kind:?}`, if there are `{key}`"),
            };
            let shape = Shape::Names(self.outline.kinds.clone());
            let kinds = self.kinds.iter().map(|k| k.name).collect();
            rows.push(Row {
                name: "kind",
                kinds,
                shape,
                default,
                needed: false,
                instead_of: None,
                words: "which one, see below",
            });
        }
        for key in &self.keys {
            let with = |k: &&Kind<S>| key.is_of(&mut k.start());
            let kinds: Vec<_> = self.kinds.iter().filter(with).collect();
            let default = match (key.needed, key.default) {
                (Some(_), _) => "needed".into(),
                (None, Some(words)) => words.into(),
                (None, None) => by_kind(kinds.iter().map(|k| (k.name, self.value_of(key, &mut k.start())))),
            };
            rows.push(Row {
                name: key.name,
                kinds: kinds.iter().map(|k| k.name).collect(),
                shape: key.shape.clone(),
                default,
                needed: key.needed.is_some(),
                instead_of: key.instead_of,
                words: key.words,
            });
        }
        self.outline.rows = rows;
        self
    }
}

/// The default of each kind, those with the same one together.
fn by_kind(values: impl Iterator<Item = (&'static str, Option<Value>)>) -> String {
    let mut groups: Vec<(Vec<&str>, String)> = Vec::new();
    for (kind, value) in values {
        let shown = match value {
            None => "none".into(),
            Some(value @ (Value::String(_) | Value::Array(_) | Value::Table(_))) => {
                format!("`{}`", value.toml())
            }
            Some(value) => value.toml().trim_end_matches(".0").to_string(),
        };
        match groups.iter_mut().find(|(_, other)| *other == shown) {
            Some((kinds, _)) => kinds.push(kind),
            None => groups.push((vec![kind], shown)),
        }
    }
    if let [(_, one)] = groups.as_slice() {
        return one.clone();
    }
    let groups: Vec<_> =
        groups.iter().map(|(kinds, value)| format!("{value} ({})", kinds.join(", "))).collect();
    groups.join(", ")
}
