//! Sums of half-precision floats, which MPI does not have: operators that its reductions call.

use std::ffi::{c_int, c_void};

use half::{bf16, f16};

use super::calls::Reducer;
use crate::element::Reduce;

/// The operators for f16 and for bf16: sum, larger, smaller.
pub(super) const OPERATORS: [[Reducer; 3]; 2] = [
    [combine::<f16, SUM>, combine::<f16, MAX>, combine::<f16, MIN>],
    [combine::<bf16, SUM>, combine::<bf16, MAX>, combine::<bf16, MIN>],
];

const SUM: usize = 0;
const MAX: usize = 1;
const MIN: usize = 2;

/// Which of [`OPERATORS`] it is.
pub(super) fn operator_idx(reduce: Reduce) -> usize {
    match reduce {
        Reduce::Sum => SUM,
        Reduce::Max => MAX,
        Reduce::Min => MIN,
    }
}

/// An MPI operator on half-precision floats.
extern "C" fn combine<T, const OP: usize>(
    from: *const c_void,
    to: *mut c_void,
    count: *const c_int,
    _: *const c_void,
) where
    T: Copy + PartialOrd + std::ops::Add<Output = T>,
{
    // SAFETY: MPI gives two buffers of as many elements of the two-byte type, aligned as the caller's buffers are.
    unsafe {
        let n = (*count).max(0) as usize;
        let (from, to) = (from.cast::<T>(), to.cast::<T>());
        for i in 0..n {
            let (a, b) = (to.add(i).read_unaligned(), from.add(i).read_unaligned());
            let c = match OP {
                SUM => a + b,
                MAX if b > a => b,
                MIN if b < a => b,
                _ => a,
            };
            to.add(i).write_unaligned(c);
        }
    }
}
