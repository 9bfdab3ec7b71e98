//! Unpacking an archive: only the files that are listed for it.
//!
//! An entry is written only if its path is one of the list, under a name that comes from the list, so no archive can
//! write anywhere else. Lengths are bounded by the list. Next to the files goes a list of their checksums, written last, by
//! which they can be verified later without the archive; `md5sum -c` reads it.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use super::known::{Member, SetFile};
use super::part::{md5_of, rename};
use crate::error::DataError;

/// The largest size of a list of checksums.
const LIST_BYTES_MAX: u64 = 1 << 16;
/// How many bytes an archive may hold besides its listed files.
const OTHER_BYTES_MAX: u64 = 1 << 20;

/// Unpacks `file`, which lies in `folder`, and deletes it.
pub(super) fn unpack(file: &SetFile, folder: &Path) -> Result<(), DataError> {
    let archive = folder.join(file.name);
    let mut sums = heading(file);
    let extracted = extract(file, &archive, folder).inspect_err(|_| {
        // Half-unpacked files are useless. That one may not exist is not a second error.
        for member in file.members {
            let _ = fs::remove_file(temporary_path(member, folder));
        }
    })?;
    for (member, temporary) in extracted {
        let target = folder.join(name(member));
        let sum = md5_of(&temporary).map_err(|err| DataError::io(&temporary, err))?;
        rename(&temporary, &target)?;
        sums.push_str(&format!("{sum}  {}\n", name(member)));
    }
    let list = list_path(file, folder);
    let temporary = list.with_extension("part");
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(sums.as_bytes())?;
        file.sync_all()
    };
    write().map_err(|err| DataError::io(&temporary, err))?;
    rename(&temporary, &list)?;
    fs::remove_file(&archive).map_err(|err| DataError::io(&archive, err))
}

/// Whether all members of `file` are in `folder`, unpacked and intact.
pub(super) fn is_unpacked(file: &SetFile, folder: &Path) -> bool {
    let mut sums = String::new();
    let read = File::open(list_path(file, folder))
        .and_then(|list| list.take(LIST_BYTES_MAX).read_to_string(&mut sums));
    if read.is_err() || !sums.starts_with(&heading(file)) {
        return false;
    }
    file.members.iter().all(|member| {
        let name = name(member);
        md5_of(&folder.join(name)).is_ok_and(|sum| sums.lines().any(|line| line == format!("{sum}  {name}")))
    })
}

/// Writes each member to a temporary file, flushed to disk.
fn extract<'a>(
    file: &'a SetFile,
    archive: &Path,
    folder: &Path,
) -> Result<Vec<(&'a Member, PathBuf)>, DataError> {
    let failed = |err| DataError::io(archive, err);
    let bytes_max = file.members.iter().map(|member| member.bytes_max).sum::<u64>() + OTHER_BYTES_MAX;
    let packed = BufReader::new(File::open(archive).map_err(failed)?);
    let mut tar = tar::Archive::new(GzDecoder::new(packed).take(bytes_max));
    let mut done: Vec<(&Member, PathBuf)> = Vec::new();
    for entry in tar.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        let offset = entry.raw_header_position();
        let path = entry.path_bytes().into_owned();
        let path = path.strip_prefix(b"./").unwrap_or(&path);
        let Some(member) = file.members.iter().find(|member| member.path.as_bytes() == path) else {
            continue;
        };
        let wrong = |why: String| DataError::corrupt(archive, offset, format!("{} {why}", member.path));
        if !entry.header().entry_type().is_file() {
            return Err(wrong("is not a regular file".into()));
        }
        if entry.size() > member.bytes_max {
            return Err(wrong(format!(
                "has {} bytes, more than the {} expected at most",
                entry.size(),
                member.bytes_max
            )));
        }
        if done.iter().any(|(other, _)| other.path == member.path) {
            return Err(wrong("is in the archive twice".into()));
        }
        let temporary = temporary_path(member, folder);
        let mut target = File::create(&temporary).map_err(|err| DataError::io(&temporary, err))?;
        let n = io::copy(&mut entry, &mut target).map_err(failed)?;
        if n != entry.size() {
            return Err(wrong(format!("ends after {n} of {} bytes", entry.size())));
        }
        target.sync_all().map_err(|err| DataError::io(&temporary, err))?;
        done.push((member, temporary));
    }
    match file.members.iter().find(|member| done.iter().all(|(other, _)| other.path != member.path)) {
        Some(lacking) => {
            Err(DataError::corrupt(archive, 0, format!("{} is not in the archive", lacking.path)))
        }
        None => Ok(done),
    }
}

/// The name under which a member is unpacked.
fn name(member: &Member) -> &'static str {
    member.path.rsplit('/').next().unwrap_or(member.path)
}

fn temporary_path(member: &Member, folder: &Path) -> PathBuf {
    folder.join(format!("{}.part", name(member)))
}

fn list_path(file: &SetFile, folder: &Path) -> PathBuf {
    folder.join(format!("{}.unpacked", file.name))
}

/// The first line of the list, which names the archive.
fn heading(file: &SetFile) -> String {
    format!("# {}  {}\n", file.md5, file.name)
}
