//! Evaluation with weights that ranks split: an engine trains on a mesh and evaluates between steps, and its logits and losses
//! are those of one rank that trained alike.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Inputs, Options, StepArgs};
use polyreme_graph::op::Cell;
use polyreme_graph::{Axis, DType, Graph, Optimizer, Precision, differentiate};
use polyreme_nn::model::{Cnn, EncoderClassifier, Gpt, RecurrentClassifier, ResNet, Stem};
use polyreme_nn::{Model, TraceOptions};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::stage::flops;
use polyreme_parallel::{
    AnswerRows, Mesh, Plan, Training, choose, compile, compile_answer, compile_forward, schedule, standalone,
};

/// Samples of an evaluation: another number than training has.
const EVALUATED: usize = 6;
const MICROBATCHES: usize = 2;
const STEPS: usize = 2;

struct Evaluated {
    name: &'static str,
    model: Model,
    image: Option<(usize, usize)>,
    precision: Precision,
    lr: f32,
}

impl Evaluated {
    fn new(name: &'static str, model: Model) -> Evaluated {
        Evaluated { name, model, image: None, precision: Precision::F32, lr: 0.05 }
    }

    fn step(&self, batch: usize) -> Graph {
        let options = TraceOptions { image: self.image, ..TraceOptions::training(batch) };
        let forward = self.model.trace(&options).unwrap();
        differentiate(&forward, forward.output("loss").unwrap()).unwrap()
    }

    /// The graph of an evaluation; also of predictions, without a loss.
    fn forward(&self, with_loss: bool) -> Graph {
        let options = TraceOptions { image: self.image, ..TraceOptions::evaluation(EVALUATED) };
        let mut graph = self.model.trace(&options).unwrap();
        graph.outputs.retain(|(name, _)| with_loss || name == "logits");
        graph.without_dead()
    }
}

/// Fills those of a graph's inputs that a stage has.
fn fill(graph: &Graph, inputs: &mut Inputs, seed: usize) {
    for (k, input) in graph.inputs.iter().enumerate() {
        let mut state = ((seed * 10 + k) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 40
        };
        if !inputs.has(&input.name) {
            continue;
        }
        match graph.value(input.value).dtype {
            DType::I32 => inputs.i32(&input.name).unwrap().fill_with(|| (next() % 8) as i32),
            _ => inputs.f32(&input.name).unwrap().fill_with(|| next() as f32 / (1 << 23) as f32 - 1.0),
        }
    }
}

/// Outputs of the evaluations of a rank, if it has them: after each step, logits, loss, and logits of the prediction.
type Outputs = Vec<Option<[Vec<f32>; 3]>>;

fn run(case: &Evaluated, plan: &Plan, comm: Comm) -> Outputs {
    let training = Training {
        optimizer: Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 },
        moments: DType::F32,
        clip: None,
        ema: None,
        scaled: false,
    };
    let step = case.step(4);
    let plan = Plan { rank: comm.rank(), precision: case.precision.clone(), ..plan.clone() };
    let plan = choose(&step, &plan, &flops(&step), None).unwrap();
    let body = compile(&step, &plan, &training, None).unwrap();
    let program = schedule(&plan, &training, &[Arc::new(body)], &plan.whole_step());
    let comms = Comms::new(comm, &plan.mesh).unwrap();
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comms).unwrap();
    let graphs = [true, false].map(|with_loss| case.forward(with_loss));
    let numbers: Vec<usize> = graphs
        .iter()
        .map(|graph| {
            let program = compile_forward(graph, &plan).unwrap();
            engine.add(program).unwrap_or_else(|e| panic!("{}: {e}", case.name))
        })
        .collect();
    let stage = plan.mesh.place(plan.rank, Axis::Stage);
    let has_output = {
        engine.select(numbers[0]);
        engine.program().graph().output("logits").is_some()
    };
    let last = if plan.pipeline == PipelineKind::ZbV { 0 } else { plan.mesh.stage - 1 };
    assert_eq!(has_output, stage == last, "{}: outputs are where the last chunk is", case.name);
    let mut found = Vec::new();
    for number in 0..STEPS {
        engine.select(0);
        let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            fill(&step, inputs, number * MICROBATCHES + microbatch);
            Ok(1.0 / MICROBATCHES as f64)
        };
        engine.step_with(&mut load, StepArgs { lr: case.lr, ..StepArgs::default() }).unwrap();
        let mut outputs = Vec::new();
        for (program, graph) in numbers.iter().zip(&graphs) {
            engine.select(*program);
            let filled: Result<(), ExecError> = engine.fill_slots(|inputs| {
                fill(graph, inputs, 50 + number);
                Ok(())
            });
            filled.unwrap();
            engine.run().unwrap();
            let names = graph.outputs.iter().map(|(name, _)| name);
            outputs.extend(names.filter_map(|name| engine.output(name).ok().map(<[f32]>::to_vec)));
        }
        found.push(<[Vec<f32>; 3]>::try_from(outputs).ok());
    }
    found
}

fn evaluate(case: &Evaluated, plan: &Plan) -> Vec<Outputs> {
    std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(plan.mesh.ranks())
            .into_iter()
            .map(|comm| s.spawn(move || run(case, plan, comm)))
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

fn plan(stage: usize, tensor: usize, pipeline: PipelineKind) -> Plan {
    let mesh = Mesh { stage, tensor, ..Mesh::data(1) };
    Plan { mesh, pipeline, microbatches: MICROBATCHES, ..Plan::alone() }
}

/// Stages, ranks of the tensor axis, and the schedule of training.
const MESHES: [(usize, usize, PipelineKind); 4] = [
    (1, 2, PipelineKind::OneFOneB),
    (2, 1, PipelineKind::OneFOneB),
    (2, 1, PipelineKind::ZbV),
    (2, 2, PipelineKind::OneFOneB),
];

/// Meshes against one rank: the same bits with stages only, and otherwise to a distance relative to the largest logit.
fn check(case: &Evaluated, meshes: &[(usize, usize, PipelineKind)], tolerance: f32) {
    let one = evaluate(case, &plan(1, 1, PipelineKind::Gpipe)).remove(0);
    for &(stage, tensor, kind) in meshes {
        let all = evaluate(case, &plan(stage, tensor, kind));
        // Every rank of the tensor axis has the outputs.
        let with_outputs: Vec<_> = all.iter().filter(|outputs| outputs[0].is_some()).collect();
        assert_eq!(with_outputs.len(), tensor, "{}", case.name);
        for (got, want) in with_outputs.iter().flat_map(|outputs| outputs.iter().zip(&one)) {
            for (got, want) in got.as_ref().unwrap().iter().zip(want.as_ref().unwrap()) {
                let largest = want.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
                let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let bound = if tensor == 1 { 0.0 } else { tolerance };
                let what = format!("{} with {stage} stages of {tensor}, {kind}", case.name);
                assert!(worst <= bound * largest, "{what}: {worst} of {largest}");
                assert_eq!(got.len(), want.len(), "{what}");
            }
        }
    }
}

fn gpt() -> Model {
    Model::Gpt(Gpt { vocab: 16, width: 32, heads: 4, layers: 4, context: 8, dropout: 0.2 })
}

#[test]
fn a_gpt_evaluates_as_on_one_rank() {
    check(&Evaluated::new("gpt", gpt()), &MESHES, 1e-5);
}

#[test]
fn bf16_evaluates_as_on_one_rank() {
    let precision = Precision::half(DType::Bf16);
    check(&Evaluated { precision, ..Evaluated::new("gpt in bf16", gpt()) }, &MESHES, 3e-2);
}

#[test]
fn an_encoder_evaluates_as_on_one_rank() {
    let model = EncoderClassifier {
        vocab: 16,
        width: 32,
        heads: 4,
        hidden: 48,
        layers: 3,
        context: 8,
        dropout: 0.1,
        classes: 8,
        ..EncoderClassifier::default()
    };
    check(&Evaluated::new("encoder", Model::Encoder(model)), &MESHES, 1e-5);
}

#[test]
fn running_statistics_are_those_of_the_stage() {
    let model = Cnn { channels: 3, widths: vec![8, 16, 16], classes: 8, dropout: 0.2 };
    let cnn = Evaluated { image: Some((8, 8)), ..Evaluated::new("cnn", Model::Cnn(model)) };
    check(&cnn, &MESHES, 1e-5);
    let model = ResNet { stem: Stem::Cifar, channels: 3, classes: 8, ..ResNet::default() };
    let resnet = Evaluated::new("resnet18", Model::ResNet(model));
    // In small batches a ReLU at its edge decides: with larger steps one rank's losses differ as much with other algorithms of
    // convolution.
    let (image, precision, lr) = (Some((8, 8)), Precision::F32_STRICT, 1e-3);
    check(&Evaluated { image, precision, lr, ..resnet }, &MESHES[2..], 1e-3);
}

#[test]
fn recurrent_layers_evaluate_as_on_one_rank() {
    for cell in [Cell::Lstm, Cell::Gru] {
        let model = RecurrentClassifier {
            cell,
            vocab: 16,
            width: 16,
            hidden: 16,
            layers: 3,
            bidirectional: true,
            context: 6,
            dropout: 0.2,
            classes: 8,
            ..RecurrentClassifier::default()
        };
        check(&Evaluated::new("recurrent", Model::Recurrent(model)), &MESHES, 1e-5);
    }
}

/// The logits of a rank whose engine only answers.
fn answer(case: &Evaluated, plan: &Plan, comm: Comm) -> Vec<f32> {
    let (step, graph) = (case.step(4), case.forward(false));
    let plan = Plan { rank: comm.rank(), ..plan.clone() };
    let plan = choose(&step, &plan, &flops(&step), None).unwrap();
    let program = standalone(compile_answer(&graph, &plan, AnswerRows::All).unwrap(), &plan);
    let comms = Comms::new(comm, &plan.mesh).unwrap();
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comms).unwrap();
    let filled: Result<(), ExecError> = engine.fill_slots(|inputs| {
        fill(&graph, inputs, 50);
        Ok(())
    });
    filled.unwrap();
    engine.run().unwrap();
    engine.output("logits").unwrap().to_vec()
}

/// Every stage has the outputs of the last one, whichever rank has its last chunk.
#[test]
fn answers_are_on_every_rank() {
    let case = Evaluated::new("gpt", gpt());
    let answers = |plan: Plan| -> Vec<Vec<f32>> {
        std::thread::scope(|s| {
            let comms = Comm::local(plan.mesh.ranks());
            let rank = |comm| s.spawn(|| answer(&case, &plan, comm));
            let ranks: Vec<_> = comms.into_iter().map(rank).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    };
    let one = answers(plan(1, 1, PipelineKind::OneFOneB)).remove(0);
    let more = [(4, 1, PipelineKind::OneFOneB), (2, 1, PipelineKind::Interleaved { chunks: 2 })];
    for (stage, tensor, kind) in MESHES.into_iter().chain(more) {
        for (rank, got) in answers(plan(stage, tensor, kind)).into_iter().enumerate() {
            let far = one.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let bound = if tensor == 1 { 0.0 } else { 1e-5 };
            let what = format!("rank {rank} of {stage} stages of {tensor}, {kind}");
            assert!(got.len() == one.len() && far <= bound, "{what}: {far}");
        }
    }
}
