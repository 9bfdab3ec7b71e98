//! Runs a model on a mesh and compares it with one rank.

use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Inputs, Isa, Options, StepArgs};
use polyreme_graph::{
    Axis, Body, Builder, DType, Graph, Microbatch, Optimizer, Part, Precision, Program, Shape, differentiate,
};
use polyreme_nn::model::{Model, TraceOptions};
use polyreme_parallel::sequence::{FedPart, SequenceOrder, SequencePlace, fed_parts, split};
use polyreme_parallel::{
    Budget, CompileError, Mesh, Plan, StepShape, Training, both_passes, compile, schedule,
};

/// A generator of test data: the high bits of a linear congruence.
struct IdStream(u64);

impl IdStream {
    fn new(seed: u64) -> IdStream {
        IdStream(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678)
    }
    fn below(&mut self, n: usize) -> i32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize % n) as i32
    }
}

/// A model, and what it is traced for: the batch of all ranks and microbatches together.
pub(crate) struct SequenceCase {
    pub(crate) name: &'static str,
    pub(crate) model: Model,
    pub(crate) options: TraceOptions,
    pub(crate) precision: Precision,
    pub(crate) microbatches: usize,
    /// The maximum of the gradients' norm.
    pub(crate) clip: Option<f64>,
    pub(crate) steps: usize,
    /// Positions whose labels are the one that is ignored.
    pub(crate) ignored: Range<usize>,
    /// Whether classes have weights.
    pub(crate) class_weights: bool,
    /// The share of a rank's activations that may be kept; the others are computed again.
    pub(crate) kept: Option<f64>,
}

impl SequenceCase {
    pub(crate) fn new(name: &'static str, model: Model, batch: usize) -> SequenceCase {
        let options = TraceOptions::training(batch);
        SequenceCase {
            name,
            model,
            options,
            precision: Precision::F32,
            microbatches: 1,
            clip: None,
            steps: 5,
            ignored: 0..0,
            class_weights: false,
            kept: None,
        }
    }
}

pub(crate) fn training(clip: Option<f64>) -> Training {
    Training {
        optimizer: Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 },
        moments: DType::F32,
        clip,
        ema: None,
        scaled: false,
    }
}

pub(crate) fn plan_of(case: &SequenceCase, mesh: Mesh, rank: usize) -> Plan {
    let (precision, microbatches) = (case.precision.clone(), case.microbatches);
    Plan { mesh, rank, precision, microbatches, ..Plan::alone() }
}

/// The step of a microbatch of `batch` samples, with whole sequences.
pub(crate) fn step_graph(case: &SequenceCase, batch: usize) -> Graph {
    let (model, options) = (&case.model, &TraceOptions { batch, ..case.options });
    let mut b = Builder::new();
    let input = model.input(options);
    let x = b.input(input.name, input.shape, input.dtype).unwrap();
    let labels = b.input("labels", [model.n_labels(options)], DType::I32).unwrap();
    let weight = b.input("weight", [1], DType::F32).unwrap();
    let logits = model.logits(&mut b, x, true).unwrap();
    let weights = case.class_weights.then(|| b.input("classes", [model.classes()], DType::F32).unwrap());
    let loss = b.layer("loss", |b| b.cross_entropy(logits, labels, weights, options.loss)).unwrap();
    let scalar = b.reshape(weight, Shape::scalar()).unwrap();
    let weighted = b.mul(loss, scalar).unwrap();
    differentiate(&b.finish(&[("loss", loss), ("weighted", weighted)]), weighted).unwrap()
}

pub(crate) fn compiled(case: &SequenceCase, mesh: Mesh, rank: usize) -> Result<Body, CompileError> {
    let step = step_graph(case, case.options.batch / mesh.data / case.microbatches);
    compile(&step, &plan_of(case, mesh, rank), &training(case.clip), None)
}

/// Bytes of a rank's activations.
pub(crate) fn footprint(case: &SequenceCase, mesh: Mesh, rank: usize) -> usize {
    let body = Arc::new(compiled(case, mesh, rank).unwrap());
    let plan = plan_of(case, mesh, rank);
    let program = schedule(&plan, &training(None), &[body], &plan.whole_step());
    Engine::footprint(&program, 1, Isa::detect()).activations
}

/// A parameter or a state of one rank at the end: its name, which part of the whole it is, its dims and elements.
struct HeldAtEnd {
    name: String,
    part: Option<Part>,
    dims: Vec<usize>,
    last: Vec<f32>,
}

/// What a rank had at the end, and its losses.
struct SequenceOutcome {
    held: Vec<HeldAtEnd>,
    losses: Vec<f64>,
}

fn place_of(graph: &Graph, mesh: &Mesh, rank: usize) -> SequencePlace {
    let order = SequenceOrder::of(graph);
    SequencePlace { rank: mesh.place(rank, Axis::Sequence), ranks: mesh.sequence, order }
}

/// Copies this rank's part of what one microbatch of a data rank is fed.
fn feed(into: &mut [i32], all: &[i32], parts: &[FedPart], name: &str) {
    match parts.iter().find(|part| part.name == name) {
        Some(part) => part.copy(all, into),
        None => into.copy_from_slice(all),
    }
}

fn run_rank(case: &SequenceCase, mesh: Mesh, comm: Comm) -> Result<SequenceOutcome, ExecError> {
    let rank = comm.rank();
    let (plan, training) = (plan_of(case, mesh, rank), training(case.clip));
    let batch = case.options.batch / mesh.data / case.microbatches;
    let whole = step_graph(case, batch);
    let parts = fed_parts(&whole, place_of(&whole, &mesh, rank)).unwrap();
    let measure = |program: &Program| Engine::footprint(program, 1, Isa::detect()).activations;
    let all = |body: Body| schedule(&plan, &training, &[Arc::new(body)], &plan.whole_step());
    let budget = case.kept.filter(|_| mesh.ranks() > 1).map(|share| {
        let all = measure(&all(compile(&whole, &plan, &training, None).unwrap()));
        Budget { bytes: (all as f64 * share) as usize, measure: &measure }
    });
    let body: Arc<Body> = Arc::new(compile(&whole, &plan, &training, budget).unwrap());
    // Microbatches first, then the ranks that share each.
    let data = mesh.place(rank, Axis::Data);
    let first = |m: usize| (m * mesh.data + data) * batch;
    let microbatches: Vec<_> =
        (0..case.microbatches).map(|m| Microbatch { body: 0, first_sample: first(m) }).collect();
    let shape = StepShape::rounds(&microbatches, microbatches.len());
    let program = schedule(&plan, &training, std::slice::from_ref(&body), &shape);
    let comms = Comms::new(comm, &mesh)?;
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comms)?;
    let mut losses = Vec::new();
    for step in 0..case.steps {
        let mut load = |m: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            let mut random = IdStream::new(step as u64);
            let input = case.model.input(&case.options);
            let samples = first(m)..first(m) + batch;
            let draw = |n: usize, below: usize, random: &mut IdStream| -> Vec<i32> {
                let all: Vec<_> = (0..n).map(|_| random.below(below)).collect();
                let each = n / case.options.batch;
                all[samples.start * each..samples.end * each].to_vec()
            };
            let ids = draw(input.shape.numel(), 16, &mut random);
            let mut labels = draw(case.model.n_labels(&case.options), case.model.classes(), &mut random);
            if let Some(ignored) = case.options.loss.ignore_index {
                let of_sequence = labels.len() / batch;
                for sequence in labels.chunks_mut(of_sequence) {
                    sequence[case.ignored.clone()].fill(ignored);
                }
            }
            if inputs.has("classes") {
                let weights = inputs.f32("classes")?;
                weights.iter_mut().enumerate().for_each(|(k, w)| *w = 0.5 + k as f32 / 8.0);
            }
            // A stage is fed what its layers read.
            for (name, all) in [(input.name, ids), ("labels", labels)] {
                if inputs.has(name) {
                    feed(inputs.i32(name)?, &all, &parts, name);
                }
            }
            Ok(1.0 / (mesh.data * case.microbatches) as f64)
        };
        let args = StepArgs { lr: 0.02, extra: [1.0, 2.0], ..StepArgs::default() };
        losses.push(engine.step_with(&mut load, args)?.loss);
    }
    let graph = &body.graph;
    let mut held = Vec::new();
    for stored in graph.params.iter().chain(&graph.states) {
        let dims = graph.shape(stored.value).dims().to_vec();
        let last = engine.param(&stored.name).or_else(|_| engine.state(&stored.name))?.to_vec();
        held.push(HeldAtEnd { name: stored.name.clone(), part: stored.part, dims, last });
    }
    engine.comm().barrier()?;
    Ok(SequenceOutcome { held, losses })
}

fn on_ranks<T: Send>(ranks: usize, name: &str, act: impl Fn(Comm) -> Result<T, ExecError> + Sync) -> Vec<T> {
    let act = &act;
    std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(ranks)
            .into_iter()
            .map(|comm| s.spawn(move || act(comm).unwrap_or_else(|e| panic!("{name}: {e}"))))
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

fn near(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    let scale = want.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert_eq!(got.len(), want.len(), "{what}");
    let some = |x: &[f32]| x[..x.len().min(5)].to_vec();
    assert!(worst <= tolerance * scale, "{what}: {worst} of {scale}: {:?}, {:?}", some(got), some(want));
}

/// Ranks that cut sequences among them have the same weights to the bit.
fn agree(case: &SequenceCase, mesh: &Mesh, many: &[SequenceOutcome]) {
    for (rank, outcome) in many.iter().enumerate() {
        let first = &many[mesh.group(rank, Axis::Sequence)[0]];
        for (own, other) in outcome.held.iter().zip(&first.held) {
            assert!(own.last == other.last, "{} on rank {rank} of {mesh:?}: {}", case.name, own.name);
        }
        assert_eq!(outcome.losses, first.losses, "{} on rank {rank} of {mesh:?}", case.name);
    }
}

/// The same as one rank, within a relative tolerance.
pub(crate) fn check(case: &SequenceCase, meshes: &[Mesh], tolerance: f32) {
    let one = on_ranks(1, case.name, |comm| run_rank(case, Mesh::data(1), comm));
    let one = &one[0];
    for mesh in meshes {
        let many = on_ranks(mesh.ranks(), case.name, |comm| run_rank(case, *mesh, comm));
        agree(case, mesh, &many);
        for (rank, outcome) in many.iter().enumerate() {
            let what = |name: &str| format!("{} on rank {rank} of {mesh:?}: {name}", case.name);
            let losses = |o: &SequenceOutcome| o.losses.iter().map(|l| *l as f32).collect::<Vec<_>>();
            near(&what("losses"), &losses(outcome), &losses(one), tolerance);
            for HeldAtEnd { name, part, dims, last } in &outcome.held {
                let whole = &one.held.iter().find(|of| of.name == *name).unwrap().last;
                let want = match part {
                    None => whole.clone(),
                    Some(part) => {
                        let slab = part.slab(&part.whole_dims(dims));
                        let at = |i: usize| slab.first + i / slab.run * slab.stride + i % slab.run;
                        (0..last.len()).map(|i| whole[at(i)]).collect()
                    }
                };
                near(&what(name), last, &want, 5.0 * tolerance);
            }
        }
    }
}

/// Logits of a forward pass without a loss: each rank's positions, or all where they have none.
pub(crate) fn forward_agrees(case: &SequenceCase, ranks: usize) {
    let mut b = Builder::new();
    let input = case.model.input(&case.options);
    let x = b.input(input.name, input.shape.clone(), input.dtype).unwrap();
    let logits = case.model.logits(&mut b, x, false).unwrap();
    let mut graph = b.finish(&[("logits", logits)]);
    graph.n_forward = graph.nodes.len();
    let whole_shape = graph.shape(logits).clone();
    let mut random = IdStream::new(1);
    let ids: Vec<i32> = (0..input.shape.numel()).map(|_| random.below(16)).collect();
    let run = |comm: Comm, graph: &Graph, parts: &[FedPart]| -> Result<Vec<f32>, ExecError> {
        let program = both_passes(1, &Arc::new(Body::forward(graph)));
        let mut engine = Engine::new(program, Options { seed: 3, ..Options::threads(1) })?;
        // The group along the sequence axis is that of all ranks.
        engine.attach(comm);
        feed(engine.input_i32(input.name)?, &ids, parts, input.name);
        engine.run()?;
        let logits = engine.output("logits")?.to_vec();
        engine.comm().barrier()?;
        Ok(logits)
    };
    let one = on_ranks(1, case.name, |comm| run(comm, &graph, &[]));
    let mesh = Mesh { sequence: ranks, ..Mesh::data(1) };
    let many = on_ranks(ranks, case.name, |comm| {
        let place = place_of(&graph, &mesh, comm.rank());
        let parts = fed_parts(&graph, place).unwrap();
        run(comm, &split(&graph, place).unwrap().graph, &parts)
    });
    for (rank, got) in many.iter().enumerate() {
        let want = if got.len() == one[0].len() {
            one[0].clone()
        } else {
            let place = place_of(&graph, &mesh, rank);
            let mut part = fed_parts(&graph, place).unwrap().remove(0);
            let classes = whole_shape.last();
            part.sequence *= classes;
            part.ranges.iter_mut().for_each(|r| *r = r.start * classes..r.end * classes);
            let mut want = vec![0.0; got.len()];
            part.copy(&one[0], &mut want);
            want
        };
        near(&format!("{}: logits of rank {rank}", case.name), got, &want, 1e-5);
    }
}
