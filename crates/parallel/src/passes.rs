//! The passes that turn a step's graph into the body of a microbatch, in their order.

use std::sync::Arc;

use polyreme_graph::recompute::BudgetError;
use polyreme_graph::{Body, Graph, Program, recompute};

use crate::plan::{Plan, Training};
use crate::schedule::schedule;
use crate::sync_norm::sync_batch_norm;

/// What a rank may take, and what a program would.
pub struct Budget<'a> {
    /// The most.
    pub bytes: usize,
    /// Of a program.
    pub measure: &'a dyn Fn(&Program) -> usize,
}

/// Compiles a differentiated graph for one size of microbatches.
pub fn compile(
    step: &Graph,
    plan: &Plan,
    training: &Training,
    budget: Option<Budget>,
) -> Result<Body, BudgetError> {
    // 1. Before anything is recomputed: ranks with parts of different size may recompute different things, but they must
    //    meet for the same sums.
    let synced = plan.syncs_norms().then(|| sync_batch_norm(step));
    let step = synced.as_ref().unwrap_or(step);
    // 3. Fusion, and the order in which gradients are made.
    let last = |step: &Graph| match plan.updates_at_once(training) {
        true => Body::at_once(step, training.optimizer),
        false => Body::new(step),
    };
    let Some(Budget { bytes, measure }) = budget else { return Ok(last(step)) };
    // 2. Recomputation, measured by what the passes after it make of a graph. All ranks must come to the same, so all measure
    //    the last rank, whose parts are the largest.
    let largest = Plan { rank: plan.mesh.ranks() - 1, ..plan.clone() };
    let measure =
        |step: &Graph| measure(&schedule(&largest, training, &[Arc::new(last(step))], &largest.whole_step()));
    Ok(last(&recompute(step, bytes, &measure)?.graph))
}
