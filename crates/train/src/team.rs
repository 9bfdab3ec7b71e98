//! The engine of one rank's training: a program for each length of pieces, all over the same weights, and one for
//! evaluations.
//!
//! Every rank has its own. What is collective says so: all ranks call it at the same time.

use std::time::Duration;

use polyreme_collective::{Comm, Reduce};
use polyreme_data::{Spec, Values};
use polyreme_exec::{Engine, ExecError, Isa, Kept, Options, Slot, Totals, floats};
use polyreme_graph::{Optimizer, Program};
use polyreme_parallel::DataPlan;

use crate::error::TrainError;
use crate::judge::{Judge, Trial};
use crate::lower::{Loss, Lowering, training_graph};
use crate::mixup;
use crate::net::Net;
use crate::pace::{Part, Piece};
use crate::talk;

/// How engines are made.
#[derive(Clone, Debug)]
pub struct TeamOptions {
    /// Threads of each rank.
    pub threads: usize,
    /// The instructions that kernels may use.
    pub isa: Isa,
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
    /// What the training of one rank may take.
    pub memory_bytes: Option<usize>,
    /// Whether each rank keeps the optimizer's state of its own range only, and weights are held once where ranks
    /// share memory; `None` for where they do. Over a network it costs overlap: updated parameters are sent when
    /// there is nothing left to compute.
    pub sharded: Option<bool>,
    /// Whether each rank keeps the gradients of its own range only; everything is then sharded, whatever `sharded` says.
    /// Every piece of a step is summed over the ranks.
    pub shard_gradients: bool,
    /// Gradients are sent in buckets of at least so many bytes.
    pub bucket_bytes: usize,
    /// Whether batch norms take their statistics over all ranks.
    pub sync_batch_norm: bool,
    /// Reproducible: into how many logical shards a step is cut.
    pub shards: Option<usize>,
    /// Whether a lone rank's step is one piece: it then updates parameters while it computes their gradients.
    pub one_piece: bool,
}

impl TeamOptions {
    /// How the program of a rank is made. `shares_memory` says whether the ranks can hold the weights together.
    pub fn lowering(&self, rank: usize, ranks: usize, shares_memory: bool) -> Lowering {
        let sharded = self.shard_gradients || self.sharded.unwrap_or(shares_memory);
        let plan = DataPlan {
            rank,
            ranks,
            sharded,
            shard_gradients: self.shard_gradients,
            shared_weights: sharded && shares_memory && ranks > 1,
            bucket_bytes: self.bucket_bytes,
            sync_batch_norm: self.sync_batch_norm,
            shards: self.shards,
            at_once: self.one_piece,
        };
        let (budget_bytes, threads) = (self.memory_bytes, self.threads);
        Lowering { optimizer: self.optimizer, clip: self.clip, plan, budget_bytes, threads }
    }
}

/// The engine of one rank.
pub struct Team {
    options: TeamOptions,
    lowering: Lowering,
    net: Net,
    spec: Spec,
    input: &'static str,
    engine: Engine,
    /// The lengths of pieces that there are programs for, and their numbers.
    programs: Vec<(usize, usize)>,
    trial: Option<Trial>,
    /// Labels of the step that is under way, over all ranks.
    step_labels: f64,
    /// Where the first number of this step came from that is not finite.
    bad: Option<String>,
    /// The averaged parameters; rank 0's, and empty without.
    average: Vec<f32>,
}

/// What a finished step came to, over all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepResult {
    /// The mean loss of its samples.
    pub loss: f64,
    /// The gradients' norm, if they are clipped.
    pub grad_norm: Option<f64>,
    /// The caller's numbers, added up over the ranks.
    pub extra: [f64; 2],
    /// How long this rank waited for others.
    pub waited: Duration,
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
    /// Compiles and reserves everything for one rank's training. Collective; the weights are those of rank 0.
    pub fn new(
        net: &Net,
        spec: &Spec,
        part: &Part,
        options: TeamOptions,
        mut comm: Comm,
    ) -> Result<Team, TrainError> {
        let lowering = options.lowering(comm.rank(), comm.size(), comm.shares_memory());
        let lengths = part.lengths();
        let compiled = training_graph(net, spec, lengths[0], options.loss).and_then(|g| lowering.program(&g));
        // The others would wait for this rank.
        let program = compiled.inspect_err(|error| comm.fail(&error.to_string()))?;
        let TeamOptions { threads, isa, seed, .. } = options;
        let exec = Options { threads, isa, seed };
        let rank = comm.rank();
        let mut engine = Engine::join(program, exec, comm)?;
        let averaged = if options.ema.is_some() && rank == 0 { engine.kept(Kept::Params).len() } else { 0 };
        let room = floats(averaged, "averaged parameters");
        let mut average = room.inspect_err(|error| engine.comm().fail(&error.to_string()))?;
        average.copy_from_slice(&engine.kept(Kept::Params)[..averaged]);
        let mut team = Team {
            lowering,
            net: net.clone(),
            spec: spec.clone(),
            input: net.input(spec, 1, true).name,
            engine,
            programs: vec![(lengths[0], 0)],
            trial: None,
            step_labels: 1.0,
            bad: None,
            average,
            options,
        };
        let ready = team.set_class_weights().and_then(|()| team.prepare(&lengths));
        ready.inspect_err(|error| team.comm().fail(&error.to_string()))?;
        Ok(team)
    }

    /// Compiles for pieces of these lengths, as far as that has not been done.
    pub fn prepare(&mut self, lengths: &[usize]) -> Result<(), TrainError> {
        for &n in lengths {
            if self.programs.iter().all(|(len, _)| *len != n) {
                let graph = training_graph(&self.net, &self.spec, n, self.options.loss)?;
                let number = self.engine.add_batch(self.lowering.program(&graph)?)?;
                self.programs.push((n, number));
                self.engine.select(number);
                self.set_class_weights()?;
            }
        }
        Ok(())
    }

    /// Gives back the memory of programs for other lengths than these.
    pub fn keep_only(&mut self, lengths: &[usize]) {
        let engine = &mut self.engine;
        self.programs.retain(|(len, number)| {
            let kept = *number == 0 || lengths.contains(len);
            if !kept {
                engine.remove_batch(*number);
            }
            kept
        });
    }

    /// Compiles for evaluations of at most `n` samples of `spec` at once.
    pub fn prepare_trial(&mut self, spec: &Spec, n: usize) -> Result<(), TrainError> {
        let (graph, mut trial) = Trial::new(&self.net, spec, n)?;
        trial.number = self.engine.add_batch(Program::forward(&graph))?;
        self.trial = Some(trial);
        Ok(())
    }

    /// The judge of this rank, with the weights that are being learnt; `None` before [`Team::prepare_trial`].
    pub fn judge(&mut self) -> Option<Judge<&mut Engine>> {
        let trial = self.trial?;
        Some(Judge::over(&mut self.engine, trial))
    }

    /// Begins a step of `samples` samples over all ranks.
    pub fn begin(&mut self, samples: usize) {
        self.step_labels = (samples * self.spec.n_labels()).max(1) as f64;
        self.bad = None;
        // A rank without samples of the step still takes part in its exchanges.
        self.engine.select(0);
        self.engine.begin_step();
    }

    /// Runs a piece that is not the last of this rank's step; of a reproducible step, any.
    pub fn piece(&mut self, piece: Piece, batch: Option<Batch>) -> Result<(), TrainError> {
        let weight = batch.map(|batch| self.feed(piece, batch)).transpose()?;
        match (self.options.shards, weight) {
            (Some(_), weight) => self.engine.shard(piece.number, weight)?,
            (None, Some(weight)) => self.engine.accumulate(weight)?,
            (None, None) => return Ok(()),
        }
        let loss = if weight.is_some() { self.engine.output("loss")?[0] } else { 0.0 };
        if !loss.is_finite() && self.bad.is_none() {
            self.find_bad()?;
        }
        Ok(())
    }

    /// Takes part in a piece of the step of which this rank has no samples. Where the pieces of a step are summed one by
    /// one, all ranks call this or [`Team::piece`] as often as the others; otherwise it does nothing.
    pub fn empty_piece(&mut self) -> Result<(), TrainError> {
        match self.engine.program().buffers {
            Some(_) => Ok(self.engine.accumulate_empty()?),
            None => Ok(()),
        }
    }

    /// Ends a step, with this rank's last piece if it has one and the step is not cut into shards. Collective.
    pub fn finish(
        &mut self,
        last: Option<(Piece, Batch)>,
        lr: f32,
        extra: [f64; 2],
    ) -> Result<StepResult, TrainError> {
        let weight = last.map(|(piece, batch)| self.feed(piece, batch)).transpose()?;
        let outcome = match (self.options.shards, weight) {
            (Some(_), _) => self.engine.finish_shards(lr, extra),
            (None, Some(weight)) => self.engine.finish(weight, lr, extra),
            (None, None) => self.engine.finish_empty(lr, extra),
        };
        let Totals { loss, extra, grad_norm, waited, .. } = match outcome {
            Err(ExecError::NotFinite { loss, here }) => return Err(self.not_finite(loss, here)?),
            outcome => outcome?,
        };
        if let (Some(decay), false) = (self.options.ema, self.average.is_empty()) {
            let decay = warm_decay(decay, self.engine.steps_done());
            self.engine.average_params_into(&mut self.average, decay);
        }
        Ok(StepResult { loss, grad_norm, extra, waited })
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.engine.steps_done()
    }

    /// The engine.
    pub fn learner(&self) -> &Engine {
        &self.engine
    }

    /// The engine, for what all ranks do together.
    pub fn learner_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// This rank's end of its group.
    pub fn comm(&mut self) -> &mut Comm {
        self.engine.comm()
    }

    /// The averaged parameters, laid out as the learner's; empty without averaging, and on other ranks than 0.
    pub fn average(&self) -> &[f32] {
        &self.average
    }

    /// Lets rank 0 set weights, states and averages; then all ranks have the weights and states. Collective.
    pub fn exclusively(
        &mut self,
        write: impl FnOnce(&mut Engine, &mut [f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let average = &mut self.average;
        self.engine.exclusively(|engine| write(engine, average))
    }

    /// How many moments the optimizer keeps for each parameter.
    pub fn n_moments(&self) -> usize {
        self.options.optimizer.state_per_param()
    }

    /// Puts the averaged parameters in the place of those that are being learnt; the second time, back. Collective.
    /// Nothing without averaging.
    pub fn swap_average(&mut self) -> Result<(), TrainError> {
        if self.options.ema.is_none() {
            return Ok(());
        }
        self.exclusively(|engine, average| {
            engine.kept_mut(Kept::Params).swap_with_slice(average);
            Ok(())
        })
    }

    /// The parameters that are evaluated and shipped: the averaged ones if there are. Rank 0's to ask.
    pub fn shipped(&self) -> (Vec<Slot>, &[f32]) {
        let params = if self.average.is_empty() { self.engine.kept(Kept::Params) } else { &self.average };
        (self.engine.param_slots(), params)
    }

    /// Chooses the program for a piece, and fills its inputs. Returns the weight of the piece in its step.
    fn feed(&mut self, piece: Piece, batch: Batch) -> Result<f64, TrainError> {
        self.prepare(&[piece.len])?;
        let program = self.programs.iter().find(|(len, _)| *len == piece.len);
        self.engine.select(program.expect("it was prepared").1);
        fill(&mut self.engine, self.input, piece.len, batch, self.options.loss.mixup)?;
        self.engine.set_first_sample(piece.offset as u64);
        Ok(label_weight(batch.labels, &self.options.class_weights) / self.step_labels)
    }

    /// Notes where the last run's loss got lost.
    fn find_bad(&mut self) -> Result<(), TrainError> {
        let place = self.engine.find_non_finite()?;
        self.bad = Some(place.map_or_else(|| "the loss itself".into(), |place| place.to_string()));
        Ok(())
    }

    /// All ranks come here together: the first one that knows where it came from tells the others.
    fn not_finite(&mut self, loss: f64, here: bool) -> Result<TrainError, TrainError> {
        if here && self.bad.is_none() {
            self.find_bad()?;
        }
        let (step, bad) = (self.engine.steps_done(), self.bad.take());
        let comm = self.engine.comm();
        let mine = if bad.is_some() { comm.rank() } else { comm.size() };
        let mut first = [mine as i64];
        comm.all_reduce(&mut first, Reduce::Min)?;
        let place = match usize::try_from(first[0]) {
            Ok(rank) if rank < comm.size() => {
                let text = talk::broadcast(comm, bad.unwrap_or_default().into_bytes(), rank)?;
                String::from_utf8_lossy(&text).into_owned()
            }
            // Every rank's own loss is finite, and their sum is not.
            _ => "the sum over the ranks".into(),
        };
        Ok(TrainError::NotFinite { step, loss, place })
    }

    /// Class weights are an input that stays.
    fn set_class_weights(&mut self) -> Result<(), TrainError> {
        if self.options.loss.class_weights {
            self.engine.input_f32("class_weights")?.copy_from_slice(&self.options.class_weights);
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

fn fill(engine: &mut Engine, input: &str, n: usize, batch: Batch, mixup: bool) -> Result<(), TrainError> {
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
