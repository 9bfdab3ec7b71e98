//! The files of a job that are not on this host.
//!
//! Tars and tables are read file by file, where the samples of a step lie. Other kinds are read as a whole: copies of all their files
//! are brought here before the set is opened, and stay until the run ends.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_data::remote::{Files, HeldEntry, Remote, RemoteEnv, is_url};
use polyreme_data::{DataError, Dataset};

use crate::fingerprint::ToldFile;
use crate::job::{CacheSpec, Job, OrderSpec, Source};

/// Samples of a block, and of a set without blocks, whose files are looked up.
const PROBES: usize = 64;
const PROBES_OF_ALL: usize = 1 << 20;

/// What was brought of a job's files.
pub(super) struct Brought {
    /// Where files are that are read one by one.
    pub(super) places: Files,
    /// The source with the copies in place of what they are of, if there are any.
    pub(super) source: Option<Source>,
    /// What keeps copies from being evicted.
    pub(super) held: Arc<[HeldEntry]>,
}

/// Brings the files of a job, as far as they are read as a whole.
pub(super) fn bring(job: &Job, env: &RemoteEnv) -> Result<Brought, DataError> {
    let mut source = job.data.source.clone();
    let mut places = Files::default();
    let mut held = Vec::new();
    if !all_paths(&mut source).iter().any(|(path, _)| is_url(path)) {
        return Ok(Brought { places, source: None, held: held.into() });
    }
    let remote = start(&job.data.cache, env)?;
    if !matches!(source, Source::Table { .. } | Source::Tar { .. }) {
        for (path, read) in all_paths(&mut source).into_iter().filter(|(path, _)| is_url(path)) {
            let (copy, hold) = remote.whole(path, matches!(read, ReadAs::Folder))?;
            *path = copy;
            held.push(hold);
        }
    }
    places = Files::with(remote);
    Ok(Brought { places, source: Some(source), held: held.into() })
}

/// What reads from stores, through the cache of a job.
pub(super) fn start(cache: &CacheSpec, env: &RemoteEnv) -> Result<Arc<Remote>, DataError> {
    let folder = cache.path.as_deref().unwrap_or(&env.cache);
    if folder.as_os_str().is_empty() {
        return Err(DataError::Setting {
            why: "no folder for copies of objects; write `data.cache.path`".into(),
        });
    }
    Remote::start(env, folder, (cache.max_gib * (1u64 << 30) as f64) as u64)
}

/// What a path stands for.
enum ReadAs {
    Folder,
    Files,
}

/// Where the samples of a source are.
fn all_paths(source: &mut Source) -> Vec<(&mut PathBuf, ReadAs)> {
    let file = |path| (path, ReadAs::Files);
    match source {
        Source::Idx { path, .. } | Source::Cifar { path, .. } => vec![(path, ReadAs::Folder)],
        Source::Images { path, table, .. } => {
            let tables = table.labels.iter_mut().chain(&mut table.test).map(file);
            std::iter::once((path, ReadAs::Folder)).chain(tables).collect()
        }
        Source::Table { path, test, .. } | Source::Tar { path, test, .. } => {
            path.iter_mut().chain(test).map(file).collect()
        }
        Source::Text { path, test, .. } | Source::Arrays { path, test, .. } => {
            std::iter::once(path).chain(test).map(file).collect()
        }
        Source::Synthetic { .. } | Source::Given => Vec::new(),
    }
}

/// What is known of files that are in stores; `None` if these are not.
pub(crate) fn told(places: &Files, paths: &[PathBuf]) -> Option<Vec<ToldFile>> {
    let of_one = |path: &PathBuf| {
        let (bytes, blake3) = places.far(path)?.remote.facts(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Some(ToldFile { name, bytes, blake3 })
    };
    paths.iter().map(of_one).collect()
}

/// The length of a file.
pub(super) fn bytes_of(places: &Files, path: &Path) -> Option<u64> {
    match places.far(path) {
        Some(far) => Some(far.remote.facts(path)?.0),
        None => Some(path.metadata().ok()?.len()),
    }
}

/// Fails if files that are read one by one would be fetched again and again, because those that are needed at one time are more than
/// the cache may have.
pub(super) fn check_order(job: &Job, train: &dyn Dataset) -> Result<(), DataError> {
    let n = train.len();
    if n == 0 || train.far(0).is_none() {
        return Ok(());
    }
    let block = match job.data.order {
        OrderSpec::Sample | OrderSpec::Parts => n,
        OrderSpec::Block(samples) => samples.min(n),
        OrderSpec::InOrder => 1,
    };
    for start in (0..n).step_by(block.max(1)) {
        let (end, mut files, mut bytes) = ((start + block).min(n), HashSet::new(), 0);
        let step = if block == n { n / PROBES_OF_ALL } else { block / PROBES };
        for idx in (start..end).step_by(step.max(1)) {
            let Some(file) = train.far(idx) else { continue };
            if files.insert(file.path) {
                bytes += file.remote.facts(file.path).map_or(0, |(bytes, _)| bytes);
            }
            let most = file.remote.bytes_max();
            if bytes > most {
                let (what, todo) = match job.data.order {
                    OrderSpec::Block(samples) => {
                        (format!("the files of a block of {samples} samples"), "or make `data.block` smaller")
                    }
                    _ => ("the files of the training set".into(), "or write order = \"block\" under [data]"),
                };
                let why = format!(
                    "{what} have {bytes} bytes or more, and the cache may have {most}: in this order they would be fetched again and \
                     again; raise `data.cache.max_gib`, {todo}"
                );
                return Err(DataError::Setting { why });
            }
        }
    }
    Ok(())
}
