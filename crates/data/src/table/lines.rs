//! JSON lines: an object per line, or one array of objects, whose keys are the columns. Rows become records of fields, as those of a CSV are, so that
//! everything after is the same.
//!
//! A key that a line lacks, and `null`, are blanks; numbers, words, true and false are what they say; what holds more (an array, an
//! object) is kept as its text, which is a word like any other. Columns are in the order of their names.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::text::{Heading, Row, Text};
use crate::error::DataError;

/// How a table is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum TableFormat {
    /// Fields between delimiters.
    #[default]
    Csv,
    /// A JSON object per line.
    JsonLines,
    /// Parquet.
    Parquet,
}

impl TableFormat {
    /// All of them.
    pub const ALL: [TableFormat; 3] = [TableFormat::Csv, TableFormat::JsonLines, TableFormat::Parquet];

    /// How the names of files end that are written so.
    pub fn extensions(self) -> &'static [&'static str] {
        match self {
            TableFormat::Csv => &["csv", "tsv"],
            TableFormat::JsonLines => &["jsonl", "ndjson"],
            TableFormat::Parquet => &["parquet", "pq"],
        }
    }

    /// The format that a file's name says, if it says one.
    pub fn of(path: &Path) -> Option<TableFormat> {
        let extension = path.extension()?.to_str()?;
        let is = |format: &TableFormat| {
            format.extensions().iter().any(|name| extension.eq_ignore_ascii_case(name))
        };
        TableFormat::ALL.into_iter().find(is)
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
        let mut record = Fields::default();
        self.objects(|object, start| {
            fill(&mut record, start, heading, &object);
            each(&Row::new(self, heading, &record))
        })
    }

    /// Reads the line that starts at a byte as a row; gives where to go on, `None` after the last.
    pub(super) fn line_at(
        &self,
        heading: &Heading,
        at: usize,
        record: &mut Fields,
    ) -> Result<Option<usize>, DataError> {
        let Some((start, next)) = self.next_line(at) else { return Ok(None) };
        fill(record, start, heading, &self.object(start, next)?);
        Ok(Some(next))
    }

    /// Where the next line that is not blank starts, and the one after it.
    pub(super) fn next_line(&self, at: usize) -> Option<(usize, usize)> {
        let mut start = at;
        while start < self.bytes().len() {
            let rest = &self.bytes()[start..];
            let length = rest.iter().position(|b| *b == b'\n').map_or(rest.len(), |end| end + 1);
            if !rest[..length].iter().all(u8::is_ascii_whitespace) {
                return Some((start, start + length));
            }
            start += length;
        }
        None
    }

    /// Whether the file is one array of objects, and has no lines of its own.
    pub(super) fn is_array(&self) -> bool {
        self.format() == TableFormat::JsonLines && self.bytes().trim_ascii_start().starts_with(b"[")
    }

    /// The object in these bytes.
    fn object(&self, from: usize, to: usize) -> Result<Map<String, Value>, DataError> {
        serde_json::from_slice(&self.bytes()[from..to]).map_err(|e| {
            let why =
                format!("{e}; each line is one JSON object, such as {{\"age\": 30, \"city\": \"Rome\"}}");
            self.error(from, 0, &why)
        })
    }

    /// Calls `each` with every object, and where its line starts.
    fn objects(
        &self,
        mut each: impl FnMut(Map<String, Value>, usize) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut read = || {
            if self.is_array() {
                let all: Vec<Map<String, Value>> = serde_json::from_slice(self.bytes()).map_err(|e| {
                    self.error(0, 0, &format!("{e}; a file that begins with [ is one array of JSON objects"))
                })?;
                return all.into_iter().try_for_each(|object| each(object, 0));
            }
            let mut at = 0;
            while let Some((start, next)) = self.next_line(at) {
                each(self.object(start, next)?, start)?;
                at = next;
            }
            Ok(())
        };
        let outcome = read();
        // Checked first: the content of a file that was cut may be wrong in any way.
        self.bytes().intact()?;
        outcome
    }
}

/// Makes a row of an object.
fn fill(record: &mut Fields, start: usize, heading: &Heading, object: &Map<String, Value>) {
    record.begin(start);
    for name in &heading.names {
        match object.get(name) {
            None | Some(Value::Null) => record.push(b""),
            Some(Value::String(text)) => record.push(text.trim().as_bytes()),
            Some(other) => record.push(other.to_string().as_bytes()),
        }
    }
}
