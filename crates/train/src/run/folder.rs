//! Where a run writes: the folder that the job names, or the first free one under `runs`.

use std::path::{Path, PathBuf};

use crate::error::TrainError;
use crate::job::Job;

/// The most runs of one name.
const RUNS_MAX: usize = 10_000;

/// The folder of a new run of `job`, not made yet. One that the job names must not hold a run already, unless that is
/// to be replaced.
pub fn choose(job: &Job, replace: bool) -> Result<PathBuf, TrainError> {
    if let Some(path) = &job.output.path {
        if holds_run(path) && !replace {
            return Err(TrainError::Taken { path: path.clone() });
        }
        return Ok(path.clone());
    }
    let numbered = |k: usize| match k {
        1 => Path::new("runs").join(&job.name),
        k => Path::new("runs").join(format!("{}-{k}", job.name)),
    };
    let free = (1..RUNS_MAX).map(numbered).find(|path| !path.exists());
    free.ok_or_else(|| TrainError::Taken { path: numbered(1) })
}

/// Whether a folder holds a run.
fn holds_run(path: &Path) -> bool {
    path.join("job.toml").exists() || path.join("checkpoints").exists()
}
