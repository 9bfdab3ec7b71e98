//! The files that a table of labels names: inside the folder, there, and images, before anything is learnt.
//!
//! Only the first bytes of each are read: whatever begins as a PNG or a JPEG is decoded when its sample is fetched.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use super::decode::{self, starts_as_image};
use crate::error::DataError;
use crate::table::{ListedFile, Table};

/// The first bytes of a file, by which it is known as an image.
const HEAD_BYTES: u64 = 8;

/// The paths of the files that the rows of a table name, relative to `folder`. A file may be named more than once.
pub fn listed(folder: &Path, table: &Table) -> Result<Vec<PathBuf>, DataError> {
    let (mut paths, mut missing) = (Vec::with_capacity(table.files().len()), Vec::<&ListedFile>::new());
    for file in table.files() {
        let name = Path::new(&file.name);
        let inside = |part: Component| matches!(part, Component::Normal(_) | Component::CurDir);
        if !name.components().all(inside) {
            let why = "leaves the folder of the images; paths are relative to `data.path` and stay inside it";
            return Err(file.error(why));
        }
        let path = folder.join(name);
        match head(&path) {
            Ok(head) => {
                if !starts_as_image(&head) {
                    // The decoder says what is wrong.
                    decode::decode_any(&head, true, &mut Vec::new()).map_err(|flaw| flaw.of(&path))?;
                }
                paths.push(path);
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                missing.push(file);
            }
            Err(error) => return Err(DataError::io(&path, error)),
        }
    }
    let Some(first) = missing.first() else { return Ok(paths) };
    let more = match missing.len() - 1 {
        0 => String::new(),
        1 => ", nor is 1 more".into(),
        n => format!(", nor are {n} more"),
    };
    let why = format!(
        "is not in {}{more}; paths are relative to `data.path`: set it, or take such rows out",
        folder.display()
    );
    Err(first.error(&why))
}

/// How a file begins.
fn head(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    // Checked before opening, because opening a pipe waits for a writer.
    if !path.metadata()?.is_file() {
        return Err(std::io::Error::other("not a file; give a PNG or JPEG file"));
    }
    File::open(path)?.take(HEAD_BYTES).read_to_end(&mut head)?;
    Ok(head)
}
