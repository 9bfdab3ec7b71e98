//! What some file systems cannot do (network and FAT ones): links, locks, bringing a folder's names to the disk. A run
//! goes on without, and says once what that costs.

use std::io;
use std::sync::Mutex;

/// Something that a file system may lack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lack {
    Links,
    Locks,
    FolderSync,
}

impl Lack {
    /// What that means for a run.
    fn note(self) -> &'static str {
        match self {
            Lack::Links => {
                "this file system has no symbolic links; `checkpoints/best` is a file with a name in it"
            }
            Lack::Locks => {
                "this file system has no locks; take care that no other process trains into this folder"
            }
            Lack::FolderSync => {
                "this file system does not sync folders; a power cut may lose the newest checkpoint"
            }
        }
    }
}

/// What was found lacking, each told once.
#[derive(Default, Debug)]
pub(super) struct Lacks(Mutex<FoundLacks>);

#[derive(Default, Debug)]
struct FoundLacks {
    known: Vec<Lack>,
    told: usize,
}

impl Lacks {
    /// Remembers it.
    pub(super) fn add(&self, lack: Lack) {
        let mut found = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !found.known.contains(&lack) {
            found.known.push(lack);
        }
    }

    /// What is to be told: every lack once.
    pub(super) fn take(&self) -> Vec<&'static str> {
        let mut found = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let n_known = found.known.len();
        let told = std::mem::replace(&mut found.told, n_known);
        found.known[told..].iter().map(|lack| lack.note()).collect()
    }
}

/// Whether an error says that this cannot be done here at all, rather than that it went wrong this time.
pub(super) fn is_lacking(error: &io::Error, lack: Lack) -> bool {
    // Linux's numbers: the standard library has no names for all of them.
    const EPERM: i32 = 1;
    const EBADF: i32 = 9;
    const EINVAL: i32 = 22;
    const ENOTTY: i32 = 25;
    const ENOLCK: i32 = 37;
    const ENOSYS: i32 = 38;
    const EOPNOTSUPP: i32 = 95;
    let Some(code) = error.raw_os_error() else { return false };
    match code {
        EINVAL | ENOTTY | ENOSYS | EOPNOTSUPP => true,
        // FAT refuses links like this.
        EPERM => lack == Lack::Links,
        ENOLCK => lack == Lack::Locks,
        EBADF => lack == Lack::FolderSync,
        _ => false,
    }
}
