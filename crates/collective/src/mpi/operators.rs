//! Operators that MPI's reductions call, for element types that it lacks or reduces wrongly.
//!
//! It has no half-precision floats, and MPICH 4.0 compares bytes as if they were signed: the larger of 4 and 250 is 4.

use std::ffi::{c_int, c_void};

use half::{bf16, f16};

use super::calls::Reducer;
use crate::element::{DType, Reduce};

/// How many types have their own operators.
pub(super) const TYPES: usize = 3;

/// The operators of each such type: sum, larger, smaller.
pub(super) const OPERATORS: [[Reducer; 3]; TYPES] =
    [operators::<f16>(), operators::<bf16>(), operators::<u8>()];

const SUM: usize = 0;
const MAX: usize = 1;
const MIN: usize = 2;

/// Which operators of [`OPERATORS`] a type has, if it has its own.
pub(super) fn type_idx(dtype: DType) -> Option<usize> {
    match dtype {
        DType::F16 => Some(0),
        DType::Bf16 => Some(1),
        DType::U8 => Some(2),
        DType::F32 | DType::F64 | DType::I32 | DType::I64 | DType::I8 | DType::Bool => None,
    }
}

/// Which one of a type's operators it is.
pub(super) fn operator_idx(reduce: Reduce) -> usize {
    match reduce {
        Reduce::Sum => SUM,
        Reduce::Max => MAX,
        Reduce::Min => MIN,
    }
}

const fn operators<T: HalfNumber>() -> [Reducer; 3] {
    [combine::<T, SUM>, combine::<T, MAX>, combine::<T, MIN>]
}

/// An element of such a type.
trait HalfNumber: Copy + PartialOrd {
    fn plus(self, other: Self) -> Self;
}

impl HalfNumber for f16 {
    fn plus(self, other: f16) -> f16 {
        self + other
    }
}

impl HalfNumber for bf16 {
    fn plus(self, other: bf16) -> bf16 {
        self + other
    }
}

impl HalfNumber for u8 {
    fn plus(self, other: u8) -> u8 {
        self.wrapping_add(other)
    }
}

/// An MPI operator.
extern "C" fn combine<T: HalfNumber, const OP: usize>(
    from: *const c_void,
    to: *mut c_void,
    count: *const c_int,
    _: *const c_void,
) {
    // SAFETY: MPI passes two buffers of equally many elements of the operator's type.
    unsafe {
        let n = (*count).max(0) as usize;
        let (from, to) = (from.cast::<T>(), to.cast::<T>());
        for i in 0..n {
            let (a, b) = (to.add(i).read_unaligned(), from.add(i).read_unaligned());
            let c = match OP {
                SUM => a.plus(b),
                MAX if b > a => b,
                MIN if b < a => b,
                _ => a,
            };
            to.add(i).write_unaligned(c);
        }
    }
}
