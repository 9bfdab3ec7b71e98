//! Sequence parallelism: a rewrite of a step for one of several ranks that cut long sequences among them.
//!
//! Each rank has some positions of every sequence of the microbatch, and all weights. Almost everything in a step is done for
//! each position by itself, so it stays as it is, on fewer positions. The rest:
//!
//! ```text
//! attention            keys and values go round a ring                          `ring`
//! recurrent layers     the state is handed on from rank to rank                 `hand_on`
//! losses, means        a sum of the ranks' terms                                `loss`, `rules`
//! positions, dropout   the rows of the table, and the mask, of the rank's positions
//! gradients            each rank has a term; they are summed over the axis
//! ```
//!
//! So activations take `1/R` of the memory, whatever the length. A value is split by position, whole, or a sum of which each
//! rank has a term; which of them follows from the inputs, op by op. The rewrite comes after differentiation, so forward and
//! backward passes are treated alike, and before matrices are split, which then sees an ordinary step of fewer positions.
//!
//! What comes after positions are summed over, such as the head of a classifier, every rank computes alike, and its gradients
//! need no sum. An op without a rule is computed by every rank from whole values, and listed in [`SequenceSplit::replicated`].
//!
//! # What must hold
//! All ranks of the axis run the same samples, and pass the same messages in the same order. If a peer dies, the message or the sum
//! that needs it fails and so does the step on every rank; no parameter has changed.
//!
//! # Layout
//! - [`place`]: which positions a rank has, and what it is fed. `convert`: from one layout to another.
//! - `rules`: a row for each op. `ring`, `hand_on`, `loss`: ops of several nodes.
//! - [`rewrite`]: the walk over the nodes. `expand`: rings, which come last.

mod convert;
mod expand;
mod hand_on;
mod loss;
pub mod place;
pub mod rewrite;
mod ring;
mod rules;

#[cfg(test)]
mod tests;

pub use expand::expand_rings;
pub use place::{FedPart, SequenceOrder, SequencePlace, fed_parts};
pub use rewrite::{SequenceSplit, split, split_positions};
