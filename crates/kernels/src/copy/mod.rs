//! Moving elements without changing them: permute, slice, expand, concat, pad; and gather with its gradient.
//!
//! All but gather are a [`StridedCopy`]: a loop nest with a stride on either side, folded into as few
//! loops as possible. It copies runs where both sides are contiguous, repeats where the source does not move, and
//! transposes in 8x8 tiles where the sides are contiguous in different dims. Elements are four bytes: f32, i32, u32.

mod gather;
mod join;
#[cfg(target_arch = "x86_64")]
mod narrow;
mod strided;
mod transpose;

pub use gather::{BadIndex, Gather};
pub use join::{Concat, Pad};
pub use strided::StridedCopy;
#[cfg(target_arch = "x86_64")]
pub(crate) use transpose::TransposeTile;

/// An element of four bytes that may be copied as bits.
pub trait Word: Copy + Send + Sync + Default + sealed::Sealed + 'static {}

impl Word for f32 {}
impl Word for i32 {}
impl Word for u32 {}

mod sealed {
    /// Only the types of this file: kernels rely on four bytes without padding.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for u32 {}
}

/// The strides of a contiguous shape.
fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}
