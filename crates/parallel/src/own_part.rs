//! The part of a step that a rank computes for each microbatch: some positions of its sequences, and some of its matrices.
//!
//! Positions first: what is left is an ordinary step of fewer positions, whose matrices are split next. Rings come last; see
//! [`crate::sequence::expand_rings`].

use polyreme_graph::graph::Node;
use polyreme_graph::{Axis, ExchangeKind, Graph, Op, Part, Shape};

use crate::passes::CompileError;
use crate::plan::Plan;
use crate::sequence::{SequenceOrder, SequencePlace, expand_rings, split_positions};
use crate::tensor::{StoredLayouts, TensorPlace, split_as};

/// A rank's part of a step, or of a forward pass.
pub(crate) struct OwnPart {
    /// Its graph.
    pub(crate) graph: Graph,
    /// How parameters and states are split over tensor ranks.
    pub(crate) layouts: StoredLayouts,
}

/// The part of a plan's rank; `None` if that is all. `cuts` are the traced nodes before which stages are cut.
pub(crate) fn own_part(step: &Graph, plan: &Plan, cuts: &[u32]) -> Result<Option<OwnPart>, CompileError> {
    let rank = plan.mesh.place(plan.rank, Axis::Sequence);
    let part = part_of(step, plan, rank, cuts)?;
    if let (Some(part), true) = (&part, plan.mesh.sequence > 1 && plan.mesh.tensor > 1) {
        // Every rank looks at all of them, so that all come to the same conclusion.
        for other in 0..plan.mesh.sequence {
            let other = part_of(step, plan, other, cuts)?;
            if other.is_some_and(|other| shared(&other.graph) != shared(&part.graph)) {
                let (tensor, sequence) = (plan.mesh.tensor, plan.mesh.sequence);
                return Err(CompileError::Sequence(format!(
                    "tensor = {tensor} and sequence = {sequence} do not work together for this model: ranks would split its \
                     matrices differently; use one of them"
                )));
            }
        }
    }
    Ok(part)
}

/// The part of a rank along the sequence axis.
fn part_of(step: &Graph, plan: &Plan, rank: usize, cuts: &[u32]) -> Result<Option<OwnPart>, CompileError> {
    let mesh = &plan.mesh;
    let place = SequencePlace { rank, ranks: mesh.sequence, order: SequenceOrder::of(step) };
    let cut = match mesh.sequence {
        1 => None,
        _ => Some(split_positions(step, place).map_err(CompileError::Sequence)?),
    };
    let tensor = TensorPlace { rank: mesh.place(plan.rank, Axis::Tensor), ranks: mesh.tensor };
    let part = match (&cut, mesh.tensor) {
        (_, 1) => None,
        (None, _) => Some(split_as(step, tensor, &plan.layouts, cuts)),
        (Some(cut), _) => Some(split_as(&cut.graph, tensor, &plan.layouts, cuts)),
    };
    let part = part.transpose().map_err(CompileError::Tensor)?;
    let part = part.map(|part| OwnPart { graph: part.graph, layouts: part.layouts });
    let Some(cut) = cut else { return Ok(part) };
    let (graph, layouts) = match part {
        Some(part) => (part.graph, part.layouts),
        None => (cut.graph, StoredLayouts::new()),
    };
    Ok(Some(OwnPart { graph: expand_rings(&graph, place, cut.time), layouts }))
}

/// What ranks along the sequence axis must have alike: parts of parameters, and what they add up or pass round a ring.
fn shared(graph: &Graph) -> (Vec<Option<Part>>, Vec<Shape>) {
    let joint = |node: &&Node| match node.op {
        Op::Exchange { axis: Axis::Sequence, kind: ExchangeKind::Pass { to, from } } => {
            to.is_some() && from.is_some()
        }
        Op::Exchange { axis: Axis::Sequence, .. } => true,
        _ => false,
    };
    let shapes = graph.nodes.iter().filter(joint).map(|node| graph.shape(node.outputs[0]).clone());
    (graph.params.iter().map(|p| p.part).collect(), shapes.collect())
}
