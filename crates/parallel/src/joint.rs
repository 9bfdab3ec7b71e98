//! Exchanges inside a body: from a node that stands for one to the exchange of a program.

use std::sync::Arc;

use polyreme_graph::graph::Node;
use polyreme_graph::{Axis, Collective, ExchangeKind, Op, Program, Region, ValueId};

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
