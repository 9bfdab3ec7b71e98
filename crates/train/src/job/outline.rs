//! Tables and keys as plain data: what the page, the schema, overrides and errors are made from.

use super::shape::Shape;

/// A table of the file as plain data.
pub(super) struct Outline {
    /// Its path, such as `train.optimizer`; lists have the path of their elements.
    pub(super) path: &'static str,
    /// What an error says is needed.
    pub(super) such_as: &'static str,
    /// Whether the kind alone may stand for it.
    pub(super) short: bool,
    /// The names of its kinds with words about each; none, if it has no kinds.
    pub(super) kinds: Vec<(&'static str, &'static str)>,
    /// The kind where none is given, and the key that must then be there.
    pub(super) fallback: Option<(&'static str, Option<&'static str>)>,
    /// Its keys. A key that differs between kinds has several rows.
    pub(super) rows: Vec<Row>,
}

/// A key as plain data.
pub(super) struct Row {
    pub(super) name: &'static str,
    /// The kinds that have it.
    pub(super) kinds: Vec<&'static str>,
    pub(super) shape: Shape,
    /// In words, or as in a file.
    pub(super) default: String,
    pub(super) needed: bool,
    /// A key that cannot be there together with this one.
    pub(super) instead_of: Option<&'static str>,
    pub(super) words: &'static str,
}

impl Outline {
    /// The keys that a kind has, each once; all keys, if the kind is not known.
    pub(super) fn names(&self, kind: Option<&str>) -> Vec<&'static str> {
        let mut names: Vec<&'static str> = Vec::new();
        for row in self.rows.iter().filter(|row| kind.is_none_or(|kind| row.kinds.contains(&kind))) {
            if !names.contains(&row.name) {
                names.push(row.name);
            }
        }
        names
    }

    /// The table that is the value of a key, or an element of it.
    pub(super) fn inside(&self, key: &str) -> Option<&'static Outline> {
        self.rows.iter().filter(|row| row.name == key).find_map(|row| row.shape.inside())
    }

    /// The key that cannot be there together with a key.
    pub(super) fn rival(&self, key: &str) -> Option<&'static str> {
        self.rows.iter().find_map(|row| match row.instead_of {
            Some(other) if row.name == key => Some(other),
            Some(other) if other == key => Some(row.name),
            _ => None,
        })
    }

    /// Whether a key is a section of the file.
    pub(super) fn is_section(&self, key: &str) -> bool {
        self.path.is_empty() && self.inside(key).is_some()
    }
}
