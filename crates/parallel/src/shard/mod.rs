//! Weights sharded over the ranks of the data axis (FSDP, ZeRO-3): a rewrite of a step in which each rank keeps a shard of every
//! large parameter, of its gradient and of its optimizer state. Whole tensors exist only around the layers that use them.
//!
//! ```text
//! forward    gather W₁, gather W₂      the shards of all ranks, one layer ahead of their use
//!            y₁ = x·W₁ᵀ                then the memory of W₁ is free
//!            gather W₃
//!            y₂ = y₁·W₂ᵀ …
//! backward   gather W₂                 again, unless it is still there: the last layer's is
//!            dy₁ = dy₂·W₂
//!            dW₂, scatter dW₂          the sum over the ranks, of which each gets its shard
//!            gather W₁ …
//!            own shard of dW₂          when a layer's worth of later gradients is on its way
//! end        update own shards         nothing is gathered after it: the next step gathers what it reads
//! ```
//!
//! Everything is a node of the graph: a gather or a scatter is an exchange like those of the tensor axis, which the program
//! starts where the node stands and waits for at the first reader. The memory plan sees whole tensors as values with a first and
//! a last use, so "freed after" is nothing but that.
//!
//! # Rounds, bytes, memory
//! With `n` elements and `R` ranks, a gather and a scatter each send `n·(R - 1)/R` elements per rank. A step of one microbatch has
//! two gathers and a scatter of every sharded parameter: 1.5 times the bytes of an all-reduce of the gradients. Every microbatch
//! gathers and scatters again. A rank holds `1/R` of the sharded weights, gradients and moments, and besides at most the weights
//! of two layers and the gradients of about two.
//!
//! # What is sharded
//! Parameters with at least two dims and 1024 elements, along the first dim that divides by the number of ranks. Biases and norms
//! stay on all ranks: they are less than 1% of a transformer, and each would cost an exchange. Their gradients are summed in
//! buckets as ever. Of a parameter that ranks of the tensor axis split already, each rank shards its part.
//!
//! # What must hold
//! All ranks of the data axis gather and scatter in the same order, however many samples they have: what is gathered follows from
//! the layers and shapes of parameters alone. A rank without samples takes part: it brings its shards, adds zeros to gradients,
//! and takes its shards of the sums (`idle`). With stages each chunk of the network gathers what it reads itself, and a data rank
//! with fewer microbatches goes through the timetable of the others. In evaluations, whose forward passes gather too, all must
//! have equally many.
//!
//! If a peer dies, the exchange that is waited for fails with a report that names it, and so does the step. A rank updates after
//! its last exchange of a step, so nothing has changed on the ranks where it failed. The dead rank's shards are gone with it: the run
//! goes on from a checkpoint.
//!
//! # Layout
//! - `choose`: which parameters are sharded, and how. `groups`: which layers read them, in each pass.
//! - [`rewrite`]: the walk over the nodes. `idle`: what a rank without samples computes.
//! - `leaves`: reproducible steps, whose gradients are added up in a fixed tree.

mod choose;
mod groups;
mod idle;
mod leaves;
pub mod rewrite;

#[cfg(test)]
mod tests;

pub use choose::{ShardPlace, refusal, shard_of};
pub(crate) use idle::{idle, sharded_range};
pub(crate) use leaves::{LeafLayout, into_leaf, whole_grads};
pub use rewrite::{Passes, shard};
