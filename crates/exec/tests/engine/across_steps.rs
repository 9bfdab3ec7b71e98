//! Pipelines without a flush between steps, against one rank that takes gradients at the weights of the step before.

use std::collections::BTreeMap;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Feed, Inputs, Kept, Options, Slot, StepArgs};
use polyreme_graph::{DType, Graph, Microbatch, Optimizer};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan, StepShape, Training, compile, schedule};

use crate::nets;
use crate::stages::fill;

const MICROBATCHES: usize = 3;

/// Without momentum, so that an update is a multiple of one step's gradient.
fn training() -> Training {
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    Training { optimizer, moments: DType::F32, clip: None, ema: None, scaled: false }
}

/// The learning rate of a step.
fn lr(step: usize) -> f32 {
    0.05 / (1 + step) as f32
}

struct Steps<'a> {
    graph: &'a Graph,
    /// The first of them.
    first: usize,
    /// One whose data are not finite.
    spoilt: Option<usize>,
}

impl Feed<ExecError> for Steps<'_> {
    fn load(&mut self, microbatch: usize, inputs: &mut Inputs) -> Result<f64, ExecError> {
        let step = self.first + microbatch / MICROBATCHES;
        fill(self.graph, inputs, (step * 100 + microbatch % MICROBATCHES) as u64);
        if self.spoilt == Some(step) && inputs.has("x") {
            inputs.f32("x")?[0] = f32::NAN;
        }
        Ok(1.0 / (1 + microbatch % MICROBATCHES) as f64)
    }

    fn args(&mut self, step: usize) -> Option<StepArgs> {
        Some(StepArgs { lr: lr(self.first + step), ..StepArgs::default() })
    }
}

type Tensors = BTreeMap<String, Vec<f32>>;

fn params(engine: &Engine) -> Tensors {
    let of = |Slot { name, range, .. }: Slot| (name, engine.kept(Kept::Params)[range].to_vec());
    engine.param_slots().into_iter().map(of).collect()
}

/// What a rank ends with: the losses of its steps, and its weights.
type RankOutcome = Result<(Vec<f64>, Tensors), ExecError>;

/// Some runs of steps on several stages; what each stage ends with.
fn ranks(
    graph: &Graph,
    stage: usize,
    runs: &[usize],
    kind: PipelineKind,
    spoilt: Option<usize>,
) -> Vec<RankOutcome> {
    let mesh = Mesh { stage, ..Mesh::data(1) };
    let plan = Plan { mesh, pipeline: kind, microbatches: MICROBATCHES, ..Plan::alone() };
    let rank = |comm: Comm| -> RankOutcome {
        let plan = Plan { rank: comm.rank(), ..plan.clone() };
        let body = Arc::new(compile(graph, &plan, &training(), None).unwrap());
        let samples = body.samples();
        let program = |steps: usize| {
            let of = |k: usize| Microbatch { body: 0, first_sample: k * samples };
            let all: Vec<Microbatch> = (0..steps * MICROBATCHES).map(of).collect();
            let shape = StepShape::rounds(&all, all.len());
            schedule(&plan, &training(), std::slice::from_ref(&body), &shape)
        };
        let comms = Comms::new(comm, &plan.mesh).unwrap();
        let options = Options { seed: 5, ..Options::threads(1) };
        let mut engine = Engine::join(program(runs[0]), options, comms).unwrap();
        let (mut losses, mut first) = (Vec::new(), 0);
        for &steps in runs {
            let number = engine.add(program(steps)).unwrap();
            engine.select(number);
            let args = StepArgs { lr: lr(first), ..StepArgs::default() };
            let last = engine.step_with(&mut Steps { graph, first, spoilt }, args)?;
            losses.extend(engine.earlier_steps().iter().map(|t| t.loss));
            losses.push(last.loss);
            first += steps;
        }
        Ok((losses, params(&engine)))
    };
    std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(stage).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Losses of the steps of some runs, and the weights that they end with.
fn staged(graph: &Graph, stage: usize, runs: &[usize], kind: PipelineKind) -> (Vec<f64>, Tensors) {
    let ranks: Vec<_> = ranks(graph, stage, runs, kind, None).into_iter().map(Result::unwrap).collect();
    let mut all = Tensors::new();
    for (losses, tensors) in &ranks {
        assert_eq!(*losses, ranks[0].0, "all stages know the losses");
        for (name, tensor) in tensors {
            assert!(
                all.entry(name.clone()).or_insert_with(|| tensor.clone()) == tensor,
                "{name} is the same"
            );
        }
    }
    (ranks[0].0.clone(), all)
}

/// The same on one rank: `W[t+1] = W[t] - update(gradient at W[t-1])`, where a run begins with the newest weights.
fn twin(graph: &Graph, runs: &[usize]) -> (Vec<f64>, Tensors) {
    let plan = Plan { microbatches: MICROBATCHES, ..Plan::alone() };
    let body = Arc::new(compile(graph, &plan, &training(), None).unwrap());
    let program = schedule(&plan, &training(), &[body], &plan.whole_step());
    let options = Options { seed: 5, ..Options::threads(1) };
    let mut engine = Engine::new(program, options).unwrap();
    let mut newest = params(&engine);
    let (mut losses, mut first) = (Vec::new(), 0);
    for &steps in runs {
        let mut older = newest.clone();
        for step in first..first + steps {
            for (name, tensor) in &older {
                engine.param_mut(name).unwrap().copy_from_slice(tensor);
            }
            let args = StepArgs { lr: lr(step), ..StepArgs::default() };
            losses
                .push(engine.step_with(&mut Steps { graph, first: step, spoilt: None }, args).unwrap().loss);
            let mut next = newest.clone();
            for (name, after) in params(&engine) {
                let tensor = next.get_mut(&name).unwrap();
                for ((to, before), after) in tensor.iter_mut().zip(&older[&name]).zip(after) {
                    *to -= before - after;
                }
            }
            older = std::mem::replace(&mut newest, next);
        }
        first += steps;
    }
    (losses, newest)
}

#[test]
fn gradients_are_one_step_old_and_all_else_is_as_on_one_rank() {
    for net in [nets::looped(), nets::all().into_iter().nth(2).unwrap()] {
        for runs in [&[4][..], &[1, 1], &[2, 3]] {
            let (losses, weights) = twin(&net.step, runs);
            for stages in 2..=4 {
                let (got, tensors) = staged(&net.step, stages, runs, PipelineKind::TwoBw);
                let what = format!("{}, runs of {runs:?} steps, {stages} stages", net.name);
                for (a, b) in got.iter().zip(&losses) {
                    assert!((a - b).abs() < 1e-5 * b.abs(), "{what}: {got:?} for {losses:?}");
                }
                assert_eq!((got.len(), tensors.len()), (losses.len(), weights.len()), "{what}");
                for (name, want) in &weights {
                    let apart: f64 =
                        tensors[name].iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                    let size: f64 = want.iter().map(|x| f64::from(*x).powi(2)).sum();
                    assert!(apart.sqrt() <= 1e-5 * size.sqrt() + 1e-6, "{what}: {name} is {apart} away");
                }
            }
        }
    }
}

#[test]
fn runs_of_one_step_have_the_bits_of_1f1b() {
    // Dropout too: the masks of a microbatch's backward pass are those of its forward pass.
    let net = &nets::all()[0];
    let flushed = staged(&net.step, 3, &[1, 1], PipelineKind::OneFOneB);
    assert!(staged(&net.step, 3, &[1, 1], PipelineKind::TwoBw) == flushed);
}

#[test]
fn the_number_of_stages_changes_no_bit() {
    // Stages end steps at different times, and draw dropout masks before and after.
    let net = &nets::all()[0];
    let two = staged(&net.step, 2, &[3], PipelineKind::TwoBw);
    for stages in 3..=4 {
        assert!(staged(&net.step, stages, &[3], PipelineKind::TwoBw) == two, "{stages} stages");
    }
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_on_all_stages() {
    let net = nets::looped();
    for spoilt in 0..4 {
        for outcome in ranks(&net.step, 3, &[4], PipelineKind::TwoBw, Some(spoilt)) {
            assert!(matches!(outcome, Err(ExecError::NotFinite { .. })), "{outcome:?}");
        }
    }
}

#[test]
fn what_needs_a_flush_is_refused() {
    let net = nets::looped();
    let mesh = Mesh { stage: 2, ..Mesh::data(1) };
    let plan = Plan { mesh, pipeline: PipelineKind::TwoBw, microbatches: 4, ..Plan::alone() };
    let why =
        |plan: &Plan, training: &Training| compile(&net.step, plan, training, None).unwrap_err().to_string();
    let clipped = why(&plan, &Training { clip: Some(1.0), ..training() });
    assert!(clipped.contains("2bw") && clipped.contains("`train.clip`"), "{clipped}");
    let data = why(&Plan { mesh: Mesh { data: 2, ..mesh }, ..plan.clone() }, &training());
    assert!(data.contains("`parallel.data`"), "{data}");
    let shards = why(&Plan { shards: Some(4), ..plan.clone() }, &training());
    assert!(shards.contains("`parallel.reproducible`"), "{shards}");
    let few = why(&Plan { mesh: Mesh { stage: 6, ..mesh }, microbatches: 2, ..plan }, &training());
    assert!(few.contains("5 or more microbatches"), "{few}");
}
