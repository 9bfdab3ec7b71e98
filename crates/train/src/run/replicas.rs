//! What a checkpoint keeps of ranks that take steps by themselves (`parallel.sync = "local"`).
//!
//! Checkpoints are taken where ranks have met, so weights and statistics are the same on all of them, and a run goes on from there with
//! the same program. What differs is what the optimizer remembers: each rank's is in a file of its own beside the mean over the ranks, which
//! stands where the moments of other runs do. As many ranks go on with their own, and come to the same bits; another number of ranks, and ranks that
//! sum gradients in every step, start from the mean. So the way in which ranks agree can be changed between checkpoint and `resume`.
//!
//! Parameters that each rank keeps for itself (`parallel.own`) are treated alike: `model.safetensors` has their mean over the ranks, which is
//! what is evaluated and shipped too, and a file beside it has those of each.
//!
//! The velocity of outer steps is the same on all ranks. A checkpoint without it is of a run that had none: it starts from zero.

use std::sync::Arc;

use polyreme_dtype::DType;
use polyreme_exec::{Kept, floats};

use super::snapshot::{of_ranks, table};
use crate::checkpoint::{Loaded, Shard, TensorAt, TensorShape};
use crate::error::TrainError;
use crate::install::{install_kept, install_numbers};
use crate::learner::Learner;

/// The velocity of outer steps.
const VELOCITY_FILE: &str = "velocity.safetensors";

/// The parameters that each rank keeps for itself.
const OWN_FILE: &str = "own-of-ranks.safetensors";

/// The file of an arena that each rank has for itself.
fn file_of(what: Kept) -> &'static str {
    match what {
        Kept::Moment2 => "moment2-of-ranks.safetensors",
        Kept::Moment1
        | Kept::Params
        | Kept::States
        | Kept::Average
        | Kept::Residual
        | Kept::Factors
        | Kept::Velocity => "moment1-of-ranks.safetensors",
    }
}

/// The moments of all ranks, on rank 0; nothing on others. Collective.
pub(super) fn gather_moments(learner: &mut Learner, what: Kept) -> Result<Vec<f32>, TrainError> {
    Ok(learner.engine_mut().gather_wide_of_each(what)?)
}

/// The file of what [`gather_moments`] gave.
pub(super) fn moments_shard(learner: &Learner, what: Kept, data: Vec<f32>) -> Shard {
    let engine = learner.engine();
    let ranks = engine.role().ranks;
    let slots = of_ranks(&engine.moment_slots(what), data.len() / ranks, ranks);
    let (file, tensors) = (file_of(what).into(), table(slots));
    Shard { file, dtype: engine.kept_dtype(what), tensors, lent: None, asked: None, data }
}

/// Gives each rank its own moments, if the checkpoint is of as many ranks that had their own; whether it is. Collective.
pub(super) fn restore_moments(
    learner: &mut Learner,
    loaded: Option<&Loaded>,
    (k, what): (usize, Kept),
) -> Result<bool, TrainError> {
    if !learner.has_own_moments() {
        return Ok(false);
    }
    let whole = learner.whole_moments_of_ranks(k);
    let file = loaded.and_then(|loaded| loaded.file(file_of(what)));
    let file = file.filter(|file| file.shapes.len() == whole.len());
    let mut there = [i64::from(file.is_some())];
    learner.comm().broadcast(&mut there, 0)?;
    if there == [0] {
        return Ok(false);
    }
    let engine = learner.engine_mut();
    let mut moments = None;
    if engine.is_writer() {
        let (len, ranks) = (engine.gathered_len(what), engine.role().ranks);
        let slots = of_ranks(&engine.moment_slots(what), len, ranks);
        let mut all = floats(len * ranks, "the optimizer's state of all ranks")?;
        install_numbers(engine, &mut all, &slots, &whole, file)?;
        moments = Some(all);
    }
    engine.scatter_wide_to_each(what, moments.as_deref())?;
    Ok(true)
}

/// What each rank keeps of the parameters for itself, of all ranks on rank 0, if there are any. From here on their mean is in their place, until they
/// are taken back. Collective.
pub(super) fn gather_own(learner: &mut Learner) -> Result<Option<Vec<f32>>, TrainError> {
    if !learner.has_own_params() {
        return Ok(None);
    }
    let own = learner.engine_mut().gather_own()?;
    learner.share_own()?;
    Ok(Some(own))
}

/// The file of what [`gather_own`] gave.
pub(super) fn own_shard(learner: &Learner, data: Vec<f32>) -> Shard {
    let engine = learner.engine();
    let tensors = table(of_ranks(&engine.own_slots(), engine.own_len(), engine.role().ranks));
    Shard { file: OWN_FILE.into(), dtype: DType::F32, tensors, lent: None, asked: None, data }
}

/// Gives each rank its own parameters, if the checkpoint is of as many ranks that had their own; otherwise all start from what
/// the model of the checkpoint has. Collective.
pub(super) fn restore_own(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    if !learner.has_own_params() {
        return Ok(());
    }
    learner.set_own_common(false);
    let engine = learner.engine();
    let slots = of_ranks(&engine.own_slots(), engine.own_len(), engine.role().ranks);
    let whole: Vec<_> =
        slots.iter().map(|s| TensorShape { name: s.name.clone(), dims: s.dims.clone() }).collect();
    let file = loaded.and_then(|loaded| loaded.file(OWN_FILE));
    let file = file.filter(|file| file.shapes.len() == whole.len());
    let mut there = [i64::from(file.is_some())];
    learner.comm().broadcast(&mut there, 0)?;
    if there == [0] {
        return Ok(());
    }
    let engine = learner.engine_mut();
    let mut own = None;
    if engine.is_writer() {
        let mut all = floats(engine.own_len() * engine.role().ranks, "the own parameters of all ranks")?;
        install_numbers(engine, &mut all, &slots, &whole, file)?;
        own = Some(all);
    }
    Ok(engine.scatter_own(own.as_deref())?)
}

/// The velocity of outer steps, if there are; rank 0's to ask.
pub(super) fn velocity_shard(learner: &Learner, params: &Arc<[TensorAt]>) -> Option<Shard> {
    let velocity = learner.engine().kept(Kept::Velocity);
    let (file, tensors, data) = (VELOCITY_FILE.into(), params.clone(), velocity.to_vec());
    (!velocity.is_empty()).then_some(Shard {
        file,
        dtype: DType::F32,
        tensors,
        lent: None,
        asked: None,
        data,
    })
}

/// Brings the velocity of outer steps to where it was. Collective.
pub(super) fn restore_velocity(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    if learner.engine().kept(Kept::Velocity).is_empty() {
        return Ok(());
    }
    let whole = learner.whole().params.clone();
    let engine = learner.engine_mut();
    if let Some(file) = loaded.and_then(|loaded| loaded.file(VELOCITY_FILE)) {
        let slots = engine.param_slots();
        install_kept(engine, Kept::Velocity, &slots, &whole, Some(file))?;
    }
    Ok(engine.broadcast_kept(Kept::Velocity)?)
}
