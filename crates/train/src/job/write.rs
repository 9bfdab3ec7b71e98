//! The way back: a job as a file that reads as the same job.

use super::section::Keyed;
use super::spec::Job;
use super::tree::{TreeTable, Value};

impl Job {
    /// The job as TOML, with every key and all paths absolute: read again, it is the same job, from any file, in any
    /// folder. What is to come from the data is left out. A well-known set that was named without a path is written
    /// so; give it the folder that was found (`known: None`) to make it independent of the working folder.
    pub fn to_toml(&self) -> String {
        match Job::section().write(self) {
            Value::Table(root) => sections(&root),
            _ => unreachable!("the file has no kinds, so it is a table"),
        }
    }
}

fn sections(root: &TreeTable) -> String {
    let line = |key: &str, value: &Value| match value {
        Value::Array(items) if items.iter().any(|i| matches!(i.value, Value::Table(_))) => {
            let items: Vec<_> = items.iter().map(|item| format!("\n    {}", item.value.toml())).collect();
            format!("{key} = [{}\n]\n", items.join(","))
        }
        _ => format!("{key} = {}\n", value.toml()),
    };
    let write = |entry: &super::tree::Entry| match &entry.node.value {
        Value::Table(section) => {
            let lines: String = section.entries.iter().map(|e| line(&e.key, &e.node.value)).collect();
            format!("\n[{}]\n{lines}", entry.key)
        }
        value => line(&entry.key, value),
    };
    root.entries.iter().map(write).collect()
}

impl Value {
    /// The value as it stands in a file.
    pub(super) fn toml(&self) -> String {
        match self {
            Value::String(s) => toml::Value::String(s.clone()).to_string(),
            Value::Integer(Some(n)) => n.to_string(),
            Value::Float(Some(x)) => format!("{x:?}"),
            Value::Bool(b) => b.to_string(),
            Value::Array(items) => {
                format!("[{}]", items.iter().map(|i| i.value.toml()).collect::<Vec<_>>().join(", "))
            }
            Value::Table(table) => {
                let entries = table.entries.iter().map(|e| format!("{} = {}", e.key, e.node.value.toml()));
                format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
            }
            Value::Date | Value::Integer(None) | Value::Float(None) => {
                unreachable!("no key holds a date or a number that is too large")
            }
        }
    }
}
