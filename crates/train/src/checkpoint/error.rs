//! What can be wrong with a checkpoint, or with a file of weights.

use std::io;
use std::path::{Path, PathBuf};

use super::Difference;

/// An error of a checkpoint or of a file of weights.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk has no room for the checkpoint.
    #[error(
        "{}: the disk is full{}; make room, or lower `output.keep`{}",
        path.display(), room(*needed, *free), still_whole(previous.as_deref())
    )]
    DiskFull {
        /// What could not be written.
        path: PathBuf,
        /// Bytes of everything that was to be written; 0: not known.
        needed: u64,
        /// Bytes that could be written before there was no more room. They were given back.
        free: u64,
        /// The newest checkpoint that is whole.
        previous: Option<PathBuf>,
    },
    /// Nothing can be written there.
    #[error("{}: cannot write here: {source}; make the folder writable, or choose another one with `output.path`", path.display())]
    Unwritable {
        /// What could not be written.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process trains into the folder.
    #[error(
        "{}: {} trains into this folder; wait for its end or stop it, or choose another folder with `output.path`",
        run.display(), process(*pid)
    )]
    Locked {
        /// The run's folder.
        run: PathBuf,
        /// The other process, if its number could be read.
        pid: Option<u32>,
    },
    /// A file or folder that is not there.
    #[error("{}: not found; {hint}", path.display())]
    Missing {
        /// What was looked for.
        path: PathBuf,
        /// What to do.
        hint: String,
    },
    /// The system could not read or write.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The manifest is cut off or was changed.
    #[error("{}: not a whole manifest: {why}; use an older checkpoint", path.display())]
    HalfWritten {
        /// The manifest.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file is shorter or longer than the manifest says.
    #[error("{}: {found} bytes long where the manifest says {expected}; use an older checkpoint", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes, by the manifest.
        expected: u64,
        /// Bytes, by the disk.
        found: u64,
    },
    /// A file's content is not what was written.
    #[error(
        "{}: damaged: its checksum is {found} where the manifest says {expected}; use an older checkpoint",
        path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// BLAKE3, by the manifest.
        expected: String,
        /// BLAKE3 of what is there.
        found: String,
    },
    /// The content is not that of a safetensors file.
    #[error("{}: at byte {offset}: {why}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is there and what should be.
        why: String,
    },
    /// The tensors are those of another model.
    #[error("{}: of another model: {difference}", path.display())]
    OtherModel {
        /// The file or checkpoint.
        path: PathBuf,
        /// What differs.
        difference: Box<Difference>,
    },
    /// A file of weights that cannot be used as it is.
    #[error("{}: {why}", path.display())]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// Written by a newer version of this program.
    #[error("{}: format {found}, and this version reads up to {known}; use a newer version", path.display())]
    NewerFormat {
        /// The manifest.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest format that is known here.
        known: u64,
    },
    /// A checkpoint that may be whole, but cannot be read now.
    #[error(
        "{source}; {} may be whole, so nothing is changed: make it readable{}",
        path.display(), or_older(older.as_deref())
    )]
    Unread {
        /// The checkpoint.
        path: PathBuf,
        /// Why it cannot be read.
        source: Box<CheckpointError>,
        /// The one before it, if there is.
        older: Option<PathBuf>,
    },
    /// A checkpoint that lies outside of a run.
    #[error(
        "{}: a checkpoint outside of a run cannot be gone on with; give RUN/checkpoints/step-N, or start from its \
         weights with `model.weights`",
        path.display()
    )]
    Stray {
        /// The checkpoint.
        path: PathBuf,
    },
    /// There are checkpoints, but none of them is whole.
    #[error("{}: no whole checkpoint{}", run.display(), reasons(skipped))]
    NoneWhole {
        /// The run's folder.
        run: PathBuf,
        /// What is there, and why it cannot be used.
        skipped: Vec<Skipped>,
    },
    /// The folder holds a later step, so this one would not be the newest.
    #[error(
        "{}: step {newest} is here already, so step {step} cannot be saved; resume from step {newest}, go back \
         explicitly, or choose another folder with `output.path`",
        run.display()
    )]
    Backwards {
        /// The run's folder.
        run: PathBuf,
        /// The step that was to be saved.
        step: u64,
        /// The newest step that is there.
        newest: u64,
    },
    /// The ranks that have the numbers do not answer any more.
    #[error("other ranks have a part of the model, and one of them is gone")]
    PeersLost,
    /// A snapshot that no file can hold: a bug of the caller.
    #[error("{file}: {why}")]
    Snapshot {
        /// The shard's or weights' file.
        file: String,
        /// What is wrong with it.
        why: String,
    },
}

/// A checkpoint that was passed over, and why.
#[derive(Debug)]
pub struct Skipped {
    /// Its step, by its name.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: CheckpointError,
}

impl CheckpointError {
    /// An error while reading `path`.
    pub(crate) fn reading(path: &Path, source: io::Error) -> CheckpointError {
        match source.kind() {
            io::ErrorKind::NotFound => CheckpointError::missing(path, "check the path"),
            _ => CheckpointError::Io { path: path.into(), source },
        }
    }

    /// An error while writing `path`. What a full disk lacked is filled in by whoever knows it.
    pub(crate) fn writing(path: &Path, source: io::Error) -> CheckpointError {
        use io::ErrorKind as Kind;
        let path = path.to_path_buf();
        match source.kind() {
            Kind::StorageFull | Kind::QuotaExceeded => {
                CheckpointError::DiskFull { path, needed: 0, free: 0, previous: None }
            }
            Kind::PermissionDenied | Kind::ReadOnlyFilesystem | Kind::NotADirectory => {
                CheckpointError::Unwritable { path, source }
            }
            _ => CheckpointError::Io { path, source },
        }
    }

    /// Whether this is certain damage: what is there is not what was written. Anything else (a permission, a disk that
    /// does not answer, a file that is not there) may pass.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            CheckpointError::HalfWritten { .. }
            | CheckpointError::Length { .. }
            | CheckpointError::Checksum { .. }
            | CheckpointError::Corrupt { .. } => true,
            CheckpointError::DiskFull { .. }
            | CheckpointError::Unwritable { .. }
            | CheckpointError::Locked { .. }
            | CheckpointError::Missing { .. }
            | CheckpointError::Io { .. }
            | CheckpointError::OtherModel { .. }
            | CheckpointError::Weights { .. }
            | CheckpointError::NewerFormat { .. }
            | CheckpointError::Unread { .. }
            | CheckpointError::Stray { .. }
            | CheckpointError::NoneWhole { .. }
            | CheckpointError::Backwards { .. }
            | CheckpointError::PeersLost
            | CheckpointError::Snapshot { .. } => false,
        }
    }

    /// Something that is not there.
    pub(crate) fn missing(path: &Path, hint: &str) -> CheckpointError {
        CheckpointError::Missing { path: path.into(), hint: hint.into() }
    }

    /// Content that is not what it should be.
    pub(crate) fn corrupt(path: &Path, offset: u64, why: impl Into<String>) -> CheckpointError {
        CheckpointError::Corrupt { path: path.into(), offset, why: why.into() }
    }

    /// The same error; if the disk was full, with what is known about it.
    pub(crate) fn with_room(self, needed: u64, free: u64, previous: Option<PathBuf>) -> CheckpointError {
        match self {
            CheckpointError::DiskFull { path, .. } => {
                CheckpointError::DiskFull { path, needed, free, previous }
            }
            other => other,
        }
    }
}

fn room(needed: u64, free: u64) -> String {
    match needed {
        0 => String::new(),
        _ => format!(": {} are needed and only {} were free", bytes(needed), bytes(free)),
    }
}

fn still_whole(previous: Option<&Path>) -> String {
    previous.map_or(String::new(), |path| format!("; {} is still whole", path.display()))
}

fn or_older(older: Option<&Path>) -> String {
    older.map_or(String::new(), |path| {
        format!(", or go on from an older one with `polyreme resume {}`", path.display())
    })
}

fn process(pid: Option<u32>) -> String {
    pid.map_or("another process".into(), |pid| format!("process {pid}"))
}

fn reasons(skipped: &[Skipped]) -> String {
    skipped.iter().map(|skipped| format!("; {}", skipped.why)).collect()
}

/// Bytes for people: exact where two sizes might look the same.
fn bytes(n: u64) -> String {
    match n {
        0..1_000_000 => format!("{n} bytes"),
        _ => format!("{:.1} MB", n as f64 / 1e6),
    }
}
