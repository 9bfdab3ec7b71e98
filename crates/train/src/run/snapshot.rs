//! Between a run and its checkpoints: what is learnt, what the optimizer remembers, and how far the run has come.
//!
//! Rank 0 reads and writes. A checkpoint knows nothing of ranks: moments are gathered and scattered on the way.

use std::path::Path;
use std::sync::Arc;

use polyreme_exec::{Engine, Kept, Slot, floats, make_room};
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

impl Progress {
    /// What a checkpoint says.
    pub fn of(loaded: &Loaded) -> Result<Progress, TrainError> {
        Progress::deserialize(&loaded.manifest.progress)
            .map_err(|e| TrainError::Progress(format!("{}: {e}", loaded.path.display())))
    }
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

    /// A copy of everything, in recycled buffers as far as there are any. Collective: rank 0 calls this, the others
    /// [`hand_over`].
    pub(crate) fn snapshot(
        &self,
        team: &mut Team,
        epoch: u64,
        progress: &Progress,
        job: &str,
        mut buffers: Vec<Vec<f32>>,
    ) -> Result<Snapshot, TrainError> {
        // The largest first: the model's shard is the longest.
        buffers.sort_by_key(|b| std::cmp::Reverse(b.capacity()));
        let mut buffers = buffers.into_iter();
        let mut next = |len: usize| {
            let mut buffer = buffers.next().unwrap_or_default();
            buffer.clear();
            make_room(&mut buffer, len, "the copy that a checkpoint is written from").map(|()| buffer)
        };
        team.learner_mut().average_states()?;
        let params = team.learner().kept(Kept::Params);
        let n_params = params.len();
        let states = team.learner().kept(Kept::States);
        let mut model = Shard::copy(MODEL_FILE, self.model.clone(), params, next(n_params + states.len())?);
        model.data.extend_from_slice(states);
        let mut shards = vec![model];
        for (file, what) in moment_files(team) {
            let mut shard = Shard::copy(file, self.params.clone(), &[], next(n_params)?);
            shard.data.resize(n_params, 0.0);
            team.learner_mut().gather_moments(what, Some(&mut shard.data))?;
            shards.push(shard);
        }
        if !team.average().is_empty() {
            shards.push(Shard::copy(AVERAGE_FILE, self.params.clone(), team.average(), next(n_params)?));
        }
        let metrics = progress.metrics.clone();
        let progress = serde_json::to_value(progress).map_err(|e| TrainError::Progress(e.to_string()))?;
        Ok(Snapshot { step: team.steps_done(), epoch, shards, progress, metrics, job: job.to_string() })
    }
}

/// What other ranks than 0 do for a checkpoint. Collective, with [`Tables::snapshot`].
pub(crate) fn hand_over(team: &mut Team) -> Result<(), TrainError> {
    team.learner_mut().average_states()?;
    for (_, what) in moment_files(team) {
        team.learner_mut().gather_moments(what, None)?;
    }
    Ok(())
}

/// Brings all ranks to where the checkpoint was, which rank 0 has. Collective.
pub(crate) fn restore(team: &mut Team, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    restore_weights(team, loaded)?;
    let (params, len) = (team.learner().param_slots(), team.learner().kept(Kept::Params).len());
    for (file, what) in moment_files(team) {
        let moments = match loaded {
            None => None,
            Some(loaded) => {
                let mut moments = floats(len, "the optimizer's state")?;
                install_arena(&mut moments, &params, loaded.shard(file), &loaded.path.join(file))?;
                Some(moments)
            }
        };
        team.learner_mut().scatter_moments(what, moments.as_deref())?;
    }
    Ok(())
}

/// The same without what the optimizer remembers: to evaluate and to ship. Collective.
pub(crate) fn restore_weights(team: &mut Team, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    team.exclusively(|engine, average| {
        let loaded = loaded.expect("rank 0 has the checkpoint");
        install_average(engine, average, loaded)?;
        install(engine, loaded.shard(MODEL_FILE).unwrap_or(&[]), &loaded.path)?;
        engine.set_steps_done(loaded.manifest.step);
        Ok(())
    })
}

/// Weights to start from, which rank 0 reads. Collective.
pub(crate) fn start_from(team: &mut Team, path: &Path) -> Result<(), TrainError> {
    team.exclusively(|engine, average| {
        crate::install::install_file(engine, path)?;
        if !average.is_empty() {
            average.copy_from_slice(engine.kept(Kept::Params));
        }
        Ok(())
    })
}

fn install_average(engine: &Engine, average: &mut [f32], loaded: &Loaded) -> Result<(), TrainError> {
    if average.is_empty() {
        return Ok(());
    }
    let file = loaded.path.join(AVERAGE_FILE);
    install_arena(average, &engine.param_slots(), loaded.shard(AVERAGE_FILE), &file)
}

/// The files of the moments that the optimizer has; the same on all ranks, also on those with an empty part.
fn moment_files(team: &Team) -> impl Iterator<Item = (&'static str, Kept)> + use<> {
    MOMENT_FILES.into_iter().take(team.n_moments())
}
