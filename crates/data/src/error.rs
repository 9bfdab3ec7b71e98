//! Errors of data: they name the file and, inside a file, the offset.

use std::io;
use std::path::PathBuf;

/// An error of a dataset.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file or folder that does not exist.
    #[error("{}: not found; {hint}", path.display())]
    Missing {
        /// The path that was looked for.
        path: PathBuf,
        /// What to do next.
        hint: String,
    },
    /// The system could not read or write a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file's content is not what it should be: truncated, corrupt or mislabelled.
    #[error("{}: at byte {offset}: {why}", path.display())]
    Corrupt {
        /// The path of the file.
        path: PathBuf,
        /// The byte offset in the file.
        offset: u64,
        /// What was found and what was expected.
        why: String,
    },
    /// What an address stands for cannot be had.
    #[error("{url}: {why}")]
    Remote {
        /// The address.
        url: String,
        /// What is wrong, and what to do next.
        why: String,
    },
    /// Settings that this set cannot satisfy.
    #[error("{why}")]
    Setting {
        /// What is wrong, and what to write instead.
        why: String,
    },
    /// A bug: code that reads or chooses samples panicked.
    #[error("{what} panicked: {why}; this is a bug in the code that reads the set")]
    Panicked {
        /// What the code was doing, with the sample's index.
        what: String,
        /// The panic's message.
        why: String,
    },
}

impl DataError {
    /// An error of the system at `path`; a missing file becomes [`DataError::Missing`].
    pub fn io(path: impl Into<PathBuf>, source: io::Error) -> DataError {
        let path = path.into();
        if source.kind() == io::ErrorKind::NotFound {
            return DataError::Missing { path, hint: "check the path".into() };
        }
        DataError::Io { path, source }
    }

    /// An error for content that is not what it should be.
    pub fn corrupt(path: impl Into<PathBuf>, offset: u64, why: impl Into<String>) -> DataError {
        DataError::Corrupt { path: path.into(), offset, why: why.into() }
    }
}
