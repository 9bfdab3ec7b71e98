//! Calls of the binary in a temporary folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polyreme"));
    command.current_dir(folder).args(args);
    command
}

pub(crate) fn polyreme(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().unwrap()
}

/// Runs a command that succeeds; its JSON lines.
#[track_caller]
pub(crate) fn json(folder: &Path, args: &[&str]) -> Vec<Value> {
    let out = polyreme(folder, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// A folder with the job in it.
pub(crate) fn folder(job: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("job.toml"), job).unwrap();
    folder
}

/// A test that this machine cannot run says so and passes; in CI, whose machine must have everything, it fails.
#[track_caller]
pub(crate) fn cannot_run(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "this test must run in CI: {why}");
    eprintln!("skipped: {why}");
}
