//! Keys of `[parallel]` that a job leaves to the planner, by `"auto"`.
//!
//! Such a key has its default until a plan has been found: a job with open keys is planned before it is prepared. `data`, `ranks` and
//! `threads` are open where they are not said, and mean what the others leave; so they are not counted here.

use polyreme_parallel::pipeline::PipelineKind;

use super::spec::ParallelSpec;

/// Which keys are open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenKeys {
    /// `tensor`.
    pub tensor: bool,
    /// `stage`.
    pub stage: bool,
    /// `sequence`.
    pub sequence: bool,
    /// `microbatches`.
    pub microbatches: bool,
    /// `schedule`.
    pub schedule: bool,
    /// `shard_weights`.
    pub shard_weights: bool,
    /// `shard_gradients`.
    pub shard_gradients: bool,
}

impl OpenKeys {
    /// The names of those that are.
    pub fn names(&self) -> Vec<&'static str> {
        let rows = [
            ("tensor", self.tensor),
            ("stage", self.stage),
            ("sequence", self.sequence),
            ("microbatches", self.microbatches),
            ("schedule", self.schedule),
            ("shard_weights", self.shard_weights),
            ("shard_gradients", self.shard_gradients),
        ];
        rows.into_iter().filter(|(_, open)| *open).map(|(name, _)| name).collect()
    }

    /// Whether one is.
    pub fn any(&self) -> bool {
        !self.names().is_empty()
    }
}

/// What a key holds: nothing if it is open.
fn held<T>(open: bool, value: T) -> Option<Option<T>> {
    Some((!open).then_some(value))
}

/// How keys that may be open are read and written; `None` is `"auto"`.
impl ParallelSpec {
    pub(super) fn tensor_key(&self) -> Option<Option<usize>> {
        held(self.open.tensor, self.tensor)
    }

    pub(super) fn set_tensor_key(&mut self, value: Option<usize>) {
        (self.open.tensor, self.tensor) = (value.is_none(), value.unwrap_or(1));
    }

    pub(super) fn stage_key(&self) -> Option<Option<usize>> {
        held(self.open.stage, self.stage)
    }

    pub(super) fn set_stage_key(&mut self, value: Option<usize>) {
        (self.open.stage, self.stage) = (value.is_none(), value.unwrap_or(1));
    }

    pub(super) fn sequence_key(&self) -> Option<Option<usize>> {
        held(self.open.sequence, self.sequence)
    }

    pub(super) fn set_sequence_key(&mut self, value: Option<usize>) {
        (self.open.sequence, self.sequence) = (value.is_none(), value.unwrap_or(1));
    }

    pub(super) fn microbatches_key(&self) -> Option<Option<usize>> {
        match (self.open.microbatches, self.microbatches) {
            (true, _) => Some(None),
            (false, n) => n.map(Some),
        }
    }

    pub(super) fn set_microbatches_key(&mut self, value: Option<usize>) {
        (self.open.microbatches, self.microbatches) = (value.is_none(), value);
    }

    pub(super) fn schedule_key(&self) -> Option<Option<PipelineKind>> {
        held(self.open.schedule, self.schedule)
    }

    pub(super) fn set_schedule_key(&mut self, value: Option<PipelineKind>) {
        (self.open.schedule, self.schedule) = (value.is_none(), value.unwrap_or(PipelineKind::OneFOneB));
    }

    pub(super) fn shard_weights_key(&self) -> Option<Option<bool>> {
        held(self.open.shard_weights, self.shard_weights)
    }

    pub(super) fn set_shard_weights_key(&mut self, value: Option<bool>) {
        (self.open.shard_weights, self.shard_weights) = (value.is_none(), value.unwrap_or(false));
    }

    pub(super) fn shard_gradients_key(&self) -> Option<Option<bool>> {
        held(self.open.shard_gradients, self.shard_gradients)
    }

    pub(super) fn set_shard_gradients_key(&mut self, value: Option<bool>) {
        (self.open.shard_gradients, self.shard_gradients) = (value.is_none(), value.unwrap_or(false));
    }
}
