//! Times the convolutions of the reference jobs on one core, pass by pass: CPU time of a call in ms, which other
//! processes disturb less than time on the wall, and GFLOP/s by the definition (so Winograd may exceed the machine's peak).
//!
//! `cargo run --release -p polyreme-kernels --example conv_shapes [name]`

use polyreme_kernels::Cx;
use polyreme_kernels::conv::{Conv2d, ConvPass};
use polyreme_kernels::floats::{Floats, FloatsMut};

fn main() {
    let only = std::env::args().nth(1);
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
        ("groups 4: 128-128", 4, 28, 128, 128, 3, 1, 1, 4),
        ("depthwise 3x3 96", 8, 56, 96, 96, 3, 1, 1, 96),
        ("depthwise 3x3/2 96", 8, 56, 96, 96, 3, 2, 1, 96),
    ];
    let cx = Cx::serial();
    println!("{:28} {:>20} {:>20} {:>20}", "ms (GFLOP/s)", "forward", "grad_input", "grad_weight");
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
        let fill =
            |len: usize| (0..len).map(|i| (i * 7919 % 1013) as f32 / 1013.0 - 0.5).collect::<Vec<f32>>();
        let (x, weight, dy) = (fill(s.x_len()), fill(s.weight_len()), fill(s.y_len()));
        let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), weight.clone());
        print!("{name:28}");
        for pass in [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight] {
            let mut scratch = vec![0.0; s.scratch_len(pass, 1)];
            let mut run = || match pass {
                ConvPass::Forward => {
                    let (x, weight, y) = (Floats::F32(&x), Floats::F32(&weight), FloatsMut::F32(&mut y));
                    s.forward(&cx, x, weight, None, y, None, &mut scratch);
                }
                ConvPass::GradInput => {
                    let (dy, weight, dx) = (Floats::F32(&dy), Floats::F32(&weight), FloatsMut::F32(&mut dx));
                    s.grad_input(&cx, dy, weight, dx, &mut scratch);
                }
                ConvPass::GradWeight => {
                    s.grad_weight(&cx, Floats::F32(&x), Floats::F32(&dy), &mut dw, &mut scratch)
                }
            };
            run();
            let (begin, mut calls) = (cpu_seconds(), 0);
            while cpu_seconds() - begin < 0.3 {
                run();
                calls += 1;
            }
            let mean = (cpu_seconds() - begin) / f64::from(calls);
            print!(" {:>11.3} ({:>6.1})", mean * 1e3, s.flops() as f64 / mean / 1e9);
        }
        println!();
    }
}

/// CPU time of this thread so far.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("this needs Linux");
    let ns = text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
    ns.expect("the first number is the time in nanoseconds") / 1e9
}
