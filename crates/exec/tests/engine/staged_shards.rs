//! Reproducible mode: stages and ranks of the data axis change no bit of losses, norms, weights, moments and states.

use std::collections::BTreeMap;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Inputs, Kept, Options, Slot, StepArgs};
use polyreme_graph::{Axis, DType, Graph, Keeps, Microbatch, Optimizer, Precision, Weights};
use polyreme_kernels::optim::Moments;
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::tree::run_of;
use polyreme_parallel::{CompileError, Mesh, Plan, StepShape, Training, compile, schedule};

use crate::nets::{self, Net};
use crate::stages::fill;

const STEPS: usize = 3;

const KINDS: [PipelineKind; 5] = [
    PipelineKind::OneFOneB,
    PipelineKind::Gpipe,
    PipelineKind::Interleaved { chunks: 2 },
    PipelineKind::ZbH1,
    PipelineKind::ZbV,
];

/// What is trained, and how.
#[derive(Clone)]
struct ShardedCase<'a> {
    step: &'a Graph,
    training: Training,
    shards: usize,
    /// Shards without samples.
    empty: &'a [usize],
    precision: Precision,
}

impl ShardedCase<'_> {
    fn of(net: &Net) -> ShardedCase<'_> {
        let optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 };
        let training = Training { optimizer, moments: DType::F32, clip: Some(0.5), ema: None, scaled: false };
        ShardedCase { step: &net.step, training, shards: 5, empty: &[], precision: Precision::F32 }
    }

    fn plan(&self, stage: usize, data: usize, pipeline: PipelineKind) -> Plan {
        let mesh = Mesh { stage, data, ..Mesh::data(1) };
        let precision = self.precision.clone();
        Plan { mesh, pipeline, shards: Some(self.shards), precision, ..Plan::alone() }
    }
}

/// Bits of losses and norms, and of tensors and moments by name.
#[derive(PartialEq, Debug)]
struct RunBits {
    totals: Vec<[u64; 2]>,
    tensors: BTreeMap<String, Vec<u32>>,
}

/// Runs some steps of one rank.
fn run(case: &ShardedCase, plan: &Plan, comms: Comms) -> Result<RunBits, CompileError> {
    let body = Arc::new(compile(case.step, plan, &case.training, None)?);
    let data = plan.mesh.place(plan.rank, Axis::Data);
    let runs: Vec<_> = (0..plan.ranks()).map(|rank| run_of(case.shards, plan.ranks(), rank)).collect();
    let samples = body.samples();
    let of_shard =
        |k: usize| (!case.empty.contains(&k)).then_some(Microbatch { body: 0, first_sample: k * samples });
    let shape = StepShape::shards(runs[data].clone().map(of_shard).collect(), runs.clone());
    let mine: Vec<usize> = runs[data].clone().filter(|k| !case.empty.contains(k)).collect();
    let program = schedule(plan, &case.training, &[body], &shape);
    let mut engine = Engine::join(program, Options { seed: 5, ..Options::threads(1) }, comms).unwrap();
    let mut totals = Vec::new();
    for number in 0..STEPS {
        let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            fill(case.step, inputs, (number * 100 + mine[microbatch]) as u64);
            Ok(1.0 / (1 + mine[microbatch] % 3) as f64)
        };
        let args = StepArgs { lr: 0.01, ..StepArgs::default() };
        let got = engine.step_with::<ExecError>(&mut load, args).unwrap();
        totals.push([got.loss, got.grad_norm.unwrap_or(0.0)].map(f64::to_bits));
    }
    let mut tensors = BTreeMap::new();
    for (slots, kept) in [(engine.param_slots(), Kept::Params), (engine.state_slots(), Kept::States)] {
        for Slot { name, range, .. } in slots {
            // Ranks that split a tensor have different parts of it.
            let part = plan.mesh.place(plan.rank, Axis::Tensor);
            tensors.insert(format!("{name} {part}"), bits(&engine.kept(kept)[range]));
        }
    }
    Ok(RunBits { totals, tensors })
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// All ranks of a mesh as threads. Ranks that have the same tensor must agree.
fn train(case: &ShardedCase, plan: &Plan) -> RunBits {
    let outcomes: Vec<RunBits> = std::thread::scope(|s| {
        let rank = |comm: Comm| {
            s.spawn(move || {
                let plan = Plan { rank: comm.rank(), ..plan.clone() };
                run(case, &plan, Comms::new(comm, &plan.mesh).unwrap()).unwrap()
            })
        };
        let ranks: Vec<_> = Comm::local(plan.mesh.ranks()).into_iter().map(rank).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    let mut all = RunBits { totals: outcomes[0].totals.clone(), tensors: BTreeMap::new() };
    for outcome in outcomes {
        assert_eq!(outcome.totals, all.totals, "all ranks know loss and norm");
        for (name, tensor) in outcome.tensors {
            let known = all.tensors.entry(name.clone()).or_insert_with(|| tensor.clone());
            assert!(*known == tensor, "ranks with {name} agree");
        }
    }
    all
}

/// Compares a mesh with one rank, to the bit.
fn check(case: &ShardedCase, plan: &Plan, want: &RunBits, what: &str) {
    let got = train(case, plan);
    let what = format!("{what}: {} on {:?}", plan.pipeline, plan.mesh);
    assert_eq!(got.totals, want.totals, "{what}: losses and norms");
    assert!(got.tensors.keys().eq(want.tensors.keys()), "{what}");
    for (name, want) in &want.tensors {
        assert!(got.tensors[name] == *want, "{what}: {name}");
    }
}

#[test]
fn stages_and_data_ranks_change_no_bit_under_any_schedule() {
    for net in nets::all() {
        let case = ShardedCase::of(&net);
        let alone = train(&case, &case.plan(1, 1, PipelineKind::OneFOneB));
        check(&case, &case.plan(1, 2, PipelineKind::OneFOneB), &alone, net.name);
        for kind in KINDS {
            for (stage, data) in [(2, 1), (3, 1), (2, 2), (3, 2)] {
                check(&case, &case.plan(stage, data, kind), &alone, net.name);
            }
        }
    }
}

#[test]
fn a_layer_that_all_stages_share_has_the_sum_of_one_rank() {
    let net = nets::looped();
    let case = ShardedCase::of(&net);
    let alone = train(&case, &case.plan(1, 1, PipelineKind::OneFOneB));
    for kind in [PipelineKind::OneFOneB, PipelineKind::Gpipe, PipelineKind::ZbH1] {
        for (stage, data) in [(2, 1), (3, 2), (4, 1)] {
            check(&case, &case.plan(stage, data, kind), &alone, net.name);
        }
        // A contribution from every stage: they are added up one after another, as on one rank.
        check(&case, &Plan { cuts: turns(), ..case.plan(6, 1, kind) }, &alone, net.name);
    }
}

/// Cuts before each turn of the looped network but the first.
fn turns() -> Vec<String> {
    (1..6).map(|i| format!("turn{i}")).collect()
}

#[test]
fn who_keeps_what_and_shards_without_samples_change_no_bit() {
    let adam = Optimizer::AdamW(Moments { weight_decay: 0.01, ..Moments::DEFAULT });
    let lamb = Optimizer::Lamb(Moments::DEFAULT);
    for net in [&nets::all()[1], &nets::all()[0]] {
        for (optimizer, empty) in [(adam, &[][..]), (lamb, &[0, 3]), (adam, &[3, 4, 5])] {
            let base = ShardedCase::of(net);
            let case =
                ShardedCase { training: Training { optimizer, ..base.training }, shards: 6, empty, ..base };
            let alone = train(&case, &case.plan(1, 1, PipelineKind::OneFOneB));
            for (weights, keeps) in [(Weights::Own, Keeps::OwnMoments), (Weights::Shared, Keeps::OwnMoments)]
            {
                let plan = Plan { weights, keeps, ..case.plan(2, 2, PipelineKind::ZbH1) };
                check(&case, &plan, &alone, net.name);
            }
        }
    }
}

#[test]
fn half_precision_too() {
    let net = &nets::all()[1];
    let precision = Precision::half(DType::Bf16);
    let case = ShardedCase { precision, ..ShardedCase::of(net) };
    let alone = train(&case, &case.plan(1, 1, PipelineKind::OneFOneB));
    for (stage, data, kind) in [(2, 1, PipelineKind::OneFOneB), (3, 2, PipelineKind::ZbV)] {
        check(&case, &case.plan(stage, data, kind), &alone, net.name);
    }
}

#[test]
fn stages_and_data_ranks_change_no_bit_of_split_matrices() {
    for net in [&nets::all()[1], &nets::all()[0]] {
        let case = ShardedCase::of(net);
        let split = |stage, data, kind| {
            let plan = case.plan(stage, data, kind);
            Plan { mesh: Mesh { tensor: 2, ..plan.mesh }, ..plan }
        };
        let alone = train(&case, &split(1, 1, PipelineKind::OneFOneB));
        for (stage, data, kind) in
            [(1, 2, PipelineKind::OneFOneB), (2, 1, PipelineKind::ZbH1), (2, 2, PipelineKind::OneFOneB)]
        {
            check(&case, &split(stage, data, kind), &alone, net.name);
        }
        // And it is the same training, but for rounding.
        let one = train(&case, &case.plan(1, 1, PipelineKind::OneFOneB));
        for (a, b) in alone.totals.iter().zip(&one.totals) {
            let [a, b] = [a, b].map(|t| t.map(f64::from_bits));
            assert!((0..2).all(|k| (a[k] - b[k]).abs() < 1e-4 * b[k].abs()), "{a:?} {b:?}");
        }
    }
}

#[test]
fn what_would_depend_on_the_stages_is_refused() {
    let net = nets::looped();
    let case = ShardedCase::of(&net);
    let why =
        |training: &Training, plan: &Plan| compile(case.step, plan, training, None).unwrap_err().to_string();
    let order = why(&case.training, &Plan { cuts: turns(), ..case.plan(3, 1, PipelineKind::ZbV) });
    assert!(order.contains("`again`") && order.contains("zb-v") && order.contains("1f1b"), "{order}");
    let half = Training { moments: DType::Bf16, ..case.training };
    let rounding = why(&half, &case.plan(2, 1, PipelineKind::OneFOneB));
    assert!(rounding.contains("bf16"), "{rounding}");
}
