//! Stages against one rank: the same losses, weights and states, to the bit, with every schedule.

use std::collections::BTreeMap;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Inputs, Kept, Options, Slot, StepArgs};
use polyreme_graph::{DType, Graph, Optimizer, Weights};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{CompileError, Mesh, Plan, Training, compile, schedule};

use crate::nets;
use crate::random::TestRandom;

const MICROBATCHES: usize = 4;
const STEPS: usize = 3;

fn training(clip: Option<f64>) -> Training {
    // Not Adam: it makes as much of a gradient that is zero but for rounding, as of keys' biases, as of any other.
    let optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 };
    Training { optimizer, moments: DType::F32, clip, ema: None, scaled: false }
}

/// What a run ends with: losses and norms of its steps, and tensors by name.
#[derive(PartialEq, Debug)]
struct StagedOutcome {
    totals: Vec<(f64, Option<f64>)>,
    tensors: BTreeMap<String, Vec<f32>>,
}

/// Runs some steps of one rank.
fn run(step: &Graph, plan: &Plan, training: &Training, comms: Comms) -> Result<StagedOutcome, CompileError> {
    let body = compile(step, plan, training, None)?;
    let program = schedule(plan, training, &[Arc::new(body)], &plan.whole_step());
    let mut engine = Engine::join(program, Options { seed: 5, ..Options::threads(1) }, comms).unwrap();
    let mut totals = Vec::new();
    for number in 0..STEPS {
        let data = plan.mesh.place(plan.rank, polyreme_graph::Axis::Data);
        let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            fill(step, inputs, (number * 100 + microbatch * 10 + data) as u64);
            Ok(1.0 / (MICROBATCHES * plan.ranks()) as f64)
        };
        let args = StepArgs { lr: 0.01, ..StepArgs::default() };
        let got = engine.step_with::<ExecError>(&mut load, args).unwrap();
        totals.push((got.loss, got.grad_norm));
    }
    let mut tensors = BTreeMap::new();
    // Ranks that split the batch have states of their own.
    let states = if plan.ranks() == 1 { engine.state_slots() } else { Vec::new() };
    for (slots, kept) in [(engine.param_slots(), Kept::Params), (states, Kept::States)] {
        for Slot { name, range, .. } in slots {
            tensors.insert(name, engine.kept(kept)[range].to_vec());
        }
    }
    Ok(StagedOutcome { totals, tensors })
}

/// Fills the inputs that there are, each from a stream of its own.
pub(crate) fn fill(step: &Graph, inputs: &mut Inputs, seed: u64) {
    for (k, input) in step.inputs.iter().enumerate().filter(|(_, i)| inputs.has(&i.name)).collect::<Vec<_>>()
    {
        let mut random = TestRandom::new(seed * 10 + k as u64);
        if step.value(input.value).dtype == DType::I32 {
            inputs.i32(&input.name).unwrap().fill_with(|| random.below(10) as i32);
        } else {
            inputs.f32(&input.name).unwrap().fill_with(|| random.uniform(-1.0, 1.0));
        }
    }
}

/// All ranks of a mesh, as threads; their tensors together. Ranks that have the same tensor must agree.
fn train(step: &Graph, plan: &Plan, training: &Training) -> StagedOutcome {
    let outcomes: Vec<StagedOutcome> = std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(plan.mesh.ranks())
            .into_iter()
            .map(|comm| {
                s.spawn(move || {
                    let plan = Plan { rank: comm.rank(), ..plan.clone() };
                    run(step, &plan, training, Comms::new(comm, &plan.mesh).unwrap()).unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    let mut all = StagedOutcome { totals: outcomes[0].totals.clone(), tensors: BTreeMap::new() };
    for outcome in outcomes {
        assert_eq!(outcome.totals, all.totals, "all ranks know the loss");
        for (name, tensor) in outcome.tensors {
            let known = all.tensors.entry(name).or_insert_with_key(|_| tensor.clone());
            assert!(*known == tensor, "ranks with the same tensor agree");
        }
    }
    all
}

fn staged(stage: usize, data: usize, pipeline: PipelineKind) -> Plan {
    let mesh = Mesh { stage, data, ..Mesh::data(1) };
    Plan { mesh, pipeline, microbatches: MICROBATCHES, ..Plan::alone() }
}

#[test]
fn every_schedule_gives_the_bits_of_one_rank() {
    for net in nets::all() {
        for clip in [None, Some(0.5)] {
            let training = training(clip);
            let alone = train(&net.step, &staged(1, 1, PipelineKind::Gpipe), &training);
            for kind in PipelineKind::ALL {
                if kind == PipelineKind::TwoBw {
                    continue;
                }
                for stages in 2..=3 {
                    let plan = staged(stages, 1, kind);
                    let got = train(&net.step, &plan, &training);
                    let what = format!("{} {kind} on {stages} stages, clipped {clip:?}", net.name);
                    // The sum of a tied parameter's gradients, and that of all squares, have another order.
                    let near = clip.is_some() || net.name == "transformer";
                    check(&got, &alone, if near { 1e-5 } else { 0.0 }, &what);
                }
            }
        }
    }
}

#[test]
fn weights_that_every_stage_uses_several_times_stay_the_same_on_all() {
    let net = nets::looped();
    let alone = train(&net.step, &staged(1, 1, PipelineKind::Gpipe), &training(None));
    for kind in PipelineKind::ALL.into_iter().filter(|kind| *kind != PipelineKind::TwoBw) {
        for stages in 2..=3 {
            let got = train(&net.step, &staged(stages, 1, kind), &training(None));
            check(&got, &alone, 1e-5, &format!("{kind} on {stages} stages"));
        }
    }
}

/// Compares runs to a relative distance, tensor by tensor; 0 for the same bits.
fn check(got: &StagedOutcome, want: &StagedOutcome, tolerance: f64, what: &str) {
    for (step, (a, b)) in got.totals.iter().zip(&want.totals).enumerate() {
        assert!((a.0 - b.0).abs() <= tolerance * b.0.abs(), "{what}, step {step}: {a:?} for {b:?}");
        let norms = a.1.zip(b.1);
        assert!(norms.is_none_or(|(a, b)| (a - b).abs() <= tolerance * b), "{what}, step {step}: {norms:?}");
    }
    assert!(got.tensors.keys().eq(want.tensors.keys()), "{what}");
    for (name, want) in &want.tensors {
        let apart = got.tensors[name].iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        let size = want.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        assert!(apart.sqrt() <= tolerance * size.sqrt(), "{what}: {name} is {} away", (apart / size).sqrt());
    }
}

#[test]
fn stages_and_data_ranks_train_as_data_ranks_do() {
    for net in nets::all() {
        let training = training(None);
        let apart = train(&net.step, &staged(1, 2, PipelineKind::Gpipe), &training);
        for kind in [PipelineKind::OneFOneB, PipelineKind::ZbH1, PipelineKind::ZbV] {
            for weights in [Weights::Own, Weights::Shared] {
                let keeps = match weights {
                    Weights::Own => polyreme_graph::Keeps::All,
                    Weights::Shared | Weights::Sharded => polyreme_graph::Keeps::OwnMoments,
                };
                let plan = Plan { weights, keeps, ..staged(2, 2, kind) };
                let got = train(&net.step, &plan, &training);
                for (a, b) in got.totals.iter().zip(&apart.totals) {
                    assert!((a.0 - b.0).abs() < 1e-5 * b.0.abs(), "{} {kind}: {a:?}, {b:?}", net.name);
                }
            }
        }
    }
}

#[test]
fn fewer_microbatches_are_held_than_a_step_has() {
    let net = &nets::all()[1];
    let held = |kind: PipelineKind| {
        let plan = Plan { microbatches: 8, ..staged(2, 1, kind) };
        let body = Arc::new(compile(&net.step, &plan, &training(None), None).unwrap());
        let program = schedule(&plan, &training(None), &[body], &plan.whole_step());
        (program.slots, Engine::footprint(&program, 1, polyreme_exec::Isa::detect()).activations)
    };
    let (gpipe, one) = (held(PipelineKind::Gpipe), held(PipelineKind::OneFOneB));
    assert_eq!((gpipe.0, one.0), (8, 2));
    assert!(one.1 * 2 < gpipe.1, "{one:?} {gpipe:?}");
}

#[test]
fn what_cannot_be_cut_is_explained() {
    let net = &nets::all()[1];
    let why = |plan: &Plan| compile(&net.step, plan, &training(None), None).unwrap_err().to_string();
    let many = why(&staged(64, 1, PipelineKind::OneFOneB));
    assert!(many.contains("at most") && many.contains("64"), "{many}");
    let unknown = why(&Plan { cuts: vec!["nowhere".into()], ..staged(2, 1, PipelineKind::OneFOneB) });
    assert!(unknown.contains("`nowhere`"), "{unknown}");
    let few = why(&Plan { cuts: vec!["a".into()], ..staged(3, 1, PipelineKind::OneFOneB) });
    assert!(few.contains("names 1 layers") && few.contains("before 2"), "{few}");
}
