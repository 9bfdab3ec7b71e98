//! A table that names files: the labels of images, with a row for each.
//!
//! Labels are read as those of any table. The column with the files' names takes the place of features: names are kept, with where each
//! stands, so that one that is wrong can be pointed at. What is in the files is read by `images`.

use super::Table;
use super::text::{FieldPlace, Heading, Row, Text};
use crate::classes::LabelPlace;
use crate::dataset::Label;
use crate::error::DataError;

/// What the column is called if it is not said, the first that there is; else it is the first column that is no label.
const USUAL_NAMES: [&str; 7] = ["image", "file", "path", "filename", "file_name", "filepath", "image_path"];

/// How the names of image files end.
const ENDINGS: [&str; 3] = [".png", ".jpg", ".jpeg"];

/// The column of a table that has the names of files.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct FileColumn {
    /// By name, or by number from 0; `None`: by one of the usual names, or the first that is no label.
    pub name: Option<String>,
}

/// A file that a row names.
#[derive(Debug)]
pub struct ListedFile {
    /// As it is written.
    pub name: String,
    place: FieldPlace,
}

impl ListedFile {
    /// An error at the row that names it.
    pub fn error(&self, why: &str) -> DataError {
        self.place.error(&format!("{:?} {why}", self.name))
    }

    /// The file that a row names in this field.
    pub(super) fn of(row: &Row, field: usize) -> Result<ListedFile, DataError> {
        row.on_one_line(field)?;
        Ok(ListedFile { name: row.word(field)?.into(), place: row.place_of(field) })
    }
}

impl FileColumn {
    /// Whether a field of a first row can only be a file's name, and the row no header.
    pub(super) fn is_file(field: &[u8]) -> bool {
        let ends = |ending: &&str| {
            let at = field.len().checked_sub(ending.len());
            at.is_some_and(|at| field[at..].eq_ignore_ascii_case(ending.as_bytes()))
        };
        ENDINGS.iter().any(ends)
    }

    /// Which field it is.
    pub(super) fn field(&self, text: &Text, heading: &Heading, labels: &[usize]) -> Result<usize, DataError> {
        let Some(name) = &self.name else {
            let free = |field: &usize| !labels.contains(field);
            let usual = |name: &&str| {
                heading.names.iter().position(|n| n.eq_ignore_ascii_case(name)).filter(|field| free(field))
            };
            let field = USUAL_NAMES.iter().find_map(usual);
            let field = field.or_else(|| (0..heading.width).find(|field| free(field)));
            return field.ok_or_else(|| text.error(0, 0, "no column is left for the images' names"));
        };
        let field = heading.label(text, name)?;
        match labels.contains(&field) {
            true => {
                let why = format!(
                    "column {name:?} names the images and is the label; name the label's with `data.label`"
                );
                Err(text.error(0, field, &why))
            }
            false => Ok(field),
        }
    }
}

impl Table {
    /// The files that its rows name, if it is a table of files.
    pub fn files(&self) -> &[ListedFile] {
        &self.files
    }

    /// The label of a row that is not of tags.
    pub(crate) fn label(&self, idx: usize) -> Label<'_> {
        match self.class_of_row(idx) {
            Some(class) => Label::Class(class),
            None => {
                let n = self.spec.n_labels();
                Label::Values(&self.targets[idx * n..][..n])
            }
        }
    }
}
