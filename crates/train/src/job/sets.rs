//! Overrides: `--set train.optimizer.lr=0.1`, put into the tree before it is read, so that they are checked as the
//! file is and their errors point at them.

use std::ops::Range;

use toml::de::DeValue;

use super::error::{ErrorPlace, JobError, Sources};
use super::outline::Outline;
use super::section::Keyed;
use super::spec::Job;
use super::tree::{Entry, TreeNode, TreeTable, Value};

/// What stands before an override in errors.
pub(super) const PREFIX: &str = "--set ";

/// Puts all overrides into the tree, in order; what cannot be put in is reported.
pub(super) fn apply(root: &mut TreeTable, sources: &Sources) -> Vec<JobError> {
    let mut errors = Vec::new();
    for (idx, text) in sources.sets.iter().enumerate() {
        if let Err((span, key, message, hint)) = apply_one(root, idx + 1, text) {
            let place = ErrorPlace { source: idx + 1, span: Some(span) };
            errors.push(sources.error(&place, &key, message, hint.into()));
        }
    }
    errors
}

type Refused = (Range<usize>, String, String, &'static str);

fn apply_one(root: &mut TreeTable, source: usize, text: &str) -> Result<(), Refused> {
    const FORM: &str = "write SECTION.KEY=VALUE, such as train.batch=128";
    let start = PREFIX.len();
    let Some(equals) = text[start..].find('=').map(|at| start + at) else {
        return Err((start..text.len(), String::new(), "an override needs `=`".into(), FORM));
    };
    let path = &text[start..equals];
    let mut parts = Vec::new();
    let mut at = start;
    for part in path.split('.') {
        let lead = part.len() - part.trim_start().len();
        let name = part.trim();
        if name.is_empty() {
            let message = "an override needs a name on each side of a dot".into();
            return Err((start..equals, path.trim().into(), message, FORM));
        }
        parts.push((name, at + lead..at + lead + name.len()));
        at += part.len() + 1;
    }
    let Some(((last, last_span), lead)) = parts.split_last() else {
        unreachable!("split gives at least one part")
    };

    let value = value_of(&text[equals + 1..], source, equals + 1);
    let place = |span: &Range<usize>| ErrorPlace { source, span: Some(span.clone()) };
    let mut here = Here { value: Inside::Table(root), outline: Some(&Job::section().outline) };
    for (name, span) in lead {
        here = here.down(name, place(span)).map_err(|m| (span.clone(), path.trim().into(), m, FORM))?;
    }
    here.put(last, place(last_span), value).map_err(|m| (last_span.clone(), path.trim().into(), m, FORM))
}

/// As TOML, or else as the text itself, so that quotes may be left out.
fn value_of(text: &str, source: usize, shift: usize) -> TreeNode {
    let lead = text.len() - text.trim_start().len();
    let trimmed = text.trim();
    let place = ErrorPlace { source, span: Some(shift + lead..shift + lead + trimmed.len()) };
    match DeValue::parse(trimmed) {
        Ok(value) => TreeNode::of(value.get_ref(), place, source, shift + lead),
        Err(_) => TreeNode { place, value: Value::String(trimmed.into()) },
    }
}

/// Where an override has got to: something with elements, and what is declared of it.
struct Here<'a> {
    value: Inside<'a>,
    /// The table that this is or whose elements are; none, where there is none.
    outline: Option<&'static Outline>,
}

enum Inside<'a> {
    Table(&'a mut TreeTable),
    Array(&'a mut Vec<TreeNode>),
}

impl<'a> Here<'a> {
    fn down(self, name: &str, place: ErrorPlace) -> Result<Here<'a>, String> {
        let (node, outline) = match self.value {
            Inside::Table(table) => {
                if table.get(name).is_none() {
                    let value = Value::Table(TreeTable::default());
                    let node = TreeNode { place: place.clone(), value };
                    table.entries.push(Entry { key: name.into(), place, node });
                }
                let Some(entry) = table.get_mut(name) else { unreachable!("it was put in just now") };
                (&mut entry.node, self.outline.and_then(|o| o.inside(name)))
            }
            Inside::Array(items) => {
                let idx = index(name, items.len())?;
                (&mut items[idx], self.outline)
            }
        };
        // `optimizer = "adam"` is short for a table with that kind.
        if let Value::String(kind) = &node.value
            && outline.is_some_and(|o| o.short)
        {
            let kind = TreeNode { place: node.place.clone(), value: Value::String(kind.clone()) };
            let entry = Entry { key: "kind".into(), place: node.place.clone(), node: kind };
            node.value = Value::Table(TreeTable { entries: vec![entry] });
        }
        let value = match &mut node.value {
            Value::Table(table) => Inside::Table(table),
            Value::Array(items) => Inside::Array(items),
            other => return Err(format!("`{name}` is {}, which has no keys", other.describe())),
        };
        Ok(Here { value, outline })
    }

    fn put(self, name: &str, place: ErrorPlace, node: TreeNode) -> Result<(), String> {
        match self.value {
            Inside::Table(table) => {
                // What cannot be there together with the key is replaced, unless it is an override too.
                let rival = self.outline.and_then(|o| o.rival(name));
                let goes =
                    |e: &Entry| e.key == name || (rival == Some(e.key.as_str()) && !e.place.is_override());
                table.entries.retain(|e| !goes(e));
                table.entries.push(Entry { key: name.into(), place, node });
            }
            Inside::Array(items) => {
                let idx = index(name, items.len())?;
                items[idx] = node;
            }
        }
        Ok(())
    }
}

fn index(name: &str, n: usize) -> Result<usize, String> {
    name.parse().ok().filter(|&i: &usize| i < n).ok_or_else(|| {
        format!("there is no element `{name}` in an array of {n}; elements are counted from 0")
    })
}
