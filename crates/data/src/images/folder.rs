//! Which files of a folder are samples, and of which class.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::DataError;

/// Folders in folders of a class are followed this deep, which also stops at a circular link.
const DEPTH_MAX: usize = 16;

/// The folders of a set's parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FoundImages {
    /// The training set: a folder with a folder per class.
    pub train: PathBuf,
    /// The validation set, if there is one.
    pub validation: Option<PathBuf>,
    /// The test set, if there is one.
    pub test: Option<PathBuf>,
}

/// Finds the parts of the set in `folder`: `train/` with `val/` (or `valid/`, `validation/`) and `test/` beside it, or
/// else `folder` itself as the training set.
pub fn find(folder: &Path) -> Result<FoundImages, DataError> {
    let part = |names: &[&str]| names.iter().map(|n| folder.join(n)).find(|p| p.is_dir());
    let found = match part(&["train"]) {
        Some(train) => {
            FoundImages { train, validation: part(&["val", "valid", "validation"]), test: part(&["test"]) }
        }
        None => FoundImages { train: folder.into(), validation: None, test: None },
    };
    for part in [Some(&found.train), found.validation.as_ref(), found.test.as_ref()].into_iter().flatten() {
        if entries(part)?.folders.is_empty() {
            return Err(no_classes(part));
        }
    }
    Ok(found)
}

/// The classes of a folder and its files, class by class, each in the order of the names.
pub(super) struct Listing {
    pub(super) classes: Vec<String>,
    pub(super) files: Vec<PathBuf>,
    /// The class of each file.
    pub(super) labels: Vec<u32>,
}

pub(super) fn list(folder: &Path) -> Result<Listing, DataError> {
    let folders = entries(folder)?.folders;
    if folders.is_empty() {
        return Err(no_classes(folder));
    }
    let mut listing = Listing { classes: Vec::new(), files: Vec::new(), labels: Vec::new() };
    for (class, path) in folders.iter().enumerate() {
        let before = listing.files.len();
        gather(path, DEPTH_MAX, &mut listing.files)?;
        if listing.files.len() == before {
            let hint = "every class needs at least one; remove the folder if it is not a class".into();
            return Err(DataError::Missing { path: path.join("*.png, *.jpg, *.jpeg"), hint });
        }
        listing.labels.resize(listing.files.len(), class as u32);
        listing.classes.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    Ok(listing)
}

fn gather(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let entries = entries(folder)?;
    files.extend(entries.images);
    if depth == 0 && !entries.folders.is_empty() {
        let why =
            format!("{}: more than {DEPTH_MAX} folders deep; is there a circular link?", folder.display());
        return Err(DataError::Setting { why });
    }
    entries.folders.iter().try_for_each(|inside| gather(inside, depth - 1, files))
}

struct Entries {
    folders: Vec<PathBuf>,
    images: Vec<PathBuf>,
}

/// The entries of a folder, sorted by name, without hidden ones and files of other kinds.
fn entries(folder: &Path) -> Result<Entries, DataError> {
    let mut entries = Entries { folders: Vec::new(), images: Vec::new() };
    for entry in fs::read_dir(folder).map_err(|e| DataError::io(folder, e))? {
        let entry = entry.map_err(|e| DataError::io(folder, e))?;
        let path = entry.path();
        let mut kind = entry.file_type().map_err(|e| DataError::io(&path, e))?;
        if kind.is_symlink() {
            kind = fs::metadata(&path).map_err(|e| DataError::io(&path, e))?.file_type();
        }
        if kind.is_dir() && !entry.file_name().to_string_lossy().starts_with('.') {
            entries.folders.push(path);
        } else if kind.is_file() && is_image(&path) {
            entries.images.push(path);
        }
    }
    entries.folders.sort();
    entries.images.sort();
    Ok(entries)
}

fn is_image(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default();
    ["png", "jpg", "jpeg"].iter().any(|e| ending.eq_ignore_ascii_case(e))
}

fn no_classes(folder: &Path) -> DataError {
    DataError::Missing { path: folder.join("*/"), hint: "the folder of a set has a folder per class".into() }
}
