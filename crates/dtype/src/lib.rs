//! Element types: the one list that graphs, collectives, files and arenas share.
//!
//! It knows nothing of tensors, kernels or ranks, and converts nothing.
//!
//! ```
//! use polyreme_dtype::{DType, Element, f16};
//! assert_eq!((f16::DTYPE, f16::DTYPE.bytes()), (DType::F16, 2));
//! assert_eq!(DType::parse("BF16").map(DType::name), Some("bf16"));
//! ```
//!
//! # Layout
//! [`DType`]: the list. [`Element`]: the Rust type of each, which unsafe code relies on. [`Stored`]: the types that
//! files may also hold.

mod dtype;
mod element;
mod stored;

pub use dtype::DType;
pub use element::{Bool, Element};
pub use half::{bf16, f16};
pub use stored::Stored;
