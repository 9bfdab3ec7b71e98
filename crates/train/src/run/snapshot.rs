//! Between a run and its checkpoints: what is learnt, what the optimizer remembers, and how far the run has come.
//!
//! Rank 0 reads and writes; `apart` has what is different where several ranks have the model together. A checkpoint knows nothing of ranks: moments are gathered and scattered on the way. But for
//! one file: where ranks have statistics of their own (batch norms without `sync_batch_norm`), it keeps those of each, so
//! that the same number of ranks goes on with the same bits; another number starts from their mean. Taking a checkpoint
//! changes nothing in the run.

use std::path::Path;
use std::sync::Arc;

use polyreme_dtype::DType;
use polyreme_exec::{Engine, Kept, Slot, floats, make_room};
use serde::{Deserialize, Serialize};

use super::degrees::Degrees;
use super::factors;
use super::frozen::restore_frozen;
use super::planned_step::PlannedStep;
use super::replicas;
use crate::checkpoint::{self, CheckpointError, FileEntry, Loaded, MODEL_FILE, Shard, Snapshot, TensorAt};
use crate::error::TrainError;
use crate::fingerprint::Fingerprint;
use crate::install::{install, install_file, install_kept, install_numbers};
use crate::learner::Learner;
use crate::ledger::SampleLedger;
use crate::loss_scale::LossScale;
use crate::metrics::{Best, Patience};
use crate::preparation::Preparation;
use crate::starting::StartingWeights;
use crate::whole::of_rank;

/// The averaged parameters' file.
pub const AVERAGE_FILE: &str = "average.safetensors";
/// The states of each rank, where they differ.
pub(super) const STATES_FILE: &str = "states.safetensors";
/// What codes have lost on each rank, where gradients travel coded; and where differences of weights do, of which it would be no help to a sum of gradients.
const RESIDUAL_FILES: [&str; 2] = ["residual.safetensors", "residual-of-weights.safetensors"];
pub(super) const MOMENT_FILES: [(&str, Kept); 2] =
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
    /// The last value of each metric, which may be NaN.
    #[serde(with = "checkpoint::numbers")]
    pub metrics: Vec<(String, f64)>,
    /// How samples are prepared.
    pub preparation: Preparation,
    /// What the data were; not known of runs of earlier versions.
    #[serde(default)]
    pub data: Option<Fingerprint>,
    /// Batches that the batch norms had seen in the file of weights that the run began with.
    #[serde(default)]
    pub batches_before: u64,
    /// The scale of the loss, in f16.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
    /// Which kernels sum products, on any rank: names of [`polyreme_exec::KernelClass`]. Not known of runs of earlier versions.
    #[serde(default)]
    pub kernels: Vec<String>,
    /// Over how many ranks the sums of a reproducible run are split; nothing in other runs, and in those of earlier versions.
    #[serde(default)]
    pub degrees: Option<Degrees>,
    /// Where the network is cut into stages, if that was chosen when the run began.
    #[serde(default)]
    pub cuts: Vec<String>,
    /// Which samples have counted; not known of runs of earlier versions.
    #[serde(default)]
    pub ledger: Option<SampleLedger>,
    /// What was predicted of the run, if a planner chose how it is split.
    #[serde(default)]
    pub planned: Option<PlannedStep>,
    /// The file with the frozen parameters of a run whose checkpoints do not have them.
    #[serde(default)]
    pub frozen: Option<FileEntry>,
    /// What rank 0's process has taken at most, in MiB, if the system says so.
    #[serde(default)]
    pub peak_mib: Option<f64>,
}

impl Progress {
    /// What a checkpoint says.
    pub fn of(loaded: &Loaded) -> Result<Progress, TrainError> {
        Progress::deserialize(&loaded.manifest.progress)
            .map_err(|e| TrainError::Progress(format!("{}: {e}", loaded.path.display())))
    }
}

/// What a checkpoint says beside its tensors.
pub(crate) struct Frame<'a> {
    /// Epochs done.
    pub(crate) epoch: u64,
    /// How far the run has come.
    pub(crate) progress: &'a Progress,
    /// The job, as TOML with everything resolved.
    pub(crate) job: &'a str,
}

impl Frame<'_> {
    /// The checkpoint of a step with these files.
    pub(super) fn snapshot(self, step: u64, shards: Vec<Shard>) -> Result<Snapshot, TrainError> {
        let Frame { epoch, progress, job } = self;
        let metrics = progress.metrics.clone();
        let batches = step.saturating_add(progress.batches_before);
        let progress = serde_json::to_value(progress).map_err(|e| TrainError::Progress(e.to_string()))?;
        Ok(Snapshot { step, epoch, shards, progress, metrics, job: job.to_string(), batches })
    }
}

/// What shards hold, made once.
pub(crate) struct Tables {
    model: Arc<[TensorAt]>,
    params: Arc<[TensorAt]>,
    /// In the order of [`MOMENT_FILES`].
    moments: [Arc<[TensorAt]>; 2],
    /// Of each rank, one after the other.
    states: Arc<[TensorAt]>,
    /// Of each rank, one after the other.
    residuals: Arc<[TensorAt]>,
}

impl Tables {
    pub(crate) fn new(learner: &Learner) -> Tables {
        let at = |slot: Slot, first: usize| TensorAt {
            name: slot.name,
            dims: slot.dims,
            start: first + slot.range.start,
        };
        let engine = learner.engine();
        let n_params = engine.kept(Kept::Params).len();
        let params: Vec<_> = engine.param_slots().into_iter().map(|s| at(s, 0)).collect();
        let saved = params.iter().filter(|at| !learner.whole().is_apart(&at.name)).cloned();
        let states = engine.state_slots().into_iter().map(|s| at(s, n_params));
        Tables {
            model: saved.chain(states).collect(),
            params: params.into(),
            moments: MOMENT_FILES.map(|(_, what)| table(engine.moment_slots(what))),
            states: table(states_of_ranks(engine)),
            residuals: table(residuals_of_ranks(engine)),
        }
    }

    /// Everything at this moment: parameters and moments of a lone rank are lent, the rest is copied, into recycled buffers as far
    /// as there are any. Collective: rank 0 calls this, the others
    /// [`hand_over`].
    pub(crate) fn snapshot(
        &self,
        learner: &mut Learner,
        frame: Frame,
        mut buffers: Vec<Vec<f32>>,
    ) -> Result<Snapshot, TrainError> {
        // The smallest that is large enough, so that no large one is kept for a few numbers.
        let mut next = |len: usize| {
            let fitting = (0..buffers.len()).filter(|at| buffers[*at].capacity() >= len);
            let smallest = fitting.min_by_key(|at| buffers[*at].capacity());
            let mut buffer = smallest.map_or_else(Vec::new, |at| buffers.swap_remove(at));
            buffer.clear();
            make_room(&mut buffer, len, "the copy that a checkpoint is written from").map(|()| buffer)
        };
        let own_params = replicas::gather_own(learner)?;
        let states = learner.engine_mut().gather_states()?;
        let loan = learner.engine_mut().lend().map(Arc::new);
        let lent = |what: Kept| loan.clone().map(|loan| (loan, what));
        let engine = learner.engine();
        let (params, own) = (engine.kept(Kept::Params), engine.kept(Kept::States));
        let copied = if loan.is_some() { &[] } else { params };
        let mut model = Shard::copy(MODEL_FILE, self.model.clone(), copied, next(copied.len() + own.len())?);
        model.lent = lent(Kept::Params);
        match &states {
            Some(all) => model.data.extend(mean(all, own.len())),
            None => model.data.extend_from_slice(own),
        }
        let mut shards = vec![model];
        if let Some(own) = own_params {
            learner.take_back_own()?;
            shards.push(replicas::own_shard(learner, own));
        }
        shards.extend(states.map(|data| Shard {
            file: STATES_FILE.into(),
            dtype: DType::F32,
            tensors: self.states.clone(),
            lent: None,
            asked: None,
            data,
        }));
        for ((file, what), tensors) in moment_files(learner).zip(&self.moments) {
            let len = if loan.is_some() { 0 } else { learner.engine().gathered_len(what) };
            let mut shard = Shard::copy(file, tensors.clone(), &[], next(len)?);
            shard.dtype = learner.engine().kept_dtype(what);
            match lent(what) {
                Some(lent) => shard.lent = Some(lent),
                None if learner.has_own_moments() => {
                    let all = replicas::gather_moments(learner, what)?;
                    shard.data.extend(mean(&all, len));
                    shards.push(replicas::moments_shard(learner, what, all));
                }
                None => {
                    shard.data.resize(len, 0.0);
                    learner.engine_mut().gather_moments(what, Some(&mut shard.data))?;
                }
            }
            shards.push(shard);
        }
        if !learner.average().is_empty() {
            let copied = if loan.is_some() { &[] } else { learner.average() };
            let mut shard = Shard::copy(AVERAGE_FILE, self.params.clone(), copied, next(copied.len())?);
            shard.lent = lent(Kept::Average);
            shards.push(shard);
        }
        shards.extend(replicas::velocity_shard(learner, &self.params));
        shards.extend(factors::shard(learner));
        if keeps_residual(learner) {
            let data = learner.engine_mut().gather_of_each(Kept::Residual)?;
            let (file, tensors) = (residual_file(learner).into(), self.residuals.clone());
            shards.push(Shard { file, dtype: DType::F32, tensors, lent: None, asked: None, data });
        }
        frame.snapshot(learner.steps_done(), shards)
    }
}

/// Slots as a file has them.
pub(super) fn table(slots: Vec<Slot>) -> Arc<[TensorAt]> {
    let at = |slot: Slot| TensorAt { name: slot.name, dims: slot.dims, start: slot.range.start };
    slots.into_iter().map(at).collect()
}

/// What other ranks than 0 do for a checkpoint. Collective, with [`Tables::snapshot`].
pub(crate) fn hand_over(learner: &mut Learner) -> Result<(), TrainError> {
    if replicas::gather_own(learner)?.is_some() {
        learner.take_back_own()?;
    }
    learner.engine_mut().gather_states()?;
    for (_, what) in moment_files(learner) {
        match learner.has_own_moments() {
            true => drop(replicas::gather_moments(learner, what)?),
            false => learner.engine_mut().gather_moments(what, None)?,
        }
    }
    if keeps_residual(learner) {
        learner.engine_mut().gather_of_each(Kept::Residual)?;
    }
    Ok(())
}

/// Brings all ranks to where the checkpoint was, which rank 0 has. Collective.
pub(crate) fn restore(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    restore_frozen(learner, loaded)?;
    restore_weights(learner, loaded)?;
    replicas::restore_own(learner, loaded)?;
    restore_states(learner, loaded)?;
    let needed = |file: &str| loaded.map(|loaded| loaded.needed(file)).transpose();
    for (k, (file, what)) in moment_files(learner).enumerate() {
        if replicas::restore_moments(learner, loaded, (k, what))? {
            continue;
        }
        let whole = learner.whole_moments(k);
        let engine = learner.engine_mut();
        let (slots, role) = (engine.moment_slots(what), engine.role());
        // Nothing is shared out over the data axis.
        if role.ranks == 1 || role.shards_weights() {
            install_kept(engine, what, &slots, &whole, needed(file)?)?;
            continue;
        }
        let mut moments = None;
        if engine.is_writer() {
            let mut numbers = floats(engine.gathered_len(what), "the optimizer's state")?;
            install_numbers(engine, &mut numbers, &slots, &whole, needed(file)?)?;
            moments = Some(numbers);
        }
        engine.scatter_moments(what, moments.as_deref())?;
    }
    replicas::restore_velocity(learner, loaded)?;
    factors::restore(learner, loaded)?;
    restore_residuals(learner, loaded)
}

/// Gives each rank what its codes had lost. Of another number of ranks each takes over what several had lost, or starts with
/// nothing: their sum is what has yet to arrive. Collective.
fn restore_residuals(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    if !keeps_residual(learner) {
        return Ok(());
    }
    let file = loaded.and_then(|loaded| loaded.file(residual_file(learner)));
    let n_params = learner.whole().params.len();
    let mut before = [file.map_or(0, |file| file.shapes.len() / n_params.max(1)) as i64];
    learner.comm().broadcast(&mut before, 0)?;
    let before = usize::try_from(before[0]).unwrap_or(0);
    if before == 0 {
        return Ok(());
    }
    let whole = learner.whole().residuals_of(before);
    let engine = learner.engine_mut();
    let mut residuals = None;
    if engine.is_writer() {
        let (len, ranks) = (engine.kept(Kept::Residual).len(), engine.role().ranks);
        let mut all = floats(len * before.max(ranks), "residuals of gradients")?;
        let slots = of_ranks(&engine.param_slots(), len, before);
        install_numbers(engine, &mut all, &slots, &whole, file)?;
        let (kept, more) = all.split_at_mut(len * ranks);
        for (k, one) in more.chunks_exact(len.max(1)).enumerate() {
            let to = &mut kept[k % ranks * len..][..len];
            to.iter_mut().zip(one).for_each(|(to, x)| *to += x);
        }
        all.truncate(len * ranks);
        residuals = Some(all);
    }
    Ok(engine.scatter_to_each(Kept::Residual, residuals.as_deref())?)
}

/// Where that is kept.
fn residual_file(learner: &Learner) -> &'static str {
    RESIDUAL_FILES[usize::from(learner.has_own_moments())]
}

/// Whether ranks keep what codes have lost; the same on all of them.
fn keeps_residual(learner: &Learner) -> bool {
    !learner.engine().kept(Kept::Residual).is_empty()
}

/// Gives each rank its own states, if the checkpoint is of as many ranks; otherwise all keep the mean. Collective.
fn restore_states(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    let whole = learner.whole().states_of(learner.engine().role().ranks);
    let file = loaded.and_then(|loaded| loaded.file(STATES_FILE));
    let file = file.filter(|file| file.shapes.len() == whole.len());
    let mut there = [i64::from(file.is_some())];
    learner.comm().broadcast(&mut there, 0)?;
    if there == [0] {
        return Ok(());
    }
    let engine = learner.engine_mut();
    let mut states = None;
    if engine.is_writer() {
        let slots = states_of_ranks(engine);
        let mut numbers = vec![0.0; engine.kept(Kept::States).len() * engine.role().ranks];
        install_numbers(engine, &mut numbers, &slots, &whole, file)?;
        states = Some(numbers);
    }
    Ok(engine.scatter_to_each(Kept::States, states.as_deref())?)
}

/// The states of all ranks, one after the other.
pub(super) fn states_of_ranks(engine: &Engine) -> Vec<Slot> {
    of_ranks(&engine.state_slots(), engine.kept(Kept::States).len(), engine.role().ranks)
}

/// The residuals of all ranks, one after the other; none if they keep none.
fn residuals_of_ranks(engine: &Engine) -> Vec<Slot> {
    match engine.kept(Kept::Residual).len() {
        0 => Vec::new(),
        len => of_ranks(&engine.param_slots(), len, engine.role().ranks),
    }
}

/// Slots of arenas of `len` elements that each of `ranks` ranks has, one after the other.
pub(super) fn of_ranks(slots: &[Slot], len: usize, ranks: usize) -> Vec<Slot> {
    let of = |rank: usize| {
        slots.iter().map(move |slot| Slot {
            name: of_rank(rank, &slot.name),
            dims: slot.dims.clone(),
            splits: slot.splits,
            range: rank * len + slot.range.start..rank * len + slot.range.end,
        })
    };
    (0..ranks).flat_map(of).collect()
}

/// The mean of parts of `len` numbers; exactly the number where all parts have the same.
pub(super) fn mean(parts: &[f32], len: usize) -> impl Iterator<Item = f32> {
    let n = parts.len() / len.max(1);
    (0..len).map(move |i| {
        let sum: f64 = parts[i..].iter().step_by(len).map(|x| f64::from(*x)).sum();
        (sum / n as f64) as f32
    })
}

/// Opens what [`restore_weights`] needs of a checkpoint.
pub(crate) fn load_weights(path: &Path) -> Result<Loaded, CheckpointError> {
    checkpoint::load_files(path, &|file| [MODEL_FILE, AVERAGE_FILE].contains(&file))
}

/// The same without what the optimizer remembers: to evaluate and to ship. Collective; rank 0 has the checkpoint.
pub(crate) fn restore_weights(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    let whole = learner.whole().clone();
    let mut step = [loaded.map_or(0, |loaded| loaded.manifest.step as i64)];
    learner.comm().broadcast(&mut step, 0)?;
    let needed = |file: &str| loaded.map(|loaded| loaded.needed(file)).transpose();
    learner.exclusively(|engine| {
        if !engine.kept(Kept::Average).is_empty() {
            let slots = engine.param_slots();
            install_kept(engine, Kept::Average, &slots, &whole.params, needed(AVERAGE_FILE)?)?;
        }
        install(engine, &whole, needed(MODEL_FILE)?)?;
        engine.set_steps_done(step[0] as u64);
        Ok(())
    })?;
    learner.set_own_common(true);
    Ok(())
}

/// Weights to start from, which rank 0 reads; it gets the number of batches that they have seen. Collective.
pub(crate) fn start_from(learner: &mut Learner, start: StartingWeights) -> Result<u64, TrainError> {
    let whole = learner.whole().clone();
    let mut batches = 0;
    learner.exclusively(|engine| {
        batches = install_file(engine, &whole, start)?;
        engine.start_average();
        Ok(())
    })?;
    Ok(batches)
}

/// The files of the moments that the optimizer has; the same on all ranks, also on those with an empty part.
pub(super) fn moment_files(learner: &Learner) -> impl Iterator<Item = (&'static str, Kept)> + use<> {
    MOMENT_FILES.into_iter().take(learner.n_moments())
}
