//! Element types and reducers.

use half::{bf16, f16};

/// The type of the elements of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// 64-bit floats.
    F64,
    /// Half-precision floats; sums are made in f32 and rounded once per addition.
    F16,
    /// The upper half of a 32-bit float; summed as f16 are.
    Bf16,
    /// 32-bit integers; sums wrap around.
    I32,
    /// 64-bit integers; sums wrap around.
    I64,
    /// Bytes; sums wrap around.
    U8,
}

impl DType {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::U8 => 1,
        }
    }
}

/// How two elements become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// The larger one.
    Max,
    /// The smaller one.
    Min,
}

/// A Rust type that a collective can work on: plain numbers without padding, of which any bits are one. Only the types of
/// this crate are such; nobody else can add one, because bytes of other ranks are taken for elements:
///
/// ```compile_fail
/// #[derive(Clone, Copy)]
/// struct Flag(bool);
/// impl polyreme_collective::Element for Flag {
///     const DTYPE: polyreme_collective::DType = polyreme_collective::DType::U8;
/// }
/// ```
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its element type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => { $(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
        // What unsafe code relies on.
        const _: () = assert!(size_of::<$t>() == DType::$d.bytes());
    )* };
}
elements!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8);

/// Out of reach of other crates, so that no type of theirs can be an [`Element`].
mod sealed {
    pub trait Sealed {}
}
