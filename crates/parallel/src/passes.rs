//! The passes that turn a step's graph into the body of a microbatch, in their order.

use std::sync::Arc;

use polyreme_graph::recompute::BudgetError;
use polyreme_graph::{Axis, Body, DType, Graph, Keeps, Program, Weights, recompute};
use thiserror::Error;

use crate::choice::CutRoom;
use crate::own_part::own_part;
use crate::plan::{Plan, Training};
use crate::schedule::schedule;
use crate::shard::{Passes, ShardPlace, refusal, shard};
use crate::stage::{CutError, PlaceError};
use crate::stage_body::{StageRoom, cut_origins, stage_body};
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
    /// Its weights cannot be sharded so.
    #[error("{0}")]
    Shard(String),
    /// Its matrices cannot be split over this number of ranks.
    #[error("{0}")]
    Tensor(String),
    /// Its sequences cannot be cut over this number of ranks.
    #[error("{0}")]
    Sequence(String),
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
    /// What would empty a pipeline that is not to be flushed.
    #[error(
        "`parallel.schedule = \"2bw\"` does not work with {what}; set `parallel.schedule = \"zb-h1\"`, or leave it out"
    )]
    Flushless {
        /// The setting.
        what: &'static str,
    },
    /// Random bits that round moments depend on where they lie, and so on the stage.
    #[error(
        "`parallel.reproducible` with several stages needs `train.optimizer` with moments in f32; bf16 ones are rounded by \
         random bits that depend on the stage"
    )]
    StagedRounding,
}

/// The plan of the rank on whose memory recomputation depends. All ranks of a stage must come to the same decision, so all
/// measure the last one of their part of the data axis, whose shards are the largest.
fn largest(plan: &Plan) -> Plan {
    let rank = plan.mesh.group(plan.rank, Axis::Data).last().copied().unwrap_or(plan.rank);
    // A longer run takes no more memory than two steps.
    Plan { rank, run_steps: plan.run_steps.min(2), ..plan.clone() }
}

/// Names what a pipeline without a flush between steps cannot have.
fn without_flush(plan: &Plan, training: &Training) -> Result<(), &'static str> {
    match () {
        () if training.scaled => Err(
            "`train.precision = \"f16\"`, whose scale would have to be chosen for each step before its forward passes",
        ),
        () if plan.shards.is_some() => Err("`parallel.reproducible`, since its gradients are one step old"),
        () if plan.shard_place().is_some() => {
            Err("`parallel.shard_weights`, since shards are gathered from one version of the weights")
        }
        () if plan.ranks() > 1 && (plan.keeps, plan.weights) != (Keeps::All, Weights::Own) => Err(
            "`parallel.shard_optimizer` or `shard_gradients`, since ranks would wait for each other's part of every update",
        ),
        () => Ok(()),
    }
}

/// Compiles a differentiated graph for one size of microbatches.
pub fn compile(
    step: &Graph,
    plan: &Plan,
    training: &Training,
    budget: Option<Budget>,
) -> Result<Body, CompileError> {
    // 0. Where the network is cut into stages: in the same places on all ranks, whatever is rewritten later.
    let room = budget.as_ref().map(|budget| CutRoom { bytes: budget.bytes, training });
    let cuts = cut_origins(step, plan, room)?;
    // 1. What is stored in half, and where it is cast.
    let step = &plan.precision.apply(step);
    // 2. The positions of it that this rank of the sequence axis has, and the part of its matrices.
    let part = own_part(step, plan, &cuts)?;
    let step = part.as_ref().map_or(step, |part| &part.graph);
    // 3. Before recomputation: ranks with shards of different sizes may recompute different values, but they must take
    //    part in the same sums.
    let synced = plan.syncs_norms().then(|| sync_batch_norm(step));
    let step = synced.as_ref().unwrap_or(step);
    if let Some(why) = plan.shard_place().and_then(|place| shard_refusal(step, place, plan, training)) {
        return Err(CompileError::Shard(why));
    }
    if plan.is_flushless() {
        without_flush(plan, training).map_err(|what| CompileError::Flushless { what })?;
    }
    if plan.mesh.stage > 1 {
        let (keeps, weights) = plan.ownership(training.optimizer);
        if keeps == Keeps::OwnGradients && weights != Weights::Sharded {
            return Err(CompileError::Shard(OWN_GRADIENTS_STAGED.into()));
        }
        if plan.shards.is_some() && training.moments != DType::F32 {
            return Err(CompileError::StagedRounding);
        }
        // 4 and 5, chunk by chunk.
        let of_plan =
            |body: Body| body.with_strict(plan.precision.strict).with_reproducible(plan.is_reproducible());
        let largest = largest(plan);
        let bytes_of = |measure: &dyn Fn(&Program) -> usize, body: Body| {
            measure(&schedule(&largest, training, &[Arc::new(of_plan(body))], &largest.whole_step()))
        };
        let body = match budget {
            None => stage_body(step, plan, &cuts, None)?,
            Some(Budget { bytes, measure }) => {
                let measure = |body: Body| bytes_of(measure, body);
                stage_body(step, plan, &cuts, Some(StageRoom { bytes, measure: &measure }))?
            }
        };
        return Ok(of_plan(body));
    }
    // 5. Shards of weights: after recomputation, whose nodes gather with the rest of the backward pass. Then fusion, and the order
    //    in which gradients are made.
    let last = |step: &Graph| {
        let declared = polyreme_graph::body::declared(step);
        let sharded = plan.shard_place().map(|place| shard(step, place, Passes::Together));
        let step = sharded.as_ref().unwrap_or(step);
        let mut body = match plan.updates_at_once(training) {
            true => Body::at_once(step, training.optimizer),
            false => Body::new(step),
        };
        // The blocks of the norm are those of whole tensors.
        body.declared = declared;
        body.with_strict(plan.precision.strict).with_reproducible(plan.is_reproducible())
    };
    let Some(Budget { bytes, measure }) = budget else { return Ok(last(step)) };
    // 4. Recomputation, measured on the result of the passes after it.
    let largest = largest(plan);
    let measure =
        |step: &Graph| measure(&schedule(&largest, training, &[Arc::new(last(step))], &largest.whole_step()));
    Ok(last(&recompute(step, bytes, &measure)?.graph))
}

/// Buffers that alternate hold the gradients of one microbatch, and stages of a pipeline have several on their way.
const OWN_GRADIENTS_STAGED: &str = "`parallel.shard_gradients` does not work with several stages yet; set `shard_weights = true`, which shards \
     gradients too, or leave it out";

/// Why the weights of a step cannot be sharded as planned, if they cannot.
fn shard_refusal(step: &Graph, place: ShardPlace, plan: &Plan, training: &Training) -> Option<String> {
    if plan.shards.is_some() && !training.optimizer.by_element() {
        let why = "`parallel.reproducible` with `shard_weights` needs an optimizer that goes by element: this one adds up norms \
                   of shards, whose last bits depend on the number of ranks; use adamw, adam, sgd or lion, or leave one of \
                   them out";
        return Some(why.into());
    }
    refusal(step, place)
}
