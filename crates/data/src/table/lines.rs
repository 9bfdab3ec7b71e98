//! JSON lines: an object per line, or one array of objects, whose keys are the columns. Rows become records of fields, as those of a CSV are, so that
//! everything after is the same.
//!
//! A key that a line lacks, and `null`, are blanks; numbers, words, true and false are what they say; what holds more (an array, an
//! object) is kept as its text, which is a word like any other. Columns are in the order of their names.

use std::collections::BTreeSet;
use std::path::Path;

use csv::{ByteRecord, Position};
use serde_json::{Map, Value};

use super::text::{Heading, Row, Text};
use crate::error::DataError;

/// How a table is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TableFormat {
    /// Fields between delimiters.
    #[default]
    Csv,
    /// A JSON object per line.
    JsonLines,
}

impl TableFormat {
    /// The format that a file's name says, if it says one.
    pub fn of(path: &Path) -> Option<TableFormat> {
        let extension = path.extension()?.to_str()?;
        let is = |names: &[&str]| names.iter().any(|name| extension.eq_ignore_ascii_case(name));
        match () {
            () if is(&["jsonl", "ndjson"]) => Some(TableFormat::JsonLines),
            () if is(&["csv", "tsv"]) => Some(TableFormat::Csv),
            () => None,
        }
    }
}

impl Text {
    /// The keys of all lines.
    pub(super) fn keys(&self) -> Result<Heading, DataError> {
        let mut names = BTreeSet::new();
        self.objects(|object, _| {
            let new =
                object.into_iter().map(|(key, _)| key).filter(|key| !names.contains(key)).collect::<Vec<_>>();
            names.extend(new);
            Ok(())
        })?;
        match names.is_empty() {
            true => Err(self.error(
                0,
                0,
                "the file is empty; each line is a row such as {\"age\": 30, \"city\": \"Rome\"}",
            )),
            false => Ok(Heading::named(names.into_iter().collect())),
        }
    }

    /// Calls `each` with every line as a row.
    pub(super) fn lines(
        &self,
        heading: &Heading,
        mut each: impl FnMut(&Row) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut record = ByteRecord::new();
        self.objects(|object, start| {
            record.clear();
            let mut at = Position::new();
            at.set_byte(start as u64);
            record.set_position(Some(at));
            for name in &heading.names {
                match object.get(name) {
                    None | Some(Value::Null) => record.push_field(b""),
                    Some(Value::String(text)) => record.push_field(text.trim().as_bytes()),
                    Some(other) => record.push_field(other.to_string().as_bytes()),
                }
            }
            each(&Row::new(self, heading, &record))
        })
    }

    /// Calls `each` with every object, and where its line starts.
    fn objects(
        &self,
        mut each: impl FnMut(Map<String, Value>, usize) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut read = || {
            if self.bytes().trim_ascii_start().starts_with(b"[") {
                let all: Vec<Map<String, Value>> = serde_json::from_slice(self.bytes()).map_err(|e| {
                    self.error(0, 0, &format!("{e}; a file that begins with [ is one array of JSON objects"))
                })?;
                return all.into_iter().try_for_each(|object| each(object, 0));
            }
            let mut start = 0;
            for line in self.bytes().split(|b| *b == b'\n') {
                let at = start;
                start += line.len() + 1;
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                let object = serde_json::from_slice(line).map_err(|e| {
                    let why = format!(
                        "{e}; each line is one JSON object, such as {{\"age\": 30, \"city\": \"Rome\"}}"
                    );
                    self.error(at, 0, &why)
                })?;
                each(object, at)?;
            }
            Ok(())
        };
        let outcome = read();
        // Checked first: the content of a file that was cut may be wrong in any way.
        self.bytes().intact()?;
        outcome
    }
}
