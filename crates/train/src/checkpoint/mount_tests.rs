//! Disks that are full or cannot be written: small file systems in memory, where the machine lets us mount them.

use std::path::Path;
use std::process::Command;

use polyreme_dtype::DType;

use super::tests::{shard, snapshot};
use super::*;
use crate::weights::{View, write_weights};

/// A file system in memory, unmounted when it goes.
struct Mount(tempfile::TempDir);

impl Mount {
    /// `None` where this is not allowed, which is said on stderr; in CI, whose machine must allow it, the test fails.
    fn new(size: &str) -> Option<Mount> {
        let at = tempfile::tempdir().unwrap();
        let mounted = mount(&["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"], at.path());
        if !mounted {
            let must = std::env::var_os("CI").is_some();
            assert!(!must, "this test must run in CI: only root can mount a file system");
            eprintln!("skipped: no file system can be mounted here (only root can)");
        }
        mounted.then_some(Mount(at))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

fn mount(args: &[&str], at: &Path) -> bool {
    Command::new("mount").args(args).arg(at).output().is_ok_and(|out| out.status.success())
}

#[test]
fn a_full_disk_leaves_the_previous_checkpoint() {
    let Some(disk) = Mount::new("1m") else { return };
    let run = disk.path().join("run");
    let mut store = Store::open(&run, 3, None).unwrap();
    store.save(snapshot(1, &[])).unwrap();
    store.finish().unwrap();
    let large = |step| {
        let shards = vec![shard(MODEL_FILE, &[&[500_000]], |i| i as f32)];
        Snapshot { shards, ..snapshot(step, &[]) }
    };
    store.save(large(2)).unwrap();
    // The error comes with the next save, which is handed over all the same, and fits.
    let error = store.save(snapshot(3, &[])).unwrap_err();
    let CheckpointError::DiskFull { needed, free, previous, .. } = &error else { panic!("{error}") };
    assert!(*needed > 2_000_000 && *free > 900_000 && *free < 1 << 20, "{needed} {free}");
    let whole = run.join("checkpoints/step-00000001");
    assert_eq!(previous.as_deref(), Some(whole.as_path()));
    let text = error.to_string();
    assert!(text.contains("the disk is full: 2.0 MB are needed and only "), "{text}");
    assert!(text.ends_with(&format!("; {} is still whole", whole.display())), "{text}");
    store.finish().unwrap();
    let steps: Vec<u64> =
        list(&run).unwrap().iter().map(|entry| load(&entry.path).unwrap().manifest.step).collect();
    assert_eq!(steps, [1, 3]);
    // Nothing of the failed one takes up room.
    assert!(
        !std::fs::read_dir(run.join("checkpoints"))
            .unwrap()
            .any(|entry| { entry.unwrap().file_name().into_string().unwrap().starts_with(".writing") })
    );

    let path = disk.path().join("model.safetensors");
    let small = View { name: "x", dims: &[1], dtype: DType::F32, data: &[1.0] };
    write_weights(&path, &[small], None).unwrap();
    let numbers = vec![0.0; 500_000];
    let error = write_weights(
        &path,
        &[View { name: "x", dims: &[500_000], dtype: DType::F32, data: &numbers }],
        None,
    )
    .unwrap_err();
    assert!(matches!(error, CheckpointError::DiskFull { needed: 2_000_000.., .. }), "{error}");
    assert_eq!(crate::weights::read_weights(&path).unwrap()[0].data, [1.0]);
}

#[test]
fn a_disk_that_became_read_only_is_an_error_and_can_be_read() {
    let Some(disk) = Mount::new("1m") else { return };
    let run = disk.path().join("run");
    let mut store = Store::open(&run, 3, None).unwrap();
    store.save(snapshot(1, &[])).unwrap();
    store.finish().unwrap();
    drop(store);
    assert!(mount(&["-o", "remount,ro"], disk.path()));
    let error = Store::open(&run, 3, None).err().unwrap();
    assert!(matches!(error, CheckpointError::Unwritable { .. }), "{error}");
    assert_eq!(latest_whole(&run).unwrap().0.manifest.step, 1);
    assert!(mount(&["-o", "remount,rw"], disk.path()));
    assert!(Store::open(&run, 3, None).is_ok());
}

#[test]
fn a_run_below_a_file_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = Store::open(&file.join("run"), 3, None).err().unwrap();
    assert!(matches!(error, CheckpointError::Unwritable { .. }), "{error}");
    assert!(error.to_string().contains("choose another one with `output.path`"), "{error}");
    let small = View { name: "x", dims: &[1], dtype: DType::F32, data: &[1.0] };
    let error = write_weights(&file.join("x.safetensors"), &[small], None).unwrap_err();
    assert!(matches!(error, CheckpointError::Unwritable { .. }), "{error}");
}
