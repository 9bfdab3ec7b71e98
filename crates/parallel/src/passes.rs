//! The passes that turn a step's graph into the body of a microbatch, in their order.

use std::sync::Arc;

use polyreme_graph::recompute::BudgetError;
use polyreme_graph::{Body, Graph, Program, recompute};
use thiserror::Error;

use crate::own_part::{own_part, part_of};
use crate::plan::{Plan, Training};
use crate::schedule::schedule;
use crate::stage::{CutError, PlaceError};
use crate::stage_body::stage_body;
use crate::sync_norm::sync_batch_norm;

/// How much memory a rank may use, and how to measure a program's.
pub struct Budget<'a> {
    /// The most that a rank may use.
    pub bytes: usize,
    /// Bytes that a rank needs for a program.
    pub measure: &'a dyn Fn(&Program) -> usize,
}

/// Why a step cannot be compiled as planned.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum CompileError {
    /// It takes more memory than it may.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Its matrices cannot be split over this number of ranks.
    #[error("{0}")]
    Tensor(String),
    /// Its sequences cannot be cut over this number of ranks.
    #[error("{0}")]
    Sequence(String),
    /// Logical shards are added up by ranks that have all positions.
    #[error(
        "`parallel.reproducible` does not work with sequences that are cut over ranks yet; leave one of them out"
    )]
    SequenceShards,
    /// There is no such pipeline.
    #[error("{0}")]
    Pipeline(String),
    /// The network cannot be cut so.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// What is cut belongs together.
    #[error(transparent)]
    Cut(#[from] CutError),
    /// Another number of cuts than the pipeline has.
    #[error(
        "`parallel.cuts` names {got} layers, and a \"{kind}\" pipeline of {n_chunks} parts is cut before {want}; name {want}, or none"
    )]
    Cuts {
        /// How many there are.
        got: usize,
        /// How many there should be.
        want: usize,
        /// How many parts the network is cut into.
        n_chunks: usize,
        /// The schedule.
        kind: &'static str,
    },
    /// Memory that is planned for one stage only.
    #[error("`train.memory_mib` does not work with several stages yet; leave it out, or use more stages")]
    StagedBudget,
    /// Logical shards are added up by ranks that have all layers.
    #[error("`parallel.reproducible` does not work with several stages yet; leave one of them out")]
    StagedShards,
}

/// Compiles a differentiated graph for one size of microbatches.
pub fn compile(
    step: &Graph,
    plan: &Plan,
    training: &Training,
    budget: Option<Budget>,
) -> Result<Body, CompileError> {
    // 1. What is stored in half, and where it is cast.
    let step = &plan.precision.apply(step);
    // 2. The positions of it that this rank of the sequence axis has, and the part of its matrices.
    let whole = step;
    let part = own_part(whole, plan)?;
    let step = part.as_ref().unwrap_or(whole);
    // 3. Before recomputation: ranks with shards of different sizes may recompute different values, but they must take
    //    part in the same sums.
    let synced = plan.syncs_norms().then(|| sync_batch_norm(step));
    let step = synced.as_ref().unwrap_or(step);
    if plan.mesh.stage > 1 {
        return match (budget, plan.shards) {
            (Some(_), _) => Err(CompileError::StagedBudget),
            (None, Some(_)) => Err(CompileError::StagedShards),
            (None, None) => {
                // Ranks along the sequence axis have different graphs, and must be cut alike.
                let like = if plan.mesh.sequence > 1 { part_of(whole, plan, 0)? } else { None };
                let body = stage_body(step, like.as_ref(), plan)?.with_strict(plan.precision.strict);
                Ok(body.with_reproducible(plan.is_reproducible()))
            }
        };
    }
    // 5. Fusion, and the order in which gradients are made.
    let last = |step: &Graph| {
        let body = match plan.updates_at_once(training) {
            true => Body::at_once(step, training.optimizer),
            false => Body::new(step),
        };
        body.with_strict(plan.precision.strict).with_reproducible(plan.is_reproducible())
    };
    let Some(Budget { bytes, measure }) = budget else { return Ok(last(step)) };
    // 4. Recomputation, measured on the result of the passes after it. All ranks must come to the same decision, so all
    //    measure the last rank, whose shards are the largest.
    let largest = Plan { rank: plan.mesh.ranks() - 1, ..plan.clone() };
    let measure =
        |step: &Graph| measure(&schedule(&largest, training, &[Arc::new(last(step))], &largest.whole_step()));
    Ok(last(&recompute(step, bytes, &measure)?.graph))
}
