//! Checkpoints and files of a model that several ranks have together: what each of them serves, and what rank 0 writes.
//!
//! Moments and states are brought together over the data axis first, as for any checkpoint; then the ranks that have the model
//! once, the writers, serve their parts of every file to rank 0.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use polyreme_collective::Reduce;
use polyreme_dtype::DType;
use polyreme_exec::{Engine, Kept, KeptArenas};

use super::served::{ServedFile, follow, serve};
use super::snapshot::{AVERAGE_FILE, Frame, MOMENT_FILES, STATES_FILE, mean, moment_files, states_of_ranks};
use crate::checkpoint::{
    AskedNumbers, CheckpointError, MODEL_FILE, Shard, Snapshot, Store, TensorAt, TensorShape,
};
use crate::error::TrainError;
use crate::install::shipped_types;
use crate::learner::Learner;
use crate::pretrained::ModelFile;
use crate::whole::{Owners, WholeModel};

/// A file of a checkpoint that ranks have together.
#[derive(Debug)]
struct ApartFile {
    name: &'static str,
    tensors: Vec<TensorShape>,
    owners: Owners,
}

/// What the ranks that have a model together know of each other.
#[derive(Debug)]
pub(crate) struct Apart {
    model: ApartFile,
    /// All parameters and states, of which checkpoints may leave some out.
    all: ApartFile,
    /// In the order of [`MOMENT_FILES`].
    moments: Vec<ApartFile>,
    average: ApartFile,
    states: ApartFile,
}

impl Apart {
    /// Finds out who has what. Collective among writers.
    pub(crate) fn agree(
        engine: &mut Engine,
        whole: &WholeModel,
        moments: &[Vec<TensorShape>],
    ) -> Result<Apart, TrainError> {
        let (params, own) = (engine.param_slots(), engine.state_slots());
        let all: Vec<_> = params.iter().chain(&own).cloned().collect();
        let states = (whole.states_of(engine.role().ranks), states_of_ranks(engine));
        let of_moments: Vec<_> = MOMENT_FILES.map(|(_, what)| engine.moment_slots(what)).into();
        let comm = engine.writers().expect("a rank of a group");
        let mut file = |name, tensors: Vec<TensorShape>, slots: &[_]| -> Result<ApartFile, TrainError> {
            Ok(ApartFile { name, owners: Owners::agree(comm, &tensors, slots)?, tensors })
        };
        Ok(Apart {
            model: file(MODEL_FILE, whole.saved(), &all)?,
            all: file(MODEL_FILE, whole.all(), &all)?,
            moments: (moments.iter().zip(MOMENT_FILES).zip(&of_moments))
                .map(|((tensors, (name, _)), slots)| file(name, tensors.clone(), slots))
                .collect::<Result<_, _>>()?,
            average: file(AVERAGE_FILE, whole.params.clone(), &params)?,
            states: file(STATES_FILE, states.0, &states.1)?,
        })
    }

    /// The files of a checkpoint, in their order. The same on all writers.
    fn files(&self, has_average: bool, has_states: bool) -> Vec<&ApartFile> {
        let mut files = vec![&self.model];
        files.extend(&self.moments);
        files.extend(has_average.then_some(&self.average));
        files.extend(has_states.then_some(&self.states));
        files
    }
}

/// What was brought together over the data axis, on its first rank.
struct Gathered {
    /// States of all ranks, if they differ.
    states: Option<Vec<f32>>,
    /// By file of moments: of all ranks, if each has a part.
    moments: Vec<Option<Vec<f32>>>,
    /// Whether any writer's ranks have states of their own.
    has_states: bool,
}

impl Gathered {
    /// Collective, over all ranks.
    fn new(learner: &mut Learner) -> Result<Gathered, TrainError> {
        let states = learner.engine_mut().gather_states()?;
        let mut moments = Vec::new();
        for (_, what) in moment_files(learner) {
            let engine = learner.engine_mut();
            let role = engine.role();
            let apart = role.ranks > 1 && role.sharded();
            let len = if apart && role.rank == 0 { engine.gathered_len(what) } else { 0 };
            let mut all = apart.then(|| vec![0.0; len]);
            if apart {
                engine.gather_moments(what, all.as_deref_mut().filter(|all| !all.is_empty()))?;
            }
            moments.push(all);
        }
        let mut has_states = [i64::from(states.is_some())];
        if learner.engine().is_writer() {
            let comm = learner.engine_mut().writers().expect("a rank of a group");
            comm.all_reduce(&mut has_states, Reduce::Max)?;
        }
        Ok(Gathered { states, moments, has_states: has_states[0] > 0 })
    }
}

/// Hands a checkpoint of this moment to the store, and serves its writer until it is done. Collective: rank 0 calls this, the
/// others [`hand_over_apart`]. The error inside is one of the write.
pub(crate) fn save_apart(
    learner: &mut Learner,
    frame: Frame,
    store: &mut Store,
) -> Result<Result<(), CheckpointError>, TrainError> {
    let gathered = Gathered::new(learner)?;
    let (step, has_average) = (learner.steps_done(), !learner.average().is_empty());
    let moments = learner.engine().kept_dtype(Kept::Moment1);
    let (apart, engine) = learner.apart_and_engine();
    let (ask, requests) = channel();
    let shard = |(number, file): (usize, &&ApartFile)| Shard {
        file: file.name.into(),
        dtype: if MOMENT_FILES.iter().any(|(name, _)| *name == file.name) { moments } else { DType::F32 },
        tensors: anywhere(&file.tensors),
        lent: None,
        asked: Some(AskedNumbers { file: number, ask: ask.clone() }),
        data: Vec::new(),
    };
    let shards = apart.files(has_average, gathered.has_states).iter().enumerate().map(shard).collect();
    let snapshot: Snapshot = frame.snapshot(step, shards)?;
    drop(ask);
    let written = store.save(snapshot);
    let slots = FileSlots::of(engine);
    let (arenas, comm) = engine.kept_and_writers();
    serve(comm, &served(apart, &slots, arenas, &gathered, has_average), requests)?;
    Ok(written.and_then(|()| store.finish()))
}

/// What other ranks than 0 do for such a checkpoint. Collective, with [`save_apart`].
pub(crate) fn hand_over_apart(learner: &mut Learner) -> Result<(), TrainError> {
    let gathered = Gathered::new(learner)?;
    if !learner.engine().is_writer() {
        return Ok(());
    }
    let has_average = !learner.average().is_empty();
    let (apart, engine) = learner.apart_and_engine();
    let slots = FileSlots::of(engine);
    let (arenas, comm) = engine.kept_and_writers();
    follow(comm, &served(apart, &slots, arenas, &gathered, has_average))
}

/// Where this rank's tensors lie.
struct FileSlots {
    params: Vec<polyreme_exec::Slot>,
    states: Vec<polyreme_exec::Slot>,
    moments: [Vec<polyreme_exec::Slot>; 2],
    states_of_ranks: Vec<polyreme_exec::Slot>,
    ranks: usize,
}

impl FileSlots {
    fn of(engine: &Engine) -> FileSlots {
        FileSlots {
            params: engine.param_slots(),
            states: engine.state_slots(),
            moments: MOMENT_FILES.map(|(_, what)| engine.moment_slots(what)),
            states_of_ranks: states_of_ranks(engine),
            ranks: engine.role().ranks,
        }
    }
}

/// This rank's part of the files of a checkpoint.
fn served<'a>(
    apart: &'a Apart,
    slots: &FileSlots,
    arenas: KeptArenas<'a>,
    gathered: &'a Gathered,
    has_average: bool,
) -> Vec<ServedFile<'a>> {
    let own = arenas.wide(Kept::States);
    let states: Cow<[f32]> = match &gathered.states {
        Some(all) => mean(all, own.len()).collect(),
        None => own.clone(),
    };
    let file = |file: &'a ApartFile, arenas| ServedFile::new(&file.tensors, &file.owners, arenas);
    let (params, model_states) = (slots.params.clone(), slots.states.clone());
    let mut files =
        vec![file(&apart.model, vec![(params, arenas.wide(Kept::Params)), (model_states, states)])];
    for (k, (of, all)) in apart.moments.iter().zip(&gathered.moments).enumerate() {
        let numbers = match all {
            Some(all) => Cow::Borrowed(&all[..]),
            None => arenas.wide(MOMENT_FILES[k].1),
        };
        files.push(file(of, vec![(slots.moments[k].clone(), numbers)]));
    }
    if has_average {
        files.push(file(&apart.average, vec![(slots.params.clone(), arenas.wide(Kept::Average))]));
    }
    if gathered.has_states {
        let all: Cow<[f32]> = match &gathered.states {
            Some(all) => Cow::Borrowed(&all[..]),
            // Its ranks have the same ones.
            None => own.repeat(slots.ranks).into(),
        };
        files.push(file(&apart.states, vec![(slots.states_of_ranks.clone(), all)]));
    }
    files
}

/// Writes the model that a learner would ship, from the parts of all writers; other ranks than 0 serve theirs. Collective.
pub(crate) fn ship_apart(
    path: &Path,
    learner: &mut Learner,
    dtype: DType,
    batches: u64,
    form: &ModelFile,
) -> Result<(), TrainError> {
    if !learner.engine().is_writer() {
        return Ok(());
    }
    let (rank, what) =
        (learner.comm().rank(), if learner.average().is_empty() { Kept::Params } else { Kept::Average });
    let whole = learner.whole().clone();
    let types = shipped_types(&whole, dtype);
    let (apart, engine) = learner.apart_and_engine();
    let (params, states) = (engine.param_slots(), engine.state_slots());
    let (arenas, comm) = engine.kept_and_writers();
    let of_file = vec![(params, arenas.wide(what)), (states, arenas.wide(Kept::States))];
    let files = [ServedFile::new(&apart.all.tensors, &apart.all.owners, of_file)];
    if rank > 0 {
        return follow(comm, &files);
    }
    let (ask, requests) = channel();
    let numbers = AskedNumbers { file: 0, ask };
    let tensors = apart.all.tensors.iter().zip(types);
    let tensors: Vec<_> = tensors.map(|(t, dtype)| (t.name.as_str(), &t.dims[..], dtype)).collect();
    thread::scope(|scope| {
        // The sender goes with the thread, which ends the serving.
        let whole = &whole;
        let writer = scope.spawn(move || form.write(path, whole, &tensors, batches, &numbers));
        serve(comm, &files, requests)?;
        match writer.join() {
            Ok(written) => Ok(written?),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Tensors that lie nowhere: their numbers are asked for.
fn anywhere(tensors: &[TensorShape]) -> Arc<[TensorAt]> {
    tensors.iter().map(|t| TensorAt { name: t.name.clone(), dims: t.dims.clone(), start: 0 }).collect()
}
