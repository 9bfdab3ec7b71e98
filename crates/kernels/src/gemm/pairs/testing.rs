//! Products of whole matrices, which kernels that multiply blocks of pairs are compared with.

use super::super::Strides;
use super::*;

/// `a[m×k] · b[k×n]`, of bf16, each contiguous, and stored by its columns if it is turned.
pub(crate) fn product(
    cx: &Cx,
    order: PairOrder,
    (m, n, k): (usize, usize, usize),
    (a, a_turned): (&[f32], bool),
    (b, b_turned): (&[f32], bool),
) -> Vec<f32> {
    let strides = |rows: usize, cols: usize, turned: bool| {
        if turned { Strides { batch: 0, row: 1, col: rows } } else { Strides { batch: 0, row: cols, col: 1 } }
    };
    let (a_strides, b_strides) = (strides(m, k, a_turned), strides(k, n, b_turned));
    let c = strides(m, n, false);
    let gemm = Gemm { batch: 1, m, n, k, a: a_strides, b: b_strides, c, accumulate: false, strict: false };
    let pairs = PairGemm { gemm, order };
    let mut c = vec![0.0; m * n];
    let mut scratch = vec![f32::NAN; pairs.scratch_len(1)];
    pairs.run(cx, Floats::F32(a), Floats::F32(b), FloatsMut::F32(&mut c), &mut scratch);
    c
}
