//! Tables: text files with a row a line and fields between delimiters (CSV). Features are numbers; the label is a small
//! integer or a name. Read whole into memory at opening, so that whatever is wrong with the text is said then.
//!
//! Not a data frame: columns of words, dates and missing values are errors, to be handled before.
//!
//! Columns that have names are looked for by name, in any order, where it is known which are wanted
//! ([`TableOptions::columns`]); others by position, of which there must be as many.

mod classes;
mod columns;
mod text;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::dataset::{Dataset, Fetched, Label, Scratch, Values};
use crate::error::DataError;
use crate::spec::{Features, Spec, Target};
use classes::Distinct;
pub use columns::Columns;
use text::{Heading, Text};

/// Options for reading a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableOptions {
    /// The label's column: its name in the header, or its number counted from 0 (from the end if negative, `-1` is the
    /// last). Without it, the last column.
    pub label: Option<String>,
    /// What stands between fields.
    pub delimiter: u8,
    /// Whether the first row is names. Without it, the first row is names if it has a word where the second has a number,
    /// or one of `columns`.
    pub header: Option<bool>,
    /// The columns of the table that was trained on, to be found by name; empty: in the order of the file.
    pub columns: Columns,
    /// Whether labels are classes, however many there are.
    pub surely_classes: bool,
}

impl Default for TableOptions {
    fn default() -> TableOptions {
        TableOptions {
            label: None,
            delimiter: b',',
            header: None,
            columns: Columns::default(),
            surely_classes: false,
        }
    }
}

/// A table: rows of numbers with labels.
#[derive(Debug)]
pub struct Table {
    spec: Spec,
    columns: Columns,
    values: Vec<f32>,
    /// Which of `distinct` each row has; empty for rows without labels.
    labels: Vec<u32>,
    distinct: Vec<Distinct>,
    /// The class of each of `distinct`.
    class_of: Vec<u32>,
}

impl Table {
    /// Reads the table at `path`. Labels that are all small integers are classes as they are, so that `0, 2` makes three
    /// classes; others are names, and classes are numbered in the order of the sorted names (numbers by value). Labels
    /// that look like numbers to be predicted are refused, unless the options say that they are classes.
    pub fn open(path: &Path, options: &TableOptions) -> Result<Table, DataError> {
        Ok(Table::open_all(&[path.to_path_buf()], options)?.remove(0))
    }

    /// Reads the tables at these paths, parts of one: their classes are those of all of them together, and their columns
    /// those of the first.
    pub fn open_all(paths: &[PathBuf], options: &TableOptions) -> Result<Vec<Table>, DataError> {
        let mut tables: Vec<Table> = Vec::with_capacity(paths.len());
        for path in paths {
            let known = tables.first().map(|t| t.columns.clone()).filter(|_| options.columns.is_empty());
            let options =
                TableOptions { columns: known.unwrap_or(options.columns.clone()), ..options.clone() };
            tables.push(Table::labelled(path, &options)?);
        }
        let (mut places, mut distinct) = (HashMap::<&str, usize>::new(), Vec::<Distinct>::new());
        for label in tables.iter().flat_map(|t| &t.distinct) {
            let place = *places.entry(&label.text).or_insert(distinct.len());
            match distinct.get_mut(place) {
                Some(known) => known.rows += label.rows,
                None => distinct.push(label.clone()),
            }
        }
        let Some(first) = tables.first() else { return Ok(tables) };
        let target = classes::number(first.columns.label.as_deref(), &distinct, options.surely_classes)?;
        tables.into_iter().map(|t| t.with_classes(&target)).collect()
    }

    /// Reads the table at `path` with the classes of another, so that a test set has those of its training set.
    pub fn open_as(path: &Path, options: &TableOptions, target: &Target) -> Result<Table, DataError> {
        Table::labelled(path, options)?.with_classes(target)
    }

    /// Reads a table whose labels are not mapped to classes yet.
    fn labelled(path: &Path, options: &TableOptions) -> Result<Table, DataError> {
        let text = Text::open(path, options)?;
        let heading = text.heading()?;
        if heading.width < 2 {
            return Err(text.error(
                0,
                0,
                "only one column; a row is features and a label: is the delimiter right?",
            ));
        }
        let label = heading.label(&text)?;
        Table::read(&text, &heading, Some(label), true)
    }

    /// Reads rows of `width` features for prediction. Labels, if there are, are left out: the column with the name that
    /// the label had in training, and in a table of one column more without such a name the one that the options name,
    /// else the last. Every row then has class 0 of 1; [`Table::with_classes`] gives the set the target of the one that
    /// was trained on.
    pub fn features_only(path: &Path, width: usize, options: &TableOptions) -> Result<Table, DataError> {
        if width == 0 {
            return Err(DataError::Setting { why: "a row needs at least one feature".into() });
        }
        let text = Text::open(path, options)?;
        let heading = text.heading()?;
        let label = match heading.known_label(&text) {
            Some(label) => Some(label),
            // Which columns are missing or unknown is said by name.
            None if heading.is_known(&text) => None,
            None => match heading.width {
                w if w == width => None,
                w if w.checked_sub(1) == Some(width) => Some(heading.label(&text)?),
                w => {
                    let why = format!("{w} columns, but the model takes {width} features");
                    return Err(text.error(0, 0, &why));
                }
            },
        };
        Table::read(&text, &heading, label, false)
    }

    /// The same with the classes of another table, so that a test set has those of its training set.
    pub fn with_classes(mut self, target: &Target) -> Result<Table, DataError> {
        let Target::Class { classes, names } = target else {
            return Err(DataError::Setting { why: "a table's labels are classes, not the next id".into() });
        };
        self.class_of = classes::look_up(&self.distinct, *classes, names)?;
        self.spec.target = target.clone();
        Ok(self)
    }

    /// The names of the columns; empty if the table has no header.
    pub fn columns(&self) -> &Columns {
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
        let features = heading.features(text, label)?;
        let path: Arc<Path> = text.path().into();
        let (mut values, mut labels) = (Vec::new(), Vec::new());
        let (mut distinct, mut known) = (Vec::<Distinct>::new(), HashMap::<String, u32>::new());
        text.rows(heading, |row| {
            for &field in &features {
                values.push(row.number(field)?);
            }
            let Some(field) = label else { return Ok(()) };
            row.on_one_line(field)?;
            if !labelled {
                return Ok(());
            }
            let name = row.word(field)?;
            let number = match known.get(name) {
                Some(&number) => number,
                None => {
                    if distinct.len() == classes::CLASSES_MAX {
                        return Err(row.error(field, &classes::too_many(heading.name(field))));
                    }
                    let (text, place) = (name.into(), row.place(field));
                    distinct.push(Distinct { path: path.clone(), text, place, rows: 0 });
                    known.insert(name.into(), distinct.len() as u32 - 1);
                    distinct.len() as u32 - 1
                }
            };
            distinct[number as usize].rows += 1;
            labels.push(number);
            Ok(())
        })?;
        let name = |field: usize| heading.name(field).map(String::from);
        let columns = Columns {
            features: features.iter().copied().filter_map(name).collect(),
            label: label.and_then(name),
        };
        let target = Target::Class { classes: 1, names: Vec::new() };
        let spec = Spec { features: Features::Row { width: features.len() }, target };
        Ok(Table { spec, columns, values, labels, distinct, class_of: Vec::new() })
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

    fn intact(&self) -> Result<(), DataError> {
        Ok(())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some(self.labels.get(idx).map_or(0, |&l| self.class_of[l as usize] as usize)))
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
