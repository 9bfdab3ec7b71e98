//! Every algorithm and pass against the oracle over awkward shapes; the oracle against finite differences; the same
//! bits whatever runs the tasks.

use std::sync::atomic::{AtomicUsize, Ordering};

use polyreme_dtype::DType;

use super::*;
use crate::floats::testing::OwnedFloats;
use crate::lanes::testing::Reverse;
use crate::{Isa, Parallel};

/// Runs tasks on threads, first come, first served.
struct Threads(usize);

// SAFETY: the counter hands out each index once, each thread has its own worker number, and the scope waits for all.
unsafe impl Parallel for Threads {
    fn workers(&self) -> usize {
        self.0
    }
    fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for worker in 0..self.0 {
                let next = &next;
                scope.spawn(move || {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        if i >= n_tasks {
                            break;
                        }
                        task(i, worker);
                    }
                });
            }
        });
    }
}

/// Numbers in -1..1 that are not special.
pub(super) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// `n h w c_in c_out kh kw stride padding dilation groups`, the same both ways unless said otherwise.
pub(super) fn conv(v: [usize; 11]) -> Conv2d {
    let [n, h, w, c_in, c_out, kh, kw, s, p, d, groups] = v;
    let (stride, padding, dilation) = ((s, s), (p, p), (d, d));
    Conv2d { n, h, w, c_in, c_out, kh, kw, stride, padding, dilation, groups, strict: false }
}

/// The formats that a convolution's operands are stored in.
#[derive(Clone, Copy, Debug)]
struct Formats {
    /// Images that are read.
    read: DType,
    weight: DType,
    /// Images that are made.
    made: DType,
}

const F32: Formats = Formats { read: DType::F32, weight: DType::F32, made: DType::F32 };

/// `y` (after an epilogue), `dx`, `dweight` of f32.
fn all(s: &Conv2d, by: Algorithm, cx: &Cx, bias: bool) -> [Vec<f32>; 3] {
    all_stored(s, by, cx, bias, F32, F32)
}

/// `y` (after an epilogue), `dx`, `dweight` of numbers that have been rounded to the formats of `rounded`, and are stored in
/// those of `stored`.
fn all_stored(
    s: &Conv2d,
    by: Algorithm,
    cx: &Cx,
    bias: bool,
    rounded: Formats,
    stored: Formats,
) -> [Vec<f32>; 3] {
    let operand = |rounded: DType, stored: DType, len: usize, seed: u64| {
        OwnedFloats::new(stored, &OwnedFloats::new(rounded, &noise(len, seed)).wide())
    };
    let x = operand(rounded.read, stored.read, s.x_len(), 1);
    let weight = operand(rounded.weight, stored.weight, s.weight_len(), 2);
    let dy = operand(rounded.read, stored.read, s.y_len(), 3);
    let (x, weight, dy) = (x.get(), weight.get(), dy.get());
    let b = noise(s.c_out, 4);
    // Scratch and results start as NaN: whatever is not written shows.
    let is_f32 = [stored.read, stored.weight, stored.made] == [DType::F32; 3];
    let scratch = |pass| vec![f32::NAN; s.scratch_len_by(by, pass, !is_f32, cx.par.workers())];
    let (mut y, mut dx) =
        (OwnedFloats::unset(stored.made, s.y_len()), OwnedFloats::unset(stored.made, s.x_len()));
    let mut dw = vec![f32::NAN; s.weight_len()];
    let shift = |first: usize, piece: &mut [f32]| {
        for (i, v) in piece.iter_mut().enumerate() {
            let (pixel, channel) = ((first + i) / s.c_out, (first + i) % s.c_out);
            *v += (pixel % 5) as f32 + (channel % 3) as f32 * 0.25;
        }
    };
    let epilogue: Option<&RunEpilogue> = if bias { Some(&shift) } else { None };
    let b = bias.then_some(&b[..]);
    s.forward_by(by, cx, x, weight, b, y.get_mut(), epilogue, &mut scratch(ConvPass::Forward));
    s.grad_input_by(by, cx, dy, weight, dx.get_mut(), &mut scratch(ConvPass::GradInput));
    s.grad_weight_by(by, cx, x, dy, &mut dw, &mut scratch(ConvPass::GradWeight));
    [y.wide(), dx.wide(), dw]
}

/// Images and weights in half: the bits of widening them, running in f32, and rounding what it gives.
#[track_caller]
fn check_halves(s: &Conv2d, by: Algorithm) {
    let all_in = |dtype| Formats { read: dtype, weight: dtype, made: dtype };
    for (stored, bias) in [
        (all_in(DType::F16), true),
        (all_in(DType::Bf16), false),
        (Formats { weight: DType::F32, ..all_in(DType::Bf16) }, true),
        (Formats { made: DType::F32, ..all_in(DType::F16) }, true),
        (Formats { read: DType::F32, ..all_in(DType::Bf16) }, false),
        (Formats { weight: DType::Bf16, ..F32 }, true),
    ] {
        for isa in Isa::available() {
            let [y, dx, dw] = all_stored(s, by, &Cx { isa, par: &crate::Serial }, bias, stored, F32);
            let [y, dx] = [y, dx].map(|v| OwnedFloats::new(stored.made, &v).wide());
            for workers in [1, 3] {
                let cx = Cx { isa, par: &Reverse(workers) };
                let got = all_stored(s, by, &cx, bias, stored, stored);
                for ((got, want), what) in got.iter().zip([&y, &dx, &dw]).zip(["y", "dx", "dweight"]) {
                    let same = got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{what} of {s:?} in {stored:?} on {workers} of {}", isa.name());
                }
            }
        }
    }
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    let max = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            (g - w).abs() <= tolerance * max.max(1e-3),
            "{what}: [{i}] is {g}, should be {w} (max {max})"
        );
    }
}

#[track_caller]
fn check_conv(s: &Conv2d, algorithm: Algorithm) {
    let tolerance = if algorithm == Algorithm::Winograd { 1e-4 } else { 1e-5 };
    for bias in [false, true] {
        let want = all(s, algorithm, &Cx::oracle(), bias);
        let got = all(s, algorithm, &Cx::serial(), bias);
        for ((got, want), what) in got.iter().zip(&want).zip(["y", "dx", "dweight"]) {
            assert_close(got, want, tolerance, &format!("{what} of {s:?}"));
        }
        // Every instruction set but the oracle's gives the same bits, whatever runs the tasks.
        for isa in Isa::available().filter(|isa| isa.has_avx2()) {
            for workers in [1, 2, 5] {
                let again = all(s, algorithm, &Cx { isa, par: &Reverse(workers) }, bias);
                for ((again, got), what) in again.iter().zip(&got).zip(["y", "dx", "dweight"]) {
                    let same = again.iter().zip(got).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{what} of {s:?} with {workers} workers on {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn halves_are_f32_that_is_rounded() {
    for (v, by) in [
        ([2, 8, 8, 16, 24, 3, 3, 1, 1, 1, 1], Algorithm::Winograd),
        ([1, 5, 7, 17, 31, 3, 3, 1, 1, 1, 1], Algorithm::Winograd),
        ([3, 3, 3, 33, 16, 3, 3, 1, 0, 1, 1], Algorithm::Winograd),
        ([1, 4, 3, 16, 18, 3, 3, 1, 4, 1, 1], Algorithm::Winograd),
        ([9, 16, 16, 16, 16, 3, 3, 1, 1, 1, 1], Algorithm::Winograd),
        ([0, 8, 8, 16, 16, 3, 3, 1, 1, 1, 1], Algorithm::Winograd),
        ([3, 32, 32, 3, 6, 5, 5, 1, 0, 1, 1], Algorithm::Direct),
        ([1, 30, 31, 3, 20, 7, 7, 2, 3, 1, 1], Algorithm::Direct),
        ([2, 8, 8, 20, 12, 1, 1, 2, 0, 1, 1], Algorithm::Direct),
        ([2, 13, 14, 6, 9, 3, 4, 4, 5, 6, 3], Algorithm::Direct),
        ([1, 20, 31, 2, 3, 3, 3, 1, 2, 2, 1], Algorithm::Direct),
        ([2, 13, 45, 9, 5, 3, 4, 1, 2, 1, 1], Algorithm::Direct),
        ([1, 9, 8, 30, 86, 3, 3, 2, 1, 1, 2], Algorithm::Direct),
        ([1, 40, 50, 8, 20, 3, 3, 1, 1, 1, 1], Algorithm::Direct),
        ([1, 8, 8, 100, 90, 3, 3, 1, 1, 1, 1], Algorithm::Direct),
        ([1, 2, 2, 3, 5, 5, 5, 1, 0, 1, 1], Algorithm::Direct),
        ([1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1], Algorithm::Pointwise),
        ([2, 9, 9, 40, 33, 1, 1, 1, 0, 1, 1], Algorithm::Pointwise),
        // Several blocks of pixels: of what is read, and of the sum.
        ([1, 40, 29, 13, 300, 1, 1, 1, 0, 1, 1], Algorithm::Pointwise),
        ([1, 40, 29, 300, 13, 1, 1, 1, 0, 1, 1], Algorithm::Pointwise),
        ([1, 50, 45, 70, 60, 1, 1, 1, 0, 1, 1], Algorithm::Pointwise),
        ([0, 9, 9, 4, 3, 1, 1, 1, 0, 1, 1], Algorithm::Pointwise),
        ([2, 9, 8, 19, 19, 3, 3, 2, 1, 1, 19], Algorithm::Depthwise),
        ([2, 9, 7, 6, 12, 3, 3, 2, 2, 1, 6], Algorithm::Depthwise),
        ([1, 4, 4, 3, 3, 1, 1, 2, 0, 1, 3], Algorithm::Depthwise),
    ] {
        check_halves(&conv(v), by);
    }
    // Strides along rows only: few channels go by planes.
    let mut s = conv([2, 12, 16, 4, 3, 3, 3, 1, 1, 1, 1]);
    (s.stride, s.dilation) = ((2, 1), (3, 1));
    check_halves(&s, Algorithm::Direct);
}

#[track_caller]
fn check(v: [usize; 11], algorithm: Algorithm) {
    check_conv(&conv(v), algorithm);
}

/// Strict convolutions sum directly, with errors that do not grow with the channels.
#[test]
fn strict() {
    for v in [
        [2, 16, 16, 64, 32, 3, 3, 1, 1, 1, 1],
        [2, 9, 7, 50, 33, 3, 3, 1, 1, 1, 1],
        [1, 11, 9, 140, 17, 3, 3, 2, 1, 1, 1],
        [1, 9, 9, 300, 7, 3, 3, 1, 1, 2, 1],
        [2, 8, 16, 64, 3, 5, 5, 1, 2, 1, 1],
        [1, 8, 8, 64, 32, 3, 3, 1, 1, 1, 2],
        [1, 20, 20, 3, 24, 7, 7, 2, 3, 1, 1],
    ] {
        let s = Conv2d { strict: true, ..conv(v) };
        assert_eq!(s.algorithm(ConvPass::Forward), Algorithm::Direct);
        check_conv(&s, Algorithm::Direct);
    }
    check_conv(&Conv2d { strict: true, ..conv([1, 8, 8, 500, 24, 1, 1, 1, 0, 1, 1]) }, Algorithm::Pointwise);
    let errors = |channels: usize, strict: bool| {
        let s = Conv2d { strict, ..conv([2, 16, 16, channels, 32, 3, 3, 1, 1, 1, 1]) };
        let got = all(&s, s.algorithm(ConvPass::Forward), &Cx::serial(), false).map(|of| widened(&of));
        let want = exactly(&s);
        std::array::from_fn::<f64, 3, _>(|k| {
            let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|v| v * v).sum::<f64>();
            let error = squares(&mut got[k].iter().zip(&want[k]).map(|(got, want)| got - want));
            (error / squares(&mut want[k].iter().copied())).sqrt()
        })
    };
    // The oracle sums directly, whatever is asked for.
    for channels in [64, 256].into_iter().filter(|_| Isa::detect().has_avx2()) {
        let (fast, strict) = (errors(channels, false), errors(channels, true));
        assert!(strict.iter().all(|e| *e < 3e-7), "{channels} channels: {strict:?}");
        assert!(fast.iter().all(|e| (5e-7..2e-6).contains(e)), "{channels} channels: {fast:?}");
    }
}

fn widened(of: &[f32]) -> Vec<f64> {
    of.iter().map(|v| f64::from(*v)).collect()
}

/// `y`, `dx` and `dweight` of a 3x3 convolution with padding 1, in f64, on the operands of [`all`].
fn exactly(s: &Conv2d) -> [Vec<f64>; 3] {
    let [x, weight, dy] =
        [(s.x_len(), 1), (s.weight_len(), 2), (s.y_len(), 3)].map(|(len, seed)| widened(&noise(len, seed)));
    let (mut y, mut dx, mut dw) = (vec![0.0; s.y_len()], vec![0.0; s.x_len()], vec![0.0; s.weight_len()]);
    for (p, tap) in (0..s.n * s.h * s.w).flat_map(|p| (0..9).map(move |tap| (p, tap))) {
        let (i, row, col) = (p / s.w / s.h, p / s.w % s.h + tap / 3, p % s.w + tap % 3);
        // The padding shifts by one.
        if !(1..=s.h).contains(&row) || !(1..=s.w).contains(&col) {
            continue;
        }
        let q = (i * s.h + row - 1) * s.w + col - 1;
        for (o, c) in (0..s.c_out).flat_map(|o| (0..s.c_in).map(move |c| (o, c))) {
            let (at, made, read) = ((o * s.c_in + c) * 9 + tap, p * s.c_out + o, q * s.c_in + c);
            y[made] += x[read] * weight[at];
            dx[read] += dy[made] * weight[at];
            dw[at] += x[read] * dy[made];
        }
    }
    [y, dx, dw]
}

#[test]
fn winograd() {
    for v in [
        [1, 4, 4, 16, 16, 3, 3, 1, 1, 1, 1],
        [2, 8, 8, 16, 24, 3, 3, 1, 1, 1, 1],
        [1, 5, 7, 17, 31, 3, 3, 1, 1, 1, 1],
        [3, 3, 3, 33, 16, 3, 3, 1, 0, 1, 1],
        [1, 9, 6, 16, 40, 3, 3, 1, 0, 1, 1],
        [2, 6, 5, 20, 20, 3, 3, 1, 2, 1, 1],
        [1, 4, 3, 16, 18, 3, 3, 1, 4, 1, 1],
        [1, 1, 1, 16, 16, 3, 3, 1, 1, 1, 1],
        [1, 1, 2, 16, 16, 3, 3, 1, 3, 1, 1],
        [0, 8, 8, 16, 16, 3, 3, 1, 1, 1, 1],
        [40, 16, 16, 16, 16, 3, 3, 1, 1, 1, 1],
        [2, 8, 8, 64, 64, 3, 3, 1, 1, 1, 1],
        [1, 8, 8, 128, 100, 3, 3, 1, 1, 1, 1],
        [2, 7, 7, 40, 300, 3, 3, 1, 1, 1, 1],
    ] {
        check(v, Algorithm::Winograd);
    }
}

/// The direct way is right on shapes that Winograd would take, too.
#[test]
fn three_by_three_directly() {
    for v in [[2, 8, 8, 16, 24, 3, 3, 1, 1, 1, 1], [1, 5, 7, 17, 31, 3, 3, 1, 2, 1, 1]] {
        check(v, Algorithm::Direct);
    }
}

#[test]
fn the_choice_goes_by_shape() {
    for (v, want) in [
        ([64, 32, 32, 64, 64, 3, 3, 1, 1, 1, 1], Algorithm::Winograd),
        ([64, 8, 8, 256, 256, 3, 3, 1, 1, 1, 1], Algorithm::Winograd),
        ([64, 32, 32, 3, 64, 3, 3, 1, 1, 1, 1], Algorithm::Direct),
        ([64, 32, 32, 16, 16, 3, 3, 1, 1, 1, 1], Algorithm::Direct),
        // Few tiles, then tiles that are mostly edge.
        ([1, 7, 7, 512, 512, 3, 3, 1, 1, 1, 1], Algorithm::Direct),
        ([64, 2, 2, 512, 512, 3, 3, 1, 1, 1, 1], Algorithm::Direct),
        ([64, 32, 32, 64, 64, 3, 3, 2, 1, 1, 1], Algorithm::Direct),
        ([64, 32, 32, 64, 64, 3, 3, 1, 2, 2, 1], Algorithm::Direct),
        ([64, 32, 32, 64, 64, 3, 3, 1, 1, 1, 2], Algorithm::Direct),
        ([64, 32, 32, 64, 64, 3, 3, 1, 1, 1, 64], Algorithm::Depthwise),
        ([64, 32, 32, 64, 64, 1, 1, 1, 0, 1, 1], Algorithm::Pointwise),
        ([64, 32, 32, 64, 64, 1, 1, 2, 0, 1, 1], Algorithm::Direct),
    ] {
        for pass in [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight] {
            assert_eq!(conv(v).algorithm(pass), want, "{v:?}");
        }
    }
}

#[test]
fn winograd_with_uneven_padding() {
    let mut s = conv([2, 7, 9, 16, 16, 3, 3, 1, 1, 1, 1]);
    s.padding = (0, 3);
    check_conv(&s, Algorithm::Winograd);
}

#[test]
fn direct() {
    for v in [
        // lenet, a stem, big kernels, and then the awkward.
        [3, 32, 32, 3, 6, 5, 5, 1, 0, 1, 1],
        [3, 14, 14, 6, 16, 5, 5, 1, 0, 1, 1],
        [2, 12, 12, 3, 64, 3, 3, 1, 1, 1, 1],
        [1, 30, 31, 3, 20, 7, 7, 2, 3, 1, 1],
        [1, 39, 40, 3, 9, 11, 11, 4, 2, 1, 1],
        [1, 1, 1, 1, 1, 3, 3, 1, 1, 1, 1],
        [2, 5, 5, 1, 1, 5, 5, 1, 0, 1, 1],
        [1, 9, 9, 24, 17, 3, 3, 2, 1, 1, 1],
        [2, 10, 9, 7, 13, 3, 3, 3, 0, 1, 1],
        [2, 8, 8, 20, 12, 1, 1, 2, 0, 1, 1],
        [1, 9, 9, 5, 33, 1, 1, 3, 1, 1, 1],
        [1, 11, 10, 4, 8, 3, 3, 1, 2, 2, 1],
        [1, 13, 14, 4, 8, 3, 3, 2, 3, 2, 1],
        [2, 13, 14, 6, 9, 3, 4, 4, 5, 6, 3],
        [1, 13, 12, 5, 7, 4, 4, 2, 2, 3, 1],
        [2, 7, 7, 8, 12, 3, 3, 1, 1, 1, 4],
        [1, 7, 6, 36, 40, 3, 3, 1, 1, 1, 2],
        [1, 6, 6, 6, 3, 2, 3, 2, 0, 1, 3],
        [1, 4, 4, 3, 5, 3, 3, 1, 6, 1, 1],
        [1, 4, 4, 3, 5, 2, 2, 5, 0, 1, 1],
        [0, 8, 8, 3, 5, 3, 3, 1, 1, 1, 1],
        [2, 56, 60, 3, 40, 3, 3, 1, 1, 1, 1],
        [40, 6, 6, 2, 3, 3, 3, 1, 1, 1, 1],
        // Few channels made, with rows that fill vectors of pixels, one way or the other.
        [2, 13, 45, 9, 5, 3, 4, 1, 2, 1, 1],
        [3, 16, 33, 11, 15, 2, 3, 1, 0, 1, 1],
        [1, 14, 14, 6, 16, 5, 5, 1, 2, 1, 1],
        [1, 20, 31, 2, 3, 3, 3, 1, 2, 2, 1],
        // Strips of two panels, the second of them partly filled; patches long enough that dy is packed.
        [2, 9, 9, 24, 29, 3, 3, 2, 1, 1, 1],
        [1, 9, 8, 30, 86, 3, 3, 2, 1, 1, 2],
        // One image: channels are cut too, the last pair of panels being short; and groups, cut inside and between.
        [1, 8, 8, 100, 90, 3, 3, 1, 1, 1, 1],
        [1, 8, 7, 120, 129, 3, 3, 2, 1, 1, 3],
    ] {
        check(v, Algorithm::Direct);
    }
}

#[test]
fn direct_with_different_axes() {
    let mut s = conv([2, 11, 8, 6, 10, 5, 2, 1, 0, 1, 2]);
    (s.stride, s.padding, s.dilation) = ((3, 2), (4, 0), (1, 3));
    check_conv(&s, Algorithm::Direct);
    // Strides along rows only: few channels go by planes.
    let mut s = conv([2, 12, 16, 4, 3, 3, 3, 1, 1, 1, 1]);
    (s.stride, s.dilation) = ((2, 1), (3, 1));
    check_conv(&s, Algorithm::Direct);
    (s.stride, s.padding) = ((4, 1), (5, 0));
    check_conv(&s, Algorithm::Direct);
    // A kernel that does not fit: no output, and gradients of zero.
    check([1, 2, 2, 3, 5, 5, 5, 1, 0, 1, 1], Algorithm::Direct);
    // Nothing but padding.
    check([2, 0, 3, 3, 5, 3, 3, 1, 2, 1, 1], Algorithm::Direct);
}

#[test]
fn pointwise() {
    for v in [
        [1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1],
        [2, 5, 3, 7, 19, 1, 1, 1, 0, 1, 1],
        [2, 9, 9, 40, 33, 1, 1, 1, 0, 2, 1],
        [0, 9, 9, 4, 3, 1, 1, 1, 0, 1, 1],
    ] {
        check(v, Algorithm::Pointwise);
    }
}

#[test]
fn depthwise() {
    for v in [
        [1, 5, 5, 2, 2, 3, 3, 1, 1, 1, 2],
        [2, 8, 9, 8, 8, 3, 3, 1, 1, 1, 8],
        [2, 9, 8, 19, 19, 3, 3, 2, 1, 1, 19],
        [1, 10, 11, 16, 16, 5, 5, 1, 2, 1, 16],
        [1, 12, 12, 9, 9, 3, 3, 1, 3, 2, 9],
        [1, 12, 13, 9, 9, 3, 2, 3, 0, 2, 9],
        [2, 7, 7, 5, 15, 3, 3, 1, 1, 1, 5],
        [2, 9, 7, 6, 12, 3, 3, 2, 2, 1, 6],
        [1, 4, 4, 3, 3, 1, 1, 2, 0, 1, 3],
        [0, 4, 4, 3, 3, 3, 3, 1, 1, 1, 3],
        [1, 40, 40, 40, 40, 7, 7, 1, 3, 1, 40],
    ] {
        check(v, Algorithm::Depthwise);
    }
}

/// Runs tasks on the caller, and keeps the largest number of them that it was given.
struct Counting(AtomicUsize);

// SAFETY: as `Serial`, which runs them.
unsafe impl Parallel for Counting {
    fn workers(&self) -> usize {
        1
    }
    fn run(&self, n_tasks: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        self.0.fetch_max(n_tasks, Ordering::Relaxed);
        crate::Serial.run(n_tasks, task);
    }
}

/// A convolution of one image is work for several threads.
#[test]
fn one_image_makes_several_tasks() {
    for (v, least) in [([1, 16, 16, 128, 128], 4), ([1, 8, 8, 256, 256], 8), ([1, 8, 8, 128, 256], 4)] {
        let [n, h, w, c_in, c_out] = v;
        let s = conv([n, h, w, c_in, c_out, 3, 3, 1, 1, 1, 1]);
        let (x, weight) = (noise(s.x_len(), 1), noise(s.weight_len(), 2));
        let (mut y, mut dx, mut dw) = (vec![0.0; s.y_len()], vec![0.0; s.x_len()], vec![0.0; s.weight_len()]);
        for pass in [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight] {
            assert_eq!(s.algorithm(pass), Algorithm::Direct, "{v:?}");
            let par = Counting(AtomicUsize::new(0));
            let cx = Cx { isa: Isa::detect(), par: &par };
            let (read, weight) = (Floats::F32(&x), Floats::F32(&weight));
            let scratch = &mut vec![0.0; s.scratch_len(pass, 1)];
            match pass {
                ConvPass::Forward => {
                    s.forward(&cx, read, weight, None, FloatsMut::F32(&mut y), None, scratch)
                }
                ConvPass::GradInput => {
                    s.grad_input(&cx, Floats::F32(&y), weight, FloatsMut::F32(&mut dx), scratch)
                }
                ConvPass::GradWeight => s.grad_weight(&cx, read, Floats::F32(&y), &mut dw, scratch),
            }
            let tasks = par.0.into_inner();
            assert!(!Isa::detect().has_avx2() || tasks >= least, "{pass:?} of {v:?}: {tasks} tasks");
        }
    }
}

#[test]
fn threads_make_the_same_bits() {
    for v in [
        [16, 16, 16, 32, 48, 3, 3, 1, 1, 1, 1],
        [16, 30, 30, 3, 24, 5, 5, 2, 2, 1, 1],
        [16, 20, 20, 24, 24, 3, 3, 1, 1, 1, 24],
        [16, 14, 14, 24, 24, 3, 3, 1, 1, 1, 3],
        [1, 8, 8, 128, 96, 3, 3, 1, 1, 1, 1],
        [8, 7, 7, 64, 96, 3, 3, 1, 1, 1, 1],
    ] {
        let s = conv(v);
        let by = s.algorithm(ConvPass::Forward);
        let alone = all(&s, by, &Cx::serial(), true);
        let together = all(&s, by, &Cx { isa: Isa::detect(), par: &Threads(4) }, true);
        for (a, b) in alone.iter().flatten().zip(together.iter().flatten()) {
            assert_eq!(a.to_bits(), b.to_bits(), "{s:?}");
        }
    }
}

/// `L = Σ y · r` has `dL/dy = r`; its slopes along `x` and `weight` are the gradients.
#[test]
fn the_oracle_has_the_slopes_of_finite_differences() {
    let mut s = conv([1, 5, 4, 4, 6, 3, 2, 2, 1, 1, 2]);
    s.dilation = (1, 2);
    let cx = Cx::oracle();
    let (mut x, mut weight, r) = (noise(s.x_len(), 5), noise(s.weight_len(), 6), noise(s.y_len(), 7));
    let loss = |x: &[f32], weight: &[f32]| -> f64 {
        let mut y = vec![0.0; s.y_len()];
        scalar::forward(&s, &cx, x, weight, None, FloatsMut::F32(&mut y), None);
        y.iter().zip(&r).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let (mut dx, mut dw) = (vec![0.0; s.x_len()], vec![0.0; s.weight_len()]);
    scalar::grad_input(&s, &cx, &r, &weight, FloatsMut::F32(&mut dx));
    scalar::grad_weight(&s, &cx, &x, &r, &mut dw);
    let step = 0.125f32;
    for i in 0..x.len() {
        let at = x[i];
        x[i] = at + step;
        let up = loss(&x, &weight);
        x[i] = at - step;
        let slope = (up - loss(&x, &weight)) / f64::from(2.0 * step);
        x[i] = at;
        assert!((slope - f64::from(dx[i])).abs() < 1e-4, "dx[{i}] {} {slope}", dx[i]);
    }
    for i in 0..weight.len() {
        let at = weight[i];
        weight[i] = at + step;
        let up = loss(&x, &weight);
        weight[i] = at - step;
        let slope = (up - loss(&x, &weight)) / f64::from(2.0 * step);
        weight[i] = at;
        assert!((slope - f64::from(dw[i])).abs() < 1e-4, "dweight[{i}] {} {slope}", dw[i]);
    }
}

#[test]
fn the_epilogue_sees_every_value_once() {
    for v in [
        [9, 9, 7, 16, 24, 3, 3, 1, 1, 1, 1],
        [8, 7, 7, 20, 70, 3, 3, 1, 1, 1, 1],
        [2, 9, 7, 3, 20, 3, 3, 2, 1, 1, 1],
        [1, 8, 8, 100, 90, 3, 3, 1, 1, 1, 1],
        [2, 9, 7, 3, 20, 1, 1, 1, 0, 1, 1],
        [2, 9, 7, 6, 12, 3, 3, 1, 1, 1, 6],
    ] {
        let s = conv(v);
        let seen: Vec<AtomicUsize> = (0..s.y_len()).map(|_| AtomicUsize::new(0)).collect();
        let count = |first: usize, piece: &mut [f32]| {
            for i in 0..piece.len() {
                seen[first + i].fetch_add(1, Ordering::Relaxed);
            }
        };
        for cx in [Cx::serial(), Cx::oracle()] {
            let (x, weight, mut y) = (noise(s.x_len(), 1), noise(s.weight_len(), 2), vec![0.0; s.y_len()]);
            let mut scratch = vec![0.0; s.scratch_len(ConvPass::Forward, 1)];
            let (x, weight, y) = (Floats::F32(&x), Floats::F32(&weight), FloatsMut::F32(&mut y));
            s.forward(&cx, x, weight, None, y, Some(&count), &mut scratch);
            assert!(seen.iter().all(|n| n.swap(0, Ordering::Relaxed) == 1), "{s:?}");
        }
    }
}
