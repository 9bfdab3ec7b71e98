//! Vectors of f32 with the same names for each instruction set, and the macro that makes twins of a kernel from one
//! body.
//!
//! [`avx2`] has 8 lanes and [`avx512`] has 16; the names in both are the same: `V` a vector, `I` one of i32, `M` a
//! mask, `WIDTH` the lanes, `add`, `fmadd`, `load`, and so on. A kernel that is written with them inside [`twins!`]
//! becomes two modules of these names. Each lane is computed by the same operations in both, so the twins give the
//! same bits as long as what crosses lanes keeps to an order that does not depend on `WIDTH`: see `LaneSum`.
//!
//! It is not for kernels that are loops over slices with nothing but arithmetic in them: see [`crate::lanes`].

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

/// Makes modules `avx2` and `avx512` from the given functions, each with the target features, the vectors and the
/// transcendental functions of its name.
macro_rules! twins {
    ($($item:item)*) => {
        /// Eight lanes.
        #[cfg(target_arch = "x86_64")]
        pub(crate) mod avx2 {
            #[allow(unused_imports, reason = "not every body needs all of them")]
            use {super::*, $crate::simd::avx2::*};
            $(
                #[inline]
                #[target_feature(enable = "avx2,fma")]
                $item
            )*
        }
        /// Sixteen lanes.
        #[cfg(target_arch = "x86_64")]
        pub(crate) mod avx512 {
            #[allow(unused_imports, reason = "not every body needs all of them")]
            use {super::*, $crate::simd::avx512::*};
            $(
                #[inline]
                #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
                $item
            )*
        }
    };
}
pub(crate) use twins;

/// Functions of vectors that are one instruction each.
#[cfg(target_arch = "x86_64")]
macro_rules! instructions {
    ($features:literal: $($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $intrinsic:expr;)*) => {
        $(
            #[inline]
            #[target_feature(enable = $features)]
            pub(crate) fn $name($($arg: $ty),*) -> $ret {
                $intrinsic($($arg),*)
            }
        )*
    };
}
#[cfg(target_arch = "x86_64")]
use instructions;
