//! A job file as values that know where they stand, so that overrides can be put in and errors can point.

use toml::de::{DeTable, DeValue};

use super::error::ErrorPlace;
use super::shape::Shape;

/// A value and its place.
#[derive(Clone, Debug)]
pub(super) struct TreeNode {
    pub(super) place: ErrorPlace,
    pub(super) value: Value,
}

/// What TOML has.
#[derive(Clone, Debug)]
pub(super) enum Value {
    String(String),
    /// `None`: too large for any of our integers.
    Integer(Option<i128>),
    /// `None`: too large for a float.
    Float(Option<f64>),
    Bool(bool),
    Date,
    Array(Vec<TreeNode>),
    Table(TreeTable),
}

impl Value {
    /// Whether it is of a sort that a shape accepts, right or wrong as it may be.
    pub(super) fn may_be(&self, shape: &Shape) -> bool {
        match (self, shape) {
            (_, Shape::Either(a, b)) => self.may_be(a) || self.may_be(b),
            (Value::String(_), Shape::Text | Shape::Path | Shape::Names(_)) => true,
            (Value::Integer(_), Shape::Whole { .. } | Shape::Real(_)) => true,
            (Value::Float(_), Shape::Real(_)) => true,
            (Value::Bool(_), Shape::Flag) => true,
            (Value::Array(_), Shape::List { .. }) => true,
            (Value::Table(_), Shape::Table(_)) => true,
            _ => false,
        }
    }

    /// What it is, for a reader.
    pub(super) fn describe(&self) -> String {
        match self {
            Value::String(s) if s.chars().count() <= 40 => format!("the string {s:?}"),
            Value::String(_) => "a string".into(),
            Value::Integer(Some(n)) => format!("the number {n}"),
            Value::Float(Some(x)) => format!("the number {x:?}"),
            Value::Integer(None) | Value::Float(None) => "a number that is too large".into(),
            Value::Bool(b) => format!("`{b}`"),
            Value::Date => "a date".into(),
            Value::Array(_) => "an array".into(),
            Value::Table(_) => "a table".into(),
        }
    }
}

/// Entries in the order in which they stand.
#[derive(Clone, Debug, Default)]
pub(super) struct TreeTable {
    pub(super) entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    /// The key's place.
    pub(super) place: ErrorPlace,
    pub(super) node: TreeNode,
}

impl TreeTable {
    pub(super) const EMPTY: &TreeTable = &TreeTable { entries: Vec::new() };

    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.key == key)
    }

    pub(super) fn get_mut(&mut self, key: &str) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|e| e.key == key)
    }

    /// The parser's table; `shift` is where its text begins in its source.
    pub(super) fn of(table: &DeTable, source: usize, shift: usize) -> TreeTable {
        let entries = table.iter().map(|(key, value)| Entry {
            key: key.get_ref().to_string(),
            place: place(key.span(), source, shift),
            node: TreeNode::of(value.get_ref(), place(value.span(), source, shift), source, shift),
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by_key(|e| e.place.span.as_ref().map_or(0, |s| s.start));
        TreeTable { entries }
    }
}

impl TreeNode {
    /// A value that is to be written, and stands nowhere yet.
    pub(super) fn written(value: Value) -> TreeNode {
        TreeNode { place: ErrorPlace::FILE, value }
    }

    /// The elements, if it is an array.
    pub(super) fn items(&self) -> &[TreeNode] {
        if let Value::Array(items) = &self.value { items } else { &[] }
    }

    /// The parser's value.
    pub(super) fn of(value: &DeValue, at: ErrorPlace, source: usize, shift: usize) -> TreeNode {
        let value = match value {
            DeValue::String(s) => Value::String(s.to_string()),
            DeValue::Integer(n) => Value::Integer(i128::from_str_radix(n.as_str(), n.radix()).ok()),
            DeValue::Float(x) => Value::Float(x.as_str().parse().ok()),
            DeValue::Boolean(b) => Value::Bool(*b),
            DeValue::Datetime(_) => Value::Date,
            DeValue::Array(items) => Value::Array(
                items
                    .iter()
                    .map(|v| TreeNode::of(v.get_ref(), place(v.span(), source, shift), source, shift))
                    .collect(),
            ),
            DeValue::Table(table) => Value::Table(TreeTable::of(table, source, shift)),
        };
        TreeNode { place: at, value }
    }
}

fn place(span: std::ops::Range<usize>, source: usize, shift: usize) -> ErrorPlace {
    ErrorPlace { source, span: Some(span.start + shift..span.end + shift) }
}
