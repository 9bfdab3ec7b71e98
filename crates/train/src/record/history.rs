//! Reading `metrics.jsonl` back, as columns. Lines that are not what this crate writes are passed over and counted: a
//! history is for looking at, and a bad line is no reason to show none of it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use serde_json::Value;

use super::error::RecordError;

/// A line may be so long; longer ones are not ours.
const LINE_BYTES_MAX: usize = 1 << 20;
/// So many different metrics are read.
const COLUMNS_MAX: usize = 1000;

/// The metrics of a run, a column each, in the order in which lines first have them; by name inside a line.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct History {
    columns: Vec<(String, Column)>,
    index: HashMap<String, usize>,
    lines: usize,
    skipped: usize,
}

/// One metric over a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Column {
    /// The step of each value.
    pub steps: Vec<u64>,
    /// The values; not finite where the run's were not.
    pub values: Vec<f64>,
}

impl Column {
    /// The last value and its step.
    pub fn last(&self) -> Option<(u64, f64)> {
        Some((*self.steps.last()?, *self.values.last()?))
    }
}

impl History {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<History, RecordError> {
        let mut history = History::default();
        each_line(path, |bytes, _| match Line::parse(bytes) {
            Some(line) => history.push(line),
            None => history.skipped += 1,
        })
        .map_err(|source| RecordError::read(path, source))?;
        Ok(history)
    }

    /// A metric's values; `epoch` and `seconds` are metrics too.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.index.get(name).map(|&i| &self.columns[i].1)
    }

    /// All metrics with their names.
    pub fn columns(&self) -> impl Iterator<Item = (&str, &Column)> {
        self.columns.iter().map(|(name, column)| (name.as_str(), column))
    }

    /// How many lines were read.
    pub fn lines(&self) -> usize {
        self.lines
    }

    /// How many lines were not metrics.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    fn push(&mut self, line: Line) {
        self.lines += 1;
        for (name, value) in line.values {
            let i = match self.index.get(&name) {
                Some(&i) => i,
                None if self.columns.len() == COLUMNS_MAX => continue,
                None => {
                    self.index.insert(name.clone(), self.columns.len());
                    self.columns.push((name, Column::default()));
                    self.columns.len() - 1
                }
            };
            let column = &mut self.columns[i].1;
            column.steps.push(line.step);
            column.values.push(value);
        }
    }
}

/// One line of metrics.
pub(super) struct Line {
    pub(super) step: u64,
    values: Vec<(String, f64)>,
}

impl Line {
    /// `None` if this is not an object with a step.
    pub(super) fn parse(bytes: &[u8]) -> Option<Line> {
        let Value::Object(object) = serde_json::from_slice(bytes).ok()? else { return None };
        let step = object.get("step")?.as_u64()?;
        let mut values = Vec::with_capacity(object.len());
        for (name, value) in object {
            let value = match value {
                Value::Number(number) => number.as_f64(),
                Value::String(text) => not_finite(&text),
                Value::Null => Some(f64::NAN),
                _ => None,
            };
            if let Some(value) = value.filter(|_| name != "step") {
                values.push((name, value));
            }
        }
        Some(Line { step, values })
    }
}

/// Only the three strings that stand for numbers; other strings are not metrics.
fn not_finite(text: &str) -> Option<f64> {
    match text {
        "NaN" => Some(f64::NAN),
        "inf" => Some(f64::INFINITY),
        "-inf" => Some(f64::NEG_INFINITY),
        _ => None,
    }
}

/// Calls `take` with each line, without its end, and whether it had one. A line that is too long comes cut, so that it
/// does not parse.
pub(super) fn each_line(path: &Path, mut take: impl FnMut(&[u8], bool)) -> io::Result<()> {
    let mut file = BufReader::new(File::open(path)?);
    let mut line = Vec::new();
    let mut started = false;
    loop {
        let chunk = file.fill_buf()?;
        if chunk.is_empty() {
            if started {
                take(&line, false);
            }
            return Ok(());
        }
        let end = chunk.iter().position(|&byte| byte == b'\n');
        let part = &chunk[..end.unwrap_or(chunk.len())];
        line.extend_from_slice(&part[..part.len().min(LINE_BYTES_MAX - line.len())]);
        let used = part.len() + usize::from(end.is_some());
        started = end.is_none();
        if end.is_some() {
            take(&line, true);
            line.clear();
        }
        file.consume(used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn read(text: &[u8]) -> History {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, text).unwrap();
        History::read(&path).unwrap()
    }

    fn check(text: &[u8], name: &str, steps: &[u64], values: &[f64], skipped: usize) {
        let history = read(text);
        let column = history.column(name).cloned().unwrap_or_default();
        assert_eq!(column.steps, steps);
        // As text, because NaN equals nothing.
        assert_eq!(format!("{:?}", column.values), format!("{values:?}"));
        assert_eq!(history.skipped(), skipped, "{:?}", String::from_utf8_lossy(text));
    }

    #[test]
    fn columns_hold_what_lines_held() {
        let text = b"{\"step\":1,\"a\":1.5,\"b\":2}\n{\"step\":3,\"a\":\"NaN\"}\n{\"step\":4,\"a\":\"-inf\",\"c\":null}\n";
        check(text, "a", &[1, 3, 4], &[1.5, f64::NAN, f64::NEG_INFINITY], 0);
        check(text, "b", &[1], &[2.0], 0);
        check(text, "c", &[4], &[f64::NAN], 0);
        check(text, "step", &[], &[], 0);
        let history = read(text);
        assert_eq!(history.columns().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!((history.lines(), history.column("b").unwrap().last()), (3, Some((1, 2.0))));
    }

    #[test]
    fn rubbish_is_passed_over() {
        check(b"", "a", &[], &[], 0);
        check(b"\n\n{\"step\":1,\"a\":1}", "a", &[1], &[1.0], 2);
        check(b"{\"step\":1,\"a\":1}\n{\"step\":2,\"a\":", "a", &[1], &[1.0], 1);
        check(b"{\"step\":1,\"a\":\"text\"}\n\xff\xfe\n{\"step\":2,\"a\":[1]}\n", "a", &[], &[], 1);
        check(b"{\"step\":1,\"a\":1e999}\n{\"step\":18446744073709551616,\"a\":1}\n", "a", &[], &[], 2);
        check(&[b"[".repeat(3000), b"\n{\"step\":1,\"a\":1}\n".to_vec()].concat(), "a", &[1], &[1.0], 1);
        // A line that is too long, and a whole one behind it.
        let long = format!("{{\"step\":1,\"a\":{}1}}\n{{\"step\":2,\"a\":2}}\n", " ".repeat(LINE_BYTES_MAX));
        check(long.as_bytes(), "a", &[2], &[2.0], 1);
        let many: String = (0..COLUMNS_MAX + 5).map(|i| format!("{{\"step\":1,\"m{i}\":1}}\n")).collect();
        assert_eq!(read(many.as_bytes()).columns().count(), COLUMNS_MAX);
        assert!(matches!(History::read(Path::new("/absent/metrics.jsonl")), Err(RecordError::Read { .. })));
    }
}
