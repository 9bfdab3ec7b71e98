//! Runs of steps without a flush between them, against a twin on one rank that takes gradients at the weights of the step
//! before: losses, norms, weights; with tied weights, clipping, several data ranks, split matrices, dropout and running statistics.

use std::collections::BTreeMap;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Counted, Engine, ExecError, Feed, Inputs, Kept, Options, Slot, StepArgs, Totals};
use polyreme_graph::{Axis, DType, Graph, Keeps, Microbatch, Optimizer};
use polyreme_kernels::tally::Tally;
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan, StepShape, Training, compile, schedule};

use crate::nets;
use crate::stages::fill;

const MICROBATCHES: usize = 3;

/// Without momentum, so that an update is a multiple of one step's gradient.
fn training(clip: Option<f64>) -> Training {
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    Training { optimizer, moments: DType::F32, clip, ema: None, scaled: false }
}

/// The learning rate of a step.
fn lr(step: usize) -> f32 {
    0.05 / (1 + step) as f32
}

/// Which steps are run, and how.
#[derive(Clone, Copy)]
struct RunCase<'a> {
    graph: &'a Graph,
    mesh: Mesh,
    kind: PipelineKind,
    /// How many steps each run has.
    runs: &'a [usize],
    clip: Option<f64>,
    /// A step whose data are not finite.
    spoilt: Option<usize>,
}

impl<'a> RunCase<'a> {
    fn new(graph: &'a Graph, stage: usize, runs: &'a [usize]) -> RunCase<'a> {
        let mesh = Mesh { stage, ..Mesh::data(1) };
        RunCase { graph, mesh, kind: PipelineKind::TwoBw, runs, clip: None, spoilt: None }
    }
}

/// The samples of some steps: those of a step are cut into microbatches, and each of these into parts for data ranks.
struct Steps<'a> {
    graph: &'a Graph,
    /// The first of them.
    first: usize,
    spoilt: Option<usize>,
    /// A data rank and how many there are.
    data: (usize, usize),
    /// How many microbatches are fed for each step.
    per_step: usize,
}

impl Steps<'_> {
    /// The number of a microbatch of this rank among all of its step.
    fn number(&self, microbatch: usize) -> usize {
        microbatch % self.per_step * self.data.1 + self.data.0
    }
}

impl Feed<ExecError> for Steps<'_> {
    fn load(&mut self, microbatch: usize, inputs: &mut Inputs) -> Result<Counted, ExecError> {
        let (step, number) = (self.first + microbatch / self.per_step, self.number(microbatch));
        fill(self.graph, inputs, (step * 100 + number) as u64);
        if self.spoilt == Some(step) && inputs.has("x") {
            inputs.f32("x")?[0] = f32::NAN;
        }
        // Sample `number` of the step, as if steps were epochs.
        let mut samples = Tally::default();
        samples.note(step as u64, number as u64);
        Ok(Counted { weight: 1.0 / (1 + number) as f64, samples })
    }

    fn args(&mut self, step: usize) -> Option<StepArgs> {
        Some(StepArgs { lr: lr(self.first + step), extra: [1.0, 0.5], ..StepArgs::default() })
    }
}

type Tensors = BTreeMap<String, Vec<f32>>;

fn params(engine: &Engine) -> Tensors {
    let of = |Slot { name, range, .. }: Slot| (name, engine.kept(Kept::Params)[range].to_vec());
    engine.param_slots().into_iter().map(of).collect()
}

/// What a step came to: its loss, the norm of its gradients if they are clipped, and its samples.
type StepTotals = (f64, Option<f64>, Tally);

fn of_totals(totals: &Totals) -> StepTotals {
    (totals.loss, totals.grad_norm, totals.samples)
}

/// What a rank ends with: the totals of its steps, and its weights.
type RankOutcome = Result<(Vec<StepTotals>, Tensors), ExecError>;

/// What each rank of a mesh ends with.
fn ranks(case: RunCase) -> Vec<RankOutcome> {
    let RunCase { graph, mesh, kind, runs, clip, spoilt } = case;
    let plan = Plan { mesh, pipeline: kind, microbatches: MICROBATCHES, ..Plan::alone() };
    let rank = |comm: Comm| -> RankOutcome {
        let plan = Plan { rank: comm.rank(), ..plan.clone() };
        let data = (plan.mesh.place(plan.rank, Axis::Data), plan.ranks());
        let training = training(clip);
        let body = Arc::new(compile(graph, &plan, &training, None).unwrap());
        let samples = body.samples();
        let mut feed = Steps { graph, first: 0, spoilt, data, per_step: MICROBATCHES };
        let of = |k: usize| Microbatch { body: 0, first_sample: feed.number(k) * samples };
        let one: Vec<Microbatch> = (0..MICROBATCHES).map(of).collect();
        let program = |steps: usize| {
            let shape = StepShape::rounds(&one, one.len()).times(steps);
            schedule(&plan, &training, std::slice::from_ref(&body), &shape)
        };
        let comms = Comms::new(comm, &plan.mesh).unwrap();
        let options = Options { seed: 5, ..Options::threads(1) };
        let mut engine = Engine::join(program(runs[0]), options, comms).unwrap();
        let mut totals = Vec::new();
        for &steps in runs {
            let number = engine.add(program(steps)).unwrap();
            engine.select(number);
            let args = feed.args(0).unwrap();
            let last = engine.step_with(&mut feed, args)?;
            let n = mesh.ranks() as f64;
            assert_eq!(last.extra, [n, n / 2.0], "the caller's numbers are those of all ranks");
            totals.extend(engine.earlier_steps().iter().map(of_totals));
            totals.push(of_totals(&last));
            feed.first += steps;
        }
        Ok((totals, params(&engine)))
    };
    std::thread::scope(|s| {
        let comms = Comm::local(mesh.ranks()).into_iter();
        let ranks: Vec<_> = comms.map(|comm| s.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// Totals of the steps of some runs, and the weights that they end with; of split matrices the parts of the first rank.
fn staged(case: RunCase) -> (Vec<StepTotals>, Tensors) {
    let ranks: Vec<_> = ranks(case).into_iter().map(Result::unwrap).collect();
    let mut all = Tensors::new();
    for (rank, (totals, tensors)) in ranks.iter().enumerate() {
        assert_eq!(*totals, ranks[0].0, "all ranks know the totals");
        if case.mesh.place(rank, Axis::Tensor) > 0 {
            continue;
        }
        for (name, tensor) in tensors {
            assert!(
                all.entry(name.clone()).or_insert_with(|| tensor.clone()) == tensor,
                "{name} is the same on all ranks"
            );
        }
    }
    (ranks[0].0.clone(), all)
}

/// The same on one rank: `W[t+1] = W[t] - update(gradient at W[t-1])`, where a run begins with the newest weights.
fn twin(case: RunCase) -> (Vec<StepTotals>, Tensors) {
    let (graph, per_step) = (case.graph, MICROBATCHES * case.mesh.data);
    let plan = Plan { microbatches: per_step, ..Plan::alone() };
    let training = training(case.clip);
    let body = Arc::new(compile(graph, &plan, &training, None).unwrap());
    let samples = body.samples();
    let of = |k: usize| Microbatch { body: 0, first_sample: k * samples };
    let shape = StepShape::rounds(&(0..per_step).map(of).collect::<Vec<_>>(), per_step);
    let program = schedule(&plan, &training, &[body], &shape);
    let options = Options { seed: 5, ..Options::threads(1) };
    let mut engine = Engine::new(program, options).unwrap();
    let mut newest = params(&engine);
    let (mut totals, mut first) = (Vec::new(), 0);
    for &steps in case.runs {
        let mut older = newest.clone();
        for step in first..first + steps {
            for (name, tensor) in &older {
                engine.param_mut(name).unwrap().copy_from_slice(tensor);
            }
            let mut feed = Steps { graph, first: step, spoilt: None, data: (0, 1), per_step };
            let args = feed.args(0).unwrap();
            totals.push(of_totals(&engine.step_with(&mut feed, args).unwrap()));
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
    (totals, newest)
}

/// Losses, norms and weights are the twin's, up to rounding.
#[track_caller]
fn agree(case: RunCase, want: &(Vec<StepTotals>, Tensors), what: &str) {
    let (got, tensors) = staged(case);
    let (totals, weights) = want;
    assert_eq!((got.len(), tensors.len()), (totals.len(), weights.len()), "{what}");
    let near = |a: f64, b: f64| (a - b).abs() < 1e-5 * b.abs();
    for (a, b) in got.iter().zip(totals) {
        let norms = a.1.zip(b.1).is_none_or(|(a, b)| near(a, b));
        assert!(near(a.0, b.0) && norms && a.1.is_some() == b.1.is_some(), "{what}: {got:?} for {totals:?}");
        assert_eq!(a.2, b.2, "{what}: the samples of a step");
    }
    // Parts of matrices are compared by the norms above.
    for (name, want) in weights.iter().filter(|_| case.mesh.tensor == 1) {
        let apart: f64 = tensors[name].iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let size: f64 = want.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!(apart.sqrt() <= 1e-5 * size.sqrt() + 1e-6, "{what}: {name} is {apart} away");
    }
}

#[test]
fn gradients_are_one_step_old_and_all_else_is_as_on_one_rank() {
    // Tied weights; dropout and running statistics; attention.
    let all = nets::all();
    for net in [&nets::looped(), &all[0], &all[2]] {
        for runs in [&[4][..], &[1, 1], &[2, 3]] {
            for clip in [None, Some(0.05)] {
                let case = RunCase { clip, ..RunCase::new(&net.step, 1, runs) };
                let want = twin(case);
                for stage in 2..=4 {
                    let what = format!("{}, runs of {runs:?} steps, {stage} stages, clip {clip:?}", net.name);
                    agree(RunCase { mesh: Mesh { stage, ..case.mesh }, ..case }, &want, &what);
                }
            }
        }
    }
}

#[test]
fn data_ranks_add_up_the_gradients_of_each_step() {
    let all = nets::all();
    for net in [&nets::looped(), &all[0], &all[2]] {
        for clip in [None, Some(0.05)] {
            let runs = &[3, 1, 2][..];
            let case = RunCase { clip, mesh: Mesh::data(2), ..RunCase::new(&net.step, 1, runs) };
            let want = twin(case);
            for stage in [2, 4] {
                let what = format!("{}, 2 data ranks, {stage} stages, clip {clip:?}", net.name);
                agree(RunCase { mesh: Mesh { stage, ..case.mesh }, ..case }, &want, &what);
            }
        }
    }
}

#[test]
fn runs_of_one_step_have_the_bits_of_1f1b() {
    // Dropout too: the masks of a microbatch's backward pass are those of its forward pass.
    let net = &nets::all()[0];
    let case = RunCase { clip: Some(0.1), ..RunCase::new(&net.step, 3, &[1, 1]) };
    let flushed = staged(RunCase { kind: PipelineKind::OneFOneB, ..case });
    assert!(staged(case) == flushed);
}

#[test]
fn the_first_step_of_a_run_has_the_gradients_of_1f1b() {
    let net = &nets::all()[0];
    let case = RunCase::new(&net.step, 3, &[2]);
    let flushed = staged(RunCase { kind: PipelineKind::OneFOneB, runs: &[1, 1], ..case });
    let (totals, _) = staged(case);
    assert_eq!(totals[0], flushed.0[0]);
    assert_ne!(totals[1], flushed.0[1], "the second has old ones");
}

#[test]
fn the_number_of_stages_changes_no_bit() {
    // Stages end steps at different times, and draw dropout masks before and after.
    let net = &nets::all()[0];
    let two = staged(RunCase::new(&net.step, 2, &[3]));
    for stages in 3..=4 {
        assert!(staged(RunCase::new(&net.step, stages, &[3])) == two, "{stages} stages");
    }
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_on_all_stages() {
    let net = nets::looped();
    for spoilt in 0..4 {
        for clip in [None, Some(1.0)] {
            let case = RunCase { spoilt: Some(spoilt), clip, ..RunCase::new(&net.step, 3, &[4]) };
            let outcomes = ranks(case);
            let here = |outcome: &RankOutcome| match outcome {
                Err(ExecError::NotFinite { here, place, .. }) => *here && place.is_some(),
                outcome => panic!("{outcome:?}"),
            };
            assert!(
                outcomes.iter().any(here),
                "the stage with the loss knows where it comes from: {outcomes:?}"
            );
        }
    }
}

#[test]
fn what_needs_a_flush_is_refused() {
    let net = nets::looped();
    let mesh = Mesh { stage: 2, ..Mesh::data(2) };
    let plan = Plan { mesh, pipeline: PipelineKind::TwoBw, microbatches: 4, ..Plan::alone() };
    let why =
        |plan: &Plan, training: &Training| compile(&net.step, plan, training, None).unwrap_err().to_string();
    let row = |plan: Plan, scaled: bool, said: &str| {
        let got = why(&plan, &Training { scaled, ..training(None) });
        assert!(got.contains(said), "{got}");
    };
    row(plan.clone(), true, "\"2bw\"` does not work with `train.precision = \"f16\"`");
    row(Plan { shards: Some(4), ..plan.clone() }, false, "`parallel.reproducible`");
    row(Plan { keeps: Keeps::OwnMoments, ..plan.clone() }, false, "`parallel.shard_optimizer`");
    row(Plan { shard_weights: true, ..plan.clone() }, false, "`parallel.shard_weights`");
    row(Plan { mesh: Mesh { stage: 6, ..mesh }, microbatches: 2, ..plan }, false, "5 or more microbatches");
}
