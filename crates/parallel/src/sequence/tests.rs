//! Tests of the rewrite on small steps; `polyreme-nn` compares whole models with one rank.

use std::sync::Arc;

use polyreme_graph::op::{Cell, CrossEntropy, ExchangeKind, Op, ReduceKind};
use polyreme_graph::{
    Axis, Builder, Collective, DType, Graph, Init, Instr, Optimizer, Tensor, Traced, differentiate,
};

use super::{SequenceOrder, SequencePlace, SequenceSplit, split};
use crate::{Mesh, Plan, StepShape, Training, compile, schedule};

const SAMPLES: usize = 2;
const TIME: usize = 8;
const WIDTH: usize = 4;

/// A step on sequences `[samples, time, width]` with a mean over time and a loss over classes.
fn step(layer: impl Fn(&mut Builder, Tensor) -> Traced) -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", [SAMPLES, TIME, WIDTH], DType::F32).unwrap();
    let labels = b.input("labels", [SAMPLES], DType::I32).unwrap();
    let w = b.param("in", [WIDTH, WIDTH], Init::Const(0.1)).unwrap();
    let x = b.linear(x, w, None).unwrap();
    let y = b.layer("layer", |b| layer(b, x)).unwrap();
    let mean = b.mean(y, &[1]).unwrap();
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
    let loss = b.cross_entropy(mean, labels, None, options).unwrap();
    differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
}

fn cut(step: &Graph, rank: usize, ranks: usize) -> SequenceSplit {
    split(step, SequencePlace { rank, ranks, order: SequenceOrder::of(step) }).unwrap()
}

/// How many exchanges along the sequence axis satisfy this.
fn count(graph: &Graph, is: impl Fn(ExchangeKind) -> bool) -> usize {
    let along = |op: &Op| match *op {
        Op::Exchange { axis, kind } => axis == Axis::Sequence && is(kind),
        _ => false,
    };
    graph.nodes.iter().filter(|node| along(&node.op)).count()
}

fn attention(causal: bool) -> impl Fn(&mut Builder, Tensor) -> Traced {
    move |b, x| {
        let w = b.param("qkv", [3 * WIDTH, WIDTH], Init::Const(0.1))?;
        let qkv = b.linear(x, w, None)?;
        let qkv = b.reshape(qkv, [SAMPLES, TIME, 3, 2, WIDTH / 2])?;
        let o = b.attention_packed(qkv, causal, None)?;
        b.reshape(o, [SAMPLES, TIME, WIDTH])
    }
}

#[test]
fn attention_passes_its_keys_round_a_ring_twice_and_their_gradients_once() {
    for causal in [false, true] {
        let step = step(attention(causal));
        for ranks in [2, 4] {
            for rank in 0..ranks {
                let SequenceSplit { graph, replicated, .. } = cut(&step, rank, ranks);
                let passed = count(&graph, |kind| matches!(kind, ExchangeKind::Pass { .. }));
                assert_eq!(passed, 2 * (2 * (ranks - 1) + ranks), "keys and values\n{graph}");
                // The mean over time and the two gradients; the loss is whole by then.
                assert_eq!(count(&graph, |kind| kind == ExchangeKind::Sum), 3, "{graph}");
                assert_eq!(replicated, []);
            }
        }
    }
}

#[test]
fn a_recurrent_state_is_received_from_one_side_and_sent_to_the_other() {
    let layer = |b: &mut Builder, x: Tensor| -> Traced {
        let xw = b.param("ih", [4 * WIDTH, WIDTH], Init::Const(0.1))?;
        let xp = b.linear(x, xw, None)?;
        let w = b.param("hh", [4 * WIDTH, WIDTH], Init::Const(0.1))?;
        let bias = b.param("bias", [4 * WIDTH], Init::Const(0.1))?;
        b.recurrent(Cell::Lstm, xp, w, bias, &[], false)
    };
    let step = step(layer);
    for (rank, want) in [(0, [1, 1]), (1, [2, 2]), (2, [2, 2]), (3, [1, 1])] {
        let graph = cut(&step, rank, 4).graph;
        let sends = count(&graph, |kind| matches!(kind, ExchangeKind::Pass { to: Some(_), .. }));
        let receives = count(&graph, |kind| matches!(kind, ExchangeKind::Pass { from: Some(_), .. }));
        assert_eq!([sends, receives], want, "rank {rank}\n{graph}");
    }
}

/// What ranks do together is in the program: messages are started before what they overlap with, and waited for after it.
#[test]
fn a_program_shows_what_goes_round_the_ring() {
    let mesh = Mesh { sequence: 2, ..Mesh::data(1) };
    let plan = Plan { mesh, rank: 1, ..Plan::alone() };
    let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let training = Training { optimizer, moments: DType::F32, clip: None, scaled: false, ema: None };
    let body = compile(&step(attention(true)), &plan, &training, None).unwrap();
    let program = schedule(&plan, &training, &[Arc::new(body)], &StepShape::one());
    let graph = program.graph();
    let starts = |op: &str| program.exchanges.iter().filter(|e| program.describe(e).starts_with(op)).count();
    // Keys and values forwards; backwards again, and twice their gradients.
    assert_eq!([starts("send f32"), starts("receive f32"), starts("all-reduce f32")], [8, 8, 3], "{program}");
    let first = program.exchanges.iter().position(|e| matches!(e.op, Collective::Receive { .. })).unwrap();
    let at = |instr: Instr| program.instrs.iter().position(|i| *i == instr).unwrap();
    let (started, waited) = (at(Instr::Start(first)), at(Instr::Wait(first)));
    let attends = |instr: &Instr| match *instr {
        Instr::Run { block, .. } => {
            program.blocks[block].nodes.clone().any(|i| graph.nodes[i].op.name() == "attention")
        }
        _ => false,
    };
    assert!(program.instrs[started..waited].iter().any(attends), "{program}");
}

#[test]
fn what_has_no_rule_is_computed_from_whole_sequences() {
    let masked = step(|b, x| {
        let qkv = b.concat(&[x, x, x], 2)?;
        let qkv = b.reshape(qkv, [SAMPLES, TIME, 3, 2, WIDTH / 2])?;
        let mask = b.input("mask", [TIME, TIME], DType::F32)?;
        let o = b.attention_packed(qkv, false, Some(mask))?;
        b.reshape(o, [SAMPLES, TIME, WIDTH])
    });
    let found = cut(&masked, 0, 2).replicated;
    assert_eq!(found, [("attention", "layer".to_string())]);
    let largest = step(|b, x| {
        let max = b.reduce(ReduceKind::Max, x, &[1], true)?;
        b.sub(x, max)
    });
    assert_eq!(cut(&largest, 1, 2).replicated, [("max", "layer".to_string())]);
}
