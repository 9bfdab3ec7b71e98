//! Learns exclusive or: `cargo run -p polyreme-exec --example xor`.

use std::error::Error;

use polyreme_exec::{Engine, Options};
use polyreme_graph::{Builder, DType, Init, Program, Tensor, Traced, differentiate};
use polyreme_kernels::optim::{Moments, Optimizer};

fn linear(b: &mut Builder, name: &str, x: Tensor, outputs: usize) -> Traced {
    b.layer(name, |b| {
        let inputs = b.shape(x).last();
        let w = b.param("weight", [outputs, inputs], Init::Uniform { bound: 1.0 })?;
        let bias = b.param("bias", [outputs], Init::Const(0.0))?;
        b.linear(x, w, Some(bias))
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut b = Builder::new();
    let x = b.input("x", [4, 2], DType::F32)?;
    let target = b.input("target", [4, 1], DType::F32)?;
    let hidden = linear(&mut b, "hidden", x, 8)?;
    let hidden = b.activation("tanh", hidden)?;
    let logits = linear(&mut b, "out", hidden, 1)?;
    let loss = b.bce_with_logits(logits, target)?;
    let forward = b.finish(&[("logits", logits), ("loss", loss)]);

    let adam = Optimizer::Adam(Moments::DEFAULT);
    let program = Program::train(&differentiate(&forward, loss)?, adam, None);
    println!("a step takes {} bytes", Engine::footprint(&program, 1, polyreme_exec::Isa::detect()).total());
    let mut engine = Engine::new(program, Options::threads(1))?;
    engine.input_f32("x")?.copy_from_slice(&[0., 0., 0., 1., 1., 0., 1., 1.]);
    engine.input_f32("target")?.copy_from_slice(&[0., 1., 1., 0.]);
    for step in 0..400 {
        engine.step(0.05)?;
        if step % 100 == 99 {
            println!("step {:3}: loss {:.4}", step + 1, engine.output("loss")?[0]);
        }
    }
    println!("logits {:?}", engine.output("logits")?);
    Ok(())
}
