//! Tensor parallelism: a rewrite of a step for one of several ranks that split its matrices among them.
//!
//! Every value of the step is whole on each rank, split along a dim, or a sum of which each rank has a term. An op's rule says in
//! which layouts it can compute its results; where an operand has another layout it is converted, which is an exchange of the
//! program or a local copy. Forward and backward passes are treated alike, because the rewrite comes after differentiation:
//!
//! ```text
//!                      forward                               backward
//! x        split rows  gather                                scatter of terms of dx
//! y = x·Wᵀ, W by rows  local: y split by columns             dW local
//! z = y·Vᵀ, V by cols  local: z a sum of terms               dV local, dy local: split by columns
//! z        terms       scatter to rows                       gather of dz
//! ```
//!
//! Residuals, norms and dropout between such pairs are computed on rows that the ranks share out. The initial values of
//! parameters and the masks of dropout are those of one rank.
//!
//! # What must hold
//! All ranks of the axis run the same samples and make the same choices: these depend on shapes alone. If a peer dies, the exchange
//! fails and so does the step on every rank; no parameter has changed.
//!
//! # Layout
//! - [`layout`]: what of a value each rank has. `convert`: from one layout to another.
//! - `rules`: a row for each op; `products`: the rows of ops with weights. `seeds`: what is known ahead. `vocabulary`: embedding and
//!   cross-entropy split over ids.
//! - [`rewrite`]: the walk over the nodes. `order`: what runs while an exchange is under way.

mod convert;
pub mod layout;
mod order;
mod products;
pub mod rewrite;
mod rules;
mod seeds;
mod vocabulary;

#[cfg(test)]
mod tests;

pub use layout::{TensorPlace, ValueLayout};
pub use rewrite::{StoredLayouts, TensorSplit, split, split_as};
