//! Every example runs to its end.

use std::path::PathBuf;
use std::process::Command;

/// Examples are built beside the tests.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().parent().unwrap().join("examples").join(name)
}

#[track_caller]
fn check(name: &str, args: &[&str], expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    let out = Command::new(example(name)).args(args).current_dir(folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
    assert!(text.contains(expected), "{name}: {expected} is not in\n{text}");
}

#[test]
fn a_step() {
    check("1_a_step", &["mlp"], "step 20: loss");
}

#[test]
fn a_job() {
    check("2_a_job", &[], "test accuracy");
}

#[test]
fn own_network() {
    check("3_own_network", &[], "test accuracy");
}

#[test]
fn own_data() {
    check("4_own_data", &[], "test accuracy");
}

#[test]
fn own_loop() {
    check("5_own_loop", &[], "step 60: loss");
}

#[test]
fn command_line() {
    check("6_command_line", &["train", "--set", "train.epochs=2"], "model");
    check("6_command_line", &["--help"], "blobs");
}
