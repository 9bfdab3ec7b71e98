//! Frozen parameters beside low-rank factors: in one file of the run's folder, written when the run begins.
//!
//! They are nearly the whole model and never change, so checkpoints leave them out and name this file with its checksum. It lies in the
//! run's folder, and not where the weights came from: a run goes on with the same bits whatever became of the file that it began with.

use std::fs::File;
use std::path::{Path, PathBuf};

use polyreme_dtype::DType;
use polyreme_exec::{Engine, Kept};

use super::apart::ship_apart;
use super::snapshot::Progress;
use crate::checkpoint::{self, CheckpointError, FileEntry, Loaded, TensorFile};
use crate::error::TrainError;
use crate::install::{install_kept, ship};
use crate::learner::Learner;
use crate::low_rank::Selection;
use crate::pretrained::ModelFile;
use crate::whole::WholeModel;

/// The file.
pub(crate) const FROZEN_FILE: &str = "frozen.safetensors";

/// Writes it, if checkpoints of this learner leave frozen parameters out; rank 0 gets what checkpoints say of it. Collective.
pub(super) fn write_frozen(folder: &Path, learner: &mut Learner) -> Result<Option<FileEntry>, TrainError> {
    let tensors = learner.whole().frozen_apart().len() as u64;
    if tensors == 0 {
        return Ok(None);
    }
    let path = folder.join(FROZEN_FILE);
    let form = ModelFile { tensors: Selection::Frozen, ..ModelFile::default() };
    let writes = learner.comm().rank() == 0;
    if learner.is_apart() {
        ship_apart(&path, learner, DType::F32, 0, &form)?;
    } else if writes {
        ship(&path, learner, DType::F32, 0, &form)?;
    }
    Ok(if writes { Some(entry_of(&path, tensors)?) } else { None })
}

fn entry_of(path: &Path, tensors: u64) -> Result<FileEntry, CheckpointError> {
    let mut hasher = blake3::Hasher::new();
    let bytes = File::open(path).and_then(|file| {
        hasher.update_reader(&file)?;
        file.metadata().map(|about| about.len())
    });
    let bytes = bytes.map_err(|e| CheckpointError::reading(path, e))?;
    let blake3 = hasher.finalize().to_hex().to_string();
    Ok(FileEntry { name: FROZEN_FILE.into(), bytes, tensors, blake3 })
}

/// The file that a checkpoint names, whole.
fn frozen_of(loaded: &Loaded) -> Result<TensorFile, TrainError> {
    let run = loaded.path.parent().and_then(Path::parent).map_or_else(PathBuf::new, Path::to_path_buf);
    let path = run.join(FROZEN_FILE);
    let entry = Progress::of(loaded)?.frozen;
    let hint =
        "the checkpoint has low-rank factors alone; the weights beside them are in this file of its run";
    let entry = entry.ok_or_else(|| CheckpointError::missing(&path, hint))?;
    if !path.is_file() {
        return Err(CheckpointError::missing(&path, hint).into());
    }
    Ok(checkpoint::verify(path, &entry)?)
}

/// Gives all ranks of an engine the frozen parameters that checkpoints leave out, if they do. Collective; rank 0 has the
/// checkpoint.
pub(crate) fn install_frozen(
    engine: &mut Engine,
    whole: &WholeModel,
    loaded: Option<&Loaded>,
) -> Result<(), TrainError> {
    if !whole.keeps_frozen_apart() {
        return Ok(());
    }
    let file = loaded.map(frozen_of).transpose()?;
    let slots = engine.param_slots();
    install_kept(engine, Kept::Params, &slots, &whole.frozen_apart(), file.as_ref())
}

/// The same for a learner.
pub(super) fn restore_frozen(learner: &mut Learner, loaded: Option<&Loaded>) -> Result<(), TrainError> {
    let whole = learner.whole().clone();
    learner.exclusively(|engine| install_frozen(engine, &whole, loaded))
}
