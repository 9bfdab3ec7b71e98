//! Each pass against a product of pairs of the whole matrix of patches, written down from the definition: bit for bit, in
//! both orders.

use super::super::tests::{conv, noise};
use super::*;
use crate::convert::{bf16_from_f32, f32_from_bf16};
use crate::floats::testing::OwnedFloats;
use crate::gemm::pairs::{AmxState, PairGemm, amx_state};
use crate::gemm::{Gemm, Strides};
use crate::lanes::testing::Reverse;
use crate::{Feature, Serial};
use polyreme_dtype::DType;

fn rounded(len: usize, seed: u64) -> Vec<bf16> {
    noise(len, seed).into_iter().map(bf16_from_f32).collect()
}

/// The input coordinate behind an output and a tap; `None` in the padding.
fn input(o: usize, k: usize, stride: usize, padding: usize, dilation: usize, len: usize) -> Option<usize> {
    (o * stride + k * dilation).checked_sub(padding).filter(|&i| i < len)
}

/// A product of plain matrices, in f32.
fn product(cx: &Cx, order: PairOrder, (m, n): (usize, usize), a: &[Vec<bf16>], b: &[Vec<bf16>]) -> Vec<f32> {
    let k = a.first().map_or(0, Vec::len);
    let gemm = Gemm {
        batch: 1,
        m,
        n,
        k,
        a: Strides { batch: 0, row: k, col: 1 },
        b: Strides { batch: 0, row: 1, col: k },
        c: Strides { batch: 0, row: n, col: 1 },
        accumulate: false,
        strict: false,
    };
    let g = PairGemm { gemm, order };
    let (a, b) = (a.concat(), b.concat());
    let (mut c, mut scratch) = (vec![f32::NAN; m * n], vec![f32::NAN; g.scratch_len(1)]);
    g.run(cx, Floats::Bf16(&a), Floats::Bf16(&b), FloatsMut::F32(&mut c), &mut scratch);
    c
}

/// Operands and results of a convolution.
struct ConvCase {
    s: Conv2d,
    x: Vec<bf16>,
    weight: Vec<bf16>,
    dy: Vec<bf16>,
    bias: Vec<f32>,
}

/// What an epilogue adds.
fn shift(s: &Conv2d, at: usize) -> f32 {
    (at / s.c_out % 5) as f32 + (at % s.c_out % 3) as f32 * 0.25
}

impl ConvCase {
    fn new(s: Conv2d) -> ConvCase {
        let (x, weight, dy) = (rounded(s.x_len(), 1), rounded(s.weight_len(), 2), rounded(s.y_len(), 3));
        let bias = noise(s.c_out, 4);
        ConvCase { s, x, weight, dy, bias }
    }

    /// All pairs of an output pixel and a tap: `(pixel, tap, input pixel)`.
    fn meetings(&self) -> impl Iterator<Item = (usize, usize, Option<usize>)> {
        let s = &self.s;
        let (oh, ow, taps) = (s.out_h(), s.out_w(), s.kh * s.kw);
        (0..s.n * oh * ow * taps).map(move |i| {
            let (p, tap) = (i / taps, i % taps);
            let row = input(p / ow % oh, tap / s.kw, s.stride.0, s.padding.0, s.dilation.0, s.h);
            let col = input(p % ow, tap % s.kw, s.stride.1, s.padding.1, s.dilation.1, s.w);
            (p, tap, row.zip(col).map(|(row, col)| (p / ow / oh * s.h + row) * s.w + col))
        })
    }

    fn weight(&self, o: usize, c: usize, tap: usize) -> bf16 {
        self.weight[(o * self.s.c_in + c) * self.s.kh * self.s.kw + tap]
    }

    /// `y` with its bias and an epilogue, `dx` and `dweight`, in f32.
    fn want(&self, cx: &Cx, order: PairOrder) -> [Vec<f32>; 3] {
        let s = &self.s;
        let (taps, pixels) = (s.kh * s.kw, s.n * s.out_h() * s.out_w());
        let mut patches = vec![Vec::new(); pixels];
        for (p, _, from) in self.meetings() {
            let zeros = vec![bf16::ZERO; s.c_in];
            patches[p].extend_from_slice(from.map_or(&zeros[..], |q| &self.x[q * s.c_in..][..s.c_in]));
        }
        let filter = |o: usize| (0..taps * s.c_in).map(move |k| self.weight(o, k % s.c_in, k / s.c_in));
        let filters: Vec<Vec<bf16>> = (0..s.c_out).map(|o| filter(o).collect()).collect();
        let mut y = product(cx, order, (pixels, s.c_out), &patches, &filters);
        for (at, v) in y.iter_mut().enumerate() {
            *v = *v + self.bias[at % s.c_out] + shift(s, at);
        }

        let turned = |c: usize| (0..pixels).map(|p| self.dy[p * s.c_out + c]).collect();
        let turned: Vec<Vec<bf16>> = (0..s.c_out).map(turned).collect();
        let column = |k: usize| patches.iter().map(|patch| patch[k]).collect();
        let columns: Vec<Vec<bf16>> = (0..taps * s.c_in).map(column).collect();
        let by_tap = product(cx, order, (s.c_out, taps * s.c_in), &turned, &columns);
        let at = |i: usize| (i / (taps * s.c_in), i / taps % s.c_in, i % taps);
        let dw = (0..s.weight_len()).map(|i| {
            let (o, c, tap) = at(i);
            by_tap[(o * taps + tap) * s.c_in + c]
        });
        let dw = if pixels == 0 || self.x.is_empty() { vec![0.0; s.weight_len()] } else { dw.collect() };

        // Pixels of `dx` whose sums have the same taps are a phase. Outputs are read in order, so taps descend. A tap that
        // no pixel of the image could read by its phase is not in the sum; one that leads out of the image is a zero.
        let reads = |i: usize, k: usize, stride: usize, padding: usize, dilation: usize| {
            let from = (i + padding) as isize - (k * dilation) as isize;
            (from.rem_euclid(stride as isize) == 0).then(|| from.div_euclid(stride as isize))
        };
        let mut dx = Vec::new();
        for q in 0..s.n * s.h * s.w {
            let (image, row, col) = (q / s.w / s.h, q / s.w % s.h, q % s.w);
            let (mut patch, mut filters) = (Vec::new(), vec![Vec::new(); s.c_in]);
            for tap in (0..taps).rev() {
                let oh = reads(row, tap / s.kw, s.stride.0, s.padding.0, s.dilation.0);
                let ow = reads(col, tap % s.kw, s.stride.1, s.padding.1, s.dilation.1);
                let (Some(oh), Some(ow)) = (oh, ow) else { continue };
                let inside = (0..s.out_h() as isize).contains(&oh) && (0..s.out_w() as isize).contains(&ow);
                for o in 0..s.c_out {
                    let p = || (image * s.out_h() + oh as usize) * s.out_w() + ow as usize;
                    patch.push(if inside { self.dy[p() * s.c_out + o] } else { bf16::ZERO });
                    for (c, filter) in filters.iter_mut().enumerate() {
                        filter.push(self.weight(o, c, tap));
                    }
                }
            }
            dx.extend(product(cx, order, (1, s.c_in), &[patch], &filters));
        }
        [y, dx, dw]
    }

    fn got(&self, cx: &Cx, order: PairOrder, made: DType) -> [OwnedFloats; 3] {
        let s = &self.s;
        let conv = PairConv { conv: s.clone(), order };
        // NaN shows what is read before it is written.
        let scratch = |pass| vec![f32::NAN; conv.scratch_len(pass, cx.par.workers())];
        let (mut y, mut dx) = (OwnedFloats::unset(made, s.y_len()), OwnedFloats::unset(made, s.x_len()));
        let mut dw = vec![f32::NAN; s.weight_len()];
        let (x, weight, dy) = (Floats::Bf16(&self.x), Floats::Bf16(&self.weight), Floats::Bf16(&self.dy));
        let add = |first: usize, piece: &mut [f32]| {
            for (i, v) in piece.iter_mut().enumerate() {
                *v += shift(s, first + i);
            }
        };
        let (bias, mut room) = (Some(&self.bias[..]), scratch(ConvPass::Forward));
        conv.forward(cx, x, weight, bias, y.get_mut(), Some(&add), &mut room);
        conv.grad_input(cx, dy, weight, dx.get_mut(), &mut scratch(ConvPass::GradInput));
        conv.grad_weight(cx, x, dy, &mut dw, &mut scratch(ConvPass::GradWeight));
        [y, dx, OwnedFloats::F32(dw)]
    }

    #[track_caller]
    fn same(&self, what: &str, cx: &Cx, order: PairOrder, want: &[Vec<f32>; 3]) {
        for made in [DType::Bf16, DType::F32] {
            let want: [OwnedFloats; 3] =
                std::array::from_fn(|k| OwnedFloats::new(if k < 2 { made } else { DType::F32 }, &want[k]));
            let got = self.got(cx, order, made);
            for ((got, want), pass) in got.iter().zip(&want).zip(["y", "dx", "dweight"]) {
                let wrong = got.bits().into_iter().zip(want.bits()).position(|(g, w)| g != w);
                assert_eq!(got.get().len(), want.get().len());
                assert!(
                    wrong.is_none(),
                    "{pass} of {:?}, {order:?}, {what}, {} workers, in {made}: [{wrong:?}] is {:?}, not {:?}",
                    self.s,
                    cx.par.workers(),
                    wrong.map(|i| got.get().at(i)),
                    wrong.map(|i| want.get().at(i))
                );
            }
        }
    }
}

/// Both orders, with every instruction set.
fn check(s: Conv2d) {
    let case = ConvCase::new(s);
    let want = case.want(&Cx::oracle(), PairOrder::Tiles);
    // The oracle is slow.
    let small = case.s.flops() < 400_000;
    for isa in Isa::available().chain([Isa::detect()]).filter(|isa| isa.has_avx2() || small) {
        for workers in [1, 3] {
            case.same(isa.name(), &Cx { isa, par: &Reverse(workers) }, PairOrder::Tiles, &want);
        }
    }
    let isa = Isa::detect();
    if isa.has(Feature::Avx512Bf16) {
        let want = case.want(&Cx { isa, par: &Serial }, PairOrder::Pairs);
        for workers in [1, 3] {
            case.same(isa.name(), &Cx { isa, par: &Reverse(workers) }, PairOrder::Pairs, &want);
        }
    }
}

#[test]
fn patches_have_the_bits_of_the_whole_matrix() {
    for v in [
        // One pixel, one channel, and nothing at all.
        [1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1],
        [1, 1, 1, 5, 7, 3, 3, 1, 1, 1, 1],
        [0, 5, 5, 3, 4, 3, 3, 1, 1, 1, 1],
        [1, 2, 2, 3, 5, 5, 5, 1, 0, 1, 1],
        // Channels that fill units, runs, both and neither.
        [2, 6, 7, 16, 32, 3, 3, 1, 1, 1, 1],
        [1, 5, 6, 32, 16, 3, 3, 1, 1, 1, 1],
        [1, 6, 5, 64, 33, 3, 3, 1, 1, 1, 1],
        [2, 5, 4, 17, 31, 3, 3, 1, 1, 1, 1],
        [1, 7, 9, 3, 20, 3, 3, 1, 1, 1, 1],
        [1, 5, 5, 48, 9, 3, 3, 1, 0, 1, 1],
        // Stems, and few channels.
        [1, 19, 18, 3, 24, 7, 7, 2, 3, 1, 1],
        [2, 12, 13, 3, 6, 5, 5, 1, 0, 1, 1],
        [2, 9, 8, 6, 16, 5, 5, 1, 2, 1, 1],
        [1, 23, 21, 1, 9, 11, 11, 4, 2, 1, 1],
        // Strides: every tap in a phase, some, none.
        [2, 8, 8, 16, 24, 3, 3, 2, 1, 1, 1],
        [1, 9, 7, 20, 12, 1, 1, 2, 0, 1, 1],
        [1, 9, 9, 5, 33, 1, 1, 3, 1, 1, 1],
        [1, 8, 8, 4, 5, 2, 2, 3, 0, 1, 1],
        [1, 10, 9, 7, 13, 3, 4, 3, 2, 1, 1],
        // Dilations, with strides that share a divisor and that do not; padding beyond the kernel.
        [1, 11, 10, 4, 8, 3, 3, 1, 2, 2, 1],
        [1, 13, 12, 5, 7, 4, 4, 2, 2, 3, 1],
        [1, 13, 14, 32, 9, 3, 3, 2, 3, 2, 1],
        [1, 4, 4, 3, 5, 3, 3, 1, 6, 1, 1],
        [2, 3, 4, 18, 16, 2, 3, 2, 5, 1, 1],
        // Plain products.
        [2, 5, 3, 7, 19, 1, 1, 1, 0, 1, 1],
        [1, 9, 9, 40, 33, 1, 1, 1, 0, 1, 1],
        [1, 6, 6, 64, 48, 1, 1, 1, 0, 1, 1],
        [1, 3, 3, 8, 8, 1, 1, 1, 1, 1, 1],
    ] {
        check(conv(v));
    }
}

#[test]
fn dims_may_differ() {
    let mut s = conv([2, 11, 8, 6, 10, 5, 2, 1, 0, 1, 1]);
    (s.stride, s.padding, s.dilation) = ((3, 2), (4, 0), (1, 3));
    check(s);
    let mut s = conv([1, 12, 9, 16, 3, 3, 3, 1, 1, 1, 1]);
    (s.stride, s.dilation) = ((2, 1), (3, 1));
    check(s);
    let mut s = conv([1, 7, 12, 3, 17, 3, 2, 1, 2, 1, 1]);
    (s.stride, s.dilation) = ((1, 2), (1, 2));
    check(s);
}

/// Several tasks, sweeps and blocks of k.
#[test]
fn large_convolutions_agree_whatever_the_instructions() {
    for v in [
        [2, 24, 24, 64, 80, 3, 3, 1, 1, 1, 1],
        [3, 28, 28, 3, 64, 7, 7, 2, 3, 1, 1],
        [2, 20, 20, 96, 40, 3, 3, 2, 1, 1, 1],
        [1, 14, 14, 128, 600, 1, 1, 2, 0, 1, 1],
    ] {
        let case = ConvCase::new(conv(v));
        let isa = Isa::detect();
        for order in [PairOrder::Tiles, PairOrder::Pairs] {
            let want = case.want(&Cx { isa, par: &Serial }, order);
            for workers in [1, 3] {
                case.same(isa.name(), &Cx { isa, par: &Reverse(workers) }, order, &want);
                if order == PairOrder::Tiles {
                    for isa in Isa::available().filter(|isa| isa.has_avx2()) {
                        case.same(isa.name(), &Cx { isa, par: &Reverse(workers) }, order, &want);
                    }
                }
            }
        }
    }
}

#[test]
fn results_are_near_those_of_f32() {
    let case = ConvCase::new(conv([2, 9, 9, 24, 20, 3, 3, 2, 1, 1, 1]));
    let s = &case.s;
    let wide = |x: &[bf16]| x.iter().map(|&v| f32_from_bf16(v)).collect::<Vec<f32>>();
    let (x, weight, dy) = (wide(&case.x), wide(&case.weight), wide(&case.dy));
    let cx = Cx::oracle();
    let scratch = |pass| vec![0.0; s.scratch_len(pass, 1)];
    let (mut y, mut dx) = (vec![0.0; s.y_len()], vec![0.0; s.x_len()]);
    let mut dw = vec![0.0; s.weight_len()];
    let (x, weight, dy) = (Floats::F32(&x), Floats::F32(&weight), Floats::F32(&dy));
    s.forward(
        &cx,
        x,
        weight,
        Some(&case.bias),
        FloatsMut::F32(&mut y),
        None,
        &mut scratch(ConvPass::Forward),
    );
    s.grad_input(&cx, dy, weight, FloatsMut::F32(&mut dx), &mut scratch(ConvPass::GradInput));
    s.grad_weight(&cx, x, dy, &mut dw, &mut scratch(ConvPass::GradWeight));
    for (at, v) in y.iter_mut().enumerate() {
        *v += shift(s, at);
    }
    for order in [PairOrder::Tiles, PairOrder::Pairs] {
        let got = case.got(&Cx::serial(), order, DType::F32).map(|v| v.wide());
        for (got, want) in got.iter().zip([&y, &dx, &dw]) {
            for (g, w) in got.iter().zip(want) {
                assert!((g - w).abs() < 1e-5, "{order:?}: {g} for {w}");
            }
        }
    }
}

#[test]
fn pairs_pay_where_winograd_does_not() {
    const PASSES: [ConvPass; 3] = [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight];
    let pays = |v, order, isa| {
        let conv = PairConv { conv: conv(v), order };
        PASSES.map(|pass| conv.pays(pass, isa))
    };
    let all = Isa::detect();
    let has = all.has(Feature::Avx512Bf16);
    for (v, want) in [
        ([8, 56, 56, 64, 256, 1, 1, 1, 0, 1, 1], [true, true, true]),
        ([8, 56, 56, 128, 128, 3, 3, 2, 1, 1, 1], [true, true, true]),
        ([8, 56, 56, 32, 64, 3, 3, 2, 1, 1, 1], [true, false, true]),
        ([8, 224, 224, 3, 64, 7, 7, 2, 3, 1, 1], [true, false, true]),
        ([64, 32, 32, 3, 64, 3, 3, 1, 1, 1, 1], [false, false, false]),
        ([64, 14, 14, 6, 16, 5, 5, 1, 0, 1, 1], [false, false, false]),
        // By Winograd's algorithm.
        ([64, 32, 32, 64, 64, 3, 3, 1, 1, 1, 1], [false, false, false]),
        // Groups.
        ([8, 28, 28, 128, 128, 3, 3, 2, 1, 1, 4], [false, false, false]),
    ] {
        assert_eq!(pays(v, PairOrder::Pairs, all), want.map(|pays| pays && has), "{v:?}");
        for isa in Isa::available() {
            assert_eq!(pays(v, PairOrder::Tiles, isa), [false; 3], "a twin does not: {v:?} {isa:?}");
            assert_eq!(pays(v, PairOrder::Pairs, isa), [false; 3], "a twin does not: {v:?} {isa:?}");
        }
    }
    let winograd = [64, 32, 32, 64, 64, 3, 3, 1, 1, 1, 1];
    assert_eq!(pays(winograd, PairOrder::Tiles, all), [amx_state() == AmxState::Ready; 3]);
}

#[test]
#[should_panic(expected = "one group")]
fn groups_are_refused() {
    let s = Conv2d { groups: 2, ..conv([1, 3, 3, 2, 2, 1, 1, 1, 0, 1, 1]) };
    let case = ConvCase::new(s);
    case.got(&Cx::serial(), PairOrder::Tiles, DType::F32);
}

#[test]
#[should_panic(expected = "not in f32")]
fn operands_in_f32_are_refused() {
    let s = conv([1, 3, 3, 2, 2, 1, 1, 1, 0, 1, 1]);
    let (x, weight, mut y) = (vec![0.0; s.x_len()], rounded(s.weight_len(), 1), vec![0.0; s.y_len()]);
    let conv = PairConv { conv: s, order: PairOrder::Tiles };
    let mut scratch = vec![0.0; conv.scratch_len(ConvPass::Forward, 1)];
    let (x, weight, y) = (Floats::F32(&x), Floats::Bf16(&weight), FloatsMut::F32(&mut y));
    conv.forward(&Cx::serial(), x, weight, None, y, None, &mut scratch);
}
