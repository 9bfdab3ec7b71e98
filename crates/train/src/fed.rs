//! Which elements of its inputs a rank is fed: all of them, or those of its own positions where ranks cut sequences.

use std::borrow::Cow;

use polyreme_data::Values;
use polyreme_graph::{Axis, Graph};
use polyreme_parallel::sequence::{FedPart, SequenceOrder, SequencePlace, fed_parts};
use polyreme_parallel::{CompileError, Plan};

use crate::error::TrainError;

/// The parts of inputs that a rank is fed.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Fed {
    parts: Vec<FedPart>,
}

impl Fed {
    /// Of a plan's rank; the graph is that of whole sequences, as it was traced.
    pub(crate) fn new(graph: &Graph, plan: &Plan) -> Result<Fed, TrainError> {
        let ranks = plan.mesh.sequence;
        if ranks == 1 {
            return Ok(Fed::default());
        }
        let (rank, order) = (plan.mesh.place(plan.rank, Axis::Sequence), SequenceOrder::of(graph));
        let parts = fed_parts(graph, SequencePlace { rank, ranks, order }).map_err(CompileError::Sequence)?;
        Ok(Fed { parts })
    }

    /// Whether an input is cut.
    pub(crate) fn cuts(&self, input: &str) -> bool {
        self.part(input).is_some()
    }

    fn part(&self, input: &str) -> Option<&FedPart> {
        self.parts.iter().find(|part| part.name == input)
    }

    /// What the rank is fed of an input.
    pub(crate) fn own<'a, T: Copy + Default>(&self, input: &str, all: &'a [T]) -> Cow<'a, [T]> {
        let Some(part) = self.part(input) else { return all.into() };
        let of_sequence: usize = part.ranges.iter().map(|range| range.len()).sum();
        let mut own = vec![T::default(); all.len() / part.sequence * of_sequence];
        part.copy(all, &mut own);
        own.into()
    }

    /// The labels that the rank's logits are of.
    pub(crate) fn own_labels<'a>(&self, labels: &Values<'a>) -> OwnLabels<'a> {
        match *labels {
            Values::I32(labels) => OwnLabels::I32(self.own("labels", labels)),
            Values::F32(labels) => OwnLabels::F32(self.own("labels", labels)),
            Values::U8(_) => unreachable!("batches are f32 or i32"),
        }
    }
}

/// Labels, all of a batch or some of them.
pub(crate) enum OwnLabels<'a> {
    I32(Cow<'a, [i32]>),
    F32(Cow<'a, [f32]>),
}

impl OwnLabels<'_> {
    pub(crate) fn values(&self) -> Values<'_> {
        match self {
            OwnLabels::I32(labels) => Values::I32(labels),
            OwnLabels::F32(labels) => Values::F32(labels),
        }
    }
}
