//! Times the convolutions of the reference jobs on one core, pass by pass: CPU time of a call in ms, which other
//! processes disturb less than time on the wall, and GFLOP/s by the definition (so Winograd may exceed the machine's peak).
//!
//! With an order of sums, images and weights are in bf16, and the passes in f32 arithmetic take turns with those of pairs.
//!
//! `cargo run --release -p polyreme-kernels --example conv_shapes [part of a name [pairs|tiles]]`

use polyreme_dtype::bf16;
use polyreme_kernels::conv::pairs::PairConv;
use polyreme_kernels::conv::{Conv2d, ConvPass};
use polyreme_kernels::floats::{Floats, FloatsMut};
use polyreme_kernels::gemm::pairs::PairOrder;
use polyreme_kernels::{Cx, convert};

/// How long each is measured.
const SECONDS: f64 = 0.3;

fn main() {
    let only = std::env::args().nth(1);
    let order = std::env::args().nth(2).map(|order| match order.as_str() {
        "pairs" => PairOrder::Pairs,
        "tiles" => PairOrder::Tiles,
        other => panic!("{other} is not an order of sums: pairs, tiles"),
    });
    // name, n, side, c_in, c_out, kernel, stride, padding, groups
    let shapes = [
        ("cnn 32x32 3-64", 64, 32, 3, 64, 3, 1, 1, 1),
        ("cnn 32x32 64-64", 64, 32, 64, 64, 3, 1, 1, 1),
        ("cnn 16x16 64-128", 64, 16, 64, 128, 3, 1, 1, 1),
        ("cnn 16x16 128-128", 64, 16, 128, 128, 3, 1, 1, 1),
        ("cnn 8x8 128-256", 64, 8, 128, 256, 3, 1, 1, 1),
        ("cnn 8x8 256-256", 64, 8, 256, 256, 3, 1, 1, 1),
        ("lenet 3-6 5x5", 64, 32, 3, 6, 5, 1, 0, 1),
        ("lenet 6-16 5x5", 64, 14, 6, 16, 5, 1, 0, 1),
        ("stem 7x7/2 3-64", 2, 224, 3, 64, 7, 2, 3, 1),
        ("stem 11x11/4 3-64", 4, 224, 3, 64, 11, 4, 2, 1),
        ("resnet 3x3/2 128-256", 4, 28, 128, 256, 3, 2, 1, 1),
        ("resnet 1x1/2 256-512", 4, 28, 256, 512, 1, 2, 0, 1),
        ("resnet 1x1 128-256", 4, 28, 128, 256, 1, 1, 0, 1),
        ("resnet50 7x7/2 3-64", 8, 224, 3, 64, 7, 2, 3, 1),
        ("resnet50 56: 1x1 64-256", 8, 56, 64, 256, 1, 1, 0, 1),
        ("resnet50 56: 1x1 256-64", 8, 56, 256, 64, 1, 1, 0, 1),
        ("resnet50 56: 3x3 64", 8, 56, 64, 64, 3, 1, 1, 1),
        ("resnet50 56: 1x1/2 256-512", 8, 56, 256, 512, 1, 2, 0, 1),
        ("resnet50 56: 3x3/2 128", 8, 56, 128, 128, 3, 2, 1, 1),
        ("resnet50 28: 1x1 128-512", 8, 28, 128, 512, 1, 1, 0, 1),
        ("resnet50 28: 1x1 512-128", 8, 28, 512, 128, 1, 1, 0, 1),
        ("resnet50 28: 3x3 128", 8, 28, 128, 128, 3, 1, 1, 1),
        ("resnet50 14: 1x1 256-1024", 8, 14, 256, 1024, 1, 1, 0, 1),
        ("resnet50 14: 1x1 1024-256", 8, 14, 1024, 256, 1, 1, 0, 1),
        ("resnet50 14: 3x3 256", 8, 14, 256, 256, 3, 1, 1, 1),
        ("resnet50 14: 3x3/2 512", 8, 14, 512, 512, 3, 2, 1, 1),
        ("resnet50 14: 1x1/2 1024-2048", 8, 14, 1024, 2048, 1, 2, 0, 1),
        ("resnet50 7: 1x1 512-2048", 8, 7, 512, 2048, 1, 1, 0, 1),
        ("resnet50 7: 1x1 2048-512", 8, 7, 2048, 512, 1, 1, 0, 1),
        ("resnet50 7: 3x3 512", 8, 7, 512, 512, 3, 1, 1, 1),
        ("cnn of 1: 32x32 3-64", 1, 32, 3, 64, 3, 1, 1, 1),
        ("cnn of 1: 32x32 64-64", 1, 32, 64, 64, 3, 1, 1, 1),
        ("cnn of 1: 16x16 64-128", 1, 16, 64, 128, 3, 1, 1, 1),
        ("cnn of 1: 16x16 128-128", 1, 16, 128, 128, 3, 1, 1, 1),
        ("cnn of 1: 8x8 128-256", 1, 8, 128, 256, 3, 1, 1, 1),
        ("cnn of 1: 8x8 256-256", 1, 8, 256, 256, 3, 1, 1, 1),
        ("narrow 1x1 16-64", 8, 56, 16, 64, 1, 1, 0, 1),
        ("narrow 1x1 32-32", 8, 56, 32, 32, 1, 1, 0, 1),
        ("narrow 1x1 32-64", 8, 56, 32, 64, 1, 1, 0, 1),
        ("narrow 1x1 48-48", 8, 56, 48, 48, 1, 1, 0, 1),
        ("narrow 3x3/2 16-32", 8, 56, 16, 32, 3, 2, 1, 1),
        ("narrow 3x3/2 32-64", 8, 56, 32, 64, 3, 2, 1, 1),
        ("narrow 5x5 16-32", 8, 28, 16, 32, 5, 1, 2, 1),
        ("narrow 5x5 32-48", 8, 28, 32, 48, 5, 1, 2, 1),
        ("narrow 5x5 64-64", 8, 28, 64, 64, 5, 1, 2, 1),
        ("narrow 3x3 of 1: 7x7 64", 1, 7, 64, 64, 3, 1, 1, 1),
        ("narrow 3x3 of 1: 4x4 512", 1, 4, 512, 512, 3, 1, 1, 1),
        ("groups 4: 128-128", 4, 28, 128, 128, 3, 1, 1, 4),
        ("depthwise 3x3 96", 8, 56, 96, 96, 3, 1, 1, 96),
        ("depthwise 3x3/2 96", 8, 56, 96, 96, 3, 2, 1, 96),
    ];
    let what = if order.is_some() { "ms in f32, of pairs, ratio" } else { "ms (GFLOP/s)" };
    println!("{what:28} {:>20} {:>20} {:>20}", "forward", "grad_input", "grad_weight");
    for (name, n, side, c_in, c_out, k, stride, padding, groups) in shapes {
        if only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let s = Conv2d {
            n,
            h: side,
            w: side,
            c_in,
            c_out,
            kh: k,
            kw: k,
            stride: (stride, stride),
            padding: (padding, padding),
            dilation: (1, 1),
            groups,
            strict: false,
        };
        print!("{name:28}");
        for pass in [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight] {
            match order {
                None => {
                    let mean = mean_of([&mut f32s(&s, pass)])[0];
                    print!(" {:>11.3} ({:>6.1})", mean * 1e3, s.flops() as f64 / mean / 1e9);
                }
                Some(order) if groups == 1 => {
                    let pairs = PairConv { conv: s.clone(), order };
                    let [wide, pairs] =
                        mean_of([&mut halves(&s, pass, None), &mut halves(&s, pass, Some(&pairs))]);
                    print!(" {:>8.3} {:>8.3} {:.2}", wide * 1e3, pairs * 1e3, pairs / wide);
                }
                Some(_) => {}
            }
        }
        println!();
    }
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i * 7919 % 1013) as f32 / 1013.0 - 0.5).collect()
}

/// A pass on f32.
fn f32s(s: &Conv2d, pass: ConvPass) -> impl FnMut() {
    let (x, weight, dy) = (numbers(s.x_len()), numbers(s.weight_len()), numbers(s.y_len()));
    let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), weight.clone());
    let mut scratch = vec![0.0; s.scratch_len(pass, 1)];
    move || {
        let cx = Cx::serial();
        let (x, weight, dy) = (Floats::F32(&x), Floats::F32(&weight), Floats::F32(&dy));
        match pass {
            ConvPass::Forward => {
                s.forward(&cx, x, weight, None, FloatsMut::F32(&mut y), None, &mut scratch);
            }
            ConvPass::GradInput => s.grad_input(&cx, dy, weight, FloatsMut::F32(&mut dx), &mut scratch),
            ConvPass::GradWeight => s.grad_weight(&cx, x, dy, &mut dw, &mut scratch),
        }
    }
}

/// A pass on bf16: in f32, or of pairs.
fn halves(s: &Conv2d, pass: ConvPass, pairs: Option<&PairConv>) -> impl FnMut() {
    let halves = |len: usize| {
        let mut to = vec![bf16::ZERO; len];
        convert::f32_to_bf16(&Cx::serial(), &numbers(len), &mut to);
        to
    };
    let (x, weight, dy) = (halves(s.x_len()), halves(s.weight_len()), halves(s.y_len()));
    let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), numbers(s.weight_len()));
    let len = pairs.map_or_else(|| s.scratch_len_half(pass, 1), |p| p.scratch_len(pass, 1));
    let mut scratch = vec![0.0; len];
    move || {
        let cx = Cx::serial();
        let (x, weight, dy) = (Floats::Bf16(&x), Floats::Bf16(&weight), Floats::Bf16(&dy));
        let (y, dx) = (FloatsMut::Bf16(&mut y), FloatsMut::Bf16(&mut dx));
        match (pass, pairs) {
            (ConvPass::Forward, None) => s.forward(&cx, x, weight, None, y, None, &mut scratch),
            (ConvPass::Forward, Some(p)) => p.forward(&cx, x, weight, None, y, None, &mut scratch),
            (ConvPass::GradInput, None) => s.grad_input(&cx, dy, weight, dx, &mut scratch),
            (ConvPass::GradInput, Some(p)) => p.grad_input(&cx, dy, weight, dx, &mut scratch),
            (ConvPass::GradWeight, None) => s.grad_weight(&cx, x, dy, &mut dw, &mut scratch),
            (ConvPass::GradWeight, Some(p)) => p.grad_weight(&cx, x, dy, &mut dw, &mut scratch),
        }
    }
}

/// Seconds of a call of each, which take turns.
fn mean_of<const N: usize>(mut runs: [&mut dyn FnMut(); N]) -> [f64; N] {
    let (mut seconds, mut calls) = ([0.0; N], 0);
    runs.iter_mut().for_each(|run| run());
    while seconds[0] < SECONDS {
        for (run, seconds) in runs.iter_mut().zip(&mut seconds) {
            let begin = cpu_seconds();
            run();
            *seconds += cpu_seconds() - begin;
        }
        calls += 1;
    }
    seconds.map(|s| s / f64::from(calls))
}

/// CPU time of this thread so far.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("this needs Linux");
    let ns = text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
    ns.expect("the first number is the time in nanoseconds") / 1e9
}
