//! Element types and reducers.

pub use polyreme_dtype::{Bool, DType, Element};

/// How two elements become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduce {
    /// Their sum. Integers wrap around; f16 and bf16 are added in f32 and rounded once per addition; of truth values it is
    /// whether either is true.
    Sum,
    /// The larger one.
    Max,
    /// The smaller one.
    Min,
}
