//! Times element-wise ops, and kernels that are bound by memory, on one core and with each instruction set:
//! `cargo run --release -p polyreme-kernels --example elementwise_shapes`.
//!
//! GB/s count each operand once, as if nothing of it were in cache before.

use std::time::Instant;

use polyreme_dtype::DType;
use polyreme_kernels::elementwise::{Binary, Expr, Fused, Source, Unary};
use polyreme_kernels::norm::{BatchNorm, LayerNorm};
use polyreme_kernels::optim::{Moments, Optimizer, StepHyper};
use polyreme_kernels::reduce::{Reduce, ReduceKind};
use polyreme_kernels::softmax::{SoftmaxDim, softmax};
use polyreme_kernels::{Cx, Floats, FloatsMut, Isa, Serial};

fn main() {
    let isas: Vec<Isa> = Isa::available().filter(|isa| isa.has_avx2()).collect();
    print!("{:34}", "");
    isas.iter().for_each(|isa| print!(" {:>12} {:>7}", isa.name(), "GB/s"));
    println!();
    for (name, op) in [
        ("exp", Unary::Exp),
        ("tanh", Unary::Tanh),
        ("gelu", Unary::Gelu),
        ("gelu_tanh", Unary::GeluTanh),
        ("sin", Unary::Sin),
        ("relu", Unary::Relu),
    ] {
        let fused = Fused::new(&Expr::unary(op), &[LEN], &[&[LEN]]).expect("shapes that agree");
        let (x, mut y) = (numbers(LEN), numbers(LEN));
        row(&format!("{name} 16 Ki"), &isas, 2 * LEN, |cx| {
            fused.run(cx, &[Source::Slice(Floats::F32(&x))], &mut [FloatsMut::F32(&mut y)]);
        });
    }
    for (name, op) in
        [("add", Binary::Add), ("gelu_grad", Binary::GeluGrad), ("gelu_tanh_grad", Binary::GeluTanhGrad)]
    {
        let fused = Fused::new(&Expr::binary(op), &[LEN], &[&[LEN], &[LEN]]).expect("shapes that agree");
        let (a, b, mut y) = (numbers(LEN), numbers(LEN), numbers(LEN));
        row(&format!("{name} 16 Ki"), &isas, 3 * LEN, |cx| {
            let sources = [Source::Slice(Floats::F32(&a)), Source::Slice(Floats::F32(&b))];
            fused.run(cx, &sources, &mut [FloatsMut::F32(&mut y)]);
        });
    }
    for (rows, d) in [(2048, 256), (128, 10)] {
        let (x, mut y) = (numbers(rows * d), numbers(rows * d));
        row(&format!("softmax {rows}×{d}"), &isas, 2 * rows * d, |cx| {
            softmax(cx, SoftmaxDim::last(rows, d), Floats::F32(&x), FloatsMut::F32(&mut y), &mut []);
        });
    }
    layer_norm(&isas, 2048, 384);
    for (rows, c) in [(64 * 1024, 64), (16 * 1024, 128), (4096, 256)] {
        batch_norm(&isas, rows, c);
    }
    for (rows, d) in [(2048, 1536), (2048, 384), (128, 512)] {
        let sum = Reduce::new(ReduceKind::Sum, &[rows, d], &[0]);
        let (x, mut y) = (numbers(rows * d), numbers(d));
        let mut scratch = numbers(sum.scratch_len(DType::F32, 1));
        row(&format!("sum of rows {rows}×{d}"), &isas, rows * d, |cx| {
            sum.forward(cx, Floats::F32(&x), FloatsMut::F32(&mut y), &mut scratch);
        });
    }
    for n in [10_800_000, 670_000] {
        let (mut p, g, mut m, mut v) = (numbers(n), numbers(n), vec![0.0; n], vec![0.0; n]);
        row(&format!("adamw {n}"), &isas, 7 * n, |cx| {
            let hyper = StepHyper { lr: 1e-3, step: 2, grad_scale: 1.0, decay_scale: 1.0 };
            Optimizer::AdamW(Moments::DEFAULT).step(cx, hyper, &mut p, &g, &mut m, &mut v, &[]);
        });
    }
}

fn layer_norm(isas: &[Isa], rows: usize, d: usize) {
    let norm = LayerNorm { rows, d, eps: 1e-5 };
    let (x, dy, w, b) = (numbers(rows * d), numbers(rows * d), numbers(d), numbers(d));
    let (mut y, mut dx, mut mean, mut rstd) =
        (numbers(rows * d), numbers(rows * d), numbers(rows), numbers(rows));
    let (mut dw, mut db, mut scratch) =
        (numbers(d), numbers(d), numbers(norm.backward_scratch_len(false, 1)));
    row(&format!("layer_norm {rows}×{d}"), isas, 2 * rows * d, |cx| {
        let (x, y) = (Floats::F32(&x), FloatsMut::F32(&mut y));
        norm.forward(cx, x, Some(&w), Some(&b), y, &mut mean, &mut rstd, &mut []);
    });
    row(&format!("layer_norm_grad {rows}×{d}"), isas, 3 * rows * d, |cx| {
        let (dw, db) = (Some(&mut dw[..]), Some(&mut db[..]));
        let (dy, x, dx) = (Floats::F32(&dy), Floats::F32(&x), FloatsMut::F32(&mut dx));
        norm.backward(cx, dy, x, Some(&w), &mean, &rstd, dx, dw, db, &mut scratch);
    });
}

fn batch_norm(isas: &[Isa], rows: usize, channels: usize) {
    let norm = BatchNorm { rows, channels, eps: 1e-5, relu: true };
    let (x, dy, w, b) =
        (numbers(rows * channels), numbers(rows * channels), numbers(channels), numbers(channels));
    let (mut y, mut dx, mut mean, mut rstd) = (x.clone(), x.clone(), numbers(channels), numbers(channels));
    let (mut dw, mut db, mut scratch) = (w.clone(), b.clone(), numbers(norm.scratch_len(false, 1)));
    row(&format!("batch_norm {rows}×{channels}"), isas, 2 * rows * channels, |cx| {
        let (x, y) = (Floats::F32(&x), FloatsMut::F32(&mut y));
        norm.forward(cx, x, &w, &b, y, &mut mean, &mut rstd, None, None, &mut scratch);
    });
    row(&format!("batch_norm_grad {rows}×{channels}"), isas, 3 * rows * channels, |cx| {
        let (dy, x, dx) = (Floats::F32(&dy), Floats::F32(&x), FloatsMut::F32(&mut dx));
        norm.backward(cx, dy, x, &w, &b, &mean, &rstd, dx, &mut dw, &mut db, &mut scratch);
    });
}

/// Elements of a chain: in L2 with room to spare.
const LEN: usize = 16 * 1024;

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1000) as f32 / 250.0 - 2.0).collect()
}

/// One line: microseconds and GB/s of each instruction set.
fn row(name: &str, isas: &[Isa], floats: usize, mut f: impl FnMut(&Cx)) {
    print!("{name:34}");
    for &isa in isas {
        let cx = Cx { isa, par: &Serial };
        let (begin, mut least) = (Instant::now(), f64::INFINITY);
        let mut n = 0;
        while n < 5 || begin.elapsed().as_secs_f64() < 0.2 {
            let start = Instant::now();
            f(&cx);
            least = least.min(start.elapsed().as_secs_f64());
            n += 1;
        }
        print!(" {:9.2} µs {:7.1}", least * 1e6, 4.0 * floats as f64 / least * 1e-9);
    }
    println!();
}
