//! What a key accepts, as plain data: messages, the page and the schema are all worded from it.

use std::ops::{Bound, RangeBounds};

use super::outline::Outline;

/// What is accepted as the value of a key.
#[derive(Clone)]
pub(super) enum Shape {
    Flag,
    Whole {
        least: u64,
        most: u64,
    },
    Real(Bounds),
    /// Any string.
    Text,
    Path,
    /// One of some names; each with words about it, which may be empty.
    Names(Vec<(&'static str, &'static str)>),
    /// An array; the words describe it with its article.
    List {
        item: Box<Shape>,
        lengths: &'static [usize],
        words: &'static str,
    },
    /// Two ways to write one thing.
    Either(Box<Shape>, Box<Shape>),
    /// A table with keys of its own. A function, since a layer may hold layers.
    Table(fn() -> &'static Outline),
}

impl Shape {
    /// What an error says is needed, such as "a whole number".
    pub(super) fn needed(&self) -> String {
        match self {
            Shape::Flag => "true or false".into(),
            Shape::Whole { .. } => "a whole number".into(),
            Shape::Real(_) => "a number".into(),
            Shape::Text | Shape::Path => "a string".into(),
            Shape::Names(names) if names.len() > 6 => "a string".into(),
            Shape::Names(names) => or(names.iter().map(|(name, _)| format!("{name:?}")).collect()),
            Shape::List { words, .. } => (*words).into(),
            Shape::Either(a, b) => or(vec![a.needed(), b.needed()]),
            Shape::Table(outline) => outline().such_as.into(),
        }
    }

    /// The table that this is, or that its elements are.
    pub(super) fn inside(&self) -> Option<&'static Outline> {
        match self {
            Shape::Table(outline) => Some(outline()),
            Shape::List { item, .. } => item.inside(),
            Shape::Either(a, b) => a.inside().or(b.inside()),
            Shape::Flag
            | Shape::Whole { .. }
            | Shape::Real(_)
            | Shape::Text
            | Shape::Path
            | Shape::Names(_) => None,
        }
    }
}

/// "a, b or c"; what is itself such a choice becomes part of it.
pub(super) fn or(words: Vec<String>) -> String {
    let mut words: Vec<_> = words.iter().flat_map(|w| w.split(" or ")).collect();
    match (words.pop(), words.is_empty()) {
        (Some(last), false) => format!("{} or {last}", words.join(", ")),
        (last, _) => last.unwrap_or_default().into(),
    }
}

/// Numbers from one bound to another.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Bounds {
    pub(super) low: Bound<f64>,
    pub(super) high: Bound<f64>,
}

impl Bounds {
    /// More than 0.
    pub(super) const POSITIVE: Bounds = Bounds { low: Bound::Excluded(0.0), high: Bound::Unbounded };
    /// More than 0 and less than 1.
    pub(super) const SHARE: Bounds = Bounds { low: Bound::Excluded(0.0), high: Bound::Excluded(1.0) };

    /// At least 0.
    pub(super) const FROM_0: Bounds = Bounds { low: Bound::Included(0.0), high: Bound::Unbounded };
    /// At least 0 and less than 1.
    pub(super) const BELOW_1: Bounds = Bounds { low: Bound::Included(0.0), high: Bound::Excluded(1.0) };

    pub(super) fn of(range: impl RangeBounds<f64>) -> Bounds {
        Bounds { low: range.start_bound().cloned(), high: range.end_bound().cloned() }
    }

    /// Whether a number lies between the bounds. No key needs more than an f32 holds.
    pub(super) fn admit(&self, x: f64) -> bool {
        x.abs() <= f64::from(f32::MAX) && (self.low, self.high).contains(&x)
    }

    /// "at least 0 and less than 1".
    pub(super) fn words(&self) -> String {
        let low = match self.low {
            Bound::Included(low) => Some(format!("at least {low}")),
            Bound::Excluded(low) => Some(format!("more than {low}")),
            Bound::Unbounded => None,
        };
        let high = match self.high {
            Bound::Included(high) => Some(format!("at most {high}")),
            Bound::Excluded(high) => Some(format!("less than {high}")),
            Bound::Unbounded => None,
        };
        match (low, high) {
            (Some(low), Some(high)) => format!("{low} and {high}"),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => "a finite number".into(),
        }
    }
}
