//! What can be wrong with a model, said while it is traced.

use crate::shape::{DType, Shape};

/// An error in a model, with the layer where it is.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("layer `{layer}`: {kind}")]
pub struct TraceError {
    /// The layer's path, such as `blocks.0.qkv`.
    pub layer: String,
    /// What is wrong.
    pub kind: TraceErrorKind,
}

/// What is wrong with an op's operands.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum TraceErrorKind {
    /// Two shapes do not match.
    #[error("{op}: shapes {left} and {right} do not fit: {why}")]
    Shapes {
        /// The op's name.
        op: &'static str,
        /// The first operand's shape.
        left: Shape,
        /// The second's.
        right: Shape,
        /// What would fit.
        why: String,
    },
    /// One shape is not what the op takes.
    #[error("{op}: shape {shape} does not fit: {why}")]
    Shape {
        /// The op's name.
        op: &'static str,
        /// The operand's shape.
        shape: Shape,
        /// What would fit.
        why: String,
    },
    /// An element type that the op does not take.
    #[error("{op}: operand {operand} is {got}, {want} is needed; cast it first")]
    DType {
        /// The op's name.
        op: &'static str,
        /// Which operand, from 0.
        operand: usize,
        /// What it is.
        got: DType,
        /// What it should be.
        want: String,
    },
    /// A name that is not known.
    #[error("unknown {what} `{name}`; known are {known}")]
    Unknown {
        /// What was named, such as `activation`.
        what: &'static str,
        /// The name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// An option out of its range.
    #[error("{op}: {why}")]
    Option {
        /// The op's name.
        op: &'static str,
        /// What is wrong and what would be right.
        why: String,
    },
    /// The same name twice.
    #[error("the name `{name}` is already used; give each {what} its own name")]
    Duplicate {
        /// `parameter`, `input` or `state`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// No gradient exists.
    #[error("{op} has no gradient with respect to one of its inputs that depends on a parameter")]
    NoGradient {
        /// The op's name.
        op: &'static str,
    },
}
