//! Evaluation with sharded weights: a forward pass gathers what it reads, and has the bits of one rank's.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Engine, Options};
use polyreme_graph::{Body, Builder, Graph};
use polyreme_nn::model::TraceOptions;
use polyreme_parallel::{Passes, both_passes, compile, schedule, shard};

use crate::run::ShardCase;
use crate::{ADAMW, gpt};

/// The network without dropout, for so many samples.
fn forward(case: &ShardCase, batch: usize) -> Graph {
    let options = &TraceOptions { batch, ..case.options };
    let mut b = Builder::new();
    let input = case.model.input(options);
    let x = b.input(input.name, input.shape, input.dtype).unwrap();
    let logits = case.model.logits(&mut b, x, false).unwrap();
    b.finish(&[("logits", logits)])
}

/// The logits of a rank that trains with sharded weights, before its first step.
fn logits(case: &ShardCase, comm: Comm) -> Vec<u32> {
    let (ranks, plan) = (comm.size(), case.plan(comm.rank()));
    let step = compile(&case.step_graph(2), &plan, &case.training(), None).unwrap();
    let program = schedule(&plan, &case.training(), &[Arc::new(step)], &plan.whole_step());
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comm).unwrap();
    let graph = forward(case, 3);
    let graph = plan.shard_place().map_or(graph.clone(), |place| shard(&graph, place, Passes::Together));
    let body = Arc::new(Body::forward(&graph));
    let number = engine.add(both_passes(ranks, &body)).unwrap();
    engine.select(number);
    let ids = engine.input_i32(&graph.inputs[0].name).unwrap();
    ids.iter_mut().enumerate().for_each(|(i, id)| *id = (i * 7 % 31) as i32);
    engine.run().unwrap();
    let logits = engine.output("logits").unwrap().iter().map(|x| x.to_bits()).collect();
    engine.comm().barrier().unwrap();
    logits
}

#[test]
fn a_forward_pass_gathers_the_weights_of_training() {
    let of = |data: usize| -> Vec<Vec<u32>> {
        let case = &ShardCase { data, optimizer: ADAMW, ..gpt(0.0) };
        std::thread::scope(|s| {
            let rank = |comm| s.spawn(move || logits(case, comm));
            let ranks: Vec<_> = Comm::local(data).into_iter().map(rank).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    };
    let one = of(1);
    for data in [2, 3] {
        for logits in of(data) {
            assert_eq!(logits, one[0], "{data} ranks");
        }
    }
}
