//! Tables: text files with a row a line and fields between delimiters (CSV). Features are numbers; the label is a small
//! integer or a name. Read whole into memory at opening, so that whatever is wrong with the text is said then.
//!
//! Not a data frame: columns of words, dates and missing values are errors, to be dealt with before.

mod classes;
mod text;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::spec::{Features, Spec, Target};
use classes::Distinct;
use text::{Heading, Text};

/// How a table is written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableOptions {
    /// The label's column: its name in the header, or its number counted from 0 (from the end if negative, `-1` is the
    /// last). Without it, the last column.
    pub label: Option<String>,
    /// What stands between fields.
    pub delimiter: u8,
    /// Whether the first row is names. Without it, the first row is names if it has a word where the second has a number.
    pub header: Option<bool>,
}

impl Default for TableOptions {
    fn default() -> TableOptions {
        TableOptions { label: None, delimiter: b',', header: None }
    }
}

/// Rows of numbers with labels.
#[derive(Debug)]
pub struct Table {
    spec: Spec,
    path: PathBuf,
    columns: Vec<String>,
    values: Vec<f32>,
    /// Which of `distinct` each row has; empty for rows without labels.
    labels: Vec<u32>,
    distinct: Vec<Distinct>,
    /// The class of each of `distinct`.
    class_of: Vec<u32>,
}

impl Table {
    /// Reads the table at `path`. Labels that are all small integers are classes as they are, so that `0, 2` makes three
    /// classes; others are names, and classes are numbered in the order of the sorted names (numbers by value).
    pub fn open(path: &Path, options: &TableOptions) -> Result<Table, DataError> {
        let text = Text::open(path, options)?;
        let heading = text.heading()?;
        let label = heading.label(&text)?;
        if heading.width < 2 {
            return Err(text.error(
                0,
                0,
                "only one column; a row is features and a label: is the delimiter right?",
            ));
        }
        let mut table = Table::read(&text, &heading, Some(label), true)?;
        let (target, class_of) = classes::number(text.path(), &table.distinct)?;
        (table.spec.target, table.class_of) = (target, class_of);
        Ok(table)
    }

    /// Reads the tables at these paths, parts of one: their classes are those of all of them together.
    pub fn open_all(paths: &[PathBuf], options: &TableOptions) -> Result<Vec<Table>, DataError> {
        let tables: Vec<Table> = paths.iter().map(|p| Table::open(p, options)).collect::<Result<_, _>>()?;
        let (mut seen, mut distinct) = (HashSet::new(), Vec::new());
        for label in tables.iter().flat_map(|t| &t.distinct) {
            if seen.insert(&label.text) {
                distinct.push(label.clone());
            }
        }
        let Some(first) = tables.first() else { return Ok(tables) };
        let (target, _) = classes::number(&first.path, &distinct)?;
        drop(seen);
        tables.into_iter().map(|t| t.with_classes(&target)).collect()
    }

    /// Reads rows of `width` features for prediction. A table that has one column more has labels, which are left out:
    /// the column that the options name, else the last. Every row then has class 0 of 1; [`Table::with_classes`] gives
    /// the set the target of the one that was trained on.
    pub fn features_only(path: &Path, width: usize, options: &TableOptions) -> Result<Table, DataError> {
        if width == 0 {
            return Err(DataError::Setting { why: "a row needs at least one feature".into() });
        }
        let text = Text::open(path, options)?;
        let heading = text.heading()?;
        let label = match heading.width {
            w if w == width => None,
            w if w.checked_sub(1) == Some(width) => Some(heading.label(&text)?),
            w => {
                let why = format!("{w} columns, but the model takes {width} features");
                return Err(text.error(0, 0, &why));
            }
        };
        Table::read(&text, &heading, label, false)
    }

    /// The same with the classes of another table, so that a test set has those of its training set.
    pub fn with_classes(mut self, target: &Target) -> Result<Table, DataError> {
        let Target::Class { classes, names } = target else {
            return Err(DataError::Setting { why: "a table's labels are classes, not the next id".into() });
        };
        self.class_of = classes::look_up(&self.path, &self.distinct, *classes, names)?;
        self.spec.target = target.clone();
        Ok(self)
    }

    /// The names of the features; empty if the table has no header.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Whether the rows have labels; not those of [`Table::features_only`].
    pub fn has_labels(&self) -> bool {
        !self.labels.is_empty()
    }

    fn width(&self) -> usize {
        self.spec.features.numel()
    }

    /// Reads all rows; `label` is a column that is no feature, and is kept if `labelled`.
    fn read(
        text: &Text,
        heading: &Heading,
        label: Option<usize>,
        labelled: bool,
    ) -> Result<Table, DataError> {
        let width = heading.width - usize::from(label.is_some());
        let (mut values, mut labels) = (Vec::new(), Vec::new());
        let (mut distinct, mut known) = (Vec::new(), HashMap::<String, u32>::new());
        text.rows(heading, |row| {
            for field in 0..heading.width {
                if Some(field) != label {
                    values.push(row.number(field)?);
                    continue;
                }
                if !labelled {
                    continue;
                }
                let name = row.word(field)?;
                let number = match known.get(name) {
                    Some(&number) => number,
                    None => {
                        let place = row.place(field);
                        if distinct.len() == classes::CLASSES_MAX {
                            return Err(
                                row.error(field, "too many different labels; is this the label's column?")
                            );
                        }
                        distinct.push(Distinct { text: name.into(), place });
                        known.insert(name.into(), distinct.len() as u32 - 1);
                        distinct.len() as u32 - 1
                    }
                };
                labels.push(number);
            }
            Ok(())
        })?;
        let mut columns = heading.names.clone();
        if let Some(label) = label.filter(|&l| l < columns.len()) {
            columns.remove(label);
        }
        let target = Target::Class { classes: 1, names: Vec::new() };
        let spec = Spec { features: Features::Row { width }, target };
        Ok(Table { spec, path: text.path().into(), columns, values, labels, distinct, class_of: Vec::new() })
    }
}

impl Dataset for Table {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn len(&self) -> usize {
        self.values.len() / self.width()
    }

    fn fetch<'a>(&'a self, idx: usize, _scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        let values = &self.values[idx * self.width()..][..self.width()];
        let class = self.labels.get(idx).map_or(0, |&l| self.class_of[l as usize] as usize);
        Ok(Fetched { values: Values::F32(values), label: Label::Class(class) })
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some(self.labels.get(idx).map_or(0, |&l| self.class_of[l as usize] as usize)))
    }
}

#[cfg(test)]
mod tests;
