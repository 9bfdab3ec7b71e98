//! Three small models, with everything that real ones have: residuals, norms with running statistics, dropout, shared weights.

use polyreme_exec::Engine;
use polyreme_graph::builder::BatchNorm;
use polyreme_graph::op::{Cell, Conv, CrossEntropy, Window};
use polyreme_graph::{Builder, DType, Graph, Init, Tensor, Traced, differentiate};

use crate::random::TestRandom;

/// A model and what to feed it.
pub(crate) struct Net {
    pub(crate) name: &'static str,
    /// The differentiated graph.
    pub(crate) step: Graph,
}

impl Net {
    fn new(name: &'static str, f: impl FnOnce(&mut Builder) -> Traced) -> Net {
        let mut b = Builder::new();
        let loss = f(&mut b).unwrap();
        let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
        Net { name, step }
    }

    /// Fills every input with data that follow from the number of the step.
    pub(crate) fn feed(&self, engine: &mut Engine, step: u64) {
        let mut random = TestRandom::new(step);
        for input in &self.step.inputs {
            if self.step.value(input.value).dtype == DType::I32 {
                engine.input_i32(&input.name).unwrap().fill_with(|| random.below(CLASSES) as i32);
            } else {
                engine.input_f32(&input.name).unwrap().fill_with(|| random.uniform(-1.0, 1.0));
            }
        }
    }
}

/// All three models.
pub(crate) fn all() -> [Net; 3] {
    [
        Net::new("convolutions", convolutions),
        Net::new("transformer", transformer),
        Net::new("recurrent", recurrent),
    ]
}

/// One layer six times over: every stage of a pipeline has its weights, and some have none of the sums of its gradient.
#[allow(dead_code, reason = "another test binary includes this file for the other networks")]
pub(crate) fn looped() -> Net {
    Net::new("looped", |b| {
        let x = b.input("x", [8, 40], DType::F32)?;
        let labels = b.input("labels", [8], DType::I32)?;
        let mut h = linear(b, "in", x, 72)?;
        let w = b.param("again", [72, 72], Init::Uniform { bound: 0.15 })?;
        for i in 0..6 {
            h = b.layer(format!("turn{i}"), |b| {
                let y = norm(b, "norm", h)?;
                let y = b.linear(y, w, None)?;
                let y = b.activation("gelu_tanh", y)?;
                b.add(y, h)
            })?;
        }
        let logits = linear(b, "head", h, CLASSES)?;
        plain(b, logits, labels)
    })
}

const CLASSES: usize = 10;

fn plain(b: &mut Builder, logits: Tensor, labels: Tensor) -> Traced {
    b.cross_entropy(logits, labels, None, CrossEntropy { label_smoothing: 0.0, ignore_index: None })
}

fn linear(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
    b.layer(name, |b| {
        let width = b.shape(x).last();
        let w = b.param("weight", [out, width], Init::Uniform { bound: 0.2 })?;
        let bias = b.param("bias", [out], Init::Uniform { bound: 0.1 })?;
        b.linear(x, w, Some(bias))
    })
}

fn convolutions(b: &mut Builder) -> Traced {
    let x = b.input("x", [6, 16, 16, 3], DType::F32)?;
    let labels = b.input("labels", [6], DType::I32)?;
    let mut h = conv_norm(b, "stem", x, 48)?;
    h = b.activation("relu", h)?;
    for i in 0..2 {
        h = b.layer(format!("block{i}"), |b| {
            let y = conv_norm(b, "a", h, 48)?;
            let y = b.activation("relu", y)?;
            let y = conv_norm(b, "b", y, 48)?;
            let y = b.add(y, h)?;
            b.activation("relu", y)
        })?;
    }
    h = b.dropout(h, 0.1)?;
    let pooled = b.avg_pool(h, Window::Adaptive { out: (1, 1) })?;
    let flat = b.reshape(pooled, [6, 48])?;
    let hidden = linear(b, "hidden", flat, 24)?;
    let logits = linear(b, "head", hidden, CLASSES)?;
    plain(b, logits, labels)
}

fn conv_norm(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
    b.layer(name, |b| {
        let c = b.shape(x).last();
        let w = b.param("weight", [out, c, 3, 3], Init::Normal { std: 0.1 })?;
        b.conv2d(x, w, None, Conv { padding: (1, 1), ..Conv::default() })
    })
    .and_then(|y| batch_norm(b, &format!("{name}_norm"), y))
}

fn batch_norm(b: &mut Builder, name: &str, x: Tensor) -> Traced {
    b.layer(name, |b| {
        let out = b.shape(x).last();
        let gamma = b.param("gamma", [out], Init::Const(1.0))?;
        let beta = b.param("beta", [out], Init::Uniform { bound: 0.1 })?;
        let running_mean = b.state("mean", [out], Init::Const(0.0))?;
        let running_var = b.state("var", [out], Init::Const(1.0))?;
        let at = BatchNorm { gamma, beta, running_mean, running_var, eps: 1e-5, momentum: 0.1 };
        b.batch_norm(x, at, true)
    })
}

fn transformer(b: &mut Builder) -> Traced {
    let (n, t, d, heads) = (4, 40, 96, 4);
    let ids = b.input("ids", [n, t], DType::I32)?;
    let labels = b.input("labels", [n * t], DType::I32)?;
    let table = b.param("table", [CLASSES, d], Init::Normal { std: 0.3 })?;
    let positions = b.param("positions", [t, d], Init::Normal { std: 0.3 })?;
    let rows = b.embedding(ids, table)?;
    let mut x = b.add(rows, positions)?;
    x = b.dropout(x, 0.1)?;
    for i in 0..3 {
        x = b.layer(format!("block{i}"), |b| {
            let y = norm(b, "norm1", x)?;
            let qkv = linear(b, "qkv", y, 3 * d)?;
            let qkv = b.reshape(qkv, [n, t, 3, heads, d / heads])?;
            let o = b.attention_packed(qkv, true, None)?;
            let o = b.reshape(o, [n, t, d])?;
            let o = linear(b, "out", o, d)?;
            let o = b.dropout(o, 0.1)?;
            let x = b.add(x, o)?;
            let y = norm(b, "norm2", x)?;
            let y = linear(b, "up", y, 4 * d)?;
            let y = b.activation("gelu_tanh", y)?;
            let y = linear(b, "down", y, d)?;
            b.add(x, y)
        })?;
    }
    let x = norm(b, "norm", x)?;
    let flat = b.reshape(x, [n * t, d])?;
    // The table again: its gradient has two contributions.
    let logits = b.matmul(flat, table, false, true)?;
    plain(b, logits, labels)
}

fn norm(b: &mut Builder, name: &str, x: Tensor) -> Traced {
    b.layer(name, |b| {
        let d = b.shape(x).last();
        let gamma = b.param("gamma", [d], Init::Const(1.0))?;
        let beta = b.param("beta", [d], Init::Const(0.0))?;
        b.layer_norm(x, gamma, beta, 1e-5)
    })
}

fn recurrent(b: &mut Builder) -> Traced {
    let (n, t, width, hidden) = (18, 9, 30, 72);
    let mut x = b.input("x", [n, t, width], DType::F32)?;
    let labels = b.input("labels", [n], DType::I32)?;
    for (name, cell) in [("lstm", Cell::Lstm), ("gru", Cell::Gru)] {
        let gates = cell.gates() * hidden;
        let mut both = Vec::new();
        for reverse in [false, true] {
            both.push(b.layer(format!("{name}{}", u8::from(reverse)), |b| {
                let xp = linear(b, "ih", x, gates)?;
                let w = b.param("w_hh", [gates, hidden], Init::Uniform { bound: 0.2 })?;
                let bias = b.param("b_hh", [gates], Init::Uniform { bound: 0.1 })?;
                b.recurrent(cell, xp, w, bias, &[], reverse)
            })?);
        }
        x = b.concat(&both, 2)?;
    }
    let mean = b.mean(x, &[1])?;
    let logits = linear(b, "head", mean, CLASSES)?;
    plain(b, logits, labels)
}
