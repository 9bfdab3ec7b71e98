//! Attention of a rank's positions as the rounds of a ring, after everything else was rewritten.
//!
//! Until then it is one node, the same on all ranks, although they see different parts of the keys. So a split of matrices in
//! between sees the same step on each of them, and comes to the same layouts.

use polyreme_graph::graph::Rebuild;
use polyreme_graph::{Graph, Op};

use super::convert::Nodes;
use super::place::SequencePlace;
use super::ring;

/// The step with every attention of `time` positions, which are a rank's, going round a ring; others see whole sequences.
pub fn expand_rings(step: &Graph, place: SequencePlace, time: usize) -> Graph {
    let mut to = Rebuild::new(step);
    for (i, node) in step.nodes.iter().enumerate() {
        if i == step.n_forward {
            to.graph.n_forward = to.graph.nodes.len();
        }
        let is_part = |operand: usize| step.shape(node.inputs[operand]).dims()[1] == time;
        let x: Vec<_> = node.inputs.iter().map(|&v| to.get(v)).collect();
        let outputs = {
            let mut nodes = Nodes { graph: &mut to.graph, place, layer: &node.layer };
            match node.op {
                Op::Attention(a) if is_part(0) => Some(ring::forward(&mut nodes, a, &x)),
                Op::AttentionGrad(a) if is_part(3) => {
                    Some(ring::backward(&mut nodes, a, [x[0], x[1], x[2]], &x[3..]))
                }
                _ => None,
            }
        };
        match outputs {
            Some(outputs) => {
                for (old, new) in node.outputs.iter().zip(outputs) {
                    to.map[old.idx()] = Some(new);
                }
                to.comes_from(node.origin);
            }
            None => to.copy(step, i),
        }
    }
    if step.n_forward == step.nodes.len() {
        to.graph.n_forward = to.graph.nodes.len();
    }
    let graph = to.finish(step).without_dead();
    graph.verify();
    graph
}
