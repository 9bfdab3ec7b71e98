//! Updates that are made while gradients are computed.
//!
//! ```text
//!  at the end                        at once
//!  %8 = matmul …    dW2              %8 = matmul …   dX
//!  %9 = matmul …    dX               %9 = matmul …   dW2, update fc2.weight
//!  %10 = matmul …   dW1              %10 = matmul …  dW1, update fc1.weight
//!  update fc2.weight fc1.weight
//! ```
//!
//! A weight's gradient is usually one matrix product, and most optimizers work element by element. So each block of the
//! gradient can be applied as soon as it is complete, while it is in cache; it is never stored, and the arena of
//! gradients only holds those that are not products. This needs a lone rank whose step is one microbatch, no clipping
//! (the norm is that of all gradients), and a parameter that is no longer read: such products are moved behind the last
//! reader of their parameter.

use std::collections::BTreeMap;

use polyreme_kernels::optim::Optimizer;

use crate::body::Body;
use crate::fuse::fuse;
use crate::graph::{Graph, ValueId};
use crate::memory::{MemoryPlan, Place, param_ranges, reshape_root};
use crate::op::Op;

impl Body {
    /// The body of a step's graph in which parameters are updated while their gradients are computed, where that can be
    /// done. Its gradients cannot be read, accumulated or clipped.
    pub fn at_once(step: &Graph, optimizer: Optimizer) -> Body {
        let mut body = Body::of(late(&fuse(step)));
        if !optimizer.by_element() {
            return body;
        }
        for (param, node) in products(&body.graph) {
            if last_reader(&body.graph, body.graph.params[param].value) < node {
                body.applied[node] = Some(param);
            }
        }
        body
    }

    /// Removes gradients that are never stored from a plan; the others are placed one after the other.
    pub fn place_gradients(&self, plan: &mut MemoryPlan) {
        let at_once = self.updated_at_once();
        if !at_once.contains(&true) {
            return;
        }
        // The new offset of each gradient, by its old one.
        let mut places = BTreeMap::new();
        plan.grad_len = 0;
        for (p, range) in param_ranges(&self.graph) {
            let place = if at_once[p] { Place::Nowhere } else { Place::Grad(plan.grad_len) };
            places.insert(range.start, place);
            let stored = !at_once[p] && !self.graph.params[p].learning.frozen;
            plan.grad_len += if stored { range.len() } else { 0 };
        }
        for place in &mut plan.places {
            if let Place::Grad(at) = place {
                *place = places[at];
            }
        }
    }
}

/// Parameters whose gradient is a product that nothing else reads, and the node that computes it.
fn products(graph: &Graph) -> impl Iterator<Item = (usize, usize)> + '_ {
    let uses = graph.use_counts();
    graph.grads.iter().enumerate().filter_map(move |(param, grad)| {
        let grad = (*grad)?;
        let node = graph.producer(grad);
        let product = matches!(node.op, Op::MatMul { .. }) && graph.shape(grad).rank() == 2;
        // It is used once: as this gradient.
        (product && uses[grad.idx()] == 1).then_some((param, graph.value(grad).producer.idx()))
    })
}

/// The last node that reads a value or a reshape of it.
fn last_reader(graph: &Graph, value: ValueId) -> usize {
    let reads = |i: usize| graph.nodes[i].inputs.iter().any(|&v| reshape_root(graph, v) == value);
    (0..graph.nodes.len()).rev().find(|&i| reads(i)).unwrap_or(0)
}

/// The graph with each such product moved behind the last reader of its parameter.
fn late(graph: &Graph) -> Graph {
    let mut behind: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    let mut moved = vec![false; graph.nodes.len()];
    for (param, node) in products(graph) {
        let reader = last_reader(graph, graph.params[param].value);
        if reader > node {
            behind[reader].push(node);
            moved[node] = true;
        }
    }
    let order: Vec<usize> = (0..graph.nodes.len())
        .flat_map(|i| (!moved[i]).then_some(i).into_iter().chain(behind[i].iter().copied()))
        .collect();
    let late = graph.reordered(&order);
    late.verify();
    late
}
