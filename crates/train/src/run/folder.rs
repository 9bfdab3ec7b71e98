//! Where a run writes, and who may: the folder that the job names, or the first free one under `runs`; and the folder of
//! a run that goes on. The lock comes before anything that is there is touched.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::frozen::FROZEN_FILE;
use crate::checkpoint::{self, CheckpointError, GivenPath, Loaded, Lock, Manifest, Store};
use crate::error::TrainError;
use crate::job::Job;
use crate::record;

/// The most runs of one name.
const RUNS_MAX: usize = 10_000;
/// The resolved job, in a run's folder: written first, so that a run which was killed at any time can go on.
pub(super) const JOB_FILE: &str = "job.toml";
/// The model that a run ends with, in its folder.
const MODEL_FILE: &str = "model.safetensors";

/// A run's folder that is this process's to write. If it is dropped before the run began, a folder that was made for it
/// goes again.
pub struct Hold {
    /// Until the run begins.
    lock: Option<Lock>,
    begin: Begin,
}

/// What a folder holds when its run begins.
enum Begin {
    /// Nothing.
    New,
    /// A run that is to be replaced.
    Replace,
    /// The run itself, which goes on; with the steps whose checkpoints are damaged.
    GoOn { damaged: Vec<u64> },
}

impl Hold {
    /// Chooses and takes the folder of a new run of `job`. One that the job names must not hold a run already, unless
    /// that is to be replaced, and never one that is being trained. Without a name it is a new folder, also if several
    /// runs of a job start together.
    pub fn new(job: &Job, replace: bool) -> Result<Hold, TrainError> {
        let Some(path) = &job.output.path else { return Hold::numbered(job) };
        let taken = || TrainError::Taken { path: path.clone() };
        // Before anything is written, and again when nobody else can change it.
        if !replace && holds_run(path)? {
            return Err(taken());
        }
        let lock = Lock::take(path)?;
        let begin = match replace {
            true => Begin::Replace,
            false if holds_run(path)? => return Err(taken()),
            false => Begin::New,
        };
        Ok(Hold { lock: Some(lock), begin })
    }

    /// The first folder under `runs` that is not there: who makes it has it.
    fn numbered(job: &Job) -> Result<Hold, TrainError> {
        for k in 1..RUNS_MAX {
            if let Some(lock) = Lock::take_new(&numbered(job, k))? {
                return Ok(Hold { lock: Some(lock), begin: Begin::New });
            }
        }
        Err(TrainError::Taken { path: numbered(job, 1) })
    }

    /// The run's folder.
    pub fn folder(&self) -> &Path {
        self.lock.as_ref().map_or(Path::new(""), Lock::run)
    }

    /// Begins: opens the folder's checkpoints, at a step of the run. Gives whether the run goes on, and what is to be said about it.
    pub(super) fn begin(
        mut self,
        keep: usize,
        best: Option<String>,
        at_step: u64,
    ) -> Result<(Store, bool, Vec<String>), TrainError> {
        let lock = self.lock.take().expect("a hold begins once");
        let (goes_on, damaged) = match &self.begin {
            Begin::New => (false, &[][..]),
            Begin::Replace => {
                remove_run(&lock)?;
                (false, &[][..])
            }
            Begin::GoOn { damaged } => (true, &damaged[..]),
        };
        let mut store = Store::open_held(lock, keep, best)?;
        let mut notes = Vec::new();
        if goes_on {
            for (step, path) in store.go_back(at_step, damaged)? {
                let until = match damaged.contains(&step) {
                    true => "it goes when a newer one is whole",
                    false => "remove it when it is no longer needed",
                };
                notes.push(format!("the later checkpoint of step {step} is now {}; {until}", path.display()));
            }
        }
        Ok((store, goes_on, notes))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(lock) = self.lock.take() {
            lock.give_up();
        }
    }
}

/// A run that is to go on, as far as it was looked at without its lock.
#[derive(Debug)]
pub struct FoundRun {
    /// The run's folder.
    pub folder: PathBuf,
    /// The job, as TOML.
    pub job: String,
    /// The checkpoint that was named; `None` for the newest whole one.
    step: Option<u64>,
}

impl FoundRun {
    /// What `path` names: a run's folder, one of its checkpoints, or its `best`.
    pub fn at(path: &Path) -> Result<FoundRun, TrainError> {
        let place = match checkpoint::resolve(path) {
            Err(CheckpointError::Missing { .. }) if path.join(JOB_FILE).is_file() => {
                GivenPath::Run(path.into())
            }
            place => place?,
        };
        match place {
            GivenPath::Checkpoint(at) => {
                let (folder, step) = checkpoint::run_of(&at)?;
                Ok(FoundRun { job: Manifest::read(&at)?.job, folder, step: Some(step) })
            }
            GivenPath::Run(folder) => Ok(FoundRun { job: job_of(&folder)?, folder, step: None }),
            GivenPath::Weights(path) => Err(TrainError::WeightsOnly { path }),
        }
    }

    /// Takes the lock, and then reads where the run goes on: `None` if it was stopped before its first checkpoint, and
    /// starts from step 0. Damaged checkpoints are passed over, and told to `note`.
    pub fn hold(&self, note: &mut dyn FnMut(&str)) -> Result<(Hold, Option<Loaded>), TrainError> {
        let lock = Lock::take(&self.folder)?;
        let (loaded, skipped) = match self.step {
            Some(step) => (Some(checkpoint::load_step(&self.folder, step)?), Vec::new()),
            None if lock.has_checkpoints()? => {
                let (loaded, skipped) = checkpoint::latest_whole(&self.folder)?;
                (Some(loaded), skipped)
            }
            None => {
                note(&format!(
                    "{}: no checkpoint was written yet; training starts at step 0",
                    self.folder.display()
                ));
                (None, Vec::new())
            }
        };
        for skipped in &skipped {
            note(&format!("{} is passed over: {}", skipped.path.display(), skipped.why));
        }
        let damaged = skipped.iter().map(|skipped| skipped.step).collect();
        Ok((Hold { lock: Some(lock), begin: Begin::GoOn { damaged } }, loaded))
    }
}

/// The folder that a new run of `job` would have now. Nothing is made.
pub fn likely_folder(job: &Job) -> PathBuf {
    let free = || (1..RUNS_MAX).map(|k| numbered(job, k)).find(|path| !path.exists());
    job.output.path.clone().or_else(free).unwrap_or_else(|| numbered(job, 1))
}

/// The hold of a run in `folder` whose caller brings the checkpoint, if it has one.
pub(super) fn hold_given(folder: &Path, resumed: bool) -> Result<Hold, TrainError> {
    let begin = if resumed { Begin::GoOn { damaged: Vec::new() } } else { Begin::New };
    Ok(Hold { lock: Some(Lock::take(folder)?), begin })
}

fn numbered(job: &Job, k: usize) -> PathBuf {
    match k {
        1 => Path::new("runs").join(&job.name),
        k => Path::new("runs").join(format!("{}-{k}", job.name)),
    }
}

/// Whether a folder holds a run.
fn holds_run(path: &Path) -> Result<bool, TrainError> {
    Ok(path.join(JOB_FILE).exists() || !checkpoint::list(path)?.is_empty())
}

/// The job that a run's newest readable checkpoint has, or else its folder.
fn job_of(folder: &Path) -> Result<String, TrainError> {
    if let Some(manifest) = checkpoint::list(folder)?.into_iter().rev().find_map(|entry| entry.manifest.ok())
    {
        return Ok(manifest.job);
    }
    let path = folder.join(JOB_FILE);
    fs::read_to_string(&path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => {
            CheckpointError::missing(&path, "there is no run in this folder; train it first").into()
        }
        _ => TrainError::io(path, e),
    })
}

/// Takes away what a run left in its folder, and nothing else. The lock stays, and the job goes last.
fn remove_run(lock: &Lock) -> Result<(), TrainError> {
    let (folder, disk) = (lock.run(), lock.disk());
    lock.remove_checkpoints()?;
    let reading = |e| TrainError::io(folder, e);
    for entry in fs::read_dir(folder).map_err(reading)? {
        let entry = entry.map_err(reading)?;
        if entry.file_name().to_str().is_some_and(record::is_event_file) {
            disk.remove(&entry.path())?;
        }
    }
    for file in [record::METRICS, record::REPORT, MODEL_FILE, FROZEN_FILE, JOB_FILE] {
        disk.remove(&folder.join(file))?;
    }
    Ok(())
}
