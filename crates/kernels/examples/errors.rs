//! How far convolutions and products are from f64: plainly, and strictly. Operands are normal; errors are relative to the
//! root mean square of the result. `bench/errors.py` does the same with PyTorch.
//!
//! `cargo run --release -p polyreme-kernels --example errors`

use polyreme_kernels::conv::{Conv2d, ConvPass};
use polyreme_kernels::gemm::{Gemm, Strides};
use polyreme_kernels::{Cx, Floats, FloatsMut, random};

/// Elements of a result that are computed in f64 as well.
const CHECKED: usize = 4096;

fn main() {
    println!("{:28} {:>10} {:>10} {:>10} {:>10}", "", "default", "largest", "strict", "largest");
    for channels in [64, 128, 256, 512] {
        for pass in [ConvPass::Forward, ConvPass::GradInput, ConvPass::GradWeight] {
            let errors = [false, true].map(|strict| conv(channels, pass, strict));
            print(&format!("3x3, {channels} channels, {pass:?}"), errors);
        }
    }
    for n in [1024, 1536, 2048] {
        print(&format!("product of {n}"), [false, true].map(|strict| product(n, strict)));
    }
}

fn print(name: &str, [fast, strict]: [[f64; 2]; 2]) {
    println!("{name:28} {:>10.1e} {:>10.1e} {:>10.1e} {:>10.1e}", fast[0], fast[1], strict[0], strict[1]);
}

fn normal(stream: u64, len: usize) -> Vec<f32> {
    let mut v = vec![0.0; len];
    random::normal(&Cx::serial(), stream, 0, 0, 0.0, 1.0, &mut v);
    v
}

/// The root mean square and the largest of the errors, both over the root mean square of what is right.
fn errors(got: &[f32], exact: impl Fn(usize) -> f64) -> [f64; 2] {
    // Neither even nor a multiple of three, so that all channels and taps are met.
    let step = (got.len() / CHECKED..).find(|step| step % 2 > 0 && step % 3 > 0).unwrap_or(1);
    let (mut squares, mut right, mut largest, mut n) = (0.0, 0.0, 0.0f64, 0.0);
    for i in (0..got.len()).step_by(step) {
        let want = exact(i);
        let error = f64::from(got[i]) - want;
        squares += error * error;
        right += want * want;
        largest = largest.max(error.abs());
        n += 1.0;
    }
    [(squares / right).sqrt(), largest / (right / n).sqrt()]
}

fn conv(channels: usize, pass: ConvPass, strict: bool) -> [f64; 2] {
    let (n, side) = (8, 16);
    let s = Conv2d {
        n,
        h: side,
        w: side,
        c_in: channels,
        c_out: channels,
        kh: 3,
        kw: 3,
        stride: (1, 1),
        padding: (1, 1),
        dilation: (1, 1),
        groups: 1,
        strict,
    };
    let (x, weight, dy) = (normal(1, s.x_len()), normal(2, s.weight_len()), normal(3, s.y_len()));
    let mut scratch = vec![0.0; s.scratch_len(pass, 1)];
    let cx = Cx::serial();
    // Pixel (i, y, x) of an image, or zero outside.
    let at = |of: &[f32], i: usize, y: usize, x: usize, c: usize| {
        // The padding shifts by one.
        let inside = (1..=side).contains(&y) && (1..=side).contains(&x);
        if inside { f64::from(of[((i * side + y - 1) * side + x - 1) * channels + c]) } else { 0.0 }
    };
    let place = |k: usize| {
        let (c, pixel) = (k % channels, k / channels);
        (pixel / side / side, pixel / side % side, pixel % side, c)
    };
    let tap =
        |o: usize, c: usize, ky: usize, kx: usize| f64::from(weight[((o * channels + c) * 3 + ky) * 3 + kx]);
    let taps = || (0..3).flat_map(|ky| (0..3).map(move |kx| (ky, kx)));
    match pass {
        ConvPass::Forward => {
            let mut y = vec![0.0; s.y_len()];
            s.forward(
                &cx,
                Floats::F32(&x),
                Floats::F32(&weight),
                None,
                FloatsMut::F32(&mut y),
                None,
                &mut scratch,
            );
            errors(&y, |k| {
                let (i, row, col, o) = place(k);
                let of = |(ky, kx)| {
                    (0..channels).map(|c| at(&x, i, row + ky, col + kx, c) * tap(o, c, ky, kx)).sum::<f64>()
                };
                taps().map(of).sum()
            })
        }
        ConvPass::GradInput => {
            let mut dx = vec![0.0; s.x_len()];
            s.grad_input(&cx, Floats::F32(&dy), Floats::F32(&weight), FloatsMut::F32(&mut dx), &mut scratch);
            errors(&dx, |k| {
                let (i, row, col, c) = place(k);
                let of = |(ky, kx)| {
                    let (row, col) = (row + 2 - ky, col + 2 - kx);
                    (0..channels).map(|o| at(&dy, i, row, col, o) * tap(o, c, ky, kx)).sum::<f64>()
                };
                taps().map(of).sum()
            })
        }
        ConvPass::GradWeight => {
            let mut dweight = vec![0.0; s.weight_len()];
            s.grad_weight(&cx, Floats::F32(&x), Floats::F32(&dy), &mut dweight, &mut scratch);
            errors(&dweight, |k| {
                let (kx, ky, c, o) = (k % 3, k / 3 % 3, k / 9 % channels, k / 9 / channels);
                let pixels = (0..n * side * side).map(|p| (p / side / side, p / side % side, p % side));
                pixels
                    .map(|(i, row, col)| at(&x, i, row + ky, col + kx, c) * at(&dy, i, row + 1, col + 1, o))
                    .sum()
            })
        }
    }
}

fn product(n: usize, strict: bool) -> [f64; 2] {
    let plain = Strides { batch: 0, row: n, col: 1 };
    let g = Gemm { batch: 1, m: n, n, k: n, a: plain, b: plain, c: plain, accumulate: false, strict };
    let (a, b) = (normal(1, n * n), normal(2, n * n));
    let (mut c, mut scratch) = (vec![0.0; n * n], vec![0.0; g.scratch_len(1)]);
    g.run(&Cx::serial(), &a, &b, &mut c, None, &mut scratch);
    errors(&c, |at| {
        let (row, col) = (at / n, at % n);
        (0..n).map(|k| f64::from(a[row * n + k]) * f64::from(b[k * n + col])).sum()
    })
}
