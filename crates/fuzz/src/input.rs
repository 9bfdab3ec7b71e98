//! What checks need around an input: a file that holds it, and a letter for a size.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::watch;

/// A file for readers that take a path. It is deleted when this is dropped.
#[derive(Debug)]
pub struct InFile(PathBuf);

impl InFile {
    /// A path that ends in `name`; the file does not exist yet.
    pub fn new(name: &str) -> InFile {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        InFile(watch::place(&format!("{}-{number}", std::process::id()), name))
    }

    /// The file with this content.
    pub fn with(&self, content: &[u8]) -> &Path {
        fs::write(&self.0, content).unwrap_or_else(|e| panic!("{}: {e}", self.0.display()));
        &self.0
    }
}

impl Drop for InFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// How large a number is, as a letter: numbers do not tell kinds of answers from each other, and this does.
pub fn scale(n: usize) -> char {
    let digits = usize::BITS - n.leading_zeros();
    char::from(b'a' + (digits / 2).min(25) as u8)
}
