//! The passes that turn a step's graph into the body of a microbatch, in their order.

use std::sync::Arc;

use polyreme_graph::recompute::BudgetError;
use polyreme_graph::{Axis, Body, DType, Graph, Program, recompute};
use thiserror::Error;

use crate::plan::{Plan, Training};
use crate::schedule::schedule;
use crate::shard::{Passes, ShardPlace, refusal, shard};
use crate::stage::{CutError, PlaceError};
use crate::stage_body::{cut_origins, stage_body};
use crate::sync_norm::sync_batch_norm;
use crate::tensor::{TensorPlace, TensorSplit, split_as};

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
    /// Its weights cannot be sharded so.
    #[error("{0}")]
    Shard(String),
    /// Its matrices cannot be split over this number of ranks.
    #[error("{0}")]
    Tensor(String),
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
    /// The sum of a tied gradient would depend on the number of stages.
    #[error(
        "`parallel.reproducible`: {n} parts of a \"{kind}\" pipeline use `{name}`, and its gradient would be added up in \
         another order than on one rank; set `parallel.schedule = \"1f1b\"` or \"zb-h1\""
    )]
    TiedOrder {
        /// The parameter.
        name: String,
        /// How many parts of the network contribute to its gradient.
        n: usize,
        /// The schedule.
        kind: &'static str,
    },
    /// Random bits that round moments depend on where they lie, and so on the stage.
    #[error(
        "`parallel.reproducible` with several stages needs `train.optimizer` with moments in f32; bf16 ones are rounded by \
         random bits that depend on the stage"
    )]
    StagedRounding,
}

/// The part of a graph that this rank of the tensor axis computes, if there are several.
pub(crate) fn tensor_part(graph: &Graph, plan: &Plan) -> Result<Option<TensorSplit>, CompileError> {
    let place = TensorPlace { rank: plan.mesh.place(plan.rank, Axis::Tensor), ranks: plan.mesh.tensor };
    let part = (place.ranks > 1).then(|| split_as(graph, place, &plan.layouts));
    part.transpose().map_err(CompileError::Tensor)
}

/// Compiles a differentiated graph for one size of microbatches.
pub fn compile(
    step: &Graph,
    plan: &Plan,
    training: &Training,
    budget: Option<Budget>,
) -> Result<Body, CompileError> {
    // 0. Where the network is cut into stages: in the same places on all ranks, whatever is rewritten later.
    let cuts = cut_origins(step, plan)?;
    // 1. What is stored in half, and where it is cast.
    let step = &plan.precision.apply(step);
    // 2. The part of it that this rank of the tensor axis computes.
    let part = tensor_part(step, plan)?;
    let step = part.as_ref().map_or(step, |part| &part.graph);
    // 3. Before recomputation: ranks with shards of different sizes may recompute different values, but they must take
    //    part in the same sums.
    let synced = plan.syncs_norms().then(|| sync_batch_norm(step));
    let step = synced.as_ref().unwrap_or(step);
    if let Some(why) = plan.shard_place().and_then(|place| shard_refusal(step, place, plan, training)) {
        return Err(CompileError::Shard(why));
    }
    if plan.mesh.stage > 1 {
        return match (budget, plan.shards) {
            (Some(_), _) => Err(CompileError::StagedBudget),
            (None, Some(_)) if training.moments != DType::F32 => Err(CompileError::StagedRounding),
            (None, _) => {
                let body = stage_body(step, plan, &cuts)?.with_strict(plan.precision.strict);
                Ok(body.with_reproducible(plan.is_reproducible()))
            }
        };
    }
    // 5. Shards of weights: after recomputation, whose nodes gather with the rest of the backward pass. Then fusion, and the order
    //    in which gradients are made.
    let last = |step: &Graph| {
        let sharded = plan.shard_place().map(|place| shard(step, place, Passes::Together));
        let step = sharded.as_ref().unwrap_or(step);
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

/// Why the weights of a step cannot be sharded as planned, if they cannot.
fn shard_refusal(step: &Graph, place: ShardPlace, plan: &Plan, training: &Training) -> Option<String> {
    if plan.shards.is_some() {
        return Some(
            "`shard_weights` does not work with `parallel.reproducible` yet; leave one of them out".into(),
        );
    }
    if !training.optimizer.by_element() {
        let why = "this optimizer needs whole tensors, and `shard_weights` leaves a rank shards of them; use adamw, adam, \
                   sgd or lion, or leave it out";
        return Some(why.into());
    }
    refusal(step, place)
}
