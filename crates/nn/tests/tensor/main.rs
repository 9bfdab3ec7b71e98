//! Ranks that split the matrices of a model against one rank: the same initial weights to the bit, the same losses, and the same
//! weights after a few steps.

// All of this is tests; clippy recognises only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Inputs, Options, StepArgs};
use polyreme_graph::op::{Cell, CrossEntropy};
use polyreme_graph::{
    Axis, Body, Builder, DType, Graph, Microbatch, Optimizer, Part, Precision, Shape, differentiate,
};
use polyreme_nn::model::{
    Cnn, Depth, EncoderClassifier, Gpt, Mlp, Model, RecurrentClassifier, ResNet, Stem, Tabular, TraceOptions,
};
use polyreme_parallel::{Mesh, Plan, StepShape, Training, compile, schedule};

const STEPS: usize = 5;

/// A generator of test data: the high bits of a linear congruence.
struct TestRandom(u64);

impl TestRandom {
    fn new(seed: u64) -> TestRandom {
        TestRandom(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678)
    }
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.next() % (1 << 20)) as f32 / (1 << 20) as f32
    }
}

/// A model, and what it is traced for: the batch of all ranks together.
struct TensorCase {
    name: &'static str,
    model: Model,
    options: TraceOptions,
    precision: Precision,
    lr: f32,
    /// Weights that are all smaller than this are compared as if one of them were so large.
    least: f32,
    /// How many ranks the batch is split over.
    data: usize,
    /// How many stages the layers are split over.
    stage: usize,
    /// The maximum of the gradients' norm.
    clip: Option<f64>,
}

fn case(name: &'static str, model: Model, batch: usize) -> TensorCase {
    TensorCase {
        name,
        model,
        options: TraceOptions::training(batch),
        precision: Precision::F32,
        lr: 0.02,
        least: 1e-3,
        data: 1,
        stage: 1,
        clip: None,
    }
}

/// A rank's part of the batch.
fn own_options(case: &TensorCase) -> TraceOptions {
    TraceOptions { batch: case.options.batch / case.data, ..case.options }
}

fn step_graph(case: &TensorCase) -> Graph {
    let (model, options) = (&case.model, &own_options(case));
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

/// A parameter or a state of one rank: its name, which part of the whole it is, its elements at the start and at the end.
struct HeldParts {
    name: String,
    dims: Vec<usize>,
    part: Option<Part>,
    first: Vec<f32>,
    last: Vec<f32>,
}

struct TensorOutcome {
    held: Vec<HeldParts>,
    losses: Vec<f64>,
}

fn run_rank(case: &TensorCase, comm: Comm) -> Result<TensorOutcome, ExecError> {
    let rank = comm.rank();
    let &TensorCase { data, stage, clip, .. } = case;
    let mesh = Mesh { tensor: comm.size() / data / stage, stage, ..Mesh::data(data) };
    let part = mesh.place(rank, Axis::Data);
    let plan = Plan { mesh, rank, precision: case.precision.clone(), ..Plan::alone() };
    let training = Training {
        optimizer: Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 },
        moments: DType::F32,
        clip,
        ema: None,
        scaled: false,
    };
    let body: Arc<Body> = Arc::new(compile(&step_graph(case), &plan, &training, None).unwrap());
    let microbatch = Microbatch { body: 0, first_sample: part * own_options(case).batch };
    let shape = StepShape::rounds(&[microbatch], 1);
    let program = schedule(&plan, &training, std::slice::from_ref(&body), &shape);
    let comms = Comms::new(comm, &mesh)?;
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comms)?;
    let graph = &body.graph;
    let mut held: Vec<HeldParts> = Vec::new();
    for stored in graph.params.iter().chain(&graph.states) {
        let dims = graph.shape(stored.value).dims().to_vec();
        let first = engine.param(&stored.name).or_else(|_| engine.state(&stored.name))?.to_vec();
        held.push(HeldParts { name: stored.name.clone(), dims, part: stored.part, first, last: Vec::new() });
    }
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut load = |_: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            let mut random = TestRandom::new(step as u64);
            let input = case.model.input(&case.options);
            let n = input.shape.numel();
            // A stage is fed what its layers read.
            let feeds = inputs.has(input.name);
            match input.dtype {
                DType::I32 => {
                    let all: Vec<_> = (0..n).map(|_| random.below(16) as i32).collect();
                    if feeds {
                        take(inputs.i32(input.name)?, &all, part);
                    }
                }
                _ => {
                    let all: Vec<_> = (0..n).map(|_| random.uniform(-1.0, 1.0)).collect();
                    if feeds {
                        take(inputs.f32(input.name)?, &all, part);
                    }
                }
            }
            let (n, classes) = (case.model.n_labels(&case.options), case.model.classes());
            let all: Vec<_> = (0..n).map(|_| random.below(classes) as i32).collect();
            if inputs.has("labels") {
                take(inputs.i32("labels")?, &all, part);
            }
            Ok(1.0 / case.data as f64)
        };
        let args = StepArgs { lr: case.lr, extra: [1.0, 2.0], ..StepArgs::default() };
        losses.push(engine.step_with(&mut load, args)?.loss);
    }
    for held in &mut held {
        held.last = engine.param(&held.name).or_else(|_| engine.state(&held.name))?.to_vec();
    }
    engine.comm().barrier()?;
    Ok(TensorOutcome { held, losses })
}

/// This rank's part of what all ranks are fed.
fn take<T: Copy>(into: &mut [T], all: &[T], part: usize) {
    into.copy_from_slice(&all[part * into.len()..][..into.len()]);
}

fn run(case: &TensorCase, ranks: usize) -> Vec<TensorOutcome> {
    std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(ranks)
            .into_iter()
            .map(|comm| {
                s.spawn(move || run_rank(case, comm).unwrap_or_else(|e| panic!("{}: {e}", case.name)))
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// The elements of a whole tensor that a part has.
fn taken(whole: &[f32], held: &HeldParts) -> Vec<f32> {
    let Some(part) = held.part else { return whole.to_vec() };
    let slab = part.slab(&part.whole_dims(&held.dims));
    (0..held.first.len()).map(|i| whole[slab.first + i / slab.run * slab.stride + i % slab.run]).collect()
}

fn near(what: &str, got: &[f32], want: &[f32], tolerance: f32, least: f32) {
    let scale = want.iter().fold(least, |m, x| m.max(x.abs()));
    let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let some = |x: &[f32]| x[..x.len().min(STEPS)].to_vec();
    assert!(worst <= tolerance * scale, "{what}: {worst} of {scale}: {:?}, {:?}", some(got), some(want));
}

/// The same as one rank, within a relative tolerance; and a share of the parameters on each rank.
fn check(case: &TensorCase, all_ranks: &[usize], tolerance: f32, held_max: f64) {
    let one = run(
        &TensorCase {
            data: 1,
            stage: 1,
            model: case.model.clone(),
            precision: case.precision.clone(),
            ..*case
        },
        1,
    );
    let one = &one[0];
    let n_whole: usize = one.held.iter().map(|h| h.first.len()).sum();
    for &ranks in all_ranks {
        let many = run(case, ranks * case.data * case.stage);
        for (rank, outcome) in many.iter().enumerate() {
            let what = |name: &str| format!("{} on rank {rank} of {ranks}: {name}", case.name);
            let losses = |o: &TensorOutcome| o.losses.iter().map(|l| *l as f32).collect::<Vec<_>>();
            near(&what("losses"), &losses(outcome), &losses(one), tolerance, case.least);
            for held in &outcome.held {
                let whole = one.held.iter().find(|whole| whole.name == held.name).unwrap();
                assert_eq!(held.first, taken(&whole.first, held), "{}", what(&held.name));
                near(&what(&held.name), &held.last, &taken(&whole.last, held), 5.0 * tolerance, case.least);
            }
            let n: usize = outcome.held.iter().map(|h| h.first.len()).sum();
            let share = n as f64 / n_whole as f64;
            assert!(share <= held_max / ranks as f64, "{}: {share}", what("share of the parameters"));
        }
    }
}

fn gpt(dropout: f32) -> TensorCase {
    let model = Gpt { vocab: 32, width: 32, heads: 4, layers: 2, context: 8, dropout };
    case("gpt", Model::Gpt(model), 4)
}

#[test]
fn an_mlp_is_split() {
    for dropout in [0.0, 0.3] {
        let model = Mlp {
            inputs: 12,
            categories: vec![],
            texts: vec![],
            hidden: vec![32, 24],
            classes: 8,
            activation: "gelu".into(),
            dropout,
        };
        check(&case("mlp", Model::Mlp(model), 8), &[2, 4], 1e-5, 1.3);
    }
}

#[test]
fn residual_blocks_of_tables_are_split() {
    for dropout in [0.0, 0.3] {
        let (inputs, embed, width, hidden, layers, classes) = (12, 4, 32, 64, 2, 8);
        let (categories, texts) = (Vec::new(), Vec::new());
        let model = Tabular { inputs, categories, texts, embed, width, hidden, layers, classes, dropout };
        check(&case("tabular", Model::Tabular(model), 8), &[2, 4], 1e-5, 1.4);
    }
}

#[test]
fn a_gpt_is_split() {
    check(&gpt(0.0), &[2, 4], 1e-5, 1.2);
    check(&gpt(0.2), &[2, 4], 1e-5, 1.2);
}

#[test]
fn a_gpt_is_split_where_rows_do_not_divide() {
    let odd = TensorCase { options: TraceOptions { time: Some(5), ..TraceOptions::training(3) }, ..gpt(0.2) };
    check(&odd, &[2, 4], 1e-5, 1.2);
}

#[test]
fn labels_are_smoothed_and_ignored_as_on_one_rank() {
    for (label_smoothing, ignore_index) in [(0.1, None), (0.0, Some(3)), (0.2, Some(3))] {
        let mut smooth = gpt(0.0);
        smooth.options.loss = CrossEntropy { label_smoothing, ignore_index };
        check(&smooth, &[2, 4], 1e-5, 1.2);
    }
}

#[test]
fn the_batch_is_split_as_well() {
    let both = TensorCase { data: 2, ..gpt(0.2) };
    check(&both, &[2], 1e-5, 1.2);
}

#[test]
fn layers_are_split_as_well() {
    let both = TensorCase { stage: 2, clip: Some(0.5), ..gpt(0.2) };
    check(&both, &[1, 2], 1e-5, 1.4);
    let all = TensorCase { stage: 2, data: 2, clip: Some(0.5), ..gpt(0.0) };
    check(&all, &[2], 1e-5, 1.4);
}

#[test]
fn convolutions_are_split() {
    let model = Cnn { channels: 3, widths: vec![8, 16], classes: 8, dropout: 0.2 };
    let mut cnn = case("cnn", Model::Cnn(model), 4);
    cnn.options.image = Some((8, 8));
    check(&cnn, &[2, 4], 1e-5, 1.5);
}

#[test]
fn residual_blocks_are_split() {
    let model = ResNet { depth: Depth::D18, stem: Stem::Cifar, channels: 3, classes: 8 };
    // With a batch of 4 a ReLU at its edge decides: one rank's losses differ by 1e-4 at the fifth step with other algorithms of
    // convolution, too.
    let mut resnet = case("resnet18", Model::ResNet(model), 8);
    resnet.options.image = Some((16, 16));
    resnet.precision = Precision::F32_STRICT;
    resnet.lr = 1e-3;
    // Its norms start with offsets of 0, and in 18 layers rounding grows to some 1e-4 of their gradients.
    resnet.least = 0.1;
    check(&resnet, &[2], 1e-5, 1.05);
}

#[test]
fn recurrent_layers_are_split() {
    for cell in [Cell::Lstm, Cell::Gru] {
        let model = RecurrentClassifier {
            cell,
            vocab: 32,
            width: 16,
            hidden: 16,
            layers: 2,
            bidirectional: true,
            context: 6,
            dropout: 0.2,
            classes: 8,
            ..RecurrentClassifier::default()
        };
        check(&case("recurrent", Model::Recurrent(model), 4), &[2, 4], 1e-5, 3.0);
    }
}

#[test]
fn an_encoder_is_split() {
    let model = EncoderClassifier {
        vocab: 32,
        width: 32,
        heads: 4,
        hidden: 48,
        layers: 2,
        context: 8,
        dropout: 0.1,
        classes: 8,
        ..EncoderClassifier::default()
    };
    check(&case("encoder", Model::Encoder(model), 4), &[2, 4], 1e-5, 1.3);
}

#[test]
fn bf16_is_split() {
    let case = TensorCase { precision: Precision::half(DType::Bf16), ..gpt(0.0) };
    check(&case, &[2], 2e-2, 1.2);
}
