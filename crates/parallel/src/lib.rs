//! How a step is distributed: plans, and the lowering of a step's graph into one program per rank.
//!
//! Pure data in, pure data out. It knows nothing of sockets, threads or kernels.
//!
//! # Layout
//! - [`mesh`]: how ranks are arranged. [`plan`]: how a step is split, and who keeps what.
//! - [`passes`]: from a step's graph to the body of a microbatch: the passes in their order.
//! - [`mod@schedule`]: from bodies and the shape of a step to a program. [`buckets`]: which gradients are sent
//!   together, and which rank owns them. `reproducible`: steps whose bits do not depend on the number of ranks;
//!   [`tree`]: the fixed tree in which gradients of logical shards are added up; `fixed_blocks`: their norm.
//! - [`stage`]: a step's graph in chunks for the stages of a pipeline: where to cut, and the graph of each chunk.
//! - `stage_body`: the body of a stage of a pipeline. `staged`: the schedule of a pipelined step;
//!   `staged_shards`: of a reproducible one; `staged_across`: of several steps without a flush between them.
//! - `local_steps`: the schedule of steps that ranks take by themselves, before they average their weights.
//!   `fragments`: parts of the model that are exchanged in turn meanwhile.
//! - `low_rank`: which gradients travel as factors.
//! - `choice`: what is chosen once for all graphs of a run.
//! - `forward`: the program of a forward pass, for evaluations. `answer`: what predictions and text need of its output.
//! - `joint`: exchanges inside a body.
//! - `own_part`: the part of a step that a rank has of each microbatch. [`tensor`]: matrices split over ranks.
//!   [`sequence`]: sequences cut over ranks.
//! - [`shard`](mod@shard): weights sharded over ranks.
//! - `split_tensors`: optimizers that look at whole tensors, where ranks have parts of them.
//! - [`sync_norm`]: batch norms with the statistics of all ranks.
//! - [`pipeline`]: in which order each stage of a pipeline runs its microbatches.

#![forbid(unsafe_code)]

mod answer;
pub mod buckets;
mod choice;
mod fixed_blocks;
mod forward;
mod fragments;
mod joint;
mod local_steps;
mod low_rank;
pub mod mesh;
mod own_part;
pub mod passes;
pub mod pipeline;
pub mod plan;
mod reproducible;
pub mod schedule;
pub mod sequence;
mod served;
pub mod shard;
mod split_tensors;
pub mod stage;
mod stage_body;
mod staged;
mod staged_across;
mod staged_shards;
pub mod sync_norm;
pub mod tensor;
pub mod tree;

pub use answer::AnswerRows;
pub use choice::{CutRoom, choose, choose_cuts, choose_layouts};
pub use forward::{compile_answer, compile_forward, standalone};
pub use fragments::fragments;
pub use local_steps::{share_own, take_back_own};
pub use mesh::Mesh;
pub use passes::{Budget, CompileError, compile};
pub use plan::{
    DriftBound, FragmentTurns, LocalSteps, Norms, OuterStep, Plan, ServerPlan, StepShape, Training, Updates,
};
pub use schedule::{average_states, both_passes, schedule};
pub use served::states_of_workers;
pub use shard::{Passes, ShardPlace, shard};
pub use sync_norm::sync_batch_norm;
pub use tree::Subtree;
