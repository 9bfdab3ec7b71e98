//! Evaluation with sharded weights: a forward pass gathers what it reads, and has the outputs of one rank's; their bits, if ranks
//! split nothing else.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Comms, Engine, ExecError, Options};
use polyreme_graph::{Builder, Graph};
use polyreme_nn::model::TraceOptions;
use polyreme_parallel::stage::flops;
use polyreme_parallel::{choose, compile, compile_forward, schedule};

use crate::run::{ShardCase, near};
use crate::{ADAMW, gpt};

/// The network without dropout, for `n` samples.
fn forward(case: &ShardCase, batch: usize) -> Graph {
    let options = &TraceOptions { batch, ..case.options };
    let mut b = Builder::new();
    let input = case.model.input(options);
    let x = b.input(input.name, input.shape, input.dtype).unwrap();
    let logits = case.model.logits(&mut b, x, false).unwrap();
    b.finish(&[("logits", logits)])
}

/// The logits of a rank that trains with sharded weights, before its first step, if it has them.
fn logits(case: &ShardCase, comm: Comm) -> Option<Vec<f32>> {
    let (step, training) = (case.step_graph(2), case.training());
    let plan = choose(&step, &case.plan(comm.rank()), &flops(&step), None).unwrap();
    let body = compile(&step, &plan, &training, None).unwrap();
    let program = schedule(&plan, &training, &[Arc::new(body)], &plan.whole_step());
    let comms = Comms::new(comm, &plan.mesh).unwrap();
    let mut engine = Engine::join(program, Options { seed: 3, ..Options::threads(1) }, comms).unwrap();
    let graph = forward(case, 3);
    let number = engine.add(compile_forward(&graph, &plan).unwrap()).unwrap();
    engine.select(number);
    let filled: Result<(), ExecError> = engine.fill_slots(|inputs| {
        let name = &graph.inputs[0].name;
        if inputs.has(name) {
            let ids = inputs.i32(name)?;
            ids.iter_mut().enumerate().for_each(|(i, id)| *id = (i * 7 % 31) as i32);
        }
        Ok(())
    });
    filled.unwrap();
    engine.run().unwrap();
    let logits = engine.output("logits").ok().map(<[f32]>::to_vec);
    engine.comm().barrier().unwrap();
    logits
}

#[test]
fn a_forward_pass_gathers_the_weights_of_training() {
    let of = |data: usize, tensor: usize, stage: usize| -> Vec<Vec<f32>> {
        let case = &ShardCase { data, tensor, stage, accumulate: 2, optimizer: ADAMW, ..gpt(0.0) };
        std::thread::scope(|s| {
            let rank = |comm| s.spawn(move || logits(case, comm));
            let ranks: Vec<_> = Comm::local(data * tensor * stage).into_iter().map(rank).collect();
            ranks.into_iter().filter_map(|r| r.join().unwrap()).collect()
        })
    };
    let one = of(1, 1, 1);
    for (data, tensor, stage) in [(2, 1, 1), (3, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2)] {
        let all = of(data, tensor, stage);
        assert_eq!(all.len(), data * tensor, "the last stage has the outputs");
        for logits in all {
            match tensor {
                1 => assert_eq!(logits, one[0], "{data}x{tensor}x{stage}"),
                _ => near("logits", &logits, &one[0], 1e-5),
            }
        }
    }
}
