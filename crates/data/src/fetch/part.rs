//! A file that is not complete yet: `NAME.part`, until its checksum is right and it gets its name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use md5::{Digest, Md5};

use crate::error::DataError;

/// Bytes that are read at a time: large enough for few calls, small enough for frequent progress.
const CHUNK_BYTES: usize = 1 << 18;

/// The part of a file that has been fetched. It stays when something fails, so that a later try can resume.
pub(super) struct PartFile {
    target: PathBuf,
    path: PathBuf,
    file: File,
    have: u64,
}

impl PartFile {
    /// Opens or creates the part of the file `target`. Fails if another process is writing it.
    pub(super) fn open(target: &Path) -> Result<PartFile, DataError> {
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(".part");
        let path = target.with_file_name(name);
        let open = || -> io::Result<(File, u64)> {
            let mut file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
            // A file system without locks gives no protection.
            if let Err(TryLockError::WouldBlock) = file.try_lock() {
                return Err(io::Error::other(
                    "another process is fetching this file; wait for it or stop it",
                ));
            }
            let have = file.seek(SeekFrom::End(0))?;
            Ok((file, have))
        };
        let (file, have) = open().map_err(|err| DataError::io(&path, err))?;
        Ok(PartFile { target: target.into(), path, file, have })
    }

    /// Bytes fetched so far.
    pub(super) fn have(&self) -> u64 {
        self.have
    }

    /// Drops what has been fetched.
    pub(super) fn restart(&mut self) -> Result<(), DataError> {
        self.have = 0;
        let done = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        done.map(|_| ()).map_err(|err| DataError::io(&self.path, err))
    }

    /// Appends all that `source` gives; `progress` is called with the size so far. More than `bytes_max` in total is an error.
    pub(super) fn append(
        &mut self,
        source: &mut dyn Read,
        bytes_max: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Trouble> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let n = match source.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(n) => n,
                Err(err) if err.kind() == io::ErrorKind::Interrupted => continue,
                Err(err) => return Err(Trouble::Source(err.to_string())),
            };
            if self.have + n as u64 > bytes_max {
                return Err(Trouble::Source(format!("more than the {bytes_max} bytes that the file has")));
            }
            self.file.write_all(&chunk[..n]).map_err(|err| Trouble::Disk(DataError::io(&self.path, err)))?;
            self.have += n as u64;
            progress(self.have);
        }
    }

    /// Gives the file its name, if its checksum is one of `sums`; flushed, so it survives a loss of power. With any other
    /// checksum the part is deleted.
    pub(super) fn finish(self, sums: &[&str]) -> Result<(), Trouble> {
        let disk = |err| Trouble::Disk(DataError::io(&self.path, err));
        let found = md5_of(&self.path).map_err(disk)?;
        if !sums.contains(&found.as_str()) {
            fs::remove_file(&self.path).map_err(disk)?;
            let expected = sums.join(" or ");
            return Err(Trouble::Source(format!(
                "the MD5 checksum is {found} and should be {expected}; the download was deleted"
            )));
        }
        self.file.sync_all().map_err(disk)?;
        rename(&self.path, &self.target).map_err(Trouble::Disk)
    }

    /// Leaves the part for later, or deletes it if it is empty. Returns its size.
    pub(super) fn leave(self) -> Result<u64, DataError> {
        if self.have == 0 {
            fs::remove_file(&self.path).map_err(|err| DataError::io(&self.path, err))?;
        }
        Ok(self.have)
    }
}

/// Why a file could not be fetched.
pub(super) enum Trouble {
    /// The source failed: another one may succeed.
    Source(String),
    /// This machine failed: no other source would help.
    Disk(DataError),
}

/// Renames a flushed file to its final name, and flushes the folder.
pub(super) fn rename(from: &Path, to: &Path) -> Result<(), DataError> {
    fs::rename(from, to).map_err(|err| DataError::io(to, err))?;
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|err| DataError::io(folder, err))
}

/// The MD5 of a file, in lower-case hexadecimal digits.
pub(super) fn md5_of(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut sum = Md5::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => sum.update(&chunk[..n]),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    Ok(sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn md5_has_the_known_answers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        for (content, expected) in [
            ("", "d41d8cd98f00b204e9800998ecf8427e"),
            ("abc", "900150983cd24fb0d6963f7d28e17f72"),
            ("message digest", "f96b697d7cb7938d525a2f31aaf161d0"),
        ] {
            fs::write(&path, content).unwrap();
            assert_eq!(md5_of(&path).unwrap(), expected);
        }
    }

    #[test]
    fn one_writer_at_a_time_and_never_too_long() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x");
        let mut part = PartFile::open(&target).unwrap();
        assert!(PartFile::open(&target).err().unwrap().to_string().contains("another process"));
        assert!(part.append(&mut &b"abc"[..], 3, &mut |_| ()).is_ok());
        assert!(matches!(part.append(&mut &b"d"[..], 3, &mut |_| ()), Err(Trouble::Source(_))));
        drop(part);
        let part = PartFile::open(&target).unwrap();
        assert_eq!(part.have(), 3);
        assert!(part.finish(&["900150983cd24fb0d6963f7d28e17f72"]).is_ok());
        assert_eq!(fs::read(&target).unwrap(), b"abc");
        assert!(!folder.path().join("x.part").exists());
    }
}
