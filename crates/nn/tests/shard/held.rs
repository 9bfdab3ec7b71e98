//! What a rank holds of a transformer, planned and measured: a share of weights, gradients and moments, and in the arena of
//! activations the layers in flight.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Engine, Footprint, Isa, Options};
use polyreme_graph::Program;
use polyreme_nn::model::{Gpt, Model, TraceOptions};
use polyreme_parallel::{Plan, compile, schedule};

use crate::run::ShardCase;
use crate::{ADAMW, gpt};

const WIDTH: usize = 96;

fn large() -> ShardCase {
    let model = Gpt { vocab: 480, width: WIDTH, heads: 4, layers: 8, context: 32, dropout: 0.0 };
    let options = TraceOptions::training(32);
    ShardCase { model: Model::Gpt(model), optimizer: ADAMW, options, ..gpt(0.0) }
}

fn program(case: &ShardCase, rank: usize, shard_weights: bool) -> Program {
    let plan = Plan { shard_weights, ..case.plan(rank) };
    let samples = case.options.batch / case.data / case.accumulate;
    let body = compile(&case.step_graph(samples), &plan, &case.training(), None).unwrap();
    schedule(&plan, &case.training(), &[Arc::new(body)], &plan.whole_step())
}

fn footprint(case: &ShardCase, shard_weights: bool) -> Footprint {
    Engine::footprint(&program(case, 0, shard_weights), 1, Isa::detect())
}

/// Weights, gradients and moments.
fn learnt(f: &Footprint) -> usize {
    f.params + f.grads + f.optimizer + f.sums
}

#[test]
fn a_rank_holds_its_shards_and_the_layers_in_flight() {
    for (data, accumulate) in [(2, 1), (4, 1), (2, 2)] {
        let options = TraceOptions::training(16 * data * accumulate);
        let case = ShardCase { data, accumulate, options, ..large() };
        let (whole, sharded) = (footprint(&case, false), footprint(&case, true));
        let share = learnt(&sharded) as f64 / learnt(&whole) as f64;
        assert!(share <= 1.1 / data as f64, "{share} on each of {data} ranks: {sharded:?}, {whole:?}");
        // The weights of a block, which has 12 matrices of this width; the gradients that are being summed lie where activations
        // were when the backward pass began.
        let layer = 12 * WIDTH * WIDTH * 4;
        let more = sharded.activations.saturating_sub(whole.activations);
        println!("{data} ranks: {share:.3}, {} more KiB of activations, a layer {}", more >> 10, layer >> 10);
        assert!(more <= 2 * layer, "{more} more bytes of activations; a layer has {layer}");
    }
}

#[test]
fn what_was_planned_is_held() {
    let case = large();
    let planned = footprint(&case, true);
    std::thread::scope(|s| {
        for comm in Comm::local(case.data) {
            let (case, planned) = (&case, &planned);
            s.spawn(move || {
                let program = program(case, comm.rank(), true);
                let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
                let held = engine.held();
                let got = held.params + held.grads + held.optimizer + held.totals;
                assert!(got.abs_diff(learnt(planned)) <= 4096, "{held:?}, {planned:?}");
                engine.comm().barrier().unwrap();
            });
        }
    });
}
