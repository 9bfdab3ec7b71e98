//! Every reference model against PyTorch: from the same weights and batch, the same logits, gradients, losses over 20
//! optimizer steps, running statistics, and logits in evaluation.

use polyreme_exec::{Engine, Options};
use polyreme_graph::op::{Cell, Conv};
use polyreme_graph::{DType, Program, differentiate};
use polyreme_kernels::optim::{Moments, Optimizer};
use polyreme_nn::model::{Stack, StackInput, StackLayer, Tabular};
use polyreme_nn::{Model, TraceOptions};
use serde::Deserialize;

use crate::fill::{fill, k, v};

#[derive(Deserialize)]
pub(crate) struct Reference {
    input: Vec<usize>,
    input_name: String,
    vocab: u64,
    /// How many ids each category at the end of a row has.
    #[serde(default)]
    ids: Vec<u64>,
    classes: u64,
    pub(crate) optimizer: OptimizerSpec,
    grad_floor: f64,
    logits: Samples,
    losses: Vec<f64>,
    eval_logits: Samples,
    params: Vec<Param>,
    buffers: Vec<ReferenceBuffer>,
}

#[derive(Deserialize)]
pub(crate) struct OptimizerSpec {
    kind: String,
    lr: f32,
    #[serde(default)]
    momentum: f32,
    #[serde(default)]
    beta1: f64,
    #[serde(default)]
    beta2: f64,
    #[serde(default)]
    eps: f32,
    #[serde(default)]
    weight_decay: f32,
}

#[derive(Deserialize)]
struct Samples {
    shape: Vec<usize>,
    peak: f64,
    norm: f64,
    dot: f64,
    at: Vec<usize>,
    values: Vec<f64>,
}

#[derive(Deserialize)]
struct Param {
    name: String,
    shape: Vec<usize>,
    fill: [f32; 2],
    first: f64,
    norm: f64,
    dot: f64,
    at: Vec<usize>,
    grad: Vec<f64>,
}

#[derive(Deserialize)]
struct ReferenceBuffer {
    name: String,
    norm: f64,
    dot: f64,
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn dot(x: &[f32], name: &str) -> f64 {
    let name = format!("dot:{name}");
    x.iter().enumerate().map(|(i, &x)| f64::from(x) * f64::from(v(&name, i))).sum()
}

/// Collects what is off, so that a failure shows all of it.
struct Check {
    model: &'static str,
    wrong: Vec<String>,
}

impl Check {
    fn near(&mut self, what: &str, got: f64, want: f64, tolerance: f64) {
        if (got - want).abs() > tolerance || got.is_nan() {
            self.wrong.push(format!("{what}: got {got:e}, want {want:e}, may differ by {tolerance:e}"));
        }
    }
    fn samples(&mut self, what: &str, got: &[f32], want: &Samples, tolerance: f64) {
        assert_eq!(got.len(), want.shape.iter().product::<usize>(), "{}: shape of {what}", self.model);
        let tolerance = tolerance * want.peak;
        for (&at, &value) in want.at.iter().zip(&want.values) {
            self.near(&format!("{what}[{at}]"), f64::from(got[at]), value, tolerance);
        }
        let all = tolerance * (got.len() as f64).sqrt();
        self.near(&format!("norm of {what}"), norm(got), want.norm, all);
        self.near(&format!("dot of {what}"), dot(got, what), want.dot, all);
    }
}

fn check(name: &'static str) {
    let want: Reference = crate::read(name);
    let mut check = Check { model: name, wrong: Vec::new() };

    let model = model(name, &want);
    let training = want.training();
    let forward = model.trace(&training).unwrap();
    let step = differentiate(&forward, forward.output("loss").unwrap()).unwrap();
    let (optimizer, lr) = optimizer(&want.optimizer);
    let mut engine = Engine::new(Program::train(&step, optimizer, None), Options::threads(2)).unwrap();
    feed(&mut engine, &want);
    start(&mut engine, &want);
    assert_eq!(forward.params.len(), want.params.len(), "{name}: number of parameters");
    for param in &want.params {
        let first = engine.param(&param.name).unwrap()[0];
        check.near(&format!("{} filled", param.name), f64::from(first), param.first, 1e-6);
    }

    let mut losses = Vec::new();
    for n in 0..want.losses.len() {
        engine.step(lr).unwrap();
        losses.push(f64::from(engine.output("loss").unwrap()[0]));
        if n == 0 {
            check.samples("logits", engine.output("logits").unwrap(), &want.logits, 1e-4);
            gradients(&mut check, &engine, &want);
            for buffer in want.buffers.iter().filter(|b| !b.name.ends_with("num_batches_tracked")) {
                let got = engine.state(&buffer.name).unwrap();
                let tolerance = 1e-4 * buffer.norm.max(1e-3);
                check.near(&format!("norm of {}", buffer.name), norm(got), buffer.norm, tolerance);
                check.near(&format!("dot of {}", buffer.name), dot(got, &buffer.name), buffer.dot, tolerance);
            }
        }
    }
    for (n, (got, want)) in losses.iter().zip(&want.losses).enumerate() {
        check.near(&format!("loss of step {n}"), *got, *want, 1e-3 * want);
    }

    let evaluation = model.trace(&TraceOptions { training: false, ..training }).unwrap();
    let mut after = Engine::new(Program::forward(&evaluation), Options::threads(2)).unwrap();
    feed(&mut after, &want);
    for param in &evaluation.params {
        after.param_mut(&param.name).unwrap().copy_from_slice(engine.param(&param.name).unwrap());
    }
    for state in &evaluation.states {
        after.state_mut(&state.name).unwrap().copy_from_slice(engine.state(&state.name).unwrap());
    }
    after.run().unwrap();
    check.samples("eval_logits", after.output("logits").unwrap(), &want.eval_logits, 1e-3);

    let n = check.wrong.len();
    assert!(n == 0, "{name}: {n} wrong\n{}", check.wrong[..n.min(20)].join("\n"));
}

fn gradients(check: &mut Check, engine: &Engine, want: &Reference) {
    for param in &want.params {
        let got = engine.grad(&param.name).unwrap().expect("every parameter has a gradient");
        // Gradients that cancel to almost nothing are compared relative to the size of the others.
        let size = param.norm.max(want.grad_floor);
        let rms = size / (got.len() as f64).sqrt();
        let what = format!("gradient of {}", param.name);
        check.near(&format!("norm of {what}"), norm(got), param.norm, 1e-3 * size);
        check.near(&format!("dot of {what}"), dot(got, &param.name), param.dot, 1e-3 * size);
        for (&at, &value) in param.at.iter().zip(&param.grad) {
            check.near(&format!("{what}[{at}]"), f64::from(got[at]), value, 1e-3 * value.abs().max(rms));
        }
    }
}

impl Reference {
    /// How its training step is traced.
    pub(crate) fn training(&self) -> TraceOptions {
        let image = self.vocab == 0 && self.input.len() == 4;
        TraceOptions {
            time: (self.vocab > 0).then(|| self.input[1]),
            image: image.then(|| (self.input[2], self.input[3])),
            ..TraceOptions::training(self.input[0])
        }
    }
}

/// The weights that training starts from.
pub(crate) fn start(engine: &mut Engine, want: &Reference) {
    for param in &want.params {
        let data = engine.param_mut(&param.name).unwrap();
        assert_eq!(data.len(), param.shape.iter().product::<usize>(), "{}", param.name);
        fill(data, &param.name, param.fill);
    }
}

pub(crate) fn feed(engine: &mut Engine, want: &Reference) {
    let input = engine.program().graph().inputs[0].clone();
    if engine.program().graph().value(input.value).dtype == DType::I32 {
        for (i, id) in engine.input_i32("ids").unwrap().iter_mut().enumerate() {
            *id = (k("ids", i) % want.vocab) as i32;
        }
    } else {
        let x = engine.input_f32("x").unwrap();
        fill(x, &want.input_name, [0.0, 1.5]);
        for (c, &ids) in want.ids.iter().enumerate() {
            let name = format!("ids{}", c + 1);
            for (i, row) in x.chunks_mut(want.input[1]).enumerate() {
                row[want.input[1] - want.ids.len() + c] = (k(&name, i) % ids) as f32;
            }
        }
    }
    for (i, label) in engine.input_i32("labels").unwrap().iter_mut().enumerate() {
        *label = (k("labels", i) % want.classes) as i32;
    }
}

pub(crate) fn optimizer(spec: &OptimizerSpec) -> (Optimizer, f32) {
    let OptimizerSpec { beta1, beta2, eps, weight_decay, momentum, .. } = *spec;
    let moments = Moments { beta1, beta2, eps, weight_decay };
    let optimizer = match spec.kind.as_str() {
        "sgd" => Optimizer::Sgd { momentum, nesterov: false, weight_decay },
        "adam" => Optimizer::Adam(moments),
        "adamw" => Optimizer::AdamW(moments),
        other => panic!("unknown optimizer {other}"),
    };
    (optimizer, spec.lr)
}

/// The model with the sizes of the reference.
pub(crate) fn model(name: &str, want: &Reference) -> Model {
    let mut model = match name {
        "layers_image" => image_stack(),
        "layers_ids" => ids_stack(),
        "tabular_mixed" => mixed_rows(want),
        _ => Model::by_name(name).unwrap(),
    };
    match &mut model {
        Model::AlexNet(m) => {
            m.classes = want.classes as usize;
            m.dropout = 0.0;
        }
        Model::ResNet(m) => m.classes = want.classes as usize,
        Model::Tabular(m) => m.dropout = 0.0,
        _ => {}
    }
    model
}

fn mixed_rows(want: &Reference) -> Model {
    Model::Tabular(Tabular {
        inputs: want.input[1],
        categories: want.ids.iter().map(|&n| n as usize).collect(),
        texts: Vec::new(),
        embed: 4,
        width: 32,
        hidden: 48,
        layers: 3,
        classes: want.classes as usize,
        dropout: 0.0,
    })
}

fn activation(name: &str) -> StackLayer {
    StackLayer::Activation { name: name.into() }
}

fn linear(outputs: usize) -> StackLayer {
    StackLayer::Linear { outputs: Some(outputs), bias: true }
}

fn image_stack() -> Model {
    let padded = Conv { padding: (1, 1), ..Conv::default() };
    let conv = |kernel, conv, bias| StackLayer::Conv { outputs: 8, kernel, conv, bias };
    let (kernel, stride, padding) = ((2, 2), (2, 2), (0, 0));
    let tall = Conv { padding: (2, 0), dilation: (2, 1), ..Conv::default() };
    let up = Conv { stride, ..Conv::default() };
    Model::Layers(Stack {
        input: StackInput::Image { channels: 3, height: 16, width: 16 },
        layers: vec![
            conv((3, 3), padded, false),
            StackLayer::BatchNorm,
            activation("relu"),
            StackLayer::MaxPool { kernel, stride, padding },
            StackLayer::Residual {
                layers: vec![
                    conv((3, 3), Conv { groups: 2, ..padded }, true),
                    StackLayer::GroupNorm { groups: 4 },
                    activation("silu"),
                    conv((3, 1), tall, true),
                ],
            },
            activation("tanh"),
            StackLayer::ConvTranspose { outputs: 6, kernel, conv: up, output_padding: (0, 0), bias: true },
            StackLayer::AvgPool { kernel, stride, padding },
            StackLayer::Flatten,
            linear(24),
            StackLayer::LayerNorm,
            activation("gelu"),
            linear(10),
        ],
    })
}

fn ids_stack() -> Model {
    let encoder = StackLayer::EncoderLayer {
        heads: 4,
        hidden: Some(32),
        activation: "relu".into(),
        dropout: 0.0,
        norm_first: true,
        causal: true,
    };
    Model::Layers(Stack {
        input: StackInput::Ids { vocab: 32, context: 12 },
        layers: vec![
            StackLayer::Embedding { width: 16 },
            StackLayer::Positions,
            encoder,
            StackLayer::Recurrent { cell: Cell::Lstm, hidden: 12, bidirectional: true },
            StackLayer::RmsNorm,
            StackLayer::Residual { layers: vec![StackLayer::Attention { heads: 3, causal: false }] },
            linear(32),
        ],
    })
}

macro_rules! references {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*
    };
}

references! {
    mlp tabular tabular_mixed lenet cnn gpt alexnet lstm gru bilstm encoder layers_image layers_ids
    resnet18 resnet34 resnet50 resnet101
    resnet18_cifar resnet34_cifar resnet50_cifar resnet101_cifar
}
