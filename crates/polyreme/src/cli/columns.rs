//! `polyreme inspect PATH --data`: what is in the columns of a table.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use polyreme_data::joined::files_of;
use polyreme_data::table::{self, ColumnSurvey, ColumnType, TableFormat, TableOptions};
use polyreme_train::job::Job;
use polyreme_train::sets::table_of;
use serde_json::{Value, json};

use super::{CommandResult, Failure, print_json};

/// Columns of a picture.
const BINS: usize = 16;
/// Values of a category that are shown, and that JSON has.
const SHOWN: usize = 4;
const LISTED: usize = 100;
/// Longer names and values are cut.
const NAME: usize = 28;
const VALUE: usize = 16;

/// Shows the columns of a table, or of the table of a job.
pub(super) fn show(path: &Path, json: bool) -> CommandResult {
    let (paths, options) = match path.extension().and_then(|e| e.to_str()) {
        Some("toml") => {
            let job = Job::from_file(path, &[]).map_err(Failure::job)?;
            table_of(&job)?.ok_or_else(|| {
                Failure::usage("the job's data are not a table; `--data` shows the columns of tables")
            })?
        }
        extension => {
            let delimiter = if extension == Some("tsv") { b'\t' } else { b',' };
            let paths = [path.to_path_buf()];
            let format = match extension {
                Some("json") => TableFormat::JsonLines,
                _ if path.is_dir() => {
                    let has = |format: &TableFormat| files_of(&paths, format.extensions()).is_ok();
                    TableFormat::ALL.into_iter().find(has).unwrap_or_default()
                }
                _ => TableFormat::of(path).unwrap_or_default(),
            };
            (
                files_of(&paths, format.extensions())?,
                TableOptions { format, delimiter, ..TableOptions::default() },
            )
        }
    };
    let surveys = table::survey(&paths, &options)?;
    match json {
        true => print_json(&as_json(&paths, &surveys)),
        false => Ok(io::stdout().lock().write_all(text(path, &surveys)?.as_bytes())?),
    }
}

fn text(path: &Path, surveys: &[ColumnSurvey]) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    let rows = surveys.first().map_or(0, |survey| survey.rows);
    writeln!(text, "{}: {rows} rows, {} columns", path.display(), surveys.len())?;
    let wide = |of: &dyn Fn(&ColumnSurvey) -> String| {
        surveys.iter().map(|s| of(s).chars().count()).max().unwrap_or(0)
    };
    let name = |s: &ColumnSurvey| cut(&s.name, NAME);
    let (names, contents, blanks) = (wide(&name), wide(&content), wide(&blank_words));
    for survey in surveys {
        let line = format!(
            "  {:<names$}  {:<8}  {:<BINS$}  {:<blanks$}  {:<contents$}  {}",
            name(survey),
            type_name(survey.kind()),
            picture(&bars(survey)),
            blank_words(survey),
            content(survey),
            remark(survey)
        );
        writeln!(text, "{}", line.trim_end())?;
    }
    Ok(text)
}

fn type_name(kind: ColumnType) -> &'static str {
    match kind {
        ColumnType::Number => "number",
        ColumnType::Boolean => "yes/no",
        ColumnType::Date => "date",
        ColumnType::Category => "category",
        ColumnType::Text => "text",
        ColumnType::Blank => "blank",
        ColumnType::Unclear => "unclear",
    }
}

fn blank_words(survey: &ColumnSurvey) -> String {
    match survey.blanks {
        0 => String::new(),
        1 => "1 blank".into(),
        n => format!("{n} blanks"),
    }
}

/// The range, or the most frequent values.
fn content(survey: &ColumnSurvey) -> String {
    let (n, more) = survey.n_distinct();
    let n =
        if more { format!("over {n} values") } else { format!("{n} value{}", if n == 1 { "" } else { "s" }) };
    match (survey.kind(), survey.range_text()) {
        (ColumnType::Blank, _) => String::new(),
        (ColumnType::Number | ColumnType::Date, Some((least, most))) => format!("{least} to {most}, {n}"),
        (ColumnType::Text, _) => {
            let (least, mean, most) = survey.word_bytes().unwrap_or_default();
            format!("{n} of {least} to {most} bytes, {mean} on average")
        }
        _ => {
            let values = survey.values();
            let shown =
                values.iter().take(SHOWN).map(|(value, rows)| format!("{} {rows}", cut(value, VALUE)));
            let rest = if values.len() > SHOWN { ", .." } else { "" };
            format!("{n}: {}{rest}", shown.collect::<Vec<_>>().join(", "))
        }
    }
}

fn remark(survey: &ColumnSurvey) -> &'static str {
    match survey.kind() {
        ColumnType::Text => match survey.is_text() {
            Some(true) => "a text: `mlp` and `tabular` learn from its words, `data.text` from it alone",
            _ => "an id or a name: left out unless `data.texts` or `data.categories` has it",
        },
        ColumnType::Unclear => "mostly numbers or dates, and some that are not",
        _ if survey.counts_rows() => "counts the rows: an id?",
        ColumnType::Number
        | ColumnType::Boolean
        | ColumnType::Date
        | ColumnType::Category
        | ColumnType::Blank => "",
    }
}

/// How often the parts of the range occur, or the most frequent values.
fn bars(survey: &ColumnSurvey) -> Vec<usize> {
    match survey.kind() {
        ColumnType::Number | ColumnType::Date => survey.histogram(BINS),
        ColumnType::Boolean | ColumnType::Category => {
            survey.values().into_iter().take(BINS).map(|(_, rows)| rows).collect()
        }
        ColumnType::Text | ColumnType::Blank | ColumnType::Unclear => Vec::new(),
    }
}

/// Counts as bars of block characters; what occurs at all is seen.
fn picture(counts: &[usize]) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = counts.iter().copied().max().unwrap_or(0).max(1);
    let block = |&n: &usize| match n {
        0 => ' ',
        n => BLOCKS[(n * BLOCKS.len()).div_ceil(most) - 1],
    };
    counts.iter().map(block).collect()
}

fn cut(text: &str, most: usize) -> String {
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match plain.chars().count() > most {
        true => plain.chars().take(most - 1).chain(['…']).collect(),
        false => plain,
    }
}

fn as_json(paths: &[PathBuf], surveys: &[ColumnSurvey]) -> Value {
    let column = |s: &ColumnSurvey| {
        let (distinct, more) = s.n_distinct();
        let numbers = s.kind() == ColumnType::Number;
        let range = s.range_text().filter(|_| numbers || s.kind() == ColumnType::Date);
        let value = |text: &String| match text.parse::<f64>() {
            Ok(number) if numbers => json!(number),
            _ => json!(text),
        };
        let values =
            s.values().into_iter().take(LISTED).map(|(value, rows)| json!({"value": value, "rows": rows}));
        json!({
            "name": s.name, "type": s.kind(), "rows": s.rows, "blanks": s.blanks, "distinct": distinct,
            "distinct_more": more, "min": range.as_ref().map(|r| value(&r.0)), "max": range.as_ref().map(|r| value(&r.1)),
            "mean": numbers.then(|| s.mean()), "word_bytes": s.word_bytes(), "histogram": bars(s), "counts_rows": s.counts_rows(), "is_text": s.is_text(),
            "values": if numbers { Vec::new() } else { values.collect::<Vec<_>>() },
        })
    };
    json!({"files": paths, "columns": surveys.iter().map(column).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_occurs_is_seen() {
        assert_eq!(picture(&[0, 1, 8, 1000, 500]), " ▁▁█▄");
        assert_eq!(picture(&[3]), "█");
        assert_eq!(picture(&[]), "");
        assert_eq!((cut("a\tb", 5), cut("longer", 4)), ("a b".into(), "lon…".into()));
    }
}
