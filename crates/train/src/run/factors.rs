//! What a checkpoint keeps of gradients that travel as factors (`parallel.wire = "powersgd"`): the right factors of the last sums.
//!
//! All ranks have the same, so rank 0's are saved, and any number of ranks goes on with them. They follow the gradients from step to step;
//! a checkpoint without them, or with those of another `rank`, starts anew, as a run does.

use polyreme_dtype::DType;
use polyreme_exec::{Engine, Kept, Slot};
use polyreme_graph::Splits;

use super::snapshot::table;
use crate::checkpoint::{Loaded, Shard, TensorShape};
use crate::error::TrainError;
use crate::install::install_kept;
use crate::learner::Learner;

const FACTORS_FILE: &str = "factors.safetensors";

/// They lie one after the other, as one tensor.
fn slots(engine: &Engine) -> Vec<Slot> {
    let len = engine.kept(Kept::Factors).len();
    vec![Slot { name: "factors".into(), dims: vec![len], splits: Splits::default(), range: 0..len }]
}

/// The factors, if there are any; rank 0's to ask.
pub(super) fn shard(learner: &Learner) -> Option<Shard> {
    let engine = learner.engine();
    let data = engine.kept(Kept::Factors).to_vec();
    let (file, tensors) = (FACTORS_FILE.into(), table(slots(engine)));
    (!data.is_empty()).then_some(Shard { file, dtype: DType::F32, tensors, lent: None, asked: None, data })
}

/// Brings factors to where they were. Collective.
pub(super) fn restore(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    let engine = learner.engine_mut();
    if engine.kept(Kept::Factors).is_empty() {
        return Ok(());
    }
    let slots = slots(engine);
    let whole: Vec<_> =
        slots.iter().map(|s| TensorShape { name: s.name.clone(), dims: s.dims.clone() }).collect();
    let file = loaded.and_then(|loaded| loaded.file(FACTORS_FILE));
    let file = file.filter(|file| file.shapes.iter().map(|s| &s.dims).eq(whole.iter().map(|s| &s.dims)));
    if file.is_some() {
        install_kept(engine, Kept::Factors, &slots, &whole, file)?;
    }
    Ok(engine.broadcast_kept(Kept::Factors)?)
}
