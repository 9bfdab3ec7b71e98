//! The text of a table: its heading, its rows, and where in the text a field is.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::str;
use std::sync::Arc;

use csv::{ByteRecord, Reader, ReaderBuilder, Trim};

use super::{TableFormat, TableOptions, TableSchema, TextColumns};
use crate::error::DataError;
use crate::map::{self, Bytes};
use crate::spec::LabelKind;

/// The byte order mark that some programs put before a text in UTF-8.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// How many rows are looked at to see whether words of the first row occur again.
const ROWS_OF_WORDS: usize = 100;

/// A table's text and its options.
pub(super) struct Text {
    path: PathBuf,
    bytes: Bytes,
    options: TableOptions,
}

/// What the first rows say about the table.
pub(super) struct Heading {
    /// Whether the first row is a header.
    is_row: bool,
    /// The names in the header.
    pub(super) names: Vec<String>,
    /// The number of columns, the label included.
    pub(super) width: usize,
}

/// A row and where it is.
pub(super) struct Row<'a> {
    text: &'a Text,
    heading: &'a Heading,
    record: &'a ByteRecord,
}

/// A position in a text: line and column, and byte offset.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextPlace {
    offset: u64,
    line: usize,
    column: usize,
}

impl TextPlace {
    pub(super) fn error(&self, path: &Path, why: &str) -> DataError {
        DataError::corrupt(path, self.offset, format!("line {}, column {}: {why}", self.line, self.column))
    }
}

impl Text {
    pub(super) fn open(path: &Path, options: &TableOptions) -> Result<Text, DataError> {
        if options.delimiter == b'"' || options.delimiter == b'\n' || options.delimiter == b'\r' {
            return Err(DataError::Setting {
                why: "the delimiter cannot be a quote or the end of a line".into(),
            });
        }
        let text = Text { path: path.into(), bytes: map::open(path)?, options: options.clone() };
        if options.format == TableFormat::Csv {
            text.check_quotes()?;
        }
        Ok(text)
    }

    /// As what labels are read.
    pub(super) fn kind(&self) -> LabelKind {
        self.options.kind
    }

    /// The content of the file.
    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// What was learnt of the columns, if they are not all numbers.
    pub(super) fn schema(&self) -> Option<&Arc<TableSchema>> {
        self.options.schema.as_ref()
    }

    /// The columns that are texts, if there are.
    pub(super) fn texts(&self) -> Option<&TextColumns> {
        self.options.texts.as_ref()
    }

    /// Looks at the first two rows.
    pub(super) fn heading(&self) -> Result<Heading, DataError> {
        if self.options.format == TableFormat::JsonLines {
            return self.keys();
        }
        let mut reader = self.reader();
        let (first, second) = (self.record(&mut reader)?, self.record(&mut reader)?);
        let Some(first) = first else {
            return Err(self.error(0, 0, "the file is empty"));
        };
        let texts = self.options.texts.iter().flat_map(|texts| &texts.columns);
        let by_name = self.options.labels.iter().chain(texts).any(|label| {
            label.parse::<i64>().is_err() && first.iter().any(|field| field == label.as_bytes())
        });
        let word_over_number = second.is_some_and(|second| {
            first
                .iter()
                .zip(&second)
                .any(|(first, second)| number(first).is_none() && number(second).is_some())
        });
        let known = &self.options.columns.features;
        let has_known = first.iter().any(|field| known.iter().any(|name| name.as_bytes() == field));
        let is_row = match self.options.header {
            Some(header) => header,
            None => by_name || word_over_number || has_known || self.names_over_words(&first)?,
        };
        let mut names = Vec::new();
        if is_row {
            for (i, field) in first.iter().enumerate() {
                let name = str::from_utf8(field)
                    .map_err(|_| self.error(start(&first), i, "the name is not UTF-8"))?;
                names.push(name.to_owned());
            }
        }
        Ok(Heading { is_row, names, width: first.len() })
    }

    /// Whether the first row is the only one with its words, in a table that has no numbers in its first two rows: words that are
    /// values occur again.
    fn names_over_words(&self, first: &ByteRecord) -> Result<bool, DataError> {
        if first.iter().any(|field| field.is_empty() || number(field).is_some()) {
            return Ok(false);
        }
        let (mut reader, mut seen) = (self.reader(), vec![HashSet::new(); first.len()]);
        let (mut again, mut rows) = (false, 0);
        while let Some(record) = self.record(&mut reader)?.filter(|_| rows < ROWS_OF_WORDS) {
            if rows > 0 && record.iter().zip(first).any(|(field, name)| field == name) {
                return Ok(false);
            }
            for (seen, field) in seen.iter_mut().zip(&record).filter(|_| rows > 0) {
                again |= !seen.insert(field.to_vec());
            }
            rows += 1;
        }
        Ok(again)
    }

    /// Calls `each` with every row under the heading; all have as many fields as the heading.
    pub(super) fn rows(
        &self,
        heading: &Heading,
        mut each: impl FnMut(&Row) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        if self.options.format == TableFormat::JsonLines {
            return self.lines(heading, each);
        }
        let mut reader = self.reader();
        let mut record = ByteRecord::new();
        let (mut n, mut skip) = (0usize, heading.is_row);
        let mut read = || -> Result<(), DataError> {
            while reader.read_byte_record(&mut record).map_err(|e| self.broken(&e))? {
                if skip {
                    skip = false;
                    continue;
                }
                if record.len() != heading.width {
                    let at = record.len().min(heading.width);
                    let why = format!("{} fields, but the first row has {}", record.len(), heading.width);
                    return Err(self.error(start(&record), at, &why));
                }
                each(&Row { text: self, heading, record: &record })?;
                n += 1;
            }
            Ok(())
        };
        let outcome = read();
        // Checked first: the content of a file that was cut may be wrong in any way, or in none.
        self.bytes.intact()?;
        outcome?;
        if n == 0 {
            return Err(self.error(
                self.bytes.len(),
                0,
                "no rows under the header; if row 1 is data, set header = false",
            ));
        }
        Ok(())
    }

    /// An error at a field of the record that starts at byte `start`.
    pub(super) fn error(&self, start: usize, field: usize, why: &str) -> DataError {
        self.place(start, field).error(&self.path, why)
    }

    /// An error where a quote opens that is never closed, or that is closed by one that was meant to open another field: all
    /// rows between would be one field.
    fn check_quotes(&self) -> Result<(), DataError> {
        let text: &[u8] = &self.bytes;
        if !text.contains(&b'"') {
            return Ok(());
        }
        let mut at = if text.starts_with(BOM) { BOM.len() } else { 0 };
        while at < text.len() {
            let open = at;
            let quoted = text[open] == b'"';
            if quoted {
                let Some(close) = self.closing_quote(open) else {
                    let why = "a quote opens here and is never closed; close it, or write it twice (\"\") inside quotes \
                               if it belongs to the text";
                    return Err(self.place_at(open).error(&self.path, why));
                };
                at = close + 1;
            }
            let (end, _) = self.unquoted_end(at);
            if quoted && !text[at..end].iter().all(u8::is_ascii_whitespace) {
                let why = format!(
                    "a quote opens here and closes at line {}, column {}, where the field goes on; is one missing, or \
                     to be written twice (\"\")?",
                    self.place_at(at - 1).line,
                    self.place_at(at - 1).column
                );
                return Err(self.place_at(open).error(&self.path, &why));
            }
            at = end + 1;
        }
        Ok(())
    }

    fn reader(&self) -> Reader<&[u8]> {
        let mut builder = ReaderBuilder::new();
        builder.has_headers(false).flexible(true).trim(Trim::All).delimiter(self.options.delimiter);
        builder.from_reader(&self.bytes)
    }

    fn record(&self, reader: &mut Reader<&[u8]>) -> Result<Option<ByteRecord>, DataError> {
        let mut record = ByteRecord::new();
        let there = reader.read_byte_record(&mut record).map_err(|e| self.broken(&e))?;
        Ok(there.then_some(record))
    }

    fn broken(&self, error: &csv::Error) -> DataError {
        let offset = error.position().map_or(0, |p| p.byte() as usize);
        self.error(offset, 0, &error.to_string())
    }

    /// Where a field is: reads the record again, as its text is not kept. For errors, and once per class.
    fn place(&self, start: usize, field: usize) -> TextPlace {
        let text: &[u8] = &self.bytes;
        let mut at = start.min(text.len());
        if at == 0 && text.starts_with(BOM) {
            at = BOM.len();
        }
        if self.options.format == TableFormat::JsonLines {
            return self.place_at(at);
        }
        while matches!(text.get(at), Some(b'\r' | b'\n')) && at + 1 < text.len() {
            at += 1;
        }
        for _ in 0..field {
            let (end, more) = self.field_end(at);
            at = end + usize::from(more);
            if !more {
                break;
            }
        }
        self.place_at(at)
    }

    fn place_at(&self, at: usize) -> TextPlace {
        let before = &self.bytes[..at];
        let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |n| n + 1);
        let line = 1 + before.iter().filter(|&&b| b == b'\n').count();
        TextPlace { offset: at as u64, line, column: 1 + at - line_start }
    }

    /// Where the field that starts at `at` ends, and whether a delimiter ends it.
    fn field_end(&self, at: usize) -> (usize, bool) {
        // Quotes count only around a whole field.
        let quoted = self.bytes.get(at) == Some(&b'"');
        let from = match quoted.then(|| self.closing_quote(at)) {
            None => at,
            Some(Some(close)) => close + 1,
            Some(None) => self.bytes.len(),
        };
        self.unquoted_end(from)
    }

    /// The quote that closes the one at `open`; two in a row are one of the text.
    fn closing_quote(&self, open: usize) -> Option<usize> {
        let mut at = open + 1;
        loop {
            at += self.bytes.get(at..)?.iter().position(|&b| b == b'"')?;
            if self.bytes.get(at + 1) != Some(&b'"') {
                return Some(at);
            }
            at += 2;
        }
    }

    /// The next delimiter or end of a line from `at` on, and whether it is a delimiter.
    fn unquoted_end(&self, at: usize) -> (usize, bool) {
        let ends = |b: &u8| *b == self.options.delimiter || matches!(b, b'\r' | b'\n');
        let end = at + self.bytes[at..].iter().position(ends).unwrap_or(self.bytes.len() - at);
        (end, self.bytes.get(end) == Some(&self.options.delimiter))
    }
}

impl Heading {
    /// The labels' columns, in the order in which they were asked for; the last column if none was.
    pub(super) fn labels(&self, text: &Text) -> Result<Vec<usize>, DataError> {
        let wanted = &text.options.columns.labels;
        if self.is_known(text) && !wanted.is_empty() {
            let known = self.known_labels(text);
            if known.len() == wanted.len() {
                return Ok(known);
            }
            if text.options.labels.is_empty() || wanted.len() > 1 {
                let missing = wanted.iter().find(|name| !self.names.contains(name)).unwrap_or(&wanted[0]);
                let why = format!("no column {missing:?}, which is the label's in the training file");
                return Err(text.error(0, 0, &why));
            }
        }
        if text.options.labels.is_empty() && text.options.format == TableFormat::JsonLines {
            let shown = self.names.iter().take(20).cloned().collect::<Vec<_>>().join(", ");
            let why = format!("name the label's key with `data.label`; there are {shown}");
            return Err(text.error(0, 0, &why));
        }
        if text.options.labels.is_empty() {
            return Ok(vec![self.width - 1]);
        }
        let mut columns: Vec<usize> = Vec::new();
        for label in &text.options.labels {
            let column = self.label(text, label)?;
            if columns.contains(&column) {
                return Err(text.error(0, column, &format!("`data.label` names column {label:?} twice")));
            }
            columns.push(column);
        }
        if columns.len() == self.width {
            return Err(text.error(0, 0, "all columns are labels; a row has at least one feature too"));
        }
        Ok(columns)
    }

    /// The column that a label's name or number stands for.
    pub(super) fn label(&self, text: &Text, label: &str) -> Result<usize, DataError> {
        if let Some(column) = self.names.iter().position(|n| n == label) {
            return Ok(column);
        }
        let wide = self.width as i64;
        match label.parse::<i64>() {
            Ok(n) if (-wide..wide).contains(&n) => Ok(n.rem_euclid(wide) as usize),
            Ok(n) => Err(text.error(0, 0, &format!("no column {n}: the table has {wide}, counted from 0"))),
            Err(_) if self.names.is_empty() => {
                Err(text.error(0, 0, &format!("no column {label:?}: the table has no header; give a number")))
            }
            Err(_) => {
                let shown = self.names.iter().take(20).cloned().collect::<Vec<_>>().join(", ");
                Err(text.error(0, 0, &format!("no column {label:?}; the header has {shown}")))
            }
        }
    }
}

impl Heading {
    /// Of columns that all have names.
    pub(super) fn named(names: Vec<String>) -> Heading {
        Heading { is_row: true, width: names.len(), names }
    }

    /// The names of the columns; their numbers, from 0, without a header.
    pub(super) fn names_or_numbers(&self) -> Vec<String> {
        match self.is_row {
            true => self.names.clone(),
            false => (0..self.width).map(|field| field.to_string()).collect(),
        }
    }

    /// Whether the first row is a header.
    pub(super) fn is_named(&self) -> bool {
        self.is_row
    }

    /// The name of a column.
    pub(super) fn name(&self, field: usize) -> Option<&str> {
        self.names.get(field).map(String::as_str)
    }

    /// Whether columns are found by name: there is a header, and it is known which are wanted.
    pub(super) fn is_known(&self, text: &Text) -> bool {
        self.is_row && !text.options.columns.is_empty()
    }

    /// The columns that have the names of the labels that were trained on, as far as they are there.
    pub(super) fn known_labels(&self, text: &Text) -> Vec<usize> {
        let names = text.options.columns.labels.iter().filter(|_| self.is_known(text));
        names.filter_map(|name| self.names.iter().position(|n| n == name)).collect()
    }

    /// The columns of the features: all but the labels, in the order of those that are wanted.
    pub(super) fn features(&self, text: &Text, labels: &[usize]) -> Result<Vec<usize>, DataError> {
        let wanted = &text.options.columns;
        if self.is_known(text) {
            return wanted.find(&self.names, labels).map_err(|why| text.error(0, 0, &why));
        }
        let features: Vec<usize> = (0..self.width).filter(|field| !labels.contains(field)).collect();
        if !wanted.is_empty() && features.len() != wanted.features.len() {
            let why = format!(
                "{} features without names, but the training file has {}; give as many, in its order, or a header",
                features.len(),
                wanted.features.len()
            );
            return Err(text.error(0, 0, &why));
        }
        Ok(features)
    }
}

impl<'a> Row<'a> {
    /// The fields of a row.
    pub(super) fn new(text: &'a Text, heading: &'a Heading, record: &'a ByteRecord) -> Row<'a> {
        Row { text, heading, record }
    }

    /// The text of a field.
    pub(super) fn field(&self, field: usize) -> &[u8] {
        &self.record[field]
    }

    /// A field as a number, if it is one; it may be infinite.
    pub(super) fn plain_number(&self, field: usize) -> Option<f32> {
        number(&self.record[field])
    }

    /// Whether a field is something else than a number: a word, or nothing.
    pub(super) fn is_not_number(&self, field: usize) -> bool {
        number(&self.record[field]).is_none_or(f32::is_nan)
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.text.path
    }

    /// The file, to be kept.
    pub(super) fn shared_path(&self) -> Arc<Path> {
        self.text.path.as_path().into()
    }

    /// The name of a column.
    pub(super) fn column_name(&self, field: usize) -> Option<&str> {
        self.heading.name(field)
    }

    /// Fails if a quoted field spans several lines.
    pub(super) fn on_one_line(&self, field: usize) -> Result<(), DataError> {
        match self.record[field].iter().any(|b| matches!(b, b'\r' | b'\n')) {
            true => Err(self.wrong(field, "goes on in another line; is a quote missing, or one too many?")),
            false => Ok(()),
        }
    }

    /// A field as a finite number.
    pub(super) fn number(&self, field: usize) -> Result<f32, DataError> {
        match number(&self.record[field]) {
            Some(number) if number.is_finite() => Ok(number),
            Some(_) => Err(self.wrong(field, "is not a finite number of 32 bits")),
            None if self.record[field].is_empty() => {
                Err(self.wrong(field, "is empty; fill it, or leave out the row"))
            }
            None => Err(self.wrong(field, "is not a number")),
        }
    }

    /// A field as a number to be predicted.
    pub(super) fn target(&self, field: usize) -> Result<f32, DataError> {
        match number(&self.record[field]) {
            None if !self.record[field].is_empty() => {
                let what = "is not a number, and a numeric target is asked for; name its column with `data.label`, or \
                            leave out `train.loss` to learn classes";
                Err(self.wrong(field, what))
            }
            _ => self.number(field),
        }
    }

    /// A field that says whether a label holds: 0 or 1.
    pub(super) fn zero_or_one(&self, field: usize) -> Result<f32, DataError> {
        match number(&self.record[field]) {
            Some(value) if value == 0.0 || value == 1.0 => Ok(value),
            _ if self.record[field].is_empty() => self.number(field),
            _ => {
                let what = "is not 0 or 1, as each label is with `train.loss = \"bce\"`; name the labels' columns with \
                            `data.label`";
                Err(self.wrong(field, what))
            }
        }
    }

    /// A field as a word.
    pub(super) fn word(&self, field: usize) -> Result<&str, DataError> {
        let word = str::from_utf8(&self.record[field]).map_err(|_| self.wrong(field, "is not UTF-8"))?;
        if word.is_empty() {
            return Err(self.wrong(field, "is empty; fill it, or leave out the row"));
        }
        if word.eq_ignore_ascii_case("nan") {
            return Err(self.wrong(field, "is not a label; fill it, or leave out the row"));
        }
        Ok(word)
    }

    pub(super) fn place(&self, field: usize) -> TextPlace {
        self.text.place(start(self.record), field)
    }

    pub(super) fn error(&self, field: usize, why: &str) -> DataError {
        self.text.error(start(self.record), field, why)
    }

    /// An error that names the field and shows its text.
    pub(super) fn wrong(&self, field: usize, what: &str) -> DataError {
        let name = match self.heading.names.get(field) {
            Some(name) => format!("{name:?}"),
            None => field.to_string(),
        };
        let mut content: String = String::from_utf8_lossy(&self.record[field]).chars().take(40).collect();
        if !content.is_empty() {
            content = format!(" {content:?}");
        }
        self.error(field, &format!("field {name}:{content} {what}"))
    }
}

/// Where a record starts.
fn start(record: &ByteRecord) -> usize {
    record.position().map_or(0, |p| p.byte() as usize)
}

fn number(field: &[u8]) -> Option<f32> {
    str::from_utf8(field).ok()?.parse().ok()
}
