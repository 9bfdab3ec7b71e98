//! Types of values: each reads a value of the file, reporting what is wrong with it, and writes it back.

use std::ops::{RangeBounds, RangeInclusive};
use std::path::{Path, PathBuf};

use polyreme_data::remote::is_url;

use super::cursor::At;
use super::nearest::nearest;
use super::section::Keyed;
use super::shape::{Bounds, Shape};
use super::tree::{TreeNode, Value};

type Read<T> = Box<dyn Fn(&At) -> Option<T> + Send + Sync>;
type Write<T> = Box<dyn Fn(&T) -> Option<Value> + Send + Sync>;

/// How a `T` stands in a job file.
pub(super) struct Type<T> {
    /// What is accepted.
    pub(super) shape: Shape,
    /// Gives nothing if the value is wrong, which has then been reported.
    pub(super) read: Read<T>,
    /// Gives nothing where nothing is to be written.
    pub(super) write: Write<T>,
}

impl<T: 'static> Type<T> {
    pub(super) fn new(
        shape: Shape,
        read: impl Fn(&At) -> Option<T> + Send + Sync + 'static,
        write: impl Fn(&T) -> Option<Value> + Send + Sync + 'static,
    ) -> Type<T> {
        Type { shape, read: Box::new(read), write: Box::new(write) }
    }

    /// The same in the file, another type in Rust.
    pub(super) fn map<U: 'static>(self, to: fn(T) -> U, from: fn(&U) -> Option<T>) -> Type<U> {
        let Type { shape, read, write } = self;
        Type::new(shape, move |at| read(at).map(to), move |u| from(u).and_then(|t| write(&t)))
    }

    /// With one more condition, which gives what is wrong with a value, after its name, and what to do.
    pub(super) fn check(self, wrong: fn(&T) -> Option<(String, &'static str)>) -> Type<T> {
        let Type { shape, read, write } = self;
        let checked = move |at: &At| {
            let value = read(at)?;
            if let Some((message, hint)) = wrong(&value) {
                at.fault(format!("`{}` {message}", at.path), hint);
                return None;
            }
            Some(value)
        };
        Type::new(shape, checked, write)
    }
}

/// `true` or `false`.
pub(super) fn flag() -> Type<bool> {
    let read = |at: &At| match at.node.value {
        Value::Bool(b) => Some(b),
        _ => at.wrong(&Shape::Flag),
    };
    Type::new(Shape::Flag, read, |b| Some(Value::Bool(*b)))
}

/// A whole number in a range.
pub(super) fn whole<T: TryFrom<u64> + TryInto<u64> + Copy + 'static>(range: RangeInclusive<u64>) -> Type<T> {
    let (least, most) = range.into_inner();
    let read = move |at: &At| {
        let Value::Integer(n) = at.node.value else { return at.wrong(&Shape::Whole { least, most }) };
        let found = n.and_then(|n| u64::try_from(n).ok()).filter(|n| (least..=most).contains(n));
        if found.is_none() {
            let bound = match n {
                Some(n) if n < i128::from(least) => format!("at least {least}"),
                _ => format!("at most {most}"),
            };
            let n = n.map_or("too large".into(), |n| n.to_string());
            at.fault(format!("`{}` is {n}; it must be {bound}", at.path), "");
        }
        found.and_then(|n| T::try_from(n).ok())
    };
    let write = |n: &T| (*n).try_into().ok().map(|n: u64| Value::Integer(Some(n.into())));
    Type::new(Shape::Whole { least, most }, read, write)
}

/// A number in a range.
pub(super) fn real(range: impl RangeBounds<f64>) -> Type<f64> {
    within(Bounds::of(range))
}

/// A number between bounds, as an f32. It is written as the shortest decimal that reads back as the same f32.
pub(super) fn single(bounds: Bounds) -> Type<f32> {
    within(bounds).map(
        |x| x as f32,
        |x| {
            let short = format!("{x:?}").parse().ok();
            Some(short.filter(|short| *short as f32 == *x).unwrap_or(f64::from(*x)))
        },
    )
}

/// A number between bounds.
pub(super) fn within(bounds: Bounds) -> Type<f64> {
    let read = move |at: &At| {
        let x = match at.node.value {
            Value::Float(x) => x,
            Value::Integer(n) => n.map(|n| n as f64),
            _ => return at.wrong(&Shape::Real(bounds)),
        };
        let found = x.filter(|&x| bounds.admit(x));
        if found.is_none() {
            let x = x.map_or("too large".into(), |x| format!("{x:?}"));
            at.fault(format!("`{}` is {x}; it must be {}", at.path, bounds.words()), "");
        }
        found
    };
    Type::new(Shape::Real(bounds), read, |x| Some(Value::Float(Some(*x))))
}

/// Any string.
pub(super) fn text() -> Type<String> {
    Type::new(Shape::Text, |at| at.string().map(String::from), |s| Some(Value::String(s.clone())))
}

/// The path of a file or folder, made absolute: an override's from the working folder, the file's from its own folder.
pub(super) fn path() -> Type<PathBuf> {
    path_or(|_| false)
}

/// The same, or the address of what is in a store, such as `s3://bucket/name`.
pub(super) fn place() -> Type<PathBuf> {
    path_or(is_url)
}

/// A path that is made absolute, unless it is `kept` as it is.
fn path_or(kept: fn(&Path) -> bool) -> Type<PathBuf> {
    let read = move |at: &At| {
        let text = at.string()?;
        if text.is_empty() || text.contains('\0') {
            at.fault(format!("`{}` is not a path", at.path), "write the path of a file or a folder");
            return None;
        }
        if kept(Path::new(text)) {
            return Some(text.into());
        }
        let path = if at.node.place.is_override() { text.into() } else { at.reading.base.join(text) };
        Some(std::path::absolute(&path).unwrap_or(path))
    };
    let write = move |path: &PathBuf| {
        let whole = match kept(path) {
            true => path.clone(),
            false => std::path::absolute(path).unwrap_or_else(|_| path.clone()),
        };
        Some(Value::String(whole.to_string_lossy().into_owned()))
    };
    Type::new(Shape::Path, read, write)
}

/// One of some values by their names; each row has words about it, which may be empty.
pub(super) fn one_of<T: Clone + PartialEq + Send + Sync + 'static>(
    rows: impl IntoIterator<Item = (&'static str, T, &'static str)>,
) -> Type<T> {
    let (mut names, mut values) = (Vec::new(), Vec::new());
    for (name, value, words) in rows {
        names.push((name, words));
        values.push((name, value));
    }
    let known: Vec<_> = names.iter().map(|(name, _)| *name).collect();
    let written = values.clone();
    Type::new(
        Shape::Names(names),
        move |at| {
            let name = at.choice(&known)?;
            values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
        },
        move |value| {
            let (name, _) = written.iter().find(|(_, known)| known == value)?;
            Some(Value::String((*name).into()))
        },
    )
}

/// One of some names, kept as a string.
pub(super) fn name_of(names: impl IntoIterator<Item = &'static str>) -> Type<String> {
    one_of(names.into_iter().map(|name| (name, name.to_string(), "")))
}

/// A key that may be left out.
pub(super) fn maybe<T: Clone + 'static>(inner: Type<T>) -> Type<Option<T>> {
    inner.map(Some, Clone::clone)
}

/// `"auto"` for nothing, or a value.
pub(super) fn auto<T: Clone + PartialEq + Send + Sync + 'static>(inner: Type<T>) -> Type<Option<T>> {
    either(one_of([("auto", None, "")]), maybe(inner))
}

/// Two ways to write a value; it is written in the first one that can.
pub(super) fn either<T: 'static>(a: Type<T>, b: Type<T>) -> Type<T> {
    let shape = Shape::Either(a.shape.clone().into(), b.shape.clone().into());
    let whole = shape.clone();
    let read = move |at: &At| match (&at.node.value, &a.shape) {
        // A string that is near no name was not meant as one.
        (Value::String(name), Shape::Names(known)) if is_near(name, known) => (a.read)(at),
        (value, other) if !matches!(other, Shape::Names(_)) && value.may_be(other) => (a.read)(at),
        (value, _) if value.may_be(&b.shape) => (b.read)(at),
        _ => at.wrong(&whole),
    };
    let write = move |value: &T| (a.write)(value).or_else(|| (b.write)(value));
    Type::new(shape, read, write)
}

fn is_near(name: &str, known: &[(&str, &str)]) -> bool {
    nearest(name, known.iter().map(|(name, _)| *name)).is_some()
}

/// An array of one of some lengths; none: of any length. `words` describe it with the article.
pub(super) fn list<T: 'static>(
    item: Type<T>,
    lengths: &'static [usize],
    words: &'static str,
) -> Type<Vec<T>> {
    let Type { shape, read, write } = item;
    let shape = Shape::List { item: shape.into(), lengths, words };
    let whole = shape.clone();
    let read = move |at: &At| {
        let items = at.items(&whole)?;
        if !lengths.is_empty() && !lengths.contains(&items.len()) {
            let plural = if items.len() == 1 { "" } else { "s" };
            at.fault(format!("`{}` has {} element{plural}; {words} is needed", at.path, items.len()), "");
            return None;
        }
        // All elements are read before one that is wrong ends it.
        let values: Vec<_> = items.iter().map(&read).collect();
        values.into_iter().collect()
    };
    let write = move |values: &Vec<T>| {
        Some(Value::Array(values.iter().filter_map(&write).map(TreeNode::written).collect()))
    };
    Type::new(shape, read, write)
}

/// Rows and columns: one number for both, or `[rows, columns]`.
pub(super) fn pair(range: RangeInclusive<u64>) -> Type<(usize, usize)> {
    let one = whole(range.clone()).map(|n| (n, n), |_| None);
    let both = list(whole(range), &[2], "[rows, columns]");
    either(one, both.map(|sides| (sides[0], sides[1]), |&(rows, columns)| Some(vec![rows, columns])))
}

/// A table with keys of its own.
pub(super) fn table<S: Keyed>() -> Type<S> {
    let shape = Shape::Table(|| &S::section().outline);
    Type::new(shape, |at| S::section().read(at), |spec| Some(S::section().write(spec)))
}
