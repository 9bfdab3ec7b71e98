//! The engines of training: one for whole pieces, which owns what is learnt, and one for the short piece at the end of
//! an epoch, which takes the first one's weights before it runs.

use polyreme_data::{Spec, Values};
use polyreme_exec::{Engine, Kept, Options, Slot};
use polyreme_graph::Optimizer;

use crate::error::TrainError;
use crate::lower::{Loss, training_graph, training_program};
use crate::mixup;
use crate::net::Net;
use crate::pace::{Pace, Piece};

/// How engines are made.
#[derive(Clone, Debug)]
pub struct TeamOptions {
    /// Threads of each engine; one of them runs at a time.
    pub threads: usize,
    /// From which weights and masks follow.
    pub seed: u64,
    /// What updates do.
    pub optimizer: Optimizer,
    /// The maximum of the gradients' norm.
    pub clip: Option<f64>,
    /// The loss.
    pub loss: Loss,
    /// Weights of the classes, if the loss has them.
    pub class_weights: Vec<f32>,
    /// The decay of averaged weights.
    pub ema: Option<f64>,
    /// What training may take.
    pub memory_bytes: Option<usize>,
}

/// The engines of training.
pub struct Team {
    options: TeamOptions,
    input: &'static str,
    main: Engine,
    /// For pieces of [`Pace::tail`] samples.
    tail: Option<Engine>,
    /// The sum of the pieces' weighted gradients; empty if every step is one piece.
    sum: Vec<f32>,
    /// The sum of the pieces' weights, and of their weighted losses.
    weight: f64,
    loss: f64,
    /// The averaged parameters; empty without.
    average: Vec<f32>,
}

/// What a finished step came to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepResult {
    /// The mean loss of its samples.
    pub loss: f64,
    /// The gradients' norm, if they are clipped.
    pub grad_norm: Option<f64>,
}

/// What goes through an engine at once.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Features, sample by sample.
    pub x: Values<'a>,
    /// Labels.
    pub labels: &'a [i32],
    /// The share of each sample in its mixture; 1 without mixup.
    pub mix: f32,
}

impl Team {
    /// Compiles and reserves everything for training.
    pub fn new(net: &Net, spec: &Spec, pace: Pace, options: TeamOptions) -> Result<Team, TrainError> {
        let exec = Options { seed: options.seed, ..Options::threads(options.threads) };
        let budget = options.memory_bytes.map(|bytes| (bytes, options.threads));
        let forward = training_graph(net, spec, pace.micro, options.loss)?;
        let update = Some((options.optimizer, options.clip));
        let main = Engine::new(training_program(&forward, update, budget)?, exec);
        let tail = match pace.tail() {
            0 => None,
            n => {
                let forward = training_graph(net, spec, n, options.loss)?;
                Some(Engine::new(training_program(&forward, None, budget)?, exec))
            }
        };
        let pieces = pace.micro < pace.batch || tail.is_some();
        let sum = vec![0.0; if pieces { main.grads().len() } else { 0 }];
        let average = options.ema.map_or(Vec::new(), |_| main.kept(Kept::Params).to_vec());
        let input = net.input(spec, 1, true).name;
        let mut team = Team { options, input, main, tail, sum, weight: 0.0, loss: 0.0, average };
        team.set_class_weights()?;
        Ok(team)
    }

    /// Runs a piece; with the last piece of a step, also the update.
    pub fn piece(&mut self, piece: Piece, batch: Batch, lr: f32) -> Result<Option<StepResult>, TrainError> {
        let whole = piece.last && piece.offset == 0 && piece.len == batch_of(&self.main);
        let is_tail = piece.len != batch_of(&self.main);
        if is_tail {
            let tail = self.tail.as_mut().expect("pieces are whole, or of the one other length");
            tail.copy_weights_from(&self.main)?;
            tail.set_steps_done(self.main.steps_done());
        }
        let engine = if is_tail { self.tail.as_mut().expect("looked at above") } else { &mut self.main };
        fill(engine, self.input, batch, self.options.loss.mixup)?;
        engine.set_first_sample(piece.offset as u64);
        engine.run()?;
        let loss = f64::from(engine.output("loss")?[0]);
        if !loss.is_finite() {
            return Err(self.not_finite(is_tail, loss)?);
        }
        engine.keep();
        if whole {
            self.main.update(lr);
            return Ok(Some(self.finish(loss)));
        }
        let weight = label_weight(batch.labels, &self.options.class_weights);
        if piece.offset == 0 {
            self.sum.fill(0.0);
            (self.weight, self.loss) = (0.0, 0.0);
        }
        engine.add_grads_to(&mut self.sum, weight as f32);
        self.weight += weight;
        self.loss += weight * loss;
        if is_tail {
            let tail = self.tail.as_ref().expect("looked at above");
            self.main.copy_states_from(tail)?;
        }
        if !piece.last {
            return Ok(None);
        }
        let scale = (1.0 / self.weight) as f32;
        for (g, s) in self.main.grads_mut().iter_mut().zip(&self.sum) {
            *g = s * scale;
        }
        self.main.update(lr);
        Ok(Some(self.finish(self.loss / self.weight)))
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.main.steps_done()
    }

    /// Continues a run of which `steps` steps are done.
    pub fn set_steps_done(&mut self, steps: u64) {
        self.main.set_steps_done(steps);
    }

    /// The engine that owns what is learnt.
    pub fn learner(&self) -> &Engine {
        &self.main
    }

    /// The same, to set weights.
    pub fn learner_mut(&mut self) -> &mut Engine {
        &mut self.main
    }

    /// The averaged parameters, laid out as the learner's; empty without averaging.
    pub fn average(&self) -> &[f32] {
        &self.average
    }

    /// The same, to set.
    pub fn average_mut(&mut self) -> &mut [f32] {
        &mut self.average
    }

    /// The parameters that are evaluated and shipped: the averaged ones if there are.
    pub fn shipped(&self) -> (Vec<Slot>, &[f32]) {
        let params = if self.average.is_empty() { self.main.kept(Kept::Params) } else { &self.average };
        (self.main.param_slots(), params)
    }

    fn finish(&mut self, loss: f64) -> StepResult {
        if let Some(decay) = self.options.ema {
            self.main.average_params_into(&mut self.average, warm_decay(decay, self.main.steps_done()));
        }
        StepResult { loss, grad_norm: self.main.grad_norm() }
    }

    fn not_finite(&mut self, is_tail: bool, loss: f64) -> Result<TrainError, TrainError> {
        let step = self.main.steps_done();
        let engine = if is_tail { self.tail.as_mut().unwrap_or(&mut self.main) } else { &mut self.main };
        Ok(TrainError::NotFinite { step, loss, place: engine.find_non_finite()? })
    }

    fn set_class_weights(&mut self) -> Result<(), TrainError> {
        if self.options.loss.class_weights {
            for engine in [Some(&mut self.main), self.tail.as_mut()].into_iter().flatten() {
                engine.input_f32("class_weights")?.copy_from_slice(&self.options.class_weights);
            }
        }
        Ok(())
    }
}

/// Averages from a start follow more quickly: `min(decay, (1 + t) / (10 + t))`.
fn warm_decay(decay: f64, steps_done: u64) -> f32 {
    let t = steps_done as f64;
    decay.min((1.0 + t) / (10.0 + t)) as f32
}

/// What the labels of a piece weigh in the mean of its step.
fn label_weight(labels: &[i32], class_weights: &[f32]) -> f64 {
    if class_weights.is_empty() {
        return labels.len() as f64;
    }
    labels.iter().map(|&l| f64::from(class_weights.get(l as usize).copied().unwrap_or(0.0))).sum()
}

fn batch_of(engine: &Engine) -> usize {
    let graph = &engine.program().graph;
    graph.shape(graph.inputs[0].value).dims()[0]
}

fn fill(engine: &mut Engine, input: &str, batch: Batch, mixup: bool) -> Result<(), TrainError> {
    let n = batch_of(engine);
    match batch.x {
        Values::F32(x) => {
            let to = engine.input_f32(input)?;
            to.copy_from_slice(x);
            if mixup {
                mixup::mix(to, n, batch.mix);
            }
        }
        Values::I32(x) => engine.input_i32(input)?.copy_from_slice(x),
        Values::U8(_) => unreachable!("batches are f32 or i32"),
    }
    engine.input_i32("labels")?.copy_from_slice(batch.labels);
    if mixup {
        engine.input_f32("mix")?[0] = batch.mix;
        let labels2 = engine.input_i32("labels2")?;
        let per_sample = labels2.len() / n.max(1);
        let pairs = labels2.chunks_exact_mut(per_sample).zip(batch.labels.chunks_exact(per_sample).rev());
        pairs.for_each(|(to, from)| to.copy_from_slice(from));
    }
    Ok(())
}
