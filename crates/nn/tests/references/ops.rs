//! Operations one by one: outputs, and the gradients of `sum(y * w)`, of every case of `ops.json`, with the best
//! instruction set and with the scalar twins.
//!
//! A case is traced through the layer that it is about, or through the builder where there is no such layer, and run
//! by the engine; optimizers and clipping are called as kernels. What PyTorch has in one call and the engine does not
//! is composed as a user would compose it. An op, attribute or input that nothing here reads fails.

use std::collections::BTreeMap;

use polyreme_exec::{Engine, Options};
use polyreme_graph::op::{Cell, Conv, CrossEntropy};
use polyreme_graph::{Builder, DType, Graph, Init, Program, Tensor, Traced, differentiate};
use polyreme_kernels::elementwise::{Binary, Unary};
use polyreme_kernels::optim::{
    Adafactor, Moments, Optimizer, ParamTensor, StepHyper, clip_scale, global_norm, scale,
};
use polyreme_kernels::{Cx, Isa};
use polyreme_nn::layer::{
    AdaptiveAvgPool2d, AvgPool2d, BatchNorm2d, Conv2d, ConvInit, ConvTranspose2d, Embedding, GroupNorm,
    LayerNorm, Linear, MaxPool2d, MultiheadAttention, Recurrent, channels_last,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::fill::{fill, k};

/// Relative to the tensor's largest element. The engine was off by 9.7e-7 at most (`gelu_tanh`), PyTorch's own float32 by 8e-7.
const TOLERANCE: f64 = 3e-6;

/// The scope of the layer that a case is about; its parameters have PyTorch's names after it.
const LAYER: &str = "layer";

#[derive(Deserialize)]
struct File {
    cases: Vec<OpCase>,
}

#[derive(Deserialize)]
struct OpCase {
    case: String,
    op: String,
    attrs: BTreeMap<String, Value>,
    inputs: Vec<Input>,
    outputs: BTreeMap<String, Want>,
    grads: BTreeMap<String, Want>,
}

#[derive(Deserialize)]
struct Input {
    name: String,
    shape: Vec<usize>,
    fill: Option<[f32; 2]>,
    modulus: Option<u64>,
}

#[derive(Deserialize)]
struct Want {
    shape: Vec<usize>,
    values: Vec<f64>,
}

/// The engine's results, by name.
type Got = BTreeMap<String, Vec<f32>>;

#[test]
fn every_case_is_as_in_pytorch() {
    let file: File = crate::read("ops");
    assert!(!file.cases.is_empty());
    let mut wrong = Vec::new();
    for case in &file.cases {
        for isa in [Isa::SCALAR, Isa::detect()] {
            check(case, isa, &mut wrong);
        }
    }
    let n = wrong.len();
    assert!(n == 0, "{n} wrong\n{}", wrong[..n.min(40)].join("\n"));
}

fn check(case: &OpCase, isa: Isa, wrong: &mut Vec<String>) {
    let mut attrs = Attrs { case: &case.case, left: case.attrs.clone() };
    let (outputs, grads) = match case.op.as_str() {
        "sgd" | "adam" | "adamw" | "lion" | "adafactor" => (optimizer(case, &mut attrs, isa), Got::new()),
        "clip_grad_norm" => (clip(case, &mut attrs, isa), Got::new()),
        _ => {
            let graph = trace(case, &mut attrs).unwrap_or_else(|e| panic!("{}: {e}", case.case));
            run(case, graph, isa)
        }
    };
    attrs.all_read();
    for (kind, got, want) in [("output", &outputs, &case.outputs), ("gradient", &grads, &case.grads)] {
        let what = format!("{} ({}): {kind}", case.case, isa.name());
        assert!(got.keys().eq(want.keys()), "{what}s {:?}, not {:?}", got.keys(), want.keys());
        for (name, want) in want {
            compare(&format!("{what} {name}"), &got[name], want, wrong);
        }
    }
}

fn compare(what: &str, got: &[f32], want: &Want, wrong: &mut Vec<String>) {
    assert_eq!(
        want.values.len(),
        want.shape.iter().product::<usize>(),
        "{what}: the reference file is broken"
    );
    assert_eq!(got.len(), want.values.len(), "{what}: elements");
    let peak = want.values.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(&want.values).enumerate() {
        let off = (f64::from(got) - want).abs();
        if off > TOLERANCE * peak || off.is_nan() {
            wrong.push(format!(
                "{what}[{i}]: got {got:e}, want {want:e}, off by {:.1e} of the peak",
                off / peak
            ));
        }
    }
}

/// A case's attributes; each is removed by the code that reads it.
struct Attrs<'a> {
    case: &'a str,
    left: BTreeMap<String, Value>,
}

impl Attrs<'_> {
    fn find<T: DeserializeOwned>(&mut self, name: &str) -> Option<T> {
        let value = self.left.remove(name)?;
        Some(serde_json::from_value(value).unwrap_or_else(|e| panic!("{}: {name}: {e}", self.case)))
    }
    fn get<T: DeserializeOwned>(&mut self, name: &str) -> T {
        self.find(name).unwrap_or_else(|| panic!("{}: needs the attribute {name}", self.case))
    }
    /// False if absent.
    fn flag(&mut self, name: &str) -> bool {
        self.find(name).unwrap_or(false)
    }
    /// Rows and columns: two numbers, or one for both.
    fn pair(&mut self, name: &str, default: (usize, usize)) -> (usize, usize) {
        match self.left.get(name) {
            None => default,
            Some(Value::Number(_)) => {
                let both = self.get(name);
                (both, both)
            }
            Some(_) => self.get(name),
        }
    }
    /// A dim; negative ones count from the end.
    fn axis(&mut self, rank: usize) -> usize {
        let dim: isize = self.get("dim");
        if dim < 0 { rank - dim.unsigned_abs() } else { dim.unsigned_abs() }
    }
    fn conv(&mut self) -> Conv {
        Conv {
            stride: self.pair("stride", (1, 1)),
            padding: self.pair("padding", (0, 0)),
            dilation: self.pair("dilation", (1, 1)),
            groups: self.find("groups").unwrap_or(1),
        }
    }
    fn all_read(&self) {
        assert!(self.left.is_empty(), "{}: attributes that nothing reads: {:?}", self.case, self.left);
    }
}

impl OpCase {
    fn input(&self, name: &str) -> Option<&Input> {
        self.inputs.iter().find(|i| i.name == name)
    }
    fn shape(&self, name: &str) -> &[usize] {
        &self.input(name).unwrap_or_else(|| panic!("{}: needs the input {name}", self.case)).shape
    }
    /// The channels of the layer's weight.
    fn channels(&self) -> usize {
        self.shape("weight")[0]
    }
    /// A parameter if the case has its gradient, else an input.
    fn leaf(&self, b: &mut Builder, name: &str) -> Traced {
        let shape = self.shape(name);
        if self.grads.contains_key(name) {
            return b.param(name, shape, Init::Const(0.0));
        }
        let integer = self.input(name).is_some_and(|i| i.modulus.is_some());
        b.input(name, shape, if integer { DType::I32 } else { DType::F32 })
    }
    /// The real input `name`.
    fn real(&self, name: &str) -> Vec<f32> {
        let mut values = vec![0.0; self.shape(name).iter().product()];
        let Some(rule) = self.input(name).and_then(|i| i.fill) else {
            panic!("{}: {name} is not real", self.case)
        };
        fill(&mut values, &format!("{}.{name}", self.case), rule);
        values
    }
    /// The whole-number input `name`.
    fn whole(&self, name: &str) -> Vec<i32> {
        let Some(modulus) = self.input(name).and_then(|i| i.modulus) else {
            panic!("{}: {name} is not whole", self.case)
        };
        let n = self.shape(name).iter().product();
        (0..n).map(|i| (k(&format!("{}.{name}", self.case), i) % modulus) as i32).collect()
    }
}

/// Forward to `y`, and the loss `sum(y * w)`.
fn trace(case: &OpCase, attrs: &mut Attrs) -> Traced<Graph> {
    let mut b = Builder::new();
    let y = y(case, attrs, &mut b)?;
    let dims = b.dims(y);
    assert_eq!(dims, case.outputs["y"].shape, "{}: shape of y", case.case);
    let w = b.input("w", dims.as_slice(), DType::F32)?;
    let yw = b.mul(y, w)?;
    let loss = b.sum(yw, &(0..dims.len()).collect::<Vec<_>>())?;
    Ok(b.finish(&[("y", y), ("loss", loss)]))
}

fn y(case: &OpCase, attrs: &mut Attrs, b: &mut Builder) -> Traced {
    match case.op.as_str() {
        "linear" => {
            let x = case.leaf(b, "x")?;
            Linear::new(case.shape("weight")[1], case.channels()).trace(b, LAYER, x)
        }
        "conv2d"
        | "conv_transpose2d"
        | "batch_norm"
        | "group_norm"
        | "adaptive_avg_pool2d"
        | "avg_pool2d"
        | "max_pool2d" => {
            let x = case.leaf(b, "x")?;
            let x = channels_last(b, x)?;
            let y = image(case, attrs, b, x)?;
            b.permute(y, &[0, 3, 1, 2])
        }
        "layer_norm" => {
            let x = case.leaf(b, "x")?;
            LayerNorm::new(case.channels()).trace(b, LAYER, x)
        }
        "relu" | "leaky_relu" | "gelu" | "softplus" | "elu" | "silu" | "sigmoid" | "tanh" => {
            let x = case.leaf(b, "x")?;
            activation(case, attrs, b, x)
        }
        "softmax" | "log_softmax" => {
            let x = case.leaf(b, "x")?;
            let axis = attrs.axis(b.shape(x).rank());
            if case.op == "softmax" { b.softmax(x, axis) } else { b.log_softmax(x, axis) }
        }
        "cross_entropy" => cross_entropy(case, attrs, b),
        "bce_with_logits" | "mse_loss" | "l1_loss" | "smooth_l1_loss" | "huber_loss" => {
            let (x, target) = (case.leaf(b, "x")?, case.leaf(b, "target")?);
            pair_loss(case, attrs, b, x, target)
        }
        "attention" => attention(case, attrs, b),
        "multi_head_attention" => {
            let x = case.leaf(b, "x")?;
            MultiheadAttention { width: 8, heads: 2, causal: false }.trace(b, LAYER, x, None)
        }
        "embedding" => {
            let ids = case.leaf(b, "ids")?;
            let &[rows, width] = case.shape("weight") else { panic!("{}: a table has two dims", case.case) };
            Embedding { rows, width }.trace(b, LAYER, ids)
        }
        "gather" => {
            let (x, index) = (case.leaf(b, "x")?, case.leaf(b, "index")?);
            let axis = attrs.axis(b.shape(x).rank());
            b.gather(x, axis, index)
        }
        "lstm" | "gru" => {
            let x = case.leaf(b, "x")?;
            let cell = if case.op == "lstm" { Cell::Lstm } else { Cell::Gru };
            let (layers, bidirectional) = (attrs.get("layers"), attrs.get("both"));
            Recurrent { layers, bidirectional, ..Recurrent::new(cell, 3, 4) }.trace(b, LAYER, x, None, true)
        }
        other => panic!("{}: unknown op {other}", case.case),
    }
}

/// The ops of images, `[n, h, w, c]`.
fn image(case: &OpCase, attrs: &mut Attrs, b: &mut Builder, x: Tensor) -> Traced {
    match case.op.as_str() {
        "conv2d" => {
            let conv = attrs.conv();
            let &[outputs, inputs, kh, kw] = case.shape("weight") else { panic!("{}: weight", case.case) };
            let (inputs, bias) = (inputs * conv.groups, case.input("bias").is_some());
            Conv2d { inputs, outputs, kernel: (kh, kw), conv, bias, init: ConvInit::FanIn }.trace(b, LAYER, x)
        }
        "conv_transpose2d" => {
            let (conv, output_padding) = (attrs.conv(), attrs.pair("output_padding", (0, 0)));
            let &[inputs, outputs, kh, kw] = case.shape("weight") else { panic!("{}: weight", case.case) };
            let (outputs, bias) = (outputs * conv.groups, case.input("bias").is_some());
            let kernel = (kh, kw);
            ConvTranspose2d { inputs, outputs, kernel, conv, output_padding, bias }.trace(b, LAYER, x)
        }
        "batch_norm" => BatchNorm2d::new(case.channels()).trace(b, LAYER, x, attrs.get("training")),
        "group_norm" => GroupNorm::new(3, case.channels()).trace(b, LAYER, x),
        "adaptive_avg_pool2d" => AdaptiveAvgPool2d { out: attrs.get("output_size") }.trace(b, LAYER, x),
        "avg_pool2d" => {
            let kernel = attrs.pair("kernel_size", (0, 0));
            let (stride, padding) = (attrs.pair("stride", kernel), attrs.pair("padding", (0, 0)));
            let count_include_pad = attrs.find("count_include_pad").unwrap_or(true);
            let pool = AvgPool2d { kernel, stride, padding, count_include_pad };
            if attrs.flag("ceil_mode") { avg_pool_ceil(b, x, pool) } else { pool.trace(b, LAYER, x) }
        }
        "max_pool2d" => {
            let kernel = attrs.pair("kernel_size", (0, 0));
            let (stride, padding) = (attrs.pair("stride", kernel), attrs.pair("padding", (0, 0)));
            match attrs.pair("dilation", (1, 1)) {
                (1, 1) => MaxPool2d { kernel, stride, padding }.trace(b, LAYER, x),
                dilation => {
                    assert_eq!((stride, padding), ((1, 1), (0, 0)), "{}: not composed", case.case);
                    max_pool_dilated(b, x, kernel, dilation)
                }
            }
        }
        other => unreachable!("{other} is not an op of images"),
    }
}

/// Windows that hang over the end divide by what they see: pads up to whole windows, and divides by the same mean of
/// ones.
fn avg_pool_ceil(b: &mut Builder, x: Tensor, pool: AvgPool2d) -> Traced {
    assert_eq!(pool.padding, (0, 0), "not composed");
    let dims = b.dims(x);
    let one = b.constant(1.0);
    let ones = b.expand(one, [1, dims[1], dims[2], 1])?;
    let mut means = Vec::new();
    for x in [x, ones] {
        let over = |len: usize, k: usize, stride: usize| (len - k).next_multiple_of(stride) - (len - k);
        let x = b.pad(x, 1, 0, over(dims[1], pool.kernel.0, pool.stride.0), 0.0)?;
        let x = b.pad(x, 2, 0, over(dims[2], pool.kernel.1, pool.stride.1), 0.0)?;
        means.push(pool.trace(b, LAYER, x)?);
    }
    b.div(means[0], means[1])
}

/// The maximum over the positions in the window, each a shifted image.
fn max_pool_dilated(b: &mut Builder, x: Tensor, kernel: (usize, usize), dilation: (usize, usize)) -> Traced {
    let dims = b.dims(x);
    let (h, w) = (dims[1] - (kernel.0 - 1) * dilation.0, dims[2] - (kernel.1 - 1) * dilation.1);
    let mut y = None;
    for i in 0..kernel.0 {
        let rows = b.slice(x, 1, i * dilation.0, h)?;
        for j in 0..kernel.1 {
            let place = b.slice(rows, 2, j * dilation.1, w)?;
            y = Some(match y {
                None => place,
                Some(y) => b.binary(Binary::Max, y, place)?,
            });
        }
    }
    Ok(y.expect("a window has a place"))
}

fn activation(case: &OpCase, attrs: &mut Attrs, b: &mut Builder, x: Tensor) -> Traced {
    let op = match case.op.as_str() {
        "leaky_relu" => Unary::LeakyRelu(attrs.get("negative_slope")),
        "elu" => Unary::Elu(attrs.get("alpha")),
        "gelu" => match attrs.get::<String>("approximate").as_str() {
            "none" => Unary::Gelu,
            "tanh" => Unary::GeluTanh,
            other => panic!("{}: unknown GELU {other}", case.case),
        },
        "softplus" => {
            let (beta, threshold): (f32, f32) = (attrs.get("beta"), attrs.get("threshold"));
            // Beyond 20 the two branches are the same f32, and the engine has no second one.
            if (beta, threshold) != (1.0, 20.0) {
                return softplus(b, x, beta, threshold);
            }
            Unary::Softplus
        }
        name => return b.activation(name, x),
    };
    b.unary(op, x)
}

/// `softplus(beta·x) / beta`, or `x` where `beta·x` is above the threshold.
fn softplus(b: &mut Builder, x: Tensor, beta: f32, threshold: f32) -> Traced {
    let bx = b.scale(x, beta)?;
    let soft = b.unary(Unary::Softplus, bx)?;
    let soft = b.scale(soft, 1.0 / beta)?;
    let threshold = b.constant(threshold);
    let above = b.binary(Binary::Greater, bx, threshold)?;
    b.select(above, x, soft)
}

fn cross_entropy(case: &OpCase, attrs: &mut Attrs, b: &mut Builder) -> Traced {
    let (x, target) = (case.leaf(b, "x")?, case.leaf(b, "target")?);
    let weights = attrs.flag("weights");
    let class_weight = weights.then(|| case.leaf(b, "class_weight")).transpose()?;
    let ignore_index = attrs.find("ignore_index");
    let label_smoothing = attrs.find("label_smoothing").unwrap_or(0.0);
    let mean = b.cross_entropy(x, target, class_weight, CrossEntropy { label_smoothing, ignore_index })?;
    match attrs.find::<String>("reduction").as_deref() {
        None => Ok(mean),
        Some("sum") => {
            assert!(!weights, "{}: the mean divides by weights, not by samples", case.case);
            let counted = case.whole("target").into_iter().filter(|&t| Some(t) != ignore_index).count();
            b.scale(mean, counted as f32)
        }
        Some(other) => panic!("{}: unknown reduction {other}", case.case),
    }
}

/// Means over pairs of a prediction and a target.
fn pair_loss(case: &OpCase, attrs: &mut Attrs, b: &mut Builder, x: Tensor, target: Tensor) -> Traced {
    let each = match case.op.as_str() {
        "mse_loss" => return b.mse(x, target),
        "bce_with_logits" if attrs.flag("weights") => {
            // (1-t)·x + (1 + (p-1)·t)·softplus(-x)
            let p = case.leaf(b, "pos_weight")?;
            let minus_t = b.unary(Unary::Neg, target)?;
            let rest = b.unary(Unary::Offset(1.0), minus_t)?;
            let linear = b.mul(rest, x)?;
            let p = b.unary(Unary::Offset(-1.0), p)?;
            let pt = b.mul(p, target)?;
            let factor = b.unary(Unary::Offset(1.0), pt)?;
            let minus_x = b.unary(Unary::Neg, x)?;
            let soft = b.unary(Unary::Softplus, minus_x)?;
            let soft = b.mul(factor, soft)?;
            b.add(linear, soft)?
        }
        "bce_with_logits" => return b.bce_with_logits(x, target),
        "l1_loss" => {
            let d = b.sub(x, target)?;
            b.unary(Unary::Abs, d)?
        }
        "smooth_l1_loss" => {
            let beta: f32 = attrs.get("beta");
            let huber = huber(b, x, target, beta)?;
            b.scale(huber, 1.0 / beta)?
        }
        "huber_loss" => {
            let delta = attrs.get("delta");
            huber(b, x, target, delta)?
        }
        other => unreachable!("{other} is not an op of pairs"),
    };
    let axes: Vec<_> = (0..b.shape(each).rank()).collect();
    b.mean(each, &axes)
}

/// `d²/2` up to `delta`, then straight on: `c²/2 + delta·(|d| - c)` with `c = min(|d|, delta)`.
fn huber(b: &mut Builder, x: Tensor, target: Tensor, delta: f32) -> Traced {
    let d = b.sub(x, target)?;
    let d = b.unary(Unary::Abs, d)?;
    let c = b.unary(Unary::Clamp(0.0, delta), d)?;
    let c2 = b.unary(Unary::Square, c)?;
    let bent = b.scale(c2, 0.5)?;
    let over = b.sub(d, c)?;
    let straight = b.scale(over, delta)?;
    b.add(bent, straight)
}

/// PyTorch has `[b, heads, t, d]`, the engine `[b, t, heads, d]`.
fn attention(case: &OpCase, attrs: &mut Attrs, b: &mut Builder) -> Traced {
    let mut qkv = Vec::new();
    for name in ["q", "k", "v"] {
        let x = case.leaf(b, name)?;
        qkv.push(b.transpose(x, 1, 2)?);
    }
    if let Some(keys) = attrs.find::<usize>("keys") {
        assert_eq!(case.shape("k")[2], keys, "{}: keys", case.case);
    }
    let mask = attrs.flag("mask").then(|| {
        let seen = case.leaf(b, "mask")?;
        let seen = b.cast(seen, DType::F32)?;
        let (zero, never) = (b.constant(0.0), b.constant(f32::NEG_INFINITY));
        b.select(seen, zero, never)
    });
    let mask = mask.transpose()?;
    let o = b.attention([qkv[0], qkv[1], qkv[2]], attrs.flag("causal"), mask)?;
    b.transpose(o, 1, 2)
}

/// Outputs and gradients, by the names of the case. Running statistics are outputs in PyTorch and states here.
fn run(case: &OpCase, forward: Graph, isa: Isa) -> (Got, Got) {
    let name = &case.case;
    let step = differentiate(&forward, forward.output("loss").expect("`trace` made it"));
    let step = step.unwrap_or_else(|e| panic!("{name}: {e}"));
    let still = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let mut engine =
        Engine::new(Program::train(&step, still, None), Options { isa, ..Options::threads(2) }).unwrap();
    for input in &case.inputs {
        feed(case, input, &forward, &mut engine);
    }
    let w = engine.input_f32("w").expect("`trace` made it");
    fill(w, &format!("{name}.w"), [0.0, 1.0]);

    // A step, not a run, as states are updated at its end; with a learning rate of 0 the parameters stay.
    engine.step(0.0).unwrap_or_else(|e| panic!("{name}: {e}"));
    let output = |n: &String| {
        let value = if n == "y" { engine.output(n) } else { engine.state(&format!("{LAYER}.{n}")) };
        (n.clone(), value.unwrap_or_else(|e| panic!("{name}: {e}")).to_vec())
    };
    let outputs = case.outputs.keys().map(output).collect();
    let mut grads = Got::new();
    for param in &forward.params {
        let grad = engine.grad(&param.name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let grad = grad.unwrap_or_else(|| panic!("{name}: no gradient of {}", param.name));
        grads.insert(unscoped(&param.name).into(), grad.to_vec());
    }
    (outputs, grads)
}

/// Writes an input where the trace has it: a parameter, a state, or an input.
fn feed(case: &OpCase, input: &Input, graph: &Graph, engine: &mut Engine) {
    let name = &input.name;
    let stored = |list: &[polyreme_graph::graph::Stored]| {
        list.iter().find(|s| unscoped(&s.name) == name).map(|s| s.name.clone())
    };
    let to = if let Some(param) = stored(&graph.params) {
        engine.param_mut(&param)
    } else if let Some(state) = stored(&graph.states) {
        engine.state_mut(&state)
    } else if input.modulus.is_some() {
        let to = engine.input_i32(name).unwrap_or_else(|e| panic!("{}: {e}", case.case));
        return to.copy_from_slice(&case.whole(name));
    } else {
        engine.input_f32(name)
    };
    to.unwrap_or_else(|e| panic!("{}: {e}", case.case)).copy_from_slice(&case.real(name));
}

fn unscoped(name: &str) -> &str {
    name.strip_prefix(LAYER).and_then(|n| n.strip_prefix('.')).unwrap_or(name)
}

/// The parameter after each of three steps, or of more where the case wants the last one only.
fn optimizer(case: &OpCase, attrs: &mut Attrs, isa: Isa) -> Got {
    let weight_decay = attrs.find("weight_decay").unwrap_or(0.0);
    let mut kept = 1.0;
    let optimizer = match case.op.as_str() {
        "sgd" => {
            // Dampening scales all that enters the momentum, after the first step.
            kept = 1.0 - attrs.find("dampening").unwrap_or(0.0);
            let momentum = attrs.find("momentum").unwrap_or(0.0);
            Optimizer::Sgd { momentum, nesterov: attrs.flag("nesterov"), weight_decay }
        }
        "lion" => {
            let (beta1, beta2) = attrs.get("betas");
            Optimizer::Lion { beta1, beta2, weight_decay }
        }
        "adafactor" => {
            let default = Adafactor::DEFAULT;
            let (eps1, eps2) = attrs.find("eps").unwrap_or((default.eps1, default.eps2));
            let (beta2_decay, d) = (attrs.find("beta2_decay"), attrs.find("d"));
            Optimizer::Adafactor(Adafactor {
                beta2_decay: beta2_decay.unwrap_or(default.beta2_decay),
                d: d.unwrap_or(default.d),
                eps1,
                eps2,
                weight_decay,
            })
        }
        op => {
            let (beta1, beta2) = attrs.get("betas");
            let moments = Moments { beta1, beta2, eps: attrs.get("eps"), weight_decay };
            if op == "adam" { Optimizer::Adam(moments) } else { Optimizer::AdamW(moments) }
        }
    };
    let (lr, cx) = (attrs.get("lr"), Cx { isa, ..Cx::serial() });
    let mut p = case.real("p");
    let dims = &case.inputs[0].shape;
    let lens = optimizer.state_dims(dims).map(|dims| dims.map_or(0, |dims| dims.iter().product::<usize>()));
    let [mut state1, mut state2] = lens.map(|len| vec![0.0; len]);
    let matrix = dims.last_chunk::<2>().copied();
    let tensor = ParamTensor { range: 0..p.len(), matrix, states: lens.map(|len| 0..len) };
    let long = attrs.find("steps");
    let last = long.unwrap_or(3);
    let mut got = Got::new();
    for step in 1..=last {
        let share = if step == 1 { 1.0 } else { kept };
        let hyper = StepHyper { lr, step, grad_scale: share, decay_scale: share };
        let g = case.real(&format!("g{}", step - 1));
        optimizer.step(&cx, hyper, &mut p, &g, &mut state1, &mut state2, std::slice::from_ref(&tensor));
        if long.is_none() || step == last {
            got.insert(format!("p{step}"), p.clone());
        }
    }
    got
}

/// The norm over both gradients, and both scaled.
fn clip(case: &OpCase, attrs: &mut Attrs, isa: Isa) -> Got {
    let cx = Cx { isa, ..Cx::serial() };
    let mut all = case.real("g0");
    let n = all.len();
    all.extend(case.real("g1"));
    let norm = global_norm(&cx, &all);
    scale(&cx, &mut all, clip_scale(norm, attrs.get("max_norm")));
    let g1 = all.split_off(n);
    [("norm", vec![norm as f32]), ("g0", all), ("g1", g1)].map(|(n, v)| (n.to_string(), v)).into()
}
