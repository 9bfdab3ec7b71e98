//! What `polyreme bench step` times: the four reference jobs, with the sizes that every comparison uses, and job files.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_data::{Features, LabelKind, Layout, Spec, Target};
use polyreme_exec::{Engine, ExecError, Filled, Isa, Options, StepArgs, Totals};
use polyreme_graph::{Axis, DType, Graph, Precision, Program, ValueId};
use polyreme_kernels::optim::{Moments, Optimizer};
use polyreme_kernels::{Cx, random};
use polyreme_nn::model::StackInput;
use polyreme_nn::{Model, TraceOptions};
use polyreme_parallel::sequence::{FedPart, SequenceOrder, SequencePlace, fed_parts};
use polyreme_parallel::{Budget, Plan, Training, Updates, compile, schedule};
use polyreme_train::job::{ClassWeights, Job, Source};
use polyreme_train::loss::{Loss, LossKind};
use polyreme_train::lower::{step_graph, training_graph};
use polyreme_train::run::Given;
use polyreme_train::{Net, TrainError, sets};

/// Steps of a job file that a measurement takes.
const TIMED_STEPS: usize = 8;

/// A network, its batch and how it is trained. Batches are random: they have the shapes of the job's data.
#[derive(Clone, Debug)]
pub struct BenchJob {
    /// Its name.
    pub name: String,
    /// The network.
    pub net: Net,
    /// The samples.
    pub spec: Spec,
    /// What is minimised.
    pub loss: Loss,
    /// Samples (for `gpt`, sequences) of each microbatch.
    pub batch: usize,
    /// Microbatches per step; of logical shards, those of all ranks.
    pub accumulate: usize,
    /// Steps of one program: several in a pipeline without a flush between steps.
    pub run_steps: usize,
    /// Reproducible mode: how many logical shards a step has.
    pub shards: Option<usize>,
    /// The optimizer, clipping and averaging.
    pub training: Training,
    /// The learning rate.
    pub lr: f32,
    /// What an engine may take; activations are recomputed to fit.
    pub budget_bytes: Option<usize>,
    /// How many steps a measurement takes.
    pub timed_steps: usize,
    /// In which formats activations are stored and multiplied.
    pub precision: Precision,
}

impl BenchJob {
    /// The names of the reference jobs.
    pub const NAMES: [&'static str; 4] = ["mlp", "lenet", "cnn", "gpt"];

    /// A reference job by its name.
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
        Some(BenchJob {
            name: name.into(),
            spec: made_for(&model, LossKind::CrossEntropy),
            net: Net::Model(model),
            loss: Loss::default(),
            batch,
            accumulate: 1,
            run_steps: 1,
            shards: None,
            training: Training { optimizer, moments: DType::F32, clip: None, ema: None, scaled: false },
            lr,
            budget_bytes: None,
            timed_steps,
            precision: Precision::F32,
        })
    }

    /// The steps of one rank of a job: its network, batch, loss, optimizer, clipping and averaging.
    ///
    /// Its data are opened only for the sizes of samples. If they are not there, the model's own sizes count, which the
    /// job must then give.
    pub fn of(mut job: Job, given: Given) -> Result<BenchJob, TrainError> {
        let (precision, reading) = (job.precision(), given.reading());
        let spec = match (given.sets, described(&job)) {
            (Some(sets), _) => sets.train.spec().clone(),
            (None, Some(spec)) => spec,
            (None, None) => match sets::open_as(&mut job, None, &reading) {
                Ok(sets) => sets.train.spec().clone(),
                Err(_) if given.net.is_none() && job.model.from_data.is_empty() => {
                    made_for(&job.model.model, job.train.loss)
                }
                Err(error) => return Err(error),
            },
        };
        let net = match given.net {
            Some(net) => net,
            None => {
                job.model.fit(&spec)?;
                Net::Model(job.model.model)
            }
        };
        let train = job.train;
        let loss = Loss {
            kind: train.loss,
            label_smoothing: train.label_smoothing,
            class_weights: job.data.class_weights != ClassWeights::None,
            mixup: train.mixup > 0.0,
        };
        let mut bench = BenchJob {
            name: job.name,
            net,
            spec,
            loss,
            batch: train.batch,
            accumulate: train.accumulate,
            run_steps: 1,
            shards: None,
            training: Training {
                optimizer: train.optimizer.rule,
                moments: train.optimizer.moments,
                clip: train.clip,
                ema: train.ema,
                scaled: precision.scales_loss(),
            },
            lr: train.optimizer.lr as f32,
            budget_bytes: train.memory_mib.map(|mib| mib << 20),
            timed_steps: TIMED_STEPS,
            precision,
        };
        bench.set_batch(train.batch);
        Ok(bench)
    }

    /// Cuts steps of so many samples into the job's microbatches; what does not divide is left out.
    pub fn set_batch(&mut self, samples: usize) {
        self.accumulate = self.accumulate.clamp(1, samples.max(1));
        self.batch = samples / self.accumulate;
    }

    /// The differentiated graph of a microbatch.
    pub fn graph(&self) -> Result<Graph, TrainError> {
        step_graph(&training_graph(&self.net, &self.spec, self.batch, self.loss)?)
    }

    /// The program of a rank's training step; with a budget, activations are recomputed so that an engine with
    /// `threads` threads stays within it.
    pub fn program(
        &self,
        plan: &Plan,
        budget_bytes: Option<usize>,
        threads: usize,
    ) -> Result<Program, Box<dyn Error + Send + Sync>> {
        let (microbatches, shards) = (self.accumulate, self.shards);
        let (precision, run_steps) = (self.precision.clone(), self.run_steps);
        let plan = Plan { microbatches, shards, precision, run_steps, ..plan.clone() };
        let measure = |program: &Program| Engine::footprint(program, threads, Isa::detect()).total();
        let budget = budget_bytes.or(self.budget_bytes).map(|bytes| Budget { bytes, measure: &measure });
        let body = compile(&self.graph()?, &plan, &self.training, budget)?;
        Ok(schedule(&plan, &self.training, &[Arc::new(body)], &plan.whole_step()))
    }

    /// The program of a lone rank of a run.
    pub fn lone_program(
        &self,
        budget_bytes: Option<usize>,
        threads: usize,
    ) -> Result<Program, Box<dyn Error + Send + Sync>> {
        self.program(&Plan { updates: Updates::AtOnce, ..Plan::alone() }, budget_bytes, threads)
    }

    /// Makes a job on sequences one of sequences of another length. Of other jobs it is an error.
    pub fn set_context(&mut self, context: usize) -> Result<(), String> {
        let no_sequences = || format!("{} is not a job on sequences, so it has no context", self.name);
        let Features::Ids { time, .. } = &mut self.spec.features else { return Err(no_sequences()) };
        match &mut self.net {
            Net::Model(Model::Gpt(m)) => m.context = context,
            Net::Model(Model::Gpt2(m)) => m.context = context,
            Net::Model(Model::Bert(m)) => m.context = context,
            Net::Model(Model::Encoder(m)) => m.context = context,
            Net::Model(Model::Recurrent(m)) => m.context = context,
            _ => {
                return Err(format!("the context of {} is in its job file; change it with --set", self.name));
            }
        }
        *time = context;
        Ok(())
    }

    /// What a rank of a plan is fed of each sequence; nothing is cut if there is one rank along that axis.
    pub fn fed_parts(&self, plan: &Plan) -> Result<Vec<FedPart>, Box<dyn Error + Send + Sync>> {
        if plan.mesh.sequence == 1 {
            return Ok(Vec::new());
        }
        let graph = training_graph(&self.net, &self.spec, self.batch, self.loss)?;
        let (rank, ranks) = (plan.mesh.place(plan.rank, Axis::Sequence), plan.mesh.sequence);
        Ok(fed_parts(&graph, SequencePlace { rank, ranks, order: SequenceOrder::of(&graph) })?)
    }

    /// An engine for it, filled with a random batch.
    pub fn engine(&self, program: Program, threads: usize, isa: Isa) -> Result<Engine, ExecError> {
        let mut engine = Engine::join(program, Options { isa, ..Options::threads(threads) }, Comm::alone())?;
        self.fill(&mut engine)?;
        Ok(engine)
    }

    /// A step with the batch that the engine was filled with, or a run of several; the totals are those of the last.
    pub fn step(&self, engine: &mut Engine) -> Result<Totals, ExecError> {
        let args = StepArgs { lr: self.lr, ..StepArgs::default() };
        // Gradients are those of the mean over all microbatches of all ranks, as in a run.
        let n = self.shards.unwrap_or(self.accumulate * engine.role().ranks);
        let weight = 1.0 / n as f64;
        engine.step_with::<ExecError>(&mut Filled { weight }, args)
    }

    /// Fills an engine's inputs with a random batch.
    pub fn fill(&self, engine: &mut Engine) -> Result<(), ExecError> {
        self.fill_parts(engine, &[])
    }

    /// Fills an engine's inputs with the rank's parts of a random batch; what is not named is whole.
    pub fn fill_parts(&self, engine: &mut Engine, parts: &[FedPart]) -> Result<(), ExecError> {
        let integers = |name: &str, to: &mut [i32], n: usize, stream: u32| {
            let Some(part) = parts.iter().find(|part| part.name == name) else {
                return fill_integers(to, n, stream);
            };
            let of_sequence: usize = part.ranges.iter().map(Range::len).sum();
            let mut all = vec![0; to.len() / of_sequence * part.sequence];
            fill_integers(&mut all, n, stream);
            part.copy(&all, to);
        };
        let body = engine.program().bodies[0].clone();
        // What arrives from other stages is not filled.
        let arrives = |v: ValueId| body.arrives.iter().any(|link| link.value == v);
        let inputs = body.graph.inputs.iter().filter(|i| !arrives(i.value));
        let inputs: Vec<_> = inputs.map(|i| (i.name.as_str(), body.graph.value(i.value).dtype)).collect();
        let ids = match &self.spec.features {
            Features::Ids { vocab, .. } | Features::Texts { vocab, .. } => *vocab,
            // Columns have tables of their own, and one id is made for all.
            Features::Mixed { ids, texts, .. } => {
                ids.iter().copied().chain(texts.iter().map(|text| text.ids)).min().unwrap_or(1)
            }
            Features::Image { .. } | Features::Row { .. } => 1,
        };
        engine.fill_slots(|to| {
            for &(name, dtype) in &inputs {
                match (name, dtype) {
                    ("ids", _) => integers(name, to.i32(name)?, ids, 1),
                    (_, DType::I32) => integers(name, to.i32(name)?, self.spec.classes(), 2),
                    ("x", _) => random::normal(&Cx::serial(), 1, 0, 0, 0.0, 1.0, to.f32(name)?),
                    // Labels that are numbers, weights of classes, and the share of a mixture.
                    _ => to.f32(name)?.fill(1.0),
                }
            }
            Ok(())
        })
    }
}

/// The samples of a job, if the job itself describes them.
fn described(job: &Job) -> Option<Spec> {
    let Source::Synthetic { shape, classes, .. } = &job.data.source else { return None };
    let features = match shape[..] {
        [channels, height, width] => Features::Image { channels, height, width, layout: Layout::Planes },
        _ => Features::Row { width: shape.iter().product() },
    };
    Some(Spec { features, target: Target::Class { classes: *classes, names: Vec::new() } })
}

/// The samples that a model with all its sizes was made for, with labels for a loss.
fn made_for(model: &Model, loss: LossKind) -> Spec {
    let input = model.input(&TraceOptions::training(1));
    let vocab = match model {
        Model::Gpt(m) => m.vocab,
        Model::Gpt2(m) => m.vocab,
        Model::Bert(m) => m.vocab,
        Model::Recurrent(m) => m.vocab,
        Model::Encoder(m) => m.vocab,
        Model::Layers(m) => match m.input {
            StackInput::Ids { vocab, .. } | StackInput::Texts { vocab, .. } => vocab,
            _ => 0,
        },
        _ => 0,
    };
    let features = match (input.dtype, &input.shape.dims()[1..]) {
        (DType::I32, dims) => Features::Ids { time: dims[0], vocab },
        (_, &[channels, height, width]) => {
            Features::Image { channels, height, width, layout: Layout::Planes }
        }
        (_, dims) => Features::Row { width: dims.iter().product() },
    };
    let (n, names) = (model.classes(), Vec::new());
    let target = match (model, loss.labels()) {
        (Model::Gpt(_) | Model::Gpt2(_), _) => Target::NextId,
        (Model::Layers(m), _) if m.is_per_token() => Target::NextId,
        (_, LabelKind::Classes) => Target::Class { classes: n, names },
        (_, LabelKind::Numbers) => Target::Numbers { n, names },
        (_, LabelKind::Labels) => Target::Labels { n, names },
    };
    Spec { features, target }
}

/// Integers below `n`, from a stream.
fn fill_integers(to: &mut [i32], n: usize, stream: u32) {
    for (i, v) in to.iter_mut().enumerate() {
        *v = (random::philox([i as u32, 0, 0, 0], [stream, 0])[0] as usize % n) as i32;
    }
}
