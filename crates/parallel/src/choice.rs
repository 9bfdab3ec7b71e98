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

use polyreme_graph::{DType, Graph};

use crate::own_part::own_part;
use crate::passes::CompileError;
use crate::pipeline::Timetable;
use crate::plan::{Plan, Training};
use crate::stage::{self, ChunkLoad, MemoryBound, PlaceError, Position, nodes_by_name};
use crate::stage_body::usual_timetable;
use crate::tensor::StoredLayouts;

/// The plan with everything that is to be chosen once, from a differentiated graph that has not been rewritten. What the plan
/// already says stays.
///
/// `cost` is the time of each node of the step, in any unit ([`flops`](stage::flops), or
/// [`measured`](stage::measured)), and `room` what each rank may take.
pub fn choose(
    step: &Graph,
    plan: &Plan,
    cost: &dyn Fn(usize) -> f64,
    room: Option<CutRoom>,
) -> Result<Plan, CompileError> {
    let cuts = choose_cuts(step, plan, cost, room)?;
    Ok(Plan { cuts, layouts: choose_layouts(step, plan)?, ..plan.clone() })
}

/// How the parameters and states of a step are split over the tensor ranks of a plan.
pub fn choose_layouts(step: &Graph, plan: &Plan) -> Result<StoredLayouts, CompileError> {
    let part = match plan.mesh.tensor {
        1 => None,
        _ => own_part(&plan.precision.apply(step), plan, &[])?,
    };
    Ok(part.map_or_else(StoredLayouts::new, |part| part.layouts))
}

/// What a rank may take, for the choice of cuts.
#[derive(Clone, Copy, Debug)]
pub struct CutRoom<'a> {
    /// The most bytes of a rank.
    pub bytes: usize,
    /// What is kept for each parameter.
    pub training: &'a Training,
}

/// The names of the places where a plan with several stages cuts the network: its own, or those that make the slowest part as
/// fast as can be. See [`choose`].
///
/// If room is short, cuts are chosen so that every stage has room for all its activations; or else for its parameters,
/// gradients and moments at least, and it recomputes activations. These are estimates: whether a stage fits is measured
/// when it is compiled.
pub fn choose_cuts(
    step: &Graph,
    plan: &Plan,
    cost: &dyn Fn(usize) -> f64,
    room: Option<CutRoom>,
) -> Result<Vec<String>, CompileError> {
    if plan.mesh.stage == 1 {
        return Ok(Vec::new());
    }
    let timetable = usual_timetable(plan)?;
    let n_chunks = timetable.place.len();
    if plan.cuts.is_empty() {
        let found = chosen(step, plan, &timetable, cost, room)?;
        return Ok(found.into_iter().map(|position| position.name).collect());
    }
    if plan.cuts.len() + 1 != n_chunks {
        let (got, want) = (plan.cuts.len(), n_chunks - 1);
        return Err(CompileError::Cuts { got, want, n_chunks, kind: plan.pipeline.name() });
    }
    nodes_by_name(step, &plan.cuts)?;
    Ok(plan.cuts.clone())
}

/// The positions of the cuts, within as much of the bound as can be kept.
fn chosen(
    step: &Graph,
    plan: &Plan,
    timetable: &Timetable,
    cost: &dyn Fn(usize) -> f64,
    room: Option<CutRoom>,
) -> Result<Vec<Position>, CompileError> {
    let n_chunks = timetable.place.len();
    if let Some(CutRoom { bytes, training }) = room {
        let bytes = bytes / timetable.chunks_per_stage;
        for with_activations in [true, false] {
            let takes = |chunk: usize, load: ChunkLoad| {
                let held = timetable.held(timetable.place[chunk]).microbatches;
                taken(plan, training, load, if with_activations { held } else { 0 })
            };
            match stage::choose(step, n_chunks, cost, Some(MemoryBound { bytes, takes: &takes })) {
                Err(PlaceError::Memory { .. }) => {}
                found => return Ok(found?),
            }
        }
    }
    Ok(stage::choose(step, n_chunks, cost, None)?)
}

/// About how many bytes a rank takes for a chunk, with the activations of this number of microbatches.
fn taken(plan: &Plan, training: &Training, load: ChunkLoad, microbatches: usize) -> usize {
    let sums = usize::from(plan.microbatches > 1);
    let stored = (2 + sums) * DType::F32.bytes() + training.optimizer.n_states() * training.moments.bytes();
    // The graph is that of one rank in f32.
    let kept = load.kept_bytes / if plan.precision.half.is_some() { 2 } else { 1 };
    (load.params * stored + kept * microbatches) / plan.mesh.tensor
}
