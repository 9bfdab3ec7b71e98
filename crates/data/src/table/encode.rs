//! From the fields of a row to the numbers of a sample, as a schema says.

use std::collections::HashMap;

use super::choose::ColumnChoice;
use super::date::Moment;
use super::schema::{ColumnRule, Reading, TableSchema};
use super::survey::boolean;
use super::text::Row;
use super::words::{FIRST, NO_WORD, UNKNOWN, each_word};
use crate::error::DataError;

/// Reads rows of one file by a schema; several threads may.
#[derive(Debug)]
pub(super) struct RowEncoder {
    choice: Box<ColumnChoice>,
    /// Columns that become numbers, then those that become ids, and then texts.
    columns: Vec<EncodedColumn>,
}

#[derive(Debug)]
struct EncodedColumn {
    rule: ColumnRule,
    field: usize,
    /// The place of each value of a category, and of each word of a text.
    places: HashMap<Box<[u8]>, usize, foldhash::fast::RandomState>,
    /// Whether a category or a text was words.
    was_words: bool,
}

/// Fields of a column that was words: how many were numbers that training did not have, and how many were something else.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct WordCounts {
    numbers: usize,
    others: usize,
}

impl WordCounts {
    /// Adds those of other rows.
    pub(super) fn add(&mut self, more: &WordCounts) {
        self.numbers += more.numbers;
        self.others += more.others;
    }
}

impl RowEncoder {
    /// For a file whose columns of the schema are these fields.
    pub(super) fn new(schema: &TableSchema, fields: &[usize]) -> RowEncoder {
        let column = |(rule, &field): (&ColumnRule, &usize)| {
            let values: &[String] = match &rule.reading {
                Reading::Category { values, .. } | Reading::Text { words: values, .. } => values,
                Reading::Number { .. } | Reading::Boolean { .. } | Reading::Date { .. } => &[],
            };
            let places = values.iter().enumerate().map(|(i, value)| (value.as_bytes().into(), i)).collect();
            let is_word = |value: &String| value.parse::<f64>().is_err();
            let was_words = match &rule.reading {
                Reading::Text { .. } => values.iter().any(is_word),
                _ => !values.is_empty() && values.iter().all(is_word),
            };
            EncodedColumn { rule: rule.clone(), field, places, was_words }
        };
        let mut columns: Vec<_> = schema.rules.iter().zip(fields).map(column).collect();
        columns.sort_by_key(|column| (column.rule.text_ids().is_some(), column.rule.n_ids().is_some()));
        RowEncoder { choice: Box::new(schema.choice()), columns }
    }

    /// What is counted of each column, before any row.
    pub(super) fn counts(&self) -> Vec<WordCounts> {
        vec![WordCounts::default(); self.columns.len()]
    }

    /// Adds what a row becomes to `values`, and what its fields are to `counts`.
    pub(super) fn row(
        &self,
        row: &Row,
        values: &mut Vec<f32>,
        counts: Option<&mut Vec<WordCounts>>,
    ) -> Result<(), DataError> {
        let Some(counts) = counts else {
            return self.columns.iter().try_for_each(|column| column.field(row, &self.choice, values, None));
        };
        let mut columns = self.columns.iter().zip(counts);
        columns.try_for_each(|(column, counts)| column.field(row, &self.choice, values, Some(counts)))
    }

    /// An error if a column that was words has nothing but numbers now.
    pub(super) fn finish(&self, counts: &[WordCounts]) -> Result<(), String> {
        let mut pairs = self.columns.iter().zip(counts);
        let Some((column, _)) = pairs.find(|(c, n)| c.was_words && n.numbers > 0 && n.others == 0) else {
            return Ok(());
        };
        let word = match &column.rule.reading {
            Reading::Category { values, .. } => values.first(),
            Reading::Text { words, .. } => words.iter().find(|word| word.parse::<f64>().is_err()),
            Reading::Number { .. } | Reading::Boolean { .. } | Reading::Date { .. } => None,
        };
        Err(format!(
            "column {:?} has only numbers, but in training it had words such as {:?}; is it another column of the same name?",
            column.rule.name,
            word.map_or("", String::as_str)
        ))
    }
}

impl EncodedColumn {
    fn field(
        &self,
        row: &Row,
        choice: &ColumnChoice,
        to: &mut Vec<f32>,
        counts: Option<&mut WordCounts>,
    ) -> Result<(), DataError> {
        let (field, rule) = (self.field, &self.rule);
        let text = row.field(field);
        let blank = choice.is_blank(text);
        let wrong = |what: &str| {
            let why = format!("is not {what}, as it was in training; write {what}, or leave it blank");
            Err(row.wrong(field, &why))
        };
        match &rule.reading {
            Reading::Number { mean } if blank => to.push(*mean as f32),
            Reading::Number { .. } => match row.plain_number(field) {
                Some(number) if number.is_finite() => to.push(number),
                Some(_) => return Err(row.wrong(field, "is not a finite number of 32 bits")),
                None => return wrong("a number"),
            },
            Reading::Boolean { mean } if blank => to.push(*mean as f32),
            Reading::Boolean { .. } => match (boolean(text), row.plain_number(field)) {
                (Some(is), _) => to.push(f32::from(u8::from(is))),
                (None, Some(number)) if number == 0.0 || number == 1.0 => to.push(number),
                _ => return wrong("true or false"),
            },
            Reading::Date { parts } if blank => to.extend(parts.iter().map(|(_, mean)| *mean as f32)),
            Reading::Date { parts } => match Moment::read(text) {
                Some(moment) => to.extend(parts.iter().map(|(part, _)| part.of(moment) as f32)),
                None => return wrong("a date such as 2024-03-31"),
            },
            Reading::Category { values, learnt } => {
                let place = if blank { None } else { self.places.get(text).copied() };
                if let Some(counts) = counts.filter(|_| self.was_words && !blank) {
                    match place.is_none() && row.plain_number(field).is_some() {
                        true => counts.numbers += 1,
                        false => counts.others += 1,
                    }
                }
                if *learnt {
                    let id = match place {
                        Some(place) => place + 1,
                        None if blank && rule.blanks => values.len() + 1,
                        None => 0,
                    };
                    // An f32 holds every whole number below 2^24, and there are fewer values than that.
                    to.push(id as f32);
                    return Ok(());
                }
                let start = to.len();
                to.resize(start + values.len() + usize::from(rule.blanks), 0.0);
                match place {
                    Some(place) => to[start + place] = 1.0,
                    None if blank && rule.blanks => to[start + values.len()] = 1.0,
                    None => {}
                }
                return Ok(());
            }
            Reading::Text { others, length, .. } => {
                if let Some(counts) = counts.filter(|_| self.was_words && !blank) {
                    match row.plain_number(field).is_some() {
                        true => counts.numbers += 1,
                        false => counts.others += 1,
                    }
                }
                let end = to.len() + length;
                if !blank {
                    each_word(text, |word| {
                        let known = self.places.get(word.as_bytes()).map(|place| place + FIRST);
                        if let Some(id) = known.or(others.then_some(UNKNOWN)).filter(|_| to.len() < end) {
                            to.push(id as f32);
                        }
                    });
                }
                to.resize(end, NO_WORD as f32);
                return Ok(());
            }
        }
        if rule.blanks {
            to.push(f32::from(u8::from(blank)));
        }
        Ok(())
    }
}
