//! The four reference jobs: what people train, with the sizes that every comparison uses.

use std::error::Error;

use polyreme_exec::{Engine, ExecError};
use polyreme_graph::{DType, Graph, Program, TraceError, differentiate, recompute};
use polyreme_kernels::optim::{Moments, Optimizer};
use polyreme_kernels::{Cx, random};
use polyreme_nn::{Model, TraceOptions};

/// A model, its batch and its optimizer.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its name.
    pub name: &'static str,
    /// The model.
    pub model: Model,
    /// Samples (for `gpt`, sequences) a step.
    pub batch: usize,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The learning rate.
    pub lr: f32,
    /// How many steps a measurement takes.
    pub timed_steps: usize,
}

impl Job {
    /// The names of all.
    pub const NAMES: [&'static str; 4] = ["mlp", "lenet", "cnn", "gpt"];

    /// A job by its name.
    pub fn by_name(name: &str) -> Option<Job> {
        let name = Job::NAMES.into_iter().find(|n| *n == name)?;
        let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
        let adamw = Optimizer::AdamW(Moments { weight_decay: 0.01, ..Moments::DEFAULT });
        let (batch, optimizer, lr, timed_steps) = match name {
            "mlp" => (128, sgd, 0.01, 300),
            "gpt" => (8, adamw, 3e-4, 8),
            "cnn" => (64, sgd, 0.01, 8),
            _ => (64, sgd, 0.01, 300),
        };
        let model = Model::by_name(name).ok()?;
        Some(Job { name, model, batch, optimizer, lr, timed_steps })
    }

    /// The program of its training step.
    pub fn program(&self) -> Result<Program, TraceError> {
        Ok(Program::train_at_once(&self.step()?, self.optimizer))
    }

    /// The same, with activations recomputed so that an engine of `threads` takes at most `budget_bytes`.
    pub fn program_within(&self, budget_bytes: usize, threads: usize) -> Result<Program, Box<dyn Error>> {
        let train = |step: &Graph| Program::train_at_once(step, self.optimizer);
        let measure = |step: &Graph| Engine::footprint(&train(step), threads).total();
        Ok(train(&recompute(&self.step()?, budget_bytes, &measure)?.graph))
    }

    /// The graph of its training step.
    fn step(&self) -> Result<Graph, TraceError> {
        let forward = self.model.trace(&TraceOptions::training(self.batch))?;
        let loss = forward.output("loss").expect("models have a loss");
        differentiate(&forward, loss)
    }

    /// Fills an engine's inputs with a random batch.
    pub fn fill(&self, engine: &mut Engine) -> Result<(), ExecError> {
        let options = TraceOptions::training(self.batch);
        let input = self.model.input(&options);
        match input.dtype {
            DType::I32 => fill_integers(engine.input_i32(input.name)?, self.model.classes(), 1),
            _ => random::normal(&Cx::serial(), 1, 0, 0, 0.0, 1.0, engine.input_f32(input.name)?),
        }
        fill_integers(engine.input_i32("labels")?, self.model.classes(), 2);
        Ok(())
    }
}

/// Integers below `n`, from a stream.
fn fill_integers(to: &mut [i32], n: usize, stream: u32) {
    for (i, v) in to.iter_mut().enumerate() {
        *v = (random::philox([i as u32, 0, 0, 0], [stream, 0])[0] as usize % n) as i32;
    }
}
