//! Steps with sharded weights as text, and what every rank does.

use std::sync::Arc;

use polyreme_graph::{
    Axis, Body, Builder, Collective, DType, ExchangeKind, Graph, Init, Instr, Microbatch, Moments, Op,
    Optimizer, Precision, Program, differentiate,
};

use super::*;
use crate::mesh::Mesh;
use crate::passes::{CompileError, compile};
use crate::plan::{Plan, StepShape, Training};
use crate::schedule::schedule;

const ADAM: Training = Training {
    optimizer: Optimizer::Adam(Moments::DEFAULT),
    moments: DType::F32,
    clip: None,
    ema: None,
    scaled: false,
};

fn plan() -> Plan {
    Plan { mesh: Mesh::data(2), rank: 1, shard_weights: true, ..Plan::alone() }
}

/// Four layers with these widths, with a bias in the first, and a mean.
fn forward(widths: [usize; 5]) -> (Graph, polyreme_graph::Tensor) {
    let mut b = Builder::new();
    let mut h = b.input("x", [4, widths[0]], DType::F32).unwrap();
    for (k, w) in widths.windows(2).enumerate() {
        let layer = |b: &mut Builder| {
            let weight = b.param("weight", [w[1], w[0]], Init::Uniform { bound: 0.5 })?;
            let bias = (k == 0).then(|| b.param("bias", [w[1]], Init::Const(0.0))).transpose()?;
            b.linear(h, weight, bias)
        };
        h = b.layer(["a", "b", "c", "d"][k], layer).unwrap();
    }
    let loss = b.layer("loss", |b| b.mean(h, &[0, 1])).unwrap();
    (b.finish(&[("loss", loss)]), loss)
}

fn step() -> Graph {
    let (forward, loss) = forward([32; 5]);
    differentiate(&forward, loss).unwrap()
}

fn body(plan: &Plan) -> Arc<Body> {
    Arc::new(compile(&step(), plan, &ADAM, None).unwrap())
}

fn started(program: &Program) -> Vec<String> {
    let start = |i: &Instr| match i {
        Instr::Start(i) => Some(program.describe(&program.exchanges[*i])),
        _ => None,
    };
    program.instrs.iter().filter_map(start).collect()
}

#[test]
fn gathers_are_started_a_layer_ahead() {
    let plan = plan();
    let program = schedule(&plan, &ADAM, &[body(&plan)], &plan.whole_step());
    let got = program.to_string();
    assert_eq!(got, include_str!("../../snapshots/sharded_weights.txt"), "\n--- got ---\n{got}");
}

#[test]
fn the_last_layer_is_gathered_once_and_the_first_has_no_need_in_the_backward_pass() {
    let count = |passes: Passes, op: &str| {
        let graph = shard(&step(), ShardPlace { rank: 0, ranks: 2, in_tree: false }, passes);
        graph.nodes.iter().filter(|n| n.op.name() == op).count()
    };
    // Of four: all, and two more for the backward pass, where the last one is kept.
    assert_eq!(count(Passes::Together, "axis_gather"), 4 + 2);
    assert_eq!(count(Passes::Apart, "axis_gather"), 4 + 3);
    assert_eq!(count(Passes::Together, "axis_scatter"), 4);
}

#[test]
fn a_forward_pass_has_the_shards_of_training() {
    let place = ShardPlace { rank: 1, ranks: 4, in_tree: false };
    let (forward, _) = forward([32; 5]);
    let (forward, step) = (shard(&forward, place, Passes::Together), shard(&step(), place, Passes::Together));
    let stored = |g: &Graph| -> Vec<_> {
        g.params.iter().map(|p| (p.name.clone(), p.shard, g.shape(p.value).clone())).collect()
    };
    assert_eq!(stored(&forward), stored(&step));
    assert_eq!(forward.n_forward, forward.nodes.len());
    assert!(forward.params.iter().filter(|p| p.shard.is_some()).count() == 4);
}

/// A rank without samples makes the same exchanges as the others, in the same order, and brings its shards.
#[test]
fn a_rank_without_samples_takes_part_in_every_exchange() {
    let plan = plan();
    let body = body(&plan);
    let microbatch = Microbatch { body: 0, first_sample: 0 };
    for rounds in [1, 3] {
        let full = StepShape::rounds(&vec![microbatch; rounds], rounds);
        let full = schedule(&plan, &ADAM, std::slice::from_ref(&body), &full);
        for n in 0..rounds {
            let shape = StepShape::rounds(&vec![microbatch; n], rounds);
            let fewer = schedule(&plan, &ADAM, std::slice::from_ref(&body), &shape);
            assert_eq!(started(&fewer), started(&full), "{n} of {rounds}");
            let loads = fewer.instrs.iter().filter(|i| matches!(i, Instr::Load { .. })).count();
            assert_eq!(loads, n);
            // Gathers bring what the node copies: nothing zeroes it.
            let zeroed = fewer.instrs.iter().filter(|i| matches!(i, Instr::Zero(_))).count();
            let scatters = (rounds - n) * 4 + usize::from(n == 0);
            assert_eq!(zeroed, scatters, "{fewer}");
        }
    }
}

/// Gathers and scatters have the same order on every rank, and only shards are left out of the sums at the end.
#[test]
fn every_rank_makes_the_same_exchanges() {
    for ranks in [2, 4] {
        let of = |rank: usize| {
            let plan = Plan { mesh: Mesh::data(ranks), rank, ..plan() };
            schedule(&plan, &ADAM, &[body(&plan)], &plan.whole_step())
        };
        let first = of(0);
        let sums = first.exchanges.iter().filter(|e| e.op == Collective::AllReduce && e.axis == Axis::Data);
        assert_eq!(sums.count(), 2, "totals and the bias:\n{first}");
        for rank in 1..ranks {
            assert_eq!(started(&of(rank)), started(&first));
        }
    }
}

/// What every reader takes in half is cast before it is sent.
#[test]
fn halves_are_sent() {
    let plan = Plan { precision: Precision::half(DType::Bf16), ..plan() };
    let graph = &body(&plan).graph;
    let gathers =
        graph.nodes.iter().filter(|n| matches!(n.op, Op::Exchange { kind: ExchangeKind::Gather { .. }, .. }));
    let dtypes: Vec<DType> = gathers.map(|n| graph.value(n.outputs[0]).dtype).collect();
    assert_eq!(dtypes, [DType::Bf16; 6], "{graph}");
}

#[test]
fn what_cannot_be_sharded_is_refused() {
    let refused = |plan: &Plan, training: &Training, widths: [usize; 5]| {
        let (forward, loss) = forward(widths);
        match compile(&differentiate(&forward, loss).unwrap(), plan, training, None) {
            Err(CompileError::Shard(why)) => why,
            other => panic!("{:?}", other.map(|_| ())),
        }
    };
    let why = refused(&plan(), &ADAM, [8; 5]);
    assert!(why.contains("no parameter has 1024 elements"), "{why}");
    let three = Plan { mesh: Mesh::data(3), ..plan() };
    let why = refused(&three, &ADAM, [32, 64, 32, 64, 33]);
    assert!(why.contains("would leave most weights whole, such as `c.weight` [64, 32]"), "{why}");
    // Rows are sharded in reproducible steps, and most do not divide.
    let in_tree = Plan { shards: Some(4), ..plan() };
    let why = refused(&in_tree, &ADAM, [64, 33, 32, 33, 32]);
    assert!(why.contains("`a.weight` [33, 64]: with `reproducible` rows are sharded"), "{why}");
    let lamb = Training { optimizer: Optimizer::Lamb(Moments::DEFAULT), ..ADAM };
    let why = refused(&in_tree, &lamb, [32; 5]);
    assert!(why.contains("needs an optimizer that goes by element"), "{why}");
    // Some dim of most weights divides.
    let (forward, loss) = forward([32, 33, 64, 36, 32]);
    let step = differentiate(&forward, loss).unwrap();
    let body = compile(&step, &three, &ADAM, None).unwrap();
    let dims: Vec<_> = body.graph.params.iter().map(|p| p.shard.map(|s| s.dim)).collect();
    assert_eq!(dims, [Some(0), None, Some(1), Some(0), Some(1)]);
}

/// LAMB's norms are those of whole tensors: two numbers of each of four shards are added up before the update.
#[test]
fn norms_of_shards_are_added_up_before_updates() {
    let lamb = Training { optimizer: Optimizer::Lamb(Moments::DEFAULT), ..ADAM };
    let body = Arc::new(compile(&step(), &plan(), &lamb, None).unwrap());
    let text = schedule(&plan(), &lamb, &[body], &StepShape::one()).to_string();
    let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} in {text}"));
    let (measured, summed) =
        (at(" = norms of split tensors in params "), at("all-reduce f64 sums of split tensors"));
    let updated = at(" by sums of split tensors");
    assert!(measured < summed && summed < updated, "{text}");
    assert!(text[summed..].starts_with("all-reduce f64 sums of split tensors 0..8 over data"), "{text}");
    assert!(!text.contains("means of split tensors"), "{text}");
}

#[test]
fn one_rank_has_nothing_to_shard() {
    let alone = Plan { mesh: Mesh::data(1), rank: 0, ..plan() };
    assert_eq!(body(&alone).graph.to_string(), body(&Plan::alone()).graph.to_string());
}
