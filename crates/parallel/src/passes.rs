//! The passes that turn a step's graph into the body of a microbatch, in their order.

use std::sync::Arc;

use polyreme_graph::recompute::BudgetError;
use polyreme_graph::{Body, Graph, Program, recompute};

use crate::plan::{Plan, Training};
use crate::schedule::schedule;
use crate::sync_norm::sync_batch_norm;

/// How much memory a rank may use, and how to measure a program's.
pub struct Budget<'a> {
    /// The most that a rank may use.
    pub bytes: usize,
    /// Bytes that a rank needs for a program.
    pub measure: &'a dyn Fn(&Program) -> usize,
}

/// Compiles a differentiated graph for one size of microbatches.
pub fn compile(
    step: &Graph,
    plan: &Plan,
    training: &Training,
    budget: Option<Budget>,
) -> Result<Body, BudgetError> {
    // 1. What is stored in half, and where it is cast.
    let step = &plan.precision.apply(step);
    // 2. Before recomputation: ranks with shards of different sizes may recompute different values, but they must take
    //    part in the same sums.
    let synced = plan.syncs_norms().then(|| sync_batch_norm(step));
    let step = synced.as_ref().unwrap_or(step);
    // 4. Fusion, and the order in which gradients are made.
    let last = |step: &Graph| {
        let body = match plan.updates_at_once(training) {
            true => Body::at_once(step, training.optimizer),
            false => Body::new(step),
        };
        body.with_strict(plan.precision.strict).with_reproducible(plan.is_reproducible())
    };
    let Some(Budget { bytes, measure }) = budget else { return Ok(last(step)) };
    // 3. Recomputation, measured on the result of the passes after it. All ranks must come to the same decision, so all
    //    measure the last rank, whose shards are the largest.
    let largest = Plan { rank: plan.mesh.ranks() - 1, ..plan.clone() };
    let measure =
        |step: &Graph| measure(&schedule(&largest, training, &[Arc::new(last(step))], &largest.whole_step()));
    Ok(last(&recompute(step, bytes, &measure)?.graph))
}
