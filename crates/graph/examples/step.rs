//! Traces a small network and prints the program of its training step: `cargo run -p polyreme-graph --example step`.

use polyreme_graph::op::CrossEntropy;
use polyreme_graph::{Builder, DType, Init, Program, TraceError, differentiate};
use polyreme_kernels::optim::Optimizer;

fn main() -> Result<(), TraceError> {
    let mut b = Builder::new();
    let x = b.input("x", [32, 16], DType::F32)?;
    let labels = b.input("labels", [32], DType::I32)?;
    let hidden = b.layer("fc1", |b| {
        let w = b.param("weight", [64, 16], Init::Uniform { bound: 0.25 })?;
        let bias = b.param("bias", [64], Init::Const(0.0))?;
        let y = b.linear(x, w, Some(bias))?;
        b.activation("gelu", y)
    })?;
    let logits = b.layer("fc2", |b| {
        let w = b.param("weight", [10, 64], Init::Uniform { bound: 0.125 })?;
        b.linear(hidden, w, None)
    })?;
    let options = CrossEntropy { label_smoothing: 0.1, ignore_index: None };
    let loss = b.cross_entropy(logits, labels, None, options)?;
    let forward = b.finish(&[("loss", loss)]);

    let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    print!("{}", Program::train(&differentiate(&forward, loss)?, sgd, Some(1.0)));
    Ok(())
}
