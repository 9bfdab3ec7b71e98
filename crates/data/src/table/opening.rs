//! Opening a table in several files: columns, types and classes are those of all of them together.
//!
//! The files may lie with several processes, each of which reads those that it has ([`Table::open_together`]). What is learnt then has the
//! bits that it has where one process reads all of them:
//!
//! - The first file says which columns there are; who has it tells the others.
//! - Whether all features are numbers is known when all files were read; the first file in which one is not, or something is wrong, decides.
//! - What is in the columns (`survey`) is not associative: sums of floats depend on their order. So the survey is handed on from file to
//!   file, in their order, and each process goes on with it where the last one stopped.
//! - Distinct labels are counted by file, and merged in the order of files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::chunks::Chunks;
use super::parts::SameColumns;
use super::stored::RowIndex;
use super::text::{FieldPlace, Text};
use super::{
    ColumnChoice, ColumnSurvey, Columns, Table, TableOptions, TableSchema, Unread, labels_of, labels_to_keep,
    look, places,
};
use crate::classes::{self, Distinct};
use crate::error::DataError;
use crate::spec::{LabelKind, Target};
use crate::together::{Alone, Members, gather, share};

/// A file of a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableFile {
    /// Where it is; `None` if this process does not have it.
    pub path: Option<PathBuf>,
    /// Who tells the others what is in it: one that has it.
    pub teller: usize,
}

/// A table that was opened together.
pub struct OpenedTable {
    /// In the order of the files; `None` for those that this process does not have.
    pub tables: Vec<Option<Table>>,
    /// The names of its columns; empty if it has no header.
    pub columns: Columns,
    /// As what they are read, if they are not all numbers.
    pub schema: Option<Arc<TableSchema>>,
    /// Columns of numbers that look like ids.
    pub like_ids: Vec<String>,
}

/// What the first file says of all of them.
#[derive(Default, Serialize, Deserialize)]
struct FirstFile {
    same: SameColumns,
    columns: Columns,
    like_ids: Vec<String>,
}

/// What has been seen of columns so far.
#[derive(Default, Serialize, Deserialize)]
struct SeenColumns {
    surveys: Vec<ColumnSurvey>,
    unnamed: Option<(usize, Vec<usize>)>,
    same: SameColumns,
}

/// How reading files went on one process.
#[derive(Serialize, Deserialize)]
struct ReadFault {
    /// The file.
    file: usize,
    /// Whether it is only that a feature is not a number.
    not_number: bool,
    why: String,
}

impl Table {
    /// Reads the tables at these paths, parts of one: their classes are those of all of them together, and all have the columns of
    /// the first, in any order.
    pub fn open_all(paths: &[PathBuf], options: &TableOptions) -> Result<Vec<Table>, DataError> {
        let opened = Table::open_together(&all_here(paths), options, &mut Alone)?;
        Ok(opened.tables.into_iter().flatten().collect())
    }

    /// The same where each of some processes has some of the files. Collective.
    pub fn open_together(
        files: &[TableFile],
        options: &TableOptions,
        members: &mut dyn Members,
    ) -> Result<OpenedTable, DataError> {
        let chosen = options.texts.is_none() && options.choice != ColumnChoice::default();
        let mut opened = match options.schema.is_none() && chosen {
            true => learn_and_read(files, options, members)?,
            false => match read_files(files, options, Vec::new(), members) {
                Ok(opened) => opened,
                // A table of a model that was trained on numbers is numbers.
                Err(Unread::NotNumbers(_)) if options.columns.is_empty() && options.schema.is_none() => {
                    learn_and_read(files, options, members)?
                }
                Err(unread) => return Err(unread.into()),
            },
        };
        if files.is_empty() || options.kind != LabelKind::Classes {
            return Ok(opened);
        }
        let distinct = distinct_labels(files, &opened.tables, members)?;
        let label = opened.columns.labels.first().map(String::as_str);
        let target = classes::number(label, &distinct, options.surely_classes)?;
        let tagged = options.texts.as_ref().is_some_and(|texts| texts.tagged);
        let target = match target {
            Target::Class { classes, names } if tagged => Target::Tags { classes, names },
            target => target,
        };
        let tables = opened.tables.into_iter().map(|t| t.map(|t| t.with_target(&target)).transpose());
        opened.tables = tables.collect::<Result<_, _>>()?;
        Ok(opened)
    }
}

/// Learns as what the columns of tables are read, from all of them together. Columns are those of the first.
pub fn learn(paths: &[PathBuf], options: &TableOptions) -> Result<TableSchema, DataError> {
    // Whoever learns columns alone reads no rows by them.
    Ok(learn_together(&all_here(paths), &TableOptions { stored: false, ..options.clone() }, &mut Alone)?.0)
}

fn all_here(paths: &[PathBuf]) -> Vec<TableFile> {
    paths.iter().map(|path| TableFile { path: Some(path.clone()), teller: 0 }).collect()
}

/// The paths of those that this process has.
fn here(files: &[TableFile]) -> Vec<PathBuf> {
    files.iter().filter_map(|file| file.path.clone()).collect()
}

/// Reads tables whose labels are not mapped to classes yet. Rows of some may have been `seen` already. Collective.
fn read_files(
    files: &[TableFile],
    options: &TableOptions,
    mut seen: Vec<Option<RowIndex>>,
    members: &mut dyn Members,
) -> Result<OpenedTable, Unread> {
    let (mut first, mut tables) = (FirstFile::default(), Vec::with_capacity(files.len()));
    let mut fault: Option<(usize, Unread)> = None;
    for (k, file) in files.iter().enumerate() {
        options.places.soon(&here(&files[k..]));
        let mut table = None;
        if let (Some(path), None) = (&file.path, &fault) {
            let seen = seen.get_mut(k).and_then(Option::take);
            match read_file(path, options, &mut first, seen) {
                Ok(read) => table = Some(read),
                Err(unread) => fault = Some((k, unread)),
            }
        }
        if k == 0 {
            if let Some(table) = &table {
                (first.columns, first.like_ids) = (table.columns().clone(), table.like_ids());
            }
            share(members, file.teller, &mut first)?;
        }
        tables.push(table);
    }
    let said = fault.as_ref().map(|(file, unread)| match unread {
        Unread::Wrong(error) => ReadFault { file: *file, not_number: false, why: error.to_string() },
        Unread::NotNumbers(error) => ReadFault { file: *file, not_number: true, why: error.to_string() },
    });
    // The first fault in the order of files is the one that a process meets which has all of them.
    let all = gather(members, said)?.into_iter().enumerate();
    let least = all.filter_map(|(member, said)| Some((member, said?))).min_by_key(|(_, said)| said.file);
    match (least, fault) {
        (None, _) => {
            let FirstFile { columns, like_ids, .. } = first;
            let schema = options.schema.clone();
            Ok(OpenedTable { tables, columns, schema, like_ids })
        }
        (Some((_, said)), Some((file, unread))) if said.file == file => Err(unread),
        (Some((member, ReadFault { not_number, why, .. })), _) => {
            let error = DataError::Setting { why: format!("rank {member}: {why}") };
            Err(if not_number { Unread::NotNumbers(error) } else { Unread::Wrong(error) })
        }
    }
}

fn read_file(
    path: &Path,
    options: &TableOptions,
    first: &mut FirstFile,
    seen: Option<RowIndex>,
) -> Result<Table, Unread> {
    let columns = if options.columns.is_empty() { first.columns.clone() } else { options.columns.clone() };
    let options = TableOptions { columns, ..options.clone() };
    let text = Text::open(path, &options)?;
    let heading = text.heading()?;
    first.same.check(&text, &heading)?;
    let labels = labels_of(&text, &heading, &options)?;
    Table::read_labelled(text, heading, &labels, seen)
}

/// The same where it is learnt first as what columns are read, from all of them. Collective.
fn learn_and_read(
    files: &[TableFile],
    options: &TableOptions,
    members: &mut dyn Members,
) -> Result<OpenedTable, DataError> {
    let (schema, rows) = learn_together(files, options, members)?;
    Ok(read_files(files, &TableOptions { schema: Some(Arc::new(schema)), ..options.clone() }, rows, members)?)
}

/// Learns as what columns are read. Where rows are to stay in their files, gives their labels and places as well, for the files that were read here:
/// a file that is larger than memory is gone through once. Collective.
fn learn_together(
    files: &[TableFile],
    options: &TableOptions,
    members: &mut dyn Members,
) -> Result<(TableSchema, Vec<Option<RowIndex>>), DataError> {
    let (mut seen, mut rows) = (SeenColumns::default(), Vec::new());
    for (k, file) in files.iter().enumerate() {
        options.places.soon(&here(&files[k..]));
        let path = file.path.as_ref().filter(|_| file.teller == members.rank());
        rows.push(path.map(|path| seen.look_at(path, options)).transpose()?.flatten());
        // Handed on where another one goes on, and at the end.
        if files.get(k + 1).is_none_or(|next| next.teller != file.teller) {
            share(members, file.teller, &mut seen)?;
        }
    }
    let schema = TableSchema { unnamed: seen.unnamed, ..TableSchema::learn(&seen.surveys, options)? };
    Ok((schema, rows))
}

impl SeenColumns {
    /// Looks at all rows of the next file.
    fn look_at(&mut self, path: &Path, options: &TableOptions) -> Result<Option<RowIndex>, DataError> {
        let text = Text::open(path, &self.same.options(options))?;
        let heading = text.heading()?;
        self.same.check(&text, &heading)?;
        let labels = labels_of(&text, &heading, options)?;
        let names = heading.names_or_numbers();
        let fields = match self.surveys.is_empty() {
            true => options.choice.features(&names, &labels),
            false => places(&self.surveys, &names),
        };
        let fields = fields.map_err(|why| text.error(0, 0, &why))?;
        if self.surveys.is_empty() {
            self.unnamed = (!heading.is_named()).then(|| (heading.width, labels.clone()));
            // Of numbers that are to be words, the values are looked at.
            let of_words = |name: &str| options.choice.is_category(name) || options.choice.is_text(name);
            let survey = |&field: &usize| ColumnSurvey::new(&names[field], of_words(&names[field]));
            self.surveys = fields.iter().map(survey).collect();
        }
        let keep =
            || RowIndex::new(labels_to_keep(&text, &heading, &labels, Some(options.choice.only_blanks())));
        let index = options.stored.then(keep);
        look(&text, &heading, &fields, &mut self.surveys, index, Chunks::default())
    }
}

/// The distinct labels of all files, in the order in which they occur first. Collective.
fn distinct_labels(
    files: &[TableFile],
    tables: &[Option<Table>],
    members: &mut dyn Members,
) -> Result<Vec<Distinct<FieldPlace>>, DataError> {
    let rank = members.rank();
    let own = |(k, (file, table)): (usize, (&TableFile, &Option<Table>))| {
        let table = table.as_ref().filter(|_| file.teller == rank)?;
        Some((k, table.distinct.clone()))
    };
    let mine: Vec<(usize, Vec<Distinct<FieldPlace>>)> =
        files.iter().zip(tables).enumerate().filter_map(own).collect();
    let mut all: Vec<_> = gather(members, mine)?.into_iter().flatten().collect();
    all.sort_by_key(|(file, _)| *file);
    let (mut places, mut distinct) = (HashMap::<String, usize>::new(), Vec::<Distinct<FieldPlace>>::new());
    for label in all.into_iter().flat_map(|(_, labels)| labels) {
        let place = *places.entry(label.text.clone()).or_insert(distinct.len());
        match distinct.get_mut(place) {
            Some(known) => known.rows += label.rows,
            None => distinct.push(label),
        }
    }
    Ok(distinct)
}
