//! The labels of rows, as they are read: numbers as they are, classes by the words that they are written with.

use std::collections::HashMap;

use super::choose::ColumnChoice;
use super::text::{FieldPlace, Heading, Row};
use crate::classes::{self, Distinct, LabelPlace};
use crate::error::DataError;
use crate::spec::LabelKind;

/// The labels of the rows that were read so far.
pub(super) struct ReadLabels {
    /// Which of `distinct` each row has; empty where labels are no classes.
    pub(super) labels: Vec<u32>,
    /// Labels that are numbers, row by row.
    pub(super) targets: Vec<f32>,
    /// The words of classes, in the order in which they occur.
    pub(super) distinct: Vec<Distinct<FieldPlace>>,
    known: HashMap<String, u32, foldhash::fast::RandomState>,
    fields: Vec<usize>,
    /// `None`: labels are not kept.
    kind: Option<LabelKind>,
    /// What stands for a blank, where that is known.
    choice: Option<ColumnChoice>,
    /// The name of the first label's column.
    name: Option<String>,
}

impl ReadLabels {
    /// Of no rows yet. Labels are in these fields; they are kept if it is said as what.
    pub(super) fn new(
        heading: &Heading,
        fields: &[usize],
        kind: Option<LabelKind>,
        choice: Option<ColumnChoice>,
    ) -> ReadLabels {
        let name = fields.first().and_then(|field| heading.name(*field)).map(String::from);
        ReadLabels {
            labels: Vec::new(),
            targets: Vec::new(),
            distinct: Vec::new(),
            known: HashMap::default(),
            fields: fields.to_vec(),
            kind,
            choice,
            name,
        }
    }

    /// The same of no rows.
    pub(super) fn again(&self) -> ReadLabels {
        ReadLabels {
            labels: Vec::new(),
            targets: Vec::new(),
            distinct: Vec::new(),
            known: HashMap::default(),
            fields: self.fields.clone(),
            choice: self.choice.clone(),
            name: self.name.clone(),
            kind: self.kind,
        }
    }

    /// How many labels a row has.
    pub(super) fn n_fields(&self) -> usize {
        self.fields.len()
    }

    /// Reads the labels of a row.
    pub(super) fn row(&mut self, row: &Row) -> Result<(), DataError> {
        for &field in &self.fields {
            row.on_one_line(field)?;
            let Some(kind) = self.kind else { continue };
            if let Some(choice) = &self.choice {
                check_label(row, field, choice)?;
            }
            match kind {
                LabelKind::Numbers => self.targets.push(row.target(field)?),
                LabelKind::Labels => self.targets.push(row.zero_or_one(field)?),
                LabelKind::Classes => {}
            }
        }
        let Some(&field) = self.fields.first().filter(|_| self.kind == Some(LabelKind::Classes)) else {
            return Ok(());
        };
        let number = self.number(row.word(field)?, row, field)?;
        self.labels.push(number);
        Ok(())
    }

    /// The number of a label that occurs in a field.
    pub(super) fn number(&mut self, name: &str, row: &Row, field: usize) -> Result<u32, DataError> {
        let number = match self.known.get(name) {
            Some(&number) => number,
            None => self.add(Distinct { text: name.into(), place: row.place_of(field), rows: 0 })?,
        };
        self.distinct[number as usize].rows += 1;
        Ok(number)
    }

    /// Adds a word that is not known yet; gives its number.
    fn add(&mut self, word: Distinct<FieldPlace>) -> Result<u32, DataError> {
        if self.distinct.len() == classes::CLASSES_MAX {
            return Err(word.place.error(&classes::too_many(self.name.as_deref())));
        }
        let number = self.distinct.len() as u32;
        self.known.insert(word.text.clone(), number);
        self.distinct.push(word);
        Ok(number)
    }

    /// Adds the labels of the rows that follow.
    pub(super) fn append(&mut self, next: ReadLabels) -> Result<(), DataError> {
        let mut numbers = Vec::with_capacity(next.distinct.len());
        for word in next.distinct {
            let rows = word.rows;
            let number = match self.known.get(&word.text) {
                Some(&number) => number,
                None => self.add(Distinct { rows: 0, ..word })?,
            };
            self.distinct[number as usize].rows += rows;
            numbers.push(number);
        }
        self.labels.extend(next.labels.into_iter().map(|label| numbers[label as usize]));
        self.targets.extend(next.targets);
        Ok(())
    }
}

/// Fails for a label that is blank.
fn check_label(row: &Row, field: usize, choice: &ColumnChoice) -> Result<(), DataError> {
    if !choice.is_blank(row.field(field)) {
        return Ok(());
    }
    let why = "is blank, and a row without a label teaches nothing; fill it, or leave out the row (what stands for blanks is \
               said by `data.blanks`)";
    Err(row.wrong(field, why))
}
