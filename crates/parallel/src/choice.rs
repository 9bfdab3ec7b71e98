//! What is chosen once for a run: where its network is cut into stages, and how its parameters are split over tensor ranks.
//!
//! A run compiles its model several times: for microbatches of several sizes, and for evaluations. What is best for one of
//! these graphs need not be for another, but a rank has one part of each parameter, so all must agree. A run chooses for its
//! usual microbatch, and puts the choice into its plan:
//!
//! ```text
//!  choose(step, plan, cost) ──▶ plan with cuts and layouts ──▶ compile(step of n samples), compile_forward(evaluation), ..
//! ```
//!
//! All of it follows from shapes, the plan and the costs, so ranks that have the same ones come to the same choice. Costs that were
//! measured are not the same on two ranks: then one rank chooses the cuts and tells the others.

use polyreme_graph::Graph;

use crate::passes::{CompileError, tensor_part};
use crate::plan::Plan;
use crate::stage::{self, MemoryBound, nodes_by_name};
use crate::stage_body::usual_timetable;
use crate::tensor::StoredLayouts;

/// The plan with everything that is to be chosen once, from a differentiated graph that has not been rewritten. What the plan
/// already says stays.
///
/// `cost` is the time of each node of the step, in any unit ([`flops`](stage::flops)), and
/// `memory` what each part may take.
pub fn choose(
    step: &Graph,
    plan: &Plan,
    cost: &dyn Fn(usize) -> f64,
    memory: Option<MemoryBound>,
) -> Result<Plan, CompileError> {
    let cuts = choose_cuts(step, plan, cost, memory)?;
    Ok(Plan { cuts, layouts: choose_layouts(step, plan)?, ..plan.clone() })
}

/// How the parameters and states of a step are split over the tensor ranks of a plan.
pub fn choose_layouts(step: &Graph, plan: &Plan) -> Result<StoredLayouts, CompileError> {
    let part = match plan.mesh.tensor {
        1 => None,
        _ => tensor_part(&plan.precision.apply(step), plan)?,
    };
    Ok(part.map_or_else(StoredLayouts::new, |part| part.layouts))
}

/// The names of the places where a plan with several stages cuts the network: its own, or those that make the slowest part as
/// fast as can be, of at most so much memory. See [`choose`].
pub fn choose_cuts(
    step: &Graph,
    plan: &Plan,
    cost: &dyn Fn(usize) -> f64,
    memory: Option<MemoryBound>,
) -> Result<Vec<String>, CompileError> {
    if plan.mesh.stage == 1 {
        return Ok(Vec::new());
    }
    let timetable = usual_timetable(plan)?;
    let n_chunks = timetable.place.len();
    if plan.cuts.is_empty() {
        let found = stage::choose(step, n_chunks, cost, memory)?;
        return Ok(found.into_iter().map(|position| position.name).collect());
    }
    if plan.cuts.len() + 1 != n_chunks {
        let (got, want) = (plan.cuts.len(), n_chunks - 1);
        return Err(CompileError::Cuts { got, want, n_chunks, kind: plan.pipeline.name() });
    }
    nodes_by_name(step, &plan.cuts)?;
    Ok(plan.cuts.clone())
}
