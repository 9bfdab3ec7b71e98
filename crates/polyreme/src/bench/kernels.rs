//! `polyreme bench kernels`: kernels one by one, at the shapes of the reference jobs.

use std::io;

use polyreme_exec::Pool;
use polyreme_kernels::attention::{Attention, Grads};
use polyreme_kernels::codec::BlockCodec;
use polyreme_kernels::conv::{Conv2d, ConvPass};
use polyreme_kernels::elementwise::{Binary, Expr, Fused, Source, Unary};
use polyreme_kernels::gemm::{Gemm, Strides};
use polyreme_kernels::norm::{BatchNorm, LayerNorm};
use polyreme_kernels::optim::{Moments, Optimizer, StepHyper};
use polyreme_kernels::{Cx, Floats, FloatsMut, Isa, probe, random};
use serde::Serialize;

use super::median_seconds;

/// The result for one kernel.
#[derive(Clone, Debug, Serialize)]
pub struct KernelReport {
    /// Its name.
    pub kernel: String,
    /// Its shape.
    pub shape: String,
    /// Threads.
    pub threads: usize,
    /// The median time of a call.
    pub us: f64,
    /// Multiply-adds times two over the time; `None` for memory-bound kernels.
    pub gflops: Option<f64>,
    /// The share of the measured multiply-add peak of one core times the threads.
    pub peak_share: Option<f64>,
    /// Bytes that must move over the time; `None` for compute-bound kernels.
    pub gbs: Option<f64>,
}

/// What bounds a kernel.
enum Bound {
    Flops(f64),
    Bytes(f64),
}

struct Bench<'a> {
    cx: Cx<'a>,
    threads: usize,
    peak: f64,
    filter: &'a str,
    report: &'a mut dyn FnMut(KernelReport),
}

/// Measures every kernel whose name contains `filter`, and reports each as it is done.
pub fn measure(
    threads: usize,
    isa: Isa,
    filter: &str,
    report: &mut dyn FnMut(KernelReport),
) -> io::Result<()> {
    let pool = Pool::new(threads)?;
    let cx = Cx { isa, par: &pool };
    let peak = probe::fma_peak_gflops(&cx) * threads as f64;
    let mut bench = Bench { cx, threads, peak, filter, report };
    bench.products();
    bench.convolutions();
    bench.attention();
    bench.norms();
    bench.element_wise();
    bench.optimizers();
    bench.codecs();
    Ok(())
}

impl Bench<'_> {
    fn time(&mut self, kernel: &str, shape: String, work: Bound, mut call: impl FnMut(&Cx)) {
        let cx = self.cx;
        let mut run = || -> Result<(), std::convert::Infallible> {
            call(&cx);
            Ok(())
        };
        let Ok(once) = median_seconds(1, 1, &mut run);
        let n = (0.3 / once.max(1e-7)).clamp(5.0, 500.0) as usize;
        let Ok(seconds) = median_seconds(1, n, run);
        let (gflops, gbs) = match work {
            Bound::Flops(flops) => (Some(flops / seconds / 1e9), None),
            Bound::Bytes(bytes) => (None, Some(bytes / seconds / 1e9)),
        };
        let peak_share = gflops.map(|g| g / self.peak);
        let (kernel, threads) = (kernel.to_string(), self.threads);
        (self.report)(KernelReport { kernel, shape, threads, us: seconds * 1e6, gflops, peak_share, gbs });
    }

    /// Formats on the wire, of a bucket of gradients; the bytes are those of the f32. One core, as the thread that communicates.
    fn codecs(&mut self) {
        let n = 1 << 18;
        for codec in BlockCodec::ALL {
            let bytes = || Bound::Bytes((n * size_of::<f32>()) as f64);
            let mut x = vec![0.0f32; n];
            random::normal(&self.cx, 1, 0, 0, 0.0, 1.0, &mut x);
            let (mut residual, mut coded) = (vec![0.0f32; n], vec![0u8; codec.coded_len(n)]);
            let (encode, add) = (format!("encode_{}", codec.name()), format!("decode_{}", codec.name()));
            codec.encode(self.cx.isa, &x, &mut residual, &mut coded);
            if self.wants(&encode) {
                self.time(&encode, n.to_string(), bytes(), |cx| {
                    codec.encode(cx.isa, &x, &mut residual, &mut coded)
                });
            }
            if self.wants(&add) {
                self.time(&add, n.to_string(), bytes(), |cx| codec.decode(cx.isa, &coded, &mut x));
            }
        }
    }

    fn wants(&self, kernel: &str) -> bool {
        kernel.contains(self.filter)
    }

    /// The three products of a linear layer: forward `x·wᵀ`, input gradient `dy·w`, weight gradient `dyᵀ·x`.
    fn products(&mut self) {
        let layers = [
            ("gpt qkv", 2048, 384, 1152),
            ("gpt proj", 2048, 384, 384),
            ("gpt up", 2048, 384, 1536),
            ("gpt down", 2048, 1536, 384),
            ("gpt head", 2048, 384, 256),
            ("mlp fc1", 128, 784, 512),
            ("mlp fc2", 128, 512, 512),
            ("mlp fc3", 128, 512, 10),
        ];
        for (layer, rows, inputs, outputs) in layers {
            let (x, w) = ((inputs, 1), (outputs, inputs));
            let across = |(row, col): (usize, usize)| Strides { batch: 0, row, col };
            let cases = [
                ("forward", rows, outputs, inputs, across(x), across((1, w.1))),
                ("grad_input", rows, inputs, outputs, across((outputs, 1)), across((w.1, 1))),
                ("grad_weight", outputs, inputs, rows, across((1, outputs)), across((inputs, 1))),
            ];
            for (pass, m, n, k, a, b) in cases {
                let kernel = format!("matmul {pass}");
                if !self.wants(&kernel) {
                    continue;
                }
                let c = Strides { batch: 0, row: n, col: 1 };
                let gemm = Gemm { batch: 1, m, n, k, a, b, c, accumulate: false, strict: false };
                let (a, b, mut c) = (noise(m * k), noise(k * n), vec![0.0; m * n]);
                let mut scratch = vec![0.0; gemm.scratch_len(self.threads)];
                let work = Bound::Flops((2 * m * n * k) as f64);
                let shape = format!("{layer} {m}x{k} by {k}x{n}");
                self.time(&kernel, shape, work, |cx| gemm.run(cx, &a, &b, &mut c, None, &mut scratch));
            }
        }
    }

    fn convolutions(&mut self) {
        let shapes = [
            ("cnn", 32, 3, 64, 3, 1),
            ("cnn", 32, 64, 64, 3, 1),
            ("cnn", 16, 64, 128, 3, 1),
            ("cnn", 16, 128, 128, 3, 1),
            ("cnn", 8, 128, 256, 3, 1),
            ("cnn", 8, 256, 256, 3, 1),
            ("lenet", 32, 3, 6, 5, 0),
            ("lenet", 14, 6, 16, 5, 0),
        ];
        for (job, size, c_in, c_out, kernel, pad) in shapes {
            let conv = Conv2d {
                n: 64,
                h: size,
                w: size,
                c_in,
                c_out,
                kh: kernel,
                kw: kernel,
                stride: (1, 1),
                padding: (pad, pad),
                dilation: (1, 1),
                groups: 1,
                strict: false,
            };
            let (x, w, y) = (noise(conv.x_len()), noise(conv.weight_len()), noise(conv.y_len()));
            for (name, pass) in [
                ("conv2d forward", ConvPass::Forward),
                ("conv2d grad_input", ConvPass::GradInput),
                ("conv2d grad_weight", ConvPass::GradWeight),
            ] {
                if !self.wants(name) {
                    continue;
                }
                let mut scratch = vec![0.0; conv.scratch_len(pass, self.threads)];
                let shape = format!(
                    "{job} 64x{size}x{size}x{c_in} to {c_out} by {kernel}x{kernel}, {:?}",
                    conv.algorithm(pass)
                );
                let work = Bound::Flops(conv.flops() as f64);
                let mut out = match pass {
                    ConvPass::Forward => y.clone(),
                    ConvPass::GradInput => x.clone(),
                    ConvPass::GradWeight => w.clone(),
                };
                self.time(name, shape, work, |cx| match pass {
                    ConvPass::Forward => conv.forward(
                        cx,
                        Floats::F32(&x),
                        Floats::F32(&w),
                        None,
                        FloatsMut::F32(&mut out),
                        None,
                        &mut scratch,
                    ),
                    ConvPass::GradInput => conv.grad_input(
                        cx,
                        Floats::F32(&y),
                        Floats::F32(&w),
                        FloatsMut::F32(&mut out),
                        &mut scratch,
                    ),
                    ConvPass::GradWeight => {
                        conv.grad_weight(cx, Floats::F32(&x), Floats::F32(&y), &mut out, &mut scratch)
                    }
                });
            }
        }
    }

    fn attention(&mut self) {
        let (b, t, heads, d) = (8, 256, 6, 64);
        let a = Attention::packed(b, t, heads, d, true);
        let (qkv, dy) = (noise(b * t * 3 * heads * d), noise(b * t * heads * d));
        let (mut o, mut lse) = (vec![0.0; b * t * heads * d], vec![0.0; a.lse_len()]);
        let shape = format!("gpt {b}x{t}x{heads}x{d}, causal");
        let pairs = (b * heads * t * (t + 1) / 2 * d) as f64;
        let mut scratch = vec![0.0; a.forward_scratch_len(self.threads)];
        let mut forward = |cx: &Cx| {
            a.forward(
                cx,
                Floats::F32(&qkv),
                Floats::F32(&qkv),
                Floats::F32(&qkv),
                None,
                FloatsMut::F32(&mut o),
                &mut lse,
                &mut scratch,
            )
        };
        forward(&self.cx);
        if self.wants("attention forward") {
            self.time("attention forward", shape.clone(), Bound::Flops(4.0 * pairs), forward);
        }
        if self.wants("attention backward") {
            let mut dqkv = vec![0.0; qkv.len()];
            let mut scratch = vec![0.0; a.backward_scratch_len(self.threads)];
            self.time("attention backward", shape, Bound::Flops(10.0 * pairs), |cx| {
                let grads = Grads::Packed(FloatsMut::F32(&mut dqkv));
                a.backward(
                    cx,
                    Floats::F32(&dy),
                    Floats::F32(&qkv),
                    Floats::F32(&qkv),
                    Floats::F32(&qkv),
                    None,
                    Floats::F32(&o),
                    &lse,
                    grads,
                    &mut scratch,
                );
            });
        }
    }

    fn norms(&mut self) {
        let (rows, d) = (2048, 384);
        let norm = LayerNorm { rows, d, eps: 1e-5 };
        let (x, gamma) = (noise(rows * d), noise(d));
        let (mut y, mut mean, mut rstd) = (vec![0.0; rows * d], vec![0.0; rows], vec![1.0; rows]);
        if self.wants("layer_norm forward") {
            let work = Bound::Bytes((8 * rows * d) as f64);
            self.time("layer_norm forward", format!("gpt {rows}x{d}"), work, |cx| {
                let (x, y, weight) = (Floats::F32(&x), FloatsMut::F32(&mut y), Some(&gamma[..]));
                norm.forward(cx, x, weight, weight, y, &mut mean, &mut rstd, &mut []);
            });
        }
        if self.wants("layer_norm backward") {
            let (mut dg, mut db) = (vec![0.0; d], vec![0.0; d]);
            let mut scratch = vec![0.0; norm.backward_scratch_len(false, self.threads)];
            let work = Bound::Bytes((12 * rows * d) as f64);
            self.time("layer_norm backward", format!("gpt {rows}x{d}"), work, |cx| {
                let (dg, db) = (Some(&mut dg[..]), Some(&mut db[..]));
                let (x, dx) = (Floats::F32(&x), FloatsMut::F32(&mut y));
                norm.backward(cx, x, x, Some(&gamma), &mean, &rstd, dx, dg, db, &mut scratch);
            });
        }
        let (rows, channels) = (65536, 64);
        let norm = BatchNorm { rows, channels, eps: 1e-5, relu: true };
        let (x, gamma) = (noise(rows * channels), noise(channels));
        let (mut y, mut mean, mut rstd) =
            (vec![0.0; rows * channels], vec![0.0; channels], vec![1.0; channels]);
        let mut scratch = vec![0.0; norm.scratch_len(false, self.threads)];
        let shape = format!("cnn {rows}x{channels}, relu");
        if self.wants("batch_norm forward") {
            let work = Bound::Bytes((12 * rows * channels) as f64);
            self.time("batch_norm forward", shape.clone(), work, |cx| {
                let (x, y, s) = (Floats::F32(&x), FloatsMut::F32(&mut y), &mut scratch);
                norm.forward(cx, x, &gamma, &gamma, y, &mut mean, &mut rstd, None, None, s);
            });
        }
        if self.wants("batch_norm backward") {
            let (mut dg, mut db) = (vec![0.0; channels], vec![0.0; channels]);
            let work = Bound::Bytes((20 * rows * channels) as f64);
            self.time("batch_norm backward", shape, work, |cx| {
                let (x, dx, s) = (Floats::F32(&x), FloatsMut::F32(&mut y), &mut scratch);
                norm.backward(cx, x, x, &gamma, &gamma, &mean, &rstd, dx, &mut dg, &mut db, s);
            });
        }
    }

    fn element_wise(&mut self) {
        let shape = [2048, 1536];
        let n = shape[0] * shape[1];
        let (x, dy, mut y) = (noise(n), noise(n), vec![0.0; n]);
        let cases = [
            ("elementwise gelu_tanh", Expr::unary(Unary::GeluTanh)),
            ("elementwise gelu_tanh_grad", Expr::binary(Binary::GeluTanhGrad)),
            ("elementwise tanh", Expr::unary(Unary::Tanh)),
            ("elementwise exp", Expr::unary(Unary::Exp)),
            ("elementwise add", Expr::binary(Binary::Add)),
        ];
        for (name, expr) in cases {
            if !self.wants(name) {
                continue;
            }
            let inputs = [Source::Slice(Floats::F32(&dy)), Source::Slice(Floats::F32(&x))];
            let inputs = &inputs[..expr.n_inputs()];
            let shapes = vec![&shape[..]; inputs.len()];
            let Ok(fused) = Fused::new(&expr, &shape, &shapes) else { continue };
            let work = Bound::Bytes((size_of::<f32>() * n * (inputs.len() + 1)) as f64);
            self.time(name, format!("gpt {}x{}", shape[0], shape[1]), work, |cx| {
                fused.run(cx, inputs, &mut [FloatsMut::F32(&mut y)]);
            });
        }
    }

    fn optimizers(&mut self) {
        let hyper = StepHyper { lr: 1e-3, step: 2, grad_scale: 1.0, decay_scale: 1.0 };
        let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
        for (name, optimizer, n, words) in [
            ("optimizer sgd", sgd, 669_706, 5),
            ("optimizer adamw", Optimizer::AdamW(Moments::DEFAULT), 10_900_000, 7),
        ] {
            if !self.wants(name) {
                continue;
            }
            let (mut p, g) = (noise(n), noise(n));
            let (mut s1, mut s2) = (vec![0.0; n], vec![0.0; if words == 7 { n } else { 0 }]);
            self.time(
                name,
                format!("{n} parameters"),
                Bound::Bytes((size_of::<f32>() * words * n) as f64),
                |cx| {
                    optimizer.step(cx, hyper, &mut p, &g, &mut s1, &mut s2, &[]);
                },
            );
        }
    }
}

fn noise(n: usize) -> Vec<f32> {
    let mut data = vec![0.0; n];
    random::uniform(&Cx::serial(), 7, 0, 0, -1.0, 1.0, &mut data);
    data
}

/// The header of the table for people.
pub const HEADER: &str = "kernel                       us    GFLOP/s  of peak    GB/s  shape";

impl std::fmt::Display for KernelReport {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let number = |x: Option<f64>, digits: usize| x.map_or("-".into(), |x| format!("{x:.digits$}"));
        let share = self.peak_share.map_or("-".into(), |s| format!("{:.0}%", s * 100.0));
        write!(
            f,
            "{:<26} {:>9.1} {:>9} {:>8} {:>7}  {}",
            self.kernel,
            self.us,
            number(self.gflops, 1),
            share,
            number(self.gbs, 1),
            self.shape
        )
    }
}
