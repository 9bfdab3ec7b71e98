//! Errors of a job file: each with its place, the text there, and what to write instead.

use std::fmt;
use std::ops::Range;

use serde::Serialize;

/// One error of a job.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct JobError {
    /// The file, or the override such as `--set train.bach=12`.
    pub origin: String,
    /// The line, from 1; 0 where the error is not at a line: an override, or a file that cannot be read.
    pub line: usize,
    /// The column in characters, from 1; 0 where there is none.
    pub column: usize,
    /// The key, such as `train.batch`; may be empty.
    pub key: String,
    /// What is wrong.
    pub message: String,
    /// What to do; may be empty.
    pub hint: String,
    /// The line's text, or the override; empty where there is none.
    pub text: String,
    /// How many characters from `column` on are meant.
    pub length: usize,
}

/// All errors of a job; its text shows each with its place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct JobErrors {
    /// The file.
    pub file: String,
    /// At least one, in the order of the file, overrides last.
    pub errors: Vec<JobError>,
}

impl std::error::Error for JobErrors {}

impl fmt::Display for JobErrors {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for error in &self.errors {
            writeln!(f, "{error}\n")?;
        }
        let n = self.errors.len();
        write!(f, "{n} error{} in {}", if n == 1 { "" } else { "s" }, self.file)
    }
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let number = if self.line > 0 { self.line.to_string() } else { String::new() };
        let gutter = " ".repeat(number.len().max(1));
        write!(f, "error: {}", self.message)?;
        if self.line > 0 {
            write!(f, "\n{gutter}--> {}:{}:{}", self.origin, self.line, self.column)?;
        } else if self.text.is_empty() {
            write!(f, "\n{gutter}--> {}", self.origin)?;
        } else {
            write!(f, "\n{gutter}--> command line")?;
        }
        if !self.text.is_empty() {
            let (text, before) = window(&self.text, self.column.saturating_sub(1), self.length);
            let left = text.chars().count().saturating_sub(before);
            let marks = "^".repeat(self.length.min(left).max(1));
            write!(f, "\n{gutter} |\n{number:>1} | {text}\n{gutter} | {}{marks}", " ".repeat(before))?;
        }
        if !self.hint.is_empty() {
            write!(f, "\n{gutter} = help: {}", self.hint)?;
        }
        Ok(())
    }
}

/// The part of a long line that is worth showing, and where in it the marks begin. Tabs become spaces, so that marks
/// stand where they should.
fn window(text: &str, start: usize, length: usize) -> (String, usize) {
    const WIDTH: usize = 120;
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    let n = text.chars().count();
    if n <= WIDTH {
        return (text.chars().map(shown).collect(), start);
    }
    let first = if start + length <= WIDTH { 0 } else { start.saturating_sub(WIDTH / 4) };
    let lead = if first > 0 { "..." } else { "" };
    let tail = if first + WIDTH < n { "..." } else { "" };
    let part: String = text.chars().skip(first).take(WIDTH).map(shown).collect();
    (format!("{lead}{part}{tail}"), start - first + lead.len())
}

/// Where something stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ErrorPlace {
    /// 0: the file; else the override of that number, from 1.
    pub(super) source: usize,
    /// The bytes of it; none: the file as a whole.
    pub(super) span: Option<Range<usize>>,
}

impl ErrorPlace {
    /// The file as a whole.
    pub(super) const FILE: ErrorPlace = ErrorPlace { source: 0, span: None };

    /// Whether it comes from the command line.
    pub(super) fn is_override(&self) -> bool {
        self.source > 0
    }
}

/// The texts that a job is read from.
pub(super) struct Sources {
    /// The file's name.
    pub(super) file: String,
    /// Its text.
    pub(super) text: String,
    /// `--set KEY=VALUE`, each.
    pub(super) sets: Vec<String>,
}

impl Sources {
    /// An error at a place.
    pub(super) fn error(&self, place: &ErrorPlace, key: &str, message: String, hint: String) -> JobError {
        let (origin, text) = match place.source {
            0 => (&self.file, &self.text),
            n => (&self.sets[n - 1], &self.sets[n - 1]),
        };
        let mut error = JobError {
            origin: origin.clone(),
            line: 0,
            column: 0,
            key: key.into(),
            message,
            hint,
            text: String::new(),
            length: 0,
        };
        if let Some(span) = &place.span {
            let at = locate(text, span);
            let line = if place.is_override() { 0 } else { at.line };
            error = JobError { line, column: at.column, length: at.length, text: at.text, ..error };
        }
        error
    }
}

struct Located {
    line: usize,
    column: usize,
    length: usize,
    text: String,
}

/// The line and the columns of some bytes of a text; what goes on in later lines is left out.
fn locate(text: &str, span: &Range<usize>) -> Located {
    let floor = |mut at: usize| {
        at = at.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    let start = floor(span.start);
    let head = text[..start].rfind('\n').map_or(0, |n| n + 1);
    let tail = text[start..].find('\n').map_or(text.len(), |n| start + n);
    let end = floor(span.end).clamp(start, tail);
    Located {
        line: text[..start].matches('\n').count() + 1,
        column: text[head..start].chars().count() + 1,
        length: text[start..end].trim_end().chars().count().max(1),
        text: text[head..tail].trim_end().to_string(),
    }
}
