//! Checkpoints that are whole or absent.
//!
//! A checkpoint is a folder of safetensors files and a manifest with their lengths and checksums:
//!
//! ```text
//! RUN/checkpoints/step-00000500/model.safetensors      what PyTorch reads, too
//!                               optimizer.safetensors
//!                               manifest.json          written last
//! RUN/checkpoints/best -> step-00000500                a link, replaced by one rename
//! RUN/checkpoints/aside-step-00000700                  whole, but the run has gone back behind it
//! RUN/checkpoints/damaged-step-00000600                goes when a newer one is whole
//! RUN/checkpoints/.lock                                held by the process that trains
//! ```
//!
//! # How it stays whole
//! A folder is written under a name that begins with a dot (`.writing-…`): files first, each brought to the disk, then
//! the manifest, then the folder itself. One rename gives it its real name. Deleting goes the other way: one rename to
//! `.old-…`, which is brought to the disk, then removal. So whatever stands under a real name is whole, whenever the
//! process is killed or the power is cut. `crash` tries every moment of that on a disk that keeps any part of what was
//! not synced.
//!
//! A step that is saved again appears as `step-00000500.new` first, which counts as a real name and comes before the
//! plain one; then the old folder leaves and the new one takes its name. At each moment one of them is there.
//!
//! Leftovers under dotted names are removed by the next [`Store::open`], which holds the lock, so that they cannot
//! belong to anyone alive. Readers take no lock.
//!
//! # How nothing is lost
//! The lock comes first: nothing is cleaned, set aside or deleted without it. Only certain damage (a checksum, a length,
//! a format) is passed over; an error of the disk stops. A run that goes back renames what is newer and deletes nothing:
//! damaged checkpoints stay until a newer one is whole, whole ones until they are removed by hand.
//!
//! `best` is derived: of the checkpoints that are there, the one whose metric is best, the earliest of equals. It is
//! never pruned, so it stays the best of the whole run.
//!
//! # Layout
//! [`Lock`] keeps others out; [`Store`] writes (in a thread of its own); [`list`], [`load`], [`latest_whole`] and [`resolve`] read;
//! [`Manifest`] says what is in a checkpoint; [`CheckpointError`] and [`Difference`] say what is wrong.

mod asked;
mod blocks;
mod difference;
mod disk;
mod error;
mod folder;
mod lacks;
mod lock;
mod manifest;
mod read;
mod store;
pub(crate) mod tensors;
mod write;

#[cfg(test)]
mod crash;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod lack_tests;
#[cfg(test)]
mod mount_tests;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use polyreme_dtype::DType;
use polyreme_exec::{Kept, Loan};

pub(crate) use asked::{AskedNumbers, NumbersRequest};
pub(crate) use blocks::WRITER_BYTES;
pub use difference::{Difference, Lacking, Reshaped, TensorShape};
pub(crate) use disk::{Disk, above};
pub use error::{CheckpointError, Skipped};
pub use folder::{CheckpointEntry, best, list};
pub use lock::Lock;
pub(crate) use manifest::numbers;
pub use manifest::{FileEntry, Manifest, model_id};
pub use read::{GivenPath, Loaded, TensorFile, latest_whole, load, load_at, load_step, resolve, run_of};
pub(crate) use read::{load_files, verify};
pub use store::Store;
use tensors::TensorSource;
pub use write::Written;

/// The version of the folder's layout and of the manifest.
pub const FORMAT: u64 = 1;

/// The file that holds the model's parameters and states. Every checkpoint has it.
pub const MODEL_FILE: &str = "model.safetensors";

/// All that a checkpoint holds, at one moment of a run.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Steps done.
    pub step: u64,
    /// Epochs done.
    pub epoch: u64,
    /// The files; one of them is [`MODEL_FILE`].
    pub shards: Vec<Shard>,
    /// Whatever the loop must remember. Numbers come back exactly; JSON has no NaN and no infinities.
    pub progress: serde_json::Value,
    /// Metrics at this moment, such as `val_accuracy`; any number, NaN too.
    pub metrics: Vec<(String, f64)>,
    /// The job, as TOML with everything resolved.
    pub job: String,
    /// Batches that batch norms have seen: the steps, and those before the first.
    pub batches: u64,
}

/// Numbers, and where the tensors lie in them: one safetensors file.
#[derive(Clone, Debug)]
pub struct Shard {
    /// The file's name, such as [`MODEL_FILE`]; it ends with `.safetensors`.
    pub file: String,
    /// What the file has the numbers in. For the numbers of a type that is stored in half, that type: nothing is lost.
    pub dtype: DType,
    /// The tensors, in the file's order. Shared, so that the next snapshot need not build it again.
    pub tensors: Arc<[TensorAt]>,
    /// The first numbers: an arena that an engine lends, read once from where it lies.
    pub lent: Option<(Arc<Loan>, Kept)>,
    /// Where the numbers are asked for, if other ranks have some of them: then tensors lie nowhere here.
    pub(crate) asked: Option<AskedNumbers>,
    /// The numbers after those. Gaps between tensors are not written.
    pub data: Vec<f32>,
}

/// Where a tensor lies in its shard.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorAt {
    /// The tensor's name: PyTorch's.
    pub name: String,
    /// Its dims.
    pub dims: Vec<usize>,
    /// Its first element among the shard's numbers.
    pub start: usize,
}

impl Shard {
    /// A shard with a copy of `arena` in `buffer`, whose old content is dropped. A recycled buffer
    /// ([`Store::take_buffers`]) that is large enough makes this one copy and no allocation.
    pub fn copy(file: &str, tensors: Arc<[TensorAt]>, arena: &[f32], mut buffer: Vec<f32>) -> Shard {
        buffer.clear();
        buffer.extend_from_slice(arena);
        Shard { file: file.into(), dtype: DType::F32, tensors, lent: None, asked: None, data: buffer }
    }

    fn n_lent(&self) -> usize {
        self.lent.as_ref().map_or(0, |(loan, what)| loan.len(*what))
    }

    /// How many numbers there are.
    fn len(&self) -> usize {
        self.n_lent() + self.data.len()
    }

    /// How many numbers are overwritten before this one of a tensor, in the step that comes; 0 for those that are not.
    fn turn(&self, tensor: usize, first: usize) -> usize {
        let at = self.tensors[tensor].start + first;
        let Some((loan, _)) = self.lent.as_ref().filter(|_| at < self.n_lent()) else { return 0 };
        let mut before = 0;
        for range in loan.order() {
            if range.contains(&at) {
                return before + at - range.start;
            }
            before += range.len();
        }
        before
    }
}

impl TensorSource for Shard {
    fn read(
        &self,
        tensor: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(&[f32]),
    ) -> Result<(), CheckpointError> {
        if let Some(asked) = &self.asked {
            return asked.read(tensor, range, read);
        }
        let (start, n_lent) = (self.tensors[tensor].start, self.n_lent());
        let range = start + range.start..start + range.end;
        match &self.lent {
            // A tensor lies in one of them.
            Some((loan, what)) if range.start < n_lent => loan.read(*what, range, read),
            _ => read(&self.data[range.start - n_lent..range.end - n_lent]),
        }
        Ok(())
    }
}
