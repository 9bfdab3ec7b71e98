//! Every model with gradients that only their owners keep: the order of its program holds, however large the batch is and
//! whatever is recomputed, and buckets lie in the same places.

use polyreme_exec::Engine;
use polyreme_graph::{Graph, Moments, Optimizer, Program, differentiate, recompute};
use polyreme_nn::{Model, TraceOptions};
use polyreme_parallel::{DataPlan, data_parallel, sync_batch_norm};

fn step(model: &Model, n: usize) -> Graph {
    let forward = model.trace(&TraceOptions::training(n)).unwrap();
    let loss = forward.output("loss").unwrap();
    differentiate(&forward, loss).unwrap()
}

fn lower(step: &Graph, bucket_bytes: usize, shared_weights: bool) -> Program {
    let optimizer = Optimizer::AdamW(Moments::DEFAULT);
    let plan = DataPlan {
        rank: 1,
        ranks: 4,
        shard_gradients: true,
        shared_weights,
        bucket_bytes,
        ..DataPlan::alone()
    };
    data_parallel(step, optimizer, Some(1.0), &plan)
}

#[test]
fn buckets_lie_in_the_same_places_for_every_batch() {
    for name in Model::NAMES {
        let model = Model::by_name(name).unwrap();
        for bucket_bytes in [1, 1 << 18, 1 << 20] {
            let first = lower(&step(&model, 8), bucket_bytes, true);
            let buffers = first.buffers.as_ref().unwrap();
            let learnt = buffers.buckets.last().unwrap().end;
            let deep = ["gpt", "resnet18", "resnet101"].contains(&name);
            assert!(!deep || buffers.len < learnt / 2, "{name}: {} of {learnt} elements", buffers.len);
            for n in [1, 2, 3] {
                let step = step(&model, n);
                for step in [sync_batch_norm(&step), step] {
                    let other = lower(&step, bucket_bytes, false);
                    assert_eq!(
                        other.buffers, first.buffers,
                        "{name}: {n} samples, buckets of {bucket_bytes}"
                    );
                    // Its plan is verified with it.
                    let footprint = Engine::footprint(&other, 1);
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
        let measure = |step: &Graph| Engine::footprint(&lower(step, 1 << 18, true), 1).total();
        let plain = lower(&step, 1 << 18, true);
        for tenths in [9, 8, 7, 6] {
            let Ok(fits) = recompute(&step, measure(&step) * tenths / 10, &measure) else { continue };
            assert_eq!(lower(&fits.graph, 1 << 18, true).buffers, plain.buffers, "{name}: {tenths} tenths");
        }
    }
}
