//! A table in several files: all have the same columns, in any order.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::TableOptions;
use super::columns::list;
use super::text::{Heading, Text};
use crate::error::DataError;

/// The columns of the first file, which all others must have too.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct SameColumns {
    first: Option<(PathBuf, Vec<String>, usize)>,
}

impl SameColumns {
    /// How the next file is read: its first row is a header if it has names of the first file's.
    pub(super) fn options(&self, options: &TableOptions) -> TableOptions {
        let mut options = options.clone();
        if let Some((_, names, _)) = self.first.as_ref().filter(|_| options.columns.is_empty()) {
            options.columns.features = names.clone();
        }
        options
    }

    /// Fails if a file has other columns than the first one; names both.
    pub(super) fn check(&mut self, text: &Text, heading: &Heading) -> Result<(), DataError> {
        let Some((first, names, width)) = &self.first else {
            self.first = Some((text.path().into(), heading.names.clone(), heading.width));
            return Ok(());
        };
        let (here, there) = (text.path().display(), first.display());
        let missing: Vec<&String> = names.iter().filter(|name| !heading.names.contains(name)).collect();
        let new: Vec<&String> = heading.names.iter().filter(|name| !names.contains(name)).collect();
        let why = match () {
            () if names.is_empty() && heading.names.is_empty() && heading.width != *width => {
                format!("{here} has {} columns and {there} has {width}", heading.width)
            }
            () if names.is_empty() && !heading.names.is_empty() => {
                format!(
                    "{here} has a header and {there} has none; set `data.header` if that was found wrongly"
                )
            }
            () if !names.is_empty() && heading.names.is_empty() => {
                format!(
                    "{there} has a header and {here} has none; set `data.header` if that was found wrongly"
                )
            }
            () if !missing.is_empty() && !new.is_empty() => {
                format!("{here} lacks {}, which {there} has, and has {} instead", list(missing), list(new))
            }
            () if !missing.is_empty() => format!("{here} lacks {}, which {there} has", list(missing)),
            () if !new.is_empty() => format!("{here} has {}, which {there} lacks", list(new)),
            () => return Ok(()),
        };
        let why = format!("{why}; the files of a table have the same columns, in any order");
        Err(DataError::Setting { why })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::{Table, survey};
    use super::*;
    use crate::dataset::Dataset;

    /// Opens files with these contents as one table.
    fn open(folder: &Path, contents: &[&str]) -> Result<Vec<Table>, String> {
        let file = |(i, content): (usize, &&str)| {
            let path = folder.join(format!("part-{i}.csv"));
            fs::write(&path, content).unwrap();
            path
        };
        let paths: Vec<PathBuf> = contents.iter().enumerate().map(file).collect();
        let opened = Table::open_all(&paths, &TableOptions::default()).map_err(|e| e.to_string());
        let surveyed = survey(&paths, &TableOptions::default()).map_err(|e| e.to_string());
        assert_eq!(opened.as_ref().err(), surveyed.as_ref().err());
        opened
    }

    #[test]
    fn files_have_the_same_columns() {
        let folder = tempfile::tempdir().unwrap();
        let good = open(folder.path(), &["a,b,y\n1,2,0\n", "b,y,a\n4,1,3\n"]).unwrap();
        assert_eq!((good[0].len(), good[1].len()), (1, 1));
        let good = open(folder.path(), &["a,b,y\n1,x,0\n2,z,1\n", "b,y,a\nx,1,3\n"]).unwrap();
        assert_eq!(good[1].spec(), good[0].spec());
        // Words alone do not say whether they are names; those of the first file do.
        let first = "a,b,y\n".to_string() + &"p,x,u\nq,z,v\n".repeat(20);
        assert_eq!(open(folder.path(), &[&first, "a,b,y\np,x,u\n"]).unwrap()[1].len(), 1);
        for (contents, parts) in [
            (["a,b,y\n1,2,0\n", "a,y\n1,0\n"], &["part-1.csv lacks \"b\", which ", "part-0.csv has"][..]),
            (["a,y\n1,0\n", "a,c,y\n1,2,0\n"], &["part-1.csv has \"c\", which ", "part-0.csv lacks"]),
            (["a,b,y\n1,2,0\n", "a,c,y\n1,2,0\n"], &["lacks \"b\"", "has \"c\" instead"]),
            (["a,b,y\n1,x,0\n2,z,1\n", "a,c,y\n1,x,0\n"], &["lacks \"b\"", "has \"c\" instead"]),
            (["1,2,0\n", "1,0\n"], &["part-1.csv has 2 columns and ", "part-0.csv has 3"]),
            (["a,b,y\n1,2,0\n", "1,2,0\n"], &["part-0.csv has a header and ", "part-1.csv has none"]),
            (["1,2,0\n", "a,b,y\n1,2,0\n"], &["part-1.csv has a header and ", "part-0.csv has none"]),
        ] {
            let error = open(folder.path(), &contents).expect_err(contents[1]);
            parts.iter().for_each(|part| assert!(error.contains(part), "{error} lacks {part}"));
        }
    }
}
