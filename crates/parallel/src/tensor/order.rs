//! The order of the backward pass: what an exchange needs first, and what does not need it while it is under way.
//!
//! Differentiation computes the gradient of a weight before that of the layer's input. Other ranks wait for the second one:
//!
//! ```text
//! before   dW₂  dh  db₁  dW₁  dx  scatter  norm …       the norm waits for all of the scatter
//! after    dh  dx  scatter  dW₂  db₁  dW₁  norm …       gradients of weights are computed meanwhile
//! ```

use polyreme_graph::{Graph, Op};

/// The graph with its backward pass in that order. Forward, almost everything leads to the next exchange.
pub(super) fn overlapped(graph: &Graph) -> Graph {
    let mut order: Vec<usize> = (0..graph.n_forward).collect();
    let mut first = graph.n_forward;
    for (at, node) in graph.nodes.iter().enumerate().skip(graph.n_forward) {
        if matches!(node.op, Op::Exchange { .. }) {
            let (needed, rest) = needed(graph, first, at);
            order.extend(needed);
            order.push(at);
            order.extend(rest);
            first = at + 1;
        }
    }
    order.extend(first..graph.nodes.len());
    graph.reordered(&order)
}

/// Of the nodes from `first` up to an exchange: those on which it depends, and the others.
fn needed(graph: &Graph, first: usize, exchange: usize) -> (Vec<usize>, Vec<usize>) {
    let mut is_needed = vec![false; exchange + 1 - first];
    is_needed[exchange - first] = true;
    for i in (first..=exchange).rev() {
        if is_needed[i - first] {
            let from = graph.nodes[i].inputs.iter().map(|v| graph.value(*v).producer.idx());
            from.filter(|i| *i >= first).for_each(|i| is_needed[i - first] = true);
        }
    }
    (first..exchange).partition(|i| is_needed[i - first])
}
