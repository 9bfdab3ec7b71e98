//! Batch norm followed by ReLU becomes one op, forward and backward.
//!
//! The backward kernel finds from `x` where the ReLU clamped, so the pass over memory that masks `dy` goes, and with it
//! one read of `y`.

use polyreme_kernels::elementwise::{Binary, Unary};

use crate::graph::{Graph, Node, Rebuild, ValueId};
use crate::op::Op;

/// The graph with every such pair joined. The first part of [`fuse`](super::fuse), on its own for rewrites that take batch
/// norms apart.
pub fn join_norm_relu(graph: &Graph) -> Graph {
    join_norm_relu_if(graph, &|_, _| true)
}

/// The same for the pairs of a norm and a ReLU that `joins` accepts.
pub(crate) fn join_norm_relu_if(graph: &Graph, joins: &dyn Fn(&Node, &Node) -> bool) -> Graph {
    let mut pairs = pairs(graph);
    pairs.retain(|pair| joins(&graph.nodes[pair.norm], &graph.nodes[pair.relu]));
    if pairs.is_empty() {
        return graph.clone();
    }
    let mut to = Rebuild::new(graph);
    for (i, node) in graph.nodes.iter().enumerate() {
        if i == graph.n_forward {
            to.graph.n_forward = to.graph.nodes.len();
        }
        let pair_of_norm = pairs.iter().find(|p| p.norm == i);
        let pair_of_grad = pairs.iter().find(|p| p.norm_grad == Some(i));
        if let (Some(_), &Op::BatchNorm { eps, momentum, .. }) = (pair_of_norm, &node.op) {
            let inputs: Vec<_> = node.inputs.iter().map(|&v| to.get(v)).collect();
            let op = Op::BatchNorm { eps, momentum, relu: true };
            to.replace(graph, &node.outputs, op, &inputs, &node.layer);
        } else if let Some(pair) = pairs.iter().find(|p| p.relu == i) {
            // The norm's result is the clamped one now.
            let y = to.get(graph.nodes[pair.norm].outputs[0]);
            to.map[node.outputs[0].idx()] = Some(y);
        } else if let Some(pair) = pair_of_grad {
            let mut inputs: Vec<_> = node.inputs.iter().skip(1).map(|&v| to.get(v)).collect();
            inputs.insert(0, to.get(pair.dy.expect("a pair with a gradient has dy")));
            to.replace(graph, &node.outputs, Op::BatchNormGrad { relu: true }, &inputs, &node.layer);
        } else {
            to.copy(graph, i);
        }
    }
    if graph.n_forward == graph.nodes.len() {
        to.graph.n_forward = to.graph.nodes.len();
    }
    let fused = to.finish(graph).without_dead();
    fused.verify();
    fused
}

/// Nodes of one norm and its ReLU.
struct NormRelu {
    norm: usize,
    relu: usize,
    norm_grad: Option<usize>,
    /// The gradient of the clamped result.
    dy: Option<ValueId>,
}

fn pairs(graph: &Graph) -> Vec<NormRelu> {
    let counts = graph.use_counts();
    let mut users = vec![Vec::new(); graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for v in &node.inputs {
            users[v.idx()].push(i);
        }
    }
    let mut pairs = Vec::new();
    for (norm, node) in graph.nodes.iter().enumerate() {
        let Op::BatchNorm { relu: false, .. } = node.op else { continue };
        let (plain, mean) = (node.outputs[0], node.outputs[1]);
        let [relu] = users[plain.idx()][..] else { continue };
        let single = counts[plain.idx()] == 1 && matches!(graph.nodes[relu].op, Op::Unary(Unary::Relu));
        if !single {
            continue;
        }
        // In the backward pass: `relu_grad(dy, y)`, which the gradient of this norm alone may read.
        let norm_grad = users[mean.idx()]
            .iter()
            .copied()
            .find(|&u| matches!(graph.nodes[u].op, Op::BatchNormGrad { .. }));
        let Some(norm_grad) = norm_grad else {
            if users[mean.idx()].is_empty() {
                pairs.push(NormRelu { norm, relu, norm_grad: None, dy: None });
            }
            continue;
        };
        let masked = graph.nodes[norm_grad].inputs[0];
        let mask = graph.producer(masked);
        let joins = matches!(mask.op, Op::Binary(Binary::ReluGrad))
            && mask.inputs[1] == graph.nodes[relu].outputs[0]
            && counts[masked.idx()] == 1;
        if joins {
            pairs.push(NormRelu { norm, relu, norm_grad: Some(norm_grad), dy: Some(mask.inputs[0]) });
        }
    }
    pairs
}
