//! The four reference jobs: what people train, with the sizes that every comparison uses.

use std::error::Error;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Engine, ExecError, Filled, Isa, Options, StepArgs, Totals};
use polyreme_graph::{Builder, DType, Graph, Precision, Program, Shape, TraceError, differentiate};
use polyreme_kernels::optim::{Moments, Optimizer};
use polyreme_kernels::{Cx, random};
use polyreme_nn::{Model, TraceOptions};
use polyreme_parallel::{Budget, Plan, StepShape, Training, Updates, compile, schedule};

/// A model, its batch and its optimizer.
#[derive(Clone, Debug)]
pub struct BenchJob {
    /// Its name.
    pub name: &'static str,
    /// The model.
    pub model: Model,
    /// Samples (for `gpt`, sequences) per step.
    pub batch: usize,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The learning rate.
    pub lr: f32,
    /// How many steps a measurement takes.
    pub timed_steps: usize,
    /// In which formats activations are stored and multiplied.
    pub precision: Precision,
}

impl BenchJob {
    /// The names of all.
    pub const NAMES: [&'static str; 4] = ["mlp", "lenet", "cnn", "gpt"];

    /// A job by its name.
    pub fn by_name(name: &str) -> Option<BenchJob> {
        let name = BenchJob::NAMES.into_iter().find(|n| *n == name)?;
        let sgd = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
        let adamw = Optimizer::AdamW(Moments { weight_decay: 0.01, ..Moments::DEFAULT });
        let (batch, optimizer, lr, timed_steps) = match name {
            "mlp" => (128, sgd, 0.01, 300),
            "gpt" => (8, adamw, 3e-4, 8),
            "cnn" => (64, sgd, 0.01, 8),
            _ => (64, sgd, 0.01, 300),
        };
        let model = Model::by_name(name).ok()?;
        Some(BenchJob { name, model, batch, optimizer, lr, timed_steps, precision: Precision::F32 })
    }

    /// The program of a rank's training step; with a budget, activations are recomputed so that an engine with
    /// `threads` threads stays within it.
    pub fn program(
        &self,
        plan: &Plan,
        budget_bytes: Option<usize>,
        threads: usize,
    ) -> Result<Program, Box<dyn Error + Send + Sync>> {
        let training = Training {
            optimizer: self.optimizer,
            moments: DType::F32,
            clip: None,
            ema: None,
            scaled: self.precision.scales_loss(),
        };
        let measure = |program: &Program| Engine::footprint(program, threads, Isa::detect()).total();
        let budget = budget_bytes.map(|bytes| Budget { bytes, measure: &measure });
        let plan = &Plan { precision: self.precision.clone(), ..plan.clone() };
        let body = compile(&self.weighted_step()?, plan, &training, budget)?;
        Ok(schedule(plan, &training, &[Arc::new(body)], &StepShape::one()))
    }

    /// The program of a lone rank of a run.
    pub fn lone_program(
        &self,
        budget_bytes: Option<usize>,
        threads: usize,
    ) -> Result<Program, Box<dyn Error + Send + Sync>> {
        self.program(&Plan { updates: Updates::AtOnce, ..Plan::alone() }, budget_bytes, threads)
    }

    /// An engine for it, filled with a random batch.
    pub fn engine(&self, program: Program, threads: usize, isa: Isa) -> Result<Engine, ExecError> {
        let mut engine = Engine::join(program, Options { isa, ..Options::threads(threads) }, Comm::alone())?;
        self.fill(&mut engine)?;
        Ok(engine)
    }

    /// A step with the batch that the engine was filled with.
    pub fn step(&self, engine: &mut Engine) -> Result<Totals, ExecError> {
        let args = StepArgs { lr: self.lr, ..StepArgs::default() };
        engine.step_with::<ExecError>(&mut Filled { weight: self.batch as f64 }, args)
    }

    /// The graph of a rank's training step: the loss's gradient is multiplied by the input `weight`.
    fn weighted_step(&self) -> Result<Graph, TraceError> {
        let options = TraceOptions::training(self.batch);
        let mut b = Builder::new();
        let input = self.model.input(&options);
        let x = b.input(input.name, input.shape, input.dtype)?;
        let labels = b.input("labels", [self.model.n_labels(&options)], DType::I32)?;
        let weight = b.input("weight", [1], DType::F32)?;
        let logits = self.model.logits(&mut b, x, true)?;
        let (loss, weighted) = b.layer("loss", |b| {
            let loss = b.cross_entropy(logits, labels, None, options.loss)?;
            let weight = b.reshape(weight, Shape::scalar())?;
            Ok((loss, b.mul(loss, weight)?))
        })?;
        differentiate(&b.finish(&[("loss", loss), ("weighted", weighted)]), weighted)
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
