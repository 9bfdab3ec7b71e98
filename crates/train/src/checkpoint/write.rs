//! Writing one checkpoint: aside, to the disk, and then under its name.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::blocks::{BLOCK_BYTES, BlockBuffer, BlockFile};
use super::folder::{self, WRITING};
use super::manifest::{MANIFEST_FILE, is_plain};
use super::tensors::Layout;
use super::{
    CheckpointError, Disk, FORMAT, FileEntry, MODEL_FILE, Manifest, Shard, Snapshot, TensorAt, model_id,
};

/// A checkpoint that was written.
#[derive(Clone, PartialEq, Debug)]
pub struct Written {
    /// Its step.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
    /// Seconds from the snapshot's arrival to its name being on the disk.
    pub seconds: f64,
    /// Whether it is now the best.
    pub is_best: bool,
}

/// Which checkpoints stay.
#[derive(Clone, Debug)]
pub(super) struct Keep {
    /// So many of the newest.
    pub(super) newest: usize,
    /// And the one that is best by this metric.
    pub(super) best: Option<String>,
}

/// Writes `snapshot` into `root`, then deletes what need not stay. If it fails before the checkpoint has its name,
/// nothing of it is left; if it fails later, it is whole.
pub(super) fn write(
    disk: &Disk,
    root: &Path,
    keep: &Keep,
    snapshot: &Snapshot,
) -> Result<Written, CheckpointError> {
    let started = Instant::now();
    let step = snapshot.step;
    // Rests of a write that failed and could not be removed then. In a folder in order this only reads names.
    folder::clean(disk, root)?;
    let aside = root.join(format!("{WRITING}{}-{}", folder::step_name(step), std::process::id()));
    let (path, bytes) = match write_aside(disk, root, &aside, snapshot)
        .and_then(|bytes| Ok((folder::place(disk, root, &aside, step)?, bytes)))
    {
        Ok(done) => done,
        Err(error) => {
            // If this fails as well, the next write or the next run removes it.
            let _ = disk.remove(&aside);
            return Err(error);
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    let best = folder::elect(disk, root, keep.best.as_deref(), u64::MAX)?;
    folder::prune(disk, root, keep.newest, best)?;
    folder::forget_damaged(disk, root, step)?;
    Ok(Written { step, path, bytes, seconds, is_best: best == Some(step) })
}

/// Writes everything into the folder `aside` and brings it to the disk. Gives the bytes written.
fn write_aside(disk: &Disk, root: &Path, aside: &Path, snapshot: &Snapshot) -> Result<u64, CheckpointError> {
    snapshot.shards.iter().try_for_each(check)?;
    let layout = |shard: &Shard| {
        let tensors = shard.tensors.iter().map(|at| (at.name.as_str(), at.dims.as_slice(), shard.dtype));
        Layout::new(tensors, Some(snapshot.batches), &[], &shard.file)
    };
    let layouts = snapshot.shards.iter().map(layout).collect::<Result<Vec<_>, _>>()?;
    let mut manifest = manifest_of(snapshot, &layouts)?;
    // Checksums that are not known yet have their final length already.
    let needed = manifest.n_bytes() + manifest.render()?.len() as u64;
    disk.start_count();
    let written = || -> Result<(), CheckpointError> {
        disk.create_dir(aside)?;
        write_files(disk, aside, snapshot, &layouts, &mut manifest)?;
        disk.write_small(&aside.join(MANIFEST_FILE), manifest.render()?.as_bytes())?;
        disk.sync_dir(aside)
    }();
    match written {
        Ok(()) => Ok(needed),
        Err(error @ CheckpointError::DiskFull { .. }) => {
            let whole = folder::entries(root)?.into_iter().rfind(|entry| entry.manifest.is_ok());
            Err(error.with_room(needed, disk.counted(), whole.map(|entry| entry.path)))
        }
        Err(error) => Err(error),
    }
}

/// The manifest, with checksums of zeros.
fn manifest_of(snapshot: &Snapshot, layouts: &[Layout]) -> Result<Manifest, CheckpointError> {
    let wrong = |file: &str, why: &str| CheckpointError::Snapshot { file: file.into(), why: why.into() };
    let mut files: Vec<FileEntry> = Vec::with_capacity(layouts.len());
    for (Shard { file: name, .. }, layout) in snapshot.shards.iter().zip(layouts) {
        if !is_plain(name) || files.iter().any(|file| file.name == *name) {
            return Err(wrong(name, "no name for a shard, or the name of two"));
        }
        let (bytes, tensors) = (layout.n_bytes(), layout.n_tensors());
        files.push(FileEntry { name: name.clone(), bytes, tensors, blake3: "0".repeat(64) });
    }
    let Some(model) = snapshot.shards.iter().find(|shard| shard.file == MODEL_FILE) else {
        return Err(wrong(MODEL_FILE, "the snapshot has no such shard"));
    };
    Ok(Manifest {
        format: FORMAT,
        step: snapshot.step,
        epoch: snapshot.epoch,
        model_id: model_id(model.tensors.iter().map(|t| (t.name.as_str(), t.dims.as_slice()))),
        files,
        metrics: snapshot.metrics.clone(),
        progress: snapshot.progress.clone(),
        job: snapshot.job.clone(),
    })
}

/// Writes the files of tensors, what training overwrites first before the rest, and notes their checksums.
fn write_files(
    disk: &Disk,
    aside: &Path,
    snapshot: &Snapshot,
    layouts: &[Layout],
    manifest: &mut Manifest,
) -> Result<(), CheckpointError> {
    let paths: Vec<PathBuf> = manifest.files.iter().map(|file| aside.join(&file.name)).collect();
    let mut files = Vec::with_capacity(paths.len());
    for (path, layout) in paths.iter().zip(layouts) {
        files.push(BlockFile::create(disk, path, layout.n_bytes())?);
    }
    let mut blocks: Vec<(usize, usize, usize)> = Vec::new();
    for (number, (shard, layout)) in snapshot.shards.iter().zip(layouts).enumerate() {
        let urgent = |block: usize| {
            let start = (block * BLOCK_BYTES) as u64;
            let numbers = layout.numbers_in(start..start + BLOCK_BYTES as u64);
            numbers.map(|(tensor, range)| shard.turn(tensor, range.start)).min().unwrap_or(0)
        };
        blocks.extend((0..files[number].n_blocks()).map(|block| (urgent(block), number, block)));
    }
    blocks.sort_unstable();
    let mut buffer = BlockBuffer::new();
    for (_, number, block) in blocks {
        let (shard, layout) = (&snapshot.shards[number], &layouts[number]);
        files[number].put(block, &mut buffer, |start, bytes| layout.fill(shard, start, bytes))?;
    }
    for (entry, file) in manifest.files.iter_mut().zip(files) {
        entry.blake3 = file.finish()?.to_hex().to_string();
    }
    Ok(())
}

/// Whether the tensors of a shard lie in its numbers.
fn check(shard: &Shard) -> Result<(), CheckpointError> {
    let lies_within = |at: &TensorAt| {
        let n = at.dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
        if shard.asked.is_some() {
            return n.is_some();
        }
        n.and_then(|n| at.start.checked_add(n)).is_some_and(|end| end <= shard.len())
    };
    match shard.tensors.iter().find(|at| !lies_within(at)) {
        None => Ok(()),
        Some(TensorAt { name, dims, start }) => Err(CheckpointError::Snapshot {
            file: shard.file.clone(),
            why: format!("tensor {name} {dims:?} from {start} on does not lie in {} numbers", shard.len()),
        }),
    }
}
