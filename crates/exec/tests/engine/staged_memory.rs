//! Stages within a budget of memory: each recomputes what it must, fits, and gives the bits of one rank that recomputes nothing.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Inputs, Isa, Options, StepArgs};
use polyreme_graph::{Axis, DType, Graph, Optimizer, Program};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::stage::flops;
use polyreme_parallel::{
    Budget, CompileError, CutRoom, Mesh, Plan, Training, choose, choose_cuts, compile, schedule,
};

use crate::nets;
use crate::random::TestRandom;

const MICROBATCHES: usize = 4;

fn training() -> Training {
    let optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 };
    Training { optimizer, moments: DType::F32, clip: None, ema: None, scaled: false }
}

fn staged(step: &Graph, stage: usize, data: usize, pipeline: PipelineKind) -> Plan {
    let mesh = Mesh { stage, data, ..Mesh::data(1) };
    let plan = Plan { mesh, pipeline, microbatches: MICROBATCHES, ..Plan::alone() };
    choose(step, &plan, &flops(step), None).unwrap()
}

fn bytes(program: &Program) -> usize {
    Engine::footprint(program, 1, Isa::detect()).total()
}

/// The program of a rank that may take so much.
fn program(step: &Graph, plan: &Plan, most: Option<usize>) -> Result<Program, CompileError> {
    let budget = most.map(|bytes_max| Budget { bytes: bytes_max, measure: &bytes });
    let body = compile(step, plan, &training(), budget)?;
    Ok(schedule(plan, &training(), &[Arc::new(body)], &plan.whole_step()))
}

/// What the rank takes without recomputation, and the least that it can take.
fn range(step: &Graph, plan: &Plan) -> (usize, usize) {
    let most = bytes(&program(step, plan, None).unwrap());
    match program(step, plan, Some(0)) {
        Err(CompileError::Budget(error)) => (most, error.least_bytes),
        other => panic!("{other:?}"),
    }
}

/// Losses, and parameters by name.
type MemoryOutcome = (Vec<f64>, Vec<(String, Vec<f32>)>);

/// Some steps of all ranks, each with its own program.
fn train(step: &Graph, plan: &Plan, programs: &[Program]) -> MemoryOutcome {
    let run = |comm: Comm| {
        let rank = comm.rank();
        let data = plan.mesh.place(rank, Axis::Data);
        let comms = Comms::new(comm, &plan.mesh).unwrap();
        let options = Options { seed: 5, ..Options::threads(1) };
        let mut engine = Engine::join(programs[rank].clone(), options, comms).unwrap();
        let mut losses = Vec::new();
        for number in 0..2 {
            let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
                let seed = (number * 100 + microbatch * 10 + data) as u64;
                for (k, input) in step.inputs.iter().enumerate() {
                    let mut random = TestRandom::new(seed * 10 + k as u64);
                    match step.value(input.value).dtype {
                        _ if !inputs.has(&input.name) => {}
                        DType::I32 => inputs.i32(&input.name)?.fill_with(|| random.below(10) as i32),
                        _ => inputs.f32(&input.name)?.fill_with(|| random.uniform(-1.0, 1.0)),
                    }
                }
                Ok(1.0 / (MICROBATCHES * plan.ranks()) as f64)
            };
            let args = StepArgs { lr: 0.01, ..StepArgs::default() };
            losses.push(engine.step_with::<ExecError>(&mut load, args).unwrap().loss);
        }
        let names = programs[rank].graph().params.iter().map(|p| p.name.clone());
        let params = names.map(|name| (name.clone(), engine.param(&name).unwrap().to_vec())).collect();
        (losses, params)
    };
    let outcomes: Vec<MemoryOutcome> = std::thread::scope(|s| {
        let ranks: Vec<_> =
            Comm::local(plan.mesh.ranks()).into_iter().map(|comm| s.spawn(|| run(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (outcomes[0].0.clone(), outcomes.into_iter().flat_map(|(_, params)| params).collect())
}

#[test]
fn stages_that_recompute_fit_and_change_no_bit() {
    let kinds = [
        PipelineKind::OneFOneB,
        PipelineKind::ZbH1,
        PipelineKind::ZbV,
        PipelineKind::Interleaved { chunks: 2 },
    ];
    for net in nets::all() {
        for kind in kinds {
            let all = staged(&net.step, 2, 1, kind);
            let at = |rank: usize| Plan { rank, ..all.clone() };
            let plain: Vec<_> = (0..2).map(|r| program(&net.step, &at(r), None).unwrap()).collect();
            let want = train(&net.step, &all, &plain);
            let ranges: Vec<_> = (0..2).map(|r| range(&net.step, &at(r))).collect();
            // As little as each can, and one stage only.
            let tight = ranges.iter().map(|(_, least)| *least).collect::<Vec<_>>();
            for budgets in [tight.clone(), vec![tight[0], usize::MAX]] {
                let fit = |rank: usize| program(&net.step, &at(rank), Some(budgets[rank])).unwrap();
                let programs: Vec<_> = (0..2).map(fit).collect();
                for (rank, program) in programs.iter().enumerate() {
                    assert!(bytes(program) <= budgets[rank], "{} {kind}, rank {rank}", net.name);
                }
                assert!(train(&net.step, &all, &programs) == want, "{} {kind}: other bits", net.name);
            }
            // With parameters and all that belongs to them.
            if kind == PipelineKind::OneFOneB {
                let (most, least) = ranges[0];
                assert!(least * 5 < most * 4, "{}: {ranges:?}", net.name);
            }
        }
    }
}

#[test]
fn ranks_of_one_stage_decide_alike() {
    let net = &nets::all()[1];
    let all = staged(&net.step, 2, 2, PipelineKind::OneFOneB);
    for stage in 0..2 {
        let first = all.mesh.group(0, Axis::Stage)[stage];
        let (_, least) = range(&net.step, &Plan { rank: first, ..all.clone() });
        let ranks = (0..4).filter(|rank| all.mesh.place(*rank, Axis::Stage) == stage);
        let bodies = ranks.map(|rank| {
            let plan = Plan { rank, ..all.clone() };
            program(&net.step, &plan, Some(least)).unwrap().graph().to_string()
        });
        let bodies: Vec<_> = bodies.collect();
        assert!(bodies.windows(2).all(|pair| pair[0] == pair[1]), "stage {stage}");
    }
}

#[test]
fn a_bound_on_memory_moves_the_cut_and_is_never_a_reason_to_refuse() {
    let net = &nets::all()[0];
    let mesh = Mesh { stage: 2, ..Mesh::data(1) };
    let plan = Plan { mesh, microbatches: MICROBATCHES, ..Plan::alone() };
    let training = training();
    let cuts = |bytes: Option<usize>| {
        let room = bytes.map(|bytes| CutRoom { bytes, training: &training });
        choose_cuts(&net.step, &plan, &|_| 1.0, room).unwrap()
    };
    assert_eq!(cuts(Some(usize::MAX)), cuts(None));
    assert_eq!(cuts(Some(0)), cuts(None));
    // Some bound lies between: the first stage holds more microbatches, so it gets fewer layers.
    let moved = (14..26).map(|shift| cuts(Some(1 << shift))).any(|found| found != cuts(None));
    assert!(moved);
}
