//! Files that grow by whole records, and files that appear whole.
//!
//! An [`Appender`] outlives a full disk: what could not be written waits in memory, up to a bound, and a half-written
//! record is cut off or written over. So a reader sees whole records at any time, short of a crash in the middle of a
//! write, after which only the last may be half.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Bytes that wait for a disk with room: some ten thousand lines of metrics. Later records are lost.
const PENDING_BYTES_MAX: usize = 1 << 20;

/// Where an appender writes: a file, or a test's double.
pub(super) trait AppendTarget {
    /// Writes all of `bytes` at `offset`.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Cuts what lies behind `len`.
    fn cut(&mut self, len: u64) -> io::Result<()>;
}

impl AppendTarget for File {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.seek(SeekFrom::Start(offset))?;
        self.write_all(bytes)
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }
}

/// A file that grows by whole records.
#[derive(Debug)]
pub(super) struct Appender<T = File> {
    path: PathBuf,
    target: T,
    len: u64,
    pending: Vec<u8>,
}

impl Appender {
    /// A new file; an error if there is one.
    pub(super) fn create(path: &Path) -> io::Result<Appender> {
        let target = OpenOptions::new().write(true).create_new(true).open(path)?;
        Ok(Appender::at(path, target, 0))
    }

    /// The end of a file, which is made if there is none.
    pub(super) fn open(path: &Path) -> io::Result<Appender> {
        let target = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        let len = target.metadata()?.len();
        Ok(Appender::at(path, target, len))
    }

    /// Waits until the disk has everything.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.append(&[])?;
        self.target.sync_data()
    }
}

impl<T: AppendTarget> Appender<T> {
    fn at(path: &Path, target: T, len: u64) -> Appender<T> {
        Appender { path: path.into(), target, len, pending: Vec::new() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a record, after those that wait.
    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.pending.len() + record.len() <= PENDING_BYTES_MAX {
            self.pending.extend_from_slice(record);
        }
        if self.pending.is_empty() {
            return Ok(());
        }
        let written = self.target.write_at(self.len, &self.pending);
        match written {
            Ok(()) => {
                self.len += self.pending.len() as u64;
                self.pending.clear();
            }
            // Where even this fails, the next write covers the same place.
            Err(_) => drop(self.target.cut(self.len)),
        }
        written
    }
}

/// Writes a file that is there whole or not at all: beside its place first, and then renamed.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".part");
    let beside = path.with_file_name(name);
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    let moved = written.and_then(|()| fs::rename(&beside, path));
    if moved.is_err() {
        // Half a file under another name is of no use to anybody.
        drop(fs::remove_file(&beside));
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with so much room, which takes what fits of a write before it fails.
    struct Disk {
        bytes: Vec<u8>,
        room: usize,
        cuts: bool,
    }

    impl AppendTarget for Disk {
        fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.bytes.truncate(offset as usize);
            let fits = bytes.len().min(self.room.saturating_sub(self.bytes.len()));
            self.bytes.extend_from_slice(&bytes[..fits]);
            if fits < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }

        fn cut(&mut self, len: u64) -> io::Result<()> {
            if self.cuts {
                self.bytes.truncate(len as usize);
            }
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_loses_nothing_that_fits_in_memory() {
        for cuts in [true, false] {
            let mut file = Appender::at(Path::new("m"), Disk { bytes: Vec::new(), room: 12, cuts }, 0);
            assert!(file.append(b"first\n").is_ok());
            assert!(file.append(b"second\n").is_err());
            if cuts {
                assert_eq!(file.target.bytes, b"first\n");
            }
            assert!(file.append(b"third\n").is_err());
            file.target.room = 100;
            assert!(file.append(b"fourth\n").is_ok());
            assert_eq!(file.target.bytes, b"first\nsecond\nthird\nfourth\n");
        }
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut file = Appender::at(Path::new("m"), Disk { bytes: Vec::new(), room: 0, cuts: true }, 0);
        for _ in 0..40 {
            assert!(file.append(&[b'x'; 100_000]).is_err());
        }
        assert!(file.pending.len() <= PENDING_BYTES_MAX);
        file.target.room = usize::MAX;
        assert!(file.append(b"\n").is_ok());
        assert_eq!(file.target.bytes.len(), 1_000_001);
    }

    #[test]
    fn a_real_full_device_is_an_error_and_not_the_end() {
        let Ok(mut file) = Appender::open(Path::new("/dev/full")) else { return };
        for _ in 0..3 {
            assert_eq!(file.append(b"line\n").unwrap_err().kind(), io::ErrorKind::StorageFull);
        }
    }

    #[test]
    fn whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.html");
        write_whole(&path, b"one").unwrap();
        write_whole(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        // A folder in the place of the file: nothing is left behind.
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert!(write_whole(&taken, b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert!(write_whole(&folder.path().join("absent/report.html"), b"x").is_err());
    }
}
