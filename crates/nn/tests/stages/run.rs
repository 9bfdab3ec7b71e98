//! A step run whole, and chunk by chunk with a separate engine for each.

use std::collections::BTreeMap;

use polyreme_exec::{Engine, Options};
use polyreme_graph::{Body, DType, Graph, Program, fuse};
use polyreme_kernels::optim::Optimizer;
use polyreme_parallel::stage::{BackwardOrder, ChunkGraph, Crossing, CrossingPass, Cut, join};

/// Outputs, gradients and new states as bits, by name.
pub(crate) type StepResults = BTreeMap<String, Vec<u32>>;

/// Values on their way from one chunk to another.
type SentValues = BTreeMap<String, Vec<f32>>;

const SGD: Optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };

/// The results of a step of the whole graph.
pub(crate) fn whole(step: &Graph) -> StepResults {
    let mut engine = engine(step, Program::train(step, SGD, None), &SentValues::new());
    engine.step(0.0).unwrap();
    let mut results = StepResults::new();
    for (name, _) in &step.outputs {
        results.insert(format!("output {name}"), bits(engine.output(name).unwrap()));
    }
    for param in &step.params {
        let grad = engine.grad(&param.name).unwrap();
        results.insert(format!("gradient {}", param.name), bits(grad.unwrap_or_default()));
    }
    for state in &step.states {
        results.insert(format!("state {}", state.name), bits(engine.state(&state.name).unwrap()));
    }
    results
}

/// The results of a step in chunks: forward passes from the first chunk to the last, then whole steps from the last to the
/// first. Gradients of tied parameters are added up.
pub(crate) fn in_chunks(cut: &Cut) -> StepResults {
    let mut sent = SentValues::new();
    for chunk in &cut.chunks {
        // Its backward pass computes with zeros for now, and is not looked at.
        let mut engine = engine(&chunk.graph, Program::gradients(&chunk.graph), &sent);
        engine.run().unwrap();
        send(chunk.leaves.iter().filter(|c| c.pass == CrossingPass::Forward), &engine, &mut sent);
    }
    let mut results = StepResults::new();
    let mut grads: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for chunk in cut.chunks.iter().rev() {
        let mut engine = engine(&chunk.graph, Program::train(&chunk.graph, SGD, None), &sent);
        engine.step(0.0).unwrap();
        send(chunk.leaves.iter().filter(|c| c.pass == CrossingPass::Backward), &engine, &mut sent);
        for (name, _) in chunk.graph.outputs.iter().filter(|(name, _)| !crosses(&chunk.leaves, name)) {
            let before = results.insert(format!("output {name}"), bits(engine.output(name).unwrap()));
            assert!(before.is_none(), "two chunks have output {name}");
        }
        for param in &chunk.graph.params {
            let tied = cut.tied.iter().any(|t| t.name == param.name);
            assert!(tied || !grads.contains_key(&param.name), "two chunks have {}", param.name);
            let sum = grads.entry(param.name.clone()).or_default();
            let Some(grad) = engine.grad(&param.name).unwrap() else { continue };
            match sum.is_empty() {
                true => sum.extend_from_slice(grad),
                false => sum.iter_mut().zip(grad).for_each(|(sum, g)| *sum += g),
            }
        }
        for state in &chunk.graph.states {
            results.insert(format!("state {}", state.name), bits(engine.state(&state.name).unwrap()));
        }
    }
    results.extend(grads.into_iter().map(|(name, grad)| (format!("gradient {name}"), bits(&grad))));
    results
}

/// Outputs and gradients of a step whose chunks are joined, those of each rank in one body. Gradients of parameters that
/// several ranks have are left out.
pub(crate) fn on_ranks(cut: &Cut, ranks: &[Vec<usize>], order: BackwardOrder) -> StepResults {
    let fused = |&k: &usize| ChunkGraph { graph: fuse(&cut.chunks[k].graph), ..cut.chunks[k].clone() };
    let bodies: Vec<_> =
        ranks.iter().map(|r| join(&r.iter().map(fused).collect::<Vec<_>>(), order)).collect();
    let (mut sent, mut results) = (SentValues::new(), StepResults::new());
    // In each round what has arrived is right for one more block of each microbatch: two for each chunk.
    for _ in 0..2 * cut.chunks.len() {
        for body in &bodies {
            let mut engine = engine(&body.graph, Program::of(Body::of(body.graph.clone())), &sent);
            engine.run().unwrap();
            send(body.leaves.iter(), &engine, &mut sent);
            for (name, _) in body.graph.outputs.iter().filter(|(name, _)| !crosses(&body.leaves, name)) {
                results.insert(format!("output {name}"), bits(engine.output(name).unwrap()));
            }
            for param in &body.graph.params {
                let holders = bodies.iter().filter(|b| b.graph.params.iter().any(|p| p.name == param.name));
                if holders.count() == 1 {
                    let grad = engine.grad(&param.name).unwrap().unwrap_or_default();
                    results.insert(format!("gradient {}", param.name), bits(grad));
                }
            }
        }
    }
    results
}

fn crosses(crossings: &[Crossing], name: &str) -> bool {
    crossings.iter().any(|c| c.name == name)
}

fn send<'a>(leaves: impl Iterator<Item = &'a Crossing>, engine: &Engine, sent: &mut SentValues) {
    for crossing in leaves {
        let value = engine.output(&crossing.name).unwrap().to_vec();
        assert_eq!(value.len(), crossing.shape.numel());
        sent.insert(crossing.name.clone(), value);
    }
}

/// An engine whose weights and inputs follow from their names, with what has been sent to it.
fn engine(graph: &Graph, program: Program, sent: &SentValues) -> Engine {
    let mut engine = Engine::new(program, Options { seed: 7, ..Options::threads(2) }).unwrap();
    for param in &graph.params {
        fill(engine.param_mut(&param.name).unwrap(), &param.name, 0.2);
    }
    for input in &graph.inputs {
        let name = &input.name;
        match (graph.value(input.value).dtype, sent.get(name)) {
            (DType::I32, _) => {
                let ids = engine.input_i32(name).unwrap();
                ids.iter_mut().enumerate().for_each(|(i, id)| *id = (i * i + 3 * i + name.len()) as i32 % 5);
            }
            (_, Some(value)) => engine.input_f32(name).unwrap().copy_from_slice(value),
            (_, None) if name.starts_with("to ") => engine.input_f32(name).unwrap().fill(0.0),
            (_, None) => fill(engine.input_f32(name).unwrap(), name, 1.0),
        }
    }
    engine
}

/// Numbers in `-size..size` that look random and follow from a name.
fn fill(data: &mut [f32], name: &str, size: f32) {
    let mut state = name.bytes().fold(17u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)));
    for x in data {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *x = size * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0);
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}
