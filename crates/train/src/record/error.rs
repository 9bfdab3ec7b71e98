//! What can go wrong with the records of a run: always with the file.

use std::io;
use std::path::{Path, PathBuf};

/// An error of the records. None of them is a reason to end a training that has begun.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The system could not write.
    #[error("{}: cannot be written: {source}; make room or permit it, what can wait is written then", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system could not read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is a run in the folder.
    #[error("{}: there already; resume that run, or choose another folder", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
    },
}

impl RecordError {
    /// The file that it is about.
    pub fn path(&self) -> &Path {
        match self {
            RecordError::Write { path, .. }
            | RecordError::Read { path, .. }
            | RecordError::Taken { path } => path,
        }
    }

    pub(super) fn write(path: &Path, source: io::Error) -> RecordError {
        if source.kind() == io::ErrorKind::AlreadyExists {
            return RecordError::Taken { path: path.into() };
        }
        RecordError::Write { path: path.into(), source }
    }

    pub(super) fn read(path: &Path, source: io::Error) -> RecordError {
        RecordError::Read { path: path.into(), source }
    }
}
