//! The folder of checkpoints: which names mean what, what is there, which is best, and what may go.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::disk::above;
use super::{CheckpointError, Disk, Manifest};

/// Begins the name of what is being written.
pub(super) const WRITING: &str = ".writing-";
/// Begins the name of what is being deleted.
const OLD: &str = ".old-";
/// Begins the name of a whole checkpoint that the run has gone back behind. It stays.
const ASIDE: &str = "aside-";
/// Begins the name of a damaged checkpoint. It stays until a newer one is whole.
const DAMAGED: &str = "damaged-";
/// Ends the name of a checkpoint that replaces one of the same step.
const NEW: &str = ".new";
/// The link to the best checkpoint.
const BEST: &str = "best";

/// A checkpoint that stands under a real name.
#[derive(Debug)]
pub struct CheckpointEntry {
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
pub fn list(run: &Path) -> Result<Vec<CheckpointEntry>, CheckpointError> {
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

pub(super) fn entries(root: &Path) -> Result<Vec<CheckpointEntry>, CheckpointError> {
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
        CheckpointEntry { step, is_best: best == Some(step), manifest, path }
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

/// The best checkpoint of a run, if there is one.
pub fn best(run: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let root = root(run);
    let copy = root.join(BEST);
    // A copy of a run may hold a folder where the link was, and the step itself no more.
    let copy = copy.join(super::manifest::MANIFEST_FILE).is_file().then_some(copy);
    Ok(best_path(&root)?.or(copy))
}

/// The checkpoint that `best` means.
pub(super) fn best_path(root: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let Some(step) = best_step(root) else { return Ok(None) };
    Ok(steps(root)?.remove(&step))
}

fn best_step(root: &Path) -> Option<u64> {
    let best = root.join(BEST);
    if let Ok(target) = fs::read_link(&best) {
        return parse(target.to_str()?).map(|(step, _)| step);
    }
    // Where there are no links it is a file; and a copy of a run may hold a folder where the link was.
    if best.is_file() {
        let mut name = String::new();
        File::open(&best).ok()?.take(64).read_to_string(&mut name).ok()?;
        return parse(name.trim()).map(|(step, _)| step);
    }
    Manifest::read(&best).ok().map(|manifest| manifest.step)
}

/// The run that a checkpoint's folder belongs to, and its step.
pub(super) fn run_of_step(path: &Path) -> Option<(PathBuf, u64)> {
    let (step, _) = parse(path.file_name()?.to_str()?)?;
    let root = path.parent().filter(|root| root.ends_with("checkpoints"))?;
    Some((above(root).to_path_buf(), step))
}

/// Removes what killed processes left, and finishes a replacement that was cut off. Only for who holds the lock.
pub(super) fn clean(disk: &Disk, root: &Path) -> Result<(), CheckpointError> {
    let mut left = names(root)?;
    left.retain(|name| name.starts_with(WRITING) || name.starts_with(OLD));
    if !left.is_empty() {
        // The disk may know an old name still.
        disk.sync_dir(root)?;
    }
    left.iter().try_for_each(|name| disk.remove(&root.join(name)))?;
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

/// Takes names away by renames, and removes what had them when the disk knows that.
fn discard<'a>(
    disk: &Disk,
    root: &Path,
    paths: impl IntoIterator<Item = &'a Path>,
) -> Result<(), CheckpointError> {
    let olds = paths.into_iter().map(|path| set_aside(disk, root, path)).collect::<Result<Vec<_>, _>>()?;
    let mut olds = olds.into_iter().flatten().peekable();
    if olds.peek().is_some() {
        disk.sync_dir(root)?;
    }
    olds.try_for_each(|old| disk.remove(&old))
}

/// Gives all later checkpoints than `step` other names, and says which: those of `damaged` steps go when a newer one is
/// whole, the others stay.
pub(super) fn go_back(
    disk: &Disk,
    root: &Path,
    step: u64,
    damaged: &[u64],
) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let mut moved = Vec::new();
    for (step, path) in steps(root)?.split_off(&step.saturating_add(1)).into_iter().rev() {
        let begin = if damaged.contains(&step) { DAMAGED } else { ASIDE };
        let numbered = |k: u64| match k {
            1 => root.join(format!("{begin}{}", step_name(step))),
            k => root.join(format!("{begin}{}-{k}", step_name(step))),
        };
        let to = (1..).map(numbered).find(|to| to.symlink_metadata().is_err());
        let to = to.expect("a folder has a last name");
        disk.rename(&path, &to)?;
        moved.push((step, to));
    }
    if !moved.is_empty() {
        disk.sync_dir(root)?;
    }
    Ok(moved)
}

/// Removes damaged checkpoints that were set aside, now that `step` is whole.
pub(super) fn forget_damaged(disk: &Disk, root: &Path, step: u64) -> Result<(), CheckpointError> {
    let is_older = |name: &String| {
        let digits = name.strip_prefix(DAMAGED).and_then(|name| name.strip_prefix("step-"));
        let damaged = digits.and_then(|digits| digits.split('-').next()?.parse::<u64>().ok());
        damaged.is_some_and(|damaged| damaged <= step)
    };
    let mut left = names(root)?.into_iter().filter(is_older);
    left.try_for_each(|name| disk.remove(&root.join(name)))
}

/// Removes every checkpoint, those that were set aside too.
pub(super) fn remove_all(disk: &Disk, root: &Path) -> Result<(), CheckpointError> {
    let all: Vec<PathBuf> = steps(root)?.into_values().chain([root.join(BEST)]).collect();
    discard(disk, root, all.iter().map(PathBuf::as_path))?;
    let is_aside = |name: &String| name.starts_with(ASIDE) || name.starts_with(DAMAGED);
    names(root)?.into_iter().filter(is_aside).try_for_each(|name| disk.remove(&root.join(name)))
}

fn set_aside(disk: &Disk, root: &Path, path: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let Some(name) = path.file_name().filter(|_| path.symlink_metadata().is_ok()) else { return Ok(None) };
    let old = root.join(format!("{OLD}{}", name.to_string_lossy()));
    // An earlier removal of the same name may have failed halfway.
    disk.remove(&old)?;
    disk.rename(path, &old)?;
    Ok(Some(old))
}

/// Lets `best` mean the best checkpoint that is there, up to the step `last`. Gives its step.
pub(super) fn elect(
    disk: &Disk,
    root: &Path,
    metric: Option<&str>,
    last: u64,
) -> Result<Option<u64>, CheckpointError> {
    let link = root.join(BEST);
    let values = match metric {
        Some(metric) => entries(root)?
            .into_iter()
            .filter(|entry| entry.step <= last)
            .filter_map(|entry| Some((entry.step, entry.manifest.ok()?.metric(metric)?)))
            .collect(),
        None => Vec::new(),
    };
    let Some(best) = best_of(metric.unwrap_or(""), &values) else {
        disk.remove(&link)?;
        return Ok(None);
    };
    let target = step_name(best);
    let is_copy = link.symlink_metadata().is_ok_and(|at| at.is_dir());
    if !is_copy && best_step(root) == Some(best) {
        return Ok(Some(best));
    }
    if is_copy {
        discard(disk, root, [link.as_path()])?;
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
    let whole: Vec<CheckpointEntry> =
        entries(root)?.into_iter().filter(|entry| entry.manifest.is_ok()).collect();
    let n_old = whole.len().saturating_sub(keep.max(1));
    let old = whole.iter().take(n_old).filter(|entry| Some(entry.step) != best);
    discard(disk, root, old.map(|entry| entry.path.as_path()))
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
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
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
