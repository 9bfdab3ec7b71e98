//! A custom training loop on the engine: a model from `nn`, a batch made by hand, a learning rate that halves.
//!
//!     cargo run --release -p polyreme --example 5_own_loop

use std::error::Error;

use polyreme::exec::{Engine, Options};
use polyreme::graph::{Optimizer, Program};
use polyreme::nn::{Model, TraceOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let model = Model::by_name("lenet")?;
    let forward = model.trace(&TraceOptions::training(16))?;
    let loss = forward.output("loss").ok_or("models have a loss")?;
    let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 1e-4 };
    let mut engine = Engine::new(Program::train_loss(&forward, loss, sgd)?, Options::threads(2))?;
    let mut lr = 0.05;
    for step in 0..60 {
        for (i, label) in engine.input_i32("labels")?.iter_mut().enumerate() {
            *label = (i % 10) as i32;
        }
        for (i, x) in engine.input_f32("x")?.iter_mut().enumerate() {
            *x = ((i / 3072 % 10 * 37 + i) % 11) as f32 / 11.0;
        }
        engine.step(lr)?;
        if step % 20 == 19 {
            lr /= 2.0;
            println!("step {}: loss {:.4}", step + 1, engine.output("loss")?[0]);
        }
    }
    Ok(())
}
