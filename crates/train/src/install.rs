//! Between files of weights and engines: by name, never by place.

use std::path::Path;

use polyreme_exec::{Engine, Kept, Slot};

use crate::checkpoint::{CheckpointError, Shape};
use crate::error::TrainError;
use crate::team::Team;
use crate::weights::{View, Weight, WeightsFile, match_weights, write_weights};

/// Parameters and states of an engine from tensors that must be just those. `path` is for the error.
pub fn install(engine: &mut Engine, weights: &[Weight], path: &Path) -> Result<(), TrainError> {
    let (params, states) = (engine.param_slots(), engine.state_slots());
    let shapes = shapes(params.iter().chain(&states));
    let matched = match_weights(&shapes, weights.to_vec(), path)?;
    let (of_params, of_states) = matched.split_at(params.len());
    copy(engine.kept_mut(Kept::Params), &params, of_params);
    copy(engine.kept_mut(Kept::States), &states, of_states);
    Ok(())
}

/// An arena that is laid out as the parameters are, from tensors that must be just those.
pub fn install_arena(
    arena: &mut [f32],
    slots: &[Slot],
    weights: Option<&[Weight]>,
    path: &Path,
) -> Result<(), TrainError> {
    let weights = weights.unwrap_or(&[]).to_vec();
    let matched = match_weights(&shapes(slots.iter()), weights, path)?;
    copy(arena, slots, &matched);
    Ok(())
}

/// Parameters and states of an engine from a safetensors file, ours or PyTorch's. Returns how many batches its batch norms
/// have seen. Numbers that are not finite are refused here: in training they would be blamed on the learning rate.
pub fn install_file(engine: &mut Engine, path: &Path) -> Result<u64, TrainError> {
    let file = WeightsFile::read(path)?;
    let wanted: Vec<Slot> = engine.param_slots().into_iter().chain(engine.state_slots()).collect();
    file.check(wanted.iter().map(|slot| slot.name.as_str()), path)?;
    install(engine, &file.weights, path)?;
    Ok(file.batches_tracked())
}

/// Writes the model that a team would ship: its parameters, averaged if they are, and its states. `batches_before` is how
/// many batches its batch norms had seen before the first step.
pub fn ship(path: &Path, team: &Team, batches_before: u64) -> Result<(), CheckpointError> {
    let (params, arena) = team.shipped();
    let states = team.learner().state_slots();
    let state_arena = team.learner().kept(Kept::States);
    let views: Vec<View> = params
        .iter()
        .map(|s| View { name: &s.name, dims: &s.dims, data: &arena[s.range.clone()] })
        .chain(states.iter().map(|s| View {
            name: &s.name,
            dims: &s.dims,
            data: &state_arena[s.range.clone()],
        }))
        .collect();
    write_weights(path, &views, Some(team.steps_done().saturating_add(batches_before)))
}

/// Names and dims.
pub fn shapes<'a>(slots: impl Iterator<Item = &'a Slot>) -> Vec<Shape> {
    slots.map(|s| Shape { name: s.name.clone(), dims: s.dims.clone() }).collect()
}

fn copy(arena: &mut [f32], slots: &[Slot], weights: &[Weight]) {
    for (slot, weight) in slots.iter().zip(weights) {
        arena[slot.range.clone()].copy_from_slice(&weight.data);
    }
}
