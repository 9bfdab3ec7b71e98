//! The text of a table: its heading, its rows, and where in the text a field is.

use std::collections::HashSet;
use std::path::Path;
use std::str;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::fields::{Cut, Fields, QuoteFault, closing_quote, unquoted_end};
use super::number;
use super::{ColumnChoice, FileColumn, TableFormat, TableOptions, TableSchema, TextColumns};
use crate::classes::LabelPlace;
use crate::error::DataError;
use crate::map::Bytes;
use crate::remote::FarFile;
use crate::spec::LabelKind;

/// The byte order mark that some programs put before a text in UTF-8.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// How many rows are looked at to see whether words of the first row occur again.
const ROWS_OF_WORDS: usize = 100;

/// A table's text and its options.
#[derive(Debug)]
pub(super) struct Text {
    path: Arc<Path>,
    bytes: Bytes,
    options: Arc<TableOptions>,
}

/// A text whose file is not held.
#[derive(Debug)]
pub(super) struct ClosedText {
    path: Arc<Path>,
    options: Arc<TableOptions>,
}

/// What the first rows say about the table.
#[derive(Debug)]
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
    record: &'a Fields,
}

/// A position in a text: line and column, and byte offset.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextPlace {
    offset: u64,
    line: usize,
    column: usize,
    /// In a file that is no text: the number of the row from 1, or 0 for all of it.
    row: Option<u64>,
}

/// Where a field is, found out when it is needed: to count lines takes a pass over the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FieldPlace {
    #[serde(with = "shared_path")]
    path: Arc<Path>,
    start: usize,
    field: usize,
    format: TableFormat,
    delimiter: u8,
}

/// A path as a string; one that is no text is only to be shown.
mod shared_path {
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Arc<Path>, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&path.to_string_lossy())
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Arc<Path>, D::Error> {
        Ok(PathBuf::deserialize(from)?.into())
    }
}

impl LabelPlace for FieldPlace {
    fn error(&self, why: &str) -> DataError {
        let (format, delimiter) = (self.format, self.delimiter);
        let options = TableOptions { format, delimiter, ..TableOptions::default() };
        match Text::open(&self.path, &options) {
            Ok(text) => text.error(self.start, self.field, why),
            // It is gone; what is wrong is known all the same.
            Err(_) => DataError::corrupt(&*self.path, self.start as u64, why),
        }
    }
}

impl TextPlace {
    pub(super) fn error(&self, path: &Path, why: &str) -> DataError {
        match self.row {
            Some(0) => return DataError::Setting { why: format!("{}: {why}", path.display()) },
            Some(row) => {
                return DataError::Setting { why: format!("{}: row {row}: {why}", path.display()) };
            }
            None => {}
        }
        DataError::corrupt(path, self.offset, format!("line {}, column {}: {why}", self.line, self.column))
    }
}

impl ClosedText {
    /// Opens it again.
    pub(super) fn open(&self) -> Result<Text, DataError> {
        let bytes = self.options.places.open(&self.path)?;
        Ok(Text { path: self.path.clone(), bytes, options: self.options.clone() })
    }

    /// Its file.
    pub(super) fn far(&self) -> Option<FarFile<'_>> {
        self.options.places.far(&self.path)
    }
}

impl Text {
    pub(super) fn open(path: &Path, options: &TableOptions) -> Result<Text, DataError> {
        if options.delimiter == b'"' || options.delimiter == b'\n' || options.delimiter == b'\r' {
            return Err(DataError::Setting {
                why: "the delimiter cannot be a quote or the end of a line".into(),
            });
        }
        let options = Arc::new(options.clone());
        Ok(Text { path: path.into(), bytes: options.places.open(path)?, options })
    }

    /// Lets go of the file.
    pub(super) fn close(self) -> ClosedText {
        ClosedText { path: self.path, options: self.options }
    }

    /// Whether its file is not on this host.
    pub(super) fn is_far(&self) -> bool {
        self.options.places.far(&self.path).is_some()
    }

    /// Whether its rows stay in the file.
    pub(super) fn is_stored(&self) -> bool {
        self.options.stored
    }

    /// Which columns are read, and as what.
    pub(super) fn choice(&self) -> &ColumnChoice {
        &self.options.choice
    }

    /// The error for a table without rows.
    pub(super) fn no_rows(&self) -> DataError {
        self.error(self.bytes.len(), 0, "no rows under the header; if row 1 is data, set header = false")
    }

    /// How it is written.
    pub(super) fn format(&self) -> TableFormat {
        self.options.format
    }

    /// As what labels are read.
    pub(super) fn kind(&self) -> LabelKind {
        self.options.kind
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
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

    /// The column that names files, if it is a table of files.
    pub(super) fn files(&self) -> Option<&FileColumn> {
        self.options.files.as_ref()
    }

    /// Which columns there are.
    pub(super) fn heading(&self) -> Result<Heading, DataError> {
        match self.options.format {
            TableFormat::Csv => self.names(),
            TableFormat::JsonLines => self.keys(),
            TableFormat::Parquet => self.parquet_columns(),
        }
    }

    /// Whether the first row of a CSV is names, and which.
    fn names(&self) -> Result<Heading, DataError> {
        let (mut first, mut second) = (Fields::default(), Fields::default());
        let Some(next) = self.next_row(self.first_row(), &mut first)? else {
            return Err(self.error(0, 0, "the file is empty"));
        };
        let has_second = self.next_row(next, &mut second)?.is_some();
        let second = has_second.then_some(second);
        let texts = self.options.texts.iter().flat_map(|texts| &texts.columns);
        let by_name = self.options.labels.iter().chain(texts).any(|label| {
            label.parse::<i64>().is_err() && first.iter(&self.bytes).any(|field| field == label.as_bytes())
        });
        let word_over_number = second.is_some_and(|second| {
            let pairs = first.iter(&self.bytes).zip(second.iter(&self.bytes));
            let is = |field: &[u8]| number::single(field).is_some();
            pairs.into_iter().any(|(first, second)| !is(first) && is(second))
        });
        let known = &self.options.columns.features;
        let has_known =
            first.iter(&self.bytes).any(|field| known.iter().any(|name| name.as_bytes() == field));
        let is_row = match self.options.header {
            Some(header) => header,
            None if self.options.files.is_some() => !first.iter(&self.bytes).any(FileColumn::is_file),
            None => by_name || word_over_number || has_known || self.names_over_words(&first)?,
        };
        let mut names = Vec::new();
        if is_row {
            for (i, field) in first.iter(&self.bytes).enumerate() {
                let name =
                    str::from_utf8(field).map_err(|_| self.error(first.start, i, "the name is not UTF-8"))?;
                names.push(name.to_owned());
            }
        }
        Ok(Heading { is_row, names, width: first.len() })
    }

    /// Whether the first row is the only one with its words, in a table that has no numbers in its first two rows: words that are
    /// values occur again.
    fn names_over_words(&self, first: &Fields) -> Result<bool, DataError> {
        let text: &[u8] = &self.bytes;
        if first.iter(text).any(|field| field.is_empty() || number::single(field).is_some()) {
            return Ok(false);
        }
        let (mut record, mut seen) = (Fields::default(), vec![HashSet::new(); first.len()]);
        let (mut again, mut rows, mut at) = (false, 0, self.first_row());
        while rows < ROWS_OF_WORDS
            && let Some(next) = self.next_row(at, &mut record)?
        {
            if rows > 0 && record.iter(text).zip(first.iter(text)).any(|(field, name)| field == name) {
                return Ok(false);
            }
            for (seen, field) in seen.iter_mut().zip(record.iter(text)).filter(|_| rows > 0) {
                again |= !seen.insert(field.to_vec());
            }
            rows += 1;
            at = next;
        }
        Ok(again)
    }

    /// Where the first row of a CSV starts.
    fn first_row(&self) -> usize {
        if self.bytes.starts_with(BOM) { BOM.len() } else { 0 }
    }

    /// Reads the row of a CSV that starts at a byte; gives where to go on, `None` after the last.
    fn next_row(&self, at: usize, record: &mut Fields) -> Result<Option<usize>, DataError> {
        let cut = Cut { delimiter: self.options.delimiter, isa: self.options.isa };
        record.read_csv(&self.bytes, at, cut).map_err(|fault| self.quote_error(fault))
    }

    /// Where the rows under the heading begin.
    pub(super) fn body(&self, heading: &Heading) -> Result<usize, DataError> {
        match self.options.format {
            TableFormat::Csv if heading.is_row => {
                Ok(self.next_row(self.first_row(), &mut Fields::default())?.unwrap_or(self.bytes.len()))
            }
            TableFormat::Csv => Ok(self.first_row()),
            TableFormat::JsonLines | TableFormat::Parquet => Ok(0),
        }
    }

    /// Reads the row that starts at a byte, which has the heading's fields; gives where to go on, `None` after the last.
    pub(super) fn row_at(
        &self,
        heading: &Heading,
        at: usize,
        record: &mut Fields,
    ) -> Result<Option<usize>, DataError> {
        match self.options.format {
            TableFormat::Csv => {
                let next = self.next_row(at, record)?;
                if next.is_some() && record.len() != heading.width {
                    let at = record.len().min(heading.width);
                    let why = format!("{} fields, but the first row has {}", record.len(), heading.width);
                    return Err(self.error(record.start, at, &why));
                }
                Ok(next)
            }
            TableFormat::JsonLines => self.line_at(heading, at, record),
            TableFormat::Parquet => unreachable!("rows of Parquet are not found by where they start"),
        }
    }

    /// Where to go on after the row that starts at a byte; `None` after the last.
    pub(super) fn skip_row(&self, at: usize, record: &mut Fields) -> Result<Option<usize>, DataError> {
        match self.options.format {
            TableFormat::Csv => self.next_row(at, record),
            TableFormat::JsonLines => Ok(self.next_line(at).map(|(_, next)| next)),
            TableFormat::Parquet => unreachable!("rows of Parquet are not found by where they start"),
        }
    }

    /// Calls `each` with every row under the heading; all have as many fields as the heading.
    pub(super) fn rows(
        &self,
        heading: &Heading,
        mut each: impl FnMut(&Row) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        match self.options.format {
            TableFormat::Csv => {}
            TableFormat::JsonLines => return self.lines(heading, each),
            TableFormat::Parquet => return self.parquet_rows(heading, each),
        }
        let mut record = Fields::default();
        let mut n = 0usize;
        let mut read = || -> Result<(), DataError> {
            let mut at = self.body(heading)?;
            while let Some(next) = self.row_at(heading, at, &mut record)? {
                at = next;
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
            return Err(self.no_rows());
        }
        Ok(())
    }

    /// An error at a field of the record that starts at byte `start`.
    pub(super) fn error(&self, start: usize, field: usize, why: &str) -> DataError {
        self.place(start, field).error(&self.path, why)
    }

    /// An error where a quote opens that is never closed, or that is closed by one that was meant to open another field: all
    /// rows between would be one field.
    fn quote_error(&self, fault: QuoteFault) -> DataError {
        let (open, why) = match fault {
            QuoteFault::Open(open) => {
                let why = "a quote opens here and is never closed; close it, or write it twice (\"\") inside quotes \
                           if it belongs to the text";
                (open, why.to_string())
            }
            QuoteFault::GoesOn(open, close) => {
                let TextPlace { line, column, .. } = self.place_at(close);
                let why = format!(
                    "a quote opens here and closes at line {line}, column {column}, where the field goes on; is one missing, \
                     or to be written twice (\"\")?"
                );
                (open, why)
            }
        };
        self.place_at(open).error(&self.path, &why)
    }

    /// Where a field is: reads the record again, as its text is not kept. For errors, and once per class.
    fn place(&self, start: usize, field: usize) -> TextPlace {
        let text: &[u8] = &self.bytes;
        let mut at = start.min(text.len());
        if at == 0 && text.starts_with(BOM) {
            at = BOM.len();
        }
        match self.options.format {
            TableFormat::Csv => {}
            TableFormat::JsonLines => return self.place_at(at),
            TableFormat::Parquet => {
                return TextPlace { offset: 0, line: 0, column: 0, row: Some(start as u64) };
            }
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
        TextPlace { offset: at as u64, line, column: 1 + at - line_start, row: None }
    }

    /// Where the field that starts at `at` ends, and whether a delimiter ends it.
    fn field_end(&self, at: usize) -> (usize, bool) {
        // Quotes count only around a whole field.
        let quoted = self.bytes.get(at) == Some(&b'"');
        let from = match quoted.then(|| closing_quote(&self.bytes, at)) {
            None => at,
            Some(Some(close)) => close + 1,
            Some(None) => self.bytes.len(),
        };
        let end = unquoted_end(&self.bytes, from, self.options.delimiter);
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
    pub(super) fn new(text: &'a Text, heading: &'a Heading, record: &'a Fields) -> Row<'a> {
        Row { text, heading, record }
    }

    /// The text of a field.
    pub(super) fn field(&self, field: usize) -> &[u8] {
        self.record.get(&self.text.bytes, field)
    }

    /// A field as a number, if it is one; it may be infinite.
    pub(super) fn plain_number(&self, field: usize) -> Option<f32> {
        number::single(self.field(field))
    }

    /// Whether a field is something else than a number: a word, or nothing.
    pub(super) fn is_not_number(&self, field: usize) -> bool {
        number::single(self.field(field)).is_none_or(f32::is_nan)
    }

    /// Where it starts.
    pub(super) fn start(&self) -> usize {
        self.record.start
    }

    /// Fails if a quoted field spans several lines.
    pub(super) fn on_one_line(&self, field: usize) -> Result<(), DataError> {
        match self.field(field).iter().any(|b| matches!(b, b'\r' | b'\n')) {
            true => Err(self.wrong(field, "goes on in another line; is a quote missing, or one too many?")),
            false => Ok(()),
        }
    }

    /// A field as a finite number.
    pub(super) fn number(&self, field: usize) -> Result<f32, DataError> {
        match number::single(self.field(field)) {
            Some(number) if number.is_finite() => Ok(number),
            Some(_) => Err(self.wrong(field, "is not a finite number of 32 bits")),
            None if self.field(field).is_empty() => {
                Err(self.wrong(field, "is empty; fill it, or leave out the row"))
            }
            None => Err(self.wrong(
                field,
                "is not a number, as those of this column are; repair it, or leave out the row",
            )),
        }
    }

    /// A field as a number to be predicted.
    pub(super) fn target(&self, field: usize) -> Result<f32, DataError> {
        match number::single(self.field(field)) {
            None if !self.field(field).is_empty() => {
                let what = "is not a number, and a numeric target is asked for; name its column with `data.label`, or \
                            leave out `train.loss` to learn classes";
                Err(self.wrong(field, what))
            }
            _ => self.number(field),
        }
    }

    /// A field that says whether a label holds: 0 or 1.
    pub(super) fn zero_or_one(&self, field: usize) -> Result<f32, DataError> {
        match number::single(self.field(field)) {
            Some(value) if value == 0.0 || value == 1.0 => Ok(value),
            _ if self.field(field).is_empty() => self.number(field),
            _ => {
                let what = "is not 0 or 1, as each label is with `train.loss = \"bce\"`; name the labels' columns with \
                            `data.label`";
                Err(self.wrong(field, what))
            }
        }
    }

    /// A field as a word.
    pub(super) fn word(&self, field: usize) -> Result<&str, DataError> {
        let word = str::from_utf8(self.field(field)).map_err(|_| self.wrong(field, "is not UTF-8"))?;
        if word.is_empty() {
            return Err(self.wrong(field, "is empty; fill it, or leave out the row"));
        }
        if word.eq_ignore_ascii_case("nan") {
            return Err(self.wrong(field, "is not a label; fill it, or leave out the row"));
        }
        Ok(word)
    }

    /// Where a field is.
    pub(super) fn place_of(&self, field: usize) -> FieldPlace {
        let TableOptions { format, delimiter, .. } = *self.text.options;
        FieldPlace { path: self.text.path.clone(), start: self.record.start, field, format, delimiter }
    }

    pub(super) fn error(&self, field: usize, why: &str) -> DataError {
        self.text.error(self.record.start, field, why)
    }

    /// An error that names the field and shows its text.
    pub(super) fn wrong(&self, field: usize, what: &str) -> DataError {
        let name = match self.heading.names.get(field) {
            Some(name) => format!("{name:?}"),
            None => field.to_string(),
        };
        let mut content: String = String::from_utf8_lossy(self.field(field)).chars().take(40).collect();
        if !content.is_empty() {
            content = format!(" {content:?}");
        }
        self.error(field, &format!("field {name}:{content} {what}"))
    }
}
