//! 2-D convolution on channels-last images: forward, gradient of the input, gradient of the weights.
//!
//! Images are NHWC, `[n, h, w, c]`. Weights are PyTorch's OIHW, `[c_out, c_in / groups, kh, kw]`, here and in
//! `dweight`; every algorithm repacks them into the layout it needs, which costs little compared to the work.
//!
//! There are four algorithms, and none of them is im2col: in NHWC the patch behind an output pixel is, for each row of
//! the kernel, one contiguous run of `kw * c` floats, so a micro-kernel can read it in place.
//!
//! - `winograd`: 3x3, stride 1, enough channels, not strict. F(4x4, 3x3), a quarter of the multiplications.
//! - `direct`: everything else, any stride, dilation, padding and groups. A strided input gradient is cut into
//!   `stride²` phases, each of which is a plain stride-1 correlation with a part of the kernel: no multiplication by
//!   inserted zeros and no scatter.
//! - `pointwise`: 1x1, stride 1: a matrix product.
//! - `depthwise`: one input channel per group: vectors over channels.
//! - `scalar`: the naive loops: the oracle, and what runs without AVX2.
//!
//! These compute in f32. Convolutions of bf16 by instructions that multiply pairs are in [`pairs`], and chosen by the caller.
//!
//! Images and weights may be stored in half. What a unit of work reads is then widened into its scratch (a few rows, the
//! patch of a tile, a block of pixels) where f32 is read in place or copied anyway, and what it makes goes through the
//! epilogue in f32 and is rounded from there. The bits are those of widening everything, running in f32 and rounding the
//! result, but for the largest 1x1 products; see `pointwise`. Gradients of weights are f32.
//!
//! It is not a layer: the gradient of the bias is a sum over pixels and lives with the other reductions; transposed
//! convolution is `grad_input` run as a forward pass.

#[cfg(target_arch = "x86_64")]
mod depthwise;
#[cfg(target_arch = "x86_64")]
mod direct;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "`pairs` needs a part of it"))]
mod geometry;
#[cfg(target_arch = "x86_64")]
mod micro;
pub mod pairs;
mod pointwise;
mod scalar;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod winograd;

#[cfg(target_arch = "x86_64")]
use self::{depthwise::Depthwise, direct::Gather, geometry::Direction, winograd::Correlate};
use crate::Cx;
use crate::cx::RunEpilogue;
use crate::floats::{Floats, FloatsMut, each};

/// One of the three products behind a convolution.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConvPass {
    /// `y` from `x` and `weight`.
    Forward,
    /// `dx` from `dy` and `weight`.
    GradInput,
    /// `dweight` from `x` and `dy`.
    GradWeight,
}

/// How a pass is computed where there is AVX2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Algorithm {
    /// F(4x4, 3x3): transforms around 36 products.
    Winograd,
    /// Register tiles that read patches in place.
    Direct,
    /// One matrix product.
    Pointwise,
    /// Vectors over channels, one filter per channel.
    Depthwise,
}

/// A convolution's shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conv2d {
    /// Images.
    pub n: usize,
    /// Height of the input.
    pub h: usize,
    /// Width of the input.
    pub w: usize,
    /// Channels of the input.
    pub c_in: usize,
    /// Channels of the output.
    pub c_out: usize,
    /// Height of the kernel.
    pub kh: usize,
    /// Width of the kernel.
    pub kw: usize,
    /// Steps between output pixels, (vertical, horizontal).
    pub stride: (usize, usize),
    /// Zeros added at each side, (vertical, horizontal).
    pub padding: (usize, usize),
    /// Steps between the kernel's taps, (vertical, horizontal).
    pub dilation: (usize, usize),
    /// Groups of channels that do not mix; divides both channel counts.
    pub groups: usize,
    /// Takes no algorithm that trades accuracy for speed: neither Winograd's nor seven products for eight. Long sums are
    /// cut into short ones.
    pub strict: bool,
}

/// What forward and the input gradient have in common: one image is read, and another is made of it.
struct Operands<'a> {
    read: Floats<'a>,
    weight: Floats<'a>,
    bias: Option<&'a [f32]>,
    made: FloatsMut<'a>,
    epilogue: Option<&'a RunEpilogue<'a>>,
}

/// With fewer channels than these the transforms of Winograd cost what they save.
///
/// Measured on one core of a Zen 3 (`examples/conv_shapes.rs` with the choice forced), batch 64, 32x32, padding 1, ms
/// of Winograd : direct:
///
/// | channels | forward | input gradient | weight gradient |
/// |---|---|---|---|
/// | 8-8 | 1.6 : 1.1 | 1.6 : 1.1 | 1.3 : 0.9 |
/// | 8-64 | 6.9 : 8.2 | 7.0 : 8.5 | 8.2 : 8.7 |
/// | 16-16 | 3.5 : 3.4 | 3.8 : 3.3 | 3.4 : 3.5 |
/// | 24-24 | 5.2 : 7.9 | 5.1 : 7.8 | 6.9 : 8.4 |
/// | 16-64 | 8.2 : 13.9 | 8.4 : 13.5 | 9.6 : 15.1 |
/// | 32-32 | 6.7 : 13.0 | 7.2 : 13.1 | 8.7 : 14.6 |
const WINOGRAD_CHANNELS_MIN: usize = 16;
/// As above, for the larger side.
const WINOGRAD_CHANNELS_MAX_MIN: usize = 24;
/// With fewer tiles than this, transforming the filters (36 floats for 9) takes longer than the direct way altogether.
const WINOGRAD_TILES_MIN: usize = 32;

impl Conv2d {
    /// Height of the output.
    pub fn out_h(&self) -> usize {
        out_len(self.h, self.kh, self.stride.0, self.padding.0, self.dilation.0)
    }

    /// Width of the output.
    pub fn out_w(&self) -> usize {
        out_len(self.w, self.kw, self.stride.1, self.padding.1, self.dilation.1)
    }

    /// Floats in `x`.
    pub fn x_len(&self) -> usize {
        self.n * self.h * self.w * self.c_in
    }

    /// Floats in `y`.
    pub fn y_len(&self) -> usize {
        self.n * self.out_h() * self.out_w() * self.c_out
    }

    /// Floats in `weight`.
    pub fn weight_len(&self) -> usize {
        self.c_out * (self.c_in / self.groups) * self.kh * self.kw
    }

    /// Floating-point operations of one pass by the definition, a multiply-add being two.
    pub fn flops(&self) -> usize {
        2 * self.n * self.out_h() * self.out_w() * self.weight_len()
    }

    /// The algorithm of a pass, by shape and strictness alone.
    pub fn algorithm(&self, pass: ConvPass) -> Algorithm {
        let plain = self.stride == (1, 1) && self.groups == 1;
        if self.groups > 1 && self.groups == self.c_in {
            Algorithm::Depthwise
        } else if plain && (self.kh, self.kw) == (1, 1) && self.padding == (0, 0) {
            Algorithm::Pointwise
        } else if plain
            && !self.strict
            && (self.kh, self.kw) == (3, 3)
            && self.dilation == (1, 1)
            && self.winograd_pays(pass)
        {
            Algorithm::Winograd
        } else {
            Algorithm::Direct
        }
    }

    fn winograd_pays(&self, pass: ConvPass) -> bool {
        let (h, w) =
            if pass == ConvPass::GradInput { (self.h, self.w) } else { (self.out_h(), self.out_w()) };
        let tiles = self.n * h.div_ceil(4) * w.div_ceil(4);
        self.c_in.min(self.c_out) >= WINOGRAD_CHANNELS_MIN
            && self.c_in.max(self.c_out) >= WINOGRAD_CHANNELS_MAX_MIN
            && tiles >= WINOGRAD_TILES_MIN
            // Tiles at the edge cost as much as whole ones: 36 multiplications, against 9 per pixel of the direct way.
            && self.n * h * w >= 6 * tiles
    }

    /// How many floats of scratch a pass on f32 needs with this many workers.
    pub fn scratch_len(&self, pass: ConvPass, workers: usize) -> usize {
        self.check();
        self.scratch_len_by(self.algorithm(pass), pass, false, workers)
    }

    /// How many floats of scratch a pass needs with this many workers if an image or the weights are stored in half.
    pub fn scratch_len_half(&self, pass: ConvPass, workers: usize) -> usize {
        self.check();
        self.scratch_len_by(self.algorithm(pass), pass, true, workers)
    }

    /// `y = conv(x, weight) + bias`, then the epilogue on each finished run, in f32, before it is rounded to the format of
    /// `y`. Overwrites `y`.
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
        self.forward_by(self.algorithm(ConvPass::Forward), cx, x, weight, bias, y, epilogue, scratch);
    }

    /// `dx` from `dy`. Overwrites `dx`, with zeros where no output pixel looked.
    pub fn grad_input(&self, cx: &Cx, dy: Floats, weight: Floats, dx: FloatsMut, scratch: &mut [f32]) {
        self.grad_input_by(self.algorithm(ConvPass::GradInput), cx, dy, weight, dx, scratch);
    }

    /// `dweight` (OIHW) from `x` and `dy`. Overwrites `dweight`.
    pub fn grad_weight(&self, cx: &Cx, x: Floats, dy: Floats, dweight: &mut [f32], scratch: &mut [f32]) {
        self.grad_weight_by(self.algorithm(ConvPass::GradWeight), cx, x, dy, dweight, scratch);
    }

    fn scratch_len_by(&self, algorithm: Algorithm, pass: ConvPass, half: bool, workers: usize) -> usize {
        match algorithm {
            Algorithm::Pointwise => pointwise::scratch_len(self, pass, half, workers),
            #[cfg(target_arch = "x86_64")]
            Algorithm::Winograd => winograd::scratch_len(self, pass, half, workers),
            #[cfg(target_arch = "x86_64")]
            Algorithm::Direct => direct::scratch_len(self, pass, half, workers),
            #[cfg(target_arch = "x86_64")]
            Algorithm::Depthwise => depthwise::scratch_len(self, pass, half, workers),
            #[cfg(not(target_arch = "x86_64"))]
            _ => 0,
        }
    }

    fn forward_by(
        &self,
        algorithm: Algorithm,
        cx: &Cx,
        x: Floats,
        weight: Floats,
        bias: Option<&[f32]>,
        y: FloatsMut,
        epilogue: Option<&RunEpilogue>,
        scratch: &mut [f32],
    ) {
        self.check_lens(x.len(), weight.len(), y.len());
        let f32s = !(x.is_half() || weight.is_half() || y.is_half());
        self.check_scratch(algorithm, ConvPass::Forward, !f32s, cx, scratch);
        assert!(bias.is_none_or(|b| b.len() == self.c_out), "one bias per channel of the output");
        if y.is_empty() {
            return;
        }
        match algorithm {
            algorithm if algorithm == Algorithm::Pointwise || cx.isa.has_avx2() => {
                let operands = Operands { read: x, weight, bias, made: y, epilogue };
                self.correlate(algorithm, ConvPass::Forward, cx, operands, scratch);
            }
            _ => each!(Floats, x, x => each!(Floats, weight, weight => {
                scalar::forward(self, cx, x, weight, bias, y, epilogue)
            })),
        }
    }

    fn grad_input_by(
        &self,
        algorithm: Algorithm,
        cx: &Cx,
        dy: Floats,
        weight: Floats,
        dx: FloatsMut,
        scratch: &mut [f32],
    ) {
        self.check_lens(dx.len(), weight.len(), dy.len());
        let f32s = !(dy.is_half() || weight.is_half() || dx.is_half());
        self.check_scratch(algorithm, ConvPass::GradInput, !f32s, cx, scratch);
        if dx.is_empty() {
            return;
        }
        match algorithm {
            algorithm if algorithm == Algorithm::Pointwise || cx.isa.has_avx2() => {
                let operands = Operands { read: dy, weight, bias: None, made: dx, epilogue: None };
                self.correlate(algorithm, ConvPass::GradInput, cx, operands, scratch);
            }
            _ => each!(Floats, dy, dy => each!(Floats, weight, weight => {
                scalar::grad_input(self, cx, dy, weight, dx)
            })),
        }
    }

    /// Forward or input gradient by one of the fast algorithms; all but the products need AVX2.
    fn correlate(
        &self,
        algorithm: Algorithm,
        pass: ConvPass,
        cx: &Cx,
        operands: Operands,
        scratch: &mut [f32],
    ) {
        #[cfg(target_arch = "x86_64")]
        let way = if pass == ConvPass::Forward { Direction::Forward } else { Direction::Backward };
        match algorithm {
            Algorithm::Pointwise => pointwise::correlate(self, pass, cx, operands, scratch),
            #[cfg(target_arch = "x86_64")]
            Algorithm::Winograd => Correlate::new(self, pass).run(cx, operands, scratch),
            #[cfg(target_arch = "x86_64")]
            Algorithm::Depthwise => Depthwise::new(self, way).run(cx, operands, scratch),
            #[cfg(target_arch = "x86_64")]
            Algorithm::Direct => Gather::new(self, way).run(cx, operands, scratch),
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("no other CPU has AVX2"),
        }
    }

    fn grad_weight_by(
        &self,
        algorithm: Algorithm,
        cx: &Cx,
        x: Floats,
        dy: Floats,
        dweight: &mut [f32],
        scratch: &mut [f32],
    ) {
        self.check_lens(x.len(), dweight.len(), dy.len());
        let f32s = !(x.is_half() || dy.is_half());
        self.check_scratch(algorithm, ConvPass::GradWeight, !f32s, cx, scratch);
        if x.is_empty() || dy.is_empty() {
            dweight.fill(0.0);
            return;
        }
        match algorithm {
            Algorithm::Pointwise => pointwise::grad_weight(self, cx, x, dy, dweight, scratch),
            #[cfg(target_arch = "x86_64")]
            algorithm if cx.isa.has_avx2() => match algorithm {
                Algorithm::Winograd => winograd::grad_weight(self, cx, x, dy, dweight, scratch),
                Algorithm::Depthwise => depthwise::grad_weight(self, cx, x, dy, dweight, scratch),
                _ => direct::grad_weight(self, cx, x, dy, dweight, scratch),
            },
            _ => each!(Floats, x, x => each!(Floats, dy, dy => {
                scalar::grad_weight(self, cx, x, dy, dweight)
            })),
        }
    }

    fn check(&self) {
        assert!(self.groups > 0, "at least one group of channels");
        assert!(
            self.c_in.is_multiple_of(self.groups) && self.c_out.is_multiple_of(self.groups),
            "{} groups do not divide {} and {} channels",
            self.groups,
            self.c_in,
            self.c_out
        );
        assert!(self.c_in > 0 && self.c_out > 0, "images have at least one channel");
        assert!(self.kh > 0 && self.kw > 0, "a kernel has at least one tap");
        assert!(self.stride.0 > 0 && self.stride.1 > 0, "strides are at least 1");
        assert!(self.dilation.0 > 0 && self.dilation.1 > 0, "dilations are at least 1");
    }

    fn check_lens(&self, x: usize, weight: usize, y: usize) {
        self.check();
        assert_eq!(x, self.x_len(), "x is [n, h, w, c_in]");
        assert_eq!(y, self.y_len(), "y is [n, oh, ow, c_out]");
        assert_eq!(weight, self.weight_len(), "weights are [c_out, c_in / groups, kh, kw]");
    }

    fn check_scratch(&self, algorithm: Algorithm, pass: ConvPass, half: bool, cx: &Cx, scratch: &[f32]) {
        let want = self.scratch_len_by(algorithm, pass, half, cx.par.workers());
        assert!(scratch.len() >= want, "{pass:?} needs {want} floats of scratch, has {}", scratch.len());
    }
}

/// How many outputs a dim has: 0 where the kernel does not fit.
fn out_len(len: usize, k: usize, stride: usize, padding: usize, dilation: usize) -> usize {
    match (len + 2 * padding).checked_sub(dilation * (k - 1) + 1) {
        Some(room) => room / stride + 1,
        None => 0,
    }
}
