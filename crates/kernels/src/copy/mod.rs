//! Moving elements without changing them: permute, slice, expand, concat, pad; and gather with its gradient.
//!
//! All but gather are a [`StridedCopy`]: a loop nest with a stride on either side, folded into as few
//! loops as possible. It copies runs where both sides are contiguous, repeats where the source does not move, and
//! transposes in 8x8 tiles where the sides are contiguous in different dims. Elements are four bytes (f32, i32, u32) or two
//! (f16, bf16).

mod bits;
mod gather;
mod join;
#[cfg(target_arch = "x86_64")]
mod narrow;
mod strided;
mod transpose;

use polyreme_dtype::{bf16, f16};

pub use gather::{BadIndex, Gather};
pub use join::{Concat, Pad};
pub use strided::StridedCopy;
pub(crate) use transpose::TransposeTile;
#[cfg(target_arch = "x86_64")]
pub(crate) use transpose::eight_by_eight;

/// An element of four or two bytes that may be copied as bits.
pub trait Word: Copy + Send + Sync + Default + sealed::Sealed + 'static {}

mod sealed {
    use super::bits::Bits;

    /// Only the types of this file: kernels rely on elements of the size of their bits, without padding.
    pub trait Sealed {
        /// What is copied.
        type Bits: Bits;
    }
}

macro_rules! words {
    ($($word:ty: $bits:ty),*) => {
        $(
            impl Word for $word {}
            impl sealed::Sealed for $word {
                type Bits = $bits;
            }
            const _: () = assert!(size_of::<$word>() == size_of::<$bits>());
            const _: () = assert!(align_of::<$word>() == align_of::<$bits>());
        )*
    };
}
words!(f32: u32, i32: u32, u32: u32, f16: u16, bf16: u16);

/// The strides of a contiguous shape.
fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}
