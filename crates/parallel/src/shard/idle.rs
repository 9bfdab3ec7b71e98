//! What a rank without samples computes in a round: other ranks need its shards, and it needs its shards of their gradients.

use std::ops::Range;

use polyreme_graph::memory::param_ranges;
use polyreme_graph::{Axis, ExchangeKind, Graph, Op};

/// By node of a body: whether a rank without samples runs it. These are gathers of shards and what they are cast by, and what
/// takes the rank's shard out of a scattered gradient; none of them reads anything that depends on samples.
pub(crate) fn idle(graph: &Graph) -> Vec<bool> {
    let mut is_needed = vec![false; graph.values.len()];
    let scatters =
        |op: &Op| matches!(op, Op::Exchange { axis: Axis::Data, kind: ExchangeKind::Scatter { .. } });
    let sums = graph.nodes.iter().any(|node| scatters(&node.op));
    for (p, grad) in graph.grads.iter().enumerate() {
        // Gradients that stay whole are of samples alone.
        if let Some(grad) = grad.filter(|_| sums && graph.params[p].shard.is_some()) {
            is_needed[grad.idx()] = true;
        }
    }
    let reads_shards = shards_alone(graph);
    let mut idle = vec![false; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().rev() {
        let runs = match node.op {
            Op::Exchange { axis: Axis::Data, kind: ExchangeKind::Gather { .. } } => {
                reads_shards[node.inputs[0].idx()]
            }
            // It begins with zeros.
            Op::Exchange { .. } => false,
            _ => !node.op.is_leaf() && node.outputs.iter().any(|v| is_needed[v.idx()]),
        };
        if runs {
            idle[i] = true;
            node.inputs.iter().for_each(|v| is_needed[v.idx()] = true);
        }
    }
    idle
}

/// By value: whether it follows from sharded parameters alone, without an exchange.
fn shards_alone(graph: &Graph) -> Vec<bool> {
    let mut alone = vec![false; graph.values.len()];
    for node in &graph.nodes {
        let is = match node.op {
            Op::Param(p) => graph.params[p].shard.is_some(),
            Op::Exchange { .. } => false,
            _ => !node.inputs.is_empty() && node.inputs.iter().all(|v| alone[v.idx()]),
        };
        node.outputs.iter().for_each(|v| alone[v.idx()] = is);
    }
    alone
}

/// The elements of the parameters' arena that are sharded and have gradients; they follow those that all ranks have.
pub(crate) fn sharded_range(graph: &Graph) -> Range<usize> {
    let learnt = |p: usize| graph.grads.get(p).is_some_and(Option::is_some);
    let ranges = param_ranges(graph).into_iter();
    let mut sharded = ranges.filter(|(p, _)| learnt(*p) && graph.params[*p].shard.is_some()).map(|(_, r)| r);
    let Some(first) = sharded.next() else { return 0..0 };
    first.start..sharded.next_back().map_or(first.end, |last| last.end)
}
