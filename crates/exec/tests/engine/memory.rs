//! The memory plan and recomputation: what fits, and that results stay the same bits.

use polyreme_exec::{Engine, Footprint, Options};
use polyreme_graph::graph::Graph;
use polyreme_graph::{DType, MemoryPlan, Op, Place, Program, recompute};
use polyreme_kernels::optim::{Moments, Optimizer};

use crate::nets;

const THREADS: usize = 2;

fn activations(step: &Graph) -> usize {
    Engine::footprint(&Program::gradients(step), THREADS, polyreme_exec::Isa::detect()).activations
}

/// Losses, gradients, parameters and states of two steps.
fn train(net: &nets::Net, step: &Graph) -> Vec<(String, Vec<f32>)> {
    let program = Program::train(step, Optimizer::AdamW(Moments::DEFAULT), None);
    let mut engine = Engine::new(program, Options::threads(THREADS)).unwrap();
    let mut seen = Vec::new();
    for i in 0..2 {
        net.feed(&mut engine, i);
        engine.step(1e-2).unwrap();
        seen.push((format!("loss {i}"), engine.output("loss").unwrap().to_vec()));
        for p in &step.params {
            let grad = engine.grad(&p.name).unwrap().unwrap().to_vec();
            seen.push((format!("gradient {i} of {}", p.name), grad));
            seen.push((format!("{} {i}", p.name), engine.param(&p.name).unwrap().to_vec()));
        }
        for s in &step.states {
            seen.push((format!("{} {i}", s.name), engine.state(&s.name).unwrap().to_vec()));
        }
    }
    seen
}

#[test]
fn recomputation_fits_its_budget_and_changes_no_bit() {
    for net in nets::all() {
        let whole = activations(&net.step);
        let want = train(&net, &net.step);
        let mut rewritten = 0;
        for percent in [100, 90, 70, 50] {
            let budget = whole * percent / 100;
            let done = match recompute(&net.step, budget, &activations) {
                Ok(done) => done,
                Err(e) => {
                    // Half is within reach where activations, not scratch, are most of it.
                    assert!(net.name != "transformer", "{e}");
                    assert_eq!(e.budget_bytes, budget);
                    assert!(e.least_bytes > budget && e.least_bytes <= whole, "{}: {e}", net.name);
                    // The minimum is reached, and nothing below it.
                    let least = recompute(&net.step, e.least_bytes, &activations).unwrap();
                    assert_eq!(least.bytes, e.least_bytes, "{}", net.name);
                    assert!(recompute(&net.step, e.least_bytes - 1, &activations).is_err());
                    least
                }
            };
            assert_eq!(done.bytes, activations(&done.graph));
            assert_eq!(done.graph == net.step, done.bytes == whole, "{} at {percent} %", net.name);
            rewritten += usize::from(done.graph != net.step);
            for ((what, a), (_, b)) in want.iter().zip(train(&net, &done.graph)) {
                let same = a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()));
                let far = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(same, "{} at {percent} %: {what} differs by up to {far}", net.name);
            }
        }
        assert!(rewritten > 0, "{}: something was recomputed", net.name);
    }
}

#[test]
fn a_footprint_is_what_the_plan_says() {
    for net in nets::all() {
        for (optimizer, moments, per_param) in [
            (Optimizer::AdamW(Moments::DEFAULT), DType::F32, 2),
            (Optimizer::AdamW(Moments::DEFAULT), DType::Bf16, 2),
            (Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 }, DType::F32, 1),
            (Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 }, DType::Bf16, 1),
            (Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 }, DType::F32, 0),
        ] {
            let program = Program { moments, ..Program::train(&net.step, optimizer, None) };
            let plan = MemoryPlan::new(program.graph(), &vec![0; program.graph().nodes.len()], &[]);
            let got = Engine::footprint(&program, THREADS, polyreme_exec::Isa::detect());
            let params = plan.param_len * 4;
            let want = Footprint {
                params,
                grads: params,
                sums: 0,
                optimizer: per_param * (plan.param_len * moments.bytes()).next_multiple_of(64),
                states: plan.state_len * 4,
                average: 0,
                inputs: plan.input_bytes,
                // Scratch depends on kernels: here it can only add.
                activations: got.activations.max(plan.arena_bytes),
            };
            assert_eq!(got, want, "{}", net.name);
            let held = Engine::new(program.clone(), Options::threads(THREADS)).unwrap().held();
            assert_eq!(held.optimizer, got.optimizer, "{}", net.name);
            assert_eq!(got.total(), plan.total_bytes() - plan.arena_bytes + got.optimizer + got.activations);
            let numel = net.step.param_numel();
            assert!((numel..numel + 16 * net.step.params.len()).contains(&plan.param_len), "{}", net.name);
        }
        let forward = Engine::footprint(&Program::forward(&net.step), THREADS, polyreme_exec::Isa::detect());
        assert_eq!((forward.grads, forward.optimizer), (0, 0));
    }
}

#[test]
fn places_are_used_again() {
    for net in nets::all() {
        let graph = Program::gradients(&net.step).graph().clone();
        let plan = MemoryPlan::new(&graph, &vec![0; graph.nodes.len()], &[]);
        let in_arena = |v: &polyreme_graph::ValueId| matches!(plan.places[v.idx()], Place::Arena(_));
        let values = (0..graph.values.len() as u32).map(polyreme_graph::ValueId);
        let sum: usize = values.filter(in_arena).map(|v| graph.value(v).bytes()).sum();
        assert!(plan.arena_bytes * 10 < sum * 8, "{}: {} of {sum}", net.name, plan.arena_bytes);
        let in_place = graph.nodes.iter().filter(|n| matches!(n.op, Op::Fused(_))).any(|n| {
            let place = |v: &polyreme_graph::ValueId| plan.places[v.idx()];
            n.outputs.iter().any(|o| in_arena(o) && n.inputs.iter().any(|i| place(i) == place(o)))
        });
        assert!(in_place || net.name == "recurrent", "{}: no fused pass works in place", net.name);
    }
}
