//! Element types and reducers.

pub use polyreme_dtype::{Bool, DType, Element};

/// A reduction of two elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduce {
    /// Their sum. Integers wrap around; f16 and bf16 are added in f32 and rounded once per addition; for booleans it is
    /// "or".
    Sum,
    /// The larger one.
    Max,
    /// The smaller one.
    Min,
}
