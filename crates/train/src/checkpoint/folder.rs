//! The folder of checkpoints: which names mean what, what is there, which is best, and what may go.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{CheckpointError, Disk, Manifest};

/// Begins the name of what is being written.
pub(super) const WRITING: &str = ".writing-";
/// Begins the name of what is being deleted.
const OLD: &str = ".old-";
/// Ends the name of a checkpoint that replaces one of the same step.
const NEW: &str = ".new";
/// The link to the best checkpoint.
const BEST: &str = "best";

/// A checkpoint that stands under a real name.
#[derive(Debug)]
pub struct Entry {
    /// Steps done, by its name.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Whether `best` means this one.
    pub is_best: bool,
    /// What it holds, or why it cannot be used. Only [`super::load`] looks at the files themselves.
    pub manifest: Result<Manifest, CheckpointError>,
}

/// The checkpoints of a run, by growing step. A run without any gives none.
pub fn list(run: &Path) -> Result<Vec<Entry>, CheckpointError> {
    entries(&root(run))
}

/// Where a run's checkpoints are.
pub(super) fn root(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

/// The real name of a step.
pub(super) fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

pub(super) fn entries(root: &Path) -> Result<Vec<Entry>, CheckpointError> {
    let best = best_step(root);
    let entry = |(step, path): (u64, PathBuf)| {
        let mut manifest = Manifest::read(&path);
        if let Ok(Manifest { step: found, .. }) = manifest
            && found != step
        {
            let why = format!("it is of step {found}, and the folder's name says {step}");
            manifest =
                Err(CheckpointError::HalfWritten { path: path.join(super::manifest::MANIFEST_FILE), why });
        }
        Entry { step, is_best: best == Some(step), manifest, path }
    };
    Ok(steps(root)?.into_iter().map(entry).collect())
}

/// The folders that count: of a step that is just being replaced, the new one.
pub(super) fn steps(root: &Path) -> Result<BTreeMap<u64, PathBuf>, CheckpointError> {
    let mut found = BTreeMap::new();
    for name in names(root)? {
        if let Some((step, is_new)) = parse(&name)
            && (is_new || !found.contains_key(&step))
        {
            found.insert(step, root.join(&name));
        }
    }
    Ok(found)
}

/// The checkpoint that `best` means.
pub(super) fn best_path(root: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let Some(step) = best_step(root) else { return Ok(None) };
    Ok(steps(root)?.remove(&step))
}

fn best_step(root: &Path) -> Option<u64> {
    let best = root.join(BEST);
    match fs::read_link(&best) {
        Ok(target) => parse(target.to_str()?).map(|(step, _)| step),
        // A copy of a run may hold a folder where the link was.
        Err(_) => Manifest::read(&best).ok().map(|manifest| manifest.step),
    }
}

/// Removes what killed processes left, and finishes a replacement that was cut off. Only for who holds the lock.
pub(super) fn clean(disk: &Disk, root: &Path) -> Result<(), CheckpointError> {
    for name in names(root)? {
        if name.starts_with(WRITING) || name.starts_with(OLD) {
            disk.remove(&root.join(name))?;
        }
    }
    for name in names(root)? {
        if let Some((step, true)) = parse(&name) {
            take_place(disk, root, step)?;
        }
    }
    Ok(())
}

/// Gives a finished folder its real name, and brings that to the disk.
pub(super) fn place(
    disk: &Disk,
    root: &Path,
    finished: &Path,
    step: u64,
) -> Result<PathBuf, CheckpointError> {
    let plain = root.join(step_name(step));
    if !plain.exists() {
        disk.rename(finished, &plain)?;
        disk.sync_dir(root)?;
        return Ok(plain);
    }
    disk.rename(finished, &root.join(step_name(step) + NEW))?;
    disk.sync_dir(root)?;
    take_place(disk, root, step)?;
    Ok(plain)
}

/// Lets `step-N.new` take the place of `step-N`, which may be gone already.
fn take_place(disk: &Disk, root: &Path, step: u64) -> Result<(), CheckpointError> {
    let plain = root.join(step_name(step));
    let old = set_aside(disk, root, &plain)?;
    disk.rename(&root.join(step_name(step) + NEW), &plain)?;
    disk.sync_dir(root)?;
    old.map_or(Ok(()), |old| disk.remove(&old))
}

/// Takes a checkpoint's name away by one rename, then removes it.
pub(super) fn discard(disk: &Disk, root: &Path, path: &Path) -> Result<(), CheckpointError> {
    set_aside(disk, root, path)?.map_or(Ok(()), |old| disk.remove(&old))
}

fn set_aside(disk: &Disk, root: &Path, path: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let Some(name) = path.file_name().filter(|_| path.symlink_metadata().is_ok()) else { return Ok(None) };
    let old = root.join(format!("{OLD}{}", name.to_string_lossy()));
    // An earlier removal of the same name may have failed halfway.
    disk.remove(&old)?;
    disk.rename(path, &old)?;
    Ok(Some(old))
}

/// Lets `best` mean the best checkpoint that is there. Gives its step.
pub(super) fn elect(disk: &Disk, root: &Path, metric: Option<&str>) -> Result<Option<u64>, CheckpointError> {
    let link = root.join(BEST);
    let values = match metric {
        Some(metric) => entries(root)?
            .into_iter()
            .filter_map(|entry| Some((entry.step, entry.manifest.ok()?.metric(metric)?)))
            .collect(),
        None => Vec::new(),
    };
    let Some(best) = best_of(metric.unwrap_or(""), &values) else {
        disk.remove(&link)?;
        return Ok(None);
    };
    let target = step_name(best);
    if fs::read_link(&link).is_ok_and(|now| now == Path::new(&target)) {
        return Ok(Some(best));
    }
    if link.symlink_metadata().is_ok_and(|at| at.is_dir()) {
        discard(disk, root, &link)?;
    }
    let writing = root.join(format!("{WRITING}{BEST}"));
    disk.remove(&writing)?;
    disk.link(Path::new(&target), &writing)?;
    disk.rename(&writing, &link)?;
    disk.sync_dir(root)?;
    Ok(Some(best))
}

/// The step with the best value: the earliest of equals, never NaN.
fn best_of(metric: &str, values: &[(u64, f64)]) -> Option<u64> {
    let sign = if lower_is_better(metric) { -1.0 } else { 1.0 };
    let mut best: Option<(u64, f64)> = None;
    for &(step, value) in values {
        let value = sign * value;
        if !value.is_nan() && best.is_none_or(|(_, so_far)| value > so_far) {
            best = Some((step, value));
        }
    }
    best.map(|(step, _)| step)
}

/// Whether less of a metric is better: losses, errors and perplexity.
fn lower_is_better(metric: &str) -> bool {
    ["loss", "perplexity", "error"].iter().any(|word| metric.contains(word))
}

/// Deletes what is neither among the newest `keep` nor `best`. What cannot be read is neither counted nor deleted.
pub(super) fn prune(disk: &Disk, root: &Path, keep: usize, best: Option<u64>) -> Result<(), CheckpointError> {
    let whole: Vec<Entry> = entries(root)?.into_iter().filter(|entry| entry.manifest.is_ok()).collect();
    let n_old = whole.len().saturating_sub(keep.max(1));
    let old = whole.iter().take(n_old).filter(|entry| Some(entry.step) != best);
    old.into_iter().try_for_each(|entry| discard(disk, root, &entry.path))
}

/// The step of a real name, and whether it is one that replaces another.
fn parse(name: &str) -> Option<(u64, bool)> {
    let (plain, is_new) = name.strip_suffix(NEW).map_or((name, false), |plain| (plain, true));
    let step = plain.strip_prefix("step-")?.parse().ok()?;
    // One step has one name.
    (step_name(step) == plain).then_some((step, is_new))
}

/// The names in the folder; none if there is no folder.
fn names(root: &Path) -> Result<Vec<String>, CheckpointError> {
    let reading = |e| CheckpointError::reading(root, e);
    let dir = match fs::read_dir(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        dir => dir.map_err(reading)?,
    };
    let mut names = Vec::new();
    for entry in dir {
        // Names that are no text are not ours.
        names.extend(entry.map_err(reading)?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_the_first_of_the_best() {
        let check = |metric: &str, values: &[f64], want: Option<u64>| {
            let values: Vec<(u64, f64)> = (1..).zip(values.iter().copied()).collect();
            assert_eq!(best_of(metric, &values), want, "{metric} {values:?}");
        };
        check("val_accuracy", &[], None);
        check("val_accuracy", &[0.5, 0.9, 0.9, 0.1], Some(2));
        check("val_loss", &[0.5, 0.1, 0.1, 0.9], Some(2));
        check("val_perplexity", &[3.0, 2.0], Some(2));
        check("val_accuracy", &[f64::NAN, 0.1], Some(2));
        check("val_loss", &[f64::NAN], None);
        check("val_loss", &[f64::INFINITY, f64::NAN], Some(1));
    }

    #[test]
    fn one_step_has_one_name() {
        for (name, want) in [
            ("step-00000500", Some((500, false))),
            ("step-00000500.new", Some((500, true))),
            ("step-123456789", Some((123456789, false))),
            ("step-500", None),
            ("step-+0000500", None),
            ("step-", None),
            (".old-step-00000500", None),
            ("best", None),
        ] {
            assert_eq!(parse(name), want, "{name}");
        }
        let max = step_name(u64::MAX);
        assert_eq!(parse(&max), Some((u64::MAX, false)));
    }
}
