//! Exchanges inside a body: from a node that stands for one to the exchange of a program.

use std::ops::Range;
use std::sync::Arc;

use polyreme_graph::graph::Node;
use polyreme_graph::{Axis, Collective, ExchangeKind, Instr, Op, Program, Region, ValueId};

use crate::schedule::first_reader;

/// The axis along which a node exchanges something, if it does.
pub(crate) fn axis_of(node: &Node) -> Option<Axis> {
    match node.op {
        Op::Exchange { axis, .. } => Some(axis),
        _ => None,
    }
}

/// Adds the exchange that a node of a body stands for; returns its number. `None` for any other node.
pub(crate) fn exchange(program: &mut Program, slot: usize, body: usize, node: &Node) -> Option<usize> {
    let Op::Exchange { axis, kind } = node.op else { return None };
    let region = |value: ValueId| Region::Value { slot, body, value };
    let (x, y) = (node.inputs[0], node.outputs[0]);
    let rows = |ranks: usize| -> Arc<[usize]> {
        let row = program.len_of(&region(y)) / ranks;
        (0..=ranks).map(|r| r * row).collect()
    };
    let (op, of) = match kind {
        ExchangeKind::Sum => (Collective::AllReduce, y),
        ExchangeKind::Gather { ranks, .. } => (Collective::AllGather(rows(ranks)), y),
        ExchangeKind::Scatter { ranks } => (Collective::ReduceScatter(rows(ranks)), y),
        ExchangeKind::Swap { ranks } => {
            let (send, recv) = (rows(ranks), rows(ranks));
            (Collective::AllToAll { send, into: region(y), recv }, x)
        }
    };
    Some(program.exchange(op, axis, region(of)))
}

/// Whether the node's operand is still read while the exchange goes on: then nothing may run before it is waited for.
pub(crate) fn reads_operand(node: &Node) -> bool {
    matches!(node.op, Op::Exchange { kind: ExchangeKind::Swap { .. }, .. })
}

/// Runs nodes of a microbatch, with the exchanges that they contain: each is started as soon as its elements are there, and
/// waited for before the first node that reads its result, or at the end. Sums over the data axis of a lone rank are left out.
pub(crate) fn run(
    program: &mut Program,
    slot: usize,
    microbatch: usize,
    nodes: &Range<usize>,
    data_ranks: usize,
) {
    let number = program.microbatches[microbatch].body;
    let body = program.bodies[number].clone();
    let graph = &body.graph;
    let (mut from, mut under_way) = (nodes.start, Vec::<(usize, usize)>::new());
    for i in nodes.clone() {
        let ready: Vec<usize> = under_way.iter().filter(|(_, reader)| *reader <= i).map(|e| e.0).collect();
        if !ready.is_empty() {
            program.run(slot, microbatch, from..i);
            from = i;
            under_way.retain(|(_, reader)| *reader > i);
            program.instrs.extend(ready.into_iter().map(Instr::Wait));
        }
        let node = &graph.nodes[i];
        let takes_part = match axis_of(node) {
            None => false,
            Some(Axis::Data) => data_ranks > 1,
            Some(Axis::Tensor | Axis::Stage | Axis::Sequence) => true,
        };
        if takes_part {
            program.run(slot, microbatch, from..i + 1);
            from = i + 1;
            let reader = if reads_operand(node) { i + 1 } else { first_reader(graph, i, node.outputs[0]) };
            if let Some(exchange) = exchange(program, slot, number, node) {
                program.instrs.push(Instr::Start(exchange));
                under_way.push((exchange, reader));
            }
        }
    }
    program.run(slot, microbatch, from..nodes.end);
    program.instrs.extend(under_way.into_iter().map(|(exchange, _)| Instr::Wait(exchange)));
}
