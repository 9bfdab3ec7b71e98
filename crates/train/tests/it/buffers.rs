//! Every model with gradients that only their owners keep: the order of its program holds, however large the batch is and
//! whatever is recomputed, and buckets lie in the same places.

use std::sync::Arc;

use polyreme_exec::Engine;
use polyreme_graph::{DType, Graph, Keeps, Moments, Optimizer, Program, Weights, differentiate, recompute};
use polyreme_nn::{Model, TraceOptions};
use polyreme_parallel::{Mesh, Plan, Training, compile, schedule, sync_batch_norm};

fn step(model: &Model, n: usize) -> Graph {
    let forward = model.trace(&TraceOptions::training(n)).unwrap();
    let loss = forward.output("loss").unwrap();
    differentiate(&forward, loss).unwrap()
}

fn lower(step: &Graph, bucket_bytes: usize, weights: Weights) -> Program {
    let training = Training {
        optimizer: Optimizer::AdamW(Moments::DEFAULT),
        moments: DType::F32,
        clip: Some(1.0),
        ema: None,
        scaled: false,
    };
    let plan = Plan {
        mesh: Mesh::data(4),
        rank: 1,
        keeps: Keeps::OwnGradients,
        weights,
        bucket_bytes,
        ..Plan::alone()
    };
    let body = compile(step, &plan, &training, None).unwrap();
    schedule(&plan, &training, &[Arc::new(body)], &plan.whole_step())
}

#[test]
fn buckets_lie_in_the_same_places_for_every_batch() {
    for name in Model::NAMES {
        let model = Model::by_name(name).unwrap();
        for bucket_bytes in [1, 1 << 18, 1 << 20] {
            let first = lower(&step(&model, 8), bucket_bytes, Weights::Shared);
            let buffers = first.grad_buffers.as_ref().unwrap();
            let learnt = buffers.buckets.last().unwrap().end;
            let deep = ["gpt", "resnet18", "resnet101"].contains(&name);
            assert!(!deep || buffers.len < learnt / 2, "{name}: {} of {learnt} elements", buffers.len);
            for n in [1, 2, 3] {
                let step = step(&model, n);
                for step in [sync_batch_norm(&step), step] {
                    let other = lower(&step, bucket_bytes, Weights::Own);
                    assert_eq!(
                        other.grad_buffers, first.grad_buffers,
                        "{name}: {n} samples, buckets of {bucket_bytes}"
                    );
                    // Its plan is verified with it.
                    let footprint = Engine::footprint(&other, 1, polyreme_exec::Isa::detect());
                    let own: usize = other.role.as_ref().unwrap().own().iter().map(|r| r.len()).sum();
                    assert_eq!(footprint.grads, 4 * (buffers.len + own), "{name}");
                }
            }
        }
    }
}

#[test]
fn recomputation_leaves_buckets_where_they_are() {
    for name in ["mlp", "cnn", "resnet18_cifar", "gpt", "bilstm", "encoder"] {
        let step = step(&Model::by_name(name).unwrap(), 4);
        let measure = |step: &Graph| {
            Engine::footprint(&lower(step, 1 << 18, Weights::Shared), 1, polyreme_exec::Isa::detect()).total()
        };
        let plain = lower(&step, 1 << 18, Weights::Shared);
        for tenths in [9, 8, 7, 6] {
            let Ok(fits) = recompute(&step, measure(&step) * tenths / 10, &measure) else { continue };
            assert_eq!(
                lower(&fits.graph, 1 << 18, Weights::Shared).grad_buffers,
                plain.grad_buffers,
                "{name}: {tenths} tenths"
            );
        }
    }
}
