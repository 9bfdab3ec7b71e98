//! Between a run and its checkpoints: what is learnt, what the optimizer remembers, and how far the run has come.

use std::sync::Arc;

use polyreme_exec::{Kept, Slot};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Loaded, MODEL_FILE, Shard, Snapshot, TensorAt};
use crate::error::TrainError;
use crate::install::{install, install_arena};
use crate::metrics::{Best, Patience};
use crate::preparation::Preparation;
use crate::team::Team;

/// The averaged parameters' file.
pub const AVERAGE_FILE: &str = "average.safetensors";
const MOMENT_FILES: [(&str, Kept); 2] =
    [("moment1.safetensors", Kept::Moment1), ("moment2.safetensors", Kept::Moment2)];

/// What a run must remember beside tensors.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// Seconds of training and evaluation.
    pub seconds: f64,
    /// Seconds of evaluation among them.
    pub evaluating: f64,
    /// Samples that training has seen.
    pub samples: u64,
    /// The sum of the losses since the last line of metrics, and how many.
    pub window: (f64, u64),
    /// The sum of the losses of this epoch, and how many.
    pub epoch: (f64, u64),
    /// The mean loss of the last whole epoch.
    pub last_epoch_loss: Option<f64>,
    /// The best evaluation.
    pub best: Option<Best>,
    /// Early stopping.
    pub patience: Option<Patience>,
    /// The last value of each metric.
    pub metrics: Vec<(String, f64)>,
    /// How samples are prepared.
    pub preparation: Preparation,
}

/// What shards hold, made once.
pub(crate) struct Tables {
    model: Arc<[TensorAt]>,
    params: Arc<[TensorAt]>,
}

impl Tables {
    pub(crate) fn new(team: &Team) -> Tables {
        let at = |slot: Slot, first: usize| TensorAt {
            name: slot.name,
            dims: slot.dims,
            start: first + slot.range.start,
        };
        let learner = team.learner();
        let n_params = learner.kept(Kept::Params).len();
        let params: Vec<_> = learner.param_slots().into_iter().map(|s| at(s, 0)).collect();
        let states = learner.state_slots().into_iter().map(|s| at(s, n_params));
        Tables { model: params.iter().cloned().chain(states).collect(), params: params.into() }
    }

    /// A copy of everything, in recycled buffers as far as there are any.
    pub(crate) fn snapshot(
        &self,
        team: &Team,
        epoch: u64,
        progress: &Progress,
        job: &str,
        mut buffers: Vec<Vec<f32>>,
    ) -> Result<Snapshot, TrainError> {
        // The largest first: the model's shard is the longest.
        buffers.sort_by_key(|b| std::cmp::Reverse(b.capacity()));
        let mut buffers = buffers.into_iter();
        let learner = team.learner();
        let mut next = || buffers.next().unwrap_or_default();
        let mut model = Shard::copy(MODEL_FILE, self.model.clone(), learner.kept(Kept::Params), next());
        model.data.extend_from_slice(learner.kept(Kept::States));
        let mut shards = vec![model];
        for (file, what) in MOMENT_FILES {
            if !learner.kept(what).is_empty() {
                shards.push(Shard::copy(file, self.params.clone(), learner.kept(what), next()));
            }
        }
        if !team.average().is_empty() {
            shards.push(Shard::copy(AVERAGE_FILE, self.params.clone(), team.average(), next()));
        }
        let metrics = progress.metrics.clone();
        let progress = serde_json::to_value(progress).map_err(|e| TrainError::Progress(e.to_string()))?;
        Ok(Snapshot { step: team.steps_done(), epoch, shards, progress, metrics, job: job.to_string() })
    }
}

/// Brings `team` to where the checkpoint was, and says how far the run had come.
pub fn restore(team: &mut Team, loaded: &Loaded) -> Result<Progress, TrainError> {
    let progress = Progress::deserialize(&loaded.manifest.progress)
        .map_err(|e| TrainError::Progress(format!("{}: {e}", loaded.path.display())))?;
    let params = team.learner().param_slots();
    let learner = team.learner_mut();
    install(learner, loaded.shard(MODEL_FILE).unwrap_or(&[]), &loaded.path)?;
    for (file, what) in MOMENT_FILES {
        if !learner.kept(what).is_empty() {
            install_arena(learner.kept_mut(what), &params, loaded.shard(file), &loaded.path.join(file))?;
        }
    }
    if !team.average().is_empty() {
        let file = loaded.path.join(AVERAGE_FILE);
        install_arena(team.average_mut(), &params, loaded.shard(AVERAGE_FILE), &file)?;
    }
    team.set_steps_done(loaded.manifest.step);
    Ok(progress)
}
