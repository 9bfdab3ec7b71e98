//! Tables and values while they are read: where each stands, and how what is wrong with it is reported. Errors are
//! collected, so that all of them are reported at once.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use super::error::{ErrorPlace, JobError, Sources};
use super::nearest::nearest;
use super::outline::Outline;
use super::read::outlines;
use super::shape::Shape;
use super::tree::{TreeNode, TreeTable, Value};

/// So many errors show their line, which may be as long as the file; those behind say where it is.
const LINES_SHOWN_MAX: usize = 100;

/// What all cursors of a job share.
pub(super) struct Reading {
    /// The texts, for errors.
    sources: Sources,
    /// The folder that paths of the file are relative to; those of overrides are relative to the working folder.
    pub(super) base: PathBuf,
    faults: RefCell<Vec<(ErrorPlace, JobError)>>,
}

impl Reading {
    pub(super) fn new(sources: Sources, base: &Path) -> Reading {
        Reading { sources, base: base.into(), faults: RefCell::default() }
    }

    /// Notes an error and goes on.
    pub(super) fn fault(
        &self,
        place: &ErrorPlace,
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

    fn n_faults(&self) -> usize {
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
    table: &'a TreeTable,
    /// Where the table begins: where missing keys are reported.
    place: &'a ErrorPlace,
    outline: &'static Outline,
    /// Such as `train.optimizer` or `model.layers[2]`; empty for the whole file.
    path: String,
    /// Errors that were noted before it was read.
    n_faults: usize,
}

impl<'a> Cursor<'a> {
    /// The whole file.
    pub(super) fn root(reading: &'a Reading, table: &'a TreeTable, outline: &'static Outline) -> Cursor<'a> {
        Cursor { reading, table, place: &ErrorPlace::FILE, outline, path: String::new(), n_faults: 0 }
    }

    /// The value of a key, if it is there.
    pub(super) fn get(&self, key: &str) -> Option<At<'a>> {
        let entry = self.table.get(key)?;
        Some(At { reading: self.reading, node: &entry.node, path: self.path_of(key) })
    }

    /// Whether a key is there.
    pub(super) fn has(&self, key: &str) -> bool {
        self.table.get(key).is_some()
    }

    /// Whether nothing was found wrong in it so far.
    pub(super) fn is_clean(&self) -> bool {
        self.reading.n_faults() == self.n_faults
    }

    /// The table of a key, if it is there and is one.
    pub(super) fn inside(&self, key: &str) -> Option<Cursor<'a>> {
        let outline = self.outline.inside(key)?;
        self.get(key)?.cursor(outline)
    }

    /// Notes an error at a key, or at the table if the key is not there.
    pub(super) fn fault(&self, key: &str, message: impl Into<String>, hint: impl Into<String>) {
        let place = self.table.get(key).map_or(self.place, |e| &e.place);
        self.reading.fault(place, &self.path_of(key), message, hint);
    }

    /// Reports a key that must be there and is not, unless a slip of it is there, which is reported by itself.
    pub(super) fn require(&self, key: &str, hint: &str) {
        if self.has(key) || self.has_slip_of(key) {
            return;
        }
        let message = match self.path.as_str() {
            "" => format!("there is no section [{key}]"),
            _ => format!("{} needs `{key}`", title(&self.path)),
        };
        self.reading.fault(self.place, &self.path_of(key), message, hint);
    }

    /// Whether some unknown key was meant to be this one.
    fn has_slip_of(&self, key: &str) -> bool {
        let known = self.outline.names(None);
        let unknown = self.table.entries.iter().filter(|e| !known.contains(&e.key.as_str()));
        unknown.map(|e| nearest(&e.key, known.iter().copied())).any(|near| near == Some(key))
    }

    /// Reports keys that a table of this kind does not have. If the kind is not known, keys of any kind pass.
    pub(super) fn report_unknown(&self, kind: Option<&str>) {
        let valid = self.outline.names(kind);
        for entry in self.table.entries.iter().filter(|e| !valid.contains(&e.key.as_str())) {
            let (message, hint) = self.unknown(&entry.key, kind, &valid);
            self.fault(&entry.key, message, hint);
        }
    }

    fn unknown(&self, key: &str, kind: Option<&str>, valid: &[&'static str]) -> (String, String) {
        let title = title(&self.path);
        let kinds: Vec<_> =
            self.outline.rows.iter().filter(|r| r.name == key).flat_map(|r| &r.kinds).collect();
        if let (false, Some(kind)) = (kinds.is_empty(), kind) {
            let message = format!("`{key}` does not belong to {title} of kind `{kind}`");
            return (message, format!("it belongs to {}", join(kinds)));
        }
        let top = self.path.is_empty();
        let message = if top && matches!(self.table.get(key).map(|e| &e.node.value), Some(Value::Table(_))) {
            format!("unknown section [{key}]")
        } else {
            format!("unknown key `{key}` in {title}")
        };
        if let Some(near) = nearest(key, valid.iter().copied()) {
            let near = if self.outline.is_section(near) { format!("[{near}]") } else { format!("`{near}`") };
            return (message, format!("did you mean {near}?"));
        }
        // So many layers have so many keys that a name found there says little.
        let elsewhere = outlines().into_iter().find(|o| {
            o.path != self.outline.path && o.path != "model.layers" && o.rows.iter().any(|r| r.name == key)
        });
        if let Some(other) = elsewhere.filter(|_| key != "kind") {
            return (message, format!("`{key}` is a key of {}", self::title(other.path)));
        }
        let what = if top { "there are" } else { "valid keys are" };
        (message, format!("{what} {}", valid.join(", ")))
    }

    pub(super) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }
}

/// What a table is called.
fn title(path: &str) -> String {
    match path {
        "" => "the file".into(),
        _ if path.contains(['.', '[']) => format!("`{path}`"),
        _ => format!("[{path}]"),
    }
}

fn join(names: Vec<&&'static str>) -> String {
    names.into_iter().copied().collect::<Vec<_>>().join(", ")
}

/// A value that is being read.
#[derive(Clone)]
pub(super) struct At<'a> {
    pub(super) reading: &'a Reading,
    pub(super) node: &'a TreeNode,
    /// Such as `model.hidden[1]`.
    pub(super) path: String,
}

impl<'a> At<'a> {
    /// Notes an error here.
    pub(super) fn fault(&self, message: impl Into<String>, hint: impl Into<String>) {
        self.reading.fault(&self.node.place, &self.path, message, hint);
    }

    /// Notes that something else is needed.
    pub(super) fn wrong<T>(&self, needed: &Shape) -> Option<T> {
        let hint = match (&self.node.value, needed) {
            (Value::String(s), _)
                if s.trim().parse::<f64>().is_ok() || matches!(s.trim(), "true" | "false") =>
            {
                format!("leave the quotes out: {}", s.trim())
            }
            (_, Shape::Table(outline)) if !outline().path.contains('.') => format!("write [{}]", self.path),
            _ => String::new(),
        };
        let found = self.node.value.describe();
        self.fault(format!("`{}` is {found}; {} is needed", self.path, needed.needed()), hint);
        None
    }

    pub(super) fn string(&self) -> Option<&'a str> {
        match &self.node.value {
            Value::String(s) => Some(s),
            _ => self.wrong(&Shape::Text),
        }
    }

    /// One of some names.
    pub(super) fn choice(&self, known: &[&'static str]) -> Option<&'static str> {
        let text = self.string()?;
        let found = known.iter().copied().find(|k| *k == text);
        if found.is_none() {
            let (message, hint) = match (known, nearest(text, known.iter().copied())) {
                ([only], _) => (format!("only {only:?} is supported"), String::new()),
                (_, Some(near)) => ("which is not known".into(), format!("did you mean {near:?}?")),
                (_, None) => ("which is not known".into(), format!("known are {}", known.join(", "))),
            };
            let joint = if known.len() == 1 { ";" } else { "," };
            self.fault(format!("`{}` is {text:?}{joint} {message}", self.path), hint);
        }
        found
    }

    /// The elements of an array.
    pub(super) fn items(&self, needed: &Shape) -> Option<Vec<At<'a>>> {
        let Value::Array(items) = &self.node.value else { return self.wrong(needed) };
        let item = |(i, node)| At { reading: self.reading, node, path: format!("{}[{i}]", self.path) };
        Some(items.iter().enumerate().map(item).collect())
    }

    /// The keys inside, if this is a table, or a name that stands for a table without any.
    pub(super) fn cursor(&self, outline: &'static Outline) -> Option<Cursor<'a>> {
        let table = match &self.node.value {
            Value::Table(table) => table,
            Value::String(_) if outline.short => TreeTable::EMPTY,
            _ => return None,
        };
        let (reading, place, path) = (self.reading, &self.node.place, self.path.clone());
        Some(Cursor { reading, table, place, outline, path, n_faults: reading.n_faults() })
    }
}
