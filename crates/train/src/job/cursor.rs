//! Reads tables and values: asks for keys by name and type, and collects what is wrong instead of stopping at it.

use std::cell::RefCell;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::path::{Path, PathBuf};

use super::error::{JobError, Place, Sources};
use super::keys::{GRAMMARS, Grammar};
use super::nearest::nearest;
use super::tree::{Node, Table, Value};

/// So many errors show their line, which may be as long as the file; those behind say where it is.
const LINES_SHOWN_MAX: usize = 100;

/// What all cursors of a job share.
pub(super) struct Reading {
    /// The texts, for errors.
    pub(super) sources: Sources,
    /// The folder that paths of the file are relative to; those of overrides are relative to the working folder.
    pub(super) base: PathBuf,
    faults: RefCell<Vec<(Place, JobError)>>,
}

impl Reading {
    pub(super) fn new(sources: Sources, base: &Path) -> Reading {
        Reading { sources, base: base.into(), faults: RefCell::default() }
    }

    /// Notes an error and goes on.
    pub(super) fn fault(
        &self,
        place: &Place,
        key: &str,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        let mut error = self.sources.error(place, key, message.into(), hint.into());
        let mut faults = self.faults.borrow_mut();
        if faults.len() >= LINES_SHOWN_MAX {
            error.text = String::new();
        }
        faults.push((place.clone(), error));
    }

    pub(super) fn n_faults(&self) -> usize {
        self.faults.borrow().len()
    }

    /// All errors in the order of the file, overrides last.
    pub(super) fn into_faults(self) -> (Sources, Vec<JobError>) {
        let mut faults = self.faults.into_inner();
        faults.sort_by_key(|(place, _)| (place.source, place.span.as_ref().map_or(0, |s| s.start)));
        (self.sources, faults.into_iter().map(|(_, error)| error).collect())
    }
}

/// A table that is being read.
pub(super) struct Cursor<'a> {
    pub(super) reading: &'a Reading,
    table: &'a Table,
    /// Where the table begins: where missing keys are reported.
    pub(super) place: &'a Place,
    grammar: &'static Grammar,
    /// Such as `train.optimizer` or `model.layers[2]`; empty for the whole file.
    pub(super) path: String,
    asked: RefCell<Vec<&'static str>>,
}

impl<'a> Cursor<'a> {
    /// The table of `grammar` at `path`.
    pub(super) fn new(
        reading: &'a Reading,
        table: &'a Table,
        place: &'a Place,
        grammar: &'static str,
        path: impl Into<String>,
    ) -> Cursor<'a> {
        let (grammar, path) = (Grammar::at(grammar), path.into());
        Cursor { reading, table, place, grammar, path, asked: RefCell::default() }
    }

    /// The value of a key, if it is there.
    pub(super) fn get(&self, key: &'static str) -> Option<At<'a>> {
        self.asked.borrow_mut().push(key);
        let entry = self.table.get(key)?;
        Some(At { reading: self.reading, node: &entry.node, path: self.path_of(key) })
    }

    /// Whether a key is there, without reading it.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.get(key).is_some()
    }

    /// The place of a key that is there.
    pub(super) fn place_of(&self, key: &str) -> &'a Place {
        self.table.get(key).map_or(self.place, |e| &e.place)
    }

    /// Reports a key that must be there and is not, unless a slip of it is there, which is reported by itself.
    pub(super) fn require(&self, key: &'static str, hint: &str) {
        if !self.has(key) && !self.has_slip_of(key) {
            let message = format!("{} needs `{key}`", self.title());
            self.reading.fault(self.place, &self.path_of(key), message, hint);
        }
    }

    /// Whether some unknown key was meant to be this one.
    pub(super) fn has_slip_of(&self, key: &str) -> bool {
        let known: Vec<_> = self.grammar.keys_of(None).collect();
        let unknown = self.table.entries.iter().filter(|e| !known.contains(&e.key.as_str()));
        unknown.map(|e| nearest(&e.key, known.iter().copied())).any(|near| near == Some(key))
    }

    /// Reports what nobody asked for, in a table without kinds.
    pub(super) fn finish(&self) {
        self.finish_kind(Some(""));
    }

    /// Reports what nobody asked for. If the kind is not known, keys of any kind pass.
    pub(super) fn finish_kind(&self, kind: Option<&str>) {
        let valid: Vec<_> = self.grammar.keys_of(kind).collect();
        if cfg!(debug_assertions) && kind.is_some() {
            let asked = self.asked.borrow();
            for key in &valid {
                assert!(asked.contains(key), "{}: nobody asked for `{key}` of {kind:?}", self.grammar.path);
            }
            for key in asked.iter() {
                assert!(
                    valid.contains(key),
                    "{}: `{key}` is not in the list for {kind:?}",
                    self.grammar.path
                );
            }
        }
        for entry in self.table.entries.iter().filter(|e| !valid.contains(&e.key.as_str())) {
            let (message, hint) = self.unknown(&entry.key, kind, &valid);
            self.reading.fault(&entry.place, &self.path_of(&entry.key), message, hint);
        }
    }

    fn unknown(&self, key: &str, kind: Option<&str>, valid: &[&'static str]) -> (String, String) {
        if let (Some(own), Some(kind)) = (self.grammar.keys.iter().find(|k| k.name == key), kind) {
            let message = format!("`{key}` does not belong to {} of kind `{kind}`", self.title());
            return (message, format!("it belongs to {}", own.kinds.join(", ")));
        }
        let top = self.path.is_empty();
        let message = if top && matches!(self.table.get(key).map(|e| &e.node.value), Some(Value::Table(_))) {
            format!("unknown section [{key}]")
        } else {
            format!("unknown key `{key}` in {}", self.title())
        };
        if let Some(near) = nearest(key, valid.iter().copied()) {
            let hint = if top && near != "name" {
                format!("did you mean [{near}]?")
            } else {
                format!("did you mean `{near}`?")
            };
            return (message, hint);
        }
        let elsewhere = GRAMMARS.iter().find(|g| {
            g.path != self.grammar.path && g.path != "model.layers" && g.keys.iter().any(|k| k.name == key)
        });
        if let Some(other) = elsewhere.filter(|_| key != "kind") {
            return (message, format!("`{key}` is a key of {}", title(other.path)));
        }
        let what = if top { "there are" } else { "valid keys are" };
        (message, format!("{what} {}", valid.join(", ")))
    }

    /// What the table is called.
    pub(super) fn title(&self) -> String {
        title(&self.path)
    }

    pub(super) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }
}

// Keys by type. Each gives nothing if the key is not there, or is wrong and has been reported.
impl<'a> Cursor<'a> {
    pub(super) fn whole(&self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        self.get(key)?.whole(range)
    }
    pub(super) fn size(&self, key: &'static str, range: RangeInclusive<usize>) -> Option<usize> {
        self.get(key)?.size(range)
    }
    pub(super) fn real(&self, key: &'static str, range: impl RangeBounds<f64>) -> Option<f64> {
        self.get(key)?.real(range)
    }
    pub(super) fn flag(&self, key: &'static str) -> Option<bool> {
        self.get(key)?.flag()
    }
    pub(super) fn string(&self, key: &'static str) -> Option<&'a str> {
        self.get(key)?.string()
    }
    pub(super) fn path(&self, key: &'static str) -> Option<PathBuf> {
        self.get(key)?.path()
    }
    pub(super) fn choice<T: AsRef<str> + Copy>(&self, key: &'static str, known: &[T]) -> Option<T> {
        self.get(key)?.choice(known)
    }
    pub(super) fn pair(&self, key: &'static str, range: RangeInclusive<usize>) -> Option<(usize, usize)> {
        self.get(key)?.pair(range)
    }
}

fn title(path: &str) -> String {
    match path {
        "" => "the file".into(),
        _ if path.contains('.') => format!("`{path}`"),
        _ => format!("[{path}]"),
    }
}

/// A value that is being read.
pub(super) struct At<'a> {
    reading: &'a Reading,
    pub(super) node: &'a Node,
    /// Such as `model.hidden[1]`.
    pub(super) path: String,
}

impl<'a> At<'a> {
    /// What all cursors share.
    pub(super) fn reading(&self) -> &'a Reading {
        self.reading
    }

    /// Notes an error here.
    pub(super) fn fault(&self, message: impl Into<String>, hint: impl Into<String>) {
        self.reading.fault(&self.node.place, &self.path, message, hint);
    }

    /// Notes that something else is needed.
    pub(super) fn wrong<T>(&self, needed: &str) -> Option<T> {
        let hint = match &self.node.value {
            Value::String(s) if s.trim().parse::<f64>().is_ok() || matches!(s.trim(), "true" | "false") => {
                format!("leave the quotes out: {}", s.trim())
            }
            _ => String::new(),
        };
        self.fault(format!("`{}` is {}; {needed} is needed", self.path, self.node.value.describe()), hint);
        None
    }

    pub(super) fn whole(&self, range: RangeInclusive<u64>) -> Option<u64> {
        let Value::Integer(n) = self.node.value else { return self.wrong("a whole number") };
        let found = n.and_then(|n| u64::try_from(n).ok()).filter(|n| range.contains(n));
        if found.is_none() {
            let bound = match n {
                Some(n) if n < i128::from(*range.start()) => format!("at least {}", range.start()),
                _ => format!("at most {}", range.end()),
            };
            let n = n.map_or("too large".into(), |n| n.to_string());
            self.fault(format!("`{}` is {n}; it must be {bound}", self.path), "");
        }
        found
    }

    pub(super) fn size(&self, range: RangeInclusive<usize>) -> Option<usize> {
        let (low, high) = (*range.start() as u64, *range.end() as u64);
        self.whole(low..=high).map(|n| n as usize)
    }

    pub(super) fn real(&self, range: impl RangeBounds<f64>) -> Option<f64> {
        let x = match self.node.value {
            Value::Float(x) => x,
            Value::Integer(n) => n.map(|n| n as f64),
            _ => return self.wrong("a number"),
        };
        // Nothing here needs more than an f32 holds.
        let found = x.filter(|x| x.abs() <= f64::from(f32::MAX) && range.contains(x));
        if found.is_none() {
            let x = x.map_or("too large".into(), |x| format!("{x:?}"));
            self.fault(format!("`{}` is {x}; it must be {}", self.path, describe(&range)), "");
        }
        found
    }

    pub(super) fn flag(&self) -> Option<bool> {
        match self.node.value {
            Value::Bool(b) => Some(b),
            _ => self.wrong("true or false"),
        }
    }

    pub(super) fn string(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::String(s) => Some(s),
            _ => self.wrong("a string"),
        }
    }

    /// A path, made absolute: an override's from the working folder, the file's from its own folder.
    pub(super) fn path(&self) -> Option<PathBuf> {
        let text = self.string()?;
        if text.is_empty() || text.contains('\0') {
            self.fault(format!("`{}` is no path", self.path), "write the path of a file or a folder");
            return None;
        }
        let path = if self.node.place.is_override() { text.into() } else { self.reading.base.join(text) };
        Some(std::path::absolute(&path).unwrap_or(path))
    }

    /// One of some names.
    pub(super) fn choice<T: AsRef<str> + Copy>(&self, known: &[T]) -> Option<T> {
        let text = self.string()?;
        let found = known.iter().find(|k| k.as_ref() == text);
        if found.is_none() {
            let hint = match nearest(text, known.iter().map(AsRef::as_ref)) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => {
                    format!("known are {}", known.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", "))
                }
            };
            self.fault(format!("`{}` is {text:?}, which is not known", self.path), hint);
        }
        found.copied()
    }

    /// The elements of an array.
    pub(super) fn items(&self, needed: &str) -> Option<Vec<At<'a>>> {
        let Value::Array(items) = &self.node.value else { return self.wrong(needed) };
        let item = |(i, node)| At { reading: self.reading, node, path: format!("{}[{i}]", self.path) };
        Some(items.iter().enumerate().map(item).collect())
    }

    /// An array of sizes, of a length that is allowed.
    pub(super) fn sizes(
        &self,
        lengths: &[usize],
        needed: &str,
        range: RangeInclusive<usize>,
    ) -> Option<Vec<usize>> {
        let items = self.items(needed)?;
        if !lengths.is_empty() && !lengths.contains(&items.len()) {
            self.fault(format!("`{}` has {} elements; {needed} is needed", self.path, items.len()), "");
            return None;
        }
        // All elements are read before one that is wrong ends it.
        let sizes: Vec<_> = items.iter().map(|item| item.size(range.clone())).collect();
        sizes.into_iter().collect()
    }

    /// One number for rows and columns, or `[rows, columns]`.
    pub(super) fn pair(&self, range: RangeInclusive<usize>) -> Option<(usize, usize)> {
        match &self.node.value {
            Value::Integer(_) => self.size(range).map(|n| (n, n)),
            Value::Array(_) => {
                let sizes = self.sizes(&[2], "a number or [rows, columns]", range)?;
                Some((sizes[0], sizes[1]))
            }
            _ => self.wrong("a number or [rows, columns]"),
        }
    }

    /// A table of `grammar`.
    pub(super) fn table(&self, grammar: &'static str, needed: &str) -> Option<Cursor<'a>> {
        match &self.node.value {
            Value::Table(table) => {
                Some(Cursor::new(self.reading, table, &self.node.place, grammar, self.path.clone()))
            }
            _ => self.wrong(needed),
        }
    }
}

/// "at least 0 and less than 1".
fn describe(range: &impl RangeBounds<f64>) -> String {
    let low = match range.start_bound() {
        Bound::Included(low) => format!("at least {low}"),
        Bound::Excluded(low) => format!("more than {low}"),
        Bound::Unbounded => String::new(),
    };
    let high = match range.end_bound() {
        Bound::Included(high) => format!("at most {high}"),
        Bound::Excluded(high) => format!("less than {high}"),
        Bound::Unbounded => String::new(),
    };
    match (low.is_empty(), high.is_empty()) {
        (false, false) => format!("{low} and {high}"),
        (false, true) => low,
        (true, false) => high,
        (true, true) => "a finite number".into(),
    }
}
