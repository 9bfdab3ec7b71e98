//! 1x1 convolution with stride 1 is a product of the matrix of pixels with the matrix of weights, with no copies:
//! `y[pixels × c_out] = x[pixels × c_in] · weightᵀ`. This file only writes down the strides.

use super::{Conv2d, ConvPass, RunEpilogue};
use crate::Cx;
use crate::gemm::{self, Gemm, OutputBlock, Strides};

fn product(s: &Conv2d, pass: ConvPass) -> Gemm {
    let pixels = s.n * s.h * s.w;
    let plain = |cols: usize| Strides { batch: 0, row: cols, col: 1 };
    let turned = |cols: usize| Strides { batch: 0, row: 1, col: cols };
    let (m, n, k, a, b, c) = match pass {
        ConvPass::Forward => (pixels, s.c_out, s.c_in, plain(s.c_in), turned(s.c_in), plain(s.c_out)),
        ConvPass::GradInput => (pixels, s.c_in, s.c_out, plain(s.c_out), plain(s.c_in), plain(s.c_in)),
        ConvPass::GradWeight => (s.c_out, s.c_in, pixels, turned(s.c_out), plain(s.c_in), plain(s.c_in)),
    };
    Gemm { batch: 1, m, n, k, a, b, c, accumulate: false, strict: s.strict }
}

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, pass: ConvPass, workers: usize) -> usize {
    product(s, pass).scratch_len(workers)
}

/// `y = x · weightᵀ + bias`.
pub(super) fn forward(
    s: &Conv2d,
    cx: &Cx,
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    y: &mut [f32],
    epilogue: Option<&RunEpilogue>,
    scratch: &mut [f32],
) {
    let finish = |block: OutputBlock| {
        let (pixel, first) = (block.row, block.col);
        for (r, piece) in block.into_rows().enumerate() {
            if let Some(bias) = bias {
                for (v, b) in piece.iter_mut().zip(&bias[first..]) {
                    *v += b;
                }
            }
            if let Some(epilogue) = epilogue {
                epilogue((pixel + r) * s.c_out + first, piece);
            }
        }
    };
    let finish = (bias.is_some() || epilogue.is_some()).then(|| gemm::Epilogue::new(&finish));
    product(s, ConvPass::Forward).run(cx, x, weight, y, finish, scratch);
}

/// `dx = dy · weight`.
pub(super) fn grad_input(
    s: &Conv2d,
    cx: &Cx,
    dy: &[f32],
    weight: &[f32],
    dx: &mut [f32],
    scratch: &mut [f32],
) {
    product(s, ConvPass::GradInput).run(cx, dy, weight, dx, None, scratch);
}

/// `dweight = dyᵀ · x`.
pub(super) fn grad_weight(
    s: &Conv2d,
    cx: &Cx,
    x: &[f32],
    dy: &[f32],
    dweight: &mut [f32],
    scratch: &mut [f32],
) {
    product(s, ConvPass::GradWeight).run(cx, dy, x, dweight, None, scratch);
}
