//! Between files of weights and engines: by name, never by place.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use polyreme_dtype::DType;
use polyreme_exec::{Engine, Kept, Slot};

use crate::checkpoint::{CheckpointError, Difference, TensorFile, TensorShape};
use crate::error::TrainError;
use crate::learner::Learner;
use crate::weights::{View, Weight, WeightsFile, match_weights, write_weights};

/// Parameters and states of an engine from a file of a checkpoint that must have just those.
pub fn install(engine: &mut Engine, file: &TensorFile) -> Result<(), TrainError> {
    let (params, states) = (engine.param_slots(), engine.state_slots());
    check(params.iter().chain(&states), &file.shapes, &file.path)?;
    let (to_params, to_states) = (by_name(&params), by_name(&states));
    Ok(file.read(&mut |name, first, numbers| {
        put(engine.kept_mut(Kept::Params), &to_params, name, first, numbers);
        put(engine.kept_mut(Kept::States), &to_states, name, first, numbers);
    })?)
}

/// An arena with such ranges from a file of a checkpoint that must have just those.
pub fn install_arena(arena: &mut [f32], slots: &[Slot], file: &TensorFile) -> Result<(), TrainError> {
    check(slots.iter(), &file.shapes, &file.path)?;
    let places = by_name(slots);
    Ok(file.read(&mut |name, first, numbers| put(arena, &places, name, first, numbers))?)
}

/// Moments of an engine from a file of a checkpoint that must have just those, in whatever type it has them: they are rounded to
/// the engine's.
pub fn install_moments(
    engine: &mut Engine,
    what: Kept,
    slots: &[Slot],
    file: &TensorFile,
) -> Result<(), TrainError> {
    check(slots.iter(), &file.shapes, &file.path)?;
    let places = by_name(slots);
    Ok(file.read(&mut |name, first, numbers| {
        if let Some(range) = places.get(name) {
            engine.put_kept(what, range.start + first, numbers);
        }
    })?)
}

/// Ranges by the names of their tensors.
fn by_name(slots: &[Slot]) -> HashMap<&str, Range<usize>> {
    slots.iter().map(|slot| (slot.name.as_str(), slot.range.clone())).collect()
}

/// Puts elements of a tensor, from the `first` on, where they belong; nowhere if this arena does not have it.
fn put(arena: &mut [f32], places: &HashMap<&str, Range<usize>>, name: &str, first: usize, numbers: &[f32]) {
    if let Some(range) = places.get(name) {
        arena[range.clone()][first..first + numbers.len()].copy_from_slice(numbers);
    }
}

/// Whether a file has the tensors that are wanted; if not, what differs.
fn check<'a>(
    wanted: impl Iterator<Item = &'a Slot>,
    there: &[TensorShape],
    path: &Path,
) -> Result<(), CheckpointError> {
    let there = there.iter().map(|shape| (shape.name.as_str(), shape.dims.as_slice()));
    match Difference::between(&shapes(wanted), there) {
        None => Ok(()),
        Some(difference) => {
            Err(CheckpointError::OtherModel { path: path.into(), difference: Box::new(difference) })
        }
    }
}

/// Parameters and states of an engine from a safetensors file, ours or PyTorch's. Returns how many batches its batch norms
/// have seen. Numbers that are not finite are refused here: in training they would be blamed on the learning rate.
pub fn install_file(engine: &mut Engine, path: &Path) -> Result<u64, TrainError> {
    let file = WeightsFile::read(path)?;
    let wanted: Vec<Slot> = engine.param_slots().into_iter().chain(engine.state_slots()).collect();
    file.check(wanted.iter().map(|slot| slot.name.as_str()), path)?;
    let (params, states) = (engine.param_slots(), engine.state_slots());
    let batches = file.batches_tracked();
    let matched = match_weights(&shapes(wanted.iter()), file.weights, path)?;
    let (of_params, of_states) = matched.split_at(params.len());
    copy(engine.kept_mut(Kept::Params), &params, of_params);
    copy(engine.kept_mut(Kept::States), &states, of_states);
    Ok(batches)
}

/// Writes the model that a learner would ship: its parameters, averaged if they are, as `dtype`, and its states, which are
/// few and lose more by rounding (a variance next to its epsilon), as they are. `batches_before` is how many batches its batch
/// norms had seen before the first step.
pub fn ship(
    path: &Path,
    learner: &Learner,
    dtype: DType,
    batches_before: u64,
) -> Result<(), CheckpointError> {
    let (params, arena) = learner.shipped();
    let states = learner.engine().state_slots();
    let state_arena = learner.engine().kept(Kept::States);
    let views: Vec<View> = params
        .iter()
        .map(|s| View { name: &s.name, dims: &s.dims, dtype, data: &arena[s.range.clone()] })
        .chain(states.iter().map(|s| View {
            name: &s.name,
            dims: &s.dims,
            dtype: DType::F32,
            data: &state_arena[s.range.clone()],
        }))
        .collect();
    write_weights(path, &views, Some(learner.steps_done().saturating_add(batches_before)))
}

/// Names and dims.
pub fn shapes<'a>(slots: impl Iterator<Item = &'a Slot>) -> Vec<TensorShape> {
    slots.map(|s| TensorShape { name: s.name.clone(), dims: s.dims.clone() }).collect()
}

fn copy(arena: &mut [f32], slots: &[Slot], weights: &[Weight]) {
    for (slot, weight) in slots.iter().zip(weights) {
        arena[slot.range.clone()].copy_from_slice(&weight.data);
    }
}
