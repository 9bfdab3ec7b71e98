//! 1x1 convolution with stride 1 is a product of the matrix of pixels with the matrix of weights, with no copies:
//! `y[pixels × c_out] = x[pixels × c_in] · weightᵀ`. This file only writes down the strides.
//!
//! Images in half go through the product in blocks of pixels, each of which is widened into shared scratch. Sums along
//! channels are not cut by this. Sums along pixels (the weight gradient) are cut where the product itself would cut them,
//! so the bits are those of f32. They are others where f32 takes seven products for eight (a product of blocks takes all
//! of them), and where a weight gradient of one channel is a matrix by a vector.

use super::{Conv2d, ConvPass, Operands};
use crate::Cx;
use crate::floats::{Floats, FloatsMut, SharedFloats};
use crate::gemm::{self, Gemm, OutputBlock, Strides};

/// Floats that are widened together: 1 MB of the last-level cache.
const STAGE: usize = 1 << 18;
/// The fewest pixels of a block, unless there are fewer: the weights are copied into panels for each.
const PIXELS_MIN: usize = 320;
/// The most pixels of a block, if there are so many channels that a larger product would be done by seven products.
const PIXELS_MAX: (usize, usize) = (1008, 256);

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

/// Part `i` of `n` nearly equal ones of `0..len`: where it starts, and how long it is.
fn part(len: usize, n: usize, i: usize) -> (usize, usize) {
    (len * i / n, len * (i + 1) / n - len * i / n)
}

/// Into how many blocks of pixels the rows of a product are cut if an image is in half.
fn row_blocks(whole: &Gemm) -> usize {
    let mut most = (STAGE / whole.k).max(PIXELS_MIN);
    if whole.n.min(whole.k) >= PIXELS_MAX.1 {
        most = most.min(PIXELS_MAX.0);
    }
    whole.m.div_ceil(most).max(1)
}

/// The cut of a weight gradient if an image is in half: blocks that the product adds one after the other, and how many of
/// them are widened together.
fn sum_blocks(whole: &Gemm) -> (usize, usize) {
    let blocks = whole.k_blocks();
    let pixels = whole.k.div_ceil(blocks);
    (blocks, (STAGE / (pixels * (whole.m + whole.n)).max(1)).max(1).min(blocks))
}

/// Floats of scratch.
pub(super) fn scratch_len(s: &Conv2d, pass: ConvPass, half: bool, workers: usize) -> usize {
    let whole = product(s, pass);
    if !half {
        return whole.scratch_len(workers);
    }
    // Blocks are of two lengths.
    let both = |len: usize, f: &dyn Fn(usize) -> usize| f(len).max(f(len.saturating_sub(1)));
    if pass == ConvPass::GradWeight {
        let (blocks, together) = sum_blocks(&whole);
        let pixels = whole.k.div_ceil(blocks);
        return together * pixels * (whole.m + whole.n)
            + both(pixels, &|k| Gemm { k, ..whole.clone() }.scratch_len(workers));
    }
    let pixels = whole.m.div_ceil(row_blocks(&whole));
    let blocks = pixels * whole.k + both(pixels, &|m| Gemm { m, ..whole.clone() }.pass_scratch_len(workers));
    s.weight_len() + blocks.max(whole.scratch_len(workers))
}

/// `y = x · weightᵀ + bias`, or `dx = dy · weight`: whole in f32, else in blocks of pixels.
pub(super) fn correlate(s: &Conv2d, pass: ConvPass, cx: &Cx, operands: Operands, scratch: &mut [f32]) {
    let Operands { read, weight, bias, made, epilogue } = operands;
    let whole = product(s, pass);
    // Where a finished run goes, unless it is there already.
    let finish = |first_pixel: usize, block: OutputBlock, target: Option<SharedFloats>| {
        let (pixel, first) = (first_pixel + block.row, block.col);
        for (r, piece) in block.into_rows().enumerate() {
            if let Some(bias) = bias {
                for (v, b) in piece.iter_mut().zip(&bias[first..]) {
                    *v += b;
                }
            }
            let at = (pixel + r) * whole.n + first;
            if let Some(epilogue) = epilogue {
                epilogue(at, piece);
            }
            if let Some(target) = target {
                // SAFETY: the product gives each element to its epilogue once.
                unsafe { target.part(at, piece.len()) }.round(cx.isa, piece);
            }
        }
    };
    let (weight, scratch) = match weight {
        Floats::F32(weight) => (weight, scratch),
        half => {
            let (stage, rest) = scratch.split_at_mut(half.len());
            half.widen_in_chunks(cx, stage);
            (&*stage, rest)
        }
    };
    if let (Floats::F32(read), true) = (read, !made.is_half()) {
        let FloatsMut::F32(made) = made else { unreachable!("it is f32") };
        let finish = |block: OutputBlock| finish(0, block, None);
        let finish = (bias.is_some() || epilogue.is_some()).then(|| gemm::Epilogue::new(&finish));
        return whole.run(cx, read, weight, made, finish, scratch);
    }
    let made = SharedFloats::new(made);
    let blocks = row_blocks(&whole);
    let (stage, scratch) = scratch.split_at_mut(whole.m.div_ceil(blocks) * whole.k);
    for i in 0..blocks {
        let (first, m) = part(whole.m, blocks, i);
        let read = staged(cx, read.part(first * whole.k, m * whole.k), stage);
        let finish = |block: OutputBlock| finish(first, block, Some(made));
        Gemm { m, ..whole.clone() }.pass(cx, read, weight, gemm::Epilogue::new(&finish), scratch);
    }
}

/// `dweight = dyᵀ · x`.
pub(super) fn grad_weight(
    s: &Conv2d,
    cx: &Cx,
    x: Floats,
    dy: Floats,
    dweight: &mut [f32],
    scratch: &mut [f32],
) {
    let whole = product(s, ConvPass::GradWeight);
    if let (Floats::F32(x), Floats::F32(dy)) = (x, dy) {
        return whole.run(cx, dy, x, dweight, None, scratch);
    }
    let (blocks, together) = sum_blocks(&whole);
    let room = together * whole.k.div_ceil(blocks);
    let (x_stage, scratch) = scratch.split_at_mut(room * s.c_in);
    let (dy_stage, scratch) = scratch.split_at_mut(room * s.c_out);
    for begin in (0..blocks).step_by(together) {
        let end = (begin + together).min(blocks);
        let (first, _) = part(whole.k, blocks, begin);
        let len = part(whole.k, blocks, end).0 - first;
        let x = staged(cx, x.part(first * s.c_in, len * s.c_in), x_stage);
        let dy = staged(cx, dy.part(first * s.c_out, len * s.c_out), dy_stage);
        for i in begin..end {
            let (start, k) = part(whole.k, blocks, i);
            let (x, dy) = (&x[(start - first) * s.c_in..], &dy[(start - first) * s.c_out..]);
            Gemm { k, accumulate: i > 0, ..whole.clone() }.run(cx, dy, x, dweight, None, scratch);
        }
    }
}

/// All of them as f32: in place if they are, else widened into the beginning of `stage`.
fn staged<'a>(cx: &Cx, floats: Floats<'a>, stage: &'a mut [f32]) -> &'a [f32] {
    match floats {
        Floats::F32(x) => x,
        half => {
            let stage = &mut stage[..half.len()];
            half.widen_in_chunks(cx, stage);
            stage
        }
    }
}
