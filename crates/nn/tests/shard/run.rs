//! Steps of one rank and of several that shard weights, and how they are compared.

use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Inputs, Isa, Kept, Options, StepArgs};
use polyreme_graph::graph::Stored;
use polyreme_graph::{
    Axis, Body, Builder, DType, Graph, Microbatch, Optimizer, Precision, Program, Shape, differentiate,
};
use polyreme_nn::model::{Model, TraceOptions};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Budget, Mesh, Norms, Plan, StepShape, Training, compile, schedule};

use crate::random::SampleRandom;

const STEPS: usize = 4;

/// A model, the batch of all ranks together that it is traced for, and how ranks split a step.
#[derive(Clone)]
pub(crate) struct ShardCase {
    pub(crate) name: &'static str,
    pub(crate) model: Model,
    pub(crate) options: TraceOptions,
    pub(crate) precision: Precision,
    pub(crate) optimizer: Optimizer,
    pub(crate) lr: f32,
    pub(crate) data: usize,
    pub(crate) tensor: usize,
    pub(crate) stage: usize,
    pub(crate) accumulate: usize,
    pub(crate) clip: Option<f64>,
    pub(crate) ema: Option<f64>,
    /// The least share of the elements that is sharded.
    pub(crate) sharded_min: f64,
    /// In which order stages run microbatches.
    pub(crate) pipeline: PipelineKind,
    /// What a rank may use of what it would; the rest is saved by recomputation.
    pub(crate) memory: Option<f64>,
}

/// The samples of each microbatch of each rank of the data axis.
type RankSamples = Vec<Vec<Range<usize>>>;

impl ShardCase {
    fn ranks(&self) -> usize {
        self.data * self.tensor * self.stage
    }

    /// Each microbatch is split over the ranks.
    fn samples(&self) -> RankSamples {
        assert!(self.options.batch.is_multiple_of(self.accumulate * self.data), "{}", self.name);
        let each = self.options.batch / self.accumulate / self.data;
        let of = |rank: usize| {
            (0..self.accumulate).map(move |k| (k * self.data + rank) * each).map(|at| at..at + each).collect()
        };
        (0..self.data).map(of).collect()
    }

    pub(crate) fn plan(&self, rank: usize) -> Plan {
        Plan {
            mesh: Mesh { tensor: self.tensor, stage: self.stage, ..Mesh::data(self.data) },
            rank,
            precision: self.precision.clone(),
            shard_weights: true,
            norms: Norms::Synchronised,
            microbatches: self.accumulate,
            bucket_bytes: 4096,
            pipeline: self.pipeline,
            ..Plan::alone()
        }
    }

    pub(crate) fn training(&self) -> Training {
        let &ShardCase { optimizer, clip, ema, .. } = self;
        let scaled = self.precision.scales_loss();
        Training { optimizer, moments: DType::F32, clip, ema, scaled }
    }

    /// The body for this number of samples, within the rank's memory.
    fn body(&self, plan: &Plan, batch: usize) -> Body {
        let (step, training) = (self.step_graph(batch), self.training());
        let body = compile(&step, plan, &training, None).unwrap();
        let Some(share) = self.memory.filter(|_| plan.ranks() > 1) else { return body };
        let measure = |program: &Program| Engine::footprint(program, 1, Isa::detect()).activations;
        let whole = measure(&schedule(plan, &training, &[Arc::new(body.clone())], &plan.whole_step()));
        let budget = Budget { bytes: (whole as f64 * share) as usize, measure: &measure };
        let again = compile(&step, plan, &training, Some(budget)).unwrap();
        let count = |body: &Body, name: &str| body.graph.nodes.iter().filter(|n| n.op.name() == name).count();
        assert!(again.graph.nodes.len() > body.graph.nodes.len(), "something is computed again");
        assert_eq!(count(&again, "axis_scatter"), count(&body, "axis_scatter"));
        again
    }

    /// The step of a microbatch of this number of samples.
    pub(crate) fn step_graph(&self, batch: usize) -> Graph {
        let (model, options) = (&self.model, &TraceOptions { batch, ..self.options });
        let mut b = Builder::new();
        let input = model.input(options);
        let x = b.input(input.name, input.shape, input.dtype).unwrap();
        let labels = b.input("labels", [model.n_labels(options)], DType::I32).unwrap();
        let weight = b.input("weight", [1], DType::F32).unwrap();
        let logits = model.logits(&mut b, x, true).unwrap();
        let loss = b.layer("loss", |b| b.cross_entropy(logits, labels, None, options.loss)).unwrap();
        let scalar = b.reshape(weight, Shape::scalar()).unwrap();
        let weighted = b.mul(loss, scalar).unwrap();
        differentiate(&b.finish(&[("loss", loss), ("weighted", weighted)]), weighted).unwrap()
    }
}

/// A parameter or a state of one rank: what it is, and its elements at the start, at the end, and their average.
struct HeldShard {
    stored: Stored,
    dims: Vec<usize>,
    first: Vec<f32>,
    last: Vec<f32>,
    average: Vec<f32>,
}

struct ShardOutcome {
    held: Vec<HeldShard>,
    losses: Vec<f32>,
}

/// The microbatches of the rank's program and the bodies that they run, one for each number of samples.
fn bodies(case: &ShardCase, plan: &Plan, samples: &RankSamples) -> (Vec<Arc<Body>>, StepShape) {
    let mine = &samples[plan.mesh.place(plan.rank, Axis::Data)];
    let mut sizes: Vec<usize> = mine.iter().map(Range::len).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.is_empty() {
        sizes.push(1);
    }
    let body = |&n: &usize| Arc::new(case.body(plan, n));
    let number = |n: usize| sizes.iter().position(|size| *size == n).unwrap();
    let microbatch = |r: &Range<usize>| Microbatch { body: number(r.len()), first_sample: r.start };
    let rounds = samples.iter().map(Vec::len).max().unwrap();
    let microbatches: Vec<_> = mine.iter().map(microbatch).collect();
    (sizes.iter().map(body).collect(), StepShape::rounds(&microbatches, rounds))
}

fn run_rank(case: &ShardCase, samples: &RankSamples, comm: Comm) -> Result<ShardOutcome, ExecError> {
    let plan = case.plan(comm.rank());
    let training = case.training();
    let mine = &samples[plan.mesh.place(plan.rank, Axis::Data)];
    let (bodies, shape) = bodies(case, &plan, samples);
    let program = schedule(&plan, &training, &bodies, &shape);
    let comms = Comms::new(comm, &plan.mesh)?;
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comms)?;
    let graph = &bodies[0].graph;
    let mut held: Vec<HeldShard> = Vec::new();
    for stored in graph.params.iter().chain(&graph.states) {
        let dims = graph.shape(stored.value).dims().to_vec();
        let first = engine.param(&stored.name).or_else(|_| engine.state(&stored.name))?.to_vec();
        held.push(HeldShard { stored: stored.clone(), dims, first, last: Vec::new(), average: Vec::new() });
    }
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            let range = mine[microbatch].clone();
            feed(case, step, &range, inputs)?;
            Ok(range.len() as f64 / case.options.batch as f64)
        };
        let args = StepArgs { lr: case.lr, loss_scale: 4.0, ..StepArgs::default() };
        losses.push(engine.step_with(&mut load, args)?.loss as f32);
    }
    for held in &mut held {
        let name = &held.stored.name;
        held.last = engine.param(name).or_else(|_| engine.state(name))?.to_vec();
        let slot = engine.param_slots().into_iter().find(|slot| slot.name == *name);
        if let Some(slot) = slot.filter(|_| !engine.kept(Kept::Average).is_empty()) {
            held.average = engine.kept(Kept::Average)[slot.range].to_vec();
        }
    }
    engine.comm().barrier()?;
    Ok(ShardOutcome { held, losses })
}

/// The samples of a range, of those that all ranks are fed in a step. A stage is fed what its layers read.
fn feed(case: &ShardCase, step: usize, samples: &Range<usize>, inputs: &mut Inputs) -> Result<(), ExecError> {
    let mut random = SampleRandom::new(step as u64);
    let input = case.model.input(&case.options);
    let n = input.shape.numel();
    let ids: Vec<_> = (0..n).map(|_| random.below(16) as i32).collect();
    let numbers: Vec<_> = (0..n).map(|_| random.uniform(-1.0, 1.0)).collect();
    match (inputs.has(input.name), input.dtype) {
        (false, _) => {}
        (true, DType::I32) => take(inputs.i32(input.name)?, &ids, samples),
        (true, _) => take(inputs.f32(input.name)?, &numbers, samples),
    }
    let (n, classes) = (case.model.n_labels(&case.options), case.model.classes());
    let labels: Vec<_> = (0..n).map(|_| random.below(classes) as i32).collect();
    if inputs.has("labels") {
        take(inputs.i32("labels")?, &labels, samples);
    }
    Ok(())
}

/// These samples of what all ranks are fed.
fn take<T: Copy>(into: &mut [T], all: &[T], samples: &Range<usize>) {
    let each = into.len() / samples.len();
    into.copy_from_slice(&all[samples.start * each..][..into.len()]);
}

fn run(case: &ShardCase, samples: &RankSamples) -> Vec<ShardOutcome> {
    std::thread::scope(|s| {
        let rank = |comm| {
            s.spawn(move || run_rank(case, samples, comm).unwrap_or_else(|e| panic!("{}: {e}", case.name)))
        };
        let ranks: Vec<_> = Comm::local(case.ranks()).into_iter().map(rank).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// The elements of a whole tensor that a rank has.
fn taken(whole: &[f32], held: &HeldShard) -> Vec<f32> {
    held.stored.runs(&held.dims).flat_map(|run| &whole[run]).copied().collect()
}

pub(crate) fn near(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let some = |x: &[f32]| x[..x.len().min(STEPS)].to_vec();
    assert!(worst <= tolerance * scale, "{what}: {worst} of {scale}: {:?}, {:?}", some(got), some(want));
}

/// The same as one rank with the same microbatches, within a relative tolerance; weights within five times of it.
pub(crate) fn check(case: &ShardCase, tolerance: f32) {
    let one = ShardCase { data: 1, tensor: 1, stage: 1, ..case.clone() };
    compare(case, &run(case, &case.samples()), &run(&one, &one.samples())[0], tolerance);
}

/// The same as one rank with one microbatch, where ranks have other numbers of microbatches and samples: from, and up to.
pub(crate) fn check_uneven(case: &ShardCase, samples: &[&[(usize, usize)]], tolerance: f32) {
    let one = ShardCase { data: 1, ..case.clone() };
    let samples = samples.iter().map(|mine| mine.iter().map(|&(from, to)| from..to).collect()).collect();
    compare(case, &run(case, &samples), &run(&one, &one.samples())[0], tolerance);
}

fn compare(case: &ShardCase, many: &[ShardOutcome], one: &ShardOutcome, tolerance: f32) {
    let numel = |held: &HeldShard| held.first.len();
    for (rank, outcome) in many.iter().enumerate() {
        let what = |name: &str| {
            let &ShardCase { data, tensor, stage, accumulate, .. } = case;
            format!("{} on rank {rank} of {data}x{tensor}x{stage}, {accumulate}: {name}", case.name)
        };
        near(&what("losses"), &outcome.losses, &one.losses, tolerance);
        for held in &outcome.held {
            let name = &held.stored.name;
            let whole = one.held.iter().find(|whole| whole.stored.name == *name).unwrap();
            assert_eq!(held.stored.whole_dims(&held.dims), whole.dims, "{}", what(name));
            assert_eq!(held.first, taken(&whole.first, held), "{}", what(name));
            near(&what(name), &held.last, &taken(&whole.last, held), 5.0 * tolerance);
            if case.ema.is_some() && !held.average.is_empty() {
                near(&what(name), &held.average, &taken(&whole.average, held), 5.0 * tolerance);
            }
        }
        let sharded = outcome.held.iter().filter(|h| h.stored.shard.is_some());
        let sharded = sharded.map(|h| numel(h) * case.data).sum::<usize>() as f64;
        let copied: usize = outcome.held.iter().filter(|h| h.stored.shard.is_none()).map(numel).sum();
        let share = sharded / (sharded + copied as f64);
        assert!(share >= case.sharded_min, "{}: {share}", what("share of the elements that is sharded"));
    }
}
