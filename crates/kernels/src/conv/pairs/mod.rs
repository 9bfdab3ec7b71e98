//! Convolutions of bf16 as products of pairs: the matrix of patches by the matrix of weights, sums in f32.
//!
//! No matrix of patches is stored: the product copies its operands into units a block at a time in any case, and a patch is
//! gathered from the image on the way (`gather`). So a convolution is `PairShape::pass` with another source of units.
//!
//! | pass | rows of A | steps of k | columns of B |
//! |---|---|---|---|
//! | forward | pixels of `y`: their windows in `x` | taps row by row, the channels of each | filters |
//! | input gradient | pixels of `dx` of one phase: their windows in `dy` | taps of the phase, the filters of each | channels of `x` |
//! | weight gradient | filters: `dy`, turned | pixels of `y`, image by image | taps and channels: windows in `x` |
//!
//! The steps of k of a sum start at 0, and no sum is split between tasks. So results do not depend on the number of workers,
//! and with [`PairOrder::Tiles`] they have the same bits on all machines.
//!
//! Phases of a strided input gradient are those of `geometry`: each is a product of its own, with a part of the kernel.

mod gather;
mod weights;
mod windows;

use polyreme_dtype::bf16;

use self::gather::{Column, PatchColumns, PatchRows, column};
use self::weights::phases;
use self::windows::Windows;
use super::geometry::Direction;
use super::{Algorithm, Conv2d, ConvPass, Operands};
use crate::cx::{RunEpilogue, SharedMut};
use crate::gemm::pairs::{OwnInstructions, PairOrder, PairShape, Strided};
use crate::gemm::{Epilogue, OutputBlock};
use crate::{Cx, Floats, FloatsMut, Isa, SharedFloats};

/// The narrowest side of C (channels made; 16 pixels count as 32 of them) and the shortest k for which pairs are faster.
///
/// Measured on a Zen 4 core with `examples/conv_shapes`, operands in bf16, as shares of the time that f32 arithmetic takes on
/// them, where that is not by Winograd's algorithm: forward 0.40 to 0.80 with 32 channels or more and 0.72 to 0.93 for stems of 3
/// to 64 channels, with one exception of 0.96 (1x1, 32 to 32), but 1.01 to 1.20 where k is 27, 1.11 where it is 16, and 1.8 and
/// 3.9 for lenet's 16 and 6 channels; unstrided input gradients 0.44 to 0.84 with 32 channels or more, 0.92 and 1.13 with 16.
/// Where f32 goes by Winograd's algorithm, pairs take 1.02 to 2.1 of its time in these passes, 0.91 to 3.3 in the weight gradient.
/// On AMX nothing has been measured.
const PAYS: (usize, usize) = (32, 32);
/// The same for an input gradient with strides, whose products are small: 0.47 to 0.62 with 128 channels or more, 1.19 with 32,
/// 1.5 with 16, 1.7 to 2.2 with 3.
const PAYS_STRIDED_INPUT: (usize, usize) = (64, 32);
/// The same for the weight gradient, where C is filters by taps and channels, and k is pixels: 0.34 to 0.90 where the least is 48
/// or more (0.65 to 0.93 for stems), 0.92 to 1.25 where it is 32, 1.44 where it is 16. With one image: 0.66 to 1.09 with 64
/// pixels or more, 1.26 with 49.
const PAYS_WEIGHT: (usize, usize) = (48, 64);

/// A convolution of images and weights in bf16, each sum in f32. It has one group.
#[derive(Clone, Debug)]
pub struct PairConv {
    /// The shape.
    pub conv: Conv2d,
    /// The order of its sums.
    pub order: PairOrder,
}

impl PairConv {
    /// Whether there is such a convolution of this shape.
    pub fn suits(conv: &Conv2d) -> bool {
        conv.groups == 1 && !conv.strict
    }

    /// Whether a pass is expected to be faster with these instructions than [`Conv2d`], which computes in f32. It never is
    /// without the order's own instructions.
    pub fn pays(&self, pass: ConvPass, isa: Isa) -> bool {
        let s = &self.conv;
        let pixels = match pass {
            ConvPass::GradInput => s.n * s.h * s.w,
            ConvPass::Forward | ConvPass::GradWeight => s.n * s.out_h() * s.out_w(),
        };
        let taps = s.kh * s.kw;
        // The narrower side of C, and k; then the least of both.
        let (side, k, least) = match pass {
            ConvPass::Forward => (s.c_out.min(pixels * 2), taps * s.c_in, PAYS),
            ConvPass::GradInput if s.stride == (1, 1) => (s.c_in.min(pixels * 2), taps * s.c_out, PAYS),
            ConvPass::GradInput => (s.c_in.min(pixels * 2), taps * s.c_out, PAYS_STRIDED_INPUT),
            ConvPass::GradWeight => (s.c_out.min(taps * s.c_in), pixels, PAYS_WEIGHT),
        };
        let large = PairConv::suits(s) && side >= least.0 && k >= least.1;
        match self.order.instructions(isa) {
            // Winograd's algorithm has a quarter of the multiplications, and these instructions have twice the speed.
            Some(OwnInstructions::Avx512Bf16) => large && s.algorithm(pass) != Algorithm::Winograd,
            // They have eight times the speed.
            Some(OwnInstructions::Amx) => large,
            None => false,
        }
    }

    /// How many floats of scratch a pass needs with this many workers.
    pub fn scratch_len(&self, pass: ConvPass, workers: usize) -> usize {
        let s = &self.conv;
        s.check();
        match pass {
            ConvPass::Forward => self.correlate_len(Direction::Forward, workers),
            ConvPass::GradInput => self.correlate_len(Direction::Backward, workers),
            ConvPass::GradWeight => self.grad_weight_shape().scratch_len(workers),
        }
    }

    /// As [`Conv2d::forward`].
    pub fn forward(
        &self,
        cx: &Cx,
        x: Floats,
        weight: Floats,
        bias: Option<&[f32]>,
        y: FloatsMut,
        epilogue: Option<&RunEpilogue>,
        scratch: &mut [f32],
    ) {
        self.check(x.len(), weight.len(), y.len());
        assert!(bias.is_none_or(|b| b.len() == self.conv.c_out), "one bias per channel of the output");
        let operands = Operands { read: x, weight, bias, made: y, epilogue };
        self.correlate(Direction::Forward, cx, operands, scratch);
    }

    /// As [`Conv2d::grad_input`].
    pub fn grad_input(&self, cx: &Cx, dy: Floats, weight: Floats, dx: FloatsMut, scratch: &mut [f32]) {
        self.check(dx.len(), weight.len(), dy.len());
        let operands = Operands { read: dy, weight, bias: None, made: dx, epilogue: None };
        self.correlate(Direction::Backward, cx, operands, scratch);
    }

    /// As [`Conv2d::grad_weight`].
    pub fn grad_weight(&self, cx: &Cx, x: Floats, dy: Floats, dweight: &mut [f32], scratch: &mut [f32]) {
        let s = &self.conv;
        self.check(x.len(), dweight.len(), dy.len());
        if x.is_empty() || dy.is_empty() {
            return dweight.fill(0.0);
        }
        let shape = self.grad_weight_shape();
        let dy = Floats::Bf16(halves(dy));
        let filters =
            Strided { x: dy, batch: 0, own: 1, k: s.c_out, n_own: s.c_out, n_k: shape.k, turned: false };
        let windows = Windows::new(s, Direction::Forward, (0, 0));
        let patches = PatchColumns::new(halves(x), windows);
        let taps = s.kh * s.kw;
        let dweight = SharedMut::new(dweight);
        let store = |block: OutputBlock| {
            let (first, start) = (block.row, block.col);
            for (r, row) in block.into_rows().enumerate() {
                let filter = dweight.as_mut_ptr().wrapping_add((first + r) * s.c_in * taps);
                let mut done = 0;
                while done < row.len() {
                    let Column { tap, channel, together } = column(&windows, start + done);
                    for (i, &v) in row[done..].iter().take(together).enumerate() {
                        // SAFETY: a column is a tap and a channel of the filter, and each is in one block.
                        unsafe { filter.add((channel + i) * taps + tap).write(v) };
                    }
                    done += together;
                }
            }
        };
        shape.pass(self.order, cx, &filters, &patches, Epilogue::new(&store), scratch);
    }

    fn grad_weight_shape(&self) -> PairShape {
        let s = &self.conv;
        PairShape { batch: 1, m: s.c_out, n: s.c_in * s.kh * s.kw, k: s.n * s.out_h() * s.out_w() }
    }

    /// The product of a phase.
    fn phase_shape(&self, windows: &Windows, way: Direction) -> PairShape {
        let n = if way == Direction::Forward { self.conv.c_out } else { self.conv.c_in };
        PairShape { batch: 1, m: windows.count(), n, k: windows.len() }
    }

    fn correlate_len(&self, way: Direction, workers: usize) -> usize {
        let of_phase = |phase| {
            let windows = Windows::new(&self.conv, way, phase);
            self.phase_shape(&windows, way).scratch_len(workers)
        };
        weights::copy_len(&self.conv) + phases(&self.conv, way).map(of_phase).max().unwrap_or(0)
    }

    /// Forward or input gradient, phase by phase.
    fn correlate(&self, way: Direction, cx: &Cx, operands: Operands, scratch: &mut [f32]) {
        let s = &self.conv;
        let Operands { read, weight, bias, made, epilogue } = operands;
        let image = halves(read);
        let (stage, scratch) = scratch.split_at_mut(weights::copy_len(s));
        let weight = weights::in_order(s, way, cx, halves(weight), stage);
        let made = SharedFloats::new(made);
        let mut taps_before = 0;
        for phase in phases(s, way) {
            let windows = Windows::new(s, way, phase);
            let shape = self.phase_shape(&windows, way);
            let (width, height) = if way == Direction::Forward { (s.out_w(), s.out_h()) } else { (s.w, s.h) };
            // Where the values of a window are made.
            let place = |idx: usize| {
                let (image, row, col) = windows.place(idx);
                let row = windows.rows.made_first + row * windows.rows.made_step;
                let col = windows.cols.made_first + col * windows.cols.made_step;
                ((image * height + row) * width + col) * shape.n
            };
            if shape.k == 0 {
                cx.par.run(windows.count().div_ceil(CLEARED), &|task, _| {
                    for idx in task * CLEARED..((task + 1) * CLEARED).min(windows.count()) {
                        // SAFETY: each window makes a pixel of its own.
                        unsafe { made.part(place(idx), shape.n) }.clear();
                    }
                });
                continue;
            }
            let store = |block: OutputBlock| {
                let (row, col) = (block.row, block.col);
                for (r, piece) in block.into_rows().enumerate() {
                    let at = place(row + r) + col;
                    if let Some(bias) = bias {
                        for (v, b) in piece.iter_mut().zip(&bias[col..]) {
                            *v += b;
                        }
                    }
                    if let Some(epilogue) = epilogue {
                        epilogue(at, piece);
                    }
                    // SAFETY: the product gives each element to its epilogue once, and each window makes a pixel of its own.
                    unsafe { made.part(at, piece.len()) }.round(cx.isa, piece);
                }
            };
            let (x, own, k) = match way {
                Direction::Forward => (weight, shape.k, 1),
                Direction::Backward => (&weight[taps_before * s.c_out * s.c_in..], 1, s.c_in),
            };
            let filters =
                Strided { x: Floats::Bf16(x), batch: 0, own, k, n_own: shape.n, n_k: shape.k, turned: true };
            let patches = PatchRows::new(image, windows);
            shape.pass(self.order, cx, &patches, &filters, Epilogue::new(&store), scratch);
            taps_before += windows.taps();
        }
    }

    fn check(&self, x: usize, weight: usize, y: usize) {
        self.conv.check_lens(x, weight, y);
        assert!(PairConv::suits(&self.conv), "a convolution of pairs has one group, and is not strict");
    }
}

/// Pixels that one task clears.
const CLEARED: usize = 1024;

/// The operand of a product of pairs.
///
/// # Panics
/// If it is stored in another format.
fn halves(x: Floats<'_>) -> &[bf16] {
    match x {
        Floats::Bf16(x) => x,
        other => panic!("a convolution of pairs has operands in bf16, not in {}", other.dtype()),
    }
}

#[cfg(test)]
mod tests;
