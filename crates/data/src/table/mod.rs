//! Tables: text files with a row per line and fields between delimiters (CSV). Features are numbers; the label is a small
//! integer or a name, or labels are numbers, or zeros and ones. Read whole into memory at opening, so that whatever is wrong
//! with the text is said then.
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
use crate::spec::{Features, LabelKind, Spec, Target};
use classes::Distinct;
pub use columns::Columns;
use text::{Heading, Text};

/// Options for reading a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableOptions {
    /// The labels' columns: a name in the header, or a number counted from 0 (from the end if negative, `-1` is the
    /// last). Empty: the last column. Classes have one.
    pub labels: Vec<String>,
    /// As what labels are read.
    pub kind: LabelKind,
    /// The delimiter between fields.
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
            labels: Vec::new(),
            kind: LabelKind::Classes,
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
    /// Labels that are numbers, row by row; empty for classes.
    targets: Vec<f32>,
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
        if options.kind != LabelKind::Classes {
            return Ok(tables);
        }
        let target = classes::number(
            first.columns.labels.first().map(String::as_str),
            &distinct,
            options.surely_classes,
        )?;
        tables.into_iter().map(|t| t.with_target(&target)).collect()
    }

    /// Reads the table at `path` with the target of another, so that a test set has the classes of its training set.
    pub fn open_as(path: &Path, options: &TableOptions, target: &Target) -> Result<Table, DataError> {
        let kind = target.kind().unwrap_or_default();
        Table::labelled(path, &TableOptions { kind, ..options.clone() })?.with_target(target)
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
        let labels = heading.labels(&text)?;
        if options.kind == LabelKind::Classes && labels.len() > 1 {
            let why = "classes have one label's column; for several numbers set `train.loss = \"mse\"`, for several \
                       labels of 0 or 1 `train.loss = \"bce\"`";
            return Err(text.error(0, 0, why));
        }
        Table::read(&text, &heading, &labels, true)
    }

    /// Reads rows of `width` features for prediction. Labels, if there are, are left out: the column with the name that
    /// the label had in training, and in a table of one column more without such a name the one that the options name,
    /// else the last; several labels likewise. Every row then has class 0 of 1; [`Table::with_target`] gives the set the
    /// target of the one that was trained on.
    pub fn features_only(path: &Path, width: usize, options: &TableOptions) -> Result<Table, DataError> {
        if width == 0 {
            return Err(DataError::Setting { why: "a row needs at least one feature".into() });
        }
        let text = Text::open(path, options)?;
        let heading = text.heading()?;
        let n_labels = options.labels.len().max(1);
        let labels = match heading.is_known(&text) {
            // The error names the columns that are missing or unknown.
            true => heading.known_labels(&text),
            false => match heading.width {
                w if w == width => Vec::new(),
                w if w.checked_sub(n_labels) == Some(width) => heading.labels(&text)?,
                w => {
                    let why = format!("{w} columns, but the model takes {width} features");
                    return Err(text.error(0, 0, &why));
                }
            },
        };
        Table::read(&text, &heading, &labels, false)
    }

    /// The same with the target of another table, so that a test set has the classes of its training set.
    pub fn with_target(mut self, target: &Target) -> Result<Table, DataError> {
        match target {
            Target::Class { classes, names } => {
                self.class_of = classes::look_up(&self.distinct, *classes, names)?;
            }
            // Rows for prediction have no labels: zeros stand for them.
            Target::Numbers { n, .. } | Target::Labels { n, .. } if self.targets.is_empty() => {
                self.targets = vec![0.0; self.len() * n];
            }
            Target::Numbers { .. } | Target::Labels { .. } if target.kind() == self.spec.target.kind() => {
                let have = self.spec.n_labels();
                self.spec.target = target.clone();
                if self.spec.n_labels() != have {
                    let why = format!(
                        "a row has {have} labels, and {} were trained on; name as many columns with `data.label`",
                        self.spec.n_labels()
                    );
                    return Err(DataError::Setting { why });
                }
            }
            Target::NextId | Target::Numbers { .. } | Target::Labels { .. } => {
                let why = "a table's labels are classes or numbers, as they were read".into();
                return Err(DataError::Setting { why });
            }
        }
        self.spec.target = target.clone();
        Ok(self)
    }

    /// The names of the columns; empty if the table has no header.
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// Whether the rows have labels; not those of [`Table::features_only`].
    pub fn has_labels(&self) -> bool {
        !self.labels.is_empty() || !self.targets.is_empty()
    }

    fn width(&self) -> usize {
        self.spec.features.numel()
    }

    /// Reads all rows; `fields` are columns that are no features, and are kept if `labelled`.
    fn read(text: &Text, heading: &Heading, fields: &[usize], labelled: bool) -> Result<Table, DataError> {
        let features = heading.features(text, fields)?;
        let kind = text.kind();
        let path: Arc<Path> = text.path().into();
        let (mut values, mut labels, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        let (mut distinct, mut known) = (Vec::<Distinct>::new(), HashMap::<String, u32>::new());
        text.rows(heading, |row| {
            for &field in &features {
                values.push(row.number(field)?);
            }
            for &field in fields {
                row.on_one_line(field)?;
                match kind {
                    LabelKind::Numbers if labelled => targets.push(row.target(field)?),
                    LabelKind::Labels if labelled => targets.push(row.zero_or_one(field)?),
                    LabelKind::Classes | LabelKind::Numbers | LabelKind::Labels => {}
                }
            }
            let Some(&field) = fields.first().filter(|_| labelled && kind == LabelKind::Classes) else {
                return Ok(());
            };
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
            labels: fields.iter().copied().filter_map(name).collect(),
        };
        let (n, names) = (fields.len(), columns.labels.clone());
        let target = match kind {
            LabelKind::Numbers if labelled => Target::Numbers { n, names },
            LabelKind::Labels if labelled => Target::Labels { n, names },
            LabelKind::Classes | LabelKind::Numbers | LabelKind::Labels => {
                Target::Class { classes: 1, names: Vec::new() }
            }
        };
        let spec = Spec { features: Features::Row { width: features.len() }, target };
        Ok(Table { spec, columns, values, labels, distinct, class_of: Vec::new(), targets })
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
        let label = match self.class(idx)? {
            Some(class) => Label::Class(class),
            None => {
                let n = self.spec.n_labels();
                Label::Values(&self.targets[idx * n..][..n])
            }
        };
        Ok(Fetched { values: Values::F32(values), label })
    }

    fn intact(&self) -> Result<(), DataError> {
        Ok(())
    }

    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        let class = || self.labels.get(idx).map_or(0, |&l| self.class_of[l as usize] as usize);
        Ok((!self.spec.target.is_values()).then(class))
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
