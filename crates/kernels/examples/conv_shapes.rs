//! Times the convolutions of the reference jobs on one core, pass by pass: least of some runs in ms, and GFLOP/s by the
//! definition (so Winograd may exceed the machine's peak).
//!
//! `cargo run --release -p polyreme-kernels --example conv_shapes [name]`

use std::time::Instant;

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
        ("groups 4: 128-128", 4, 28, 128, 128, 3, 1, 1, 4),
        ("depthwise 3x3 96", 8, 56, 96, 96, 3, 1, 1, 96),
        ("depthwise 3x3/2 96", 8, 56, 96, 96, 3, 2, 1, 96),
    ];
    let cx = Cx::serial();
    println!("{:24} {:>20} {:>20} {:>20}", "ms (GFLOP/s)", "forward", "grad_input", "grad_weight");
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
        };
        let fill =
            |len: usize| (0..len).map(|i| (i * 7919 % 1013) as f32 / 1013.0 - 0.5).collect::<Vec<f32>>();
        let (x, weight, dy) = (fill(s.x_len()), fill(s.weight_len()), fill(s.y_len()));
        let (mut y, mut dx, mut dw) = (dy.clone(), x.clone(), weight.clone());
        print!("{name:24}");
        for pass in [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight] {
            let mut scratch = vec![0.0; s.scratch_len(pass, 1)];
            let mut best = f64::MAX;
            let begin = Instant::now();
            while begin.elapsed().as_millis() < 300 {
                let start = Instant::now();
                match pass {
                    ConvPass::Forward => {
                        let (x, weight, y) = (Floats::F32(&x), Floats::F32(&weight), FloatsMut::F32(&mut y));
                        s.forward(&cx, x, weight, None, y, None, &mut scratch);
                    }
                    ConvPass::GradInput => {
                        let (dy, weight, dx) =
                            (Floats::F32(&dy), Floats::F32(&weight), FloatsMut::F32(&mut dx));
                        s.grad_input(&cx, dy, weight, dx, &mut scratch);
                    }
                    ConvPass::GradWeight => {
                        s.grad_weight(&cx, Floats::F32(&x), Floats::F32(&dy), &mut dw, &mut scratch);
                    }
                }
                best = best.min(start.elapsed().as_secs_f64());
            }
            print!(" {:>11.3} ({:>6.1})", best * 1e3, s.flops() as f64 / best / 1e9);
        }
        println!();
    }
}
