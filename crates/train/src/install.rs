//! Between files of weights and engines: by name, never by place.
//!
//! One rank reads a file; ranks that have the model together ([`Engine::writers`]) all hear its numbers, and each keeps what is
//! its own. So a file is read in parts of bounded size, and no rank ever has the whole model.

use std::path::Path;

use polyreme_dtype::DType;
use polyreme_exec::{Engine, Kept, Slot};

use crate::checkpoint::{CheckpointError, Difference, TensorFile, TensorShape};
use crate::error::TrainError;
use crate::learner::Learner;
use crate::pretrained::ModelFile;
use crate::starting::StartingWeights;
use crate::weights::View;
use crate::whole::{WholeModel, put};

/// Elements that are told at once.
const TOLD: usize = 1 << 18;

/// Tells numbers: the name of a tensor, the first element, and elements from there on.
pub(crate) type Tell<'a> = dyn FnMut(&str, usize, &[f32]) + 'a;

/// The numbers of a whole model, on the rank that has them.
pub(crate) type Teller<'a> = dyn FnMut(&mut Tell) -> Result<(), TrainError> + 'a;

/// Parameters and states of an engine from a file of a checkpoint that must have just those which checkpoints keep. Of several writers the first one
/// has the file, and all call it.
pub fn install(engine: &mut Engine, whole: &WholeModel, file: Option<&TensorFile>) -> Result<(), TrainError> {
    let (params, states) = (engine.param_slots(), engine.state_slots());
    hear_file(engine, &whole.saved(), file, &mut |engine, name, first, numbers| {
        put(&params, name, first, numbers, &mut |at, x| engine.put_kept(Kept::Params, at, x));
        put(&states, name, first, numbers, &mut |at, x| engine.put_kept(Kept::States, at, x));
    })
}

/// One arena of an engine, with such slots, from a file of a checkpoint that must have just the tensors `whole`, in whatever
/// type it has them: they are rounded to the engine's. As [`install`].
pub fn install_kept(
    engine: &mut Engine,
    what: Kept,
    slots: &[Slot],
    whole: &[TensorShape],
    file: Option<&TensorFile>,
) -> Result<(), TrainError> {
    hear_file(engine, whole, file, &mut |engine, name, first, numbers| {
        put(slots, name, first, numbers, &mut |at, x| engine.put_kept(what, at, x));
    })
}

/// Numbers with such slots from a file of a checkpoint, as [`install_kept`].
pub(crate) fn install_numbers(
    engine: &mut Engine,
    to: &mut [f32],
    slots: &[Slot],
    whole: &[TensorShape],
    file: Option<&TensorFile>,
) -> Result<(), TrainError> {
    hear_file(engine, whole, file, &mut |_, name, first, numbers| {
        put(slots, name, first, numbers, &mut |at, x| to[at..at + x.len()].copy_from_slice(x));
    })
}

/// Parameters and states of an engine from a safetensors file, ours or PyTorch's; those of a new head stay as they are. Of several
/// writers the first one reads it. Returns how many batches its batch norms have seen.
pub fn install_file(
    engine: &mut Engine,
    whole: &WholeModel,
    start: StartingWeights,
) -> Result<u64, TrainError> {
    let reads = engine.writers().is_none_or(|comm| comm.rank() == 0);
    let (mut batches, mut matched) = (0, Vec::new());
    let wanted = whole.all();
    if reads {
        let taken = start.read(&wanted, whole.params.len())?;
        (matched, batches) = (taken.weights, taken.batches);
    }
    let (params, states) = (engine.param_slots(), engine.state_slots());
    let mut teller = |tell: &mut Tell| {
        for weight in matched.drain(..) {
            for (k, numbers) in weight.data.chunks(TOLD).enumerate() {
                tell(&weight.name, k * TOLD, numbers);
            }
        }
        Ok(())
    };
    let teller: Option<&mut Teller> = if reads { Some(&mut teller) } else { None };
    hear(engine, &wanted, teller, &mut |engine, name, first, numbers| {
        put(&params, name, first, numbers, &mut |at, x| engine.put_kept(Kept::Params, at, x));
        put(&states, name, first, numbers, &mut |at, x| engine.put_kept(Kept::States, at, x));
    })?;
    Ok(batches)
}

/// What a rank does with the numbers that it hears.
type Hear<'a> = dyn FnMut(&mut Engine, &str, usize, &[f32]) + 'a;

/// All writers hear the numbers of a file, which the first one has.
fn hear_file(
    engine: &mut Engine,
    whole: &[TensorShape],
    file: Option<&TensorFile>,
    heard: &mut Hear,
) -> Result<(), TrainError> {
    let Some(file) = file else { return hear(engine, whole, None, heard) };
    let there = file.shapes.iter().map(|shape| (shape.name.as_str(), shape.dims.as_slice()));
    if let Some(difference) = Difference::between(whole, there) {
        let (path, difference) = (file.path.clone(), Box::new(difference));
        return Err(CheckpointError::OtherModel { path, difference }.into());
    }
    hear(engine, whole, Some(&mut |tell| Ok(file.read(tell)?)), heard)
}

/// All writers hear what the first one tells. If it fails, the others hear of that as of any rank that fails.
fn hear(
    engine: &mut Engine,
    whole: &[TensorShape],
    teller: Option<&mut Teller>,
    heard: &mut Hear,
) -> Result<(), TrainError> {
    let together = engine.writers().is_some_and(|comm| comm.size() > 1);
    match teller {
        Some(teller) if !together => teller(&mut |name, first, numbers| heard(engine, name, first, numbers)),
        Some(teller) => {
            let mut told = Ok(());
            teller(&mut |name, first, numbers| {
                let Some(tensor) = whole.iter().position(|t| t.name == name).filter(|_| told.is_ok()) else {
                    return;
                };
                told = tell(engine, [tensor, first, numbers.len()], Some(numbers));
                heard(engine, name, first, numbers);
            })?;
            told?;
            tell(engine, [whole.len(), 0, 0], None)
        }
        None => listen(engine, whole, heard),
    }
}

/// Tells the other writers elements of a tensor: which one, the first element, how many; or that there are no more.
fn tell(engine: &mut Engine, about: [usize; 3], numbers: Option<&[f32]>) -> Result<(), TrainError> {
    let comm = engine.writers().expect("several writers");
    comm.broadcast(&mut about.map(|n| n as i64), 0)?;
    if let Some(numbers) = numbers {
        comm.broadcast(&mut numbers.to_vec(), 0)?;
    }
    Ok(())
}

/// What other writers than the first one do.
fn listen(engine: &mut Engine, whole: &[TensorShape], heard: &mut Hear) -> Result<(), TrainError> {
    let mut numbers: Vec<f32> = Vec::new();
    loop {
        let comm = engine.writers().expect("several writers");
        let mut about = [0i64; 3];
        comm.broadcast(&mut about, 0)?;
        let [tensor, first, len] = about.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let Some(tensor) = whole.get(tensor) else { return Ok(()) };
        // What is told lies inside a tensor that this rank knows too.
        if first.checked_add(len).is_none_or(|end| end > tensor.dims.iter().product()) {
            return Err(TrainError::Progress(format!("rank 0 told of more than tensor {} has", tensor.name)));
        }
        numbers.resize(len, 0.0);
        comm.broadcast(&mut numbers, 0)?;
        heard(engine, &tensor.name, first, &numbers);
    }
}

/// What a file of the model has its parameters in, and its states: these are few and lose more by rounding (a variance next to
/// its epsilon), so they stay as they are.
pub(crate) fn shipped_types(whole: &WholeModel, dtype: DType) -> Vec<DType> {
    let params = whole.params.iter().map(|_| dtype);
    params.chain(whole.states.iter().map(|_| DType::F32)).collect()
}

/// Writes the model that a learner which has all of it would ship: its parameters, averaged if they are, as `dtype`, and its
/// states. `batches` is how many batches its batch norms have seen.
pub fn ship(
    path: &Path,
    learner: &Learner,
    dtype: DType,
    batches: u64,
    form: &ModelFile,
) -> Result<(), CheckpointError> {
    let (params, arena) = learner.shipped();
    let states = learner.engine().state_slots();
    let state_arena = learner.engine().kept(Kept::States);
    let of = params.iter().map(|slot| (slot, &arena[slot.range.clone()]));
    let of = of.chain(states.iter().map(|slot| (slot, &state_arena[slot.range.clone()])));
    let types = shipped_types(learner.whole(), dtype);
    let view = |((slot, data), dtype)| {
        let slot: &Slot = slot;
        View { name: &slot.name, dims: &slot.dims, dtype, data }
    };
    let views: Vec<View> = of.zip(types).map(view).collect();
    let heads: Vec<_> = views.iter().map(|view| (view.name, view.dims, view.dtype)).collect();
    form.write(path, learner.whole(), &heads, batches, views.as_slice())
}
